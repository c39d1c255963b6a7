"""The example of a third party's package: installed as such, and put through the suite."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from truetap.harness import contract

pytestmark = [pytest.mark.torch, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE, GUIDE = ROOT / "examples/hf_hooks_adapter", ROOT / "conformance/ADAPTERS.md"


class Stranger:
    """A folder of somebody's, with the package installed for Python to find."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.site = folder, folder / "site"

    def install(self, source: Path) -> None:
        """As ``pip install`` of the guide, without a network and into a folder of its own."""
        options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target")
        self.run("-m", "pip", "install", *options, str(self.site), str(source), code=0)

    def suite(self, adapter: str, *options: str, code: int) -> dict[str, Any]:
        """Return the report of an adapter whose run ends with exit code ``code``."""
        path = self.folder / "report.json"
        path.unlink(missing_ok=True)
        (self.folder / "empty.ini").write_text("[pytest]\n")
        suite = ("-m", "pytest", "-c", "empty.ini", "-p", "no:cacheprovider", "--pyargs")
        named = ("truetap.conformance", "--adapter", adapter, "--report", str(path))
        self.run(*suite, *named, *options, code=code)
        report: dict[str, Any] = json.loads(path.read_text())
        return report

    def run(self, *arguments: str, code: int) -> str:
        """Run Python with the package in its path; return what was said on standard error."""
        found = [str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])]
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(found)},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stderr


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    new = Stranger(tmp_path_factory.mktemp("stranger"))
    # From a copy: building leaves files beside the sources.
    source = new.folder / "source"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    new.install(source)
    return new


@pytest.fixture(scope="module")
def executable(stranger: Stranger) -> str:
    """Its first line names the Python of its environment; here there is only this one."""
    path = stranger.folder / "hf_hooks"
    path.write_text(f"#!{sys.executable}\n" + (EXAMPLE / "hf_hooks.py").read_text())
    path.chmod(0o700)
    return f"subprocess:{path}"


def outcomes(report: dict[str, Any]) -> dict[str, str]:
    return {clause["id"]: clause["outcome"] for clause in report["clauses"]}


def saw(report: dict[str, Any], clause_id: str) -> str:
    (text,) = [clause["saw"] for clause in report["clauses"] if clause["id"] == clause_id]
    return str(text)


ALL_PASS = dict.fromkeys(contract.PROFILES["core"], "pass")


def test_the_adapter_that_the_guide_shows_conforms(tmp_path: Path) -> None:
    shown = re.findall(r"^```(\w+)\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    source = tmp_path / "source"
    source.mkdir()
    adapter, by_hand = (text for kind, text in shown if kind == "python")
    (source / "my_adapter.py").write_text(adapter)
    (source / "pyproject.toml").write_text(next(text for kind, text in shown if kind == "toml"))
    stranger = Stranger(tmp_path)
    stranger.install(source)
    report = stranger.suite("mine", code=0)
    assert report["verdict"] == "conformant"
    assert outcomes(report) == ALL_PASS
    # The guide's last step captures one prompt by hand, with the adapter just installed.
    near = "assert capture.states.shape == (97, 4, 128) and compare.row_distances"
    stranger.run("-c", f"{by_hand}\n{near}(capture.states[:, 0], right[2]).max() < 0.05", code=0)


def test_a_faulty_package_does_not_and_the_suite_names_what_it_holds(stranger: Stranger) -> None:
    report = stranger.suite("hf_hooks_off_by_one", code=1)
    assert report["verdict"] == "non-conformant"
    # Block 12 is the last one and has none after it: boundary 12 is right, and so is LAYERS-002.
    by_value = {"LAYERS-001", "ROWS-005"} & ALL_PASS.keys()
    assert outcomes(report) == ALL_PASS | dict.fromkeys(by_value, "fail")
    for asked, held in ((2, 3), (6, 7), (9, 10)):
        assert f"boundary {asked} holds boundary {held} (" in saw(report, "LAYERS-001")
    assert "boundary 12 holds" not in saw(report, "LAYERS-001")
    assert report["environment"]["binding"]["adapter"]["name"] == "hf_hooks_off_by_one"


@pytest.mark.nightly
def test_the_same_hooks_as_an_executable_conform(stranger: Stranger, executable: str) -> None:
    report = stranger.suite(executable, code=0)
    assert report["verdict"] == "conformant"
    assert outcomes(report) == ALL_PASS
    assert report["environment"]["binding"]["engine"] == "transformers"


def test_what_it_cannot_do_it_refuses(stranger: Stranger, executable: str) -> None:
    spec = {"tensor_parallel_size": 1, "include_output": True, "boundaries": [2]}
    request = stranger.folder / "request.json"
    request.write_text(json.dumps({"spec": spec}))
    path = executable.removeprefix("subprocess:")
    said = stranger.run(path, "capture", "--request", str(request), "--out", ".", code=2)
    assert said == "one rank, prompts only, and not without capture\n"

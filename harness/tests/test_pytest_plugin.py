"""The pytest plugin: what a run of the suite puts into its report, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from truetap.harness import contract, pytest_plugin, registry

pytest_plugins = "pytester"


class Run:
    """One pytest process and the report that it wrote."""

    def __init__(self, pytester: pytest.Pytester, *arguments: str) -> None:
        # An empty configuration of its own: users of the suite do not have this repository's.
        ini = pytester.makefile(".ini", empty="[pytest]\n")
        options = ("-c", ini, "-p", "no:cacheprovider", "--report", "r.json")
        result = pytester.runpytest_subprocess(*options, *arguments, timeout=300)
        self.code = int(result.ret)
        self.output = result.stdout.str() + result.stderr.str()
        path = pytester.path / "r.json"
        self.report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        clauses = self.report.get("clauses", [])
        self.outcomes: dict[str, str] = {clause["id"]: clause["outcome"] for clause in clauses}
        self.saw: dict[str, str] = {clause["id"]: clause["saw"] for clause in clauses}


SUITE = ("--pyargs", "truetap.conformance")


@pytest.mark.torch
def test_the_reference_adapter_conforms(pytester: pytest.Pytester) -> None:
    run = Run(pytester, *SUITE, "--adapter", "transformers")
    assert run.code == 0, run.output
    assert run.report["verdict"] == "conformant"
    assert run.outcomes == dict.fromkeys(contract.PROFILES["core"], "pass")
    assert all(run.saw.values())
    assert run.report["evidence"] == "live"
    assert run.report["suite_digest"] == pytest_plugin.suite_digest()
    binding = run.report["environment"]["binding"]
    assert binding["adapter"]["name"] == "transformers"
    assert binding["boundaries"] == [2, 6, 9, 12]
    assert "boundary 12: " in run.saw["LAYERS-001"]


@pytest.mark.torch
def test_an_off_by_one_does_not_conform_and_the_boundary_really_held_is_named(
    pytester: pytest.Pytester,
) -> None:
    (pytester.path / "spec.json").write_text('{"dtype": "float32"}')
    settings = ("--spec", "spec.json", "--boundaries", "4,7,12")
    run = Run(pytester, *SUITE, "--adapter", "off-by-one@transformers", *settings)
    assert run.code == 1
    assert run.report["verdict"] == "non-conformant"
    assert run.report["spec"] == {"dtype": "float32", "boundaries": [4, 7, 12]}
    assert run.report["environment"]["binding"]["adapter"]["name"] == "off-by-one@transformers"
    assert run.outcomes["LAYERS-001"] == run.outcomes["LAYERS-002"] == "fail"
    assert run.outcomes["ROWS-001"] == run.outcomes["LAYERS-003"] == "pass"
    for asked, held in ((4, 3), (7, 6), (12, 11)):
        assert f"the slot for boundary {asked} holds boundary {held} (" in run.saw["LAYERS-001"]


@pytest.mark.parametrize(
    ("arguments", "saw"),
    [
        (["--adapter", "vllm_natvie"], "no capture adapter named 'vllm_natvie'"),
        (["--adapter", "no-such-fault@transformers"], "no mutant named 'no-such-fault'"),
        ([], "name the adapter under test; --adapter vllm_native"),
    ],
)
def test_an_adapter_that_cannot_be_found_is_no_verdict(
    pytester: pytest.Pytester, arguments: list[str], saw: str
) -> None:
    run = Run(pytester, *SUITE, *arguments)
    assert run.code == 1
    assert run.report["verdict"] == "inconclusive"
    assert run.outcomes == dict.fromkeys(contract.PROFILES["core"], "error")
    assert {saw in said for said in run.saw.values()} == {True}
    if "vllm_natvie" in arguments:
        assert all(name in run.saw["ROWS-001"] for name in ("transformers", "vllm_native"))
        assert ", ".join(registry.names()) in run.saw["ROWS-001"]


OUTCOMES = """
import pytest

@pytest.fixture
def broken():
    raise RuntimeError("the engine did not start\\nfor some reason")

@pytest.fixture
def torn():
    yield
    raise RuntimeError("the engine did not stop")

@pytest.mark.clause("REPLY-001")
def test_passes(saw):
    saw("two calls")

@pytest.mark.clause("ROWS-001")
def test_fails(saw):
    saw("some rows")
    assert 6 == 7, "six rows for seven tokens"

@pytest.mark.clause("ROWS-002")
def test_fails_otherwise():
    pytest.fail("result 2 is for another")

@pytest.mark.clause("ROWS-003")
def test_setup_errs(broken):
    pass

@pytest.mark.clause("LAYERS-001")
def test_raises():
    raise ValueError("no such slot")

@pytest.mark.clause("LAYERS-002")
def test_skips():
    pytest.skip("not today")

@pytest.mark.clause("LAYERS-003")
@pytest.mark.parametrize("case", [0, 1, 2])
def test_cases(case):
    assert case != 1, "case one"

@pytest.mark.clause("LAYERS-004")
def test_teardown_errs(torn, saw):
    saw("four slots")
"""


def test_each_way_for_a_clause_to_end_is_reported_as_what_it_is(pytester: pytest.Pytester) -> None:
    run = Run(pytester, str(pytester.makepyfile(OUTCOMES)))
    assert run.code == 1
    assert run.outcomes == dict.fromkeys(contract.PROFILES["core"], "not_run") | {
        "REPLY-001": "pass",
        "ROWS-001": "fail",
        "ROWS-002": "fail",
        "ROWS-003": "error",
        "LAYERS-001": "error",
        "LAYERS-002": "not_run",
        "LAYERS-003": "fail",
        "LAYERS-004": "error",
    }
    assert run.saw == dict.fromkeys(contract.PROFILES["core"], "") | {
        "REPLY-001": "two calls",
        "ROWS-001": "six rows for seven tokens",
        "ROWS-002": "result 2 is for another",
        "ROWS-003": "the engine did not start",
        "LAYERS-001": "no such slot",
        "LAYERS-002": "",
        "LAYERS-003": "case one",
        "LAYERS-004": "the engine did not stop",
    }
    assert {c["id"]: c["cases"] for c in run.report["clauses"]}["LAYERS-003"] == 3
    assert run.report["verdict"] == "non-conformant"


def test_a_run_of_some_clauses_is_green_for_pytest_but_no_verdict(
    pytester: pytest.Pytester,
) -> None:
    run = Run(pytester, str(pytester.makepyfile(OUTCOMES)), "-k", "test_passes")
    assert run.code == 0
    assert run.outcomes["REPLY-001"] == "pass"
    assert run.outcomes["ROWS-001"] == "not_run"
    assert run.report["verdict"] == "inconclusive"


@pytest.mark.parametrize("mark", ['clause("ROWS-999")', "clause", "clause()"])
def test_a_conformance_test_without_a_clause_of_the_contract_is_a_usage_error(
    pytester: pytest.Pytester, mark: str
) -> None:
    source = f"import pytest\n@pytest.mark.{mark}\ndef test_it(): pass\n"
    run = Run(pytester, str(pytester.makepyfile(source)))
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert "test_it names no clause of the contract" in run.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--profile", "all"], "no profile named 'all'; profiles: core"),
        (["--spec", "spec.json"], "unknown engine settings: quick"),
        (["--spec", "list.json"], "settings cannot be read"),
        (["--spec", "missing.json"], "settings cannot be read: .*missing.json"),
        (["--boundaries", "2,six"], "settings cannot be read: .*six"),
        (["--report", "gone/report.json"], "in a folder that does not exist"),
    ],
)
def test_options_that_mean_nothing_are_usage_errors(
    pytester: pytest.Pytester, arguments: list[str], says: str
) -> None:
    (pytester.path / "spec.json").write_text('{"quick": true, "dtype": "float32"}')
    (pytester.path / "list.json").write_text("[1]")
    run = Run(pytester, *SUITE, "--adapter", "transformers", *arguments)
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert re.search(says, run.output)
    assert "Traceback" not in run.output
    assert run.report == {}


@pytest.mark.torch
def test_gpu_tests_without_a_gpu_are_not_a_pass(pytester: pytest.Pytester) -> None:
    import torch

    source = "import pytest\n@pytest.mark.gpu\ndef test_it(): pass\n"
    run = Run(pytester, str(pytester.makepyfile(source)), "-m", "gpu")
    if torch.cuda.is_available():
        assert run.code == 0
        assert "1 passed" in run.output
    else:
        assert run.code == 3
        assert "no GPU here" in run.output
        assert "passed" not in run.output


def test_leaving_gpu_tests_out_needs_no_gpu(pytester: pytest.Pytester) -> None:
    source = "import pytest\n@pytest.mark.gpu\ndef test_it(): assert False\ndef test_b(): pass\n"
    run = Run(pytester, str(pytester.makepyfile(source)), "-m", "not gpu")
    assert run.code == 0
    assert "1 passed, 1 deselected" in run.output


def test_the_suites_digest_is_of_the_code_that_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    before = pytest_plugin.suite_digest()
    assert len(bytes.fromhex(before)) == 32
    read = Path.read_bytes
    for judging in ("compare.py", "test_rows.py", "conftest.py", "mutants.py", "judge.py"):

        def changed(path: Path, judging: str = judging) -> bytes:
            return read(path) + (b"#" if path.name == judging else b"")

        monkeypatch.setattr(Path, "read_bytes", changed)
        assert pytest_plugin.suite_digest() != before

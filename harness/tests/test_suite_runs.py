"""Whole runs of pytest with the plugin: expectations, JUnit, xdist, deadlines, GPUs, selection.

The clauses' tests are light ones made here; a fixture stands in for an engine that said where it
runs.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import psutil
import pytest

from truetap.harness import contract

pytest_plugins = "pytester"

TESTS = """
import pytest

@pytest.fixture(autouse=True)
def engine(suite_run):
    suite_run.environment = {
        "binding": {"engine": "vllm", "engine_version": "0.32.0", "device": "AVX512"},
        "recorded": {},
    }

def clauses():
    from truetap.harness import contract
    return [pytest.param(c, marks=pytest.mark.clause(c)) for c in contract.PROFILES["core"]]

@pytest.mark.parametrize("clause", clauses())
def test_clause(clause, saw):
    saw(f"{clause} looked at")
    assert clause not in FAILING, f"{clause} is wrong: slot 1 <of> 4"

@pytest.mark.clause("LAYERS-004")
@pytest.mark.parametrize("width", [16, 32])
def test_more_of_one(width, saw):
    saw(f"width {width}")
"""
KNOWN = """
[[expectation]]
clause = "{clause}"
releases = "{releases}"
reason = "known since long"
link = "https://example.org/1"
review = {review}
example = "two tokens"
"""
CORE = contract.PROFILES["core"]


class SuiteRunner:
    """Runs light tests as if they were the suite; keeps what the run left."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.ini = pytester.makefile(".ini", empty="[pytest]\n")

    def known(self, *clauses: str, releases: str = ">=0.11.1", review: str = "9999-12-31") -> str:
        text = "".join(KNOWN.format(clause=c, releases=releases, review=review) for c in clauses)
        (self.pytester.path / "known.toml").write_text(text)
        return "--expectations=known.toml"

    def __call__(
        self, *arguments: str, failing: tuple[str, ...] = (), tests: str = TESTS, adapter: str = "x"
    ) -> SuiteRunner:
        path = self.pytester.makepyfile(test_light=f"FAILING = {failing!r}\n{tests}")
        fixed: tuple[str | Path, ...] = (
            "-c",
            self.ini,
            "-p",
            "no:cacheprovider",
            "--report",
            "r.json",
        )
        fixed += ("--junitxml", "junit.xml", "--adapter", adapter)
        done = self.pytester.runpytest_subprocess(*fixed, *arguments, path, timeout=300)
        self.code = int(done.ret)
        self.output = done.stdout.str() + done.stderr.str()
        written = self.pytester.path / "r.json"
        self.report: dict[str, Any] = json.loads(written.read_text()) if written.exists() else {}
        self.clauses = {clause["id"]: clause for clause in self.report.get("clauses", [])}
        self.outcomes = {name: clause["outcome"] for name, clause in self.clauses.items()}
        return self

    def junit(self) -> dict[str, dict[str, str]]:
        """Return the properties of each test, by name."""
        found = {}
        for case in ET.parse(self.pytester.path / "junit.xml").iter("testcase"):
            properties = [(p.attrib["name"], p.attrib["value"]) for p in case.iter("property")]
            assert len(dict(properties)) == len(properties), properties
            found[case.attrib["name"]] = dict(properties)
        return found


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> SuiteRunner:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return SuiteRunner(pytester)


WORKERS = pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["here", "xdist"])


@WORKERS
def test_a_run_without_fault_conforms(run: SuiteRunner, workers: tuple[str, ...]) -> None:
    run(*workers)
    assert run.code == 0, run.output
    assert run.report["verdict"] == "conformant"
    assert run.clauses["LAYERS-004"]["cases"] == 3
    assert run.report["environment"]["binding"]["engine_version"] == "0.32.0"
    assert "x, profile core: conformant" in run.output


@WORKERS
def test_an_expected_failure_is_an_xfail_and_no_conformance(
    run: SuiteRunner, workers: tuple[str, ...]
) -> None:
    run(*workers, run.known("ROWS-003"), "-rx", failing=("ROWS-003",))
    assert run.code == 0, run.output
    assert "1 xfailed" in run.output
    assert "ROWS-003: known since long (https://example.org/1)" in run.output
    assert run.report["verdict"] == "non-conformant"
    assert run.clauses["ROWS-003"]["outcome"] == "fail"
    assert run.clauses["ROWS-003"]["expected"] == "known since long (https://example.org/1)"
    assert run.clauses["ROWS-003"]["saw"] == "ROWS-003 is wrong: slot 1 <of> 4"
    assert "x, profile core: non-conformant" in run.output


@WORKERS
def test_another_clauses_failure_fails_as_ever(run: SuiteRunner, workers: tuple[str, ...]) -> None:
    run(*workers, run.known("ROWS-003"), failing=("ROWS-003", "ROWS-001"))
    assert run.code == 1
    assert "1 failed" in run.output
    assert run.clauses["ROWS-001"]["expected"] == ""


@WORKERS
def test_an_unexpected_pass_fails_the_run_and_says_what_to_delete(
    run: SuiteRunner, workers: tuple[str, ...]
) -> None:
    run(*workers, run.known("ROWS-003"))
    assert run.code == 1, run.output
    assert "ROWS-003 passed where a failure was expected (known since long)" in run.output
    assert "delete the expectation for ROWS-003 with releases = '>=0.11.1' in known.toml" in (
        run.output
    )
    assert run.report["verdict"] == "conformant"  # of the clauses, which all passed


def test_an_expectation_for_other_releases_expects_nothing(run: SuiteRunner) -> None:
    known = run.known("ROWS-003", releases="<0.32")
    assert run(known).code == 0
    run(known, failing=("ROWS-003",))
    assert run.code == 1
    assert run.clauses["ROWS-003"]["expected"] == ""


REFUSING = """
import pytest
from truetap.harness.pytest_plugin import Refused

@pytest.mark.clause("ROWS-003")
def test_it(suite_run):
    suite_run.environment = {"binding": {"engine_version": "0.32.0"}}
    raise HOW("no such prompt")
"""


@pytest.mark.parametrize(
    ("how", "outcome", "says"),
    [
        ("Refused", "refused", "was refused, where"),
        ("OSError", "error", "ended in an error, where"),
    ],
)
def test_a_refusal_or_an_error_is_not_the_failure_that_was_expected(
    run: SuiteRunner, how: str, outcome: str, says: str
) -> None:
    run(run.known("ROWS-003"), tests=REFUSING.replace("HOW", how))
    assert run.code == 1, run.output
    assert f"ROWS-003 {says} a failure was expected" in run.output
    assert run.clauses["ROWS-003"] | {"outcome": outcome, "expected": ""} == run.clauses["ROWS-003"]
    assert run(tests=REFUSING.replace("HOW", how)).code == (0 if how == "Refused" else 1)


def test_a_review_that_is_due_is_told_loudly(run: SuiteRunner) -> None:
    run(run.known("ROWS-003", review="2020-01-01"), failing=("ROWS-003",))
    assert run.code == 0
    warning = "WARNING: known.toml: ROWS-003 (known since long) was to be reviewed by 2020-01-01"
    assert run.output.count(warning) == 2  # at the head and at the end
    run(run.known("ROWS-003"), failing=("ROWS-003",))
    assert "WARNING" not in run.output


def test_a_bad_file_of_expectations_is_a_usage_error(run: SuiteRunner) -> None:
    run(run.known("ROWS-999"))
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert "the expectations in known.toml are not right: expectation.0.clause: there is no" in (
        run.output
    )
    assert "Traceback" not in run.output
    assert run.report == {}


def test_what_the_suite_itself_expects_is_found_by_name(run: SuiteRunner) -> None:
    run(adapter="vllm_native")
    assert "expectations/vllm_native.toml, 6 in all" in run.output
    run(adapter="off-by-one@vllm_native")
    assert "expectations" not in run.output


@WORKERS
def test_junit_carries_clauses_and_what_was_seen(
    run: SuiteRunner, workers: tuple[str, ...]
) -> None:
    run(*workers, run.known("ROWS-003"), failing=("ROWS-003", "ROWS-001"))
    told = run.junit()
    assert len(told) == len(CORE) + 2
    for clause_id in CORE:
        properties = told[f"test_clause[{clause_id}]"]
        assert properties["truetap_clause"] == clause_id
        failed = clause_id in {"ROWS-001", "ROWS-003"}
        assert properties["truetap_outcome"] == ("fail" if failed else "pass")
        seen = f"{clause_id} is wrong: slot 1 <of> 4" if failed else f"{clause_id} looked at"
        assert properties["truetap_saw"] == seen
        assert ("truetap_reproduce" in properties) == failed
        assert ("truetap_expected" in properties) == (clause_id == "ROWS-003")
    assert told["test_more_of_one[16]"]["truetap_clause"] == "LAYERS-004"
    assert told["test_more_of_one[32]"]["truetap_saw"] == "width 32"


def test_xdist_tells_the_same_story(run: SuiteRunner) -> None:
    def story() -> tuple[int, dict[str, Any], dict[str, dict[str, str]]]:
        run(*workers, run.known("ROWS-003"), failing=("ROWS-003", "LAYERS-001"))
        return run.code, run.clauses, run.junit()

    workers: tuple[str, ...] = ()
    alone = story()
    workers = ("-n", "2")
    assert story() == alone


def test_a_failure_comes_with_the_command_that_repeats_it(run: SuiteRunner) -> None:
    (run.pytester.path / "my spec.json").write_text('{"dtype": "float32"}')
    run("--spec", "my spec.json", failing=("ROWS-003",))
    command = "pytest --pyargs truetap.conformance --adapter x --spec 'my spec.json' --clause"
    assert f"{command} ROWS-003" in run.output
    assert f"{command} ROWS-001" not in run.output
    assert run.clauses["ROWS-003"]["reproduce"] == f"{command} ROWS-003"


def test_one_clause_alone(run: SuiteRunner) -> None:
    run("--clause", "LAYERS-004", "--clause", "ROWS-001", failing=("ROWS-003",))
    assert run.code == 0, run.output
    assert f"4 passed, {len(CORE) - 2} deselected" in run.output
    passed = {name for name, outcome in run.outcomes.items() if outcome == "pass"}
    assert passed == {"LAYERS-004", "ROWS-001"}
    assert run.report["verdict"] == "inconclusive"
    assert run("--clause", "ROWS-003", failing=("ROWS-003",)).code == 1


@pytest.mark.parametrize("clause_id", ["ROWS-999", "REPLY-003", "rows-003", ""])
def test_a_clause_that_the_profile_lacks_is_a_usage_error(run: SuiteRunner, clause_id: str) -> None:
    run("--clause", clause_id)
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert f"profile core has no clause {clause_id!r}" in run.output


def test_the_suites_own_tests_are_chosen_by_clause(run: SuiteRunner) -> None:
    collected = run.pytester.runpytest_subprocess(
        *("-c", run.ini, "--collect-only", "-q", "--pyargs", "truetap.conformance"),
        *("--channel", "collect", "--clause", "REPLY-003"),
        timeout=300,
    )
    (line,) = [line for line in collected.outlines if "::" in line]
    assert line.endswith("test_values_keep_their_structure")


@WORKERS
def test_a_run_where_nothing_ran_is_not_green(run: SuiteRunner, workers: tuple[str, ...]) -> None:
    run(*workers, "-k", "no_such_test")
    assert run.code == pytest.ExitCode.NO_TESTS_COLLECTED
    assert set(run.outcomes.values()) == {"not_run"}
    assert run.report["verdict"] == "inconclusive"
    suite = run.pytester.runpytest_subprocess(
        *("-c", run.ini, "--pyargs", "truetap.conformance", "--adapter", "x", "-k", "no_such_test"),
        timeout=300,
    )
    assert int(suite.ret) == pytest.ExitCode.NO_TESTS_COLLECTED


SKIPPING = TESTS.replace("    saw(", "    pytest.skip('not today')\n    saw(")


@WORKERS
def test_a_run_that_skipped_everything_is_not_green(
    run: SuiteRunner, workers: tuple[str, ...]
) -> None:
    run(*workers, tests=SKIPPING)
    assert f"{len(CORE) + 2} skipped" in run.output
    assert run.code == pytest.ExitCode.NO_TESTS_COLLECTED
    assert run.report["verdict"] == "inconclusive"
    assert run("--collect-only", tests=SKIPPING).code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["-k", "not ROWS-002"],
        ["--deselect", "test_light.py::test_clause[ROWS-002]"],
        ["-k", "not 32"],
        ["--deselect", "test_light.py::test_more_of_one[32]"],
    ],
)
def test_a_clause_of_which_only_some_tests_ran_is_not_run(
    run: SuiteRunner, arguments: list[str]
) -> None:
    run(*arguments)
    assert run.code == 0
    missing = "ROWS-002" if "ROWS-002" in arguments[1] else "LAYERS-004"
    assert run.outcomes == dict.fromkeys(CORE, "pass") | {missing: "not_run"}
    assert run.report["verdict"] == "inconclusive"
    if missing == "LAYERS-004":
        assert run.clauses[missing]["saw"].startswith("2 of 3 tests ran")


def test_a_test_named_by_hand_does_not_speak_for_its_clause(run: SuiteRunner) -> None:
    path = run.pytester.makepyfile(test_light=f"FAILING = ()\n{TESTS}")
    options = ("-c", run.ini, "--adapter", "x", "--report", "r.json")
    named = f"{path}::test_more_of_one"
    run.pytester.runpytest_subprocess(*options, named, timeout=300)
    report = json.loads((run.pytester.path / "r.json").read_text())
    assert {clause["outcome"] for clause in report["clauses"]} == {"not_run"}


def test_a_run_stopped_at_its_first_failure_proves_nothing_of_the_rest(run: SuiteRunner) -> None:
    run("-x", failing=("ROWS-002",))
    assert run.outcomes["ROWS-002"] == "fail"
    assert run.outcomes["LAYERS-004"] == "not_run"


HANGING = (
    TESTS
    + """
@pytest.mark.clause("LAYERS-004")
def test_hangs():
    import subprocess, sys, pathlib
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path("pid").write_text(str(engine.pid))
    while True:
        try:
            engine.wait()
            import time
            time.sleep(600)
        except Exception:
            pass
"""
)


@WORKERS
def test_a_run_ends_at_its_deadline_and_takes_the_engine_with_it(
    run: SuiteRunner, workers: tuple[str, ...]
) -> None:
    started = time.monotonic()
    run(*workers, "--deadline", "4", tests=HANGING)
    assert time.monotonic() - started < 60
    assert run.code == 3, run.output
    pid = int((run.pytester.path / "pid").read_text())
    assert not psutil.pid_exists(pid)
    assert run.outcomes == dict.fromkeys(CORE, "pass") | {"LAYERS-004": "error"}
    assert run.clauses["LAYERS-004"]["saw"] == "not run before the deadline of 4 s passed"
    assert run.report["verdict"] == "inconclusive"
    assert "the deadline of 4 s passed; the engine was killed" in run.output


def test_a_deadline_that_is_met_changes_nothing(run: SuiteRunner) -> None:
    assert run("--deadline", "200").code == 0
    assert run.report["verdict"] == "conformant"
    assert "the deadline of" not in run.output


def test_a_deadline_is_for_runs_of_the_suite_only(run: SuiteRunner) -> None:
    path = run.pytester.makepyfile("import time\ndef test_it(): time.sleep(2)\n")
    done = run.pytester.runpytest_subprocess("-c", run.ini, "--deadline", "1", path, timeout=300)
    assert int(done.ret) == 0


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_a_deadline_is_above_zero(run: SuiteRunner, seconds: str) -> None:
    run("--deadline", seconds)
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert "a deadline is a number of seconds above 0" in run.output


PINNED = (
    TESTS
    + """
@pytest.mark.clause("LAYERS-004")
@pytest.mark.parametrize("case", range(8))
def test_pinned(case, worker_id):
    import os, pathlib, subprocess, sys, time
    child = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    seen = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
    pathlib.Path(f"gpus-{worker_id}").write_text(seen.stdout.strip())
"""
)


def pinned(run: SuiteRunner) -> dict[str, str]:
    return {path.name: path.read_text() for path in Path(run.pytester.path).glob("gpus-*")}


def test_each_workers_engine_gets_gpus_of_its_own(
    run: SuiteRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert run("--gpus", "2", "-n", "2", "--dist", "each", tests=PINNED).code == 0, run.output
    assert pinned(run) == {"gpus-gw0": "4,5", "gpus-gw1": "6,7"}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_a_run_without_workers_gets_the_first_ones(
    run: SuiteRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa,GPU-bb")
    assert run("--gpus", "1", tests=PINNED).code == 0, run.output
    assert pinned(run) == {"gpus-master": "GPU-aa"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpus", "3"], "engine 1 of 3 GPUs each needs 3 in all"),
        (["--gpus", "1", "-n", "3"], "engine 3 of 1 GPUs each needs 3 in all"),
        (["--gpus", "0"], "0 GPUs for each engine are none"),
        (["--gpus", "1", "--spec", "tp2.json"], "an engine of 2 ranks does not fit on 1 GPUs"),
    ],
)
def test_too_few_gpus_are_refused_before_anything_starts(
    run: SuiteRunner, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    (run.pytester.path / "tp2.json").write_text('{"tensor_parallel_size": 2}')
    run(*arguments)
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert says in run.output
    assert "Traceback" not in run.output


def test_where_nobody_says_how_many_gpus_there_are_it_could_not_run(
    run: SuiteRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(run.pytester.path))  # no nvidia-smi
    run("--gpus", "1")
    assert run.code == 3
    assert "CUDA_VISIBLE_DEVICES is not set and nvidia-smi cannot say" in run.output


def test_the_head_says_what_is_tested(run: SuiteRunner) -> None:
    (run.pytester.path / "s.json").write_text("{}")
    run(run.known("ROWS-003"), "--spec", "s.json", failing=("ROWS-003",))
    assert "truetap: adapter x, profile core, spec s.json" in run.output
    assert "truetap: installed: " in run.output
    assert "truetap: expectations: known.toml, 1 in all" in run.output
    path = run.pytester.makepyfile("def test_it(): pass\n")
    other = run.pytester.runpytest_subprocess("-c", run.ini, path, timeout=300)
    assert "truetap:" not in other.stdout.str()

"""pytest plugin: options, markers, fixtures and hooks of the conformance suite.

Loaded into every pytest run where truetap is installed, so it imports neither torch nor an engine,
and does nothing unless the suite or one of its markers is used.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from truetap.harness import contract, gpus, reaper, suite_options
from truetap.harness.errors import CouldNotRun, UsageError
from truetap.harness.run_deadline import RunDeadline
from truetap.harness.suite_options import suite_digest
from truetap.harness.suite_reporter import (
    CLAUSE,
    EXPECTED,
    FACTS,
    OUTCOME,
    REPRODUCE,
    SAW,
    SLOT,
    UNTIL,
    Reporter,
)

if TYPE_CHECKING:
    from truetap.harness.expectations import Expectations
    from truetap.harness.model import EngineSpec

__all__ = ["Refused", "Saw", "SuiteRun", "suite_digest"]

Saw = Callable[[str], None]
"""A clause calls this with one sentence of what it measured."""


class Refused(pytest.skip.Exception):  # type: ignore[name-defined, misc]
    """What a clause asks for was refused by the capture path, loudly and before it gave data."""


_MARKERS = {
    "clause(id)": "the clause that a conformance test decides",
    "live": "drives a real engine in processes of its own",
    "gpu": "needs a GPU; a run of these without one exits non-zero",
    "torch": "needs torch and transformers",
    "slow": "takes more than a few seconds",
    "nightly": "takes minutes and repeats on other verifiers what other tests do on one",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's options."""
    suite_options.add(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Register markers; refuse what cannot be; start the report, the deadline and GPU pinning."""
    for marker, meaning in _MARKERS.items():
        config.addinivalue_line("markers", f"{marker}: {meaning}")
    try:
        _pin_gpus(config)
        config.stash[_EXPECTED] = suite_options.expectations(config)
        reporter = None
        if not hasattr(config, "workerinput"):  # xdist's workers leave this to their controller
            reporter = Reporter(config)
            config.pluginmanager.register(reporter, "truetap-reporter")
    except UsageError as wrong:
        raise pytest.UsageError(f"{wrong}; {wrong.remedy}".removesuffix("; ")) from None
    except CouldNotRun as missing:
        pytest.exit(f"{missing}; {missing.remedy}", returncode=missing.exit_code)
    wanted = config.getoption("markexpr", "") or ""
    if "gpu" in wanted and "not gpu" not in wanted and not _has_gpu():
        pytest.exit("no GPU here: GPU tests cannot run, which is not a pass", returncode=3)
    if suite_options.subject(config) and not _workers(config):
        _start_deadline(config, reporter)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the clock, and give the environment back as it was."""
    if deadline := config.stash.get(_DEADLINE, None):
        deadline.stop()
    before = config.stash.get(_VISIBLE, _UNPINNED)
    if before is None:
        os.environ.pop(gpus.VARIABLE, None)
    elif before != _UNPINNED:
        os.environ[gpus.VARIABLE] = before


def _workers(config: pytest.Config) -> int:
    """Return how many workers run the tests for this process; 0 if it runs them itself."""
    return 0 if hasattr(config, "workerinput") else len(getattr(config.option, "tx", None) or ())


def _pin_gpus(config: pytest.Config) -> None:
    """Give this process, and the engine that it will start, its own of the caller's GPUs."""
    wanted = config.getoption("gpus", None)
    if wanted is None:
        return
    visible = os.environ.get(gpus.VARIABLE)
    workers = _workers(config)
    slot = getattr(config, "workerinput", {}).get(SLOT, max(0, workers - 1))
    mine = gpus.share(visible, worker=slot, per_worker=wanted, count=gpus.count)
    ranks = suite_options.spec_record(config).get("tensor_parallel_size", 1)
    if ranks > wanted:
        raise UsageError(
            f"an engine of {ranks} ranks does not fit on {wanted} GPUs",
            remedy="raise --gpus, or lower tensor_parallel_size in --spec",
        )
    if not workers:  # a controller only looks whether there are enough for all
        config.stash[_VISIBLE] = visible
        os.environ[gpus.VARIABLE] = mine


def _start_deadline(config: pytest.Config, reporter: Reporter | None) -> None:
    until = getattr(config, "workerinput", {}).get(UNTIL)
    left = config.getoption("deadline") if until is None else until - time.monotonic()
    before = set(psutil.Process().children(recursive=True))

    def engine() -> list[psutil.Process]:
        now = set(psutil.Process().children(recursive=True))
        return [process for process in now - before if not reaper.is_reaper(process)]

    def last_words() -> None:
        if reporter is not None:
            reporter.finish(late=True)

    config.stash[_DEADLINE] = RunDeadline(left, engine, last_words)


@pytest.hookimpl(tryfirst=True)  # before -k and the like: all tests of a clause are counted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Require a clause on every conformance test; leave out the tests of other clauses."""
    suite = suite_options.suite_folder()
    wanted = suite_options.chosen(config)
    alone = bool(config.getoption("clause", None))
    others = []
    tests: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("clause")
        if mark is not None and mark.args and mark.args[0] in contract.CLAUSES:
            item.user_properties.append((CLAUSE, mark.args[0]))
            tests[mark.args[0]] += 1
            if mark.args[0] not in wanted:
                others.append(item)
        elif mark is not None or item.path.parent == suite:
            raise pytest.UsageError(f"{item.nodeid} names no clause of the contract")
        elif alone:
            others.append(item)
    if any("::" in argument for argument in config.args):  # there may be others, never collected
        tests.update(dict.fromkeys(tests, 1))
    config.stash[_TESTS] = tests
    # What needs other engines comes last: the first one is closed by then.
    items.sort(key=lambda item: _is_clause(item) and "staged" in getattr(item, "fixturenames", ()))
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def _is_clause(item: pytest.Item) -> bool:
    return any(name == CLAUSE for name, _ in item.user_properties)


@pytest.fixture
def saw(request: pytest.FixtureRequest) -> Saw:
    """Record what a clause measured, for the report."""
    return lambda sentence: request.node.user_properties.append((SAW, sentence))


class SuiteRun:
    """The engine under test, opened once for the whole run."""

    def __init__(self, config: pytest.Config, scratch: Path) -> None:
        self._config = config
        self._scratch = scratch
        self._session: Any = None
        self.environment: dict[str, Any] = {}
        self.evidence = "live"

    def observe(self) -> Any:
        """Open the adapter and drive it through the core workload."""
        from truetap.harness import registry
        from truetap.harness.observation import observe

        name = self._config.getoption("adapter")
        if not name:
            raise UsageError("name the adapter under test", remedy="--adapter vllm_native")
        adapter = registry.find(name)
        self.evidence = getattr(adapter, "evidence", "live")
        spec = suite_options.spec(self._config, self._scratch, adapter)
        started = time.monotonic()
        _say(f"opening {name}")
        self._session = adapter.open(spec, scratch=self._scratch)
        _say(f"{name} is up after {time.monotonic() - started:.0f} s")
        self.environment = asdict(self._session.environment())
        profile = suite_options.profile(self._config)
        by_value = profile != "shapes"  # which loads no second copy of the verifier
        reference = suite_options.reference(self._config, spec) if by_value else None
        return observe(self._session, spec, reference, {}, _say, profile=profile)

    def play(self, seen: Any) -> Any:
        """Close the base session, and open the adapter once for each scene of the profile."""
        from truetap.harness import registry
        from truetap.harness.scenes import play

        self.close()
        adapter = registry.find(self._config.getoption("adapter"))

        def opened(spec: EngineSpec, name: str) -> Any:
            scratch = self._scratch / name
            scratch.mkdir()
            return adapter.open(spec, scratch=scratch)

        profile = suite_options.profile(self._config)
        return play(seen, opened, contract.clauses_of(profile), _say)

    def observe_channel(self) -> Any:
        """Open the reply channel, tensor parallel over two ranks, and drive it."""
        from truetap.harness import registry
        from truetap.harness.channel import observe_channel

        name = self._config.getoption("channel")
        if not name:
            raise UsageError("name the reply channel under test", remedy="--channel collect")
        spec = suite_options.spec(self._config, self._scratch)
        seen = observe_channel(registry.find_channel(name), spec, self._scratch, _say)
        self.environment = asdict(seen.environment)
        return seen

    def observe_store(self) -> Any:
        """Drive the store of captures."""
        from truetap.harness import registry
        from truetap.harness.store_script import observe_store

        name = self._config.getoption("store")
        if not name:
            raise UsageError("name the store under test", remedy="--store shards")
        seen = observe_store(registry.find_store(name), self._scratch, _say)
        self.environment = asdict(seen.environment)
        return seen

    def close(self) -> None:
        """Close the engine."""
        if self._session is not None:
            self._session.close()


@pytest.fixture(scope="session")
def suite_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SuiteRun]:
    """Return the engine under test, closed at the end whatever happens."""
    run = SuiteRun(request.config, tmp_path_factory.mktemp("truetap"))
    request.config.stash[_RUN] = run
    yield run
    run.close()


_RUN = pytest.StashKey[SuiteRun]()
_EXPECTED: pytest.StashKey[Expectations | None] = pytest.StashKey()
_DEADLINE = pytest.StashKey[RunDeadline]()
_TESTS: pytest.StashKey[Counter[str]] = pytest.StashKey()
_VISIBLE: pytest.StashKey[str | None] = pytest.StashKey()
_UNPINNED = "\0"  # no environment variable holds this


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Attach to each test's report what came of it, in one line, and where it ran."""
    told: pytest.TestReport = yield
    clause_id = dict(item.user_properties).get(CLAUSE)
    if not isinstance(clause_id, str):
        return told
    run = item.config.stash.get(_RUN, None)
    # Plain builtins: a report may travel between processes.
    environment = json.loads(json.dumps(run.environment)) if run else {}
    vars(told)[FACTS] = {
        "environment": environment,
        "evidence": run.evidence if run else "live",
        "tests": item.config.stash[_TESTS][clause_id],
    }
    if call.excinfo is None:
        if call.when == "call":
            _record(item, told, {OUTCOME: "pass"})
        return told
    kind = _kind(call)
    if kind is None:
        return told
    message = str(call.excinfo.value).strip() or call.excinfo.typename
    sentence = message.splitlines()[0]
    if remedy := getattr(call.excinfo.value, "remedy", ""):
        sentence += f"; {remedy}"
    again = suite_options.reproduce(item.config, clause_id)
    _record(item, told, {OUTCOME: kind, SAW: sentence} | ({REPRODUCE: again} if again else {}))
    if again and kind != "refused":
        told.sections.append((f"to run {clause_id} alone", again))
    expected = item.config.stash.get(_EXPECTED, None)
    if kind == "fail" and expected is not None:
        asked = suite_options.spec_record(item.config)
        if entry := expected.of(clause_id, environment, asked):
            told.outcome = "skipped"  # with ``wasxfail``, that is how pytest tells an xfail
            vars(told)["wasxfail"] = f"{clause_id}: {entry.says}"
            _record(item, told, {EXPECTED: entry.says})
    return told


def _kind(call: pytest.CallInfo[None]) -> str | None:
    """Return the outcome that an exception stands for; None for a skip, which is none."""
    assert call.excinfo is not None
    raised = call.excinfo.value
    if isinstance(raised, Refused):
        return "refused"
    if isinstance(raised, pytest.skip.Exception):
        return None
    judged = isinstance(raised, (AssertionError, pytest.fail.Exception))
    return "fail" if call.when == "call" and judged else "error"


def _record(item: pytest.Item, told: pytest.TestReport, properties: dict[str, str]) -> None:
    """Set properties of a test, in this phase's report and in those that follow."""
    for where in (item.user_properties, told.user_properties):
        kept = [(name, value) for name, value in where if name not in properties]
        where[:] = [*kept, *properties.items()]


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _say(sentence: str) -> None:
    print(f"truetap: {sentence}", flush=True)  # noqa: T201

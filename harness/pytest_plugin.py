"""pytest plugin: options, markers and the report of the conformance suite.

Loaded into every pytest run where truetap is installed, so it imports neither torch nor an engine,
and does nothing unless the suite or one of its markers is used.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from truetap.harness import contract, report
from truetap.harness.errors import UsageError
from truetap.harness.model import EngineSpec
from truetap.harness.report import Outcome

Saw = Callable[[str], None]
"""A clause calls this with one sentence of what it measured."""


class Refused(pytest.skip.Exception):  # type: ignore[name-defined, misc]
    """What a clause asks for was refused by the capture path, loudly and before it gave data."""


_CLAUSE, _SAW, _ENVIRONMENT = "truetap_clause", "truetap_saw", "truetap_environment"
_OUTCOMES: dict[str, Outcome] = {"pass": "pass", "refused": "refused", "fail": "fail"}
_MARKERS = {
    "clause(id)": "the clause that a conformance test decides",
    "live": "drives a real engine in processes of its own",
    "gpu": "needs a GPU; a run of these without one exits non-zero",
    "torch": "needs torch and transformers",
    "slow": "takes more than a few seconds",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's options."""
    group = parser.getgroup("truetap", "truetap conformance suite")
    group.addoption("--adapter", help="capture adapter to put through the suite")
    group.addoption("--channel", help="reply channel to put through the suite instead")
    group.addoption("--model", help="verifier directory (default: a small random Llama)")
    group.addoption("--boundaries", help="comma-separated boundaries (default: EAGLE-3's)")
    group.addoption("--spec", help="JSON file with engine settings; see EngineSpec")
    group.addoption(
        "--profile", help="clauses to run and require (default: core; with --channel: reply)"
    )
    group.addoption(
        "--draws",
        default="ci",
        choices=["dev", "ci", "gpu", "nightly"],
        help="how many batches hypothesis draws (default: ci)",
    )
    group.addoption("--report", help="write the conformance report to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Register markers; refuse GPU runs without a GPU; start a report if one is wanted."""
    for marker, meaning in _MARKERS.items():
        config.addinivalue_line("markers", f"{marker}: {meaning}")
    wanted = config.getoption("markexpr", "") or ""
    if "gpu" in wanted and "not gpu" not in wanted and not _has_gpu():
        pytest.exit("no GPU here: GPU tests cannot run, which is not a pass", returncode=3)
    if not hasattr(config, "workerinput"):  # xdist's workers leave reporting to their controller
        try:
            reporter = _Reporter(config)
        except UsageError as wrong:
            raise pytest.UsageError(f"{wrong}; {wrong.remedy}") from None
        config.pluginmanager.register(reporter, "truetap-reporter")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Require a clause on every conformance test; leave out those of other profiles."""
    suite = _suite_folder()
    wanted = contract.clauses_of(_profile(config))
    others = []
    for item in items:
        mark = item.get_closest_marker("clause")
        if mark is not None and mark.args and mark.args[0] in contract.CLAUSES:
            item.user_properties.append((_CLAUSE, mark.args[0]))
            if mark.args[0] not in wanted:
                others.append(item)
        elif mark is not None or item.path.parent == suite:
            raise pytest.UsageError(f"{item.nodeid} names no clause of the contract")
    # What needs other engines comes last: the first one is closed by then.
    items.sort(key=lambda item: _is_clause(item) and "staged" in getattr(item, "fixturenames", ()))
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def _is_clause(item: pytest.Item) -> bool:
    return any(name == _CLAUSE for name, _ in item.user_properties)


@pytest.fixture
def saw(request: pytest.FixtureRequest) -> Saw:
    """Record what a clause measured, for the report."""
    return lambda sentence: request.node.user_properties.append((_SAW, sentence))


class SuiteRun:
    """The engine under test, opened once for the whole run."""

    def __init__(self, config: pytest.Config, scratch: Path) -> None:
        self._config = config
        self._scratch = scratch
        self._session: Any = None
        self.environment: dict[str, Any] = {}

    def observe(self) -> Any:
        """Open the adapter and drive it through the core workload."""
        from truetap.harness import registry
        from truetap.harness.observation import observe
        from truetap.harness.reference import Reference

        name = self._config.getoption("adapter")
        if not name:
            raise UsageError("name the adapter under test", remedy="--adapter vllm_native")
        adapter = registry.find(name)
        spec = _spec(self._config, self._scratch)
        started = time.monotonic()
        _say(f"opening {name}")
        self._session = adapter.open(spec, scratch=self._scratch)
        _say(f"{name} is up after {time.monotonic() - started:.0f} s")
        self.environment = asdict(self._session.environment())
        reference = Reference(Path(spec.model), spec.dtype)
        return observe(self._session, spec, reference, {}, _say, profile=_profile(self._config))

    def play(self, seen: Any) -> Any:
        """Close the base session, and open the adapter once for each scene of the profile."""
        from truetap.harness import contract, registry
        from truetap.harness.scenes import play

        self.close()
        adapter = registry.find(self._config.getoption("adapter"))

        def opened(spec: EngineSpec, name: str) -> Any:
            scratch = self._scratch / name
            scratch.mkdir()
            return adapter.open(spec, scratch=scratch)

        return play(seen, opened, contract.clauses_of(_profile(self._config)), _say)

    def observe_channel(self) -> Any:
        """Open the reply channel, tensor parallel over two ranks, and drive it."""
        from truetap.harness import registry
        from truetap.harness.channel import observe_channel

        name = self._config.getoption("channel")
        if not name:
            raise UsageError("name the reply channel under test", remedy="--channel collect")
        spec = _spec(self._config, self._scratch, tensor_parallel_size=2)
        seen = observe_channel(registry.find_channel(name), spec, self._scratch, _say)
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Attach to each test's report what failed, in one line, and where it ran."""
    outcome: pytest.TestReport = yield
    if _is_clause(item):
        if call.excinfo is not None:
            message = str(call.excinfo.value).strip() or call.excinfo.typename
            expected = isinstance(call.excinfo.value, (AssertionError, pytest.fail.Exception))
            kind = "fail" if call.when == "call" and expected else "error"
            if isinstance(call.excinfo.value, Refused):
                kind = "refused"
            sentence = message.splitlines()[0]
            if remedy := getattr(call.excinfo.value, "remedy", ""):
                sentence += f"; {remedy}"
            outcome.user_properties.append((_SAW, f"{kind}|{sentence}"))
        if run := item.config.stash.get(_RUN, None):
            outcome.user_properties.append((_ENVIRONMENT, run.environment))
    return outcome


class _Reporter:
    """Collects clause outcomes from test reports and writes the conformance report."""

    def __init__(self, config: pytest.Config) -> None:
        self._path = config.getoption("report", None)
        if self._path and not Path(self._path).parent.is_dir():
            raise UsageError(
                f"--report names {self._path}, in a folder that does not exist",
                remedy="make the folder first",
            )
        self._started = time.monotonic()
        adapter, channel = (config.getoption(name, None) or "" for name in ("adapter", "channel"))
        if adapter and channel:
            raise UsageError(
                "--adapter and --channel name different subjects", remedy="give one of them"
            )
        self._report = report.blank(
            _profile(config),
            evidence="live",
            adapter=adapter or channel,
            spec=_spec_record(config),
            suite_digest=suite_digest(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one phase of a clause's test."""
        properties = dict(report.user_properties)
        clause_id = properties.get(_CLAUSE)
        if clause_id is None or (report.when != "call" and not report.failed):
            return
        said = str(properties.get(_SAW, ""))
        kind, _, sentence = ("pass", "", said) if report.passed else said.partition("|")
        outcome = _OUTCOMES.get(kind, "error")
        for clause in self._report.clauses:
            if clause.id == clause_id:
                if report.skipped and outcome != "refused":
                    continue
                clause.add(outcome, sentence)
        if environment := properties.get(_ENVIRONMENT):
            assert isinstance(environment, dict)
            self._report.environment = environment

    def pytest_sessionfinish(self) -> None:
        """Write the report."""
        if self._path:
            self._report.seconds = round(time.monotonic() - self._started, 1)
            self._report.write(Path(self._path))


def _profile(config: pytest.Config) -> str:
    default = "reply" if config.getoption("channel", None) else "core"
    return config.getoption("profile", None) or default


def suite_digest() -> str:
    """Return the SHA-256 of the code that judges: the suite's tests and the harness they use."""
    harness = Path(__file__).parent
    files = [*harness.glob("*.py")]
    for folder in ("adapters", "channels"):
        files += (harness / folder).rglob("*.py")
    if suite := _suite_folder():
        files += suite.glob("*.py")
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _suite_folder() -> Path | None:
    """Return where the suite's tests are, without importing them."""
    suite = find_spec("truetap.conformance")
    return Path(suite.origin).parent if suite and suite.origin else None


def _spec(config: pytest.Config, scratch: Path, **defaults: Any) -> EngineSpec:
    from truetap.harness import boundaries, random_verifier, verifier

    record = {**defaults, **_spec_record(config)}
    if not record.get("model"):
        record["model"] = str(random_verifier.tiny_llama(scratch / "tiny-llama"))
    if not record.get("boundaries"):
        facts = verifier.describe(Path(record["model"]))
        record["boundaries"] = boundaries.eagle3(facts.num_blocks)
    spec = EngineSpec(**record)
    return replace(spec, boundaries=tuple(spec.boundaries))


def _spec_record(config: pytest.Config) -> dict[str, Any]:
    """Return the engine settings named on the command line, as plain JSON values."""
    record: dict[str, Any] = {}
    try:
        if file := config.getoption("spec", None):
            record = dict(json.loads(Path(file).read_text()))
        if model := config.getoption("model", None):
            record["model"] = model
        if listed := config.getoption("boundaries", None):
            record["boundaries"] = [int(k) for k in listed.split(",")]
    except (OSError, ValueError, TypeError) as error:
        raise pytest.UsageError(f"the engine settings cannot be read: {error}") from None
    unknown = record.keys() - {field.name for field in fields(EngineSpec)}
    if unknown:
        raise pytest.UsageError(f"unknown engine settings: {', '.join(sorted(unknown))}")
    return record


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _say(sentence: str) -> None:
    print(f"truetap: {sentence}", flush=True)  # noqa: T201

"""What is decided when engines speak: whose job, whose shard, who may, and what ends it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from truetap.harness.certificate import Reason
from truetap.harness.errors import CheckFailed, CouldNotRun, IntegrityError, UsageError
from truetap.pipeline import gatekeeper
from truetap.pipeline.config import RunConfig, Verifier
from truetap.pipeline.dispatch import Dispatch
from truetap.pipeline.engine_lines import EngineLines, engine_lines
from truetap.pipeline.engine_worker import (
    Delivered,
    Event,
    Failed,
    Hello,
    Lost,
    Opened,
    Progress,
    Want,
)
from truetap.pipeline.extract import Extraction
from truetap.pipeline.gate import Decision
from truetap.pipeline.prepare import Conversation
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.shard_making import Job
from truetap.pipeline.store import Store

if TYPE_CHECKING:
    from rich.console import Console

DENIED = Decision((Reason("gpu", "device was 'A' when certified", "certify it"),), None, True)


class Audit:
    """Misses the ``misses``-th shard; remembers whose each was."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bool]] = []
        self.misses = 0
        self.settled = 0

    def promise_of(self, engine: str) -> dict[str, Any]:
        return {"audit": {"engine": engine}}

    def published(self, entry: Any, *, last: bool, engine: str) -> bool:
        self.seen.append((entry["shard"], engine, last))
        return len(self.seen) != self.misses

    def settle(self) -> None:
        self.settled += 1


class Paper:
    """Engines that do as a script says: one line of it is one thing that one of them does."""

    def __init__(self, folder: Path, engines: int) -> None:
        self.engines = range(1, engines + 1)
        self.folder = folder
        self.script: deque[tuple[int, Any]] = deque()
        self.given: dict[int, list[Job]] = {engine: [] for engine in self.engines}
        self.told: list[tuple[int, str | None]] = []
        self.dismissed: list[int] = []

    def heard(self) -> Iterator[tuple[int, Event]]:
        engine, does = self.script.popleft()
        yield engine, does() if callable(does) else does

    def tell(self, engine: int, job: Job | None) -> None:
        self.told.append((engine, job.name if job else None))
        if job:
            self.given[engine].append(job)

    def dismiss(self, engine: int) -> None:
        self.dismissed.append(engine)

    def up(self, engine: int, device: str = "cpu") -> None:
        self.script += [(engine, Hello(f"node{engine}", 1)), (engine, Opened({"device": device}))]

    def makes(self, engine: int, *, wants: bool = True, **changed: Any) -> None:
        """Have an engine deliver the oldest job that it has; ``changed`` is wrong about it."""

        def made() -> Delivered:
            job = self.given[engine].pop(0)
            partial = f"{job.name}.{len(self.told)}.partial"
            (self.folder / partial).write_text(f"{job.name} by {engine}")
            entry = {"shard": job.name, "ids": [c.id for c in job.conversations]} | changed
            return Delivered(entry, changed.get("partial", partial))

        self.script.append((engine, made))
        if wants:
            self.script.append((engine, Want()))


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the gate was asked about; whoever has the device "other" is denied."""
    asked: list[Any] = []

    def answer(_config: Any, _folder: Any, *, binding: Any) -> Decision:
        asked.append(binding["device"])
        allowed = Decision((), "c" * 64, True, path=Path("certificate.json"))
        return DENIED if binding["device"] == "other" else allowed

    monkeypatch.setattr(gatekeeper, "ask_gate", answer)
    monkeypatch.setattr(gatekeeper.provenance, "keep", lambda *_: None)
    return asked


class Stage:
    def __init__(self, root: Path, console: Console, jobs: int, engines: int) -> None:
        folder = RunFolder(root)
        folder.shards.mkdir(parents=True)
        self.store, self.audit = Store(folder.shards), Audit()
        config = RunConfig(output=root, verifier=Verifier(directory=root))
        of = Extraction(
            config, folder, None, console, self.store, self.audit, {}, None  # type: ignore[arg-type]
        )  # fmt: skip
        self.fleet = Paper(folder.shards, engines)
        one = [Conversation(f"c{n}", "train", (1, 2), 1) for n in range(jobs)]
        self.jobs = [Job(f"s{n}", one[n : n + 1]) for n in range(jobs)]
        lines = EngineLines(console, jobs, 0, None)
        self.dispatch = Dispatch(of, self.jobs, self.fleet, lines)

    def files(self) -> dict[str, str]:
        return {p.name: p.read_text() for p in self.store.folder.iterdir() if p.suffix == ""}


@pytest.fixture
def stage(tmp_path: Path, console: Console, ask: list[Any]) -> Callable[..., Stage]:  # noqa: ARG001
    def made(jobs: int, engines: int) -> Stage:
        return Stage(tmp_path / "run", console, jobs, engines)

    return made


def said(stage_: Stage) -> str:
    return stage_.dispatch._of.console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_engines_get_jobs_as_they_ask_and_the_head_alone_records(
    stage: Callable[..., Stage], ask: list[Any]
) -> None:
    made = stage(4, 2)
    fleet = made.fleet
    fleet.up(1)
    fleet.up(2)
    for engine in (1, 1, 1, 2):
        fleet.makes(engine)
    fleet.script.pop()
    made.dispatch.run()
    assert fleet.told == [(1, "s0"), (2, "s1"), (1, "s2"), (1, "s3"), (1, None)]
    assert made.files() == {"s0": "s0 by 1", "s2": "s2 by 1", "s3": "s3 by 1", "s1": "s1 by 2"}
    assert made.audit.seen == [
        ("s0", "1", False),
        ("s2", "1", False),
        ("s3", "1", False),
        ("s1", "2", True),
    ]
    assert made.audit.settled == 1
    entries = made.store.entries()
    assert list(entries) == ["s0", "s2", "s3", "s1"]
    assert {e["shard"]: e["audit"]["engine"] for e in entries.values()} == {
        "s0": "1", "s2": "1", "s3": "1", "s1": "2"
    }  # fmt: skip
    assert len(ask) == 1 + 4  # once for the first engine, and before every job
    assert entries["s0"]["made"] < entries["s1"]["made"] < entries["s3"]["made"]


def test_a_resting_engine_gets_what_a_lost_one_held(stage: Callable[..., Stage]) -> None:
    made = stage(2, 2)
    fleet = made.fleet
    fleet.up(1)
    fleet.up(2)
    fleet.makes(2)
    fleet.script.append((1, Lost("killed")))
    fleet.makes(2)
    made.dispatch.run()
    assert fleet.told == [(1, "s0"), (2, "s1"), (2, None), (2, "s0")]
    assert fleet.dismissed == [1]
    assert made.files() == {"s0": "s0 by 2", "s1": "s1 by 2"}
    assert "engine 1 on node1 is lost: killed; to be made by others: s0" in said(made)


def test_an_engine_taken_for_lost_is_not_heard_again(stage: Callable[..., Stage]) -> None:
    made = stage(1, 2)
    fleet = made.fleet
    fleet.up(1)
    fleet.script.append((1, Lost("silent")))
    fleet.makes(1)  # it was not dead: its file is there, and is nobody's
    fleet.up(2)
    fleet.makes(2)
    made.dispatch.run()
    assert made.files() == {"s0": "s0 by 2"}
    assert [p.read_text() for p in made.store.folder.glob("*.partial")] == ["s0 by 1"]


def test_no_engine_left(stage: Callable[..., Stage]) -> None:
    made = stage(3, 2)
    made.fleet.script.append((2, Lost("no room")))
    made.fleet.up(1)
    made.fleet.makes(1)
    made.fleet.script.append((1, Lost("killed")))
    with pytest.raises(CouldNotRun) as ended:
        made.dispatch.run()
    assert "no engine is left: engine 1 on node1: killed; engine 2: no room" in str(ended.value)
    assert "logs/extract-*/engine.log" in ended.value.remedy
    assert list(made.store.entries()) == ["s0"]


def test_a_job_that_is_lost_twice_ends_it_though_engines_are_left(
    stage: Callable[..., Stage],
) -> None:
    made = stage(5, 3)
    for engine in (1, 2):
        made.fleet.up(engine)
    made.fleet.script += [(1, Lost("killed")), (2, Want()), (2, Lost("killed too"))]
    with pytest.raises(CouldNotRun, match=r"s0 was lost twice: by engine 1 \(killed\), then by"):
        made.dispatch.run()


@pytest.mark.parametrize(
    "error",
    [
        CheckFailed("rank 1 saw other tokens"),
        IntegrityError("read back differently"),
        UsageError("no such setting"),
        CouldNotRun("No space left on device", remedy="free disk space"),
        OSError(28, "No space left on device"),
    ],
)
def test_an_engines_own_error_ends_it_as_itself(
    stage: Callable[..., Stage], error: Exception
) -> None:
    made = stage(3, 2)
    made.fleet.up(1)
    made.fleet.up(2)
    made.fleet.script.append((2, Failed(error)))
    with pytest.raises(type(error)) as ended:
        made.dispatch.run()
    assert ended.value is error
    assert "engine 2 on node2 ends the extraction" in said(made)


@pytest.mark.parametrize("begun", [False, True])
def test_a_denied_engine_gets_no_work(
    stage: Callable[..., Stage], ask: list[Any], *, begun: bool
) -> None:
    made = stage(3, 2)
    if begun:
        made.fleet.up(1)
    made.fleet.up(2, "other")
    with pytest.raises(CheckFailed) as denied:
        made.dispatch.run()
    assert str(denied.value).startswith("engine 2 on node2: the gate denies ")
    assert ("the shards made so far are kept" in str(denied.value)) == begun
    assert ("nothing was extracted" in str(denied.value)) == (not begun)
    assert made.fleet.told == [(1, "s0")] * begun
    assert ask[-1] == "other"


def test_engines_that_differ_are_asked_about_apart(
    stage: Callable[..., Stage], ask: list[Any]
) -> None:
    made = stage(3, 3)
    for engine, device in ((1, "a"), (2, "b"), (3, "a")):
        made.fleet.up(engine, device)
        made.fleet.makes(engine, wants=False)
    made.dispatch.run()
    assert ask == ["a", "a", "b", "b", "a"]


@pytest.mark.parametrize(
    "changed", [{"ids": ["c9"]}, {"partial": "../s0.partial"}, {"partial": "s0/../x.partial"}]
)
def test_what_was_not_ordered_is_not_recorded(
    stage: Callable[..., Stage], changed: dict[str, Any]
) -> None:
    made = stage(1, 1)
    made.fleet.up(1)
    made.fleet.makes(1, **changed)
    with pytest.raises(IntegrityError, match="engine 1 on node1 delivered other captures as s0"):
        made.dispatch.run()
    assert made.files() == {}
    assert not made.store.manifest.exists()


def test_a_folder_that_is_not_shared_is_named(stage: Callable[..., Stage]) -> None:
    made = stage(1, 1)
    made.fleet.up(1)
    made.fleet.makes(1, partial="elsewhere.partial")
    with pytest.raises(CouldNotRun, match=r"wrote elsewhere\.partial, which is not in") as ended:
        made.dispatch.run()
    assert "same path on every node" in ended.value.remedy


def test_a_missed_audit_stops_it(stage: Callable[..., Stage]) -> None:
    made = stage(3, 1)
    made.audit.misses = 2
    made.fleet.up(1)
    made.fleet.makes(1)
    made.fleet.makes(1)
    made.fleet.script.pop()
    made.dispatch.run()
    assert list(made.store.entries()) == ["s0", "s1"]


def test_progress_of_a_lost_engine_counts_no_more(console: Console) -> None:
    with engine_lines(console, 20, done=4) as lines:
        for engine in (1, 2):
            lines.started(engine, "node")
        lines.advance(1, 3, 300, "fast")
        lines.made(1, 3)
        lines.advance(1, 2, 200, "fast")
        lines.advance(2, 5, 500, "slow")
        lines.lost(1)
        lines.lost(3)  # never started
    told: Sequence[str] = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert told[0].startswith("captured: 12 of 20, ")
    assert told[1:] == ["  engine 1 on node: 1 shards, lost", "  engine 2 on node: 0 shards, slow"]


def test_progress_is_one_live_line_an_engine() -> None:
    calls: list[Any] = []
    live = SimpleNamespace(
        add_task=lambda title, **_: calls.append(title) or len(calls) - 1,
        update=lambda task, **changed: calls.append((task, changed)),
    )
    lines = EngineLines(None, 9, 1, live)  # type: ignore[arg-type]
    lines.started(1, "gpu7")
    lines.advance(1, 2, 10, "")
    assert calls[:2] == ["captured", "engine 1 on gpu7"]
    assert [(task, changed.get("advance")) for task, changed in calls[2:]] == [(0, 2), (1, None)]


def test_progress_reaches_the_user(stage: Callable[..., Stage]) -> None:
    made = stage(1, 1)
    made.fleet.up(1)
    made.fleet.script.append((1, Progress(1, 200, "7 tokens/s, 1 MiB staged")))
    made.fleet.makes(1, wants=False)
    made.dispatch.run()
    made.dispatch._lines.finish()
    assert "captured: 1 of 1, " in said(made)
    assert "engine 1 on node1: 1 shards, 7 tokens/s, 1 MiB staged" in said(made)

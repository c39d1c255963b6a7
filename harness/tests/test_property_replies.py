"""``collect`` under drawn faults: a call's own values of the ranks asked, or who is at fault.

The stand-in executor has no call ids: whatever lies in a rank's queue is taken for its reply. The
same property is put to callers that trust it, and must find them out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from truetap.conformance.strategies import Fault, FaultSchedule, FaultyCall, examples, faults
from truetap.harness import collect as module
from truetap.harness import envelope
from truetap.harness.collect import EngineUnusable, collect, readmit
from truetap.harness.errors import CouldNotRun, TruetapError

FIND = settings(max_examples=3000)


class FaultyEngine:
    """A stand-in executor, made anew when it is given up, whose ranks do what a call's faults say.

    ``faulty``: ranks at fault in the present executor's life, of calls that have begun.
    """

    def __init__(self, fakes: SimpleNamespace, world_size: int) -> None:
        self._fakes, self._world_size = fakes, world_size
        self.renew()

    def renew(self) -> None:
        """Start a new engine in place of one that cannot be used any more."""
        self.executor = self._fakes.Executor(self._world_size)
        self.faulty: set[int] = set()
        self._faults: dict[int, Fault] = {}
        self._last: dict[int, Any] = {}
        self._twice: set[int] = set()
        for worker in self.executor.workers:
            worker.fault = lambda reply, rank=worker.rank: self._changed(rank, reply)
            worker.behaviour["act"] = lambda *a, rank=worker.rank: self._act(rank, *a)
            worker.truetap_collect = self._dying(worker.rank, worker.truetap_collect)
        run = self.executor.run

        def run_and_say_again(rank: int) -> None:
            run(rank)
            if rank in self._twice:
                self._twice.discard(rank)
                self.executor.replies[rank].append(self.executor.replies[rank][-1])

        self.executor.run = run_and_say_again

    def begin(self, call: FaultyCall) -> None:
        """Let late ranks catch up, and set what goes wrong now."""
        for rank in sorted(self.executor.held):
            self._faults = {}
            self.executor.held.discard(rank)
            self.executor.run(rank)
        self._faults = dict(call.faults)
        self.executor.held = {r for r, fault in call.faults.items() if fault.kind == "late"}
        self.faulty |= self.executor.held

    def _act(self, rank: int, tag: int, tensors: bool) -> Any:
        if self._kind(rank) == "raises":
            self.faulty.add(rank)
            raise ValueError("so it was drawn")
        return value(rank, tag, tensors)

    def _dying(self, rank: int, plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def called(request: Any) -> Any:
            if self._kind(rank) == "dies":
                self.faulty.add(rank)
                raise OSError("so it was drawn")
            return plain(request)

        return called

    def _changed(self, rank: int, reply: dict[str, Any]) -> Any:
        sent = self._sent(rank, reply)
        if sent != reply:
            self.faulty.add(rank)
        self._last[rank] = reply
        return sent

    def _sent(self, rank: int, reply: dict[str, Any]) -> Any:
        fault = self._faults.get(rank)
        if fault is None:
            return reply
        if fault.kind == "junk":
            return fault.value
        if fault.kind == "stale":
            return self._last.get(rank, reply)
        if fault.kind == "twice":
            self._twice.add(rank)
            self.faulty.add(rank)
        if fault.kind != "altered":
            return reply
        changed = {k: v for k, v in reply.items() if k != fault.field}
        return changed if fault.value is None else changed | {fault.field: fault.value}

    def _kind(self, rank: int) -> str:
        return self._faults[rank].kind if rank in self._faults else ""


def value(rank: int, tag: int, tensors: bool) -> Any:
    return np.array([rank, tag]) if tensors else {"rank": rank, "call": tag}


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and np.array_equal(one, other)


Call = Callable[[Any, int, FaultyCall], dict[int, Any]]
"""How a caller asks: ``call(executor, tag, what)`` gives values by rank, or raises."""


def by_collect(executor: Any, tag: int, call: FaultyCall) -> Any:
    return collect(executor, "act", (tag, call.tensors), ranks=call.ranks)


def follow(
    fakes: SimpleNamespace,
    schedule: FaultSchedule,
    call: Call = by_collect,
    again: Callable[[Any], None] = readmit,
    *,
    told: bool = True,
) -> Counter[str]:
    """Make all calls of ``schedule``; return how often each came to what end.

    After a failure ``again`` is asked; an engine that it refuses is replaced. AssertionError if a
    call returns anything but its own values of just the ranks asked, or (``told``) fails with an
    error that names no rank at fault.
    """
    engine, ends = FaultyEngine(fakes, schedule.world_size), Counter[str]()
    for tag, what in enumerate(schedule.calls):
        engine.begin(what)
        values, failed = outcome(call, engine.executor, tag, what)
        if failed is not None:
            names, faulty = named(failed), sorted(engine.faulty)
            assert not told or names & engine.faulty, (
                f"call {tag} names ranks {sorted(names)}, at fault are {faulty}: {failed}\n"
                f"{schedule}"
            )
            ends[type(failed).__name__] += 1
            try:
                again(engine.executor)
                ends["readmitted"] += 1
            except EngineUnusable:
                engine.renew()
            continue
        asked = range(schedule.world_size) if what.ranks is None else what.ranks
        assert list(values) == list(asked), (
            f"call {tag} gives values of ranks {list(values)}\n{schedule}"
        )
        for rank in asked:
            due = value(rank, tag, what.tensors)
            assert same(values[rank], due), (
                f"call {tag} gives {values[rank]} as rank {rank}'s\n{schedule}"
            )
        ends["after a fault" if engine.faulty else "values"] += 1
    return ends


def outcome(call: Call, executor: Any, tag: int, what: FaultyCall) -> Any:
    """Return what the call gives, and how it failed: one of them is empty."""
    try:
        return call(executor, tag, what), None
    except TruetapError as error:
        return {}, error


def named(error: TruetapError) -> set[int]:
    """Return the ranks that an error names, as data or else in words."""
    if ranks := getattr(error, "ranks", ()):
        return set(ranks)
    return {int(rank) for rank in re.findall(r"(?:ranks?|reply) (\d+)", str(error))}


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.call_folder, "_MEMORY", tmp_path)


def by_force(executor: Any) -> None:
    """Readmit an engine whose queues may hold anything."""
    module._standing(executor).failure = ""


def test_no_fault_gives_a_wrong_value_or_a_nameless_error(
    fakes: SimpleNamespace, tmp_path: Path
) -> None:
    ends = Counter[str]()

    @settings(max_examples=max(150, examples(150)))  # with fewer not every end is reached
    @given(faults())
    def holds(schedule: FaultSchedule) -> None:
        ends.update(follow(fakes, schedule))

    holds()
    for end in ("values", "after a fault", "readmitted", "WorkerFailed", "DeadlinePassed"):
        assert ends[end] > 5, ends
    for end in ("ReplyRefused", "EngineUnusable"):
        assert ends[end] > 5, ends
    assert list(tmp_path.iterdir()) == []


def test_nor_does_an_engine_that_is_used_on_all_the_same(fakes: SimpleNamespace) -> None:
    """The nonce alone: whatever its queues hold, it deceives nobody."""
    ends = Counter[str]()

    @given(faults())
    def holds(schedule: FaultSchedule) -> None:
        ends.update(follow(fakes, schedule, again=by_force, told=False))

    holds()
    assert ends["after a fault"] > examples(5), ends


# ---- mutants: callers that trust the transport


def by_order(executor: Any, tag: int, call: FaultyCall) -> Any:
    """As everybody calls: one reply a rank, in rank order, so it must be ours."""
    request = {"nonce": "", "version": 1, "method": "act", "ranks": None, "folder": "/nowhere"}
    request |= {"arguments": module.parcel.take_apart(((tag, False), {}), "")[0], "sha256": None}
    try:
        replies = executor.collective_rpc("truetap_collect", timeout=60, args=(request,))
        values = [reply["payload"]["value"] for reply in replies]
        back = [module.parcel.unpack(one, Path("/nowhere"), None) for one in values]
    except Exception as error:
        raise CouldNotRun(str(error)) from None
    return {r: back[r] for r in (range(len(back)) if call.ranks is None else call.ranks)}


def of_everybody(executor: Any, tag: int, call: FaultyCall) -> Any:
    return collect(executor, "act", (tag, call.tensors))


def nameless(executor: Any, tag: int, call: FaultyCall) -> Any:
    try:
        return by_collect(executor, tag, call)
    except CouldNotRun:
        raise CouldNotRun("a worker failed") from None


def partial(executor: Any, tag: int, call: FaultyCall) -> Any:
    """Make do with the ranks that did answer."""
    try:
        return by_collect(executor, tag, call)
    except module.WorkerFailed as failed:
        ranks = [rank for rank in range(len(executor.workers)) if rank not in failed.ranks]
        return {rank: value(rank, tag, call.tensors) for rank in ranks}


@pytest.mark.parametrize(
    ("caller", "said", "calls"),
    [
        (by_order, "as rank", 2),
        (of_everybody, "gives values of ranks", 1),
        (nameless, "names ranks []", 1),
        (partial, "gives values of ranks", 1),
    ],
)
def test_the_same_property_finds_a_trusting_caller(
    fakes: SimpleNamespace, caller: Call, said: str, calls: int
) -> None:
    @FIND
    @given(faults())
    def holds(schedule: FaultSchedule) -> None:
        plain = FaultSchedule(
            schedule.world_size, tuple(FaultyCall(c.ranks, c.faults) for c in schedule.calls)
        )
        again = readmit if caller is not by_order else lambda _: None
        follow(fakes, plain, caller, again, told=caller is nameless)

    with pytest.raises(AssertionError) as found:
        holds()
    complaint, _, smallest = str(found.value).partition("\n")
    assert said in complaint, f"{complaint}\n{smallest}"
    assert len(re.findall(r"^ *call \d", smallest, re.MULTILINE)) == calls, smallest


def test_it_finds_a_call_out_whose_nonce_is_not_looked_at(
    fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = envelope.problems

    def lenient(replies: Any, **asked: Any) -> list[str]:
        return [one for one in plain(replies, **asked) if "answers another call" not in one]

    monkeypatch.setattr(module.envelope, "problems", lenient)

    @FIND
    @given(faults())
    def holds(schedule: FaultSchedule) -> None:
        follow(fakes, schedule, again=by_force, told=False)

    with pytest.raises(AssertionError, match=r"call \d gives .* as rank \d's") as found:
        holds()
    assert len(re.findall(r"^ *call \d,", str(found.value), re.MULTILINE)) == 2, found.value

"""Calls, failures and delays in any order: what is returned is this call's, or nothing is.

The same machine drives a caller without nonces over the same transport, and must find it out.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from truetap.conformance import strategies
from truetap.harness import collect as module
from truetap.harness.collect import CollectFailed, EngineUnusable, WorkerFailed, collect, readmit

RUN = settings(
    max_examples=strategies.examples(150),
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow],
)


def machine(fakes: SimpleNamespace, call: Any, again: Any) -> type[RuleBasedStateMachine]:
    """Return a machine that drives one engine by ``call(engine, tag, ranks)``.

    ``call`` returns ``{rank: (rank, tag)}`` or raises; after a failure ``again(engine)`` says
    whether calls are tried on.
    """

    class Calls(RuleBasedStateMachine):
        @initialize(world_size=st.sampled_from([1, 2, 4, 8]))
        def start(self, world_size: int) -> None:
            self.engine = fakes.Executor(world_size)
            self.world_size = world_size
            self.failing: set[int] = set()
            self.calls = 0
            for worker in self.engine.workers:
                worker.behaviour["act"] = lambda tag, worker=worker: self.answer(worker.rank, tag)

        def answer(self, rank: int, tag: int) -> Any:
            if rank in self.failing:
                raise ValueError(f"rank {rank} fails")
            return rank, tag

        @rule(data=st.data())
        def call_some(self, data: st.DataObject) -> None:
            ranks = data.draw(
                st.none() | st.lists(st.integers(0, self.world_size - 1), unique=True)
            )
            self.calls += 1
            try:
                values = call(self.engine, self.calls, ranks)
            except (CollectFailed, RuntimeError, TimeoutError):
                again(self.engine)
                return
            asked = range(self.world_size) if ranks is None else sorted(ranks)
            assert list(values) == list(asked), "other ranks, or in another order"
            stale = {rank for rank in asked if values[rank] != (rank, self.calls)}
            assert not stale, f"stale replies of ranks {stale}"
            assert not self.failing, "a failing rank went unseen"

        @rule(data=st.data())
        def fail(self, data: st.DataObject) -> None:
            """A rank raises from now on."""
            self.failing.add(data.draw(st.integers(0, self.world_size - 1)))

        @rule()
        def heal(self) -> None:
            self.failing.clear()

        @rule(data=st.data())
        def hold(self, data: st.DataObject) -> None:
            """A rank that is late from now on: calls run into their deadline."""
            self.engine.held.add(data.draw(st.integers(0, self.world_size - 1)))

        @rule()
        def catch_up(self) -> None:
            """All late ranks answer what they were sent; nobody waits for it any more."""
            self.engine.held.clear()
            for rank in range(self.world_size):
                self.engine.run(rank)

        @rule()
        def drain(self) -> None:
            """Throw away what lies in the queues, as some releases do after a failure."""
            for queue in self.engine.replies:
                queue.clear()

        @rule()
        def steal(self) -> None:
            """Lose the oldest reply of a queue, if there is one."""
            for queue in self.engine.replies:
                if queue:
                    queue.popleft()
                    return

    return Calls


def by_nonce(engine: Any, tag: int, ranks: Any) -> Any:
    return collect(engine, "act", (tag,), ranks=ranks)


def without_nonce(engine: Any, tag: int, ranks: Any) -> Any:
    """As everybody calls: one reply per rank, in rank order, so it must be ours."""
    replies = engine.collective_rpc("act", timeout=60, args=(tag,))
    asked = range(len(replies)) if ranks is None else sorted(ranks)
    return {rank: replies[rank] for rank in asked}


def test_no_order_of_failures_gives_a_wrong_value(
    fakes: SimpleNamespace, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.call_folder, "_MEMORY", tmp_path)
    seen = {"values": 0, "readmitted": 0, "refused": 0}

    def call(engine: Any, tag: int, ranks: Any) -> Any:
        values = by_nonce(engine, tag, ranks)
        seen["values"] += 1
        return values

    def again(engine: Any) -> None:
        try:
            readmit(engine)
            seen["readmitted"] += 1
        except EngineUnusable:
            seen["refused"] += 1

    run_state_machine_as_test(machine(fakes, call, again), settings=RUN)
    assert all(count > strategies.examples(20) for count in seen.values()), (
        f"the machine did not come far: {seen}"
    )
    assert list(tmp_path.iterdir()) == []


def test_readmission_of_everything_would_still_give_no_wrong_value(
    fakes: SimpleNamespace, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nonce alone: even an engine whose queues hold stale replies cannot deceive us."""
    monkeypatch.setattr(module.call_folder, "_MEMORY", tmp_path)
    refused = []

    def call(engine: Any, tag: int, ranks: Any) -> Any:
        try:
            return by_nonce(engine, tag, ranks)
        except module.ReplyRefused as error:
            refused.append(str(error))
            raise

    def again(engine: Any) -> None:
        module._standing(engine).failure = ""

    run_state_machine_as_test(machine(fakes, call, again), settings=RUN)
    assert any("answers another call" in text for text in refused)


FIND = settings(RUN, max_examples=2000, report_multiple_bugs=False, phases=[Phase.generate])


def test_the_same_machine_finds_a_caller_without_nonces_out(fakes: SimpleNamespace) -> None:
    with pytest.raises(AssertionError, match="stale replies of ranks"):
        run_state_machine_as_test(machine(fakes, without_nonce, lambda _: None), settings=FIND)


def test_the_same_machine_finds_a_nonce_out_that_is_always_the_same(
    fakes: SimpleNamespace, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.call_folder, "_MEMORY", tmp_path)
    monkeypatch.setattr(module.envelope, "new_nonce", lambda: "0" * 16)

    def again(engine: Any) -> None:
        module._standing(engine).failure = ""

    with pytest.raises(AssertionError, match="stale replies of ranks"):
        run_state_machine_as_test(machine(fakes, by_nonce, again), settings=FIND)


def test_the_plainest_history_by_hand(
    fakes: SimpleNamespace, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 raises through the executor, and rank 1's reply stays for the next call."""
    monkeypatch.setattr(module.call_folder, "_MEMORY", tmp_path)
    engine = fakes.Executor(2)
    engine.workers[0].behaviour["act"] = lambda tag: 1 // (tag - 1)
    engine.workers[1].behaviour["act"] = lambda tag: (1, tag)
    with pytest.raises(RuntimeError):
        without_nonce(engine, 1, None)
    assert without_nonce(engine, 2, None) == {0: 1, 1: (1, 1)}, "an answer to the call before"
    engine = fakes.Executor(2)
    engine.workers[0].behaviour["act"] = lambda tag: 1 // (tag - 1)
    engine.workers[1].behaviour["act"] = lambda tag: (1, tag)
    with pytest.raises(WorkerFailed):
        by_nonce(engine, 1, None)
    readmit(engine)
    assert by_nonce(engine, 2, None) == {0: 1, 1: (1, 2)}

"""What a release's executors do when something goes wrong, found by running the release's code.

``failures(source)`` gives, for each executor, values of these words:

``worker_raises``, ``missing_method``
    what the caller gets where a worker's method raises, or no worker has the method: ``original``
    (the very exception), ``E_with_text`` (class E, of the worker's exception only the text) or
    ``E`` (another exception of class E)
``after_rank0_raises``, ``after_late_reply``
    ``raised`` by the call in which rank 0 raised, or rank 1 was too late for the timeout, and what
    the ``next`` call returns: ``fresh`` (only replies to it), ``stale_rank_1`` (rank 1's reply to
    the earlier call in the place of the one to this call), ``raises_E`` or ``never_replies``
``after_rank0_raises_fault_tolerant``
    the same with ``enable_fault_tolerance``; null where the executor does not read that setting
``silent_rank_raises``
    rank 0 is asked, rank 1 raises: ``not_reported`` or ``raises_E``
``negative_timeout``
    the time left that reaches a queue when a call's timeout is over before its first read:
    ``passed_on`` (a negative number) or ``clamped`` (0)
``rank_out_of_range``
    when the call with rank W raises: ``after_the_workers_ran``, ``before_anything_was_sent``;
    ``not_accepted`` where no rank can be named
``unpicklable_reply``
    ``kills_the_worker_loop`` or ``reported`` (the caller's exception)
``timeout``
    what a worker that is too late for the timeout means: ``raises_E`` or ``ignored``
``async_output``
    a blocking call whose worker returns an unfinished ``AsyncModelRunnerOutput``: ``unresolved``
    (the object itself) or ``resolved``; null where the release has no such class
``worker_raises_non_block``
    where the exception is: ``in_the_future``, ``in_a_list_of_futures`` or ``raises_E``
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from truetap.harness.surface import standins
from truetap.harness.surface.replies import Bench, Raised, benches
from truetap.harness.surface.standins import (
    MISSING_METHOD,
    WORLD_SIZE,
    Cluster,
    Hang,
    Token,
    Unpicklable,
    WorkerFault,
)
from truetap.harness.surface.strict import NotUnderstood, bare, section
from truetap.harness.surface.wheel import Source

_UNFINISHED = ("vllm.v1.outputs", "AsyncModelRunnerOutput")


@section
def failures(source: Source) -> dict[str, Any]:
    """Return executor -> event -> what happens; executors that the release lacks are absent."""
    return {bench.name: _of_executor(bench) for bench in benches(source)}


def _of_executor(bench: Bench) -> dict[str, Any]:
    if bench.multiprocess:
        return _multiprocess(bench)
    return _local(bench) if bench.local else {"timeout": _ray_timeout(bench)}


def _multiprocess(bench: Bench) -> dict[str, Any]:
    return {
        "after_late_reply": _after_late_reply(bench),
        "after_rank0_raises": _after_rank0_raises(bench, fault_tolerant=False),
        "after_rank0_raises_fault_tolerant": _after_rank0_raises(bench, fault_tolerant=True),
        "negative_timeout": _negative_timeout(bench),
        "missing_method": _missing_method(bench),
        "rank_out_of_range": _rank_out_of_range(bench),
        "silent_rank_raises": _silent_rank_raises(bench),
        "unpicklable_reply": _unpicklable_reply(bench),
        "worker_raises": _worker_raises(bench),
    }


def _local(bench: Bench) -> dict[str, Any]:
    with bench.session() as (executor, _):
        late = bench.call(executor.collective_rpc, "answer", -1.0, (1,))
    return {
        "async_output": _async_output(bench),
        "missing_method": _missing_method(bench),
        "timeout": _raises(late) or "ignored",
        "worker_raises": _worker_raises(bench),
        "worker_raises_non_block": _worker_raises_non_block(bench),
    }


def _after_rank0_raises(bench: Bench, *, fault_tolerant: bool) -> dict[str, str] | None:
    with bench.session() as (executor, cluster):
        config = standins.config(fault_tolerance=fault_tolerant)
        executor.vllm_config = config
        cluster.workers[0].raises_on = (1,)
        first = bench.call(executor.collective_rpc, "answer", args=(1,))
        if fault_tolerant and "enable_fault_tolerance" not in config.parallel_config.reached:
            return None
        return {"raised": _name(first), "next": _next(bench, executor)}


def _after_late_reply(bench: Bench) -> dict[str, str]:
    with bench.session() as (executor, cluster):
        cluster.late = {1}
        first = bench.call(executor.collective_rpc, "answer", 5.0, (1,))
        cluster.late = set()
        return {"raised": _name(first), "next": _next(bench, executor)}


def _next(bench: Bench, executor: Any) -> str:
    """Return what a call gets that follows one that failed."""
    reply = bench.call(executor.collective_rpc, "answer", args=(2,))
    if isinstance(reply, Raised):
        return _raises(reply) or ""
    if reply == [Token(rank, 2) for rank in range(WORLD_SIZE)]:
        return "fresh"
    if reply == [Token(0, 2), Token(1, 1)]:
        return "stale_rank_1"
    raise NotUnderstood(f"the call after a failed one gives {reply!r}")


def _silent_rank_raises(bench: Bench) -> str:
    named: dict[str, Any] = {"unique_reply_rank": 0}
    if not bench.accepts(**named):
        named = {"rank0_reply_only": True}
    with bench.session() as (executor, cluster):
        cluster.workers[1].raises_on = (1,)
        reply = bench.call(executor.collective_rpc, "answer", args=(1,), **named)
        # The executor may return before rank 1 has run; its fault must have happened.
        cluster.run()
        if not cluster.workers[1].calls:
            raise NotUnderstood("a rank that was not asked does not run the method")
        return _raises(reply) or "not_reported"


def _negative_timeout(bench: Bench) -> str:
    with bench.session() as (executor, cluster):
        cluster.on_send = lambda: setattr(bench.clock, "now", bench.clock.now + 60.0)
        bench.call(executor.collective_rpc, "answer", 1.0, (1,))
        seen = cluster.timeouts[0] if cluster.timeouts else None
    if seen is None or seen > 0:
        raise NotUnderstood(f"a queue is read for {seen} s when the deadline is past")
    return "passed_on" if seen < 0 else "clamped"


def _rank_out_of_range(bench: Bench) -> str:
    if not bench.accepts(unique_reply_rank=WORLD_SIZE):
        return "not_accepted"
    with bench.session() as (executor, cluster):
        reply = bench.call(
            executor.collective_rpc, "answer", args=(1,), unique_reply_rank=WORLD_SIZE
        )
        cluster.run()
        if not isinstance(reply, Raised):
            raise NotUnderstood(f"a rank out of range gives {reply!r}")
        ran = any(worker.calls for worker in cluster.workers)
        return "after_the_workers_ran" if ran else "before_anything_was_sent"


def _unpicklable_reply(bench: Bench) -> str:
    with bench.session() as (executor, cluster):
        reply = bench.call(executor.collective_rpc, "give", args=(Unpicklable(),))
        if cluster.died:
            return "kills_the_worker_loop"
        if isinstance(reply, Raised) and not isinstance(reply.error, Hang):
            return "reported"
    raise NotUnderstood(f"a reply that cannot be pickled gives {reply!r}")


def _worker_raises(bench: Bench) -> str:
    with bench.session() as (executor, behind):
        for worker in behind.workers if isinstance(behind, Cluster) else [behind]:
            worker.raises_on = (1,)
        return _name(bench.call(executor.collective_rpc, "answer", args=(1,)))


def _missing_method(bench: Bench) -> str:
    with bench.session() as (executor, _):
        return _name(bench.call(executor.collective_rpc, MISSING_METHOD))


def _worker_raises_non_block(bench: Bench) -> str:
    with bench.session() as (executor, worker):
        worker.raises_on = (1,)
        reply = bench.call(executor.collective_rpc, "answer", args=(1,), non_block=True)
        if isinstance(reply, Raised):
            return _raises(reply) or ""
        future = reply[0] if isinstance(reply, list) and len(reply) == 1 else reply
        if isinstance(future, Future) and isinstance(future.exception(0), WorkerFault):
            return "in_the_future" if future is reply else "in_a_list_of_futures"
    raise NotUnderstood(f"a worker that raises gives {reply!r}")


def _async_output(bench: Bench) -> str | None:
    if not bench.linker.has(*_UNFINISHED):
        return None
    unfinished = bench.linker.get(*_UNFINISHED)
    value = bare(type("Unfinished", (unfinished,), {"get_output": lambda _: "done"}))
    with bench.session() as (executor, _):
        reply = bench.call(executor.collective_rpc, "give", args=(value,))
    if reply == ["done"]:
        return "resolved"
    if isinstance(reply, list) and len(reply) == 1 and reply[0] is value:
        return "unresolved"
    raise NotUnderstood(f"an AsyncModelRunnerOutput gives {reply!r}")


def _ray_timeout(bench: Bench) -> str:
    with bench.session() as (executor, ray):
        ray.late = {1}
        reply = bench.call(executor.collective_rpc, "answer", 5.0, (1,))
        if isinstance(reply, Raised) and isinstance(reply.error, Hang):
            return "ignored"
        return _raises(reply) or "ignored"


def _raises(reply: Any) -> str | None:
    """Return the word for what a call raised; None if it returned."""
    if not isinstance(reply, Raised):
        return None
    if isinstance(reply.error, Hang):
        return "never_replies"
    return f"raises_{type(reply.error).__name__}"


def _name(reply: Any) -> str:
    if not isinstance(reply, Raised):
        raise NotUnderstood(f"a call that must fail gives {reply!r}")
    error = reply.error
    if isinstance(error, Hang):
        return "never_replies"
    if isinstance(error, WorkerFault):
        return "original"
    kind, text = type(error).__name__, str(error)
    carried = "broken on purpose" in text or MISSING_METHOD in text
    return f"{kind}_with_text" if carried else kind

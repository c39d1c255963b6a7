"""What ``collective_rpc`` of a release returns, found by running the release's own code.

``replies(source)`` gives, for every executor, mode and rank key, one shape:

``list_per_rank``
    ``[R0, ..., R(W-1)]`` in rank order
``list_of_one_rank``, ``bare``
    ``[Rk]`` and ``Rk``, k the rank that was named
``list_of_one_local``
    ``[R]`` of the one local worker, whatever the world size is
``list_of_futures``, ``list_of_one_future``
    ``[Future(R0), ...]``; ``[Future(Rk)]``, or of the local worker
``future_of_list``, ``future_of_list_of_one``, ``future_of_bare``
    the same within one future; a list of one is of the rank that was named, or local
``aggregate``, ``future_of_aggregate``
    one object that the aggregator made of all replies
``never_replies``, ``future_never_resolves``, ``list_of_one_future_never_resolves``
    a wait for ever if no timeout was given
``raises_E``, ``future_raises_E``
    the call raises, or resolving its future does; E is a class of Python's

Modes: ``default`` passes no more than the rank; ``non_block``, ``single_value`` and
``rank0_reply_only`` pass that argument as True; ``aggregator`` passes ``kv_output_aggregator``;
``non_block_io_pool`` is ``non_block`` on an executor with an I/O thread pool, and there only where
the executor may have one and takes ``non_block``. Rank keys are the values of
``unique_reply_rank``: ``absent`` is not passed, ``W`` is the world size, one past the last rank.

The multiprocess executors and Ray's run with two workers, the others with their one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from truetap.harness.surface import standins
from truetap.harness.surface.definitions import own_class
from truetap.harness.surface.link import Linker
from truetap.harness.surface.standins import (
    WORLD_SIZE,
    AggregateReply,
    Aggregator,
    Clock,
    Cluster,
    Hang,
    Ray,
    Token,
    Worker,
)
from truetap.harness.surface.strict import NotUnderstood, bare, section
from truetap.harness.surface.wheel import Source

RANKS: dict[str, dict[str, int | None]] = {
    "absent": {},
    "None": {"unique_reply_rank": None},
    "0": {"unique_reply_rank": 0},
    "1": {"unique_reply_rank": 1},
    "-1": {"unique_reply_rank": -1},
    "W": {"unique_reply_rank": WORLD_SIZE},
}
MODES: dict[str, dict[str, object]] = {
    "default": {},
    "non_block": {"non_block": True},
    "non_block_io_pool": {"non_block": True},
    "single_value": {"single_value": True},
    "non_block_single_value": {"non_block": True, "single_value": True},
    "aggregator": {"kv_output_aggregator": Aggregator()},
    "non_block_aggregator": {"non_block": True, "kv_output_aggregator": Aggregator()},
    "rank0_reply_only": {"rank0_reply_only": True},
}
EXECUTORS = {
    "mp": "MultiprocExecutor",
    "uni": "UniProcExecutor",
    "external_launcher": "ExecutorWithExternalLauncher",
    "ray": "RayDistributedExecutor",
    "ray_v2": "RayExecutorV2",
}
OPTIONAL = {"ray", "ray_v2"}
"""Executors that a release may lack; one without any of the others is not understood."""

FOLDER = "vllm/v1/executor"
_WORKER_PROCS = {"mp": "WorkerProc", "ray_v2": "RayWorkerProc"}
_ONLY = {
    **dict.fromkeys(EXECUTORS.values(), ("collective_rpc",)),
    **dict.fromkeys(_WORKER_PROCS.values(), ("worker_busy_loop",)),
}
_IN_A_FUTURE = {
    "list_per_rank": "future_of_list",
    "list_of_one_local": "future_of_list_of_one",
    "list_of_one_rank": "future_of_list_of_one",
    "bare": "future_of_bare",
    "aggregate": "future_of_aggregate",
}
_RAISED = (TypeError, IndexError, AttributeError, RuntimeError, AssertionError, ValueError)
_RESOLVE_S = 10.0
"""For futures that a thread pool resolves; those of the release decide for themselves."""


class Bench:
    """One executor class of a release, and fresh instances of it on demand."""

    def __init__(self, source: Source, name: str, module: str) -> None:
        self.name = name
        self.clock = Clock()
        self.ray = Ray()
        self.linker = Linker(source, standins.table(self.clock, self.ray), _ONLY)
        # The worker first: a class is linked with the members that its first subclass wants.
        self._worker_proc = (
            self.linker.get(module, _WORKER_PROCS[name]) if name in _WORKER_PROCS else None
        )
        self._executor = self.linker.get(module, EXECUTORS[name])

    @property
    def local(self) -> bool:
        """Whether the executor has one worker, in its own process."""
        return self.name in {"uni", "external_launcher"}

    @property
    def multiprocess(self) -> bool:
        """Whether replies come through queues, one for each rank."""
        return self._worker_proc is not None

    def accepts(self, **arguments: object) -> bool:
        """Tell whether ``collective_rpc`` has these parameters."""
        try:
            inspect.signature(self._executor.collective_rpc).bind(None, "m", **arguments)
        except TypeError:
            return False
        return True

    @contextmanager
    def session(self, *, io_pool: bool = False) -> Iterator[tuple[Any, Any]]:
        """Yield a fresh executor and what is behind it: ``Cluster``, ``Ray`` or ``Worker``."""
        executor = bare(self._executor)
        pool = ThreadPoolExecutor(max_workers=1) if io_pool else None
        try:
            behind: Cluster | Ray | Worker
            if self._worker_proc is not None:
                behind = Cluster(self._worker_proc)
                standins.prepare_multiprocess(executor, behind, pool)
            elif self.local:
                behind = Worker(0)
                standins.prepare_local(executor, behind)
            else:
                behind = self.ray
                behind.late.clear()
                standins.prepare_ray(executor, behind)
            yield executor, behind
        finally:
            if pool is not None:
                pool.shutdown()

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call code of the release; return its value, or what it raised as ``Raised``."""
        try:
            return function(*args, **kwargs)
        except (Hang, Exception) as error:
            return Raised(error)


def benches(source: Source) -> Iterator[Bench]:
    """Yield a bench for every executor that the release has."""
    for name, cls in EXECUTORS.items():
        homes = [path for path in source.paths(FOLDER) if own_class(source, path, cls)]
        if len(homes) > 1:
            raise NotUnderstood(f"{' and '.join(homes)} both define {cls}")
        if homes:
            yield Bench(source, name, homes[0].removesuffix(".py").replace("/", "."))
        elif name not in OPTIONAL:
            raise NotUnderstood(f"{FOLDER} has no {cls}")


class Raised:
    """That a call raised, which no reply can be mistaken for."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


@section
def replies(source: Source) -> dict[str, Any]:
    """Return executor -> mode -> rank key -> shape; executors that the release lacks are absent."""
    return {
        bench.name: {
            mode: {rank: _shape(bench, mode, rank) for rank in RANKS}
            for mode in MODES
            if mode != "non_block_io_pool" or _may_have_io_pool(bench)
        }
        for bench in benches(source)
    }


def _may_have_io_pool(bench: Bench) -> bool:
    return bench.multiprocess and bench.accepts(non_block=True)


def _shape(bench: Bench, mode: str, rank: str) -> str:
    arguments = {**MODES[mode], **RANKS[rank]}
    asked = arguments.get("unique_reply_rank")
    if mode == "rank0_reply_only":
        asked = 0
    with bench.session(io_pool=mode == "non_block_io_pool") as (executor, _):
        reply = bench.call(executor.collective_rpc, "answer", args=(7,), **arguments)
        if isinstance(reply, Raised) and isinstance(reply.error, TypeError):
            if bench.accepts(**arguments):
                raise _strange(bench, mode, rank, reply)
        elif not bench.accepts(**arguments):
            raise _strange(bench, mode, rank, reply)
        return _Reading(bench, mode, rank, asked).outer(reply)


def _strange(bench: Bench, mode: str, rank: str, reply: Any) -> NotUnderstood:
    seen = repr(reply.error) if isinstance(reply, Raised) else repr(reply)
    return NotUnderstood(
        f"no word for a reply of {EXECUTORS[bench.name]}.collective_rpc, mode {mode}, rank {rank}: "
        f"{seen}"
    )


class _Reading:
    """Puts a name to one reply. Every token says its rank, so nothing is guessed from lengths."""

    def __init__(self, bench: Bench, mode: str, rank: str, asked: Any) -> None:
        self._bench, self._mode, self._rank, self._asked = bench, mode, rank, asked
        self._expected: int = 0 if asked is None else asked

    def outer(self, reply: Any) -> str:
        if isinstance(reply, list) and reply and all(isinstance(each, Future) for each in reply):
            return self._futures(reply)
        if isinstance(reply, Future):
            return self._future(reply)
        return self._plain(reply)

    def _futures(self, reply: list[Future[Any]]) -> str:
        values = [self._resolve(future) for future in reply]
        if len(values) == 1 and isinstance(values[0], Raised):
            if isinstance(values[0].error, Hang):
                return "list_of_one_future_never_resolves"
        elif len(values) == 1 and values[0] == self._token(self._expected):
            return "list_of_one_future"
        elif values == [self._token(rank) for rank in range(WORLD_SIZE)]:
            return "list_of_futures"
        raise _strange(self._bench, self._mode, self._rank, values)

    def _future(self, reply: Future[Any]) -> str:
        value = self._resolve(reply)
        if isinstance(value, Raised):
            if isinstance(value.error, Hang):
                return "future_never_resolves"
            return f"future_{self._plain(value)}"
        shape = self._plain(value)
        if shape not in _IN_A_FUTURE:
            raise _strange(self._bench, self._mode, self._rank, reply)
        return _IN_A_FUTURE[shape]

    def _plain(self, value: Any) -> str:
        if isinstance(value, Raised):
            return self._raised(value)
        asked, every = self._token(self._expected), self._all()
        words: list[tuple[Any, str]] = [(AggregateReply(every, self._expected), "aggregate")]
        if self._bench.local:
            words += [(asked, "bare"), ([asked], "list_of_one_local")]
        elif self._asked is None:
            words += [(every, "list_per_rank")]
        else:
            words += [(asked, "bare"), ([asked], "list_of_one_rank")]
        for known, word in words:
            if type(value) is type(known) and value == known:
                return word
        raise _strange(self._bench, self._mode, self._rank, value)

    def _raised(self, raised: Raised) -> str:
        if isinstance(raised.error, Hang):
            return "never_replies"
        if type(raised.error) in _RAISED:
            return f"raises_{type(raised.error).__name__}"
        raise _strange(self._bench, self._mode, self._rank, raised)

    def _all(self) -> list[Token]:
        return [self._token(rank) for rank in range(WORLD_SIZE)]

    @staticmethod
    def _token(rank: Any) -> Token:
        return Token(rank, 7)

    def _resolve(self, future: Future[Any]) -> Any:
        if type(future) is Future:
            return self._bench.call(future.result, _RESOLVE_S)
        return self._bench.call(future.result)

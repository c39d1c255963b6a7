"""Call a method on every worker of a vLLM engine, and get exactly what it returned.

``collective_rpc`` answers in eighteen shapes, depending on release, executor and mode; replies
carry no call id, tensors lose their data on the way, and the caller may wait for ever. ``collect``
is one call with one meaning on every release from 0.8.5 on:

    llm = LLM(..., worker_extension_cls="my_module.MyWorker")  # a subclass of CollectWorker
    values = collect(llm, "my_method", args=(7,), deadline=60)  # {0: ..., 1: ...}

It uses the plainest mode only, one worker method, requests and replies of builtins that echo the
call's nonce, and files for tensors.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
import time
import weakref
from collections.abc import Awaitable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, overload

from truetap.harness import call_check, call_errors, call_folder, envelope, parcel
from truetap.harness.call_check import RPC, WORKER
from truetap.harness.call_errors import (
    CollectFailed,
    DeadlinePassed,
    EngineUnusable,
    ReplyRefused,
    ValueCannotTravel,
    WorkerFailed,
)
from truetap.harness.collect_worker import VERSION
from truetap.harness.deadline import bounded
from truetap.harness.errors import CouldNotRun, IntegrityError, TruetapError

__all__ = [
    "AsyncEngine",
    "CollectFailed",
    "DeadlinePassed",
    "Engine",
    "EngineUnusable",
    "ReplyRefused",
    "ValueCannotTravel",
    "WorkerFailed",
    "collect",
    "readmit",
]

# How executors of different releases say it.
_NO_METHOD = re.compile(rf"has no attribute '{RPC}'|'{RPC}' is not implemented")


class Engine(Protocol):
    """``LLM``, or an executor: the call returns the replies."""

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = ...,
        args: tuple[Any, ...] = ...,
        kwargs: dict[str, Any] | None = ...,
    ) -> Sequence[Any]:
        """Call ``method`` on every worker."""


class AsyncEngine(Protocol):
    """``AsyncLLM``: the call is a coroutine."""

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = ...,
        args: tuple[Any, ...] = ...,
        kwargs: dict[str, Any] | None = ...,
    ) -> Coroutine[Any, Any, Sequence[Any]]:
        """Call ``method`` on every worker."""


@overload
def collect(
    engine: Engine,
    method: str,
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    ranks: Collection[int] | None = ...,
    deadline: float = ...,
    folder: Path | str | None = ...,
) -> dict[int, Any]: ...


@overload
def collect(
    engine: AsyncEngine,
    method: str,
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    ranks: Collection[int] | None = ...,
    deadline: float = ...,
    folder: Path | str | None = ...,
) -> Awaitable[dict[int, Any]]: ...


def collect(
    engine: Any,
    method: str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    ranks: Collection[int] | None = None,
    deadline: float = 60.0,
    folder: Path | str | None = None,
) -> Any:
    """Call ``method`` on every worker; return the values of ``ranks`` by rank, in rank order.

    ``engine`` is a vLLM ``LLM`` or executor, or an ``AsyncLLM``, for which the result is awaitable.
    Its workers must have ``truetap.harness.collect_worker.CollectWorker`` (or a subclass with the
    methods to be called) as ``worker_extension_cls``. All ranks run the method, whatever ``ranks``
    says (default: all), and an error on any of them is raised. With an external launcher each
    process gets its own rank's value, under its rank.

    Arguments and values may be builtins, nested in any way, tensors (they arrive on the CPU) and
    numpy arrays; they come back with their types, dtypes, shapes and bits, or the call fails.
    Tensors travel by files in a fresh directory under ``folder``: needed only where ranks on other
    hosts must see it, or where shared memory and the temporary directory are too small.

    The call ends within ``deadline`` seconds. Raises ``UsageError`` before anything is sent if
    the call itself is wrong. Any failure after that makes the engine unusable for ``collect``, as
    replies of the failed call may still arrive; see ``readmit``. Not where all workers answered
    and none ran the method.
    """
    call = _Call(engine, method, args, kwargs, ranks, deadline, folder)
    if inspect.iscoroutinefunction(engine.collective_rpc):
        return call.run_async()
    return call.run()


def readmit(engine: Engine | AsyncEngine) -> None:
    """Allow calls again after a failed one, which must have been answered by every rank.

    Only then are no replies of it left in the engine. Raises ``EngineUnusable`` otherwise.
    """
    standing = _standing(engine)
    if standing.failure and not standing.answered:
        raise EngineUnusable(
            f"the engine cannot be readmitted: not every rank is known to have answered the failed "
            f"call, so a later call could get its replies. It was: {standing.failure}",
            method=standing.method,
            remedy="start a new engine",
        )
    standing.failure = ""


@dataclass
class _Standing:
    """What is known of an engine between calls."""

    turn: threading.Lock = field(default_factory=threading.Lock)
    """Replies are matched to calls by their order alone: one call at a time."""
    failure: str = ""
    """The first one; calls of an ``AsyncLLM`` that overlap may add theirs."""
    method: str = ""
    answered: bool = True
    """By every rank, each failed call since the engine was last usable."""

    def fail(self, error: BaseException, method: str, *, answered: bool) -> None:
        if not self.failure:
            self.failure = str(error) if isinstance(error, TruetapError) else repr(error)
            self.method, self.answered = method, True
        self.answered = self.answered and answered


_standings: dict[int, tuple[weakref.ref[Any], _Standing]] = {}
_standings_lock = threading.Lock()


def _standing(engine: Any) -> _Standing:
    key = id(engine)  # by identity: an engine may define equality
    with _standings_lock:
        if key not in _standings:
            forget = weakref.ref(engine, lambda _: _standings.pop(key, None))
            _standings[key] = (forget, _Standing())
        return _standings[key][1]


class _Call:
    """One call, from the check of its arguments to the removal of its folder."""

    def __init__(
        self,
        engine: Any,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        ranks: Collection[int] | None,
        deadline_s: float,
        folder: Path | str | None,
    ) -> None:
        self._deadline_s = call_check.deadline(deadline_s)
        self._ends = time.monotonic() + deadline_s
        self._world_size, self._local = call_check.reach(engine)
        self._engine = engine
        self._method = call_check.method(method)
        self._ranks = call_check.ranks(ranks, self._world_size, local=self._local)
        self._tree, self._tensors = call_check.arguments(args, kwargs)
        self._parent = None if folder is None else Path(folder)
        self._nonce = envelope.new_nonce()
        self._standing = _standing(engine)
        self._sent = False
        self._answered = False  # every rank, with this call's nonce
        self._ran = True  # the method, on some rank; until it is known that it did not

    def run(self) -> dict[int, Any]:
        if not self._standing.turn.acquire(timeout=self._left()):
            raise self._late("another call of this engine was still running")
        try:
            with self._in_folder() as folder:
                # On threads of their own: one that is late with the request must not send it.
                request = (
                    bounded(lambda: self._request(folder), self._left())
                    if self._tensors
                    else self._request(folder)
                )
                return bounded(lambda: self._judged(self._replies(request), folder), self._left())
        finally:
            self._standing.turn.release()

    async def run_async(self) -> dict[int, Any]:
        # Calls may overlap here: AsyncLLM itself matches replies to calls by a number.
        async def exchange() -> dict[int, Any]:
            request = await asyncio.to_thread(self._request, folder)
            replies = await self._replies(request)
            return await asyncio.to_thread(self._judged, replies, folder)

        with self._in_folder() as folder:
            return await asyncio.wait_for(exchange(), self._left())

    def _left(self) -> float:
        return max(0.0, self._ends - time.monotonic())

    @contextmanager
    def _in_folder(self) -> Iterator[Path]:
        if self._standing.failure:
            raise EngineUnusable(
                f"{self._method} was not called: replies of an earlier call may still be on their "
                f"way. It failed: {self._standing.failure}",
                method=self._method,
                remedy="start a new engine, or see truetap.harness.collect.readmit",
            )
        folder = call_folder.make(self._parent, sum(tensor.nbytes for tensor in self._tensors))
        try:
            yield folder
        except BaseException as error:
            told = self._told(error, folder)
            if self._sent and self._ran:
                self._standing.fail(told, self._method, answered=self._answered)
            if told is error:
                raise
            raise told from error
        finally:
            call_folder.remove(folder)

    def _request(self, folder: Path) -> dict[str, Any]:
        return {
            "version": VERSION,
            "nonce": self._nonce,
            "method": self._method,
            "arguments": self._tree,
            "sha256": parcel.write(self._tensors, call_folder.tensors(folder, None)),
            "ranks": self._ranks,
            "folder": str(folder),
        }

    def _replies(self, request: dict[str, Any]) -> Any:
        self._sent = True  # before the clock is read: a caller that gave up has not missed it
        left = self._left()
        if not left:
            raise TimeoutError
        return self._engine.collective_rpc(RPC, timeout=left, args=(request,))

    def _judged(self, replies: Any, folder: Path) -> dict[int, Any]:
        wrong = envelope.problems(
            replies, nonce=self._nonce, world_size=self._world_size, local=self._local
        )
        if wrong:
            raise self._refused("; ".join(wrong))
        self._answered = True
        if errors := {reply["rank"]: reply["error"] for reply in replies if "error" in reply}:
            everywhere = len(errors) == len(replies)
            self._ran = not (everywhere and call_errors.before_the_method(errors))
            raise call_errors.of_workers(self._method, errors, everywhere=everywhere)
        values = {}
        for reply in replies:
            rank, payload = reply["rank"], reply["payload"]
            if self._ranks is not None and rank not in self._ranks:
                continue
            if not payload.keys() >= {"value", "sha256"}:
                raise self._refused(f"rank {rank} was asked for its value and sent none", (rank,))
            try:
                path = call_folder.tensors(folder, rank)
                values[rank] = parcel.unpack(payload["value"], path, payload["sha256"])
            except IntegrityError as error:
                raise self._refused(f"rank {rank}: {error}", (rank,)) from error
        return values

    def _refused(self, why: str, ranks: Collection[int] = ()) -> ReplyRefused:
        return ReplyRefused(
            f"{self._method}: {why}",
            method=self._method,
            ranks=ranks,
            remedy="start a new engine; the same truetap must be installed for all its workers",
        )

    def _told(self, error: BaseException, folder: Path) -> BaseException:
        """Return what the caller is told of ``error``."""
        if isinstance(error, TruetapError) or not isinstance(error, Exception):
            return error
        if not self._sent and isinstance(error, OSError) and not isinstance(error, TimeoutError):
            return CouldNotRun(
                f"{self._method}: its arguments cannot be written: {error}",
                remedy="give folder= a directory with more room",
            )
        missing = call_folder.unfinished(folder, self._world_size)
        failures = call_folder.failures(folder)
        progress = call_errors.progress(missing, self._world_size, failures)
        if isinstance(error, TimeoutError) or not self._left():
            return self._late(progress, missing)
        if _NO_METHOD.search(str(error)):
            return EngineUnusable(
                f"the workers of this engine have no method {RPC}",
                method=self._method,
                remedy=f'start it with worker_extension_cls="{WORKER}" or a subclass of that',
            )
        return EngineUnusable(
            f"{self._method}: the engine failed: {type(error).__name__}: {error} ({progress})",
            method=self._method,
            ranks=missing,
            remedy="see the engine's log, and start a new engine",
        )

    def _late(self, why: str, missing: Collection[int] = ()) -> DeadlinePassed:
        what = "did not end" if self._sent else "was not called"
        return DeadlinePassed(
            f"{self._method} {what} within {self._deadline_s:g} s: {why}",
            method=self._method,
            ranks=missing,
            remedy="start a new engine" if self._sent else "give a longer deadline",
        )

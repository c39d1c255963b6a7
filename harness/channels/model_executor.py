"""A model of vLLM's ``MultiprocExecutor``: worker threads, a queue of replies each, no call ids.

It has the faults of the real one: replies are read rank by rank, an exception or a timeout leaves
the other ranks' replies queued, a silent rank's failure is not seen, a rank out of range is noticed
after the broadcast. It serves to try callers, and the clauses, without an engine.
"""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

from truetap.harness.channel import WORKER
from truetap.harness.probe_worker import ProbeWorker


class ModelExecutor:
    """Answers like ``MultiprocExecutor`` of vLLM 0.11.1 to 0.33.0, or like older ones."""

    def __init__(self, world_size: int, *, named_rank_in_list: bool = False) -> None:
        self.parallel_config = SimpleNamespace(
            world_size=world_size,
            data_parallel_size=1,
            worker_cls="auto",
            distributed_executor_backend="mp",
            worker_extension_cls=WORKER,
        )
        self._in_list = named_rank_in_list
        self._workers = [_Worker(rank, world_size) for rank in range(world_size)]

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Run a worker method on every rank; read the replies in rank order."""
        until = None if timeout is None else time.monotonic() + timeout
        for worker in self._workers:
            worker.calls.put((method, args, kwargs or {}, unique_reply_rank))
        chosen = self._workers if unique_reply_rank is None else [self._workers[unique_reply_rank]]
        replies = []
        for worker in chosen:
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                succeeded, reply = worker.replies.get(timeout=left)
            except queue.Empty:
                raise TimeoutError(f"RPC call to {method} timed out.") from None
            if not succeeded:
                raise RuntimeError(f"Worker failed with error '{reply}'")
            replies.append(reply)
        return replies if unique_reply_rank is None or self._in_list else replies[0]

    def close(self) -> None:
        """Let the worker threads end."""
        for worker in self._workers:
            worker.calls.put(None)


class _Worker(threading.Thread):
    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(daemon=True)
        self.calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.replies: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._probe = ProbeWorker()
        self._probe.rank = rank
        self._probe.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=world_size)
        )
        self.start()

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            method, args, kwargs, reply_rank = call
            try:
                outcome = True, getattr(self._probe, method)(*args, **kwargs)
            except Exception as error:
                outcome = False, str(error)
            if reply_rank is None or reply_rank == self._probe.rank:
                self.replies.put(outcome)

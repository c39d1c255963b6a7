"""What surrounds a release's ``collective_rpc`` when truetap runs it: queues, workers, a clock.

Only this is ours. Who is asked, what is sent, what is read and what is returned is decided by the
release's own code, on both sides: the executor's, and the worker's loop where it has one. Nothing
here waits. A read that would block for ever raises ``Hang``; time is a number that tests move.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Event
from typing import Any, NamedTuple

from truetap.harness.surface.strict import Prepared, Strict, bare, silent

WORLD_SIZE = 2

_PATIENCE = 100
"""Reads of an empty queue, one after the other, that count as waiting for ever."""


MISSING_METHOD = "no_such_method"
"""What the scenarios call that no worker has."""


class Hang(BaseException):
    """The call would never return. Not an ``Exception``: a release must not handle it."""


class Idle(BaseException):
    """A worker has done all that was sent to it."""


class WorkerFault(ValueError):
    """What a worker's method raises in the scenarios; no release knows this type."""


class Token(NamedTuple):
    """A reply that says who gave it, and to which call."""

    rank: int
    call: int


class Unpicklable:
    """A reply that no queue can carry."""

    def __reduce__(self) -> str:
        raise TypeError("cannot pickle 'Unpicklable' object")


class AggregateReply(NamedTuple):
    """What ``Aggregator`` makes of all replies."""

    replies: list[Any]
    rank: int


class Aggregator(Strict):
    """In place of vLLM's ``KVOutputAggregator``; it also starts with ``outputs[output_rank]``."""

    def aggregate(self, outputs: list[Any], output_rank: int = 0) -> AggregateReply:
        """Return one object made of all replies."""
        outputs[output_rank]
        return AggregateReply(outputs, output_rank)


class Clock:
    """Time in seconds, which moves only when somebody moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def read(self) -> float:
        """Return the time."""
        return self.now


class Worker(Strict):
    """The object whose methods are called: one on each rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls = 0
        self.raises_on: tuple[int, ...] = ()
        """Numbers of the calls that raise."""

    def __getattr__(self, name: str) -> Any:
        if name == MISSING_METHOD:
            raise AttributeError(name)
        return super().__getattr__(name)

    def answer(self, call: int) -> Token:
        """Answer call number ``call``, or raise."""
        self.calls += 1
        if call in self.raises_on:
            raise WorkerFault("broken on purpose")
        return Token(self.rank, call)

    def give(self, value: Any) -> Any:
        """Return ``value``."""
        return value


class Cluster(Strict):
    """Workers behind queues, and the executor's ends of those queues.

    A worker runs when the executor reads: it takes everything sent to it through the release's own
    ``worker_busy_loop``. Ranks in ``late`` do not run.
    """

    def __init__(self, worker_proc: type) -> None:
        self.workers = [Worker(rank) for rank in range(WORLD_SIZE)]
        self.late: set[int] = set()
        self.died: dict[int, BaseException] = {}
        self.on_send: Callable[[], None] = lambda: None
        self.timeouts: list[float | None] = []
        self.sent = [_Sent() for _ in self.workers]
        self.replies = [_Replies(self) for _ in self.workers]
        self.handles: list[Any] = [
            Prepared("WorkerProcHandle", rank=rank, worker_response_mq=replies)
            for rank, replies in enumerate(self.replies)
        ]
        self._procs = [
            bare(
                worker_proc,
                rank=rank,
                worker=worker,
                rpc_broadcast_mq=self.sent[rank],
                worker_response_mq=self.replies[rank],
                use_async_scheduling=False,
                mm_receiver_cache=None,
            )
            for rank, worker in enumerate(self.workers)
        ]

    def enqueue(self, message: Any, **_: Any) -> None:
        """Send a message to all workers; the executor calls this its broadcast queue."""
        for sent in self.sent:
            sent.messages.append(message)
        self.on_send()

    def run(self) -> None:
        """Let every worker that is neither late nor dead do what was sent to it."""
        for rank, proc in enumerate(self._procs):
            if rank in self.late or rank in self.died:
                continue
            try:
                proc.worker_busy_loop()
            except Idle:
                continue
            except Exception as error:
                self.died[rank] = error


class _Sent(Strict):
    def __init__(self) -> None:
        self.messages: deque[Any] = deque()

    def dequeue(self, **_: Any) -> Any:
        if not self.messages:
            raise Idle
        return self.messages.popleft()


class _Replies(Strict):
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._replies: deque[Any] = deque()
        self._vain = 0

    def enqueue(self, reply: Any, **_: Any) -> None:
        pickle.dumps([value for value in reply if isinstance(value, Unpicklable)])
        self._replies.append(reply)

    def dequeue(self, timeout: float | None = None, **_: Any) -> Any:
        self._cluster.timeouts.append(timeout)
        self._cluster.run()
        if self._replies:
            self._vain = 0
            return self._replies.popleft()
        self._vain += 1
        if timeout is None or self._vain > _PATIENCE:
            raise Hang
        raise TimeoutError


def prepare_multiprocess(executor: Any, cluster: Cluster, pool: ThreadPoolExecutor | None) -> None:
    """Give a ``MultiprocExecutor`` of any release the attributes that its start would have."""
    executor.is_failed = False
    executor.rpc_broadcast_mq = cluster
    executor.response_mqs = cluster.replies
    executor.workers = cluster.handles
    executor.futures_queue = deque()
    executor.shutdown_event = Event()
    executor.io_thread_pool = pool
    executor.vllm_config = config()


def config(*, fault_tolerance: bool = False) -> Prepared:
    """Return an engine configuration with what ``collective_rpc`` may read of it."""
    parallel = Prepared("parallel_config", enable_fault_tolerance=fault_tolerance)
    return Prepared("vllm_config", parallel_config=parallel)


def prepare_local(executor: Any, worker: Worker) -> None:
    """Give a ``UniProcExecutor`` of any release the attributes that its start would have."""
    executor.driver_worker = worker
    executor.mm_receiver_cache = None
    executor.async_output_thread = None


class Ray:
    """What is behind the module ``ray``: actors, and references to what they will return."""

    GetTimeoutError = type("GetTimeoutError", (TimeoutError,), {})

    def __init__(self) -> None:
        self.workers = [Worker(rank) for rank in range(WORLD_SIZE)]
        self.late: set[int] = set()

    def get(self, refs: Any, *, timeout: float | None = None) -> Any:
        """Return the values of one reference or of a list of them."""
        if isinstance(refs, list):
            return [self.get(ref, timeout=timeout) for ref in refs]
        if refs.rank in self.late:
            if timeout is None:
                raise Hang
            raise self.GetTimeoutError
        return refs.value()

    def actors(self) -> list[Any]:
        """Return the handles of the actors, in rank order."""
        return [
            Prepared("actor", execute_method=Prepared("method", remote=self._remote(worker)))
            for worker in self.workers
        ]

    @staticmethod
    def _remote(worker: Worker) -> Callable[..., Any]:
        def remote(method: str, *args: Any, **kwargs: Any) -> Any:
            def value() -> Any:
                return getattr(worker, method)(*args, **kwargs)

            return Prepared("reference", rank=worker.rank, value=value)

        return remote


def prepare_ray(executor: Any, ray: Ray) -> None:
    """Give a ``RayDistributedExecutor`` of any release what its start would have."""
    executor.workers = ray.actors()
    # vLLM's engine of today always sets this; without it rank 0 would run in the driver.
    executor.use_ray_spmd_worker = True


def table(clock: Clock, ray: Ray) -> Mapping[str, object]:
    """Return what takes the place of the libraries, and of helpers that need them."""
    watch_dog = Prepared("watch_dog", feed=silent, disable=nullcontext)
    return {
        "cloudpickle": pickle,
        "ray": Prepared("ray", get=ray.get),
        "time": Prepared("time", monotonic=clock.read),
        "vllm.utils.watch_dog.get_watch_dog": lambda: watch_dog,
        "vllm.v1.outputs.KVConnectorOutput": type("KVConnectorOutput", (), {}),
        "vllm.v1.executor.ray_utils.detach_zero_copy_from_model_runner_output": silent,
    }

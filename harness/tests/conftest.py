"""A stand-in for vLLM's engines: its transport with all its faults, and no engine."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from truetap.conformance import strategies
from truetap.harness.collect_worker import CollectWorker


def pytest_configure(config: pytest.Config) -> None:
    """Draw as many examples as ``--draws`` says, ten times over: none of ours asks an engine."""
    strategies.load_draws(config.getoption("draws"), times=10)


@pytest.fixture(autouse=True)
def _draws(pytestconfig: pytest.Config) -> None:
    """Come back to that profile after tests that judge as the suite does, with one of its own."""
    strategies.load_draws(pytestconfig.getoption("draws"), times=10)


class FakeWorker(CollectWorker):
    """A worker with methods of a user's own. ``faults`` are done to its next replies."""

    def __init__(self, rank: int, config: Any) -> None:
        self.rank = rank
        self.vllm_config = config
        self.log: list[str] = []
        self.behaviour: dict[str, Callable[..., Any]] = {}
        self.fault: Callable[[dict[str, Any]], Any] | None = None

    def truetap_collect(self, request: dict[str, Any]) -> Any:
        reply = super().truetap_collect(request)
        return reply if self.fault is None else self.fault(reply)

    def echo(self, *args: Any, **kwargs: Any) -> Any:
        """Return what was sent, with this rank."""
        self.log.append("echo")
        return self.rank, args, kwargs

    def act(self, *args: Any) -> Any:
        """Do what the test has set for this rank."""
        self.log.append("act")
        return self.behaviour["act"](*args)

    not_a_method = 7


class FakeExecutor:
    """MultiprocExecutor in one process: a queue of replies per rank, without call ids.

    Workers run when the executor waits for them; one that is ``held`` is late. What is sent either
    way is pickled, as between processes.
    """

    def __init__(self, world_size: int = 2, worker: type = FakeWorker, **config: Any) -> None:
        parallel = {
            "world_size": world_size,
            "data_parallel_size": 1,
            "distributed_executor_backend": "mp",
            "worker_extension_cls": "",
            "worker_cls": "my.Worker",
        }
        self.parallel_config = SimpleNamespace(**parallel | config)
        self.vllm_config = SimpleNamespace(parallel_config=self.parallel_config)
        self.workers = [worker(rank, self.vllm_config) for rank in range(world_size)]
        self.inboxes: list[deque[bytes]] = [deque() for _ in self.workers]
        self.replies: list[deque[bytes]] = [deque() for _ in self.workers]
        self.held: set[int] = set()
        self.sent = 0
        self.timeouts: list[float | None] = []

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        self.sent += 1
        self.timeouts.append(timeout)
        call = pickle.dumps((method, args, kwargs or {}))
        for inbox in self.inboxes:
            inbox.append(call)
        replies = []
        for rank, queue in enumerate(self.replies):
            if rank not in self.held:
                self.run(rank)
            if not queue:
                raise TimeoutError(f"RPC call to {method} timed out.")
            status, result = pickle.loads(queue.popleft())
            if status != "success":
                raise RuntimeError(f"Worker failed with error '{result}', please check the stack")
            replies.append(result)
        return replies

    def run(self, rank: int) -> None:
        """Have a worker do all that it was sent."""
        while self.inboxes[rank]:
            method, args, kwargs = pickle.loads(self.inboxes[rank].popleft())
            try:
                answer = ("success", getattr(self.workers[rank], method)(*args, **kwargs))
            except Exception as error:
                answer = ("failure", str(error))
            self.replies[rank].append(pickle.dumps(answer))


class FakeLocalExecutor(FakeExecutor):
    """ExecutorWithExternalLauncher: one process of several, with a worker of its own only."""

    def __init__(self, world_size: int, rank: int, **config: Any) -> None:
        super().__init__(
            world_size, **{"distributed_executor_backend": "external_launcher"} | config
        )
        self.workers = [self.workers[rank]]
        self.inboxes, self.replies = self.inboxes[:1], self.replies[:1]


class PlainException(Exception):
    """All that is left of an error on its way through the client."""


class FakeLLM:
    """LLM: msgpack between client and engine core, errors as text. ``wait`` is what hangs it."""

    def __init__(self, executor: FakeExecutor) -> None:
        self.executor = executor
        self.llm_engine = SimpleNamespace(vllm_config=executor.vllm_config)
        self.wait = threading.Event()

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        from msgspec import msgpack

        method, timeout, arguments, named = msgpack.decode(
            msgpack.encode((method, timeout, args, kwargs))
        )
        try:
            replies = self.executor.collective_rpc(method, timeout, tuple(arguments), named)
        except Exception as error:
            raise PlainException(f"Call to collective_rpc method failed: {error}") from None
        try:
            raw = msgpack.encode(replies)
        except TypeError:  # the engine's output thread dies of it and nobody is told
            self.wait.wait()
            raise
        decoded: list[Any] = msgpack.decode(raw)
        return decoded


class FakeAsyncLLM:
    """AsyncLLM: the call is a coroutine, and the configuration lies elsewhere."""

    def __init__(self, executor: FakeExecutor) -> None:
        self.executor = executor
        self.vllm_config = executor.vllm_config
        self.hangs = False

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        if self.hangs:
            await asyncio.Event().wait()
        return self.executor.collective_rpc(method, timeout, args, kwargs)


@pytest.fixture(scope="session")
def fakes() -> SimpleNamespace:
    """The stand-ins, for tests that share them."""
    return SimpleNamespace(
        Worker=FakeWorker,
        Executor=FakeExecutor,
        LocalExecutor=FakeLocalExecutor,
        LLM=FakeLLM,
        AsyncLLM=FakeAsyncLLM,
    )

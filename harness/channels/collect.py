"""truetap's own channel: ``collect`` on an ``LLM``, an executor or an ``AsyncLLM``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from truetap.harness.channels import live_engine
from truetap.harness.channels.model_executor import ModelExecutor
from truetap.harness.collect import EngineUnusable, collect, readmit
from truetap.harness.model import EngineSpec, Environment


class Closable(Protocol):
    """An engine, as far as a session needs it to end it."""

    def close(self) -> None:
        """Release it."""


class CollectChannel:
    """``collect`` on an ``LLM`` whose engine core runs in another process: the usual way."""

    name = "collect"
    kind: live_engine.Kind = "llm"

    def open(self, spec: EngineSpec, *, scratch: Path) -> CollectSession:
        """Start the engine; takes seconds to a minute."""
        engine = live_engine.start(spec, self.kind, scratch / "engine.log")
        target = live_engine.executor_of(engine) if self.kind == "executor" else engine.llm
        session = AsyncCollectSession if self.kind == "async" else CollectSession
        return session(engine, target, spec.tensor_parallel_size)


class CollectExecutorChannel(CollectChannel):
    """``collect`` on the executor itself."""

    name = "collect-executor"
    kind: live_engine.Kind = "executor"


class CollectAsyncChannel(CollectChannel):
    """``collect`` on an ``AsyncLLM``."""

    name = "collect-async"
    kind: live_engine.Kind = "async"


class CollectModelChannel:
    """``collect`` on the model of an executor: to try the suite where there is no engine."""

    name = "collect-model"

    def open(self, spec: EngineSpec, *, scratch: Path) -> CollectSession:  # noqa: ARG002
        """Start worker threads."""
        executor = ModelExecutor(spec.tensor_parallel_size)
        return CollectSession(executor, executor, spec.tensor_parallel_size)


class CollectSession:
    """Something with workers, asked through ``collect``."""

    def __init__(self, engine: Closable, target: Any, world_size: int) -> None:
        self.world_size = world_size
        self._engine, self._target = engine, target

    def ask(
        self, method: str, *args: Any, ranks: Sequence[int] | None, deadline_s: float
    ) -> Mapping[int, Any]:
        """Ask, and get values by rank."""
        answers: Mapping[int, Any] = collect(
            self._target, method, args=args, ranks=ranks, deadline=deadline_s
        )
        return answers

    def recover(self) -> bool:
        """Lift the mark of the failure before, which works if every rank had answered."""
        try:
            readmit(self._target)
        except EngineUnusable:
            return False
        return True

    def environment(self) -> Environment:
        """Return the engine's version and what is asked."""
        return live_engine.describe(self._target, self.world_size)

    def close(self) -> None:
        """Stop the engine and its processes."""
        self._engine.close()


class AsyncCollectSession(CollectSession):
    """The same, awaited on an event loop of its own."""

    def __init__(self, engine: Closable, target: Any, world_size: int) -> None:
        super().__init__(engine, target, world_size)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def ask(
        self, method: str, *args: Any, ranks: Sequence[int] | None, deadline_s: float
    ) -> Mapping[int, Any]:
        """Ask on the event loop, and wait for its answer."""

        async def asked() -> Mapping[int, Any]:
            answers: Mapping[int, Any] = await collect(
                self._target, method, args=args, ranks=ranks, deadline=deadline_s
            )
            return answers

        return asyncio.run_coroutine_threadsafe(asked(), self._loop).result()

    def close(self) -> None:
        """Stop the engine, then the loop."""
        super().close()
        self._loop.call_soon_threadsafe(self._loop.stop)

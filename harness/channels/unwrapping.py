"""Subjects under test: ``collective_rpc`` of an executor, unwrapped by hand.

Each is a line that somebody's pipeline really had. Against the release it was written for it is
right; that is why the release's facts decide in ``truetap.harness.reply``, and no such line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from truetap.harness.channels import live_engine
from truetap.harness.channels.collect import Closable
from truetap.harness.model import EngineSpec, Environment

Unwrap = Callable[[Any], Any]


class UnwrappingChannel:
    """An executor asked for one rank's reply, which ``unwrap`` then takes apart."""

    name = ""
    unwrap: Unwrap

    def open(self, spec: EngineSpec, *, scratch: Path) -> UnwrappingSession:
        """Start the engine; takes seconds to a minute."""
        engine = live_engine.start(spec, "executor", scratch / "engine.log")
        executor = live_engine.executor_of(engine)
        return UnwrappingSession(engine, executor, spec.tensor_parallel_size, type(self).unwrap)


class SpeculatorsLegacyChannel(UnwrappingChannel):
    """The generator of speculators 0.3.0, written for vLLM 0.11.0: ``reply[0]``."""

    name = "speculators_legacy"

    @staticmethod
    def unwrap(reply: Any) -> Any:
        """Take the reply for a list of one."""
        return reply[0]


class BareChannel(UnwrappingChannel):
    """The same line after a repair for vLLM 0.11.1 and later: ``reply``."""

    name = "unwrap-bare"

    @staticmethod
    def unwrap(reply: Any) -> Any:
        """Take the reply for the payload."""
        return reply


class GuessChannel(UnwrappingChannel):
    """A repair for both: ``reply[0] if isinstance(reply, list) else reply``."""

    name = "unwrap-guess"

    @staticmethod
    def unwrap(reply: Any) -> Any:
        """Guess from the value, which cannot tell."""
        return reply[0] if isinstance(reply, list) else reply


class UnwrappingSession:
    """An executor in this process, asked without nonces."""

    def __init__(self, engine: Closable, executor: Any, world_size: int, unwrap: Unwrap) -> None:
        self.world_size = world_size
        self._engine, self._executor, self._unwrap = engine, executor, unwrap

    def ask(
        self, method: str, *args: Any, ranks: Sequence[int] | None, deadline_s: float
    ) -> Mapping[int, Any]:
        """Ask all ranks at once, or each named one by itself."""
        if ranks is None:
            replies = self._executor.collective_rpc(method, timeout=deadline_s, args=args)
            return dict(enumerate(replies))
        return {
            rank: self._unwrap(
                self._executor.collective_rpc(
                    method, timeout=deadline_s, args=args, unique_reply_rank=rank
                )
            )
            for rank in ranks
        }

    def recover(self) -> bool:
        """Go on as if nothing had happened, as such code does."""
        return True

    def environment(self) -> Environment:
        """Return the engine's version and what is asked."""
        return live_engine.describe(self._executor, self.world_size)

    def close(self) -> None:
        """Stop the engine and its processes."""
        self._engine.close()

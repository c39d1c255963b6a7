"""What a fault is, and what faults are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from truetap.harness.model import Capture, CaptureBatch, CaptureRequest, EngineSpec, Float32


@dataclass(frozen=True)
class Fault:
    """One fault, and the clause that must catch it."""

    caught_by: str
    says: str
    """What was done wrong, in a phrase."""
    corrupt: Callable[[Corruptor, CaptureBatch], CaptureBatch]
    early: int = 0
    """How many boundaries before each requested one the fault needs to see."""
    ask: Callable[[Corruptor, Sequence[CaptureRequest]], Sequence[CaptureRequest]] | None = None
    """What is asked of the real session in place of the requests."""
    on_nothing: bool = False
    """Whether the fault also shows in a call without requests."""
    mute: bool = False
    """Whether the session keeps no log."""


@dataclass
class Corruptor:
    """What a fault may draw on besides the batch itself."""

    spec: EngineSpec
    final_norm: Callable[[Float32], Float32]
    mistaken_norm: Callable[[Float32], Float32]
    """The final norm with ``weight`` in place of ``1 + weight``, or the other way round."""
    earlier: list[CaptureBatch] = field(default_factory=list)
    """What the real session gave so far."""

    @property
    def requested(self) -> tuple[int, ...]:
        """Boundaries as the caller asked for them; the real session may capture more."""
        return self.spec.boundaries


def right(context: Corruptor, capture: Capture) -> Float32:
    """Return the states that were asked for."""
    return slots_of(capture, context.requested)


def slots_of(capture: Capture, wanted: Sequence[int]) -> Float32:
    """Return the slots of ``wanted`` boundaries from a capture that holds more."""
    if not capture.boundaries:
        return capture.states
    return capture.states[:, [capture.boundaries.index(max(k, 0)) for k in wanted]]


def per_capture(change: Callable[[Corruptor, Capture], Capture]) -> Any:
    """Return a fault that changes each capture by itself."""

    def corrupt(context: Corruptor, batch: CaptureBatch) -> CaptureBatch:
        return replace(batch, captures=tuple(change(context, c) for c in batch.captures))

    return corrupt


def of_states(change: Callable[[Corruptor, Capture], Float32]) -> Any:
    """Return a fault that changes the states of each capture."""
    return per_capture(
        lambda context, c: replace(c, states=change(context, c)) if context.requested else c
    )


def all_right(context: Corruptor, batch: CaptureBatch) -> list[Capture]:
    """Return the captures as they were asked for."""
    return [replace(c, states=right(context, c)) for c in batch.captures]

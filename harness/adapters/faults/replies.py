"""Faults in what the workers answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from truetap.harness.adapters.faults.fault import Corruptor, Fault, all_right
from truetap.harness.model import CaptureBatch


def _reply(change: Callable[[Corruptor, CaptureBatch], Any]) -> Any:
    def corrupt(context: Corruptor, batch: CaptureBatch) -> CaptureBatch:
        true = tuple(all_right(context, batch))
        return replace(batch, captures=true, replies=change(context, batch))

    return corrupt


def _stale(context: Corruptor, batch: CaptureBatch) -> Any:
    return context.earlier[-1].replies if context.earlier else batch.replies


FAULTS: dict[str, Fault] = {
    "stale-reply": Fault("REPLY-001", "the reply of the call before", _reply(_stale)),
    "rank-missing": Fault(
        "REPLY-001", "one rank's reply is missing", _reply(lambda _, b: b.replies[1:])
    ),
    "reply-unwrapped": Fault(
        "REPLY-001", "a bare reply in place of a list", _reply(lambda _, b: b.replies[0])
    ),
}

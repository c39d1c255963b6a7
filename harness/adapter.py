"""The interface that a way of capturing hidden states implements to be put through the suite.

An adapter is one class registered in the entry-point group ``truetap.adapters``. It opens sessions;
a session captures. What it returns is *raw*: nothing is sorted, trimmed or repaired on the way,
because the suite's job is to see what an unsuspecting caller would get.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from truetap.harness.model import CaptureBatch, CaptureRequest, EngineSpec, Environment


class Session(Protocol):
    """A verifier opened for capture at fixed boundaries.

    It may have an attribute ``log``, the path of what the engine's processes wrote (ENGINE-004).
    """

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Boundaries of the captured slots, in slot order."""
        ...

    def capture(self, requests: Sequence[CaptureRequest]) -> CaptureBatch:
        """Capture several prompts in one call, batched as the engine likes.

        Raises ``UsageError`` for requests that cannot be captured whole; the session stays usable.
        """
        ...

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float] | None:
        """Return the engine's log-probability of each token but the first; None if it has none."""
        ...

    def environment(self) -> Environment:
        """Return facts about the running engine, read from its workers."""
        ...

    def close(self) -> None:
        """Release the engine. Safe to call twice."""
        ...


class Adapter(Protocol):
    """One way to get captures out of one engine.

    It may have an attribute ``evidence``, "live" where it has none: a report of anything else
    certifies nothing. It may have a method ``settings(scratch)``, which returns the fields of
    ``EngineSpec`` that it can be opened with, in place of the suite's defaults.
    """

    name: str

    def open(self, spec: EngineSpec, *, scratch: Path) -> Session:
        """Open a session; ``scratch`` is an empty folder for logs and files in transit."""
        ...

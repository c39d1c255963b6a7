"""A session that captures for real once, and gives the same again to whoever asks the same.

One live engine then serves every mutant, and a mutant's scene costs no engine of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from truetap.harness.adapter import Session
from truetap.harness.model import CaptureBatch, CaptureRequest, Environment


class Remembering:
    """Passes on what is asked for the first time."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.boundaries = session.boundaries
        self.log: Path | None = getattr(session, "log", None)
        self._environment: Environment | None = None
        self._batches: dict[tuple[CaptureRequest, ...], CaptureBatch | Exception] = {}
        self._logprobs: dict[tuple[int, ...], list[float] | None] = {}

    def capture(self, requests: Sequence[CaptureRequest]) -> CaptureBatch:
        """Capture, or give or raise what the same requests gave or raised before."""
        key = tuple(requests)
        if key not in self._batches:
            try:
                self._batches[key] = self._session.capture(requests)
            except Exception as error:
                self._batches[key] = error
        found = self._batches[key]
        if isinstance(found, Exception):
            raise found
        return found

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float] | None:
        """Ask, or say what was said before."""
        key = tuple(token_ids)
        if key not in self._logprobs:
            self._logprobs[key] = self._session.prompt_logprobs(token_ids)
        return self._logprobs[key]

    def environment(self) -> Environment:
        """Ask, or say what was said before."""
        if self._environment is None:
            self._environment = self._session.environment()
        return self._environment

    def close(self) -> None:
        """Close the real session; what it gave stays."""
        self._session.close()

"""A sink that keeps in memory what an engine's passes give, in place of a ``Staging``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Put:
    """Rows that were handed over together."""

    position: int
    token_ids: list[int]
    states: Any


@dataclass
class KeptRows:
    """All puts by key, and why there will be no more."""

    puts: dict[str, list[Put]] = field(default_factory=dict)
    stopped: Exception | None = None

    def put(
        self, key: str, position: int, token_ids: Sequence[int], rows: Callable[[int, int], Any]
    ) -> None:
        """Keep a copy of rows, fetched in two pieces as from a small pool."""
        import torch

        half = -(-len(token_ids) // 2)
        pieces = [(0, half), (half, len(token_ids))]
        states = torch.cat([rows(start, end).clone() for start, end in pieces if start < end])
        self.puts.setdefault(key, []).append(Put(position, list(token_ids), states))

    def stop(self, error: Exception) -> None:
        """Keep the error."""
        self.stopped = error

    def rows(self, key: str) -> dict[int, tuple[int, Any]]:
        """Return token and states by position; of rows that came twice the first."""
        found: dict[int, tuple[int, Any]] = {}
        for put in self.puts.get(key, []):
            for offset, token in enumerate(put.token_ids):
                found.setdefault(put.position + offset, (token, put.states[offset]))
        return found

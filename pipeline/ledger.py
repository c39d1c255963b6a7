"""Which engine has which shard to make, and what becomes of the shards of an engine that is lost.

Plain bookkeeping of the one process that decides; it knows nothing of engines, files or Ray.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from truetap.harness.errors import CouldNotRun, IntegrityError
from truetap.pipeline.shard_making import Job


class Ledger:
    """Jobs that wait, that are held by an engine, and that were delivered: each is one of these."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = {job.name: job for job in jobs}
        self._waiting = deque(self._jobs)
        self._held: dict[int, list[str]] = {}
        self._lost: dict[str, str] = {}

    @property
    def finished(self) -> bool:
        """Whether every job was delivered."""
        return not self._waiting and not any(self._held.values())

    @property
    def waiting(self) -> int:
        """How many jobs nobody has."""
        return len(self._waiting)

    def take(self, engine: int) -> Job | None:
        """Give an engine the next job; None if none waits, though one may be returned later."""
        if not self._waiting:
            return None
        name = self._waiting.popleft()
        self._held.setdefault(engine, []).append(name)
        return self._jobs[name]

    def deliver(self, engine: int, name: str) -> Job:
        """Take a finished job off an engine; ``IntegrityError`` if it has no such job."""
        try:
            self._held.get(engine, []).remove(name)
        except ValueError:
            raise IntegrityError(
                f"engine {engine} delivered {name!r}, which it was not given",
                remedy="run truetap extract again: it redoes exactly the shards that are missing",
            ) from None
        return self._jobs[name]

    def lose(self, engine: int, why: str) -> list[str]:
        """Put an engine's jobs in front of those that wait; return their names.

        ``CouldNotRun`` if one of them was lost before: then the job may be what kills engines.
        """
        names = self._held.pop(engine, [])
        told = f"by engine {engine} ({why})"
        for name in names:
            if before := self._lost.get(name):
                raise CouldNotRun(
                    f"{name} was lost twice: {before}, then {told}; finished shards are kept",
                    remedy="see the engines' logs; then run truetap extract again",
                )
            self._lost[name] = told
        self._waiting.extendleft(reversed(names))
        return names

"""One of several engines: opens the capture path where it is put, and makes the shards it is given.

The process that decides (``truetap.pipeline.dispatch``) calls the methods; what happens here it is
told as events. Nothing here knows of Ray, so that tests can hold a worker in their hands. A worker
writes shards under names of its own call, and never gives one its final name: a worker that was
taken for dead and is not can do no damage.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truetap.harness import reaper, verifier
from truetap.harness.errors import FULL_DISK, CouldNotRun, IntegrityError, TruetapError, UsageError
from truetap.harness.extraction import Pool
from truetap.harness.model import EngineSpec
from truetap.pipeline.extract import extracting, opened
from truetap.pipeline.shard_making import Job, Pace, make_shards

EVENTS_EVERY_S = 1.0
"""How long ``events`` waits for one before it says that there is none."""
JOIN_S = 5.0
"""How long ``close`` waits for what was under way; an engine that hangs is killed after that."""


@dataclass(frozen=True)
class Assignment:
    """What all engines of one extraction have in common."""

    adapter: str
    spec: EngineSpec
    facts: Mapping[str, Any]
    pool: Pool
    shards: Path
    logs: Path
    token: str
    """What ``token_path(logs)`` must hold, as a proof that the folder is the very same."""


def token_path(logs: Path) -> Path:
    """Return where the deciding process leaves the token of the present extraction."""
    return logs / "extract-token"


@dataclass(frozen=True)
class Hello:
    """A worker's process has started."""

    host: str
    pid: int


@dataclass(frozen=True)
class Opened:
    """The engine is up; this is what its workers say of themselves."""

    binding: Mapping[str, Any]


@dataclass(frozen=True)
class Progress:
    """Requests and tokens captured since the last event of this kind."""

    requests: int
    tokens: int
    note: str
    """The engine's speed, and the state of its pool."""


@dataclass(frozen=True)
class Want:
    """The engine has room for another job."""


@dataclass(frozen=True)
class Delivered:
    """A shard is written, read back and sound; ``partial`` is its file's present name."""

    entry: Mapping[str, Any]
    partial: str


@dataclass(frozen=True)
class Failed:
    """Something is wrong that another engine would meet as well: the extraction ends with it."""

    error: Exception


@dataclass(frozen=True)
class Lost:
    """This engine is gone, for a reason that need not concern the others."""

    why: str


Event = Hello | Opened | Progress | Want | Delivered | Failed | Lost


class EngineWorker:
    """Holds one engine. Methods may be called from any thread and return soon."""

    def __init__(self, number: int, assignment: Assignment) -> None:
        self._number, self._with = number, assignment
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._session: Any = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, daemon=True)

    def hello(self) -> Hello:
        """Say where this is."""
        return Hello(socket.gethostname(), os.getpid())

    def begin(self, position: int, cores: int) -> None:
        """Start the engine, in the background.

        Without GPUs ``position`` is this engine's among those of its machine, each of which gets
        ``cores`` cores of its own: two engines that share cores wait for each other. 0: as it is.
        """
        try:
            mine = sorted(os.sched_getaffinity(0))[position * cores : (position + 1) * cores]
            if cores and len(mine) == cores:
                os.sched_setaffinity(0, mine)  # of this thread, and of all that it starts
            self._thread.start()
        except BaseException as error:  # nobody waits for what this call returns
            self._events.put(self._verdict(error))

    def tell(self, job: Job | None) -> None:
        """Hand over a job; None in answer to ``Want``: there is none at present."""
        self._jobs.put(job)

    def events(self) -> list[Event]:
        """Return what happened since the last call; waits a moment for the first event."""
        found: list[Event] = []
        with suppress(queue.Empty):
            found.append(self._events.get(timeout=EVENTS_EVERY_S))
            while True:
                found.append(self._events.get_nowait())
        return found

    def close(self) -> None:
        """End the engine, whatever it does, and as far as can be what it still has to write."""
        self._closed = True
        self._jobs.put(None)
        if self._session is not None:
            self._session.close()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._events.put(self._verdict(error))

    def _serve(self) -> None:
        self._require_shared()
        reaper.watch_over_me()
        given = self._with
        session = opened(given.adapter, given.spec, given.logs / f"extract-{self._number}")
        self._session = session
        if self._closed:  # while it started
            session.close()
            return
        writing = extracting(session, given.adapter)
        environment = session.environment()
        self._events.put(Opened(environment.binding))
        pace = _Told(self._events)
        while not self._closed:
            for made in make_shards(
                writing,
                self._orders(pace),
                given.shards,
                pace,
                given.pool,
                given.facts,
                environment,
            ):
                self._events.put(Delivered(made.entry, made.partial.name))

    def _orders(self, pace: Pace) -> Iterator[Job]:
        """Wait for a job, then ask for another whenever the engine has room, until there is none.

        That there is none now ends the orders: the engine has to finish what it has.
        """
        job = self._jobs.get()
        if not pace.tokens:
            pace.started = time.monotonic()
        while job is not None and not self._closed:
            yield job
            self._events.put(Want())
            job = self._jobs.get()

    def _require_shared(self) -> None:
        """Raise unless run folder and verifier are here what they are for who decides."""
        given, host = self._with, socket.gethostname()
        remedy = "mount it under the same path on every node"
        try:
            seen = token_path(given.logs).read_text()
        except OSError:
            seen = ""
        if seen != given.token:
            raise UsageError(
                f"engine {self._number} on {host} does not see the run folder of this run at "
                f"{given.shards.parent}",
                remedy=remedy,
            )
        try:
            digests = verifier.digests(Path(given.spec.model))
        except (TruetapError, OSError) as error:
            raise UsageError(
                f"engine {self._number} on {host} does not see the verifier at "
                f"{given.spec.model}: {error}",
                remedy=remedy,
            ) from error
        if digests != given.facts["verifier"]:
            raise IntegrityError(
                f"engine {self._number} on {host} has another verifier at {given.spec.model}",
                remedy=remedy,
            )

    def _verdict(self, error: BaseException) -> Event:
        """Tell an engine that is gone from a fault that the next engine would meet as well."""
        if isinstance(error, CouldNotRun):
            return Failed(error) if self._answers() else Lost(_told(error))
        if isinstance(error, TruetapError):
            return Failed(error)
        if isinstance(error, OSError) and error.errno in FULL_DISK:  # of the folder that all share
            return Failed(error)
        log = self._with.logs / f"extract-{self._number}" / "engine.log"
        with suppress(OSError), log.open("a") as file:
            file.writelines(traceback.format_exception(error))
        return Lost(f"{type(error).__name__}: {error}; see {log}")

    def _answers(self) -> bool:
        try:
            self._session.environment()
        except Exception:
            return False
        return True


class _Told(Pace):
    """Tells of each request that the engine finishes."""

    def __init__(self, events: queue.SimpleQueue[Event]) -> None:
        super().__init__()
        self._events, self._before = events, 0

    def advanced(self) -> None:
        """Tell of one more request."""
        tokens, self._before = self.tokens - self._before, self.tokens
        self._events.put(Progress(1, tokens, self.note()))


def _told(error: TruetapError) -> str:
    return f"{error} ({error.remedy})" if error.remedy else str(error)

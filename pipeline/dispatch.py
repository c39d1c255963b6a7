"""Decides for several engines: who makes which shard, who may, and what is recorded.

One process decides. It hands out jobs one by one, as engines ask for them, so a slow engine gets
fewer and holds up nobody. It asks the gate about each engine's own facts, before every job, and is
the only one that gives a shard its name and its line in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from truetap.harness import environment, names
from truetap.harness.errors import CheckFailed, CouldNotRun, IntegrityError
from truetap.pipeline.engine_lines import EngineLines
from truetap.pipeline.engine_worker import (
    Delivered,
    Event,
    Failed,
    Hello,
    Lost,
    Opened,
    Progress,
    Want,
)
from truetap.pipeline.extract import Extraction
from truetap.pipeline.gatekeeper import Gatekeeper
from truetap.pipeline.ledger import Ledger
from truetap.pipeline.shard_making import Job


class Fleet(Protocol):
    """Several engines, by number from 1 on, wherever they are."""

    @property
    def engines(self) -> Sequence[int]:
        """Return the numbers of all."""
        ...

    def heard(self) -> Iterable[tuple[int, Event]]:
        """Return what happened, waiting a moment for it; ``Lost`` of one that is found gone."""
        ...

    def tell(self, engine: int, job: Job | None) -> None:
        """Hand an engine a job, or say that there is none at present."""
        ...

    def dismiss(self, engine: int) -> None:
        """End an engine that is not to be heard again."""
        ...


@dataclass
class _Member:
    """An engine that is up."""

    keeper: Gatekeeper
    resting: bool = False
    """It was told that there is no job."""


class Dispatch:
    """One extraction on several engines."""

    def __init__(
        self, extraction: Extraction, jobs: Sequence[Job], fleet: Fleet, lines: EngineLines
    ) -> None:
        self._of, self._fleet, self._lines = extraction, fleet, lines
        self._ledger = Ledger(jobs)
        self._hosts: dict[int, str] = {}
        self._members: dict[int, _Member] = {}
        self._keepers: dict[str, Gatekeeper] = {}
        self._promised: dict[str, dict[str, Any]] = {}
        self._gone: dict[int, str] = {}

    def run(self) -> None:
        """Return when all is made, or an audit missed; the audit's ``settle`` comes next.

        Raises what ends an extraction: an engine's own error, a denial, a job that was lost twice,
        ``CouldNotRun`` when no engine is left.
        """
        while not self._ledger.finished:
            for engine, event in self._fleet.heard():
                if engine in self._gone:  # what it still says counts no more
                    continue
                if not self._on(engine, event):
                    return

    def _on(self, engine: int, event: Event) -> bool:
        """Act on an event; False: stop."""
        match event:
            case Hello():
                self._hosts[engine] = event.host
                self._lines.started(engine, event.host)
            case Opened():
                self._members[engine] = _Member(self._keeper(engine, event))
                self._supply(engine)
            case Want():
                self._supply(engine)
            case Progress():
                self._lines.advance(engine, event.requests, event.tokens, event.note)
            case Delivered():
                return self._record(engine, event)
            case Failed():
                self._of.console.print(
                    f"{self._name(engine)} ends the extraction", style="red", highlight=False
                )
                raise event.error
            case Lost():
                self._lose(engine, event.why)
        return True

    def _keeper(self, engine: int, event: Opened) -> Gatekeeper:
        """Return who asks the gate for such an engine, after a first question."""
        key = environment.binding_digest(event.binding)
        if key not in self._keepers:
            of = self._of
            keeper = Gatekeeper(
                of.config,
                of.folder,
                event.binding,
                of.allow_uncertified,
                of.console,
                begun=bool(self._keepers),
            )
            try:
                keeper.standing()
            except CheckFailed as denied:
                told = f"{self._name(engine)}: {denied}"
                raise CheckFailed(told, remedy=denied.remedy) from None
            if not self._keepers:
                of.audit.settle()  # of what an earlier run left, before anything is added to it
            self._keepers[key] = keeper
        return self._keepers[key]

    def _supply(self, engine: int) -> None:
        member = self._members[engine]
        job = self._ledger.take(engine)
        member.resting = job is None
        if job is not None:
            audit = self._of.audit.promise_of(str(engine))
            self._promised[job.name] = {**member.keeper.standing(), **audit}
        self._fleet.tell(engine, job)

    def _record(self, engine: int, made: Delivered) -> bool:
        """Publish a shard, under the name that it was to have, and count it for its audit."""
        store, name = self._of.store, made.entry["shard"]
        job = self._ledger.deliver(engine, name)
        if made.entry["ids"] != [c.id for c in job.conversations] or names.fault_of(made.partial):
            raise IntegrityError(f"{self._name(engine)} delivered other captures as {name}")
        entry = {**made.entry, **self._promised.pop(name)}
        try:
            store.record(entry, store.folder / made.partial)
        except FileNotFoundError:
            raise CouldNotRun(
                f"{self._name(engine)} wrote {made.partial}, which is not in {store.folder}",
                remedy="mount the run folder under the same path on every node",
            ) from None
        self._lines.made(engine, len(job.conversations))
        last = self._ledger.finished
        return self._of.audit.published(entry, last=last, engine=str(engine))

    def _lose(self, engine: int, why: str) -> None:
        """Go on without an engine: what it had not delivered is for the others."""
        self._gone[engine] = why
        self._members.pop(engine, None)
        self._fleet.dismiss(engine)
        left = self._ledger.lose(engine, why)
        others = f"; to be made by others: {', '.join(left)}" if left else ""
        told = f"{self._name(engine)} is lost: {why}{others}"
        self._of.console.print(told, style="yellow", highlight=False, markup=False)
        self._lines.lost(engine)
        if len(self._gone) == len(self._fleet.engines):
            reasons = "; ".join(f"{self._name(k)}: {w}" for k, w in sorted(self._gone.items()))
            raise CouldNotRun(
                f"no engine is left: {reasons}; finished shards are kept",
                remedy=f"see {self._of.folder.logs}/extract-*/engine.log, then run again",
            )
        for other, member in self._members.items():
            if member.resting and self._ledger.waiting:
                self._supply(other)

    def _name(self, engine: int) -> str:
        host = self._hosts.get(engine)
        return f"engine {engine} on {host}" if host else f"engine {engine}"

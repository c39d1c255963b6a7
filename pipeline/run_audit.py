"""Audits while extraction runs: every few shards a random sample is captured again.

The certificate says that the capture path was right when it was tried; this says that it still is.
The first shard of an extraction, every ``every_shards``-th and the last are audited by the
reference, in a process of the lowest priority, while the engine goes on. At most one audit is under
way: a path that turns wrong is seen by the next one, and that ends before the one after it begins.

A miss ends the run. The shards since the last audit that passed are then sampled one by one, the
first bad one is named, and all from that one on are set aside.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn

from truetap.harness.auditor import Finding, Task
from truetap.harness.auditor_process import Checker
from truetap.harness.errors import CheckFailed
from truetap.harness.progress import bar
from truetap.pipeline.audit_log import AuditLog, Line
from truetap.pipeline.config import Audit
from truetap.pipeline.store import Store

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from truetap.pipeline.prepare import Conversation


@dataclass(frozen=True)
class _Pending:
    """An audit under way."""

    entry: Line
    sample: Mapping[str, Any]
    group: Sequence[Line]
    """The shards of the same engine since the one before, this one last: it answers for those."""
    engine: str = ""


class RunAudit:
    """The audits of one extraction. Any call may raise what an audit found."""

    def __init__(
        self,
        settings: Audit,
        seed: int,
        store: Store,
        conversations: Iterable[Conversation],
        console: Console,
        start: Callable[[], Checker],
    ) -> None:
        self._settings, self._seed, self._store = settings, seed, store
        self._tokens = {c.id: c.token_ids for c in conversations}
        self._console, self._start = console, start
        self._log = AuditLog(store)
        self._checker: Checker | None = None
        self._pending: _Pending | None = None
        self._since: dict[str, list[Line]] = {}
        self._begun: set[str] = set()
        self._missed: tuple[_Pending, Finding] | None = None
        self._passed = 0
        self._waited = 0.0

    @property
    def promise(self) -> dict[str, Any]:
        """What a manifest line says of its audit; empty if there will be none."""
        if not self._settings.enabled:
            return {}
        rate = self._settings.model_dump(include={"every_shards", "samples", "max_tokens"})
        return {"audit": {**rate, "passed_before": self._passed}}

    def promise_of(self, engine: str) -> dict[str, Any]:
        """Return the same for a shard of one of several engines."""
        return {name: {**held, "engine": engine} for name, held in self.promise.items()}

    def recover(self) -> None:
        """Finish what an interruption prevented after a miss: set the shards aside.

        For the one process that writes, before it looks at what is to be done.
        """
        for repaired in self._log.repair():
            self._say(repaired, "yellow")
        standing = self._log.standing(list(self._store.entries().values()))
        if "failed" in standing.values():
            reason = "an audit failed, and the run was stopped before it could look for the first"
            unproven = [n for n, how in standing.items() if how != "proven"]
            entries = self._store.entries()
            aside = self._set_aside([entries[name] for name in unproven], reason)
            self._say(f"{_count(unproven)} set aside in {aside}: {reason}", "yellow")

    def begin(self, coming: Collection[str]) -> None:
        """Start the reference if it will be needed, and the audit that an interruption prevented.

        ``coming`` are the shards that will be made, so whatever is there of them is not asked. What
        was promised an audit gets it, even if audits are switched off by now.
        """
        self._passed = self._log.passed()
        entries = self._store.entries()
        standing = self._log.standing(list(entries.values()))
        unproven = [
            entry
            for name, entry in entries.items()
            if standing.get(name) == "open"
            and name not in coming
            and self._tokens.keys() >= set(entry["ids"])
        ]
        if unproven or (coming and self._settings.enabled):
            self._checker = self._start()
        if unproven:
            self._say(f"audit: {_count(unproven)} captured after the last audit", "yellow")
            for group in _by_engine(unproven):
                self._wait()
                if self._missed:
                    break
                self._submit(group)
        if coming and not self._settings.enabled:
            self._say("audit: switched off, so nothing is captured again", "yellow")

    def published(self, entry: Line, *, last: bool, engine: str = "") -> bool:
        """Count a finished shard; audit it if its turn has come. False: stop, and ``settle``.

        Of several engines one may turn wrong while the others are right, so each has audits of its
        own; with the ``last`` shard of all, every engine's rest gets one.
        """
        if not self._settings.enabled:
            return True
        assert self._checker is not None
        since = self._since.setdefault(engine, [])
        since.append(entry)
        if self._pending and (finding := self._checker.finished()):
            self._judge(finding)
        due = engine not in self._begun or len(since) >= self._settings.every_shards
        for name in [*self._since] if last else [engine] if due else []:
            self._wait()
            if self._missed:
                break
            self._submit(self._since.pop(name), name)
            self._begun.add(name)
        return self._missed is None

    def settle(self) -> None:
        """Wait for the audit under way; after a miss, find where it began, and raise."""
        if self._pending:
            self._say("waiting for the audit under way", "dim")
        self._wait()
        if self._missed:
            self._stop(*self._missed)

    def close(self) -> None:
        """End the auditor."""
        if self._checker:
            self._checker.close()

    def _submit(self, group: Sequence[Line], engine: str = "") -> None:
        """Start the audit of the last of some shards."""
        assert self._checker is not None
        task, sample = self._task(group[-1])
        self._checker.submit(task)
        self._pending = _Pending(group[-1], sample, tuple(group), engine)

    def _task(self, entry: Line) -> tuple[Task, dict[str, Any]]:
        """Draw requests of a shard; nobody can tell which before its states are written."""
        lengths = [len(self._tokens[name]) for name in entry["ids"]]
        firsts = [0, *accumulate(lengths)]
        seed = f"{self._seed}:{entry['digests']['states']}"
        count = min(self._settings.samples, len(lengths))
        drawn = sorted(random.Random(seed).sample(range(len(lengths)), count))
        most = self._settings.max_tokens // count
        names = [entry["ids"][index] for index in drawn]
        prompts = tuple(tuple(self._tokens[name][:most]) for name in names)
        task = Task(
            shard=str(self._store.path(entry["shard"])),
            boundaries=tuple(entry["boundaries"]),
            first_rows=tuple(firsts[index] for index in drawn),
            token_ids=prompts,
        )
        return task, {"seed": seed, "requests": names, "tokens": [len(p) for p in prompts]}

    def _wait(self) -> None:
        if self._pending and self._checker:
            began = time.monotonic()
            self._judge(self._checker.wait())
            self._waited += time.monotonic() - began

    def _judge(self, finding: Finding) -> None:
        """Record the finding of the audit under way."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        self._record(pending, finding)
        if finding.right:
            self._passed += 1
        else:
            self._say(f"audit: {pending.entry['shard']}: {finding.saw}", "bold red")
            self._missed = pending, finding

    def _record(self, audited: _Pending, finding: Finding) -> None:
        if not finding.right:
            self._store.verified(audited.entry)  # a damaged file is no fault of the capture path
        self._log.record(audited.entry, finding, answers_for=audited.group, sample=audited.sample)

    def _first_bad(self, missed: _Pending, finding: Finding) -> tuple[int, Finding]:
        """Sample the shards since the last audit that passed, in order, until one is bad."""
        assert self._checker is not None
        *before, _ = missed.group
        with bar(self._console, "looking for the first bad shard", len(before)) as progress:
            for index, entry in enumerate(before):
                task, sample = self._task(entry)
                self._checker.submit(task)
                seen = self._checker.wait()
                self._record(_Pending(entry, sample, (entry,)), seen)
                progress.advance()
                if not seen.right:
                    return index, seen
        return len(before), finding

    def _stop(self, missed: _Pending, finding: Finding) -> NoReturn:
        """Name the first bad shard, set it and all after it aside, end the run."""
        index, finding = self._first_bad(missed, finding)
        bad = [*missed.group[index:], *self._since.get(missed.engine, ())]
        first = bad[0]["shard"]
        aside = self._set_aside(bad, f"{first}: {finding.saw}")
        raise CheckFailed(
            f"the capture path is wrong from {first} on: {finding.saw}; {_count(bad)} set aside in "
            f"{aside}, {len(self._store.entries())} kept",
            remedy="find out what changed (truetap conform puts the path through the suite again); "
            "then run truetap extract again: it redoes exactly those",
        )

    def _set_aside(self, bad: Sequence[Line], reason: str) -> Path:
        aside = self._store.reject(bad, reason)
        self._log.set_aside(bad)
        return aside

    def told(self) -> str:
        """Return in words what was audited so far, by earlier runs too."""
        standing = self._log.standing(list(self._store.entries().values()))
        proven = sum(how == "proven" for how in standing.values())
        return (
            f"audit: {self._passed} shards captured again in part, all right; they answer for "
            f"{proven} of {len(self._store.entries())}; the engine waited {self._waited:.1f} s"
        )

    def _say(self, text: str, style: str) -> None:
        self._console.print(text, style=style, highlight=False, markup=False)


def _by_engine(entries: Iterable[Line]) -> list[list[Line]]:
    """Return the shards of each engine, in the order of writing: one cannot vouch for another."""
    groups: dict[str, list[Line]] = {}
    for entry in entries:
        groups.setdefault(entry["audit"].get("engine", ""), []).append(entry)
    return list(groups.values())


def _count(shards: Sequence[Any]) -> str:
    return "1 shard was" if len(shards) == 1 else f"{len(shards)} shards were"

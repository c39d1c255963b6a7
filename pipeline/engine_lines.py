"""Progress of several engines: one line each, and one for all.

On a terminal they are live; elsewhere a line is printed every few seconds, and one for each engine
with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from truetap.harness.progress import LINE_EVERY_S

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


@dataclass
class _Engine:
    host: str
    shards: int = 0
    pending: int = 0
    """Requests of shards that are not recorded yet: those of a lost engine count no more."""
    note: str = "starting"
    gone: bool = False

    def told(self) -> str:
        return f"{self.shards} shards, {'lost' if self.gone else self.note}"


class EngineLines:
    """What the dispatcher reports to."""

    def __init__(self, console: Console, total: int, done: int, live: Progress | None) -> None:
        self._console, self._total, self._live = console, total, live
        self._done = done
        self._engines: dict[int, _Engine] = {}
        self._tokens, self._began = 0, 0.0
        self._said = time.monotonic()
        self._tasks: dict[int, Any] = {}
        if live:
            self._tasks[0] = live.add_task("captured", total=total, completed=done, note="")

    def started(self, engine: int, host: str) -> None:
        """Show an engine, from the start of its process on."""
        self._engines[engine] = _Engine(host)
        if self._live:
            title = f"engine {engine} on {host}"
            self._tasks[engine] = self._live.add_task(title, total=None, note="starting")

    def advance(self, engine: int, requests: int, tokens: int, note: str) -> None:
        """Count requests of an engine; ``note`` is its speed, and the state of its pool."""
        if not self._tokens:
            self._began = time.monotonic()
        self._done += requests
        self._tokens += tokens
        of = self._engines[engine]
        of.pending, of.note = of.pending + requests, note
        self._show(engine, requests)

    def made(self, engine: int, requests: int) -> None:
        """Count a shard of an engine, of so many requests."""
        of = self._engines[engine]
        of.pending, of.shards = of.pending - requests, of.shards + 1
        self._show(engine, 0)

    def lost(self, engine: int) -> None:
        """Mark an engine that is gone; it may never have started."""
        if engine in self._engines:
            gone = self._engines[engine]
            gone.gone = True
            self._done -= gone.pending
            self._show(engine, -gone.pending)

    def finish(self) -> None:
        """Print the last state where nothing is live."""
        if not self._live and self._tokens:
            self._print()

    def _show(self, engine: int, requests: int) -> None:
        if self._live:
            self._live.update(self._tasks[0], advance=requests, note=self._rate())
            self._live.update(self._tasks[engine], note=self._engines[engine].told())
        elif time.monotonic() - self._said >= LINE_EVERY_S:
            self._print()

    def _rate(self) -> str:
        return f"{self._tokens / max(time.monotonic() - self._began, 1e-6):,.0f} tokens/s"

    def _print(self) -> None:
        self._said = time.monotonic()
        lines = [f"captured: {self._done} of {self._total}, {self._rate()}"]
        lines += [f"  engine {k} on {e.host}: {e.told()}" for k, e in sorted(self._engines.items())]
        for line in lines:
            self._console.print(line, highlight=False, markup=False)


@contextmanager
def engine_lines(console: Console, total: int, *, done: int) -> Iterator[EngineLines]:
    """Show the progress of ``total`` conversations, ``done`` of them from an earlier run."""
    if not console.is_terminal:
        lines = EngineLines(console, total, done, None)
        try:
            yield lines
        finally:
            lines.finish()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as live:
        yield EngineLines(console, total, done, live)

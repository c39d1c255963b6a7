"""Progress of long work: a live bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

LINE_EVERY_S = 15.0


class Bar(Protocol):
    """What the work reports to."""

    def advance(self, steps: int = 1, *, note: str = "") -> None:
        """Count ``steps`` more; ``note`` is a short measurement such as ``1,320 tokens/s``."""
        ...


@contextmanager
def bar(console: Console, title: str, total: int, *, done: int = 0) -> Iterator[Bar]:
    """Show progress of ``total`` steps, ``done`` of them from an earlier run."""
    if not console.is_terminal:
        yield _Lines(console, title, total, done)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=total, completed=done, note="")

        class Live:
            def advance(self, steps: int = 1, *, note: str = "") -> None:
                progress.update(task, advance=steps, note=note)

        yield Live()


class _Lines:
    def __init__(self, console: Console, title: str, total: int, done: int) -> None:
        self._console, self._title, self._total = console, title, total
        self._done = self._already = done
        self._started = self._said = time.monotonic()

    def advance(self, steps: int = 1, *, note: str = "") -> None:
        self._done += steps
        now = time.monotonic()
        if now - self._said < LINE_EVERY_S and self._done < self._total:
            return
        self._said = now
        pace = (now - self._started) / max(self._done - self._already, 1)
        left = f", {pace * (self._total - self._done):.0f} s left"
        parts = f"{self._title}: {self._done} of {self._total}{f', {note}' if note else ''}"
        self._console.print(parts + (left if self._done < self._total else ""), highlight=False)

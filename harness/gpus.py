"""Which GPUs an engine gets, where several engines share those that the caller was given.

A caller's ``CUDA_VISIBLE_DEVICES`` is an allotment, often a scheduler's: GPUs are chosen by
position in it, never by number, and its entries are handed on as they are spelt.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

from truetap.harness.errors import CouldNotRun, UsageError

VARIABLE = "CUDA_VISIBLE_DEVICES"
QUERY_DEADLINE_S = 30.0


def share(visible: str | None, *, worker: int, per_worker: int, count: Callable[[], int]) -> str:
    """Return the ``CUDA_VISIBLE_DEVICES`` of one worker's engine.

    ``visible`` is the caller's own; None if it is not set, and only then ``count()``, the number of
    GPUs of this machine, is asked. Worker 1 with two GPUs of "4,5,6,7" gets "6,7". UUIDs and MIG
    ids stay text. ``UsageError`` if there are too few.
    """
    if per_worker < 1:
        raise UsageError(
            f"{per_worker} GPUs for each engine are none", remedy="leave --gpus out to use no GPU"
        )
    there = [str(index) for index in range(count())] if visible is None else _entries(visible)
    first = worker * per_worker
    mine = there[first : first + per_worker]
    if len(mine) < per_worker:
        held = "this machine has" if visible is None else f"{VARIABLE}={visible!r} gives"
        raise UsageError(
            f"engine {worker + 1} of {per_worker} GPUs each needs {first + per_worker} in all; "
            f"{held} {len(there)}",
            remedy="run fewer workers (-n), ask for fewer GPUs (--gpus), or make more visible",
        )
    return ",".join(mine)


def _entries(visible: str) -> list[str]:
    """Return the devices that CUDA would see; it stops reading at the first that cannot be one."""
    entries = []
    for entry in (part.strip() for part in visible.split(",")):
        if not entry or entry.startswith("-"):
            break
        entries.append(entry)
    if len(set(entries)) < len(entries):
        raise UsageError(
            f"{VARIABLE}={visible!r} names a GPU twice: two engines would share it",
            remedy="name each GPU once",
        )
    return entries


def count() -> int:
    """Return how many GPUs this machine has, as ``nvidia-smi`` lists them."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--list-gpus"],
            capture_output=True,
            text=True,
            timeout=QUERY_DEADLINE_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CouldNotRun(
            f"{VARIABLE} is not set and nvidia-smi cannot say how many GPUs there are: {error}",
            remedy=f"set {VARIABLE}, or leave --gpus out",
        ) from None
    return listed(done.stdout)


def listed(text: str) -> int:
    """Return the number of GPUs in what ``nvidia-smi --list-gpus`` printed."""
    if re.search(r"^\s+MIG ", text, flags=re.MULTILINE):
        raise CouldNotRun(
            "a GPU here is split into MIG instances, which cannot be chosen by number",
            remedy=f"name them in {VARIABLE} by the ids that nvidia-smi --list-gpus prints",
        )
    return len(re.findall(r"^GPU \d+:", text, flags=re.MULTILINE))

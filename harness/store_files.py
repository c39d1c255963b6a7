"""The files of a store under test: their state, ways to damage them, and where to break a write."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from truetap.harness.capture_store import DATA_BYTES

T = TypeVar("T")


def sizes(folder: Path) -> dict[str, int]:
    """Return the folder's files by path, with their bytes."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def stamps(folder: Path) -> dict[str, os.stat_result]:
    """Return the state of the files that can hold a sample."""
    stats = {file: (folder / file).stat() for file in sizes(folder)}
    return {file: stat for file, stat in stats.items() if stat.st_size >= DATA_BYTES}


def rewritten(
    earlier: Mapping[str, os.stat_result], later: Mapping[str, os.stat_result]
) -> list[str]:
    """Return the files that are still there and were written again, not merely appended to."""
    return [
        file
        for file, old in earlier.items()
        if (new := later.get(file))
        and (
            new.st_ino != old.st_ino
            or (new.st_mtime_ns != old.st_mtime_ns and new.st_size <= old.st_size)
        )
    ]


def limits(files: Mapping[str, int]) -> list[int]:
    """Return byte limits that break a write at its start, its middle, and a file's last byte."""
    sizes = sorted({size for size in files.values() if size})
    return sorted({1, sizes[-1] // 2, *(size - 1 for size in some(sizes, 2))})


def bytes_to_flip(size: int, files: int) -> list[int]:
    """Return places all over a file, denser where headers are and in an index; fewer of many."""
    if not size:
        return []
    index = size < DATA_BYTES
    count = max(3, (200 if index else 60) // files)
    start = size if index else min(size, 1024)
    step, stride = max(1, start // count), max(1, 2 * size // count)
    return sorted({*range(0, start, step), *range(0, size, stride), size - 1})


def some(items: Sequence[T], most: int) -> list[T]:
    """Return ``most`` of the items, spread evenly, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def halve(path: Path) -> None:
    """Cut a file in half."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flip(path: Path, byte: int) -> None:
    """Flip the lowest bit of one byte."""
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)

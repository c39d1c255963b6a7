"""Walks a folder that somebody else filled: lazily, and never out of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from truetap.harness.errors import UsageError
from truetap.pipeline.foreign.producers.sample import Found, Problem


def walk(root: Path, wanted: Callable[[str], bool]) -> Iterator[Found]:
    """Yield the files below ``root`` whose names are ``wanted``.

    Folders behind links are not entered; a link to a file is followed only if it stays below
    ``root``.
    """
    inside = root.resolve()
    waiting = [root]
    while waiting:
        try:
            entries = os.scandir(waiting.pop())
        except OSError as error:
            raise UsageError(f"a folder cannot be read: {error}") from error
        with entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                elif wanted(entry.name):
                    yield _found(root, inside, Path(entry.path))


def _found(root: Path, inside: Path, path: Path) -> Found:
    # Names on disk are bytes; what is no UTF-8 in them can be kept and printed when spelt out.
    name = path.relative_to(root).as_posix().encode(errors="backslashreplace").decode()
    if path.is_symlink() and not _stays(path, inside):
        return Found(name, path, 0, 0, Problem("link", "a link out of the folder: not followed"))
    try:
        state = path.stat()
    except OSError as error:
        return Found(name, path, 0, 0, Problem("unreadable", f"cannot be read: {error.strerror}"))
    problem = None if path.is_file() else Problem("unreadable", "not a regular file")
    return Found(name, path, state.st_size, state.st_mtime_ns, problem)


def _stays(path: Path, inside: Path) -> bool:
    try:
        return path.resolve().is_relative_to(inside)
    except (OSError, RuntimeError):  # a loop of links
        return False

"""The simplest store that holds to every STORE clause: the control of the mutants, and an example.

Each file holds up to three captures and is named by the SHA-256 of its own bytes. So it is its own
index: it is there under that name whole, or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from truetap.harness.capture_store import SHARD, Kept
from truetap.harness.errors import CouldNotRun, IntegrityError, UsageError
from truetap.harness.model import Capture


class PlainStore:
    """Files of up to three captures, named by their digests. One writer at a time."""

    name = "plain"

    def write(self, folder: Path, captures: Iterable[Capture]) -> Sequence[str]:
        """Keep what is not there yet, three captures a file; a damaged file is thrown away."""
        folder.mkdir(parents=True, exist_ok=True)
        written: list[str] = []
        with self.alone(folder):
            self.clean(folder)
            stored = self.stored(folder)
            group: list[Capture] = []
            for capture in captures:
                if self.is_stored(capture, stored):
                    continue
                group.append(capture)
                if len(group) == SHARD:
                    written += self.save_group(folder, group)
                    group = []
            if group:
                written += self.save_group(folder, group)
        return written

    def read(self, folder: Path) -> Mapping[str, Kept]:
        """Return all captures, or raise ``IntegrityError`` naming the first damaged file."""
        found: dict[str, Kept] = {}
        for path in self.files(folder):
            found |= self.decode(self.checked(path))
        return found

    # The steps of which each mutant does one wrong.

    @contextmanager
    def alone(self, folder: Path) -> Iterator[None]:
        """Hold the folder; another writer is refused."""
        with (folder / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CouldNotRun(f"another process is writing to {folder}") from None
            yield

    def clean(self, folder: Path) -> None:
        """Remove what an interrupted writer left."""
        for path in folder.glob("*.partial"):
            path.unlink()

    def stored(self, folder: Path) -> dict[str, tuple[int, ...]]:
        """Return the token ids of what is there and whole; remove damaged files."""
        found: dict[str, tuple[int, ...]] = {}
        for path in self.files(folder):
            try:
                kept = self.decode(self.checked(path))
            except IntegrityError:
                path.unlink()
                continue
            found |= {key: tuple(ids) for key, (ids, _) in kept.items()}
        return found

    def is_stored(self, capture: Capture, stored: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether a capture need not be written; refuse other tokens under its key."""
        if stored.get(capture.key, capture.token_ids) != capture.token_ids:
            raise UsageError(
                f"{capture.key} is stored with other tokens", remedy="choose another folder"
            )
        return capture.key in stored

    def save_group(self, folder: Path, group: Sequence[Capture]) -> list[str]:
        """Write a group, return its keys."""
        self.save(folder, self.encode(group))
        return [capture.key for capture in group]

    def save(self, folder: Path, data: bytes) -> None:
        """Publish the bytes of one file by a rename, once they are on disk."""
        path = folder / f"{hashlib.sha256(data).hexdigest()}.captures"
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        self.sync(folder)

    def sync(self, folder: Path) -> None:
        """Put the folder's entries on disk."""
        directory = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def encode(self, group: Sequence[Capture]) -> bytes:
        """Return a line of JSON (keys, token ids, shapes) and the float32 states."""
        head = [[c.key, c.token_ids, c.states.shape] for c in group]
        states = [c.states.astype("<f4").tobytes() for c in group]
        return json.dumps(head).encode() + b"\n" + b"".join(states)

    def decode(self, data: bytes) -> dict[str, Kept]:
        """Undo ``encode``."""
        line, _, rest = data.partition(b"\n")
        found: dict[str, Kept] = {}
        for key, ids, shape in json.loads(line):
            size = int(np.prod(shape)) * 4
            found[key] = ids, np.frombuffer(rest[:size], "<f4").reshape(shape)
            rest = rest[size:]
        return found

    def files(self, folder: Path) -> list[Path]:
        """Return what has been published."""
        return sorted(folder.glob("*.captures"))

    def checked(self, path: Path) -> bytes:
        """Return a file's bytes, if they are those that it was written with."""
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != path.stem:
            raise IntegrityError(f"{path} is damaged", remedy="write again: it is redone")
        return data

"""Deliberately wrong stores: the proof that the STORE clauses can fail.

``FAULT@STORE`` names one. Most are ``plain`` with one of its steps done wrong, as somebody's store
really did it, and exist as ``FAULT@plain`` only; some spoil any store from outside. The fault
``none`` is the negative control.
"""

from __future__ import annotations

import json
import pickle
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from truetap.harness.capture_store import CaptureStore, Kept
from truetap.harness.errors import IntegrityError, UsageError
from truetap.harness.model import Capture
from truetap.harness.stores.plain import PlainStore


class _Wrapped:
    """Any store, spoilt from outside."""

    def __init__(self, inner: CaptureStore) -> None:
        self.inner, self.name = inner, inner.name

    def write(self, folder: Path, captures: Iterable[Capture]) -> Sequence[str]:
        return self.inner.write(folder, captures)

    def read(self, folder: Path) -> Mapping[str, Kept]:
        return self.inner.read(folder)


class _HalfPrecision(_Wrapped):
    def write(self, folder: Path, captures: Iterable[Capture]) -> Sequence[str]:
        with np.errstate(over="ignore"):
            return super().write(folder, map(self.narrowed, captures))

    @staticmethod
    def narrowed(capture: Capture) -> Capture:
        return replace(capture, states=capture.states.astype(np.float16).astype(np.float32))


class _SortedKeys(_Wrapped):
    """Keys are kept apart from the data, and sorted: sample-10 comes before sample-2."""

    def read(self, folder: Path) -> Mapping[str, Kept]:
        kept = self.inner.read(folder)
        by_length = sorted(kept.values(), key=lambda one: len(one[0]))
        return dict(zip(sorted(kept), by_length, strict=True))


class _KeepsNothing(_Wrapped):
    def write(self, folder: Path, captures: Iterable[Capture]) -> Sequence[str]:  # noqa: ARG002
        return []

    def read(self, folder: Path) -> Mapping[str, Kept]:  # noqa: ARG002
        return {}


class _AllAtTheEnd(_Wrapped):
    def write(self, folder: Path, captures: Iterable[Capture]) -> Sequence[str]:
        return super().write(folder, list(captures))


class _Swallowed(_Wrapped):
    def write(self, folder: Path, captures: Iterable[Capture]) -> Sequence[str]:
        with suppress(Exception):
            return super().write(folder, captures)
        return []


class _Nameless(_Wrapped):
    def write(self, folder: Path, captures: Iterable[Capture]) -> Sequence[str]:
        try:
            return super().write(folder, captures)
        except Exception:
            raise RuntimeError("captures could not be written") from None


class _FilterCached(_Wrapped):
    """What was ever written is remembered beside the data, and the data is not looked at."""

    def write(self, folder: Path, captures: Iterable[Capture]) -> Sequence[str]:
        notes = folder / "done.json"
        done = set(json.loads(notes.read_text())) if notes.exists() else set()
        written = super().write(folder, (c for c in captures if c.key not in done))
        scratch = notes.with_suffix(".new")
        scratch.write_text(json.dumps(sorted(done.union(written))))
        scratch.rename(notes)
        return written


class _LastGroupLost(PlainStore):
    def save_group(self, folder: Path, group: Sequence[Capture]) -> list[str]:
        return super().save_group(folder, group) if len(group) == 3 else []


class _Numbered(PlainStore):
    """Files are numbered, so their names prove nothing."""

    def save(self, folder: Path, data: bytes) -> None:
        path = folder / f"{len(self.files(folder)):05}.captures"
        path.with_suffix(".partial").write_bytes(data)
        path.with_suffix(".partial").rename(path)

    def checked(self, path: Path) -> bytes:
        return path.read_bytes()


class _InPlace(_Numbered):
    def save(self, folder: Path, data: bytes) -> None:
        (folder / f"{len(self.files(folder)):05}.captures").write_bytes(data)


class _InPlaceShortRead(_InPlace):
    """As many rows as there are: numpy's fromfile does not mind a short file."""

    def decode(self, data: bytes) -> dict[str, Kept]:
        line, _, rest = data.partition(b"\n")
        found: dict[str, Kept] = {}
        with suppress(ValueError):
            for key, ids, shape in json.loads(line):
                row = shape[1] * shape[2] * 4
                rows = min(shape[0], len(rest) // row)
                states = np.frombuffer(rest[: rows * row], "<f4").reshape(rows, *shape[1:])
                found[key], rest = (ids[:rows], states), rest[shape[0] * row :]
        return found


class _PublishedFirst(_Numbered):
    """A file of the right size is published and filled in afterwards."""

    def save(self, folder: Path, data: bytes) -> None:
        head = data.index(b"\n") + 1
        path = folder / f"{len(self.files(folder)):05}.captures"
        path.with_suffix(".partial").write_bytes(data[:head] + bytes(len(data) - head))
        path.with_suffix(".partial").rename(path)
        with path.open("r+b") as file:
            file.write(data)


class _LockReleasedEarly(_Numbered):
    """A pickle under the final name first, which a lock file covers only while it is written."""

    def save(self, folder: Path, data: bytes) -> None:
        path = folder / f"{len(self.files(folder)):05}.captures"
        lock = path.with_suffix(".lock")
        lock.touch()
        path.write_bytes(pickle.dumps(data))
        lock.unlink()
        path.with_suffix(".partial").write_bytes(data)
        path.with_suffix(".partial").rename(path)

    def files(self, folder: Path) -> list[Path]:
        return [p for p in super().files(folder) if not p.with_suffix(".lock").exists()]


class _OneFile(_Numbered):
    """All captures in one file, written anew for each group."""

    def save(self, folder: Path, data: bytes) -> None:
        path = folder / "all.captures"
        head, _, states = data.partition(b"\n")
        old_head, _, old_states = (path.read_bytes() if path.exists() else b"[]").partition(b"\n")
        joined = json.dumps(json.loads(old_head) + json.loads(head)).encode()
        path.write_bytes(joined + b"\n" + old_states + states)


class _SizeOnly(_Numbered):
    """The size stands in the name; that is all that is checked."""

    def save(self, folder: Path, data: bytes) -> None:
        path = folder / f"{len(self.files(folder)):05}-{len(data)}.captures"
        path.with_suffix(".partial").write_bytes(data)
        path.with_suffix(".partial").rename(path)

    def checked(self, path: Path) -> bytes:
        data = path.read_bytes()
        if len(data) != int(path.stem.partition("-")[2]):
            raise IntegrityError(f"{path} is cut short")
        return data


class _StatesOnly(PlainStore):
    """The digest covers the states; keys and tokens stand in a header beside them."""

    def save(self, folder: Path, data: bytes) -> None:
        head, _, states = data.partition(b"\n")
        super().save(folder, states)
        (name,) = {p.stem for p in self.bare(folder)} - {p.stem for p in folder.glob("*.head")}
        (folder / f"{name}.partial").write_bytes(head + b"\n")
        (folder / f"{name}.partial").rename(folder / f"{name}.head")

    def bare(self, folder: Path) -> list[Path]:
        return super().files(folder)

    def clean(self, folder: Path) -> None:
        super().clean(folder)
        for path in self.bare(folder):
            if not path.with_suffix(".head").exists():
                path.unlink()

    def files(self, folder: Path) -> list[Path]:
        return [p for p in self.bare(folder) if p.with_suffix(".head").exists()]

    def checked(self, path: Path) -> bytes:
        states = super().checked(path)
        try:
            head = path.with_suffix(".head").read_bytes()
            self.decode(head + states)
        except (ValueError, TypeError, MemoryError) as error:
            raise IntegrityError(f"the header of {path} is damaged: {error}") from error
        return head + states


class _StartsOver(PlainStore):
    def stored(self, folder: Path) -> dict[str, tuple[int, ...]]:
        for path in self.files(folder):
            path.unlink()
        return {}


class _AllForOne(PlainStore):
    """One damaged file, and everything is written again."""

    def stored(self, folder: Path) -> dict[str, tuple[int, ...]]:
        try:
            return {key: tuple(ids) for key, (ids, _) in self.read(folder).items()}
        except IntegrityError:
            for path in self.files(folder):
                path.unlink()
            return {}


class _PublishedAnyway(_Numbered):
    """What a failed write left is published by the clean-up."""

    def save(self, folder: Path, data: bytes) -> None:
        path = folder / f"{len(self.files(folder)):05}.captures"
        try:
            path.with_suffix(".partial").write_bytes(data)
        finally:
            path.with_suffix(".partial").rename(path)


class _KeyIsDone(PlainStore):
    def is_stored(self, capture: Capture, stored: Mapping[str, tuple[int, ...]]) -> bool:
        return capture.key in stored


class _LastIndexWins(PlainStore):
    """An index of files, which each writer rewrites from what it knows itself."""

    @contextmanager
    def alone(self, folder: Path) -> Iterator[None]:
        self._mine = [path.name for path in self.files(folder)]
        yield

    def save(self, folder: Path, data: bytes) -> None:
        before = set(folder.glob("*.captures"))
        super().save(folder, data)
        self._mine += [path.name for path in set(folder.glob("*.captures")) - before]
        scratch = folder / f"{uuid.uuid4()}.partial"
        scratch.write_text(json.dumps(self._mine))
        scratch.rename(folder / "index.json")

    def clean(self, folder: Path) -> None:
        pass

    def files(self, folder: Path) -> list[Path]:
        index = folder / "index.json"
        try:
            listed = json.loads(index.read_text()) if index.exists() else []
        except ValueError as error:
            raise IntegrityError(f"{index} is damaged") from error
        return [folder / name for name in listed if (folder / name).exists()]


class _Litter(PlainStore):
    """Unfinished files have names of their own each time, and nobody removes them."""

    def save(self, folder: Path, data: bytes) -> None:
        mine = folder / f"{uuid.uuid4()}.staged"
        mine.write_bytes(data)
        super().save(folder, data)
        mine.unlink()


@dataclass(frozen=True)
class Fault:
    """One fault, and the clause that must catch it."""

    caught_by: str
    says: str
    store: type[_Wrapped] | type[PlainStore]


FAULTS: dict[str, Fault] = {
    "none": Fault("", "nothing: the negative control", _Wrapped),
    "half-precision": Fault("STORE-001", "states are kept as float16", _HalfPrecision),
    "sorted-keys": Fault("STORE-001", "captures under each other's keys", _SortedKeys),
    "last-group-lost": Fault("STORE-001", "what does not fill a file is lost", _LastGroupLost),
    "keeps-nothing": Fault("STORE-001", "writes nothing, and says so", _KeepsNothing),
    "published-first": Fault(
        "STORE-002", "a file is published and then filled in", _PublishedFirst
    ),
    "lock-released-early": Fault(
        "STORE-002", "a pickle under the final name, its lock released", _LockReleasedEarly
    ),
    "in-place": Fault("STORE-003", "written under the final name, no rename", _InPlace),
    "short-read": Fault(
        "STORE-003", "no rename, and of a short file as many rows as there are", _InPlaceShortRead
    ),
    "one-file": Fault("STORE-003", "all captures in one file, rewritten in place", _OneFile),
    "no-digest": Fault("STORE-004", "what is read is not checked at all", _Numbered),
    "size-only": Fault("STORE-004", "only the size of a file is checked", _SizeOnly),
    "states-digest-only": Fault(
        "STORE-004", "keys and tokens are outside of the digest", _StatesOnly
    ),
    "starts-over": Fault("STORE-005", "a second run deletes and writes all", _StartsOver),
    "all-at-the-end": Fault("STORE-005", "everything is held back until the end", _AllAtTheEnd),
    "existence-is-done": Fault("STORE-006", "what was ever written counts as done", _FilterCached),
    "all-for-one": Fault("STORE-006", "one damaged file, and all are redone", _AllForOne),
    "swallowed-error": Fault("STORE-007", "a failed write is not told", _Swallowed),
    "nameless-error": Fault("STORE-007", "a failed write does not say why", _Nameless),
    "published-anyway": Fault("STORE-007", "a failed write is published", _PublishedAnyway),
    "key-is-done": Fault("STORE-008", "a stored key counts as done", _KeyIsDone),
    "last-index-wins": Fault("STORE-009", "each writer rewrites the index", _LastIndexWins),
    "litter": Fault("STORE-010", "unfinished files are never removed", _Litter),
}
"""All faults by name."""


class MutantStore:
    """A real store with one fault."""

    def __init__(self, fault: str, inner: CaptureStore) -> None:
        if fault not in FAULTS:
            raise UsageError(
                f"there is no store mutant named {fault!r}", remedy=f"mutants: {', '.join(FAULTS)}"
            )
        self.name = f"{fault}@{inner.name}"
        made = FAULTS[fault].store
        if issubclass(made, _Wrapped):
            self._store: CaptureStore = made(inner)
        elif type(inner) is PlainStore:
            self._store = made()
        else:
            raise UsageError(
                f"the fault {fault!r} is in a step of the store plain, not in {inner.name!r}",
                remedy=f"name it {fault}@plain",
            )

    def write(self, folder: Path, captures: Iterable[Capture]) -> Sequence[str]:
        """Write with the fault."""
        return self._store.write(folder, captures)

    def read(self, folder: Path) -> Mapping[str, Kept]:
        """Read with the fault."""
        return self._store.read(folder)

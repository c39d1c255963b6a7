"""A store at a URL, through fsspec: ``s3://``, ``memory://``, ``file://`` and whatever else it has.

Object stores have no rename and no append. So a shard is uploaded under a temporary key and moved,
and the manifest is written anew for each batch of shards; that is why a batch has many. Shards are
read by downloading them to a file that has no name any more, so that they are memory-mapped as
local ones are and their space is free as soon as nobody uses them.

The local store stays what it is: what makes this one safe would make that one slower.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truetap.harness import names, shard
from truetap.harness.errors import CouldNotRun, IntegrityError, TruetapError, UsageError
from truetap.pipeline import packed_shard
from truetap.pipeline.audit_log import AuditLog
from truetap.pipeline.store import REDO, Store, by_shard, opened, require_recorded, sealed

if TYPE_CHECKING:
    import torch

BATCH = 16
"""Shards between two writings of the manifest: what an interruption can cost in uploads."""


class RemoteStore:
    """The shards under a URL. Any number of processes may read; one may write."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise CouldNotRun(
                f"{url} cannot be reached: {error}", remedy="pip install 'truetap[remote]'"
            ) from error
        try:
            self._files, self._root = fsspec.url_to_fs(url.rstrip("/"))
        except ImportError as error:  # fsspec knows the protocol, and its package is not there
            raise CouldNotRun(
                f"{url} cannot be reached: {error}",
                remedy="install the package that it names; truetap[remote] has that of s3://",
            ) from error
        except ValueError as error:
            raise UsageError(f"{url} is no URL of a store: {error}") from error
        self.folder: str = self._files.unstrip_protocol(self._root)  # without user and password

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return the manifest's lines by shard name, in the order of writing."""
        return by_shard(self._lines(self._manifest()))

    def signature(self, _entry: Mapping[str, Any]) -> None:
        """Return None: a download is compared every time."""
        return

    def mapped(self, entry: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Download a shard; return its tensors, memory-mapped and not compared with anything."""
        name = self._file_of(entry)
        with tempfile.TemporaryDirectory(prefix="truetap-") as folder, self._reached():
            path = Path(folder) / name
            try:
                self._files.get_file(self._at(name), str(path))
            except FileNotFoundError:
                raise IntegrityError(
                    f"shard {self.folder}/{name} is missing", remedy="publish it again"
                ) from None
            if "packed" in entry:
                return packed_shard.unpack(path)
            try:
                return shard.read(path)
            except Exception as error:
                raise IntegrityError(
                    f"shard {self.folder}/{name} cannot be read: {error}", remedy="publish it again"
                ) from error

    def record(self, shards: Iterable[tuple[Path, Mapping[str, Any]]]) -> None:
        """Upload complete shards, then write the manifest with their lines.

        Each file is needed only until the next one is asked for.
        """
        before = self._manifest()
        held = by_shard(self._lines(before))
        lines = dict(held)
        for path, entry in shards:
            self._upload(path, self._file_of(entry))
            lines.pop(entry["shard"], None)  # to the end: the order is that of writing
            lines[entry["shard"]] = dict(entry)
        if self._manifest() != before:
            raise CouldNotRun(
                f"another process has written {self.folder}/manifest.jsonl meanwhile",
                remedy="let one process publish, and run it again",
            )
        data = b"".join(json.dumps(sealed(line)).encode() + b"\n" for line in lines.values())
        self.write("manifest.jsonl", data)
        named = {self._file_of(line) for line in lines.values()}
        for stale in {self._file_of(line) for line in held.values()} - named:
            with self._reached():
                self._files.rm(self._at(stale))

    def write(self, name: str, data: bytes) -> None:
        """Write a small file so that it is there whole or not at all."""
        with tempfile.TemporaryDirectory(prefix="truetap-") as folder:
            path = Path(folder) / "data"
            path.write_bytes(data)
            self._upload(path, name)

    def _upload(self, path: Path, name: str) -> None:
        target = self._at(name)
        partial = target + ".partial"
        with self._reached():
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(path), partial)
            self._files.invalidate_cache()
            there = self._files.size(partial)
            if there != path.stat().st_size:
                raise IntegrityError(
                    f"of {path.stat().st_size:,} bytes of {name} {there:,} came to {self.folder}",
                    remedy="run it again",
                )
            self._files.mv(partial, target)

    def _manifest(self) -> bytes:
        with self._reached():
            self._files.invalidate_cache()
            try:
                return bytes(self._files.cat_file(self._at("manifest.jsonl")))
            except FileNotFoundError:
                return b""

    def _lines(self, data: bytes) -> list[dict[str, Any]]:
        return opened(data[: data.rfind(b"\n") + 1].splitlines(), f"{self.folder}/manifest.jsonl")

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _file_of(self, entry: Mapping[str, Any]) -> str:
        """Return the name of the file that a line is about."""
        name = entry["packed"]["file"] if "packed" in entry else entry["shard"]
        if wrong := names.fault_of(name):
            raise IntegrityError(f"{self.folder} names a shard {name!r}: {wrong}", remedy=REDO)
        return str(name)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Turn what a file system raises into one sentence; each has errors of its own."""
        try:
            yield
        except (TruetapError, FileNotFoundError):
            raise
        except Exception as error:
            raise CouldNotRun(
                f"{self.folder} cannot be used: {type(error).__name__}: {error}",
                remedy="look at the address, the credentials and the network",
            ) from error


def withheld(store: Store) -> list[str]:
    """Return shards that are not published: no audit answers for them yet, or theirs failed.

    Where they have gone they could not be set aside any more.
    """
    return _unproven(store, store.entries())


def _unproven(store: Store, entries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    standing = AuditLog(store).standing(list(entries.values()))
    return [name for name, how in standing.items() if how != "proven"]


def publish(
    store: Store, remote: RemoteStore, *, compress: bool = False
) -> Iterator[tuple[int, int]]:
    """Copy what a remote store lacks, verified; yield how many shards are there, of how many.

    Shards that are ``withheld`` do not count.
    The certificates, which the lines refer to, go first, the audits last. What is sent has been
    compared with its digests, after packing if it is packed.
    """
    entries = store.entries()  # once: extraction may add to it
    for name in _unproven(store, entries):
        del entries[name]
    held = remote.entries()
    todo = [entry for name, entry in entries.items() if _as_made(held.get(name)) != entry]
    for path in sorted((store.folder / "certificates").glob("*.json")):
        remote.write(f"certificates/{path.name}", path.read_bytes())
    yield len(entries) - len(todo), len(entries)
    for at in range(0, len(todo), BATCH):
        batch = todo[at : at + BATCH]
        remote.record(_packed(store, batch) if compress else _plain(store, batch))
        yield len(entries) - len(todo) + at + len(batch), len(entries)
    if (audits := AuditLog(store).path).exists():
        remote.write(audits.name, audits.read_bytes())


def ratio(entries: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return the packed shards' bytes over those of the shards themselves; None without any."""
    packed = [entry["packed"] for entry in entries.values() if "packed" in entry]
    whole = sum(int(facts["of_bytes"]) for facts in packed)
    return sum(int(facts["bytes"]) for facts in packed) / whole if whole else None


def _as_made(line: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a line without what publishing added to it."""
    return None if line is None else {k: v for k, v in line.items() if k != "packed"}


def _plain(
    store: Store, batch: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    for entry in batch:
        store.verified(entry)
        yield store.path(entry["shard"]), entry


def _packed(
    store: Store, batch: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    for entry in batch:
        source = store.path(entry["shard"])
        store.verified(entry)
        with tempfile.TemporaryDirectory(prefix="truetap-") as folder:
            path = Path(folder) / f"{source.stem}.packed{source.suffix}"
            size = packed_shard.pack(source, path)
            require_recorded(packed_shard.unpack(path), entry, path)
            facts = {
                "file": path.name,
                "codec": packed_shard.CODEC,
                "bytes": size,
                "of_bytes": source.stat().st_size,
            }
            yield path, {**entry, "packed": facts}

"""The store: shards of captures with a manifest, one line per finished shard.

A shard counts as finished only if the manifest has its line *and* its tensors have the digests of
that line. Everything needed to trust a shard stands in its line: verifier, boundaries, norm state,
dtype, engine, the time, and the certificate under which it was made or that there was none
(``truetap.pipeline.provenance`` follows that). The line has a digest of its own, because
a changed byte in it can give a conversation another's states. Any number of processes may read;
one may write (``RunFolder.lock``).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truetap.harness import names, shard
from truetap.harness.errors import IntegrityError
from truetap.pipeline import run_folder

if TYPE_CHECKING:
    import torch

READERS = 8
"""Threads that read and digest at once: a core digests 1 to 2 GB/s, a disk may give more."""
REDO = "run truetap extract again: it redoes exactly the shards that are bad or missing"


@dataclass(frozen=True)
class Sample:
    """Captures of one conversation of T tokens."""

    id: str
    token_ids: torch.Tensor
    """``[T]`` int64."""
    loss_mask: torch.Tensor
    """``[T]`` uint8."""
    states: torch.Tensor
    """``[T, boundaries, hidden]`` in the engine's dtype, memory-mapped."""


class Store:
    """A folder of shards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def manifest(self) -> Path:
        """The manifest's path."""
        return self.folder / "manifest.jsonl"

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return the manifest's lines by shard name, in the order of writing.

        Of two for one shard the later counts.
        """
        return by_shard(sealed_lines(self.manifest))

    def repair(self) -> list[str]:
        """Remove what an interruption or damage left; return what was done, in words.

        For the one process that writes. Shards whose lines are dropped count as missing.
        """
        done = drop_damaged(self.manifest)
        for pattern in ("*.partial", ".tmp*"):  # safetensors writes to a .tmp of its own
            for path in self.folder.glob(pattern):
                path.unlink()
                done.append(f"{path}, left by an interrupted write, was removed")
        return done

    def path(self, name: str) -> Path:
        """Return where a shard lies; ``IntegrityError`` for a name that leads out of the folder."""
        if wrong := names.fault_of(name):
            raise IntegrityError(f"{self.manifest} names a shard {name!r}: {wrong}", remedy=REDO)
        return self.folder / name

    def record(self, entry: dict[str, Any], partial: Path | None = None) -> dict[str, Any]:
        """Publish a shard's partial file, then add its line to the manifest; return the line."""
        shard.publish(self.path(entry["shard"]), partial)
        self.append(entry)
        return entry

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line to the manifest, with its digest."""
        run_folder.append_line(self.manifest, sealed(entry))

    def reject(self, entries: Sequence[Mapping[str, Any]], reason: str) -> Path:
        """Take shards out of the manifest; return where their files are kept, with the reason.

        The files go first: an interruption leaves lines without files, which are redone as well.
        """
        aside = self.folder / "rejected"
        for entry in entries:
            path = self.path(entry["shard"])
            kept = aside / f"{path.stem}.{entry['digests']['states'][:12]}{path.suffix}"
            run_folder.write_json(kept.with_suffix(".json"), {"reason": reason, "line": entry})
            if path.exists():
                path.rename(kept)
        gone = {entry["shard"] for entry in entries}
        _rewrite(
            self.manifest,
            [
                line
                for line in run_folder.whole_lines(self.manifest)
                if (held := unsealed(line)) is None or held["shard"] not in gone
            ],
        )
        return aside

    def holds(
        self,
        entry: Mapping[str, Any] | None,
        ids: Sequence[str],
        token_ids: Iterable[int],
        loss_mask: Iterable[int],
    ) -> bool:
        """Return whether a shard is there and holds exactly these conversations, concatenated.

        The tokens are compared too: a conversation may have been answered anew under its id.
        ``IntegrityError`` if it is damaged.
        """
        if entry is None or entry.get("ids") != list(ids):
            return False
        held = self.verified(entry)
        wanted = list(zip(token_ids, loss_mask, strict=True))
        return wanted == list(
            zip(held["token_ids"].tolist(), held["loss_mask"].tolist(), strict=True)
        )

    def verified(self, entry: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return a shard's tensors; ``IntegrityError`` if they are not what was recorded."""
        tensors = self.mapped(entry)
        require_recorded(tensors, entry, self.path(entry["shard"]))
        return tensors

    def mapped(self, entry: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return a shard's tensors, memory-mapped and not compared with anything."""
        path = self.path(entry["shard"])
        if path.is_symlink():  # a digest can be right today and the file another's tomorrow
            raise IntegrityError(f"shard {path} is a link, not a file of this folder", remedy=REDO)
        try:
            return shard.read(path)
        except FileNotFoundError:
            raise IntegrityError(f"shard {path} is missing", remedy=REDO) from None
        except Exception as error:  # safetensors has its own error type, and corrupt headers many
            raise IntegrityError(f"shard {path} cannot be read: {error}", remedy=REDO) from error

    def signature(self, entry: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Return what changes when a shard's file is replaced or written to; None if it is gone."""
        try:
            status = self.path(entry["shard"]).lstat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def tokens(self, entry: Mapping[str, Any]) -> list[list[int]]:
        """Return the token ids of a shard's requests, verified, without reading its states."""
        from safetensors import safe_open

        path = self.path(entry["shard"])
        try:
            with safe_open(path, framework="pt") as file:
                held = {name: file.get_tensor(name) for name in ("token_ids", "offsets")}
        except FileNotFoundError:
            raise IntegrityError(f"shard {path} is missing", remedy=REDO) from None
        except Exception as error:
            raise IntegrityError(f"shard {path} cannot be read: {error}", remedy=REDO) from error
        digests = entry.get("digests", {})
        if wrong := [name for name in held if shard.digest(held[name]) != digests.get(name)]:
            raise IntegrityError(
                f"shard {path} is corrupt: {', '.join(wrong)} differ from the recorded digests",
                remedy=REDO,
            )
        bounds = held["offsets"].tolist()
        return [held["token_ids"][a:b].tolist() for a, b in pairwise(bounds)]

    def samples(
        self, ids: Sequence[str], *, verified: Callable[[], None] = lambda: None
    ) -> list[Sample]:
        """Return the captures of the given conversations, every shard verified first.

        ``verified`` is called after each shard.
        """
        found: dict[str, Sample] = {}
        entries = list(self.entries().values())
        shards = []
        with ThreadPoolExecutor(READERS) as readers:
            for tensors in readers.map(self.verified, entries):
                shards.append(tensors)
                verified()
        for entry, tensors in zip(entries, shards, strict=True):
            bounds = tensors["offsets"].tolist()
            for index, sample_id in enumerate(entry["ids"]):
                rows = slice(bounds[index], bounds[index + 1])
                found[sample_id] = Sample(
                    sample_id,
                    tensors["token_ids"][rows],
                    tensors["loss_mask"][rows],
                    tensors["states"][rows],
                )
        if missing := [sample_id for sample_id in ids if sample_id not in found]:
            raise IntegrityError(
                f"{len(missing)} of {len(ids)} conversations have no captures in {self.folder}, "
                f"the first of them {missing[0]!r}",
                remedy=REDO,
            )
        return [found[sample_id] for sample_id in ids]


def require_recorded(
    tensors: Mapping[str, torch.Tensor],
    entry: Mapping[str, Any],
    where: object,
    names: Sequence[str] = shard.TENSORS,
) -> None:
    """Raise ``IntegrityError`` unless tensors of a shard have the digests of its line."""
    if wrong := shard.mismatches(tensors, entry.get("digests", {}), names):
        raise IntegrityError(
            f"shard {where} is corrupt: {', '.join(wrong)} differ from the recorded digests",
            remedy=REDO,
        )


def by_shard(lines: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return lines by shard name, in the order of writing; of two for one shard the later."""
    found: dict[str, dict[str, Any]] = {}
    for entry in lines:
        found.pop(entry["shard"], None)
        found[entry["shard"]] = entry
    return found


def sealed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line about a shard with its own digest."""
    return {**entry, "sha256": _digest(entry)}


def sealed_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of sealed lines; ``IntegrityError`` if one is damaged."""
    return opened(run_folder.whole_lines(path), path)


def opened(lines: Iterable[bytes], where: object) -> list[dict[str, Any]]:
    """Return the content of sealed lines; ``IntegrityError`` if one is damaged."""
    found = []
    for number, line in enumerate(lines, start=1):
        entry = unsealed(line)
        if entry is None:
            raise IntegrityError(f"line {number} of {where} is not as it was written", remedy=REDO)
        if wrong := names.fault_of(entry["shard"]):
            raise IntegrityError(
                f"line {number} of {where} names {entry['shard']!r}, which is no file of this "
                f"folder: {wrong}",
                remedy=REDO,
            )
        found.append(entry)
    return found


def drop_damaged(path: Path) -> list[str]:
    """Remove damaged lines from a file of sealed lines; return what was done, in words."""
    lines = run_folder.whole_lines(path)
    sound = [line for line in lines if (e := unsealed(line)) and names.fault_of(e["shard"]) is None]
    if len(sound) == len(lines):
        return []
    _rewrite(path, sound)
    return [f"{len(lines) - len(sound)} damaged lines of {path} were dropped"]


def _rewrite(path: Path, lines: Sequence[bytes]) -> None:
    """Replace the lines of a file, durably, all or none."""
    scratch = path.with_name(path.name + ".partial")
    with scratch.open("wb") as file:
        file.write(b"".join(line + b"\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())
    scratch.rename(path)


def _digest(entry: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()


def unsealed(line: bytes) -> dict[str, Any] | None:
    """Return a sealed line's content, or None if it is not what was written."""
    try:
        entry = run_folder.json_object(line)
    except ValueError:
        return None
    return entry if entry.pop("sha256", None) == _digest(entry) and "shard" in entry else None

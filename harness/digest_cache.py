"""Digests of large files, remembered between processes: a verifier of terabytes takes an hour.

An entry counts only for the very same file: path, device, inode, size, and the times of the last
change of its bytes and of itself, of which no program can set the second. Whatever is wrong with an
entry, or with the cache, the digest is worked out anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from functools import lru_cache
from pathlib import Path

from platformdirs import user_cache_path

SMALLEST = 8 << 20
"""Bytes; a smaller file is quicker digested than looked up."""
SETTLED_NS = 2_000_000_000
"""A file changed more recently could change again within the same tick of the file system's
clock, and nobody would see it: it is not remembered yet."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, hex, from the cache if it is known there."""
    if path.stat().st_size < SMALLEST:
        return _worked_out(path)
    return _known(_stamp(path), path)


@lru_cache(maxsize=4096)
def _known(stamp: str, path: Path) -> str:
    entry = _entry_path(stamp)
    if (remembered := _remembered(entry, stamp)) is not None:
        return remembered
    digest = _worked_out(path)
    settled = time.time_ns() - path.stat().st_ctime_ns > SETTLED_NS
    if settled and _stamp(path) == stamp:
        _remember(entry, stamp, digest)
    return digest


def _stamp(path: Path) -> str:
    """Return, as JSON, everything that tells a file and this state of it from others."""
    told = path.stat()
    stamp = {
        "path": str(path.resolve()),
        "device": told.st_dev,
        "inode": told.st_ino,
        "size": told.st_size,
        "mtime_ns": told.st_mtime_ns,
        "ctime_ns": told.st_ctime_ns,
    }
    return json.dumps(stamp, sort_keys=True)


def _worked_out(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entry_path(stamp: str) -> Path:
    """Return where a file's entry is: one a path, so that a changed file leaves none behind."""
    name = hashlib.sha256(json.loads(stamp)["path"].encode(errors="surrogateescape")).hexdigest()
    return user_cache_path("truetap") / "digests" / f"{name}.json"


def _remembered(entry: Path, stamp: str) -> str | None:
    try:
        known = json.loads(entry.read_text())
        digest = known["sha256"]
        if known["stamp"] == stamp and known["check"] == _check(stamp, digest):
            return str(digest) if _SHA256.fullmatch(digest) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    return None


def _remember(entry: Path, stamp: str, digest: str) -> None:
    told = {"stamp": stamp, "sha256": digest, "check": _check(stamp, digest)}
    with contextlib.suppress(OSError):  # a cache that cannot be written is only slow
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=entry.parent, prefix=".new-")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(told, file)
            Path(scratch).rename(entry)
        except OSError:
            Path(scratch).unlink(missing_ok=True)
            raise


def _check(stamp: str, digest: str) -> str:
    """Return what shows that an entry was damaged; whoever can write here can forge it anyway."""
    return hashlib.sha256(f"{stamp}\0{digest}".encode(errors="surrogateescape")).hexdigest()

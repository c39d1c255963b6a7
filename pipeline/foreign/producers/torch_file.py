"""Opens files of ``torch.save`` that nobody vouches for.

``torch.load`` runs what a pickle tells it to unless ``weights_only`` is set, and it is always set
here. A file is looked at before that: it must be the zip archive that ``torch.save`` writes, with
uncompressed members, and a tensor may not be larger than the bytes that stand for it.
"""

from __future__ import annotations

import gzip
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

from truetap.pipeline.foreign.producers.sample import BadFile

PICKLE_LIMIT = 1 << 20
"""Bytes of a ``data.pkl``: those of real files have less than one thousand."""
MEMBERS_LIMIT = 1000


def load(path: Path, *, limit: int) -> Any:
    """Return the content of a file of ``torch.save``, or of one compressed by gzip.

    ``limit`` is how many bytes it may have, uncompressed. ``BadFile`` for anything that is not
    plain data.
    """
    if path.stat().st_size > limit:
        raise BadFile("unreadable", f"larger than any states of this verifier: {limit:,} bytes")
    if path.suffix != ".gz":
        return _load(path)
    with tempfile.NamedTemporaryFile(prefix="truetap-audit-") as plain:
        _unpack(path, plain, limit)
        return _load(Path(plain.name))


def _unpack(path: Path, into: IO[bytes], limit: int) -> None:
    """Decompress, and stop where a small file would fill the disk."""
    done = 0
    try:
        with gzip.open(path, "rb") as packed:
            while block := packed.read(1 << 20):
                done += len(block)
                if done > limit:
                    raise BadFile(
                        "unreadable",
                        f"unpacks to more than any states of this verifier: {limit:,} bytes",
                    )
                into.write(block)
    except (EOFError, zlib.error) as error:
        raise BadFile("truncated", f"cut short or damaged: {error}") from None
    except gzip.BadGzipFile as error:
        raise BadFile("unreadable", f"not a gzip file: {error}") from None
    into.flush()


def _load(path: Path) -> Any:
    _require_plain_zip(path)
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch, pickle and zip have many kinds
        first = str(error).strip().partition("\n")[0]
        if "weights_only" in str(error) or "Unsupported" in first or "GLOBAL" in str(error):
            raise BadFile(
                "code", "would run code when loaded, or holds more than tensors: not loaded"
            ) from None
        raise BadFile("unreadable", f"torch cannot read it: {first}") from None
    _require_backed(content)
    return content


def _require_plain_zip(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        with path.open("rb") as file:
            began = file.read(2) == b"PK"
        if began:
            raise BadFile("truncated", "cut short: the end of the archive is missing") from None
        raise BadFile("unreadable", f"not a file that torch.save writes: {error}") from None
    packed = [member for member in members if member.compress_type != zipfile.ZIP_STORED]
    pickles = [member for member in members if member.filename.endswith("data.pkl")]
    if packed or len(members) > MEMBERS_LIMIT or sum(p.file_size for p in pickles) > PICKLE_LIMIT:
        raise BadFile("unreadable", "not an archive as torch.save writes it")


def _require_backed(content: Any) -> None:
    """Refuse tensors that claim more elements than their storage has: views that repeat it."""
    import torch

    values = content if isinstance(content, list) else [content]
    for value in values:
        inner = list(value.values()) if isinstance(value, dict) else [value]
        for part in inner:
            for tensor in part if isinstance(part, list) else [part]:
                if isinstance(tensor, torch.Tensor) and not _backed(tensor):
                    raise BadFile("unreadable", "a tensor in it is no plain array")


def _backed(tensor: Any) -> bool:
    import torch

    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return False
    stored: int = tensor.untyped_storage().nbytes()
    needed: int = tensor.numel() * tensor.element_size()
    return needed <= stored

"""One file of captures: many requests concatenated, in safetensors.

Tensors in the file, R rows in all and N requests:

* ``states`` ``[R, boundaries, hidden]`` in the engine's dtype,
* ``token_ids`` ``[R]`` int64,
* ``loss_mask`` ``[R]`` uint8, 1 where the token belongs to the assistant's text,
* ``offsets`` ``[N + 1]`` int64: request i owns rows ``offsets[i]`` to ``offsets[i + 1]``.

Digests are taken of each tensor's raw bytes, not of the file, so that they survive a rewrite of
the header.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from truetap.harness.errors import CheckFailed

if TYPE_CHECKING:
    import torch

TENSORS = ("loss_mask", "offsets", "states", "token_ids")
_KINDS = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
}


def partial_path(path: Path, owner: str = "") -> Path:
    """Return where a shard is written before it is complete; never read as a shard.

    ``owner`` tells the files of writers apart that may both believe that the shard is theirs.
    """
    return path.with_name(f"{path.name}.{owner}.partial" if owner else f"{path.name}.partial")


@dataclass(frozen=True)
class Layout:
    """Where everything of a shard stands in its file, known before the first row is.

    ``lengths`` are the tokens of each request; rows are ``[boundaries, hidden]`` of ``dtype``.
    """

    lengths: tuple[int, ...]
    boundaries: int
    hidden: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """Rows of the whole shard."""
        return sum(self.lengths)

    @property
    def row_bytes(self) -> int:
        """Bytes of the states of one token."""
        return int(self.boundaries * self.hidden * self.dtype.itemsize)

    @cached_property
    def _table(self) -> dict[str, Any]:
        """Return safetensors' table. Tensors of large elements come first: all are aligned so."""
        table: dict[str, Any] = {}
        at = 0
        kind = _KINDS[str(self.dtype).removeprefix("torch.")]
        for name, dtype, row_bytes, shape in (
            ("offsets", "I64", 8, [len(self.lengths) + 1]),
            ("token_ids", "I64", 8, [self.rows]),
            ("states", kind, self.row_bytes, [self.rows, self.boundaries, self.hidden]),
            ("loss_mask", "U8", 1, [self.rows]),
        ):
            end = at + row_bytes * shape[0]
            table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            at = end
        return table

    @cached_property
    def header(self) -> bytes:
        """The file's beginning: the length of the table in eight bytes, then the table."""
        text = json.dumps(self._table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def place(self, name: str) -> int:
        """Return where in the file a tensor begins."""
        return len(self.header) + int(self._table[name]["data_offsets"][0])


class ShardFile:
    """A partial file that is written in place, its rows in any order and by any threads."""

    def __init__(self, partial: Path, layout: Layout, loss_masks: Sequence[bytes]) -> None:
        self.partial, self.layout = partial, layout
        self._states, self._ids = layout.place("states"), layout.place("token_ids")
        self._file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            offsets = np.cumsum([0, *layout.lengths], dtype=np.int64)
            self._write(layout.header + offsets.tobytes(), 0)
            self._write(b"".join(loss_masks), layout.place("loss_mask"))
        except OSError:
            self.discard()
            raise

    def write(self, row: int, states: Any) -> None:
        """Write states of some consecutive rows: bytes of ``[rows, boundaries, hidden]``."""
        self._write(states, self._states + row * self.layout.row_bytes)

    def sync(self) -> None:
        """Bring what was written so far to the disk."""
        os.fdatasync(self._file)

    def close(self, token_ids: npt.NDArray[np.int64]) -> None:
        """Write the ids of all rows and bring everything to the disk.

        The file is complete if all rows' states were written before. Ids come once for all: threads
        that write to one file wait for each other, for a little as long as for much.
        """
        try:
            self._write(token_ids, self._ids)
            os.fsync(self._file)
        except OSError:
            self.discard()
            raise
        os.close(self._file)

    def discard(self) -> None:
        """Remove the file. What its file system still has to say of it is of no interest."""
        with suppress(OSError):
            os.close(self._file)
        with suppress(OSError):
            self.partial.unlink(missing_ok=True)

    def _write(self, data: Any, at: int) -> None:
        left = memoryview(data).cast("B")
        while left:  # a full disk cuts a write short before it refuses one
            done = os.pwrite(self._file, left, at)
            left, at = left[done:], at + done


def write_partial(
    path: Path,
    states: Sequence[torch.Tensor],
    token_ids: Sequence[Sequence[int]],
    loss_masks: Sequence[bytes],
) -> dict[str, str]:
    """Write the captures of some requests to ``partial_path(path)``, fsynced; return digests.

    ``states[i]`` is ``[tokens, boundaries, hidden]``, ``token_ids[i]`` and ``loss_masks[i]`` have
    one entry a token: ``CheckFailed`` if not, because one row too few shifts all requests after it.
    Nothing is left behind if the write fails. ``publish`` makes it a shard.
    """
    import torch

    for index, one in enumerate(zip(states, token_ids, loss_masks, strict=True)):
        rows, ids, mask = map(len, one)
        if not rows == ids == mask:
            raise CheckFailed(
                f"request {index} has {rows} rows, {ids} token ids and a loss mask of {mask}",
                remedy="store the ids that the engine computed, placeholders expanded, and extend "
                "the mask by zeros there",
            )
    lengths = tuple(map(len, token_ids))
    _, boundaries, hidden = states[0].shape
    file = ShardFile(
        partial_path(path), Layout(lengths, boundaries, hidden, states[0].dtype), loss_masks
    )
    try:
        for row, its in zip(accumulate((0, *lengths)), states, strict=False):
            file.write(row, raw(its))
    except BaseException:
        file.discard()
        raise
    file.close(np.array([token for ids in token_ids for token in ids], dtype=np.int64))
    tensors = {
        "states": torch.cat(list(states)),
        "token_ids": torch.tensor([t for ids in token_ids for t in ids], dtype=torch.int64),
        "loss_mask": torch.frombuffer(bytearray(b"".join(loss_masks)), dtype=torch.uint8),
        "offsets": torch.cumsum(torch.tensor([0, *lengths]), 0),
    }
    return {name: digest(tensor) for name, tensor in tensors.items()}


def publish(path: Path, partial: Path | None = None) -> None:
    """Rename a complete partial file to its final name, durably."""
    (partial or partial_path(path)).rename(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a shard, memory-mapped; raises safetensors' error on a bad file."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = load_file(path)
    return tensors


def digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a CPU tensor's raw bytes, hex."""
    return hashlib.sha256(raw(tensor)).hexdigest()


def checksum(data: memoryview) -> str:
    """Return a checksum of bytes on their way through memory and disk, hex; no signature.

    It is an order of magnitude faster than a digest, which is taken once, of what is on the disk.
    """
    import xxhash

    return str(xxhash.xxh3_128_hexdigest(data))


def raw(tensor: torch.Tensor) -> memoryview:
    """Return the raw bytes of a CPU tensor, row-major; no copy if it is contiguous."""
    import torch

    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


def mismatches(
    tensors: Mapping[str, Any], digests: Mapping[str, str], names: Sequence[str] = TENSORS
) -> list[str]:
    """Return which of ``names`` are absent or have other bytes than ``digests`` says."""
    return [
        name for name in names if name not in tensors or digest(tensors[name]) != digests.get(name)
    ]

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
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truetap.harness.errors import CheckFailed

if TYPE_CHECKING:
    import torch

TENSORS = ("loss_mask", "offsets", "states", "token_ids")


def partial_path(path: Path) -> Path:
    """Return where a shard is written before it is complete; never read as a shard."""
    return path.with_name(path.name + ".partial")


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
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    for index, of_one in enumerate(zip(states, token_ids, loss_masks, strict=True)):
        rows, ids, mask = map(len, of_one)
        if not rows == ids == mask:
            raise CheckFailed(
                f"request {index} has {rows} rows, {ids} token ids and a loss mask of {mask}",
                remedy="store the ids that the engine computed, placeholders expanded, and extend "
                "the mask by zeros there",
            )
    counts = torch.tensor([0, *(len(ids) for ids in token_ids)])
    tensors = {
        "states": torch.cat(list(states)).contiguous(),
        "token_ids": torch.tensor([t for ids in token_ids for t in ids], dtype=torch.int64),
        "loss_mask": torch.frombuffer(bytearray(b"".join(loss_masks)), dtype=torch.uint8),
        "offsets": torch.cumsum(counts, 0),
    }
    partial = partial_path(path)
    try:
        save_file(tensors, partial)
        partial.chmod(0o644)  # safetensors makes files that only their owner can read
        with partial.open("rb") as written:
            os.fsync(written.fileno())
    except Exception as error:
        partial.unlink(missing_ok=True)
        # safetensors tells a full disk and the like in its message only.
        number = re.search(r"\(os error (\d+)\)", str(error))
        if isinstance(error, SafetensorError) and number:
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(partial)) from error
        raise
    return {name: digest(tensor) for name, tensor in tensors.items()}


def publish(path: Path) -> None:
    """Rename a complete partial file to its final name, durably."""
    partial_path(path).rename(path)
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
    import torch

    flat = tensor.contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(memoryview(flat.numpy())).hexdigest()


def mismatches(
    tensors: Mapping[str, Any], digests: Mapping[str, str], names: Sequence[str] = TENSORS
) -> list[str]:
    """Return which of ``names`` are absent or have other bytes than ``digests`` says."""
    return [
        name for name in names if name not in tensors or digest(tensors[name]) != digests.get(name)
    ]

"""A shard made smaller without loss, for slow links: the states byte by byte, then zstd.

The high bytes of neighbouring bfloat16 values, sign and exponent, are alike, and the low ones are
nearly noise. Apart they compress to about two thirds; interleaved to far less. The small tensors
stay as they are. Digests are those of the shard itself: what is unpacked is compared with them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truetap.harness import shard
from truetap.harness.errors import CouldNotRun, IntegrityError

if TYPE_CHECKING:
    from types import ModuleType

    import torch

CODEC = "byte-planes+zstd"
LEVEL = 1
"""zstd's fastest: higher ones halve the speed for one twentieth."""
SMALL = tuple(name for name in shard.TENSORS if name != "states")
DTYPES = ("bfloat16", "float16", "float32")


def pack(source: Path, target: Path) -> int:
    """Write a shard in packed form; return its bytes."""
    import torch
    from safetensors.torch import save_file

    zstandard = _library()
    tensors = shard.read(source)
    states = tensors["states"]
    by_value = states.contiguous().flatten().view(torch.uint8).view(-1, states.element_size())
    planes = {}
    for number in range(states.element_size()):  # one after the other: each is a copy
        plane = memoryview(by_value[:, number].contiguous().numpy())
        frame = zstandard.ZstdCompressor(level=LEVEL).compress(plane)
        planes[f"plane.{number}"] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    facts = {"dtype": str(states.dtype).removeprefix("torch."), "shape": list(states.shape)}
    small = {name: tensors[name].clone() for name in SMALL}
    save_file({**small, **planes}, target, {"codec": CODEC, "states": json.dumps(facts)})
    return target.stat().st_size


def unpack(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a packed shard, in memory; ``IntegrityError`` if it is damaged.

    They are not compared with any digests.
    """
    from safetensors import safe_open

    zstandard = _library()
    try:
        with safe_open(path, framework="pt") as file:
            found = file.metadata() or {}
            if found.get("codec") != CODEC:
                raise ValueError(f"its codec is {found.get('codec')!r}, not {CODEC!r}")
            tensors = {name: file.get_tensor(name).clone() for name in SMALL}
            rows = len(tensors["token_ids"])
            tensors["states"] = _states(file, json.loads(found["states"]), rows, zstandard)
    except Exception as error:  # of safetensors, zstandard and json; a damaged file can give any
        raise IntegrityError(f"packed shard {path.name} cannot be read: {error}") from error
    return tensors


def _states(file: Any, facts: dict[str, Any], rows: int, zstandard: ModuleType) -> torch.Tensor:
    import torch

    name, shape = facts["dtype"], [int(n) for n in facts["shape"]]
    if name not in DTYPES or len(shape) != 3 or shape[0] != rows or min(shape) < 0:
        raise ValueError(f"its states are {name} {shape} for {rows} tokens")
    dtype, values = getattr(torch, name), math.prod(shape)
    frames = [
        memoryview(file.get_tensor(f"plane.{number}").numpy()) for number in range(dtype.itemsize)
    ]
    for number, frame in enumerate(frames):  # before anything of that size is made
        if (size := zstandard.get_frame_parameters(frame).content_size) != values:
            raise ValueError(f"plane {number} has {size} bytes for {values} values")
    by_value = torch.empty(values, dtype.itemsize, dtype=torch.uint8)
    for number, frame in enumerate(frames):
        plane = bytearray(zstandard.ZstdDecompressor().decompress(frame))
        by_value[:, number] = torch.frombuffer(plane, dtype=torch.uint8)
    return by_value.flatten().view(dtype).view(shape)


def _library() -> ModuleType:
    try:
        import zstandard
    except ImportError as error:
        raise CouldNotRun(
            f"packed shards need zstd: {error}", remedy="pip install 'truetap[remote]'"
        ) from error
    return zstandard

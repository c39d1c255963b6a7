"""Packing is lossless, for every dtype and every value."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from truetap.harness import shard
from truetap.harness.errors import IntegrityError
from truetap.pipeline import packed_shard

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.torch


def write(folder: Path, states: Any) -> tuple[Path, dict[str, str]]:
    path, rows = folder / "shard-0.safetensors", len(states)
    digests = shard.write_partial(path, [states], [list(range(rows))], [b"\1" * rows])
    shard.publish(path)
    return path, digests


@pytest.mark.parametrize("dtype", packed_shard.DTYPES)
def test_every_bit_comes_back(tmp_path: Path, dtype: str) -> None:
    import torch

    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(64, 4, 256)
    values = (
        bits.view(torch.int32) if dtype == "float32" else bits
    )  # NaN, infinities, zeros of both signs
    path, digests = write(tmp_path, values.view(getattr(torch, dtype)))
    packed = tmp_path / "packed"
    assert packed_shard.pack(path, packed) == packed.stat().st_size
    assert shard.mismatches(packed_shard.unpack(packed), digests) == []


def test_values_as_states_have_them_become_smaller(tmp_path: Path) -> None:
    import torch

    states = torch.randn(200, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    path, _ = write(tmp_path, states)
    assert packed_shard.pack(path, tmp_path / "packed") < 0.8 * path.stat().st_size


def shape(facts: dict[str, Any]) -> None:
    facts["states"]["shape"][1] += 1


def rows(facts: dict[str, Any]) -> None:
    facts["states"]["shape"][0] *= 2
    facts["states"]["shape"][1] //= 2


def dtype(facts: dict[str, Any]) -> None:
    facts["states"]["dtype"] = "Tensor"


def wider(facts: dict[str, Any]) -> None:
    facts["states"]["dtype"] = "float32"


def codec(facts: dict[str, Any]) -> None:
    facts["codec"] = "none"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (shape, "bytes for"),
        (rows, "for 8 tokens"),
        (dtype, "its states are Tensor"),
        (wider, r"plane\.2"),
        (codec, "its codec is 'none'"),
    ],
)
def test_what_a_packed_file_claims_is_checked(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    path, _ = write(tmp_path, torch.ones(8, 2, 3, dtype=torch.bfloat16))
    packed = tmp_path / "packed"
    packed_shard.pack(path, packed)
    with safe_open(packed, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        facts = {**file.metadata(), "states": json.loads(file.metadata()["states"])}
    change(facts)
    save_file(tensors, packed, {**facts, "states": json.dumps(facts["states"])})
    with pytest.raises(IntegrityError, match=f"cannot be read: .*{said}"):
        packed_shard.unpack(packed)

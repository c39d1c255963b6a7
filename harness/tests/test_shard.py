"""Shards: what is read is bit for bit what was written, or there is nothing to read."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from truetap.harness import envelope, shard
from truetap.harness.errors import CheckFailed, CouldNotRun

pytestmark = pytest.mark.torch

LENGTHS = (1, 5, 3)
IDS = [[11], [1, 2, 3, 4, 128_000], [7, 7, 7]]
MASKS = [b"\1", b"\0\0\1\1\1", b"\0\1\0"]


def captures(dtype: str) -> list[Any]:
    """Random bits, with NaN, infinities and subnormals among them as the dtype has them."""
    import torch

    kind = getattr(torch, dtype)
    bits = torch.Generator().manual_seed(3)
    return [
        torch.randint(0, 256, (rows, 3, 4 * kind.itemsize), dtype=torch.uint8, generator=bits).view(
            kind
        )
        for rows in LENGTHS
    ]


def write(path: Path, dtype: str = "bfloat16") -> dict[str, str]:
    digests = shard.write_partial(path, captures(dtype), IDS, MASKS)
    shard.publish(path)
    return digests


def raw(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_what_is_read_is_bit_for_bit_what_was_written(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "shard-0.safetensors"
    digests = write(path, dtype)
    tensors = shard.read(path)
    assert sorted(tensors) == list(shard.TENSORS)
    assert str(tensors["states"].dtype) == f"torch.{dtype}"
    assert tensors["offsets"].tolist() == [0, 1, 6, 9]
    for i, (start, end) in enumerate(pairwise(tensors["offsets"].tolist())):
        assert tensors["states"][start:end].shape == (LENGTHS[i], 3, 4)
        assert raw(tensors["states"][start:end]) == raw(captures(dtype)[i])
        assert tensors["token_ids"][start:end].tolist() == IDS[i]
        assert bytes(tensors["loss_mask"][start:end].numpy()) == MASKS[i]
    assert shard.mismatches(tensors, digests) == []


@pytest.mark.parametrize(
    ("rows", "ids", "mask"), [(275, 20, 20), (275, 275, 20), (20, 275, 275), (19, 20, 20)]
)
def test_rows_ids_and_mask_of_a_request_are_of_one_length(
    tmp_path: Path, rows: int, ids: int, mask: int
) -> None:
    """CASE-17: 20 ids of the client are 275 rows of the server, which expands a placeholder."""
    import torch

    lists = [[1, 2], list(range(ids))], [b"\0\1", bytes(mask)]
    with pytest.raises(CheckFailed, match=f"1 has {rows} rows, {ids} token ids .* of {mask}") as no:
        shard.write_partial(tmp_path / "s", [torch.ones(n, 2, 4) for n in (2, rows)], *lists)
    assert "extend the mask by zeros" in no.value.remedy
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", shard.TENSORS)
@pytest.mark.parametrize("where", [0, -1])
def test_one_flipped_bit_is_seen_and_only_its_tensor_named(
    tmp_path: Path, name: str, where: int
) -> None:
    import torch

    path = tmp_path / "shard-0.safetensors"
    digests = write(path)
    tensors = {key: tensor.clone() for key, tensor in shard.read(path).items()}
    tensors[name].view(torch.uint8).flatten()[where] ^= 1
    assert shard.mismatches(tensors, digests) == [name]


def test_absent_tensors_and_absent_digests_are_mismatches(tmp_path: Path) -> None:
    path = tmp_path / "shard-0.safetensors"
    digests = write(path)
    tensors = shard.read(path)
    del tensors["loss_mask"], digests["states"]
    assert shard.mismatches(tensors, digests) == ["loss_mask", "states"]


def test_a_digest_is_of_the_values_not_of_their_layout(tmp_path: Path) -> None:
    states = captures("bfloat16")[1]
    apart = states.transpose(0, 1).contiguous().transpose(0, 1)
    assert not apart.is_contiguous()
    assert shard.digest(apart) == shard.digest(states)
    assert shard.write_partial(tmp_path / "s", [apart], [IDS[1]], [MASKS[1]])[
        "states"
    ] == shard.digest(states)


def test_a_partial_file_has_no_shards_name_until_it_is_published(tmp_path: Path) -> None:
    path = tmp_path / "shard-0.safetensors"
    shard.write_partial(path, captures("bfloat16"), IDS, MASKS)
    (only,) = tmp_path.iterdir()
    assert only == shard.partial_path(path)
    assert only.suffix != ".safetensors"
    with pytest.raises(FileNotFoundError):
        shard.read(path)
    assert only.stat().st_mode & 0o777 == 0o644
    shard.publish(path)
    assert list(tmp_path.iterdir()) == [path]


def fail_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)


def fail_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail as a full disk does: a write that is cut short, then one that is refused."""
    write, calls = os.pwrite, iter(range(1000))

    def full(file: int, data: memoryview, at: int) -> int:
        if next(calls) < 2:  # the header and half of the loss mask
            return write(file, data[: len(data) // 2 + 1], at)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)


@pytest.mark.parametrize("failing", [fail_fsync, fail_write])
def test_a_full_disk_leaves_nothing_behind_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: Any
) -> None:
    failing(monkeypatch)
    path = tmp_path / "shard-0.safetensors"
    reply = envelope.seal(
        "n", 0, 1, lambda: shard.write_partial(path, captures("bfloat16"), IDS, MASKS)
    )
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CouldNotRun, match="No space left") as raised:
        envelope.unseal([reply], nonce="n", world_size=1, method="truetap_flush")
    assert "free disk space" in raised.value.remedy


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_the_system_cuts_short_is_an_os_error(tmp_path: Path) -> None:
    path = tmp_path / "shard-0.safetensors"
    with files_no_larger_than(100), pytest.raises(OSError, match="too large") as raised:
        shard.write_partial(path, captures("bfloat16"), IDS, MASKS)
    assert raised.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_shard_is_not_read(tmp_path: Path) -> None:
    from safetensors import SafetensorError

    path = tmp_path / "shard-0.safetensors"
    write(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SafetensorError):
        shard.read(path)

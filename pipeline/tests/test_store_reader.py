"""Reading a store by request and by shard."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from truetap.harness import shard
from truetap.harness.errors import IntegrityError
from truetap.pipeline.store import Store
from truetap.pipeline.store_reader import StoreReader, open_source

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

pytestmark = pytest.mark.torch

LENGTHS = {"a": 5, "b": 2, "c": 7, "d": 3, "e": 4, "f": 1, "g": 6}


def tokens_of(name: str) -> list[int]:
    return [100 * (ord(name) - 96) + n for n in range(LENGTHS[name])]


def states_of(name: str) -> torch.Tensor:
    """States that name their token, slot and channel."""
    import torch

    return torch.tensor(tokens_of(name)).float()[:, None, None] + torch.arange(6).view(2, 3) / 8


def write(store: Store, name: str, ids: Sequence[str], **more: Any) -> None:
    store.folder.mkdir(exist_ok=True)
    digests = shard.write_partial(
        store.path(name),
        [states_of(i) for i in ids],
        [tokens_of(i) for i in ids],
        [b"\1" * LENGTHS[i] for i in ids],
    )
    store.record({"shard": name, "digests": digests, "ids": list(ids), **more})


class Watched(Store):
    """A store that tells which shards were mapped, and how many still are."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.mappings: list[str] = []

    def mapped(self, entry: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        self.mappings.append(entry["shard"][:7])
        return super().mapped(entry)


@pytest.fixture
def store(tmp_path: Path) -> Watched:
    made = Watched(tmp_path / "shards")
    for name, ids in (("shard-0", "ab"), ("shard-2", "cd"), ("shard-1", "ef"), ("shard-3", "g")):
        write(made, f"{name}.safetensors", ids)
    return made


def require_right(samples: Iterator[Any], order: str) -> None:
    import torch

    got = list(samples)
    assert [sample.id for sample in got] == list(order)
    for sample in got:
        assert sample.token_ids.tolist() == tokens_of(sample.id)
        assert torch.equal(sample.states, states_of(sample.id))
        assert len(sample.loss_mask) == LENGTHS[sample.id]


def flip(path: Path, at: int) -> None:
    """Change a byte, as a disk would: the file's times and size stay."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    with path.open("r+b") as file:  # the same inode
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_opening_maps_no_shard_and_knows_every_request(store: Watched) -> None:
    reader = StoreReader(store)
    assert (len(reader), list(reader.ids)) == (7, list("abcdefg"))
    assert "a" in reader
    assert "z" not in reader
    assert store.mappings == []


def test_any_order_gives_each_request_its_own_rows(store: Watched) -> None:
    reader = StoreReader(store, keep=2)
    require_right(reader.samples("gadbgcef"), "gadbgcef")
    assert store.mappings == [f"shard-{n}" for n in (3, 0, 2, 3, 2, 1)]  # the last two used stay
    require_right(reader.samples("ef"), "ef")
    assert len(store.mappings) == 6


@pytest.mark.parametrize("ahead", [1, 3])
def test_streaming_goes_shard_by_shard_in_the_order_of_writing(store: Watched, ahead: int) -> None:
    reader = StoreReader(store)
    coming = reader.stream(ahead=ahead)
    assert store.mappings == []
    require_right((next(coming) for _ in range(2)), "ab")
    assert len(store.mappings) <= 1 + ahead  # the rest is not read before it is wanted
    require_right(coming, "cdefg")
    assert sorted(store.mappings) == [f"shard-{n}" for n in range(4)]


def test_a_stream_that_is_left_early_ends(store: Watched) -> None:
    for sample in StoreReader(store).stream():
        assert sample.id == "a"
        break
    assert len(store.mappings) <= 2


def test_a_request_that_was_captured_again_counts_once_and_anew(store: Watched) -> None:
    write(store, "shard-4.safetensors", "ca")
    reader = StoreReader(store)
    require_right(reader.stream(), "bdefgca")
    require_right(reader.samples("ac"), "ac")
    assert store.mappings[-1] == "shard-4"


@pytest.mark.parametrize("at", [-1, -100])
def test_a_damaged_shard_gives_no_sample_and_the_others_do(store: Watched, at: int) -> None:
    path = store.path("shard-2.safetensors")
    flip(path, at)
    reader = StoreReader(store)
    require_right(reader.samples("abefg"), "abefg")
    for name in "cdc":
        with pytest.raises(IntegrityError, match=r"shard-2\.safetensors is corrupt"):
            reader[name]
    got = reader.stream()
    require_right((next(got) for _ in range(2)), "ab")
    with pytest.raises(IntegrityError, match=r"shard-2\.safetensors is corrupt"):
        next(got)
    done = []
    with pytest.raises(IntegrityError, match="is corrupt"):
        done.extend(reader.verify())


def test_digests_are_taken_once_and_again_after_a_change(
    store: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    real = shard.digest

    def counted(tensor: torch.Tensor) -> str:
        taken.append(tensor.numel())
        return real(tensor)

    monkeypatch.setattr(shard, "digest", counted)
    reader = StoreReader(store, keep=1)
    require_right(reader.samples("acbdac"), "acbdac")
    assert len(store.mappings) == 6
    assert len(taken) == 2 * len(shard.TENSORS)
    flip(store.path("shard-0.safetensors"), -1)
    with pytest.raises(IntegrityError, match="is corrupt"):
        reader["a"]


def place_of(path: Path, tensor: str) -> int:
    data = path.read_bytes()
    header = int.from_bytes(data[:8], "little")
    return 8 + header + int(json.loads(data[8 : 8 + header])[tensor]["data_offsets"][0])


def test_states_left_to_verify_are_not_digested_but_offsets_are(store: Watched) -> None:
    path = store.path("shard-2.safetensors")
    flip(path, place_of(path, "states"))
    trusting = StoreReader(store, digest_states=False)
    assert trusting["c"].token_ids.tolist() == tokens_of("c")
    with pytest.raises(IntegrityError, match=r"corrupt: states differ"):
        list(trusting.verify())
    flip(path, place_of(path, "states"))
    assert len(list(trusting.verify())) == 4
    for tensor in ("offsets", "token_ids", "loss_mask"):
        flip(path, place_of(path, tensor))
        with pytest.raises(IntegrityError, match=f"corrupt: {tensor} differ"):
            StoreReader(store, digest_states=False)["d"]
        flip(path, place_of(path, tensor))


@pytest.mark.parametrize("ids", ["c", "cde"])
def test_a_line_with_other_requests_than_its_shard_is_refused(store: Watched, ids: str) -> None:
    entry = store.entries()["shard-2.safetensors"]
    store.append({**entry, "ids": list(ids)})
    with pytest.raises(IntegrityError, match="does not have the rows that"):
        StoreReader(store)["c"]


def test_a_request_without_captures_is_named(store: Watched) -> None:
    with pytest.raises(IntegrityError, match="there are no captures of 'z' in"):
        StoreReader(store)["z"]


def test_samples_are_the_mapped_file_which_goes_when_nobody_has_it(store: Watched) -> None:
    def mapped() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.rpartition("/")[2] for line in lines if str(store.folder) in line}

    reader = StoreReader(store, keep=1)
    sample = reader["d"]
    assert mapped() == {"shard-2.safetensors"}
    assert reader["a"].id == "a"
    assert mapped() == {"shard-2.safetensors", "shard-0.safetensors"}
    require_right(iter([sample]), "d")
    del sample
    assert mapped() == {"shard-0.safetensors"}


def test_a_path_is_a_folder_and_a_url_is_not(store: Watched) -> None:
    assert isinstance(open_source(store.folder), Store)
    require_right(StoreReader(open_source(str(store.folder))).samples("fa"), "fa")
    require_right(StoreReader(open_source(f"file://{store.folder}")).samples("fa"), "fa")

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from truetap.harness import shard
from truetap.harness.errors import CheckFailed, CouldNotRun, IntegrityError
from truetap.harness.extraction import ShardOrder, WrittenShard
from truetap.harness.model import CaptureRequest, EngineSpec
from truetap.pipeline import extract, shard_making
from truetap.pipeline.prepare import Conversation
from truetap.pipeline.store import REDO, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch
    from rich.console import Console

pytestmark = pytest.mark.torch

BOUNDARIES, WIDTH = 3, 4
TENSORS = ("states", "token_ids", "loss_mask", "offsets")


def conversation(name: str, tokens: int) -> Conversation:
    """A conversation whose token ids are found nowhere else."""
    first = 100 * (ord(name) - ord("a") + 1)
    return Conversation(name, "train", tuple(range(first, first + tokens)), prompt_tokens=1)


CONVERSATIONS = [conversation(name, n) for name, n in zip("abcde", (5, 2, 7, 3, 4), strict=True)]


def states_of(conversation: Conversation) -> torch.Tensor:
    """States that name their token, boundary and channel."""
    import torch

    ids = torch.tensor(conversation.token_ids, dtype=torch.float32)
    slots = torch.arange(BOUNDARIES * WIDTH).reshape(BOUNDARIES, WIDTH) / 16
    return ids[:, None, None] + slots


def write_shard(store: Store, name: str, conversations: Sequence[Conversation]) -> dict[str, Any]:
    store.folder.mkdir(exist_ok=True)
    digests = shard.write_partial(
        store.path(name),
        [states_of(c) for c in conversations],
        [c.token_ids for c in conversations],
        [c.loss_mask for c in conversations],
    )
    entry = {"shard": name, "digests": digests, "ids": [c.id for c in conversations]}
    store.record(entry)
    return entry


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Shards of the conversations, two each, as extraction makes them."""
    made = Store(tmp_path / "shards")
    for job in extract._jobs(CONVERSATIONS, 2):
        write_shard(made, job.name, job.conversations)
    return made


def flip_byte(path: Path, tensor: str) -> None:
    """Change one bit of a tensor's last byte, leaving the header alone."""
    data = bytearray(path.read_bytes())
    header = int.from_bytes(data[:8], "little")
    end = json.loads(data[8 : 8 + header])[tensor]["data_offsets"][1]
    data[8 + header + end - 1] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def spoil_header(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"\xff" * 20 + data[28:])


def spoil_header_length(path: Path) -> None:
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def drop_a_tensor(path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {name: tensor.clone() for name, tensor in shard.read(path).items()}
    del tensors["loss_mask"]
    save_file(tensors, path)


def remove(path: Path) -> None:
    path.unlink()


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def test_a_written_shard_verifies_and_holds_what_was_written(store: Store) -> None:
    entries = store.entries()
    assert list(entries) == [f"shard-0000{number}.safetensors" for number in range(3)]
    tensors = store.verified(entries["shard-00000.safetensors"])
    assert tensors["offsets"].tolist() == [0, 5, 7]
    assert tensors["token_ids"].tolist() == [100, 101, 102, 103, 104, 200, 201]
    assert tensors["loss_mask"].tolist() == [0, 1, 1, 1, 1, 0, 1]
    assert tensors["states"][6].equal(states_of(CONVERSATIONS[1])[1])
    assert not list(store.folder.glob("*.partial"))


@pytest.mark.parametrize("tensor", TENSORS)
def test_one_flipped_bit_is_found_and_its_tensor_named(store: Store, tensor: str) -> None:
    entry = store.entries()["shard-00001.safetensors"]
    flip_byte(store.path(entry["shard"]), tensor)
    said = rf"shard-00001\.safetensors is corrupt: {tensor} differ from"
    with pytest.raises(IntegrityError, match=said) as caught:
        store.verified(entry)
    assert caught.value.remedy == REDO


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "cannot be read"),
        (empty, "cannot be read"),
        (spoil_header, "cannot be read"),
        (spoil_header_length, "cannot be read"),
        (become_a_folder, "cannot be read"),
        (remove, "is missing"),
        (drop_a_tensor, "is corrupt: loss_mask differ from"),
    ],
)
def test_a_damaged_file_is_an_integrity_failure(
    store: Store, damage: Callable[[Path], None], said: str
) -> None:
    entry = store.entries()["shard-00001.safetensors"]
    damage(store.path(entry["shard"]))
    with pytest.raises(IntegrityError, match=rf"shard-00001\.safetensors {said}") as caught:
        store.verified(entry)
    assert caught.value.remedy == REDO
    with pytest.raises(IntegrityError, match="shard-00001"):
        store.samples(["a"])


def test_a_line_without_digests_proves_nothing(store: Store) -> None:
    entry = store.entries()["shard-00001.safetensors"]
    del entry["digests"]
    with pytest.raises(IntegrityError, match="is corrupt"):
        store.verified(entry)


def test_a_line_without_a_shard_is_an_integrity_failure(store: Store) -> None:
    store.append({"ids": []})
    with pytest.raises(IntegrityError, match=r"line 4 of .*manifest\.jsonl is not as it was"):
        store.entries()


CHANGES = [
    (b'"ids": ["c", "d"]', b'"ids": ["c", "e"]'),
    (b'"ids": ["c", "d"]', b'"ids": ["d", "c"]'),
    (b'"shard": "shard-00001', b'"shard": "shard-00002'),
    (b'"sha256": ', b'"sha255": '),
    (b"}\n{", b"}_{"),
]


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_a_changed_manifest_line_is_seen_and_its_shards_are_redone(
    store: Store, console: Console, old: bytes, new: bytes
) -> None:
    data = store.manifest.read_bytes()
    assert old in data
    place = data.index(old, data.index(b'"shard-00001') - 10)
    store.manifest.write_bytes(data[:place] + new + data[place + len(old) :])
    with pytest.raises(IntegrityError, match=r"line 2 of .*manifest\.jsonl is not as it was"):
        store.samples(["a"])
    assert len(store.repair()) == 1
    gone = {"shard-00001.safetensors"} | ({"shard-00002.safetensors"} if b"}_{" in new else set())
    assert set(unfinished(store, console)) == gone


@pytest.mark.parametrize("name", ["../shard-1", "/etc/passwd", "a/b", "..", ".hidden", "", 7])
def test_a_shard_whose_name_leads_out_of_the_folder_is_not_opened(store: Store, name: Any) -> None:
    for use in (store.path, lambda shard_name: store.verified({"shard": shard_name})):
        with pytest.raises(IntegrityError, match="names a shard"):
            use(name)
    assert store.path("shard-00001.safetensors").parent == store.folder


def test_repair_removes_what_interrupted_writes_left_and_nothing_else(store: Store) -> None:
    before = sorted(path.name for path in store.folder.iterdir())
    assert store.repair() == []
    (store.folder / "shard-00003.safetensors.partial").write_bytes(b"half")
    (store.folder / ".tmpA1b2C3").write_bytes(b"half")
    assert [said.rpartition(",")[0].rpartition("/")[2] for said in store.repair()] == [
        "shard-00003.safetensors.partial, left by an interrupted write",
        ".tmpA1b2C3, left by an interrupted write",
    ]
    assert sorted(path.name for path in store.folder.iterdir()) == before
    assert len(store.samples(list("abcde"))) == 5


def test_a_reader_leaves_a_line_that_is_being_written_alone(store: Store) -> None:
    with store.manifest.open("ab") as file:
        file.write(b'{"shard": "shard-00003')
    data = store.manifest.read_bytes()
    assert len(store.entries()) == 3
    assert store.manifest.read_bytes() == data


def test_of_two_lines_for_a_shard_the_later_counts(store: Store) -> None:
    again = [conversation("x", 3), conversation("y", 2)]
    new = write_shard(store, "shard-00001.safetensors", again)
    assert store.entries()["shard-00001.safetensors"] == new
    # In the order of writing, in which audits answer for what came before them.
    assert list(store.entries()) == [f"shard-0000{number}.safetensors" for number in (0, 2, 1)]
    assert [s.id for s in store.samples(["y", "a", "x"])] == ["y", "a", "x"]


def test_each_conversation_gets_its_own_rows_in_the_order_asked(store: Store) -> None:
    import torch

    order = [CONVERSATIONS[index] for index in (3, 0, 4, 1, 2)]
    for asked, sample in zip(order, store.samples([c.id for c in order]), strict=True):
        assert sample.id == asked.id
        assert tuple(sample.token_ids.tolist()) == asked.token_ids
        assert bytes(sample.loss_mask.tolist()) == asked.loss_mask
        assert torch.equal(sample.states, states_of(asked))


def test_every_shard_that_is_verified_is_told(store: Store) -> None:
    told: list[int] = []
    store.samples(["a"], verified=lambda: told.append(1))
    assert len(told) == len(store.entries()) == 3


def test_missing_conversations_are_counted_and_the_first_is_named(store: Store) -> None:
    said = "2 of 4 conversations have no captures in .*, the first of them 'z'"
    with pytest.raises(IntegrityError, match=said) as caught:
        store.samples(["a", "z", "e", "w"])
    assert caught.value.remedy == REDO


def unfinished(store: Store, console: Console) -> list[str]:
    jobs = extract._jobs(CONVERSATIONS, 2)
    return [job.name for job in extract._unfinished(store, jobs, console)]


def test_whole_shards_are_not_redone(store: Store, console: Console) -> None:
    assert unfinished(store, console) == []


def test_without_shards_all_are_to_be_made(tmp_path: Path, console: Console) -> None:
    assert unfinished(Store(tmp_path), console) == [f"shard-0000{n}.safetensors" for n in range(3)]


def split_line(store: Store, name: str) -> bytes:
    """Take a shard's line out of the manifest and return it."""
    lines = store.manifest.read_bytes().splitlines(keepends=True)
    (mine,) = (line for line in lines if name.encode() in line)
    store.manifest.write_bytes(b"".join(line for line in lines if line != mine))
    return mine


def lose_line(store: Store, name: str) -> None:
    split_line(store, name)


def tear_line(store: Store, name: str) -> None:
    """An interruption while the shard's line was written."""
    mine = split_line(store, name)
    with store.manifest.open("ab") as file:
        file.write(mine[:-5])


def exchange_conversations(store: Store, name: str) -> None:
    write_shard(store, name, [conversation("x", 3), conversation("y", 2)])


def answer_anew(store: Store, name: str) -> None:
    """The same ids as before, but the answers are longer by a token."""
    ids = store.entries()[name]["ids"]
    old = [c for c in CONVERSATIONS if c.id in ids]
    write_shard(store, name, [conversation(c.id, len(c.token_ids) + 1) for c in old])


def move_the_mask(store: Store, name: str) -> None:
    old = [c for c in CONVERSATIONS if c.id in store.entries()[name]["ids"]]
    write_shard(store, name, [Conversation(c.id, c.split, c.token_ids, 2) for c in old])


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize(
    "change",
    [
        lambda store, name: truncate(store.path(name)),
        lambda store, name: flip_byte(store.path(name), "states"),
        lambda store, name: store.path(name).unlink(),
        lose_line,
        tear_line,
        exchange_conversations,
        answer_anew,
        move_the_mask,
    ],
    ids=["truncated", "flipped", "missing", "no-line", "torn-line", "others", "anew", "mask"],
)
def test_exactly_the_bad_shard_is_redone(
    store: Store, console: Console, change: Callable[[Store, str], None], number: int
) -> None:
    name = f"shard-0000{number}.safetensors"
    change(store, name)
    assert unfinished(store, console) == [name]
    write_shard(store, name, extract._jobs(CONVERSATIONS, 2)[number].conversations)
    assert unfinished(store, console) == []


def two_written(folder: Path) -> WrittenShard:
    """Return a shard of the first two conversations, in its partial file."""
    two = CONVERSATIONS[:2]
    path = folder / "shard-9"
    states = [states_of(c) for c in two]
    shard.write_partial(path, states, [c.token_ids for c in two], [c.loss_mask for c in two])
    order = ShardOrder(
        path, [CaptureRequest(c.id, c.token_ids) for c in two], [c.loss_mask for c in two]
    )
    cut = [(0, 1), (1, len(two[0].token_ids))]
    pieces = [[(a, b - a, shard.checksum(shard.raw(states[0][a:b]))) for a, b in cut]]
    pieces += [[(0, len(states[1]), shard.checksum(shard.raw(states[1])))]]
    return WrittenShard(order, shard.partial_path(path), pieces)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    tensors = two_written(tmp_path).read_back()
    bounds = tensors["offsets"].tolist()
    assert bounds == [0, 5, 7]
    for c, start, end in zip(CONVERSATIONS, bounds, bounds[1:], strict=False):
        assert tensors["states"][start:end].equal(states_of(c))
        assert tensors["token_ids"][start:end].tolist() == list(c.token_ids)


def other_requests(written: WrittenShard) -> WrittenShard:
    order = written.order
    return replace(written, order=replace(order, requests=order.requests[::-1]))


def expanded_ids(written: WrittenShard) -> WrittenShard:
    """The engine expanded a placeholder, and the client's ids have it once."""
    first, second = written.order.requests
    once = replace(first, token_ids=first.token_ids[:1])
    return replace(written, order=replace(written.order, requests=[once, second]))


def short_mask(written: WrittenShard) -> WrittenShard:
    first, second = written.order.loss_masks
    return replace(written, order=replace(written.order, loss_masks=[first[1:], second]))


def other_mask(written: WrittenShard) -> WrittenShard:
    first, second = written.order.loss_masks
    wrong = bytes([1 - first[0]]) + first[1:]
    return replace(written, order=replace(written.order, loss_masks=[wrong, second]))


def without_a_piece(written: WrittenShard) -> WrittenShard:
    return replace(written, pieces=[written.pieces[0][:1], written.pieces[1]])


def piece_of_another_place(written: WrittenShard) -> WrittenShard:
    (_, rows, digest), *others = written.pieces[0]
    return replace(written, pieces=[[(1, rows, digest), *others], written.pieces[1]])


def other_states(written: WrittenShard) -> WrittenShard:
    """As a disk would that loses what it acknowledged."""
    data = bytearray(written.partial.read_bytes())
    table = int.from_bytes(data[:8], "little") + 8
    rows = sum(len(r.token_ids) for r in written.order.requests)
    data[table + 8 * 3 + 8 * rows + 1] ^= 1
    written.partial.write_bytes(data)
    return written


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_requests, "token ids differ from those that were sent"),
        (expanded_ids, "token ids differ from those that were sent"),
        (short_mask, "a loss mask of 6 for 7 tokens"),
        (other_mask, "offsets or loss mask are not those of the order"),
        (without_a_piece, "1 rows of request 'a'"),
        (piece_of_another_place, "rows from 1 on of request 'a' read back differently"),
        (other_states, "rows from 0 on of request 'a' read back differently"),
    ],
)
def test_what_reads_back_otherwise_is_refused(
    tmp_path: Path, change: Callable[[WrittenShard], WrittenShard], said: str
) -> None:
    with pytest.raises((CheckFailed, IntegrityError), match=f"shard-9: {said}"):
        change(two_written(tmp_path)).read_back()


def soundness(change: Callable[[Any], Any], dtype: str = "float32") -> None:
    """Check sound states of seven tokens, after a change."""
    import torch

    states = torch.randn(7, BOUNDARIES, WIDTH, generator=torch.Generator().manual_seed(0))
    states = states.to(getattr(torch, dtype))
    change(states)
    shard_making.require_sound("shard-9", states)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sound_states_pass(dtype: str) -> None:
    soundness(lambda _: None, dtype)
    soundness(set_states((1, 1, 1), -0.0), dtype)
    soundness(set_states((1, 1, 1), 65504 if dtype == "float16" else 3e38), dtype)


def set_states(index: Any, value: float) -> Callable[[Any], None]:
    def change(states: Any) -> None:
        states[index] = value

    return change


def copy_slot(states: Any) -> None:
    states[:, 2] = states[:, 0]


@pytest.mark.parametrize("size", [shard_making._PIECE_BYTES, 30, 80])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_states((4, 1, 2), float("nan")), "1 rows are not finite, the first is 4"),
        (set_states(([2, 5], 0, 0), float("-inf")), "2 rows are not finite, the first is 2"),
        (set_states((slice(None), 1), 0.0), "slot 1 is all zero"),
        (copy_slot, "slots 0 and 2 are equal"),
    ],
)
def test_unsound_states_fail_by_name(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Any], None],
    said: str,
    dtype: str,
    size: int,
) -> None:
    monkeypatch.setattr(shard_making, "_PIECE_BYTES", size)
    with pytest.raises(CheckFailed, match=f"shard-9: {said}"):
        soundness(change, dtype)


@pytest.mark.parametrize("size", [shard_making._PIECE_BYTES, 30, 80])
def test_slots_that_are_equal_or_zero_in_part_are_sound(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(shard_making, "_PIECE_BYTES", size)
    soundness(set_states((slice(0, 6), 1), 0.0))
    soundness(set_states((slice(1, None), 1), 0.0))


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_a_disk_that_is_too_small_is_refused(
    tmp_path: Path,
    paper_verifier: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    size: int,
) -> None:
    need = 21 * 4 * 16 * size  # tokens, boundaries, width, bytes
    free = need
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    spec = EngineSpec(str(paper_verifier), boundaries=(2, 6, 9, 12), dtype=dtype)
    jobs = extract._jobs(CONVERSATIONS, 2)
    extract._require_space(Store(tmp_path), jobs, spec)
    free -= 1
    with pytest.raises(CouldNotRun, match=f"{tmp_path} has .* GB free") as caught:
        extract._require_space(Store(tmp_path), jobs, spec)
    assert "free disk space" in caught.value.remedy

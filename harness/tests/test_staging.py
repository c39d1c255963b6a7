"""Rows on their way from an engine to the disk: whole, bounded, never an error in a step."""

from __future__ import annotations

import errno
import os
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from truetap.harness import shard, staging
from truetap.harness.shard import Layout, ShardFile
from truetap.harness.staging import Staging

pytestmark = pytest.mark.torch

SHAPE = (3, 8)
SLOT = 4 * 3 * 8 * 2
"""Four rows of bfloat16."""
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def _small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SLOT_BYTES", SLOT)


def made(**changes: Any) -> Staging:
    import torch

    settings = {"shape": SHAPE, "dtype": torch.bfloat16, "pool_bytes": 8 * SLOT, "threads": 2}
    return Staging(**{**settings, **changes})


def states_of(number: int, tokens: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(number)
    return torch.randn(tokens, *SHAPE, generator=generator).bfloat16()


def put(subject: Staging, key: str, position: int, ids: list[int], states: Any) -> None:
    subject.put(key, position, ids, lambda start, end: states[start:end])


def shard_of(subject: Staging, folder: Path, name: str, lengths: list[int]) -> list[str]:
    keys = [f"{name}:{n}" for n in range(len(lengths))]
    masks = [bytes([1] * length) for length in lengths]
    subject.expect(str(folder / name), str(folder / name), keys, lengths, masks)
    return keys


@pytest.mark.parametrize("seed", range(8))
def test_rows_in_any_order_and_cut_make_the_shards_that_were_announced(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    subject = made(threads=rng.randint(1, 4), pool_bytes=rng.randint(1, 8) * SLOT)
    shards = {f"s{n}": [rng.randint(1, 21) for _ in range(rng.randint(1, 6))] for n in range(3)}
    chunks: dict[str, list[tuple[int, int]]] = {}
    for name, lengths in shards.items():
        for key, length in zip(shard_of(subject, tmp_path, name, lengths), lengths, strict=True):
            cuts = sorted({0, length, *(rng.randint(0, length) for _ in range(2))})
            chunks[key] = list(pairwise(cuts))
    while chunks:
        key = rng.choice(list(chunks))
        start, end = chunks[key].pop(0)
        if not chunks[key]:
            del chunks[key]
        length = shards[key[:2]][int(key[3:])]
        ids = list(range(100, 100 + length))
        put(subject, key, start, ids[start:end], states_of(hash(key), length)[start:end])
    for name, lengths in shards.items():
        report = subject.report([str(tmp_path / name)], WAIT_S)
        assert not report["missing"]
        assert not report["failed"]
        (seen,) = report["written"].values()
        tensors = shard.read(tmp_path / name)
        bounds = tensors["offsets"].tolist()
        for n, length in enumerate(lengths):
            rows = tensors["states"][bounds[n] : bounds[n + 1]]
            assert rows.equal(states_of(hash(f"{name}:{n}"), length))
            assert tensors["token_ids"][bounds[n] : bounds[n + 1]].tolist() == list(
                range(100, 100 + length)
            )
            pieces = seen[n]["pieces"]
            assert [p[0] for p in pieces] == [0, *[p[0] + p[1] for p in pieces][:-1]]
            for position, count, digest in pieces:
                assert shard.checksum(shard.raw(rows[position : position + count])) == digest
        assert tensors["loss_mask"].tolist() == [1] * sum(lengths)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(shards)


def test_what_comes_a_second_time_is_left_out_and_counted(tmp_path: Path) -> None:
    """As after a preemption: the first rows count, and no digest is of any others."""
    subject = made()
    (key,) = shard_of(subject, tmp_path, "s", [6])
    states = states_of(1, 6)
    put(subject, key, 0, [1, 2, 3, 4], states[:4])
    put(subject, key, 0, [1, 2, 3, 4, 5, 6], states + 1)
    report = subject.report([str(tmp_path / "s")], WAIT_S)
    ((seen,),) = report["written"].values()
    assert seen["recomputed"] == 4
    assert shard.read(tmp_path / "s")["states"][:4].equal(states[:4])
    assert shard.read(tmp_path / "s")["states"][4:].equal(states[4:] + 1)


def test_rows_that_nobody_asked_for_are_counted(tmp_path: Path) -> None:
    subject = made()
    put(subject, "other", 0, [1], states_of(1, 1))
    put(subject, "other", 1, [1], states_of(1, 1))
    assert subject.report([])["others"] == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_when_the_engine_is_done_is_told_and_the_file_goes(
    tmp_path: Path,
) -> None:
    subject = made()
    first, _ = shard_of(subject, tmp_path, "s", [5, 2])
    put(subject, first, 0, [1, 2, 3, 4, 5], states_of(1, 5))
    name = str(tmp_path / "s")
    assert subject.report([])["missing"] == {}  # it may still come
    assert subject.report([name])["missing"] == {"s:1": 0}
    assert eventually(lambda: not list(tmp_path.iterdir()))
    assert subject.report([name])["missing"] == {}  # told once
    again = shard_of(subject, tmp_path, "s", [1])
    put(subject, again[0], 0, [1], states_of(1, 1))
    assert name in subject.report([name], WAIT_S)["written"]


def eventually(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    return holds()


class Slow:
    """A file system that holds every write until it is let go, as a network's does for seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        write = os.pwrite

        def slow(file: int, data: Any, at: int) -> int:
            if threading.current_thread().name == "truetap-write":
                assert self.gate.wait(WAIT_S)
            return write(file, data, at)

        monkeypatch.setattr(os, "pwrite", slow)


def test_a_slow_disk_holds_the_engine_up_and_memory_stays_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    subject = made(pool_bytes=4 * SLOT)
    lengths = [4] * 20
    keys = shard_of(subject, tmp_path, "s", lengths)
    done: list[str] = []

    def engine() -> None:
        for n, key in enumerate(keys):
            put(subject, key, 0, [1, 2, 3, 4], states_of(n, 4))
            done.append(key)

    thread = threading.Thread(target=engine, daemon=True)
    thread.start()
    assert eventually(lambda: len(done) == 4)
    time.sleep(0.1)
    assert len(done) == 4, "a fifth slot was found in a pool of four"
    status = subject.report([])["status"]
    assert status["staged"] == status["most_staged"] == 4 * SLOT
    slow.gate.set()
    thread.join(WAIT_S)
    report = subject.report([str(tmp_path / "s")], WAIT_S)
    assert list(report["written"]) == [str(tmp_path / "s")]
    assert report["status"]["most_staged"] <= 4 * SLOT
    assert report["status"]["waited_s"] > 0.05
    assert report["status"]["staged"] == report["status"]["queued"] == 0
    states = shard.read(tmp_path / "s")["states"]
    for n in range(20):
        assert states[4 * n : 4 * n + 4].equal(states_of(n, 4))


def test_memory_does_not_grow_with_what_passes_through(tmp_path: Path) -> None:
    """Fifty times the pool, and then fifty times more: the second costs nothing."""
    import torch

    big = 1 << 20
    staging_of = {"shape": (4, 512), "pool_bytes": 8 * big, "threads": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "SLOT_BYTES", big)
        subject = made(**staging_of)
    states = torch.randn(256, 4, 512).bfloat16()  # one slot

    def pass_through(name: str) -> int:
        keys = shard_of(subject, tmp_path, name, [256] * 400)
        for key in keys:
            put(subject, key, 0, list(range(256)), states)
        assert subject.report([str(tmp_path / name)], WAIT_S)["written"]
        (tmp_path / name).unlink()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = pass_through("first")
    assert pass_through("second") - before < 4 << 10, "KiB grew with the rows"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], None]]:
    """Make a call of the operating system fail in the writing threads from the nth one on."""

    def fail(what: str, after: int) -> None:
        real, calls = getattr(os, what), iter(range(10_000))

        def call(*arguments: Any) -> Any:
            if threading.current_thread().name.startswith("truetap-") and next(calls) >= after:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments)

        monkeypatch.setattr(os, what, call)

    yield fail
    monkeypatch.undo()


@pytest.mark.parametrize(("what", "after"), [("pwrite", 0), ("pwrite", 3), ("fsync", 0)])
def test_a_full_disk_is_told_and_leaves_no_file_and_no_slot_is_lost(
    tmp_path: Path, broken: Callable[[str, int], None], what: str, after: int
) -> None:
    subject = made(pool_bytes=2 * SLOT)
    broken(what, after)
    keys = shard_of(subject, tmp_path, "s", [9] * 6)
    for n, key in enumerate(keys):
        put(subject, key, 0, list(range(9)), states_of(n, 9))  # more than the pool: it would hang
    failed = subject.report([str(tmp_path / "s")], WAIT_S)["failed"]
    assert (failed["type"], failed["errno"]) == ("OSError", errno.ENOSPC)
    assert eventually(lambda: not list(tmp_path.iterdir()))
    assert eventually(lambda: subject.report([])["status"]["staged"] == 0)


def test_a_file_that_cannot_be_made_is_told_like_one_that_cannot_be_written(
    tmp_path: Path,
) -> None:
    subject = made(pool_bytes=2 * SLOT)
    (key,) = shard_of(subject, tmp_path / "nowhere", "s", [9])
    put(subject, key, 0, list(range(9)), states_of(1, 9))
    failed = subject.report([str(tmp_path / "nowhere" / "s")], WAIT_S)["failed"]
    assert (failed["type"], failed["errno"]) == ("FileNotFoundError", errno.ENOENT)


def test_rows_of_another_kind_are_refused(tmp_path: Path) -> None:
    import torch

    for wrong in (torch.zeros(2, 2, 8).bfloat16(), torch.zeros(2, *SHAPE)):
        subject = made()
        (key,) = shard_of(subject, tmp_path, "s", [2])
        put(subject, key, 0, [1, 2], wrong)
        failed = subject.report([str(tmp_path / "s")], WAIT_S)["failed"]
        assert failed["message"].startswith("the engine gives states")


@pytest.mark.parametrize("given", [1, 3])
def test_too_few_or_too_many_rows_are_refused_and_no_slot_is_lost(
    tmp_path: Path, given: int
) -> None:
    subject = made(pool_bytes=2 * SLOT)
    for name in "abc":  # more shards than slots
        (key,) = shard_of(subject, tmp_path, name, [2])
        subject.put(key, 0, [1, 2], lambda _start, _end: states_of(1, given))
        failed = subject.report([str(tmp_path / name)], WAIT_S)["failed"]
        assert failed["message"].startswith(f"the engine gives states [{given}, 3, 8]")


def test_a_copy_that_fails_gives_its_slot_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = made(pool_bytes=2 * SLOT)
    monkeypatch.setattr(subject, "_copy", lambda _rows, _states: 1 / 0)
    for name in "abc":  # more shards than slots
        (key,) = shard_of(subject, tmp_path, name, [2])
        assert subject._free.qsize() == 2
        put(subject, key, 0, [1, 2], states_of(1, 2))
        failed = subject.report([str(tmp_path / name)], WAIT_S)["failed"]
        assert failed["type"] == "ZeroDivisionError"


def test_earlier_rows_after_later_ones_are_refused(tmp_path: Path) -> None:
    """What is left out of a second computation is the beginning, or nothing."""
    subject = made()
    (key,) = shard_of(subject, tmp_path, "s", [4])
    put(subject, key, 2, [3, 4], states_of(1, 2))
    put(subject, key, 0, [1, 2, 3, 4], states_of(1, 4))
    failed = subject.report([str(tmp_path / "s")], WAIT_S)["failed"]
    assert "later rows of request s:0 before earlier" in failed["message"]


def test_requests_of_one_length_are_shared_among_the_threads(tmp_path: Path) -> None:
    subject = made(threads=4)
    keys = shard_of(subject, tmp_path, "s", [8] * 12)
    assert {subject._requests[key].lane for key in keys} == {0, 1, 2, 3}


def test_shards_of_few_requests_are_shared_among_the_threads(tmp_path: Path) -> None:
    subject = made(threads=4)
    keys = [shard_of(subject, tmp_path, f"s{number}", [8])[0] for number in range(8)]
    assert [subject._requests[key].lane for key in keys] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_an_error_that_comes_while_a_report_is_made_is_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = made()
    first, second = (shard_of(subject, tmp_path, name, [2])[0] for name in "ab")
    put(subject, first, 0, [1, 2], states_of(1, 2))
    name, other = str(tmp_path / "a"), subject._shards[str(tmp_path / "b")]
    assert eventually(lambda: subject._shards[name].done)
    seen = subject._seen

    def slowly(shard_: Any) -> Any:
        subject._settle(other, error=OSError(errno.ENOSPC, "No space left on device"))
        return seen(shard_)

    monkeypatch.setattr(subject, "_seen", slowly)
    report = subject.report([name], WAIT_S)
    assert (list(report["written"]), report["failed"]) == ([name], None)
    assert subject.report([], 0.0)["failed"]["errno"] == errno.ENOSPC
    assert second not in subject._requests


def test_what_a_file_system_says_of_a_discarded_file_reaches_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS tells of a quota at ``close``."""
    subject = made()
    (key,) = shard_of(subject, tmp_path, "s", [2])
    close = os.close

    def tells(file: int) -> None:
        close(file)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "close", tells)
    put(subject, key, 0, [1, 2, 3], states_of(1, 3))
    monkeypatch.undo()
    assert "more rows" in subject.report([str(tmp_path / "s")], WAIT_S)["failed"]["message"]
    assert list(tmp_path.iterdir()) == []


def test_more_rows_than_tokens_are_refused(tmp_path: Path) -> None:
    subject = made()
    (key,) = shard_of(subject, tmp_path, "s", [2])
    put(subject, key, 0, [1, 2, 3], states_of(1, 3))
    failed = subject.report([str(tmp_path / "s")], WAIT_S)["failed"]
    assert "more rows than request s:0 has tokens" in failed["message"]


def test_a_step_never_sees_an_error_of_whoever_gives_the_rows(tmp_path: Path) -> None:
    subject = made()
    (key,) = shard_of(subject, tmp_path, "s", [2])
    subject.put(key, 0, [1, 2], lambda _start, _end: 1 / 0)  # type: ignore[arg-type,return-value]
    failed = subject.report([str(tmp_path / "s")], WAIT_S)["failed"]
    assert failed["type"] == "ZeroDivisionError"


@pytest.mark.parametrize("hashes", [True, False])
def test_a_rank_that_writes_nothing_sees_what_the_first_sees(tmp_path: Path, hashes: bool) -> None:
    told = []
    for writes in (True, False):
        subject = made(writes=writes, hashes=hashes)
        (key,) = shard_of(subject, tmp_path, "s", [6])
        put(subject, key, 0, [1, 2, 3], states_of(1, 3))
        put(subject, key, 3, [4, 5, 6], states_of(2, 3))
        ((seen,),) = subject.report([str(tmp_path / "s")], WAIT_S)["written"].values()
        told.append(seen)
        assert bool(list(tmp_path.iterdir())) is writes
        for path in tmp_path.iterdir():
            path.unlink()
    first, second = told
    assert (first["rows"], first["token_ids"]) == (second["rows"], second["token_ids"])
    assert second["pieces"] == (first["pieces"] if hashes else [])


def test_a_shard_is_reported_only_when_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, sync = threading.Event(), os.fsync

    def slow(file: int) -> None:
        assert gate.wait(WAIT_S)
        sync(file)

    monkeypatch.setattr(os, "fsync", slow)
    subject = made()
    (key,) = shard_of(subject, tmp_path, "s", [2])
    put(subject, key, 0, [1, 2], states_of(1, 2))
    name = str(tmp_path / "s")
    assert eventually(lambda: subject.report([])["status"]["staged"] == 0)
    assert subject.report([name], 0.2)["written"] == {}
    gate.set()
    assert name in subject.report([name], WAIT_S)["written"]


def test_a_file_is_what_safetensors_itself_writes(tmp_path: Path) -> None:
    """The layout is ours to write, and the library's to read."""
    import torch
    from safetensors.torch import load_file, save_file

    layout = Layout((2, 3), 3, 8, torch.bfloat16)
    states = states_of(1, 5)
    file = ShardFile(tmp_path / "ours", layout, [b"\0\1", b"\1\1\0"])
    ids = torch.arange(5)
    for row in (4, 0, 2, 1, 3):
        file.write(row, shard.raw(states[row : row + 1]))
    file.close(ids.numpy())
    ours = load_file(tmp_path / "ours")
    save_file(ours, tmp_path / "theirs")
    assert (tmp_path / "theirs").stat().st_size <= (tmp_path / "ours").stat().st_size + 64
    theirs = load_file(tmp_path / "theirs")
    assert ours.keys() == theirs.keys() == set(shard.TENSORS)
    assert ours["states"].equal(states)
    assert ours["offsets"].tolist() == [0, 2, 5]
    assert ours["loss_mask"].tolist() == [0, 1, 1, 1, 0]
    assert ours["token_ids"].tolist() == list(range(5))

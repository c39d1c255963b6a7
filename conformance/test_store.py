"""STORE: how captures are kept on disk, judged under kills, damage, full disks and company.

These judge a store (``--store``): truetap's own ``shards``, or anybody else's.
"""

from __future__ import annotations

import re

import pytest

from truetap.harness.capture_store import DATA_BYTES, SHARD, Mended, Read, StoreObservation
from truetap.harness.pytest_plugin import Saw
from truetap.harness.store_script import STOP


def whole(seen: StoreObservation, read: Read, when: str) -> None:
    """Require all samples, each as it was written."""
    assert not read.fault, f"{when}: {read.fault}"
    missing = sorted(seen.everything - read.keys)
    assert not missing, f"{when}: {missing[0]} is absent ({len(missing)} samples are)"


def completed(seen: StoreObservation, case: Mended) -> None:
    """Require that the next writer made the store complete."""
    assert case.resumed.written is not None, f"{case.what}: the next writer {case.resumed.ended}"
    whole(seen, case.after, f"{case.what}, then all written again")


def kept(case: Mended) -> None:
    """Require that nothing wrong can be read, and all that could be read before."""
    assert not case.read.fault, f"{case.what}: {case.read.fault}"
    lost = sorted(case.before - case.read.keys)
    assert not lost, f"{case.what}: {lost[0]} is lost, which could be read before"


@pytest.mark.clause("STORE-001")
def test_what_is_read_is_what_was_written(store_seen: StoreObservation, saw: Saw) -> None:
    """Ten samples in four files or more, written in one process and read in another."""
    written = store_seen.clean.written
    assert written is not None, f"the writer {store_seen.clean.ended}"
    assert sorted(written) == sorted(store_seen.everything), (
        f"of {len(store_seen.everything)} samples the writer {store_seen.clean.ended}"
    )
    whole(store_seen, store_seen.clean_read, "all written")
    saw(f"{len(written)} samples in {len(store_seen.files)} files")


@pytest.mark.clause("STORE-002")
def test_a_reader_sees_whole_captures_or_none(store_seen: StoreObservation, saw: Saw) -> None:
    """At each place where the writer can be held, and with readers that never pause."""
    assert store_seen.held, "nothing was read while a writer was at work"
    earlier: frozenset[str] = frozenset()
    for place, reads in store_seen.held:
        for read in reads:
            assert not read.fault, f"writer held {place}: {read.fault}"
            lost = sorted(earlier - read.keys)
            assert not lost, f"writer held {place}: {lost[0]} is gone, which could be read before"
        earlier = frozenset(earlier.union(*(read.keys for read in reads)))
    for count, read in store_seen.raced:
        assert not read.fault, f"read {count} while a writer worked: {read.fault}"
        assert read.keys == store_seen.everything, f"after the writer's end: {sorted(read.keys)}"
    counts = " and ".join(str(count) for count, _ in store_seen.raced)
    saw(f"{len(store_seen.held)} places, then {counts} reads of a writer at work")


@pytest.mark.clause("STORE-003")
def test_a_killed_writer_leaves_whole_captures(store_seen: StoreObservation, saw: Saw) -> None:
    """Killed between its calls, or ended by the kernel inside a write; then completed."""
    assert store_seen.killed, "no writer was killed"
    for case in store_seen.killed:
        kept(case)
        completed(store_seen, case)
    saw(f"{len(store_seen.killed)} kills, {store_seen.killed[-1].what} among them")


@pytest.mark.clause("STORE-004")
def test_damage_is_never_returned(store_seen: StoreObservation, saw: Saw) -> None:
    """Each file deleted, emptied, cut, and with single bits flipped all over it."""
    assert store_seen.damaged, "nothing was damaged"
    refused = 0
    for damage in store_seen.damaged:
        read = damage.read
        refused += read.refused
        assert not read.wrong, f"{damage.file}, {damage.how}: {read.fault}"
        assert read.refused or not read.error, f"{damage.file}, {damage.how}: {read.fault}"
    saw(
        f"{len(store_seen.damaged)} ways to damage {len(store_seen.files)} files, {refused} refused"
    )


@pytest.mark.clause("STORE-005")
def test_after_a_stop_the_rest_is_written(store_seen: StoreObservation, saw: Saw) -> None:
    """Killed after 6 of 10; and once more over what is complete."""
    case = store_seen.stopped
    assert case is not None, "no writer was stopped"
    kept(case)
    assert len(case.read.keys) >= STOP - SHARD, (
        f"{STOP} samples were handed over before the stop and {len(case.read.keys)} can be read; "
        f"at most {SHARD} may be held back"
    )
    completed(store_seen, case)
    assert case.resumed.written is not None
    rest = sorted(store_seen.everything - case.read.keys)
    assert sorted(case.resumed.written) == rest, f"{rest} were missing, it {case.resumed.ended}"
    assert not case.rewritten, f"{case.rewritten[0]} was complete and was written again"
    assert store_seen.again.written == (), f"all were there, the writer {store_seen.again.ended}"
    again = store_seen.rewritten_again
    assert not again, f"all were there, and {again[0]} was written again"
    saw(f"{len(case.read.keys)} were there, {len(rest)} were written")


@pytest.mark.clause("STORE-006")
def test_a_damaged_file_is_written_again(store_seen: StoreObservation, saw: Saw) -> None:
    """One finished file cut in half: exactly what was in it is written."""
    said = []
    for file, case in store_seen.cut.items():
        completed(store_seen, case)
        written = case.resumed.written
        assert written is not None
        if not case.read.error:
            missing = sorted(store_seen.everything - case.read.keys)
            assert sorted(written) == missing, (
                f"{case.what}: {missing} are absent, {list(written)} written"
            )
        if store_seen.files[file] < DATA_BYTES:
            continue
        assert written, f"{case.what}: nothing was written, {case.read.fault}"
        most = max(SHARD, store_seen.files[file] // DATA_BYTES)  # there is no room for more
        assert len(written) <= most, f"{case.what}: {list(written)} were written"
        assert not case.rewritten, f"{case.what}: {case.rewritten[0]} was whole and written again"
        said.append(len(written))
    assert said, f"no file of the store is as large as a sample: {dict(store_seen.files)}"
    saw(f"{len(said)} files cut; each time {min(said)} to {max(said)} samples were written again")


@pytest.mark.clause("STORE-007")
def test_a_failed_write_raises(store_seen: StoreObservation, saw: Saw) -> None:
    """A file that cannot grow (EFBIG, as a full disk), and captures that stop coming."""
    met = []
    for case in store_seen.failed:
        kept(case)
        completed(store_seen, case)
        if case.outcome.written is not None:
            missing = sorted(store_seen.everything - case.read.keys)
            assert not missing, f"{case.what}: no error, and {missing[0]} is absent"
            continue  # what it wrote was smaller than that
        error = case.outcome.error
        assert re.search(case.cause, error, re.IGNORECASE), (
            f"{case.what}: the error names no cause ({case.cause.split('|')[0]}): {error}"
        )
        met.append(error)
    assert len(met) > 1, "no write failed"
    saw(f"{len(met)} failures, {met[0]!r} among them")


@pytest.mark.clause("STORE-008")
def test_other_tokens_are_not_taken_for_done(store_seen: StoreObservation, saw: Saw) -> None:
    """All samples given again, one of them with other tokens under its key."""
    key, (as_old, as_new) = store_seen.changed_key, store_seen.changed_read
    assert key, "nothing was changed"
    if store_seen.changed.written is None:
        assert key in store_seen.changed.error, f"the writer {store_seen.changed.ended}"
        whole(store_seen, as_old, f"{key} with other tokens was refused")
        saw(f"refused: {store_seen.changed.error}")
        return
    whole(store_seen, as_new, f"{key} was given with other tokens, the writer ended well")
    assert key in store_seen.changed.written, f"{key} was changed, it {store_seen.changed.ended}"
    saw(f"{key} was written again")


@pytest.mark.clause("STORE-009")
def test_two_writers_do_not_spoil_each_other(store_seen: StoreObservation, saw: Saw) -> None:
    """The second comes while the first is held, which then goes on."""
    assert store_seen.pairs, "there were no two writers"
    refused = 0
    for pair in store_seen.pairs:
        when = f"a second writer came when the first was held {pair.place}"
        ended = [outcome.written is not None for outcome in (pair.first, pair.second)]
        assert any(ended), f"{when}: both failed, the first {pair.first.ended}"
        refused += ended.count(False)
        for where, read in pair.reads:
            whole(store_seen, read, f"{when}; {where}")
    saw(f"{len(store_seen.pairs)} pairs, {refused} writers were refused")


@pytest.mark.clause("STORE-010")
def test_an_interrupted_write_leaves_nothing(store_seen: StoreObservation, saw: Saw) -> None:
    """The folder is as large as after an undisturbed run, but for less than one sample."""
    assert store_seen.killed, "no writer was killed"
    usual = sum(store_seen.files.values())
    for case in (*store_seen.killed, *store_seen.failed):
        more = case.size - usual
        assert more < DATA_BYTES, f"{case.what}, then completed: {more} bytes more than usual"
    saw(f"{usual} bytes each time")

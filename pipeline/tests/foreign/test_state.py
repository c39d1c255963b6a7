"""The state of an audit: what an interruption costs, and what it refuses to continue."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from truetap.harness.errors import CouldNotRun, UsageError
from truetap.pipeline.foreign import judgement
from truetap.pipeline.foreign import state as state_file
from truetap.pipeline.foreign.producers.sample import Found, Problem
from truetap.pipeline.foreign.state import AuditState, Examined

if TYPE_CHECKING:
    from pathlib import Path

ABOUT = {"path": "/data", "producer": "modelopt"}


def found(index: int) -> Found:
    from pathlib import Path

    name = f"{index:05d}.pt"
    return Found(name, Path("/data") / name, 1000 + index, 7)


def examined(index: int, **changes: Any) -> Examined:
    plain = Examined(
        name=found(index).name,
        rows=10,
        tokens=10,
        slots=4,
        dtype="bfloat16",
        width=32,
        masked=5,
        mask_judged=True,
        problems=[],
        prefixes=[(8, 1000 + index, 2000 + index)],
    )
    return replace(plain, **changes)


@pytest.fixture
def state(tmp_path: Path) -> AuditState:
    return AuditState(tmp_path / "a" / "audit.state", ABOUT, resume=False)


def test_what_a_file_costs_does_not_grow_with_the_files_before_it(state: AuditState) -> None:
    """No statement that is made for each file goes through a whole table."""
    state.record(found(0), [examined(0)])
    made: list[str] = []
    state._db.set_trace_callback(made.append)
    for index in (0, 1):  # one that was known, and a new one
        assert state.has(found(index)) == (index == 0)
        state.record(found(index), [examined(index, problems=[Problem("nan", "")])])
    state._db.set_trace_callback(None)
    queries = [sql for sql in made if sql.startswith(("SELECT", "DELETE", "INSERT"))]
    assert len({sql.split()[0] for sql in queries}) == 3
    for sql in queries:
        plan = [row[3] for row in state._db.execute(f"EXPLAIN QUERY PLAN {sql}")]
        assert not [step for step in plan if step.startswith("SCAN")], (sql, plan)


def test_an_interruption_costs_less_than_one_commit(
    state: AuditState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "COMMIT_EVERY", 10)
    for index in range(37):
        state.record(found(index), [examined(index)])
    # Not closed: the process is gone.
    again = AuditState(state.path, ABOUT, resume=True)
    read = [index for index in range(40) if again.has(found(index))]
    assert read == list(range(30))
    assert again.totals()["samples"] == 30


def test_without_resume_nothing_is_kept(state: AuditState) -> None:
    state.record(found(1), [examined(1)])
    state.close()
    assert AuditState(state.path, ABOUT, resume=True).has(found(1))
    assert not AuditState(state.path, ABOUT, resume=False).has(found(1))


def test_a_file_that_changed_is_read_again_and_counts_once(state: AuditState) -> None:
    state.record(found(1), [examined(1, problems=[Problem("nan", "3 rows")])])
    state.keep_reading(found(1).name, {"slots": []})
    changed = replace(found(1), mtime_ns=8)
    assert not state.has(changed)
    state.record(changed, [examined(1)])
    assert state.has(changed)
    assert state.totals()["samples"] == 1
    assert list(state.problems()) == []
    assert not state.is_judged(found(1).name)


def test_the_state_of_another_audit_is_refused(state: AuditState) -> None:
    state.close()
    with pytest.raises(UsageError, match="the state of another audit"):
        AuditState(state.path, ABOUT | {"path": "/other"}, resume=True)


def test_a_state_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "audit.state"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(CouldNotRun, match="cannot be kept"):
        AuditState(path, ABOUT, resume=True)
    with pytest.raises(CouldNotRun, match="cannot be kept"):
        AuditState(path / "below", ABOUT, resume=False)


@pytest.mark.parametrize("resume", [True, False])
def test_a_file_that_is_no_audit_s_is_left_alone(resume: bool, tmp_path: Path) -> None:
    """A mistyped --state must cost nobody their data."""
    path, database = tmp_path / "hs_0.safetensors", tmp_path / "notes.sqlite"
    path.write_bytes(b"somebody's states" * 100)
    with closing(sqlite3.connect(database)) as db:
        db.execute("CREATE TABLE notes (text)")
        db.commit()
    for other in (path, database):
        before = other.read_bytes()
        with pytest.raises(CouldNotRun, match="cannot be kept") as refused:
            AuditState(other, ABOUT, resume=resume)
        assert "another file with --state" in refused.value.remedy
        assert other.read_bytes() == before
    (tmp_path / "empty").touch()
    AuditState(tmp_path / "empty", ABOUT, resume=resume).close()


def test_files_that_have_gone_are_missed(state: AuditState) -> None:
    for index in range(3):
        state.record(found(index), [examined(index)])
    state.require_present(3)
    with pytest.raises(UsageError, match="1 files that were audited before are not there"):
        state.require_present(2)


def test_equal_states_of_different_tokens(state: AuditState) -> None:
    state.record(found(1), [examined(1, prefixes=[(8, 5, 50), (10, 6, 60)])])
    state.record(found(2), [examined(2, prefixes=[(8, 5, 50), (16, 7, 70)])])
    assert list(state.repeated()) == [], "equal tokens have equal states"
    state.record(found(3), [examined(3, prefixes=[(8, 5, 51)])])
    assert list(state.repeated()) == [
        ("00001.pt", "00003.pt", 8),
        ("00002.pt", "00003.pt", 8),
        ("00003.pt", "00001.pt", 8),
    ]
    shared = judgement.repeats(state, {"00001.pt", "00002.pt"})
    assert shared is not None
    assert shared.severity == "error"
    assert shared.files == [
        ("00003.pt", "its first 8 rows are those of 00001.pt, whose tokens differ")
    ], "where values were compared they tell more"
    assert judgement.repeats(state, {f"0000{i}.pt" for i in (1, 2, 3)}) is None


def test_the_draw_is_the_seed_s_whatever_the_order(state: AuditState, tmp_path: Path) -> None:
    other = AuditState(tmp_path / "other", ABOUT, resume=False)
    for index in range(50):
        state.record(found(index), [examined(index)])
        other.record(found(49 - index), [examined(49 - index)])
    drawn = state.draw(3, 5, 100)
    assert drawn == other.draw(3, 5, 100)
    assert len(drawn) == 5
    assert drawn != state.draw(4, 5, 100)
    assert len(state.draw(3, None, 100)) == 50


def test_what_cannot_be_compared_is_not_drawn(state: AuditState) -> None:
    state.record(found(0), [examined(0)])
    state.record(found(1), [examined(1, problems=[Problem("zeros", "")])])
    state.record(found(2), [examined(2, rows=9)])
    state.record(found(3), [examined(3, tokens=101, rows=101)])
    state.record(found(4), [examined(4, problems=[Problem("mask_empty", "")])])
    assert {one.name for one in state.draw(0, None, 100)} == {"00000.pt", "00004.pt"}


def test_the_odd_ones_out(state: AuditState) -> None:
    for index in range(5):
        state.record(found(index), [examined(index, slots=3 if index == 2 else 4)])
    (usual, *_) = state.shapes()
    assert usual == (4, 32, "bfloat16", 4)
    (odd,) = state.of_other_shape(*usual[:3])
    assert odd[0] == "00002.pt"
    assert odd[1].text.startswith("3 slots of width 32 in bfloat16, where most files have 4")

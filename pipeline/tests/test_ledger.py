"""Every job is made once, whichever engine is lost on the way."""

from __future__ import annotations

import random

import pytest

from truetap.harness.errors import CouldNotRun, IntegrityError
from truetap.pipeline.ledger import Ledger
from truetap.pipeline.shard_making import Job


def ledger(count: int) -> Ledger:
    return Ledger([Job(f"s{n}", ()) for n in range(count)])


def names(made: Ledger, engine: int, count: int) -> list[str]:
    return [job.name for _ in range(count) if (job := made.take(engine))]


def test_jobs_go_out_in_order_to_whoever_asks() -> None:
    made = ledger(3)
    assert [names(made, e, 1) for e in (2, 1, 2)] == [["s0"], ["s1"], ["s2"]]
    assert made.take(1) is None
    assert not made.finished
    for engine, name in ((2, "s2"), (1, "s1"), (2, "s0")):
        assert not made.finished
        assert made.deliver(engine, name).name == name
    assert made.finished


def test_what_a_lost_engine_held_comes_first_and_in_order() -> None:
    made = ledger(5)
    assert names(made, 1, 3) == ["s0", "s1", "s2"]
    made.deliver(1, "s1")
    assert made.lose(1, "killed") == ["s0", "s2"]
    assert made.waiting == 4
    assert names(made, 2, 9) == ["s0", "s2", "s3", "s4"]


def test_a_job_that_is_lost_twice_ends_it_and_both_reasons_are_told() -> None:
    made = ledger(2)
    made.take(1)
    made.lose(1, "out of memory")
    made.take(2)
    with pytest.raises(CouldNotRun) as twice:
        made.lose(2, "killed")
    assert "s0 was lost twice: by engine 1 (out of memory), then by engine 2 (killed)" in str(
        twice.value
    )
    assert twice.value.remedy


def test_an_engine_that_held_nothing_costs_nothing() -> None:
    made = ledger(1)
    assert made.lose(1, "killed") == []
    assert names(made, 2, 2) == ["s0"]


@pytest.mark.parametrize(("engine", "name"), [(1, "s0"), (2, "s1"), (2, "../s0"), (3, "s0")])
def test_a_job_is_only_delivered_by_who_has_it(engine: int, name: str) -> None:
    made = ledger(2)
    made.take(2)
    with pytest.raises(IntegrityError, match=f"engine {engine} delivered {name!r}"):
        made.deliver(engine, name)
    made.deliver(2, "s0")
    with pytest.raises(IntegrityError):
        made.deliver(2, "s0")


@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_of_events_each_job_is_made_once(seed: int) -> None:
    draw, made = random.Random(seed), ledger(30)
    held: dict[int, list[str]] = {engine: [] for engine in range(6)}
    done: list[str] = []
    while not made.finished:
        engine = draw.choice(list(held))
        match draw.choice(("take", "take", "deliver", "lose")):
            case "take":
                if job := made.take(engine):
                    held[engine].append(job.name)
            case "deliver" if held[engine]:
                name = held[engine].pop(draw.randrange(len(held[engine])))
                made.deliver(engine, name)
                done.append(name)
            case "lose" if len(held) > 1 and len(held[engine]) < 3:
                try:
                    assert made.lose(engine, "killed") == held.pop(engine)
                except CouldNotRun:
                    return
    assert sorted(done) == sorted(f"s{n}" for n in range(30))

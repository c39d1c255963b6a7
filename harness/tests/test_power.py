"""What was measured is read as it stands: misses, idle clauses and false alarms are told."""

from __future__ import annotations

from typing import Any

import pytest

from truetap.harness import contract, power
from truetap.harness.adapters.mutants import FAULTS
from truetap.harness.power import Power

OWN = {name: fault.caught_by for name, fault in FAULTS.items() if name != power.CONTROL}
KEY = "random-llama-0/bfloat16/mine/full"


def measurement(**changes: Any) -> dict[str, Any]:
    """Return a measurement in which every fault is caught by its own clause and by no other."""
    faults = {name: {"caught_by": [clause]} for name, clause in OWN.items()}
    return {"refused": [], "faults": {power.CONTROL: {"caught_by": []}, **faults}} | changes


def test_a_perfect_measurement() -> None:
    found = Power({KEY: measurement()})
    assert found.missed(OWN) == []
    assert found.idle() == []
    assert found.correct() == {KEY: []}
    assert found.caught("off-by-one") == {"LAYERS-001": 1}
    assert found.times("off-by-one") == 1


@pytest.mark.parametrize("fault", OWN)
def test_a_fault_that_got_past_its_clause_is_told(fault: str) -> None:
    one = measurement()
    one["faults"][fault] = {"caught_by": ["REPLY-003"]}
    assert Power({KEY: one, "v/d/a/core": measurement()}).missed({fault: OWN[fault]})[0] == (
        f"{fault} in {KEY}"
    )


def test_what_was_refused_or_is_not_in_the_profile_is_no_miss_unless_it_never_could_be() -> None:
    own = {"output-row-made-up": "ROWS-008"}
    nothing = {"faults": {"output-row-made-up": {"caught_by": []}}}
    refused = {"refused": ["ROWS-008"], **nothing}
    core = {"refused": [], **nothing}
    only = Power({KEY: refused, "v/d/a/core": core})
    assert only.missed(own) == ["output-row-made-up: never measured"]
    assert Power({KEY: refused, "v/d/b/full": measurement()}).missed(own) == []


def test_a_clause_that_caught_nothing_is_idle() -> None:
    one = measurement()
    for name, clause in OWN.items():
        if clause == "ROWS-004":
            one["faults"][name] = {"caught_by": []}
    assert Power({KEY: one}).idle() == ["ROWS-004"]


def test_a_flagged_control_is_a_false_alarm() -> None:
    one = measurement()
    one["faults"][power.CONTROL] = {"caught_by": ["ROWS-003"]}
    assert Power({KEY: one}).correct() == {KEY: ["ROWS-003"]}


def test_the_committed_measurements_cover_every_mutant_and_raise_no_alarm() -> None:
    found = power.measured()
    assert found.missed(OWN) == []
    assert found.idle() == []
    assert not [key for key, flagged in found.correct().items() if flagged]
    assert {name for one in found.measurements.values() for name in one["faults"]} == set(FAULTS)
    assert all(clause in contract.CLAUSES for name in OWN for clause in found.caught(name))

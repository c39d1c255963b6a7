"""The power of the STORE clauses: every faulty store is caught, and a right one never is."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from truetap.conformance import judge
from truetap.harness import capture_store, contract, registry
from truetap.harness.capture_store import StoreObservation
from truetap.harness.errors import UsageError
from truetap.harness.store_script import observe_store
from truetap.harness.stores import mutants
from truetap.harness.stores.plain import PlainStore

pytest_plugins = "pytester"

WRONG = [fault for fault in mutants.FAULTS if fault != "none"]


STORE = contract.PROFILES["store"]


def failures_of(
    store: capture_store.CaptureStore, tmp_path: Path, clauses: Collection[str] = STORE
) -> dict[str, str]:
    """What fails of a store driven for these clauses; the others have nothing to judge."""
    failures = judge.failures(observe_store(store, tmp_path, clauses=clauses))
    return {clause_id: said for clause_id, said in failures.items() if clause_id in clauses}


def test_every_store_clause_is_judged_and_has_a_mutant() -> None:
    assert tuple(sorted(judge.checks(StoreObservation))) == STORE
    caught = {fault.caught_by for fault in mutants.FAULTS.values()} - {""}
    assert tuple(sorted(caught)) == STORE


def test_the_plain_store_conforms(tmp_path: Path) -> None:
    assert failures_of(PlainStore(), tmp_path) == {}


def test_the_negative_control_conforms(tmp_path: Path) -> None:
    assert failures_of(mutants.MutantStore("none", PlainStore()), tmp_path) == {}


@pytest.mark.parametrize("fault", WRONG)
def test_every_mutant_is_caught_by_its_clause(fault: str, tmp_path: Path) -> None:
    clause_id = mutants.FAULTS[fault].caught_by
    assert clause_id in failures_of(mutants.MutantStore(fault, PlainStore()), tmp_path, [clause_id])


def test_a_store_that_keeps_nothing_passes_nothing(tmp_path: Path) -> None:
    store = mutants.MutantStore("keeps-nothing", PlainStore())
    assert set(failures_of(store, tmp_path)) == set(STORE)


@pytest.mark.parametrize(
    ("fault", "clause_id", "says"),
    [
        (
            "states-digest-only",
            "STORE-004",
            r"[0-9a-f]{64}\.head, bit 0 of byte \d+ flipped: sam.le-\d: .* was (ever )?written",
        ),
        (
            "all-at-the-end",
            "STORE-005",
            "6 samples were handed over before the stop and 0 can be read; at most 3 may .*",
        ),
        (
            "short-read",
            "STORE-003",
            r"ended by the kernel at byte \d+ of a file: sample-7: 0 token ids, 10 were written",
        ),
    ],
)
def test_the_smallest_input_is_named(fault: str, clause_id: str, says: str, tmp_path: Path) -> None:
    """A file, a byte, a sample: what has to be known to look at it."""
    store = mutants.MutantStore(fault, PlainStore())
    assert re.fullmatch(says, failures_of(store, tmp_path, [clause_id])[clause_id])


class Elsewhere:
    """A store that has none of plain's steps."""

    name = "elsewhere"

    def write(self, folder: Path, captures: Any) -> list[str]:
        raise NotImplementedError

    def read(self, folder: Path) -> dict[str, Any]:
        raise NotImplementedError


def test_stores_and_their_mutants_are_found_by_name() -> None:
    assert isinstance(registry.find_store("plain"), PlainStore)
    assert registry.find_store("in-place@plain").name == "in-place@plain"
    assert mutants.MutantStore("swallowed-error", Elsewhere()).name == "swallowed-error@elsewhere"
    with pytest.raises(UsageError, match="no store of captures named 'nowhere'"):
        registry.find_store("nowhere")
    with pytest.raises(UsageError, match="no store mutant named 'wrong'"):
        registry.find_store("wrong@plain")
    with pytest.raises(UsageError, match="in a step of the store plain, not in 'elsewhere'"):
        mutants.MutantStore("in-place", Elsewhere())


def test_samples_are_what_they_promise_to_be() -> None:
    """Exact in bfloat16, finite, no two alike; a changed one differs in tokens and states."""
    ten = capture_store.samples()
    assert len({capture.key for capture in ten}) == len({c.token_ids for c in ten}) == 10
    for capture in ten:
        assert not (capture.states.view(np.uint32) & 0xFFFF).any()
        assert np.isfinite(capture.states).all()
        assert not capture_store.difference(capture, (capture.token_ids, capture.states))
    changed = capture_store.after_change(3)
    assert [c.key for c in changed] == [c.key for c in ten]
    assert [n for n in range(10) if changed[n].token_ids != ten[n].token_ids] == [3]


def test_a_negative_zero_and_one_lost_bit_are_differences() -> None:
    capture = capture_store.samples()[1]
    states = capture.states.copy()
    states.view(np.uint32)[7, 3, 63] ^= 1
    said = capture_store.difference(capture, (capture.token_ids, states))
    assert said.startswith("token 7, slot 3, channel 63 is ")
    assert said.endswith("(1 of 2048 values differ)")


@pytest.mark.parametrize(
    ("store", "verdict", "code"),
    [("plain", "conformant", 0), ("size-only@plain", "non-conformant", 1)],
)
def test_a_store_is_put_through_the_suite_by_name(
    pytester: pytest.Pytester, store: str, verdict: str, code: int
) -> None:
    options = ("-p", "no:cacheprovider", "--store", store, "--report", "r.json")
    run = pytester.runpytest_subprocess("--pyargs", "truetap.conformance", *options, timeout=120)
    report = json.loads((pytester.path / "r.json").read_text())
    assert (run.ret, report["verdict"], report["profile"]) == (code, verdict, "store")
    assert report["adapter"] == report["environment"]["binding"]["store"] == store
    outcomes = {clause["id"]: clause["outcome"] for clause in report["clauses"]}
    failing = {"STORE-004"} if code else set()
    assert outcomes == {id_: "fail" if id_ in failing else "pass" for id_ in STORE}


def test_only_one_subject_may_be_named(pytester: pytest.Pytester) -> None:
    options = ("--store", "plain", "--channel", "collect")
    run = pytester.runpytest_subprocess("--pyargs", "truetap.conformance", *options, timeout=60)
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    assert "--channel and --store name different subjects; give one" in run.stderr.str()

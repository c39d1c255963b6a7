"""The suite's power: every planted fault is caught, and a correct capture path never is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import pytest

from truetap.conformance import judge
from truetap.harness import boundaries, contract, envelope, random_verifier, verifier
from truetap.harness.adapter import Session
from truetap.harness.adapters import mutants
from truetap.harness.model import CaptureBatch, CaptureRequest, EngineSpec, Environment

pytestmark = pytest.mark.torch

Table = dict[str, dict[str, str]]
"""What each failing clause saw, by fault and clause."""

MUSTS = [id_ for id_ in contract.PROFILES["core"] if contract.CLAUSES[id_].level == "MUST"]
WRONG = [fault for fault in mutants.FAULTS if fault != "none"]


class Remembering:
    """Captures for real once; later calls get the same states, announced by a reply of their own.

    bfloat16 on a CPU is slow: capturing anew for each of the mutants takes two minutes.
    """

    def __init__(self, inner: Session) -> None:
        self.boundaries = inner.boundaries
        self._inner = inner
        self._batches: dict[tuple[str, ...], CaptureBatch] = {}
        self._logprobs: dict[tuple[int, ...], list[float] | None] = {}

    def capture(self, requests: Sequence[CaptureRequest]) -> CaptureBatch:
        keys = tuple(request.key for request in requests)
        if keys not in self._batches:
            self._batches[keys] = self._inner.capture(requests)
        nonce = envelope.new_nonce()
        reply = envelope.seal(nonce, 0, 1, lambda: {"requests": len(keys)})
        return replace(self._batches[keys], nonce=nonce, replies=[reply])

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float] | None:
        ids = tuple(token_ids)
        if ids not in self._logprobs:
            self._logprobs[ids] = self._inner.prompt_logprobs(ids)
        return self._logprobs[ids]

    def environment(self) -> Environment:
        return self._inner.environment()

    def close(self) -> None:
        self._inner.close()


@pytest.fixture(
    scope="module",
    params=[
        *(("llama", dtype, seed) for dtype in ("bfloat16", "float32") for seed in (0, 1)),
        *((family, "bfloat16", 0) for family in random_verifier.FAMILIES if family != "llama"),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}-seed{param[2]}",
)
def table(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Table:
    """Judge every mutant of one session, against one reference."""
    from truetap.harness.adapters.transformers import TransformersSession
    from truetap.harness.observation import observe
    from truetap.harness.reference import Reference, ReferenceStates

    family, dtype, seed = request.param
    model = random_verifier.FAMILIES[family](tmp_path_factory.mktemp("tiny"), seed=seed)
    wanted = boundaries.eagle3(verifier.describe(model).num_blocks)
    spec = EngineSpec(model=str(model), boundaries=wanted, dtype=dtype)
    reference = Reference(model, dtype)
    references: dict[str, ReferenceStates] = {}
    seen = replace(spec, boundaries=mutants.boundaries_for(wanted, 1))
    with closing(Remembering(TransformersSession(seen))) as session:
        return {
            fault: judge.failures(
                observe(mutants.MutantSession(fault, session, spec), spec, reference, references)
            )
            for fault in mutants.FAULTS
        }


def test_the_negative_control_is_not_flagged(table: Table) -> None:
    assert table["none"] == {}


@pytest.mark.parametrize("fault", WRONG)
def test_a_fault_is_caught_by_its_clause(table: Table, fault: str) -> None:
    caught_by = mutants.FAULTS[fault].caught_by
    assert caught_by in table[fault]
    assert len(table[fault][caught_by]) > 20


@pytest.mark.parametrize("clause_id", MUSTS)
def test_a_must_clause_can_fail(table: Table, clause_id: str) -> None:
    assert [fault for fault in WRONG if clause_id in table[fault]]


def test_every_clause_is_checked_and_every_fault_names_a_must_clause() -> None:
    assert sorted(judge.checks()) == sorted(contract.PROFILES["core"])
    assert {mutants.FAULTS[fault].caught_by for fault in WRONG} <= set(MUSTS)


@pytest.mark.parametrize(
    ("requested", "early", "seen"),
    [
        ((2, 6, 9, 12), 0, (2, 6, 9, 12)),
        ((2, 6, 9, 12), 1, (1, 2, 5, 6, 8, 9, 11, 12)),
        ((0, 1, 2), 1, (0, 1, 2)),
        ((3, 4), 2, (1, 2, 3, 4)),
    ],
)
def test_boundaries_that_a_fault_needs_to_see(
    requested: tuple[int, ...], early: int, seen: tuple[int, ...]
) -> None:
    assert mutants.boundaries_for(requested, early) == seen

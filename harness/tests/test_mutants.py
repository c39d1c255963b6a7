"""The suite's power: every planted fault is caught, and a correct capture path never is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from truetap.conformance import judge, strategies
from truetap.conformance.remembering import Remembering
from truetap.harness import boundaries, contract, envelope, random_verifier, verifier
from truetap.harness.adapter import Session
from truetap.harness.adapters import mutants
from truetap.harness.model import CaptureBatch, CaptureRequest, EngineSpec

pytestmark = pytest.mark.torch

Table = dict[str, dict[str, str]]
"""What each failing clause saw, by fault and clause."""

MUSTS = [id_ for id_ in contract.PROFILES["full"] if contract.CLAUSES[id_].level == "MUST"]
WRONG = [fault for fault in mutants.FAULTS if fault != "none"]


class Pretending(Remembering):
    """transformers as an engine with ranks, a compiler and preemption, correct throughout."""

    def __init__(self, spec: EngineSpec, scratch: Path) -> None:
        from truetap.harness.adapters.transformers import TransformersSession

        plain = replace(spec, tensor_parallel_size=1, enforce_eager=True, kv_cache_blocks=None)
        super().__init__(TransformersSession(plain, scratch / "transformers.log"))
        self._spec = spec

    def capture(self, requests: Sequence[CaptureRequest]) -> CaptureBatch:
        ranks, tight = self._spec.tensor_parallel_size, self._spec.kv_cache_blocks is not None
        if tight:  # nothing is asked about what they generate
            requests = [replace(request, max_tokens=1) for request in requests]
        batch = super().capture(requests)
        return replace(
            batch,
            replies=[envelope.seal(batch.nonce, rank, ranks, dict) for rank in range(ranks)],
            world_size=ranks,
            by_rank=["the same"] * ranks,
            preemptions=3 if tight else None,
        )

    def close(self) -> None:
        """Stays open: others share it."""


@pytest.fixture(
    scope="module",
    params=[
        *(("llama", dtype, 0) for dtype in ("bfloat16", "float32")),
        pytest.param(("llama", "float32", 1), marks=pytest.mark.nightly),
        *(
            pytest.param((family, "bfloat16", 0), marks=pytest.mark.nightly)
            for family in random_verifier.FAMILIES
            if family != "llama"
        ),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}-seed{param[2]}",
)
def table(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Table:
    """Judge every mutant of one capture path, in every scene, against one reference."""
    from truetap.harness.observation import observe
    from truetap.harness.reference import Reference, ReferenceStates
    from truetap.harness.scenes import play

    family, dtype, seed = request.param
    scratch = tmp_path_factory.mktemp("tiny")
    model = random_verifier.FAMILIES[family](scratch / family, seed=seed)
    wanted = boundaries.eagle3(verifier.describe(model).num_blocks)
    spec = EngineSpec(model=str(model), boundaries=wanted, dtype=dtype)
    reference = Reference(model, dtype)
    references: dict[str, ReferenceStates] = {}
    opened: dict[EngineSpec, Pretending] = {}

    def session(fault: str, spec: EngineSpec) -> Session:
        seen = mutants.boundaries_for(spec.boundaries, 1)
        shared = replace(spec, boundaries=seen)
        if shared not in opened:
            opened[shared] = Pretending(shared, scratch)
        return mutants.MutantSession(fault, opened[shared], spec)

    strategies.load_draws("dev")
    found = {}
    for fault in mutants.FAULTS:
        # Each has to meet its own clause; truetap.conformance.calibrate measures the whole table.
        caught_by = mutants.FAULTS[fault].caught_by
        asked = [caught_by] if caught_by else contract.PROFILES["full"]
        seen = observe(session(fault, spec), spec, reference, references, profile="full")
        staged = play(seen, lambda other, _, fault=fault: session(fault, other), asked)
        found[fault] = judge.failures(staged, asked)
    return found


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


def test_every_clause_is_checked_and_has_a_fault_of_its_own() -> None:
    assert sorted(judge.checks()) == sorted(contract.PROFILES["full"])
    assert {mutants.FAULTS[fault].caught_by for fault in WRONG} == set(contract.PROFILES["full"])


@pytest.mark.parametrize(
    ("requested", "early", "seen"),
    [
        ((2, 6, 9, 12), 0, (2, 6, 9, 12)),
        ((2, 6, 9, 12), 1, (1, 2, 5, 6, 8, 9, 11, 12)),
        ((0, 1, 2), 1, (0, 1, 2)),
        ((3, 4), 2, (1, 2, 3, 4)),
        ((12, 2, 11, 2), 0, (2, 11, 12)),
        ((), 1, ()),
    ],
)
def test_boundaries_that_a_fault_needs_to_see(
    requested: tuple[int, ...], early: int, seen: tuple[int, ...]
) -> None:
    assert mutants.boundaries_for(requested, early) == seen

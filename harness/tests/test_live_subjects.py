"""The unwrapping of speculators 0.3.0 on a real vLLM of today: just these clauses fail."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from truetap.conformance import judge
from truetap.harness import observation, random_verifier, registry
from truetap.harness.model import CaptureRequest, EngineSpec

pytestmark = [pytest.mark.live, pytest.mark.torch, pytest.mark.slow]

FAILING = {
    *("REPLY-001", "ROWS-003", "ROWS-005", "ROWS-006", "ROWS-009", "ENGINE-003", "ENGINE-004"),
    *(f"LAYERS-00{number}" for number in (1, 2, 3, 4)),
}
"""On the generator's own terms, one step and no prefix cache: every row comes, of one boundary."""


def test_speculators_legacy_fails_in_just_these_clauses(tmp_path: Path) -> None:
    from truetap.harness import compare
    from truetap.harness.reference import Reference

    spec = EngineSpec(
        model=str(random_verifier.tiny_llama(tmp_path / "tiny-llama")),
        boundaries=(2, 6, 9, 12),
        enable_prefix_caching=False,
        max_num_batched_tokens=8192,
    )
    reference = Reference(Path(spec.model), spec.dtype)
    session = registry.find("speculators_legacy").open(spec, scratch=tmp_path)
    with closing(session):
        seen = observation.observe(session, spec, reference, {})
        (capture,) = session.capture([CaptureRequest("smallest", (5,))]).captures
    failures = judge.failures(seen)
    assert set(failures) == FAILING
    assert failures["LAYERS-001"] == "1 of 4 boundaries came back"
    assert failures["REPLY-001"].startswith("4 replies came from 1 ranks")
    # One token is enough, and what comes back is the first boundary, in every row.
    assert capture.states.shape == (1, 1, 128)
    keys = [one.key for one in seen.batch.captures]
    states = [one.states[:, 0] for one in seen.batch.captures]
    assert compare.read_slot(2, states, [seen.references[key] for key in keys]).right

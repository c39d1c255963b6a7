"""PARALLEL: the number of ranks changes nothing, and all ranks hold the same."""

from __future__ import annotations

import pytest

from truetap.conformance.same import by_value, captured, first_call, same_rows, scene, whole
from truetap.harness.observation import Observation
from truetap.harness.pytest_plugin import Saw


@pytest.mark.clause("PARALLEL-001")
def test_other_tensor_parallel_size(staged: Observation, saw: Saw) -> None:
    """Two ranks where the base session has one, or one where it has several."""
    other = scene(staged, "other-ranks")
    tokens = {request.key: len(request.token_ids) for request in other.requests}
    ranks = f"{staged.spec.tensor_parallel_size} and {other.spec.tensor_parallel_size} ranks"
    found = whole(captured(other.together, refusable=True), tokens, ranks)
    measured = by_value(found.values(), other.references, staged.hidden_size)
    base = first_call(staged)
    worst = max(
        same_rows(capture, base[key], staged.references[key], f"on {ranks}")
        for key, capture in found.items()
    )
    saw(f"{ranks}, worst row {worst:.1f}x noise; {measured}")


@pytest.mark.clause("PARALLEL-002")
def test_ranks_agree(observation: Observation, saw: Saw) -> None:
    """Every rank gives the same digest of what it saw of a call."""
    batches = [observation.batch, observation.reordered, *observation.singles.values()]
    for batch in batches:
        ranks = batch.world_size
        digests = list(batch.by_rank)
        if ranks == 1 and not digests:
            continue
        assert len(digests) == ranks, (
            f"{len(digests)} of {ranks} ranks say what they saw of the call {batch.nonce}"
        )
        differ = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        assert not differ, f"ranks 0 and {differ[0]} saw other tokens in the call {batch.nonce}"
    saw(f"{len(batches)} calls, {observation.batch.world_size} ranks")

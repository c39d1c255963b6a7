"""REPLY: what the workers answered, before anything was made of it."""

from __future__ import annotations

import pytest

from truetap.harness import envelope
from truetap.harness.observation import Observation
from truetap.harness.pytest_plugin import Saw


@pytest.mark.clause("REPLY-001")
def test_one_reply_per_rank(observation: Observation, saw: Saw) -> None:
    """Every capture call is answered by every rank, once, in order, with the call's own nonce."""
    batches = [observation.batch, *observation.singles.values()]
    for batch in batches:
        problems = envelope.problems(batch.replies, nonce=batch.nonce, world_size=batch.world_size)
        assert not problems, "; ".join(problems)
    assert len({batch.nonce for batch in batches}) == len(batches), "two calls share a nonce"
    saw(f"{len(batches)} calls, each answered by all {observation.batch.world_size} ranks")

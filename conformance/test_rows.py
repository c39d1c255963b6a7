"""ROWS: which rows come back, and whose they are."""

from __future__ import annotations

import numpy as np
import pytest

from truetap.harness import compare
from truetap.harness.observation import Observation
from truetap.harness.pytest_plugin import Saw


@pytest.mark.clause("ROWS-001")
def test_rows_equal_tokens(observation: Observation, saw: Saw) -> None:
    """Each request comes back once, with one row a prompt token."""
    captured = [capture.key for capture in observation.batch.captures]
    for request in observation.requests:
        times = captured.count(request.key)
        assert times == 1, f"request {request.key!r} came back {times} times"
    tokens = {request.key: len(request.token_ids) for request in observation.requests}
    for capture in observation.batch.captures:
        rows = len(capture.states)
        assert rows == tokens[capture.key], (
            f"request {capture.key!r} has {rows} rows for {tokens[capture.key]} tokens"
        )
    saw(f"{sum(tokens.values())} rows for {len(tokens)} requests")


@pytest.mark.clause("ROWS-002")
def test_token_ids_echoed_in_order(observation: Observation, saw: Saw) -> None:
    """Result i carries the key and the token ids of request i."""
    for index, (request, capture) in enumerate(
        zip(observation.requests, observation.batch.captures, strict=False)
    ):
        assert capture.key == request.key, (
            f"result {index} is for {capture.key!r}, request {index} was {request.key!r}"
        )
        assert capture.token_ids == request.token_ids, (
            f"result {index} ({request.key!r}) carries other token ids than were sent"
        )
    saw(f"{len(observation.requests)} results in the order asked")


@pytest.mark.clause("ROWS-003")
def test_batched_equals_single(observation: Observation, saw: Saw) -> None:
    """A request captured alone has the rows that it has in the batch.

    Kernels are chosen by shape, so equality is within a few times the row's own noise floor.
    """
    batched = {capture.key: capture for capture in observation.batch.captures}
    worst = 0.0
    for key, batch in observation.singles.items():
        (single,) = batch.captures
        assert key in batched, f"request {key!r} is not in the batch"
        together = batched[key]
        assert single.states.shape == together.states.shape, (
            f"request {key!r} has shape {single.states.shape} alone and "
            f"{together.states.shape} in a batch"
        )
        tokens = len(single.token_ids)
        assert len(single.states) == tokens, (
            f"request {key!r} has {len(single.states)} rows for {tokens} tokens when alone"
        )
        reference = observation.references[key]
        for slot, boundary in enumerate(single.boundaries):
            distance = compare.row_distances(single.states[:, slot], together.states[:, slot])
            floor = reference.noise[boundary]
            excess = distance / np.maximum(floor, np.median(floor))
            worst = max(worst, float(excess.max()))
            assert worst <= compare.ROW_EXCESS, (
                f"boundary {boundary} of request {key!r} differs between alone and batched by up "
                f"to {worst:.0f} times the noise floor"
            )
    saw(f"{len(observation.singles)} requests alone and batched, worst row {worst:.1f}x noise")

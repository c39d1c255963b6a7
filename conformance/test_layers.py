"""LAYERS: which states they are, proven by value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from truetap.conformance.same import by_value, captured, of_width, scene, whole
from truetap.harness import compare
from truetap.harness.model import Float32
from truetap.harness.observation import Observation
from truetap.harness.pytest_plugin import Saw
from truetap.harness.reference import Reference

MEDIAN_LOGPROB_EXCESS = 2.0
"""Allowed median difference of log-probabilities, in units of the noise floor's median. Measured on
vLLM 0.32.0, CPU, bfloat16: 0.7 to 0.9 (SmolLM2) and 0.1 (random Llama) for correct captures; with a
post-norm last state 111 and 5.9, with the last boundary one early 5.0 on the random Llama."""
LOGPROB_ROW_SLACK = 16.0
"""Allowed difference of any one log-probability, in units of the noise floor (no floor being below
the mean one). Measured: 3.2 (SmolLM2) and 0.3 (random Llama) at most for correct captures."""

BLOCK_EXCESS = 2.0
"""Allowed median distance of a boundary to what its block makes of the one before, in units of one
block's noise."""

LAST_BIT_SHARE = 0.25
"""Least share of values that use the last bit of their dtype; about 0.5 in correct captures."""


@pytest.mark.clause("LAYERS-001")
def test_requested_boundary_by_value(observation: Observation, saw: Saw) -> None:
    """The nearest candidate to every slot is the requested boundary, clearly, and in every row."""
    captures = [c for c in observation.batch.captures if c.key in observation.references]
    wanted = tuple(observation.spec.boundaries)
    readings = {}
    for slot, boundary in enumerate(wanted):
        states, references = [], []
        for capture in captures:
            assert capture.boundaries == wanted, f"slots are declared as {capture.boundaries}"
            width = capture.states.shape[-1]
            assert width == observation.hidden_size, f"states of width {width} hold no boundary"
            slots = capture.states.shape[1]
            assert slots == len(wanted), f"{slots} of {len(wanted)} boundaries came back"
            rows = min(len(capture.states), len(capture.token_ids))
            if len(capture.states) != len(capture.token_ids):
                continue  # ROWS-001 speaks about these; their rows have no counterpart
            states.append(capture.states[:rows, slot])
            references.append(observation.references[capture.key])
        assert states, "no request came back with as many rows as tokens"
        readings[boundary] = compare.read_slot(boundary, states, references)
    assert all(reading.right for reading in readings.values()), compare.summary(readings)
    saw(compare.summary(readings))


@pytest.mark.clause("LAYERS-002")
def test_last_boundary_gives_the_engines_logprobs(observation: Observation, saw: Saw) -> None:
    """log_softmax(lm_head(norm(last boundary))) is what the engine itself says of the prompt."""
    captured = {capture.key: capture for capture in observation.batch.captures}
    differences, floors = [], []
    for key, said in observation.logprobs.items():
        assert said is not None, "the engine gives no prompt log-probabilities"
        assert key in captured, f"request {key!r} did not come back"
        capture, reference = captured[key], observation.references[key]
        assert not capture.last_boundary_normed, "the last slot is declared as already normed"
        last = capture.states[:, -1]
        assert len(last) == len(capture.token_ids), (
            f"request {key!r} has {len(last)} rows for {len(capture.token_ids)} tokens"
        )
        assert last.shape[-1] == observation.hidden_size, f"states have width {last.shape[-1]}"
        ours = observation.reference.logprobs_of_last(last, capture.token_ids)
        differences.append(np.abs(ours - np.asarray(said, dtype=np.float32)))
        floors.append(reference.logprob_noise)
    difference, floor = np.concatenate(differences), np.concatenate(floors)
    assert np.isfinite(difference).all(), "log-probabilities of the last state are not finite"
    excess = difference / np.maximum(floor, floor.mean())
    median = float(np.median(difference) / np.median(floor))
    measured = (
        f"median difference {np.median(difference):.3f} nats ({median:.1f}x noise), worst "
        f"{difference.max():.3f} ({excess.max():.1f}x)"
    )
    assert median <= MEDIAN_LOGPROB_EXCESS, f"last state is not the one before the norm: {measured}"
    assert excess.max() <= LOGPROB_ROW_SLACK, f"some rows of the last state are wrong: {measured}"
    saw(measured)


@pytest.mark.clause("LAYERS-003")
def test_finite_nonzero_distinct(observation: Observation, saw: Saw) -> None:
    """No NaN or infinity, no slot of zeros, no slot equal to another."""
    values = 0
    for capture in observation.batch.captures:
        states = capture.states
        bad = np.argwhere(~np.isfinite(states).all(-1))
        assert not len(bad), (
            f"request {capture.key!r}: {len(bad)} rows are not finite, the first at token "
            f"{bad[0][0]}, boundary {capture.boundaries[bad[0][1]]}"
        )
        slots = states.shape[1]
        assert slots == len(capture.boundaries), (
            f"request {capture.key!r} has {slots} of {len(capture.boundaries)} slots"
        )
        for slot, boundary in enumerate(capture.boundaries):
            assert states[:, slot].any(), (
                f"request {capture.key!r}: boundary {boundary} is all zero"
            )
        for i, j in compare.duplicate_slots(states):
            pytest.fail(
                f"request {capture.key!r}: the slots of boundaries {capture.boundaries[i]} and "
                f"{capture.boundaries[j]} are equal"
            )
        values += states.size
    assert values, "nothing came back"
    saw(f"{values} values")


@pytest.mark.clause("LAYERS-004")
def test_width_and_dtype(observation: Observation, saw: Saw) -> None:
    """States are [tokens, boundaries, hidden] in the engine's dtype, with all of its precision.

    Storage in a coarser format in between stays within the noise of bfloat16 on a small model, so
    it is looked for in the bits: half of all values use the last one. Embeddings are a checkpoint's
    own values and may be coarse.
    """
    slots = len(observation.spec.boundaries)
    assert observation.batch.captures, "nothing came back"
    for capture in observation.batch.captures:
        assert capture.states.ndim == 3, f"states have {capture.states.ndim} dimensions, not 3"
        assert capture.states.shape[1:] == (slots, observation.hidden_size), (
            f"rows have shape {capture.states.shape[1:]}, not {(slots, observation.hidden_size)}"
        )
        assert capture.dtype == observation.spec.dtype, (
            f"states are {capture.dtype}, the engine computes in {observation.spec.dtype}"
        )
    dtype = observation.spec.dtype
    for slot, boundary in enumerate(observation.spec.boundaries):
        rows = np.concatenate([capture.states[:, slot] for capture in observation.batch.captures])
        share = compare.last_bit_share(rows, dtype)
        assert boundary == 0 or not share < LAST_BIT_SHARE, (
            f"boundary {boundary}: {share:.1%} of the values use the last bit of {dtype}; "
            "they were stored in a coarser format"
        )
    saw(f"{slots} slots of width {observation.hidden_size}, {dtype}")


@pytest.mark.clause("LAYERS-005")
def test_every_boundary(staged: Observation, saw: Saw) -> None:
    """All boundaries from 1 to n in one engine, each by value."""
    every = scene(staged, "every-boundary")
    tokens = {request.key: len(request.token_ids) for request in every.requests}
    found = whole(captured(every.together), tokens, "all boundaries")
    for capture in found.values():
        assert capture.boundaries == every.spec.boundaries, (
            f"slots are declared as {capture.boundaries}, asked were {every.spec.boundaries}"
        )
    saw(by_value(found.values(), every.references, staged.hidden_size))


@pytest.mark.clause("LAYERS-006")
def test_boundary_0_is_the_embeddings(staged: Observation, saw: Saw) -> None:
    """Row for row the embedding of its token, so a row that is another token's names it."""
    embeddings = scene(staged, "embeddings")
    tokens = {request.key: len(request.token_ids) for request in embeddings.requests}
    ids = {request.key: request.token_ids for request in embeddings.requests}
    found = whole(captured(embeddings.together, refusable=True), tokens, "boundary 0")
    rows = 0
    for key, capture in found.items():
        assert capture.boundaries[0] == 0, f"slots are declared as {capture.boundaries}"
        of_width(capture, staged.hidden_size)
        expected = staged.reference.embedding_rows(ids[key])
        wrong = np.flatnonzero((capture.states[:, 0] != expected).any(-1))
        if len(wrong):
            row = int(wrong[0])
            known = [
                other
                for other in range(len(expected))
                if np.array_equal(expected[other], capture.states[row, 0])
            ]
            holds = f"the embedding of the token at {known[0]}" if known else "no prompt token's"
            pytest.fail(
                f"request {key!r}: {len(wrong)} of {len(expected)} rows of boundary 0 are not "
                f"their token's embedding; row {row} is {holds}"
            )
        rows += len(expected)
    saw(f"{rows} rows equal, bit for bit")


@pytest.mark.clause("LAYERS-007")
def test_slots_in_the_order_asked(staged: Observation, saw: Saw) -> None:
    """Boundaries neither ascending nor distinct: slot i is the i-th, or the list is refused."""
    order = scene(staged, "another-order")
    asked = order.spec.boundaries
    batch = captured(order.together, refusable=True)
    tokens = {request.key: len(request.token_ids) for request in order.requests}
    for capture in whole(batch, tokens, f"boundaries {list(asked)}").values():
        slots = capture.states.shape[1]
        assert slots == len(asked), f"{slots} slots came back for boundaries {list(asked)}"
    listed = [replace(capture, boundaries=asked) for capture in batch.captures]
    saw(by_value(listed, order.references, staged.hidden_size))


@pytest.mark.clause("LAYERS-008")
def test_each_block_leads_to_the_next_boundary(staged: Observation, saw: Saw) -> None:
    """f_k(captured boundary k) is captured boundary k + 1, and no neighbour's block is nearer.

    The noise floor is what the engine's dtype does to one block; the input is as captured, so
    nothing that came before can hide or excuse a difference.
    """
    every = scene(staged, "every-boundary")
    batch = captured(every.together)
    # One prompt of some length is enough: what is judged is the layer, not the rows.
    capture = max(batch.captures, key=lambda one: len(one.states))
    of_width(capture, staged.hidden_size)
    slots = {boundary: capture.states[:, i] for i, boundary in enumerate(every.spec.boundaries)}
    assert np.isfinite(capture.states).all(), f"request {capture.key!r} has values not finite"
    away, floors = block_distances(staged.reference, slots, staged.num_blocks)
    worst, clearest = 0.0, float("inf")
    for k in range(1, staged.num_blocks):
        own = away[k].pop(k)
        excess = own / max(floors[k], float(np.finfo(np.float32).eps))
        nearest = min(away[k], key=away[k].__getitem__)
        margin = away[k][nearest] / max(own, 1e-12)
        worst, clearest = max(worst, excess), min(clearest, margin)
        assert margin >= compare.MARGIN, (
            f"block {nearest} leads from boundary {k} to {k + 1} no worse than block {k} does "
            f"({away[k][nearest]:.1e} and {own:.1e} away)"
        )
        assert excess <= BLOCK_EXCESS, (
            f"block {k} does not lead from captured boundary {k} to {k + 1}: "
            f"{own:.1e} away, {excess:.1f} times the dtype's noise"
        )
    saw(
        f"blocks 1 to {staged.num_blocks - 1}: at most {worst:.1f}x the noise of one block, other "
        f"blocks at least {clearest:.0f} times as far"
    )


def block_distances(
    reference: Reference, slots: Mapping[int, Float32], num_blocks: int
) -> tuple[dict[int, dict[int, float]], dict[int, float]]:
    """Return how far boundary k + 1 is from what blocks k - 1, k and k + 1 make of boundary k.

    Median row distances, by k and block, and by k the noise of block k alone. The outer loop is
    over blocks, so that a reference that holds one at a time reads each once.
    """
    away: dict[int, dict[int, float]] = {k: {} for k in range(1, num_blocks)}
    floors = {}
    for j in range(num_blocks):
        reached = {k: reference.next_boundary(j, slots[k]) for k in (j - 1, j, j + 1) if k in away}
        for k, state in reached.items():
            away[k][j] = float(np.median(compare.row_distances(slots[k + 1], state)))
        if j in reached:
            rough = reference.next_boundary(j, slots[j], rough=True)
            floors[j] = float(np.median(compare.row_distances(rough, reached[j])))
    return away, floors

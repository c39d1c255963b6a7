"""Faults that show under some settings of the engine, or after some calls, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from truetap.harness.adapters.faults.fault import (
    Corruptor,
    Fault,
    all_right,
    of_states,
    per_capture,
    right,
    slots_of,
)
from truetap.harness.model import Capture, CaptureBatch, CaptureRequest, EngineSpec, Float32


def _where(
    condition: Callable[[EngineSpec], bool], change: Callable[[Corruptor, Capture], Float32]
) -> Callable[[Corruptor, Capture], Float32]:
    """Return a change of states that is made under some settings only."""
    return lambda context, c: (change if condition(context.spec) else right)(context, c)


def _chunk_repeated(context: Corruptor, capture: Capture) -> Float32:
    """Write the second chunk of a prompt where the first one was, and leave it in its own place."""
    states, chunk = right(context, capture).copy(), context.spec.max_num_batched_tokens
    second = states[chunk : 2 * chunk]
    states[: len(second)] = second
    return states


def _warm_rows_from_neighbour(context: Corruptor, batch: CaptureBatch) -> CaptureBatch:
    """Fill the rows of tokens that an earlier call had with those of the request before."""
    known = [c.token_ids for earlier in context.earlier for c in earlier.captures]
    true = all_right(context, batch)
    captures = true[:1]
    for before, capture in pairwise(true):
        cached = max((_shared(capture.token_ids, ids) for ids in known), default=0)
        rows = min(cached, len(before.states)) // 16 * 16
        states = capture.states.copy()
        states[:rows] = before.states[:rows]
        captures.append(replace(capture, states=states))
    return replace(batch, captures=tuple(captures))


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two prompts have in common at their beginning."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def _rows_of_the_call_before(context: Corruptor, batch: CaptureBatch) -> CaptureBatch:
    """Give result i the rows that result i of an earlier call of as many requests had."""
    count = len(batch.captures)
    alike = [b for b in context.earlier if len(b.captures) == count and count > 1]
    true = all_right(context, batch)
    if not alike:
        return replace(batch, captures=tuple(true))
    old = all_right(context, alike[-1])
    return replace(
        batch,
        captures=tuple(
            replace(c, states=np.resize(o.states, c.states.shape))
            for c, o in zip(true, old, strict=True)
        ),
    )


def _blocks_reused(context: Corruptor, batch: CaptureBatch) -> CaptureBatch:
    """Read the first rows of each request from blocks that are another's since a preemption."""
    true = all_right(context, batch)
    if context.spec.kv_cache_blocks is None or len(true) < 2:
        return replace(batch, captures=tuple(true))
    captures = []
    for capture, other in zip(true, [*true[1:], true[0]], strict=True):
        states = capture.states.copy()
        rows = min(16, len(states), len(other.states))
        states[:rows] = other.states[:rows]
        captures.append(replace(capture, states=states))
    return replace(batch, captures=tuple(captures))


def _row_made_up(context: Corruptor, capture: Capture) -> Capture:
    """Give the last generated token a row too, which no forward pass computed."""
    states = right(context, capture)
    if not context.spec.include_output or not capture.generated:
        return replace(capture, states=states)
    return replace(
        capture,
        states=np.concatenate([states, states[-1:]]),
        token_ids=(*capture.token_ids, capture.generated[-1]),
    )


def _ids_of_what_follows(context: Corruptor, capture: Capture) -> Capture:
    """Carry for each row the token that follows it."""
    true = replace(capture, states=right(context, capture))
    if not context.spec.include_output or not capture.generated:
        return true
    return replace(true, token_ids=(*capture.token_ids[1:], capture.generated[-1]))


def _cut_to_the_limit(
    context: Corruptor, requests: Sequence[CaptureRequest]
) -> Sequence[CaptureRequest]:
    longest = context.spec.max_model_len - 2
    return [replace(request, token_ids=request.token_ids[:longest]) for request in requests]


def _same_length_swapped(context: Corruptor, batch: CaptureBatch) -> CaptureBatch:
    """Attribute rows by how many there are: of two prompts of one length, each gets the other's."""
    true = all_right(context, batch)
    by_length: dict[int, list[int]] = {}
    for index, capture in enumerate(true):
        by_length.setdefault(len(capture.states), []).append(index)
    captures = list(true)
    for places in by_length.values():
        for place, source in zip(places, reversed(places), strict=True):
            captures[place] = replace(true[place], states=true[source].states)
    return replace(batch, captures=tuple(captures))


def _first_is_embeddings(context: Corruptor, capture: Capture) -> Float32:
    return slots_of(capture, [0 if k == 1 else k for k in context.requested])


def _boundary_0(change: Callable[[Float32], Float32]) -> Callable[[Corruptor, Capture], Float32]:
    def changed(context: Corruptor, capture: Capture) -> Float32:
        states = right(context, capture).copy()
        if 0 in context.requested:
            slot = context.requested.index(0)
            states[:, slot] = change(states[:, slot])
        return states

    return changed


def _interpolated(context: Corruptor, capture: Capture) -> Float32:
    """Where a boundary and both its neighbours are asked for, give the mean of the neighbours."""
    states = right(context, capture).copy()
    wanted = context.requested
    for slot in range(1, len(wanted) - 1):
        if wanted[slot - 1 : slot + 2] == (wanted[slot] - 1, wanted[slot], wanted[slot] + 1):
            states[:, slot] = (states[:, slot - 1] + states[:, slot + 1]) / 2
            break
    return states


def _half_reduced(context: Corruptor, capture: Capture) -> Float32:
    states = right(context, capture).copy()
    states[..., states.shape[-1] // 2 :] /= 2
    return states


def _one_early(context: Corruptor, capture: Capture) -> Float32:
    return slots_of(capture, [k - 1 for k in context.requested])


def _ranks_differ(context: Corruptor, batch: CaptureBatch) -> CaptureBatch:
    said = [f"rank {rank}" for rank in range(max(2, batch.world_size))]
    return replace(batch, captures=tuple(all_right(context, batch)), by_rank=said)


def _other_tokens(context: Corruptor, capture: Capture) -> Capture:
    said = list(capture.generated)
    if len(said) > 3:
        said[3] ^= 1
    return replace(capture, states=right(context, capture), generated=tuple(said))


def _warm_up_kept(context: Corruptor, batch: CaptureBatch) -> CaptureBatch:
    if batch.captures or context.earlier:
        return replace(batch, captures=tuple(all_right(context, batch)))
    rows = np.ones((8, len(context.requested), 16), dtype=np.float32)
    return replace(batch, captures=(Capture("", (0,) * 8, context.requested, rows, "bfloat16"),))


FAULTS: dict[str, Fault] = {
    "chunk-repeated": Fault(
        "ROWS-004",
        "a prompt's second chunk was written over the first",
        of_states(_chunk_repeated),
    ),
    "warm-rows-from-neighbour": Fault(
        "ROWS-005",
        "rows of cached tokens are those of the request before",
        _warm_rows_from_neighbour,
    ),
    "rows-of-the-call-before": Fault(
        "ROWS-006", "results are those of an earlier call", _rows_of_the_call_before
    ),
    "preempted-twice": Fault(
        "ROWS-007",
        "rows from before and after a preemption",
        of_states(
            _where(
                lambda spec: spec.kv_cache_blocks is not None,
                lambda x, c: np.concatenate([right(x, c)] * 2),
            )
        ),
    ),
    "preempted-blocks-reused": Fault(
        "ROWS-007", "rows from blocks that are another request's by now", _blocks_reused
    ),
    "output-row-made-up": Fault(
        "ROWS-008", "the last generated token has a row", per_capture(_row_made_up)
    ),
    "output-ids-shifted": Fault(
        "ROWS-008", "ids of the tokens that follow the rows'", per_capture(_ids_of_what_follows)
    ),
    "cut-to-the-limit": Fault(
        "ROWS-009",
        "a prompt past the limit is cut, and nobody is told",
        of_states(right),
        ask=_cut_to_the_limit,
    ),
    "same-length-swapped": Fault(
        "ROWS-010", "rows attributed to requests by their number", _same_length_swapped
    ),
    "first-boundary-is-embeddings": Fault(
        "LAYERS-005", "boundary 1 is boundary 0", of_states(_first_is_embeddings), 1
    ),
    "embeddings-of-the-next-token": Fault(
        "LAYERS-006",
        "boundary 0 is one token early",
        of_states(_boundary_0(lambda rows: np.roll(rows, -1, axis=0))),
    ),
    "embeddings-scaled": Fault(
        "LAYERS-006",
        "boundary 0 is scaled by the root of the width",
        of_states(_boundary_0(lambda rows: rows * np.float32(rows.shape[-1] ** 0.5))),
    ),
    "slots-sorted": Fault(
        "LAYERS-007",
        "slots come in ascending order whatever was asked",
        of_states(lambda x, c: slots_of(c, sorted(x.requested))),
    ),
    "duplicates-dropped": Fault(
        "LAYERS-007",
        "a boundary asked for twice has one slot",
        of_states(lambda x, c: slots_of(c, list(dict.fromkeys(x.requested)))),
    ),
    "interpolated": Fault(
        "LAYERS-008", "a boundary is the mean of its neighbours", of_states(_interpolated)
    ),
    "half-reduced": Fault(
        "PARALLEL-001",
        "with two ranks half of the width lacks a rank's sum",
        of_states(_where(lambda spec: spec.tensor_parallel_size > 1, _half_reduced)),
    ),
    "ranks-differ": Fault("PARALLEL-002", "ranks saw different tokens", _ranks_differ),
    "tokens-changed": Fault(
        "ENGINE-001", "capture changes what is generated", per_capture(_other_tokens)
    ),
    "compiled-early": Fault(
        "ENGINE-002",
        "a compiled model gives every boundary one block early",
        of_states(_where(lambda spec: not spec.enforce_eager, _one_early)),
        1,
    ),
    "warm-up-kept": Fault(
        "ENGINE-003", "what the warm-up left is the first result", _warm_up_kept, on_nothing=True
    ),
    "workers-unheard": Fault(
        "ENGINE-004", "workers' messages are lost", of_states(right), mute=True
    ),
}

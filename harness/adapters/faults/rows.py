"""Faults in which rows come back, and whose they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from truetap.harness.adapters.faults.fault import (
    Corruptor,
    Fault,
    all_right,
    of_states,
    per_capture,
    right,
)
from truetap.harness.model import Capture, CaptureBatch, Float32


def _neighbours_rows(context: Corruptor, batch: CaptureBatch) -> CaptureBatch:
    """Cut rows by running offset, as if the scheduler had kept the order of submission reversed."""
    rows = np.concatenate([right(context, c) for c in reversed(batch.captures)])
    captures, start = [], 0
    for capture in batch.captures:
        end = start + len(capture.states)
        captures.append(replace(capture, states=rows[start:end]))
        start = end
    return replace(batch, captures=tuple(captures))


def _row_from_neighbour(context: Corruptor, batch: CaptureBatch) -> CaptureBatch:
    """Put one row of the next request into the middle of each: one slot of a mapping is wrong."""
    true = [right(context, c) for c in batch.captures]
    captures = []
    for index, capture in enumerate(batch.captures):
        states = true[index].copy()
        states[len(states) // 2] = true[(index + 1) % len(true)][0]
        captures.append(replace(capture, states=states))
    return replace(batch, captures=tuple(captures))


def _stale_chunk_tail(context: Corruptor, capture: Capture) -> Float32:
    """Leave the rows of the last chunk as the chunk before had them."""
    states = right(context, capture).copy()
    chunk = max(1, len(states) // 4)
    if len(states) > 2 * chunk:
        states[-chunk:] = states[-2 * chunk : -chunk]
    return states


def _last_chunk_only(context: Corruptor, capture: Capture) -> Float32:
    states = right(context, capture)
    return states[-max(1, len(states) // 2) :]


def _cached_prefix_missing(context: Corruptor, batch: CaptureBatch) -> CaptureBatch:
    """Leave out the rows of whole cache blocks that an earlier request of the batch had."""
    block, seen, captures = 16, set(), []
    for capture in batch.captures:
        blocks = [
            capture.token_ids[: end + block]
            for end in range(0, len(capture.token_ids) - block, block)
        ]
        cached = 0
        for prefix in blocks:
            cached = len(prefix) if prefix in seen else cached
        seen.update(blocks)
        captures.append(replace(capture, states=right(context, capture)[cached:]))
    return replace(batch, captures=tuple(captures))


def _warm_up_rows(context: Corruptor, batch: CaptureBatch) -> CaptureBatch:
    """Begin with the rows that the engine's warm-up left: the founding run had 943 for 771."""
    captures = all_right(context, batch)
    first = captures[0].states
    captures[0] = replace(captures[0], states=np.concatenate([np.ones_like(first[:1]), first]))
    return replace(batch, captures=tuple(captures))


def _aliased(context: Corruptor, batch: CaptureBatch) -> CaptureBatch:
    """Hand out views of one buffer, which every later request overwrites."""
    true = [right(context, c) for c in batch.captures]
    buffer = np.zeros_like(max(true, key=len))
    captures = []
    for capture, states in zip(batch.captures, true, strict=True):
        buffer[: len(states)] = states
        captures.append(replace(capture, states=buffer[: len(states)]))
    return replace(batch, captures=tuple(captures))


def _swapped_requests(context: Corruptor, batch: CaptureBatch) -> CaptureBatch:
    """Give the two longest requests each other's rows, cut to length."""
    captures = all_right(context, batch)
    if len(captures) > 1:
        i, j = sorted(range(len(captures)), key=lambda k: len(captures[k].states))[-2:]
        rows = min(len(captures[i].states), len(captures[j].states))
        ours, theirs = captures[i].states.copy(), captures[j].states.copy()
        ours[:rows], theirs[:rows] = captures[j].states[:rows], captures[i].states[:rows]
        captures[i] = replace(captures[i], states=ours)
        captures[j] = replace(captures[j], states=theirs)
    return replace(batch, captures=tuple(captures))


def _zero_tail(context: Corruptor, capture: Capture) -> Float32:
    """Leave the last rows as they were allocated."""
    states = right(context, capture).copy()
    states[len(states) - len(states) // 8 - 1 :] = 0
    return states


def _text_order(context: Corruptor, batch: CaptureBatch) -> CaptureBatch:
    """Return results sorted by request number as text: 0, 1, 10, 11, 2."""
    true = all_right(context, batch)
    order = sorted(range(len(true)), key=str)
    return replace(batch, captures=tuple(true[i] for i in order))


def _last_missing(context: Corruptor, batch: CaptureBatch) -> CaptureBatch:
    true = all_right(context, batch)
    return replace(batch, captures=tuple(true[:-1] if len(true) > 1 else true))


def _padded(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0] // 8 * 8 + 8, *shape[1:])


FAULTS: dict[str, Fault] = {
    "rows-shifted": Fault(
        "LAYERS-001",
        "every row belongs to the token before",
        of_states(lambda x, c: np.roll(right(x, c), 1, axis=0)),
    ),
    "rows-short": Fault(
        "ROWS-001", "the last row is missing", of_states(lambda x, c: right(x, c)[:-1])
    ),
    "rows-extra": Fault(
        "ROWS-001",
        "one row too many, as from a decode step",
        of_states(lambda x, c: right(x, c)[[*range(len(c.states)), -1]]),
    ),
    "rows-reversed": Fault(
        "LAYERS-001", "rows in reverse order", of_states(lambda x, c: right(x, c)[::-1])
    ),
    "last-request-missing": Fault(
        "ROWS-001", "the last request of a run was never written", _last_missing
    ),
    "last-chunk-only": Fault(
        "ROWS-001", "of a chunked prompt only the last chunk", of_states(_last_chunk_only)
    ),
    "cached-prefix-missing": Fault(
        "ROWS-001", "cached blocks have no rows", _cached_prefix_missing
    ),
    "warm-up-rows": Fault("ROWS-001", "rows of the warm-up come first", _warm_up_rows),
    "padding-rows": Fault(
        "ROWS-001",
        "rows of padding, up to a multiple of eight",
        of_states(lambda x, c: np.resize(right(x, c), _padded(right(x, c).shape))),
    ),
    "ids-missing": Fault(
        "ROWS-002",
        "no token ids come back",
        per_capture(lambda x, c: replace(c, states=right(x, c), token_ids=())),
    ),
    "ids-wrong": Fault(
        "ROWS-002",
        "ids with one token changed come back",
        per_capture(
            lambda x, c: replace(
                c, states=right(x, c), token_ids=(c.token_ids[0] ^ 1, *c.token_ids[1:])
            )
        ),
    ),
    "text-order": Fault("ROWS-002", "results in text order of request ids", _text_order),
    "neighbours-rows": Fault("ROWS-003", "rows cut from a reordered batch", _neighbours_rows),
    "requests-swapped": Fault(
        "LAYERS-001", "two requests have each other's rows", _swapped_requests
    ),
    "row-from-neighbour": Fault(
        "LAYERS-001", "one row in the middle is a neighbour's", _row_from_neighbour
    ),
    "stale-chunk-tail": Fault(
        "LAYERS-001",
        "the last chunk's rows are those of the one before",
        of_states(_stale_chunk_tail),
    ),
    "buffer-aliased": Fault("LAYERS-001", "all requests are views of one reused buffer", _aliased),
    "zero-tail": Fault("LAYERS-001", "the last rows were never filled", of_states(_zero_tail)),
}

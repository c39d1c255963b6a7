"""Deliberately wrong capture paths: the proof that the suite can fail.

A mutant wraps a real adapter, takes real captures from it, and makes one fault that somebody's
pipeline really had. ``FAULT@ADAPTER`` names it, e.g. ``off-by-one@vllm_native``. The fault
``none`` is the negative control: the same wrapping, nothing changed, and nothing may be flagged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from truetap.harness.adapter import Adapter, Session
from truetap.harness.errors import UsageError
from truetap.harness.final_norm import final_norm
from truetap.harness.model import (
    Capture,
    CaptureBatch,
    CaptureRequest,
    EngineSpec,
    Environment,
    Float32,
)


@dataclass(frozen=True)
class Fault:
    """One fault, and the clause that must catch it."""

    caught_by: str
    says: str
    """What was done wrong, in a phrase."""
    corrupt: Callable[[_Corruptor, CaptureBatch], CaptureBatch]
    early: int = 0
    """How many boundaries before each requested one the fault needs to see."""


@dataclass
class _Corruptor:
    """What a fault may draw on besides the batch itself."""

    requested: tuple[int, ...]
    final_norm: Callable[[Float32], Float32]
    mistaken_norm: Callable[[Float32], Float32]
    """The final norm with ``weight`` in place of ``1 + weight``, or the other way round."""
    previous: CaptureBatch | None = None


def _per_capture(change: Callable[[_Corruptor, Capture], Capture]) -> Any:
    def corrupt(context: _Corruptor, batch: CaptureBatch) -> CaptureBatch:
        return replace(batch, captures=tuple(change(context, c) for c in batch.captures))

    return corrupt


def _states(change: Callable[[_Corruptor, Capture], Float32]) -> Any:
    return _per_capture(lambda context, c: replace(c, states=change(context, c)))


def _boundaries(context: _Corruptor, capture: Capture, wanted: Sequence[int]) -> Float32:
    """Return the slots of ``wanted`` boundaries from a capture that holds more."""
    del context
    return capture.states[:, [capture.boundaries.index(k) for k in wanted]]


def _right(context: _Corruptor, capture: Capture) -> Float32:
    return _boundaries(context, capture, context.requested)


def _off_by_one(context: _Corruptor, capture: Capture) -> Float32:
    return _boundaries(context, capture, [k - 1 for k in context.requested])


def _one_slot_early(slot: int) -> Callable[[_Corruptor, Capture], Float32]:
    def change(context: _Corruptor, capture: Capture) -> Float32:
        wanted = list(context.requested)
        wanted[slot] -= 1
        return _boundaries(context, capture, wanted)

    return change


def _residual_missing(context: _Corruptor, capture: Capture) -> Float32:
    return _right(context, capture) - _off_by_one(context, capture)


def _post_norm(context: _Corruptor, capture: Capture) -> Float32:
    states = _right(context, capture).copy()
    states[:, -1] = context.final_norm(states[:, -1])
    return states


def _mistaken_norm(context: _Corruptor, capture: Capture) -> Float32:
    states = _right(context, capture).copy()
    states[:, -1] = context.mistaken_norm(states[:, -1])
    return states


def _first_only(context: _Corruptor, capture: Capture) -> Float32:
    states = _right(context, capture)
    return np.repeat(states[:, :1], states.shape[1], axis=1)


def _zero_slot(context: _Corruptor, capture: Capture) -> Float32:
    states = _right(context, capture).copy()
    states[:, 0] = 0
    return states


def _nan_row(context: _Corruptor, capture: Capture) -> Float32:
    states = _right(context, capture).copy()
    states[len(states) // 2, 1] = np.nan
    return states


def _half_precision(context: _Corruptor, capture: Capture) -> Capture:
    with np.errstate(over="ignore"):
        states = _right(context, capture).astype(np.float16).astype(np.float32)
    return replace(capture, states=states, dtype="float16")


def _neighbours_rows(context: _Corruptor, batch: CaptureBatch) -> CaptureBatch:
    """Cut rows by running offset, as if the scheduler had kept the order of submission reversed."""
    rows = np.concatenate([_right(context, c) for c in reversed(batch.captures)])
    captures, start = [], 0
    for capture in batch.captures:
        end = start + len(capture.states)
        captures.append(replace(capture, states=rows[start:end]))
        start = end
    return replace(batch, captures=tuple(captures))


def _row_from_neighbour(context: _Corruptor, batch: CaptureBatch) -> CaptureBatch:
    """Put one row of the next request into the middle of each: one slot of a mapping is wrong."""
    right = [_right(context, c) for c in batch.captures]
    captures = []
    for index, capture in enumerate(batch.captures):
        states = right[index].copy()
        states[len(states) // 2] = right[(index + 1) % len(right)][0]
        captures.append(replace(capture, states=states))
    return replace(batch, captures=tuple(captures))


def _stale_chunk_tail(context: _Corruptor, capture: Capture) -> Float32:
    """Leave the rows of the last chunk as the chunk before had them."""
    states = _right(context, capture).copy()
    chunk = max(1, len(states) // 4)
    if len(states) > 2 * chunk:
        states[-chunk:] = states[-2 * chunk : -chunk]
    return states


def _last_chunk_only(context: _Corruptor, capture: Capture) -> Float32:
    states = _right(context, capture)
    return states[-max(1, len(states) // 2) :]


def _cached_prefix_missing(context: _Corruptor, batch: CaptureBatch) -> CaptureBatch:
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
        captures.append(replace(capture, states=_right(context, capture)[cached:]))
    return replace(batch, captures=tuple(captures))


def _warm_up_rows(context: _Corruptor, batch: CaptureBatch) -> CaptureBatch:
    """Begin with the rows that the engine's warm-up left: the founding run had 943 for 771."""
    captures = [replace(c, states=_right(context, c)) for c in batch.captures]
    first = captures[0].states
    captures[0] = replace(captures[0], states=np.concatenate([np.ones_like(first[:1]), first]))
    return replace(batch, captures=tuple(captures))


def _aliased(context: _Corruptor, batch: CaptureBatch) -> CaptureBatch:
    """Hand out views of one buffer, which every later request overwrites."""
    right = [_right(context, c) for c in batch.captures]
    buffer = np.zeros_like(max(right, key=len))
    captures = []
    for capture, states in zip(batch.captures, right, strict=True):
        buffer[: len(states)] = states
        captures.append(replace(capture, states=buffer[: len(states)]))
    return replace(batch, captures=tuple(captures))


def _swapped_requests(context: _Corruptor, batch: CaptureBatch) -> CaptureBatch:
    """Give the two longest requests each other's rows, cut to length."""
    captures = [replace(c, states=_right(context, c)) for c in batch.captures]
    if len(captures) > 1:
        i, j = sorted(range(len(captures)), key=lambda k: len(captures[k].states))[-2:]
        rows = min(len(captures[i].states), len(captures[j].states))
        ours, theirs = captures[i].states.copy(), captures[j].states.copy()
        ours[:rows], theirs[:rows] = captures[j].states[:rows], captures[i].states[:rows]
        captures[i] = replace(captures[i], states=ours)
        captures[j] = replace(captures[j], states=theirs)
    return replace(batch, captures=tuple(captures))


def _slot_duplicated(context: _Corruptor, capture: Capture) -> Float32:
    states = _right(context, capture).copy()
    states[:, 1] = states[:, 0]
    return states


def _double_norm(context: _Corruptor, capture: Capture) -> Float32:
    states = _right(context, capture).copy()
    states[:, -1] = context.final_norm(context.final_norm(states[:, -1]))
    return states


def _zero_tail(context: _Corruptor, capture: Capture) -> Float32:
    """Leave the last rows as they were allocated."""
    states = _right(context, capture).copy()
    states[len(states) - len(states) // 8 - 1 :] = 0
    return states


def _tensor_parallel_share(context: _Corruptor, capture: Capture) -> Float32:
    states = _right(context, capture)
    return states[..., : states.shape[-1] // 2]


def _eight_bits(context: _Corruptor, capture: Capture) -> Float32:
    """Keep three bits of every mantissa, as float8_e4m3 does, and go on calling it bfloat16."""
    fraction, exponent = np.frexp(_right(context, capture))
    rounded: Float32 = np.ldexp(np.round(fraction * 16) / 16, exponent).astype(np.float32)
    return rounded


def _text_order(context: _Corruptor, batch: CaptureBatch) -> CaptureBatch:
    """Return results sorted by request number as text: 0, 1, 10, 11, 2."""
    right = [replace(c, states=_right(context, c)) for c in batch.captures]
    order = sorted(range(len(right)), key=str)
    return replace(batch, captures=tuple(right[i] for i in order))


def _last_missing(context: _Corruptor, batch: CaptureBatch) -> CaptureBatch:
    right = [replace(c, states=_right(context, c)) for c in batch.captures]
    return replace(batch, captures=tuple(right[:-1] if len(right) > 1 else right))


def _reply(change: Callable[[_Corruptor, CaptureBatch], Any]) -> Any:
    def corrupt(context: _Corruptor, batch: CaptureBatch) -> CaptureBatch:
        right = tuple(replace(c, states=_right(context, c)) for c in batch.captures)
        return replace(batch, captures=right, replies=change(context, batch))

    return corrupt


def _stale(context: _Corruptor, batch: CaptureBatch) -> Any:
    return context.previous.replies if context.previous else batch.replies


FAULTS: dict[str, Fault] = {
    "none": Fault("", "nothing: the negative control", _states(_right)),
    "first-boundary-only": Fault(
        "LAYERS-001", "one state of the reply was taken for all", _states(_first_only)
    ),
    "off-by-one": Fault("LAYERS-001", "every boundary one block early", _states(_off_by_one), 1),
    "middle-boundary-early": Fault(
        "LAYERS-001", "one middle boundary one block early", _states(_one_slot_early(1)), 1
    ),
    "last-boundary-early": Fault(
        "LAYERS-002", "the last boundary one block early", _states(_one_slot_early(-1)), 1
    ),
    "residual-missing": Fault(
        "LAYERS-001", "block outputs without the residual", _states(_residual_missing), 1
    ),
    "last-boundary-post-norm": Fault(
        "LAYERS-002", "the final norm is already in the last boundary", _states(_post_norm)
    ),
    "last-boundary-mistaken-norm": Fault(
        "LAYERS-002",
        "a norm of the wrong kind, weight for 1 + weight, is in the last boundary",
        _states(_mistaken_norm),
    ),
    "slots-permuted": Fault(
        "LAYERS-001", "slots in descending order", _states(lambda x, c: _right(x, c)[:, ::-1])
    ),
    "rows-shifted": Fault(
        "LAYERS-001",
        "every row belongs to the token before",
        _states(lambda x, c: np.roll(_right(x, c), 1, axis=0)),
    ),
    "rows-short": Fault(
        "ROWS-001", "the last row is missing", _states(lambda x, c: _right(x, c)[:-1])
    ),
    "rows-extra": Fault(
        "ROWS-001",
        "one row too many, as from a decode step",
        _states(lambda x, c: _right(x, c)[[*range(len(c.states)), -1]]),
    ),
    "last-request-missing": Fault(
        "ROWS-001", "the last request of a run was never written", _last_missing
    ),
    "last-chunk-only": Fault(
        "ROWS-001", "of a chunked prompt only the last chunk", _states(_last_chunk_only)
    ),
    "cached-prefix-missing": Fault(
        "ROWS-001", "cached blocks have no rows", _cached_prefix_missing
    ),
    "warm-up-rows": Fault("ROWS-001", "rows of the warm-up come first", _warm_up_rows),
    "ids-missing": Fault(
        "ROWS-002",
        "no token ids come back",
        _per_capture(lambda x, c: replace(c, states=_right(x, c), token_ids=())),
    ),
    "ids-wrong": Fault(
        "ROWS-002",
        "ids with one token changed come back",
        _per_capture(
            lambda x, c: replace(
                c, states=_right(x, c), token_ids=(c.token_ids[0] ^ 1, *c.token_ids[1:])
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
        _states(_stale_chunk_tail),
    ),
    "buffer-aliased": Fault("LAYERS-001", "all requests are views of one reused buffer", _aliased),
    "rows-reversed": Fault(
        "LAYERS-001", "rows in reverse order", _states(lambda x, c: _right(x, c)[::-1])
    ),
    "slot-duplicated": Fault(
        "LAYERS-001", "the second slot holds the first boundary", _states(_slot_duplicated)
    ),
    "scaled": Fault(
        "LAYERS-001",
        "states scaled, as float16 DeepSeek scales its residual",
        _states(lambda x, c: _right(x, c) / np.float32(2.5)),
    ),
    "eight-bits": Fault(
        "LAYERS-004", "values rounded to eight bits, still called bfloat16", _states(_eight_bits)
    ),
    "zero-tail": Fault("LAYERS-001", "the last rows were never filled", _states(_zero_tail)),
    "double-norm": Fault("LAYERS-002", "the final norm was applied twice", _states(_double_norm)),
    "zero-slot": Fault("LAYERS-003", "one slot was never filled", _states(_zero_slot)),
    "nan-row": Fault("LAYERS-003", "one row is not a number", _states(_nan_row)),
    "tensor-parallel-share": Fault(
        "LAYERS-004", "one rank's half of the width", _states(_tensor_parallel_share)
    ),
    "half-precision": Fault(
        "LAYERS-004", "states stored as float16", _per_capture(_half_precision)
    ),
    "stale-reply": Fault("REPLY-001", "the reply of the call before", _reply(_stale)),
    "rank-missing": Fault(
        "REPLY-001", "one rank's reply is missing", _reply(lambda _, b: b.replies[1:])
    ),
    "reply-unwrapped": Fault(
        "REPLY-001", "a bare reply in place of a list", _reply(lambda _, b: b.replies[0])
    ),
}
"""All faults by name."""


class MutantAdapter:
    """A real adapter with one fault."""

    def __init__(self, fault: str, inner: Adapter) -> None:
        if fault not in FAULTS:
            raise UsageError(
                f"there is no mutant named {fault!r}", remedy=f"mutants: {', '.join(FAULTS)}"
            )
        self._fault = fault
        self._inner = inner
        self.name = f"{fault}@{inner.name}"

    def open(self, spec: EngineSpec, *, scratch: Path) -> MutantSession:
        """Open the real adapter at the boundaries that the fault needs to see."""
        seen = boundaries_for(spec.boundaries, FAULTS[self._fault].early)
        inner = self._inner.open(replace(spec, boundaries=seen), scratch=scratch)
        return MutantSession(self._fault, inner, spec)


def boundaries_for(requested: Sequence[int], early: int) -> tuple[int, ...]:
    """Return the requested boundaries and the ``early`` ones before each."""
    return tuple(sorted({k - e for k in requested for e in range(early + 1) if k - e >= 0}))


class MutantSession:
    """A real session whose captures are corrupted on the way out.

    ``inner`` may capture more boundaries than ``spec`` asks for, so that one engine can serve
    several mutants.
    """

    def __init__(self, fault: str, inner: Session, spec: EngineSpec) -> None:
        self.boundaries = tuple(spec.boundaries)
        self._fault, self._name = FAULTS[fault], fault
        self._inner = inner
        model = Path(spec.model)
        self._context = _Corruptor(
            self.boundaries, final_norm(model), final_norm(model, mistaken=True)
        )

    def capture(self, requests: Sequence[CaptureRequest]) -> CaptureBatch:
        """Capture for real, then make the fault."""
        batch = self._inner.capture(requests)
        corrupted = self._fault.corrupt(self._context, batch)
        self._context.previous = batch
        return replace(
            corrupted,
            captures=tuple(replace(c, boundaries=self.boundaries) for c in corrupted.captures),
        )

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float] | None:
        """Pass the real engine's log-probabilities through."""
        return self._inner.prompt_logprobs(token_ids)

    def environment(self) -> Environment:
        """Return the real environment under the mutant's own name."""
        real = self._inner.environment()
        adapter = dict(real.binding["adapter"])
        adapter["name"] = f"{self._name}@{adapter['name']}"
        binding = {**real.binding, "adapter": adapter, "boundaries": list(self.boundaries)}
        return Environment(binding=binding, recorded=real.recorded)

    def close(self) -> None:
        """Close the real session."""
        self._inner.close()

"""Faults in which states a slot holds, and how they are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from truetap.harness.adapters.faults.fault import (
    Corruptor,
    Fault,
    of_states,
    per_capture,
    right,
    slots_of,
)
from truetap.harness.model import Capture, Float32


def _off_by_one(context: Corruptor, capture: Capture) -> Float32:
    return slots_of(capture, [k - 1 for k in context.requested])


def _one_slot_early(slot: int) -> Callable[[Corruptor, Capture], Float32]:
    def change(context: Corruptor, capture: Capture) -> Float32:
        wanted = list(context.requested)
        wanted[slot] -= 1
        return slots_of(capture, wanted)

    return change


def _residual_missing(context: Corruptor, capture: Capture) -> Float32:
    return right(context, capture) - _off_by_one(context, capture)


def _post_norm(context: Corruptor, capture: Capture) -> Float32:
    states = right(context, capture).copy()
    states[:, -1] = context.final_norm(states[:, -1])
    return states


def _mistaken_norm(context: Corruptor, capture: Capture) -> Float32:
    states = right(context, capture).copy()
    states[:, -1] = context.mistaken_norm(states[:, -1])
    return states


def _first_only(context: Corruptor, capture: Capture) -> Float32:
    states = right(context, capture)
    return np.repeat(states[:, :1], states.shape[1], axis=1)


def _zero_slot(context: Corruptor, capture: Capture) -> Float32:
    states = right(context, capture).copy()
    states[:, 0] = 0
    return states


def _nan_row(context: Corruptor, capture: Capture) -> Float32:
    states = right(context, capture).copy()
    states[len(states) // 2, 1] = np.nan
    return states


def _half_precision(context: Corruptor, capture: Capture) -> Capture:
    with np.errstate(over="ignore"):
        states = right(context, capture).astype(np.float16).astype(np.float32)
    return replace(capture, states=states, dtype="float16")


def _slot_duplicated(context: Corruptor, capture: Capture) -> Float32:
    states = right(context, capture).copy()
    states[:, 1] = states[:, 0]
    return states


def _double_norm(context: Corruptor, capture: Capture) -> Float32:
    states = right(context, capture).copy()
    states[:, -1] = context.final_norm(context.final_norm(states[:, -1]))
    return states


def _tensor_parallel_share(context: Corruptor, capture: Capture) -> Float32:
    states = right(context, capture)
    return states[..., : states.shape[-1] // 2]


def _eight_bits(context: Corruptor, capture: Capture) -> Float32:
    """Keep three bits of every mantissa, as float8_e4m3 does, and go on calling it bfloat16."""
    fraction, exponent = np.frexp(right(context, capture))
    rounded: Float32 = np.ldexp(np.round(fraction * 16) / 16, exponent).astype(np.float32)
    return rounded


FAULTS: dict[str, Fault] = {
    "first-boundary-only": Fault(
        "LAYERS-001", "one state of the reply was taken for all", of_states(_first_only)
    ),
    "off-by-one": Fault("LAYERS-001", "every boundary one block early", of_states(_off_by_one), 1),
    "middle-boundary-early": Fault(
        "LAYERS-001", "one middle boundary one block early", of_states(_one_slot_early(1)), 1
    ),
    "last-boundary-early": Fault(
        "LAYERS-002", "the last boundary one block early", of_states(_one_slot_early(-1)), 1
    ),
    "residual-missing": Fault(
        "LAYERS-001", "block outputs without the residual", of_states(_residual_missing), 1
    ),
    "last-boundary-post-norm": Fault(
        "LAYERS-002", "the final norm is already in the last boundary", of_states(_post_norm)
    ),
    "last-boundary-mistaken-norm": Fault(
        "LAYERS-002",
        "a norm of the wrong kind, weight for 1 + weight, is in the last boundary",
        of_states(_mistaken_norm),
    ),
    "double-norm": Fault("LAYERS-002", "the final norm was applied twice", of_states(_double_norm)),
    "slots-permuted": Fault(
        "LAYERS-001", "slots in descending order", of_states(lambda x, c: right(x, c)[:, ::-1])
    ),
    "slot-duplicated": Fault(
        "LAYERS-001", "the second slot holds the first boundary", of_states(_slot_duplicated)
    ),
    "scaled": Fault(
        "LAYERS-001",
        "states scaled, as float16 DeepSeek scales its residual",
        of_states(lambda x, c: right(x, c) / np.float32(2.5)),
    ),
    "zero-slot": Fault("LAYERS-003", "one slot was never filled", of_states(_zero_slot)),
    "nan-row": Fault("LAYERS-003", "one row is not a number", of_states(_nan_row)),
    "tensor-parallel-share": Fault(
        "LAYERS-004", "one rank's half of the width", of_states(_tensor_parallel_share)
    ),
    "half-precision": Fault("LAYERS-004", "states stored as float16", per_capture(_half_precision)),
    "eight-bits": Fault(
        "LAYERS-004", "values rounded to eight bits, still called bfloat16", of_states(_eight_bits)
    ),
}

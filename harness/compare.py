"""Value comparison: relative row distances, and the name of what a slot really holds.

Adjacent boundaries of a real model have a cosine of .92 to .98 with each other, so neither a cosine
nor one absolute tolerance can tell a boundary from its neighbour. Here a slot is compared with
*every* candidate - all boundaries, each block's output without the residual, the normed last state,
rows shifted by one - and the nearest one by median row distance is what the slot is said to hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from truetap.harness.model import Float32

if TYPE_CHECKING:
    from truetap.harness.reference import ReferenceStates

MARGIN = 2.0
"""How many times nearer the requested boundary must be than any other candidate, by median and in
each row that is far from its reference."""
MEDIAN_EXCESS = 2.0
"""How many times the noise floor the median row may be away."""
ROW_EXCESS = 8.0
"""How many times the noise floor a row may be away before its neighbours are asked. The noise of a
few rows (attention sinks) is heavy-tailed: a correct capture had one at 10 times. Measurements
behind these three numbers, and what each mutant scores, are in conformance/calibration.json."""


@dataclass(frozen=True)
class SlotReading:
    """What one slot holds, by value."""

    requested: int
    holds: str
    """Name of the nearest candidate, e.g. ``boundary 15``."""
    distance: float
    """Median relative L2 distance of the slot's rows to that candidate."""
    requested_distance: float
    runner_up: str
    margin: float
    """Distance of the nearest *other* candidate over that of the requested boundary, by median."""
    median_excess: float
    """Median row distance to the requested boundary, in units of the noise floor's median."""
    worst_row: float
    """Largest row distance to the requested boundary, in units of that row's noise floor."""
    bad_rows: int
    """Rows beyond ``ROW_EXCESS`` that are not clearly nearest to their own reference either."""
    rows: int

    @property
    def right(self) -> bool:
        """True if the slot holds the requested boundary, clearly, in every row."""
        return self.margin >= MARGIN and self.median_excess <= MEDIAN_EXCESS and self.bad_rows == 0

    def __str__(self) -> str:
        slot = f"the slot for boundary {self.requested}"
        if self.margin < MARGIN and self.holds != f"boundary {self.requested}":
            return (
                f"{slot} holds {self.holds} (median distance {self.distance:.1e}, to boundary "
                f"{self.requested} {self.requested_distance:.1e})"
            )
        if self.margin < MARGIN:
            return (
                f"{slot} is hardly nearer to boundary {self.requested} "
                f"({self.requested_distance:.1e}) than to {self.runner_up} ({self.margin:.1f}x)"
            )
        if self.bad_rows:
            return (
                f"{slot} has {self.bad_rows} of {self.rows} rows that are not its own: up to "
                f"{self.worst_row:.0f} times their noise floor away"
            )
        if not self.right:
            return f"{slot} is {self.median_excess:.1f} times as noisy as the dtype explains"
        return (
            f"boundary {self.requested}: {self.requested_distance:.1e} away "
            f"({self.median_excess:.1f}x noise), next is {self.runner_up} ({self.margin:.0f}x)"
        )


def row_distances(a: Float32, b: Float32) -> Float32:
    """Return ``||a - b|| / ||b||`` along the last axis; inf where ``a`` is not finite."""
    with np.errstate(invalid="ignore"):
        norm = np.linalg.norm(b.astype(np.float64), axis=-1)
        gap = np.linalg.norm(a.astype(np.float64) - b, axis=-1)
        distance = gap / np.maximum(norm, 1e-30)
    result: Float32 = np.where(np.isfinite(distance), distance, np.inf).astype(np.float32)
    return result


def row_excess(rows: Float32, others: Float32, floor: Float32) -> float:
    """Return the largest distance of ``rows`` ``[T, H]`` to ``others``, in units of noise floors.

    For two captures of the same tokens: kernels are chosen by shape, so they are equal within a few
    times each row's own noise. No floor counts as being below the typical one.
    """
    if not len(rows):
        return 0.0
    typical = np.maximum(np.median(floor), np.finfo(np.float32).eps)
    return float((row_distances(rows, others) / np.maximum(floor[: len(rows)], typical)).max())


def read_slot(
    requested: int,
    states: Sequence[Float32],
    references: Sequence[ReferenceStates],
) -> SlotReading:
    """Say what a slot holds; ``states[i]`` is ``[T, H]`` for the prompt of ``references[i]``."""
    distances = _by_candidate(states, references)
    wanted = f"boundary {requested}"
    own = distances.pop(wanted)
    floors = np.concatenate([r.noise[requested] for r in references])
    # A row can be lucky in one arithmetic and not in the other: no floor is below the typical one.
    typical = float(max(np.median(floors), np.finfo(np.float32).eps))
    excess = own / np.maximum(floors, typical)
    nearest_other = np.min(list(distances.values()), axis=0)
    bad = ~np.isfinite(own) | (excess > ROW_EXCESS) & (own * MARGIN > nearest_other)

    medians = {name: float(np.median(rows)) for name, rows in distances.items()}
    mine = float(np.median(own))
    runner_up = min(medians, key=medians.__getitem__)
    return SlotReading(
        requested=requested,
        holds=wanted if mine <= medians[runner_up] else runner_up,
        distance=min(mine, medians[runner_up]),
        requested_distance=mine,
        runner_up=runner_up,
        margin=medians[runner_up] / max(mine, 1e-12) if np.isfinite(mine) else 0.0,
        median_excess=mine / typical,
        worst_row=float(excess.max()),
        bad_rows=int(bad.sum()),
        rows=len(own),
    )


def ranking(
    states: Sequence[Float32], references: Sequence[ReferenceStates]
) -> list[tuple[str, float]]:
    """Return every candidate with its median row distance, nearest first; nothing is expected.

    For states of which nobody knows what they are meant to be; arguments as of ``read_slot``.
    """
    rows = _by_candidate(states, references)
    return sorted(
        ((name, float(np.median(found))) for name, found in rows.items()), key=lambda c: c[1]
    )


def _by_candidate(
    states: Sequence[Float32], references: Sequence[ReferenceStates]
) -> dict[str, Float32]:
    """Return ``[R]`` row distances to each candidate, over the rows of all prompts."""
    rows: dict[str, list[Float32]] = {}
    for state, reference in zip(states, references, strict=True):
        for name, candidate in _candidates(reference):
            rows.setdefault(name, []).append(row_distances(state, candidate))
    return {name: np.concatenate(parts) for name, parts in rows.items()}


def _candidates(reference: ReferenceStates) -> Iterator[tuple[str, Float32]]:
    """Yield every right and wrong thing that a slot is known to have held in the wild."""
    boundaries = reference.boundaries
    last = len(boundaries) - 1
    for k, state in enumerate(boundaries):
        yield f"boundary {k}", state
        if k:
            yield f"the output of block {k} without the residual", state - boundaries[k - 1]
        yield f"boundary {k} of the next token", _shifted(state, -1)
        yield f"boundary {k} of the token before", _shifted(state, 1)
    yield f"boundary {last} after the final norm", reference.normed_last


def _shifted(state: Float32, by: int) -> Float32:
    """Return rows moved by one; the row that has no neighbour is infinitely far from anything."""
    moved = np.roll(state, by, axis=0)
    moved[-1 if by < 0 else 0] = np.inf
    return moved


def duplicate_slots(states: Float32) -> list[tuple[int, int]]:
    """Return pairs of slots of ``[T, boundaries, H]`` that are equal in every row."""
    count = states.shape[1]
    return [
        (i, j)
        for i in range(count)
        for j in range(i + 1, count)
        if np.array_equal(states[:, i], states[:, j])
    ]


def summary(readings: Mapping[int, SlotReading]) -> str:
    """Return one sentence over all slots: the wrong ones if there are any."""
    wrong = [str(reading) for reading in readings.values() if not reading.right]
    return "; ".join(wrong or [str(reading) for reading in readings.values()])


_LAST_BIT = {"float32": 0, "float16": 13, "bfloat16": 16}
"""Of a float32 that holds such a value, the last bit of the mantissa that the dtype has."""


def last_bit_share(states: Float32, dtype: str) -> float:
    """Return how many of the nonzero values use the last bit of their dtype's mantissa, 0 to 1.

    About half of them do, unless they were stored in a coarser format in between. NaN for a dtype
    that is not known here.
    """
    if dtype not in _LAST_BIT or not states.any():
        return float("nan")
    bits = np.ascontiguousarray(states[states != 0], dtype=np.float32).view(np.uint32)
    return float(np.mean((bits >> _LAST_BIT[dtype]) & 1))

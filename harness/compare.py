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
"""How many times nearer the requested boundary must be than any other candidate (by median)."""
SLACK = 8.0
"""How many times the noise floor a row may be away. Both are measured in calibration.json."""


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
    """Distance of the nearest *other* candidate over that of the requested boundary."""
    worst_row: float
    """Largest row distance to the requested boundary, in units of the row's noise floor."""
    bad_rows: int
    rows: int

    @property
    def right(self) -> bool:
        """True if the slot holds the requested boundary, clearly, in every row."""
        return self.margin >= MARGIN and self.bad_rows == 0

    def __str__(self) -> str:
        if self.right:
            return (
                f"boundary {self.requested}: median distance {self.requested_distance:.1e}, next "
                f"is {self.runner_up} ({self.margin:.0f}x), worst row {self.worst_row:.1f}x noise"
            )
        if self.margin < MARGIN:
            return (
                f"the slot for boundary {self.requested} holds {self.holds} (median distance "
                f"{self.distance:.1e}, to boundary {self.requested} {self.requested_distance:.1e})"
            )
        return (
            f"the slot for boundary {self.requested} has {self.bad_rows} of {self.rows} rows up to "
            f"{self.worst_row:.0f} times their noise floor away from it"
        )


def row_distances(a: Float32, b: Float32) -> Float32:
    """Return ``||a - b|| / ||b||`` along the last axis; inf where ``a`` is not finite."""
    norm = np.linalg.norm(b, axis=-1)
    gap = np.linalg.norm(a - b, axis=-1)
    distance = gap / np.maximum(norm, np.finfo(np.float32).tiny)
    result: Float32 = np.where(np.isfinite(distance), distance, np.inf).astype(np.float32)
    return result


def read_slot(
    requested: int,
    states: Sequence[Float32],
    references: Sequence[ReferenceStates],
) -> SlotReading:
    """Say what a slot holds; ``states[i]`` is ``[T, H]`` for the prompt of ``references[i]``."""
    own = np.concatenate(
        [row_distances(s, r.boundaries[requested]) for s, r in zip(states, references, strict=True)]
    )
    floors = np.concatenate([r.noise[requested] for r in references])
    # A row can be lucky in one arithmetic and not in the other: no floor is below the typical one.
    excess = own / np.maximum(floors, np.median(floors))
    medians = _median_by_candidate(states, references)
    wanted = f"boundary {requested}"
    mine = medians.pop(wanted)
    runner_up = min(medians, key=medians.__getitem__)
    nearest = wanted if mine <= medians[runner_up] else runner_up
    return SlotReading(
        requested=requested,
        holds=nearest,
        distance=min(mine, medians[runner_up]),
        requested_distance=mine,
        runner_up=runner_up,
        margin=medians[runner_up] / max(mine, 1e-12) if np.isfinite(mine) else 0.0,
        worst_row=float(excess.max()),
        bad_rows=int((excess > SLACK).sum()),
        rows=len(own),
    )


def _median_by_candidate(
    states: Sequence[Float32], references: Sequence[ReferenceStates]
) -> dict[str, float]:
    rows: dict[str, list[Float32]] = {}
    for state, reference in zip(states, references, strict=True):
        for name, candidate in _candidates(reference):
            rows.setdefault(name, []).append(row_distances(state, candidate))
    return {name: float(np.median(np.concatenate(parts))) for name, parts in rows.items()}


def _candidates(reference: ReferenceStates) -> Iterator[tuple[str, Float32]]:
    """Yield every right and wrong thing that a slot is known to have held in the wild."""
    boundaries = reference.boundaries
    last = len(boundaries) - 1
    for k, state in enumerate(boundaries):
        yield f"boundary {k}", state
        if k:
            yield f"the output of block {k} without the residual", state - boundaries[k - 1]
        if len(state) > 1:
            yield f"boundary {k} of the next token", np.roll(state, -1, axis=0)
            yield f"boundary {k} of the token before", np.roll(state, 1, axis=0)
    yield f"boundary {last} after the final norm", reference.normed_last


def duplicate_slots(states: Float32) -> list[tuple[int, int]]:
    """Return pairs of slots of ``[T, boundaries, H]`` that are equal in every row."""
    count = states.shape[1]
    return [
        (i, j)
        for i in range(count)
        for j in range(i + 1, count)
        if np.array_equal(states[:, i], states[:, j])
    ]


def excess_over_noise(differences: Float32, noise: Float32) -> Float32:
    """Return differences in units of the noise floor, no floor being below the median one."""
    floor = np.maximum(noise, np.median(noise))
    result: Float32 = differences / np.maximum(floor, np.finfo(np.float32).eps)
    return result


def summary(readings: Mapping[int, SlotReading]) -> str:
    """Return one sentence over all slots: the wrong ones if there are any."""
    wrong = [str(reading) for reading in readings.values() if not reading.right]
    return "; ".join(wrong or [str(reading) for reading in readings.values()])

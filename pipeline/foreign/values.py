"""What the slots of a sample really hold, by value, against the reference of its token ids.

Nothing is expected of a slot: it is compared with every boundary, with each block's output without
its residual, with the normed last state and with the neighbouring rows. Only where none of these is
clearly the nearest are the other samples' references asked, and rows further away.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from truetap.harness import compare
from truetap.harness.model import Float32

if TYPE_CHECKING:
    from truetap.harness.reference import ReferenceStates

MOST_ROWS = 1024
"""Rows of a sample that are compared. The verifier is causal: what follows does not change them."""
_ASKED_ROWS = 32
"""Rows that are looked for in all references, where a slot holds nothing that it could."""
_PLAIN = re.compile(r"boundary (\d+)")
COARSE = 0.25
"""Share of values that use the last bit of their dtype, under which they were stored coarser."""


@dataclass(frozen=True)
class Slot:
    """What one slot of one sample holds."""

    holds: str
    """Name of the nearest candidate, as in ``truetap.harness.compare``."""
    distance: float
    runner_up: str
    margin: float
    """How many times further away the next candidate is."""
    noise: float | None
    """Median distance in units of the noise floor; None where there is no floor."""
    bad_rows: int
    rows: int
    instead: str
    """What it holds in place of its own states, where that was found; else empty."""
    coarse: bool

    @property
    def clear(self) -> bool:
        """Whether the nearest candidate is nearer than any other by ``compare.MARGIN``."""
        return self.margin >= compare.MARGIN

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Slot:
        """Return what ``as_dict`` gave."""
        return cls(**kept)

    def as_dict(self) -> dict[str, Any]:
        """Return builtins."""
        return asdict(self)


def boundary_of(holds: str) -> int | None:
    """Return k if a slot holds plain boundary k, else None."""
    match = _PLAIN.fullmatch(holds)
    return int(match[1]) if match else None


def normed(num_blocks: int) -> str:
    """Return the name of the last state after the final norm."""
    return f"boundary {num_blocks} after the final norm"


def read_slots(
    states: Float32, dtype: str, name: str, references: Mapping[str, ReferenceStates]
) -> list[Slot]:
    """Say what each slot of ``states`` ``[R, slots, hidden]`` holds.

    ``references`` has the sample's own under its ``name``, and those of other samples, for telling
    whose states it has instead. Rows beyond the shorter of states and reference are left out.
    """
    own = references[name]
    rows = min(len(states), own.boundaries.shape[1])
    own = _first_rows(own, rows)
    found = []
    for index in range(states.shape[1]):
        slot = np.ascontiguousarray(states[:rows, index])
        found.append(_read(slot, dtype, name, own, references))
    return found


def _read(
    slot: Float32,
    dtype: str,
    name: str,
    own: ReferenceStates,
    references: Mapping[str, ReferenceStates],
) -> Slot:
    (nearest, distance), (second, further) = compare.ranking([slot], [own])[:2]
    margin = further / max(distance, 1e-12) if np.isfinite(distance) else 0.0
    boundary = boundary_of(nearest)
    bad, noise = np.zeros(len(slot), dtype=bool), None
    if margin >= compare.MARGIN:
        if boundary is not None:
            floor = max(float(np.median(own.noise[boundary])), float(np.finfo(np.float32).eps))
            noise = distance / floor
        bad = _not_their_own(slot, nearest, own)
    odd = slot[bad] if bad.any() else slot
    instead = ""
    if margin < compare.MARGIN or bad.any():
        at = np.flatnonzero(bad) if bad.any() else np.arange(len(slot))
        instead = _whose(odd, at, name, references)
    share = compare.last_bit_share(slot, dtype)
    return Slot(
        holds=nearest,
        distance=distance,
        runner_up=second,
        margin=float(min(margin, 1e6)),
        noise=noise,
        bad_rows=int(bad.sum()),
        rows=len(slot),
        instead=instead,
        # A checkpoint's own embeddings may be coarse.
        coarse=bool(boundary != 0 and share < COARSE),
    )


def _not_their_own(
    slot: Float32, nearest: str, own: ReferenceStates
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which rows are far from ``nearest`` and not clearly nearer to it than to all else.

    The rule of ``compare.read_slot``, for the normed state too, which has no noise floor: there the
    typical distance stands for it.
    """
    boundary = boundary_of(nearest)
    if boundary is None and nearest != normed(len(own.boundaries) - 1):
        return np.zeros(len(slot), dtype=bool)
    target = own.normed_last if boundary is None else own.boundaries[boundary]
    distances = compare.row_distances(slot, target)
    floor = np.full(len(slot), np.median(distances), dtype=np.float32)
    if boundary is not None:
        floor = np.maximum(floor, own.noise[boundary])
    far = distances > compare.ROW_EXCESS * floor
    if far.any():
        others = [s for k, s in enumerate(own.boundaries) if k != boundary]
        nearest_other = np.min([compare.row_distances(slot, state) for state in others], axis=0)
        far &= distances * compare.MARGIN > nearest_other
    found: np.ndarray[Any, np.dtype[np.bool_]] = far
    return found


_STRANGE = 0.5
"""Rows further than this from the nearest row of all references are from nowhere that is known."""


def _whose(
    odd: Float32, at: np.ndarray[Any, Any], name: str, references: Mapping[str, ReferenceStates]
) -> str:
    """Look for rows in all references at all positions; say where they are from, or nothing."""
    step = max(1, len(odd) // _ASKED_ROWS)
    asked, positions = odd[::step][:_ASKED_ROWS], at[::step][:_ASKED_ROWS]
    scores: list[tuple[float, str, int, int]] = []
    for whose, reference in references.items():
        for k, state in enumerate(reference.boundaries):
            distances = _all_distances(asked, state)
            rows = distances.argmin(axis=1)
            shift = int(np.median(rows - positions))
            fixed = (rows - positions == shift).mean()
            if fixed > 0.5 and not (whose == name and shift == 0):
                scores.append((float(np.median(distances.min(axis=1))), whose, k, shift))
    if not scores:
        return ""
    scores.sort()
    distance, whose, k, shift = scores[0]
    # The same rows under another boundary's name is the alternative that matters here.
    others = [s[0] for s in scores[1:] if (s[1], s[3]) != (whose, shift) or s[2] != k]
    if distance > _STRANGE or (others and others[0] < compare.MARGIN * distance):
        return ""
    moved = f", {abs(shift)} rows {'later' if shift > 0 else 'earlier'}" if shift else ""
    return f"boundary {k} of {'its own tokens' if whose == name else whose}{moved}"


def _all_distances(asked: Float32, state: Float32) -> Float32:
    """Return ``[asked, rows]`` relative distances of every row asked to every row of a state."""
    norms = (state.astype(np.float64) ** 2).sum(axis=1)
    squares = (asked.astype(np.float64) ** 2).sum(axis=1)[:, None] + norms
    squares -= 2 * asked.astype(np.float64) @ state.astype(np.float64).T
    relative = np.sqrt(np.maximum(squares, 0) / np.maximum(norms, 1e-30))
    found: Float32 = np.where(np.isfinite(relative), relative, np.inf).astype(np.float32)
    return found


def _first_rows(reference: ReferenceStates, rows: int) -> ReferenceStates:
    from truetap.harness.reference import ReferenceStates

    return ReferenceStates(
        boundaries=reference.boundaries[:, :rows],
        normed_last=reference.normed_last[:rows],
        noise=reference.noise[:, :rows],
        logprobs=reference.logprobs[: rows - 1],
        logprob_noise=reference.logprob_noise[: rows - 1],
    )


def as_array(states: Any, rows: int) -> Float32:
    """Return the first rows of a sample's states in float32."""
    found: Float32 = states[:rows].float().numpy()
    return found


def chunks(names: Sequence[tuple[str, int]], bytes_per_row: int, limit: int) -> list[list[str]]:
    """Group samples so that the references of one group take about ``limit`` bytes."""
    groups: list[list[str]] = []
    room = 0
    for name, rows in names:
        need = rows * bytes_per_row
        if not groups or need > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= need
    return groups

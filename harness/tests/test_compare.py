"""What a slot holds is read by value; references here are made like a real residual stream."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from truetap.harness import compare
from truetap.harness.model import Float32
from truetap.harness.reference import ReferenceStates

BLOCKS, WIDTH = 8, 64
LENGTHS = (1, 40, 23)
COSINE = 0.95
FLOOR = 0.008
"""What bfloat16 costs: adjacent boundaries are .3 apart, some forty times as far."""

Wrong = Callable[[ReferenceStates, int], Float32]


def reference(tokens: int, seed: int) -> ReferenceStates:
    rng = np.random.default_rng(seed)
    state = rng.normal(size=(tokens, WIDTH))
    stream = [state]
    for _ in range(BLOCKS):
        state = COSINE * state + np.sqrt(1 - COSINE**2) * rng.normal(size=state.shape)
        stream.append(state)
    boundaries = np.stack(stream).astype(np.float32)
    last = boundaries[-1]
    weight = rng.uniform(0.5, 1.5, WIDTH)
    return ReferenceStates(
        boundaries=boundaries,
        normed_last=(last / np.sqrt((last**2).mean(-1, keepdims=True)) * weight).astype(np.float32),
        noise=rng.uniform(0.7 * FLOOR, 1.3 * FLOOR, boundaries.shape[:2]).astype(np.float32),
        logprobs=np.zeros(tokens - 1, dtype=np.float32),
        logprob_noise=np.zeros(tokens - 1, dtype=np.float32),
    )


@pytest.fixture(scope="module")
def references() -> list[ReferenceStates]:
    return [reference(tokens, seed) for seed, tokens in enumerate(LENGTHS)]


def noisy(state: Float32, floors: Float32, seed: int = 9) -> Float32:
    """Move each row by its own floor in a random direction."""
    push = np.random.default_rng(seed).normal(size=state.shape)
    push *= (floors * np.linalg.norm(state, axis=-1) / np.linalg.norm(push, axis=-1))[:, None]
    return (state + push).astype(np.float32)


def captured(references: list[ReferenceStates], k: int, times: float = 1.0) -> list[Float32]:
    """Return what a correct capture path gives for boundary ``k``."""
    return [noisy(r.boundaries[k], times * r.noise[k]) for r in references]


@pytest.mark.parametrize("k", range(BLOCKS))
def test_references_are_as_close_as_a_real_models(
    references: list[ReferenceStates], k: int
) -> None:
    here, there = references[1].boundaries[k : k + 2]
    lengths = np.linalg.norm(here, axis=-1) * np.linalg.norm(there, axis=-1)
    assert 0.92 < ((here * there).sum(-1) / lengths).mean() < 0.98


@pytest.mark.parametrize("k", range(BLOCKS + 1))
def test_the_requested_boundary_is_right(references: list[ReferenceStates], k: int) -> None:
    reading = compare.read_slot(k, captured(references, k), references)
    assert reading.right
    assert reading.holds == f"boundary {k}"
    assert str(reading).startswith(f"boundary {k}: ")
    assert reading.rows == sum(LENGTHS)
    assert 0.8 < reading.median_excess < 1.2
    assert reading.margin > 20


def other_boundary(by: int) -> Wrong:
    return lambda r, k: r.boundaries[k + by]


def without_residual(r: ReferenceStates, k: int) -> Float32:
    states: Float32 = r.boundaries[k] - r.boundaries[k - 1]
    return states


def rows_moved(by: int) -> Wrong:
    return lambda r, k: np.roll(r.boundaries[k], by, axis=0)


@pytest.mark.parametrize(
    ("k", "wrong", "holds"),
    [
        *[(5, other_boundary(by), f"boundary {5 + by}") for by in (-5, -4, -3, -2, -1, 1, 2, 3)],
        (BLOCKS, other_boundary(-1), f"boundary {BLOCKS - 1}"),
        (0, other_boundary(1), "boundary 1"),
        (5, without_residual, "the output of block 5 without the residual"),
        (1, without_residual, "the output of block 1 without the residual"),
        (5, rows_moved(1), "boundary 5 of the token before"),
        (5, rows_moved(-1), "boundary 5 of the next token"),
        (BLOCKS, lambda r, _: r.normed_last, f"boundary {BLOCKS} after the final norm"),
        (
            5,
            lambda r, _: np.roll(r.boundaries[4], 1, axis=0),
            "boundary 4 of the token before",
        ),
    ],
)
def test_a_wrong_content_is_named(
    references: list[ReferenceStates], k: int, wrong: Wrong, holds: str
) -> None:
    states = [noisy(wrong(r, k), r.noise[k]) for r in references]
    reading = compare.read_slot(k, states, references)
    assert not reading.right
    assert reading.holds == holds
    assert f"the slot for boundary {k} holds {holds} (" in str(reading)
    assert reading.margin < 1 / compare.MARGIN
    assert str(reading) in compare.summary({k: reading})


def test_zeros_are_nearest_to_nothing(references: list[ReferenceStates]) -> None:
    states = [np.zeros_like(r.boundaries[5]) for r in references]
    reading = compare.read_slot(5, states, references)
    assert not reading.right
    assert reading.requested_distance == pytest.approx(1.0)
    assert reading.margin == pytest.approx(1.0)
    assert str(reading).startswith("the slot for boundary 5 ")


def row_of_boundary_before(states: Float32, r: ReferenceStates) -> None:
    states[7] = r.boundaries[4, 7]


def row_of_next_token(states: Float32, r: ReferenceStates) -> None:
    states[7] = r.boundaries[5, 8]


def row_without_residual(states: Float32, r: ReferenceStates) -> None:
    states[7] -= r.boundaries[4, 7]


def row_of_zeros(states: Float32, _: ReferenceStates) -> None:
    states[7] = 0


def row_with_one_nan(states: Float32, _: ReferenceStates) -> None:
    states[7, 3] = np.nan


def row_with_one_infinity(states: Float32, _: ReferenceStates) -> None:
    states[7, 3] = -np.inf


@pytest.mark.parametrize(
    "spoil",
    [
        row_of_boundary_before,
        row_of_next_token,
        row_without_residual,
        row_of_zeros,
        row_with_one_nan,
        row_with_one_infinity,
    ],
)
def test_one_wrong_row_of_sixty_four_is_seen(
    references: list[ReferenceStates], spoil: Callable[[Float32, ReferenceStates], None]
) -> None:
    states = captured(references, 5)
    spoil(states[1], references[1])
    reading = compare.read_slot(5, states, references)
    assert reading.bad_rows == 1
    assert not reading.right
    assert reading.holds == "boundary 5"
    assert "the slot for boundary 5 has 1 of 64 rows that are not its own" in str(reading)


@pytest.mark.parametrize("k", [0, 5, BLOCKS])
def test_four_times_the_noise_is_too_much_though_the_boundary_is_clear(
    references: list[ReferenceStates], k: int
) -> None:
    reading = compare.read_slot(k, captured(references, k, times=4), references)
    assert reading.margin > compare.MARGIN
    assert reading.bad_rows == 0
    assert not reading.right
    assert reading.median_excess == pytest.approx(4, rel=0.2)
    assert f"the slot for boundary {k} is {reading.median_excess:.1f} times as noisy" in str(
        reading
    )


@pytest.mark.parametrize("times", [10, 15])
def test_a_heavy_tailed_row_that_is_clearly_its_own_is_right(
    references: list[ReferenceStates], times: float
) -> None:
    states = captured(references, 5)
    row = int(references[1].noise[5].argmin())
    states[1][row] = captured(references, 5, times=times * 1.3)[1][row]
    reading = compare.read_slot(5, states, references)
    assert reading.worst_row > compare.ROW_EXCESS
    assert reading.bad_rows == 0
    assert reading.right


def test_between_two_boundaries_is_neither(references: list[ReferenceStates]) -> None:
    states = [0.55 * r.boundaries[5] + 0.45 * r.boundaries[4] for r in references]
    reading = compare.read_slot(5, states, references)
    assert not reading.right
    assert "hardly nearer to boundary 5" in str(reading)
    assert "boundary 4" in str(reading)


def test_a_slot_of_nothing_but_nan_is_not_right(references: list[ReferenceStates]) -> None:
    states = [np.full_like(r.boundaries[5], np.nan) for r in references]
    reading = compare.read_slot(5, states, references)
    assert not reading.right
    assert reading.bad_rows == sum(LENGTHS)


def test_row_distances_are_relative_and_infinite_where_not_finite() -> None:
    b = np.array([[3, 4], [3, 4], [0, 5], [1e30, 0], [1, 1]], dtype=np.float32)
    a = np.array([[3, 4], [0, 4], [0, 10], [np.inf, 0], [np.nan, 1]], dtype=np.float32)
    distances = compare.row_distances(a, b)
    assert distances.dtype == np.float32
    assert distances.tolist() == pytest.approx([0, 0.6, 1, np.inf, np.inf])


def test_duplicate_slots_are_found_in_pairs() -> None:
    states = np.random.default_rng(0).normal(size=(5, 4, 3)).astype(np.float32)
    assert compare.duplicate_slots(states) == []
    states[:, 2] = states[:, 0]
    assert compare.duplicate_slots(states) == [(0, 2)]
    states[:, 3] = states[:, 0]
    assert compare.duplicate_slots(states) == [(0, 2), (0, 3), (2, 3)]
    states[4, 2, 1] += 1
    assert compare.duplicate_slots(states) == [(0, 3)]


def test_a_summary_speaks_of_the_wrong_slots_only(references: list[ReferenceStates]) -> None:
    good = compare.read_slot(2, captured(references, 2), references)
    bad = compare.read_slot(5, captured(references, 4), references)
    assert compare.summary({2: good, 5: bad}) == str(bad)
    assert compare.summary({2: good}) == str(good)


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 23), ("float16", 10), ("bfloat16", 7)])
def test_half_of_all_values_use_the_last_bit_unless_stored_coarser(dtype: str, bits: int) -> None:
    values = np.random.default_rng(0).normal(size=(50, 40)).astype(np.float32)

    def rounded(kept: int) -> np.ndarray:
        dropped = np.uint32(23 - kept)
        return ((values.view(np.uint32) >> dropped) << dropped).view(np.float32)

    assert 0.45 < compare.last_bit_share(rounded(bits), dtype) < 0.55
    assert compare.last_bit_share(rounded(bits - 1), dtype) == 0
    assert np.isnan(compare.last_bit_share(values, "float8_e4m3fn"))
    assert np.isnan(compare.last_bit_share(np.zeros((2, 2), np.float32), dtype))

"""Layer-id spellings, against the table of who counts how (Llama, Qwen3, DeepSeek-V3, SmolLM2)."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truetap.harness import boundaries
from truetap.harness.errors import UsageError


@pytest.mark.parametrize(
    ("num_blocks", "canonical"),
    [
        (8, (2, 4, 5, 8)),
        (28, (2, 14, 25, 28)),  # Qwen3-0.6B and 1.7B
        (30, (2, 15, 27, 30)),  # SmolLM2-135M
        (32, (2, 16, 29, 32)),  # Llama-3.1-8B
        (36, (2, 18, 33, 36)),  # Qwen3-8B
        (61, (2, 30, 58, 61)),  # DeepSeek-V3, Kimi-K2.5
        (80, (2, 40, 77, 80)),  # Llama-3.1-70B
    ],
)
def test_canonical_set(num_blocks: int, canonical: tuple[int, ...]) -> None:
    assert boundaries.eagle3(num_blocks) == canonical
    assert boundaries.check(canonical, num_blocks) == canonical


@pytest.mark.parametrize("num_blocks", [-1, 0, 1, 7])
def test_a_small_verifier_has_no_canonical_set(num_blocks: int) -> None:
    with pytest.raises(UsageError, match=f"with {num_blocks} blocks"):
        boundaries.eagle3(num_blocks)


@pytest.mark.parametrize(
    ("num_blocks", "output_of"),
    [(28, (1, 13, 24)), (32, (1, 15, 28)), (36, (1, 17, 32)), (61, (1, 29, 57)), (80, (1, 39, 76))],
)
def test_the_published_output_of_lists_name_the_canonical_set(
    num_blocks: int, output_of: tuple[int, ...]
) -> None:
    converted = tuple(boundaries.from_output_of(block) for block in output_of)
    assert converted == boundaries.eagle3(num_blocks)[:3]
    assert boundaries.from_output_of(num_blocks - 1) == num_blocks


@given(num_blocks=st.integers(1, 200), data=st.data())
def test_hf_tuple_index_is_the_boundary_except_the_last(
    num_blocks: int, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, num_blocks - 1))
    assert boundaries.from_hf_tuple_index(index, num_blocks) == index
    with pytest.raises(UsageError, match="after the final norm") as refused:
        boundaries.from_hf_tuple_index(num_blocks, num_blocks)
    assert "hook the last decoder block" in refused.value.remedy


@given(num_blocks=st.integers(1, 200), data=st.data())
def test_all_spellings_of_one_tensor_meet(num_blocks: int, data: st.DataObject) -> None:
    block = data.draw(st.integers(0, num_blocks - 1))
    boundary = boundaries.from_output_of(block)
    assert boundary == block + 1
    assert boundaries.to_vllm_layer_id(boundary) == boundary
    if boundary < num_blocks:
        assert boundaries.from_hf_tuple_index(boundary, num_blocks) == boundary
    assert boundaries.check([boundary], num_blocks) == (boundary,)


@pytest.mark.parametrize(
    ("listed", "says", "remedy"),
    [
        ([], "no boundaries", "list at least two"),
        ([2, 31], "boundary 31 is out of range: this verifier has 30 blocks", "from 0 .* to 30"),
        ([-1, 2], "boundary -1 is out of range", "from 0"),
        ([2, 2, 30], "not strictly ascending", r"\[2, 30\]"),
        ([15, 2, 30], "not strictly ascending", r"\[2, 15, 30\]"),
        ([30, 27, 15, 2], "not strictly ascending", r"\[2, 15, 27, 30\]"),
    ],
)
def test_lists_that_no_engine_would_deliver_in_order_are_refused(
    listed: list[int], says: str, remedy: str
) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        boundaries.check(listed, 30)
    assert re.search(remedy, refused.value.remedy)


@given(num_blocks=st.integers(0, 100), listed=st.lists(st.integers(-3, 104), max_size=6))
def test_check_accepts_exactly_sorted_sets_in_range(num_blocks: int, listed: list[int]) -> None:
    fine = bool(listed) and listed == sorted(set(listed) & set(range(num_blocks + 1)))
    if fine:
        assert boundaries.check(listed, num_blocks) == tuple(listed)
    else:
        with pytest.raises(UsageError):
            boundaries.check(listed, num_blocks)

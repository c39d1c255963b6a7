"""Layer-id spellings, converted once at the edge.

Inside truetap there is one spelling: **boundary k** is the residual stream after k decoder blocks,
residual added, before any norm. 0 is the embeddings, n (the number of blocks) the state after the
last block and before the final norm. The functions here are the only place where another spelling
becomes a boundary; sources and traps are in the names' docstrings.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from truetap.harness.errors import UsageError


def from_output_of(block: int) -> int:
    """Boundary of "the output of 0-based block ``block``" (SpecForge, TRT-LLM, TransformerLens)."""
    return block + 1


def from_hf_tuple_index(index: int, num_blocks: int) -> int:
    """Boundary of entry ``index`` of transformers' ``output_hidden_states`` tuple.

    Entry ``num_blocks`` is *post*-norm there, so it is no boundary at all and is refused.
    """
    if index == num_blocks:
        raise UsageError(
            f"entry {index} of transformers' hidden-states tuple is after the final norm and is "
            "no boundary",
            remedy="hook the last decoder block to get the state before the norm",
        )
    return index


def to_vllm_layer_id(boundary: int) -> int:
    """Id that vLLM's ``eagle_aux_hidden_state_layer_ids`` uses: equal to the boundary (0.18.0+)."""
    return boundary


def eagle3(num_blocks: int) -> tuple[int, int, int, int]:
    """Return EAGLE-3's canonical set for a verifier: (2, n//2, n-3) and the last boundary, n.

    The first three feed the draft; the last one gives the training targets.
    """
    if num_blocks < 8:
        raise UsageError(
            f"a verifier with {num_blocks} blocks has no canonical EAGLE-3 boundaries",
            remedy="give the boundaries explicitly",
        )
    return 2, num_blocks // 2, num_blocks - 3, num_blocks


def check(boundaries: Sequence[int], num_blocks: int) -> tuple[int, ...]:
    """Return ``boundaries`` as a tuple if an engine can deliver them in this order, else refuse.

    Engines return slots in ascending order and drop duplicates, so any other list would come back
    with slot i not holding the i-th boundary.
    """
    listed = tuple(boundaries)
    if not listed:
        raise UsageError("no boundaries were asked for", remedy="list at least two, e.g. [2, 15]")
    outside = [k for k in listed if not 0 <= k <= num_blocks]
    if outside:
        raise UsageError(
            f"boundary {outside[0]} is out of range: this verifier has {num_blocks} blocks",
            remedy=f"use boundaries from 0 (embeddings) to {num_blocks} (after the last block)",
        )
    if any(a >= b for a, b in pairwise(listed)):
        raise UsageError(
            f"boundaries {list(listed)} are not strictly ascending",
            remedy=f"write them as {sorted(set(listed))}",
        )
    return listed

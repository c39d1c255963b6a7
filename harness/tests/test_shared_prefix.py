"""Prompts that begin alike have states that are alike, not equal: that is no fault.

CASE-22: kernels are chosen by shape, and sums of low precision depend on their order. The suite
must not fail that, nor be so lax that a neighbour's rows pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from truetap.conformance.same import same_rows
from truetap.harness import compare
from truetap.harness.model import Capture, CaptureRequest, EngineSpec, Float32
from truetap.harness.reference import ReferenceStates

pytestmark = pytest.mark.torch

PREFIX = 40
SUFFIXES = (0, 1, 1, 9, 90, 200)
"""Lengths; the two of one token differ in it."""
BOUNDARIES = (2, 5, 6, 9, 12)


@dataclass
class Seen:
    """Captures of one prompt and its continuations, cut to what they share."""

    captures: list[Capture]
    reference: ReferenceStates


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from truetap.harness.adapters.transformers import TransformersSession
    from truetap.harness.random_verifier import tiny_llama
    from truetap.harness.reference import Reference

    model = tiny_llama(tmp_path_factory.mktemp("verifier") / "tiny")
    session = TransformersSession(EngineSpec(str(model), BOUNDARIES))
    random = np.random.default_rng(0)
    prefix = tuple(random.integers(0, 512, PREFIX).tolist())
    prompts = [prefix + tuple(random.integers(0, 512, n).tolist()) for n in SUFFIXES]
    requests = [CaptureRequest(str(n), prompt) for n, prompt in enumerate(prompts)]
    made = list(session.capture(requests).captures)
    # Whether a suffix has another kernel chosen is the CPU's affair (with AVX2 alone none has), so
    # the continuations are computed by another one, too.
    with sdpa_kernel(SDPBackend.MATH):
        made += session.capture(requests[1:]).captures
    captures = [replace(one, token_ids=prefix, states=one.states[:PREFIX]) for one in made]
    return Seen(captures, Reference(Path(model), "bfloat16").states(prefix))


def test_other_suffixes_change_bits_of_the_prefix_and_pass(seen: Seen) -> None:
    alone, *longer = seen.captures
    changed = [one for one in longer if not np.array_equal(one.states, alone.states)]
    assert changed, "no suffix changed a bit: this proves nothing"
    worst = max(same_rows(one, alone, seen.reference, "other suffix") for one in longer)
    assert 0 < worst <= compare.ROW_EXCESS
    for slot, boundary in enumerate(BOUNDARIES):
        assert compare.read_slot(
            boundary,
            [one.states[:, slot] for one in seen.captures],
            [seen.reference] * len(seen.captures),
        ).right


def one_row_late(states: Float32) -> Float32:
    return np.roll(states, 1, axis=0)


def one_block_early(states: Float32) -> Float32:
    """Boundary 5 where 6 is due; the other slots are right."""
    early = states.copy()
    early[:, 2] = states[:, 1]
    return early


def without_residual(states: Float32) -> Float32:
    bare = states.copy()
    bare[:, 2] -= states[:, 1]
    return bare


def row_of_a_neighbour(states: Float32) -> Float32:
    """One row of forty, as where a cached prefix is cut wrongly (CASE-04)."""
    wrong = states.copy()
    wrong[17] = states[3]
    return wrong


@pytest.mark.parametrize(
    "fault", [one_row_late, one_block_early, without_residual, row_of_a_neighbour]
)
def test_the_same_tolerance_rejects_what_is_wrong(
    seen: Seen, fault: Callable[[Float32], Float32]
) -> None:
    alone, *longer = seen.captures
    for one in longer:
        wrong = replace(one, states=fault(one.states))
        with pytest.raises(AssertionError, match="times the noise floor"):
            same_rows(wrong, alone, seen.reference, "other suffix")

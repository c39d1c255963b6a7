"""The native capture path on every family of verifier that the suite builds itself."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from truetap.harness import boundaries, random_verifier
from truetap.harness.model import EngineSpec

pytestmark = [pytest.mark.live, pytest.mark.torch, pytest.mark.slow]

DEADLINE_S = 300
OTHERS = ("qwen3", "qwen3_next")
FAULTS = (
    *("none", "off-by-one", "residual-missing"),
    *("last-boundary-post-norm", "last-boundary-mistaken-norm"),
)


def judged(model: Path, scratch: Path, **settings: Any) -> dict[str, dict[str, str]]:
    """Return what each failing clause saw, by fault; one engine for all."""
    from truetap.conformance import judge
    from truetap.harness.adapters import mutants
    from truetap.harness.adapters.vllm_native import VllmNativeAdapter
    from truetap.harness.observation import observe
    from truetap.harness.reference import Reference, ReferenceStates

    spec = EngineSpec(
        model=str(model),
        boundaries=boundaries.eagle3(12),
        startup_deadline_s=DEADLINE_S,
        **settings,
    )
    seen = replace(spec, boundaries=mutants.boundaries_for(spec.boundaries, 1))
    reference = Reference(model, spec.dtype)
    references: dict[str, ReferenceStates] = {}
    with closing(VllmNativeAdapter().open(seen, scratch=scratch)) as session:
        return {
            fault: judge.failures(
                observe(mutants.MutantSession(fault, session, spec), spec, reference, references)
            )
            for fault in FAULTS
        }


@pytest.mark.parametrize(
    "family", ["deepseek_v3", *(pytest.param(f, marks=pytest.mark.nightly) for f in OTHERS)]
)
def test_a_right_capture_passes_and_wrong_ones_do_not(family: str, tmp_path: Path) -> None:
    from truetap.harness.adapters import mutants

    model = random_verifier.FAMILIES[family](tmp_path / family)
    # With a prefix cache vLLM copies the state of delta nets by Triton, which its CPU build lacks.
    found = judged(model, tmp_path, enable_prefix_caching=family != "qwen3_next")
    assert found["none"] == {}
    missed = [f for f in FAULTS[1:] if mutants.FAULTS[f].caught_by not in found[f]]
    assert missed == []


def test_plain_positions_in_latent_attention_are_seen_to_be_wrong(tmp_path: Path) -> None:
    """A fault of vLLM's CPU build, found by this suite; when it is mended this test says so."""
    model = random_verifier.tiny_deepseek_v3(tmp_path / "plain", yarn=False)
    assert set(judged(model, tmp_path, dtype="float32")["none"]) == {
        *("ROWS-003", "ROWS-005", "ROWS-006", "ROWS-009", "LAYERS-001", "LAYERS-002")
    }


def test_the_smallest_input_of_that_fault() -> None:
    """Two tokens, one head: the kernel steps from token to token by the wrong stride.

    It takes ``stride(-2)``, right for ``[tokens, heads * size]``; latent attention hands it
    ``[tokens, heads, size]``, where that is the stride between heads.
    """
    import torch
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    positions, angle = torch.arange(2), torch.tensor([0.0, 1.0])
    cache = torch.stack([angle.cos(), angle.sin()], dim=1)  # [positions, cos and sin of one pair]
    flat = torch.tensor([[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0]])  # [tokens, 2 heads * 2]
    heads = flat.clone().view(2, 2, 2)
    ops.rotary_embedding(positions, flat, None, 2, cache, False)
    ops.rotary_embedding(positions, heads, None, 2, cache, False)
    turned = [angle[1].cos().item(), angle[1].sin().item()]
    assert flat.tolist() == [[1, 0, 1, 0], [pytest.approx(x) for x in turned * 2]]
    assert heads.tolist() == [[[1, 0], [pytest.approx(x) for x in turned]], [[1, 0], [1, 0]]]

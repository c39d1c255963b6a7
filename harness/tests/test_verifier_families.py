"""The small random verifiers: the reference is right about each, and their boundaries differ."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from truetap.harness import compare, random_verifier, verifier
from truetap.harness.errors import UsageError
from truetap.harness.final_norm import ONE_PLUS_WEIGHT, final_norm

if TYPE_CHECKING:
    from truetap.harness.reference import ReferenceStates

pytestmark = pytest.mark.torch

TOKENS = [int(x) for x in np.random.default_rng(7).integers(0, 512, 41)]

RMS_NORMS = {
    "gemma": ("gemma", "GemmaRMSNorm"),
    "gemma2": ("gemma2", "Gemma2RMSNorm"),
    "gemma3_text": ("gemma3", "Gemma3RMSNorm"),
    "gemma3n_text": ("gemma3n", "Gemma3nRMSNorm"),
    "gemma4_text": ("gemma4", "Gemma4RMSNorm"),
    "recurrent_gemma": ("recurrent_gemma", "RecurrentGemmaRMSNorm"),
    "qwen3_next": ("qwen3_next", "Qwen3NextRMSNorm"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5RMSNorm"),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeRMSNorm"),
    "llama": ("llama", "LlamaRMSNorm"),
    "qwen3": ("qwen3", "Qwen3RMSNorm"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3RMSNorm"),
}


@pytest.fixture(scope="module", params=list(random_verifier.FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One verifier of each family."""
    return random_verifier.FAMILIES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def states(model: Path) -> ReferenceStates:
    """The float32 reference of one prompt, with the noise of bfloat16."""
    from truetap.harness.reference import Reference

    return Reference(model, "bfloat16").states(TOKENS)


def hooked(model: Path) -> tuple[Any, Any, Any]:
    """Run transformers in float32; return what blocks and final norm took in, and the rest."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    taken: list[Any] = []
    normed: list[Any] = []
    base = loaded.base_model
    for module in [*base.layers, base.norm]:
        module.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0][0].numpy()))
    base.norm.register_forward_hook(lambda _, __, output: normed.append(output[0].numpy()))
    with torch.no_grad():
        logits = loaded(torch.tensor([TOKENS]), use_cache=False).logits[0]
    return np.stack(taken), normed[0], logits.log_softmax(-1).numpy()


def test_the_reference_equals_hooks(model: Path, states: ReferenceStates) -> None:
    boundaries, normed, logprobs = hooked(model)
    assert boundaries.shape == (13, len(TOKENS), verifier.describe(model).hidden_size)
    np.testing.assert_array_equal(states.boundaries, boundaries)
    np.testing.assert_array_equal(states.normed_last, normed)
    following = logprobs[np.arange(len(TOKENS) - 1), TOKENS[1:]]
    np.testing.assert_allclose(states.logprobs, following, atol=1e-5)


def test_neighbouring_boundaries_are_told_apart(states: ReferenceStates) -> None:
    """A capture one block early is a wrong reading at every boundary, a right one nowhere."""
    for k in range(1, 13):
        right = compare.read_slot(k, [states.boundaries[k]], [states])
        early = compare.read_slot(k, [states.boundaries[k - 1]], [states])
        assert right.right
        assert not early.right
        assert early.holds == f"boundary {k - 1}"
        # In the rows' own noise: what a bfloat16 engine adds must not reach the neighbour.
        gap = np.median(compare.row_distances(states.boundaries[k - 1], states.boundaries[k]))
        assert gap > 2 * compare.MARGIN * np.median(states.noise[k])


def test_one_activation_is_massive(model: Path) -> None:
    from safetensors.numpy import load_file

    rows = np.abs(load_file(model / "model.safetensors")["model.embed_tokens.weight"])
    assert rows[0, 7] == 40
    rows[0, 7] = 0
    assert rows.max() < 1


def test_no_norm_weight_is_neutral(model: Path) -> None:
    from safetensors.numpy import load_file

    one_plus = verifier.describe(model).config["model_type"] in ONE_PLUS_WEIGHT
    weights = {
        name: weight
        for name, weight in load_file(model / "model.safetensors").items()
        if "norm" in name
    }
    assert len(weights) >= 25
    for name, weight in weights.items():
        gated = name.endswith("linear_attn.norm.weight")  # of the plain kind in every family
        factor = weight + (1 if one_plus and not gated else 0)
        assert 0.49 < factor.min() < 0.8, name
        assert 1.2 < factor.max() < 1.51, name


def test_the_final_norm_is_computed_from_weights(model: Path, states: ReferenceStates) -> None:
    last = states.boundaries[-1]
    assert compare.row_distances(final_norm(model)(last), states.normed_last).max() < 1e-5
    mistaken = final_norm(model, mistaken=True)(last)
    assert compare.row_distances(mistaken, states.normed_last).min() > 0.3


@pytest.mark.parametrize("model_type", RMS_NORMS)
def test_which_families_multiply_by_one_plus_weight(model_type: str) -> None:
    import torch

    module, name = RMS_NORMS[model_type]
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    norm = getattr(modeling, name)(8)
    with torch.no_grad():
        norm.weight.zero_()
        out = norm(torch.arange(8, dtype=torch.float32))
    assert bool(out.any()) == (model_type in ONE_PLUS_WEIGHT)


def test_a_verifier_without_a_known_final_norm_is_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    model = random_verifier.tiny_llama(tmp_path, num_blocks=1)
    save_file({"model.other.weight": np.ones(4, np.float32)}, model / "model.safetensors")
    with pytest.raises(UsageError, match="no final norm"):
        final_norm(model)(np.ones((2, 128), np.float32))

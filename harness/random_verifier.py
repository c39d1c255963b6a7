"""Small verifiers with random weights, for tests on any machine.

Random is not enough by itself: with default initialisation every block is nearly the identity and
all boundaries look alike, so a wrong one could not be told from a right one. These have blocks that
matter, norm weights that are not 1, and some massive activations, as real models do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from truetap.harness.errors import CouldNotRun

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}

_NARROW: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the least that vLLM's CPU kernels have
    "initializer_range": 0.24,
}

_LATENT: dict[str, Any] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
}
"""What the DeepSeeks share; vLLM's CPU build has no other latent and rotary sizes."""

_DEEPSEEK_V3: dict[str, Any] = {
    **_LATENT,
    "num_experts_per_tok": 8,
    "n_group": 4,
    "topk_group": 3,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}

_SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""transformers routes in this way without being told, and so does not write it down; vLLM reads it
from the configuration, as published with the original, and takes softmax without it."""

_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def tiny_llama(directory: Path, *, seed: int = 0, num_blocks: int = 12, num_heads: int = 4) -> Path:
    """Write a Llama of ``num_blocks`` blocks, width 128, vocabulary 512; 7 MB, in float32.

    Twelve blocks, so that sorting ids as text ("10" before "2") would show. Heads, all 32 wide, are
    what tensor parallel ranks divide.
    """
    settings = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": num_blocks,
    }
    return _build(directory, "tiny_llama", "Llama", settings, seed)


def narrow_llama(directory: Path, *, seed: int = 0, num_blocks: int = 12) -> Path:
    """Write a Llama as ``tiny_llama``, of width 32, for recordings that have to stay small; 0.7 MB.

    A recording is judged against a verifier that is built anew, so these weights are the same bytes
    on every machine and with every release of torch and transformers.
    """
    settings = {**_NARROW, "num_hidden_layers": num_blocks}
    return _build(directory, "narrow_llama", "Llama", settings, seed, reproducible=True)


def narrow_qwen3(directory: Path, *, seed: int = 0, num_blocks: int = 12) -> Path:
    """Write a Qwen3 as ``narrow_llama``, with norms on queries and keys; 0.7 MB."""
    settings = {**_NARROW, "num_hidden_layers": num_blocks}
    return _build(directory, "narrow_qwen3", "Qwen3", settings, seed, reproducible=True)


def tiny_qwen3(directory: Path, *, seed: int = 0, num_blocks: int = 12) -> Path:
    """Write a Qwen3: as ``tiny_llama``, with norms on queries and keys; 7 MB."""
    settings = {"num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": num_blocks}
    return _build(directory, "tiny_qwen3", "Qwen3", settings, seed)


def tiny_qwen2(directory: Path, *, seed: int = 0, num_blocks: int = 12) -> Path:
    """Write a Qwen2: as ``tiny_llama``, with biases, and embeddings for a head; 7 MB."""
    settings = {
        "num_key_value_heads": 2,
        "num_hidden_layers": num_blocks,
        "tie_word_embeddings": True,
    }
    return _build(directory, "tiny_qwen2", "Qwen2", settings, seed)


def tiny_qwen3_moe(directory: Path, *, seed: int = 0, num_blocks: int = 12) -> Path:
    """Write a Qwen3-MoE: as ``tiny_qwen3``, with experts from the third block on; 9 MB."""
    settings = {
        "initializer_range": 0.08,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": num_blocks,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 6,
        "norm_topk_prob": True,
        "mlp_only_layers": [0, 1],
    }
    return _build(directory, "tiny_qwen3_moe", "Qwen3Moe", settings, seed)


def tiny_qwen3_next(directory: Path, *, seed: int = 0, num_blocks: int = 12) -> Path:
    """Write a Qwen3-Next: norms of Gemma's kind, which multiply by ``1 + weight``; 9 MB.

    It stands for Gemma too, of which vLLM 0.32.0 can capture only the fourth generation, and that
    one has plain norms. Every fourth block attends, the others are gated delta nets; two have
    experts.
    """
    settings = {
        "initializer_range": 0.06,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": num_blocks,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,  # vLLM's CPU kernel refuses 32
        "linear_value_head_dim": 128,
        "decoder_sparse_step": 5,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        # All are chosen: with two of four, bfloat16 alone sent some rows to other experts.
        "num_experts": 2,
        "num_experts_per_tok": 2,
    }
    return _build(directory, "tiny_qwen3_next", "Qwen3Next", settings, seed)


def tiny_deepseek_v3(
    directory: Path, *, seed: int = 0, num_blocks: int = 12, yarn: bool = True
) -> Path:
    """Write a DeepSeek-V3: latent attention, and from the second block on experts; 18 MB.

    vLLM's CPU build has its latent attention for a latent of 512 and 64 rotary channels only. With
    ``yarn=False`` positions are encoded the plain way, which no published DeepSeek-V3 does: vLLM's
    CPU kernel for it rotates wrong rows (see ``docs/verifiers.md``).
    """
    settings = {
        **_DEEPSEEK_V3,
        # Above this attention is so sharp, and routing so close, that bfloat16 alone moves a row
        # by a fifth of its length.
        "initializer_range": 0.08,
        "num_hidden_layers": num_blocks,
        "q_lora_rank": 64,
    }
    if yarn:
        settings["rope_parameters"] = _YARN
    return _build(directory, "tiny_deepseek_v3", "DeepseekV3", settings, seed, unsaid=_SIGMOID)


def narrow_deepseek_v3(directory: Path, *, seed: int = 0, num_blocks: int = 12) -> Path:
    """Write ``tiny_deepseek_v3`` of width 32, the same bytes everywhere: for recordings."""
    settings = {
        **_DEEPSEEK_V3,
        # vLLM's kernels for latent attention on a GPU know the sizes of published models alone.
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "initializer_range": 0.12,
        "num_hidden_layers": num_blocks,
        "q_lora_rank": 32,
        "rope_parameters": _YARN,
    }
    return _build(
        directory,
        "narrow_deepseek_v3",
        "DeepseekV3",
        settings,
        seed,
        unsaid=_SIGMOID,
        reproducible=True,
    )


def tiny_deepseek_v2(directory: Path, *, seed: int = 0, num_blocks: int = 12) -> Path:
    """Write a DeepSeek-V2: latent attention with whole queries, experts by softmax; 20 MB.

    With YaRN, as published ones have it.
    """
    settings: dict[str, Any] = {
        "initializer_range": 0.08,
        "num_hidden_layers": num_blocks,
        **_LATENT,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "num_experts_per_tok": 12,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "rope_parameters": _YARN,
    }
    return _build(directory, "tiny_deepseek_v2", "DeepseekV2", settings, seed)


def tiny_kimi(directory: Path, *, seed: int = 0, num_blocks: int = 12) -> Path:
    """Write ``tiny_deepseek_v3`` as Kimi-K2.5 is written: within a larger model.

    Configuration and names are nested; of the rest there is one tensor, which nothing reads.
    """
    import torch
    from safetensors.torch import load_file, save_file

    tiny_deepseek_v3(directory, seed=seed, num_blocks=num_blocks)
    weights = directory / "model.safetensors"
    text = {f"language_model.{name}": value for name, value in load_file(weights).items()}
    save_file(text | {"vision_tower.patch_embed.proj.weight": torch.ones(4, 4)}, weights)
    path = directory / "config.json"
    nested = json.loads(path.read_text()) | {"model_type": "kimi_k2"}
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
    path.write_text(json.dumps(outer | {"text_config": nested}, indent=2))
    marker = {"built_by": "truetap.harness.random_verifier.tiny_kimi", "seed": seed}
    (directory / "truetap.json").write_text(json.dumps(marker))
    return directory


Builder = Callable[..., Path]
FAMILIES: dict[str, Builder] = {
    "llama": tiny_llama,
    "llama_narrow": narrow_llama,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "qwen3_narrow": narrow_qwen3,
    "qwen3_moe": tiny_qwen3_moe,
    "qwen3_next": tiny_qwen3_next,
    "deepseek_v2": tiny_deepseek_v2,
    "deepseek_v3": tiny_deepseek_v3,
    "deepseek_v3_narrow": narrow_deepseek_v3,
}
"""One builder a family, by name: ``FAMILIES[name](directory, seed=0, num_blocks=12)``."""


def _build(
    directory: Path,
    builder: str,
    family: str,
    settings: dict[str, Any],
    seed: int,
    *,
    unsaid: dict[str, Any] | None = None,
    reproducible: bool = False,
) -> Path:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise CouldNotRun(
            f"a random verifier cannot be built: {error}", remedy="pip install 'truetap[reference]'"
        ) from error

    config = getattr(transformers, f"{family}Config")(**(_COMMON | settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        if reproducible:
            _initialise(model, config.initializer_range, seed)
        for name, weight in model.named_parameters():
            # Half off its neutral value, which is 1, or 0 for (1 + weight).
            if "norm" in name and not reproducible:
                weight.copy_(weight - 0.5 + torch.rand(weight.shape, generator=generator))
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(0.2 * torch.rand(bias.shape, generator=generator))
        # A channel that one token drives far above the rest, as attention sinks do.
        model.model.embed_tokens.weight[0, 7] = 40.0
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (unsaid or {}), indent=2))
    marker = {"built_by": f"truetap.harness.random_verifier.{builder}", "seed": seed}
    (directory / "truetap.json").write_text(json.dumps(marker))
    return directory


def _initialise(model: Any, scale: float, seed: int) -> None:
    """Give every weight the same bytes everywhere, drawn evenly with deviation ``scale``.

    transformers initialises otherwise from release to release, and torch's normal distribution
    differs in the last bit from machine to machine. Norms are up to half off from 1.
    """
    import numpy as np
    import torch

    drawn = np.random.RandomState(seed)  # its stream is frozen
    for name, weight in sorted(model.named_parameters()):
        values = drawn.random_sample(tuple(weight.shape)).astype(np.float32)
        spread = (values - np.float32(0.5)) * np.float32(12**0.5 * scale)
        weight.copy_(torch.from_numpy(np.float32(0.5) + values if "norm" in name else spread))

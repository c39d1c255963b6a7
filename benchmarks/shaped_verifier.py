"""Write a verifier of a published model's shape with random weights of real scale.

    python benchmarks/shaped_verifier.py qwen3-8b DIR
    python benchmarks/shaped_verifier.py kimi-k2.5 DIR --experts 8 --expert-width 256

Speed, memory and shapes of captures do not depend on what the weights say, and weights of a model
that is published have to be fetched. Matrices have a spread of one over the root of their inputs,
so that no residual stream grows out of bfloat16; in kimi-k2.5 norms differ from one, and one token
has an outlier, so that captures at wrong places show. The number and width of experts decide the
size: 61 blocks with 8 experts of 256 take 19 GB, with 64 of 1024 about 190. It is written block by
block; ``--device cuda`` draws the numbers there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ending
import torch
from safetensors.torch import save_file

from truetap.harness.errors import UsageError

Tensors = dict[str, torch.Tensor]


@dataclass
class Numbers:
    """Random weights, always the same ones on one kind of device."""

    device: str

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(0)

    def matrix(self, out: int, into: int, gain: float = 1.0) -> torch.Tensor:
        """Return a matrix of ``into`` inputs, ``[out, into]``."""
        return self._drawn(torch.randn, out, into).mul_(gain / into**0.5).bfloat16().cpu()

    def embeddings(self, vocabulary: int, width: int) -> torch.Tensor:
        """Return embeddings of unit spread; of the first token one value is an outlier."""
        made = self._drawn(torch.randn, vocabulary, width)
        made[0, 7] = 40.0
        return made.bfloat16().cpu()

    def norm(self, width: int) -> torch.Tensor:
        """Return a norm's weights between 0.5 and 1.5."""
        return self._drawn(torch.rand, width).add_(0.5).bfloat16().cpu()

    def bias(self, width: int) -> torch.Tensor:
        """Return small float32 numbers, as experts are chosen with."""
        return self._drawn(torch.rand, width).mul_(0.1).cpu()

    def _drawn(self, draw: Any, *shape: int) -> torch.Tensor:
        drawn: torch.Tensor = draw(*shape, generator=self.generator, device=self.device)
        return drawn


def qwen3(blocks: int, width: int, inner: int, heads: int, vocabulary: int) -> dict[str, Any]:
    """Return the configuration of a Qwen3, four heads to a key and value."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": blocks,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "head_dim": 128,
        "vocab_size": vocabulary,
        "max_position_embeddings": 40960,
        "rope_theta": 1_000_000,
        "attention_bias": False,
    }


def deepseek_v3(
    blocks: int, width: int, heads: int, vocabulary: int, experts: int, expert_width: int
) -> dict[str, Any]:
    """Return the configuration of a DeepSeek-V3 as Kimi-K2.5 is one: the first block is dense."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": blocks,
        "hidden_size": width,
        "intermediate_size": 2048,
        "moe_intermediate_size": expert_width,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": min(8, experts),
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
        "rope_theta": 50_000.0,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }


COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def tensors(config: dict[str, Any], numbers: Numbers) -> Iterator[tuple[str, Tensors]]:
    """Yield the name and content of each file."""
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    yield (
        "model-embeddings",
        {
            "model.embed_tokens.weight": numbers.embeddings(vocabulary, width),
            "model.norm.weight": numbers.norm(width),
            "lm_head.weight": numbers.matrix(vocabulary, width),
        },
    )
    block = {"qwen3": _qwen3_block, "deepseek_v3": _deepseek_v3_block}[config["model_type"]]
    for number in range(config["num_hidden_layers"]):
        named = {
            "input_layernorm.weight": numbers.norm(width),
            "post_attention_layernorm.weight": numbers.norm(width),
            **block(config, numbers, number),
        }
        prefix = f"model.layers.{number}."
        yield f"model-{number:03d}", {prefix + name: tensor for name, tensor in named.items()}


def _qwen3_block(config: dict[str, Any], numbers: Numbers, _number: int) -> Tensors:
    width, size = config["hidden_size"], config["head_dim"]
    heads, pairs = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    return {
        "self_attn.q_proj.weight": numbers.matrix(heads, width),
        "self_attn.k_proj.weight": numbers.matrix(pairs, width),
        "self_attn.v_proj.weight": numbers.matrix(pairs, width),
        "self_attn.o_proj.weight": numbers.matrix(width, heads),
        "self_attn.q_norm.weight": numbers.norm(size),
        "self_attn.k_norm.weight": numbers.norm(size),
        **_gated(numbers, "mlp", width, config["intermediate_size"]),
    }


def _deepseek_v3_block(config: dict[str, Any], numbers: Numbers, number: int) -> Tensors:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    queries, latent = config["q_lora_rank"], config["kv_lora_rank"]
    plain, rotary, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    made = {
        "self_attn.q_a_proj.weight": numbers.matrix(queries, width),
        "self_attn.q_a_layernorm.weight": numbers.norm(queries),
        "self_attn.q_b_proj.weight": numbers.matrix(heads * (plain + rotary), queries),
        "self_attn.kv_a_proj_with_mqa.weight": numbers.matrix(latent + rotary, width),
        "self_attn.kv_a_layernorm.weight": numbers.norm(latent),
        "self_attn.kv_b_proj.weight": numbers.matrix(heads * (plain + value), latent),
        "self_attn.o_proj.weight": numbers.matrix(width, heads * value, gain=1.5),
    }
    if number < config["first_k_dense_replace"]:
        return made | _gated(numbers, "mlp", width, config["intermediate_size"])
    experts = config["n_routed_experts"]
    made["mlp.gate.weight"] = numbers.matrix(experts, width)
    made["mlp.gate.e_score_correction_bias"] = numbers.bias(experts)
    for name in (*(f"experts.{expert}" for expert in range(experts)), "shared_experts"):
        made |= _gated(numbers, f"mlp.{name}", width, config["moe_intermediate_size"])
    return made


def _gated(numbers: Numbers, name: str, width: int, inner: int) -> Tensors:
    return {
        f"{name}.gate_proj.weight": numbers.matrix(inner, width),
        f"{name}.up_proj.weight": numbers.matrix(inner, width),
        f"{name}.down_proj.weight": numbers.matrix(width, inner),
    }


def write(config: dict[str, Any], folder: Path, device: str) -> int:
    """Write the verifier; return its bytes."""
    if (folder / "config.json").exists():
        raise UsageError(f"{folder} holds a model already", remedy="name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    places, total = {}, 0
    for name, content in tensors(config, Numbers(device)):
        file = f"{name}.safetensors"
        save_file(content, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(content, file)
        total += sum(tensor.numel() * tensor.element_size() for tensor in content.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(COMMON | config, indent=1) + "\n")
    return total


def main() -> None:
    """Write one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=("qwen3-8b", "kimi-k2.5"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=8, help="of each block of kimi-k2.5")
    parser.add_argument("--expert-width", type=int, default=256)
    parser.add_argument("--device", default="cpu", help="what draws the numbers, such as cuda")
    given = parser.parse_args()
    if given.shape == "qwen3-8b":
        config = qwen3(36, 4096, 12288, 32, 151936)
    else:
        config = deepseek_v3(61, 7168, 64, 32768, given.experts, given.expert_width)
    began = time.monotonic()
    size = write(config, given.folder, given.device)
    print(f"{given.folder}: {size / 1e9:.1f} GB in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    ending.run(main)

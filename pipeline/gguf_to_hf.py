"""Converts SmolLM2's GGUF file to a Hugging Face directory: weights, tokenizer and settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truetap.harness.errors import IntegrityError

if TYPE_CHECKING:
    import torch

# The Hugging Face name of each weight inside a decoder block, by its GGUF name.
_BLOCK_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# The output head is tied to the embeddings, so the file has no third entry.
_OUTER_WEIGHTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_CONTROL_TOKEN = 3
"""GGUF's token type for special tokens."""
_UNK, _BOS, _EOS = 0, 1, 2
# Padding is the end token, as published: padded batches need an attention mask.
_TOKEN_IDS = {"bos_token_id": _BOS, "eos_token_id": _EOS, "pad_token_id": _EOS}


def convert(gguf: Path, folder: Path) -> None:
    """Write the Hugging Face files for the model in ``gguf`` to ``folder``."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    # Metadata is read by key, such as "llama.block_count".
    fields = {key: field.contents() for key, field in reader.fields.items()}
    weights = folder / "model.safetensors"
    save_file(read_weights(reader, fields), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes files that only their owner can read
    for name, value in {
        "config.json": model_config(fields),
        "generation_config.json": {"_from_model_config": True, **_TOKEN_IDS},
        "tokenizer.json": tokenizer(fields),
        "tokenizer_config.json": tokenizer_config(fields),
    }.items():
        text = json.dumps(value, indent=2, ensure_ascii=False)
        (folder / name).write_text(text, encoding="utf-8")


def read_weights(reader: Any, fields: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Dequantise every weight of an open GGUF file to bfloat16, under its Hugging Face name."""
    import torch
    from gguf import dequantize

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in reader.tensors:
        # GGUF lists dimensions fastest first: [in, out] for what torch calls [out, in].
        shape = [int(length) for length in reversed(tensor.shape)]
        values = dequantize(tensor.data, tensor.tensor_type)
        # A copy, as unquantised norms come as a read-only view of the mapped file.
        weight = torch.tensor(values, dtype=torch.float32).reshape(shape)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = unpermute(weight, heads[part])
        weights[hugging_face_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    return weights


def hugging_face_name(name: str) -> str:
    """Translate a weight's GGUF name: ``blk.3.attn_q.weight``, ``token_embd.weight``."""
    match name.split("."):
        case ["blk", block, part, "weight"] if part in _BLOCK_WEIGHTS:
            return f"model.layers.{block}.{_BLOCK_WEIGHTS[part]}.weight"
        case [part, "weight"] if part in _OUTER_WEIGHTS:
            return f"{_OUTER_WEIGHTS[part]}.weight"
    raise IntegrityError(f"the model file has a weight {name!r} that SmolLM2 does not have")


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Put the rows of a query or key projection back in Hugging Face's order.

    Rotary embedding turns pairs of a head's rows. llama.cpp's converter lays the two rows of a pair
    side by side, ``[head, pair, 2]``; Hugging Face keeps all first rows of a head before all second
    ones, ``[head, 2, pair]``. ``weight`` is ``[heads * head_dim, hidden]``, and so is the result.
    """
    rows, hidden = weight.shape
    return (
        weight.reshape(heads, rows // heads // 2, 2, hidden).transpose(1, 2).reshape(rows, hidden)
    )


def model_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json``: the shape of the model from its GGUF metadata, the rest as published."""
    hidden = fields["llama.embedding_length"]
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        **_TOKEN_IDS,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pretraining_tp": 1,
        # The metadata has it too, but in float32: 9.999999747378752e-06.
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def tokenizer(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``tokenizer.json``, with its keys in the published order: the file is checked by digest.

    transformers can read a tokenizer from GGUF by itself, but loses the splitting of digits.
    """

    def byte_level(*, prefix_space: bool) -> dict[str, Any]:
        options = {"trim_offsets": True, "use_regex": True}
        return {"type": "ByteLevel", "add_prefix_space": prefix_space, **options}

    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, **entry} for i, entry in _special_tokens(fields).items()],
        "normalizer": None,
        # What GGUF calls "smollm": every digit by itself, then GPT-2's byte-level pattern.
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                byte_level(prefix_space=False),
            ],
        },
        "post_processor": None,
        "decoder": byte_level(prefix_space=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])},
            "merges": fields["tokenizer.ggml.merges"],
        },
    }


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``tokenizer_config.json``, with the chat template."""
    special = _special_tokens(fields)
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(i): entry for i, entry in special.items()},
        "additional_special_tokens": [special[_BOS]["content"], special[_EOS]["content"]],
        "bos_token": special[_BOS]["content"],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": special[_EOS]["content"],
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": fields["llama.context_length"],
        "pad_token": special[_EOS]["content"],
        # Not the GPT-2 class, which would put its own pre-tokenizer in place of the file's.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": special[_UNK]["content"],
    }


def _special_tokens(fields: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Describe the tokens that stand for no text, by id."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    return {
        i: {"content": token, **flags, "special": True}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == _CONTROL_TOKEN
    }

"""The conversion from GGUF, on a model small enough to know every number of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from truetap.harness.errors import IntegrityError
from truetap.pipeline import gguf_to_hf, smollm2


@pytest.mark.parametrize(
    ("gguf", "hugging_face"),
    [
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ],
)
def test_names(gguf: str, hugging_face: str) -> None:
    assert gguf_to_hf.hugging_face_name(gguf) == hugging_face


@pytest.mark.parametrize("name", ["output.weight", "blk.0.attn_q.bias", "blk.0.ssm.weight", "x"])
def test_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(IntegrityError, match=name):
        gguf_to_hf.hugging_face_name(name)


@pytest.mark.torch
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_unpermute_undoes_permute(heads: int) -> None:
    import torch

    head_dim, hidden = 8, 5
    weight = torch.arange(heads * head_dim * hidden).reshape(heads * head_dim, hidden)
    # Row by row: within a head, row i of the first half and row i of the second become neighbours.
    half = head_dim // 2
    order = [
        head * head_dim + part * half + pair
        for head in range(heads)
        for pair in range(half)
        for part in range(2)
    ]
    permuted = weight[order]
    assert not torch.equal(permuted, weight)
    assert torch.equal(gguf_to_hf.unpermute(permuted, heads), weight)


@pytest.fixture
def small_gguf(tmp_path: Path) -> Path:
    """A Llama with one block, two heads, one key-value head and four tokens, in float32."""
    import gguf
    import numpy as np

    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(6)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(4)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a"])
    writer.add_token_types([3, 3, 3, 1])
    writer.add_token_merges(["a a"])
    writer.add_chat_template("{{ messages }}")
    shapes = {"token_embd": (4, 8), "output_norm": (8,), "blk.0.attn_q": (8, 8)}
    shapes |= {"blk.0.attn_k": (4, 8), "blk.0.attn_v": (4, 8), "blk.0.ffn_down": (8, 6)}
    for name, shape in shapes.items():
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.torch
def test_weights_and_settings_of_a_small_model(small_gguf: Path) -> None:
    import torch
    from gguf import GGUFReader

    reader = GGUFReader(small_gguf)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    weights = gguf_to_hf.read_weights(reader, fields)
    block = "model.layers.0."
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == {
        "model.embed_tokens.weight": (4, 8),
        "model.norm.weight": (8,),
        f"{block}self_attn.q_proj.weight": (8, 8),
        f"{block}self_attn.k_proj.weight": (4, 8),
        f"{block}self_attn.v_proj.weight": (4, 8),
        f"{block}mlp.down_proj.weight": (8, 6),
    }
    assert all(weight.dtype == torch.bfloat16 for weight in weights.values())
    # First columns are the row numbers times eight. Query and key rows move, value rows do not.
    first = {name: (weight[..., 0] / 8).tolist() for name, weight in weights.items()}
    assert first[f"{block}self_attn.q_proj.weight"] == [0, 2, 1, 3, 4, 6, 5, 7]
    assert first[f"{block}self_attn.k_proj.weight"] == [0, 2, 1, 3]
    assert first[f"{block}self_attn.v_proj.weight"] == [0, 1, 2, 3]
    config = gguf_to_hf.model_config(fields)
    assert (config["head_dim"], config["num_hidden_layers"], config["vocab_size"]) == (4, 1, 4)
    special = gguf_to_hf.tokenizer_config(fields)
    assert (special["eos_token"], special["unk_token"]) == ("<|im_end|>", "<|endoftext|>")


@pytest.mark.torch
def test_other_weights_or_another_tokenizer_are_refused(
    small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    gguf_to_hf.convert(small_gguf, folder)
    assert {path.name for path in folder.iterdir()} == set(smollm2.FILES)
    with pytest.raises(IntegrityError, match="converted weights"):
        smollm2.require_right(folder)
    measured = smollm2.tensors_digest(folder / "model.safetensors")
    monkeypatch.setattr(smollm2, "TENSORS_SHA256", measured)
    with pytest.raises(IntegrityError, match="tokenizer"):
        smollm2.require_right(folder)

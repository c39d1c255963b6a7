"""Small verifiers with random weights, for tests on any machine.

Random is not enough by itself: with default initialisation every block is nearly the identity and
all boundaries look alike, so a wrong one could not be told from a right one. These have blocks that
matter, norm weights that are not 1, and some massive activations, as real models do.
"""

from __future__ import annotations

import json
from pathlib import Path

from truetap.harness.errors import CouldNotRun


def tiny_llama(directory: Path, *, seed: int = 0, num_blocks: int = 12) -> Path:
    """Write a Llama of ``num_blocks`` blocks, width 128, vocabulary 512; 3 MB, in float32.

    Twelve blocks, so that sorting ids as text ("10" before "2") would show.
    """
    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise CouldNotRun(
            f"a random verifier cannot be built: {error}", remedy="pip install 'truetap[reference]'"
        ) from error

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.12,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(0.5 + torch.rand(weight.shape, generator=generator))
        # A channel that one token drives far above the rest, as attention sinks do.
        model.model.embed_tokens.weight[0, 7] = 40.0
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    marker = {"built_by": "truetap.harness.random_verifier.tiny_llama", "seed": seed}
    (directory / "truetap.json").write_text(json.dumps(marker))
    return directory

"""What several test modules need: a silent console, and a small verifier on disk."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from rich.console import Console

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def console() -> Console:
    """A console whose text is read with ``console.file.getvalue()``."""
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(scope="session")
def paper_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that describes a verifier of 12 blocks; its weights are no weights.

    Enough for everything that does not load it, and made without torch.
    """
    from safetensors.numpy import save_file

    directory = tmp_path_factory.mktemp("verifiers") / "paper"
    directory.mkdir()
    config = {
        "model_type": "llama",
        "num_hidden_layers": 12,
        "hidden_size": 16,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"weight": np.arange(4, dtype=np.float32)}, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real Llama of 8 blocks, width 128, vocabulary 512, with random weights; needs torch."""
    from truetap.harness.random_verifier import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("verifiers") / "tiny", num_blocks=8)

"""Verifiers of published shapes for benchmarks: whole, so that an engine loads every weight."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from truetap.harness.errors import UsageError

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Callable[[Any], dict[str, Any]]] = {
    "Qwen3ForCausalLM": lambda shaped: shaped.qwen3(2, 64, 128, 4, 512),
    "DeepseekV3ForCausalLM": lambda shaped: shaped.deepseek_v3(2, 64, 2, 512, 4, 32),
}


@pytest.fixture
def shaped(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("shaped_verifier")


@pytest.mark.parametrize("architecture", SMALL)
def test_every_weight_of_the_model_is_written_and_no_other(
    shaped: Any, tmp_path: Path, architecture: str
) -> None:
    import torch
    import transformers

    folder = tmp_path / "model"
    size = shaped.write(SMALL[architecture](shaped), folder, "cpu")
    assert size == sum(path.stat().st_size for path in folder.glob("*.safetensors")) - headers(
        folder
    )
    kind = getattr(transformers, architecture)
    model, told = kind.from_pretrained(folder, output_loading_info=True, dtype=torch.bfloat16)
    assert not {name: left for name, left in told.items() if left}
    with torch.no_grad():
        states = model(torch.tensor([[0, 5, 9]]), output_hidden_states=True).hidden_states
    assert all(bool(torch.isfinite(state).all()) for state in states)
    with pytest.raises(UsageError, match="holds a model already"):
        shaped.write(SMALL[architecture](shaped), folder, "cpu")


def headers(folder: Path) -> int:
    """Return the bytes of the files' headers: eight say how long each is."""
    starts = [path.read_bytes()[:8] for path in folder.glob("*.safetensors")]
    return sum(8 + int.from_bytes(start, "little") for start in starts)

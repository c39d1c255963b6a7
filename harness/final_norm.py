"""A verifier's final norm, computed from its own weights without any model code.

Gemma's kind of RMSNorm multiplies by ``1 + weight`` and stores weights around 0, the plain kind by
``weight``. Nothing in a configuration says which; it is a property of the model's code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from truetap.harness import verifier
from truetap.harness.errors import UsageError
from truetap.harness.model import Float32

ONE_PLUS_WEIGHT = frozenset(
    {
        *("gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma"),
        *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    }
)
"""``model_type`` of verifiers whose norms multiply by ``1 + weight``."""

_NAMES = (
    *("model.norm.weight", "model.language_model.norm.weight"),
    "language_model.model.norm.weight",
)


def final_norm(model: Path, *, mistaken: bool = False) -> Callable[[Float32], Float32]:
    """Return the norm between the last boundary and the output head, for rows of any ``[..., H]``.

    ``mistaken=True`` gives the fault instead: the weight taken for the other kind's.
    """
    config = verifier.describe(model).config
    text = config.get("text_config", config)
    eps = float(text.get("rms_norm_eps", 1e-6))
    one_plus = (text.get("model_type") in ONE_PLUS_WEIGHT) != mistaken

    def apply(states: Float32) -> Float32:
        factor = _weight(model) + float(one_plus)
        scale = np.sqrt((states.astype(np.float64) ** 2).mean(-1, keepdims=True) + eps)
        normed: Float32 = (states / scale * factor).astype(np.float32)
        return normed

    return apply


def _weight(model: Path) -> Float32:
    from safetensors import safe_open

    index = model / "model.safetensors.index.json"
    where: dict[str, Any] = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    for name in _NAMES:
        if where and name not in where:
            continue
        with safe_open(model / where.get(name, "model.safetensors"), framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 (not a dictionary)
                weight: Float32 = tensors.get_tensor(name).float().numpy()
                return weight
    raise UsageError(
        f"{model} has no final norm under any of the names {', '.join(_NAMES)}",
        remedy="mutants that apply the final norm cannot be built for this verifier",
    )

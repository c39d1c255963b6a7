"""Compares what workers sent with what a caller got, tensors bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np


def outline(value: Any) -> str:
    """Describe the containers of ``value`` and the kinds of what is in them, in a line.

    Two values with equal outlines have the same nesting. Contents, dtypes and shapes are left to
    ``difference``.
    """
    if isinstance(value, dict):
        inner = ", ".join(f"{key!r}: {outline(item)}" for key, item in value.items())
        return f"{{{inner}}}"
    if isinstance(value, (list, tuple)):
        kinds = [outline(item) for item in value]
        brackets = "[]" if isinstance(value, list) else "()"
        if len(kinds) > 2 and len(set(kinds)) == 1:
            return f"{brackets[0]}{len(kinds)} x {kinds[0]}{brackets[1]}"
        return f"{brackets[0]}{', '.join(kinds)}{brackets[1]}"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__} of {len(value)}"
    if is_tensor(value):
        return "tensor"
    return "array" if isinstance(value, np.ndarray) else type(value).__name__


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is no list, tuple or dict, with its place in ``value``."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{place}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{place}[{index}]")
    else:
        yield place, value


def difference(sent: Any, got: Any) -> str:
    """Return how ``got`` differs from ``sent``, in a phrase; '' if it does not, bit for bit."""
    if type(sent) is not type(got):
        return f"a {type(sent).__name__} was sent, a {type(got).__name__} came: {_brief(got)}"
    if is_tensor(sent) or isinstance(sent, np.ndarray):
        if sent.dtype != got.dtype:
            return f"{sent.dtype} was sent, {got.dtype} came"
        if tuple(sent.shape) != tuple(got.shape):
            return f"shape {list(sent.shape)} was sent, {list(got.shape)} came"
        if _bits(sent) != _bits(got):
            return "the same dtype and shape came with other bits"
        return ""
    return "" if _same(sent, got) else f"{_brief(sent)} was sent, {_brief(got)} came"


def is_tensor(value: Any) -> bool:
    """Tell a torch tensor without importing torch."""
    kind = type(value)
    return kind.__module__.partition(".")[0] == "torch" and kind.__name__ in {"Tensor", "Parameter"}


def _bits(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    import torch

    flat = value.detach().cpu().contiguous().reshape(-1)
    bits: bytes = flat.view(torch.uint8).numpy().tobytes()
    return bits


def _same(sent: Any, got: Any) -> bool:
    if isinstance(sent, float):
        return sent.hex() == str(got.hex())
    return bool(sent == got)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

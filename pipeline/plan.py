"""What a run will take, computed before it starts: bytes on disk, and in the engine's cache.

Hidden states keep their full width under any tensor parallel size, so none of this depends on it.
"""

from __future__ import annotations

import re

from truetap.harness.errors import CouldNotRun

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes per value, by the engine's dtype."""

_NEEDED = re.compile(r"\(?([\d.]+) GiB KV\s+cache is needed")


def capture_bytes(tokens: int, states: int, width: int, dtype: str) -> int:
    """Return the bytes of ``states`` hidden states of ``width`` values for each of ``tokens``."""
    return tokens * states * width * BYTES[dtype]


def told(tokens: int, states: int, width: int, dtype: str) -> str:
    """Return that computation in words."""
    need = capture_bytes(tokens, states, width, dtype)
    return (
        f"{tokens:,} tokens x {states} states x {width} values x {BYTES[dtype]} bytes = "
        f"{need / 1e9:,.2f} GB"
    )


def require_space(need: int, free: int, where: object) -> None:
    """Refuse if ``need`` bytes are not free."""
    if need > free:
        raise CouldNotRun(
            f"the shards need {need / 1e9:,.1f} GB and {where} has {free / 1e9:,.1f} GB free",
            remedy="free disk space, or choose another output folder",
        )


def most_cache_bytes(tokens: int, states: int, blocks: int, width: int, dtype: str) -> int:
    """Return the most that an engine's cache can fairly take for one request of ``tokens``.

    Twice the hidden states, and keys and values of every block at full width: no attention keeps
    more, and most keep far less.
    """
    own = 2 * capture_bytes(tokens, blocks, width, dtype)
    return 2 * capture_bytes(tokens, states, width, dtype) + own


def overpriced(failure: str, most: int) -> str:
    """Say that an engine refused to start because it misprices its cache; '' if it does not.

    ``failure`` is what the engine said. Some releases charge the layer that holds the hidden states
    as if it were one of the model's own, or many (vllm#53243, vllm#56774).
    """
    said = _NEEDED.search(failure)
    if said is None or float(said[1]) * 2**30 <= most:
        return ""
    return (
        f"one request takes at most {most / 2**30:.2f} GiB, states included: this engine misprices "
        "the cache of hidden states"
    )

"""What the files of each producer have in them, and how large they can be."""

from __future__ import annotations

from typing import Any

from truetap.harness.verifier import VerifierFacts
from truetap.pipeline.foreign.producers.sample import BadFile

KEYS = {
    "speculators": {"input_ids", "loss_mask", "hidden_states"},
    "specforge": {"input_ids", "loss_mask", "hidden_state"},
    "modelopt": {"input_ids", "hidden_states", "aux_hidden_states"},
}
"""Of files that ``torch.save`` wrote: keys that tell a producer from the others."""
_MOST_SLOTS = 16
_LARGEST = 16 << 30


def require_keys(content: Any, producer: str, *keys: str) -> None:
    """Raise ``BadFile`` unless ``content`` is a dict with ``keys``; name whose it seems to be."""
    if not isinstance(content, dict):
        raise BadFile("keys", f"holds a {type(content).__name__}, not a dict of tensors")
    missing = [key for key in keys if key not in content]
    if not missing:
        return
    found = {str(key) for key in content}
    likely = [
        name
        for name, needed in KEYS.items()
        if name != producer and needed <= found and not KEYS[producer] <= found
    ]
    hint = f"; these are the keys of --producer {likely[0]}" if likely else ""
    raise BadFile("keys", f"has no {', '.join(missing)}{hint}")


def size_limit(verifier: VerifierFacts) -> int:
    """Return how many bytes a file of one request can have: every slot in float32, the longest."""
    row = _MOST_SLOTS * verifier.hidden_size * 4 + 64
    return min(verifier.max_positions * row + (1 << 20), _LARGEST)

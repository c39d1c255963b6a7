"""Measures how clearly the streamed reference tells blocks apart, on every family that it knows.

Run ``python benchmarks/streamed_margins.py``; it prints the table in ``docs/verifiers.md``. The
captures are transformers' own, in bfloat16, of a prompt of 97 tokens at every boundary.

``by value`` is how many times farther than the requested boundary the nearest other candidate is,
``by block`` how many times farther boundary k + 1 is from what a neighbouring block makes of the
captured boundary k than from what block k makes of it: the least over all boundaries. ``next``
is how far the nearest neighbouring boundary is, relative L2. ``to the whole`` is the largest
distance of any row to the reference that is held whole.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import ending
import numpy as np

from truetap.conformance.test_layers import block_distances
from truetap.harness import compare, random_verifier
from truetap.harness.adapters.transformers import TransformersSession
from truetap.harness.model import CaptureRequest, EngineSpec
from truetap.harness.reference import Reference
from truetap.harness.streamed_reference import FAMILIES, StreamedReference

TOKENS = 97
BLOCKS = 12


def row(family: str, model: Path, text: Path) -> str:
    """Return one line of the table; ``text`` is the verifier as transformers has it."""
    prompt = np.random.default_rng(7).integers(0, 512, TOKENS).tolist()
    session = TransformersSession(EngineSpec(str(text), tuple(range(1, BLOCKS + 1))))
    (capture,) = session.capture([CaptureRequest("prompt", tuple(prompt))]).captures
    reference = StreamedReference(model, "bfloat16")
    (states,) = reference.states_of([prompt])
    (whole,) = Reference(text, "bfloat16").states_of([prompt])
    slots = {k: capture.states[:, k - 1] for k in range(1, BLOCKS + 1)}
    readings = [compare.read_slot(k, [slots[k]], [states]) for k in slots]
    assert all(reading.right for reading in readings)
    away, _ = block_distances(reference, slots, BLOCKS)
    margins = [
        min(distance for j, distance in found.items() if j != k) / found[k]
        for k, found in away.items()
    ]
    steps = [
        np.median(compare.row_distances(states.boundaries[k - 1], states.boundaries[k]))
        for k in range(1, BLOCKS + 1)
    ]
    apart = compare.row_distances(states.boundaries, whole.boundaries).max()
    by_value = min(reading.margin for reading in readings)
    return f"| `{family}` | {min(steps):.2f} | {by_value:.1f} | {min(margins):.0f} | {apart:.1e} |"


def main() -> None:
    """Print the table."""
    print("| family | next | by value | by block | to the whole |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as scratch:
        for family, builder in random_verifier.FAMILIES.items():
            if family in FAMILIES:
                model = builder(Path(scratch) / family)
                print(row(family, model, model))
        model = random_verifier.tiny_kimi(Path(scratch) / "kimi")
        print(row("kimi_k2", model, Path(scratch) / "deepseek_v3"))


if __name__ == "__main__":
    ending.run(main)

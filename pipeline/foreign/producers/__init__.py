"""Readers of hidden states that other pipelines left on disk, one module a producer."""

from __future__ import annotations

from pathlib import Path

from truetap.harness.errors import UsageError
from truetap.harness.verifier import VerifierFacts
from truetap.pipeline.foreign.producers.modelopt import ModelOptimizer
from truetap.pipeline.foreign.producers.own_store import OwnStore
from truetap.pipeline.foreign.producers.sample import Producer
from truetap.pipeline.foreign.producers.specforge import SpecForge
from truetap.pipeline.foreign.producers.speculators import Speculators

PRODUCERS: dict[str, type[Producer]] = {
    "truetap": OwnStore,
    "speculators": Speculators,
    "specforge": SpecForge,
    "modelopt": ModelOptimizer,
}
"""By the name that ``--producer`` takes."""


def open_producer(name: str, root: Path, verifier: VerifierFacts) -> Producer:
    """Open a folder as what ``name`` wrote; ``UsageError`` if none of its files is there."""
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise UsageError(f"{root} {what}", remedy="give the folder that holds the states")
    producer = PRODUCERS[name](root, verifier)
    if next(producer.files(), None) is not None:
        return producer
    others = [
        other
        for other, kind in PRODUCERS.items()
        if other != name and next(kind(root, verifier).files(), None) is not None
    ]
    raise UsageError(
        f"{root} has no files of {name}: {producer.pattern}",
        remedy=f"--producer {' or '.join(others)} finds some there"
        if others
        else "give the folder that holds the states",
    )

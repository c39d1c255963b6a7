"""The store: shards of captures with a manifest, one line per finished shard.

A shard counts as finished only if the manifest has its line *and* its tensors have the digests of
that line. Everything needed to trust a shard stands in its line: verifier, boundaries, norm state,
dtype, engine and the certificate under which it was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truetap.harness import shard
from truetap.harness.errors import IntegrityError
from truetap.pipeline import run_folder

if TYPE_CHECKING:
    import torch

REDO = "run truetap extract again: it redoes exactly the shards that are bad or missing"


@dataclass(frozen=True)
class Sample:
    """Captures of one conversation of T tokens."""

    id: str
    token_ids: torch.Tensor
    """``[T]`` int64."""
    loss_mask: torch.Tensor
    """``[T]`` uint8."""
    states: torch.Tensor
    """``[T, boundaries, hidden]`` in the engine's dtype, memory-mapped."""


class Store:
    """A folder of shards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def manifest(self) -> Path:
        """The manifest's path."""
        return self.folder / "manifest.jsonl"

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return the manifest's lines by shard name; of two for one shard the later counts."""
        lines = run_folder.read_lines(self.manifest)
        try:
            return {line["shard"]: line for line in lines}
        except KeyError as missing:
            raise IntegrityError(f"{self.manifest} has a line without {missing}") from None

    def path(self, name: str) -> Path:
        """Return where a shard lies."""
        return self.folder / name

    def record(self, entry: dict[str, Any]) -> None:
        """Publish a shard's partial file and add its line to the manifest, in that order."""
        shard.publish(self.path(entry["shard"]))
        run_folder.append_line(self.manifest, entry)

    def verified(self, entry: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return a shard's tensors; ``IntegrityError`` if they are not what was recorded."""
        path = self.path(entry["shard"])
        try:
            tensors = shard.read(path)
        except FileNotFoundError:
            raise IntegrityError(f"shard {path} is missing", remedy=REDO) from None
        except Exception as error:  # safetensors has its own error type, and corrupt headers many
            raise IntegrityError(f"shard {path} cannot be read: {error}", remedy=REDO) from error
        if wrong := shard.mismatches(tensors, entry.get("digests", {})):
            raise IntegrityError(
                f"shard {path} is corrupt: {', '.join(wrong)} differ from the recorded digests",
                remedy=REDO,
            )
        return tensors

    def samples(self, ids: Sequence[str]) -> list[Sample]:
        """Return the captures of the given conversations, every shard verified first."""
        found: dict[str, Sample] = {}
        for entry in self.entries().values():
            tensors = self.verified(entry)
            bounds = tensors["offsets"].tolist()
            for index, sample_id in enumerate(entry["ids"]):
                rows = slice(bounds[index], bounds[index + 1])
                found[sample_id] = Sample(
                    sample_id,
                    tensors["token_ids"][rows],
                    tensors["loss_mask"][rows],
                    tensors["states"][rows],
                )
        if missing := [sample_id for sample_id in ids if sample_id not in found]:
            raise IntegrityError(
                f"{len(missing)} of {len(ids)} conversations have no captures in {self.folder}, "
                f"the first of them {missing[0]!r}",
                remedy=REDO,
            )
        return [found[sample_id] for sample_id in ids]

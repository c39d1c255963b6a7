"""The records of production extraction: shards that are ordered, and shards that are written.

A session that can extract has ``extract(orders, ...)`` beside what ``truetap.harness.adapter`` asks
for: it takes orders whenever its engine has room, so several shards are under way at once and the
engine never waits between two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from truetap.harness import shard
from truetap.harness.errors import CheckFailed, IntegrityError
from truetap.harness.model import CaptureRequest, Environment

if TYPE_CHECKING:
    import torch

    from truetap.harness.engine import Finished


@dataclass(frozen=True)
class Pool:
    """Memory and threads between an engine's steps and the disk, in each worker."""

    size_bytes: int = 512 << 20
    """Of rows that wait to be written. When it is full, the engine waits."""
    threads: int = 4
    """That write, and as many that read back and hash. A core hashes 1 to 2 GB/s."""


@dataclass(frozen=True)
class ShardOrder:
    """A shard that is wanted."""

    path: Path
    """Its final name. The worker writes a partial file beside it."""
    requests: Sequence[CaptureRequest]
    loss_masks: Sequence[bytes]
    """One byte a token for each request."""

    @property
    def rows(self) -> int:
        """Rows of the whole shard: one per token."""
        return sum(len(request.token_ids) for request in self.requests)


@dataclass(frozen=True)
class WrittenShard:
    """A shard that lies complete and fsynced in its partial file, not yet read back."""

    order: ShardOrder
    partial: Path
    pieces: Sequence[Sequence[tuple[int, int, str]]]
    """For each request, piece by piece: first row, rows, checksum of the rows in the worker."""
    generated: Sequence[tuple[int, ...]] = ()
    """What the engine generated after each request."""
    by_rank: Sequence[str] = ()
    """For each rank a digest of what it saw."""
    recomputed: int = 0
    """Rows that the engine computed a second time, after a preemption; the first ones count."""

    def read_back(self) -> dict[str, torch.Tensor]:
        """Return the file's tensors, memory-mapped, if they are what was ordered and captured.

        Raises ``IntegrityError`` if rows on the disk are not those that the worker had in memory,
        ``CheckFailed`` if ids, masks or counts are not those of the order.
        """
        try:
            tensors = shard.read(self.partial)
        except Exception as error:  # safetensors has its own error type
            raise IntegrityError(
                f"{self.order.path.name}: {self.partial} cannot be read back: {error}", remedy=_REDO
            ) from error
        requests, name = self.order.requests, self.order.path.name
        expected = [token for request in requests for token in request.token_ids]
        if tensors["token_ids"].tolist() != expected:
            raise CheckFailed(f"{name}: token ids differ from those that were sent")
        states, mask = tensors["states"], tensors["loss_mask"]
        if len(states) != len(expected):
            raise CheckFailed(f"{name}: {len(states)} rows for {len(expected)} tokens")
        wanted = b"".join(self.order.loss_masks)
        if len(wanted) != len(expected):
            raise CheckFailed(f"{name}: a loss mask of {len(wanted)} for {len(expected)} tokens")
        offsets = np.cumsum([0, *(len(request.token_ids) for request in requests)])
        if tensors["offsets"].tolist() != offsets.tolist() or bytes(shard.raw(mask)) != wanted:
            raise IntegrityError(
                f"{name}: offsets or loss mask are not those of the order", remedy=_REDO
            )
        for request, first, pieces in zip(requests, offsets, self.pieces, strict=False):
            self._compare(states[int(first) :], request, pieces)
        return tensors

    def _compare(
        self,
        rows: torch.Tensor,
        request: CaptureRequest,
        pieces: Sequence[tuple[int, int, str]],
    ) -> None:
        end = 0
        for position, count, checksum in pieces:
            if (
                position != end
                or shard.checksum(shard.raw(rows[position : position + count])) != checksum
            ):
                raise IntegrityError(
                    f"{self.order.path.name}: rows from {position} on of request {request.key!r} "
                    "read back differently from what the worker wrote",
                    remedy=_REDO,
                )
            end += count
        if end != len(request.token_ids):
            raise CheckFailed(f"{self.order.path.name}: {end} rows of request {request.key!r}")


_REDO = "check the disk, then run truetap extract again"


@dataclass
class Status:
    """What the first worker says of its pool."""

    queued: int = 0
    """Pieces of rows that wait to be written."""
    staged: int = 0
    """Their bytes."""
    most_staged: int = 0
    """The most that they ever were."""
    moved: int = 0
    """How often anything has reached the disk."""
    waited_s: float = 0.0
    """How long the engine's steps waited for a free slot, in all."""


@dataclass
class Progress:
    """What an extraction shows while it goes on; a caller's to read at any time."""

    status: Status = field(default_factory=Status)
    finished: Callable[[Finished, CaptureRequest], None] = lambda _finished, _request: None
    """Called for each request as the engine finishes it."""


@runtime_checkable
class Extracting(Protocol):
    """A session that writes shards."""

    def extract(
        self, orders: Iterable[ShardOrder], progress: Progress, pool: Pool
    ) -> Iterator[WrittenShard]:
        """Make the shards, yielding each when it is on the disk, in the order of completion."""
        ...

    def environment(self) -> Environment:
        """Return facts about the running engine, read from its workers."""
        ...

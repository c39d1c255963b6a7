"""Makes shards with a session that can extract: orders, checks what was written, states it.

A shard comes out of here complete, fsynced, read back from the disk and compared, in its partial
file; whoever keeps the store publishes it. While one is read back, the engine makes others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from truetap.harness import shard
from truetap.harness.engine import Finished
from truetap.harness.errors import CheckFailed
from truetap.harness.extraction import Extracting, Pool, Progress, ShardOrder, WrittenShard
from truetap.harness.model import CaptureRequest, Environment
from truetap.pipeline import float_bits
from truetap.pipeline.prepare import Conversation

if TYPE_CHECKING:
    import torch

_PIECE_BYTES = 256 << 10
"""As much as a core's cache holds."""


@dataclass(frozen=True)
class Job:
    """One shard to be made."""

    name: str
    conversations: Sequence[Conversation]


@dataclass(frozen=True)
class Made:
    """A shard that is proven, in its partial file."""

    entry: dict[str, Any]
    """Its manifest line, but for certificate and audit."""
    partial: Path


@dataclass
class Pace:
    """What was captured so far, and how fast; shown while it goes on."""

    progress: Progress = field(default_factory=Progress)
    tokens: int = 0
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.progress.finished = self._count

    def _count(self, finished: Finished, request: CaptureRequest) -> None:  # noqa: ARG002
        self.tokens += len(request.token_ids)
        self.advanced()

    def advanced(self) -> None:
        """Hear that one more request was captured."""

    @property
    def seconds(self) -> float:
        """Time since the first prompt."""
        return time.monotonic() - self.started

    def note(self) -> str:
        """Return speed and state of the pool in a few words."""
        status = self.progress.status
        rate = self.tokens / max(self.seconds, 1e-6)
        return (
            f"{rate:,.0f} tokens/s, {status.staged / 2**20:,.0f} MiB in {status.queued} pieces "
            f"staged, waited {status.waited_s:.1f} s"
        )


def make_shards(
    session: Extracting,
    jobs: Iterable[Job],
    folder: Path,
    pace: Pace,
    pool: Pool,
    facts: Mapping[str, Any],
    environment: Environment,
) -> Iterator[Made]:
    """Make a shard for each job, taken whenever the engine has room; yield as they are proven.

    ``facts`` are those of the run about boundaries, dtype and verifier. Raises ``CheckFailed`` or
    ``IntegrityError`` for a shard that is not right; its partial file is left.
    """
    jobs_by_path: dict[Path, Job] = {}

    def orders() -> Iterator[ShardOrder]:
        for job in jobs:
            path = folder / job.name
            jobs_by_path[path] = job
            yield ShardOrder(
                path,
                [CaptureRequest(c.id, c.token_ids) for c in job.conversations],
                [c.loss_mask for c in job.conversations],
            )

    def prove(written: WrittenShard) -> Made:
        job = jobs_by_path.pop(written.order.path)
        tensors = written.read_back()
        require_sound(job.name, tensors["states"])
        digests = {name: shard.digest(tensors[name]) for name in shard.TENSORS}
        return Made(_entry(job, tensors, digests, facts, environment), written.partial)

    with ThreadPoolExecutor(pool.threads, "truetap-read-back") as readers:
        proving: deque[Future[Made]] = deque()
        failed: Exception | None = None
        try:
            for written in session.extract(orders(), pace.progress, pool):
                proving.append(readers.submit(prove, written))
                while proving and (proving[0].done() or len(proving) > 2 * pool.threads):
                    yield proving.popleft().result()
        except Exception as error:  # what is complete is kept first
            failed = error
        while proving:
            try:
                made = proving.popleft().result()
            except Exception as error:
                failed = failed or error
            else:
                yield made
        if failed:
            raise failed


def _entry(
    job: Job,
    tensors: Mapping[str, torch.Tensor],
    digests: Mapping[str, str],
    facts: Mapping[str, Any],
    environment: Environment,
) -> dict[str, Any]:
    binding = dict(environment.binding)
    return {
        "shard": job.name,
        "requests": len(job.conversations),
        "rows": len(tensors["states"]),
        "bytes": sum(t.numel() * t.element_size() for t in tensors.values()),
        "boundaries": facts["boundaries"],
        "last_boundary_normed": False,
        "dtype": facts["dtype"],
        "verifier": {"name": environment.recorded["verifier_name"], **facts["verifier"]},
        "engine": {k: v for k, v in binding.items() if k not in ("verifier", "boundaries")},
        "digests": dict(digests),
        "ids": [c.id for c in job.conversations],
    }


def require_sound(name: str, states: torch.Tensor) -> None:
    """Raise ``CheckFailed`` unless states ``[rows, boundaries, hidden]`` can be right at all.

    Where they are right it takes few calls, each over all of them: after each a thread waits for
    Python's lock, which the thread that drives the engine holds most of the time.
    """
    bits = float_bits.of(states)
    if not bits.finite:
        bad = [
            start + row
            for start, some in _pieces(bits.array)
            for row in np.flatnonzero(bits.not_finite(some)).tolist()
        ]
        raise CheckFailed(f"{name}: {len(bad)} rows are not finite, the first is {bad[0]}")
    slots = range(bits.array.shape[1])
    zero, equal = set(slots), set(combinations(slots, 2))
    for _, some in _pieces(bits.array):
        zero -= {slot for slot in zero if not bits.zero(some[:, slot]).all()}
        equal -= {(a, b) for a, b in equal if not np.array_equal(some[:, a], some[:, b])}
        if not zero and not equal:  # as a rule after the first piece
            return
    for slot in sorted(zero):
        raise CheckFailed(f"{name}: slot {slot} is all zero")
    for one, other in sorted(equal):
        raise CheckFailed(f"{name}: slots {one} and {other} are equal")


def _pieces(bits: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield some rows at a time, with the number of the first."""
    step = max(1, _PIECE_BYTES // bits[:1].nbytes)
    for start in range(0, len(bits), step):
        yield start, bits[start : start + step]

"""How fast a run's extraction would be: a short capture of its own conversations, kept nowhere.

What is timed is what extraction does for a shard: prefill, copy, write, fsync, read back, compare.
Only the audits are left out; they run beside it.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truetap.harness import registry, verifier
from truetap.harness.errors import UsageError
from truetap.harness.extraction import Extracting, Pool, Progress, ShardOrder
from truetap.harness.model import CaptureRequest, EngineSpec
from truetap.pipeline import forecast, prepare
from truetap.pipeline.config import RunConfig
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.shard_making import require_sound

if TYPE_CHECKING:
    from rich.console import Console

SECONDS = 20.0
"""About how long is measured, once the engine is up."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Measured:
    """A probe's outcome."""

    conversations: int
    tokens: int
    seconds: float
    engine_start_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return asdict(self)

    def told(self) -> str:
        """Say it in a line."""
        return (
            f"probe: {self.tokens:,} tokens of {self.conversations:,} conversations in "
            f"{self.seconds:.1f} s; the engine took {self.engine_start_s:.0f} s to start"
        )


def measure(
    config: RunConfig,
    folder: RunFolder,
    spec: EngineSpec,
    console: Console,
    *,
    seconds: float = SECONDS,
) -> Measured:
    """Start the engine, capture for about ``seconds``, stop it, remove what it wrote.

    Shards go to the run's own disk, whose speed counts. The engine's log is kept if it fails.
    """
    with _scratch(folder) as scratch:
        requests = requests_of(config, folder, spec)
        console.print(f"starting vLLM to measure for about {seconds:.0f} s", highlight=False)
        began = time.monotonic()
        session = registry.find(config.capture.adapter).open(spec, scratch=scratch)
        started = time.monotonic() - began
        with closing(session):
            if not isinstance(session, Extracting):
                raise UsageError(
                    f"adapter {config.capture.adapter!r} cannot write shards",
                    remedy="use vllm_native or vllm_rpc for extraction",
                )
            count, tokens, took = paced(
                requests,
                lambda batch: _captured(session, config, scratch, batch),
                seconds=seconds,
                first_tokens=2 * spec.max_num_batched_tokens,
            )
    return Measured(count, tokens, took, started)


@contextmanager
def _scratch(folder: RunFolder) -> Iterator[Path]:
    """Give a folder on the run's disk that is gone afterwards, with the run's if that is new."""
    new = not folder.root.exists()
    path = folder.root / "probe"
    with folder.lock():
        shutil.rmtree(path, ignore_errors=True)  # of a probe that was killed
        path.mkdir()
        try:
            yield path
        except BaseException:
            for left in path.glob("probe.safetensors*"):
                left.unlink()
            raise
        shutil.rmtree(path)
    if new and [p.name for p in folder.root.iterdir()] == [".lock"]:
        shutil.rmtree(folder.root)


def requests_of(config: RunConfig, folder: RunFolder, spec: EngineSpec) -> list[CaptureRequest]:
    """Return the run's conversations in a random order; of unanswered ones stand-ins, at the end.

    A stand-in has the length that its conversation may come to, and random tokens: none of them may
    be found in the prefix cache.
    """
    drawn = random.Random(config.seed)
    lengths = forecast.lengths_of(config, folder, Path(spec.model))
    answered = (
        [CaptureRequest(c.id, c.token_ids) for c in prepare.load(folder)]
        if lengths.answered
        else []
    )
    drawn.shuffle(answered)
    return answered + _stand_ins(lengths.unanswered, spec, drawn)


def _stand_ins(
    lengths: Mapping[str, int], spec: EngineSpec, drawn: random.Random
) -> list[CaptureRequest]:
    vocab_size = verifier.describe(Path(spec.model)).vocab_size
    # As many as a probe could ever take: a corpus of 68,000 would be drawn for minutes.
    names = drawn.sample(sorted(lengths), k=min(len(lengths), 2_000))
    return [
        CaptureRequest(name, tuple(drawn.choices(range(vocab_size), k=lengths[name])))
        for name in names
    ]


def paced(
    requests: Sequence[CaptureRequest],
    capture: Callable[[Sequence[CaptureRequest]], None],
    *,
    seconds: float,
    first_tokens: int,
    clock: Clock = time.monotonic,
) -> tuple[int, int, float]:
    """Capture batches for about ``seconds``; return conversations, tokens and seconds measured.

    The first batch, of ``first_tokens``, warms the engine and shows how much the time that is left
    is enough for; it counts only if there is no other. No conversation is captured twice.
    """
    pilot: tuple[int, int, float] | None = None
    count, tokens, took = 0, 0, 0.0
    at, limit, left = 0, float(first_tokens), seconds
    while at < len(requests) and (pilot is None or left > seconds / 10):
        batch = _batch(requests, at, limit)
        began = clock()
        capture(batch)
        spent = max(clock() - began, 1e-6)
        size = sum(len(request.token_ids) for request in batch)
        at, left, limit = at + len(batch), left - spent, size / spent * (left - spent)
        if pilot is None:
            pilot = (len(batch), size, spent)
        else:
            count, tokens, took = count + len(batch), tokens + size, took + spent
    if pilot is None:
        raise UsageError(
            "there is no conversation to measure with", remedy="run truetap prepare first"
        )
    return (count, tokens, took) if count else pilot


def _batch(
    requests: Sequence[CaptureRequest], start: int, limit: float
) -> Sequence[CaptureRequest]:
    """Return the requests that come next: as many as ``limit`` tokens hold; at least one."""
    end, size = start, 0
    while end < len(requests):
        size += len(requests[end].token_ids)
        if end > start and size > limit:
            break
        end += 1
    return requests[start:end]


def _captured(
    session: Extracting, config: RunConfig, scratch: Path, requests: Sequence[CaptureRequest]
) -> None:
    """Make shards as extraction does, up to their names; remove each when it is read back."""
    settings, most = config.extract, config.extract.requests_per_shard

    def orders() -> Iterator[ShardOrder]:
        for start in range(0, len(requests), most):
            some = requests[start : start + most]
            path = scratch / f"probe.safetensors.{start:06d}"
            yield ShardOrder(path, some, [bytes(len(r.token_ids)) for r in some])

    pool = Pool(settings.staging_mib << 20, settings.writers)
    for written in session.extract(orders(), Progress(), pool):
        require_sound("the probe", written.read_back()["states"])
        written.partial.unlink()

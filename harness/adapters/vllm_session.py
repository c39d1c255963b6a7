"""A vLLM engine that captures: what ``vllm_native`` and ``vllm_rpc`` have in common.

They differ in how rows are seen in the workers. From there on both go one way: the workers'
``Staging`` writes shards, and ``collect`` asks every rank what it saw, so that a shard counts as
written only if all ranks saw all rows of all its requests. What the suite judges (``capture``) is
read from a shard as well, so it is the production path that is certified.
"""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from truetap.harness import envelope, environment, shard, verifier
from truetap.harness.adapters.rpc_schedule import KEY_PREFIX
from truetap.harness.engine import Finished, Prompt, VllmEngine
from truetap.harness.errors import FULL_DISK, CheckFailed, CouldNotRun
from truetap.harness.extraction import Pool, Progress, ShardOrder, Status, WrittenShard
from truetap.harness.model import Capture, CaptureBatch, CaptureRequest, EngineSpec, Environment

SOURCES = (
    __name__,
    "truetap.harness.adapters.vllm_worker",
    "truetap.harness.staging",
    "truetap.harness.shard",
    "truetap.harness.collect",
    "truetap.harness.collect_worker",
)
"""Modules that can change what is captured, whichever way rows are seen."""

_ASK_EVERY_S = 0.5
_NO_STATES = np.zeros((0, 0, 0), dtype=np.float32)


@dataclass
class _Making:
    """A shard that the engine is working on."""

    order: ShardOrder
    partial: Path
    keys: list[str]
    unfinished: int
    generated: dict[str, tuple[int, ...]] = field(default_factory=dict)
    seen: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """What each rank saw of each request, once it has everything."""

    @property
    def announcement(self) -> list[Any]:
        """Return what a rank is told of it beforehand."""
        lengths = [len(request.token_ids) for request in self.order.requests]
        masks = [bytes(mask) for mask in self.order.loss_masks]
        return [str(self.partial), self.keys, lengths, masks]


class VllmSession(ABC):
    """A running vLLM engine that captures every prompt it is given."""

    adapter: ClassVar[str]
    sources: ClassVar[tuple[str, ...]]
    """Modules of the adapter itself that can change what is captured."""
    lost: ClassVar[str]
    """What to do where rows are missing."""

    def __init__(
        self,
        spec: EngineSpec,
        boundaries: tuple[int, ...],
        arguments: dict[str, Any],
        scratch: Path,
    ) -> None:
        self.boundaries = boundaries
        self.log = scratch / "engine.log"
        self._spec = spec
        self._scratch = scratch
        self._hidden = verifier.describe(Path(spec.model)).hidden_size
        self._pool: Pool | None = None
        self._captured = 0
        self._engine = VllmEngine(
            arguments,
            log=self.log,
            startup_deadline_s=spec.startup_deadline_s,
            call_deadline_s=spec.call_deadline_s,
        )
        self._calls = _Overheard(self._engine.llm)

    @abstractmethod
    def _prompt(self, key: str, request: CaptureRequest) -> Prompt:
        """Return what the engine is told of a request, so that its workers know the key."""

    @abstractmethod
    def _refuse_long(self, requests: Sequence[CaptureRequest]) -> None:
        """Raise ``UsageError`` for requests that could not be captured whole."""

    def extract(
        self, orders: Iterable[ShardOrder], progress: Progress, pool: Pool
    ) -> Iterator[WrittenShard]:
        """Make the shards, yielding each when it is on the disk, in the order of completion.

        Orders are taken whenever the engine has room for their requests. Raises ``CheckFailed`` if
        rows are missing, or if ranks saw different things; ``CouldNotRun`` if nothing can be
        written. The session is of no use after that.
        """
        if self._pool != pool:
            shape = [len(self.boundaries), self._hidden]
            self._collect("truetap_stage", shape, self._spec.dtype, pool.size_bytes, pool.threads)
            self._pool = pool
        ready: deque[WrittenShard] = deque()
        try:
            for _ in self._extracting(envelope.new_nonce(), orders, ready, progress, pool):
                while ready:
                    yield ready.popleft()
        except Exception:
            yield from ready  # what is complete is no worse for what came after it
            raise

    def _extracting(
        self,
        call: str,
        orders: Iterable[ShardOrder],
        ready: deque[WrittenShard],
        progress: Progress,
        pool: Pool,
    ) -> Iterator[None]:
        """Fill ``ready``; yield whenever there may be something in it."""
        making: dict[str, _Making] = {}
        asked = time.monotonic()
        for finished in self._engine.generate(
            self._prompts(call, orders, making, ready, progress, pool),
            in_flight=2 * self._spec.max_num_seqs,
        ):
            _take_in(finished, making, progress)
            if time.monotonic() - asked > _ASK_EVERY_S:
                self._ask(making, ready, progress)
                asked = time.monotonic()
            yield
        while making:
            self._ask_until_news(making, ready, progress)
            yield
        yield

    def _prompts(
        self,
        call: str,
        orders: Iterable[ShardOrder],
        making: dict[str, _Making],
        ready: deque[WrittenShard],
        progress: Progress,
        pool: Pool,
    ) -> Iterator[Prompt]:
        """Yield the prompts of one order after the other, announced to the workers before.

        Not while many shards wait for the disk: each holds a file open.
        """
        numbered = enumerate(orders)
        while some := self._some(call, numbered):
            while sum(not one.unfinished for one in making.values()) > 4 * pool.threads:
                self._ask_until_news(making, ready, progress)
            making |= some
            self._ask(making, ready, progress, list(some))
            for one in some.values():
                for key, request in zip(one.keys, one.order.requests, strict=True):
                    yield self._prompt(key, request)

    def _some(self, call: str, numbered: Iterator[tuple[int, ShardOrder]]) -> dict[str, _Making]:
        """Take orders, of as many requests as the engine computes at a time; none at the end.

        Workers hear of them in one call: it waits for the end of a step, and one for each small
        shard would leave the engine without requests.
        """
        some: dict[str, _Making] = {}
        while sum(one.unfinished for one in some.values()) < self._spec.max_num_seqs:
            if (following := next(numbered, None)) is None:
                break
            number, order = following
            self._refuse_long(order.requests)
            keys = [f"{KEY_PREFIX}{call}:{number}:{n}" for n in range(len(order.requests))]
            partial = shard.partial_path(order.path, f"{call}-{number}")
            some[f"{call}:{number}"] = _Making(order, partial, keys, unfinished=len(keys))
        return some

    def _ask_until_news(
        self, making: dict[str, _Making], ready: deque[WrittenShard], progress: Progress
    ) -> None:
        """Wait for the disk: there is nothing else to do."""
        before, moved, since = len(making), -1, time.monotonic()
        while len(making) == before:
            self._ask(making, ready, progress, wait_s=1.0)
            if progress.status.moved != moved:
                moved, since = progress.status.moved, time.monotonic()
            if time.monotonic() - since > self._spec.call_deadline_s:
                raise CouldNotRun(
                    f"nothing has reached the disk for {self._spec.call_deadline_s:.0f} s, and "
                    f"{progress.status.queued} pieces wait to be written",
                    remedy="look at the disk or file system of the run folder",
                )

    def _ask(
        self,
        making: dict[str, _Making],
        ready: deque[WrittenShard],
        progress: Progress,
        announced: Sequence[str] = (),
        wait_s: float = 0.0,
    ) -> None:
        """Announce shards to every rank, and hear what has come of those under way.

        Those that all ranks have seen completely go from ``making`` to ``ready``.
        """
        told = [[name, *making[name].announcement] for name in announced]
        due = {name: one for name, one in making.items() if not one.unfinished}
        reports = self._collect("truetap_shards", told, list(due), wait_s)
        progress.status = Status(**reports[0]["status"])
        for rank, report in reports.items():
            for name, seen in report["written"].items():
                due[name].seen[rank] = seen
        for name in [n for n, one in making.items() if one.seen.keys() == reports.keys()]:
            ready.append(_written(making.pop(name)))
        for rank, report in reports.items():
            self._refuse(rank, report, due)

    def _refuse(self, rank: int, report: Mapping[str, Any], due: Mapping[str, _Making]) -> None:
        """Raise if a rank could not write, lost rows, or has rows that nobody asked for."""
        if failed := report["failed"]:
            raise CouldNotRun(
                f"rank {rank} could not write: {failed['type']}: {failed['message']}",
                remedy="free disk space and run again; finished shards are kept"
                if failed["errno"] in FULL_DISK
                else f"see {self.log}; finished shards are kept",
            )
        if report["others"]:
            raise CheckFailed(
                f"rank {rank} captured rows of {report['others']} requests of other calls"
            )
        if missing := report["missing"]:
            request, rows = next(
                (request, missing[key])
                for one in due.values()
                for key, request in zip(one.keys, one.order.requests, strict=True)
                if key in missing
            )
            raise CheckFailed(
                f"rank {rank} captured {rows} of {len(request.token_ids)} rows of request "
                f"{request.key!r}, and too few of {len(missing) - 1} others",
                remedy=self.lost,
            )

    def capture(self, requests: Sequence[CaptureRequest]) -> CaptureBatch:
        """Capture in one call, through a shard, as production extraction does."""
        self._refuse_long(requests)
        before = self._preemptions()
        if not self.boundaries:
            call = envelope.new_nonce()
            return CaptureBatch(self._without_states(call, requests), call)
        captures: tuple[Capture, ...] = ()
        by_rank: Sequence[str] = ()
        if requests:
            self._captured += 1
            path = self._scratch / f"capture-{self._captured:05d}.safetensors"
            order = ShardOrder(path, requests, [bytes(len(r.token_ids)) for r in requests])
            (written,) = self.extract([order], Progress(), self._pool or Pool())
            captures = _captures(written, self.boundaries)
            written.partial.unlink()
            by_rank = written.by_rank
        else:
            self._ask({}, deque(), Progress())
        return CaptureBatch(
            captures=captures,
            nonce=self._calls.nonce,
            replies=self._calls.replies,
            world_size=self._spec.tensor_parallel_size,
            by_rank=by_rank,
            preemptions=None if before is None else self._engine.preemptions() - before,
        )

    def _without_states(self, call: str, requests: Sequence[CaptureRequest]) -> tuple[Capture, ...]:
        """Generate without capturing: the same engine, to compare with."""
        keys = [f"{call}:{number}" for number in range(len(requests))]
        prompts = map(self._prompt, keys, requests)
        generated = {
            finished.key: tuple(finished.token_ids)
            for finished in self._engine.generate(prompts, in_flight=2 * self._spec.max_num_seqs)
        }
        return tuple(
            Capture(r.key, r.token_ids, (), _NO_STATES, self._spec.dtype, False, generated[key])
            for r, key in zip(requests, keys, strict=True)
        )

    def _preemptions(self) -> int | None:
        return self._engine.preemptions() if self._spec.kv_cache_blocks is not None else None

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float] | None:
        """Ask the capturing engine itself for the prompt's log-probabilities."""
        return self._engine.prompt_logprobs(token_ids)

    def environment(self) -> Environment:
        """Return facts read from every worker; they must agree."""
        by_rank = self._collect("truetap_facts")
        return environment.assemble(
            environment.agreed(list(by_rank.values())),
            boundaries=self.boundaries,
            adapter=self.adapter,
            adapter_digest=environment.source_digest((*self.sources, *SOURCES)),
        )

    def close(self) -> None:
        """Stop the engine and its processes."""
        self._engine.close()

    def _collect(self, method: str, *args: Any) -> dict[int, Any]:
        by_rank = self._engine.collect(self._calls, method, args, self._scratch)
        if len(by_rank) != (ranks := self._spec.tensor_parallel_size):
            raise CouldNotRun(f"{len(by_rank)} ranks answered {method} where {ranks} were due")
        return by_rank


class _Overheard:
    """An ``LLM`` whose last call can be read: the suite judges replies as the engine gave them."""

    def __init__(self, llm: Any) -> None:
        self.llm_engine = llm.llm_engine
        self._llm = llm
        self.nonce = ""
        self.replies: Sequence[Any] = ()

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Sequence[Any]:
        """Call ``method`` on every worker; keep the nonce that was sent and what came back."""
        self.nonce, self.replies = args[0]["nonce"], ()
        self.replies = self._llm.collective_rpc(method, timeout, args, kwargs)
        return self.replies


def greedy(request: CaptureRequest) -> dict[str, Any]:
    """Return what both paths tell vLLM's ``SamplingParams`` of a request."""
    return {
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "detokenize": False,
    }


def _take_in(finished: Finished, making: Mapping[str, _Making], progress: Progress) -> None:
    """Note what the engine finished."""
    name, _, number = finished.key.removeprefix(KEY_PREFIX).rpartition(":")
    one = making[name]
    one.generated[finished.key] = tuple(finished.token_ids)
    one.unfinished -= 1
    progress.finished(finished, one.order.requests[int(number)])


def _written(one: _Making) -> WrittenShard:
    """Return a shard that every rank has seen; raises ``CheckFailed`` if they saw other things."""
    first = one.seen[0]
    for rank, seen in one.seen.items():
        for request, what, of_first in zip(one.order.requests, seen, first, strict=True):
            ids = np.array(request.token_ids, dtype=np.int64).tobytes()
            if what["token_ids"] != hashlib.sha256(ids).hexdigest():
                raise CheckFailed(f"rank {rank} computed other tokens for request {request.key!r}")
            if what["pieces"] and what["pieces"] != of_first["pieces"]:
                raise CheckFailed(
                    f"ranks 0 and {rank} hold other states of request {request.key!r}"
                )
    hashed = all(what["pieces"] for seen in one.seen.values() for what in seen)
    return WrittenShard(
        one.order,
        one.partial,
        pieces=[[tuple(piece) for piece in what["pieces"]] for what in first],
        generated=[one.generated[key] for key in one.keys],
        by_rank=[_digest(seen, hashed) for _, seen in sorted(one.seen.items())],
        recomputed=sum(what["recomputed"] for what in first),
    )


def _digest(seen: Sequence[Mapping[str, Any]], hashed: bool) -> str:
    """Return a digest of what a rank saw of a shard, its states included if all ranks hashed."""
    told = [[what["rows"], what["token_ids"], what["pieces"] if hashed else []] for what in seen]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _captures(written: WrittenShard, boundaries: tuple[int, ...]) -> tuple[Capture, ...]:
    """Read the captures from the file that the worker wrote."""
    import torch

    tensors = written.read_back()
    bounds = tensors["offsets"].tolist()
    return tuple(
        Capture(
            key=request.key,
            token_ids=tuple(tensors["token_ids"][start:end].tolist()),
            boundaries=boundaries,
            states=tensors["states"][start:end].to(torch.float32).numpy(),
            dtype=str(tensors["states"].dtype).removeprefix("torch."),
            generated=ids,
        )
        for request, start, end, ids in zip(
            written.order.requests, bounds, bounds[1:], written.generated, strict=False
        )
    )

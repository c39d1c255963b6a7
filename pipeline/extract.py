"""Captures the conversations, gated, into verified shards."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truetap.harness import registry, shard, verifier
from truetap.harness.adapter import Session
from truetap.harness.adapters.vllm_native import VllmNativeSession
from truetap.harness.errors import CheckFailed, CouldNotRun, IntegrityError, UsageError
from truetap.harness.model import CaptureRequest, EngineSpec, Environment
from truetap.harness.progress import Bar, bar
from truetap.harness.pytest_plugin import suite_digest
from truetap.pipeline import gate, plan, prepare
from truetap.pipeline.config import RunConfig
from truetap.pipeline.prepare import Conversation
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.store import Store
from truetap.pipeline.verifiers import facts_of

if TYPE_CHECKING:
    import torch
    from rich.console import Console


@dataclass(frozen=True)
class _Job:
    """One shard to be made."""

    name: str
    conversations: Sequence[Conversation]


def extract(config: RunConfig, folder: RunFolder, spec: EngineSpec, console: Console) -> None:
    """Capture every conversation that has no verified shard yet.

    The gate is asked with the facts of the workers that will do it, before the first prompt.
    """
    facts = facts_of(config, Path(spec.model))
    folder.claim("capture", facts | config.extract.model_dump())
    conversations = prepare.load(folder)
    store = Store(folder.shards)
    store.folder.mkdir(parents=True, exist_ok=True)
    jobs = _jobs(conversations, config.extract.requests_per_shard)
    for repaired in store.repair():
        console.print(repaired, style="yellow", highlight=False)
    todo = _unfinished(store, jobs, console)
    done = len(conversations) - sum(len(job.conversations) for job in todo)
    if not todo:
        console.print("every shard is there and verified", highlight=False)
        return
    _require_space(store, todo, spec)
    console.print(f"to be captured: {plan.told(*_sizes(todo, spec))}", highlight=False)
    console.print("starting vLLM to capture", highlight=False)
    session = _opened(config.capture.adapter, spec, folder.logs / "extract")
    with closing(session):
        if not isinstance(session, VllmNativeSession):
            raise UsageError(
                f"adapter {config.capture.adapter!r} cannot write shards",
                remedy="use vllm_native for extraction",
            )
        environment = session.environment()
        decision = ask_gate(config, folder, binding=environment.binding)
        require_allowed(decision, console)
        with bar(console, "captured", len(conversations), done=done) as progress:
            counter = _Counter(progress)
            for job in todo:
                _make(store, session, job, counter, facts, environment, decision.certificate)


def ask_gate(
    config: RunConfig, folder: RunFolder, *, binding: Mapping[str, Any] | None
) -> gate.Decision:
    """Ask the gate about this run, now."""
    return gate.decide(
        certificate_path=folder.certificate,
        report_path=folder.report,
        profile=config.gate.profile,
        suite_digest=suite_digest(),
        now=datetime.now(UTC),
        binding=binding,
    )


def require_allowed(decision: gate.Decision, console: Console) -> None:
    """Show the gate's decision; raise if it denies."""
    if decision.allowed:
        where = "by these very workers" if decision.workers_checked else "so far, from the files"
        console.print(f"gate: allowed {where}", style="green", highlight=False)
        return
    console.print("gate: denied", style="bold red", highlight=False)
    for reason in decision.reasons:
        console.print(f"  {reason.code}: {reason.text}", highlight=False, markup=False)
        console.print(f"    remedy: {reason.remedy}", style="dim", highlight=False, markup=False)
    codes = list(dict.fromkeys(reason.code for reason in decision.reasons))
    raise CheckFailed(f"the gate denies this run: {', '.join(codes)}; nothing was extracted")


class _Counter:
    """Turns finished requests into progress with tokens/s."""

    def __init__(self, progress: Bar) -> None:
        self._bar, self._started, self._tokens = progress, time.monotonic(), 0

    def count(self, tokens: int) -> None:
        self._tokens += tokens
        rate = self._tokens / max(time.monotonic() - self._started, 1e-6)
        self._bar.advance(note=f"{rate:,.0f} tokens/s")


def _make(
    store: Store,
    session: VllmNativeSession,
    job: _Job,
    counter: _Counter,
    facts: Mapping[str, Any],
    environment: Environment,
    certificate: str | None,
) -> None:
    """Capture one shard, check its values, publish it."""
    requests = [CaptureRequest(c.id, c.token_ids) for c in job.conversations]
    lengths = {request.key: len(request.token_ids) for request in requests}
    path = store.path(job.name)
    for key in session.run(path, requests, [c.loss_mask for c in job.conversations]):
        counter.count(lengths[key])
    digests = session.flushed(requests)
    tensors = shard.read(shard.partial_path(path))
    if wrong := shard.mismatches(tensors, digests):
        raise IntegrityError(
            f"{job.name}: {', '.join(wrong)} read back differently from what the worker wrote",
            remedy="check the disk, then run truetap extract again",
        )
    require_sound(job.name, tensors, requests)
    states = tensors["states"]
    binding = dict(environment.binding)
    store.record(
        {
            "shard": job.name,
            "requests": len(requests),
            "rows": states.shape[0],
            "bytes": sum(t.numel() * t.element_size() for t in tensors.values()),
            "boundaries": facts["boundaries"],
            "last_boundary_normed": False,
            "dtype": facts["dtype"],
            "verifier": {"name": environment.recorded["verifier_name"], **facts["verifier"]},
            "engine": {k: v for k, v in binding.items() if k not in ("verifier", "boundaries")},
            "certificate": certificate,
            "digests": digests,
            "ids": [c.id for c in job.conversations],
        }
    )


def require_sound(
    name: str, tensors: Mapping[str, torch.Tensor], requests: Sequence[CaptureRequest]
) -> None:
    """Raise unless rows, ids and values of a shard are what every shard's must be."""
    import torch

    expected = [token for request in requests for token in request.token_ids]
    if tensors["token_ids"].tolist() != expected:
        raise CheckFailed(f"{name}: token ids differ from those that were sent")
    states = tensors["states"]
    if states.shape[0] != len(expected):
        raise CheckFailed(f"{name}: {states.shape[0]} rows for {len(expected)} tokens")
    if len(tensors["loss_mask"]) != len(expected):
        raise CheckFailed(
            f"{name}: a loss mask of {len(tensors['loss_mask'])} for {len(expected)} tokens"
        )
    finite = torch.isfinite(states).flatten(1).all(1)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise CheckFailed(f"{name}: {int((~finite).sum())} rows are not finite, the first is {row}")
    for slot in range(states.shape[1]):
        if not bool(states[:, slot].any()):
            raise CheckFailed(f"{name}: slot {slot} is all zero")
        for other in range(slot):
            if torch.equal(states[:, slot], states[:, other]):
                raise CheckFailed(f"{name}: slots {other} and {slot} are equal")


def _jobs(conversations: Sequence[Conversation], size: int) -> list[_Job]:
    return [
        _Job(f"shard-{index:05d}.safetensors", conversations[start : start + size])
        for index, start in enumerate(range(0, len(conversations), size))
    ]


def _unfinished(store: Store, jobs: Sequence[_Job], console: Console) -> list[_Job]:
    """Return the shards that are missing, corrupt, or hold other conversations."""
    entries, todo = store.entries(), []
    for job in jobs:
        token_ids = (token for c in job.conversations for token in c.token_ids)
        loss_mask = (flag for c in job.conversations for flag in c.loss_mask)
        ids = [c.id for c in job.conversations]
        try:
            done = store.holds(entries.get(job.name), ids, token_ids, loss_mask)
        except IntegrityError as bad:
            console.print(f"{bad}; it will be redone", style="yellow", highlight=False)
            done = False
        if not done:
            todo.append(job)
    return todo


def _require_space(store: Store, todo: Sequence[_Job], spec: EngineSpec) -> None:
    """Refuse before the first prompt if the shards cannot fit on the disk."""
    need = plan.capture_bytes(*_sizes(todo, spec))
    plan.require_space(need, shutil.disk_usage(store.folder).free, store.folder)


def _sizes(todo: Sequence[_Job], spec: EngineSpec) -> tuple[int, int, int, str]:
    """Return tokens, states, width and dtype of what is to be captured."""
    tokens = sum(len(c.token_ids) for job in todo for c in job.conversations)
    width = verifier.describe(Path(spec.model)).hidden_size
    return tokens, len(spec.boundaries), width, spec.dtype


def _opened(adapter: str, spec: EngineSpec, scratch: Path) -> Session:
    """Start the engine; if it refuses for want of cache, say whether it prices that rightly."""
    try:
        return registry.find(adapter).open(spec, scratch=scratch)
    except CouldNotRun as error:
        facts = verifier.describe(Path(spec.model))
        states = len(spec.boundaries)
        most = plan.most_cache_bytes(
            spec.max_model_len, states, facts.num_blocks, facts.hidden_size, spec.dtype
        )
        if wrong := plan.overpriced(str(error), most):
            raise CouldNotRun(
                f"{error} ({wrong})", remedy="lower capture.max_model_len, or use another release"
            ) from error
        raise

"""Captures the conversations, gated, into verified shards."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truetap.harness import registry, shard, verifier
from truetap.harness.adapter import Session
from truetap.harness.adapters.vllm_native import VllmNativeSession
from truetap.harness.auditor_process import Auditor, Checker
from truetap.harness.errors import CheckFailed, CouldNotRun, IntegrityError, UsageError
from truetap.harness.model import CaptureRequest, EngineSpec, Environment
from truetap.harness.progress import Bar, bar
from truetap.harness.pytest_plugin import suite_digest
from truetap.pipeline import gate, plan, policy, prepare, provenance, uncertified
from truetap.pipeline.config import RunConfig
from truetap.pipeline.prepare import Conversation
from truetap.pipeline.run_audit import RunAudit
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


def extract(
    config: RunConfig,
    folder: RunFolder,
    spec: EngineSpec,
    console: Console,
    *,
    allow_uncertified: str | None = None,
    checker: Callable[[], Checker] | None = None,
) -> None:
    """Capture every conversation that has no verified shard yet.

    The gate is asked with the facts of the workers that will do it, before the first prompt and
    again before each shard. If it denies, ``allow_uncertified``, a reason, lets the run go on.
    ``checker`` captures samples again meanwhile; by default an ``Auditor``.
    """
    facts = facts_of(config, Path(spec.model))
    folder.claim("capture", facts | config.extract.model_dump())
    conversations = prepare.load(folder)
    store = Store(folder.shards)
    store.folder.mkdir(parents=True, exist_ok=True)
    jobs = _jobs(conversations, config.extract.requests_per_shard)
    for repaired in store.repair():
        console.print(repaired, style="yellow", highlight=False)
    audit = RunAudit(
        config.audit,
        config.seed,
        store,
        conversations,
        console,
        checker or partial(_auditor, config, folder, spec),
    )
    audit.recover()
    lacking = _without_certificate(store, jobs, console, allowed=allow_uncertified is not None)
    names = lacking | {job.name for job in _unfinished(store, jobs, console)}
    todo = [job for job in jobs if job.name in names]
    with closing(audit):
        audit.begin([job.name for job in todo])
        if todo:
            _require_space(store, todo, spec)
            _capture(
                *(config, folder, spec, console, store, todo, audit, facts, len(conversations)),
                allow_uncertified,
            )
        audit.settle()
    if todo and config.audit.enabled:
        console.print(audit.told(), highlight=False)
    elif not todo:
        console.print("every shard is there and verified", highlight=False)


def _auditor(config: RunConfig, folder: RunFolder, spec: EngineSpec) -> Auditor:
    return Auditor(
        Path(spec.model),
        spec.dtype,
        log=folder.logs / "audit.log",
        deadline_s=config.audit.deadline_s,
    )


def _capture(
    config: RunConfig,
    folder: RunFolder,
    spec: EngineSpec,
    console: Console,
    store: Store,
    todo: Sequence[_Job],
    audit: RunAudit,
    facts: Mapping[str, Any],
    total: int,
    allow_uncertified: str | None,
) -> None:
    """Start the engine, ask the gate, make the shards."""
    done = total - sum(len(job.conversations) for job in todo)
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
        keeper = _Gatekeeper(config, folder, environment.binding, allow_uncertified, console)
        keeper.standing()
        audit.settle()  # of what an earlier run left, before anything is added to it
        with bar(console, "captured", total, done=done) as progress:
            counter = _Counter(progress)
            for job in todo:
                entry = _make(
                    *(store, session, job, counter, facts, environment, keeper.standing()),
                    audit.promise,
                )
                if not audit.published(entry, last=job is todo[-1]):
                    return  # what comes now is the auditor's: ``settle``


def ask_gate(
    config: RunConfig, folder: RunFolder, *, binding: Mapping[str, Any] | None
) -> gate.Decision:
    """Ask the gate about this run, now."""
    demanded = policy.load(config.gate.policy)
    return gate.decide(
        config.gate.certificates or (folder.certificate,),
        demanded.demands(config.gate.profile, suite_digest(), datetime.now(UTC), binding),
        report_path=None if config.gate.certificates else folder.report,
    )


def require_allowed(decision: gate.Decision, console: Console) -> None:
    """Show the gate's decision; raise if it denies."""
    if decision.allowed:
        where = "by these very workers" if decision.workers_checked else "so far, from the files"
        where += "" if decision.signer else " (unsigned: development only)"
        console.print(f"gate: allowed {where}", style="green", highlight=False)
        return
    nearest = f"; of {decision.judged} certificates {decision.path} comes nearest"
    told = f"gate: denied{nearest if decision.judged > 1 else ''}"
    console.print(told, style="bold red", highlight=False, markup=False)
    for reason in decision.reasons:
        console.print(f"  {reason.code}: {reason.text}", highlight=False, markup=False)
        console.print(f"    remedy: {reason.remedy}", style="dim", highlight=False, markup=False)
    codes = list(dict.fromkeys(reason.code for reason in decision.reasons))
    raise CheckFailed(f"the gate denies this run: {', '.join(codes)}; nothing was extracted")


def go_on_uncertified(decision: gate.Decision, console: Console, reason: str) -> None:
    """Say loudly that a denied run goes on, or that the flag was not needed."""
    if decision.allowed:
        require_allowed(decision, console)
        text = "--allow-uncertified is not needed: nothing is recorded as uncertified"
        console.print(text, style="yellow", highlight=False)
        return
    uncertified.banner(console, reason, [(why.code, why.text) for why in decision.reasons])


class _Gatekeeper:
    """Asks the gate before every shard: a certificate may expire, or be replaced, meanwhile."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        binding: Mapping[str, Any],
        reason: str | None,
        console: Console,
    ) -> None:
        self._config, self._folder, self._binding = config, folder, binding
        self._reason, self._console = reason, console
        self._told: gate.Decision | None = None

    def standing(self) -> dict[str, Any]:
        """Return what the next shard's line says of its certificate; raise if it may not be made.

        The time comes before the question, so a shard is never older than its permission.
        """
        made = datetime.now(UTC)
        decision = ask_gate(self._config, self._folder, binding=self._binding)
        first, news = self._told is None, decision != self._told
        self._told = decision
        if self._reason is None:
            if first:
                require_allowed(decision, self._console)
            _require_still_allowed(decision)
        elif news:
            go_on_uncertified(decision, self._console, self._reason)
        if decision.allowed and decision.certificate:
            judged = getattr(decision, "path", None) or self._folder.certificate
            provenance.keep(self._folder.shards, judged, decision.certificate)
            return {"made": made.isoformat(), "certificate": decision.certificate}
        assert self._reason is not None
        if news:
            uncertified.record(self._folder, self._reason, decision, made)
        said = uncertified.entry_of(self._reason, decision)
        return {"made": made.isoformat(), "uncertified": said}


def _require_still_allowed(decision: gate.Decision) -> None:
    """Raise if the gate denies the shards that are left, with what it says of them."""
    if not decision.allowed:
        told = "; ".join(f"{why.code}: {why.text}" for why in decision.reasons)
        raise CheckFailed(
            f"the gate denies the rest of this run: {told}; the shards made so far are kept",
            remedy=decision.reasons[0].remedy,
        )


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
    standing: Mapping[str, Any],
    promise: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Capture one shard, check its values, publish it; return its line."""
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
    return store.record(
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
            **standing,
            "digests": digests,
            "ids": [c.id for c in job.conversations],
            **(promise or {}),
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


def _without_certificate(
    store: Store, jobs: Sequence[_Job], console: Console, *, allowed: bool
) -> set[str]:
    """Return the shards whose chain is broken, and those made uncertified unless that is allowed.

    They are captured again: nothing that comes later can certify what was captured before it.
    """
    chain, entries = provenance.Chain(store.folder), store.entries()
    reasons: dict[str, list[str]] = {}
    for name in [job.name for job in jobs if job.name in entries]:
        entry = entries[name]
        if faults := chain.faults(entry):
            reasons.setdefault(faults[0].text, []).append(name)
        elif entry.get("uncertified") and not allowed:
            reasons.setdefault("captured uncertified", []).append(name)
    for why, names in reasons.items():
        text = f"{provenance.listed(names)}: {why}; to be captured again"
        console.print(text, style="yellow", highlight=False, markup=False)
    return {name for names in reasons.values() for name in names}


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

"""Captures the conversations, gated, into verified shards."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truetap.harness import registry, verifier
from truetap.harness.adapter import Session
from truetap.harness.auditor_process import Auditor, Checker
from truetap.harness.errors import CouldNotRun, IntegrityError, UsageError
from truetap.harness.extraction import Extracting, Pool
from truetap.harness.model import EngineSpec
from truetap.harness.progress import Bar, bar
from truetap.pipeline import forecast, plan, policy, prepare, provenance
from truetap.pipeline.config import Gate, RunConfig
from truetap.pipeline.gatekeeper import Gatekeeper
from truetap.pipeline.prepare import Conversation
from truetap.pipeline.run_audit import RunAudit
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.shard_making import Job, Pace, make_shards
from truetap.pipeline.store import Store
from truetap.pipeline.verifiers import facts_of

if TYPE_CHECKING:
    from rich.console import Console


def extract(
    config: RunConfig,
    folder: RunFolder,
    spec: EngineSpec,
    console: Console,
    *,
    allow_uncertified: str | None = None,
    checker: Callable[[], Checker] | None = None,
    cluster: Cluster | None = None,
) -> None:
    """Capture every conversation that has no verified shard yet.

    The gate is asked with the facts of the workers that will do it, before the first prompt and
    again before each shard is recorded. If it denies, ``allow_uncertified``, a reason, lets the run
    go on. ``checker`` captures samples again meanwhile; by default an ``Auditor``. With
    ``cluster`` the engines run on Ray, several of them; without, one runs here.
    """
    facts = facts_of(config, Path(spec.model))
    folder.claim("capture", facts | config.extract.facts())
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
    allowed = allow_uncertified is not None
    lacking = _without_certificate(config.gate, store, jobs, console, allowed=allowed)
    names = lacking | {job.name for job in _unfinished(store, jobs, console)}
    todo = [job for job in jobs if job.name in names]
    with closing(audit):
        audit.begin([job.name for job in todo])
        if todo:
            _require_space(store, todo, spec)
            extraction = Extraction(
                config, folder, spec, console, store, audit, facts, allow_uncertified
            )
            if cluster is None:
                extraction.capture(todo, len(conversations))
            else:
                from truetap.pipeline import scale

                scale.capture(extraction, todo, len(conversations), cluster)
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


@dataclass(frozen=True)
class Cluster:
    """Where to start several engines."""

    address: str
    """``local`` starts Ray on this machine; else as in ``ray.init``."""
    engines: int | None = None
    """How many; None: as many as there is room for."""

    @property
    def options(self) -> list[str]:
        """Return how ``truetap extract`` is told."""
        many = ["--engines", str(self.engines)] if self.engines else []
        return ["--ray", self.address, *many]


@dataclass(frozen=True)
class Extraction:
    """What every shard of one extraction is made with."""

    config: RunConfig
    folder: RunFolder
    spec: EngineSpec
    console: Console
    store: Store
    audit: RunAudit
    facts: Mapping[str, Any]
    allow_uncertified: str | None

    def capture(self, todo: Sequence[Job], total: int) -> None:
        """Start the engine, ask the gate, make the shards."""
        console, adapter = self.console, self.config.capture.adapter
        done = total - sum(len(job.conversations) for job in todo)
        console.print(f"to be captured: {plan.told(*sizes(todo, self.spec))}", highlight=False)
        console.print("starting vLLM to capture", highlight=False)
        opened_session = opened(adapter, self.spec, self.folder.logs / "extract")
        with closing(opened_session):
            session = extracting(opened_session, adapter)
            environment = session.environment()
            keeper = Gatekeeper(
                self.config, self.folder, environment.binding, self.allow_uncertified, console
            )
            keeper.standing()
            self.audit.settle()  # of what an earlier run left, before anything is added to it
            with bar(console, "captured", total, done=done) as progress:
                pace = _Shown(progress)
                try:
                    made = make_shards(
                        session, todo, self.store.folder, pace, self.pool, self.facts, environment
                    )
                    for count, one in enumerate(made, start=1):
                        entry = one.entry | keeper.standing() | self.audit.promise
                        self.store.record(entry, one.partial)
                        if not self.audit.published(entry, last=count == len(todo)):
                            return  # what comes now is the auditor's: ``settle``
                finally:
                    forecast.record_speed(self.folder, self.config, pace.tokens, pace.seconds)

    @property
    def pool(self) -> Pool:
        """Memory and threads of each engine's first worker."""
        settings = self.config.extract
        return Pool(settings.staging_mib << 20, settings.writers)


def extracting(session: Session, adapter: str) -> Extracting:
    """Return a session that can write shards; ``UsageError`` if it cannot."""
    if not isinstance(session, Extracting):
        raise UsageError(
            f"adapter {adapter!r} cannot write shards",
            remedy="use vllm_native, or vllm_rpc, for extraction",
        )
    return session


class _Shown(Pace):
    """Turns finished requests into progress with tokens/s and the state of the pool."""

    def __init__(self, progress: Bar) -> None:
        super().__init__()
        self._bar = progress

    def advanced(self) -> None:
        """Show one more request."""
        self._bar.advance(note=self.note())


def _jobs(conversations: Sequence[Conversation], size: int) -> list[Job]:
    return [
        Job(f"shard-{index:05d}.safetensors", conversations[start : start + size])
        for index, start in enumerate(range(0, len(conversations), size))
    ]


def _unfinished(store: Store, jobs: Sequence[Job], console: Console) -> list[Job]:
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
    gate: Gate, store: Store, jobs: Sequence[Job], console: Console, *, allowed: bool
) -> set[str]:
    """Return the shards whose chain is broken, and those made uncertified unless that is allowed.

    They are captured again: nothing that comes later can certify what was captured before it.
    """
    chain = provenance.Chain(store.folder, policy.demands_of(gate))
    entries = store.entries()
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


def _require_space(store: Store, todo: Sequence[Job], spec: EngineSpec) -> None:
    """Refuse before the first prompt if the shards cannot fit on the disk."""
    need = plan.capture_bytes(*sizes(todo, spec))
    plan.require_space(need, shutil.disk_usage(store.folder).free, store.folder)


def sizes(todo: Sequence[Job], spec: EngineSpec) -> tuple[int, int, int, str]:
    """Return tokens, states, width and dtype of what is to be captured."""
    tokens = sum(len(c.token_ids) for job in todo for c in job.conversations)
    width = verifier.describe(Path(spec.model)).hidden_size
    return tokens, len(spec.boundaries), width, spec.dtype


def opened(adapter: str, spec: EngineSpec, scratch: Path) -> Session:
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

"""Reads what a run has left in its folder: records of the JSON files that its stages write.

A file that is absent means a stage that was not reached; a file that cannot be read is an
``IntegrityError``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from truetap.harness import certificate, report
from truetap.harness.certificate import Certificate
from truetap.harness.errors import IntegrityError, UsageError
from truetap.harness.report import ClauseResult, Report
from truetap.pipeline import uncertified
from truetap.pipeline.audit_log import AuditLog
from truetap.pipeline.run_folder import RunFolder, read_json, read_lines
from truetap.pipeline.store import Store


class _Record(BaseModel):
    """A recorded fact. Fields that nobody here asks for are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class AnsweredQuestion(_Record):
    """One line of ``conversations.jsonl``."""

    split: str
    question: str
    answer: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    masked: tuple[tuple[int, int], ...] | None = None

    @property
    def loss_tokens(self) -> int:
        """How many tokens are under the loss mask."""
        if self.masked is None:
            return len(self.token_ids) - self.prompt_tokens
        return sum(end - first for first, end in self.masked)


class VerifierName(_Record):
    """Which verifier a shard's states are from."""

    name: str
    weights_sha256: str


class Overruled(_Record):
    """What a shard's line says if the gate denied it: the reason given, and the gate's codes."""

    reason: str
    denied: tuple[str, ...]


class Shard(_Record):
    """One line of ``shards/manifest.jsonl``."""

    shard: str
    requests: int
    rows: int
    bytes: int
    boundaries: tuple[int, ...]
    dtype: str
    verifier: VerifierName
    certificate: str | None = None
    uncertified: Overruled | None = None


class OverruledHead(_Record):
    """What a head's record says of shards that had no certificate."""

    shards: tuple[str, ...]
    reasons: tuple[str, ...]
    denied: tuple[str, ...]
    trained_because: tuple[str, ...] = ()


class Head(_Record):
    """``head/truetap.json``."""

    certificates: tuple[str, ...] = ()
    uncertified: OverruledHead | None = None


class Denial(_Record):
    """One line of ``uncertified.jsonl``: what the gate said when it was overruled."""

    class Why(_Record):
        """One of its reasons."""

        code: str
        text: str

    reason: str
    reasons: tuple[Why, ...]


class Audited(_Record):
    """One line of ``shards/audits.jsonl``."""

    shard: str
    verdict: Literal["pass", "fail"]
    saw: str
    seconds: float


class Metric(_Record):
    """One line of ``train/metrics.jsonl``."""

    kind: Literal["step", "validation"]
    step: int
    epoch: int
    loss: float
    accuracy: tuple[float, ...]
    """Share of tokens predicted right, by draft step."""
    tokens_per_s: float | None = None


class Measurement(_Record):
    """One head at one temperature, served over all held-out questions."""

    head: str
    temperature: float
    acceptance_length: float
    acceptance_length_interval: tuple[float, float] | None = None
    """None without a head: nothing was estimated."""
    per_position: tuple[float, ...] = ()
    engine_steps_per_100_tokens: float
    output_tokens: int
    tokens_per_s: float
    invalid: str = ""
    """Why the acceptance length is no measurement; empty if it is one."""


class PartedAnswers(_Record):
    """Greedy answers with a head that differ from the verifier's own."""

    answers: int
    largest_gap: float | None
    """Between the two tokens where one parts, in nats; None if one answer just ends there."""


class Evaluation(_Record):
    """``evaluate/results.json``."""

    num_speculative_tokens: int
    heldout_prompts: int
    max_tokens: int
    greedy_identical: dict[str, tuple[int, int]]
    greedy_parted: dict[str, PartedAnswers] = {}
    runs: tuple[Measurement, ...]

    def first(self, head: str) -> Measurement | None:
        """Return a head's measurement at the first temperature, which is 0 by default."""
        return next((run for run in self.runs if run.head == head), None)


@dataclass(frozen=True)
class RunSummary:
    """Everything that a run folder says. ``None`` or empty: that stage was not reached."""

    name: str
    conformance: Report | None
    certificate: Certificate | None
    answered: tuple[AnsweredQuestion, ...]
    heldout: int
    shards: tuple[Shard, ...]
    audits: tuple[Audited, ...]
    proven: int
    """Shards that an audit which passed answers for."""
    metrics: tuple[Metric, ...]
    evaluation: Evaluation | None
    head: Head | None = None
    denials: tuple[Denial, ...] = ()

    @property
    def uncertified_shards(self) -> tuple[Shard, ...]:
        """The shards that were captured although the gate denied."""
        return tuple(shard for shard in self.shards if shard.uncertified)

    @property
    def uncertified(self) -> str:
        """Say what of this run no certificate stands behind, and why it was made; '' if nothing."""
        told = []
        if mine := self.uncertified_shards:
            given = {shard.uncertified.reason for shard in mine if shard.uncertified}
            told.append(
                f"{len(mine)} of {len(self.shards)} shards were captured although the gate denied "
                f"(reason given: {'; '.join(sorted(given))})"
            )
        if self.head and (made := self.head.uncertified):
            given = {*made.reasons, *made.trained_because}
            told.append(
                f"the head was trained on {len(made.shards)} such shards "
                f"(reason given: {'; '.join(sorted(given))})"
            )
        return "; ".join(told)

    @property
    def stages(self) -> dict[str, bool]:
        """Every stage, and whether it left anything."""
        return {
            "conform": self.conformance is not None,
            "certify": self.certificate is not None,
            "prepare": bool(self.answered),
            "extract": bool(self.shards),
            "train": bool(self.metrics),
            "evaluate": self.evaluation is not None,
        }

    @property
    def failed(self) -> list[ClauseResult]:
        """The clauses that failed or ended in an error."""
        clauses = self.conformance.clauses if self.conformance else []
        return [clause for clause in clauses if clause.outcome in ("fail", "error")]

    @property
    def audited(self) -> str:
        """The audits in words."""
        if not self.audits:
            return "nothing was captured again during the run"
        failed = sum(audit.verdict == "fail" for audit in self.audits)
        return (
            f"{len(self.audits)} audits, {failed or 'none'} failed; those that passed answer for "
            f"{self.proven} of {len(self.shards)} shards; "
            f"{sum(audit.seconds for audit in self.audits):.1f} s beside the engine"
        )

    @property
    def splits(self) -> str:
        """The questions in words: "280 train, 20 validation, 40 held out"."""
        counts = Counter(row.split for row in self.answered)
        train, validation = counts["train"], counts["validation"]
        return f"{train:,} train, {validation:,} validation, {self.heldout:,} held out"

    @property
    def tokens(self) -> int:
        """Tokens of all conversations."""
        return sum(len(row.token_ids) for row in self.answered)

    @property
    def loss_tokens(self) -> int:
        """Tokens under the loss mask: those of the answers."""
        return sum(row.loss_tokens for row in self.answered)

    @property
    def rows(self) -> int:
        """Captured rows in all shards."""
        return sum(shard.rows for shard in self.shards)

    def last(self, kind: Literal["step", "validation"]) -> Metric | None:
        """Return the last measurement of its kind in training."""
        return next((row for row in reversed(self.metrics) if row.kind == kind), None)


def load(run_dir: Path) -> RunSummary:
    """Read whatever the run has left so far."""
    if not run_dir.is_dir():
        raise UsageError(f"there is no run folder {run_dir}", remedy="name the folder of a run")
    folder = RunFolder(run_dir)
    results = folder.evaluate / "results.json"
    metrics = folder.train / "metrics.jsonl"
    card = folder.head / "truetap.json"
    store = Store(folder.shards)
    log = AuditLog(store)
    entries = store.entries()
    standing = log.standing(list(entries.values()))
    return RunSummary(
        name=run_dir.resolve().name,
        conformance=report.load(folder.report) if folder.report.exists() else None,
        certificate=certificate.load(folder.certificate) if folder.certificate.exists() else None,
        answered=_parsed(AnsweredQuestion, read_lines(folder.conversations), folder.conversations),
        heldout=len(read_lines(folder.heldout)),
        shards=_parsed(Shard, entries.values(), store.manifest),
        audits=_parsed(
            Audited, (line for line in log.lines() if line["verdict"] != "set aside"), log.path
        ),
        proven=sum(how == "proven" for how in standing.values()),
        metrics=_parsed(Metric, read_lines(metrics), metrics),
        evaluation=(
            _parsed(Evaluation, [read_json(results)], results)[0] if results.exists() else None
        ),
        head=_parsed(Head, [read_json(card)], card)[0] if card.exists() else None,
        denials=_parsed(Denial, uncertified.rows(folder), folder.uncertified),
    )


RecordT = TypeVar("RecordT", bound=_Record)


def _parsed(kind: type[RecordT], rows: Iterable[Any], path: Path) -> tuple[RecordT, ...]:
    try:
        return tuple(kind.model_validate(row) for row in rows)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise IntegrityError(
            f"{path} is corrupt: {where}: {first['msg']}",
            remedy="delete it and run the stage again",
        ) from error

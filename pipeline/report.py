"""What a run did, as a terminal summary and as one self-contained HTML page.

Both are made only from the JSON files in the run directory, so they show exactly what was recorded.
A file that is absent means a stage that was not reached; a file that cannot be read is an
``IntegrityError``.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from truetap.harness.errors import CouldNotRun, IntegrityError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from markupsafe import Markup
    from rich.console import Console

PAGE = "report.html"
SAMPLES = 3
SAMPLE_CHARACTERS = 1200
Tone = Literal["ok", "bad", "unsure"]


class _Record(BaseModel):
    """A recorded fact. Fields that the report does not show are allowed and ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Clause(_Record):
    """One clause of the conformance report."""

    id: str
    title: str = ""
    level: str = "MUST"
    outcome: str
    cases: int = 0
    saw: str = ""

    @property
    def tone(self) -> Tone:
        """How the outcome is coloured."""
        tones: dict[str, Tone] = {"pass": "ok", "fail": "bad", "error": "bad"}
        return tones.get(self.outcome, "unsure")


class Facts(_Record):
    """The environment of a conformance run."""

    binding: dict[str, Any] = Field(default_factory=dict)
    recorded: dict[str, Any] = Field(default_factory=dict)


class Conformance(_Record):
    """``conform/report.json``."""

    verdict: str
    profile: str = ""
    evidence: str = ""
    adapter: str = ""
    spec: dict[str, Any] = Field(default_factory=dict)
    environment: Facts = Facts()
    clauses: tuple[Clause, ...] = ()
    started: str = ""
    seconds: float | None = None

    @property
    def failed(self) -> tuple[Clause, ...]:
        """The clauses that failed or ended in an error."""
        return tuple(c for c in self.clauses if c.tone == "bad")

    @property
    def tally(self) -> str:
        """The outcomes in words: "12 clauses: 11 pass, 1 fail"."""
        counts = Counter(c.outcome.replace("_", " ") for c in self.clauses)
        told = ", ".join(f"{n} {outcome}" for outcome, n in counts.items())
        return f"{len(self.clauses)} clauses" + (f": {told}" if told else "")


class Certificate(_Record):
    """The predicate of ``certificate.json``."""

    result: str
    profile: str = ""
    issued: str = Field("", alias="timeCreated")
    expires: str = Field("", alias="notAfter")
    binding_digest: str | None = Field(None, alias="bindingDigest")


class _Statement(_Record):
    predicate: Certificate


class _Conversation(_Record):
    split: str
    question: str
    answer: str
    token_ids: list[int]
    prompt_tokens: int


class _HeldOut(_Record):
    id: str | int


class _Verifier(_Record):
    name: str = ""
    weights_sha256: str = ""


class _Shard(_Record):
    shard: str
    requests: int
    rows: int
    bytes: int = 0
    boundaries: tuple[int, ...] = ()
    dtype: str = ""
    verifier: _Verifier = _Verifier()


class Metric(_Record):
    """One line of ``train/metrics.jsonl``."""

    kind: Literal["step", "validation"]
    step: int
    epoch: int = 0
    loss: float | None = None
    accuracy: tuple[float, ...] = ()
    tokens_per_s: float | None = None


class Run(_Record):
    """One measured way of decoding the held-out prompts."""

    head: str
    temperature: float
    acceptance_length: float
    acceptance_length_interval: tuple[float, float] | None = None
    per_position: tuple[float, ...] = ()
    drafts: int = 0
    accepted: int = 0
    output_tokens: int = 0
    seconds: float | None = None
    engine_steps_per_100_tokens: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens per second, over all prompts."""
        return self.output_tokens / self.seconds if self.seconds else None


class Evaluation(_Record):
    """``evaluate/results.json``."""

    num_speculative_tokens: int
    heldout_prompts: int = 0
    max_tokens: int = 0
    greedy_identical: dict[str, tuple[int, int]] = Field(default_factory=dict)
    runs: tuple[Run, ...] = ()

    def greedy(self, head: str) -> Run | None:
        """Return the run of one head at temperature 0, if there is one."""
        return next((r for r in self.runs if r.head == head and r.temperature == 0), None)


@dataclass(frozen=True)
class Sample:
    """One conversation, shortened for reading."""

    split: str
    question: str
    answer: str


@dataclass(frozen=True)
class Data:
    """``conversations.jsonl`` and ``heldout.jsonl``, counted."""

    splits: dict[str, int]
    heldout: int | None
    tokens: int
    trained_tokens: int
    """Tokens under the loss mask: those of the answers."""
    samples: tuple[Sample, ...]

    @property
    def conversations(self) -> int:
        """How many conversations there are in all splits."""
        return sum(self.splits.values())

    @property
    def mask_share(self) -> float:
        """Share of all tokens that is under the loss mask."""
        return self.trained_tokens / self.tokens if self.tokens else 0.0

    @property
    def split_words(self) -> str:
        """The splits in words: "180 train, 20 validation, 40 held out"."""
        parts = [f"{n:,} {split}" for split, n in self.splits.items()]
        if self.heldout is not None:
            parts.append(f"{self.heldout:,} held out")
        return ", ".join(parts)


@dataclass(frozen=True)
class Captured:
    """``shards/manifest.jsonl``, summed. More than one dtype or verifier means mixed shards."""

    shards: int
    requests: int
    rows: int
    bytes: int
    boundaries: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    verifiers: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class RunSummary:
    """Everything that a run directory says. ``None`` or empty: that stage was not reached."""

    name: str
    conformance: Conformance | None = None
    certificate: Certificate | None = None
    data: Data | None = None
    captured: Captured | None = None
    metrics: tuple[Metric, ...] = ()
    evaluation: Evaluation | None = None
    torn: tuple[str, ...] = ()
    """Files whose torn last line was dropped."""

    @property
    def stages(self) -> tuple[tuple[str, bool], ...]:
        """Every stage, and whether it left its file."""
        return (
            ("conform", self.conformance is not None),
            ("certify", self.certificate is not None),
            ("prepare", self.data is not None),
            ("extract", self.captured is not None),
            ("train", bool(self.metrics)),
            ("evaluate", self.evaluation is not None),
        )

    @property
    def not_reached(self) -> tuple[str, ...]:
        """The stages that left nothing."""
        return tuple(name for name, reached in self.stages if not reached)


@dataclass(frozen=True)
class Headline:
    """What a reader should know first."""

    tone: Tone
    verdict: str
    proof: str
    result: str
    """One sentence about the acceptance length; empty if nothing was evaluated."""
    numbers: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]


# ---- reading ----------------------------------------------------------------------------------

RecordT = TypeVar("RecordT", bound=_Record)


class _Reader:
    """Reads the files of one run directory; remembers which had a torn last line."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.torn: list[str] = []

    def _bytes(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            message = f"{self.root / name} could not be read: {error.strerror or error}."
            raise CouldNotRun(message, remedy="Check the file's permissions and disk.") from error

    def _bad(self, name: str, stage: str, why: str) -> IntegrityError:
        return IntegrityError(
            f"{self.root / name} is corrupt: {why}.",
            remedy=f"Restore the file from a copy, or delete it and run the {stage} stage again.",
        )

    def _parse(self, model: type[RecordT], raw: bytes) -> RecordT:
        """Parse one JSON object; ValueError tells in one line what is wrong."""
        try:
            return model.model_validate(json.loads(raw))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{field}: {first['msg']}" if field else first["msg"]) from error
        except RecursionError as error:
            raise ValueError("nested too deeply") from error

    def one(self, name: str, model: type[RecordT], stage: str) -> RecordT | None:
        raw = self._bytes(name)
        if raw is None:
            return None
        try:
            return self._parse(model, raw)
        except ValueError as error:
            raise self._bad(name, stage, str(error)) from error

    def lines(self, name: str, model: type[RecordT], stage: str) -> list[RecordT] | None:
        """Read JSON lines. A last line that has no newline and does not parse was torn."""
        raw = self._bytes(name)
        if raw is None:
            return None
        records = []
        lines = raw.split(b"\n")
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                records.append(self._parse(model, line))
            except ValueError as error:
                if number == len(lines):
                    self.torn.append(name)
                    break
                raise self._bad(name, stage, f"line {number}: {error}") from error
        return records

    def certificate(self) -> Certificate | None:
        """Read the statement, bare or in its DSSE envelope. The signature is the gate's matter."""
        name = "certificate.json"
        raw = self._bytes(name)
        if raw is None:
            return None
        try:
            outer = json.loads(raw)
            if isinstance(outer, dict) and "payload" in outer:
                raw = base64.b64decode(outer["payload"], validate=True)
            return self._parse(_Statement, raw).predicate
        except (ValueError, TypeError) as error:
            raise self._bad(name, "certify", str(error)) from error


def _shortened(text: str) -> str:
    if len(text) <= SAMPLE_CHARACTERS:
        return text
    return text[:SAMPLE_CHARACTERS].rstrip() + " …"


def _data(reader: _Reader) -> Data | None:
    found = reader.lines("conversations.jsonl", _Conversation, "prepare")
    heldout = reader.lines("heldout.jsonl", _HeldOut, "prepare")
    if found is None:
        return None
    gap = max(1, (len(found) - 1) // (SAMPLES - 1))  # the samples are spread over the file
    return Data(
        splits=dict(Counter(c.split for c in found)),
        heldout=None if heldout is None else len(heldout),
        tokens=sum(len(c.token_ids) for c in found),
        trained_tokens=sum(max(0, len(c.token_ids) - c.prompt_tokens) for c in found),
        samples=tuple(
            Sample(c.split, _shortened(c.question), _shortened(c.answer))
            for c in found[::gap][:SAMPLES]
        ),
    )


def _captured(reader: _Reader) -> Captured | None:
    lines = reader.lines("shards/manifest.jsonl", _Shard, "extract")
    if not lines:
        return None
    shards = list({s.shard: s for s in lines}.values())  # a shard written again counts once
    return Captured(
        shards=len(shards),
        requests=sum(s.requests for s in shards),
        rows=sum(s.rows for s in shards),
        bytes=sum(s.bytes for s in shards),
        boundaries=tuple(dict.fromkeys(s.boundaries for s in shards)),
        dtypes=tuple(dict.fromkeys(s.dtype for s in shards)),
        verifiers=tuple(
            dict.fromkeys((s.verifier.name, s.verifier.weights_sha256) for s in shards)
        ),
    )


def _metrics(reader: _Reader) -> tuple[Metric, ...]:
    lines = reader.lines("train/metrics.jsonl", Metric, "train") or []
    # Training that resumed from a checkpoint wrote some steps twice: the later line is true.
    latest = {(m.step, m.kind): m for m in lines}
    return tuple(latest[key] for key in sorted(latest))


def load(run_dir: Path) -> RunSummary:
    """Read whatever the run has left so far."""
    if not run_dir.is_dir():
        raise UsageError(
            f"There is no run directory {run_dir}.", remedy="Name the directory of a run."
        )
    reader = _Reader(run_dir)
    return RunSummary(
        name=run_dir.resolve().name,
        conformance=reader.one("conform/report.json", Conformance, "conform"),
        certificate=reader.certificate(),
        data=_data(reader),
        captured=_captured(reader),
        metrics=_metrics(reader),
        evaluation=reader.one("evaluate/results.json", Evaluation, "evaluate"),
        torn=tuple(reader.torn),
    )


# ---- words ------------------------------------------------------------------------------------


def _verdict(summary: RunSummary) -> tuple[Tone, str]:
    report = summary.conformance
    if report is None:
        return "unsure", "No verdict: the conformance suite did not report"
    # A verdict that its own clauses contradict is never shown as a yes.
    must = [c.id for c in report.failed if c.level == "MUST"]
    if report.verdict == "conformant" and not must:
        if summary.certificate is None:
            return "unsure", "Conformant, but not certified"
        if summary.certificate.result != "pass":
            return "bad", f"Not certified: the certificate says {summary.certificate.result}"
        return "ok", "Conformant and certified"
    if report.verdict == "inconclusive":
        return "unsure", "Inconclusive: the suite could not decide"
    return "bad", "Not conformant: this capture path was denied"


def _warnings(summary: RunSummary) -> Iterator[str]:
    report, captured, evaluation = summary.conformance, summary.captured, summary.evaluation
    if report and report.verdict == "conformant" and report.failed:
        ids = ", ".join(c.id for c in report.failed)
        yield f"The report says conformant, yet these clauses did not pass: {ids}."
    if report and report.evidence and report.evidence != "live":
        yield f"The evidence is {report.evidence}; only live evidence certifies."
    if captured and max(map(len, (captured.boundaries, captured.dtypes, captured.verifiers))) > 1:
        yield "The shards disagree about the verifier, the boundaries or the dtype."
    if evaluation:
        for head, (equal, total) in evaluation.greedy_identical.items():
            if equal != total:
                yield (
                    f"With the {head} head, only {equal} of {total} greedy outputs were "
                    "identical to the verifier's own."
                )
    for name in summary.torn:
        yield f"{name}: the torn last line was dropped."


def _result(evaluation: Evaluation) -> tuple[str, tuple[tuple[str, str], ...]]:
    trained, untrained = evaluation.greedy("trained"), evaluation.greedy("untrained")
    if trained is None:
        return "The trained head was not evaluated at temperature 0.", ()
    numbers = [(f"{trained.acceptance_length:.2f}", "acceptance length, trained head")]
    sentences = []
    if untrained is not None:
        numbers.append((f"{untrained.acceptance_length:.2f}", "with the untrained head"))
        ours, theirs = trained.acceptance_length_interval, untrained.acceptance_length_interval
        if ours and theirs and ours[0] <= theirs[1]:
            sentences.append(
                "The trained head is not shown to beat the untrained one: "
                + ("it is below it." if ours[1] < theirs[0] else "their intervals overlap.")
            )
    if (steps := trained.engine_steps_per_100_tokens) is not None:
        numbers.append((f"{steps:.0f}", "verifier steps for 100 tokens"))
        sentences.insert(0, f"100 tokens took {steps:.1f} verifier steps instead of 100.")
    return " ".join(sentences), tuple(numbers)


def headline(summary: RunSummary) -> Headline:
    """Say what happened, in the order in which it matters."""
    tone, verdict = _verdict(summary)
    report = summary.conformance
    proof = ""
    if report is not None:
        proof = f"Profile {report.profile}, {report.evidence} evidence, adapter {report.adapter}. "
        proof += f"{report.tally}."
    result, numbers = _result(summary.evaluation) if summary.evaluation else ("", ())
    return Headline(tone, verdict, proof, result, numbers, tuple(_warnings(summary)))


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Turn nested facts into rows: dotted name, value as JSON spells it (text without quotes)."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        for index, inner in enumerate(value):
            yield from flatten(inner, f"{prefix}[{index}]")
    elif isinstance(value, list) and value:
        yield prefix, ", ".join(v if isinstance(v, str) else json.dumps(v) for v in value)
    elif value != {} or prefix:
        yield prefix, value if isinstance(value, str) else json.dumps(value)


def _moment(text: str) -> str:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text or "not recorded"
    if moment.tzinfo is None:
        return f"{moment:%Y-%m-%d %H:%M}"
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _size(count: int) -> str:
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 or share == 0 else f"{100 * share:.1f} %"


# ---- figures ----------------------------------------------------------------------------------

# Stand-in colours, drawn by matplotlib and then replaced by the page's own variables, so that one
# figure fits light and dark. None is black: matplotlib leaves black out of its SVG.
_INK, _RULE = "#010203", "#010204"
_SERIES = ("#010211", "#010212", "#010213", "#010214", "#010215", "#010216")
_VARIABLES = {
    _INK: "var(--soft)",
    _RULE: "var(--rule)",
    **{colour: f"var(--series-{i})" for i, colour in enumerate(_SERIES, start=1)},
}


@dataclass(frozen=True)
class Curve:
    """One line of a figure; ``faint`` marks the noisy training measurements."""

    points: tuple[tuple[int, float], ...]
    series: int
    faint: bool


@dataclass(frozen=True)
class Figure:
    """A drawing for the page, with the words of its key."""

    title: str
    svg: Markup
    key: tuple[tuple[int, str], ...]
    """Series number and name."""
    note: str


def _svg(name: str, label: str, curves: Sequence[Curve], *, shares: bool) -> Markup:
    """Draw curves over the training step; the same input gives the same text."""
    import io

    import matplotlib as mpl
    from markupsafe import Markup, escape
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "text.color": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "axes.labelcolor": _INK,
    }
    with mpl.rc_context(settings):
        canvas = Canvas(figsize=(5, 2.9), layout="constrained")
        axes = canvas.add_subplot()
        canvas.patch.set_visible(False)
        axes.patch.set_visible(False)
        for curve in curves:
            colour = _SERIES[(curve.series - 1) % len(_SERIES)]
            xs, ys = zip(*curve.points, strict=True)
            single = len(curve.points) == 1
            axes.plot(
                xs,
                ys,
                color=colour,
                alpha=0.45 if curve.faint else 1.0,
                linewidth=1.0 if curve.faint else 1.8,
                marker="o" if single or not curve.faint else "",
                markersize=3.5,
            )
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(_RULE)
        axes.tick_params(length=0, labelcolor=_INK)
        axes.grid(axis="y", color=_RULE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlabel("training step")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.set_ylim(bottom=0)
        if shares:
            decimals = 0 if axes.get_ylim()[1] >= 0.1 else 1
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=decimals, symbol=" %"))
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip()
    # The page must hold no address at all, and no rule or id that reaches outside the figure.
    text = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    opening = f'<svg role="img" aria-label="{escape(label)}"'
    return Markup(text.replace("<svg", opening, 1))


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _curves(metrics: Sequence[Metric], accuracy: bool) -> list[Curve]:
    """Return the training curves (faint) and the validation curves of one measure."""
    curves = []
    width = max((len(m.accuracy) for m in metrics), default=0) if accuracy else 1
    for kind in ("step", "validation"):
        for index in range(width):
            measured = [
                (m.step, (m.accuracy[index : index + 1] or (None,))[0] if accuracy else m.loss)
                for m in metrics
                if m.kind == kind
            ]
            points = tuple((s, float(v)) for s, v in measured if v is not None and _finite(v))
            if points:
                curves.append(Curve(points, index + 1, faint=kind == "step"))
    return curves


def figures(metrics: Sequence[Metric]) -> tuple[Figure, ...]:
    """Draw loss and accuracy over the training step; empty if matplotlib is not installed."""
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        return ()
    drawn = []
    for name, title, accuracy in (("loss", "Loss", False), ("accuracy", "Accuracy", True)):
        curves = _curves(metrics, accuracy)
        if not curves:
            continue
        kinds = {curve.faint for curve in curves}
        note = "Faint: training. Dots: validation."
        if len(kinds) == 1:
            note = "Training." if kinds == {True} else "Validation."
        key = [(n, f"draft step {n}") for n in sorted({c.series for c in curves})]
        label = f"{title} over the training step"
        svg = _svg(name, label, curves, shares=accuracy)
        drawn.append(Figure(title, svg, tuple(key) if accuracy else (), note))
    return tuple(drawn)


# ---- output -----------------------------------------------------------------------------------


def _last(metrics: Sequence[Metric], kind: str) -> Metric | None:
    return next((m for m in reversed(metrics) if m.kind == kind), None)


def render_html(summary: RunSummary) -> str:
    """Return the page. The same summary gives the same page."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "moment": _moment,
        "percent": _percent,
        "size": _size,
        "count": lambda number: f"{number:,}",
    }
    template = resources.files("truetap.pipeline").joinpath("report.html").read_text("utf-8")
    report = summary.conformance
    facts = report.environment if report else Facts()
    return environment.from_string(template).render(
        run=summary,
        headline=headline(summary),
        figures=figures(summary.metrics),
        last_step=_last(summary.metrics, "step"),
        last_validation=_last(summary.metrics, "validation"),
        spec=list(flatten(report.spec)) if report else [],
        binding=list(flatten(facts.binding)),
        recorded=list(flatten(facts.recorded)),
    )


def write_page(run_dir: Path) -> Path:
    """Write ``report.html`` into the run directory: the whole page, or the old one stays."""
    # A lone surrogate in recorded text has no UTF-8 form.
    page = render_html(load(run_dir)).encode("utf-8", "replace")
    path = run_dir / PAGE
    temporary = run_dir / f".{PAGE}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            file.write(page)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        message = f"{path} could not be written: {error.strerror or error}."
        raise CouldNotRun(message, remedy="Free some disk space or check permissions.") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _plain(text: str) -> str:
    """Make recorded text safe for a terminal: one line, no control characters."""
    return "".join(c if c.isprintable() else " " for c in text)


def _told(summary: RunSummary) -> Iterator[tuple[str, str]]:
    """Yield the rows of the terminal summary."""
    head = headline(summary)
    yield "Verdict", head.verdict
    if head.proof:
        yield "", head.proof
    if summary.certificate:
        certificate = summary.certificate
        yield (
            "Certificate",
            f"{_moment(certificate.issued)} until {_moment(certificate.expires)}",
        )
    if data := summary.data:
        share = _percent(data.mask_share)
        yield "Data", f"{data.split_words}; {data.tokens:,} tokens, {share} under the loss mask"
    if captured := summary.captured:
        ids = " / ".join(" ".join(map(str, b)) for b in captured.boundaries)
        yield (
            "Captured",
            f"{captured.rows:,} rows at boundaries {ids}; {_size(captured.bytes)}",
        )
    if last := _last(summary.metrics, "validation") or _last(summary.metrics, "step"):
        loss = "not recorded" if last.loss is None else f"{last.loss:.3f}"
        shares = ", ".join(_percent(a) for a in last.accuracy)
        yield "Training", f"step {last.step:,}: {last.kind} loss {loss}, accuracy {shares}"
    if head.result:
        numbers = "; ".join(f"{number} {what}" for number, what in head.numbers[:2])
        yield "Acceptance", f"{numbers}. {head.result}" if numbers else head.result
    if summary.not_reached:
        yield "Not reached", ", ".join(summary.not_reached)
    for warning in head.warnings[:3]:
        yield "Warning", warning


def print_summary(summary: RunSummary, console: Console) -> None:
    """Print the run in one screen."""
    from rich.table import Table
    from rich.text import Text

    tones = {"ok": "bold green", "bad": "bold red", "unsure": "bold yellow"}
    tone = tones[headline(summary).tone]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("Run", Text(_plain(summary.name)))
    for name, text in _told(summary):
        # Text, not markup: recorded words may hold brackets.
        grid.add_row(name, Text(_plain(text), style=tone if name == "Verdict" else ""))
    failed = summary.conformance.failed if summary.conformance else ()
    for clause in failed[:4]:
        saw = _plain(clause.saw)
        grid.add_row(Text(_plain(clause.id), style="red"), Text(saw[:140]))
    if len(failed) > 4:
        grid.add_row("", f"and {len(failed) - 4} more clauses")
    console.print(grid)
    if summary.evaluation is None or not summary.evaluation.runs:
        return
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("head", "T", "acceptance length", "interval", "steps/100", "tokens/s"):
        table.add_column(name, justify="left" if name == "head" else "right", no_wrap=True)
    for run in summary.evaluation.runs[:6]:
        low_high = run.acceptance_length_interval
        steps, speed = run.engine_steps_per_100_tokens, run.tokens_per_s
        table.add_row(
            Text(_plain(run.head)),
            f"{run.temperature:g}",
            f"{run.acceptance_length:.2f}",
            f"{low_high[0]:.2f} to {low_high[1]:.2f}" if low_high else "",
            "" if steps is None else f"{steps:.1f}",
            "" if speed is None else f"{speed:.1f}",
        )
    console.print(table)

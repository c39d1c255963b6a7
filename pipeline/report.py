"""What a run did, told as one self-contained HTML page and as a terminal summary.

Both are made only from the files in the run folder, so they show exactly what was recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from truetap.pipeline.figures import training_curves
from truetap.pipeline.run_records import Evaluation, Measurement, PartedAnswers, RunSummary, load

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["headline", "load", "print_summary", "render_html", "write_page"]

Tone = Literal["ok", "bad", "unsure"]


@dataclass(frozen=True)
class Headline:
    """What a reader should know first."""

    tone: Tone
    verdict: str
    proof: str
    result: str
    """What the acceptance lengths mean; empty if nothing was evaluated."""
    numbers: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]


def headline(summary: RunSummary) -> Headline:
    """Say what happened, in the order in which it matters."""
    tone, verdict = _verdict(summary)
    proof = ""
    if report := summary.conformance:
        passed = sum(clause.outcome == "pass" for clause in report.clauses)
        proof = (
            f"{report.adapter} is {report.verdict}: profile {report.profile}, {report.evidence} "
            f"evidence, {passed} of {len(report.clauses)} clauses passed."
        )
    warnings = _overruled(summary)
    if summary.evaluation is None:
        return Headline(tone, verdict, proof, "", (), warnings)
    result, numbers = _result(summary.evaluation)
    differing = [
        f"With the {head} head, only {same} of {total} greedy outputs were identical to the "
        f"verifier's own{_undecided(summary.evaluation.greedy_parted.get(head))}."
        for head, (same, total) in summary.evaluation.greedy_identical.items()
        if same != total
    ]
    invalid = [
        f"The {run.head} head at temperature {run.temperature:g} is no measurement: {run.invalid}."
        for run in summary.evaluation.runs
        if run.invalid
    ]
    return Headline(tone, verdict, proof, result, numbers, (*warnings, *differing, *invalid))


def _undecided(parted: PartedAnswers | None) -> str:
    """Say how decided the verifier is where answers part; '' if that was not looked at."""
    if parted is None or parted.largest_gap is None:
        return ""
    return (
        "; where the others part, it finds the two tokens at most "
        f"{parted.largest_gap:.3f} nats apart"
    )


def _overruled(summary: RunSummary) -> tuple[str, ...]:
    """Say what no certificate stands behind, and what the gate said when it was overruled."""
    if not summary.uncertified:
        return ()
    said = [
        f"The gate denied: {why.code}: {why.text}"
        for denial in summary.denials
        for why in denial.reasons
    ]
    return (f"UNCERTIFIED: {summary.uncertified}.", *dict.fromkeys(said))


_UNCERTIFIED = "Conformant, but not certified"


def _verdict(summary: RunSummary) -> tuple[Tone, str]:
    report, held = summary.conformance, summary.certificate
    if summary.uncertified:
        return "bad", "UNCERTIFIED: the gate denied this run and was overruled"
    certified = held is not None and held.predicate["result"] == "pass"
    if report is None:
        if certified:
            return "ok", "Certified, by a certificate that was made elsewhere"
        return "unsure", "No verdict: the conformance suite did not report"
    if report.verdict == "non-conformant":
        return "bad", "Not conformant: this capture path was denied"
    if report.verdict == "inconclusive":
        return "unsure", "Inconclusive: the suite could not decide"
    return ("ok", "Conformant and certified") if certified else ("unsure", _UNCERTIFIED)


def _result(evaluation: Evaluation) -> tuple[str, tuple[tuple[str, str], ...]]:
    trained, untrained = evaluation.first("trained"), evaluation.first("untrained")
    if trained is None or untrained is None:
        return "No head was evaluated.", ()
    steps = trained.engine_steps_per_100_tokens
    numbers = (
        (f"{trained.acceptance_length:.2f}", "acceptance length, trained head"),
        (f"{untrained.acceptance_length:.2f}", "with the untrained head"),
        (f"{steps:.0f}", "verifier steps for 100 tokens"),
    )
    told = f"100 tokens took {steps:.1f} verifier steps instead of 100."
    return f"{told} {_no_gain(trained, untrained)}".strip(), numbers


def _no_gain(trained: Measurement, untrained: Measurement) -> str:
    """Say so if the trained head is not shown to be better."""
    ours, theirs = trained.acceptance_length_interval, untrained.acceptance_length_interval
    if ours and theirs and ours[0] > theirs[1]:
        return ""
    below = ours and theirs and ours[1] < theirs[0]
    why = "it is below it" if below else "their intervals overlap"
    return f"The trained head is not shown to beat the untrained one: {why}."


def render_html(summary: RunSummary) -> str:
    """Return the page. The same summary gives the same page."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"count": "{:,}".format, "percent": "{:.1%}".format}
    template = resources.files("truetap.pipeline").joinpath("report.html").read_text("utf-8")
    report = summary.conformance
    return environment.from_string(template).render(
        run=summary,
        headline=headline(summary),
        curves=training_curves(summary.metrics) if summary.metrics else None,
        samples=summary.answered[:: max(1, len(summary.answered) // 3)][:3],
        spec=list(_facts(report.spec)) if report else [],
        environment=list(_facts(report.environment)) if report else [],
    )


def _facts(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested facts as rows: dotted name, value as JSON spells it (text without quotes)."""
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _facts(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, str) else json.dumps(value)


def write_page(run_dir: Path) -> Path:
    """Write ``report.html`` into the run folder: the whole page, or the old one stays."""
    page = run_dir / "report.html"
    scratch = page.with_name(page.name + ".partial")
    scratch.write_text(render_html(load(run_dir)), encoding="utf-8")
    scratch.rename(page)
    return page


def print_summary(summary: RunSummary, console: Console) -> None:
    """Print the run in one screen."""
    from rich.text import Text

    tones = {"ok": "bold green", "bad": "bold red", "unsure": "bold yellow"}
    for name, text in _told(summary):
        style = tones[headline(summary).tone] if name == "Verdict" else ""
        # Recorded words may hold brackets, which are no markup, and control characters.
        plain = "".join(char if char.isprintable() else " " for char in text)
        console.print(Text.assemble((f"{name:<12}", "bold"), (plain, style)))


def _told(summary: RunSummary) -> Iterator[tuple[str, str]]:
    """Yield the lines of the terminal summary."""
    head = headline(summary)
    yield "Run", summary.name
    yield "Verdict", head.verdict
    if head.proof:
        yield "", head.proof
    for clause in summary.failed:
        yield clause.id, clause.saw[:200]
    if summary.answered:
        share = summary.loss_tokens / summary.tokens
        yield (
            "Data",
            f"{summary.splits}; {summary.tokens:,} tokens, {share:.0%} under the loss mask",
        )
    if summary.shards:
        boundaries = ", ".join(map(str, summary.shards[0].boundaries))
        yield "Captured", f"{summary.rows:,} rows at boundaries {boundaries}"
        yield "Audited", summary.audited
    if last := summary.last("validation") or summary.last("step"):
        shares = ", ".join(f"{share:.1%}" for share in last.accuracy)
        yield "Training", f"step {last.step:,}: {last.kind} loss {last.loss:.3f}, accuracy {shares}"
    for run in summary.evaluation.runs if summary.evaluation else ():
        interval = run.acceptance_length_interval
        span = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
        span += " INVALID" if run.invalid else ""
        speed = f"temperature {run.temperature:g}, {run.tokens_per_s:.1f} tokens/s"
        yield "Acceptance", f"{run.acceptance_length:.2f}{span} with head: {run.head}, {speed}"
    if head.result:
        yield "Result", head.result
    for warning in head.warnings:
        yield "Warning", warning
    if missing := [stage for stage, reached in summary.stages.items() if not reached]:
        yield "Not reached", ", ".join(missing)

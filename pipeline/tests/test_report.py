"""The report: the page, the terminal summary, and what they do with missing or broken files."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from truetap.harness import certificate, signing
from truetap.harness import report as suite_report
from truetap.harness.errors import IntegrityError, UsageError
from truetap.harness.report import Outcome, Report
from truetap.pipeline import report
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.run_records import RunSummary
from truetap.pipeline.store import Store

HOSTILE = "<script>alert('question')</script> & \"quotes\" [bold]not markup[/bold]"
ENVIRONMENT = {
    "binding": {
        "engine_version": "0.32.0",
        "verifier": {"weights_sha256": "cd" * 32},
        "adapter": {"name": "vllm_native", "sha256": "ef" * 32},
    },
    "recorded": {"verifier_name": "verifier", "host_os": HOSTILE, "transformers": None},
}


def conformance(outcome: Outcome = "pass", saw: str = "2 slots") -> Report:
    """A report in which every clause passed, but one that has this outcome."""
    made = suite_report.blank(
        "core",
        evidence="live",
        adapter="vllm_native",
        spec={"model": "verifier", "boundaries": [2, 30], "enforce_eager": True},
        suite_digest="ab" * 32,
        started="2026-11-29T15:57:00+00:00",
        environment=ENVIRONMENT,
        seconds=41.2,
    )
    for clause in made.clauses:
        clause.add("pass", "15 rows")
        if clause.id == "LAYERS-001":
            clause.outcome, clause.saw = outcome, saw
    return made


def conversation(number: int) -> dict[str, Any]:
    return {
        "id": f"c{number}",
        "split": "validation" if number % 10 == 9 else "train",
        "question": HOSTILE if number == 0 else f"Question {number}?",
        "answer": f"Answer {number}.",
        "token_ids": list(range(40)),
        "prompt_tokens": 10,
    }


def shard(number: int, rows: int = 7421) -> dict[str, Any]:
    return {
        "shard": f"shard-{number:05}.safetensors",
        "requests": 50,
        "rows": rows,
        "bytes": 34_190_000,
        "boundaries": [2, 15, 27, 30],
        "dtype": "bfloat16",
        "verifier": {"name": "verifier", "weights_sha256": "cd" * 32},
        "certificate": "ce" * 32,
    }


def metrics() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for step in range(10, 210, 10):
        shares = [0.5 - 3 / step, 0.3 - 2 / step, 0.2 - 1 / step]
        told = {"step": step, "epoch": 0, "loss": 2 + 20 / step, "accuracy": shares}
        lines.append({"kind": "step", **told, "learning_rate": 1e-3, "tokens_per_s": 1400.0})
        if step % 50 == 0:
            lines.append({"kind": "validation", **told})
    return lines


def evaluation(trained: Iterable[float] = (1.62, 1.55, 1.70)) -> dict[str, Any]:
    served = {"output_tokens": 2400, "seconds": 9.1, "tokens_per_s": 263.7}
    runs: list[dict[str, Any]] = [
        {
            "head": "none",
            "temperature": 0.0,
            "acceptance_length": 1.0,
            "engine_steps_per_100_tokens": 100.0,
            **served,
        }
    ]
    for head, (length, low, high) in (("untrained", (1.001, 1.0, 1.002)), ("trained", trained)):
        runs += [
            {
                "head": head,
                "temperature": temperature,
                "acceptance_length": length,
                "acceptance_length_interval": [low, high],
                "per_position": [0.4, 0.15, 0.07],
                "engine_steps_per_100_tokens": 61.7,
                **served,
            }
            for temperature in (0.0, 0.7)
        ]
    return {
        "num_speculative_tokens": 3,
        "heldout_prompts": 4,
        "max_tokens": 64,
        "greedy_identical": {"untrained": [4, 4], "trained": [4, 4]},
        "runs": runs,
    }


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(line) + "\n" for line in value))
    else:
        path.write_text(json.dumps(value))


def write_conformance(root: Path, made: Report) -> None:
    (root / "conform").mkdir(parents=True, exist_ok=True)
    made.write(RunFolder(root).report)


@pytest.fixture
def denied(tmp_path: Path) -> Path:
    root = tmp_path / "denied-run"
    write_conformance(root, conformance("fail", saw="nearest is boundary [3]"))
    return root


@pytest.fixture
def complete(tmp_path: Path) -> Path:
    root = tmp_path / "complete-run"
    write_conformance(root, conformance())
    statement = certificate.issue(conformance(), now=datetime(2026, 11, 29, 16, tzinfo=UTC))
    certificate.write(statement, RunFolder(root).certificate)
    write(root / "conversations.jsonl", [conversation(n) for n in range(20)])
    write(root / "heldout.jsonl", [{"id": str(n), "question": "?"} for n in range(4)])
    for line in (shard(0, rows=1), shard(0), shard(1)):
        Store(root / "shards").append(line)
    write(root / "train/metrics.jsonl", metrics())
    write(root / "evaluate/results.json", evaluation())
    return root


class Page(HTMLParser):
    """The tags, ids, references and words of a page; its tags must be balanced."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [v or "" for k, v in attrs if k == "id"]
        self.links += [v or "" for k, v in attrs if k in ("href", "src", "xlink:href")]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def terminal(summary: RunSummary) -> str:
    out = io.StringIO()
    report.print_summary(summary, Console(file=out, width=80))
    return out.getvalue()


def test_complete_run_is_told_with_its_numbers(complete: Path) -> None:
    summary = report.load(complete)
    head = report.headline(summary)
    assert (head.tone, head.verdict) == ("ok", "Conformant and certified")
    assert [number for number, _ in head.numbers] == ["1.62", "1.00", "62"]
    assert head.result == "100 tokens took 61.7 verifier steps instead of 100."
    assert head.warnings == ()
    assert all(summary.stages.values())
    assert (summary.tokens, summary.loss_tokens) == (800, 600)
    assert summary.splits == "18 train, 2 validation, 4 held out"
    # A shard that was written again counts once.
    assert (summary.rows, len(summary.shards)) == (14842, 2)
    told = terminal(summary)
    assert len(told.splitlines()) <= 25
    for words in ("1.62 (1.55 to 1.70)", "61.7 verifier steps", "step 200: validation loss 2.100"):
        assert words in told


def test_page_is_self_contained_and_escapes_everything(complete: Path) -> None:
    path = report.write_page(complete)
    text = path.read_text("utf-8")
    page = Page(text)
    assert path == complete / "report.html"
    assert "script" not in page.tags
    assert "".join(page.words).count(HOSTILE) == 2  # a question and a recorded fact
    assert "://" not in text
    assert "url(" not in text.replace("url(#", "")
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert ("recorded.transformers", "null") in zip(page.words, page.words[1:], strict=False)
    assert [p.name for p in complete.iterdir() if "partial" in p.name] == []


@pytest.mark.torch  # not torch itself, but matplotlib, which comes with the same extra
def test_curves_follow_the_theme_and_are_deterministic(complete: Path) -> None:
    text = report.render_html(report.load(complete))
    assert text == report.render_html(report.load(complete))
    svg = text[text.index("<svg") : text.index("</svg>")]
    # Outside of the variables there is no colour: nothing stays black on black.
    assert {f"var(--series-{n})" for n in (1, 2, 3)} | {"var(--soft)"} <= set(
        re.findall(r"var\([^)]*\)", svg)
    )
    assert re.search(r"(?:fill|stroke|color): *(?:#|black|white)", svg) is None
    assert ">draft step 3</text>" in svg


def test_page_without_matplotlib_says_so(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = report.render_html(report.load(complete))
    assert "<svg" not in text
    assert "matplotlib is not installed" in text


def test_denied_run_shows_why_and_what_was_not_reached(denied: Path) -> None:
    summary = report.load(denied)
    assert report.headline(summary).tone == "bad"
    text = report.write_page(denied).read_text("utf-8")
    Page(text)
    assert "nearest is boundary [3]" in text
    for stage in ("certify", "prepare", "extract", "train", "evaluate"):
        assert f"Not reached: the {stage} stage" in text
    told = terminal(summary)
    assert "denied" in told
    assert "nearest is boundary [3]" in told
    assert "Not reached certify, prepare, extract, train, evaluate" in told


def test_empty_run_folder_still_has_a_page(tmp_path: Path) -> None:
    text = report.write_page(tmp_path).read_text("utf-8")
    assert "No verdict" in text
    assert "No verdict" in terminal(report.load(tmp_path))


@pytest.mark.parametrize(
    ("outcome", "certified", "tone"),
    [
        ("pass", None, "unsure"),
        ("pass", "fail", "unsure"),
        ("error", "pass", "unsure"),
        ("not_run", "pass", "unsure"),
        ("fail", "pass", "bad"),
    ],
)
def test_nothing_but_a_proven_run_looks_like_a_yes(
    complete: Path, outcome: Outcome, certified: str | None, tone: str
) -> None:
    write_conformance(complete, conformance(outcome))
    # What the report's file says of itself is not believed.
    path = RunFolder(complete).report
    write(path, json.loads(path.read_text()) | {"verdict": "conformant"})
    held = RunFolder(complete).certificate
    statement = certificate.issue(conformance(), now=datetime(2026, 11, 29, 16, tzinfo=UTC))
    statement["predicate"]["result"] = certified or "pass"
    certificate.write(statement, held)
    if certified is None:
        held.unlink()
    assert report.headline(report.load(complete)).tone == tone


@pytest.mark.parametrize(("result", "tone"), [("pass", "ok"), ("expected-failures", "unsure")])
def test_a_certificate_made_elsewhere_counts_without_a_report(
    complete: Path, result: str, tone: str
) -> None:
    folder = RunFolder(complete)
    statement = certificate.issue(conformance(), now=datetime(2026, 11, 29, 16, tzinfo=UTC))
    statement["predicate"]["result"] = result
    certificate.write(statement, folder.certificate)
    folder.report.unlink()
    assert report.headline(report.load(complete)).tone == tone


@pytest.mark.parametrize(
    ("made_by", "said"), [(None, "no: for development only"), (1, "by <code>")]
)
def test_the_page_says_who_signed(
    complete: Path, tmp_path: Path, made_by: int | None, said: str
) -> None:
    statement = certificate.issue(conformance(), now=datetime(2026, 11, 29, 16, tzinfo=UTC))
    signer = made_by and signing.signer_from(signing.new_key("ours", tmp_path / "keys")[0])
    certificate.write(statement, RunFolder(complete).certificate, signer or None)
    text = report.write_page(complete).read_text("utf-8")
    assert said in text
    assert ("ed25519:" in text) == bool(made_by)


@pytest.mark.parametrize(
    ("trained", "words"),
    [((1.1, 0.9, 1.3), "intervals overlap"), ((0.8, 0.7, 0.9), "below it")],
)
def test_no_gain_is_not_sold_as_one(
    complete: Path, trained: tuple[float, float, float], words: str
) -> None:
    told = evaluation(trained)
    told["greedy_identical"]["trained"] = [3, 4]
    write(complete / "evaluate/results.json", told)
    head = report.headline(report.load(complete))
    assert words in head.result
    assert any("only 3 of 4" in warning for warning in head.warnings)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("conform/report.json", "{"),
        ("conform/report.json", '{"profile": "core"}'),
        ("certificate.json", "[]"),
        ("conversations.jsonl", '{"id": 1}\n'),
        ("conversations.jsonl", '{"torn\n{"torn"'),
        ("shards/manifest.jsonl", '{"shard": "a", "requests": "many", "rows": 1}\n'),
        ("train/metrics.jsonl", "\xff\n"),
        ("evaluate/results.json", '{"num_speculative_tokens": 3, "runs": [{}]}'),
    ],
)
def test_corrupt_file_is_an_integrity_error(complete: Path, name: str, content: str) -> None:
    (complete / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(IntegrityError, match=re.escape(name)) as caught:
        report.load(complete)
    assert "again" in caught.value.remedy


def test_only_a_torn_last_line_is_dropped(complete: Path) -> None:
    path = complete / "shards/manifest.jsonl"
    path.write_bytes(path.read_bytes() + b'{"shard": "shard-00002.safe')
    assert len(report.load(complete).shards) == 2


def test_loss_that_is_not_a_number_does_not_stop_the_page(complete: Path) -> None:
    lines = metrics()
    lines[-1]["loss"] = float("nan")
    write(complete / "train/metrics.jsonl", lines)
    assert "loss nan" in report.render_html(report.load(complete))


def test_terminal_gets_no_control_characters(denied: Path) -> None:
    write_conformance(denied, conformance("fail", saw="\x1b[2Jcleared\r\n[red]x[/red]"))
    shown = terminal(report.load(denied))
    assert "\x1b[2J" not in shown
    assert "[red]x[/red]" in shown


def test_no_run_folder_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        report.load(tmp_path / "nowhere")


def test_failed_write_keeps_the_old_page(denied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = report.write_page(denied).read_bytes()

    def full(path: Path, text: str, **_options: Any) -> None:
        path.write_bytes(text.encode()[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        report.write_page(denied)
    assert (denied / "report.html").read_bytes() == old

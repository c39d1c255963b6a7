"""The report: the page, the terminal summary, and what they do with missing or broken files."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from truetap.harness.errors import CouldNotRun, IntegrityError, UsageError
from truetap.pipeline import report

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = "<script>alert('question')</script> & \"quotes\" [bold]not markup[/bold]"


def clause(name: str, outcome: str = "pass", saw: str = "cosine 0.9999 [2, 15]") -> dict[str, Any]:
    return {
        "id": name,
        "title": f"What {name} asks for",
        "level": "MUST",
        "outcome": outcome,
        "cases": 3,
        "saw": saw,
    }


def conformance(verdict: str = "conformant", *clauses: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": "truetap/conformance-report/1",
        "verdict": verdict,
        "profile": "core",
        "evidence": "live",
        "adapter": "vllm_native",
        "spec": {"model": "verifier", "boundaries": [2, 15, 27, 30], "dtype": "bfloat16"},
        "environment": {
            "binding": {"engine": {"version": "0.32.0", "eager": True}, "gpus": []},
            "recorded": {"host": HOSTILE, "workers": [{"rank": 0}, {"rank": 1}]},
        },
        "clauses": list(clauses) or [clause("LAYERS-001"), clause("ROWS-002")],
        "started": "2026-11-29T15:57:00+01:00",
        "seconds": 41.2,
    }


STATEMENT = {
    "_type": "statement",
    "predicate": {
        "result": "pass",
        "profile": "core",
        "timeCreated": "2026-11-29T15:00:00Z",
        "notAfter": "2026-12-29T15:00:00Z",
        "bindingDigest": "ab" * 32,
    },
}


def conversation(number: int) -> dict[str, Any]:
    return {
        "id": f"c{number}",
        "split": "validation" if number % 10 == 9 else "train",
        "question": HOSTILE if number == 0 else f"Question {number}?",
        "answer": f"Answer {number} \ud800.",
        "token_ids": list(range(40)),
        "prompt_tokens": 10,
    }


def shard(number: int, **changed: Any) -> dict[str, Any]:
    return {
        "shard": f"shard-{number:05}.safetensors",
        "requests": 50,
        "rows": 7421,
        "bytes": 34_190_000,
        "boundaries": [2, 15, 27, 30],
        "dtype": "bfloat16",
        "verifier": {"name": "verifier", "weights_sha256": "cd" * 32},
        **changed,
    }


def metrics() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for step in range(10, 210, 10):
        shares = [0.5 - 3 / step, 0.3 - 2 / step, 0.2 - 1 / step]
        told = {"step": step, "epoch": 0, "loss": 2 + 20 / step, "accuracy": shares}
        lines.append({"kind": "step", "learning_rate": 1e-3, "tokens_per_s": 1400.0, **told})
        if step % 50 == 0:
            lines.append({"kind": "validation", **told})
    return lines


def run(head: str, temperature: float, length: float, low: float, high: float) -> dict[str, Any]:
    return {
        "head": head,
        "temperature": temperature,
        "acceptance_length": length,
        "acceptance_length_interval": [low, high],
        "per_position": [0.4, 0.15, 0.07] if head == "trained" else [0.001, 0, 0],
        "drafts": 900,
        "accepted": 558,
        "output_tokens": 2400,
        "seconds": 9.1,
        "engine_steps_per_100_tokens": 61.7 if head == "trained" else 99.9,
    }


def evaluation() -> dict[str, Any]:
    plain = {"head": "none", "acceptance_length": 1.0, "output_tokens": 2400, "seconds": 8.0}
    return {
        "num_speculative_tokens": 3,
        "heldout_prompts": 40,
        "max_tokens": 64,
        "greedy_identical": {"trained": [40, 40], "untrained": [40, 40]},
        "runs": [
            run(head, temperature, length, low, high)
            for temperature in (0.0, 1.0)
            for head, length, low, high in (
                ("trained", 1.62, 1.55, 1.70),
                ("untrained", 1.001, 1.0, 1.002),
            )
        ]
        + [{**plain, "temperature": 0.0}, {**plain, "temperature": 1.0}],
    }


def write(root: Path, name: str, value: Any) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(line) + "\n" for line in value))
    else:
        path.write_text(json.dumps(value))
    return path


@pytest.fixture
def denied(tmp_path: Path) -> Path:
    root = tmp_path / "denied-run"
    told = conformance("non-conformant", clause("LAYERS-001", "fail", "nearest is boundary [3]"))
    write(root, "conform/report.json", told)
    return root


@pytest.fixture
def complete(tmp_path: Path) -> Path:
    root = tmp_path / "complete-run"
    write(root, "conform/report.json", conformance())
    write(root, "certificate.json", STATEMENT)
    write(root, "conversations.jsonl", [conversation(n) for n in range(20)])
    write(root, "heldout.jsonl", [{"id": n, "question": "?"} for n in range(4)])
    write(root, "shards/manifest.jsonl", [shard(0), shard(1)])
    write(root, "train/metrics.jsonl", metrics())
    write(root, "evaluate/results.json", evaluation())
    return root


class Page(HTMLParser):
    """The tags, ids and addresses of a page, and that its tags are balanced."""

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
        self.links += [v or "" for k, v in attrs if k in ("href", "src")]
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


def terminal(summary: report.RunSummary, width: int = 80) -> str:
    out = io.StringIO()
    report.print_summary(summary, Console(file=out, width=width))
    return out.getvalue()


def test_complete_run_is_told_with_its_one_number(complete: Path) -> None:
    summary = report.load(complete)
    head = report.headline(summary)
    assert head.tone == "ok"
    assert [number for number, _ in head.numbers] == ["1.62", "1.00", "62"]
    assert head.result == "100 tokens took 61.7 verifier steps instead of 100."
    assert head.warnings == ()
    assert summary.not_reached == ()
    data, captured = summary.data, summary.captured
    assert data is not None
    assert (data.tokens, data.mask_share) == (800, 0.75)
    assert data.split_words == "18 train, 2 validation, 4 held out"
    assert captured is not None
    assert (captured.rows, captured.requests, captured.shards) == (14842, 100, 2)


def test_page_is_self_contained_and_escapes_everything(complete: Path) -> None:
    path = report.write_page(complete)
    text = path.read_text("utf-8")
    page = Page(text)
    assert path == complete / "report.html"
    assert "script" not in page.tags
    assert HOSTILE in "".join(page.words)
    assert "://" not in text
    assert "url(" not in re.sub(r"url\(#", "", text)
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)
    assert str(complete.parent) not in text
    assert [p.name for p in complete.glob(".*")] == []


def test_figures_share_no_id_follow_the_theme_and_are_deterministic(complete: Path) -> None:
    pytest.importorskip("matplotlib")
    summary = report.load(complete)
    drawn = report.figures(summary.metrics)
    assert [figure.title for figure in drawn] == ["Loss", "Accuracy"]
    text = report.render_html(summary)
    ids = Page(text).ids
    assert len(ids) == len(set(ids)) > 0
    assert text == report.render_html(report.load(complete))
    for figure in drawn:
        # Outside of the variables there is no colour: nothing stays black on black.
        assert "var(--soft)" in figure.svg
        assert "var(--series-1)" in figure.svg
        assert re.search(r"(?:fill|stroke|color): *(?:#|black|white)", figure.svg) is None
        assert "<text" in figure.svg
    assert "var(--series-3)" in drawn[1].svg


def test_page_without_matplotlib_says_so(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = report.render_html(report.load(complete))
    assert "<svg" not in text
    assert "matplotlib is not installed" in text


def test_denied_run_shows_why_and_what_was_not_reached(denied: Path) -> None:
    summary = report.load(denied)
    assert summary.not_reached == ("certify", "prepare", "extract", "train", "evaluate")
    assert report.headline(summary).tone == "bad"
    text = report.write_page(denied).read_text("utf-8")
    Page(text)
    assert "nearest is boundary [3]" in text
    for stage in summary.not_reached:
        assert f"Not reached: the {stage} stage" in text
    told = terminal(summary)
    assert "denied" in told
    assert "nearest is boundary [3]" in told
    assert "Not reached" in told


def test_empty_run_directory_still_has_a_page(tmp_path: Path) -> None:
    text = report.write_page(tmp_path).read_text("utf-8")
    assert "No verdict" in text
    assert "No verdict" in terminal(report.load(tmp_path))


@pytest.mark.parametrize(
    ("told", "certificate", "tone"),
    [
        (conformance("inconclusive"), None, "unsure"),
        (conformance("conformant"), None, "unsure"),
        (conformance("conformant", clause("ROWS-002", "fail")), "pass", "bad"),
        (conformance("conformant", clause("ROWS-002", "error")), "pass", "bad"),
        (conformance("conformant"), "fail", "bad"),
        (conformance("something new"), "pass", "bad"),
        (conformance("conformant"), "pass", "ok"),
    ],
)
def test_nothing_but_a_proven_run_looks_like_a_yes(
    tmp_path: Path, told: dict[str, Any], certificate: str | None, tone: str
) -> None:
    write(tmp_path, "conform/report.json", told)
    if certificate:
        predicate = {**STATEMENT["predicate"], "result": certificate}  # type: ignore[dict-item]
        write(tmp_path, "certificate.json", {"predicate": predicate})
    assert report.headline(report.load(tmp_path)).tone == tone


def test_certificate_in_its_envelope_reads_the_same(complete: Path) -> None:
    bare = report.load(complete).certificate
    payload = base64.b64encode(json.dumps(STATEMENT).encode()).decode()
    write(complete, "certificate.json", {"payload": payload, "signatures": []})
    assert report.load(complete).certificate == bare
    write(complete, "certificate.json", {"payload": "not base64", "signatures": []})
    with pytest.raises(IntegrityError, match=r"certificate\.json"):
        report.load(complete)


@pytest.mark.parametrize(
    ("trained", "words"),
    [((1.1, 0.9, 1.3), "intervals overlap"), ((0.8, 0.7, 0.9), "below it")],
)
def test_no_gain_is_not_sold_as_one(
    complete: Path, trained: tuple[float, float, float], words: str
) -> None:
    told = evaluation()
    told["runs"][0] = run("trained", 0.0, *trained)
    told["greedy_identical"]["trained"] = [38, 40]
    write(complete, "evaluate/results.json", told)
    head = report.headline(report.load(complete))
    assert words in head.result
    assert any("only 38 of 40" in warning for warning in head.warnings)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("conform/report.json", "{"),
        ("conform/report.json", '{"profile": "core"}'),
        ("conform/report.json", "[" * 100_000),
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
    summary = report.load(complete)
    assert summary.captured is not None
    assert summary.captured.shards == 2
    assert summary.torn == ("shards/manifest.jsonl",)
    assert "torn last line" in report.render_html(summary)


def test_lines_written_again_count_once(complete: Path) -> None:
    write(complete, "shards/manifest.jsonl", [shard(0, rows=1), shard(0)])
    write(complete, "train/metrics.jsonl", [*metrics(), {**metrics()[0], "loss": 9.0}])
    summary = report.load(complete)
    assert summary.captured is not None
    assert summary.captured.rows == 7421
    assert [m.loss for m in summary.metrics if m.step == 10] == [9.0]
    assert [m.step for m in summary.metrics] == sorted(m.step for m in summary.metrics)


def test_mixed_shards_are_warned_of(complete: Path) -> None:
    write(complete, "shards/manifest.jsonl", [shard(0), shard(1, dtype="float16")])
    assert "The shards disagree" in report.headline(report.load(complete)).warnings[0]


def test_loss_that_is_not_a_number_does_not_stop_the_page(complete: Path) -> None:
    write(complete, "train/metrics.jsonl", [{"kind": "step", "step": 1, "loss": float("nan")}])
    assert "nan" in report.render_html(report.load(complete))


def test_terminal_summary_fits_one_screen(complete: Path) -> None:
    told = terminal(report.load(complete))
    assert len(told.splitlines()) <= 25
    assert "1.62" in told
    assert "61.7 verifier steps" in told
    assert "1.55 to 1.70" in told


def test_terminal_gets_no_control_characters(denied: Path) -> None:
    saw = "\x1b[2Jcleared\r\n[red]x[/red]"
    told = conformance("non-conformant", clause("LAYERS-001", "fail", saw))
    write(denied, "conform/report.json", told)
    shown = terminal(report.load(denied))
    assert "\x1b[2J" not in shown
    assert "[red]x[/red]" in shown


def test_no_run_directory_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        report.load(tmp_path / "nowhere")


def test_failed_write_keeps_the_old_page(denied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = report.write_page(denied).read_bytes()

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.os, "fsync", full)  # type: ignore[attr-defined]
    with pytest.raises(CouldNotRun, match="No space left"):
        report.write_page(denied)
    assert (denied / "report.html").read_bytes() == old
    assert list(denied.glob(".report*")) == []


def test_flatten_names_every_leaf() -> None:
    facts = {"a": {"b": 1, "c": {}}, "d": [1, "x", None], "e": [{"f": True}], "g": None, "h": []}
    assert list(report.flatten(facts)) == [
        ("a.b", "1"),
        ("a.c", "{}"),
        ("d", "1, x, null"),
        ("e[0].f", "true"),
        ("g", "null"),
        ("h", "[]"),
    ]
    assert list(report.flatten({})) == []

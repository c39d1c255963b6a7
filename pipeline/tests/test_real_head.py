"""The measurement of a head: what is held out, what is done once, and which numbers are told."""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from truetap.harness import report
from truetap.harness.errors import CheckFailed
from truetap.pipeline import config, run_folder

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def real_head(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("real_head")


@pytest.fixture
def given(tmp_path: Path) -> argparse.Namespace:
    questions, heldout = tmp_path / "questions.jsonl", tmp_path / "heldout.jsonl"
    questions.write_text(json.dumps({"id": "q", "turns": ["What is a list?"]}) + "\n")
    rows: list[dict[str, Any]] = [
        {"id": "short", "task": "qa", "turns": ["Why?", "And then?"]},
        {"id": "again", "task": "qa", "turns": ["Why?"]},
        {"id": "long", "task": "rag", "turns": ["x" * 2000]},
        {"id": "other", "task": "rag", "turns": ["How?"]},
        {"id": "too-many", "task": "rag", "turns": ["Who?"]},
    ]
    heldout.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return argparse.Namespace(
        verifier=tmp_path,
        questions=questions,
        heldout=heldout,
        into=tmp_path / "work",
        boundaries=[2, 15, 27, 30],
        train=1,
        validation=1,
        most_heldout=2,
        answer_tokens=256,
        seqs=8,
        epochs=3,
        tokens_per_step=512,
        draft_vocabulary=4096,
        eager=True,
    )


def test_held_out_are_questions_that_fit_once_each(
    real_head: Any, given: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_head.chat, "load_tokenizer", lambda _: None)
    monkeypatch.setattr(real_head.chat, "prompt_ids", lambda _, said: tuple(said[0].content))
    work = real_head.Work(given)
    real_head.begin(work)
    assert work.result["tasks"] == {"short": "qa", "other": "rag"}
    lines = run_folder.read_lines(given.into / "questions.jsonl")
    assert [row["id"] for row in lines] == ["short", "other", "q"]
    assert lines[0]["turns"] == ["Why?"]
    run, early = (config.load(work.config(name)) for name in ("run", "early"))
    assert run.data.heldout == 2
    assert run.capture.boundaries == (2, 15, 27, 30)
    # Each boundary one early, and the last one, without which no run captures.
    assert early.capture.boundaries == (1, 14, 26, 29, 30)
    assert str(given.verifier) not in json.dumps(work.result["settings"])


def test_a_stage_is_done_once_and_a_failure_is_none(
    real_head: Any, given: argparse.Namespace
) -> None:
    work = real_head.Work(given)
    count = [sys.executable, "-c", f"print('x', file=open({str(given.into / 'n')!r}, 'a'))"]
    with pytest.raises(CheckFailed, match="one ended with 1"):
        work.once("one", sys.executable, "-c", "raise SystemExit('no room')")
    assert "no room" in (given.into / "logs" / "one.log").read_text()
    work.once("one", *count)
    real_head.Work(given).once("one", *count)  # another process, after an interruption
    assert (given.into / "n").read_text() == "x\n"


def test_acceptance_of_each_task(real_head: Any, given: argparse.Namespace) -> None:
    """Three steps with one token accepted of two, then one step with two of two: 2 and 3."""
    work = real_head.Work(given)
    work.result["tasks"] = {"a": "qa", "b": "qa", "c": "rag"}
    made = {"a": [1, 1, 1], "b": [0, 0, 0], "c": [0, 0, 1]}
    for head, histograms in (("none", {}), ("trained", made)):
        row = {"head": head, "temperature": 1.0, "histograms": histograms}
        path = work.folder("run").evaluate / f"{head}-1.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        run_folder.write_json(path, row)
    told = {"head": "trained", "temperature": 1.0, "qa": 2.0, "rag": 3.0}
    assert real_head.by_task(work) == [told]


def test_what_is_captured_early_are_the_same_conversations(
    real_head: Any, given: argparse.Namespace
) -> None:
    """Made anew they would not be; and it stands for captures of its own."""
    work = real_head.Work(given)
    run, early = work.folder("run"), work.folder("early")
    for path in (run.conversations, run.heldout):
        run_folder.append_line(path, {"id": path.name})
    run_folder.write_json(run.root / "made-from.json", {"verifier": 1, "data": 2, "capture": 3})
    asked = []
    work.verb = lambda *words: asked.append(words)
    real_head.captured_early(work)
    assert asked == [("extract", "early", "--allow-uncertified", real_head.REASON)]
    assert early.conversations.read_bytes() == run.conversations.read_bytes()
    assert early.heldout.read_bytes() == run.heldout.read_bytes()
    claimed = run_folder.read_json(early.root / "made-from.json")
    assert claimed == {"verifier": 1, "data": 2}


@pytest.mark.parametrize("measured", [True, False])
def test_an_evaluation_that_fails_over_what_it_measured_is_told(
    real_head: Any, given: argparse.Namespace, *, measured: bool
) -> None:
    work = real_head.Work(given)
    work.result["tasks"] = {"a": "qa"}
    folder = work.folder("run")
    folder.root.mkdir(parents=True)
    run_folder.append_line(folder.heldout, {"id": "a"})
    (given.into / "speculators" / "2").mkdir(parents=True)
    asked = []

    def refuse(verb: str, name: str, *options: str) -> None:
        asked.append((verb, name, *options))
        if measured:
            folder.evaluate.mkdir()
            run_folder.write_json(folder.evaluate / "results.json", {"runs": []})
        raise CheckFailed("evaluate ended with 1", remedy="see its log")

    work.verb = refuse
    if measured:
        real_head.evaluated(work)
        told = json.loads((given.into / "result.json").read_text())["evaluation"]
        assert told["failed"] == "evaluate ended with 1; see its log"
    else:
        with pytest.raises(CheckFailed, match="ended with 1"):
            real_head.evaluated(work)
    heads = [option.partition("=")[0] for option in asked[0][3::2]]
    assert heads == ["first-boundary-only", "off-by-one", "speculators"]


def test_what_training_said_and_what_serving_does(
    real_head: Any, given: argparse.Namespace
) -> None:
    """The figure holds both, for a training that tells steps and for one that does not."""
    work = real_head.Work(given)
    metrics = work.folder("run").train / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    for kind, step in (("step", 1), ("step", 2), ("validation", 2)):
        row = {"kind": kind, "step": step, "epoch": 0, "loss": 2.0, "accuracy": [0.7, 0.5]}
        run_folder.append_line(metrics, row)
    validation = real_head.validations(work.folder("run"))
    assert validation == [{"step": 2, "loss": 2.0, "accuracy": [0.7, 0.5]}]
    theirs = [{"loss": 2.1, "accuracy": [0.6, 0.5]}]
    work.result["trained"] = {"trained": validation, "speculators": theirs}
    work.result["evaluation"] = {
        "runs": [
            {"head": head, "temperature": t, "acceptance_length": 2.0}
            | ({"acceptance_length_interval": [1.9, 2.1]} if head != "none" else {})
            for head in ("none", "trained", "speculators")
            for t in (0.0, 1.0)
        ]
    }
    real_head.drawn(work)
    drawn = (given.into / "figure.svg").read_text()
    for said in ("trained", "speculators", "temperature 1"):
        assert f"<!-- {said} -->" in drawn
    assert "<!-- none -->" not in drawn


def test_the_last_epochs_head(real_head: Any, tmp_path: Path) -> None:
    for name in ("2", "10", "checkpoint_best", "9"):
        (tmp_path / name).mkdir()
    assert real_head.newest(tmp_path).name == "10"


def test_bad_input_ends_in_one_sentence(given: argparse.Namespace, tmp_path: Path) -> None:
    """As from truetap's own command, and as from every script here."""
    script = ROOT / "benchmarks" / "real_head.py"
    nowhere = tmp_path / "nowhere.jsonl"
    command = [sys.executable, script, tmp_path, "--questions", given.questions]
    ended = subprocess.run(
        [*map(str, command), "--heldout", str(nowhere), "--into", str(tmp_path / "made")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    said = f"real_head.py: there are no questions at {nowhere}\nremedy: name JSON lines\n"
    assert ended.stderr == said


def test_the_committed_head_stands_on_the_committed_certificate() -> None:
    """What the results say of a head on an H200 can be followed to the suite's report."""
    name = "vllm_native-vllm-0.26.0-h200-smollm2-compiled.json"
    certificate = ROOT / "fixtures" / "certificates" / name
    card = (RESULTS / "real-head-h200-card.md").read_text()
    assert hashlib.sha256(certificate.read_bytes()).hexdigest() in card
    envelope = json.loads(certificate.read_text())
    predicate = json.loads(base64.b64decode(envelope["payload"]))["predicate"]
    seen = report.load(ROOT / "fixtures/reports/h200" / name.replace("-h200", ""))
    assert (predicate["result"], seen.verdict) == ("pass", "conformant")
    assert predicate["suite"]["sha256"] == seen.suite_digest
    binding = seen.environment["binding"]
    assert predicate["environment"]["binding"] == binding
    result = json.loads((RESULTS / "real-head-h200.json").read_text())
    assert result["settings"]["boundaries"] == binding["boundaries"]
    assert result["captured"]["audited"] == result["captured"]["shards"]

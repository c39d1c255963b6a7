"""The comparison of trainers: what a rate is counted from."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from truetap.harness.errors import CheckFailed
from truetap.pipeline import run_folder
from truetap.pipeline.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("training_rate")


def test_a_rate_leaves_out_what_starting_and_compiling_take(training: Any) -> None:
    """1,000 tokens in 100 steps, ten a second once it runs; the first step took a minute."""
    slow_start = [(60.0, 1), *((60.0 + n / 10, 1 + n) for n in range(1, 100))]
    assert training.rate(slow_start, 1000, 0) == pytest.approx(100)
    assert training.rate(slow_start, 1000, 50) == pytest.approx(100)
    every_tenth = [one for one in slow_start if one[1] % 10 == 0]
    assert training.rate(every_tenth, 1000, 20) == pytest.approx(100)


@pytest.mark.parametrize("seen", [[], [(1.0, 40)], [(1.0, 49), (2.0, 50)], [(1.0, 50), (2.0, 50)]])
def test_too_few_steps_are_no_rate(training: Any, seen: list[tuple[float, int]]) -> None:
    with pytest.raises(CheckFailed, match="too few to leave 50 out"):
        training.rate(seen, 1000, 50)


def test_which_step_the_other_trainer_reports(training: Any) -> None:
    line = "   INFO     {'train': {'loss': 1.5}, 'epoch': 0, 'global_step': 70}   trainer.py"
    assert training.steps_of(line) == 70
    assert training.steps_of("Starting fresh training run.") is None


def test_a_trainer_that_fails_is_no_measurement(training: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no GPU')"]
    with pytest.raises(CheckFailed, match="ended with 1"):
        training.watched(command, tmp_path / "log", lambda: None)
    assert "no GPU" in (tmp_path / "log").read_text()


def test_ratios_are_those_of_pairs(training: Any) -> None:
    made = [("truetap", 110), ("speculators", 100), ("truetap", 90), ("speculators", 60)]
    told = training.summary([{"trainer": t, "tokens_per_second": r} for t, r in made])
    assert told == {"truetap": 100, "speculators": 80, "ratio": 1.3, "ratios": [1.1, 1.5]}


def test_our_trainer_gets_the_same_conversations_and_shards_for_one_epoch(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, scratch = RunFolder(tmp_path / "run"), tmp_path / "scratch"
    scratch.mkdir()
    folder.shards.mkdir(parents=True)
    for path in (folder.conversations, folder.heldout):
        path.write_text("{}\n")
    known = {"verifier": 1, "data": 2, "capture": 3}
    run_folder.write_json(folder.root / "made-from.json", known | {"train": 4})
    monkeypatch.setattr(training, "watched", lambda command, *_: command)
    text = f'output = "{folder.root}"\n[train]\nepochs = 3\n'
    command = training.ours(text, folder, scratch, "")
    assert command[-2:] == ["train", str(scratch / "ours.toml")]
    own = f'output = "{scratch / "ours"}"\n[train]\nepochs = 1\n'
    assert (scratch / "ours.toml").read_text() == own
    root = scratch / "ours"
    assert run_folder.read_json(root / "made-from.json") == known
    assert RunFolder(root).shards.resolve() == folder.shards.resolve()
    assert RunFolder(root).conversations.read_text() == "{}\n"

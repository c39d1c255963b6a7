"""The founding scene for big verifiers: its configuration, and the rows that it demands."""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from truetap.harness.errors import CheckFailed
from truetap.harness.random_verifier import tiny_llama
from truetap.pipeline import config
from truetap.pipeline.run_folder import RunFolder

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("founding_scene")


@pytest.mark.parametrize(("ranks", "epochs"), [(1, 2), (2, 4), (8, 10)])
def test_ten_samples_make_twenty_steps_with_any_number_of_ranks(
    scene: Any, tmp_path: Path, ranks: int, epochs: int
) -> None:
    given = argparse.Namespace(
        model=tiny_llama(tmp_path / "model", num_heads=8),
        into=tmp_path,
        ranks=ranks,
        samples=10,
        tokens=512,
        steps=20,
        boundaries=None,
        eager=False,
        reference_device="cuda:0",
    )
    made = config.load(scene.begin(given, "run"))
    assert made.train.epochs == epochs
    assert made.capture.tensor_parallel_size == ranks
    assert made.capture.boundaries == (2, 6, 9, 12)
    lines = (tmp_path / "run/conversations.jsonl").read_text().splitlines()
    assert len(lines) == 10
    scene.begin(given, "run")
    assert (tmp_path / "run/conversations.jsonl").read_text().splitlines() == lines


def store(rows: list[int], states: int = 4, width: int = 8) -> Any:
    import torch

    offsets = torch.tensor([0, *rows]).cumsum(0)
    held = {"offsets": offsets, "states": torch.zeros(int(offsets[-1]), states, width)}
    return SimpleNamespace(entries=lambda: {"a": {}}, verified=lambda _: held)


def test_as_many_rows_as_tokens_in_four_states(scene: Any) -> None:
    assert scene.rows_of(store([5, 7]), [5, 7], 8, 4) == [5, 7]
    with pytest.raises(CheckFailed, match=r"rows of the requests are \[5, 6\]"):
        scene.rows_of(store([5, 6]), [5, 7], 8, 4)
    with pytest.raises(CheckFailed, match=r"states are \[12, 1, 8\]"):
        scene.rows_of(store([5, 7], states=1), [5, 7], 8, 4)
    with pytest.raises(CheckFailed, match=r"states are \[12, 4, 9\]"):
        scene.rows_of(store([5, 7], width=9), [5, 7], 8, 4)


TRAINING = """
import json, subprocess, sys, time
from pathlib import Path

train, head, quick = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "quick"
if len(sys.argv) == 4:  # as torchrun does: the work is done by a process in a session of its own
    sys.exit(subprocess.run([sys.executable, *sys.argv, "work"], start_new_session=True).returncode)
train.mkdir(parents=True)
for step in range(1, 9):
    with (train / "metrics.jsonl").open("a") as file:
        print(json.dumps({"kind": "step", "step": step, "tokens_per_s": time.time()}), file=file)
    if step == 3:
        (train / "checkpoint-000003").mkdir()
    time.sleep(0 if quick else 0.3)
head.mkdir()
(head / "truetap.json").touch()
"""


def test_a_training_is_killed_with_all_its_processes_after_a_checkpoint(
    scene: Any, tmp_path: Path
) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    folder = RunFolder(tmp_path / "slow")
    command = [str(script), str(folder.train), str(folder.head)]
    kept = scene.interrupted([*command, "slow"], folder, tmp_path / "log")
    assert [row["step"] for row in kept] == [1, 2, 3]
    there = len(scene.measured(folder))
    assert there > 3
    time.sleep(1)
    assert len(scene.measured(folder)) == there
    assert not folder.head.exists()


def test_a_training_that_was_not_killed_is_no_interruption(
    scene: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    folder = RunFolder(tmp_path / "quick")
    command = [str(script), str(folder.train), str(folder.head), "quick", "work"]
    monkeypatch.setattr(scene, "measured", lambda _: [])  # over before anybody looked
    with pytest.raises(CheckFailed, match="was not killed while it ran"):
        scene.interrupted(command, folder, tmp_path / "log")

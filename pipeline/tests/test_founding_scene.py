"""The founding scene for big verifiers: its configuration, and the rows that it demands."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from truetap.harness.errors import CheckFailed
from truetap.harness.random_verifier import tiny_llama
from truetap.pipeline import config

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

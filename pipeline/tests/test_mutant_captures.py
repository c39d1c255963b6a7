"""Captures with a fault in them, for training: that fault, nothing else, and every line says it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from truetap.harness import shard, verifier
from truetap.harness.errors import CheckFailed, UsageError
from truetap.pipeline import run_folder
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.store import Store

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
RIGHT, EARLY = (2, 4, 5, 8), (1, 3, 4, 7, 8)
TOKENS = {"c0": (5, 6, 7), "c1": (8, 9)}
SHARD = "shard-00000.safetensors"


@pytest.fixture
def mutant(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("mutant_captures")


def state(key: str, boundary: int) -> Any:
    """States in which every number tells its conversation, token and boundary."""
    import torch

    tokens = torch.tensor(TOKENS[key])[:, None]
    return (tokens + boundary / 16 + torch.zeros(128)).bfloat16()


def captured(folder: Path, model: Path, boundaries: tuple[int, ...]) -> Path:
    """Make a run that captured these boundaries; return its configuration."""
    import torch

    run = RunFolder(folder)
    run.shards.mkdir(parents=True)
    config = folder.with_suffix(".toml")
    config.write_text(
        f'output = "{folder}"\n[verifier]\ndirectory = "{model}"\n'
        f"[capture]\nboundaries = {list(boundaries)}\n"
    )
    for path in (run.conversations, run.heldout):
        path.write_text("{}\n")
    made_from = {"verifier": {}, "data": {}, "capture": {}, "train": {}}
    run_folder.write_json(folder / "made-from.json", made_from)
    store = Store(run.shards)
    digests = shard.write_partial(
        store.path(SHARD),
        [torch.stack([state(key, k) for k in boundaries], dim=1) for key in TOKENS],
        list(TOKENS.values()),
        [b"\0" + b"\1" * (len(ids) - 1) for ids in TOKENS.values()],
    )
    store.record(
        {
            "shard": SHARD,
            "digests": digests,
            "ids": list(TOKENS),
            "boundaries": list(boundaries),
            "dtype": "bfloat16",
            "verifier": verifier.digests(model),
            "certificate": "0" * 64,
            "audit": {"every": 16},
        }
    )
    return config


@pytest.mark.parametrize(
    ("fault", "held"), [("first-boundary-only", (2, 2, 2, 2)), ("off-by-one", (1, 3, 4, 7))]
)
def test_the_fault_is_made_and_nothing_else(
    mutant: Any, tmp_path: Path, tiny_verifier: Path, fault: str, held: tuple[int, ...]
) -> None:
    run = mutant.Source(captured(tmp_path / "right", tiny_verifier, RIGHT))
    seen = mutant.Source(captured(tmp_path / "early", tiny_verifier, EARLY))
    target = RunFolder(tmp_path / "made")
    mutant.make(run, seen if fault == "off-by-one" else None, fault, target, threads=2)
    made, right = Store(target.shards), run.store
    (entry,), (true,) = made.entries().values(), right.entries().values()
    tensors, true_tensors = made.verified(entry), right.verified(true)
    for (start, end), key in zip(((0, 3), (3, 5)), TOKENS, strict=True):
        for slot, boundary in enumerate(held):
            assert tensors["states"][start:end, slot].equal(state(key, boundary))
    assert tensors["states"].dtype == true_tensors["states"].dtype
    for name in ("token_ids", "loss_mask", "offsets"):
        assert tensors[name].equal(true_tensors[name])
    assert entry["boundaries"] == list(RIGHT)  # what it claims, wrongly
    assert entry["uncertified"]["reason"] == f"the mutant {fault}, made on purpose"
    assert "certificate" not in entry
    assert "audit" not in entry
    assert f'output = "{target.root}"' in (target.root / "run.toml").read_text()
    assert "train" not in run_folder.read_json(target.root / "made-from.json")


def test_boundaries_that_nobody_captured_are_not_made_up(
    mutant: Any, tmp_path: Path, tiny_verifier: Path
) -> None:
    run = mutant.Source(captured(tmp_path / "right", tiny_verifier, RIGHT))
    with pytest.raises(UsageError, match="needs boundaries that the run lacks"):
        mutant.make(run, None, "off-by-one", RunFolder(tmp_path / "made"), threads=1)


def test_captures_of_another_text_are_not_put_together(mutant: Any) -> None:
    import numpy as np

    states = np.zeros((3, 1, 2), dtype=np.float32)
    one = mutant.Capture("c0", (5, 6, 7), (2,), states, "bfloat16")
    other = mutant.Capture("c0", (5, 6, 8), (1,), states, "bfloat16")
    with pytest.raises(CheckFailed, match="c0 has other tokens"):
        mutant.joined(one, other)

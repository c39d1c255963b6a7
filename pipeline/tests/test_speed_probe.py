"""How a probe paces itself, and what it measures with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from truetap.harness.errors import CheckFailed, CouldNotRun, UsageError
from truetap.harness.model import CaptureRequest
from truetap.pipeline import config as configuration
from truetap.pipeline import forecast, run_folder, speed_probe, verifiers
from truetap.pipeline.forecast import Lengths
from truetap.pipeline.run_folder import RunFolder


class Engine:
    """Captures at a steady pace, on a clock of its own; the first batch takes a second more."""

    def __init__(self, tokens_per_second: float) -> None:
        self.now, self.pace = 0.0, tokens_per_second
        self.batches: list[list[str]] = []

    def capture(self, batch: Sequence[CaptureRequest]) -> None:
        self.now += sum(len(r.token_ids) for r in batch) / self.pace + (not self.batches)
        self.batches.append([r.key for r in batch])


def probed(engine: Engine, count: int, *, length: int = 100, **settings: Any) -> Any:
    requests = [CaptureRequest(f"c{n}", (1,) * length) for n in range(count)]
    return speed_probe.paced(
        requests,
        engine.capture,
        clock=lambda: engine.now,
        **{"seconds": 20, "first_tokens": 2_000} | settings,
    )


@pytest.mark.parametrize("pace", [50, 1_000, 100_000])
def test_a_probe_takes_its_time_at_any_speed_and_leaves_warming_up_out(pace: float) -> None:
    engine = Engine(pace)
    first = min(2_000, pace * 10)
    count, tokens, seconds = probed(engine, 30_000, first_tokens=first)
    assert tokens / seconds == pytest.approx(pace)
    assert tokens == 100 * count == 100 * sum(map(len, engine.batches[1:]))
    assert 17 < engine.now < 23
    names = [name for batch in engine.batches for name in batch]
    assert len(names) == len(set(names)), "the prefix cache would answer"


def test_a_request_longer_than_the_time_is_one_batch() -> None:
    engine = Engine(10)
    assert probed(engine, 5, length=1_000) == (2, 2_000, pytest.approx(201))
    assert engine.batches == [["c0", "c1"]]


def test_few_conversations_are_better_than_none() -> None:
    assert probed(Engine(1_000), 30)[0] == 10
    assert probed(Engine(1_000), 5)[:2] == (5, 500)
    with pytest.raises(UsageError, match="no conversation to measure with") as caught:
        probed(Engine(1_000), 0)
    assert caught.value.remedy


@pytest.fixture
def path(tmp_path: Path, paper_verifier: Path) -> Path:
    made = tmp_path / "run.toml"
    made.write_text(
        f'output = "{tmp_path}/run"\n[verifier]\ndirectory = "{paper_verifier}"\n'
        "[data]\ntrain = 3\nvalidation = 1\nmax_answer_tokens = 50\n"
    )
    return made


def test_answered_conversations_come_first_and_the_others_at_their_length(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration.load(path)
    folder = RunFolder(config.output)
    spec = verifiers.spec_of(config, config.verifier.directory)  # type: ignore[arg-type]
    for name, ids in (("a", [1, 2]), ("b", [3])):
        row = {"id": name, "split": "train", "token_ids": ids, "prompt_tokens": 1}
        run_folder.append_line(folder.conversations, row)
    known = Lengths({"a": 2, "b": 1}, {"c": 90, "d": 70})
    monkeypatch.setattr(forecast, "lengths_of", lambda *_: known)
    found = speed_probe.requests_of(config, folder, spec)
    assert {r.key: r.token_ids for r in found[:2]} == {"a": (1, 2), "b": (3,)}
    assert {r.key: len(r.token_ids) for r in found[2:]} == {"c": 90, "d": 70}
    random_ids = [token for r in found[2:] for token in r.token_ids]
    assert len(set(random_ids)) > 60, "stand-ins share prefixes"
    assert all(0 <= token < 512 for token in random_ids)


@pytest.mark.parametrize("existed", [True, False])
def test_nothing_is_left_behind(tmp_path: Path, *, existed: bool) -> None:
    folder = RunFolder(tmp_path / "run")
    if existed:
        folder.root.mkdir()
        (folder.root / "probe").mkdir()
        (folder.root / "probe" / "of a probe that was killed").touch()
    with speed_probe._scratch(folder) as scratch:
        assert list(scratch.iterdir()) == []
        (scratch / "probe.safetensors.partial").touch()
        with pytest.raises(CouldNotRun, match="another truetap is working in"), folder.lock():
            pass
    assert folder.root.exists() == existed
    assert not scratch.exists()


def test_of_a_probe_that_fails_the_log_is_kept_to_be_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")

    def fail() -> None:
        with speed_probe._scratch(folder) as scratch:
            (scratch / "probe.safetensors.partial").touch()
            (scratch / "engine.log").touch()
            raise CouldNotRun("the engine fails")

    with pytest.raises(CouldNotRun, match="the engine fails"):
        fail()
    assert [p.name for p in (folder.root / "probe").iterdir()] == ["engine.log"]


@pytest.mark.torch
@pytest.mark.parametrize("sound", [True, False])
def test_shards_are_made_read_back_and_removed(
    tmp_path: Path, path: Path, without_engine: Any, *, sound: bool
) -> None:
    import torch

    def states(order: Any) -> list[Any]:
        made = [torch.rand(len(r.token_ids), 2, 4, dtype=torch.bfloat16) for r in order.requests]
        return made if sound else [rows * 0 for rows in made]

    session = without_engine(states)
    requests = [CaptureRequest(f"c{n}", (1, 2, n)) for n in range(120)]

    def captured() -> None:
        speed_probe._captured(session, configuration.load(path), tmp_path, requests)

    if sound:
        captured()
        assert session.orders == 3, "50 requests make a shard"
        assert not list(tmp_path.glob("probe*"))
    else:
        with pytest.raises(CheckFailed, match="the probe: slot 0 is all zero"):
            captured()


@pytest.mark.live
@pytest.mark.torch
@pytest.mark.nightly
def test_a_real_engine_is_measured(tmp_path: Path, tiny_verifier: Path) -> None:
    made = tmp_path / "run.toml"
    made.write_text(
        f'output = "{tmp_path}/run"\n[verifier]\ndirectory = "{tiny_verifier}"\n'
        "[capture]\nmax_model_len = 256\n[data]\ntrain = 60\nvalidation = 10\n"
    )
    folder = RunFolder(tmp_path / "run")
    for n in range(70):
        row = {"id": f"c{n}", "split": "train", "token_ids": [n, *range(200)], "prompt_tokens": 1}
        run_folder.append_line(folder.conversations, row)
    before = {p.name for p in folder.root.iterdir()} | {".lock"}
    command = [sys.executable, "-m", "truetap.pipeline.cli", "plan", str(made), "--measure"]
    ran = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert said["probe"]["tokens"] == 201 * said["probe"]["conversations"] > 0
    assert said["tokens_per_second"] == pytest.approx(
        said["probe"]["tokens"] / said["probe"]["seconds"]
    )
    assert said["seconds"] == pytest.approx(70 * 201 / said["tokens_per_second"])
    assert {p.name for p in folder.root.iterdir()} == before

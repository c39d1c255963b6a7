"""The whole main job, small: a real verifier, a real engine, killed on the way, run again."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from truetap.harness import doctor

pytestmark = [pytest.mark.live, pytest.mark.torch, pytest.mark.slow]

DEADLINE_S = 600
CONFIG = """
output = "{output}"
[verifier]
builtin = "smollm2-135m-instruct"
[capture]
max_model_len = 384
dtype = "{dtype}"
[data]
train = 16
validation = 2
heldout = 4
max_answer_tokens = 24
temperature = 0.7
[extract]
requests_per_shard = 6
[train]
draft_vocabulary = 512
epochs = 2
checkpoint_every = 5
[evaluate]
max_tokens = 16
temperatures = [0.0, 0.7]
dtype = "float32"
"""


def _fast_dtype() -> str:
    """Return bfloat16, or float32 for a CPU that is slow in it."""
    import torch

    slow = doctor.is_slow_in_bfloat16(torch.backends.cpu.get_cpu_capability())
    return "float32" if slow else "bfloat16"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration for minutes, not hours."""
    folder = tmp_path_factory.mktemp("run")
    path = folder / "small.toml"
    path.write_text(CONFIG.format(output=folder / "out", dtype=_fast_dtype()))
    return path


def _truetap(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "truetap.pipeline.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, output


def _kill_when(process: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    """Kill -9 the command alone, as an out-of-memory killer would, once ``ready()``."""
    deadline = time.monotonic() + DEADLINE_S
    while not ready():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=15)
    assert [p for p in alive if "truetap.harness.reaper" not in p.cmdline()] == []


def test_a_broken_capture_is_denied_and_nothing_is_extracted(config: Path) -> None:
    code, output = _finish(_truetap("run", str(config), "--mutant", "first-boundary-only"))
    assert code == 1, output
    assert "gate: denied" in output
    assert "the slot for boundary 15 holds boundary 2" in output
    assert "LAYERS-001" in output
    assert "Traceback" not in output
    made = config.parent / "out" / "mutants" / "first-boundary-only"
    assert not (made / "certificate.json").exists()
    assert not (made / "shards").exists()
    assert not (config.parent / "out" / "shards").exists()


def test_killed_at_several_stages_it_finishes_and_redoes_little(config: Path) -> None:
    out = config.parent / "out"
    answers = out / "conversations.jsonl"
    manifest = out / "shards" / "manifest.jsonl"

    _kill_when(_truetap("run", str(config)), lambda: _lines(answers) >= 3)
    kept = answers.read_text().splitlines()[:3]

    _kill_when(_truetap("run", str(config)), lambda: _lines(manifest) >= 1)
    assert answers.read_text().splitlines()[:3] == kept
    first = out / "shards" / "shard-00000.safetensors"
    written = first.stat().st_mtime_ns

    _kill_when(_truetap("run", str(config)), lambda: any(out.glob("train/checkpoint-000005")))
    assert first.stat().st_mtime_ns == written
    shards = {p: p.stat().st_mtime_ns for p in out.glob("shards/*.safetensors")}

    code, output = _finish(_truetap("run", str(config)))
    assert code == 0, output
    assert "a certificate made for these settings" in output
    assert {p: p.stat().st_mtime_ns for p in out.glob("shards/*.safetensors")} == shards

    audits = [json.loads(line) for line in (out / "shards" / "audits.jsonl").open()]
    assert {line["verdict"] for line in audits} == {"pass"}
    assert audits[-1]["shard"] == max(path.name for path in shards)
    answered_for = {name for line in audits for name in line["answers_for"]}
    assert answered_for == {path.name for path in shards}
    assert all(slot["margin"] > 4 for line in audits for slot in line["slots"])

    steps = [json.loads(line) for line in (out / "train" / "metrics.jsonl").open()]
    numbers = [row["step"] for row in steps if row["kind"] == "step"]
    assert numbers == list(range(1, len(numbers) + 1))
    assert steps[-1]["loss"] < steps[0]["loss"]

    results = json.loads((out / "evaluate" / "results.json").read_text())
    assert results["greedy_identical"] == {"untrained": [4, 4], "trained": [4, 4]}
    measured = {(run["head"], run["temperature"]) for run in results["runs"]}
    assert measured == set(itertools.product(("none", "untrained", "trained"), (0, 0.7)))
    page = (out / "report.html").read_text()
    assert "conformant" in page
    assert f"{len(audits)} audits, none failed" in page


def test_a_second_run_redoes_nothing(config: Path) -> None:
    out = config.parent / "out"
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*.safetensors")}
    began = time.monotonic()
    code, output = _finish(_truetap("run", str(config)))
    assert code == 0, output
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*.safetensors")} == before
    assert "starting vLLM" not in output
    assert time.monotonic() - began < DEADLINE_S


@pytest.mark.nightly
def test_the_tokens_of_steps_tell_what_vllm_counts(config: Path, tmp_path: Path) -> None:
    """So that acceptance can be measured on releases that do not count it themselves."""
    from truetap.harness.engine import Prompt, VllmEngine
    from truetap.pipeline import evaluate, run_folder
    from truetap.pipeline.cli import Stage

    code, output = _finish(_truetap("run", str(config)))
    assert code == 0, output
    stage = Stage(config, None)
    drafts = stage.config.evaluate.num_speculative_tokens
    greedy = {"max_tokens": 100, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
    questions = run_folder.read_lines(stage.folder.heldout)
    prompts = [Prompt(question["id"], question["token_ids"], greedy) for question in questions]
    arguments = evaluate._engine(stage.folder.head, stage.config, stage.model)
    with VllmEngine(arguments, log=tmp_path / "engine.log") as engine:
        finished = list(engine.generate(prompts))
    accepted = 0
    for one in finished:
        counted = np.array(one.accepted_histogram)
        told = np.array(evaluate._accepted(replace(one, accepted_histogram=None), drafts))
        assert (counted - told).tolist() in np.eye(drafts + 1, dtype=int).tolist()  # the last step
        accepted += told @ np.arange(drafts + 1)
    assert accepted > 0


def test_a_corrupt_shard_stops_training_and_is_the_only_one_redone(config: Path) -> None:
    out = config.parent / "out"
    shards = sorted(out.glob("shards/*.safetensors"))
    data = bytearray(shards[1].read_bytes())
    data[-1] ^= 1
    shards[1].write_bytes(data)
    for made in ("head", "train"):
        (out / made).rename(out / f"{made}-old")
    code, output = _finish(_truetap("train", str(config)))
    assert code == 4, output
    assert shards[1].name in output
    assert "remedy: run truetap extract again" in output
    kept = {p: p.stat().st_mtime_ns for p in shards if p != shards[1]}
    code, output = _finish(_truetap("extract", str(config)))
    assert code == 0, output
    assert {p: p.stat().st_mtime_ns for p in kept} == kept
    for made in ("head", "train"):
        (out / f"{made}-old").rename(out / made)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0

"""Real engines on a real Ray: one of two killed in the middle, the same bytes as from one."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from truetap.pipeline import audit_log
from truetap.pipeline.store import Store

pytestmark = [pytest.mark.live, pytest.mark.torch, pytest.mark.slow, pytest.mark.nightly]

DEADLINE_S = 400
REASON = ("--allow-uncertified", "equality is tried, not the capture path")
CONFIG = """
output = "{output}"
[verifier]
directory = "{model}"
[capture]
boundaries = [2, 4, 6, 8]
dtype = "float32"
max_num_seqs = 1
enable_prefix_caching = false
max_model_len = 384
[extract]
requests_per_shard = 4
[audit]
every_shards = 100
"""


def configuration(root: Path, name: str, model: Path, conversations: int) -> Path:
    out = root / name
    out.mkdir()
    draw = random.Random(5)
    with (out / "conversations.jsonl").open("w") as file:
        for n in range(conversations):
            ids = [draw.randrange(2, 512) for _ in range(draw.randrange(120, 300))]
            row = {"id": f"c{n:04}", "split": "train", "token_ids": ids, "prompt_tokens": 9}
            file.write(json.dumps(row) + "\n")
    path = root / f"{name}.toml"
    path.write_text(CONFIG.format(output=out, model=model))
    return path


def extract(config: Path, *options: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "truetap.pipeline.cli", "extract", config, *REASON, *options],
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def wait_for(process: subprocess.Popen[bytes], ready: Callable[[], bool], log: Path) -> None:
    until = time.monotonic() + DEADLINE_S
    while not ready():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.02)


def engines_of(manifest: Path) -> set[str]:
    """Return which engines have made a shard."""
    text = manifest.read_text() if manifest.exists() else ""
    whole = text[: text.rfind("\n") + 1].splitlines()
    return {json.loads(line)["audit"]["engine"] for line in whole}


def files(root: Path, name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / name / "shards").glob("*.safetensors")}


def test_a_killed_engine_changes_no_byte(tmp_path: Path, tiny_verifier: Path) -> None:
    one = configuration(tmp_path, "one", tiny_verifier, 600)
    two = configuration(tmp_path, "two", tiny_verifier, 600)
    manifest, log = tmp_path / "two" / "shards" / "manifest.jsonl", tmp_path / "two.log"

    process = extract(two, "--ray", "local", "--engines", "2", log=log)
    wait_for(process, lambda: len(engines_of(manifest)) == 2, log)
    started = psutil.Process(process.pid).children(recursive=True)
    workers = [p for p in started if "EngineWorker" in " ".join(p.cmdline())]
    assert len(workers) == 2
    workers[0].kill()
    code, said = process.wait(DEADLINE_S), log.read_text()
    assert code == 0, said
    assert " is lost: its process died (" in said
    assert "Traceback" not in said
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:1])  # as many threads as each of the two had
    try:
        process = extract(one, log=tmp_path / "one.log")
    finally:
        os.sched_setaffinity(0, cores)
    assert process.wait(DEADLINE_S) == 0, (tmp_path / "one.log").read_text()

    assert files(tmp_path, "one") == files(tmp_path, "two")
    lines = [json.loads(line) for line in manifest.open()]
    assert sorted(line["shard"] for line in lines) == sorted(files(tmp_path, "two"))
    assert len(lines) == 150
    store = Store(manifest.parent)
    audit_log.require_kept(store)
    by_engine = {e: {s["shard"] for s in lines if s["audit"]["engine"] == e} for e in ("1", "2")}
    for audit in audit_log.AuditLog(store).lines():
        assert audit["verdict"] == "pass"
        answered = set(audit["answers_for"])
        assert answered <= by_engine["1"] or answered <= by_engine["2"]  # none vouches for another
    assert list(manifest.parent.glob("*.partial")) == []

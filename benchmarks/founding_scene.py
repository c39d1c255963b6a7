"""Ten samples of 512 tokens through all of truetap, on a verifier as big as the machine holds.

    python benchmarks/shaped_verifier.py kimi-k2.5 KIMI --device cuda
    python benchmarks/founding_scene.py KIMI --into DIR --reference-device cuda:0
    python benchmarks/founding_scene.py KIMI --into DIR --reference-device cuda:0 --ranks 8

The story that truetap began with: four states of `[tokens, 7168]` a request were expected and one
came, 943 rows came where 771 were expected. Here the capture path is put through the conformance
suite, certified with a key, gated and made to extract; every request must have as many rows as
tokens, in four states of the verifier's width. Then a draft head makes some steps on them, in as
many processes as there are ranks; once through, and once killed in the middle and continued, which
must come to the same steps. Writes DIR/result.json.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import ending
import psutil
from capture_tax import hardware, versions

from truetap.harness import boundaries, reaper, report, verifier
from truetap.harness.errors import CheckFailed
from truetap.pipeline import config, run_folder
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.store import Store

CLI = ("-m", "truetap.pipeline.cli")
RUN = """\
output = "{output}"
[verifier]
directory = "{model}"
[capture]
boundaries = {boundaries}
max_model_len = {length}
tensor_parallel_size = {ranks}
enforce_eager = {eager}
[gate]
reference_device = "{reference_device}"
[audit]
enabled = false
[train]
draft_vocabulary = {vocabulary}
epochs = {epochs}
tokens_per_step = {tokens}
checkpoint_every = {checkpoint_every}
"""


def settings(given: argparse.Namespace, output: Path) -> str:
    """Return a run's configuration."""
    described = verifier.describe(given.model)
    # Each sample is a pack, and each step takes one for every process.
    steps_of_an_epoch = math.ceil(given.samples / given.ranks)
    return RUN.format(
        output=output,
        model=given.model.resolve(),
        boundaries=list(given.boundaries or boundaries.eagle3(described.num_blocks)),
        length=max(1024, 2 * given.tokens),
        ranks=given.ranks,
        eager=str(given.eager).lower(),
        reference_device=given.reference_device,
        vocabulary=min(described.vocab_size, 16384),
        epochs=math.ceil(given.steps / steps_of_an_epoch),
        tokens=given.tokens,
        checkpoint_every=max(1, given.steps // 4),
    )


def begin(given: argparse.Namespace, name: str) -> Path:
    """Write a run's configuration and its conversations of random tokens."""
    path, folder = given.into / f"{name}.toml", RunFolder(given.into / name)
    folder.root.mkdir(parents=True, exist_ok=True)
    path.write_text(settings(given, folder.root.resolve()))
    if not folder.conversations.exists():
        drawn = random.Random(10)
        vocabulary = verifier.describe(given.model).vocab_size
        for number in range(given.samples):
            ids = [drawn.randrange(3, vocabulary) for _ in range(given.tokens)]
            row = {"id": f"sample-{number}", "split": "train", "token_ids": ids, "prompt_tokens": 3}
            run_folder.append_line(folder.conversations, row)
    return path


def done(*command: str, log: Path) -> float:
    """Run a command; return the seconds that it took. Raises ``CheckFailed`` if it fails."""
    print(" ".join(command), flush=True)
    began = time.monotonic()
    with log.open("a") as file:
        code = subprocess.run(
            [sys.executable, *command], stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        raise CheckFailed(f"{' '.join(command)} ended with {code}", remedy=f"see {log}")
    return round(time.monotonic() - began, 1)


def rows_of(store: Store, wanted: Sequence[int], width: int, states: int) -> list[int]:
    """Return how many rows each request has; ``CheckFailed`` unless all have what they should."""
    found = []
    for entry in store.entries().values():
        tensors = store.verified(entry)
        if tuple(tensors["states"].shape[1:]) != (states, width):
            raise CheckFailed(f"states are {list(tensors['states'].shape)}")
        found += [end - start for start, end in pairwise(tensors["offsets"].tolist())]
    if sorted(found) != sorted(wanted):
        raise CheckFailed(f"rows of the requests are {found}, their tokens {list(wanted)}")
    return found


def training(given: argparse.Namespace, path: Path) -> tuple[str, ...]:
    """Return the arguments that train a run in as many processes as there are ranks."""
    alone = (*CLI, "train", str(path))
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", str(given.ranks))
    return (*launcher, *alone) if given.ranks > 1 else alone


def measured(folder: RunFolder) -> list[dict[str, Any]]:
    """Return what is on record of each step of a training, how fast it was included."""
    rows = run_folder.read_lines(folder.train / "metrics.jsonl")
    return [row for row in rows if row["kind"] == "step"]


def alike(row: dict[str, Any]) -> dict[str, Any]:
    """Return what has to be the same if a step is made again."""
    return {name: value for name, value in row.items() if name != "tokens_per_s"}


def interrupted(command: Sequence[str], folder: RunFolder, log: Path) -> list[dict[str, Any]]:
    """Start a training, kill all of it some steps after a checkpoint; return those up to it."""
    kept: list[dict[str, Any]] = []
    with log.open("a") as file:
        running = psutil.Popen([sys.executable, *command], stdout=file, stderr=subprocess.STDOUT)
        while running.poll() is None:
            checkpoints = sorted(folder.train.glob("checkpoint-*[0-9]"))
            rows = measured(folder)
            if checkpoints and len(rows) > int(checkpoints[0].name[-6:]):
                # torchrun gives its processes sessions of their own.
                reaper.kill([*running.children(recursive=True), running])
                kept = rows[: int(checkpoints[0].name[-6:])]
            time.sleep(0.05)
    if not kept or (folder.head / "truetap.json").exists():
        raise CheckFailed("the training was not killed while it ran", remedy=f"see {log}")
    return kept


def captured(given: argparse.Namespace, path: Path, folder: RunFolder) -> dict[str, Any]:
    """Conform, certify, gate and extract; return what came of it."""
    log, key = given.into / "log", given.into / "keys" / "node.pem"
    if not key.exists():
        done(*CLI, "keys", "new", "node", "--into", str(key.parent), log=log)
    told: dict[str, Any] = {"conform_s": done(*CLI, "conform", str(path), log=log)}
    done(*CLI, "certify", str(path), "--key", str(key), log=log)
    told["extract_s"] = done(*CLI, "extract", str(path), log=log)
    seen = report.load(folder.report)
    told |= {"verdict": seen.verdict, "clauses": len(seen.clauses)}
    spec = config.load(path).capture.boundaries or ()
    width = verifier.describe(given.model).hidden_size
    rows = rows_of(Store(folder.shards), [given.tokens] * given.samples, width, len(spec))
    return told | {"boundaries": spec, "width": width, "rows": rows}


def taught(given: argparse.Namespace, path: Path, folder: RunFolder) -> dict[str, Any]:
    """Train once through and once killed and continued; return how the two compare."""
    log, other = given.into / "log", RunFolder(given.into / "resumed")
    shutil.rmtree(other.root, ignore_errors=True)
    again = begin(given, "resumed")
    shutil.copytree(folder.shards, other.shards)
    for name in ("certificate.json", "made-from.json"):
        shutil.copy(folder.root / name, other.root / name)
    told: dict[str, Any] = {"train_s": done(*training(given, path), log=log)}
    kept = interrupted(training(given, again), other, log)
    done(*training(given, again), log=log)
    through, resumed = measured(folder), measured(other)
    if resumed[: len(kept)] != kept:  # made again they would not have been equally fast
        raise CheckFailed(f"the {len(kept)} steps before the checkpoint were made again")
    heads = [run.head / "model.safetensors" for run in (folder, other)]
    return told | {
        "steps": len(through),
        "continued_after": len(kept),
        "same_steps": [alike(row) for row in through] == [alike(row) for row in resumed],
        "same_head": heads[0].read_bytes() == heads[1].read_bytes(),
    }


def main() -> None:
    """Play it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="verifier's directory")
    parser.add_argument("--into", type=Path, required=True, help="folder for everything")
    parser.add_argument("--ranks", type=int, default=1, help="tensor parallel, and of the training")
    parser.add_argument("--boundaries", type=lambda text: [int(k) for k in text.split(",")])
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--reference-device", default="cpu")
    parser.add_argument("--eager", action="store_true", help="neither compile nor capture graphs")
    given = parser.parse_args()
    given.into.mkdir(parents=True, exist_ok=True)
    path, folder = begin(given, "run"), RunFolder(given.into / "run")
    result: dict[str, Any] = {
        "format": "truetap/benchmark/1",
        "measures": "the founding scene: rows, states and steps of a small run, end to end",
        "hardware": hardware(),
        "versions": versions(),
        "settings": {"ranks": given.ranks, "samples": given.samples, "tokens": given.tokens},
    }
    for stage in (captured, taught):
        result |= stage(given, path, folder)
        (given.into / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    ending.run(main)

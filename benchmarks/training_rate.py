"""Tokens per second of training a draft head: `truetap train` and speculators' trainer, in turn.

    python benchmarks/training_rate.py RUN.toml --rounds 2 --out FILE

The configuration is that of a run with shards and an exported dataset. Both train one epoch of the
same conversations, read from the same verified shards, with as many tokens a step and draft steps
and as large a draft vocabulary; everything else is each one's own default. They take turns: A B A
B. What starting, verifying and compiling take is left out: a rate is that of the tokens after the
first --skip steps, by the clock of this process, which watches what each of them reports. Needs a
GPU, because speculators' trainer does.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ending
import same_conversations
from capture_tax import hardware, versions

from truetap.harness.errors import CheckFailed, UsageError
from truetap.pipeline import arrow_dataset, prepare, verifiers
from truetap.pipeline import config as configuration
from truetap.pipeline.config import RunConfig
from truetap.pipeline.run_folder import RunFolder

Seen = list[tuple[float, int]]
"""When a step was reported, and its number."""

_STEP = re.compile(r"'global_step': (\d+)")
LOG_EVERY = 10
"""Steps between two reports of speculators' trainer, which waits for the GPU at each."""


def rate(seen: Seen, tokens: int, skip: int) -> float:
    """Return tokens per second after the first ``skip`` steps of an epoch of ``tokens``.

    Steps are packs of about equal size. Raises ``CheckFailed`` if too few of them were seen.
    """
    after = [one for one in seen if one[1] >= skip]
    if len(after) < 2 or after[-1][1] == after[0][1]:
        raise CheckFailed(
            f"only {seen[-1][1] if seen else 0} steps were made: too few to leave {skip} out",
            remedy="lower --skip, or take a run of more conversations",
        )
    (first, start), (last, end) = after[0], after[-1]
    return tokens * (end - start) / end / (last - first)


def steps_of(line: str) -> int | None:
    """Return which step a line of speculators' trainer reports."""
    found = _STEP.search(line)
    return int(found[1]) if found else None


def watched(command: Sequence[str], log: Path, look: Callable[[], int | None]) -> Seen:
    """Run a command, ask ``look`` for the number of steps twenty times a second."""
    seen: Seen = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            step = look()
            if step and (not seen or seen[-1][1] != step):
                seen.append((time.monotonic(), step))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    with log.open("w") as file:
        ended = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    over.set()
    thread.join()
    if ended.returncode:
        raise CheckFailed(f"{command[2]} ended with {ended.returncode}; its log is {log}")
    return seen


def ours(text: str, folder: RunFolder, scratch: Path, reason: str) -> Seen:
    """Train with ``truetap train`` in a folder of its own."""
    root = scratch / "ours"
    same_conversations.begin(RunFolder(root), folder, ("verifier", "data", "capture"))
    (root / "shards").symlink_to(folder.shards.resolve())
    changed = re.sub(r"(?m)^output\s*=.*$", f'output = "{root}"', text, count=1)
    changed = re.sub(r"(?m)^epochs\s*=.*$", "epochs = 1", changed, count=1)
    (scratch / "ours.toml").write_text(changed)
    metrics = RunFolder(root).train / "metrics.jsonl"

    def look() -> int | None:
        return metrics.read_bytes().count(b'"kind": "step"') if metrics.exists() else None

    command = [sys.executable, "-m", "truetap.pipeline.cli", "train", str(scratch / "ours.toml")]
    allowed = ["--allow-uncertified", reason] if reason else []
    return watched([*command, *allowed], scratch / "ours.log", look)


def their_command(config: RunConfig, folder: RunFolder, epochs: int, into: Path) -> list[str]:
    """Return what trains a run with speculators' trainer, through truetap's backend."""
    model = verifiers.directory_of(config, print)
    spec = verifiers.spec_of(config, model)
    conversations = prepare.load(folder)
    training = sum(c.split == "train" for c in conversations)
    return [
        *(sys.executable, "-m", "truetap.pipeline.speculators_train"),
        *("--hidden-states-backend", "truetap", "--data-path", str(folder.dataset)),
        *("--train-data-ratio", f"{arrow_dataset.share(training, len(conversations)):.9f}"),
        *("--verifier-name-or-path", str(model)),
        *("--target-layer-ids", *map(str, spec.boundaries[:-1])),
        *("--draft-vocab-size", str(config.train.draft_vocabulary)),
        *("--total-seq-len", str(config.train.tokens_per_step)),
        *("--ttt-steps", str(config.train.test_time_steps)),
        *("--loss-implementation", "eager"),  # as ours; see draft_head.loss
        *("--epochs", str(epochs), "--log-freq", str(LOG_EVERY), "--save-path", str(into)),
    ]


def theirs(config: RunConfig, folder: RunFolder, scratch: Path, reason: str) -> Seen:
    """Train with speculators' trainer."""
    log = scratch / "theirs.log"
    command = their_command(config, folder, 1, scratch / "theirs")
    allowed = ["--truetap-allow-uncertified", reason] if reason else []

    def look() -> int | None:
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return next((step for line in reversed(lines) if (step := steps_of(line))), None)

    return watched([*command, *allowed], log, look)


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="configuration of an extracted, exported run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--skip", type=int, default=50, help="first steps that are left out")
    parser.add_argument("--allow-uncertified", default="", metavar="REASON")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    text, config = given.run.read_text(), configuration.load(given.run)
    folder = RunFolder(config.output.resolve())
    if not folder.dataset.exists():
        raise UsageError(f"{folder.dataset} is missing", remedy="run truetap export-dataset")
    training = [c for c in prepare.load(folder) if c.split == "train"]
    # Shifted by one, a conversation is trained on in one token less.
    tokens = sum(len(c.token_ids) - 1 for c in training)
    result: dict[str, Any] = {
        "format": "truetap/benchmark/1",
        "measures": "tokens per second of training after the first steps",
        "hardware": hardware(),
        "versions": versions(),
        "settings": {"skip": given.skip, "train": config.train.model_dump(), "tokens": tokens},
    }
    passes: list[dict[str, Any]] = []
    for _ in range(given.rounds):
        for name in ("truetap", "speculators"):
            with tempfile.TemporaryDirectory(dir=folder.root) as made:
                scratch, reason = Path(made), given.allow_uncertified
                if name == "truetap":
                    seen = ours(text, folder, scratch, reason)
                else:
                    seen = theirs(config, folder, scratch, reason)
            passes.append({"trainer": name, "tokens_per_second": rate(seen, tokens, given.skip)})
            print(f"{name}: {passes[-1]['tokens_per_second']:,.0f} tokens/s", flush=True)
        result |= {"summary": summary(passes), "passes": passes}
        if given.out:  # a node may be taken away before the last round
            given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))


def summary(passes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians, and the ratio of ours to theirs, pair by pair and of the medians."""
    rates = {
        name: [one["tokens_per_second"] for one in passes if one["trainer"] == name]
        for name in ("truetap", "speculators")
    }
    pairs = [a / b for a, b in zip(rates["truetap"], rates["speculators"], strict=True)]
    return {
        **{name: round(statistics.median(values)) for name, values in rates.items()},
        "ratio": round(statistics.median(pairs), 3),
        "ratios": [round(pair, 3) for pair in pairs],
    }


if __name__ == "__main__":
    ending.run(main)

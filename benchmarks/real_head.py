"""A head trained on many real conversations, measured against what it could have been.

    python benchmarks/real_head.py VERIFIER --questions TRAIN --heldout SPEC_BENCH --into DIR

The verifier answers the questions; its states are captured, certified, audited and trained on, and
the head is served on the held-out questions, greedily and sampled. Three other heads are served on
the same questions: one that speculators' own trainer made from the same shards in as many steps,
and two from captures with a fault in them, which the gate denies: the first boundary in all slots,
and every boundary one block early. So the result tells what the head saves, and what a wrong
capture would have cost.

TRAIN and SPEC_BENCH are JSON lines with "id" and "turns". A row that is held out may have a "task":
acceptance is told for each. Everything is done by truetap's own commands. Trainings run beside each
other, so what they take is no measure of speed; training_rate.py measures that. Finished stages are
not done again. Writes DIR/result.json and DIR/figure.svg. 18,000 conversations of SmolLM2 take
110 GB; DIR/early and DIR/off-by-one, half of them, may be links to another disk.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ending
import numpy as np
import same_conversations
from capture_tax import hardware, versions
from founding_scene import CLI
from training_rate import their_command

from truetap.harness.errors import CheckFailed, UsageError
from truetap.pipeline import chat, config, prepare, run_folder
from truetap.pipeline.dialogues import Message
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.store import Store

FAULTS = ("first-boundary-only", "off-by-one")
REASON = "a fault made on purpose, to measure what it costs a head"
LENGTH = 2048
"""Of a conversation at most, in tokens."""
RUN = """\
output = "{output}"
[verifier]
directory = "{model}"
[capture]
boundaries = {boundaries}
max_model_len = {length}
max_num_batched_tokens = 8192
max_num_seqs = {seqs}
enforce_eager = {eager}
[data]
questions = "{questions}"
too_long = "drop"
train = {train}
validation = {validation}
heldout = {heldout}
max_answer_tokens = {answer_tokens}
[extract]
staging_mib = 1024
writers = 12
[train]
draft_vocabulary = {vocabulary}
epochs = {epochs}
tokens_per_step = {tokens_per_step}
checkpoint_every = 500
[evaluate]
max_tokens = {answer_tokens}
temperatures = [0.0, 1.0]
"""


class Work:
    """The folder of a measurement, and what was done in it."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.into = given, given.into
        self.result_path = self.into / "result.json"
        (self.into / "logs").mkdir(parents=True, exist_ok=True)
        known = json.loads(self.result_path.read_text()) if self.result_path.exists() else {}
        self.result: dict[str, Any] = {
            "format": "truetap/benchmark/1",
            "measures": "acceptance of draft heads, one of them from verified states",
            "hardware": known.get("hardware") or hardware(),
            "versions": known.get("versions") or versions(),
            **{k: v for k, v in known.items() if k not in ("hardware", "versions")},
        }
        self.seconds: dict[str, float] = self.result.setdefault("seconds", {})
        self._writing = threading.Lock()

    def config(self, name: str) -> Path:
        """Return the path of a run's configuration."""
        return self.into / f"{name}.toml"

    def folder(self, name: str) -> RunFolder:
        """Return the folder of a run."""
        return RunFolder(self.into / name)

    def write(self) -> None:
        """Write what is known: a machine may be taken away before the end."""
        with self._writing:  # stages that run beside each other end when they like
            run_folder.write_json(self.result_path, self.result)

    def once(self, stage: str, *command: object) -> None:
        """Run a command unless it was run; ``CheckFailed`` if it fails."""
        if stage in self.seconds:
            return
        print(f"{time.strftime('%H:%M:%S')} {stage}", flush=True)
        log, began = self.into / "logs" / f"{stage}.log", time.monotonic()
        with log.open("a") as file:
            code = subprocess.run(
                list(map(str, command)), stdout=file, stderr=subprocess.STDOUT, check=False
            ).returncode
        if code:
            raise CheckFailed(f"{stage} ended with {code}", remedy=f"see {log}")
        self.seconds[stage] = round(time.monotonic() - began, 1)
        print(f"{time.strftime('%H:%M:%S')} {stage}: {self.seconds[stage]} s", flush=True)
        self.write()

    def verb(self, verb: str, name: str, *options: object) -> None:
        """Run one of truetap's commands on one of the runs."""
        self.once(f"{verb} {name}".replace(" ", "-"), sys.executable, *CLI, verb,
                  self.config(name), *options)  # fmt: skip


def begin(work: Work) -> None:
    """Write the questions, those to be held out first, and the runs' configurations."""
    given = work.given
    questions = work.into / "questions.jsonl"
    for path in (given.questions, given.heldout):
        if not path.is_file():
            raise UsageError(f"there are no questions at {path}", remedy="name JSON lines")
    held, tasks = fitting(given, run_folder.read_lines(given.heldout))
    if not questions.exists():
        first = "".join(json.dumps(row) + "\n" for row in held)
        run_folder.write_bytes(questions, first.encode() + given.questions.read_bytes())
    early = sorted({*(k - 1 for k in given.boundaries), given.boundaries[-1]})
    for name, boundaries in (("run", given.boundaries), ("early", early)):
        work.config(name).write_text(
            RUN.format(
                output=(work.into / name).resolve(),
                model=given.verifier.resolve(),
                boundaries=list(boundaries),
                length=LENGTH,
                seqs=given.seqs,
                eager=str(given.eager).lower(),
                questions=questions.resolve(),
                train=given.train,
                validation=given.validation,
                heldout=len(held),
                answer_tokens=given.answer_tokens,
                vocabulary=given.draft_vocabulary,
                epochs=given.epochs,
                tokens_per_step=given.tokens_per_step,
            )
        )
    work.result |= {"tasks": tasks, "settings": settings(given)}


def fitting(
    given: argparse.Namespace, rows: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the first questions that leave room for an answer, and the task of each."""
    tokenizer = chat.load_tokenizer(given.verifier)
    limit = LENGTH - given.answer_tokens - 2
    kept, tasks, texts = [], {}, set()
    for row in rows:
        asked = row["turns"][0]
        fits = len(chat.prompt_ids(tokenizer, [Message("user", asked)])) <= limit
        if fits and asked not in texts and len(kept) < given.most_heldout:
            texts.add(asked)
            kept.append({"id": row["id"], "turns": [asked]})
            tasks[row["id"]] = row.get("task", "all")
    return kept, tasks


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """Return what the result depends on, without where files lie."""
    paths = {"verifier", "questions", "heldout", "into"}
    return {k: v for k, v in vars(given).items() if k not in paths}


def captured(work: Work) -> None:
    """Have the questions answered; prove, certify and capture."""
    key = work.into / "keys" / "node.pem"
    work.verb("prepare", "run")
    work.verb("conform", "run")
    if not key.exists():
        work.once("keys", sys.executable, *CLI, "keys", "new", "node", "--into", key.parent)
    work.verb("certify", "run", "--key", key)
    work.verb("extract", "run")
    work.verb("export-dataset", "run")
    folder = work.folder("run")
    conversations = prepare.load(folder)
    work.result["data"] = {
        split: {"conversations": len(of), "tokens": sum(len(c.token_ids) for c in of)}
        for split in ("train", "validation")
        if (of := [c for c in conversations if c.split == split])
    }
    entries = Store(folder.shards).entries().values()
    work.result["captured"] = {
        "rows": sum(one["rows"] for one in entries),
        "shards": len(entries),
        "audited": sum("audit" in one for one in entries),
    }
    work.write()


def captured_early(work: Work) -> None:
    """Capture one block early: what the fault off-by-one takes its states from."""
    run, early = work.folder("run"), work.folder("early")
    if not early.conversations.exists():
        same_conversations.begin(early, run, ("verifier", "data"))
    work.verb("extract", "early", "--allow-uncertified", REASON)


def trained(work: Work) -> None:
    """Train the four heads, beside each other."""
    run = config.load(work.config("run"))
    theirs = their_command(run, work.folder("run"), run.train.epochs, work.into / "speculators")
    theirs += ["--lr", str(run.train.learning_rate)]

    def mutants() -> None:
        mutant_captures = Path(__file__).with_name("mutant_captures.py")
        with ThreadPoolExecutor() as trainings:
            ends = []
            for fault in FAULTS:
                seen = ["--seen", work.config("early")] if fault == "off-by-one" else []
                work.once(f"make-{fault}", sys.executable, mutant_captures, work.config("run"),
                          "--fault", fault, *seen, "--into", work.into / fault)  # fmt: skip
                train = (sys.executable, *CLI, "train", work.into / fault / "run.toml")
                allowed = ("--allow-uncertified", REASON)
                ends.append(trainings.submit(work.once, f"train-{fault}", *train, *allowed))
            shutil.rmtree(work.folder("early").shards, ignore_errors=True)  # 31 GB, used up
        for end in ends:
            end.result()

    together: tuple[Callable[[], None], ...] = (
        lambda: work.verb("train", "run"),
        lambda: work.once("train-speculators", *theirs),
        mutants,
    )
    with ThreadPoolExecutor() as pool:
        for end in [pool.submit(one) for one in together]:
            end.result()
    work.result["trained"] = {
        ("trained" if name == "run" else name): validations(work.folder(name))
        for name in ("run", *FAULTS)
    }
    theirs_at_end = newest(work.into / "speculators") / "val_metrics.json"
    if theirs_at_end.exists():
        measured = run_folder.read_json(theirs_at_end)
        accuracy = [measured[f"full_acc_{k}_epoch"] for k in range(run.train.test_time_steps)]
        last = {"loss": measured["loss_epoch"], "accuracy": accuracy}
        work.result["trained"]["speculators"] = [last]
    work.write()


def validations(folder: RunFolder) -> list[dict[str, Any]]:
    """Return what a training measured on the conversations that it does not learn from."""
    rows = run_folder.read_lines(folder.train / "metrics.jsonl")
    kept = ("step", "loss", "accuracy")
    return [{k: row[k] for k in kept} for row in rows if row["kind"] == "validation"]


def newest(folder: Path) -> Path:
    """Return the last epoch's head of speculators' trainer."""
    return folder / str(max(int(path.name) for path in folder.iterdir() if path.name.isdigit()))


def evaluated(work: Work) -> None:
    """Serve all heads on the held-out questions."""
    heads = {fault: work.folder(fault).head for fault in FAULTS}
    heads["speculators"] = newest(work.into / "speculators")
    named = [word for name, path in heads.items() for word in ("--head", f"{name}={path}")]
    folder = work.folder("run")
    asked = {row["id"] for row in run_folder.read_lines(folder.heldout)}
    if asked != set(work.result["tasks"]):
        raise CheckFailed("other questions are held out than those that were to be")
    told, failed = folder.evaluate / "results.json", ""
    try:
        work.verb("evaluate", "run", *named)
    except CheckFailed as why:  # greedy answers that part by more than rounding are a result, too
        if not told.exists():
            raise
        failed = f"{why}; {why.remedy}"
    of_all = run_folder.read_json(told)
    work.result["evaluation"] = of_all | {"failed": failed, "by_task": by_task(work)}
    work.write()


def by_task(work: Work) -> list[dict[str, Any]]:
    """Return the acceptance length of every head at every temperature, task by task."""
    rows = []
    for path in sorted(work.folder("run").evaluate.glob("*-*.json")):
        one = run_folder.read_json(path)
        steps: dict[str, Any] = {}
        for question, histogram in one.get("histograms", {}).items():
            task = work.result["tasks"][question]
            steps[task] = steps.get(task, 0) + np.array(histogram)
        lengths = {
            task: round(float(1 + counts @ np.arange(len(counts)) / counts.sum()), 3)
            for task, counts in sorted(steps.items())
        }
        if lengths:
            rows.append({"head": one["head"], "temperature": one["temperature"], **lengths})
    return rows


def drawn(work: Work) -> None:
    """Draw what training said of each head, and what serving does."""
    from matplotlib.figure import Figure

    runs = [run for run in work.result["evaluation"]["runs"] if run["head"] != "none"]
    heads = list(dict.fromkeys(run["head"] for run in runs))
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    training, serving = figure.subplots(1, 2)
    for name, rows in work.result["trained"].items():
        steps = [row["step"] for row in rows if "step" in row]
        if steps:
            training.plot(steps, [row["accuracy"][0] for row in rows], marker="o", label=name)
    training.set_title("Training: share of next tokens right, validation", fontsize=9)
    training.set_xlabel("step")
    training.set_ylim(0, 1)
    training.legend(frameon=False, fontsize=8)
    for offset, temperature in ((0.17, 0.0), (-0.17, 1.0)):
        of = [run for run in runs if run["temperature"] == temperature]
        lengths = np.array([run["acceptance_length"] for run in of])
        ends = np.array([run["acceptance_length_interval"] for run in of]).T
        places = [len(heads) - 1 - heads.index(run["head"]) + offset for run in of]
        label = f"temperature {temperature:g}"
        serving.barh(places, lengths - 1, 0.3, left=1, xerr=abs(ends - lengths), label=label)
    serving.set_yticks(range(len(heads)), reversed(heads))
    serving.set_title("Serving: tokens a verifier step yields, 95 % interval", fontsize=9)
    serving.set_xlim(left=1)
    serving.legend(frameon=False, fontsize=8, loc="lower right")
    for axes in (training, serving):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(work.into / "figure.svg", metadata={"Date": None})


STAGES: tuple[Callable[[Work], None], ...] = (
    begin, captured, captured_early, trained, evaluated, drawn,
)  # fmt: skip


def arguments() -> argparse.Namespace:
    """Return what the user asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verifier", type=Path, help="verifier's directory")
    parser.add_argument("--questions", type=Path, required=True, help="JSON lines with turns")
    parser.add_argument("--heldout", type=Path, required=True, help="the same, for evaluation only")
    parser.add_argument("--into", type=Path, required=True, help="folder for everything")
    parser.add_argument("--boundaries", default="2,15,27,30")
    parser.add_argument("--train", type=int, default=18000)
    parser.add_argument("--validation", type=int, default=200)
    parser.add_argument("--most-heldout", type=int, default=480)
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--seqs", type=int, default=128, help="max_num_seqs of captures")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument("--draft-vocabulary", type=int, default=16384)
    parser.add_argument("--eager", action="store_true", help="neither compile nor capture graphs")
    given = parser.parse_args()
    given.boundaries = [int(k) for k in given.boundaries.split(",")]
    return given


def main() -> None:
    """Do it."""
    work = Work(arguments())
    for stage in STAGES:
        stage(work)
    print(json.dumps(work.result["evaluation"]["runs"], indent=1))


if __name__ == "__main__":
    ending.run(main)

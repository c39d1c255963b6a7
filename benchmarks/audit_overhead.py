"""What the audits of a run cost: extractions with and without them, in turn.

    python benchmarks/audit_overhead.py runs/base.toml --pairs 2 --run-seconds 780 --out FILE

The configuration is that of a run which is certified and has its conversations: `make demo` leaves
one. Each extraction is a process of its own, in a copy of the run's folder, and starts an engine.
Variants: `off`; `process`, as shipped; `inline`, the same audits in the extracting process, between
two shards, for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ending

from truetap.harness.errors import TruetapError

VARIANTS = ("off", "process", "inline")
LEFT_OUT = ("shards", "train", "head", "head-untrained", "evaluate", "logs", "mutants", ".lock")


class Inline:
    """The audit without a process of its own: the engine waits for it."""

    def __init__(self, model: Path, dtype: str) -> None:
        from truetap.harness.reference import Reference

        self._reference = Reference(model, dtype)

    def submit(self, task: Any) -> None:
        from truetap.harness.auditor import audit

        self._finding = audit(self._reference, task)

    def finished(self) -> Any:
        return self._finding

    def wait(self) -> Any:
        return self._finding

    def close(self) -> None:
        pass


def watched(*arguments: Any, **settings: Any) -> tuple[Any, dict[str, float]]:
    """Return an auditor as shipped, and what its process used, filled in when it is closed."""
    import psutil

    from truetap.harness.auditor_process import Auditor

    used: dict[str, float] = {}

    class Watched(Auditor):
        def close(self) -> None:
            times = psutil.Process(self.pid).cpu_times()
            used["auditor_processor_seconds"] = round(times.user + times.system, 2)
            super().close()

    return Watched(*arguments, **settings), used


def once(variant: str, config: Path, folder: Path) -> dict[str, Any]:
    """Extract into `folder`; return wall and processor seconds, children included."""
    from truetap.pipeline.cli import Stage
    from truetap.pipeline.extract import extract
    from truetap.pipeline.run_folder import RunFolder, read_lines

    stage = Stage(config, None)
    audit = stage.config.audit.model_copy(update={"enabled": variant != "off"})
    settings = stage.config.model_copy(update={"audit": audit})
    target, used_by_auditor = RunFolder(folder), {}

    def checker() -> Any:
        if variant == "inline":
            return Inline(stage.model, stage.spec.dtype)
        made, seen = watched(
            stage.model,
            stage.spec.dtype,
            log=target.logs / "audit.log",
            deadline_s=stage.config.audit.deadline_s,
        )
        used_by_auditor["seen"] = seen
        return made

    began = time.monotonic()
    with target.lock():
        extract(settings, target, stage.spec, stage.console, checker=checker)
    seconds = time.monotonic() - began
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    lines = read_lines(folder / "shards" / "audits.jsonl")
    return {
        "variant": variant,
        "seconds": round(seconds, 2),
        "processor_seconds": round(sum(u.ru_utime + u.ru_stime for u in used), 2),
        **used_by_auditor.get("seen", {}),
        "audits": len(lines),
        "audit_seconds": [line["seconds"] for line in lines],
        "margins": [min(slot["margin"] for slot in line["slots"]) for line in lines],
        "shards": len(read_lines(folder / "shards" / "manifest.jsonl")),
    }


def copy_of(run: Path, into: Path, conversations: int | None) -> Path:
    """Copy what extraction needs of a run; of its conversations perhaps the first few only."""
    folder = into / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    (folder / "made-from.json").unlink(missing_ok=True)
    path = folder / "conversations.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:conversations]))
    return folder


def hardware() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in info if "model name" in line), "")
    return {
        "processor": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load_before": [round(load, 2) for load in os.getloadavg()],
    }


def summary(runs: list[dict[str, Any]], run_seconds: float) -> dict[str, Any]:
    """Return for each variant its median, and what it adds to an extraction and to a whole run."""
    base = statistics.median(run["seconds"] for run in runs if run["variant"] == "off")
    told: dict[str, Any] = {}
    for variant in dict.fromkeys(run["variant"] for run in runs):
        mine = [run for run in runs if run["variant"] == variant]
        seconds = statistics.median(run["seconds"] for run in mine)
        told[variant] = {
            "seconds": seconds,
            "processor_seconds": statistics.median(run["processor_seconds"] for run in mine),
            "added_to_extraction": round((seconds - base) / base, 4),
            "added_to_run": round((seconds - base) / run_seconds, 4),
        }
        # What the auditor computed, as if the engine had stood still for it: other load on the
        # machine moves the differences above, this hardly.
        used = [r["auditor_processor_seconds"] for r in mine if "auditor_processor_seconds" in r]
        if used:
            told[variant]["at_most_of_run"] = round(statistics.median(used) / run_seconds, 4)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="configuration of a certified, prepared run")
    parser.add_argument("--pairs", type=int, default=2, help="extractions of each variant")
    parser.add_argument("--variants", default="off,process", help="comma-separated")
    parser.add_argument("--conversations", type=int, help="only the first so many")
    parser.add_argument("--run-seconds", type=float, required=True, help="what a whole run takes")
    parser.add_argument("--out", type=Path, help="where the JSON goes; default: standard output")
    parser.add_argument("--once", nargs=2, metavar=("VARIANT", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        variant, folder = given.once
        try:
            measured = once(variant, given.config, Path(folder))
        except TruetapError as error:
            print(f"{error}\nremedy: {error.remedy}", file=sys.stderr)
            sys.exit(error.exit_code)
        (Path(folder) / "measured.json").write_text(json.dumps(measured))
        return
    variants = given.variants.split(",")
    if unknown := set(variants) - set(VARIANTS):
        parser.error(f"no variant {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    from truetap.pipeline import config as configuration

    run = configuration.load(given.config).output
    machine, runs = hardware(), []
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(given.pairs):
            for variant in variants:
                folder = copy_of(run, Path(scratch), given.conversations)
                command = [sys.executable, __file__, str(given.config), "--run-seconds", "1"]
                done = subprocess.run([*command, "--once", variant, str(folder)], check=False)
                if done.returncode:
                    sys.exit(done.returncode)  # it has told its reason
                runs.append(json.loads((folder / "measured.json").read_text()))
                print(runs[-1], file=sys.stderr, flush=True)
    result = {
        "format": "truetap/benchmark/1",
        "measures": "seconds of truetap extract, engine start included",
        "hardware": machine,
        "versions": {name: version(name) for name in ("torch", "transformers", "truetap")},
        "python": platform.python_version(),
        "run_seconds": given.run_seconds,
        "summary": summary(runs, given.run_seconds),
        "runs": runs,
    }
    text = json.dumps(result, indent=1) + "\n"
    if given.out:
        given.out.write_text(text)
    print(text if not given.out else json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    ending.run(main)

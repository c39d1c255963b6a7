"""Runs the conformance suite on a run's capture path, in a process of its own, and certifies it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from truetap.harness import certificate, report
from truetap.harness.errors import CouldNotRun, TruetapError
from truetap.harness.model import EngineSpec
from truetap.harness.pytest_plugin import suite_digest
from truetap.harness.report import Report
from truetap.harness.suite_options import DEADLINE_S
from truetap.pipeline.run_folder import RunFolder, write_json

if TYPE_CHECKING:
    from rich.console import Console


def conform(
    adapter: str, spec: EngineSpec, profile: str, folder: RunFolder, console: Console
) -> Report:
    """Put an adapter through the suite; return the report, which is also written to the folder."""
    where = folder.report.parent
    where.mkdir(parents=True, exist_ok=True)
    folder.report.unlink(missing_ok=True)
    folder.certificate.unlink(missing_ok=True)
    write_json(where / "spec.json", asdict(spec))
    command = [
        *(sys.executable, "-m", "pytest", "--pyargs", "truetap.conformance"),
        *("--adapter", adapter, "--profile", profile, "--spec", str(where / "spec.json")),
        *("--report", str(folder.report), "--deadline", str(DEADLINE_S)),
        *("-q", "-s", "-p", "no:cacheprovider"),
        f"--rootdir={where}",
    ]
    console.print(f"conformance of {adapter}, profile {profile}", highlight=False)
    log = where / "suite.log"
    with log.open("w") as file:
        # -s sends the suite's own progress through; engines write to logs of their own.
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=where,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            if line.startswith("truetap: "):
                console.print("  " + line.removeprefix("truetap: ").rstrip(), highlight=False)
        process.wait()  # the suite keeps its own deadline
    if not folder.report.exists():
        raise CouldNotRun("the conformance suite did not write a report", remedy=f"see {log}")
    made = report.load(folder.report)
    show(made, console)
    return made


def show(made: Report, console: Console) -> None:
    """Print one line a clause and the verdict."""
    styles: Mapping[str, str] = {"pass": "green", "fail": "bold red"}
    for clause in made.clauses:
        outcome = clause.outcome.replace("_", " ")
        style = styles.get(clause.outcome, "yellow")
        console.print(f"  [{style}]{outcome:>7}[/] {clause.id}  {clause.title}", highlight=False)
        if clause.saw:
            console.print(
                f"            saw: {clause.saw}", style="dim", highlight=False, markup=False
            )
        if clause.expected:
            console.print(
                f"            expected: {clause.expected}",
                style="dim",
                highlight=False,
                markup=False,
            )
    console.print(f"{made.adapter}: {made.verdict}", style="bold", highlight=False)


def certify(folder: RunFolder) -> str:
    """Write a certificate for the folder's report; ``CheckFailed`` if it deserves none."""
    statement = certificate.issue(report.load(folder.report), now=datetime.now(UTC))
    return certificate.write(statement, folder.certificate)


def still_certified(adapter: str, spec: EngineSpec, profile: str, folder: RunFolder) -> bool:
    """Return True if the folder's certificate was made for these very settings and holds today.

    Only the gate decides, on facts of running workers; this only saves repeating the suite.
    """
    try:
        made_for = json.loads((folder.report.parent / "spec.json").read_text())
        held = certificate.load(folder.certificate)
        tested = report.load(folder.report)
    except (OSError, ValueError, TruetapError):
        return False
    now_wanted = json.loads(json.dumps(asdict(spec)))
    return (
        made_for == now_wanted
        and tested.adapter == adapter
        and not certificate.shortcomings(
            held,
            profile=profile,
            suite_digest=suite_digest(),
            now=datetime.now(UTC),
            binding=None,
        )
    )


def workers_binding(adapter: str, spec: EngineSpec, scratch: Path) -> Mapping[str, object]:
    """Open the capture path only to read what its workers say of themselves."""
    from contextlib import closing

    from truetap.harness import registry

    session = registry.find(adapter).open(spec, scratch=scratch)
    with closing(session):
        return session.environment().binding

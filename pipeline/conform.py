"""Runs the conformance suite on a run's capture path, in a process of its own, and certifies it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from truetap.harness import certificate, contract, report, signing
from truetap.harness.errors import CheckFailed, CouldNotRun, IntegrityError, TruetapError
from truetap.harness.model import EngineSpec
from truetap.harness.report import Report
from truetap.harness.suite_options import DEADLINE_S
from truetap.pipeline import policy
from truetap.pipeline.config import RunConfig
from truetap.pipeline.gate import Decision
from truetap.pipeline.run_folder import RunFolder, write_json

if TYPE_CHECKING:
    from rich.console import Console
    from securesystemslib.signer import CryptoSigner


def conform(
    adapter: str,
    spec: EngineSpec,
    profile: str,
    folder: RunFolder,
    console: Console,
    *,
    device: str = "cpu",
) -> Report:
    """Put an adapter through the suite; return the report, which is also written to the folder.

    ``device`` is where the reference computes.
    """
    where = folder.report.parent
    where.mkdir(parents=True, exist_ok=True)
    folder.report.unlink(missing_ok=True)
    folder.certificate.unlink(missing_ok=True)
    write_json(where / "spec.json", asdict(spec))
    command = [
        *(sys.executable, "-m", "pytest", "--pyargs", "truetap.conformance"),
        *("--adapter", adapter, "--profile", profile, "--spec", str(where / "spec.json")),
        *("--report", str(folder.report), "--deadline", str(DEADLINE_S)),
        *("--reference-device", device),
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


KEY_VARIABLE = "TRUETAP_KEY"
UNSIGNED = (
    "no key is configured: the certificate is UNSIGNED, for development only (truetap keys, "
    "docs/gate.md)"
)


def signer_of(config: RunConfig, key: Path | None = None) -> CryptoSigner | None:
    """Return what signs certificates; None if no key is named. ``UsageError`` for a bad key."""
    named = key or os.environ.get(KEY_VARIABLE) or config.gate.key
    return signing.signer_from(Path(named)) if named else None


def certify(
    config: RunConfig,
    folder: RunFolder,
    *,
    key: Path | None = None,
    validity: timedelta = certificate.VALIDITY,
    with_expectations: bool = False,
) -> certificate.Certificate:
    """Write a certificate for the folder's report; ``CheckFailed`` if it deserves none.

    ``key``, else TRUETAP_KEY, else the configuration names the private key.
    """
    signer = signer_of(config, key)
    demanded = policy.load(config.gate.policy)
    made = report.load(folder.report)
    profile = contract.stronger(config.gate.profile, demanded.profile)
    if not contract.satisfies(made.profile, profile):
        raise CheckFailed(
            f"no certificate: the report is of profile {made.profile}, not {profile}",
            remedy="run truetap conform again",
        )
    statement = certificate.issue(
        made,
        now=datetime.now(UTC),
        validity=validity,
        with_expectations=with_expectations or bool(demanded.expectations),
    )
    certificate.write(statement, folder.certificate, signer)
    return certificate.load(folder.certificate)


def keep(decision: Decision, folder: RunFolder) -> None:
    """Have a copy of the certificate that allows a run in its folder, whatever becomes of the file.

    Its digest, which the shards name, stays the same.
    """
    if decision.path is None or decision.path.resolve() == folder.certificate.resolve():
        return
    data = decision.path.read_bytes()
    if hashlib.sha256(data).hexdigest() != decision.certificate:
        raise IntegrityError(
            f"{decision.path} was changed since the gate judged it", remedy="ask the gate again"
        )
    scratch = folder.certificate.with_name(folder.certificate.name + ".partial")
    folder.root.mkdir(parents=True, exist_ok=True)
    scratch.write_bytes(data)
    scratch.rename(folder.certificate)


def profile_of(config: RunConfig) -> str:
    """Return the profile that a run's capture path is put through: what the gate will demand."""
    return contract.stronger(config.gate.profile, policy.load(config.gate.policy).profile)


def still_certified(adapter: str, spec: EngineSpec, config: RunConfig, folder: RunFolder) -> bool:
    """Return True if the folder's certificate was made for these very settings and holds today.

    Only the gate decides, on facts of running workers; this only saves repeating the suite.
    """
    demands = policy.demands_of(config.gate)
    try:
        made_for = dict(json.loads((folder.report.parent / "spec.json").read_text()))
        tested = report.load(folder.report)
    except (OSError, ValueError, TypeError, TruetapError):
        return False
    # How long an engine may be silent is no property of its captures.
    now_wanted = json.loads(json.dumps(asdict(spec)))
    return (
        made_for | {"call_deadline_s": None} == now_wanted | {"call_deadline_s": None}
        and tested.adapter == adapter
        and not certificate.judge(folder.certificate, demands).reasons
    )


def workers_binding(adapter: str, spec: EngineSpec, scratch: Path) -> Mapping[str, object]:
    """Open the capture path only to read what its workers say of themselves."""
    from contextlib import closing

    from truetap.harness import registry

    session = registry.find(adapter).open(spec, scratch=scratch)
    with closing(session):
        return session.environment().binding

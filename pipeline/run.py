"""A whole run: every stage in order, each in a process of its own.

Engines, torch and their environment settings never share a process, and a stage that dies takes
nothing else with it. A stage looks at what is already in the run folder and does the rest, so
running again after any interruption continues.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from truetap.harness import reaper
from truetap.harness.errors import CheckFailed, TruetapError
from truetap.pipeline import conform, gatekeeper, report, uncertified

if TYPE_CHECKING:
    from rich.console import Console

    from truetap.pipeline.cli import Stage
    from truetap.pipeline.extract import Cluster


def run(
    stage: Stage, *, allow_uncertified: str | None = None, cluster: Cluster | None = None
) -> None:
    """Run all stages; the gate stands before everything that costs time.

    ``allow_uncertified`` is the reason for which the run goes on even if the gate denies.
    ``cluster`` is where engines make the shards; None: one engine here.
    """
    reaper.watch_over_me()
    began = time.monotonic()
    config, folder, console = stage.config, stage.folder, stage.console
    if config.gate.certificates:
        console.print("the certificates that the configuration names are used", highlight=False)
    elif conform.still_certified(stage.adapter, stage.spec, config, folder):
        console.print("the capture path has a certificate made for these settings", highlight=False)
    else:
        conform.signer_of(config)  # a key that cannot be read is told before the suite's minutes
        _title(console, "conform")
        _verb("conform", stage, accept=(0, 1) if allow_uncertified is None else (0, 1, 3))
        _title(console, "certify")
        try:
            issued = conform.certify(config, folder)
            console.print(f"certificate issued (sha256 {issued.digest[:16]})", highlight=False)
            if issued.signer is None:
                console.print(conform.UNSIGNED, style="yellow", highlight=False)
        except TruetapError as refusal:
            if allow_uncertified is None and not isinstance(refusal, CheckFailed):
                raise
            failed = isinstance(refusal, CheckFailed)  # the gate says in what
            told = "no certificate: the capture path did not pass" if failed else str(refusal)
            console.print(told, style="red", highlight=False, markup=False)
    _title(console, "gate")
    decision = gatekeeper.ask_gate(config, folder, binding=None)
    if allow_uncertified is None:
        gatekeeper.require_allowed(decision, console)
    else:
        gatekeeper.go_on_uncertified(decision, console, allow_uncertified)
    if decision.allowed:
        conform.keep(decision, folder)
    if stage.mutant:
        console.print("a run with --mutant ends at the gate", highlight=False)
        return
    without = ["--allow-uncertified", allow_uncertified] if allow_uncertified else []
    where = cluster.options if cluster else []
    for verb, options in (
        ("prepare", []),
        ("extract", without + where),
        ("train", without),
        ("evaluate", []),
    ):
        _title(console, verb)
        _verb(verb, stage, options=options)
    _title(console, "report")
    page = report.write_page(folder.root)
    summary = report.load(folder.root)
    report.print_summary(summary, console)
    console.print(f"report: {page}", highlight=False)
    if summary.uncertified:
        uncertified.repeat(folder, console)
    console.print(f"done in {(time.monotonic() - began) / 60:.1f} minutes", highlight=False)


def _verb(
    verb: str, stage: Stage, accept: tuple[int, ...] = (0,), options: Sequence[str] = ()
) -> None:
    """Run one verb; end with its exit code if that is not accepted. It has told its reason."""
    command = [sys.executable, "-m", "truetap.pipeline.cli", verb, str(stage.path), *options]
    if stage.mutant:
        command += ["--mutant", stage.mutant]
    code = subprocess.run(command, check=False).returncode
    if code not in accept:
        # A negative code is a signal; the shell's convention keeps it apart from ours.
        sys.exit(code if code >= 0 else 128 - code)


def _title(console: Console, stage: str) -> None:
    console.rule(f"[bold]{stage}", align="left", characters="-")

"""The ``truetap`` command.

Each verb does one stage; ``run`` does all of them in order. Verbs import what they need when they
run, so that ``truetap --help`` stays instant.
"""

from __future__ import annotations

import json
import signal
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from truetap.harness.errors import FULL_DISK, CouldNotRun, TruetapError, UsageError
from truetap.pipeline import cli_audit, cli_engine, cli_gate, cli_store, cli_suite, ranks

if TYPE_CHECKING:
    from rich.console import Console

    from truetap.harness.model import EngineSpec
    from truetap.pipeline.config import RunConfig
    from truetap.pipeline.run_folder import RunFolder

EPILOG = (
    "Exit codes: 0 yes; 1 no (non-conformant, denied, failed check); 2 usage; 3 could not run; "
    "4 integrity failure (bad digest or signature); 130 interrupted; 143 ended by SIGTERM."
)


def _checked_mutant(context: click.Context, _parameter: click.Parameter, name: str | None) -> Any:
    """Refuse an unknown fault, or list them all, before anything else is looked at."""
    if name is None:
        return None
    from truetap.harness.adapters.mutants import FAULTS

    listed = "\n".join(f"  {fault_name}: {fault.says}" for fault_name, fault in FAULTS.items())
    if name == "list":
        click.echo(listed)
        context.exit(0)
    if name not in FAULTS:
        raise UsageError(f"{name!r} is no mutant; there are:\n{listed}")
    return name


def _checked_reason(_context: click.Context, _parameter: click.Parameter, text: str | None) -> Any:
    from truetap.pipeline import uncertified

    return uncertified.checked_reason(text)


CONFIG = click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
MUTANT = click.option(
    "--mutant",
    metavar="FAULT",
    callback=_checked_mutant,
    is_eager=True,
    help="Break the capture on purpose, to see the gate deny: first-boundary-only, off-by-one, "
    "residual-missing, last-boundary-post-norm, rows-shifted, ... ('list' lists all).",
)
ALLOW_UNCERTIFIED = click.option(
    "--allow-uncertified",
    metavar="REASON",
    callback=_checked_reason,
    help="Go on although the gate denies, and say why. It is recorded in every shard, checkpoint "
    "and head made from it, and without it such shards are not trained on.",
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="truetap")
def app() -> None:
    """Get hidden states out of an LLM engine, prove they are the right ones, train a draft on them.

    Start with `truetap doctor`, then `truetap run examples/smollm2-cpu.toml`.
    """


def _end(*_: object) -> None:
    """Have SIGTERM end everything in order, as Ctrl-C does: engines, bars, files."""
    raise KeyboardInterrupt(signal.SIGTERM)


def main() -> None:
    """Run the command line; every expected failure is one sentence and a documented exit code."""
    signal.signal(signal.SIGTERM, _end)
    try:
        code = app(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = 2
    except (click.Abort, KeyboardInterrupt) as stop:
        ended = signal.SIGTERM in (stop.__cause__ or stop).args  # click raises its own from it
        how, code = ("ended by SIGTERM", 143) if ended else ("interrupted", 130)
        click.echo(f"{how}; run the same command again to continue", err=True)
    except TruetapError as error:
        _tell(error)
        code = error.exit_code
    except Exception as error:
        code = CouldNotRun.exit_code
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            remedy = "free disk space and run again; finished work is kept"
            _tell(CouldNotRun(f"no space: {error}", remedy=remedy))
        elif isinstance(error, OSError):  # some have no text of their own
            _tell(CouldNotRun(str(error) or type(error).__name__))
        else:  # a defect of ours; Python's own exit code for it would read as "no"
            traceback.print_exc()
    # An engine's threads may still wait for a process that was killed; do not wait with them.
    ranks.end(code or 0)


def _tell(error: TruetapError) -> None:
    click.echo(f"truetap: {error}", err=True)
    if error.remedy:
        click.echo(f"remedy: {error.remedy}", err=True)


def _console(*, quiet: bool = False, silent: bool = False) -> Console:
    from rich.console import Console

    if silent:  # of several processes only one speaks
        return Console(quiet=True, force_terminal=False)
    # Keeps its own stream: engines redirect file descriptors while they start.
    return Console(stderr=quiet, soft_wrap=True)


class Stage:
    """What every stage of a run works with."""

    def __init__(
        self, path: Path, mutant: str | None, *, quiet: bool = False, silent: bool = False
    ) -> None:
        from truetap.pipeline import config, verifiers
        from truetap.pipeline.run_folder import RunFolder

        self.path, self.mutant = path, mutant
        self.console = _console(quiet=quiet, silent=silent)
        self.config: RunConfig = config.load(path)
        self.adapter = self.config.capture.adapter
        root = self.config.output.resolve()
        if mutant:
            self.adapter = f"{mutant}@{self.adapter}"
            # A broken capture never touches what the right one made, nor hides behind it.
            root = root / "mutants" / mutant
            self.config = cli_gate.with_gate(self.config, certificates=())
        self.folder: RunFolder = RunFolder(root)
        self.model = verifiers.directory_of(self.config, self.console.print)
        self.spec: EngineSpec = verifiers.spec_of(self.config, self.model)


def _stage(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb its stage, holding the run folder meanwhile."""

    @wraps(verb)
    def run(config: Path, mutant: str | None = None, **options: Any) -> None:
        ranks.require_alone(verb.__name__.replace("_", "-"))
        stage = Stage(config, mutant, quiet=options.get("as_json", False))
        with stage.folder.lock():
            verb(stage, **options)

    return run


@app.command()
@AS_JSON
@click.option(
    "--expect-env",
    metavar="NAME",
    help="Fail unless the engine is the one a tox environment names.",
)
def doctor(as_json: bool, expect_env: str | None) -> None:
    """Say what can run here, what is missing and how to get it."""
    from truetap.harness import doctor as examination

    diagnosis = examination.examine()
    if as_json:
        click.echo(json.dumps(diagnosis.as_dict(), indent=1))
    else:
        examination.print_diagnosis(diagnosis, _console())
    if expect_env:  # of engines that need not be able to run the demo
        examination.require_engine(expect_env)
        return
    if not diagnosis.can_run_demo:
        raise CouldNotRun("something needed here is missing", remedy="see above")


@app.command()
@CONFIG
@MUTANT
@AS_JSON
@_stage
def conform(stage: Stage, as_json: bool) -> None:
    """Put the run's capture path through the conformance suite, live; write a report.

    To test another verifier or adapter without a configuration:
    pytest --pyargs truetap.conformance --adapter NAME --model DIR
    """
    from truetap.harness.errors import CheckFailed
    from truetap.pipeline import conform as suite

    made = suite.conform(
        stage.adapter,
        stage.spec,
        suite.profile_of(stage.config),
        stage.folder,
        stage.console,
        device=stage.config.gate.reference_device,
    )
    if as_json:
        click.echo(stage.folder.report.read_text())
    if made.verdict == "non-conformant":
        raise CheckFailed(f"{made.adapter} is non-conformant")
    if made.verdict == "inconclusive":
        raise CouldNotRun(
            f"{made.adapter}: not every clause could be judged",
            remedy=f"see {stage.folder.report.parent / 'suite.log'}",
        )


@app.command()
@CONFIG
@MUTANT
@cli_gate.KEY
@cli_gate.VALID_DAYS
@cli_gate.PROFILE
@click.option(
    "--with-expectations",
    is_flag=True,
    help="State clauses that failed as expected as such; a policy has to allow each of them.",
)
@_stage
def certify(
    stage: Stage, key: Path | None, valid_days: int, profile: str | None, with_expectations: bool
) -> None:
    """Turn a conformant report with live evidence into a signed certificate.

    Without a key it is unsigned: good for development, and rejected by every production policy.
    `truetap keys new NAME` makes a key.
    """
    from datetime import timedelta

    from truetap.pipeline import conform as suite

    issued = suite.certify(
        cli_gate.with_gate(stage.config, profile=profile),
        stage.folder,
        key=key,
        validity=timedelta(days=valid_days),
        with_expectations=with_expectations,
    )
    stage.console.print(
        f"certificate {stage.folder.certificate} (sha256 {issued.digest[:16]}), "
        f"valid until {issued.predicate['notAfter']}",
        highlight=False,
    )
    if issued.signer is None:
        stage.console.print(suite.UNSIGNED, style="bold yellow", highlight=False)
    else:
        stage.console.print(f"signed by {issued.signer}", highlight=False)


@app.command()
@CONFIG
@MUTANT
@cli_gate.POLICY
@cli_gate.CERTIFICATES
@AS_JSON
@_stage
def gate(stage: Stage, policy: Path | None, certificate: tuple[Path, ...], as_json: bool) -> None:
    """Ask whether this run may go ahead: start its workers, compare them with the certificate.

    All reasons to deny are told at once, the first to be fixed first. Nothing is started if the
    files alone are enough to deny.
    """
    from truetap.pipeline import conform as suite
    from truetap.pipeline import gatekeeper

    config = cli_gate.with_gate(stage.config, policy=policy, certificates=certificate or None)
    decision = gatekeeper.ask_gate(config, stage.folder, binding=None)
    if decision.allowed:
        binding = suite.workers_binding(stage.adapter, stage.spec, stage.folder.logs / "gate")
        decision = gatekeeper.ask_gate(config, stage.folder, binding=binding)
    if as_json:
        click.echo(json.dumps(decision.as_dict(), indent=1))
    gatekeeper.require_allowed(decision, stage.console)


@app.command()
@CONFIG
@_stage
def prepare(stage: Stage) -> None:
    """Have the verifier answer the questions; write conversations with their loss masks.

    [data] questions names JSON lines, a .json array, a .parquet file, a folder that datasets saved,
    or hub:NAME; rows are prompts, ShareGPT, messages, Spec-Bench turns or Alpaca, told by the first
    row's keys. answers = "given" keeps the data set's own answers; server = "http://host:port/v1"
    has a server of the verifier answer (docs/data.md). What is left out is counted, here and in the
    run folder's README.md.
    """
    from truetap.pipeline import prepare as preparation

    preparation.prepare(stage.config, stage.folder, stage.model, stage.console)


@app.command()
@CONFIG
@ALLOW_UNCERTIFIED
@cli_engine.RAY
@cli_engine.ENGINES
@_stage
def extract(
    stage: Stage, allow_uncertified: str | None, ray: str | None, engines: int | None
) -> None:
    """Capture the conversations into verified shards, if the gate allows it.

    Meanwhile samples are captured again by transformers and compared; a miss ends it with exit code
    1 and names the first bad shard. The table [audit] of the configuration has the rate.
    """
    from truetap.pipeline import extract as extraction

    extraction.extract(
        stage.config,
        stage.folder,
        stage.spec,
        stage.console,
        allow_uncertified=allow_uncertified,
        cluster=cli_engine.cluster_of(ray, engines),
    )


@app.command()
@CONFIG
@ALLOW_UNCERTIFIED
def train(config: Path, allow_uncertified: str | None) -> None:
    """Train an EAGLE-3 draft head on the shards; continue from the last checkpoint.

    Every shard must have a certificate that was valid, and for these workers, when it was made, and
    that gate.policy allows. On several GPUs, where CONFIG's [train] tokens_per_step is of each:
    torchrun --nproc-per-node 8 -m truetap.pipeline.cli train CONFIG
    """
    from truetap.pipeline import train as training

    with ranks.joined() as us, ExitStack() as held:
        stage = us.main_first(lambda: Stage(config, None, silent=not us.main))
        us.main_does(lambda: held.enter_context(stage.folder.lock()))
        training.train(
            stage.config,
            stage.folder,
            stage.spec,
            stage.console,
            allow_uncertified=allow_uncertified,
            ranks=us,
        )


@app.command("export-dataset")
@CONFIG
@_stage
def export_dataset(stage: Stage) -> None:
    """Write the conversations as speculators' own trainer reads them, to train with it.

    It then reads the states from the run's shards, verified: docs/speculators.md.
    """
    from truetap.pipeline import arrow_dataset

    arrow_dataset.export(stage.config, stage.folder, stage.spec, stage.console)


@app.command()
@CONFIG
@cli_engine.HEADS
@AS_JSON
@_stage
def evaluate(stage: Stage, heads: Mapping[str, Path], as_json: bool) -> None:
    """Serve the head by speculative decoding; measure acceptance on held-out questions."""
    from truetap.pipeline import evaluate as evaluation

    evaluation.evaluate(stage.config, stage.folder, stage.model, stage.console, others=heads)
    if as_json:
        click.echo((stage.folder.evaluate / "results.json").read_text())


@app.command()
@CONFIG
@MUTANT
@ALLOW_UNCERTIFIED
@cli_engine.RAY
@cli_engine.ENGINES
def run(
    config: Path,
    mutant: str | None,
    allow_uncertified: str | None,
    ray: str | None,
    engines: int | None,
) -> None:
    """Do all stages: conform, certify, gate, prepare, extract, train, evaluate, report.

    A second run continues where the last one stopped, and redoes nothing that is finished. With
    --ray the shards are made by several engines; every other stage runs here.
    """
    from truetap.pipeline import run as whole

    ranks.require_alone("run")
    if mutant and allow_uncertified:
        raise UsageError(
            "a run with --mutant ends at the gate, which --allow-uncertified would open",
            remedy="give one of the two",
        )
    cluster = cli_engine.cluster_of(ray, engines)
    # Does not hold the folder itself: each stage does, in a process of its own.
    stage = Stage(config, mutant)
    whole.run(stage, allow_uncertified=allow_uncertified, cluster=cluster)


for verb in (
    *(cli_engine.surface, cli_engine.record),
    *(cli_suite.clauses, cli_suite.adapters, cli_suite.matrix),
    cli_audit.audit,
    *(cli_store.plan, cli_store.publish),
    *(cli_gate.keys, cli_gate.verify),
):
    app.add_command(verb)


if __name__ == "__main__":
    main()

"""The verb that audits somebody's files."""

from __future__ import annotations

import json
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

import click

from truetap.harness.errors import CouldNotRun, UsageError

PRODUCERS = ("truetap", "speculators", "specforge", "modelopt")


def _sample(_context: click.Context, _parameter: click.Parameter, text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--sample is a number from 1 on, or 'all', not {text!r}")
    return min(int(text), sys.maxsize)


def _list(
    _context: click.Context, _parameter: click.Parameter, text: str | None
) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--boundaries is a list of numbers, not {text!r}", remedy="write it as 2,15,27,30"
        ) from None


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--producer", required=True, type=click.Choice(PRODUCERS), help="Whose files they are."
)
@click.option(
    "--model",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The verifier that the states should be of, a folder in Hugging Face layout.",
)
@click.option(
    "--sample",
    default="16",
    metavar="N|all",
    callback=_sample,
    show_default=True,
    help="How many samples are compared by value; 'all' finds every bad one.",
)
@click.option("--seed", default=0, show_default=True, help="Draws the sample.")
@click.option(
    "--boundaries",
    metavar="LIST",
    callback=_list,
    help="What you believe the slots are, e.g. 2,15,27,30 (0 = embeddings, the number of blocks = "
    "after the last one).",
)
@click.option(
    "--report", type=click.Path(dir_okay=False, path_type=Path), help="Write the report as JSON."
)
@click.option(
    "--state",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where progress is kept. Default: beside --report, else in the user's cache.",
)
@click.option("--resume", is_flag=True, help="Continue an interrupted audit of the same folder.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def audit(
    path: Path,
    producer: str,
    model: Path,
    sample: int | None,
    seed: int,
    boundaries: tuple[int, ...] | None,
    report: Path | None,
    state: Path | None,
    resume: bool,
    as_json: bool,
) -> int:
    """Find out whether hidden states on disk are the right ones.

    Every file is read: rows and tokens, zeros, NaN, repeated states, loss masks. A random sample is
    compared by value with the verifier's own states: which boundary each slot holds, before or
    after the final norm, shifted, another request's. PATH is only read, and nothing in it can run
    code here.

    \b
    Exit codes: 0 right; 1 faults that training would suffer from; 2 usage; 3 could not be judged;
    4 truetap's own shards are not what was written. docs/audit.md explains the findings.
    """  # noqa: D301
    from rich.console import Console

    from truetap.pipeline import run_folder
    from truetap.pipeline.foreign import audit as auditing
    from truetap.pipeline.foreign import judgement

    console = Console(stderr=as_json, soft_wrap=True)
    request = auditing.Request(
        path=path,
        producer=producer,
        model=model,
        state=state or _state_file(path, report),
        sample=sample,
        seed=seed,
        boundaries=boundaries,
        resume=resume,
    )
    made: dict[str, Any] = auditing.audit_folder(request, console)
    if as_json:
        click.echo(json.dumps(made, indent=1))
    else:
        judgement.print_report(made, console)
    if report is not None:
        try:
            run_folder.write_json(report, made)
        except OSError as error:
            raise CouldNotRun(
                f"the report cannot be written to {report}: {error}",
                remedy=f"name another file with --report; --state {request.state} --resume keeps "
                "what was found",
            ) from error
    return int(made["exit_code"])


def _state_file(path: Path, report: Path | None) -> Path:
    """Return where progress is kept: never in the folder itself, which may be read-only."""
    if report is not None:
        return report.with_name(report.name + ".state")
    import platformdirs

    name = blake2b(str(path.resolve()).encode(), digest_size=8).hexdigest()
    return Path(platformdirs.user_cache_dir("truetap")) / "audits" / f"{name}.state"

"""Verbs about engines: what a release's replies are, recordings of real ones; where engines run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from truetap.harness.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from truetap.pipeline.extract import Cluster

RAY = click.option(
    "--ray",
    metavar="ADDRESS",
    help="Run several engines on a Ray cluster: 'auto' (the one this machine is part of), "
    "HOST:PORT, ray://HOST:PORT, or 'local', which starts one here. Needs the extra 'ray', and run "
    "folder and verifier under the same path on every node (docs/scale.md).",
)
ENGINES = click.option(
    "--engines",
    type=click.IntRange(min=1),
    metavar="N",
    help="How many engines --ray starts. Default: as many as there are GPUs for, or one a node.",
)


def _named_heads(_context: click.Context, _option: click.Parameter, given: Sequence[str]) -> Any:
    heads: dict[str, Path] = {}
    for text in given:
        name, _, directory = text.partition("=")
        if not name or not directory or name in heads:
            raise UsageError(f"--head takes NAME=DIR, each name once, not {text!r}")
        heads[name] = Path(directory)
    return heads


HEADS = click.option(
    "--head",
    "heads",
    metavar="NAME=DIR",
    multiple=True,
    callback=_named_heads,
    help="Serve this EAGLE-3 head too, one from elsewhere, on the same questions. Repeatable.",
)


def cluster_of(address: str | None, engines: int | None) -> Cluster | None:
    """Return where engines are to run, from ``--ray`` and ``--engines``; None: here."""
    from truetap.pipeline.extract import Cluster

    if address is not None:
        return Cluster(address, engines)
    if engines:
        raise UsageError(
            "--engines is about engines on Ray", remedy="give --ray too: --ray local, for example"
        )
    return None


def _console(*, quiet: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=quiet, soft_wrap=True)


@click.command()
@click.argument("versions", nargs=-1, metavar="VERSION...")
@click.option("--all", "everything", is_flag=True, help="All releases, known or on the index.")
@click.option(
    "--check", is_flag=True, help="Compare with the committed facts; exit 1 if differing."
)
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the facts to this folder (in the repository: fixtures/surfaces).",
)
@click.option("--table", is_flag=True, help="Show what collective_rpc returns, from known facts.")
@click.option("--index", metavar="URL", help="Package index (default: PIP_INDEX_URL, else PyPI).")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def surface(
    versions: tuple[str, ...],
    everything: bool,
    check: bool,
    into: Path | None,
    table: bool,
    index: str | None,
    as_json: bool,
) -> None:
    """Derive what a vLLM release replies and offers, by running its own code over stand-ins.

    Fetches the Python files of the release's wheel; needs no torch, no GPU and no vLLM. Without
    other options it says what changed since the release before. Needs 'truetap[surface]'.

    \b
    truetap surface 0.34.0 --into fixtures/surfaces    a new release: one command, one diff
    truetap surface --all --check                      do all committed facts still hold?
    truetap surface --table                            the reply of every call, by release
    """  # noqa: D301
    from truetap.harness.surface import facts

    if table:
        if everything or check or into:
            raise UsageError("--table shows known facts and derives none")
        _print_table([facts.load(version) for version in versions or facts.versions()], as_json)
        return
    console = _console(quiet=as_json)
    found = facts.run_surface(
        versions, everything=everything, check=check, into=into, index=index, console=console
    )
    if as_json:
        click.echo(json.dumps(found, indent=1, sort_keys=True))
    elif check:
        console.print(f"{len(found)} releases: every committed fact holds")
    else:
        for one in found:
            _print_changes(one, console)


def _print_changes(found: dict[str, Any], console: Console) -> None:
    """Say what differs from the newest known release before this one."""
    from packaging.version import Version

    from truetap.harness.surface import facts

    version = found["version"]
    earlier = [known for known in facts.versions() if Version(known) < Version(version)]
    if not earlier:
        console.print(f"vLLM {version}: the first release that is known", highlight=False)
        return
    before = facts.load(earlier[-1])
    for own in ("version", "wheel"):
        before.pop(own)
    lines = facts.differences(before, {k: v for k, v in found.items() if k in before})
    console.print(f"vLLM {version}: {len(lines)} facts differ from {earlier[-1]}", highlight=False)
    for line in lines:
        console.print(f"  {line}", highlight=False, markup=False)


_WRITTEN = {
    "list_per_rank": "[R0, ... R(W-1)]",
    "list_of_one_rank": "[Rk]",
    "list_of_one_local": "[R]",
    "bare": "Rk, bare",
    "list_of_futures": "[Future(R0), ... Future(R(W-1))]",
    "list_of_one_future": "[Future(Rk)]",
    "future_of_list": "Future([R0, ... R(W-1)])",
    "future_of_list_of_one": "Future([R])",
    "future_of_bare": "Future(Rk)",
    "aggregate": "one object of all replies",
    "future_of_aggregate": "Future(one object of all replies)",
    "never_replies": "waits for ever, or until its timeout",
}
"""How a shape of the facts looks: R0 is what rank 0 returned, W the world size."""


def reply_table(all_facts: Sequence[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return for every call the ranges of releases that answer it alike, and with what."""
    from truetap.harness.surface import facts

    made = facts.table(all_facts)
    shown: dict[str, dict[str, str]] = {}
    for call, words in made.rows.items():
        ranges: list[tuple[str, str, str]] = []
        for (first, last), word in zip(made.columns, words, strict=True):
            if ranges and ranges[-1][2] == word:
                ranges[-1] = (ranges[-1][0], last, word)
            else:
                ranges.append((first, last, word))
        shown[call] = {
            first if first == last else f"{first} to {last}": word for first, last, word in ranges
        }
    return shown


def reply_lines(all_facts: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table as lines of text, under 100 characters wide."""
    lines = [f"{'call':32} {'vLLM':18} reply"]
    for call, ranges in reply_table(all_facts).items():
        for number, (releases, word) in enumerate(ranges.items()):
            said = _WRITTEN.get(word, word.replace("raises_", "raises "))
            lines.append(f"{call if not number else '':32} {releases:18} {said}")
    return lines


def _print_table(all_facts: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(reply_table(all_facts), indent=1))
        return
    for line in reply_lines(all_facts):
        click.echo(line)


@click.command()
@click.option(
    "--into",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the recordings of this engine, one folder a case; with --captures, for one.",
)
@click.option("--case", "cases", multiple=True, help="Record only this case; can be repeated.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Verifier to load (default: a small Llama with random weights, made here).",
)
@click.option("--force", is_flag=True, help="Record anew what is there already.")
@click.option("--captures", is_flag=True, help="Record what a capture path gives to the suite.")
@click.option("--adapter", metavar="NAME", help="The capture path to record.")
@click.option("--family", metavar="NAME", help="Verifier to build for it (default: llama_narrow).")
@click.option("--seed", type=int, help="The verifier's seed (default: 0).")
@click.option(
    "--spec",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The engine's settings, as JSON: {\"enforce_eager\": false} (default: the suite's).",
)
def record(
    into: Path,
    cases: tuple[str, ...],
    model: Path | None,
    force: bool,
    captures: bool,
    adapter: str | None,
    family: str | None,
    seed: int | None,
    spec: Path | None,
) -> None:
    """Record what the installed engine really replies, in every mode, for replay anywhere.

    Starts real engines with one and two workers, makes every call, and writes down what came back,
    untouched, stale and failed replies included. Judging is somebody else's: see the tests.
    Finished cases are kept, so an interrupted recording continues. Those of eight workers are made
    only when asked for: --case mp-tp8, mp-tp8-raised, mp-tp8-killed.

    With --captures: open one capture path on a random verifier, make the calls of the suite's core
    profile, and write down what it gave. The suite judges that with --adapter replay:DIR.

    \b
    truetap record --into fixtures/cassettes/vllm-0.32.0
    truetap record --captures --adapter vllm_native --into fixtures/captures/NAME
    truetap record --captures --adapter vllm_native --family qwen3_narrow --spec FILE --into DIR
    """  # noqa: D301
    console = _console()

    def progress(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    if captures:
        if cases or model or adapter is None:
            raise UsageError("--captures takes --adapter, and neither --case nor --model")
        from truetap.harness.record_captures import read_settings, record_captures

        named = {"family": family, "seed": seed, "settings": spec and read_settings(spec)}
        chosen: Any = {name: value for name, value in named.items() if value is not None}
        record_captures(adapter, into, force=force, progress=progress, **chosen)
        return
    if adapter or family or spec or seed is not None:
        raise UsageError("--adapter, --family, --seed and --spec go with --captures")
    from truetap.harness.record import record as recorded

    recorded(into, cases=cases or None, model=model, force=force, progress=progress)

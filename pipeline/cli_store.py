"""The verbs about a run's captures: what they will take, and copying them elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import click

from truetap.harness.errors import UsageError

CONFIG = click.argument("config", type=click.Path(dir_okay=False, path_type=Path))


@click.command()
@CONFIG
@click.option("--json", "as_json", is_flag=True, help="Print the forecast as JSON.")
@click.option(
    "--measure",
    is_flag=True,
    help="Start the engine and capture some of the conversations for 20 seconds, to tell the time.",
)
def plan(config: Path, as_json: bool, measure: bool) -> None:
    """Say what the rest of an extraction will take: tokens, bytes, memory, disk, time.

    Starts no engine and changes nothing. Before the questions are answered, answers count as long
    as they may become. The time is told if an extraction with the same settings was measured in
    this run's folder, or with --measure, which starts the engine and leaves nothing behind. Exit
    code 1 if the disk is too small.
    """
    from dataclasses import replace

    from rich.console import Console

    from truetap.pipeline import config as configuration
    from truetap.pipeline import forecast, verifiers
    from truetap.pipeline.run_folder import RunFolder

    console = Console(stderr=as_json, soft_wrap=True)
    settings = configuration.load(config)
    model = verifiers.directory_of(settings, console.print)
    folder = RunFolder(settings.output.resolve())
    spec = verifiers.spec_of(settings, model)
    seen = forecast.foresee(settings, folder, spec)
    probe = {}
    if measure and seen.fits and seen.tokens:
        from truetap.pipeline import speed_probe

        measured = speed_probe.measure(settings, folder, spec, console)
        console.print(measured.told(), highlight=False)
        seen = replace(
            seen,
            tokens_per_second=measured.tokens / measured.seconds,
            measured_tokens=measured.tokens,
        )
        probe = {"probe": measured.as_dict()}
    if as_json:
        click.echo(json.dumps(seen.as_dict() | probe, indent=1))
    else:
        for line in seen.told():
            console.print(line, highlight=False, markup=False)
    seen.require_space()


@click.command()
@CONFIG
@click.argument("url")
@click.option(
    "--compress", is_flag=True, help="Send the states packed, without loss: about two thirds."
)
def publish(config: Path, url: str, *, compress: bool) -> None:
    """Copy a run's finished shards to URL (s3://, file://, ...), verified, with their certificates.

    A second call sends what is missing or was captured again. It may run while extraction goes on,
    and keeps back what no audit answers for yet; one at a time per URL. The address is one of
    fsspec's: pip install 'truetap[remote]'.
    """
    from rich.console import Console

    from truetap.harness.progress import bar
    from truetap.pipeline import config as configuration
    from truetap.pipeline import remote_store
    from truetap.pipeline.run_folder import RunFolder
    from truetap.pipeline.store import Store

    if "://" not in url:
        raise UsageError(f"{url!r} is no URL", remedy=f"write it as file://{Path(url).absolute()}")
    console = Console(soft_wrap=True)
    store = Store(RunFolder(configuration.load(config).output.resolve()).shards)
    remote = remote_store.RemoteStore(url)
    steps = remote_store.publish(store, remote, compress=compress)
    sent, total = next(steps)
    if later := remote_store.withheld(store):
        text = f"kept back until an audit answers for them: {len(later)} shards"
        console.print(text, style="yellow", highlight=False)
    elif not total:
        raise UsageError(f"there are no shards in {store.folder}", remedy="run truetap extract")
    with bar(console, "published", total, done=sent) as progress:
        for now, _ in steps:
            progress.advance(now - sent)
            sent = now
    packed = remote_store.ratio(remote.entries())
    told = "" if packed is None else f", packed to {packed:.1%} of their size"
    console.print(f"{remote.folder} has all {total} shards{told}", highlight=False, markup=False)

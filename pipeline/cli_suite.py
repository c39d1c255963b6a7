"""Verbs about the conformance suite: its clauses, their mutants, and what can be put through it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from truetap.harness import contract

if TYPE_CHECKING:
    from truetap.harness.power import Power


@click.command()
@click.option(
    "--profile", type=click.Choice(sorted(contract.PROFILES)), help="Only this profile's clauses."
)
@click.option("--mutants", is_flag=True, help="Show for each clause the faults it must catch.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def clauses(profile: str | None, mutants: bool, as_json: bool) -> None:
    """List what the suite requires, and why.

    A clause is worth what it catches: every MUST has deliberately wrong capture paths, channels or
    stores, and a test puts each of them through the suite. --mutants shows them, and for capture
    paths by which clauses each was caught when last measured on live engines.
    """
    wanted = contract.PROFILES[profile] if profile else tuple(contract.CLAUSES)
    faults = _faults() if mutants else {}
    rows = [_row(contract.CLAUSES[clause_id], faults) for clause_id in wanted]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    measured = _measured() if mutants else None
    for row in rows:
        click.echo(f"{row['id']}  {row['level']}  {row['title']}")
        if not mutants:
            click.echo(f"    {row['reason']} ({', '.join(row['references'])})")
        for name, says in row.get("mutants", {}).items():
            click.echo(f"    {name}: {says}")
            if measured and (caught := measured.caught(name)):
                by = ", ".join(f"{clause} ({caught[clause]}x)" for clause in sorted(caught))
                click.echo(f"        measured {measured.times(name)}x, caught by {by}")
    if measured:
        _summary(rows, measured)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def adapters(as_json: bool) -> None:
    """List the capture adapters, reply channels and stores that are installed here.

    \b
    pytest --pyargs truetap.conformance --adapter NAME    captures, profile core
    pytest --pyargs truetap.conformance --channel NAME    replies, profile reply
    pytest --pyargs truetap.conformance --store NAME      captures on disk, profile store
    """  # noqa: D301
    from truetap.harness import registry

    found = {
        "adapters": registry.names(registry.ADAPTERS),
        "channels": registry.names(registry.CHANNELS),
        "stores": registry.names(registry.STORES),
    }
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    for kind, names in found.items():
        click.echo(f"{kind}: {', '.join(names) or 'none'}")


@click.command()
@click.argument("reports", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The page to write, one self-contained HTML file.",
)
def matrix(reports: tuple[Path, ...], out: Path) -> None:
    """Lay conformance reports side by side: clauses down, runs across, details on a click.

    A folder stands for all the reports in it. FILE.html#c=LAYERS-001&r=2 opens the page at that
    clause in the second run.
    """
    from truetap.pipeline import matrix as page

    count = page.write_page(reports, out)
    click.echo(f"{out}: {count} {'report' if count == 1 else 'reports'}")


def _measured() -> Power:
    from truetap.harness import power

    return power.measured()


def _summary(rows: list[dict[str, Any]], measured: Power) -> None:
    """Say in four lines how strong the suite is, and whether it cries wolf."""
    own = {
        name: row["id"]
        for row in rows
        for name in row["mutants"]
        if row["id"] in contract.PROFILES["full"]
    }
    others = sum(len(row["mutants"]) for row in rows) - len(own)
    missed, idle, correct = measured.missed(own), measured.idle(), measured.correct()
    alarms = {key: flagged for key, flagged in correct.items() if flagged}
    click.echo(f"{len(own)} mutants of capture paths and {others} of channels and stores")
    click.echo(f"not caught by their own clause: {', '.join(missed) or 'none'}")
    click.echo(f"MUST clauses that caught nothing: {', '.join(idle) or 'none'}")
    click.echo(f"correct capture paths: {len(correct)} measured, {len(alarms)} flagged")
    for key, flagged in alarms.items():
        click.echo(f"    {key}: {', '.join(flagged)}")


def _row(clause: contract.Clause, faults: dict[str, dict[str, str]]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": clause.id,
        "level": clause.level,
        "title": clause.title,
        "reason": clause.reason,
        "references": list(clause.references),
        "since": clause.since,
    }
    return row | ({"mutants": faults.get(clause.id, {})} if faults else {})


def _faults() -> dict[str, dict[str, str]]:
    """Return what each clause must catch: the mutants' names and what they do."""
    from truetap.harness.adapters import mutants as of_adapters
    from truetap.harness.channels import mutants as of_channels
    from truetap.harness.stores import mutants as of_stores

    found: dict[str, dict[str, str]] = {}
    tables: tuple[Mapping[str, Any], ...] = (
        of_adapters.FAULTS,
        of_channels.FAULTS,
        of_stores.FAULTS,
    )
    for table in tables:
        for name, fault in table.items():
            if fault.caught_by:
                found.setdefault(fault.caught_by, {})[name] = fault.says
    return found

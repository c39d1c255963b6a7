"""Verbs about certificates that need no run: keys, verify; and the options of certify and gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from truetap.harness.certificate import Judged
    from truetap.pipeline.config import RunConfig

_FILE = click.Path(path_type=Path)
KEY = click.option(
    "--key",
    type=_FILE,
    help="Private key to sign with. Default: TRUETAP_KEY, then gate.key of the configuration.",
)
VALID_DAYS = click.option(
    "--valid-days",
    type=click.IntRange(1, 3650),
    default=30,
    show_default=True,
    help="How long the certificate is to be valid.",
)
PROFILE = click.option(
    "--profile",
    type=click.Choice(["shapes", "core", "full"]),
    help="Refuse a report of a weaker profile. Default: gate.profile of the configuration.",
)
POLICY = click.option(
    "--policy",
    type=_FILE,
    help="What to demand (TOML). Default: gate.policy, else that of development.",
)
CERTIFICATES = click.option(
    "--certificate",
    type=_FILE,
    multiple=True,
    help="Judge this file in place of the run's own; may be given several times.",
)


def with_gate(config: RunConfig, **settings: Any) -> RunConfig:
    """Return a configuration whose gate has these settings, those that are not None."""
    given = {name: value for name, value in settings.items() if value is not None}
    return config.model_copy(update={"gate": config.gate.model_copy(update=given)})


@click.group()
def keys() -> None:
    """Make keys for certificates, and show their ids."""


@keys.command()
@click.argument("name")
@click.option(
    "--into", type=_FILE, help="Folder. Default: truetap's own in the user's configuration."
)
def new(name: str, into: Path | None) -> None:
    """Make NAME.pem, the private key, and NAME.pub, the public one.

    The private key is readable by you alone and not locked with a password. Give it to whoever
    certifies (`truetap certify --key`, or TRUETAP_KEY), and to nobody else. A policy names the
    public file, or the id that is printed. Keys are never overwritten.
    """
    from platformdirs import user_config_path

    from truetap.harness import signing

    private, public, key_id = signing.new_key(name, into or user_config_path("truetap") / "keys")
    click.echo(f"private key  {private}\npublic key   {public}\nid           {key_id}")


@keys.command()
@click.argument("file", type=_FILE)
def show(file: Path) -> None:
    """Print the id of a key, read from its public or private file."""
    from truetap.harness import signing

    click.echo(signing.key_id(file))


@click.command()
@click.argument("files", nargs=-1, required=True, type=_FILE, metavar="FILE...")
@POLICY
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def verify(files: tuple[Path, ...], policy: Path | None, as_json: bool) -> None:
    """Check certificates without an engine: signature, schema, suite, dates and clauses.

    Whether one holds for your workers only `truetap gate` can say. Exits with 0 if all hold, with 4
    if one was altered or its signature is bad, else with 1.
    """
    from truetap.harness import certificate
    from truetap.pipeline import policy as policies
    from truetap.pipeline.config import Gate

    # The least profile there is, so that the policy's own counts.
    demands = policies.demands_of(Gate(profile="shapes", policy=policy))
    judged = [certificate.judge(file, demands) for file in files]
    if as_json:
        click.echo(json.dumps([_as_dict(one) for one in judged], indent=1))
    else:
        for one in judged:
            _tell(one)
        if policy is None:
            click.echo("no policy was named: anybody's signature was accepted, or none")
    _conclude(judged)


def _as_dict(judged: Judged) -> dict[str, Any]:
    from dataclasses import asdict

    held = judged.certificate
    stated = {} if held is None else held.predicate
    return {
        "path": str(judged.path),
        "valid": not judged.reasons,
        "certificate": judged.digest,
        "signer": held.signer if held else None,
        **{name: stated.get(name) for name in ("result", "profile", "timeCreated", "notAfter")},
        "reasons": [asdict(reason) for reason in judged.reasons],
    }


def _tell(judged: Judged) -> None:
    click.echo(f"{judged.path}: {'denied' if judged.reasons else 'valid'}")
    for reason in judged.reasons:
        click.echo(f"  {reason.code}: {reason.text}\n    remedy: {reason.remedy}")
    if held := judged.certificate:
        binding = held.predicate["environment"]["binding"]
        verifier = held.predicate["environment"]["recorded"]["verifier_name"]
        click.echo(
            f"  {binding['adapter']['name']} on {verifier}, profile {held.predicate['profile']}, "
            f"until {held.predicate['notAfter']}\n"
            f"  {'signed by ' + held.signer if held.signer else 'UNSIGNED: development only'}"
        )


def _conclude(judged: list[Judged]) -> None:
    from truetap.harness.certificate import ALTERED
    from truetap.harness.errors import CheckFailed, IntegrityError, UsageError

    bad = [one for one in judged if one.reasons]
    if not bad:
        return
    codes = {reason.code for one in bad for reason in one.reasons}
    kinds = (
        (codes & ALTERED, IntegrityError),
        (codes - {"certificate"}, CheckFailed),
        (codes, UsageError),
    )
    kind = next(error for found, error in kinds if found)
    raise kind(f"{len(bad)} of {len(judged)} certificates do not hold: {', '.join(sorted(codes))}")

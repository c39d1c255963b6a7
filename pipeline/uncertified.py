"""Going on although the gate denies: ``--allow-uncertified REASON``.

It is for the day on which somebody knows better than the gate. Then it must be loud, and it must
stay with what was made: each shard's manifest line, each checkpoint, the head and its card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from truetap.harness.errors import UsageError
from truetap.pipeline import run_folder
from truetap.pipeline.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

    from truetap.pipeline.gate import Decision

LEAST_LETTERS = 10
"""A reason is for whoever reads the head's card in a year; "test" tells nothing."""


def checked_reason(text: str | None) -> str | None:
    """Return the reason on one line; ``UsageError`` if it is too short to be one."""
    if text is None:
        return None
    # Neither what steers a terminal nor what nobody can see is part of a reason.
    reason = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if len(reason) < LEAST_LETTERS:
        raise UsageError(
            f"--allow-uncertified needs a reason of {LEAST_LETTERS} characters or more, not "
            f"{reason!r}",
            remedy="say why this run may go on without a certificate; it is recorded in every "
            "shard, checkpoint and head",
        )
    return reason


def entry_of(reason: str, decision: Decision) -> dict[str, Any]:
    """Return what the manifest line of a shard says that is made in spite of the gate."""
    denied = list(dict.fromkeys(why.code for why in decision.reasons))
    return {"reason": reason, "denied": denied}


def record(folder: RunFolder, reason: str, decision: Decision, made: datetime) -> None:
    """Keep the gate's whole reasons for the report; the shards' own lines have only the codes."""
    told = [{"code": why.code, "text": why.text} for why in decision.reasons]
    row = {"made": made.isoformat(), "reason": reason, "reasons": told}
    run_folder.append_line(folder.uncertified, row)


def banner(console: Console, reason: str, denied: Sequence[tuple[str, str]]) -> None:
    """Print in red that the gate's denial was overruled, by what reason, and all that it said."""
    style = "bold white on red"
    console.print(
        "UNCERTIFIED: the gate denies this run, and --allow-uncertified lets it go on",
        style=style, highlight=False,
    )  # fmt: skip
    console.print(f"  reason given: {reason}", style="red", highlight=False, markup=False)
    for code, text in denied:
        console.print(f"  {code}: {text}", style="red", highlight=False, markup=False)
    console.print(
        "  Nothing proves that these hidden states are the right ones. It is recorded in every "
        "shard, checkpoint and head made from them.",
        style="red", highlight=False, markup=False,
    )  # fmt: skip


def repeat(folder: RunFolder, console: Console) -> None:
    """Print the banner again for what this folder's shards were made in spite of."""
    for row in rows(folder):
        banner(console, row["reason"], [(why["code"], why["text"]) for why in row["reasons"]])


def rows(folder: RunFolder) -> list[Mapping[str, Any]]:
    """Return the recorded denials, each different one once."""
    found: dict[str, Mapping[str, Any]] = {}
    for row in run_folder.read_lines(folder.uncertified):
        found.setdefault(repr((row["reason"], row["reasons"])), row)
    return list(found.values())


def warn(card: Mapping[str, Any], console: Console) -> None:
    """Print in red what a head's card says of shards without a certificate, if it has any."""
    if said := told(card):
        text = f"UNCERTIFIED: the head is {said}"
        console.print(text, style="bold white on red", highlight=False, markup=False)


def told(card: Mapping[str, Any]) -> str:
    """Say in one sentence what a head's card says of its shards; '' if all had a certificate."""
    made = card.get("uncertified")
    if not made:
        return ""
    return (
        f"trained on {len(made['shards'])} of {len(card['shards'])} shards that were captured "
        f"without a certificate (the gate denied: {', '.join(made['denied'])}); "
        f"reasons given: {'; '.join([*made['reasons'], *made['trained_because']])}"
    )

"""Asks the gate about a run, tells what it says, and holds the run to it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from truetap.harness.errors import CheckFailed
from truetap.pipeline import gate, policy, provenance, uncertified
from truetap.pipeline.config import RunConfig
from truetap.pipeline.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console


def ask_gate(
    config: RunConfig, folder: RunFolder, *, binding: Mapping[str, Any] | None
) -> gate.Decision:
    """Ask the gate about this run, now."""
    return gate.decide(
        config.gate.certificates or (folder.certificate,),
        policy.demands_of(config.gate, binding),
        report_path=None if config.gate.certificates else folder.report,
    )


def require_allowed(decision: gate.Decision, console: Console) -> None:
    """Show the gate's decision; raise if it denies."""
    if decision.allowed:
        where = "by these very workers" if decision.workers_checked else "so far, from the files"
        where += "" if decision.signer else " (unsigned: development only)"
        console.print(f"gate: allowed {where}", style="green", highlight=False)
        return
    nearest = f"; of {decision.judged} certificates {decision.path} comes nearest"
    told = f"gate: denied{nearest if decision.judged > 1 else ''}"
    console.print(told, style="bold red", highlight=False, markup=False)
    for reason in decision.reasons:
        console.print(f"  {reason.code}: {reason.text}", highlight=False, markup=False)
        console.print(f"    remedy: {reason.remedy}", style="dim", highlight=False, markup=False)
    codes = list(dict.fromkeys(reason.code for reason in decision.reasons))
    raise CheckFailed(f"the gate denies this run: {', '.join(codes)}; nothing was extracted")


def go_on_uncertified(decision: gate.Decision, console: Console, reason: str) -> None:
    """Say loudly that a denied run goes on, or that the flag was not needed."""
    if decision.allowed:
        require_allowed(decision, console)
        text = "--allow-uncertified is not needed: nothing is recorded as uncertified"
        console.print(text, style="yellow", highlight=False)
        return
    uncertified.banner(console, reason, [(why.code, why.text) for why in decision.reasons])


class Gatekeeper:
    """Asks the gate for every shard: a certificate may expire, or be replaced, meanwhile."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        binding: Mapping[str, Any],
        reason: str | None,
        console: Console,
        *,
        begun: bool = False,
    ) -> None:
        """``begun``: others' shards are there already, so a denial concerns the rest only."""
        self._config, self._folder, self._binding = config, folder, binding
        self._reason, self._console, self._begun = reason, console, begun
        self._told: gate.Decision | None = None

    def standing(self) -> dict[str, Any]:
        """Return what the next shard's line says of its certificate; raise if it may not be made.

        The time comes before the question, so a shard is never older than its permission.
        """
        made = datetime.now(UTC)
        decision = ask_gate(self._config, self._folder, binding=self._binding)
        first, news = self._told is None, decision != self._told
        self._told = decision
        if self._reason is None:
            if first and not self._begun:
                require_allowed(decision, self._console)
            _require_still_allowed(decision)
        elif news:
            go_on_uncertified(decision, self._console, self._reason)
        if decision.allowed and decision.certificate:
            assert decision.path is not None
            provenance.keep(self._folder.shards, decision.path, decision.certificate)
            return {"made": made.isoformat(), "certificate": decision.certificate}
        assert self._reason is not None
        if news:
            uncertified.record(self._folder, self._reason, decision, made)
        said = uncertified.entry_of(self._reason, decision)
        return {"made": made.isoformat(), "uncertified": said}


def _require_still_allowed(decision: gate.Decision) -> None:
    """Raise if the gate denies the shards that are left, with what it says of them."""
    if not decision.allowed:
        told = "; ".join(f"{why.code}: {why.text}" for why in decision.reasons)
        raise CheckFailed(
            f"the gate denies the rest of this run: {told}; the shards made so far are kept",
            remedy=decision.reasons[0].remedy,
        )

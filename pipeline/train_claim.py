"""What a draft head may be made from, and what its run folder and itself record of that."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from truetap.harness import verifier
from truetap.harness.errors import UsageError
from truetap.harness.model import EngineSpec
from truetap.pipeline import audit_log, policy, provenance, run_folder, uncertified
from truetap.pipeline.config import RunConfig
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.store import Store

if TYPE_CHECKING:
    from rich.console import Console


def claimed(
    config: RunConfig,
    folder: RunFolder,
    spec: EngineSpec,
    allow_uncertified: str | None,
    processes: int,
) -> dict[str, Any]:
    """Return what the head will be made from, recorded in the run folder; refuse what is not."""
    store = Store(folder.shards)
    shards = provenance.examine(
        store,
        policy.demands_of(config.gate),
        boundaries=spec.boundaries,
        verifier=verifier.digests(Path(spec.model)),
    )
    shards.require_certified(unless=allow_uncertified)
    audit_log.require_kept(store)
    made_from = shards.as_dict()
    facts = config.train.model_dump(mode="json") | made_from
    folder.claim("train", facts | _processes(folder, processes))
    return made_from


def _processes(folder: RunFolder, processes: int) -> dict[str, int]:
    """Return the number of processes as a claim holds it: only if there are several.

    The schedule depends on it, so it stays the same until the head is trained.
    """
    path = folder.root / "made-from.json"
    known = run_folder.read_json(path) if path.exists() else {}
    begun = known["train"].get("processes", 1) if "train" in known else processes
    if begun != processes and not (folder.head / "truetap.json").exists():
        raise UsageError(
            f"training in {folder.root} was begun with {begun} process"
            f"{'es' if begun > 1 else ''}, and cannot go on exactly with {processes}",
            remedy=f"start it with torchrun --nproc-per-node {begun}"
            if begun > 1
            else "start it without torchrun",
        )
    return {"processes": begun} if begun > 1 else {}


def with_reasons(
    folder: RunFolder, made_from: dict[str, Any], reason: str | None, console: Console
) -> dict[str, Any]:
    """Return what the head records, with why it was trained on uncertified shards; tell that."""
    if "uncertified" not in made_from:
        if reason is not None:
            text = "every shard has a certificate: --allow-uncertified was not needed"
            console.print(text, style="yellow", highlight=False)
        return made_from
    path = folder.train / "uncertified.jsonl"
    given = [row["reason"] for row in run_folder.read_lines(path)]
    if reason not in given:
        run_folder.append_line(path, {"reason": reason})
        given.append(reason)
    recorded = {**made_from, "uncertified": {**made_from["uncertified"], "trained_because": given}}
    uncertified.warn(recorded, console)
    return recorded

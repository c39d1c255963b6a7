"""What audits of a run's shards were made, and what they answer for.

One sealed line an audit, beside the manifest. A manifest line with ``audit`` promises that its
shard will be answered for by an audit that passed: its own, or one of a shard made after it by the
same session. ``require_kept`` is how training holds extraction to that promise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from truetap.harness.auditor import Finding
from truetap.harness.errors import CheckFailed
from truetap.pipeline import run_folder
from truetap.pipeline.store import REDO, Store, drop_damaged, sealed, sealed_lines

FORMAT = "truetap/run-audit/1"
Line = Mapping[str, Any]


class AuditLog:
    """The file ``audits.jsonl`` of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._store.folder / "audits.jsonl"

    def lines(self) -> list[dict[str, Any]]:
        """Return all audits, in order; ``IntegrityError`` if one is not as it was written."""
        return sealed_lines(self.path)

    def repair(self) -> list[str]:
        """Drop damaged lines: their audits count as not made. Return what was done, in words."""
        return drop_damaged(self.path)

    def record(
        self,
        entry: Line,
        finding: Finding,
        *,
        answers_for: Sequence[Line],
        sample: Mapping[str, Any],
    ) -> None:
        """Add one audit of the shard of a manifest line.

        ``sample`` says which requests were drawn and how; ``answers_for`` counts if it passed.
        """
        passed = finding.right
        line = {
            "format": FORMAT,
            "shard": entry["shard"],
            "states": entry["digests"]["states"],
            "verdict": "pass" if passed else "fail",
            "answers_for": {e["shard"]: e["digests"]["states"] for e in answers_for if passed},
            **sample,
            "saw": finding.saw,
            "slots": [dict(slot) for slot in finding.slots],
            "seconds": finding.seconds,
            "reference": dict(finding.reference),
        }
        run_folder.append_line(self.path, sealed(line))

    def set_aside(self, entries: Sequence[Line]) -> None:
        """Add that shards were set aside: no audit so far says anything of them, made anew."""
        for entry in entries:
            line = {
                "format": FORMAT,
                "shard": entry["shard"],
                "states": entry["digests"]["states"],
                "verdict": "set aside",
                "answers_for": {},
            }
            run_folder.append_line(self.path, sealed(line))

    def passed(self) -> int:
        """Return how many audits passed."""
        return sum(line["verdict"] == "pass" for line in self.lines())

    def standing(self, entries: Sequence[Line]) -> dict[str, Literal["proven", "failed", "open"]]:
        """Return how it stands with each shard that was promised an audit.

        ``failed`` is one whose own latest audit failed, whoever else answers for it; ``open`` one
        that nobody answers for yet.
        """
        vouched: set[tuple[str, str]] = set()
        latest: dict[tuple[str, str], str] = {}
        for line in self.lines():
            vouched.update(line["answers_for"].items())
            latest[line["shard"], line["states"]] = line["verdict"]
        found: dict[str, Literal["proven", "failed", "open"]] = {}
        for entry in entries:
            key = (entry["shard"], entry.get("digests", {}).get("states", ""))
            if latest.get(key) == "fail":
                found[entry["shard"]] = "failed"
            elif entry.get("audit"):
                found[entry["shard"]] = "proven" if key in vouched else "open"
        return found


def require_kept(store: Store) -> None:
    """Refuse shards that failed an audit, or were promised one that was not made."""
    standing = AuditLog(store).standing(list(store.entries().values()))
    for word, said in (
        ("failed", "failed its audit and was not redone"),
        ("open", "was captured after the last audit, so nothing answers for it yet"),
    ):
        names = [name for name, how in standing.items() if how == word]
        if names:
            more = f", like {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckFailed(f"{names[0]} {said}{more}", remedy=REDO)

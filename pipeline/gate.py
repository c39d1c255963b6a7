"""The gate: says whether a run may train on what its capture path gives.

It denies unless a valid certificate exists, and it gives all reasons at once. It is asked twice in
a run: before anything costly, from the files alone, and again on facts read from the very workers
that will do the extraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from truetap.harness import certificate, report
from truetap.harness.certificate import Demands, Judged, Reason
from truetap.harness.errors import TruetapError


@dataclass(frozen=True)
class Decision:
    """Allow, or deny with every reason."""

    reasons: tuple[Reason, ...]
    certificate: str | None
    """SHA-256 of the certificate that allowed, or was nearest to it, hex."""
    workers_checked: bool
    """False if the facts of running workers were not yet known."""
    path: Path | None = None
    """The file of that certificate."""
    signer: str | None = None
    """Id of the key that it is signed with; None: unsigned, or not to be trusted."""
    judged: int = 1
    """How many certificates there were to choose from."""

    @property
    def allowed(self) -> bool:
        """True if nothing speaks against the run."""
        return not self.reasons

    def as_dict(self) -> dict[str, Any]:
        """Return the decision for ``--json``."""
        return {
            "allowed": self.allowed,
            "certificate": self.certificate,
            "path": None if self.path is None else str(self.path),
            "signer": self.signer,
            "workers_checked": self.workers_checked,
            "reasons": [asdict(reason) for reason in self.reasons],
        }


def decide(
    certificates: Sequence[Path], demands: Demands, *, report_path: Path | None = None
) -> Decision:
    """Judge certificates: one good one allows; of none, the nearest says what is missing.

    Where there is no certificate at all, the report says why.
    """
    files = [certificate.judge(path, demands) for path in certificates]
    nearest = min(files, key=_distance)
    reasons = list(nearest.reasons)
    if report_path is not None and all(_absent(file) for file in files):
        reasons = [*_failed_clauses(report_path), *reasons]
    return Decision(
        tuple(reasons),
        nearest.digest,
        workers_checked=demands.binding is not None,
        path=nearest.path,
        signer=nearest.certificate.signer if nearest.certificate else None,
        judged=len(files),
    )


def _distance(judged: Judged) -> tuple[int, int]:
    """Return how far a certificate is from allowing: first how little could be trusted of it."""
    if judged.certificate is not None:
        return (0, len(judged.reasons))
    if judged.digest is not None:
        return (1, 0)
    return (3 if _absent(judged) else 2, 0)


def _absent(judged: Judged) -> bool:
    return [reason.code for reason in judged.reasons] == ["certificate"]


def _failed_clauses(report_path: Path) -> list[Reason]:
    try:
        seen = report.load(report_path)
    except TruetapError:
        return []
    return [
        Reason(
            clause.id,
            f"{clause.title}: {clause.outcome.replace('_', ' ')}. Seen: {clause.saw}",
            "fix the capture path; do not train on what it gives",
        )
        for clause in seen.clauses
        if clause.level == "MUST" and not clause.holds
    ]

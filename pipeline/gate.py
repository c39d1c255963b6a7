"""The gate: says whether a run may train on what its capture path gives.

It denies unless a valid certificate exists, and it gives all reasons at once. It is asked twice in
a run: before anything costly, from the files alone, and again on facts read from the very workers
that will do the extraction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from truetap.harness import certificate, report
from truetap.harness.certificate import Reason
from truetap.harness.errors import TruetapError


@dataclass(frozen=True)
class Decision:
    """Allow, or deny with every reason."""

    reasons: tuple[Reason, ...]
    certificate: str | None
    """SHA-256 of the certificate that was judged, hex."""
    workers_checked: bool
    """False if the facts of running workers were not yet known."""

    @property
    def allowed(self) -> bool:
        """True if nothing speaks against the run."""
        return not self.reasons

    def as_dict(self) -> dict[str, Any]:
        """Return the decision for ``--json``."""
        return {
            "allowed": self.allowed,
            "certificate": self.certificate,
            "workers_checked": self.workers_checked,
            "reasons": [asdict(reason) for reason in self.reasons],
        }


def decide(
    *,
    certificate_path: Path,
    report_path: Path,
    profile: str,
    suite_digest: str,
    now: datetime,
    binding: Mapping[str, Any] | None,
) -> Decision:
    """Judge the certificate; where there is none, the report says why.

    ``binding`` holds the facts of the running workers, or None before the engine is up.
    """
    reasons: list[Reason] = []
    digest = None
    try:
        held = certificate.load(certificate_path)
    except TruetapError as missing:
        reasons += _failed_clauses(report_path)
        reasons.append(Reason("certificate", str(missing), missing.remedy))
    else:
        digest = held.digest
        reasons += certificate.shortcomings(
            held, profile=profile, suite_digest=suite_digest, now=now, binding=binding
        )
    return Decision(tuple(reasons), digest, workers_checked=binding is not None)


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
        if clause.level == "MUST" and clause.outcome != "pass"
    ]

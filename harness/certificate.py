"""Certificates: this adapter passed this profile, live, in exactly this environment, until then.

A certificate is an in-toto statement. It is issued only from a conformant report with live
evidence, and is bound to facts read from the running workers. Nothing here reads the clock: the
time is passed in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from truetap.harness import contract, environment
from truetap.harness.errors import CheckFailed, IntegrityError, UsageError
from truetap.harness.report import Report

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:truetap:conformance:v1"
VALIDITY = timedelta(days=30)


@dataclass(frozen=True)
class Reason:
    """One reason to deny, and what the user can do about it."""

    code: str
    text: str
    remedy: str


@dataclass(frozen=True)
class Certificate:
    """A parsed certificate; ``digest`` is the SHA-256 of the file's bytes, hex."""

    predicate: Mapping[str, Any]
    digest: str


def issue(report: Report, *, now: datetime, validity: timedelta = VALIDITY) -> dict[str, Any]:
    """Return the statement for a report; ``CheckFailed`` names every clause in the way."""
    refusals = [
        f"{clause.id} {clause.outcome.replace('_', ' ')}: {clause.saw or clause.title}"
        for clause in report.clauses
        if clause.level == "MUST" and not clause.holds
    ]
    refusals += [f"{clause_id} is not in the report" for clause_id in report.absent]
    if report.evidence != "live":
        refusals.append(f"the evidence is {report.evidence}; only live evidence certifies")
    if not report.environment:
        refusals.append("the report has no facts about the workers it ran on")
    if refusals:
        raise CheckFailed("no certificate: " + "; ".join(refusals))
    binding = report.environment["binding"]
    predicate = {
        "result": "pass",
        "profile": report.profile,
        "evidence": report.evidence,
        "suite": {"sha256": report.suite_digest},
        "environment": report.environment,
        "bindingDigest": environment.binding_digest(binding),
        "clauses": {
            clause.id: {"outcome": clause.outcome, "cases": clause.cases}
            for clause in report.clauses
        },
        "timeCreated": now.isoformat(),
        "notAfter": (now + validity).isoformat(),
    }
    return {
        "_type": STATEMENT_TYPE,
        "subject": [
            {
                "name": f"adapter:{report.adapter}",
                "digest": {"sha256": binding["adapter"]["sha256"]},
            },
            {
                "name": f"verifier:{report.environment['recorded']['verifier_name']}",
                "digest": {"sha256": binding["verifier"]["weights_sha256"]},
            },
        ],
        "predicateType": PREDICATE_TYPE,
        "predicate": predicate | {"predicateDigest": _predicate_digest(predicate)},
    }


def write(statement: Mapping[str, Any], path: Path) -> str:
    """Write a certificate atomically; return its digest."""
    data = (json.dumps(statement, indent=1) + "\n").encode()
    scratch = path.with_name(path.name + ".partial")
    scratch.write_bytes(data)
    scratch.rename(path)
    return hashlib.sha256(data).hexdigest()


def load(path: Path) -> Certificate:
    """Read a certificate; ``UsageError`` if there is none, ``IntegrityError`` if it is bad."""
    try:
        data = path.read_bytes()
        statement = json.loads(data)
        if statement["_type"] != STATEMENT_TYPE or statement["predicateType"] != PREDICATE_TYPE:
            raise ValueError("another kind of statement")
        predicate = statement["predicate"]
        for name in ("result", "profile", "evidence", "bindingDigest", "predicateDigest"):
            if not isinstance(predicate[name], str):
                raise TypeError(f"{name} is not text")
        for name in ("suite", "environment", "clauses"):
            if not isinstance(predicate[name], dict):
                raise TypeError(f"{name} is not a table")
        if not isinstance(predicate["environment"]["binding"], dict):
            raise TypeError("environment.binding is not a table")
        for name in ("timeCreated", "notAfter"):
            if datetime.fromisoformat(predicate[name]).tzinfo is None:
                raise ValueError(f"{name} has no time zone")
    except FileNotFoundError:
        raise UsageError(
            f"there is no certificate at {path}", remedy="run truetap conform, then truetap certify"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise IntegrityError(
            f"{path} is not a readable certificate: {error}",
            remedy="delete it, then run truetap conform and truetap certify again",
        ) from error
    return Certificate(predicate=predicate, digest=hashlib.sha256(data).hexdigest())


def shortcomings(
    certificate: Certificate,
    *,
    profile: str,
    suite_digest: str,
    now: datetime,
    binding: Mapping[str, Any] | None,
) -> list[Reason]:
    """Return every reason why a certificate does not allow a run, the first to be fixed first.

    ``binding`` holds facts about the present workers; None leaves that comparison for later.
    """
    predicate = certificate.predicate
    again = "run truetap conform and truetap certify again in this environment"
    reasons = []
    if predicate["result"] != "pass" or predicate["evidence"] != "live":
        reasons.append(
            Reason("result", "it does not say that live checks passed", again),
        )
    if predicate["profile"] != profile:
        reasons.append(
            Reason("profile", f"it is for profile {predicate['profile']!r}, not {profile!r}", again)
        )
    reasons += _uncovered(predicate["clauses"], contract.clauses_of(profile), again)
    if _predicate_digest(predicate) != predicate["predicateDigest"]:
        reasons.append(Reason("altered", "it was altered after it was issued", again))
    certified = predicate["environment"]["binding"]
    if binding is not None:
        reasons += [
            Reason("environment", difference, again)
            for difference in environment.differences(certified, binding)
        ]
    if predicate["suite"].get("sha256") != suite_digest:
        reasons.append(Reason("suite", "it was issued by another version of the suite", again))
    created = datetime.fromisoformat(predicate["timeCreated"])
    expires = datetime.fromisoformat(predicate["notAfter"])
    if now < created:
        reasons.append(
            Reason(
                "not-yet",
                f"it was issued in the future, at {created:%Y-%m-%d %H:%M %Z}",
                "set the clock",
            )
        )
    if now > expires:
        reasons.append(Reason("expired", f"it expired on {expires:%Y-%m-%d %H:%M %Z}", again))
    return reasons


def _predicate_digest(predicate: Mapping[str, Any]) -> str:
    """Return the SHA-256 of everything in a predicate but this digest, in a stable spelling, hex.

    It finds damage and edits by hand; only a signature would find a forgery.
    """
    covered = {name: value for name, value in predicate.items() if name != "predicateDigest"}
    return hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()


def _uncovered(clauses: Mapping[str, Any], required: Sequence[str], again: str) -> list[Reason]:
    reasons = []
    for clause_id in required:
        entry = clauses.get(clause_id)
        clause = contract.CLAUSES[clause_id]
        enough = ("pass", "refused") if clause.refusable else ("pass",)
        ran = isinstance(entry, Mapping) and entry.get("outcome") in enough and entry.get("cases")
        if clause.level == "MUST" and not ran:
            reasons.append(
                Reason("clause", f"clause {clause_id} did not run and pass", again),
            )
    return reasons

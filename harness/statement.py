"""What a certificate states: an in-toto statement made from a report, and its schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from truetap.harness import environment, names
from truetap.harness.errors import CheckFailed
from truetap.harness.report import ClauseResult, Report
from truetap.harness.signing import Untrusted, strict_json

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:truetap:conformance:v1"
VALIDITY = timedelta(days=30)
PASS = "pass"
EXPECTED_FAILURES = "expected-failures"
"""Result of a report in which nothing failed but what was expected to."""


def _moment(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("it has no time zone")
    return text


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Word = Annotated[str, Field(pattern=r"^[a-z_-]{1,40}$")]
ClauseId = Annotated[str, Field(pattern=r"^[A-Z]+-[0-9]{3}$")]
Moment = Annotated[str, AfterValidator(_moment)]


class _Table(BaseModel):
    """What is not known here is refused: it might be a condition that nobody looks at."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Digest(_Table):
    sha256: Sha256


class _Subject(_Table):
    name: str
    digest: _Digest


class _Clause(_Table):
    outcome: Literal["pass", "refused", "expected_fail", "fail", "error", "not_run"]
    cases: Annotated[int, Field(ge=0)]
    expected: str = ""


class _Environment(_Table):
    binding: dict[str, Any]
    recorded: dict[str, Any]


class _Predicate(_Table):
    result: Word
    profile: Word
    evidence: Word
    suite: _Digest
    environment: _Environment
    bindingDigest: Sha256  # noqa: N815 (in-toto's spelling)
    clauses: dict[ClauseId, _Clause]
    timeCreated: Moment  # noqa: N815
    notAfter: Moment  # noqa: N815


class _Statement(_Table):
    type: Annotated[Literal["https://in-toto.io/Statement/v1"], Field(alias="_type")]
    subject: list[_Subject]
    predicateType: Literal["urn:truetap:conformance:v1"]  # noqa: N815
    predicate: _Predicate


def issue(
    report: Report,
    *,
    now: datetime,
    validity: timedelta = VALIDITY,
    with_expectations: bool = False,
) -> dict[str, Any]:
    """Return the statement for a report; ``CheckFailed`` names everything in the way.

    ``with_expectations`` states MUST clauses that failed as expected as just that, so that a policy
    can allow them; otherwise they are in the way like any other failure.
    """
    refusals = [
        f"{clause.id} {clause.outcome.replace('_', ' ')}: {clause.saw or clause.title}"
        for clause in report.clauses
        if clause.level == "MUST"
        and not clause.holds
        and not (with_expectations and _foretold(clause))
    ]
    refusals += [f"{clause_id} is not in the report" for clause_id in report.absent]
    if report.evidence != "live":
        refusals.append(f"the evidence is {report.evidence}; only live evidence certifies")
    if not report.environment:
        refusals.append("the report has no facts about the workers it ran on")
    try:
        # Else a policy's greatest age is got round by certifying an old report again and again.
        if now - datetime.fromisoformat(_moment(report.started)) > VALIDITY:
            refusals.append(f"the checks ran on {report.started}, over {VALIDITY.days} days ago")
    except ValueError as error:
        refusals.append(f"the report does not say when the checks ran: {error}")
    if refusals:
        raise CheckFailed(
            "no certificate: " + "; ".join(refusals),
            remedy="repair what is named, then run truetap conform again",
        )
    try:
        statement = _statement(report, now, validity)
        parse(payload_of(statement))
    except (KeyError, TypeError, ValueError, OverflowError, Untrusted) as error:
        raise CheckFailed(
            f"no certificate: the report's facts cannot be certified: {error}",
            remedy=getattr(error, "remedy", "run truetap conform again"),
        ) from error
    return statement


def payload_of(statement: Mapping[str, Any]) -> bytes:
    """Return the bytes that are signed."""
    return (json.dumps(statement, indent=1, allow_nan=False) + "\n").encode()


def parse(payload: bytes) -> dict[str, Any]:
    """Return a statement's predicate; ``Untrusted`` says where its schema is not kept.

    Only for bytes that were verified.
    """
    try:
        statement = strict_json(payload)
        held = _Statement.model_validate(statement)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the statement"
        raise Untrusted(
            "schema", f"it is not of a kind that truetap reads: {where}: {first['msg']}"
        ) from None
    except ValueError as error:
        raise Untrusted("schema", f"it is not of a kind that truetap reads: {error}") from error
    _require_plain(held.subject)
    predicate: dict[str, Any] = statement["predicate"]
    binding = predicate["environment"]["binding"]
    if statement["subject"] != _subjects(predicate):
        raise Untrusted("schema", "its subjects are not those of its environment")
    if predicate["bindingDigest"] != environment.binding_digest(binding):
        raise Untrusted("schema", "its bindingDigest is not that of its binding facts")
    return predicate


def _foretold(clause: ClauseResult) -> bool:
    return clause.outcome == "fail" and bool(clause.expected)


def _statement(report: Report, now: datetime, validity: timedelta) -> dict[str, Any]:
    facts = json.loads(json.dumps(report.environment))
    failed = any(clause.level == "MUST" and _foretold(clause) for clause in report.clauses)
    predicate = {
        "result": EXPECTED_FAILURES if failed else PASS,
        "profile": report.profile,
        "evidence": report.evidence,
        "suite": {"sha256": report.suite_digest},
        "environment": facts,
        "bindingDigest": environment.binding_digest(facts["binding"]),
        "clauses": {clause.id: _stated(clause) for clause in report.clauses},
        "timeCreated": now.isoformat(),
        "notAfter": (now + validity).isoformat(),
    }
    return {
        "_type": STATEMENT_TYPE,
        "subject": _subjects(predicate),
        "predicateType": PREDICATE_TYPE,
        "predicate": predicate,
    }


def _stated(clause: ClauseResult) -> dict[str, Any]:
    if _foretold(clause):
        return {
            "outcome": "expected_fail",
            "cases": clause.cases,
            "expected": clause.expected,
        }
    return {"outcome": clause.outcome, "cases": clause.cases}


def _subjects(predicate: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return who the statement is about: all of it is in the environment already."""
    facts = predicate["environment"]
    try:
        adapter, verifier = facts["binding"]["adapter"], facts["binding"]["verifier"]
        return [
            {"name": f"adapter:{adapter['name']}", "digest": {"sha256": adapter["sha256"]}},
            {
                "name": f"verifier:{facts['recorded']['verifier_name']}",
                "digest": {"sha256": verifier["weights_sha256"]},
            },
        ]
    except (KeyError, TypeError) as error:
        text = f"its environment names no adapter or verifier: {error}"
        raise Untrusted("schema", text) from None


def _require_plain(subjects: list[_Subject]) -> None:
    for subject in subjects:
        kind, _, name = subject.name.partition(":")
        if wrong := names.fault_of(name, slashes=kind == "adapter"):
            raise Untrusted(
                "name",
                f"its subject {subject.name!r} has a bad name: {wrong}",
                remedy="rename the verifier's folder, or name the executable by its whole path, "
                "then conform and certify again",
            )

"""The conformance report: what ran, what passed, what was seen.

A report is conformant only if every MUST clause of its profile ran and passed. There is no
percentage, and a run in which nothing ran is not green.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from truetap.harness import contract
from truetap.harness.errors import IntegrityError, UsageError

SCHEMA = "truetap/conformance-report/1"
Outcome = Literal["pass", "refused", "fail", "error", "not_run"]
Verdict = Literal["conformant", "non-conformant", "inconclusive"]
_STRICT = {"extra": "forbid", "strict": True, "use_attribute_docstrings": True}
"""How pydantic reads these records where a schema is wanted; nothing here imports it."""
_SEVERITY: tuple[Outcome, ...] = ("not_run", "pass", "refused", "error", "fail")


@dataclass
class ClauseResult:
    """Outcome of one clause over all its cases."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    id: str
    title: str
    level: str
    outcome: Outcome = "not_run"
    cases: int = 0
    saw: str = ""
    """What was seen: the worst case's message, or what a passing case measured."""
    expected: str = ""
    """Reason and link of the expectation that foretold this failure; the outcome stays "fail"."""
    reproduce: str = ""
    """The command line that runs this clause alone, on the same subject."""

    @property
    def holds(self) -> bool:
        """True if it passed, or if it was refused and may be: an error is no wrong capture."""
        known = contract.CLAUSES.get(self.id)
        return self.outcome == "pass" or (
            self.outcome == "refused" and known is not None and known.refusable
        )

    def add(self, outcome: Outcome, saw: str) -> None:
        """Count one more case; the worst outcome stays, whatever order the cases come in."""
        self.cases += 1
        worse = _SEVERITY.index(outcome) - _SEVERITY.index(self.outcome)
        if worse > 0 or (worse == 0 and saw and (not self.saw or saw < self.saw)):
            self.outcome, self.saw = outcome, saw


@dataclass
class Report:
    """One run of the suite against one adapter in one environment."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    profile: str
    evidence: str
    """``live``, ``replay`` or ``surface``; only ``live`` certifies."""
    adapter: str
    spec: dict[str, Any]
    suite_digest: str
    started: str
    environment: dict[str, Any] = field(default_factory=dict)
    clauses: list[ClauseResult] = field(default_factory=list)
    seconds: float = 0.0
    schema: str = SCHEMA

    @property
    def verdict(self) -> Verdict:
        """Conformant, not, or inconclusive: something could not be run."""
        musts = [clause for clause in self.clauses if clause.level == "MUST"]
        if any(clause.outcome == "fail" for clause in musts):
            return "non-conformant"
        passed = bool(musts) and all(clause.holds for clause in musts)
        if passed and self.environment and not self.absent:
            return "conformant"
        return "inconclusive"

    @property
    def absent(self) -> list[str]:
        """MUST clauses of the profile that are not in the report as such."""
        listed = {clause.id for clause in self.clauses if clause.level == "MUST"}
        return [
            clause_id
            for clause_id in contract.clauses_of(self.profile)
            if contract.CLAUSES[clause_id].level == "MUST" and clause_id not in listed
        ]

    def write(self, path: Path) -> None:
        """Write as JSON, atomically."""
        document = asdict(self) | {"verdict": self.verdict}
        scratch = path.with_name(path.name + ".partial")
        scratch.write_text(json.dumps(document, indent=1) + "\n")
        scratch.rename(path)


def blank(profile: str, **facts: Any) -> Report:
    """Return a report with every clause of ``profile`` not yet run."""
    if profile not in contract.PROFILES:
        raise UsageError(
            f"there is no profile named {profile!r}",
            remedy=f"profiles: {', '.join(contract.PROFILES)}",
        )
    clauses = [contract.CLAUSES[clause_id] for clause_id in contract.PROFILES[profile]]
    return Report(
        profile=profile,
        clauses=[ClauseResult(clause.id, clause.title, clause.level) for clause in clauses],
        **facts,
    )


def load(path: Path) -> Report:
    """Read a report. The verdict is worked out again from the clauses, not believed."""
    try:
        document = json.loads(path.read_text())
        if document.get("schema") != SCHEMA:
            raise IntegrityError(
                f"{path} is not a conformance report of a kind this truetap reads",
                remedy="run truetap conform again",
            )
        document.pop("verdict", None)
        clauses = [ClauseResult(**clause) for clause in document.pop("clauses")]
        return _checked(Report(clauses=clauses, **document))
    except FileNotFoundError:
        raise UsageError(
            f"there is no conformance report at {path}", remedy="run truetap conform first"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise IntegrityError(
            f"{path} is not a readable conformance report: {error}",
            remedy="delete it and run truetap conform again",
        ) from error


def _checked(loaded: Report) -> Report:
    """Raise TypeError where a field that is read later is of another type."""
    for name in ("profile", "evidence", "adapter", "suite_digest", "started"):
        if not isinstance(getattr(loaded, name), str):
            raise TypeError(f"{name} is not text")
    if not isinstance(loaded.environment, dict):
        raise TypeError("environment is not a table")
    if not isinstance(loaded.spec, dict):
        raise TypeError("spec is not a table")
    for clause in loaded.clauses:
        if not isinstance(clause.id, str) or clause.outcome not in _SEVERITY:
            raise TypeError(f"there is no clause {clause.id!r} with outcome {clause.outcome!r}")
        for name in ("title", "level", "saw", "expected", "reproduce"):
            if not isinstance(getattr(clause, name), str):
                raise TypeError(f"{name} of {clause.id} is not text")
    return loaded

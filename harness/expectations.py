"""Known failures of a capture path or channel: what is expected to fail, where, why, until when.

An expectation makes nothing conformant. It says that a failure is known, so that a run fails only
on what is new; it holds for exactly the releases and circumstances that it names, and one that
does not fail any more fails the run, so that it is deleted.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from truetap.harness import contract
from truetap.harness.errors import UsageError
from truetap.harness.model import EngineSpec
from truetap.harness.report import ClauseResult, Report

_SETTINGS = {setting.name: setting.default for setting in fields(EngineSpec)}


class _Table(BaseModel):
    """A mistyped key is an error, not a condition that is never looked at."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Verifier(_Table):
    """Which verifiers: as their ``config.json`` says, read at the path that the workers loaded."""

    model_type: str | None = None
    rope_type: str | None = None
    """How positions are encoded: "default", "yarn", ..."""


class Expectation(_Table):
    """One clause that fails, and where."""

    clause: str
    releases: str
    """PEP 440 specifier of the engine's version, as the running workers gave it; "" is any."""
    reason: str = Field(min_length=1)
    link: str = Field(min_length=1)
    """Where this is known or proven: an address, or a path of this repository."""
    review: date
    """From the day after on, every run says that somebody should look again."""
    example: str = Field(min_length=1)
    """The smallest input that shows the failure, as text."""
    device: Literal["cpu", "cuda"] | None = None
    least_ranks: int | None = Field(default=None, ge=2, strict=True)
    """How many workers the engine must have at least: what one rank is given of another one's
    cannot be seen with one alone."""
    verifier: Verifier = Verifier()
    spec: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Engine settings, fields of ``EngineSpec``, that must have these values."""

    @field_validator("clause")
    @classmethod
    def _is_a_clause(cls, clause: str) -> str:
        if clause not in contract.CLAUSES:
            raise ValueError(f"there is no clause {clause!r}")
        return clause

    @field_validator("releases")
    @classmethod
    def _is_a_specifier(cls, releases: str) -> str:
        try:
            SpecifierSet(releases)
        except InvalidSpecifier:
            raise ValueError(f"{releases!r} is no version specifier, like '>=0.11.1'") from None
        return releases

    @field_validator("spec")
    @classmethod
    def _has_settings(cls, spec: dict[str, Any]) -> dict[str, Any]:
        if unknown := spec.keys() - _SETTINGS.keys():
            raise ValueError(f"there is no engine setting {', '.join(sorted(unknown))}")
        return spec

    @property
    def says(self) -> str:
        """Reason and link in one phrase."""
        return f"{self.reason} ({self.link})"

    def holds_for(self, environment: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
        """Return whether this is about a run in ``environment``, that was ``asked`` for a spec.

        What the running workers say counts before what was asked for. What nobody says is no
        match: an expectation never covers a run that it is not known to be about.
        """
        binding = environment.get("binding") or {}
        recorded = environment.get("recorded") or {}
        wanted = self.verifier.model_dump(exclude_none=True)
        return (
            self._covers(str(binding.get("engine_version", "")))
            and self.device in (None, _device(binding))
            and _ranks(binding, asked) >= (self.least_ranks or 0)
            and all(recorded.get(f"verifier_{name}") == value for name, value in wanted.items())
            and all(
                _same(binding.get(name, asked.get(name, _SETTINGS[name])), value)
                for name, value in self.spec.items()
            )
        )

    def _covers(self, release: str) -> bool:
        try:
            return SpecifierSet(self.releases).contains(Version(release), prereleases=True)
        except InvalidVersion:
            return False


class _File(_Table):
    expectation: tuple[Expectation, ...] = ()


@dataclass(frozen=True)
class Expectations:
    """All expectations of one subject, and the file that they stand in."""

    source: str = ""
    entries: tuple[Expectation, ...] = ()

    def of(
        self, clause_id: str, environment: Mapping[str, Any], asked: Mapping[str, Any]
    ) -> Expectation | None:
        """Return the first expectation about a clause in this run, if there is one."""
        for entry in self.entries:
            if entry.clause == clause_id and entry.holds_for(environment, asked):
                return entry
        return None

    def overdue(self, today: date) -> list[str]:
        """Return one sentence for each entry whose review date has passed."""
        return [
            f"{self.source}: {entry.clause} ({entry.reason}) was to be reviewed by {entry.review}"
            for entry in self.entries
            if entry.review < today
        ]


@dataclass
class Comparison:
    """How a run compares with what was expected of it."""

    foretold: list[str] = field(default_factory=list)
    """One phrase for each clause that failed as expected."""
    surprises: list[str] = field(default_factory=list)
    """One sentence for each expectation that did not come true; each of them fails the run."""


def compare(report: Report, expectations: Expectations) -> Comparison:
    """Mark the failures of ``report`` that were expected; return what that amounts to.

    A clause that did not run, wholly, is no proof of anything. An error was not the expected
    failure, and neither is a refusal.
    """
    found = Comparison()
    for clause in report.clauses:
        entry = expectations.of(clause.id, report.environment, report.spec)
        if entry is None:
            continue
        if clause.outcome == "fail":
            clause.expected = entry.says
            found.foretold.append(f"{clause.id}: {entry.says}")
        elif clause.outcome != "not_run":
            found.surprises.append(_surprise(clause, entry, expectations.source))
    return found


def _surprise(clause: ClauseResult, entry: Expectation, source: str) -> str:
    which = f"the expectation for {clause.id} with releases = {entry.releases!r} in {source}"
    if clause.outcome == "pass":
        return f"{clause.id} passed where a failure was expected ({entry.reason}): delete {which}"
    how = {"refused": "was refused", "error": "ended in an error"}[clause.outcome]
    return f"{clause.id} {how}, where a failure was expected ({entry.reason}): see {which}"


def load(path: Path) -> Expectations:
    """Read a file of expectations; ``UsageError`` tells every mistake in one sentence."""
    try:
        table = tomllib.loads(path.read_text())
        return Expectations(str(path), _File.model_validate(table).expectation)
    except FileNotFoundError:
        raise UsageError(f"there is no file of expectations at {path}") from None
    except ValidationError as error:
        mistakes = "; ".join(
            f"{'.'.join(map(str, mistake['loc'])) or 'the file'}: "
            + mistake["msg"].removeprefix("Value error, ")
            for mistake in error.errors()
        )
        raise UsageError(f"the expectations in {path} are not right: {mistakes}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"the expectations in {path} cannot be read: {error}") from None


def packaged(name: str) -> Expectations:
    """Return what the suite itself expects of an adapter or channel; empty for most.

    A mutant, ``FAULT@NAME``, has none of NAME's: its faults are there to be seen.
    """
    suite = find_spec("truetap.conformance")
    if not suite or not suite.origin or Path(name).name != name:
        return Expectations()
    path = Path(suite.origin).parent / "expectations" / f"{name}.toml"
    return load(path) if path.is_file() else Expectations()


def _device(binding: Mapping[str, Any]) -> str | None:
    if binding.get("cuda_version"):
        return "cuda"
    return "cpu" if binding.get("device") else None


def _ranks(binding: Mapping[str, Any], asked: Mapping[str, Any]) -> int:
    """Return how many workers a run has; 0 if what is said is no number."""
    wanted = asked.get("tensor_parallel_size", _SETTINGS["tensor_parallel_size"])
    ranks = binding.get("world_size", wanted)
    return ranks if type(ranks) is int else 0


def _same(value: Any, wanted: str | float | bool) -> bool:
    """Compare as JSON does: true is not 1."""
    return isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)

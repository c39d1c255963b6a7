"""Reports side by side: one self-contained page, clauses down, runs across.

Reports are foreign data. They are put into the page as text, never as markup, script or address.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from truetap.harness import contract, report
from truetap.harness.errors import IntegrityError, UsageError
from truetap.harness.report import ClauseResult, Report

_FAMILY = {
    "REPLY": "what the workers answer",
    "ROWS": "which rows come back, and whose",
    "LAYERS": "which states they are",
    "PARALLEL": "several ranks",
    "ENGINE": "what capture does to the engine",
    "STORE": "what is kept on disk",
}
_WEB = re.compile(r"(https?://[^\s<>\"'()]+)")
_PARTS = re.compile(r"(?<=[_/:@.-])")
_KIND = "truetap/conformance-report/"


@dataclass(frozen=True)
class Cell:
    """What became of one clause in one run."""

    kind: str
    """Style of the cell: pass, refused, expected, fail, error, not_run or absent."""
    text: str
    clause: ClauseResult | None = None

    @property
    def expected_parts(self) -> list[tuple[str, str]]:
        """The expectation as pairs of text and web address; nothing else becomes a link."""
        parts = _WEB.split(self.clause.expected) if self.clause else []
        return [("", part) if index % 2 else (part, "") for index, part in enumerate(parts)]


@dataclass(frozen=True)
class Column:
    """One run."""

    number: int
    """Its place, from 1 on: ``r`` of a page's address."""
    adapter: str
    engine: str
    verifier: str
    verdict: str
    profile: str
    setting: str
    facts: tuple[tuple[str, str], ...]
    cells: Mapping[str, Cell]


@dataclass(frozen=True)
class Row:
    """One clause: what it demands, and why."""

    id: str
    level: str
    title: str
    reason: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    """All runs; ``families`` are names, explanations and rows."""

    columns: tuple[Column, ...]
    families: tuple[tuple[str, str, tuple[Row, ...]], ...]


def gather(paths: Sequence[Path]) -> list[Report]:
    """Read the reports at ``paths``; a folder stands for all reports in it, by name.

    ``UsageError`` if there is none, ``IntegrityError`` for what cannot be read.
    """
    found = []
    for path in paths:
        if not path.is_dir():
            found.append(report.load(path))
            continue
        inside = [report.load(file) for file in sorted(path.glob("*.json")) if _is_report(file)]
        if not inside:
            raise UsageError(
                f"there is no conformance report in {path}", remedy="name a folder that has some"
            )
        found += inside
    return found


def _is_report(file: Path) -> bool:
    """Tell reports from other JSON files of a folder; what is no JSON may be a torn report."""
    try:
        document = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise IntegrityError(
            f"{file} cannot be read: {error}", remedy="delete it, or name the reports one by one"
        ) from None
    schema = document.get("schema") if isinstance(document, dict) else None
    return isinstance(schema, str) and schema.startswith(_KIND)


def lay_out(reports: Sequence[Report]) -> Matrix:
    """Return the table of all reports: clauses in the contract's order, unknown ones last."""
    rows: dict[str, Row] = {}
    for clause in (clause for made in reports for clause in made.clauses):
        rows.setdefault(clause.id, _row(clause))
    known = [clause_id for clause_id in contract.CLAUSES if clause_id in rows]
    ordered = known + [clause_id for clause_id in rows if clause_id not in contract.CLAUSES]
    families: dict[str, list[Row]] = {}
    for clause_id in ordered:
        families.setdefault(clause_id.partition("-")[0], []).append(rows[clause_id])
    return Matrix(
        tuple(_column(number, made) for number, made in enumerate(reports, 1)),
        tuple((name, _FAMILY.get(name, ""), tuple(members)) for name, members in families.items()),
    )


def _row(clause: ClauseResult) -> Row:
    if known := contract.CLAUSES.get(clause.id):
        return Row(known.id, known.level, known.title, known.reason, known.references)
    return Row(clause.id, clause.level, clause.title, "", ())


def _column(number: int, made: Report) -> Column:
    facts = dict(_flat(made.environment))
    engine = facts.get("binding.engine", "")
    release = facts.get("binding.engine_version", "")
    verifier = facts.get("recorded.verifier_name") or _named(made.spec.get("model"))
    ranks = facts.get("binding.tensor_parallel_size") or facts.get("binding.world_size")
    settings = (facts.get("binding.dtype"), ranks and f"TP {ranks}", facts.get("binding.device"))
    asked = [(f"asked.{name}", value) for name, value in _flat(made.spec)]
    run = [("started", made.started), ("seconds", str(made.seconds)), ("evidence", made.evidence)]
    return Column(
        number=number,
        adapter=made.adapter or "no adapter",
        engine=f"{engine} {release}".strip() or "engine unknown",
        verifier=verifier,
        verdict=made.verdict,
        profile=made.profile,
        setting=", ".join(setting for setting in settings if setting),
        facts=(*run, ("suite", made.suite_digest), *facts.items(), *asked),
        cells={clause.id: _cell(clause) for clause in made.clauses},
    )


def _named(model: Any) -> str:
    return Path(model).name if isinstance(model, str) and model else "random Llama"


def _cell(clause: ClauseResult) -> Cell:
    if clause.outcome == "fail" and clause.expected:
        return Cell("expected", "expected fail", clause)
    return Cell(clause.outcome, clause.outcome.replace("_", " "), clause)


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, str) else json.dumps(value)


def render(reports: Sequence[Report]) -> str:
    """Return the page. The same reports give the same page."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # Long names may break after a separator; ``join`` escapes the parts.
    environment.filters["breakable"] = lambda text: Markup("<wbr>").join(_PARTS.split(text))
    template = resources.files("truetap.pipeline").joinpath("matrix.html").read_text("utf-8")
    absent = Cell("absent", "not in the profile")
    return environment.from_string(template).render(matrix=lay_out(reports), absent=absent)


def write_page(paths: Sequence[Path], page: Path) -> int:
    """Write the page for the reports at ``paths``, wholly or not at all; return their number."""
    reports = gather(paths)
    if not page.parent.is_dir():
        raise UsageError(
            f"--out names {page}, in a folder that does not exist", remedy="make the folder first"
        )
    scratch = page.with_name(page.name + ".partial")
    scratch.write_text(render(reports), encoding="utf-8")
    scratch.rename(page)
    return len(reports)

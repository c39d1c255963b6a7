"""docs/cases.md: every case has a row, and what the row names is there and catches what it says."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from truetap.harness import contract
from truetap.pipeline import cli_suite

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "cases.md"
CLAUSE = re.compile(r"\b[A-Z]+-\d{3}\b")
QUOTED = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Row:
    """One case: what holds it, what shows that this can fail, and what is not covered."""

    number: int
    held_by: str
    can_fail: str
    not_covered: str

    @property
    def clauses(self) -> list[str]:
        return CLAUSE.findall(self.held_by)

    @property
    def nodes(self) -> list[str]:
        return [name for name in QUOTED.findall(self.held_by + self.can_fail) if "::" in name]

    @property
    def mutants(self) -> list[str]:
        return [name for name in QUOTED.findall(self.can_fail) if "::" not in name]


def rows_of(text: str) -> list[Row]:
    rows = []
    for line in text.splitlines():
        if found := re.match(r"\| (\d\d) [^|]+ \|(.*)\|$", line):
            cells = [cell.strip() for cell in found[2].split(" | ")]
            assert len(cells) == 3, line
            rows.append(Row(int(found[1]), *cells))
    return rows


ROWS = rows_of(TABLE.read_text("utf-8"))


def functions_of(path: Path) -> set[str]:
    """Return the names of a file's test functions, read and not imported."""
    tree = ast.parse(path.read_text("utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
    }


def complaints(row: Row) -> list[str]:
    """Return what is wrong with a row, one sentence each."""
    caught = cli_suite._faults()
    found = [f"no clause {name}" for name in row.clauses if name not in contract.CLAUSES]
    for node in row.nodes:
        file, _, name = node.partition("::")
        if not (ROOT / file).is_file() or name not in functions_of(ROOT / file):
            found.append(f"no test {node}")
    due = {clause: set(caught.get(clause, {})) for clause in row.clauses}
    all_due = set().union(*due.values())
    found += [
        f"no clause of the row has to catch the mutant {mutant}"
        for mutant in row.mutants
        if mutant not in all_due
    ]
    found += [
        f"no mutant of the row is for {clause}"
        for clause, theirs in due.items()
        if not theirs & set(row.mutants)
    ]
    if not row.clauses and not row.nodes:
        found.append("nothing holds it")
    if not row.mutants and "::" not in row.can_fail:
        found.append("nothing shows that it can fail")
    if not row.not_covered.endswith("."):
        found.append("it does not say what is not covered")
    return found


def test_every_case_has_one_row() -> None:
    assert [row.number for row in ROWS] == list(range(1, 28))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.number:02}")
def test_what_a_row_names_is_there(row: Row) -> None:
    assert complaints(row) == []


HELD = "ROWS-001; `harness/tests/test_cases.py::test_every_case_has_one_row`"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Row(1, HELD, "`rows-short`", "Much."), None),
        (Row(1, "ROWS-999", "`rows-short`", "Much."), "no clause ROWS-999"),
        (Row(1, HELD.replace("_row`", "_line`"), "`rows-short`", "Much."), "no test harness"),
        (Row(1, HELD.replace("cases.py", "c.py"), "`rows-short`", "Much."), "no test harness"),
        (Row(1, HELD, "`rows-shorn`", "Much."), "mutant rows-shorn"),
        (Row(1, HELD, "`off-by-one`", "Much."), "mutant off-by-one"),  # of another clause
        (Row(1, "ROWS-001, ROWS-002", "`rows-short`", "Much."), "no mutant .* ROWS-002"),
        (Row(1, "words", "words", "Much."), "nothing holds it"),
        (Row(1, HELD.partition("; ")[2], "words", "Much."), "nothing shows"),
        (Row(1, HELD, "`rows-short`", ""), "not covered"),
    ],
)
def test_a_wrong_row_is_seen(row: Row, said: str | None) -> None:
    found = "; ".join(complaints(row))
    assert not found if said is None else re.search(said, found)


def test_a_row_that_is_missing_or_twice_is_seen() -> None:
    text = TABLE.read_text("utf-8")
    (line,) = (line for line in text.splitlines() if line.startswith("| 07 "))
    assert 7 not in [row.number for row in rows_of(text.replace(line, ""))]
    assert [row.number for row in rows_of(f"{text}\n{line}")].count(7) == 2

"""The report's JSON Schema: what is committed is what the records say, and reports follow it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from truetap.harness import report, report_schema

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "conformance" / "report.schema.json"
RECORDED = sorted((ROOT / "fixtures" / "reports").glob("*.json"))


def fresh(tmp_path: Path) -> dict[str, Any]:
    made = report.blank(
        "core", evidence="live", adapter="a", spec={"seed": 1}, suite_digest="5", started="then"
    )
    made.environment = {"binding": {"engine": "x"}, "recorded": {}}
    for clause in made.clauses:
        clause.add("fail", "seen")
        clause.expected, clause.reproduce = "known (docs/x.md)", "pytest --clause X"
    made.write(tmp_path / "r.json")
    document: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    return document


def test_the_committed_schema_is_the_generated_one() -> None:
    text = json.dumps(report_schema.schema(), indent=1) + "\n"
    assert COMMITTED.read_text() == text, (
        "python -m truetap.harness.report_schema conformance/report.schema.json writes it anew"
    )


def test_a_new_field_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = report_schema.schema()
    monkeypatch.setattr(report_schema, "SCHEMA", "truetap/conformance-report/2")
    assert report_schema.schema() != before


def test_a_fresh_report_follows_it(tmp_path: Path) -> None:
    document = fresh(tmp_path)
    assert report_schema.validate(document) == report.load(tmp_path / "r.json")
    described = report_schema.schema()
    assert document.keys() == described["properties"].keys()
    clause = described["$defs"]["ClauseResult"]["properties"]
    assert document["clauses"][0].keys() == clause.keys()


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_reports_follow_it(path: Path) -> None:
    assert report_schema.validate(json.loads(path.read_text())) == report.load(path)


BROKEN: list[tuple[str, Any]] = [
    ("verdict", "green"),
    ("verdict", None),
    ("profile", 1),
    ("seconds", "34"),
    ("surplus", 1),
    ("environment", []),
    ("clauses", [{"id": "ROWS-001", "title": "t"}]),
    ("clauses", [{"id": "ROWS-001", "title": "t", "level": "MUST", "outcome": "passed"}]),
    ("clauses", [{"id": "ROWS-001", "title": "t", "level": "MUST", "cases": "1"}]),
    ("clauses", [{"id": "ROWS-001", "title": "t", "level": "MUST", "surplus": 1}]),
]


@pytest.mark.parametrize(("name", "value"), BROKEN)
def test_what_does_not_follow_it_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValidationError):
        report_schema.validate(fresh(tmp_path) | {name: value})


@pytest.mark.torch  # jsonschema is pinned with the engines, not with the light tests
def test_another_validator_agrees(tmp_path: Path) -> None:
    from jsonschema import Draft202012Validator

    described = json.loads(COMMITTED.read_text())
    Draft202012Validator.check_schema(described)
    validator = Draft202012Validator(described)
    for document in (fresh(tmp_path), *(json.loads(path.read_text()) for path in RECORDED)):
        assert list(validator.iter_errors(document)) == []
    for name, value in BROKEN:
        assert list(validator.iter_errors(fresh(tmp_path) | {name: value})), (name, value)

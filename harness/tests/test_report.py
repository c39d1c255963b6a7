"""The conformance report: what counts as conformant, and that a file's word is not taken for it."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from truetap.harness import contract, report
from truetap.harness.errors import IntegrityError, UsageError
from truetap.harness.report import ClauseResult, Outcome, Report, Verdict

CORE = contract.PROFILES["core"]
EVERY_ERROR: dict[str, Outcome] = {clause_id.replace("-", "_"): "error" for clause_id in CORE}


def blank() -> Report:
    return report.blank(
        "core",
        evidence="live",
        adapter="transformers",
        spec={"dtype": "bfloat16"},
        suite_digest="5" * 64,
        started="2026-11-29T16:00:00+00:00",
    )


def ran(**outcomes: Outcome) -> Report:
    """Return a report in which all clauses passed but those named, by id with underscores."""
    made = blank()
    made.environment = {"binding": {"engine": "vllm"}, "recorded": {}}
    for clause in made.clauses:
        clause.add(outcomes.get(clause.id.replace("-", "_"), "pass"), "seen")
    return made


def test_a_blank_report_lists_every_clause_of_the_profile_as_not_run() -> None:
    made = blank()
    assert [clause.id for clause in made.clauses] == list(CORE)
    assert {(clause.outcome, clause.cases) for clause in made.clauses} == {("not_run", 0)}
    assert made.verdict == "inconclusive"


def test_an_unknown_profile_is_a_usage_error_naming_those_there_are() -> None:
    with pytest.raises(UsageError, match="'all'") as refused:
        report.blank("all", evidence="live")
    assert "core" in refused.value.remedy


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        (ran(), "conformant"),
        (ran(ROWS_001="not_run"), "inconclusive"),
        (ran(ROWS_001="error"), "inconclusive"),
        (ran(ROWS_001="fail"), "non-conformant"),
        (ran(REPLY_001="error", ROWS_003="fail", LAYERS_001="not_run"), "non-conformant"),
        (ran(**EVERY_ERROR), "inconclusive"),
    ],
)
def test_verdict(made: Report, verdict: Verdict) -> None:
    assert made.verdict == verdict


def test_where_nothing_ran_or_nobody_knows_where_it_ran_is_inconclusive() -> None:
    homeless = ran()
    homeless.environment = {}
    assert homeless.verdict == "inconclusive"
    empty = ran()
    empty.clauses = []
    assert empty.verdict == "inconclusive"


def test_a_must_clause_cannot_be_made_optional_by_the_report() -> None:
    made = ran()
    made.clauses[0].level = "SHOULD"
    assert made.verdict == "inconclusive"


@pytest.mark.parametrize("outcome", ["fail", "error", "not_run"])
def test_a_should_clause_does_not_block(outcome: Outcome) -> None:
    made = ran()
    made.clauses.append(ClauseResult("EXTRA-001", "nice", "SHOULD", outcome))
    assert made.verdict == "conformant"


def test_only_should_clauses_are_not_enough() -> None:
    made = ran()
    made.clauses = [ClauseResult("EXTRA-001", "nice", "SHOULD", "pass")]
    assert made.verdict == "inconclusive"


@pytest.mark.parametrize(
    ("outcomes", "worst", "saw"),
    [
        (["pass", "pass"], "pass", 0),
        (["pass", "fail", "pass"], "fail", 1),
        (["error", "fail"], "fail", 1),
        (["fail", "error"], "fail", 0),
        (["pass", "error", "error"], "error", 1),
    ],
)
def test_the_worst_case_of_a_clause_stays_with_what_it_saw(
    outcomes: list[Outcome], worst: Outcome, saw: int
) -> None:
    clause = ClauseResult("ROWS-001", "rows", "MUST")
    for index, outcome in enumerate(outcomes):
        clause.add(outcome, f"case {index}")
    assert (clause.outcome, clause.saw, clause.cases) == (worst, f"case {saw}", len(outcomes))


def test_what_is_loaded_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    made = ran(ROWS_002="fail")
    made.seconds = 12.5
    made.write(path)
    assert report.load(path) == made
    assert json.loads(path.read_text())["verdict"] == "non-conformant"
    assert list(tmp_path.iterdir()) == [path]


def test_the_verdict_in_the_file_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    ran(ROWS_002="fail").write(path)
    path.write_text(path.read_text().replace('"non-conformant"', '"conformant"'))
    assert report.load(path).verdict == "non-conformant"


def test_a_clause_that_is_gone_from_the_file_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    made = ran()
    made.clauses = [clause for clause in made.clauses if clause.id != "ROWS-003"]
    made.write(path)
    assert report.load(path).verdict == "inconclusive"


def test_a_missing_report_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no conformance report at") as raised:
        report.load(tmp_path / "report.json")
    assert "truetap conform" in raised.value.remedy


def with_field(name: str, value: Any) -> bytes:
    return json.dumps(asdict(ran()) | {name: value}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b'"text"',
        b"{}",
        b"[" * 100_000,
        json.dumps(asdict(ran())).encode()[:-20],
        with_field("schema", "truetap/conformance-report/2"),
        with_field("clauses", None),
        with_field("clauses", ["ROWS-001"]),
        with_field("clauses", [{"id": "ROWS-001"}]),
        with_field("clauses", [{"id": "x", "title": "x", "level": "MUST", "surplus": 1}]),
        with_field("clauses", [{"id": "x", "title": "x", "level": "MUST", "outcome": "passed"}]),
        with_field("clauses", [{"id": ["x"], "title": "x", "level": "MUST"}]),
        with_field("environment", "somewhere"),
        with_field("profile", ["core"]),
        with_field("surplus", 1),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_a_corrupt_report_is_an_integrity_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"report\.json is not a") as raised:
        report.load(path)
    assert "truetap conform again" in raised.value.remedy


def test_a_folder_in_place_of_a_report_is_an_integrity_error(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="not a readable"):
        report.load(tmp_path)


@pytest.mark.parametrize("outcome", ["pass", "fail", "error"])
def test_what_was_seen_does_not_depend_on_which_worker_was_first(outcome: Outcome) -> None:
    cases = [("width 16", outcome), ("", outcome), ("width 32", outcome)]
    told = set()
    for order in permutations(cases):
        clause = ClauseResult("LAYERS-004", "", "MUST")
        for saw, what in order:
            clause.add(what, saw)
        told.add((clause.outcome, clause.saw, clause.cases))
    assert told == {(outcome, "width 16", 3)}


@pytest.mark.parametrize("clause_id", contract.CLAUSES)
def test_a_refusal_holds_only_where_it_may_be(clause_id: str) -> None:
    clause = ClauseResult(clause_id, "", "MUST", "refused", 1)
    assert clause.holds == contract.CLAUSES[clause_id].refusable
    assert not ClauseResult("ROWS-999", "", "MUST", "refused", 1).holds

from __future__ import annotations

import copy
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from truetap.harness import certificate, contract, report
from truetap.pipeline import gate

if TYPE_CHECKING:
    from pathlib import Path

    from truetap.harness.report import Outcome, Report

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
SUITE = "5" * 64
BINDING = {
    "engine": "vllm",
    "engine_version": "0.32.0",
    "max_num_seqs": 32,
    "verifier": {"weights_sha256": "a" * 64, "num_blocks": 12},
    "boundaries": [2, 6, 9, 12],
    "adapter": {"name": "vllm_native", "sha256": "b" * 64},
}
MUSTS = [id_ for id_ in contract.PROFILES["core"] if contract.CLAUSES[id_].level == "MUST"]


def report_with(outcomes: dict[str, tuple[Outcome, str]]) -> Report:
    """A live report in which all clauses passed but those named."""
    made = report.blank(
        "core",
        evidence="live",
        adapter="vllm_native",
        spec={},
        suite_digest=SUITE,
        started=NOW.isoformat(),
        environment={"binding": BINDING, "recorded": {"verifier_name": "tiny"}},
    )
    for clause in made.clauses:
        clause.add(*outcomes.get(clause.id, ("pass", "")))
    return made


@pytest.fixture
def statement() -> dict[str, Any]:
    """A certificate of yesterday."""
    return copy.deepcopy(certificate.issue(report_with({}), now=NOW - timedelta(days=1)))


def ask(
    folder: Path, binding: dict[str, Any] | None, *, now: datetime = NOW, suite: str = SUITE
) -> gate.Decision:
    return gate.decide(
        certificate_path=folder / "certificate.json",
        report_path=folder / "report.json",
        profile="core",
        suite_digest=suite,
        now=now,
        binding=binding,
    )


def test_a_good_certificate_for_these_workers_allows(
    tmp_path: Path, statement: dict[str, Any]
) -> None:
    digest = certificate.write(statement, tmp_path / "certificate.json")
    decision = ask(tmp_path, copy.deepcopy(BINDING))
    assert decision.allowed
    assert decision.as_dict() == {
        "allowed": True,
        "certificate": digest,
        "workers_checked": True,
        "reasons": [],
    }


def test_before_the_workers_are_up_it_says_that_they_were_not_checked(
    tmp_path: Path, statement: dict[str, Any]
) -> None:
    certificate.write(statement, tmp_path / "certificate.json")
    decision = ask(tmp_path, None)
    assert decision.allowed
    assert not decision.workers_checked


@pytest.mark.parametrize(
    ("fact", "value", "said"),
    [
        ("engine_version", "0.33.0", "engine_version was '0.32.0' when certified and is '0.33.0'"),
        ("boundaries", [2, 6, 10, 12], "boundaries was [2, 6, 9, 12] when certified"),
        ("verifier", {"weights_sha256": "c" * 64, "num_blocks": 12}, "verifier.weights_sha256 was"),
        ("tensor_parallel_size", 2, "tensor_parallel_size was 'absent' when certified and is 2"),
    ],
)
def test_one_other_fact_about_the_workers_denies(
    tmp_path: Path, statement: dict[str, Any], fact: str, value: Any, said: str
) -> None:
    certificate.write(statement, tmp_path / "certificate.json")
    decision = ask(tmp_path, BINDING | {fact: value})
    assert not decision.allowed
    assert [reason.code for reason in decision.reasons] == ["environment"]
    assert said in decision.reasons[0].text
    assert "truetap conform" in decision.reasons[0].remedy


def test_without_a_certificate_every_failed_clause_is_named_first(tmp_path: Path) -> None:
    bad: dict[str, tuple[Outcome, str]] = {
        MUSTS[1]: ("fail", "row 3 is short"),
        MUSTS[4]: ("error", "no reply"),
        MUSTS[5]: ("not_run", ""),
    }
    report_with(bad).write(tmp_path / "report.json")
    decision = ask(tmp_path, None)
    assert not decision.allowed
    assert decision.certificate is None
    assert [reason.code for reason in decision.reasons] == [
        MUSTS[1],
        MUSTS[4],
        MUSTS[5],
        "certificate",
    ]
    assert decision.reasons[0].text.endswith("fail. Seen: row 3 is short")
    assert ": not run. " in decision.reasons[2].text
    assert "there is no certificate" in decision.reasons[3].text
    assert all(reason.remedy for reason in decision.reasons)


@pytest.mark.parametrize("written", [None, "{", "[]", "conformant"])
def test_without_a_certificate_the_report_cannot_allow(tmp_path: Path, written: str | None) -> None:
    """Neither a report that is missing, nor one that is broken, nor one that passed."""
    if written == "conformant":
        report_with({}).write(tmp_path / "report.json")
    elif written is not None:
        (tmp_path / "report.json").write_text(written)
    assert [reason.code for reason in ask(tmp_path, BINDING).reasons] == ["certificate"]


@pytest.mark.parametrize("content", ["", "[]", '{"_type": "other"}'])
def test_a_certificate_that_is_none_denies(tmp_path: Path, content: str) -> None:
    (tmp_path / "certificate.json").write_text(content)
    decision = ask(tmp_path, BINDING)
    assert [reason.code for reason in decision.reasons] == ["certificate"]
    assert "is not a readable certificate" in decision.reasons[0].text


def test_every_reason_is_given_at_once(tmp_path: Path, statement: dict[str, Any]) -> None:
    certificate.write(statement, tmp_path / "certificate.json")
    others = BINDING | {"engine": "sglang", "max_num_seqs": 64}
    decision = ask(tmp_path, others, now=NOW + timedelta(days=90), suite="6" * 64)
    assert [reason.code for reason in decision.reasons] == [
        "environment",
        "environment",
        "suite",
        "expired",
    ]
    assert "max_num_seqs was 32" in decision.reasons[1].text
    listed = json.loads(json.dumps(decision.as_dict()))
    assert listed["allowed"] is False
    assert len(listed["reasons"]) == 4
    assert all(reason.keys() == {"code", "text", "remedy"} for reason in listed["reasons"])
    assert all(all(reason.values()) for reason in listed["reasons"])


def test_a_decision_is_allowed_only_without_reasons() -> None:
    allowed = gate.Decision((), "aa", workers_checked=True)
    assert allowed.allowed
    assert not replace(allowed, reasons=(certificate.Reason("a", "b", "c"),)).allowed

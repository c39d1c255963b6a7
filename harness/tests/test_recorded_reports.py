"""Reports of real engines, replayed: they can still be read, and still mean what they meant."""

from __future__ import annotations

import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from truetap.harness import certificate, report, scrub
from truetap.harness.certificate import Demands
from truetap.harness.errors import TruetapError

RECORDED = [
    path
    for path in sorted((Path(__file__).parents[2] / "fixtures" / "reports").rglob("*.json"))
    if path.parent.name != "third_party"  # test_third_party_reports.py is about those
]
SUBJECTS = {"speculators_legacy", "vllm_example"}
"""Adapters that are there to be judged; their reports are kept for what fails in them."""
OURS = [path for path in RECORDED if report.load(path).adapter not in SUBJECTS]
EXPECTATIONS = Path(__file__).parents[2] / "conformance" / "expectations"
NOW = datetime(2026, 11, 29, 18, 0, tzinfo=UTC)


def test_there_are_recordings() -> None:
    assert OURS
    assert {report.load(path).adapter for path in RECORDED} >= SUBJECTS


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_a_real_report_certifies_its_own_environment_and_no_other(
    path: Path, tmp_path: Path
) -> None:
    seen = report.load(path)
    assert all(clause.holds for clause in seen.clauses)
    if seen.absent:  # the profile has grown since: what was conformant then is not known to be now
        assert seen.verdict == "inconclusive"
        with pytest.raises(TruetapError):
            certificate.issue(seen, now=NOW)
        return
    assert seen.verdict == "conformant"
    certificate.write(certificate.issue(seen, now=NOW), tmp_path / "certificate.json")
    held = certificate.load(tmp_path / "certificate.json")
    binding = seen.environment["binding"]

    def reasons(present: dict[str, object]) -> list[str]:
        return [
            reason.text
            for reason in certificate.shortcomings(
                held, Demands(seen.profile, seen.suite_digest, NOW, present)
            )
        ]

    assert reasons(binding) == []
    elsewhere = {**binding, "engine_version": "0.33.0", "boundaries": [3, 16, 28, 31]}
    (version, boundaries) = reasons(elsewhere)
    assert boundaries.startswith(f"boundaries was {binding['boundaries']} when certified")
    was = binding["engine_version"]
    assert version.startswith(f"engine_version was {was!r} when certified and is '0.33.0'")


@pytest.mark.parametrize(
    "path", [path for path in RECORDED if path not in OURS], ids=lambda path: path.stem
)
def test_a_report_of_a_subject_certifies_nothing(path: Path) -> None:
    seen = report.load(path)
    assert seen.verdict == "non-conformant"
    with pytest.raises(TruetapError):
        certificate.issue(seen, now=NOW)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recording_names_no_machine(path: Path) -> None:
    text = path.read_text()
    assert not scrub.leaks(text)
    assert "/root" not in text
    assert "/home" not in text
    assert "/tmp" not in text


@pytest.mark.parametrize(
    "path",
    [path for path in RECORDED if path not in OURS and not path.stem.endswith("in-process")],
    ids=lambda path: path.stem,
)
def test_what_fails_in_a_subject_is_what_is_expected(path: Path) -> None:
    seen = report.load(path)
    binding = seen.environment["binding"]
    listed = {clause.id: clause.outcome for clause in seen.clauses}
    expected = set()
    for file in EXPECTATIONS.glob(f"{seen.adapter}*.toml"):
        for entry in tomllib.loads(file.read_text())["expectation"]:
            here = SpecifierSet(entry["releases"]).contains(binding["engine_version"])
            here = here and binding["world_size"] >= entry.get("least_ranks", 1)
            asked = entry.get("spec", {}).items()
            if here and entry["clause"] in listed and all(binding[k] == v for k, v in asked):
                expected.add(entry["clause"])
    assert {id_ for id_, outcome in listed.items() if outcome != "pass"} == expected

"""Reports of real engines, replayed: they can still be read, and still mean what they meant."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from truetap.harness import certificate, report

RECORDED = sorted((Path(__file__).parents[2] / "fixtures" / "reports").glob("*.json"))
NOW = datetime(2026, 11, 29, 18, 0, tzinfo=UTC)


def test_there_are_recordings() -> None:
    assert RECORDED


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_real_report_certifies_its_own_environment_and_no_other(
    path: Path, tmp_path: Path
) -> None:
    seen = report.load(path)
    assert seen.verdict == "conformant"
    certificate.write(certificate.issue(seen, now=NOW), tmp_path / "certificate.json")
    held = certificate.load(tmp_path / "certificate.json")
    binding = seen.environment["binding"]

    def reasons(present: dict[str, object]) -> list[str]:
        return [
            reason.text
            for reason in certificate.shortcomings(
                held,
                profile=seen.profile,
                suite_digest=seen.suite_digest,
                now=NOW,
                binding=present,
            )
        ]

    assert reasons(binding) == []
    elsewhere = {**binding, "engine_version": "0.33.0", "boundaries": [3, 16, 28, 31]}
    (boundaries, version) = reasons(elsewhere)
    assert boundaries.startswith("boundaries was [2, 15, 27, 30] when certified")
    assert version.startswith("engine_version was '0.32.0' when certified and is '0.33.0'")


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recording_names_no_machine(path: Path) -> None:
    text = path.read_text()
    assert "/root" not in text
    assert "/home" not in text
    assert "/tmp" not in text

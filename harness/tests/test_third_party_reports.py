"""Reports of other people's capture libraries: readable, and saying what the documentation says."""

from __future__ import annotations

import json
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from truetap.harness import contract, report, scrub

ROOT = Path(__file__).resolve().parents[2]
FOLDER, PAGE = ROOT / "fixtures/reports/third_party", ROOT / "docs/third_parties.md"
RECORDED = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}
CLAUSES = {
    "REPLY-001",
    *(f"ROWS-00{n}" for n in (1, 2, 3)),
    *(f"LAYERS-00{n}" for n in (1, 2, 3, 4)),
}
"""What the core profile had when the first of these was recorded."""
FOR_EACH = pytest.mark.parametrize("stem", RECORDED)

EXPECTATIONS = {
    "nnsight_batched": ROOT / "examples/nnsight_adapter/expectations.toml",
    "transformer_lens_padded_left": ROOT / "examples/transformer_lens_adapter/expectations.toml",
}
"""The executables that are known to fail; every other one here is conformant."""


def subject(stem: str) -> str:
    return stem.split("-", maxsplit=1)[0]


def failures(document: dict[str, Any]) -> set[str]:
    return {clause["id"] for clause in document["clauses"] if clause["outcome"] == "fail"}


def expected(name: str, release: str) -> set[str]:
    if name not in EXPECTATIONS:
        return set()
    entries = tomllib.loads(EXPECTATIONS[name].read_text())["expectation"]
    return {e["clause"] for e in entries if release in SpecifierSet(e["releases"])}


def mistakes(stem: str, text: str, path: Path) -> list[str]:
    """Return what in a recording is not as it should be; empty if nothing."""
    document = json.loads(text)
    path.write_text(text)
    binding = document["environment"]["binding"]
    found = scrub.leaks(text)
    # Not by the present profile: it may have gained clauses since.
    loaded = report.load(path)
    held = loaded.absent and loaded.clauses and all(c.holds for c in loaded.clauses)
    worked_out = "conformant" if held else loaded.verdict
    if not {clause["id"] for clause in document["clauses"]} >= CLAUSES:
        found.append("a clause is missing")
    if document["verdict"] != worked_out:
        found.append("its verdict is not that of its clauses")
    if failures(document) != expected(subject(stem), binding["engine_version"]):
        found.append("other clauses fail than are expected to")
    if any(c["outcome"] not in {"pass", "fail"} for c in document["clauses"]):
        found.append("a clause did not run")
    verifier = document["environment"]["recorded"]["verifier_name"].removeprefix("tiny_")
    named = (subject(stem), binding["engine_version"], verifier, binding["dtype"])
    if stem != "-".join(named):
        found.append(f"it is of {named}")
    executable = document["adapter"].removeprefix("subprocess:").removesuffix(".py")
    if executable.removesuffix("_adapter") != subject(stem):
        found.append(f"it is of the executable {executable}")
    return found


def test_both_libraries_are_there_with_what_passes_and_what_fails() -> None:
    subjects = {subject(stem) for stem in RECORDED}
    assert {"nnsight", "transformer_lens"} <= subjects
    assert subjects >= EXPECTATIONS.keys()


@FOR_EACH
def test_a_recording_is_what_it_says(stem: str, tmp_path: Path) -> None:
    assert mistakes(stem, RECORDED[stem].read_text(), tmp_path / "report.json") == []


@pytest.mark.parametrize(
    ("was", "now", "found"),
    [
        ('"verdict": "non-conformant"', '"verdict": "conformant"', "verdict is not that of its"),
        ('"outcome": "fail"', '"outcome": "pass"', "other clauses fail"),
        ('"outcome": "pass"', '"outcome": "not_run"', "did not run"),
        ('"id": "ROWS-002"', '"id": "ROWS-102"', "a clause is missing"),
        ('"subprocess:', '"subprocess:/srv/', "an executable's path"),
        ('"model": "', '"model": "/srv/models/', "an absolute path"),
        ('"dtype": "bfloat16"', '"dtype": "float32"', "it is of"),
    ],
)
def test_a_changed_recording_is_not(was: str, now: str, found: str, tmp_path: Path) -> None:
    stem = next(stem for stem in RECORDED if subject(stem) == "nnsight_batched")
    text = RECORDED[stem].read_text()
    assert was in text
    assert found in "; ".join(mistakes(stem, text.replace(was, now), tmp_path / "report.json"))


@FOR_EACH
def test_the_page_gives_its_verdict(stem: str) -> None:
    document = json.loads(RECORDED[stem].read_text())
    failed = [c["id"] for c in document["clauses"] if c["outcome"] == "fail"]
    verdict = ": ".join([document["verdict"], *filter(None, [", ".join(failed)])])
    name, release, verifier, dtype = stem.split("-")
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{name}` |")]
    said, on, of, _ = reversed([cell.strip() for cell in row.strip("|").split("|")])
    assert (said, of) == (verdict, release)
    assert f"{verifier} {dtype}" in on.split(", ")


@pytest.mark.parametrize("path", EXPECTATIONS.values(), ids=EXPECTATIONS)
def test_an_expectation_is_complete(path: Path) -> None:
    entries = tomllib.loads(path.read_text())["expectation"]
    assert entries
    for entry in entries:
        assert entry.keys() == {"clause", "releases", "reason", "link", "review", "example"}
        assert entry["clause"] in contract.CLAUSES
        assert isinstance(entry["review"], date)
        assert entry["reason"]
        assert entry["example"]
        assert entry["link"].startswith("https://") or (ROOT / entry["link"]).is_file()


def test_what_is_published_of_a_report() -> None:
    record = {
        "adapter": "subprocess:/srv/a-b/engine.py",
        "saw": ["see /tmp/x/log.txt; and", "a/b 1/2 https://h.org/x"],
        "recorded": {"host_os": "Linux-6.1-x86_64", "cases": 3, "none": None},
    }
    assert scrub.leaks(json.dumps(record)) != []
    assert scrub.published(record) == {
        "adapter": "subprocess:engine.py",
        "saw": ["see log.txt; and", "a/b 1/2 https://h.org/x"],
        "recorded": {"host_os": "Linux", "cases": 3, "none": None},
    }

"""Expectations: what they cover and what not, and that they make nothing conformant."""

from __future__ import annotations

import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from truetap.harness import contract, expectations, registry, report, verifier
from truetap.harness.errors import UsageError
from truetap.harness.report import Outcome, Report

SUITE = Path(__file__).parents[2] / "conformance" / "expectations"
PACKAGED = sorted(SUITE.glob("*.toml"))
TODAY = date(2026, 11, 29)

ENTRY = """
[[expectation]]
clause = "ROWS-003"
releases = ">=0.11.1,<0.33"
reason = "rows of a neighbour"
link = "https://example.org/1"
review = 2027-01-31
example = "two prompts of two tokens"
"""
CONDITIONS = """
device = "cpu"
verifier = { model_type = "deepseek_v3", rope_type = "default" }
spec = { tensor_parallel_size = 2, enforce_eager = true }
"""


def entries(text: str, tmp_path: Path) -> expectations.Expectations:
    path = tmp_path / "known.toml"
    path.write_text(text)
    return expectations.load(path)


def environment(version: str = "0.32.0", **facts: Any) -> dict[str, Any]:
    binding = {"engine": "vllm", "engine_version": version, "device": "AVX512"}
    recorded = {"verifier_model_type": "deepseek_v3", "verifier_rope_type": "default"}
    recorded |= {k: facts.pop(k) for k in list(facts) if k in recorded}
    return {"binding": binding | facts, "recorded": recorded}


def ran(outcome: Outcome, where: dict[str, Any] | None = None) -> Report:
    made = report.blank(
        "core", evidence="live", adapter="a", spec={}, suite_digest="5", started="then"
    )
    made.environment = environment() if where is None else where
    for clause in made.clauses:
        if clause.id == "ROWS-003" and outcome == "not_run":
            continue
        clause.add(outcome if clause.id == "ROWS-003" else "pass", "seen")
    return made


def rows_003(made: Report) -> report.ClauseResult:
    (found,) = [clause for clause in made.clauses if clause.id == "ROWS-003"]
    return found


@pytest.mark.parametrize(
    ("version", "covered"),
    [
        ("0.11.0", False),
        ("0.11.1", True),
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.32.1rc1", True),
        ("0.33.0", False),
        ("unknown", False),
        ("", False),
    ],
)
def test_releases(version: str, covered: bool, tmp_path: Path) -> None:
    known = entries(ENTRY, tmp_path)
    assert (known.of("ROWS-003", environment(version), {}) is not None) == covered
    assert known.of("ROWS-001", environment(version), {}) is None


def test_nothing_is_known_about_an_engine_that_said_nothing(tmp_path: Path) -> None:
    anywhere = entries(ENTRY.replace(">=0.11.1,<0.33", ""), tmp_path)
    assert anywhere.of("ROWS-003", environment("9.9"), {})
    assert anywhere.of("ROWS-003", {}, {}) is None


FITTING = {"tensor_parallel_size": 2, "enforce_eager": True}


@pytest.mark.parametrize(
    ("facts", "covered"),
    [
        (FITTING, True),
        (FITTING | {"tensor_parallel_size": 1}, False),
        (FITTING | {"enforce_eager": 1}, False),
        (FITTING | {"cuda_version": "13.0"}, False),
        (FITTING | {"device": None}, False),
        (FITTING | {"verifier_rope_type": "yarn"}, False),
        (FITTING | {"verifier_model_type": "llama"}, False),
        (FITTING | {"verifier_model_type": None}, False),
    ],
)
def test_conditions(facts: dict[str, Any], covered: bool, tmp_path: Path) -> None:
    known = entries(ENTRY + CONDITIONS, tmp_path)
    assert (known.of("ROWS-003", environment(**facts), {}) is not None) == covered


def test_what_workers_say_counts_before_what_was_asked_for(tmp_path: Path) -> None:
    known = entries(ENTRY + "spec = { tensor_parallel_size = 2 }", tmp_path)
    asked = {"tensor_parallel_size": 2}
    assert known.of("ROWS-003", environment(), asked)
    assert known.of("ROWS-003", environment(tensor_parallel_size=1), asked) is None
    assert known.of("ROWS-003", environment(), {}) is None


@pytest.mark.parametrize(
    ("said", "asked", "covered"),
    [
        ({"world_size": 2}, {}, True),
        ({"world_size": 4}, {"tensor_parallel_size": 1}, True),
        ({"world_size": 1}, {"tensor_parallel_size": 2}, False),
        ({"world_size": None}, {"tensor_parallel_size": 2}, False),
        ({"world_size": True}, {}, False),
        ({}, {"tensor_parallel_size": 2}, True),
        ({}, {"tensor_parallel_size": 1}, False),
        ({}, {"tensor_parallel_size": "2"}, False),
        ({}, {}, False),
    ],
)
def test_what_needs_several_ranks_is_not_expected_of_one(
    said: dict[str, Any], asked: dict[str, Any], covered: bool, tmp_path: Path
) -> None:
    known = entries(ENTRY + "least_ranks = 2", tmp_path)
    assert (known.of("ROWS-003", environment(**said), asked) is not None) == covered
    anywhere = entries(ENTRY, tmp_path)
    assert anywhere.of("ROWS-003", environment(**said), asked)


def test_an_expected_failure_is_marked_and_stays_a_failure(tmp_path: Path) -> None:
    made = ran("fail")
    found = expectations.compare(made, entries(ENTRY, tmp_path))
    assert (found.foretold, found.surprises) == (
        ["ROWS-003: rows of a neighbour (https://example.org/1)"],
        [],
    )
    assert rows_003(made).outcome == "fail"
    assert rows_003(made).expected == "rows of a neighbour (https://example.org/1)"
    assert made.verdict == "non-conformant"
    assert {clause.expected for clause in made.clauses} == {"", rows_003(made).expected}


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        ("pass", "ROWS-003 passed where a failure was expected"),
        ("refused", "ROWS-003 was refused, where a failure was expected"),
        ("error", "ROWS-003 ended in an error, where a failure was expected"),
    ],
)
def test_what_did_not_fail_as_expected_is_a_surprise(
    outcome: Outcome, says: str, tmp_path: Path
) -> None:
    made = ran(outcome)
    found = expectations.compare(made, entries(ENTRY, tmp_path))
    (surprise,) = found.surprises
    assert surprise.startswith(says)
    assert ">=0.11.1,<0.33" in surprise
    assert "known.toml" in surprise
    assert found.foretold == []
    assert rows_003(made).expected == ""


def test_an_unexpected_pass_says_what_to_delete(tmp_path: Path) -> None:
    (surprise,) = expectations.compare(ran("pass"), entries(ENTRY, tmp_path)).surprises
    assert surprise.endswith(
        f"delete the expectation for ROWS-003 with releases = '>=0.11.1,<0.33' in "
        f"{tmp_path / 'known.toml'}"
    )


def test_what_did_not_run_or_ran_elsewhere_proves_nothing(tmp_path: Path) -> None:
    known = entries(ENTRY, tmp_path)
    for made in (ran("not_run"), ran("pass", environment("0.33.0")), ran("pass", {})):
        assert expectations.compare(made, known) == expectations.Comparison()
    elsewhere = ran("fail", environment("0.33.0"))
    assert expectations.compare(elsewhere, known) == expectations.Comparison()
    assert rows_003(elsewhere).expected == ""


def test_a_review_is_due_the_day_after_its_date(tmp_path: Path) -> None:
    known = entries(ENTRY, tmp_path)
    assert known.overdue(TODAY) == known.overdue(date(2027, 1, 31)) == []
    (said,) = known.overdue(date(2027, 2, 1))
    assert said.endswith("ROWS-003 (rows of a neighbour) was to be reviewed by 2027-01-31")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("ROWS-003", "ROWS-999", r"expectation\.0\.clause: there is no clause 'ROWS-999'"),
        (">=0.11.1,<0.33", "since 0.11", "releases: 'since 0.11' is no version specifier"),
        ('reason = "rows of a neighbour"\n', "", "reason: Field required"),
        ("rows of a neighbour", "", "reason: String should have at least 1 character"),
        ("two prompts of two tokens", "", "example: String should have at least 1 character"),
        ("review = 2027-01-31", 'review = "soon"', "review: Input should be a valid date"),
        ("review = 2027-01-31\n", "", "review: Field required"),
        ("link", "lnik", "link: Field required; expectation.0.lnik: Extra inputs"),
        ("[[expectation]]", "[[expectations]]", "expectations: Extra inputs"),
        ('example = "t', 'spec = { tp = 2 }\nexample = "t', "there is no engine setting tp"),
        (
            'example = "t',
            'verifier = { family = "x" }\nexample = "t',
            "verifier.family: Extra inputs",
        ),
        ('example = "t', 'device = "tpu"\nexample = "t', "device: Input should be 'cpu' or 'cuda'"),
        ('example = "t', 'least_ranks = 1\nexample = "t', "least_ranks: Input should be greater"),
        ('example = "t', 'least_ranks = "2"\nexample = "t', "least_ranks: Input should be a valid"),
        ("review = 2027-01-31", "review = ", "cannot be read"),
    ],
)
def test_a_bad_file_is_one_sentence(old: str, new: str, says: str, tmp_path: Path) -> None:
    assert old in ENTRY
    with pytest.raises(UsageError, match=says) as refused:
        entries(ENTRY.replace(old, new), tmp_path)
    assert "known.toml" in str(refused.value)
    assert "\n" not in str(refused.value).replace(str(tmp_path), "")
    assert refused.value.exit_code == 2


def test_a_missing_or_binary_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no file of expectations at"):
        expectations.load(tmp_path / "gone.toml")
    with pytest.raises(UsageError, match="cannot be read"):
        expectations.load(tmp_path)
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        expectations.load(tmp_path / "b.toml")


@pytest.mark.parametrize(
    ("config", "model_type", "rope_type"),
    [
        ({"model_type": "llama"}, "llama", "default"),
        ({"model_type": "a", "rope_parameters": {"rope_type": "yarn"}}, "a", "yarn"),
        ({"model_type": "a", "rope_scaling": {"type": "linear"}}, "a", "linear"),
        ({"model_type": "a", "rope_scaling": None, "rope_theta": 1e4}, "a", "default"),
        ({"model_type": "vl", "text_config": {"model_type": "a"}}, "a", "default"),
        ({"rope_parameters": {"rope_theta": 1e4}}, None, "default"),
        (
            {"rope_parameters": {"full": {"rope_type": "yarn"}, "sliding": {"rope_theta": 1}}},
            *(None, "default+yarn"),
        ),
    ],
)
def test_the_kind_of_a_verifier_is_read_from_its_configuration(
    config: dict[str, Any], model_type: str | None, rope_type: str
) -> None:
    assert verifier.kinds(config) == {
        "verifier_model_type": model_type,
        "verifier_rope_type": rope_type,
    }


def test_a_subject_without_a_file_has_no_expectations() -> None:
    for name in (
        "collect",
        "off-by-one@vllm_native",
        "subprocess:/x/vllm_native",
        "../vllm_native",
    ):
        assert expectations.packaged(name) == expectations.Expectations()
    assert expectations.packaged("vllm_native").entries


@pytest.mark.parametrize("path", PACKAGED, ids=lambda path: path.stem)
def test_what_is_packaged_is_about_what_there_is(path: Path) -> None:
    known = expectations.packaged(path.stem)
    assert len(known.entries) == len(tomllib.loads(path.read_text())["expectation"])
    installed = {"core": registry.ADAPTERS, "reply": registry.CHANNELS}
    for entry in known.entries:
        (profile,) = [name for name, ids in contract.PROFILES.items() if entry.clause in ids][:1]
        assert path.stem in registry.names(installed[profile])
        if not entry.link.startswith("https://"):
            file, _, test = entry.link.partition("::")
            assert f"def {test}(" in (SUITE.parents[1] / file).read_text() if test else True
            assert (SUITE.parents[1] / file).is_file()
    told = [(entry.clause, entry.releases, entry.least_ranks) for entry in known.entries]
    assert len(set(told)) == len(told)


def deepseek(rope: str, **facts: Any) -> dict[str, Any]:
    return environment(verifier_rope_type=rope, **facts)


def test_plain_deepseek_on_the_cpu_is_expected_to_fail_and_nothing_else() -> None:
    known = expectations.packaged("vllm_native")

    def expected(where: dict[str, Any]) -> set[str]:
        return {c for c in contract.CLAUSES if known.of(c, where, {})}

    assert expected(deepseek("default")) == {
        *("ROWS-003", "ROWS-005", "ROWS-006", "ROWS-009", "LAYERS-001", "LAYERS-002")
    }
    assert expected(deepseek("yarn")) == set()
    assert expected(deepseek("default", cuda_version="13.0")) == set()
    assert expected(deepseek("default", verifier_model_type="llama")) == set()


@pytest.mark.parametrize(
    ("version", "ranks", "executors_own"),
    [
        ("0.11.0", 2, (4, 5, 6, 7, 8, 9)),
        ("0.11.1", 2, (4, 5, 6, 7, 8, 9)),
        ("0.26.0", 2, (4, 5, 6, 7, 8, 9)),
        ("0.32.0", 2, (4, 5, 6, 7, 8, 9)),
        # With one rank no other's reply is left over; a late one is, if fp8 has not come before it.
        ("0.26.0", 1, (4, 5, 6, 7, 9)),
        ("0.27.0", 1, (5, 6, 7, 8, 9)),
        ("0.32.0", 1, (5, 6, 7, 8, 9)),
    ],
)
def test_the_legacy_channel_is_expected_to_fail_as_it_does(
    version: str, ranks: int, executors_own: tuple[int, ...]
) -> None:
    """On the model of either side of the break; what really fails is asserted live."""
    known = expectations.packaged("speculators_legacy")
    where = environment(version, world_size=ranks)
    expected = {c for c in contract.PROFILES["reply"] if known.of(c, where, {})}
    bare = {"REPLY-002", "REPLY-003"} if version != "0.11.0" else set()
    assert expected == {f"REPLY-00{number}" for number in executors_own} | bare


@pytest.mark.parametrize(("clause", "alone"), [("REPLY-004", "0.26.0"), ("REPLY-008", "0.32.0")])
def test_a_reason_is_that_of_the_ranks_there_are(clause: str, alone: str) -> None:
    known = expectations.packaged("speculators_legacy")
    two = known.of(clause, environment(alone, world_size=2), {})
    one = known.of(clause, environment(alone, world_size=1), {})
    assert two
    assert one
    assert (two.least_ranks, one.least_ranks) == (2, None)
    assert two.reason != one.reason

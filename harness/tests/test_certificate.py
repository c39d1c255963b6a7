"""Certificates: what earns one, what voids one, and that no damage to one goes unseen."""

from __future__ import annotations

import copy
import json
import random
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truetap.conformance import strategies
from truetap.harness import certificate, contract, report
from truetap.harness.certificate import Certificate, Reason
from truetap.harness.errors import CheckFailed, IntegrityError, TruetapError, UsageError
from truetap.harness.report import Outcome, Report

MUSTS = [id_ for id_ in contract.PROFILES["core"] if contract.CLAUSES[id_].level == "MUST"]
NOW = datetime(2026, 11, 29, 16, 0, tzinfo=UTC)
SECOND = timedelta(seconds=1)
SUITE = "5" * 64
BINDING: dict[str, Any] = {
    "machine": "x86_64",
    "engine": "vllm",
    "engine_version": "0.32.0",
    "cuda_version": None,
    "device": "AVX512",
    "world_size": 1,
    "enforce_eager": True,
    "boundaries": [2, 6, 9, 12],
    "verifier": {
        "num_blocks": 12,
        "hidden_size": 128,
        "config_sha256": "c" * 64,
        "weights_sha256": "d" * 64,
    },
    "adapter": {"name": "vllm_native", "sha256": "a" * 64},
}


def conformant() -> Report:
    made = report.blank(
        "core",
        evidence="live",
        adapter="vllm_native",
        spec={},
        suite_digest=SUITE,
        started=NOW.isoformat(),
        environment={"binding": copy.deepcopy(BINDING), "recorded": {"verifier_name": "tiny"}},
    )
    for clause in made.clauses:
        clause.add("pass", "seen")
    return made


def issued() -> dict[str, Any]:
    statement = certificate.issue(conformant(), now=NOW)
    read: dict[str, Any] = json.loads(json.dumps(statement))
    return read


def reasons(held: Certificate, **changes: Any) -> list[Reason]:
    asked: dict[str, Any] = {
        "profile": "core",
        "suite_digest": SUITE,
        "now": NOW + timedelta(days=1),
        "binding": BINDING,
    }
    return certificate.shortcomings(held, **(asked | changes))


def held(statement: dict[str, Any]) -> Certificate:
    return Certificate(predicate=statement["predicate"], digest="")


@pytest.mark.parametrize("outcome", ["fail", "error", "not_run"])
@pytest.mark.parametrize("clause_id", MUSTS)
def test_any_must_clause_that_did_not_pass_refuses(clause_id: str, outcome: Outcome) -> None:
    made = conformant()
    (clause,) = [clause for clause in made.clauses if clause.id == clause_id]
    clause.outcome, clause.saw = outcome, "rows of another"
    with pytest.raises(CheckFailed) as refused:
        certificate.issue(made, now=NOW)
    said = f"no certificate: {clause_id} {outcome.replace('_', ' ')}: rows of another"
    assert str(refused.value) == said


def test_everything_that_refuses_is_named_at_once() -> None:
    made = conformant()
    made.evidence = "replay"
    made.environment = {}
    made.clauses[0].outcome = "error"
    made.clauses[1].outcome = "fail"
    gone = made.clauses.pop(2)
    with pytest.raises(CheckFailed) as refused:
        certificate.issue(made, now=NOW)
    for named in (
        f"{made.clauses[0].id} error",
        f"{made.clauses[1].id} fail",
        f"{gone.id} is not in the report",
        "evidence is replay",
        "no facts about the workers",
    ):
        assert named in str(refused.value)


def test_a_report_without_clauses_earns_nothing() -> None:
    made = conformant()
    made.clauses = []
    with pytest.raises(CheckFailed) as refused:
        certificate.issue(made, now=NOW)
    assert all(clause_id in str(refused.value) for clause_id in MUSTS)


@pytest.mark.parametrize("outcome", ["pass", "refused"])
def test_what_may_be_refused_is_certified_as_such(outcome: Outcome) -> None:
    """A refusal is no wrong capture; of a clause that may not be refused it certifies nothing."""
    may = [id_ for id_ in MUSTS if contract.CLAUSES[id_].refusable]
    assert may
    made = conformant()
    for clause in made.clauses:
        if clause.id in may:
            clause.outcome = outcome
    statement = certificate.issue(made, now=NOW)
    assert reasons(held(statement)) == []
    for clause_id in set(MUSTS) - set(may):
        statement = certificate.issue(made, now=NOW)
        statement["predicate"]["clauses"][clause_id]["outcome"] = "refused"
        assert [reason.code for reason in reasons(held(statement))] == ["clause", "altered"]


def test_a_should_clause_refuses_nothing() -> None:
    made = conformant()
    (clause,) = [one for one in made.clauses if one.level == "SHOULD"]
    clause.outcome = "fail"
    assert reasons(held(certificate.issue(made, now=NOW))) == []


def test_a_fresh_certificate_has_no_shortcomings(tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    digest = certificate.write(certificate.issue(conformant(), now=NOW), path)
    loaded = certificate.load(path)
    assert loaded.digest == digest
    assert reasons(loaded) == []
    assert reasons(loaded, binding=None) == []
    assert list(tmp_path.iterdir()) == [path]
    statement = json.loads(path.read_text())
    assert [subject["name"] for subject in statement["subject"]] == [
        "adapter:vllm_native",
        "verifier:tiny",
    ]
    assert statement["subject"][1]["digest"]["sha256"] == "d" * 64


EXPIRY = NOW + certificate.VALIDITY


@pytest.mark.parametrize(
    ("now", "codes"),
    [
        (NOW - SECOND, ["not-yet"]),
        (NOW, []),
        (NOW + SECOND, []),
        (EXPIRY - SECOND, []),
        (EXPIRY, []),
        (EXPIRY + SECOND, ["expired"]),
        # The same moments told in another time zone.
        ((NOW - SECOND).astimezone(timezone(timedelta(hours=9))), ["not-yet"]),
        ((EXPIRY - SECOND).astimezone(timezone(timedelta(hours=9))), []),
        ((EXPIRY + SECOND).astimezone(timezone(-timedelta(hours=9))), ["expired"]),
    ],
)
def test_validity_is_exact_to_the_second(now: datetime, codes: list[str]) -> None:
    found = reasons(held(issued()), now=now)
    assert [reason.code for reason in found] == codes
    assert all("2026-1" in reason.text and reason.remedy for reason in found)


def leaves(facts: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    if isinstance(facts, dict):
        for key, value in facts.items():
            yield from leaves(value, *path, key)
    else:
        yield path


def put(facts: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        facts = facts[key]
    facts[path[-1]] = value


def take(facts: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        facts = facts[key]
    return facts.pop(path[-1])


@pytest.mark.parametrize("path", leaves(BINDING), ids=".".join)
def test_each_fact_that_differs_is_one_reason_that_names_it(path: tuple[str, ...]) -> None:
    changed = copy.deepcopy(BINDING)
    put(changed, path, "other")
    (reason,) = reasons(held(issued()), binding=changed)
    assert reason.code == "environment"
    assert reason.text.startswith(".".join(path) + " was ")
    assert reason.text.endswith(" and is 'other'")

    gone = copy.deepcopy(BINDING)
    take(gone, path)
    (reason,) = reasons(held(issued()), binding=gone)
    assert reason.text.startswith(".".join(path) + " was ")

    (reason,) = reasons(held(issued()), binding=BINDING | {"new_fact": None})
    assert reason.text == "new_fact was 'absent' when certified and is None"


def test_boundaries_in_another_order_are_another_environment() -> None:
    (reason,) = reasons(held(issued()), binding=BINDING | {"boundaries": [12, 9, 6, 2]})
    assert reason.text == ("boundaries was [2, 6, 9, 12] when certified and is [12, 9, 6, 2]")


def test_another_profile_and_another_suite_are_told() -> None:
    profile, *uncovered = reasons(held(issued()), profile="extended")
    assert profile.code == "profile"
    assert {reason.code for reason in uncovered} == {"clause"}
    assert "'core', not 'extended'" in profile.text
    (suite,) = reasons(held(issued()), suite_digest="6" * 64)
    assert suite.code == "suite"


@pytest.mark.parametrize("clause_id", MUSTS)
@pytest.mark.parametrize(
    "entry",
    [
        None,
        {"outcome": "fail", "cases": 1},
        {"outcome": "not_run", "cases": 0},
        {"outcome": "pass", "cases": 0},
        {"outcome": "pass"},
        "pass",
    ],
)
def test_a_clause_that_did_not_run_and_pass_is_named(clause_id: str, entry: Any) -> None:
    statement = issued()
    statement["predicate"]["clauses"][clause_id] = entry
    if entry is None:
        del statement["predicate"]["clauses"][clause_id]
    found = reasons(held(statement))
    assert [reason.code for reason in found] == ["clause", "altered"]
    assert clause_id in found[0].text


def test_an_unknown_profile_requires_every_clause() -> None:
    statement = issued()
    statement["predicate"] |= {"profile": "mine", "clauses": {}}
    codes = [reason.code for reason in reasons(held(statement), profile="mine")]
    required = [clause for clause in contract.CLAUSES.values() if clause.level == "MUST"]
    assert codes == ["clause"] * len(required) + ["altered"]


@pytest.mark.parametrize("name", ["bindingDigest", "predicateDigest"])
def test_a_digest_that_was_tampered_with_is_seen(name: str) -> None:
    statement = issued()
    statement["predicate"][name] = "0" * 64
    assert [reason.code for reason in reasons(held(statement))] == ["altered"]


def test_a_certificate_edited_to_fit_this_machine_is_seen() -> None:
    present = BINDING | {"engine_version": "0.33.0"}
    statement = issued()
    statement["predicate"]["environment"]["binding"] = present
    assert [reason.code for reason in reasons(held(statement), binding=present)] == ["altered"]


def test_a_certificate_edited_to_last_longer_is_seen() -> None:
    statement = issued()
    statement["predicate"]["notAfter"] = (EXPIRY + timedelta(days=3650)).isoformat()
    late = reasons(held(statement), now=EXPIRY + SECOND)
    assert [reason.code for reason in late] == ["altered"]


@pytest.mark.parametrize("name", ["timeCreated", "notAfter"])
@pytest.mark.parametrize("moment", ["9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59"])
def test_moments_at_the_ends_of_time_are_compared_too(name: str, moment: str) -> None:
    statement = issued()
    statement["predicate"][name] = moment
    codes = [reason.code for reason in judged(json.dumps(statement).encode())]
    void = (name == "timeCreated") == moment.startswith("9999")
    assert codes == ["altered", *(["not-yet" if name == "timeCreated" else "expired"] * void)]


def test_no_certificate_is_a_usage_error_with_the_way_to_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no certificate at") as raised:
        certificate.load(tmp_path / "certificate.json")
    assert "truetap certify" in raised.value.remedy


PREDICATE_FIELDS = (
    *("result", "profile", "evidence", "bindingDigest", "predicateDigest"),
    *("suite", "environment", "clauses", "timeCreated", "notAfter"),
)


def spoilt(path: tuple[str, ...], value: Any) -> bytes:
    statement = issued()
    put(statement, path, value)
    return json.dumps(statement).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"null",
        b"[1]",
        b"{}",
        b"[" * 100_000,
        b"1" * 10_000,
        random.Random(0).randbytes(1 << 20),
        json.dumps(issued()).encode()[:-9],
        spoilt(("_type",), "https://in-toto.io/Statement/v2"),
        spoilt(("predicateType",), "https://slsa.dev/provenance/v1"),
        spoilt(("predicate",), None),
        spoilt(("predicate", "environment", "binding"), []),
        spoilt(("predicate", "notAfter"), "2026-12-29T16:00:00"),
        spoilt(("predicate", "timeCreated"), "soon"),
        *[spoilt(("predicate", name), value) for name in PREDICATE_FIELDS for value in (None, 7)],
    ],
    ids=lambda data: f"{len(data)} bytes",
)
def test_what_is_not_a_certificate_is_an_integrity_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "certificate.json"
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="is not a readable certificate") as raised:
        certificate.load(path)
    assert "delete it" in raised.value.remedy


def test_a_folder_in_place_of_a_certificate_is_an_integrity_error(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="is not a readable certificate"):
        certificate.load(tmp_path)


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["pass", "live", "core", "9999-12-31T23:59:59-23:59", "0001-01-01T00:00+14"])
    | st.datetimes(timezones=st.just(UTC)).map(datetime.isoformat),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


def places(node: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON document at which a value can be replaced or removed."""
    children: Any = ()
    if isinstance(node, dict):
        children = node.items()
    elif isinstance(node, list):
        children = enumerate(node)
    for key, value in children:
        yield (*path, key)
        yield from places(value, *path, key)


def judged(data: bytes) -> list[Reason]:
    """Load and judge a certificate as the gate does; an error counts as a reason."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "certificate.json"
        path.write_bytes(data)
        try:
            return reasons(certificate.load(path))
        except TruetapError as error:
            return [Reason("error", str(error), error.remedy)]


@settings(deadline=None, max_examples=strategies.examples(400))
@given(data=st.data())
def test_no_changed_value_of_the_predicate_is_accepted(data: st.DataObject) -> None:
    statement = issued()
    place = data.draw(st.sampled_from(list(places(statement["predicate"]))))
    if data.draw(st.booleans(), label="remove"):
        take(statement["predicate"], place)
    else:
        put(statement["predicate"], place, data.draw(JUNK))
    same = json.dumps(statement, sort_keys=True) == json.dumps(issued(), sort_keys=True)
    assert bool(judged(json.dumps(statement).encode())) != same


@settings(deadline=None, max_examples=strategies.examples(200))
@given(position=st.integers(0), byte=st.integers(0, 255))
def test_no_changed_byte_changes_what_is_accepted(position: int, byte: int) -> None:
    original = json.dumps(issued(), indent=1).encode()
    position %= len(original)
    data = original[:position] + bytes([byte]) + original[position + 1 :]
    if not judged(data):
        assert json.loads(data)["predicate"] == issued()["predicate"]

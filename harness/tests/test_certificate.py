"""Certificates: what earns one, what voids one, and that no damage to one goes unseen."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import os
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from truetap.harness import certificate, contract, environment, report, signing, statement
from truetap.harness.certificate import Certificate, Demands, Reason
from truetap.harness.errors import CheckFailed, IntegrityError, UsageError
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
    "tensor_parallel_size": 1,
    "world_size": 1,
    "torch_version": "2.13.0",
    "enable_prefix_caching": True,
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


FACTS: dict[str, Any] = {
    "evidence": "live",
    "adapter": "vllm_native",
    "spec": {},
    "suite_digest": SUITE,
    "started": NOW.isoformat(),
    "environment": {"binding": BINDING, "recorded": {"verifier_name": "tiny"}},
}


def conformant() -> Report:
    made = report.blank("core", **copy.deepcopy(FACTS))
    for clause in made.clauses:
        clause.add("pass", "seen")
    return made


OURS, OTHERS = (
    signing._signer_of(Ed25519PrivateKey.from_private_bytes(bytes([seed] * 32))) for seed in (1, 2)
)
TRUSTED = frozenset({OURS.public_key.keyid})


def issued() -> dict[str, Any]:
    stated = certificate.issue(conformant(), now=NOW)
    read: dict[str, Any] = json.loads(json.dumps(stated))
    return read


def demands(**changes: Any) -> Demands:
    """What a production policy asks, a day after the certificate was issued."""
    asked: dict[str, Any] = {
        "profile": "core",
        "suite_digest": SUITE,
        "now": NOW + timedelta(days=1),
        "binding": BINDING,
        "signers": TRUSTED,
        "unsigned": False,
        "max_age": timedelta(days=40),
    }
    return Demands(**(asked | changes))


def reasons(held: Certificate, **changes: Any) -> list[Reason]:
    return certificate.shortcomings(held, demands(**changes))


def held(stated: dict[str, Any]) -> Certificate:
    return Certificate(predicate=stated["predicate"], digest="")


def judged(data: bytes, **changes: Any) -> list[Reason]:
    return list(certificate.judge_bytes(data, demands(**changes)).reasons)


def sealed(stated: dict[str, Any], signer: Any = OURS) -> bytes:
    return signing.seal(statement.payload_of(stated), signer)


def rebound(stated: dict[str, Any]) -> dict[str, Any]:
    """Make the fingerprint that of the facts again, as a forger would."""
    facts = stated["predicate"]["environment"]["binding"]
    stated["predicate"]["bindingDigest"] = environment.binding_digest(facts)
    return stated


def codes(found: list[Reason]) -> list[str]:
    assert all(reason.code in certificate.CODES for reason in found)
    assert all(reason.text and reason.remedy for reason in found)
    return [reason.code for reason in found]


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
    assert reasons(held(certificate.issue(made, now=NOW))) == []
    for clause_id in set(MUSTS) - set(may):
        stated = certificate.issue(made, now=NOW)
        stated["predicate"]["clauses"][clause_id]["outcome"] = "refused"
        assert codes(reasons(held(stated))) == ["clause"]


def test_a_should_clause_refuses_nothing() -> None:
    made = conformant()
    (clause,) = [one for one in made.clauses if one.level == "SHOULD"]
    clause.outcome = "fail"
    assert reasons(held(certificate.issue(made, now=NOW))) == []


def test_a_fresh_certificate_allows(tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    digest = certificate.write(certificate.issue(conformant(), now=NOW), path, OURS)
    judged_file = certificate.judge(path, demands())
    assert (judged_file.reasons, judged_file.digest, judged_file.path) == ((), digest, path)
    assert certificate.judge(path, demands(binding=None)).reasons == ()
    loaded = certificate.load(path)
    assert loaded == judged_file.certificate
    assert (loaded.digest, loaded.signer) == (digest, OURS.public_key.keyid)
    assert list(tmp_path.iterdir()) == [path]
    stated = json.loads(base64.b64decode(json.loads(path.read_text())["payload"]))
    assert [subject["name"] for subject in stated["subject"]] == [
        "adapter:vllm_native",
        "verifier:tiny",
    ]
    assert stated["subject"][1]["digest"]["sha256"] == "d" * 64


EXPIRY = NOW + certificate.VALIDITY


@pytest.mark.parametrize(
    ("now", "expected"),
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
def test_validity_is_exact_to_the_second(now: datetime, expected: list[str]) -> None:
    found = reasons(held(issued()), now=now)
    assert [reason.code for reason in found] == expected
    assert all("2026-1" in reason.text and reason.remedy for reason in found)


@pytest.mark.parametrize(("seconds", "expected"), [(0, []), (1, ["too-old"])])
def test_the_policys_age_is_exact_to_the_second(seconds: int, expected: list[str]) -> None:
    age = timedelta(days=7)
    found = reasons(held(issued()), now=NOW + age + seconds * SECOND, max_age=age)
    assert codes(found) == expected
    assert all("7 days" in reason.text for reason in found)


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


FAMILY = {
    "machine": "environment",
    "engine": "engine-release",
    "engine_version": "engine-release",
    "cuda_version": "cuda",
    "device": "gpu",
    "tensor_parallel_size": "tensor-parallel",
    "world_size": "tensor-parallel",
    "torch_version": "torch",
    "enable_prefix_caching": "prefix-caching",
    "enforce_eager": "environment",
    "boundaries": "boundaries",
    "verifier": "weights",
    "adapter": "adapter",
}


@pytest.mark.parametrize("path", leaves(BINDING), ids=".".join)
def test_each_fact_that_differs_is_one_reason_of_its_own_that_names_it(
    path: tuple[str, ...],
) -> None:
    changed = copy.deepcopy(BINDING)
    put(changed, path, "other")
    (reason,) = reasons(held(issued()), binding=changed)
    assert reason.code == FAMILY[path[0]]
    assert reason.text.startswith(".".join(path) + " was ")
    assert reason.text.endswith(" and is 'other'")
    assert "certify" in reason.remedy

    gone = copy.deepcopy(BINDING)
    take(gone, path)
    (reason,) = reasons(held(issued()), binding=gone)
    assert reason.text.startswith(".".join(path) + " was ")

    (reason,) = reasons(held(issued()), binding=BINDING | {"new_fact": None})
    assert reason.code == "environment"
    assert reason.text == "new_fact was 'absent' when certified and is None"


def test_boundaries_in_another_order_are_another_environment() -> None:
    (reason,) = reasons(held(issued()), binding=BINDING | {"boundaries": [12, 9, 6, 2]})
    assert reason.text == ("boundaries was [2, 6, 9, 12] when certified and is [12, 9, 6, 2]")


@pytest.mark.parametrize(
    "alike",
    [{"enforce_eager": 1}, {"world_size": 1.0}, {"world_size": True}, {"extra": {}}],
)
def test_the_fingerprint_decides_where_facts_only_look_alike(alike: dict[str, Any]) -> None:
    """In Python 1 is True, and a table without facts tells none that differs."""
    found = reasons(held(issued()), binding=BINDING | alike)
    assert [reason.code for reason in found] == ["environment"]


def test_differences_are_told_in_the_order_in_which_to_look_at_them() -> None:
    present = BINDING | {
        "max_num_seqs": 3,
        "enable_prefix_caching": False,
        "boundaries": [12],
        "world_size": 2,
        "device": "H200",
        "torch_version": "2.14.0",
        "engine_version": "0.33.0",
        "verifier": BINDING["verifier"] | {"weights_sha256": "0" * 64},
    }
    found = codes(reasons(held(issued()), binding=present, suite_digest="6" * 64, now=NOW - SECOND))
    assert found == [
        *("weights", "engine-release", "torch", "gpu", "tensor-parallel", "boundaries"),
        *("prefix-caching", "environment", "suite", "not-yet"),
    ]
    order = list(certificate.CODES)
    assert found == sorted(found, key=order.index)


def test_another_suite_is_told() -> None:
    (suite,) = reasons(held(issued()), suite_digest="6" * 64)
    assert suite.code == "suite"


@pytest.mark.parametrize("certified", contract.STRENGTHS)
@pytest.mark.parametrize("wanted", contract.STRENGTHS)
def test_a_stronger_profile_satisfies_a_weaker_demand_and_no_other(
    certified: str, wanted: str
) -> None:
    made = report.blank(certified, **FACTS)
    for clause in made.clauses:
        clause.add("pass", "seen")
    found = reasons(held(certificate.issue(made, now=NOW)), profile=wanted)
    weaker = contract.STRENGTHS.index(certified) < contract.STRENGTHS.index(wanted)
    assert codes(found) == ["profile"] * weaker
    assert all(f"{certified!r}, not {wanted!r}" in reason.text for reason in found)


@pytest.mark.parametrize("certified", ["mine", "reply", "store"])
def test_a_profile_of_another_kind_satisfies_nothing(certified: str) -> None:
    stated = issued()
    stated["predicate"]["profile"] = certified
    assert codes(reasons(held(stated)))[0] == "profile"


def test_a_clause_of_a_weaker_profile_is_missed_beside_the_profile() -> None:
    stated = issued()
    del stated["predicate"]["clauses"]["ROWS-001"]
    found = reasons(held(stated), profile="full")
    assert codes(found) == ["profile", "clause"]
    assert "ROWS-001" in found[1].text


@pytest.mark.parametrize("clause_id", MUSTS)
@pytest.mark.parametrize(
    "entry",
    [
        None,
        {"outcome": "fail", "cases": 1},
        {"outcome": "not_run", "cases": 0},
        {"outcome": "pass", "cases": 0},
        {"outcome": "error", "cases": 1},
    ],
)
def test_a_clause_that_did_not_run_and_pass_is_named(clause_id: str, entry: Any) -> None:
    stated = issued()
    stated["predicate"]["clauses"][clause_id] = entry
    if entry is None:
        del stated["predicate"]["clauses"][clause_id]
    (found,) = reasons(held(stated))
    assert found.code == "clause"
    assert clause_id in found.text
    assert judged(sealed(stated)) == [found]


def test_an_unknown_profile_requires_every_clause() -> None:
    stated = issued()
    stated["predicate"] |= {"profile": "mine", "clauses": {}}
    found = codes(reasons(held(stated), profile="mine"))
    required = [clause for clause in contract.CLAUSES.values() if clause.level == "MUST"]
    assert found == ["clause"] * len(required)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("evidence", "replay", "evidence"),
        ("evidence", "surface", "evidence"),
        ("result", "fail", "result"),
        ("result", "passed", "result"),
    ],
)
def test_only_live_checks_that_passed_count(name: str, value: str, code: str) -> None:
    stated = issued()
    stated["predicate"][name] = value
    assert codes(judged(sealed(stated))) == [code]


def foretold(*clause_ids: str) -> Report:
    made = conformant()
    for clause in made.clauses:
        if clause.id in clause_ids:
            clause.outcome, clause.expected = "fail", "the example keeps no log (docs/x.md)"
    return made


def test_what_failed_as_expected_is_certified_only_on_request_and_as_such() -> None:
    made = foretold("ROWS-003", "LAYERS-002")
    with pytest.raises(CheckFailed, match=r"ROWS-003 fail.*; LAYERS-002 fail"):
        certificate.issue(made, now=NOW)
    stated = certificate.issue(made, now=NOW, with_expectations=True)
    assert stated["predicate"]["result"] == "expected-failures"
    assert stated["predicate"]["clauses"]["ROWS-003"]["outcome"] == "expected_fail"
    assert stated["predicate"]["clauses"]["ROWS-001"]["outcome"] == "pass"


@pytest.mark.parametrize(
    ("allowed", "denied"),
    [
        ((), ["ROWS-003", "LAYERS-002"]),
        (("ROWS-003",), ["LAYERS-002"]),
        (("LAYERS-001", "ROWS-002"), ["ROWS-003", "LAYERS-002"]),
        (("ROWS-003", "LAYERS-002"), []),
    ],
)
def test_a_policy_allows_exactly_the_expected_failures_that_it_names(
    allowed: tuple[str, ...], denied: list[str]
) -> None:
    made = foretold("ROWS-003", "LAYERS-002")
    data = sealed(certificate.issue(made, now=NOW, with_expectations=True))
    found = judged(data, expectations=frozenset(allowed))
    assert codes(found) == ["expected-failure"] * len(denied)
    assert all(id_ in one.text for id_, one in zip(denied, found, strict=True))
    assert all("keeps no log" in reason.text for reason in found)


def test_what_a_certificate_says_reaches_the_terminal_without_control_characters() -> None:
    made = foretold("ROWS-003")
    for clause in made.clauses:
        clause.expected = clause.expected and "known\x1b[2J\nallowed"
    (reason,) = judged(sealed(certificate.issue(made, now=NOW, with_expectations=True)))
    assert reason.text.isprintable()
    assert reason.text.endswith("known [2J allowed")


def test_an_allowed_expectation_does_not_excuse_another_failure() -> None:
    made = foretold("ROWS-003")
    (other,) = [clause for clause in made.clauses if clause.id == "LAYERS-001"]
    other.outcome = "fail"
    with pytest.raises(CheckFailed, match="LAYERS-001 fail"):
        certificate.issue(made, now=NOW, with_expectations=True)
    stated = issued()
    stated["predicate"]["clauses"]["ROWS-003"]["outcome"] = "fail"
    assert codes(judged(sealed(stated), expectations=frozenset({"ROWS-003"}))) == ["clause"]


def test_a_certificate_edited_to_fit_this_machine_is_seen() -> None:
    present = BINDING | {"engine_version": "0.33.0"}
    stated = issued()
    stated["predicate"]["environment"]["binding"] = present
    assert codes(judged(sealed(stated), binding=present)) == ["schema"]
    data = spliced(sealed(issued()), sealed(rebound(stated)))
    assert codes(judged(data, binding=present)) == ["signature"]


def test_a_certificate_edited_to_last_longer_is_seen() -> None:
    stated = issued()
    stated["predicate"]["notAfter"] = (EXPIRY + timedelta(days=3650)).isoformat()
    late = demands(now=EXPIRY + SECOND)
    data = spliced(sealed(issued()), sealed(stated))
    (reason,) = certificate.judge_bytes(data, late).reasons
    assert reason.code == "signature"


def spliced(signed: bytes, other: bytes) -> bytes:
    """The signature of one envelope under the payload of another."""
    forged = json.loads(other)
    forged["signatures"] = json.loads(signed)["signatures"]
    return (json.dumps(forged, indent=1) + "\n").encode()


def test_the_payload_is_not_parsed_before_its_signature_is_verified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    untrusted = [
        spliced(sealed(issued()), signing.seal(b"{}", OURS)),
        sealed(issued(), OTHERS),
        sealed(issued(), None),
    ]
    parsed: list[bytes] = []
    monkeypatch.setattr(statement, "parse", parsed.append)
    assert all(judged(data) for data in untrusted)
    assert parsed == []
    with pytest.raises(TypeError):  # what can be trusted is parsed, here into None
        judged(GOOD)
    assert parsed


@pytest.mark.parametrize(
    ("signer", "changes", "expected"),
    [
        (OURS, {}, []),
        (OTHERS, {}, ["signer"]),
        (None, {}, ["unsigned"]),
        (None, {"unsigned": True}, []),
        (OTHERS, {"unsigned": True}, ["signer"]),
        (OTHERS, {"unsigned": True, "signers": None}, []),
        (OURS, {"signers": frozenset()}, ["signer"]),
    ],
)
def test_whose_signature_is_accepted(
    signer: Any, changes: dict[str, Any], expected: list[str]
) -> None:
    assert codes(judged(sealed(issued(), signer), **changes)) == expected


@pytest.mark.parametrize("name", ["timeCreated", "notAfter"])
@pytest.mark.parametrize("moment", ["9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59"])
def test_moments_at_the_ends_of_time_are_compared_too(name: str, moment: str) -> None:
    stated = issued()
    stated["predicate"][name] = moment
    void = (name == "timeCreated") == moment.startswith("9999")
    old = name == "timeCreated" and not void
    expected = ["not-yet" if name == "timeCreated" else "expired"] * void + ["too-old"] * old
    assert codes(judged(sealed(stated))) == expected


def test_no_certificate_is_a_usage_error_with_the_way_to_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no certificate at") as raised:
        certificate.load(tmp_path / "certificate.json")
    assert "truetap certify" in raised.value.remedy
    judged_file = certificate.judge(tmp_path / "certificate.json", demands())
    assert codes(list(judged_file.reasons)) == ["certificate"]


@pytest.mark.parametrize(
    ("started", "said"),
    [
        (NOW.isoformat(), ""),
        ((NOW - certificate.VALIDITY).isoformat(), ""),
        ((NOW - certificate.VALIDITY - SECOND).isoformat(), "over 30 days ago"),
        ("then", "does not say when the checks ran"),
        ("2026-11-29T16:00:00", "does not say when the checks ran: it has no time zone"),
    ],
)
def test_an_old_report_is_not_made_young_by_certifying_it_again(started: str, said: str) -> None:
    made = conformant()
    made.started = started
    if not said:
        assert certificate.issue(made, now=NOW)
        return
    for validity in (certificate.VALIDITY, timedelta(days=3650)):
        with pytest.raises(CheckFailed, match=said):
            certificate.issue(made, now=NOW, validity=validity)


def test_facts_that_cannot_be_certified_are_no_traceback() -> None:
    for spoil in (
        lambda facts: facts["binding"].pop("adapter"),
        lambda facts: facts["binding"]["verifier"].update(weights_sha256="short"),
        lambda facts: facts["recorded"].pop("verifier_name"),
        lambda facts: facts["recorded"].update(verifier_name="../../etc"),
        lambda facts: facts["binding"]["adapter"].update(name="subprocess:../mine"),
        lambda facts: facts["binding"].update(share=float("nan")),
    ):
        made = conformant()
        spoil(made.environment)
        with pytest.raises(CheckFailed, match="no certificate: "):
            certificate.issue(made, now=NOW)


def test_an_executable_by_its_whole_path_is_a_name() -> None:
    made = conformant()
    made.environment["binding"]["adapter"]["name"] = "subprocess:/opt/capture/run.py"
    assert certificate.issue(made, now=NOW)


PREDICATE_FIELDS = (
    *("result", "profile", "evidence", "bindingDigest", "suite", "environment", "clauses"),
    *("timeCreated", "notAfter"),
)


def spoilt(path: tuple[Any, ...], value: Any) -> bytes:
    stated = issued()
    put(stated, path, value)
    return (json.dumps(stated) + "\n").encode()


def without(path: tuple[Any, ...]) -> bytes:
    stated = issued()
    take(stated, path)
    return (json.dumps(stated) + "\n").encode()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"null",
        b"[1]",
        b"{}",
        b"[" * 100_000,
        b"1" * 10_000,
        random.Random(0).randbytes(1 << 10),
        json.dumps(issued()).encode()[:-9],
        json.dumps(issued())
        .encode()
        .replace(b'"result": "pass"', b'"result": "x", "result": "pass"'),
        spoilt(("_type",), "https://in-toto.io/Statement/v2"),
        spoilt(("predicateType",), "https://slsa.dev/provenance/v1"),
        spoilt(("predicate",), None),
        spoilt(("subject",), []),
        spoilt(("subject", 1, "digest", "sha256"), "0" * 64),
        spoilt(("more",), 1),
        spoilt(("predicate", "more"), 1),
        spoilt(("predicate", "environment", "binding"), []),
        spoilt(("predicate", "environment", "binding"), {}),
        spoilt(("predicate", "environment", "binding", "engine"), "sglang"),
        spoilt(("predicate", "notAfter"), "2026-12-29T16:00:00"),
        spoilt(("predicate", "timeCreated"), "soon"),
        spoilt(("predicate", "bindingDigest"), "0" * 64),
        spoilt(("predicate", "suite", "sha256"), "A" * 64),
        spoilt(("predicate", "clauses", "ROWS-001"), "pass"),
        spoilt(("predicate", "clauses", "ROWS-001"), {"outcome": "pass"}),
        spoilt(("predicate", "clauses", "\x1b[2J"), {"outcome": "pass", "cases": 1}),
        spoilt(("predicate", "profile"), "core\x1b[2J"),
        spoilt(("predicate", "result"), ""),
        spoilt(("predicate", "clauses", "ROWS-001", "cases"), True),
        spoilt(("predicate", "clauses", "ROWS-001", "cases"), -1),
        spoilt(("predicate", "clauses", "ROWS-001", "outcome"), "passed"),
        *[spoilt(("predicate", name), value) for name in PREDICATE_FIELDS for value in (None, 7)],
        *[without(("predicate", name)) for name in PREDICATE_FIELDS],
    ],
    ids=lambda payload: f"{len(payload)} bytes",
)
def test_what_is_signed_but_no_statement_is_told_as_such(tmp_path: Path, payload: bytes) -> None:
    data = signing.seal(payload, OURS)
    assert codes(judged(data)) == ["schema"]
    path = tmp_path / "certificate.json"
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="is not a valid certificate") as raised:
        certificate.load(path)
    assert "delete it" in raised.value.remedy


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".hidden", "", "a\\b", "a\x00b", "x" * 300])
def test_a_subject_whose_name_leads_elsewhere_is_refused(name: str) -> None:
    stated = issued()
    stated["predicate"]["environment"]["recorded"]["verifier_name"] = name
    stated["subject"][1]["name"] = f"verifier:{name}"
    assert codes(judged(sealed(stated))) == ["name"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[" * 100_000,
        random.Random(0).randbytes(1 << 10),
        json.dumps(issued()).encode(),  # without an envelope
        sealed(issued())[:-1],
        sealed(issued()) + b"\n",
        sealed(issued()).replace(b'"signatures"', b'"more": 1, "signatures"'),
        sealed(issued()).replace(b'"signatures"', b'"payloadType": 1, "signatures"'),
        sealed(issued()).replace(b"vnd.in-toto+json", b"vnd.in-toto+yaml"),
        json.dumps(json.loads(sealed(issued()))).encode(),  # the same, spelled otherwise
    ],
    ids=lambda data: f"{len(data)} bytes",
)
def test_what_is_no_envelope_is_told_as_such(data: bytes) -> None:
    assert codes(judged(data)) == ["malformed"]


def test_what_is_no_file_is_never_read(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # nobody writes: to read it would be to wait for ever
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path, code in ((folder, "not-a-file"), (pipe, "not-a-file"), (loop, "unreadable")):
        assert codes(list(certificate.judge(path, demands()).reasons)) == [code]
        with pytest.raises(IntegrityError):
            certificate.load(path)
    assert codes(list(certificate.judge(Path("/dev/zero"), demands()).reasons)) == ["not-a-file"]
    assert codes(list(certificate.judge(Path("a\0b"), demands()).reasons)) == ["unreadable"]


def test_a_gigabyte_of_garbage_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "certificate.json"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    opened: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(certificate.os, "fdopen", lambda *_, **__: opened.append(1))
        (reason,) = certificate.judge(path, demands()).reasons
    assert (reason.code, opened) == ("too-large", [])
    assert "1,073,741,824 bytes" in reason.text
    path.write_bytes(b" " * certificate.LIMIT)  # the largest that is looked at
    assert codes(list(certificate.judge(path, demands()).reasons)) == ["malformed"]


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


JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 10**400, 0.5, [], {}, [1], {"a": "b"}, "", "\x00", "é"),
    *("pass", "live", "core", "full", "9999-12-31T23:59:59-23:59", "0001-01-01T00:00+14"),
    *(NOW.isoformat(), "0" * 64, "ed25519:" + "0" * 64),
)
GOOD = sealed(issued())
SIBLING = sealed(certificate.issue(conformant(), now=NOW + SECOND))
STATED = json.dumps(issued())
PLACES = list(places(json.loads(STATED)))
HEADINGS = list(places(json.loads(GOOD)))


def flipped(rng: random.Random) -> bytes:
    at, bits = rng.randrange(len(GOOD)), rng.randrange(1, 256)
    return GOOD[:at] + bytes([GOOD[at] ^ bits]) + GOOD[at + 1 :]


def cut(rng: random.Random) -> bytes:
    return GOOD[: rng.randrange(len(GOOD))]


def edited(rng: random.Random) -> bytes:
    """What it states, edited and encoded again, under the old signature or none."""
    stated, place = json.loads(STATED), rng.choice(PLACES)
    if rng.random() < 0.5:
        take(stated, place) if not isinstance(place[-1], int) else put(stated, place, None)
    else:
        put(stated, place, rng.choice([*JUNK, rng.random()]))
    data = signing.seal(json.dumps(stated, indent=1).encode() + b"\n", None)
    return data if rng.random() < 0.5 else spliced(GOOD, data)


def re_dressed(rng: random.Random) -> bytes:
    """The envelope edited, its payload's digest made right again."""
    envelope, place = json.loads(GOOD), rng.choice(HEADINGS)
    put(envelope, place, rng.choice([*JUNK, rng.random()]))
    if isinstance(envelope.get("payload"), str):
        seen = hashlib.sha256(base64.b64decode(envelope["payload"].encode() + b"==")).hexdigest()
        envelope["payloadSha256"] = rng.choice([envelope["payloadSha256"], seen])
    return (json.dumps(envelope, indent=1) + "\n").encode()


def signed_otherwise(rng: random.Random) -> bytes:
    """Another's signature, another's name over ours, ours of another statement, two, or none."""
    envelope = json.loads(GOOD)
    (own,), (sibling,) = envelope["signatures"], json.loads(SIBLING)["signatures"]
    (other,) = json.loads(sealed(issued(), OTHERS))["signatures"]
    junk = base64.b64encode(rng.randbytes(rng.randrange(60, 69))).decode()
    envelope["signatures"] = rng.choice(
        [
            [other],
            [sibling],
            [],
            [own, own],
            [own, other],
            [other, own],
            [own | {"keyid": other["keyid"]}],
            [other | {"keyid": own["keyid"]}],
            [own | {"sig": junk}],
            [own | {"more": 1}],
            [own | {"keyid": "ed25519:" + "0" * 64}],
        ]
    )
    return (json.dumps(envelope, indent=1) + "\n").encode()


def said_twice(rng: random.Random) -> bytes:
    """A key twice, so that one reader takes the first and another the last."""
    lines = GOOD.decode().split("\n")
    at = rng.randrange(1, 4)
    name = lines[at].split(":")[0]
    lines.insert(rng.randrange(1, 5), f"{name}: {json.dumps(rng.choice([*JUNK, rng.random()]))},")
    return "\n".join(lines).encode()


MUTATIONS = (flipped, cut, edited, re_dressed, signed_otherwise, said_twice)
DRAWN = (*MUTATIONS, *(flipped, edited) * 4, cut)
"""Of some kinds there are only so many."""


def test_no_mutated_certificate_is_accepted_of_two_thousand_and_the_good_one_is() -> None:
    tried: dict[str, set[bytes]] = {mutate.__name__: set() for mutate in MUTATIONS}

    @settings(
        deadline=None, max_examples=3200, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(seed=st.integers(0, 2**64 - 1))
    def is_denied(seed: int) -> None:
        rng = random.Random(seed)
        mutate = rng.choice(DRAWN)
        try:
            mutated = mutate(rng)
        except ValueError:  # junk in place of base64 text
            return
        if mutated != GOOD:
            tried[mutate.__name__].add(mutated)
            assert codes(judged(mutated))

    is_denied()
    assert all(tried.values())
    distinct = {name: len(found) for name, found in tried.items()}
    assert sum(distinct.values()) >= 2000, distinct
    assert judged(GOOD) == []
    assert judged(SIBLING) == []

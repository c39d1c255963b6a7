"""The gate, on files: every fault to survive has a reason of its own, and all are told at once."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from securesystemslib.signer import CryptoSigner

from truetap.harness import certificate, contract, report, signing
from truetap.harness.report import Outcome, Report
from truetap.pipeline import gate, policy

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
GUIDE = Path(__file__).parents[2] / "docs" / "gate.md"
DAY, SECOND = timedelta(days=1), timedelta(seconds=1)
SUITE = "5" * 64
BINDING: dict[str, Any] = {
    "engine": "vllm",
    "engine_version": "0.32.0",
    "torch_version": "2.13.0",
    "device": "NVIDIA H200",
    "tensor_parallel_size": 1,
    "world_size": 1,
    "enable_prefix_caching": False,
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
        environment={"binding": copy.deepcopy(BINDING), "recorded": {"verifier_name": "tiny"}},
    )
    for clause in made.clauses:
        clause.add(*outcomes.get(clause.id, ("pass", "")))
    return made


class Place:
    """A folder with a production policy, the key that it allows, and one that it does not."""

    def __init__(self, folder: Path) -> None:
        self.certificate, self.report = folder / "certificate.json", folder / "report.json"
        ours, public, self.id = signing.new_key("ours", folder / "keys")
        self.ours = signing.signer_from(ours)
        self.theirs = signing.signer_from(signing.new_key("theirs", folder / "keys")[0])
        self.policy = folder / "policy.toml"
        self.policy.write_text(f'signers = ["keys/{public.name}"]\n')

    def issue(
        self,
        path: Path | None = None,
        *,
        by: CryptoSigner | None = None,
        change: Callable[[dict[str, Any]], Any] = lambda _: None,
        now: datetime = NOW - DAY,
    ) -> str:
        """Write a certificate of yesterday, with a change; return its digest."""
        stated = copy.deepcopy(certificate.issue(report_with({}), now=now))
        change(stated["predicate"])
        return certificate.write(stated, path or self.certificate, by or self.ours)

    def ask(
        self,
        binding: dict[str, Any] | None = BINDING,
        *,
        now: datetime = NOW,
        suite: str = SUITE,
        files: tuple[Path, ...] = (),
        profile: str = "core",
    ) -> gate.Decision:
        demands = policy.load(self.policy).demands(profile, suite, now, copy.deepcopy(binding))
        return gate.decide(files or (self.certificate,), demands, report_path=self.report)

    def codes(self, binding: dict[str, Any] | None = BINDING, **asked: Any) -> list[str]:
        decision = self.ask(binding, **asked)
        assert decision.allowed == (not decision.reasons)
        assert all(reason.text and reason.remedy for reason in decision.reasons)
        return [reason.code for reason in decision.reasons]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_good_certificate_for_these_workers_allows(place: Place) -> None:
    digest = place.issue()
    assert digest == hashlib.sha256(place.certificate.read_bytes()).hexdigest()
    decision = place.ask()
    assert decision.allowed
    assert decision.as_dict() == {
        "allowed": True,
        "certificate": digest,
        "path": str(place.certificate),
        "signer": place.id,
        "workers_checked": True,
        "reasons": [],
    }


def test_before_the_workers_are_up_it_says_that_they_were_not_checked(place: Place) -> None:
    place.issue()
    decision = place.ask(None)
    assert decision.allowed
    assert not decision.workers_checked


def tampered(place: Place, change: Callable[[dict[str, Any]], Any]) -> None:
    place.issue()
    envelope = json.loads(place.certificate.read_text())
    change(envelope)
    place.certificate.write_text(json.dumps(envelope, indent=1) + "\n")


def payload(envelope: dict[str, Any], *, cover: bool) -> None:
    """Let it be valid for longer; ``cover`` makes the digest beside it right again."""
    old = base64.b64decode(envelope["payload"])
    new = old.replace(b'"notAfter": "2026', b'"notAfter": "2036')
    assert new != old
    envelope["payload"] = base64.b64encode(new).decode()
    if cover:
        envelope["payloadSha256"] = hashlib.sha256(new).hexdigest()


def signature(envelope: dict[str, Any]) -> None:
    sig = bytearray(base64.b64decode(envelope["signatures"][0]["sig"]))
    sig[3] ^= 1
    envelope["signatures"][0]["sig"] = base64.b64encode(bytes(sig)).decode()


def garbage(place: Place) -> None:
    with place.certificate.open("wb") as file:
        file.write(os.urandom(1 << 16))
        file.truncate(1 << 30)


def named(predicate: dict[str, Any]) -> None:
    predicate["environment"]["recorded"]["verifier_name"] = "../../outside"


def issue_named(place: Place) -> None:
    stated = copy.deepcopy(certificate.issue(report_with({}), now=NOW - DAY))
    named(stated["predicate"])
    stated["subject"][1]["name"] = "verifier:../../outside"
    certificate.write(stated, place.certificate, place.ours)


FAULTS: dict[str, tuple[str, Callable[[Place], Any], dict[str, Any]]] = {
    "expired by one second": ("expired", lambda p: p.issue(), {"now": NOW + 29 * DAY + SECOND}),
    "dated in the future": ("not-yet", lambda p: p.issue(), {"now": NOW - DAY - SECOND}),
    "tampered payload": ("payload", lambda p: tampered(p, lambda e: payload(e, cover=False)), {}),
    "tampered payload, covered up": (
        "signature",
        lambda p: tampered(p, lambda e: payload(e, cover=True)),
        {},
    ),
    "tampered signature": ("signature", lambda p: tampered(p, signature), {}),
    "no signature": ("unsigned", lambda p: tampered(p, lambda e: e["signatures"].clear()), {}),
    "key not allowed": ("signer", lambda p: p.issue(by=p.theirs), {}),
    "other engine release": (
        "engine-release",
        lambda p: p.issue(),
        {"binding": BINDING | {"engine_version": "0.33.0"}},
    ),
    "other torch": ("torch", lambda p: p.issue(), {"binding": BINDING | {"torch_version": "2.14"}}),
    "other GPU model": ("gpu", lambda p: p.issue(), {"binding": BINDING | {"device": "H100"}}),
    "other TP": (
        "tensor-parallel",
        lambda p: p.issue(),
        {"binding": BINDING | {"tensor_parallel_size": 2, "world_size": 2}},
    ),
    "other boundary list": (
        "boundaries",
        lambda p: p.issue(),
        {"binding": BINDING | {"boundaries": [2, 6, 10, 12]}},
    ),
    "other verifier weights with the same name": (
        "weights",
        lambda p: p.issue(),
        {"binding": BINDING | {"verifier": {"weights_sha256": "c" * 64, "num_blocks": 12}}},
    ),
    "prefix caching switched on after certifying": (
        "prefix-caching",
        lambda p: p.issue(),
        {"binding": BINDING | {"enable_prefix_caching": True}},
    ),
    "another setting": (
        "environment",
        lambda p: p.issue(),
        {"binding": BINDING | {"max_num_seqs": 64}},
    ),
    "other capture path": (
        "adapter",
        lambda p: p.issue(),
        {"binding": BINDING | {"adapter": {"name": "vllm_native", "sha256": "c" * 64}}},
    ),
    "replay evidence": (
        "evidence",
        lambda p: p.issue(change=lambda c: c.update(evidence="replay")),
        {},
    ),
    "a result of its own": (
        "result",
        lambda p: p.issue(change=lambda c: c.update(result="no")),
        {},
    ),
    "missing clause": (
        "clause",
        lambda p: p.issue(change=lambda c: c["clauses"].pop(MUSTS[3])),
        {},
    ),
    "a weaker profile": ("profile", lambda p: p.issue(), {"profile": "full"}),
    "stale suite": ("suite", lambda p: p.issue(), {"suite": "6" * 64}),
    "older than the policy allows": (
        "too-old",
        lambda p: (
            p.issue(change=lambda c: c.update(notAfter=(NOW + 99 * DAY).isoformat())),
            p.policy.write_text(p.policy.read_text() + "max_age_days = 1\n"),
        ),
        {"now": NOW + SECOND},
    ),
    "unreadable file": ("unreadable", lambda p: p.certificate.symlink_to(p.certificate), {}),
    "directory in place of file": ("not-a-file", lambda p: p.certificate.mkdir(), {}),
    "a pipe in place of file": ("not-a-file", lambda p: os.mkfifo(p.certificate), {}),
    "1 GB of garbage": ("too-large", garbage, {}),
    "garbage": ("malformed", lambda p: p.certificate.write_bytes(os.urandom(999)), {}),
    "a signed statement of another kind": (
        "schema",
        lambda p: p.certificate.write_bytes(signing.seal(b'{"_type": "other"}', p.ours)),
        {},
    ),
    "path traversal in names": ("name", issue_named, {}),
    "none": ("certificate", lambda _: None, {}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_denied_with_its_own_reason(place: Place, fault: str) -> None:
    code, make, asked = FAULTS[fault]
    make(place)
    assert set(place.codes(**asked)) == {code}
    # The same place without the fault: nothing speaks against it.
    good = place.certificate.with_name("good.json")
    place.policy.write_text(f'signers = ["{place.id}"]\n')
    place.issue(good)
    assert place.codes(files=(good,)) == []


def test_every_code_has_a_fault_here_or_in_the_certificates_own_tests() -> None:
    elsewhere = {"cuda", "expected-failure"}
    assert {code for code, _, _ in FAULTS.values()} | elsewhere == set(certificate.CODES)


def test_without_a_certificate_every_failed_clause_is_named_first(place: Place) -> None:
    bad: dict[str, tuple[Outcome, str]] = {
        MUSTS[1]: ("fail", "row 3 is short"),
        MUSTS[4]: ("error", "no reply"),
        MUSTS[5]: ("not_run", ""),
    }
    report_with(bad).write(place.report)
    decision = place.ask(None)
    assert not decision.allowed
    assert decision.certificate is None
    assert [reason.code for reason in decision.reasons] == [
        *(MUSTS[1], MUSTS[4], MUSTS[5], "certificate")
    ]
    assert decision.reasons[0].text.endswith("fail. Seen: row 3 is short")
    assert ": not run. " in decision.reasons[2].text
    assert "there is no certificate" in decision.reasons[3].text
    assert all(reason.remedy for reason in decision.reasons)


@pytest.mark.parametrize("written", [None, "{", "[]", "conformant"])
def test_without_a_certificate_the_report_cannot_allow(place: Place, written: str | None) -> None:
    """Neither a report that is missing, nor one that is broken, nor one that passed."""
    if written == "conformant":
        report_with({}).write(place.report)
    elif written is not None:
        place.report.write_text(written)
    assert place.codes() == ["certificate"]


def test_beside_a_certificate_the_report_says_nothing(place: Place) -> None:
    report_with({MUSTS[1]: ("fail", "row 3 is short")}).write(place.report)
    place.issue(by=place.theirs)
    assert place.codes() == ["signer"]


def test_every_reason_is_given_at_once_the_first_to_fix_first(place: Place) -> None:
    place.issue(change=lambda c: c["clauses"].pop(MUSTS[2]))
    others = BINDING | {"engine": "sglang", "max_num_seqs": 64, "boundaries": [12]}
    decision = place.ask(others, now=NOW + 90 * DAY, suite="6" * 64, profile="full")
    assert [reason.code for reason in decision.reasons] == [
        *("profile", "engine-release", "boundaries", "environment", "suite", "expired"),
        "clause",
    ]
    assert "max_num_seqs was 32" in decision.reasons[3].text
    listed = json.loads(json.dumps(decision.as_dict()))
    assert listed["allowed"] is False
    assert len(listed["reasons"]) == 7
    assert all(reason.keys() == {"code", "text", "remedy"} for reason in listed["reasons"])
    assert all(all(reason.values()) for reason in listed["reasons"])


def test_one_good_certificate_of_several_allows(place: Place, tmp_path: Path) -> None:
    files = tuple(tmp_path / f"{name}.json" for name in ("none", "theirs", "old", "good"))
    place.issue(files[1], by=place.theirs)
    place.issue(files[2], now=NOW - 60 * DAY)
    assert not place.ask(files=files[:3]).allowed
    digest = place.issue(files[3])
    for listed in (files, files[::-1]):
        decision = place.ask(files=listed)
        assert decision.allowed
        assert (decision.path, decision.certificate) == (files[3], digest)


def test_of_several_bad_certificates_the_nearest_says_what_is_missing(
    place: Place, tmp_path: Path
) -> None:
    """One that can be trusted is nearer than one that cannot; then the fewest reasons count."""
    files = tuple(tmp_path / f"{name}.json" for name in ("none", "theirs", "two", "one", "folder"))
    place.issue(files[1], by=place.theirs)
    place.issue(files[2], now=NOW - 60 * DAY, change=lambda c: c["clauses"].pop(MUSTS[0]))
    place.issue(files[3], change=lambda c: c["clauses"].pop(MUSTS[0]))
    files[4].mkdir()
    for listed in (files, files[::-1]):
        decision = place.ask(files=listed)
        assert (decision.path, decision.judged) == (files[3], 5)
        assert [reason.code for reason in decision.reasons] == ["clause"]
    assert place.ask(files=files[:2]).path == files[1]
    assert place.ask(files=(files[0], files[4])).path == files[4]


@pytest.mark.parametrize(
    ("text", "by", "expected"),
    [
        ("production = false\nunsigned = true", "ours", []),
        ("production = false\nunsigned = true", "theirs", []),
        ("production = false\nunsigned = true", None, []),
        (None, None, []),
        (None, "theirs", []),
    ],
)
def test_development_takes_anybodys_word_but_no_damage(
    place: Place, text: str | None, by: str | None, expected: list[str]
) -> None:
    stated = certificate.issue(report_with({}), now=NOW - DAY)
    certificate.write(stated, place.certificate, getattr(place, by) if by else None)
    place.policy.write_text(text or "")
    wanted = policy.load(place.policy if text else None).demands("core", SUITE, NOW, BINDING)
    decision = gate.decide([place.certificate], wanted)
    assert [reason.code for reason in decision.reasons] == expected
    assert (decision.signer is None) == (by is None)
    data = bytearray(place.certificate.read_bytes())
    data[len(data) // 2] ^= 1
    place.certificate.write_bytes(data)
    assert not gate.decide([place.certificate], wanted).allowed


def test_a_decision_is_allowed_only_without_reasons() -> None:
    allowed = gate.Decision((), "aa", workers_checked=True)
    assert allowed.allowed
    assert not replace(allowed, reasons=(certificate.Reason("a", "b", "c"),)).allowed


def test_the_guides_table_of_reasons_is_the_codes_in_their_order() -> None:
    rows = [line for line in GUIDE.read_text().splitlines() if line.startswith("| `")]
    assert rows == [f"| `{code}` | {meaning} |" for code, meaning in certificate.CODES.items()]

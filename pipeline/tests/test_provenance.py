"""From a shard's line to its certificate: what holds is trained on, what does not is told whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from truetap.harness import certificate, signing
from truetap.harness.errors import CheckFailed, IntegrityError, TruetapError, UsageError
from truetap.pipeline import policy, provenance
from truetap.pipeline.store import Store

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

Certify = Callable[..., str]
CERTIFIED = datetime(2026, 11, 29, 12, tzinfo=UTC)
VALID = timedelta(days=30)
VERIFIER = {"config_sha256": "c" * 64, "weights_sha256": "a" * 64}
ENGINE = {
    "engine": "vllm",
    "engine_version": "0.32.0",
    "dtype": "bfloat16",
    "tensor_parallel_size": 1,
    "enable_prefix_caching": True,
    "adapter": {"name": "vllm_native", "sha256": "b" * 64},
}
BOUNDARIES = [2, 6, 9, 12]
ANYBODYS = policy.DEVELOPMENT.demands("core", "6" * 64, datetime(2030, 1, 1, tzinfo=UTC))
"""Demands of development, by another suite, long after: neither speaks against what was made."""
BINDING: dict[str, Any] = {
    **ENGINE,
    "verifier": {"num_blocks": 12, "hidden_size": 16, **VERIFIER},
    "boundaries": BOUNDARIES,
}
OVERRULED = {"reason": "the node is new, a trial", "denied": ["LAYERS-001", "certificate"]}


def line(number: int, digest: str | None, **changed: Any) -> dict[str, Any]:
    made = CERTIFIED + timedelta(days=1)
    entry = {
        "shard": f"shard-{number:05d}.safetensors",
        "boundaries": BOUNDARIES,
        "last_boundary_normed": False,
        "dtype": "bfloat16",
        "verifier": {"name": "tiny", **VERIFIER},
        "engine": ENGINE,
        "made": made.isoformat(),
        "certificate": digest,
        "digests": {"states": f"digest of {number}"},
        "ids": [],
    }
    return {name: value for name, value in (entry | changed).items() if value != "absent"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "shards")
    made.folder.mkdir()
    return made


def refusal(store: Store, **needed: Any) -> TruetapError:
    with pytest.raises(TruetapError) as refused:
        provenance.examine(store, ANYBODYS, **needed)
    return refused.value


def test_a_whole_chain_holds(store: Store, certify: Certify) -> None:
    first = certify(store.folder, BINDING)
    second = certify(store.folder, BINDING, created=CERTIFIED + timedelta(hours=1))
    for number, digest in enumerate((first, second, first)):
        store.append(line(number, digest))
    made = provenance.examine(store, ANYBODYS, boundaries=(2, 6, 9, 12), verifier=VERIFIER)
    assert made.as_dict() == {
        "verifier": {"name": "tiny", **VERIFIER},
        "boundaries": BOUNDARIES,
        "certificates": sorted({first, second}),
        "shards": {f"shard-{n:05d}.safetensors": f"digest of {n}" for n in range(3)},
    }
    made.require_certified(unless=None)
    assert provenance.examine(store, ANYBODYS) == made


def test_a_folder_without_shards_is_a_usage_error(store: Store) -> None:
    with pytest.raises(UsageError, match="there are no shards in"):
        provenance.examine(store, ANYBODYS)


@pytest.mark.parametrize("absent", [None, "", "absent"])
def test_a_line_without_a_certificate_is_refused(
    store: Store, certify: Certify, absent: str | None
) -> None:
    store.append(line(0, certify(store.folder, BINDING)))
    store.append(line(1, absent))
    refused = refusal(store)
    assert isinstance(refused, CheckFailed)
    assert str(refused) == (
        "1 of 2 shards must not be trained on. made without a certificate: shard-00001.safetensors"
    )
    assert "truetap extract again" in refused.remedy


# How a certificate's own file can be wrong; each spoils the file of a digest.
def lost(path: Path) -> None:
    path.unlink()


def tampered(path: Path) -> None:
    path.write_text(path.read_text().replace('"payload"', '"paylaod"', 1))


def linked(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def folder_in_its_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


def garbage(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(1 << 30)  # sparse


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lost, "is not in"),
        (tampered, "is not the file that was kept"),
        (linked, "is not a file of this folder"),
        (folder_in_its_place, "is not a file of this folder"),
        (garbage, "is too large to be one"),
    ],
)
def test_a_certificate_file_that_is_not_the_one_kept_is_an_integrity_failure(
    store: Store, certify: Certify, spoil: Callable[[Path], None], said: str
) -> None:
    good = certify(store.folder, BINDING, validity=timedelta(days=9))
    digest = certify(store.folder, BINDING)
    store.append(line(0, good))
    store.append(line(1, digest))
    provenance.examine(store, ANYBODYS)
    spoil(store.folder / "certificates" / f"{digest}.json")
    refused = refusal(store)
    assert isinstance(refused, IntegrityError)
    assert f"its certificate {digest[:12]} {said}" in str(refused)
    assert str(refused).endswith(": shard-00001.safetensors")


def test_a_linked_folder_of_certificates_is_refused(store: Store, certify: Certify) -> None:
    store.append(line(0, certify(store.folder, BINDING)))
    (store.folder / "certificates").rename(store.folder.parent / "elsewhere")
    (store.folder / "certificates").symlink_to(store.folder.parent / "elsewhere")
    assert "is not a file of this folder" in str(refusal(store))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "A" * 64, "c0ffee", 7, ["x"]])
def test_a_certificate_is_named_by_a_digest_and_nothing_else(store: Store, name: Any) -> None:
    store.append(line(0, name))
    refused = refusal(store)
    assert isinstance(refused, IntegrityError)
    assert "its certificate is not named by a SHA-256" in str(refused)


@pytest.mark.parametrize("name", ["../x", "/tmp/x.safetensors", "a/b", "..", ".", "", "a\\b", 3])
def test_a_shard_is_named_by_a_file_of_its_folder(
    store: Store, certify: Certify, name: Any
) -> None:
    store.append(line(0, certify(store.folder, BINDING)))
    store.append(line(1, None, shard=name))
    refused = refusal(store)
    assert isinstance(refused, IntegrityError)
    assert f"line 2 of {store.manifest} names {name!r}, which is no file of this" in str(refused)
    assert store.repair() == [f"1 damaged lines of {store.manifest} were dropped"]
    assert len(provenance.examine(store, ANYBODYS).shards) == 1


def test_a_linked_shard_is_not_read(store: Store) -> None:
    (store.folder.parent / "other.safetensors").write_bytes(b"")
    name = "shard-00000.safetensors"
    store.path(name).symlink_to(store.folder.parent / "other.safetensors")
    with pytest.raises(IntegrityError, match="is a link, not a file of this folder"):
        store.verified({"shard": name, "digests": {}})


def other(**changed: Any) -> dict[str, Any]:
    return BINDING | changed


@pytest.mark.parametrize(
    ("certified", "said"),
    [
        (other(boundaries=[2, 6, 10, 12]), "boundaries was [2, 6, 10, 12] when certified and is"),
        (
            other(verifier=BINDING["verifier"] | {"weights_sha256": "d" * 64}),
            f"verifier.weights_sha256 was '{'d' * 64}' when certified",
        ),
        (
            other(adapter={"name": "vllm_rpc", "sha256": "e" * 64}),
            "adapter.name was 'vllm_rpc' when certified and is 'vllm_native'",
        ),
        (other(engine_version="0.33.0"), "engine_version was '0.33.0' when certified"),
        (other(dtype="float16"), "dtype was 'float16' when certified and is 'bfloat16'"),
        (other(enable_prefix_caching=False), "enable_prefix_caching was False when certified"),
        (other(device="H200"), "device was 'H200' when certified and is 'absent'"),
    ],
)
def test_a_certificate_for_something_else_is_refused(
    store: Store, certify: Certify, certified: dict[str, Any], said: str
) -> None:
    store.append(line(0, certify(store.folder, BINDING)))
    digest = certify(store.folder, certified)
    store.append(line(1, digest))
    refused = refusal(store)
    assert isinstance(refused, CheckFailed)
    assert f"its certificate {digest[:12]} is for something else: {said}" in str(refused)
    assert str(refused).endswith(": shard-00001.safetensors")


@pytest.mark.parametrize(
    ("late", "said"),
    [
        (timedelta(0), ""),
        (VALID, ""),
        (VALID + timedelta(seconds=1), "had expired when it was made (2026-12-29T12:00:00+00:00)"),
        (-timedelta(seconds=1), "was issued only after it was made (2026-11-29T12:00:00+00:00)"),
    ],
)
def test_it_must_have_been_valid_to_the_second_when_the_shard_was_made(
    store: Store, certify: Certify, late: timedelta, said: str
) -> None:
    digest = certify(store.folder, BINDING)
    store.append(line(0, digest, made=(CERTIFIED + late).isoformat()))
    if not said:
        provenance.examine(store, ANYBODYS)
        return
    assert f"its certificate {digest[:12]} {said}" in str(refusal(store))


@pytest.mark.parametrize("made", ["absent", None, "yesterday", 5, "2026-11-30T12:00:00"])
def test_a_line_that_does_not_say_when_it_was_made_is_refused(
    store: Store, certify: Certify, made: Any
) -> None:
    store.append(line(0, certify(store.folder, BINDING), made=made))
    assert "its line does not say when it was made" in str(refusal(store))


@pytest.mark.parametrize("fact", ["engine", "verifier"])
@pytest.mark.parametrize("value", ["absent", None, "vllm"])
def test_a_line_that_does_not_say_what_made_it_is_refused(
    store: Store, certify: Certify, fact: str, value: Any
) -> None:
    digest = certify(store.folder, BINDING)
    store.append(line(0, digest))
    store.append(line(1, digest, **{fact: value}))
    assert "its line does not say which engine and verifier made it" in str(refusal(store))


@pytest.mark.parametrize("digests", ["absent", {}, "e" * 64])
def test_a_line_without_a_digest_of_its_states_is_refused(
    store: Store, certify: Certify, digests: Any
) -> None:
    store.append(line(0, certify(store.folder, BINDING), digests=digests))
    refused = refusal(store)
    assert isinstance(refused, IntegrityError)
    assert "its line has no digest of its states" in str(refused)


def test_a_statement_that_checks_failed_is_no_certificate(store: Store, certify: Certify) -> None:
    """Right digest, right environment, right time, but it says no."""
    path = store.folder / "certificates" / f"{certify(store.folder, BINDING)}.json"
    for name, value in (("result", "fail"), ("evidence", "replay")):
        statement = json.loads(signing.unseal(path.read_bytes()).payload)
        statement["predicate"][name] = value
        digest = certificate.write(statement, path.with_name("new.json"))
        path.with_name("new.json").rename(path.with_name(f"{digest}.json"))
        store.append(line(0, digest))
        assert "does not say that live checks passed" in str(refusal(store))


def test_a_line_moved_from_another_store_has_no_certificate_here(
    store: Store, certify: Certify, tmp_path: Path
) -> None:
    theirs = Store(tmp_path / "theirs")
    store.append(line(0, certify(store.folder, BINDING)))
    theirs.append(line(1, certify(theirs.folder, other(engine_version="0.31.0"))))
    with store.manifest.open("ab") as file:
        file.write(theirs.manifest.read_bytes())
    assert "is not in" in str(refusal(store))
    # With its certificate it is as good as it was there, if it is of what this training needs.
    shutil.copytree(
        theirs.folder / "certificates", store.folder / "certificates", dirs_exist_ok=True
    )
    assert "engine_version was '0.31.0' when certified" in str(refusal(store))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"boundaries": [2, 6, 9]}, "it holds boundaries [2, 6, 9] (last one before the norm)"),
        ({"last_boundary_normed": True}, "(last one after the norm); this run needs [2, 6, 9, 12]"),
        ({"last_boundary_normed": None}, "it does not say which boundaries it holds"),
        ({"boundaries": None}, "it does not say which boundaries it holds"),
        (
            {"verifier": {"name": "tiny", "config_sha256": "c" * 64, "weights_sha256": "9" * 64}},
            "it is of another verifier: weights_sha256 999999999999, not aaaaaaaaaaaa",
        ),
    ],
)
def test_states_that_are_not_what_this_training_needs_are_refused(
    store: Store, certify: Certify, changed: dict[str, Any], said: str
) -> None:
    """Each has a certificate for exactly what it is: it is only not what is needed."""
    entry = line(1, None, **changed)
    bound = other(
        boundaries=entry["boundaries"],
        verifier={"num_blocks": 12, "hidden_size": 16}
        | {k: v for k, v in entry["verifier"].items() if k != "name"},
    )
    store.append(line(0, certify(store.folder, BINDING)))
    store.append(entry | {"certificate": certify(store.folder, bound)})
    refused = refusal(store, boundaries=BOUNDARIES, verifier=VERIFIER)
    assert said in str(refused)
    assert str(refused).startswith("1 of 2 shards")
    assert said in str(refusal(store)), "the first shard is what all must be"


def test_all_reasons_are_told_at_once_and_grouped(store: Store, certify: Certify) -> None:
    digest = certify(store.folder, BINDING)
    late = (CERTIFIED + VALID + timedelta(days=1)).isoformat()
    for number in range(1000):
        if number < 900:
            store_line = line(number, digest)
        elif number < 950:
            store_line = line(number, None)
        else:
            store_line = line(number, digest, made=late, boundaries=[2, 6, 8, 12])
        _append_fast(store, store_line)
    said = str(refusal(store, boundaries=BOUNDARIES, verifier=VERIFIER))
    assert said.startswith("100 of 1000 shards must not be trained on. ")
    assert (
        "made without a certificate: shard-00900.safetensors, shard-00901.safetensors, "
        "shard-00902.safetensors and 47 more" in said
    )
    assert "had expired when it was made" in said
    assert "boundaries was [2, 6, 9, 12] when certified and is [2, 6, 8, 12]" in said
    assert "it holds boundaries [2, 6, 8, 12]" in said
    assert said.count("47 more") == 4
    assert len(said) < 1500


def _append_fast(store: Store, entry: dict[str, Any]) -> None:
    """Add a line without syncing the disk a thousand times."""
    from truetap.pipeline.store import _digest

    with store.manifest.open("a") as file:
        file.write(json.dumps({**entry, "sha256": _digest(entry)}) + "\n")


def test_hundreds_of_kinds_of_fault_do_not_make_hundreds_of_sentences(store: Store) -> None:
    for number in range(300):
        _append_fast(store, line(number, f"{number:012x}" + "0" * 52))
    said = str(refusal(store))
    assert said.startswith("300 of 300 shards must not be trained on. ")
    assert said.endswith("and 290 other faults")
    assert len(said) < 3000


# --- made in spite of the gate -----------------------------------------------------------------


def test_uncertified_shards_are_seen_each_and_used_only_for_a_reason(
    store: Store, certify: Certify
) -> None:
    digest = certify(store.folder, BINDING)
    store.append(line(0, digest))
    store.append(line(1, "absent", uncertified=OVERRULED))
    made = provenance.examine(store, ANYBODYS, boundaries=BOUNDARIES, verifier=VERIFIER)
    with pytest.raises(CheckFailed, match=r"^1 of 2 shards .*: shard-00001\.safetensors$") as no:
        made.require_certified(unless=None)
    assert '--allow-uncertified "REASON"' in no.value.remedy
    made.require_certified(unless="I have read why the gate denies")
    assert made.as_dict()["certificates"] == [digest]
    assert made.as_dict()["uncertified"] == {
        "shards": ["shard-00001.safetensors"],
        "reasons": ["the node is new, a trial"],
        "denied": ["LAYERS-001", "certificate"],
    }


@pytest.mark.parametrize("changed", [{"boundaries": [2, 6, 9]}, {"last_boundary_normed": True}])
def test_no_reason_makes_up_for_states_of_something_else(
    store: Store, changed: dict[str, Any]
) -> None:
    store.append(line(0, "absent", uncertified=OVERRULED, **changed))
    assert "it holds boundaries" in str(refusal(store, boundaries=BOUNDARIES))


@pytest.mark.parametrize(
    ("digest", "said"),
    [
        ("a" * 64, OVERRULED),
        ("absent", {}),
        ("absent", "yes"),
        ("absent", {"reason": "because"}),
        ("absent", {"reason": "because", "denied": [{}]}),
    ],
)
def test_a_line_that_says_and_unsays_a_certificate_is_refused(
    store: Store, digest: str, said: Any
) -> None:
    store.append(line(0, digest, uncertified=said))
    assert "its line says and unsays a certificate" in str(refusal(store))


def test_what_is_kept_is_what_the_gate_judged(
    store: Store, certify: Certify, tmp_path: Path
) -> None:
    digest = certify(tmp_path / "elsewhere", BINDING)
    source = tmp_path / "elsewhere" / "certificates" / f"{digest}.json"
    provenance.keep(store.folder, source, digest)
    store.append(line(0, digest))
    provenance.examine(store, ANYBODYS)
    source.write_text(source.read_text() + " ")
    with pytest.raises(IntegrityError, match="is not the certificate that the gate"):
        provenance.keep(store.folder, source, digest)


# --- what the gate allowed, by the word of the manifest ----------------------------------------


def test_the_policy_is_asked_again_of_what_the_manifest_says_was_allowed(
    store: Store, certify: Certify, tmp_path: Path
) -> None:
    """Anybody can write an unsigned certificate and a manifest that names it."""
    ours, theirs = (
        signing.signer_from(signing.new_key(name, tmp_path)[0]) for name in ("ours", "theirs")
    )
    demanded = policy.Policy(signers=(ours.public_key.keyid,), max_age_days=2)
    kept = store.folder / "certificates"
    unsigned = certify(store.folder, BINDING)
    statement = json.loads(signing.unseal((kept / f"{unsigned}.json").read_bytes()).payload)

    def keep(signer: CryptoSigner, **changed: Any) -> str:
        changes = {"predicate": statement["predicate"] | changed}
        digest = certificate.write(statement | changes, kept / "new.json", signer)
        (kept / "new.json").rename(kept / f"{digest}.json")
        return digest

    clauses = statement["predicate"]["clauses"]
    failed = {"outcome": "expected_fail", "cases": 1, "expected": "we know"}
    foretold = {"result": "expected-failures", "clauses": clauses | {"LAYERS-001": failed}}
    good, too_late = keep(ours), (CERTIFIED + timedelta(days=3)).isoformat()
    store.append(line(0, good))
    demands = demanded.demands("core", "6" * 64, datetime(2030, 1, 1, tzinfo=UTC))
    provenance.examine(store, demands)
    for number, (digest, made, said) in enumerate(
        [
            (unsigned, "", "it is not signed, and the policy demands a signature"),
            (keep(theirs), "", f"it is signed by {theirs.public_key.keyid}, which"),
            (keep(ours, profile="shapes"), "", "it is for profile 'shapes', not 'core'"),
            (good, too_late, "the policy allows 2 days"),
            (keep(ours, **foretold), "", "clause LAYERS-001 failed, as was expected: we know"),
        ],
        start=1,
    ):
        store.append(line(number, digest, **({"made": made} if made else {})))
        with pytest.raises(CheckFailed) as refused:
            provenance.examine(store, demands)
        told = str(refused.value)
        assert f"its certificate {digest[:12]} is not what the policy demands: " in told
        assert f"{said}" in told
        assert told.startswith(f"{number} of {number + 1} shards ")
    allowing = demanded.model_copy(update={"expectations": ("LAYERS-001",)})
    last = line(5, digest)
    chain = provenance.Chain(store.folder, allowing.demands("core", "", demands.now))
    assert chain.faults(last) == []

"""Keys and envelopes: what is written for whom, and what a signature covers."""

from __future__ import annotations

import base64
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    PublicFormat,
    load_pem_public_key,
)

from truetap.harness import names, signing
from truetap.harness.errors import UsageError
from truetap.harness.signing import Untrusted

PAYLOAD = b'{"_type": "anything"}\n'


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return signing.new_key("ours", tmp_path / "keys")[0]


def test_a_new_pair_is_private_and_public_and_has_one_id(tmp_path: Path) -> None:
    private, public, told = signing.new_key("release", tmp_path / "keys")
    assert [private.name, public.name] == ["release.pem", "release.pub"]
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert stat.S_IMODE(private.parent.stat().st_mode) == 0o700
    assert private.read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----\n")
    assert public.read_bytes().startswith(b"-----BEGIN PUBLIC KEY-----\n")
    assert b"PRIVATE" not in public.read_bytes()
    assert {signing.key_id(private), signing.key_id(public)} == {told}
    assert signing.KEY_ID.fullmatch(told)
    assert signing.new_key("other", tmp_path / "keys")[2] != told


@pytest.mark.parametrize("there", ["ours.pem", "ours.pub"])
def test_a_key_is_never_overwritten(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("precious")
    with pytest.raises(UsageError, match="never overwritten"):
        signing.new_key("ours", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "precious"


def test_a_key_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "ours.pem").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError):
        signing.new_key("ours", tmp_path)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/b", "..", ".x", "", "a\nb", "a\0b", "x" * 201]
)
def test_a_key_whose_name_leads_elsewhere_is_not_made(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is no name for a key"):
        signing.new_key(name, tmp_path / "keys")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as caught:
        signing.new_key("ours", tmp_path / "file" / "keys")
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("name", "slashes", "fine"),
    [
        ("SmolLM2-135M-Instruct", False, True),
        ("shard-00001.safetensors", False, True),
        ("subprocess:/opt/x.py", True, True),
        ("off-by-one@vllm_native", True, True),
        ("a..b", False, True),
        ("subprocess:../x.py", True, False),
        ("subprocess:a/../x.py", True, False),
        ("subprocess:a\\..\\x.py", True, False),
        (None, False, False),
        (7, True, False),
    ],
)
def test_names(name: Any, slashes: bool, fine: bool) -> None:
    assert (names.fault_of(name, slashes=slashes) is None) == fine


def write_key(path: Path, key: Any, password: bytes | None = None) -> Path:
    from cryptography.hazmat.primitives.serialization import NoEncryption

    lock = BestAvailableEncryption(password) if password else NoEncryption()
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock))
    return path


def test_what_is_no_key_is_one_sentence_with_the_way_to_one(tmp_path: Path) -> None:
    locked = write_key(tmp_path / "locked.pem", ed25519.Ed25519PrivateKey.generate(), b"secret")
    other = write_key(tmp_path / "rsa.pem", rsa.generate_private_key(65537, 2048))
    junk = tmp_path / "junk.pem"
    junk.write_bytes(os.urandom(100))
    public = signing.new_key("ours", tmp_path)[1]
    for path in (locked, other, junk, public, tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError) as caught:
            signing.signer_from(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert "truetap keys new" in caught.value.remedy
    for path in (locked, other, junk, tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError):
            signing.key_id(path)


def test_what_is_sealed_is_what_is_unsealed(key: Path) -> None:
    signer = signing.signer_from(key)
    assert signing.unseal(signing.seal(PAYLOAD, signer)) == signing.Sealed(
        PAYLOAD, signing.key_id(key)
    )
    assert signing.unseal(signing.seal(PAYLOAD, None)) == signing.Sealed(PAYLOAD, None)


def test_the_signature_is_of_the_pre_authentication_encoding(key: Path) -> None:
    """Checked without the library that made it: DSSE 1.0, type and payload with their lengths."""
    envelope = json.loads(signing.seal(PAYLOAD, signing.signer_from(key)))
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    (one,) = envelope["signatures"]
    kind = envelope["payloadType"].encode()
    pae = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(PAYLOAD), PAYLOAD)
    public = load_pem_public_key(key.with_suffix(".pub").read_bytes())
    public.verify(base64.b64decode(one["sig"]), pae)  # type: ignore[union-attr, call-arg]
    raw = public.public_bytes(Encoding.Raw, PublicFormat.Raw)
    assert one["keyid"] == "ed25519:" + raw.hex()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda e: e.update(payload=base64.b64encode(PAYLOAD + b" ").decode()), "payload"),
        (lambda e: e.update(payload=e["payload"] + "\n"), "malformed"),
        (lambda e: e.update(payload=e["payload"].rstrip("=") + "!="), "malformed"),
        (lambda e: e.update(payloadType="text/plain"), "malformed"),
        (lambda e: e["signatures"][0].update(sig="AAAA"), "signature"),
        (lambda e: e["signatures"][0].update(sig=""), "signature"),
        (lambda e: e["signatures"][0].update(keyid="ed25519:" + "0" * 64), "signature"),
        (lambda e: e["signatures"][0].update(keyid="../../key"), "malformed"),
        (lambda e: e["signatures"][0].update(keyid=None), "malformed"),
        (lambda e: e["signatures"].append(e["signatures"][0]), "malformed"),
        (lambda e: e.pop("payloadSha256"), "malformed"),
        (lambda e: e.update(payloadSha256=None), "malformed"),
        (lambda e: e.update(payloadSha256="0" * 64), "payload"),
        (lambda e: e.update(more=1), "malformed"),
    ],
)
def test_an_envelope_that_was_changed_is_told_by_what_was(
    key: Path, change: Any, code: str
) -> None:
    envelope = json.loads(signing.seal(PAYLOAD, signing.signer_from(key)))
    change(envelope)
    with pytest.raises(Untrusted) as caught:
        signing.unseal((json.dumps(envelope, indent=1) + "\n").encode())
    assert caught.value.code == code
    assert caught.value.remedy


def test_two_signers_are_one_too_many(tmp_path: Path) -> None:
    keys = [signing.new_key(name, tmp_path)[0] for name in ("ours", "theirs")]
    both = [json.loads(signing.seal(PAYLOAD, signing.signer_from(key))) for key in keys]
    both[0]["signatures"] += both[1]["signatures"]
    with pytest.raises(Untrusted) as caught:
        signing.unseal((json.dumps(both[0], indent=1) + "\n").encode())
    assert caught.value.code == "malformed"


def test_a_damaged_unsigned_envelope_is_seen_too() -> None:
    envelope = json.loads(signing.seal(PAYLOAD, None))
    envelope["payload"] = base64.b64encode(PAYLOAD.replace(b"any", b"some")).decode()
    with pytest.raises(Untrusted) as caught:
        signing.unseal((json.dumps(envelope, indent=1) + "\n").encode())
    assert caught.value.code == "payload"


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        '[{"a": {"b": 1, "b": 1}}]',
        "NaN",
        "[-Infinity]",
        "[-1e999]",
        "[" * 100_000,
    ],
)
def test_json_that_can_be_read_in_two_ways_is_read_in_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        signing.strict_json(text.encode())
    assert signing.strict_json(b'{"a": [1, {"a": 2}]}') == {"a": [1, {"a": 2}]}


def test_a_link_that_leads_nowhere_is_no_free_name(tmp_path: Path) -> None:
    (tmp_path / "ours.pub").symlink_to(tmp_path / "none")
    with pytest.raises(UsageError, match="never overwritten"):
        signing.new_key("ours", tmp_path)
    assert not (tmp_path / "ours.pem").exists(), "half a pair is no key"

"""Keys and signed bytes: ed25519, in DSSE envelopes that are verified before anybody reads them.

A key's id is its public half, so that a policy which names the id needs no file beside it, and
nobody can publish one key under the id of another.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import Error, VerificationError
from securesystemslib.signer import CryptoSigner, SSlibKey

from truetap.harness import names
from truetap.harness.errors import IntegrityError, UsageError

PAYLOAD_TYPE = "application/vnd.in-toto+json"
KEY_ID = re.compile(r"ed25519:[0-9a-f]{64}")
AGAIN = "delete it, then run truetap conform and truetap certify again"
_KEY_LIMIT = 1 << 16


class Untrusted(IntegrityError):
    """Bytes that nothing may be read from; ``code`` says why, in a word."""

    def __init__(self, code: str, message: str, *, remedy: str = AGAIN) -> None:
        super().__init__(message, remedy=remedy)
        self.code = code


@dataclass(frozen=True)
class Sealed:
    """What an envelope holds, and whose valid signature it bears."""

    payload: bytes
    signer: str | None
    """Key id; None: unsigned."""


def new_key(name: str, into: Path) -> tuple[Path, Path, str]:
    """Make a key pair; return the private file, the public file and the key id.

    The private key, PEM, is readable by its owner alone. Neither file is ever overwritten.
    """
    if wrong := names.fault_of(name):
        raise UsageError(
            f"{name!r} is no name for a key: {wrong}", remedy="use letters, digits, - and _"
        )
    private, public = into / f"{name}.pem", into / f"{name}.pub"
    made = Ed25519PrivateKey.generate()
    signer = _signer_of(made)
    spoken = made.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    try:
        into.mkdir(parents=True, exist_ok=True, mode=0o700)
        if public.exists() or public.is_symlink():
            raise FileExistsError(public)
        _create(private, signer.private_bytes, 0o600)
        _create(public, spoken, 0o644)
    except FileExistsError:
        raise UsageError(
            f"there is a key {name!r} in {into} already; keys are never overwritten",
            remedy="choose another name, or another folder with --into",
        ) from None
    except OSError as error:
        raise UsageError(
            f"no key can be written to {into}: {error}", remedy="choose a folder with --into"
        ) from error
    return private, public, signer.public_key.keyid


def signer_from(path: Path) -> CryptoSigner:
    """Read a private key, PEM; ``UsageError`` if it is none of ed25519, or locked."""
    with _key_errors(path, "private key"):
        private = load_pem_private_key(_key_bytes(path), password=None)
        if not isinstance(private, Ed25519PrivateKey):
            raise ValueError("another kind of key")  # noqa: TRY004
        return _signer_of(private)


def key_id(path: Path) -> str:
    """Return the id of a key, read from its public or its private file."""
    with _key_errors(path, "key"):
        data = _key_bytes(path)
        if b"PRIVATE KEY" in data:
            return str(signer_from(path).public_key.keyid)
        public = load_pem_public_key(data)
        if not isinstance(public, Ed25519PublicKey):
            raise ValueError("another kind of key")  # noqa: TRY004
        return _id_of(public)


def seal(payload: bytes, signer: CryptoSigner | None) -> bytes:
    """Return the bytes of an envelope; without a signer it bears no signature."""
    envelope = Envelope(payload, PAYLOAD_TYPE, {})
    if signer is not None:
        envelope.sign(signer)
    return _written(envelope)


def unseal(data: bytes) -> Sealed:
    """Return what an envelope holds once its bytes are proven; raise ``Untrusted`` otherwise.

    The envelope must be spelled exactly as ``seal`` spells it: of one statement by one signer there
    is one file, and no byte of it can be another.
    """
    envelope = _envelope(data)
    if not envelope.signatures:
        return Sealed(envelope.payload, None)
    ((signed_by, _),) = envelope.signatures.items()
    try:
        envelope.verify([_public_of(signed_by)], 1)
    except (VerificationError, Error, ValueError) as error:
        raise Untrusted(
            "signature",
            f"its signature is not that of key {signed_by} over these bytes",
        ) from error
    return Sealed(envelope.payload, signed_by)


def strict_json(data: bytes) -> Any:
    """Parse JSON in which nothing is said twice and every number is one; ``ValueError`` if not."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a key comes twice")
        return table

    def no_number(spelling: str) -> Any:
        raise ValueError(f"{spelling} is no number")

    def finite(spelling: str) -> float:
        number = float(spelling)
        return number if math.isfinite(number) else no_number(spelling)

    try:
        return json.loads(
            data, object_pairs_hook=once, parse_constant=no_number, parse_float=finite
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _envelope(data: bytes) -> Envelope:
    try:
        document = strict_json(data)
        if not isinstance(document, dict):
            raise TypeError("not an object")
        told = document.pop("payloadSha256")
        envelope = Envelope.from_dict(document)
        spelled = data == _written(envelope, told)
    except (Error, ValueError, TypeError, KeyError, AttributeError, UnicodeError) as error:
        raise Untrusted("malformed", f"it is no envelope: {error}") from error
    named = all(isinstance(keyid, str) and KEY_ID.fullmatch(keyid) for keyid in envelope.signatures)
    alone = len(envelope.signatures) <= 1
    if envelope.payload_type != PAYLOAD_TYPE or not (spelled and named and alone):
        raise Untrusted("malformed", "it is no envelope of the kind and spelling that truetap uses")
    if told != _sha256(envelope.payload):
        # Unsigned too: damage and edits by hand are seen, forgery is not.
        raise Untrusted("payload", "what it states was altered after it was written")
    return envelope


def _written(envelope: Envelope, told: str | None = None) -> bytes:
    document = {
        "payload": base64.b64encode(envelope.payload).decode(),
        "payloadSha256": told if told is not None else _sha256(envelope.payload),
        "payloadType": envelope.payload_type,
        "signatures": [
            {"keyid": keyid, "sig": base64.b64encode(bytes.fromhex(one.signature)).decode()}
            for keyid, one in envelope.signatures.items()
        ],
    }
    return (json.dumps(document, indent=1) + "\n").encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _signer_of(private: Ed25519PrivateKey) -> CryptoSigner:
    return CryptoSigner(private, _public_of(_id_of(private.public_key())))


def _id_of(public: Ed25519PublicKey) -> str:
    return "ed25519:" + public.public_bytes(Encoding.Raw, PublicFormat.Raw).hex()


def _public_of(keyid: str) -> SSlibKey:
    return SSlibKey(keyid, "ed25519", "ed25519", {"public": keyid.removeprefix("ed25519:")})


def _create(path: Path, data: bytes, mode: int) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _key_bytes(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(path)
    with path.open("rb") as file:
        return file.read(_KEY_LIMIT)


@contextmanager
def _key_errors(path: Path, kind: str) -> Iterator[None]:
    remedy = "truetap keys new NAME makes a pair"
    try:
        yield
    except FileNotFoundError:
        raise UsageError(f"there is no {kind} at {path}", remedy=remedy) from None
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        # TypeError is how cryptography tells that a key is locked with a password.
        raise UsageError(
            f"{path} is no {kind} of ed25519 in PEM, or is locked with a password", remedy=remedy
        ) from error

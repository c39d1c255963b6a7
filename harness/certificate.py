"""Certificates: this adapter passed this profile, live, in exactly this environment, until then.

A certificate is a file: an in-toto statement in a signed envelope. Its bytes are verified before
anything is read from them, and judged against what a gate demands. Nothing here reads the clock:
the time is passed in.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truetap.harness import contract, environment, signing, statement
from truetap.harness.errors import UsageError
from truetap.harness.signing import Untrusted
from truetap.harness.statement import VALIDITY, issue

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

__all__ = ["VALIDITY", "Certificate", "Demands", "Judged", "Reason", "issue", "judge", "load"]

LIMIT = 1 << 20
"""Bytes of the largest file that is read at all; real certificates have some 10,000."""
AGAIN = "run truetap conform and truetap certify again in this environment"

CODES: dict[str, str] = {
    "certificate": "there is no such file",
    "not-a-file": "it is a folder, a pipe or a device",
    "unreadable": "it cannot be opened or read",
    "too-large": "it is larger than 1 MiB",
    "malformed": "it is no envelope, or not spelled as truetap spells one",
    "payload": "what it states was altered after it was written",
    "signature": "its signature is not that of its key over these bytes",
    "unsigned": "it bears no signature, and the policy demands one",
    "signer": "its key is not one of those that the policy allows",
    "schema": "what was signed is no statement of a kind that truetap reads",
    "name": "a subject's name would lead out of its folder",
    "evidence": "it was made from a replay, not from a live engine",
    "result": "it does not state that the checks passed",
    "profile": "its profile is weaker than the one demanded",
    "weights": "other weights, or another configuration of the verifier",
    "adapter": "another capture path, or other code of it",
    "engine-release": "another engine, or another release of it",
    "torch": "another torch",
    "cuda": "another CUDA",
    "gpu": "another GPU model (without one: other instructions of the CPU)",
    "tensor-parallel": "another number of ranks",
    "boundaries": "another list of boundaries",
    "prefix-caching": "prefix caching was switched on or off",
    "environment": "another setting of the engine that can change what is captured",
    "suite": "it was issued by another version of the suite",
    "not-yet": "it was issued in the future",
    "expired": "it has expired",
    "too-old": "it is older than the policy allows",
    "clause": "a MUST clause of the profile did not run and pass",
    "expected-failure": "a clause failed as expected, and the policy does not allow that",
}
"""Why a gate denies, in the order in which it says so. A clause's id is a code too: where there is
no certificate, the clauses that failed are told."""

ALTERED = frozenset({"malformed", "payload", "signature", "schema", "name", "too-large"})
"""Codes that say: these are not the bytes of a certificate, whatever the policy."""

_REMEDIES = {
    "weights": "serve the verifier that was certified, or conform and certify this one",
    "engine-release": "install the engine that was certified, or conform and certify this one",
    "torch": "install the torch that was certified, or conform and certify with this one",
    "cuda": "install the CUDA build that was certified, or conform and certify with this one",
    "gpu": "run on the kind of machine that was certified, or conform and certify on this one",
    "tensor-parallel": "set capture.tensor_parallel_size back, or conform and certify again",
    "boundaries": "set capture.boundaries back, or conform and certify again",
    "prefix-caching": "set capture.enable_prefix_caching back, or conform and certify again",
}


@dataclass(frozen=True)
class Reason:
    """One reason to deny, and what the user can do about it."""

    code: str
    text: str
    remedy: str


@dataclass(frozen=True)
class Certificate:
    """A verified certificate; ``digest`` is the SHA-256 of the file's bytes, hex."""

    predicate: Mapping[str, Any]
    digest: str
    signer: str | None = None
    """Key id; None: unsigned."""


@dataclass(frozen=True)
class Demands:
    """What a certificate has to satisfy, here and now. The defaults are those of development."""

    profile: str
    suite_digest: str
    now: datetime
    binding: Mapping[str, Any] | None = None
    """Facts of the running workers; None leaves that comparison for later."""
    signers: frozenset[str] | None = None
    """Key ids; None: anybody's valid signature."""
    unsigned: bool = True
    max_age: timedelta | None = None
    expectations: frozenset[str] = field(default=frozenset())
    """Clauses that may have failed as expected."""


@dataclass(frozen=True)
class Judged:
    """A file in the light of some demands; without reasons it allows."""

    path: Path
    reasons: tuple[Reason, ...]
    digest: str | None = None
    """SHA-256 of the file's bytes, hex; None if they were not read."""
    certificate: Certificate | None = None
    """None if its bytes are not to be trusted."""


def write(stated: Mapping[str, Any], path: Path, signer: CryptoSigner | None = None) -> str:
    """Sign a statement and write the file, atomically; return its digest."""
    data = signing.seal(statement.payload_of(stated), signer)
    scratch = path.with_name(path.name + ".partial")
    with scratch.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    scratch.rename(path)
    return hashlib.sha256(data).hexdigest()


def load(path: Path) -> Certificate:
    """Read and verify a certificate, whoever signed it.

    ``UsageError`` if there is none, ``IntegrityError`` if it cannot be trusted.
    """
    data = _bytes_of(path)
    try:
        return opened(data)
    except Untrusted as error:
        raise Untrusted(
            error.code, f"{path} is not a valid certificate: {error}", remedy=error.remedy
        ) from error


def judge(path: Path, demands: Demands) -> Judged:
    """Return everything that speaks against a file, the first to be fixed first."""
    try:
        data = _bytes_of(path)
    except UsageError as missing:
        return Judged(path, (Reason("certificate", str(missing), missing.remedy),))
    except Untrusted as error:
        return Judged(path, (Reason(error.code, str(error), error.remedy),))
    return judge_bytes(data, demands, path)


def judge_bytes(data: bytes, demands: Demands, path: Path = Path()) -> Judged:
    """Do as ``judge`` with the bytes of ``path``: signature first, then schema, then content."""
    digest = hashlib.sha256(data).hexdigest()
    try:
        sealed = signing.unseal(data)
        if distrust := _distrusted(sealed.signer, demands):
            return Judged(path, (distrust,), digest)
        held = Certificate(statement.parse(sealed.payload), digest, sealed.signer)
    except Untrusted as error:
        return Judged(path, (Reason(error.code, str(error), error.remedy),), digest)
    return Judged(path, tuple(shortcomings(held, demands)), digest, held)


def shortcomings(held: Certificate, demands: Demands) -> list[Reason]:
    """Return every reason why a verified certificate does not allow, the first to fix first."""
    predicate = held.predicate
    return [
        *_kind(predicate, demands.profile),
        *_environment(predicate["environment"]["binding"], demands.binding),
        *_suite(predicate["suite"]["sha256"], demands.suite_digest),
        *_dates(predicate, demands),
        *_clauses(predicate, demands),
        *_foretold(predicate, demands),
    ]


def against_policy(held: Certificate, demands: Demands) -> list[Reason]:
    """Return what a policy says of a certificate under which something was made, at ``now``.

    Not what the gate asked then and nobody can ask again: the workers, and the suite of that day.
    """
    distrust = _distrusted(held.signer, demands)
    return [
        *([distrust] if distrust else []),
        *_profile(held.predicate, demands.profile),
        *_age(held.predicate, demands),
        *_foretold(held.predicate, demands),
    ]


def opened(data: bytes) -> Certificate:
    """Return the certificate that a file's bytes are; ``Untrusted`` if they are none."""
    sealed = signing.unseal(data)
    digest = hashlib.sha256(data).hexdigest()
    return Certificate(statement.parse(sealed.payload), digest, sealed.signer)


def _bytes_of(path: Path) -> bytes:
    """Return a file's bytes; nothing but a regular file of at most ``LIMIT`` bytes is read."""
    try:
        # A pipe without a writer must not hold the gate; what was opened is what is asked.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"there is no certificate at {path}", remedy="run truetap conform, then truetap certify"
        ) from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    try:
        told = os.fstat(handle)
        if not stat.S_ISREG(told.st_mode):
            remedy = "name the certificate's file"
            raise Untrusted("not-a-file", f"{path} is no regular file", remedy=remedy)
        if told.st_size > LIMIT:
            raise _too_large(path, told.st_size)
        with os.fdopen(handle, "rb", closefd=False) as file:
            data = file.read(LIMIT + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(handle)
    if len(data) > LIMIT:  # it grew meanwhile, or lied about its size
        raise _too_large(path, len(data))
    return data


def _unreadable(path: Path, error: Exception) -> Untrusted:
    remedy = "see its permissions and the disk, or conform and certify again"
    return Untrusted("unreadable", f"{path} cannot be read: {error}", remedy=remedy)


def _too_large(path: Path, size: int) -> Untrusted:
    return Untrusted("too-large", f"{path} has {size:,} bytes; no certificate has that many")


def _distrusted(signer: str | None, demands: Demands) -> Reason | None:
    if signer is None and not demands.unsigned:
        return Reason(
            "unsigned",
            "it is not signed, and the policy demands a signature",
            "run truetap certify with --key, or TRUETAP_KEY, set to a key that the policy allows",
        )
    if signer is not None and demands.signers is not None and signer not in demands.signers:
        return Reason(
            "signer",
            f"it is signed by {signer}, which the policy does not allow",
            "certify with a key that the policy allows, or add this one to its signers",
        )
    return None


def _kind(predicate: Mapping[str, Any], wanted: str) -> Iterator[Reason]:
    if predicate["evidence"] != "live":
        yield Reason(
            "evidence", f"its evidence is {predicate['evidence']!r}; only live checks count", AGAIN
        )
    if predicate["result"] not in (statement.PASS, statement.EXPECTED_FAILURES):
        yield Reason("result", f"its result is {predicate['result']!r}", AGAIN)
    yield from _profile(predicate, wanted)


def _profile(predicate: Mapping[str, Any], wanted: str) -> Iterator[Reason]:
    held = predicate["profile"]
    if not contract.satisfies(held, wanted):
        yield Reason("profile", f"it is for profile {held!r}, not {wanted!r}", AGAIN)


def _environment(
    certified: Mapping[str, Any], present: Mapping[str, Any] | None
) -> Iterator[Reason]:
    # The fingerprint decides; the facts only tell what differs in it.
    if present is None or environment.same(certified, present):
        return
    told = environment.differing(certified, present)
    for family, sentence in told:
        yield Reason(family, sentence, _REMEDIES.get(family, AGAIN))
    if not told:
        yield Reason("environment", "its facts are of other kinds than the present ones", AGAIN)


def _suite(certified: str, present: str) -> Iterator[Reason]:
    if certified != present:
        yield Reason("suite", "it was issued by another version of the suite", AGAIN)


def _dates(predicate: Mapping[str, Any], demands: Demands) -> Iterator[Reason]:
    created = datetime.fromisoformat(predicate["timeCreated"])
    expires = datetime.fromisoformat(predicate["notAfter"])
    if demands.now < created:
        text = f"it was issued in the future, at {created:%Y-%m-%d %H:%M:%S %Z}"
        yield Reason("not-yet", text, "set the clock")
    if demands.now > expires:
        yield Reason("expired", f"it expired on {expires:%Y-%m-%d %H:%M:%S %Z}", AGAIN)
    else:
        yield from _age(predicate, demands)


def _age(predicate: Mapping[str, Any], demands: Demands) -> Iterator[Reason]:
    created = datetime.fromisoformat(predicate["timeCreated"])
    if demands.max_age is not None and demands.now - created > demands.max_age:
        text = f"it was issued at {created:%Y-%m-%d %H:%M:%S %Z}; the policy allows "
        yield Reason("too-old", f"{text}{demands.max_age.days} days", AGAIN)


def _clauses(predicate: Mapping[str, Any], demands: Demands) -> Iterator[Reason]:
    clauses, profile = predicate["clauses"], predicate["profile"]
    required: set[str] = set(contract.clauses_of(demands.profile))
    if not contract.satisfies(profile, demands.profile):
        required &= set(contract.PROFILES.get(profile, ()))  # the rest is told by "profile"
    foretold = _expected_to_fail(clauses)
    for clause_id in contract.CLAUSES:
        if clause_id in required and clause_id not in foretold and not _held(clause_id, clauses):
            yield Reason("clause", f"clause {clause_id} did not run and pass", AGAIN)


def _foretold(predicate: Mapping[str, Any], demands: Demands) -> Iterator[Reason]:
    clauses = predicate["clauses"]
    for clause_id in _expected_to_fail(clauses):
        known = contract.CLAUSES.get(clause_id)
        if clause_id not in demands.expectations and (known is None or known.level == "MUST"):
            why = "".join(c if c.isprintable() else " " for c in clauses[clause_id]["expected"])
            yield Reason(
                "expected-failure",
                f"clause {clause_id} failed, as was expected: {why}",
                "repair the capture path; or, if you can live with it, name the clause in the "
                "policy's expectations",
            )


def _expected_to_fail(clauses: Mapping[str, Any]) -> list[str]:
    return [id_ for id_, entry in clauses.items() if entry["outcome"] == "expected_fail"]


def _held(clause_id: str, clauses: Mapping[str, Any]) -> bool:
    clause, entry = contract.CLAUSES[clause_id], clauses.get(clause_id)
    enough = ("pass", "refused") if clause.refusable else ("pass",)
    ran = entry is not None and entry["outcome"] in enough and entry["cases"] > 0
    return clause.level != "MUST" or ran

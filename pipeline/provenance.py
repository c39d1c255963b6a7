"""The chain from every shard to the certificate that stood behind it when it was made.

Extraction keeps the certificate's file beside the shards, under its digest, and each manifest line
names that digest. Before anything is trained on shards, the chain of every one is followed: the
file is there and has that digest, the policy of today would have had nothing against it, it
certifies the line's own engine, verifier and boundaries, and it was valid when the shard was made.
A line may say instead that it was made uncertified; what it
may not do is say nothing, or something that is not true.
"""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from truetap.harness import certificate, statement
from truetap.harness.certificate import Certificate, Demands
from truetap.harness.environment import differences
from truetap.harness.errors import CheckFailed, IntegrityError, TruetapError, UsageError
from truetap.pipeline import run_folder
from truetap.pipeline.store import Store

LARGEST_CERTIFICATE = 1 << 20
NAMED, KINDS = 3, 10
"""How many shards of one kind of fault are named, and how many kinds are told."""
AGAIN = (
    "run truetap extract again: it redoes shards whose chain is broken; delete the manifest's line "
    "of a shard that this run never made"
)
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Fault:
    """Why a shard must not be trained on. Shards with equal texts are told together."""

    text: str
    integrity: bool = False
    """True if bytes are not those that were recorded, rather than a check that said no."""


@dataclass(frozen=True)
class Provenance:
    """What stands behind the shards of a folder, whose chains all hold."""

    verifier: Mapping[str, Any]
    boundaries: Sequence[int]
    shards: Mapping[str, str]
    """Digest of the states by shard."""
    certificates: Sequence[str]
    uncertified: Mapping[str, Mapping[str, Any]]
    """By shard: ``reason``, and ``denied``, the gate's codes."""

    def as_dict(self) -> dict[str, Any]:
        """Return what a head made from these shards records."""
        made: dict[str, Any] = {
            "verifier": dict(self.verifier),
            "boundaries": list(self.boundaries),
            "certificates": list(self.certificates),
            "shards": dict(self.shards),
        }
        if self.uncertified:
            lines = self.uncertified.values()
            made["uncertified"] = {
                "shards": sorted(self.uncertified),
                "reasons": sorted({line["reason"] for line in lines}),
                "denied": sorted({code for line in lines for code in line["denied"]}),
            }
        return made

    def require_certified(self, *, unless: str | None) -> None:
        """Raise ``CheckFailed`` if a shard has no certificate and no reason is given to use it."""
        if self.uncertified and unless is None:
            raise CheckFailed(
                f"{len(self.uncertified)} of {len(self.shards)} shards were captured without a "
                f"certificate: {listed(sorted(self.uncertified))}",
                remedy="run truetap extract without --allow-uncertified, which captures them "
                'again under a certificate, or give --allow-uncertified "REASON" here too',
            )


class Chain:
    """Judges the manifest lines of one store. Each certificate is read once.

    Of ``demands`` the policy's count, at the time at which a shard was made. They are asked again
    because a manifest is signed by nobody: what it says the gate allowed, anybody could write.
    """

    def __init__(self, shards: Path, demands: Demands) -> None:
        self._folder, self._demands = shards / "certificates", demands
        self._read: dict[str, Certificate | Fault] = {}

    def faults(self, entry: Mapping[str, Any]) -> list[Fault]:
        """Return everything that is wrong with one line's claim; none if it says 'uncertified'."""
        digest, uncertified = entry.get("certificate"), entry.get("uncertified")
        if uncertified is not None:
            said = isinstance(uncertified, Mapping) and (
                isinstance(uncertified.get("reason"), str)
                and isinstance(uncertified.get("denied"), list)
                and all(isinstance(code, str) for code in uncertified["denied"])
            )
            return [] if said and not digest else [Fault("its line says and unsays a certificate")]
        if not digest:
            return [Fault("made without a certificate")]
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            return [Fault("its certificate is not named by a SHA-256", integrity=True)]
        if digest not in self._read:
            self._read[digest] = self._held(digest)
        held = self._read[digest]
        if isinstance(held, Fault):
            return [held]
        name = f"its certificate {digest[:12]}"
        stated, made = held.predicate, _made(entry)
        if made is None:
            return [Fault("its line does not say when it was made")]
        barred = certificate.against_policy(held, replace(self._demands, now=made))
        return [
            *_claim(stated, name),
            *_time(stated, made, name),
            *(Fault(f"{name} is not what the policy demands: {why.text}") for why in barred),
            *_agreement(stated, entry, name),
        ]

    def _held(self, digest: str) -> Certificate | Fault:
        path = self._folder / f"{digest}.json"
        name = f"its certificate {digest[:12]}"
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or self._folder.is_symlink():
                return Fault(f"{name} is not a file of this folder", integrity=True)
            if status.st_size > LARGEST_CERTIFICATE:
                return Fault(f"{name} is too large to be one", integrity=True)
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != digest:
                return Fault(f"{name} is not the file that was kept", integrity=True)
            return certificate.opened(data)
        except FileNotFoundError:
            return Fault(f"{name} is not in {self._folder}", integrity=True)
        except (OSError, TruetapError) as error:
            return Fault(f"{name} cannot be read: {error}", integrity=True)


def _claim(held: Mapping[str, Any], name: str) -> list[Fault]:
    passed = held["result"] in (statement.PASS, statement.EXPECTED_FAILURES)
    if passed and held["evidence"] == "live":  # which failures are allowed the policy says
        return []
    return [Fault(f"{name} does not say that live checks passed")]


def _made(entry: Mapping[str, Any]) -> datetime | None:
    try:
        made = datetime.fromisoformat(entry["made"])
    except (KeyError, TypeError, ValueError):
        return None
    return made if made.tzinfo else None


def _time(held: Mapping[str, Any], made: datetime, name: str) -> list[Fault]:
    created, expires = (datetime.fromisoformat(held[k]) for k in ("timeCreated", "notAfter"))
    if made < created:
        return [Fault(f"{name} was issued only after it was made ({held['timeCreated']})")]
    late = made > expires
    return [Fault(f"{name} had expired when it was made ({held['notAfter']})")] if late else []


def _agreement(held: Mapping[str, Any], entry: Mapping[str, Any], name: str) -> list[Fault]:
    """Compare what was certified with what the line says that the shard was made with."""
    certified = dict(held["environment"]["binding"])
    engine, verifier = entry.get("engine"), entry.get("verifier")
    if not isinstance(engine, Mapping) or not isinstance(verifier, Mapping):
        return [Fault("its line does not say which engine and verifier made it")]
    weights = certified.get("verifier")
    # The line has the verifier's digests and a name for the reader; the binding has its size too.
    certified["verifier"] = {
        k: v for k, v in (weights if isinstance(weights, Mapping) else {}).items()
        if k not in ("num_blocks", "hidden_size")
    }  # fmt: skip
    present = {
        **engine,
        "verifier": {k: v for k, v in verifier.items() if k != "name"},
        "boundaries": entry.get("boundaries"),
        "dtype": entry.get("dtype"),
    }
    other = differences(certified, present)
    return [Fault(f"{name} is for something else: {'; '.join(other)}")] if other else []


def examine(
    store: Store,
    demands: Demands,
    *,
    boundaries: Sequence[int] | None = None,
    verifier: Mapping[str, str] | None = None,
) -> Provenance:
    """Follow the chain of every shard; raise with everything that is wrong, told by kind.

    ``demands`` has what the policy wants. ``boundaries`` and ``verifier`` (its digests) are those
    that the training needs; without them the first shard's are what all others must have. Raises
    ``UsageError`` if there are no shards, ``IntegrityError`` if bytes are not those that were
    recorded, else ``CheckFailed``.
    """
    entries = list(store.entries().values())
    if not entries:
        raise UsageError(f"there are no shards in {store.folder}", remedy="run truetap extract")
    held = entries[0].get("boundaries")
    first = held if isinstance(held, list) else []
    wanted = first if boundaries is None else list(boundaries)
    digests = _digests(entries[0]) if verifier is None else dict(verifier)
    chain = Chain(store.folder, demands)
    kinds: dict[Fault, list[str]] = {}
    for entry in entries:
        found = [*chain.faults(entry), *_unfit(entry, wanted, digests)]
        for fault in dict.fromkeys(found):
            kinds.setdefault(fault, []).append(entry["shard"])
    if kinds:
        raise _refusal(kinds, len(entries))
    return Provenance(
        verifier=entries[0]["verifier"],
        boundaries=wanted,
        shards={entry["shard"]: entry["digests"]["states"] for entry in entries},
        certificates=sorted({e["certificate"] for e in entries if e.get("certificate")}),
        uncertified={e["shard"]: e["uncertified"] for e in entries if e.get("uncertified")},
    )


def _digests(entry: Mapping[str, Any]) -> dict[str, str]:
    made_from = entry.get("verifier")
    found = made_from if isinstance(made_from, Mapping) else {}
    return {name: value for name, value in found.items() if name != "name"}


def _unfit(
    entry: Mapping[str, Any], boundaries: Sequence[int], verifier: Mapping[str, str]
) -> Iterable[Fault]:
    """Yield why a shard, rightly made or not, is no material for this training."""
    held, normed = entry.get("boundaries"), entry.get("last_boundary_normed")
    if not isinstance(entry.get("digests"), Mapping) or "states" not in entry["digests"]:
        yield Fault("its line has no digest of its states", integrity=True)
    if normed is None or not held:
        yield Fault("it does not say which boundaries it holds, or whether the last one is normed")
    elif held != list(boundaries) or normed:
        where = "after" if normed else "before"
        yield Fault(
            f"it holds boundaries {held} (last one {where} the norm); this run needs "
            f"{list(boundaries)} before the norm"
        )
    if (made_from := _digests(entry)) != verifier:
        other = "; ".join(
            f"{name} {str(made_from.get(name))[:12]}, not {str(verifier.get(name))[:12]}"
            for name in sorted({*made_from, *verifier})
            if made_from.get(name) != verifier.get(name)
        )
        yield Fault(f"it is of another verifier: {other}")


def _refusal(kinds: Mapping[Fault, Sequence[str]], total: int) -> TruetapError:
    """Return one error for all shards and all faults, worst kind of error first."""
    told = [f"{fault.text}: {listed(names)}" for fault, names in list(kinds.items())[:KINDS]]
    if len(kinds) > KINDS:
        told.append(f"and {len(kinds) - KINDS} other faults")
    bad = len({name for names in kinds.values() for name in names})
    kind = IntegrityError if any(fault.integrity for fault in kinds) else CheckFailed
    message = f"{bad} of {total} shards must not be trained on. {'. '.join(told)}"
    return kind(message, remedy=AGAIN)


def listed(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def keep(shards: Path, path: Path, digest: str) -> None:
    """Copy the certificate that allowed a run beside its shards, under its digest, durably."""
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != digest:
        raise IntegrityError(
            f"{path} is not the certificate that the gate has just judged",
            remedy="run truetap extract again",
        )
    target = shards / "certificates" / f"{digest}.json"
    run_folder.write_bytes(target, data)

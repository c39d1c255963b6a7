"""What a gate demands of certificates: one TOML file, whose defaults are those of production.

Without a file the policy is that of development: anybody's signature will do, or none.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from truetap.harness import contract, signing
from truetap.harness.certificate import Demands
from truetap.harness.errors import TruetapError, UsageError
from truetap.harness.suite_options import suite_digest

if TYPE_CHECKING:
    from truetap.pipeline.config import Gate

EXAMPLE = "see examples/policy.toml and docs/gate.md"


class Policy(BaseModel):
    """Everything that a policy can say; a mistyped key is an error, not a silent default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    production: Annotated[bool, Field(strict=True)] = True
    """False lets a policy allow unsigned certificates and the profile ``shapes``."""
    profile: Literal["shapes", "core", "full"] = "core"
    """The least; a stronger one satisfies it."""
    signers: tuple[str, ...] = ()
    """Key ids, or files of public keys, relative to the policy's folder."""
    max_age_days: Annotated[int, Field(strict=True, gt=0, le=36500)] | None = 30
    expectations: tuple[str, ...] = ()
    """MUST clauses that may have failed as expected."""
    unsigned: Annotated[bool, Field(strict=True)] = False

    @field_validator("expectations")
    @classmethod
    def _are_clauses(cls, named: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [clause_id for clause_id in named if clause_id not in contract.CLAUSES]:
            raise ValueError(f"there is no clause {', '.join(unknown)}")
        return named

    @model_validator(mode="after")
    def _is_safe(self) -> Policy:
        if self.production and self.unsigned:
            raise ValueError(
                "a production policy cannot allow unsigned certificates: delete unsigned, or say "
                "production = false"
            )
        if self.production and self.profile == "shapes":
            raise ValueError(
                "profile shapes looks at no value and is not enough for production: ask for core, "
                "or say production = false"
            )
        if not self.signers and not self.unsigned:
            raise ValueError("signers names no key, so that no certificate could be allowed")
        return self

    def demands(
        self,
        profile: str,
        suite_digest: str,
        now: datetime,
        binding: Mapping[str, Any] | None = None,
    ) -> Demands:
        """Return what a certificate must satisfy now, of at least ``profile``."""
        return Demands(
            profile=contract.stronger(profile, self.profile),
            suite_digest=suite_digest,
            now=now,
            binding=binding,
            # A signer is checked against the list if there is one; an empty list allows nobody,
            # except where unsigned certificates, which anybody can make, are allowed.
            signers=frozenset(self.signers) if self.signers or not self.unsigned else None,
            unsigned=self.unsigned,
            max_age=None if self.max_age_days is None else timedelta(days=self.max_age_days),
            expectations=frozenset(self.expectations),
        )


DEVELOPMENT = Policy(production=False, profile="shapes", max_age_days=None, unsigned=True)


def demands_of(gate: Gate, binding: Mapping[str, Any] | None = None) -> Demands:
    """Return what a run's configuration demands of certificates, now."""
    return load(gate.policy).demands(gate.profile, suite_digest(), datetime.now(UTC), binding)


def load(path: Path | None) -> Policy:
    """Read a policy, its signers as key ids; ``UsageError`` has one sentence per mistake."""
    if path is None:
        return DEVELOPMENT
    try:
        policy = Policy.model_validate(tomllib.loads(path.read_text()))
    except FileNotFoundError:
        raise UsageError(f"there is no policy at {path}", remedy=EXAMPLE) from None
    except ValidationError as error:
        mistakes = [
            f"{'.'.join(map(str, mistake['loc'])) or 'the file'}: "
            + mistake["msg"].removeprefix("Value error, ")
            for mistake in error.errors()
        ]
        raise UsageError(
            f"the policy {path} is not right: {'; '.join(mistakes)}", remedy=EXAMPLE
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"the policy {path} is not readable TOML: {error}", remedy=EXAMPLE
        ) from error
    return policy.model_copy(
        update={"signers": tuple(_key_id(signer, path) for signer in policy.signers)}
    )


def _key_id(signer: str, policy: Path) -> str:
    if signing.KEY_ID.fullmatch(signer):
        return signer
    try:
        return signing.key_id(policy.parent / signer)
    except TruetapError as error:
        raise UsageError(
            f"the policy {policy} is not right: signers: {error}",
            remedy="name a public key's file, or the id that truetap keys show FILE prints",
        ) from error

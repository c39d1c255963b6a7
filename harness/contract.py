"""The clauses: what every way of capturing hidden states must, or should, hold to.

Tests, reports and certificates name clauses, never test ids: those change with how pytest is
called. A clause's number is never reused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["MUST", "SHOULD"]


@dataclass(frozen=True)
class Clause:
    """One numbered requirement."""

    id: str
    level: Level
    title: str
    reason: str
    """What went wrong in the wild, or would, where this does not hold."""
    references: tuple[str, ...]
    since: str
    """Calendar version of the suite in which the clause appeared."""


_CLAUSES = (
    Clause(
        "REPLY-001",
        "MUST",
        "one reply per rank, in rank order, each answering this very call",
        "Replies carry no call id and their shape moves with release, executor and mode: one [0] "
        "too many took one layer of four, and after any failure the next call can return a reply "
        "of the one before.",
        ("vllm#28012", "vllm#57846", "speculators#225"),
        "2026.11.0",
    ),
    Clause(
        "ROWS-001",
        "MUST",
        "as many rows as prompt tokens, for every request, the last one of a run included",
        "Cached prefixes, chunks, warm-up and padding add or drop rows, and a request can be left "
        "unwritten when no further engine step comes. Packed into training batches, one short "
        "request shifts all that follow.",
        ("vllm#44485", "speculators#279", "IBM/vLLM-Hook#22"),
        "2026.11.0",
    ),
    Clause(
        "ROWS-002",
        "MUST",
        "token ids come back with the rows and equal those that were sent, in the order asked",
        "Results in the order of text-sorted request ids gave samples other samples' masks as soon "
        "as a batch had more than ten requests.",
        ("speculators#836", "speculators 0.4.0"),
        "2026.11.0",
    ),
    Clause(
        "ROWS-003",
        "MUST",
        "a request's rows do not depend on what it was batched with, or on a warm prefix cache",
        "Rows cut by offset in submission order belong to a neighbour as soon as the scheduler "
        "reorders, splits or mixes: right shape, wrong content.",
        ("speculators#283", "sglang#6551", "vllm#44485"),
        "2026.11.0",
    ),
    Clause(
        "LAYERS-001",
        "MUST",
        "each slot holds the requested boundary, by value, in every row",
        "Layer ids have three spellings one block apart; slots can be permuted, broadcast, taken "
        "without the residual or one token late. Shapes are right in every such case.",
        ("sglang#25454", "vllm#43671", "TorchSpec#87", "vllm#46788"),
        "2026.11.0",
    ),
    Clause(
        "LAYERS-002",
        "MUST",
        "the last boundary, before its norm, reproduces the engine's own log-probabilities",
        "The last state is the training target. Whether the final norm is in it differs between "
        "backends; applied twice or never, acceptance falls and nothing crashes.",
        ("speculators#313", "Model-Optimizer#1846", "SpecForge#879"),
        "2026.11.0",
    ),
    Clause(
        "LAYERS-003",
        "MUST",
        "every value is finite, no slot is all zero, and no two slots are equal",
        "All-zero states train to a lower loss than right ones; one NaN row spoils a checkpoint "
        "that is saved with exit code 0; one captured layer can fill all slots.",
        ("vllm#46301", "speculators#615", "speculators#994"),
        "2026.11.0",
    ),
    Clause(
        "LAYERS-004",
        "MUST",
        "the states have the verifier's width and the engine's dtype",
        "States stored in another dtype lose range without a word.",
        ("vllm#25294",),
        "2026.11.0",
    ),
)

CLAUSES: dict[str, Clause] = {clause.id: clause for clause in _CLAUSES}
"""All clauses by id."""

PROFILES: dict[str, tuple[str, ...]] = {"core": tuple(CLAUSES)}
"""Clause ids that each profile requires to have run and passed."""


def clauses_of(profile: str) -> tuple[str, ...]:
    """Return the clause ids of a profile; of one that is unknown here, all there are."""
    return PROFILES.get(profile, tuple(CLAUSES))

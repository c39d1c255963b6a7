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
    refusable: bool = False
    """True if a capture path may refuse what the clause asks for, loudly and before it gives any
    data: an error in place of a wrong capture. Reports then say ``refused``."""


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
        "REPLY-002",
        "MUST",
        "values come from exactly the ranks asked for, in rank order",
        "Replies taken as they arrive, or from the first data-parallel group only, are other "
        "ranks' values under the wrong name.",
        ("vllm-omni#5397", "sglang#6989"),
        "2026.11.0",
    ),
    Clause(
        "REPLY-003",
        "MUST",
        "a value keeps its nesting: no list is added, none is taken away",
        "Up to vLLM 0.11.0 a named rank's reply came wrapped in a list, from 0.11.1 on it comes "
        "bare: the same [0] then takes one boundary of four. The value cannot tell which it is.",
        ("speculators#225", "speculators#433", "vllm#28012"),
        "2026.11.0",
    ),
    Clause(
        "REPLY-004",
        "MUST",
        "a tensor keeps its dtype, shape and bits",
        "Across processes vLLM's client turns tensors into [dtype, shape, index] with the data "
        "lost, and what is decoded depends on a flag, the release and the nesting.",
        ("vllm#25294", "vllm#21845", "vllm#17490"),
        "2026.11.0",
    ),
    Clause(
        "REPLY-005",
        "MUST",
        "a failure on any rank, asked or not, names the rank, the method and the cause",
        "With a reply rank named, only that rank's error is reported: the others fail unseen. "
        "Without, the error's type is lost and the rank with it.",
        ("vllm#23985", "vllm#20379"),
        "2026.11.0",
    ),
    Clause(
        "REPLY-006",
        "MUST",
        "no call outlives its deadline, and the error says which rank is late",
        "vLLM's client has no limit of its own, and the executor's is off by default: a rank that "
        "hangs takes the caller with it.",
        ("vllm#23985", "vllm#29390"),
        "2026.11.0",
    ),
    Clause(
        "REPLY-007",
        "MUST",
        "a value that cannot travel fails at once, and its place is named",
        "A torch.dtype in a reply kills the engine's output thread on vLLM 0.32.0; the caller "
        "hung for eight minutes.",
        ("allenai/open-instruct#1102", "vllm#23985"),
        "2026.11.0",
    ),
    Clause(
        "REPLY-008",
        "MUST",
        "no call is answered by the reply of an earlier one",
        "Replies carry no call id. After an exception or a timeout the other ranks' replies stay "
        "queued and are taken for the next call's, in every release from 0.8.5 to 0.33.0.",
        ("vllm#57846",),
        "2026.11.0",
    ),
    Clause(
        "REPLY-009",
        "MUST",
        "a rank that does not exist is refused before any worker runs the method",
        "MultiprocExecutor broadcasts first and raises IndexError afterwards; for rank -1 no "
        "worker answers, and the call waits for ever.",
        ("vllm 0.9.0 to 0.33.0",),
        "2026.11.0",
    ),
    Clause(
        "REPLY-010",
        "SHOULD",
        "a method that the workers do not have is an error that names it",
        "Worker methods are renamed and moved between releases.",
        ("vllm#23985",),
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

_CHANNEL = tuple(f"REPLY-{number:03}" for number in range(2, 11))

PROFILES: dict[str, tuple[str, ...]] = {
    "core": tuple(clause_id for clause_id in CLAUSES if clause_id not in _CHANNEL),
    "reply": _CHANNEL,
}
"""Clause ids that each profile requires to have run and passed: ``core`` judges a capture adapter,
``reply`` a reply channel."""


def clauses_of(profile: str) -> tuple[str, ...]:
    """Return the clause ids of a profile; of one that is unknown here, all there are."""
    return PROFILES.get(profile, tuple(CLAUSES))

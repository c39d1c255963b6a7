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
        "ROWS-004",
        "MUST",
        "a prompt prefilled in chunks has the rows that it has when prefilled at once",
        "A hook fires once a pass and cannot tell a middle chunk from the last: full mode returns "
        "pieces, and a buffer keeps the rows of the chunk before.",
        ("IBM/vLLM-Hook#22", "vllm#52074"),
        "2026.11.0",
        refusable=True,
    ),
    Clause(
        "ROWS-005",
        "MUST",
        "a prompt in the prefix cache has all its rows, also beside one that shares its prefix",
        "Cached tokens do not pass through the model: their rows are left out, or a neighbour's "
        "are cut in their place.",
        ("vllm#44485", "IBM/vLLM-Hook#14", "sglang#4997"),
        "2026.11.0",
        refusable=True,
    ),
    Clause(
        "ROWS-006",
        "MUST",
        "a second call gives the same rows, with the same requests in any other order",
        "State of an earlier call stays behind: cached prefixes, offsets, a buffer. Rows go by the "
        "order of submission, and the scheduler's is another one.",
        ("speculators#279", "speculators#283", "sglang#6551"),
        "2026.11.0",
    ),
    Clause(
        "ROWS-007",
        "MUST",
        "a preempted request has the rows of one that was not",
        "After a preemption a request starts anew in other blocks: rows come twice, or from blocks "
        "that are somebody else's by now.",
        ("vllm 0.26.0 to 0.33.0 (resumed_req_ids)",),
        "2026.11.0",
        refusable=True,
    ),
    Clause(
        "ROWS-008",
        "MUST",
        "with output included there are prompt + generated - 1 rows, and ids to match",
        "The last generated token never enters a forward pass. A made-up row, or an id without "
        "one, shifts everything after it.",
        ("speculators#836",),
        "2026.11.0",
        refusable=True,
    ),
    Clause(
        "ROWS-009",
        "MUST",
        "the longest prompt is captured whole, and one that does not fit is refused, never cut",
        "Engines cut a prompt to their limit, or skip the capture of a whole step when one request "
        "of it is at the limit: other requests' rows are never written.",
        ("vllm 0.26.0 to 0.33.0 (drafter skipped at max_model_len)",),
        "2026.11.0",
    ),
    Clause(
        "ROWS-010",
        "MUST",
        "any batch of prompts gives each its own rows",
        "Rows that are attributed by length, by order or by a running offset are right until the "
        "batch is of the other kind.",
        ("speculators#279", "sglang#6551"),
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
    Clause(
        "LAYERS-005",
        "MUST",
        "every boundary from 1 to n can be had, each with its own value",
        "Model files differ at both ends: one appended states before each block and never after "
        "the last, so id n yielded nothing.",
        ("vllm#46788", "vllm#48124", "TorchSpec#87"),
        "2026.11.0",
    ),
    Clause(
        "LAYERS-006",
        "MUST",
        "boundary 0 is the embedding rows of the token ids",
        "It is the one boundary that names each row's token, and some model files fail on it: the "
        "residual is not there yet.",
        ("vllm 0.32.0 (deepseek_v2.py)",),
        "2026.11.0",
        refusable=True,
    ),
    Clause(
        "LAYERS-007",
        "MUST",
        "slots come in the order asked, repeated ones too",
        "Engines sort the list and drop duplicates, each at a stage of its own: slot i is then not "
        "the i-th boundary.",
        ("vllm 0.18.0 to 0.33.0", "speculators 0.4.0"),
        "2026.11.0",
        refusable=True,
    ),
    Clause(
        "LAYERS-008",
        "MUST",
        "block k of the verifier takes captured boundary k to captured boundary k + 1",
        "Local proof of which layer a state is, without trusting anything that came before it: it "
        "works for verifiers too large to be run twice.",
        ("TorchSpec#87", "vllm#43671"),
        "2026.11.0",
    ),
    Clause(
        "PARALLEL-001",
        "MUST",
        "tensor parallel over two ranks gives the states of one rank",
        "A rank's share of a state, or a sum taken before all ranks have added theirs, has the "
        "right shape and half of the content.",
        ("vllm#45985", "sglang#14280"),
        "2026.11.0",
        refusable=True,
    ),
    Clause(
        "PARALLEL-002",
        "MUST",
        "all ranks have seen the same tokens",
        "Whose states are handed out is a matter of convention only if all ranks hold the same.",
        ("vllm-omni#5397", "RBLN-SW/vllm-rbln#1007"),
        "2026.11.0",
    ),
    Clause(
        "ENGINE-001",
        "MUST",
        "the engine generates the same tokens with capture as without",
        "A capture that disturbs the model captures another model.",
        ("ndif-team/nnsight#630",),
        "2026.11.0",
        refusable=True,
    ),
    Clause(
        "ENGINE-002",
        "MUST",
        "a compiled engine gives the states of an eager one",
        "Hooks do not run in a compiled or graph-captured model, or record its warm-up.",
        ("IBM/vLLM-Hook#6", "IBM/vLLM-Hook#7"),
        "2026.11.0",
        refusable=True,
    ),
    Clause(
        "ENGINE-003",
        "MUST",
        "nothing is captured before the first request",
        "Warm-up passes run through the same hooks: a founding run had 943 rows for 771 tokens.",
        ("IBM/vLLM-Hook#6",),
        "2026.11.0",
    ),
    Clause(
        "ENGINE-004",
        "SHOULD",
        "what a worker has to say reaches the user",
        "Workers log at another level than the caller's: a warning in one is seen by nobody.",
        ("vllm 0.11.0 (worker logs at INFO)",),
        "2026.11.0",
    ),
    Clause(
        "STORE-001",
        "MUST",
        "what is read is what was written: keys, token ids and states, bit for bit",
        "Everything after the capture is read from disk. A narrower dtype, a last group that was "
        "never flushed or rows under another key train as well as right ones.",
        ("vllm#25294", "vllm#37374"),
        "2026.11.0",
    ),
    Clause(
        "STORE-002",
        "MUST",
        "a reader sees a capture whole or not at all while a writer is at work",
        "Copy and write became asynchronous behind a lock file: a reader found missing and short "
        "files, and for a while pickle under a safetensors name.",
        ("vllm#37374",),
        "2026.11.0",
    ),
    Clause(
        "STORE-003",
        "MUST",
        "a writer killed at any point leaves every capture whole or absent, and loses none",
        "Writes that are not atomic leave half a file under its final name, and a lock that ends "
        "with its holder lets readers at it.",
        ("vllm#37374", "NVIDIA/Model-Optimizer#2080"),
        "2026.11.0",
    ),
    Clause(
        "STORE-004",
        "MUST",
        "data damaged on disk is refused or absent, never returned",
        "A changed byte of a state is a number like any other, and one of an index gives a capture "
        "another's name: without digests neither can be seen.",
        ("vllm#37374", "NVIDIA/Model-Optimizer#2080"),
        "2026.11.0",
    ),
    Clause(
        "STORE-005",
        "MUST",
        "after a stop, exactly what is missing is written",
        "A filter that remembered its first answer rewrote 62,000 files in two hours; a store that "
        "keeps everything back until the end loses it all.",
        ("NVIDIA/Model-Optimizer#2080",),
        "2026.11.0",
    ),
    Clause(
        "STORE-006",
        "MUST",
        "a finished file that is damaged is written again on the next run, and no other",
        "Where existence is the only test for done, a file that an interruption cut short stays "
        "short for ever.",
        ("NVIDIA/Model-Optimizer#2080",),
        "2026.11.0",
    ),
    Clause(
        "STORE-007",
        "MUST",
        "a write that fails raises, names the cause, and leaves what was there before valid",
        "A failed write was logged and its lock released: the reader woke to nothing. Disks fill "
        "up part-way through: 68,000 conversations take 740 GB for one state a token.",
        ("vllm#37374", "NVIDIA/Model-Optimizer#2080", "SafeAILab/EAGLE#30"),
        "2026.11.0",
    ),
    Clause(
        "STORE-008",
        "MUST",
        "a capture of other tokens under a stored key is written or refused, not taken for done",
        "Where a key's existence is the only test for done, samples that were answered anew keep "
        "the states of the text before.",
        ("NVIDIA/Model-Optimizer#2080",),
        "2026.11.0",
    ),
    Clause(
        "STORE-009",
        "SHOULD",
        "two writers in one folder both keep what they say they wrote, or one is refused",
        "Extraction is run in parallel over one folder; an index that each writer rewrites from "
        "its own memory keeps the last one's captures only.",
        ("vllm#37374",),
        "2026.11.0",
    ),
    Clause(
        "STORE-010",
        "SHOULD",
        "an interrupted write leaves no data behind once the next one is done",
        "Staged files that nobody removes filled a RAM disk part-way through 194,000 "
        "conversations.",
        ("NVIDIA/Model-Optimizer#2080",),
        "2026.11.0",
    ),
)

CLAUSES: dict[str, Clause] = {clause.id: clause for clause in _CLAUSES}
"""All clauses by id."""

_CHANNEL = tuple(f"REPLY-{number:03}" for number in range(2, 11))
_STORE = tuple(clause_id for clause_id in CLAUSES if clause_id.startswith("STORE-"))
_CAPTURE = tuple(id_ for id_ in CLAUSES if id_ not in _CHANNEL and id_ not in _STORE)
_OF_OTHER_ENGINES = (
    *("ROWS-004", "ROWS-007", "ROWS-008", "ROWS-010"),
    *("LAYERS-005", "LAYERS-006", "LAYERS-007", "LAYERS-008"),
    *("PARALLEL-001", "ENGINE-001", "ENGINE-002"),
)
"""Clauses that need engines with other settings, or many more captures."""

_SHAPES = ("REPLY-001", "ROWS-001", "ROWS-002", "LAYERS-004")
"""How many, how wide, of which dtype, for which tokens: nothing about what the states are."""

PROFILES: dict[str, tuple[str, ...]] = {
    "core": tuple(clause_id for clause_id in _CAPTURE if clause_id not in _OF_OTHER_ENGINES),
    "full": _CAPTURE,
    "reply": _CHANNEL,
    "store": _STORE,
    "shapes": _SHAPES,
}
"""Clause ids that each profile requires to have run and passed. ``shapes``, ``core`` and ``full``
judge a capture adapter: its counts and widths alone, what it holds, and with several engines;
``reply`` judges a reply channel, ``store`` a store of captures."""

STRENGTHS = ("shapes", "core", "full")
"""Profiles of capture adapters, weak to strong: each requires all that the one before does."""


def satisfies(held: str, wanted: str) -> bool:
    """Return whether having passed profile ``held`` is enough where ``wanted`` is demanded."""
    if held in STRENGTHS and wanted in STRENGTHS:
        return STRENGTHS.index(held) >= STRENGTHS.index(wanted)
    return held == wanted


def stronger(one: str, other: str) -> str:
    """Return the stronger of two profiles of capture adapters."""
    return max(one, other, key=STRENGTHS.index)


def clauses_of(profile: str) -> tuple[str, ...]:
    """Return the clause ids of a profile; of one that is unknown here, all there are."""
    return PROFILES.get(profile, tuple(CLAUSES))

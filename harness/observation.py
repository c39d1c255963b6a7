"""One observation of a capture path: every capture that the clauses judge, and the references.

The engine is driven once; each clause is then a judgement over the same observation. That keeps a
live run short, and lets a mutant be judged by exactly the code that judges the real thing. What
needs an engine with other settings is a scene: see ``truetap.harness.scenes``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from truetap.harness import contract, verifier
from truetap.harness.adapter import Session
from truetap.harness.errors import CouldNotRun, NotRecorded, TruetapError, UsageError
from truetap.harness.model import CaptureBatch, CaptureRequest, EngineSpec, Environment
from truetap.harness.reference import Reference, ReferenceStates

LENGTHS = (1, 2, 33, 97, 150, 64, 12, 63, 128, 129, 7, 65)
"""Prompt lengths of the core workload: one token, both sides of a cache block and of a chunk, and
twelve in all, so that request ids sorted as text come back in another order."""
ALONE = (0, 3, 8, -2)
"""Which of the core workload's prompts are captured alone too."""
SAMPLED_TOKENS = 16
"""How many tokens are generated to see whether capture changes them."""


@dataclass(frozen=True)
class Refusal:
    """An error in place of captures."""

    sentence: str
    loud: bool
    """True if the capture path itself refused (``UsageError``); False if something broke."""
    could_not_run: bool = False
    """True if there was no engine to ask (``CouldNotRun``), which is neither yes nor no."""

    @classmethod
    def of(cls, error: Exception) -> Refusal:
        """Return what an error means in place of captures."""
        if not isinstance(error, TruetapError):
            return cls(f"{type(error).__name__}: {error}", loud=False)
        return cls(str(error), isinstance(error, UsageError), isinstance(error, CouldNotRun))


Answer = CaptureBatch | Refusal


@dataclass(frozen=True)
class Scene:
    """What one engine with other settings gave."""

    spec: EngineSpec
    requests: tuple[CaptureRequest, ...]
    together: Answer
    """All requests in one call."""
    alone: Mapping[str, Answer]
    """Some of them again, each alone, by key."""
    references: Mapping[str, ReferenceStates]
    """Of the tokens that came back, by key."""


NOTHING = CaptureBatch((), "")


@dataclass(frozen=True)
class Observation:
    """What was seen of one capture path."""

    spec: EngineSpec
    environment: Environment
    hidden_size: int
    num_blocks: int
    requests: tuple[CaptureRequest, ...]
    before: Answer
    """A call without requests, made before any other."""
    batch: CaptureBatch
    """All requests in one call."""
    singles: dict[str, CaptureBatch]
    """Some of the requests again, each alone, by key; the prefix cache is warm by then."""
    warm_requests: tuple[CaptureRequest, ...] = ()
    warm: CaptureBatch = NOTHING
    """In one call: prompts that are in the prefix cache, and one that begins like one of them."""
    reordered: CaptureBatch = NOTHING
    """All requests once more, in another order."""
    limits: Mapping[int, Answer] = field(default_factory=dict)
    """Prompts at and past the longest that must be captured, by length: the longest core prompt
    and what follows it."""
    afterwards: Answer = NOTHING
    """The fourth request again, after all that."""
    logprobs: dict[str, list[float] | None] = field(default_factory=dict)
    """The engine's own prompt log-probabilities of some requests."""
    references: dict[str, ReferenceStates] = field(default_factory=dict)
    reference: Reference | None = None
    """None where nothing is judged by value: in profile ``shapes``, which sees only what stands
    before ``warm_requests``."""
    log: str | None = None
    """What the engine's processes wrote, if the session keeps it."""
    sampled: Answer | None = None
    """Some requests again, with ``SAMPLED_TOKENS`` generated tokens; full profile only."""
    scenes: Mapping[str, Scene] = field(default_factory=dict)
    """By name, see ``truetap.harness.scenes``; full profile only."""
    session: Session | None = None
    """The session itself, still open: for a clause that draws its own batches."""
    profile: str = "core"


def core_workload(model: Path, max_model_len: int, *, seed: int = 0) -> list[CaptureRequest]:
    """Return the prompts of the core profile: real text if the verifier has a tokenizer.

    Two prompts share a long prefix and one is sent twice, so that both kinds of prefix-cache hit
    occur; the longest has ``max_model_len - 2`` tokens, up to 300.
    """
    longest = min(300, max_model_len - 2)
    lengths = [min(length, longest) for length in LENGTHS]
    stream = token_stream(model, sum(lengths) + longest, seed)
    prompts, start = [], 0
    for length in [*lengths, longest]:
        prompts.append(tuple(stream[start : start + length]))
        start += length
    prompts.append(prompts[-1][: longest - 5] + prompts[3][:5])
    prompts.append(prompts[3])
    return [CaptureRequest(f"prompt-{i}", ids) for i, ids in enumerate(prompts)]


def observe(
    session: Session,
    spec: EngineSpec,
    reference: Reference | None,
    references: dict[str, ReferenceStates],
    say: Callable[[str], None] = lambda _: None,
    *,
    profile: str = "core",
) -> Observation:
    """Drive ``session`` through the workload of a profile, scenes excepted.

    ``references`` is filled as needed and can be shared between observations of one verifier.
    Without a ``reference`` only that is seen which profile ``shapes`` judges.
    """
    facts = verifier.describe(Path(spec.model))
    before = answered(partial(session.capture, []))
    requests = core_workload(Path(spec.model), spec.max_model_len)
    say(f"capturing {len(requests)} prompts in one batch")
    batch = session.capture(requests)
    alone = [requests[i] for i in ALONE]
    then = ", then all in another order" if reference is not None else ""
    say(f"capturing {len(alone)} of them alone{then}")
    singles = {request.key: session.capture([request]) for request in alone}
    seen = Observation(
        spec=spec,
        environment=session.environment(),
        hidden_size=facts.hidden_size,
        num_blocks=facts.num_blocks,
        requests=tuple(requests),
        before=before,
        batch=batch,
        singles=singles,
        session=session,
        profile=profile,
    )
    if reference is None:  # nothing will be judged by value: the rest is not asked for
        return seen
    warm_requests = _warm(requests)
    warm = session.capture(warm_requests)
    reordered = session.capture(_shuffled(requests))
    say("asking the engine for prompt log-probabilities")
    logprobs = {
        request.key: session.prompt_logprobs(request.token_ids)
        for request in (requests[3], requests[4])
    }
    sampled: Answer | None = None
    if profile == "full":
        say(f"generating {SAMPLED_TOKENS} tokens for {len(generating(requests))} prompts")
        sampled = answered(partial(session.capture, generating(requests)))
    say("capturing prompts at the engine's limit")
    limits = {
        len(request.token_ids): answered(partial(session.capture, [request]))
        for request in _at_the_limit(spec, requests)
    }
    afterwards = answered(partial(session.capture, [requests[3]]))
    log = getattr(session, "log", None)
    say("running the reference")
    wanted = {request.key: request.token_ids for request in [*requests, *warm_requests]}
    fresh = [key for key in wanted if key not in references]
    # All at once: a reference that holds one block at a time reads its checkpoint for each call.
    found = reference.states_of([wanted[key] for key in fresh])
    references.update(zip(fresh, found, strict=True))
    return replace(
        seen,
        warm_requests=tuple(warm_requests),
        warm=warm,
        reordered=reordered,
        limits=limits,
        afterwards=afterwards,
        logprobs=logprobs,
        references=references,
        reference=reference,
        log=log.read_text(errors="replace") if log is not None and log.is_file() else None,
        sampled=sampled,
    )


def answered(call: Callable[[], CaptureBatch]) -> Answer:
    """Return the captures, or the error that came in their place, whatever its class.

    A recording that lacks the answer is neither: ``NotRecorded`` is raised.
    """
    try:
        return call()
    except NotRecorded:
        raise
    except Exception as error:
        return Refusal.of(error)


def generating(requests: Sequence[CaptureRequest]) -> list[CaptureRequest]:
    """Return the requests that also generate, where capture must not change what is generated."""
    return [replace(request, max_tokens=SAMPLED_TOKENS) for request in requests[2:8]]


def _warm(requests: Sequence[CaptureRequest]) -> list[CaptureRequest]:
    """Return cached prompts, one that begins like another, and a new one that does: in one step."""
    long, alike = requests[-3], requests[-2]
    shared = len(long.token_ids) - len(long.token_ids) // 8
    new = CaptureRequest("prompt-warm", long.token_ids[:shared] + requests[4].token_ids[:20])
    return [long, requests[4], alike, new]


def _shuffled(requests: Sequence[CaptureRequest]) -> list[CaptureRequest]:
    order = np.random.default_rng(1).permutation(len(requests))
    return [requests[i] for i in order]


def _at_the_limit(spec: EngineSpec, requests: Sequence[CaptureRequest]) -> list[CaptureRequest]:
    """Return prompts that begin like the longest core prompt, around the engine's limit."""
    longest = spec.max_model_len - 2
    begin = requests[-3].token_ids
    stream = token_stream(Path(spec.model), longest + 3, seed=1)
    return [
        CaptureRequest(f"limit-{length}", (begin + tuple(stream))[:length])
        for length in range(longest, longest + 4)
    ]


def token_stream(model: Path, count: int, seed: int) -> Sequence[int]:
    """Return ``count`` or more token ids: truetap's own prose, or random without a tokenizer."""
    facts = verifier.describe(model)
    if not (model / "tokenizer.json").is_file():
        ids: list[int] = np.random.default_rng(seed).integers(0, facts.vocab_size, count).tolist()
        return ids
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise CouldNotRun(
            f"the verifier's tokenizer cannot be read: {error}",
            remedy="pip install 'truetap[reference]'",
        ) from error
    clauses = (contract.CLAUSES[clause_id] for clause_id in contract.PROFILES["core"])
    prose = "\n\n".join(f"{clause.title}. {clause.reason}" for clause in clauses)
    tokens: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(prose).ids
    start = seed * 97 % len(tokens)  # another seed begins elsewhere in the text
    return (tokens * (count // len(tokens) + 2))[start : start + count]

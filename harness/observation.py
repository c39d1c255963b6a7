"""One observation of a capture path: every capture that the core clauses judge, and the references.

The engine is driven once; each clause is then a judgement over the same observation. That keeps a
live run short, and lets a mutant be judged by exactly the code that judges the real thing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from truetap.harness import contract, verifier
from truetap.harness.adapter import Session
from truetap.harness.model import CaptureBatch, CaptureRequest, EngineSpec
from truetap.harness.reference import Reference, ReferenceStates

LENGTHS = (1, 2, 33, 97, 150, 64, 12, 41, 128, 129, 7, 23)
"""Prompt lengths of the core workload: one token, both sides of a cache block, and twelve in all,
so that request ids sorted as text come back in another order."""


@dataclass(frozen=True)
class Observation:
    """What was seen of one session."""

    spec: EngineSpec
    hidden_size: int
    requests: tuple[CaptureRequest, ...]
    batch: CaptureBatch
    """All requests in one call."""
    singles: dict[str, CaptureBatch]
    """Some of the requests again, each alone, by key; the prefix cache is warm by then."""
    logprobs: dict[str, list[float] | None]
    """The engine's own prompt log-probabilities of some requests."""
    references: dict[str, ReferenceStates]
    reference: Reference


def core_workload(model: Path, max_model_len: int, *, seed: int = 0) -> list[CaptureRequest]:
    """Return the prompts of the core profile: real text if the verifier has a tokenizer.

    Two prompts share a long prefix and one is sent twice, so that both kinds of prefix-cache hit
    occur; the longest has ``max_model_len - 2`` tokens, up to 300.
    """
    longest = min(300, max_model_len - 2)
    lengths = [min(length, longest) for length in LENGTHS]
    stream = _token_stream(model, sum(lengths) + longest, seed)
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
    reference: Reference,
    references: dict[str, ReferenceStates],
    say: Callable[[str], None] = lambda _: None,
) -> Observation:
    """Drive ``session`` through the core workload.

    ``references`` is filled as needed and can be shared between observations of one verifier.
    """
    requests = core_workload(Path(spec.model), spec.max_model_len)
    say(f"capturing {len(requests)} prompts in one batch")
    batch = session.capture(requests)
    alone = [requests[i] for i in (0, 3, 8, len(requests) - 2)]
    say(f"capturing {len(alone)} of them alone")
    singles = {request.key: session.capture([request]) for request in alone}
    say("asking the engine for prompt log-probabilities")
    logprobs = {
        request.key: session.prompt_logprobs(request.token_ids)
        for request in (requests[3], requests[4])
    }
    say("running the reference")
    for request in requests:
        if request.key not in references:
            references[request.key] = reference.states(request.token_ids)
    return Observation(
        spec=spec,
        hidden_size=verifier.describe(Path(spec.model)).hidden_size,
        requests=tuple(requests),
        batch=batch,
        singles=singles,
        logprobs=logprobs,
        references=references,
        reference=reference,
    )


def _token_stream(model: Path, count: int, seed: int) -> Sequence[int]:
    """Return ``count`` or more token ids: truetap's own prose, or random without a tokenizer."""
    facts = verifier.describe(model)
    if not (model / "tokenizer.json").is_file():
        ids: list[int] = np.random.default_rng(seed).integers(0, facts.vocab_size, count).tolist()
        return ids
    from tokenizers import Tokenizer

    clauses = (contract.CLAUSES[clause_id] for clause_id in contract.PROFILES["core"])
    prose = "\n\n".join(f"{clause.title}. {clause.reason}" for clause in clauses)
    tokens: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(prose).ids
    return (tokens * (count // len(tokens) + 1))[:count]

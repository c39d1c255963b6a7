"""Scenes: the same prompts through engines with other settings.

Each scene opens an engine of its own, because what it is about cannot be changed while one runs:
the token budget of a step, the size of the KV cache, the boundaries, the number of ranks. The
clauses of the full profile judge them against the references and against the base session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from truetap.harness.adapter import Session
from truetap.harness.errors import CouldNotRun, UsageError
from truetap.harness.model import CaptureRequest, EngineSpec
from truetap.harness.observation import (
    Observation,
    Refusal,
    Scene,
    answered,
    generating,
)
from truetap.harness.reference import ReferenceStates

CHUNK = 64
"""Token budget of a step in the chunked scene; the core workload has prompts around it."""
Open = Callable[[EngineSpec, str], Session]
"""Opens a session with these settings; the text names the scene."""


@dataclass(frozen=True)
class Staging:
    """How a scene is made from what the base session was given."""

    says: str
    clauses: tuple[str, ...]
    """Clauses that need it."""
    settings: Callable[[Observation], EngineSpec]
    requests: Callable[[Observation, EngineSpec], Sequence[CaptureRequest]]
    alone: Callable[[CaptureRequest], bool] = lambda _: False
    """Which of the requests are captured alone too."""


def _few(seen: Observation, _spec: EngineSpec) -> Sequence[CaptureRequest]:
    return [seen.requests[i] for i in (0, 2, 4, 5, 8)]


def _all(seen: Observation, _spec: EngineSpec) -> Sequence[CaptureRequest]:
    return seen.requests


def _with_output(seen: Observation, _spec: EngineSpec) -> Sequence[CaptureRequest]:
    return [
        replace(request, max_tokens=count)
        for request, count in zip(_few(seen, _spec), (5, 1, 2, 16, 9), strict=True)
    ]


def _tiny_cache(seen: Observation) -> EngineSpec:
    """Return settings under which two prompts fit the KV cache and their continuations do not."""
    length = min(256, seen.spec.max_model_len)
    block = int(seen.environment.binding.get("block_size") or 16)
    per_sequence = -(-length // block)
    return replace(
        seen.spec,
        max_model_len=length,
        kv_cache_blocks=2 * per_sequence + 2,
        max_num_seqs=8,
    )


def _until_preempted(seen: Observation, spec: EngineSpec) -> Sequence[CaptureRequest]:
    """Return prompts of 100 tokens, each to be continued to the engine's limit."""
    long = [request for request in seen.requests if len(request.token_ids) >= 100]
    return [
        CaptureRequest(request.key, request.token_ids[:100], spec.max_model_len - 2 - 100)
        for request in long
    ]


def _another_order(seen: Observation) -> tuple[int, ...]:
    n = seen.num_blocks
    return (n, 2, n - 1, 2, 1)


SCENES: dict[str, Staging] = {
    "chunked": Staging(
        f"steps of {CHUNK} tokens, so that prompts are prefilled in chunks",
        ("ROWS-004",),
        lambda seen: replace(
            seen.spec, max_num_batched_tokens=CHUNK, max_num_seqs=min(CHUNK, seen.spec.max_num_seqs)
        ),
        _all,
        lambda request: CHUNK - 2 < len(request.token_ids) <= 2 * CHUNK + 1,
    ),
    "preempted": Staging(
        "a KV cache too small for what is running in it",
        ("ROWS-007",),
        _tiny_cache,
        _until_preempted,
    ),
    "output": Staging(
        "generated tokens captured too",
        ("ROWS-008",),
        lambda seen: replace(seen.spec, include_output=True),
        _with_output,
    ),
    "every-boundary": Staging(
        "all boundaries from 1 to n",
        ("LAYERS-005", "LAYERS-008"),
        lambda seen: replace(seen.spec, boundaries=tuple(range(1, seen.num_blocks + 1))),
        _few,
    ),
    "embeddings": Staging(
        "boundary 0",
        ("LAYERS-006",),
        lambda seen: replace(seen.spec, boundaries=(0, seen.num_blocks)),
        _few,
    ),
    "another-order": Staging(
        "boundaries neither ascending nor distinct",
        ("LAYERS-007",),
        lambda seen: replace(seen.spec, boundaries=_another_order(seen)),
        _few,
    ),
    "other-ranks": Staging(
        "tensor parallel over two ranks, or over one",
        ("PARALLEL-001",),
        lambda seen: replace(
            seen.spec, tensor_parallel_size=1 if seen.spec.tensor_parallel_size > 1 else 2
        ),
        _all,
    ),
    "without-capture": Staging(
        "the same engine without capture",
        ("ENGINE-001",),
        lambda seen: replace(seen.spec, boundaries=()),
        lambda seen, _spec: generating(seen.requests),
    ),
    "compiled": Staging(
        "compiled instead of eager, or eager instead of compiled",
        ("ENGINE-002",),
        lambda seen: replace(seen.spec, enforce_eager=not seen.spec.enforce_eager),
        _few,
    ),
}
"""All scenes by name."""


def play(
    seen: Observation,
    open_session: Open,
    clauses: Sequence[str],
    say: Callable[[str], None] = lambda _: None,
) -> Observation:
    """Return ``seen`` with the scenes that the given clauses need."""
    played: dict[str, Scene] = {}
    for name, staging in SCENES.items():
        if set(staging.clauses) & set(clauses):
            say(f"another engine: {staging.says}")
            played[name] = _play(staging, name, seen, open_session)
    return replace(seen, scenes=_with_references(seen, played))


def _play(staging: Staging, name: str, seen: Observation, open_session: Open) -> Scene:
    spec = staging.settings(seen)
    requests = tuple(staging.requests(seen, spec))
    try:
        session = open_session(spec, name)
    except (UsageError, CouldNotRun) as error:
        return Scene(spec, requests, Refusal.of(error), {}, {})
    with closing(session):
        together = answered(partial(session.capture, requests))
        alone = {
            request.key: answered(partial(session.capture, [request]))
            for request in requests
            if staging.alone(request)
        }
    return Scene(spec, requests, together, alone, {})


def _with_references(seen: Observation, played: Mapping[str, Scene]) -> dict[str, Scene]:
    """Return the scenes with references of the tokens that have rows.

    Where the base session had the same tokens its reference is taken; the others are computed in
    one call for all scenes, since for some references each call is a pass over the checkpoint.
    """
    assert seen.reference is not None  # a profile that has scenes judges by value
    known = {request.key: request.token_ids for request in seen.requests}
    tokens = {name: _tokens_with_rows(scene) for name, scene in played.items()}
    others = {
        (name, key): ids
        for name, scene_tokens in tokens.items()
        for key, ids in scene_tokens.items()
        if known.get(key) != ids
    }
    computed = dict(zip(others, seen.reference.states_of(list(others.values())), strict=True))

    def of(name: str, key: str) -> ReferenceStates:
        return computed[name, key] if (name, key) in computed else seen.references[key]

    return {
        name: replace(scene, references={key: of(name, key) for key in tokens[name]})
        for name, scene in played.items()
    }


def _tokens_with_rows(scene: Scene) -> dict[str, tuple[int, ...]]:
    """Return the tokens of each request that must have come back with rows."""
    if isinstance(scene.together, Refusal) or not scene.spec.boundaries:
        return {}
    generated = {capture.key: capture.generated for capture in scene.together.captures}
    found = {}
    for request in scene.requests:
        ids = request.token_ids
        if scene.spec.include_output:
            ids = (ids + generated.get(request.key, ()))[: len(ids) + request.max_tokens - 1]
        found[request.key] = ids
    return found

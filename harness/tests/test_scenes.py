"""Scenes: what is opened, what is asked, and what an engine that cannot be had means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from truetap.conformance import judge
from truetap.conformance.same import captured
from truetap.harness import contract, scenes
from truetap.harness.errors import CheckFailed, CouldNotRun, UsageError
from truetap.harness.model import (
    Capture,
    CaptureBatch,
    CaptureRequest,
    EngineSpec,
    Environment,
)
from truetap.harness.observation import LENGTHS, Observation, Refusal
from truetap.harness.pytest_plugin import Refused

SPEC = EngineSpec("verifier", (2, 6, 9, 12))


def base(**facts: Any) -> Observation:
    """Return as much of an observation as scenes look at."""
    lengths = (*LENGTHS, 300, 300, 97)
    requests = tuple(CaptureRequest(f"prompt-{i}", (7,) * n) for i, n in enumerate(lengths))
    known = {
        "spec": SPEC,
        "num_blocks": 12,
        "requests": requests,
        "environment": Environment(facts, {}),
        "references": dict.fromkeys((request.key for request in requests), "known"),
        "reference": SimpleNamespace(
            states_of=lambda prompts: [f"computed {len(ids)}" for ids in prompts]
        ),
    }
    rest = {field.name: None for field in fields(Observation) if field.default is MISSING}
    rest.pop("scenes")
    return Observation(**(rest | known))


class Session:
    """Answers every call with nothing, or with an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[list[CaptureRequest]] = []
        self.closed = False
        self._error = error

    def capture(self, requests: Any) -> CaptureBatch:
        self.asked.append(list(requests))
        if self._error:
            raise self._error
        return CaptureBatch((), "nonce")

    def close(self) -> None:
        self.closed = True


def test_every_clause_that_needs_other_engines_has_a_scene_or_is_drawn() -> None:
    needed = {clause for staging in scenes.SCENES.values() for clause in staging.clauses}
    assert needed | {"ROWS-010"} == set(contract.PROFILES["full"]) - set(contract.PROFILES["core"])


def test_each_scene_changes_what_it_is_about_and_nothing_else() -> None:
    changed = {}
    for name, staging in scenes.SCENES.items():
        spec = staging.settings(base())
        changed[name] = {k for k, v in vars(spec).items() if v != getattr(SPEC, k)}
    assert changed == {
        "chunked": {"max_num_batched_tokens"},
        "preempted": {"kv_cache_blocks", "max_model_len", "max_num_seqs"},
        "output": {"include_output"},
        "every-boundary": {"boundaries"},
        "embeddings": {"boundaries"},
        "another-order": {"boundaries"},
        "other-ranks": {"tensor_parallel_size"},
        "without-capture": {"boundaries"},
        "compiled": {"enforce_eager"},
    }


@pytest.mark.parametrize("block", [16, 128, None])
def test_two_prompts_fit_the_tiny_cache_and_their_continuations_do_not(block: int | None) -> None:
    seen = base(**({} if block is None else {"block_size": block}))
    staging = scenes.SCENES["preempted"]
    spec = staging.settings(seen)
    requests = staging.requests(seen, spec)
    size = block or 16
    assert spec.kv_cache_blocks is not None
    assert len(requests) >= 4
    for request in requests:
        whole = len(request.token_ids) + request.max_tokens
        assert whole <= spec.max_model_len - 2
        assert 2 * -(-len(request.token_ids) // size) < spec.kv_cache_blocks
    everything = sum(-(-(len(r.token_ids) + r.max_tokens) // size) for r in requests)
    assert everything > spec.kv_cache_blocks


def test_prompts_around_the_budget_are_captured_alone_too() -> None:
    session = Session()
    seen = scenes.play(base(), lambda _spec, _name: session, ["ROWS-004"])  # type: ignore[arg-type]
    together, *alone = session.asked
    assert len(together) == 15
    assert [len(one.token_ids) for (one,) in alone] == [97, 64, 63, 128, 129, 65, 97]
    assert session.closed
    assert list(seen.scenes) == ["chunked"]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (UsageError("this engine is never compiled"), Refused),
        (CouldNotRun("no compiler"), CouldNotRun),
        (CheckFailed("a row is missing"), pytest.fail.Exception),
        (IndexError("index out of range in self"), pytest.fail.Exception),
    ],
)
def test_what_an_error_in_place_of_captures_means(
    error: Exception, outcome: type[BaseException]
) -> None:
    session = Session(error)
    seen = scenes.play(base(), lambda _spec, _name: session, ["ENGINE-002"])  # type: ignore[arg-type]
    # Refused is a kind of skip: raised past ``raises`` it would skip this test, not fail it.
    found = raised_by(lambda: captured(seen.scenes["compiled"].together, refusable=True))
    assert (type(found), str(error) in str(found)) == (outcome, True)
    may_not = raised_by(lambda: captured(seen.scenes["compiled"].together))
    assert type(may_not) in (CouldNotRun, pytest.fail.Exception)


def raised_by(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


def test_generated_tokens_have_references_too() -> None:
    class Generating(Session):
        def capture(self, requests: Any) -> CaptureBatch:
            none = np.zeros((0, 0, 0), dtype=np.float32)
            made = [
                Capture(r.key, (), (), none, "bfloat16", generated=(1,) * r.max_tokens)
                for r in requests
            ]
            return CaptureBatch(tuple(made), "nonce")

    seen = scenes.play(base(), lambda _spec, _name: Generating(), ["ROWS-008"])  # type: ignore[arg-type]
    output = seen.scenes["output"]
    rows = {r.key: len(r.token_ids) + r.max_tokens - 1 for r in output.requests}
    computed = {key: f"computed {count}" for key, count in rows.items()}
    assert output.references == computed | {"prompt-2": "known"}  # one token: none has a row


def test_a_session_that_cannot_be_opened_is_told_like_one_that_cannot_answer() -> None:
    def opens(_spec: EngineSpec, _name: str) -> Any:
        raise UsageError("one rank only")

    seen = scenes.play(base(), opens, ["PARALLEL-001"])
    assert seen.scenes["other-ranks"].together == Refusal("one rank only", loud=True)


def test_references_are_of_the_tokens_that_have_rows() -> None:
    """Of generated ones too, if asked for; the base session's where the prompt is the same."""
    session = Session()
    seen = scenes.play(base(), lambda _spec, _name: session, ["ROWS-008", "LAYERS-005"])  # type: ignore[arg-type]
    assert set(seen.scenes["every-boundary"].references.values()) == {"known"}
    output = seen.scenes["output"]
    assert {r.key: r.max_tokens for r in output.requests} == {
        "prompt-0": 5,
        "prompt-2": 1,
        "prompt-4": 2,
        "prompt-5": 16,
        "prompt-8": 9,
    }


def test_a_scene_never_played_is_no_pass() -> None:
    (check,) = judge.checks()["ROWS-004"]
    with pytest.raises(AssertionError, match="the scene 'chunked' was never played"):
        check(base(), lambda _: None)


def test_a_scene_without_capture_needs_no_reference() -> None:
    seen = scenes.play(base(), lambda _spec, _name: Session(), ["ENGINE-001"])  # type: ignore[arg-type]
    assert seen.scenes["without-capture"].references == {}
    assert seen.scenes["without-capture"].spec == replace(SPEC, boundaries=())

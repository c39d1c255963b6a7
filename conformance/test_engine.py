"""ENGINE: capture neither disturbs the engine nor is disturbed by it."""

from __future__ import annotations

import pytest

from truetap.conformance.same import by_value, captured, first_call, same_rows, scene, whole
from truetap.harness.observation import Observation, Refusal
from truetap.harness.pytest_plugin import Saw

NEAR_TIE = 4.0
"""By how many times the dtype's typical error two tokens' log-probabilities may differ for either
to count as the most likely."""


@pytest.mark.clause("ENGINE-001")
def test_generated_tokens_are_unchanged(staged: Observation, saw: Saw) -> None:
    """Greedy tokens with and without capture; they may part only where two are equally likely."""
    plain = scene(staged, "without-capture")
    without = {c.key: c.generated for c in captured(plain.together, refusable=True).captures}
    captures = {c.key: c.generated for c in captured(staged.sampled, refusable=True).captures}
    ties = 0
    for request in plain.requests:
        ours, theirs = captures.get(request.key, ()), without.get(request.key, ())
        for said in (ours, theirs):
            assert len(said) == request.max_tokens, (
                f"request {request.key!r}: {len(said)} of {request.max_tokens} tokens are named"
            )
        if ours == theirs:
            continue
        at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        sequence = request.token_ids + ours[:at]
        gap, noise = staged.reference.preference(sequence, ours[at], theirs[at])
        assert gap <= NEAR_TIE * noise, (
            f"request {request.key!r}: with capture token {at + 1} is {ours[at]}, without "
            f"{theirs[at]}, {gap:.2f} nats apart ({gap / max(noise, 1e-9):.0f}x noise)"
        )
        ties += 1
    count = sum(request.max_tokens for request in plain.requests)
    saw(f"{count} tokens of {len(plain.requests)} prompts, {ties} prompts part at a tie")


@pytest.mark.clause("ENGINE-002")
def test_compiled_equals_eager(staged: Observation, saw: Saw) -> None:
    """The same prompts through a compiled and an eager engine."""
    other = scene(staged, "compiled")
    tokens = {request.key: len(request.token_ids) for request in other.requests}
    how = "eager" if other.spec.enforce_eager else "compiled"
    found = whole(captured(other.together, refusable=True), tokens, how)
    measured = by_value(found.values(), other.references, staged.hidden_size)
    base = first_call(staged)
    worst = max(
        same_rows(capture, base[key], staged.references[key], "compiled and eager")
        for key, capture in found.items()
    )
    saw(f"{how}, worst row {worst:.1f}x noise; {measured}")


@pytest.mark.clause("ENGINE-003")
def test_nothing_before_the_first_request(observation: Observation, saw: Saw) -> None:
    """A call without requests, before any other, gives nothing."""
    before = observation.before
    if isinstance(before, Refusal):
        assert before.loud, f"a call without requests broke the session: {before.sentence}"
        saw(f"a call without requests is refused: {before.sentence}")
        return
    rows = sum(len(capture.states) for capture in before.captures)
    assert not before.captures, (
        f"before the first request there are {len(before.captures)} captures with {rows} rows"
    )
    saw("no captures")


@pytest.mark.clause("ENGINE-004")
def test_workers_are_heard(observation: Observation, saw: Saw) -> None:
    """The session's log has a line of each rank for a call, told by the call's nonce."""
    assert observation.log is not None, "the session keeps no log"
    nonce, ranks = observation.batch.nonce, observation.batch.world_size
    lines = [line for line in observation.log.splitlines() if nonce in line]
    assert len(lines) >= ranks, (
        f"{len(lines)} of {ranks} ranks left a line about the call {nonce} in the log"
    )
    saw(lines[0].strip())

"""ROWS: which rows come back, and whose they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, note

from truetap.conformance import strategies
from truetap.conformance.same import by_value, captured, first_call, same_rows, scene, whole
from truetap.harness.model import Capture, CaptureRequest
from truetap.harness.observation import Observation, Refusal
from truetap.harness.pytest_plugin import Saw


@pytest.mark.clause("ROWS-001")
def test_rows_equal_tokens(observation: Observation, saw: Saw) -> None:
    """Each request comes back once, with one row a prompt token."""
    captured = [capture.key for capture in observation.batch.captures]
    for request in observation.requests:
        times = captured.count(request.key)
        assert times == 1, f"request {request.key!r} came back {times} times"
    tokens = {request.key: len(request.token_ids) for request in observation.requests}
    for capture in observation.batch.captures:
        rows = len(capture.states)
        assert rows == tokens[capture.key], (
            f"request {capture.key!r} has {rows} rows for {tokens[capture.key]} tokens"
        )
    saw(f"{sum(tokens.values())} rows for {len(tokens)} requests")


@pytest.mark.clause("ROWS-002")
def test_token_ids_echoed_in_order(observation: Observation, saw: Saw) -> None:
    """Result i carries the key and the token ids of request i."""
    assert observation.batch.captures, "nothing came back"
    for index, (request, capture) in enumerate(
        zip(observation.requests, observation.batch.captures, strict=False)
    ):
        assert capture.key == request.key, (
            f"result {index} is for {capture.key!r}, request {index} was {request.key!r}"
        )
        assert capture.token_ids == request.token_ids, (
            f"result {index} ({request.key!r}) carries other token ids than were sent"
        )
    saw(f"{len(observation.requests)} results in the order asked")


@pytest.mark.clause("ROWS-003")
def test_batched_equals_single(observation: Observation, saw: Saw) -> None:
    """A request captured alone has the rows that it has in the batch.

    Kernels are chosen by shape, so equality is within a few times the row's own noise floor.
    """
    batched = {capture.key: capture for capture in observation.batch.captures}
    worst = 0.0
    for key, batch in observation.singles.items():
        came = len(batch.captures)
        assert came == 1, f"request {key!r} came back {came} times when alone"
        (single,) = batch.captures
        assert key in batched, f"request {key!r} is not in the batch"
        together = batched[key]
        assert single.states.shape == together.states.shape, (
            f"request {key!r} has shape {single.states.shape} alone and "
            f"{together.states.shape} in a batch"
        )
        tokens = len(single.token_ids)
        assert len(single.states) == tokens, (
            f"request {key!r} has {len(single.states)} rows for {tokens} tokens when alone"
        )
        worst = max(
            worst,
            same_rows(single, together, observation.references[key], "alone and in a batch"),
        )
    saw(f"{len(observation.singles)} requests alone and batched, worst row {worst:.1f}x noise")


@pytest.mark.clause("ROWS-004")
def test_chunked_equals_at_once(staged: Observation, saw: Saw) -> None:
    """Prompts around the step's budget, and several times it, alone and together."""
    chunked = scene(staged, "chunked")
    tokens = {request.key: len(request.token_ids) for request in chunked.requests}
    budget = chunked.spec.max_num_batched_tokens
    at_once = first_call(staged)
    found = whole(captured(chunked.together, refusable=True), tokens, "in one batch")
    captures = [("in one batch", capture) for capture in found.values()]
    for key, answer in chunked.alone.items():
        alone = whole(captured(answer, refusable=True), {key: tokens[key]}, "alone")
        captures += [("alone", capture) for capture in alone.values()]
    worst = 0.0
    for how, capture in captures:
        what = f"{tokens[capture.key]} tokens in steps of {budget}, {how}, and at once"
        reference = staged.references[capture.key]
        worst = max(worst, same_rows(capture, at_once[capture.key], reference, what))
    saw(f"{len(captures)} captures in steps of {budget} tokens, worst row {worst:.1f}x noise")


@pytest.mark.clause("ROWS-005")
def test_cached_prefix_equals_cold(observation: Observation, saw: Saw) -> None:
    """Prompts that are all in the cache, and one that shares a beginning, in one call."""
    tokens = {request.key: len(request.token_ids) for request in observation.warm_requests}
    found = whole(observation.warm, tokens, "with a warm prefix cache")
    cold = first_call(observation)
    worst = 0.0
    for key, capture in found.items():
        if key in cold:
            reference = observation.references[key]
            worst = max(worst, same_rows(capture, cold[key], reference, "warm and cold"))
    by_value(found.values(), observation.references, observation.hidden_size)
    saw(f"{sum(tokens.values())} rows of {len(tokens)} prompts, worst row {worst:.1f}x noise")


@pytest.mark.clause("ROWS-006")
def test_again_in_any_order(observation: Observation, saw: Saw) -> None:
    """The same requests once more on the same session, shuffled."""
    tokens = {request.key: len(request.token_ids) for request in observation.requests}
    first = first_call(observation)
    again = whole(observation.reordered, tokens, "in a second call, in another order")
    worst = 0.0
    for key, capture in again.items():
        reference = observation.references[key]
        what = "in the first call and in the second, in another order"
        worst = max(worst, same_rows(capture, first[key], reference, what))
    saw(f"{len(again)} requests in another order, worst row {worst:.1f}x noise")


@pytest.mark.clause("ROWS-007")
def test_preempted_equals_not_preempted(staged: Observation, saw: Saw) -> None:
    """With a KV cache for two sequences, and requests that grow out of it."""
    tight = scene(staged, "preempted")
    batch = captured(tight.together, refusable=True)
    assert batch.preemptions is not None, "the capture path does not say what was preempted"
    tokens = {request.key: len(request.token_ids) for request in tight.requests}
    found = whole(batch, tokens, f"after {batch.preemptions} preemptions")
    measured = by_value(found.values(), tight.references, staged.hidden_size)
    if not batch.preemptions:
        raise RuntimeError(
            f"{tight.spec.kv_cache_blocks} cache blocks preempted nothing: it was not tested"
        )
    saw(f"{batch.preemptions} preemptions of {len(found)} requests; {measured}")


@pytest.mark.clause("ROWS-008")
def test_output_rows(staged: Observation, saw: Saw) -> None:
    """Prompt + generated - 1 rows, with the prompt's ids and all generated ones but the last."""
    output = scene(staged, "output")
    batch = captured(output.together, refusable=True)
    captures = {capture.key: capture for capture in batch.captures}
    for request in output.requests:
        assert request.key in captures, f"request {request.key!r} did not come back"
        capture = captures[request.key]
        said = capture.generated
        assert len(said) == request.max_tokens, (
            f"request {request.key!r}: {len(said)} tokens are named as generated, "
            f"{request.max_tokens} were asked for"
        )
        ids = (request.token_ids + said)[:-1]
        assert len(capture.states) == len(ids), (
            f"request {request.key!r} has {len(capture.states)} rows for {len(request.token_ids)} "
            f"prompt tokens and {len(said)} generated ones, not {len(ids)}"
        )
        assert capture.token_ids == ids, f"request {request.key!r} carries ids of other tokens"
    saw(by_value(captures.values(), output.references, staged.hidden_size))


@pytest.mark.clause("ROWS-009")
def test_prompts_at_the_limit(observation: Observation, saw: Saw) -> None:
    """The longest prompt comes whole, one that does not fit is refused; the session lives on."""
    first = first_call(observation)
    begin = first[observation.requests[-3].key]
    reference = observation.references[begin.key]
    longest, *longer = sorted(observation.limits)
    refused = 0
    for length, answer in observation.limits.items():
        if isinstance(answer, Refusal) and answer.loud and length != longest:
            refused += 1
            continue
        assert length <= observation.spec.max_model_len, (
            f"a prompt of {length} tokens was taken where {observation.spec.max_model_len} fit"
        )
        key = f"limit-{length}"
        (capture,) = whole(captured(answer), {key: length}, "at the limit").values()
        shared = min(len(begin.states), length)
        same_rows(_cut(begin, shared), capture, reference, f"{length} tokens and their beginning")
        assert capture.states[-1].any(), f"the last of {length} rows is zero"
    fourth = observation.requests[3]
    tokens = {fourth.key: len(fourth.token_ids)}
    (after,) = whole(captured(observation.afterwards), tokens, "after a refusal").values()
    before = first[fourth.key]
    same_rows(after, before, observation.references[fourth.key], "after a refusal and before")
    saw(f"{longest} tokens captured; of {', '.join(map(str, longer))} {refused} were refused")


@pytest.mark.clause("ROWS-010")
def test_any_batch(observation: Observation, saw: Saw) -> None:
    """Batches as hypothesis draws them; each prompt is how one of the core prompts begins."""
    session = observation.session
    assert session is not None, "the session is closed"
    whole_prompts = [r for r in observation.requests if len(r.token_ids) > 1][:13]
    known = first_call(observation)
    drawn = 0

    @given(strategies.batches([len(request.token_ids) for request in whole_prompts]))
    @example([strategies.Slice(2, 12), strategies.Slice(3, 12)])  # equal length, other content
    @example([strategies.Slice(12, 290), strategies.Slice(12, 290)])
    def holds(batch: list[strategies.Slice]) -> None:
        nonlocal drawn
        drawn += 1
        note("prompts: " + strategies.written(batch))
        requests = [
            CaptureRequest(f"{i}", whole_prompts[one.prompt].token_ids[: one.length])
            for i, one in enumerate(batch)
        ]
        tokens = {request.key: len(request.token_ids) for request in requests}
        found = whole(session.capture(requests), tokens, strategies.written(batch))
        for one, request in zip(batch, requests, strict=True):
            source = whole_prompts[one.prompt].key
            same_rows(
                found[request.key],
                known[source],
                observation.references[source],
                f"in the batch {strategies.written(batch)} and in the first call",
            )

    holds()
    saw(f"{drawn} batches drawn")


def _cut(capture: Capture, rows: int) -> Capture:
    return replace(capture, states=capture.states[:rows])

"""Capture by hooks on a real vLLM: the core profile, chunks, decoding, preemption, dummy runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from truetap.harness import compare, observation
from truetap.harness.adapters import vllm_rpc
from truetap.harness.adapters.vllm_rpc import VllmRpcAdapter, VllmRpcSession
from truetap.harness.engine import Prompt
from truetap.harness.errors import CheckFailed, UsageError
from truetap.harness.extraction import Pool, Progress, ShardOrder
from truetap.harness.model import CaptureRequest, EngineSpec

if TYPE_CHECKING:
    from truetap.harness.reference import Reference

pytestmark = [pytest.mark.live, pytest.mark.torch, pytest.mark.slow]

BOUNDARIES = (0, 1, 6, 11, 12)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    """A twelve-block random Llama; a step's budget is a fifth of the longest prompt."""
    from truetap.harness import random_verifier

    model = random_verifier.tiny_llama(tmp_path_factory.mktemp("verifier") / "tiny-llama")
    return EngineSpec(model=str(model), boundaries=BOUNDARIES, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def reference(spec: EngineSpec) -> Reference:
    from truetap.harness.reference import Reference

    return Reference(Path(spec.model), spec.dtype)


@pytest.fixture(scope="module")
def session(spec: EngineSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmRpcSession]:
    opened = VllmRpcAdapter().open(spec, scratch=tmp_path_factory.mktemp("scratch"))
    with closing(opened):
        yield opened


def taken(session: VllmRpcSession, prompts: Sequence[Sequence[int]], max_tokens: int) -> Any:
    """Return what was written of prompts that are to be continued by so many tokens."""
    requests = [
        CaptureRequest(str(n), tuple(ids), max_tokens=max_tokens) for n, ids in enumerate(prompts)
    ]
    path = session._scratch / "taken.safetensors"
    order = ShardOrder(path, requests, [bytes(len(ids)) for ids in prompts])
    (written,) = session.extract([order], Progress(), Pool())
    return written


def refuse_wrong_values(found: Any, prompts: Sequence[Any], reference: Reference) -> None:
    tensors = found.read_back()
    bounds = tensors["offsets"].tolist()
    by_ids = {ids: reference.states(ids) for ids in set(prompts)}
    references = [by_ids[ids] for ids in prompts]
    for slot, boundary in enumerate(BOUNDARIES):
        states = [
            tensors["states"][start:end, slot].float().numpy() for start, end in pairwise(bounds)
        ]
        reading = compare.read_slot(boundary, states, references)
        assert reading.right, str(reading)


def prompts_of(spec: EngineSpec) -> list[tuple[int, ...]]:
    workload = observation.core_workload(Path(spec.model), spec.max_model_len)
    return [request.token_ids for request in workload]


def test_nothing_is_recorded_before_the_first_request(session: VllmRpcSession) -> None:
    """Of the warm-up, nor of a dummy run, with the last batch in the runner's buffers or none."""
    session._collect("execute_dummy_batch")
    session.capture([CaptureRequest("a", tuple(range(2, 40)))])
    session._collect("execute_dummy_batch")
    report = session._collect("truetap_shards", [], [], 0.0)[0]
    assert (report["others"], report["failed"]) == (0, None)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_core_profile(
    session: VllmRpcSession, spec: EngineSpec, reference: Reference, ranks: int, tmp_path: Path
) -> None:
    from truetap.conformance import judge

    if ranks == 1:
        seen = observation.observe(session, spec, reference, {})
    else:
        spec = replace(spec, tensor_parallel_size=ranks)
        with closing(VllmRpcAdapter().open(spec, scratch=tmp_path)) as wide:
            seen = observation.observe(wide, spec, reference, {})
            assert wide.environment().binding["world_size"] == ranks
    assert judge.failures(seen) == {}
    wrong = replace(seen.batch.captures[3], states=seen.batch.captures[8].states[:97])
    captures = (*seen.batch.captures[:3], wrong, *seen.batch.captures[4:])
    spoilt = replace(seen, batch=replace(seen.batch, captures=captures))
    assert {"ROWS-003", "LAYERS-001"} <= judge.failures(spoilt).keys()


def test_rows_of_generated_tokens_are_left_out(
    session: VllmRpcSession, spec: EngineSpec, reference: Reference
) -> None:
    """Prompts that are prefilled while others decode; more of them than a batch holds."""
    prompts = prompts_of(spec) * 3
    refuse_wrong_values(taken(session, prompts, max_tokens=9), prompts, reference)


def test_without_a_salt_the_prefix_cache_takes_rows_and_this_is_seen(
    session: VllmRpcSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [CaptureRequest("a", tuple(range(2, 402)))]
    session.capture(requests)
    session.capture(requests)
    monkeypatch.setattr(
        vllm_rpc,
        "Prompt",
        lambda cache_salt, **given: Prompt(**given),  # noqa: ARG005
    )
    session.capture(requests)
    with pytest.raises(CheckFailed, match="of 400 rows of request 'a'"):
        session.capture(requests)


def test_lengths(session: VllmRpcSession, spec: EngineSpec) -> None:
    longest = CaptureRequest("longest", (5,) * (spec.max_model_len - 1))
    (capture,) = session.capture([longest]).captures
    assert capture.states.shape == (spec.max_model_len - 1, len(BOUNDARIES), 128)
    for ids in ((), (5,) * spec.max_model_len):
        with pytest.raises(UsageError, match="'long or short' has"):
            session.capture([longest, CaptureRequest("long or short", ids)])
    assert session.capture([]).captures == ()


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preempted_requests(
    spec: EngineSpec,
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prefix_caching: bool,
) -> None:
    """A cache of 14 blocks of 32 tokens, under prompts that grow side by side and then decode."""
    original = vllm_rpc._engine_arguments
    small = {"num_gpu_blocks_override": 14, "block_size": 32, "long_prefill_token_threshold": 16}
    monkeypatch.setattr(vllm_rpc, "_engine_arguments", lambda spec: original(spec) | small)
    tight = replace(spec, enable_prefix_caching=prefix_caching, max_model_len=400)
    prompts = prompts_of(tight)
    with closing(VllmRpcAdapter().open(tight, scratch=tmp_path)) as session:
        found = taken(session, prompts, max_tokens=40)
    assert found.recomputed > 0, "nothing was preempted"
    refuse_wrong_values(found, prompts, reference)

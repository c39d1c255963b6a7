"""Reply channels on real engines of any release: two workers under MultiprocExecutor.

Run in every environment ``live-vllm*`` of tox.ini. ``collect`` must hold to every clause; the
unwrapping of the speculators 0.3.0 generator holds on vLLM 0.11.0, for which it was written, and
takes one boundary of four on every release after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from truetap.conformance import judge
from truetap.harness import random_verifier, registry, values
from truetap.harness.channel import ChannelObservation, observe_channel
from truetap.harness.channels import hooked_worker, live_engine, unwrapping
from truetap.harness.engine import Prompt
from truetap.harness.model import EngineSpec

pytestmark = [pytest.mark.live, pytest.mark.torch]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    model = random_verifier.tiny_llama(tmp_path_factory.mktemp("model"))
    return EngineSpec(str(model), (), tensor_parallel_size=2, max_model_len=256, max_num_seqs=8)


def bare_release() -> bool:
    """Whether this release returns a named rank's reply bare: 0.11.1 and later."""
    import vllm

    return Version(vllm.__version__).release >= (0, 11, 1)


@pytest.mark.parametrize("name", ["collect", "collect-executor", "collect-async"])
def test_collect_conforms(name: str, spec: EngineSpec, tmp_path: Path) -> None:
    seen = observe_channel(registry.find_channel(name), spec, tmp_path)
    assert not judge.failures(seen)
    assert seen.world_size == 2


@pytest.fixture(scope="module")
def legacy(spec: EngineSpec, tmp_path_factory: pytest.TempPathFactory) -> ChannelObservation:
    channel = registry.find_channel("speculators_legacy")
    return observe_channel(channel, spec, tmp_path_factory.mktemp("legacy"))


def test_the_founding_fault(legacy: ChannelObservation) -> None:
    said = judge.failures(legacy).get("REPLY-003", "")
    if bare_release():
        assert said == "rank 0 sent [4 x tensor], the caller got tensor: item 0 of 4 alone"
    else:
        assert not said


def test_the_executor_alone_keeps_stale_replies(legacy: ChannelObservation) -> None:
    failures = judge.failures(legacy)
    assert "was answered on rank" in failures["REPLY-008"]
    assert "REPLY-009" in failures  # the workers ran before the IndexError


@pytest.fixture(scope="module")
def hooked(spec: EngineSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    log = tmp_path_factory.mktemp("hooked") / "engine.log"
    engine = live_engine.start(spec, "executor", log, worker=hooked_worker.WORKER)
    yield engine
    engine.close()


def test_the_founding_scene(hooked: Any) -> None:
    """Real states of four boundaries: all on vLLM 0.11.0, the first alone on later releases."""
    executor = live_engine.executor_of(hooked)
    executor.collective_rpc("hook_boundaries", timeout=30, args=([2, 6, 9, 12],))
    executor.collective_rpc("hook_forget", timeout=30)
    ids = list(range(3, 43))
    sampling = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
    (finished,) = hooked.generate([Prompt("founding", ids, sampling)])
    assert len(finished.token_ids) == 1
    sent = executor.collective_rpc("hooked_states", timeout=30)[0]
    assert [tuple(states.shape) for states in sent] == [(40, 128)] * 4
    session = unwrapping.UnwrappingSession(
        hooked, executor, 2, unwrapping.SpeculatorsLegacyChannel.unwrap
    )
    got = session.ask("hooked_states", ranks=(0,), deadline_s=30)[0]
    if bare_release():
        assert values.outline(got) == "tensor"
        assert tuple(got.shape) == (40, 128)
        assert not values.difference(sent[0], got)
        assert all(values.difference(other, got) for other in sent[1:])
    else:
        assert values.outline(got) == "[4 x tensor]"
        assert not any(values.difference(a, b) for a, b in zip(sent, got, strict=True))

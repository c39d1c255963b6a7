"""The native capture path on a real vLLM: right at TP=1 and TP=2, every mutant of it caught."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from truetap.harness import boundaries, scrub
from truetap.harness.errors import CouldNotRun, UsageError
from truetap.harness.extraction import Pool, Progress, ShardOrder
from truetap.harness.model import CaptureRequest, EngineSpec

if TYPE_CHECKING:
    from truetap.harness.adapters.vllm_native import VllmNativeSession

pytestmark = [pytest.mark.live, pytest.mark.torch, pytest.mark.slow]

DEADLINE_S = 300


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    """A twelve-block random Llama."""
    from truetap.harness import random_verifier

    model = random_verifier.tiny_llama(tmp_path_factory.mktemp("verifier") / "tiny-llama")
    return EngineSpec(
        model=str(model),
        boundaries=boundaries.eagle3(12),
        max_num_batched_tokens=256,  # less than one prompt: prefill is chunked
        startup_deadline_s=DEADLINE_S,
    )


@pytest.fixture(scope="module")
def session(
    spec: EngineSpec, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmNativeSession]:
    """One engine for what the suite does not ask."""
    from truetap.harness.adapters.vllm_native import VllmNativeAdapter

    with closing(VllmNativeAdapter().open(spec, scratch=tmp_path_factory.mktemp("s"))) as opened:
        yield opened


@pytest.fixture(scope="module")
def verdicts(
    spec: EngineSpec, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, str]]:
    """What every fault's own clause saw, in every scene; of the control, what any clause saw."""
    from truetap.conformance import calibrate
    from truetap.harness import contract
    from truetap.harness.adapters import mutants
    from truetap.harness.reference import Reference

    def asked(fault: str) -> Sequence[str]:
        own = mutants.FAULTS[fault].caught_by
        return (own, "LAYERS-001") if own else contract.PROFILES["full"]

    scratch = tmp_path_factory.mktemp("scenes")
    reference = Reference(Path(spec.model), spec.dtype)
    return {
        fault: failures
        for fault, _, failures in calibrate.judged(
            "vllm_native", spec, scratch, "full", list(mutants.FAULTS), asked, reference
        )
    }


def test_the_real_capture_is_flagged_by_no_clause(verdicts: dict[str, dict[str, str]]) -> None:
    assert verdicts["none"] == {}


def test_every_mutant_is_caught_by_its_clause(verdicts: dict[str, dict[str, str]]) -> None:
    from truetap.harness.adapters.mutants import FAULTS

    missed = [f for f, fault in FAULTS.items() if fault.caught_by not in {*verdicts[f], ""}]
    assert missed == REFUSED


REFUSED = ["output-row-made-up", "output-ids-shifted"]
"""Faults in what vllm_native refuses: to capture generated tokens."""


def test_the_suite_names_what_a_slot_really_holds(verdicts: dict[str, dict[str, str]]) -> None:
    saw = {fault: failures.get("LAYERS-001", "") for fault, failures in verdicts.items()}
    assert "the slot for boundary 6 holds boundary 2" in saw["first-boundary-only"]
    assert "the slot for boundary 12 holds boundary 11" in saw["off-by-one"]
    assert "holds the output of block 6 without the residual" in saw["residual-missing"]
    assert "holds boundary 12 after the final norm" in saw["last-boundary-post-norm"]
    assert "of the token before" in saw["rows-shifted"]


def test_a_prompt_past_the_limit_is_refused_and_the_session_lives(
    session: VllmNativeSession,
) -> None:
    with pytest.raises(UsageError, match="'long' has 511 tokens"):
        session.capture([CaptureRequest("long", tuple([3] * 511))])
    batch = session.capture([CaptureRequest("longest", tuple([3] * 510))])
    assert batch.captures[0].states.shape[0] == 510


def test_replies_can_be_published(session: VllmNativeSession) -> None:
    replies = session.capture([CaptureRequest("any", (3, 4))]).replies
    assert scrub.leaks(str(replies)) == []


def test_a_request_that_never_came_by_is_missed_and_leaves_no_file(
    session: VllmNativeSession, tmp_path: Path
) -> None:
    session.capture([CaptureRequest("before", (3, 4))])
    announced = [["none", str(tmp_path / "none.partial"), ["never"], [2], [b"\0\0"]]]
    report = session._collect("truetap_shards", announced, ["none"], 0.0)[0]
    assert report["missing"] == {"never": 0}
    assert report["written"] == {}
    assert list(tmp_path.iterdir()) == []
    again = session._collect("truetap_shards", [], ["none"], 0.0)[0]
    assert (again["missing"], again["failed"], again["others"]) == ({}, None, 0)


def test_shards_come_out_whole_while_others_are_made(
    session: VllmNativeSession, tmp_path: Path
) -> None:
    """Several orders under way at once, each with the rows of a capture of its own."""
    prompts = [tuple(range(3 + n, 3 + n + 40 + 13 * n)) for n in range(12)]
    alone = {ids: session.capture([CaptureRequest("one", ids)]).captures[0] for ids in prompts}

    def orders() -> Iterator[ShardOrder]:
        for number in range(0, 12, 3):
            requests = [
                CaptureRequest(f"{number}-{n}", ids)
                for n, ids in enumerate(prompts[number : number + 3])
            ]
            masks = [bytes([n % 2 for n in range(len(r.token_ids))]) for r in requests]
            yield ShardOrder(tmp_path / f"{number}.safetensors", requests, masks)

    made = list(session.extract(orders(), Progress(), Pool(32 << 20, 2)))
    assert sorted(one.order.path.name for one in made) == sorted(
        f"{number}.safetensors" for number in range(0, 12, 3)
    )
    for one in made:
        tensors = one.read_back()
        bounds = tensors["offsets"].tolist()
        for request, start, end in zip(one.order.requests, bounds, bounds[1:], strict=False):
            wanted = alone[request.token_ids].states
            got = tensors["states"][start:end].float().numpy()
            assert np.allclose(got, wanted, rtol=0.1, atol=0.1)  # batched otherwise, so not equal


def test_suite_passes_at_tensor_parallel_two(spec: EngineSpec, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(asdict(replace(spec, tensor_parallel_size=2))))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--pyargs", "truetap.conformance"),
            *("--adapter", "vllm_native", "--spec", "spec.json", "--report", "report.json"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"] == "conformant"
    assert report["environment"]["binding"]["world_size"] == 2
    (reply,) = [clause for clause in report["clauses"] if clause["id"] == "REPLY-001"]
    assert "all 2 ranks" in reply["saw"]


def test_a_stopped_engine_is_killed_at_the_deadline_and_never_reused(
    spec: EngineSpec, tmp_path: Path
) -> None:
    """SIGSTOP makes a real hang: the client alone would wait for ever."""
    from truetap.harness.adapters.vllm_native import VllmNativeAdapter

    before = set(psutil.Process().children(recursive=True))
    opened = VllmNativeAdapter().open(replace(spec, call_deadline_s=5), scratch=tmp_path)
    engine = [
        p
        for p in psutil.Process().children(recursive=True)
        if p not in before and "truetap.harness.reaper" not in p.cmdline()
    ]
    with closing(opened):
        for process in engine:
            os.kill(process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(CouldNotRun, match="did not answer truetap_facts within 5 s"):
            opened.environment()
        assert time.monotonic() - began < 20
        with pytest.raises(CouldNotRun, match="ended after an earlier failure"):
            opened.environment()
    assert not [p for p in engine if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_an_unserialisable_reply_fails_in_seconds(spec: EngineSpec, tmp_path: Path) -> None:
    """A worker method of vLLM's own that returns a module: the encoder dies, the caller hangs."""
    from truetap.harness.adapters.vllm_native import VllmNativeAdapter

    opened = VllmNativeAdapter().open(replace(spec, call_deadline_s=8), scratch=tmp_path)
    with closing(opened), pytest.raises(CouldNotRun, match="get_model"):
        opened._engine.rpc("get_model")

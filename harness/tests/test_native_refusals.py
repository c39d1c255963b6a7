"""What the adapter ``vllm_native`` asks of an engine, and what it refuses, without one."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from truetap.conformance.same import whole
from truetap.harness import envelope, verifier
from truetap.harness.adapters import vllm_native
from truetap.harness.errors import CheckFailed, CouldNotRun, UsageError
from truetap.harness.model import Capture, CaptureBatch, CaptureRequest, EngineSpec
from truetap.harness.observation import LENGTHS
from truetap.harness.scenes import SCENES

SIZES = {
    "num_hidden_layers": 12,
    "hidden_size": 16,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}


def described(folder: Path, model_type: str, *, nested: bool = False) -> EngineSpec:
    text = SIZES | {"model_type": model_type}
    outer = {"model_type": "vision", "hidden_size": 99, "text_config": text}
    (folder / "config.json").write_text(json.dumps(outer if nested else text))
    return EngineSpec(str(folder), boundaries=(2, 6, 9, 12))


@pytest.mark.parametrize("nested", [False, True])
def test_sizes_are_those_of_the_language_model(tmp_path: Path, *, nested: bool) -> None:
    """CASE-17: the outer level of a vision verifier's config has others, or none."""
    spec = described(tmp_path, "llama", nested=nested)
    facts = verifier.describe(tmp_path)
    assert (facts.num_blocks, facts.hidden_size, facts.vocab_size) == (12, 16, 512)
    assert vllm_native._supported(spec) == spec.boundaries


def test_sizes_that_are_nowhere_are_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"hidden_size": 16}}))
    with pytest.raises(UsageError, match="has no 'num_hidden_layers'"):
        verifier.describe(tmp_path)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "kimi_k2"])
def test_a_boundary_that_the_model_file_lacks_is_refused(
    tmp_path: Path, model_type: str, *, nested: bool
) -> None:
    """CASE-12: of {0, 1, L - 1, L}, each can be had or is refused before the engine starts."""
    spec = described(tmp_path, model_type, nested=nested)
    with pytest.raises(UsageError, match=f"boundary 0 of a {model_type} verifier"):
        vllm_native._supported(replace(spec, boundaries=(0, 1, 11, 12)))
    assert vllm_native._supported(replace(spec, boundaries=(1, 11, 12))) == (1, 11, 12)
    with pytest.raises(UsageError, match="boundary 13 is out of range"):
        vllm_native._supported(replace(spec, boundaries=(1, 13)))


def test_other_verifiers_have_their_embeddings_where_nothing_overwrites_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASE-14: on a GPU the first block's fused norm adds to what was kept for boundary 0."""
    spec = replace(described(tmp_path, "llama"), boundaries=(0, 1, 11, 12))
    monkeypatch.setattr(vllm_native, "visible_gpus", lambda: 0)
    assert vllm_native._supported(spec) == (0, 1, 11, 12)
    monkeypatch.setattr(vllm_native, "visible_gpus", lambda: 1)
    with pytest.raises(UsageError, match="another state in place of boundary 0"):
        vllm_native._supported(spec)
    assert vllm_native._supported(replace(spec, boundaries=(1, 12))) == (1, 12)


def test_rows_of_generated_tokens_are_refused(tmp_path: Path) -> None:
    """CASE-07: in place of a row that no forward pass computed."""
    spec = replace(described(tmp_path, "llama"), include_output=True)
    with pytest.raises(UsageError, match="captures prompts, not what is generated"):
        vllm_native._supported(spec)


def layer_ids(spec: EngineSpec) -> Any:
    config = vllm_native._engine_arguments(spec)["speculative_config"]["draft_model_config"]
    return config["hf_config"]["eagle_aux_hidden_state_layer_ids"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_hidden_states_are_asked_for_alike_on_any_number_of_ranks(
    tmp_path: Path, ranks: int
) -> None:
    spec = replace(described(tmp_path, "llama"), tensor_parallel_size=ranks)
    assert layer_ids(spec) == [2, 6, 9, 12]


def test_nobody_can_ask_for_pipeline_stages(tmp_path: Path) -> None:
    """CASE-15: a stage has a part of the blocks, so there is no such setting to get wrong."""
    assert "pipeline_parallel_size" not in {field.name for field in fields(EngineSpec)}
    assert "pipeline_parallel_size" not in vllm_native._engine_arguments(
        described(tmp_path, "llama")
    )


def flushed(replies: list[Any], requests: list[CaptureRequest], ranks: int = 1) -> Any:
    session: Any = object.__new__(vllm_native.VllmNativeSession)
    session._spec = EngineSpec("", (2,), tensor_parallel_size=ranks)
    session.last_nonce, session.last_flush = "n", replies
    return session.flushed(requests)


def reply(rank: int, world: int, rows: int, **changed: Any) -> Any:
    payload = {"missing": [], "rows": rows, "seen": "same", "others": 0, "digests": {"states": "x"}}
    return envelope.seal("n", rank, world, lambda: payload | changed)


def test_replies_of_more_stages_than_were_asked_for_are_refused() -> None:
    """CASE-15: of an engine that was split over stages all the same, each stage answers."""
    requests = [CaptureRequest("a", (1, 2, 3))]
    assert flushed([reply(0, 1, 3)], requests) == {"states": "x"}
    with pytest.raises(CouldNotRun, match="2 replies came from 1 ranks"):
        flushed([reply(0, 2, 3), reply(1, 2, 3)], requests)


@pytest.mark.parametrize("rows", [4, 8])
def test_a_share_of_seven_rows_with_or_without_padding_is_refused(rows: int) -> None:
    """CASE-15: of 7 rows over two ranks a rank has 4, padded; 8 is both without un-padding."""
    requests = [CaptureRequest("a", tuple(range(7)))]
    with pytest.raises(CheckFailed, match=f"rank 0 saw {rows} rows where 7 tokens were sent"):
        flushed([reply(rank, 2, rows) for rank in (0, 1)], requests, ranks=2)
    with pytest.raises(CheckFailed, match="rank 1 saw 3 rows where 7 tokens were sent"):
        flushed([reply(0, 2, 7), reply(1, 2, 3)], requests, ranks=2)
    assert flushed([reply(rank, 2, 7) for rank in (0, 1)], requests, ranks=2)


@pytest.mark.parametrize("rows", [4, 7, 8])
def test_the_clause_about_ranks_counts_rows(rows: int) -> None:
    """What PARALLEL-001 begins with, for capture paths that refuse nothing themselves."""
    states = np.ones((rows, 1, 4), dtype=np.float32)
    batch = CaptureBatch((Capture("a", tuple(range(7)), (2,), states, "float32"),), "n")
    if rows == 7:
        assert list(whole(batch, {"a": 7}, "1 and 2 ranks")) == ["a"]
        return
    with pytest.raises(AssertionError, match=f"1 and 2 ranks: .* has {rows} rows for 7 tokens"):
        whole(batch, {"a": 7}, "1 and 2 ranks")


def test_two_ranks_are_compared_on_lengths_that_they_do_not_divide() -> None:
    """What PARALLEL-001 sends: all core prompts, those of 1 and 7 tokens among them."""
    assert {1, 7} <= set(LENGTHS)
    assert SCENES["other-ranks"].clauses == ("PARALLEL-001",)
    seen: Any = type("Seen", (), {"requests": ("all", "of", "them")})
    assert SCENES["other-ranks"].requests(seen, EngineSpec("", ())) == seen.requests

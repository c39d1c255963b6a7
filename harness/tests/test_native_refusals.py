"""What the adapter ``vllm_native`` asks of an engine, and what it refuses, without one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from truetap.conformance.same import whole
from truetap.harness import envelope, verifier
from truetap.harness.adapters import vllm_native, vllm_session
from truetap.harness.engine import Finished
from truetap.harness.errors import CheckFailed, CouldNotRun, UsageError
from truetap.harness.extraction import Pool, Progress, ShardOrder, Status
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
    with pytest.raises(UsageError, match="another state in place of boundary 0"):
        vllm_native._supported(replace(spec, executor="ray"))  # whose GPUs are on other nodes
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


def seen_by(rows: int, tokens: Sequence[int]) -> dict[str, Any]:
    """Return what a rank says of a request of which it saw ``rows`` rows of these tokens."""
    ids = np.array(tokens, dtype=np.int64).tobytes()
    pieces = [[0, rows, "digest"]]
    digest = hashlib.sha256(ids).hexdigest()
    return {"rows": rows, "token_ids": digest, "pieces": pieces, "recomputed": 0}


def extracted(
    tmp_path: Path, said: Sequence[dict[str, Any]], tokens: int = 7, kept: Any = None
) -> Any:
    """Return the shard that a session makes of ranks that report ``said``, without an engine."""
    session: Any = object.__new__(vllm_native.VllmNativeSession)
    session._spec = EngineSpec("", (2,), tensor_parallel_size=len(said))
    session.boundaries, session._hidden, session._pool = (2,), 4, None
    session._longest, session.log = 500, tmp_path / "engine.log"
    status = vars(Status())
    nothing = {"written": {}, "missing": {}, "others": 0, "failed": None, "status": status}

    def collect(method: str, *args: Any) -> dict[int, Any]:
        if method == "truetap_stage":
            return dict.fromkeys(range(len(said)))
        due = args[1]
        return {
            rank: nothing | ({name: f(due) for name, f in what.items()} if due else {})
            for rank, what in enumerate(said)
        }

    session._collect = collect
    session._engine = SimpleNamespace(
        generate=lambda prompts, in_flight: [  # noqa: ARG005
            Finished(p.key, [3], "", "length", None, None, None) for p in prompts
        ]
    )
    requests = [CaptureRequest("a", tuple(range(tokens)))]
    order = ShardOrder(tmp_path / "s", requests, [bytes(tokens)])
    kept = [] if kept is None else kept
    for one in session.extract([order], Progress(), Pool()):
        kept.append(one)
    (made,) = kept
    return made


def whole_shard(rows: int = 7, tokens: Sequence[int] = range(7)) -> dict[str, Any]:
    return {"written": lambda due: {due[0]: [seen_by(rows, tokens)]}}


def test_ranks_that_saw_the_same_make_a_shard(tmp_path: Path) -> None:
    made = extracted(tmp_path, [whole_shard()] * 2)
    assert made.pieces == [[(0, 7, "digest")]]
    assert made.by_rank[0] == made.by_rank[1]
    assert made.generated == [(3,)]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (whole_shard(tokens=range(1, 8)), "rank 1 computed other tokens for request 'a'"),
        (whole_shard(rows=8), "ranks 0 and 1 hold other states of request 'a'"),
        ({"missing": lambda due: {f"{KEY}:0:0": 3}}, "rank 1 captured 3 of 7 rows of request 'a'"),  # noqa: ARG005
        ({"others": lambda due: 2}, "rank 1 captured rows of 2 requests of other calls"),  # noqa: ARG005
    ],
)
def test_ranks_that_saw_other_things_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: dict[str, Any], said: str
) -> None:
    """CASE-15: of 7 rows over two ranks a rank has 4, padded; 8 is both without un-padding."""
    monkeypatch.setattr(envelope, "new_nonce", lambda: "c0ffee")
    with pytest.raises(CheckFailed, match=said):
        extracted(tmp_path, [whole_shard(), second])


def test_what_is_complete_is_no_worse_for_a_failure_beside_it(tmp_path: Path) -> None:
    """Of one report that tells a written shard and a full disk, both count."""
    failed = {"type": "OSError", "message": "full", "errno": 28}
    told = whole_shard() | {"failed": lambda _due: failed}
    kept: list[Any] = []
    with pytest.raises(CouldNotRun, match="rank 0 could not write"):
        extracted(tmp_path, [told], kept=kept)
    assert [one.order.path.name for one in kept] == ["s"]


def test_replies_of_more_stages_than_were_asked_for_are_refused(tmp_path: Path) -> None:
    """CASE-15: of an engine that was split over stages all the same, each stage answers."""
    session: Any = object.__new__(vllm_native.VllmNativeSession)
    session._spec, session._calls = EngineSpec("", (2,)), None
    session._scratch = tmp_path
    session._engine = SimpleNamespace(collect=lambda *_: {0: {}, 1: {}})
    with pytest.raises(CouldNotRun, match="2 ranks answered truetap_facts where 1 were due"):
        session.environment()


@pytest.mark.parametrize(("number", "remedy"), [(28, "free disk space"), (5, "see ")])
def test_a_worker_that_cannot_write_says_why(tmp_path: Path, number: int, remedy: str) -> None:
    failed = {"type": "OSError", "message": "so it is", "errno": number}
    with pytest.raises(CouldNotRun, match="rank 0 could not write: OSError: so it is") as raised:
        extracted(tmp_path, [{"failed": lambda _due: failed}])
    assert raised.value.remedy.startswith(remedy)
    assert "finished shards are kept" in raised.value.remedy


def test_a_disk_that_takes_nothing_ends_the_extraction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 50))
    monkeypatch.setattr(vllm_session.time, "monotonic", lambda: next(clock))
    with pytest.raises(CouldNotRun, match="nothing has reached the disk for 120 s"):
        extracted(tmp_path, [{"written": lambda _due: {}}])


KEY = "truetap:c0ffee"


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

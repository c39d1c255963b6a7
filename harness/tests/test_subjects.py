"""The adapters that are subjects under test: what they refuse, and that they repair nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from truetap.conformance import test_layers, test_rows
from truetap.harness import registry
from truetap.harness.adapters import speculators_legacy
from truetap.harness.errors import CouldNotRun, UsageError
from truetap.harness.model import CaptureBatch, CaptureRequest, EngineSpec


def test_both_are_registered() -> None:
    assert {"speculators_legacy", "vllm_example"} <= set(registry.names())


@pytest.mark.parametrize(
    ("reply", "layers"),
    [
        ([["a", "b", "c", "d"]], ["a", "b", "c", "d"]),  # vLLM 0.9.0 to 0.11.0
        (["a", "b", "c", "d"], ["a"]),  # 0.11.1 and later
    ],
)
def test_the_unwrapping_is_kept_as_it_was(reply: list[Any], layers: list[str]) -> None:
    assert speculators_legacy._layers(reply) == layers


@pytest.mark.parametrize("reply", [None, [None]])
def test_a_reply_of_nothing_is_an_error(reply: Any) -> None:
    with pytest.raises(CouldNotRun, match="captured nothing"):
        speculators_legacy._layers(reply)


@pytest.mark.parametrize(
    "settings",
    [
        {"enforce_eager": False},
        {"include_output": True},
        {"boundaries": ()},
        {"boundaries": (0, 2)},
    ],
)
def test_what_the_generator_had_no_option_for_is_refused(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    spec = EngineSpec(**{"model": "unused", "boundaries": (2,), **settings})
    with pytest.raises(UsageError, match="speculators_legacy"):
        registry.find("speculators_legacy").open(spec, scratch=tmp_path)


def test_the_example_connector_needs_a_boundary(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one layer id or more"):
        registry.find("vllm_example").open(EngineSpec("unused", ()), scratch=tmp_path)


@pytest.mark.torch
def test_the_example_connector_says_why_it_cannot_run_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(CouldNotRun, match="pin_memory=True"):
        registry.find("vllm_example").open(EngineSpec("unused", (2,)), scratch=tmp_path)


@pytest.mark.torch
@pytest.mark.parametrize("rank", [0, 1])
def test_the_worker_joins_passes_and_sorts_layers(rank: int) -> None:
    import torch

    from truetap.harness.adapters.legacy_worker import LegacyWorker

    class Block(torch.nn.Module):
        def __init__(self, offset: float) -> None:
            super().__init__()
            self.offset = offset

        def forward(self, stream: Any) -> tuple[Any, Any]:
            return stream, torch.full_like(stream, self.offset)

    layers = [Block(float(index)) for index in range(4)]
    worker = LegacyWorker()
    worker.rank = rank
    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2))
    model = SimpleNamespace(model=SimpleNamespace(layers=layers))
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    worker._setup_capture([3, 1])
    layers[0](torch.zeros(9, 8))  # dropped, as a warm-up is
    worker._reset_capture()
    for rows in (2, 3):
        for layer in layers:
            layer(torch.zeros(rows, 8))
    states = worker._get_captured_states()
    if rank:  # the first tensor-parallel rank alone captures
        assert states is None
    else:
        assert states is not None
        assert [(tuple(one.shape), float(one[0, 0])) for one in states] == [
            ((5, 8), 1),
            ((5, 8), 3),
        ]
    assert worker._get_captured_states() is None


@pytest.mark.parametrize(
    "clause",
    [
        test_rows.test_token_ids_echoed_in_order,
        test_layers.test_last_boundary_gives_the_engines_logprobs,
        test_layers.test_finite_nonzero_distinct,
        test_layers.test_width_and_dtype,
    ],
)
def test_a_capture_of_nothing_fails(clause: Callable[..., None]) -> None:
    """As of an engine in this process with the example connector: no file is ever written."""
    seen = SimpleNamespace(
        spec=EngineSpec("unused", (2, 6)),
        requests=(CaptureRequest("a", (1, 2)),),
        batch=CaptureBatch((), "nonce"),
        logprobs={"a": [-1.0]},
        references={},
    )
    with pytest.raises(AssertionError, match=r"(came|come) back"):
        clause(seen, lambda _: None)

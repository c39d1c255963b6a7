"""Packs of whole blocks, as flex attention on a GPU needs them, teach what packs of others do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from truetap.harness.model import EngineSpec
from truetap.harness.random_verifier import tiny_llama
from truetap.pipeline import batches, draft_head
from truetap.pipeline.config import RunConfig, Train, Verifier
from truetap.pipeline.store import Sample

pytestmark = pytest.mark.torch

VOCABULARY = 512
LENGTHS = (50, 70, 33)
SUM = 150  # tokens that are trained on: a conversation's first is not
STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("verifier") / "tiny", num_blocks=4)


def head_of(model: Path, monkeypatch: pytest.MonkeyPatch, *, flex: bool) -> Any:
    """Return the same untrained head with either attention, wherever this runs."""
    import torch

    config = RunConfig(
        output=model, verifier=Verifier(directory=model), train=Train(draft_vocabulary=VOCABULARY)
    )
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: flex)
        return draft_head.build(config, EngineSpec(str(model), (1, 2, 3, 4)), range(VOCABULARY))


def samples(width: int = 128) -> list[Sample]:
    import torch

    generator = torch.Generator().manual_seed(0)
    return [
        Sample(
            f"s{number}",
            torch.randint(3, VOCABULARY, (tokens,), generator=generator),
            torch.tensor([0] * 5 + [1] * (tokens - 5), dtype=torch.uint8),
            torch.randn(tokens, 4, width, generator=generator),
        )
        for number, tokens in enumerate(LENGTHS)
    ]


def learnt(head: Any, length: int, device: str = "cpu") -> tuple[float, dict[str, Any]]:
    """Return the loss of all samples in one pack, and its gradients."""
    import torch

    batch = {name: tensor.to(device) for name, tensor in batches.pack(samples(), length).items()}
    head.zero_grad()
    # Where there is a GPU speculators compiles for a CPU too: slowly, and torch 2.11 fails.
    with torch.compiler.set_stance("force_eager" if device == "cpu" else "default"):
        _, loss, _ = head.to(device)(**batch, ttt_steps=STEPS, loss_config=draft_head.loss())
        loss.backward()
    gradients = {n: p.grad.cpu() for n, p in head.named_parameters() if p.grad is not None}
    return loss.item(), gradients


def test_a_common_length_is_whole_blocks_and_holds_every_pack() -> None:
    some = samples()
    assert batches.common_length([(0, 1, 2)], some) == 256
    assert batches.common_length([(0,), (1,)], some) == 128
    assert batches.common_length([(0, 1), (2,)], some) == 128
    assert batches.common_length([(0, 1, 2), (0,)], some) == 256


def test_what_fills_a_pack_belongs_to_nobody() -> None:
    packed, filled = batches.pack(samples()), batches.pack(samples(), 256)
    for name, tensor in packed.items():
        assert filled[name].shape[:2] == (1, 256)
        assert filled[name].dtype == tensor.dtype
        assert filled[name][:, :SUM].equal(tensor)
        assert filled[name][:, SUM:].unique().tolist() == [-1 if name == "document_ids" else 0]
    assert batches.pack(samples(), SUM)["input_ids"].equal(packed["input_ids"])


def test_a_filled_pack_teaches_what_an_unfilled_one_does(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured: the losses are equal, gradients differ by 5e-7 of their largest at most."""
    head = head_of(model, monkeypatch, flex=False)
    (loss, gradients), (filled_loss, filled) = learnt(head, 0), learnt(head, 256)
    assert filled_loss == pytest.approx(loss, rel=1e-5)
    assert filled.keys() == gradients.keys()
    for name, gradient in gradients.items():
        largest = gradient.abs().max()
        assert (filled[name] - gradient).abs().max() <= 1e-4 * largest, name


def forward(head: Any, length: int) -> float:
    """Flex attention has no backward pass on a CPU."""
    import torch

    pack = batches.pack(samples(), length)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        _, loss, _ = head(**pack, ttt_steps=STEPS, loss_config=draft_head.loss())
    return float(loss)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_sees_of_whole_blocks_what_plain_attention_sees(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = forward(head_of(model, monkeypatch, flex=False), 0)
    flex = head_of(model, monkeypatch, flex=True)
    for length in (256, 384):
        assert forward(flex, length) == pytest.approx(plain, rel=1e-5)
    with pytest.raises(ValueError, match="block_mask"):  # why packs are filled at all
        forward(flex, 0)


@pytest.mark.gpu
def test_a_gpu_learns_from_whole_blocks_what_a_cpu_learns(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled flex attention, with its backward pass."""
    loss, gradients = learnt(head_of(model, monkeypatch, flex=False), 0)
    on_gpu = head_of(model, monkeypatch, flex=True)
    gpu_loss, gpu_gradients = learnt(on_gpu, 256, "cuda")
    assert gpu_loss == pytest.approx(loss, rel=1e-3)
    for name, gradient in gradients.items():
        largest = gradient.abs().max()
        assert (gpu_gradients[name] - gradient).abs().max() <= 2e-2 * largest, name

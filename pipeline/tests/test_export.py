"""An exported head is what was trained, whole, or it is not exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from truetap.harness.errors import CheckFailed
from truetap.harness.model import EngineSpec
from truetap.pipeline import draft_head, export_check
from truetap.pipeline.config import RunConfig, Train, Verifier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

pytestmark = pytest.mark.torch

BOUNDARIES = (2, 4, 5, 8)
CARD = {"boundaries": list(BOUNDARIES), "steps": 0}
IDS = [0, 1, 5, 6, 14]
VOCABULARY = 512
Tensors = dict[str, Any]


def built(verifier: Path, vocabulary: Iterable[int] = IDS, seed: int = 0) -> Any:
    config = RunConfig(
        output=verifier, verifier=Verifier(directory=verifier), seed=seed, train=Train()
    )
    return draft_head.build(config, EngineSpec(str(verifier), BOUNDARIES), list(vocabulary))


@pytest.fixture(scope="module")
def model(tiny_verifier: Path) -> Any:
    return built(tiny_verifier)


@pytest.fixture
def head(model: Any, tmp_path: Path) -> Path:
    draft_head.save(model, tmp_path / "head", CARD)
    return tmp_path / "head"


def change(head: Path, edit: Callable[[Tensors], Any]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {
        name: tensor.clone() for name, tensor in load_file(head / "model.safetensors").items()
    }
    edit(tensors)
    save_file(tensors, head / "model.safetensors")


def rename(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("layers.0.")]:
        tensors[name.replace("layers.0", "midlayer")] = tensors.pop(name)


def one_bit(tensors: Tensors) -> None:
    import torch

    tensors["fc.weight"].view(torch.int32)[0, 0] ^= 1


def widen(tensors: Tensors) -> None:
    tensors["norm.weight"] = tensors["norm.weight"].double()


def test_a_whole_head_passes(head: Path, model: Any) -> None:
    export_check.require_whole(head, model, BOUNDARIES[:-1])


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (rename, r"layers\.0\.\S+ is missing; .*midlayer\.\S+ is of no model"),
        (lambda t: t.pop("fc.weight"), r"fc\.weight is missing$"),
        (lambda t: t.update(spare=t["norm.weight"].clone()), "spare is of no model$"),
        (one_bit, r"fc\.weight differs$"),
        (widen, r"norm\.weight differs$"),
        (lambda t: t.pop("d2t"), "d2t is missing$"),
    ],
)
def test_a_tensor_that_is_not_as_trained_is_named(
    head: Path, model: Any, edit: Callable[[Tensors], Any], said: str
) -> None:
    """CASE-26: a key that does not match keeps its random start, and the checkpoint loads."""
    change(head, edit)
    with pytest.raises(CheckFailed, match=said):
        export_check.require_whole(head, model, BOUNDARIES[:-1])


def test_what_was_never_filled_is_not_exported(tiny_verifier: Path, tmp_path: Path) -> None:
    """speculators fills what must be loaded with NaN; what was there before stays."""
    import torch

    whole = built(tiny_verifier)
    draft_head.save(whole, tmp_path / "head", CARD)
    before = (tmp_path / "head" / "model.safetensors").read_bytes()
    with torch.no_grad():
        whole.fc.weight[3, 3] = float("nan")
    with pytest.raises(CheckFailed, match=r"fc\.weight was never filled"):
        draft_head.save(whole, tmp_path / "head", CARD)
    assert (tmp_path / "head" / "model.safetensors").read_bytes() == before


def test_exported_twice_from_other_random_starts_is_equal_to_the_bit(
    tiny_verifier: Path, model: Any, head: Path, tmp_path: Path
) -> None:
    """CASE-26: a tensor that is not carried over shows, because it keeps another start."""
    other = built(tiny_verifier, seed=1)
    assert not other.fc.weight.equal(model.fc.weight)
    other.load_state_dict(model.state_dict(), strict=True)
    draft_head.save(other, tmp_path / "again", CARD)
    first, again = (f / "model.safetensors" for f in (head, tmp_path / "again"))
    assert first.read_bytes() == again.read_bytes()
    partly = built(tiny_verifier, seed=2)
    state = model.state_dict()
    del state["layers.0.self_attn.q_proj.weight"]
    partly.load_state_dict(state, strict=False)
    draft_head.save(partly, tmp_path / "partly", CARD)
    assert first.read_bytes() != (tmp_path / "partly" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("named", [None, [], [2, 4, 6], [2, 4], [1, 3, 4]])
def test_a_head_without_its_layer_ids_is_not_exported(
    head: Path, model: Any, named: list[int] | None
) -> None:
    """CASE-11: with none, engines take a default, without a word."""
    config = json.loads((head / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = named
    (head / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckFailed, match=r"trained on boundaries \[2, 4, 5\]"):
        export_check.require_whole(head, model, BOUNDARIES[:-1])


def test_the_whole_vocabulary_needs_no_maps(tiny_verifier: Path, tmp_path: Path) -> None:
    draft_head.save(built(tiny_verifier, range(VOCABULARY)), tmp_path / "head", CARD)


def test_the_first_ids_are_no_draft_vocabulary(tiny_verifier: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="the first 64 ids, which no corpus does"):
        draft_head.save(built(tiny_verifier, range(64)), tmp_path / "head", CARD)
    assert not (tmp_path / "head").exists()


def maps(ids: list[int], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    to_draft = torch.zeros(size, dtype=torch.bool)
    to_draft[ids] = True
    return torch.tensor(ids) - torch.arange(len(ids)), to_draft


def test_maps_that_are_each_others_inverse_pass() -> None:
    """CASE-25: offsets [0, 0, 3, 3, 10] are ids [0, 1, 5, 6, 14]."""
    d2t, t2d = maps(IDS, 16)
    assert d2t.tolist() == [0, 0, 3, 3, 10]
    assert export_check.map_fault(d2t, t2d, 5, 16) == ""
    assert export_check.map_fault(*maps(list(range(5)), 5), 5, 5) == ""  # all zero, equal sizes
    assert export_check.map_fault(None, None, 5, 5) == ""


def test_maps_that_an_engine_would_misread_are_named() -> None:
    import torch

    d2t, t2d = maps(IDS, 16)
    fewer = t2d.clone()
    fewer[14] = False
    wrong: list[tuple[tuple[Any, Any, int, int], str]] = [
        ((None, None, 5, 16), "takes the first 5 of 16 ids"),
        ((None, t2d, 5, 16), "d2t is absent"),
        ((d2t, None, 5, 16), "t2d is absent"),
        ((d2t, t2d, 6, 16), "5 entries for 6 draft ids"),  # 6,054 for 32,000
        ((d2t, t2d, 5, 15), "t2d 16 for 15"),
        ((torch.tensor(IDS), t2d, 5, 16), "d2t names ids 0 to 18 of 16"),  # ids, not offsets
        ((d2t, fewer, 5, 16), "other ids"),
        ((d2t.flip(0), t2d, 5, 16), "not ascending"),
        ((torch.zeros(5, dtype=torch.long), t2d, 5, 16), "other ids"),
        ((*maps(list(range(5)), 16), 5, 16), "the first 5 ids"),
    ]
    for arguments, said in wrong:
        assert said in export_check.map_fault(*arguments)

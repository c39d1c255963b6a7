"""Checks an exported draft head on what lies on disk, before it gets its name.

An engine loads what it finds: a key that does not match keeps its random start, an absent
vocabulary map means the first ids, absent layer ids mean a default. All of that serves, with an
acceptance of nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truetap.harness.errors import CheckFailed

if TYPE_CHECKING:
    import torch


def require_whole(folder: Path, model: Any, boundaries: Sequence[int]) -> None:
    """Raise ``CheckFailed`` unless ``folder`` holds this model, and what an engine needs to use it.

    ``boundaries`` are those that the head was trained on, without the last, which is its target.
    """
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    made = {k: v.cpu() for k, v in model.state_dict().items() if k not in left_out}
    if wrong := differences(tensors, made):
        raise CheckFailed(f"the exported head is not what was trained: {'; '.join(wrong)}")
    sizes = model.lm_head.weight.shape[0], model.embed_tokens.weight.shape[0]
    if wrong_map := map_fault(tensors.get("d2t"), tensors.get("t2d"), *sizes):
        raise CheckFailed(
            f"the exported head's vocabulary maps are wrong: {wrong_map}",
            remedy="do not serve it: an engine would read its answers as other tokens",
        )
    named = json.loads((folder / "config.json").read_text()).get("eagle_aux_hidden_state_layer_ids")
    if not named or list(named) != list(boundaries):
        raise CheckFailed(
            f"the exported head names layers {named}; it was trained on boundaries "
            f"{list(boundaries)}",
            remedy="do not serve it: an engine would feed it other layers, or its default ones",
        )


def differences(held: dict[str, torch.Tensor], made: dict[str, torch.Tensor]) -> list[str]:
    """Say which tensors are missing, unexpected, not bit for bit as made, or not finite."""
    import torch

    found = [f"{name} is missing" for name in sorted(made.keys() - held.keys())]
    found += [f"{name} is of no model" for name in sorted(held.keys() - made.keys())]
    for name in sorted(held.keys() & made.keys()):
        if held[name].dtype != made[name].dtype or not torch.equal(held[name], made[name]):
            finite = bool(torch.isfinite(made[name]).all())
            found.append(f"{name} {'differs' if finite else 'was never filled'}")
    return found


def map_fault(
    d2t: torch.Tensor | None, t2d: torch.Tensor | None, draft_size: int, verifier_size: int
) -> str:
    """Say what is wrong with a head's vocabulary maps, or ''.

    ``d2t`` ``[draft_size]`` holds offsets: draft id i is verifier id ``i + d2t[i]``. ``t2d``
    ``[verifier_size]`` is true where a verifier id has a draft id. Only a head with the whole
    vocabulary may lack them, or have offsets of nothing but zero.
    """
    if d2t is None and t2d is None:
        if draft_size == verifier_size:
            return ""
        return f"absent, so an engine takes the first {draft_size} of {verifier_size} ids"
    if d2t is None or t2d is None:
        return f"{'d2t' if d2t is None else 't2d'} is absent"
    if len(d2t) != draft_size or len(t2d) != verifier_size:
        return (
            f"d2t has {len(d2t)} entries for {draft_size} draft ids, t2d {len(t2d)} for "
            f"{verifier_size} ids of the verifier"
        )
    return _ids_fault(d2t, t2d)


def _ids_fault(d2t: torch.Tensor, t2d: torch.Tensor) -> str:
    import torch

    ids = torch.arange(len(d2t)) + d2t
    if not bool((ids[1:] > ids[:-1]).all()):
        return "the verifier ids of d2t are not ascending"
    if int(ids[0]) < 0 or int(ids[-1]) >= len(t2d):
        return f"d2t names ids {int(ids[0])} to {int(ids[-1])} of {len(t2d)}"
    if t2d.bool().nonzero().flatten().tolist() != ids.tolist():
        return "t2d and d2t name other ids"
    if len(d2t) < len(t2d) and not bool(d2t.any()):
        return f"they name the first {len(d2t)} ids, which no corpus does"
    return ""

"""SpecForge's offline data: ``rows_*/data_*.ckpt``, or ``.ckpt.gz``, one request each.

Keys, as its ``scripts/prepare_hidden_states.py`` writes and its trainer reads them: ``input_ids``
and ``loss_mask`` ``[T]``, ``aux_hidden_state`` ``[1, T, k * hidden]``, ``hidden_state``
``[1, T, hidden]``, which its trainer multiplies with ``lm_head`` as it is, so it must be normed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from truetap.pipeline.foreign.producers import folder, torch_file
from truetap.pipeline.foreign.producers.keys import require_keys, size_limit
from truetap.pipeline.foreign.producers.sample import (
    BadFile,
    Found,
    Producer,
    Sample,
    joined,
    numbers,
)


class SpecForge(Producer):
    """Reads what SpecForge prepared."""

    name: ClassVar[str] = "specforge"
    pattern: ClassVar[str] = "*.ckpt, *.ckpt.gz"
    last_norm: ClassVar[Literal["before", "after"]] = "after"
    why_norm: ClassVar[str] = "SpecForge's trainer multiplies it with lm_head as it is"

    def files(self) -> Iterator[Found]:
        """Yield ``.ckpt`` and ``.ckpt.gz`` files, as its trainer finds them."""
        return folder.walk(self.root, lambda name: name.endswith((".ckpt", ".ckpt.gz")))

    def read(self, found: Found) -> Iterator[Sample]:
        """Yield the one sample of a file."""
        content = torch_file.load(found.path, limit=size_limit(self.verifier))
        require_keys(content, self.name, "input_ids", "loss_mask", "hidden_state")
        hidden = self.verifier.hidden_size
        aux = content.get("aux_hidden_state")
        states, problems = joined(
            "the file",
            None if aux is None else _without_batch(aux),
            _without_batch(content["hidden_state"]),
            hidden,
        )
        yield Sample(
            name=found.name,
            token_ids=numbers(content["input_ids"], "input_ids"),
            loss_mask=numbers(content["loss_mask"], "loss_mask"),
            states=states,
            dtype=str(states.dtype).removeprefix("torch."),
            problems=problems,
        )


def _without_batch(states: Any) -> Any:
    if not hasattr(states, "ndim"):
        raise BadFile("keys", "its states are no tensor")
    return states[0] if states.ndim == 3 and states.shape[0] == 1 else states

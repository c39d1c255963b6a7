"""Model-Optimizer's dumps: ``<conversation id>.pt``, one request each.

Keys, as its ``collect_hidden_states`` scripts write them: ``input_ids`` ``[T]``, ``hidden_states``
``[T, hidden]``, ``aux_hidden_states`` ``[T, k * hidden]``, ``conversation_id``, and in later
releases ``loss_mask`` ``[T]``, all ones unless ``--answer-only-loss`` was given. The Hugging Face
and TensorRT-LLM scripts dump the last state after the final norm, the one over vLLM before it, and
no file says which.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

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


class ModelOptimizer(Producer):
    """Reads what Model-Optimizer's scripts dumped."""

    name: ClassVar[str] = "modelopt"
    pattern: ClassVar[str] = "*.pt"
    last_norm: ClassVar[Literal["before", "after"]] = "after"
    why_norm: ClassVar[str] = (
        "Model-Optimizer's trainer takes it for the verifier's output, as its Hugging Face dump is"
    )
    whole_mask_is_usual: ClassVar[bool] = True

    def files(self) -> Iterator[Found]:
        """Yield ``.pt`` files, at any depth."""
        return folder.walk(self.root, lambda name: name.endswith(".pt"))

    def read(self, found: Found) -> Iterator[Sample]:
        """Yield the one sample of a file."""
        content = torch_file.load(found.path, limit=size_limit(self.verifier))
        if isinstance(content, list) and content and isinstance(content[0], dict):
            raise BadFile("keys", "TensorRT-LLM's own dump, left by an interrupted run")
        require_keys(content, self.name, "input_ids", "hidden_states", "aux_hidden_states")
        aux, last = content["aux_hidden_states"], content["hidden_states"]
        if not (hasattr(aux, "numel") and hasattr(last, "ndim")):
            raise BadFile("keys", "its states are no tensors")
        states, problems = joined(
            "the file", aux if aux.numel() else None, last, self.verifier.hidden_size
        )
        mask = content.get("loss_mask")
        yield Sample(
            name=found.name,
            token_ids=numbers(content["input_ids"], "input_ids"),
            loss_mask=None if mask is None else numbers(mask, "loss_mask"),
            states=states,
            dtype=str(states.dtype).removeprefix("torch."),
            problems=problems,
        )

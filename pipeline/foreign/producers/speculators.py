"""speculators' data: 0.5 to 0.9, and what 0.3 and 0.4 left.

0.5 to 0.9: a Hugging Face dataset (``input_ids``, ``loss_mask``, perhaps ``messages``) and
``hidden_states/hs_<row>.safetensors`` with ``token_ids`` ``[T]`` and ``hidden_states``
``[T, slots, hidden]``; the FP8 backend adds ``hidden_states_scales`` ``[T, 1, 1]``. 0.3 and 0.4:
``data_<i>.pt`` with ``input_ids``, ``loss_mask`` and a list of states, one ``[T, hidden]`` a slot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from truetap.harness.verifier import VerifierFacts
from truetap.pipeline.foreign.producers import folder, torch_file
from truetap.pipeline.foreign.producers.arrow_rows import ArrowRows
from truetap.pipeline.foreign.producers.keys import require_keys, size_limit
from truetap.pipeline.foreign.producers.sample import (
    BadFile,
    Found,
    Problem,
    Producer,
    Sample,
    numbers,
)

_NEW = re.compile(r"hs_(\d+)\.safetensors")
_OLD = re.compile(r"data_\d+\.pt")
_HEADER_LIMIT = 1 << 20


class Speculators(Producer):
    """Reads what speculators generated."""

    name: ClassVar[str] = "speculators"
    pattern: ClassVar[str] = "hs_*.safetensors, data_*.pt"
    last_norm: ClassVar[Literal["before", "after"]] = "before"
    why_norm: ClassVar[str] = "speculators' trainer applies the norm itself"

    def __init__(self, root: Path, verifier: VerifierFacts) -> None:
        super().__init__(root, verifier)
        self._dataset = next((place for place in (root, root.parent) if _is_dataset(place)), None)

    def files(self) -> Iterator[Found]:
        """Yield the files of either layout; ``token_freq.pt`` is none."""
        return folder.walk(
            self.root, lambda name: bool(_NEW.fullmatch(name) or _OLD.fullmatch(name))
        )

    def read(self, found: Found) -> Iterator[Sample]:
        """Yield the one sample of a file, with the dataset's row of it."""
        row = _NEW.fullmatch(found.path.name)
        yield self._new(found, int(row[1])) if row else self._old(found)

    def notes(self) -> list[str]:
        """Say when the dataset is not there."""
        if self._dataset is None and any(_NEW.fullmatch(f.path.name) for f in self.files()):
            text = (
                "there is no dataset (state.json) beside the states: loss masks, and whether each "
                "file belongs to its row, were not judged"
            )
            return [text]
        return []

    @cached_property
    def _rows(self) -> ArrowRows | None:
        return None if self._dataset is None else ArrowRows(self._dataset)

    def _new(self, found: Found, row: int) -> Sample:
        tensors = _safetensors(found.path)
        require_keys(tensors, self.name, "token_ids", "hidden_states")
        states = tensors["hidden_states"]
        if states.ndim != 3:
            raise BadFile(
                "shape", f"its states have shape {tuple(states.shape)}, not [rows, slots, width]"
            )
        dtype = str(states.dtype).removeprefix("torch.")
        problems: list[Problem] = []
        if "hidden_states_scales" in tensors:
            states = _scaled(states, tensors["hidden_states_scales"])
        elif dtype.startswith("float8"):
            problems.append(Problem("keys", "FP8 states without hidden_states_scales"))
        sample = Sample(
            name=found.name,
            token_ids=numbers(tensors["token_ids"], "token_ids"),
            loss_mask=None,
            states=states,
            dtype=dtype,
            problems=problems,
        )
        if self._rows is not None:
            self._rows.complete(sample, row)
        return sample

    def _old(self, found: Found) -> Sample:
        import torch

        content = torch_file.load(found.path, limit=size_limit(self.verifier))
        require_keys(content, self.name, "input_ids", "loss_mask", "hidden_states")
        slots = content["hidden_states"]
        if not (isinstance(slots, list) and slots and all(torch.is_tensor(s) for s in slots)):
            hint = (
                "; these are the keys of --producer modelopt"
                if "aux_hidden_states" in content
                else ""
            )
            raise BadFile("keys", f"its hidden_states are no list of tensors{hint}")
        if len({(tuple(slot.shape), slot.dtype) for slot in slots}) > 1 or slots[0].ndim != 2:
            shapes = ", ".join(str(tuple(slot.shape)) for slot in slots)
            raise BadFile("shape", f"its slots differ in shape or dtype: {shapes}")
        states = torch.stack(slots, dim=1)
        return Sample(
            name=found.name,
            token_ids=numbers(content["input_ids"], "input_ids"),
            loss_mask=numbers(content["loss_mask"], "loss_mask"),
            states=states,
            dtype=str(states.dtype).removeprefix("torch."),
        )


def _is_dataset(place: Path) -> bool:
    return (place / "state.json").is_file() and (place / "dataset_info.json").is_file()


def _safetensors(path: Path) -> dict[str, Any]:
    """Return a file's tensors, memory-mapped; its header is bounded before it is parsed."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8:
            raise BadFile("truncated", f"cut short: {size} bytes")
        if length > _HEADER_LIMIT:
            raise BadFile("unreadable", "not a safetensors file of states: its header is too long")
        header = file.read(length)
    if length > size - 8 or size < 8 + length + _payload(header):
        raise BadFile("truncated", "cut short: it has fewer bytes than its header says")
    try:
        tensors: dict[str, Any] = load_file(path)
    except SafetensorError as error:
        raise BadFile("unreadable", f"safetensors cannot read it: {error}") from None
    return tensors


def _payload(header: bytes) -> int:
    """Return how many bytes a header says that follow it; 0 if it says nothing."""
    try:
        told = json.loads(header)
        return max(int(entry["data_offsets"][1]) for n, entry in told.items() if n[0] != "_")
    except (
        *(ValueError, TypeError, KeyError, IndexError, AttributeError),
        *(OverflowError, RecursionError),  # Infinity; ten thousand brackets
    ):
        return 0  # safetensors says what is wrong with it


def _scaled(states: Any, scales: Any) -> Any:
    import torch

    if scales.shape != (len(states), 1, 1):
        raise BadFile(
            "shape", f"its scales have shape {tuple(scales.shape)}, not {(len(states), 1, 1)}"
        )
    return states.to(torch.float32) * scales.to(torch.float32)

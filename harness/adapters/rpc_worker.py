"""What the adapter ``vllm_rpc`` runs inside each vLLM worker: hooks on the decoder's blocks.

vLLM adds ``RpcWorker`` to its worker's bases (``worker_extension_cls``); ``self`` is the worker.
The hooks are put in after the engine has started, so its warm-up never meets them, and they record
the prompt rows of requests that are to be captured, nothing else.
"""

from __future__ import annotations

import hashlib
import inspect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from truetap.harness.adapters import rpc_schedule, vllm_worker
from truetap.harness.adapters.rpc_schedule import Span
from truetap.harness.collect_worker import CollectWorker


class RpcWorker(CollectWorker):
    """Worker methods of the adapter, called by ``truetap.harness.collect``."""

    model_runner: Any
    _truetap_recorder: Recorder

    def truetap_watch(self, boundaries: list[int]) -> int:
        """Put hooks on the blocks; return the version of the model runner, 1 or 2.

        Raises RuntimeError where hooks would miss rows: a compiled or graph-captured model, or one
        that is split over pipeline stages.
        """
        config = self.vllm_config
        if not config.model_config.enforce_eager:
            raise RuntimeError("hooks do not run in a compiled model: enforce_eager is off")
        if config.parallel_config.pipeline_parallel_size > 1:
            raise RuntimeError("each pipeline stage has a part of the blocks only")
        if hasattr(self, "_truetap_recorder"):
            raise RuntimeError("this worker is watched already")
        version = rpc_schedule.runner_version(self.model_runner)
        blocks = find_blocks(
            self.model_runner.get_model(), config.model_config.hf_text_config.num_hidden_layers
        )
        self._truetap_recorder = Recorder(partial(rpc_schedule.spans, self.model_runner))
        self._truetap_recorder.attach(blocks, boundaries)
        return version

    def truetap_take(self, keys: list[str]) -> dict[str, Any]:
        """Hand out the rows of ``keys``, in that order, and forget all that was recorded.

        ``rows``: rows of each key that have a state at every boundary, and ``tokens``: how many
        its prompt has, 0 for a key that never came by. ``digests``: SHA-256 of each key's token ids
        and states. ``others``: requests recorded but not asked for. ``recomputed``: rows that were
        computed a second time, in which case the later one counts. Rank 0 adds ``token_ids`` and
        ``states`` ``[tokens, boundaries, hidden]``, zero where there was no row.
        """
        taken, others = self._truetap_recorder.take(keys)
        reply: dict[str, Any] = {
            "rows": [one.rows() if one else 0 for one in taken],
            "tokens": [len(one.token_ids) if one else 0 for one in taken],
            "digests": [one.digest() if one else "" for one in taken],
            "others": others,
            "recomputed": sum(one.recomputed for one in taken if one),
        }
        if self.rank == 0:
            reply["token_ids"] = [one.token_ids.tolist() if one else [] for one in taken]
            reply["states"] = [one.states if one else None for one in taken]
        return reply

    def truetap_facts(self) -> dict[str, Any]:
        """Return facts about this worker that can change what is captured."""
        return vllm_worker.facts(self)


@dataclass
class Recorded:
    """One prompt's rows, at their positions in the prompt."""

    states: Any
    """``[tokens, boundaries, hidden]`` on the CPU, in the engine's dtype."""
    token_ids: np.ndarray[Any, np.dtype[np.int64]]
    """What the model was given at each position; -1 where no row came by."""
    there: np.ndarray[Any, np.dtype[np.bool_]]
    """``[tokens, boundaries]``: whether there is a state."""
    recomputed: int = 0

    def rows(self) -> int:
        """Return how many rows are complete."""
        return int(self.there.all(axis=1).sum())

    def digest(self) -> str:
        """Return the SHA-256 of the token ids and of the states' raw bytes, hex."""
        import torch

        digest = hashlib.sha256(self.token_ids.tobytes())
        digest.update(memoryview(self.states.flatten().view(torch.uint8).numpy()))
        return digest.hexdigest()


@dataclass
class Recorder:
    """Records the residual stream at some boundaries, row by row, by request.

    ``spans`` says whose rows the present pass computes. Memory: one copy, in the host's memory, of
    every row recorded since the last ``take``, so it is bounded by the prompts sent in between.
    """

    spans: Callable[[], list[Span]]
    failure: str = ""
    """Why recording stopped. An exception in a hook would end the engine instead, and reach the
    caller as a dead engine core."""
    _requests: dict[str, Recorded] = field(default_factory=dict)
    _step: list[Span] = field(default_factory=list)

    def attach(self, blocks: Sequence[Any], boundaries: Sequence[int]) -> None:
        """Put hooks on the blocks: boundary k is what block k - 1 leaves, 0 what block 0 gets."""
        count = len(boundaries)
        parameters = inspect.signature(blocks[0].forward)

        def enter(_block: Any, args: Any, kwargs: Any) -> None:
            given = parameters.bind(*args, **kwargs).arguments
            stream = _stream((given["hidden_states"], given.get("residual")))
            self._begin(count, stream)
            for slot, boundary in enumerate(boundaries):
                if boundary == 0:
                    self._store(slot, stream)

        def leave(slot: int, _block: Any, _args: Any, output: Any) -> None:
            if self._step:
                self._store(slot, _stream(output))

        blocks[0].register_forward_pre_hook(self._kept_safe(enter), with_kwargs=True)
        for slot, boundary in enumerate(boundaries):
            if boundary > 0:
                blocks[boundary - 1].register_forward_hook(self._kept_safe(partial(leave, slot)))

    def take(self, keys: Sequence[str]) -> tuple[list[Recorded | None], int]:
        """Return what was recorded for each key, and for how many others; forget all of it."""
        if self.failure:
            raise RuntimeError(f"recording stopped: {self.failure}")
        requests, self._requests = self._requests, {}
        return [requests.pop(key, None) for key in keys], len(requests)

    def _begin(self, slots: int, stream: Any) -> None:
        """Note whose rows this pass computes, and make room for those seen for the first time."""
        import torch

        self._step = self.spans()
        for span in self._step:
            if span.key not in self._requests:
                shape = (span.prompt_length, slots)
                self._requests[span.key] = Recorded(
                    states=torch.zeros((*shape, stream.shape[-1]), dtype=stream.dtype),
                    token_ids=np.full(span.prompt_length, -1, dtype=np.int64),
                    there=np.zeros(shape, dtype=np.bool_),
                )
            request, places = self._requests[span.key], _places(span)
            request.recomputed += int(request.there[places].any(axis=1).sum())
            request.token_ids[places] = span.token_ids

    def _store(self, slot: int, stream: Any) -> None:
        """Copy the step's rows of one boundary: the engine reuses the memory they are in."""
        rows = stream.reshape(-1, stream.shape[-1])
        for span in self._step:
            request, places = self._requests[span.key], _places(span)
            theirs = rows[span.row : span.row + len(span.token_ids)]
            if theirs.shape != request.states[places, slot].shape:
                raise RuntimeError(
                    f"a block leaves {tuple(rows.shape)} where rows up to "
                    f"{span.row + len(span.token_ids)} are scheduled: each rank has a part only"
                )
            if theirs.dtype != request.states.dtype:
                raise RuntimeError(f"blocks leave {request.states.dtype} and {theirs.dtype}")
            request.states[places, slot] = theirs.to("cpu")
            request.there[places, slot] = True

    def _kept_safe(self, hook: Callable[..., None]) -> Callable[..., None]:
        def safe(*arguments: Any) -> None:
            if self.failure:
                return
            try:
                hook(*arguments)
            except Exception as error:
                self.failure = traceback.format_exception_only(error)[-1].strip()

        return safe


def find_blocks(model: Any, num_blocks: int) -> Sequence[Any]:
    """Return the decoder's blocks: the one outermost list of ``num_blocks`` modules.

    Looked for in the language model alone if the model has other parts. Raises RuntimeError if
    there is none, or more than one.
    """
    import torch

    if hasattr(model, "get_language_model"):
        model = model.get_language_model()
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_blocks and not inside:
            found[name] = module
    if len(found) != 1:
        raise RuntimeError(
            f"expected one list of {num_blocks} blocks in {type(model).__qualname__}, "
            f"found {len(found)}: {', '.join(found) or 'none'}"
        )
    (blocks,) = found.values()
    return list(blocks)


def _stream(output: Any) -> Any:
    """Return the residual stream that a block leaves, from the forms in which blocks leave it.

    Most leave (hidden, residual), not yet added, some the stream itself. The first block is given
    (hidden, None).
    """
    if not isinstance(output, tuple):
        return output
    hidden, *rest = output
    if not rest or (len(rest) == 1 and rest[0] is None):
        return hidden
    if len(rest) > 1 or getattr(rest[0], "shape", None) != hidden.shape:
        raise RuntimeError(f"a block leaves {len(output)} values that are not hidden and residual")
    return hidden + rest[0]


def _places(span: Span) -> slice:
    return slice(span.position, span.position + len(span.token_ids))

"""What the adapter ``vllm_rpc`` runs inside each vLLM worker: hooks on the decoder's blocks.

vLLM adds ``RpcWorker`` to its worker's bases (``worker_extension_cls``); ``self`` is the worker.
The hooks are put in after the engine has started, so its warm-up never meets them, and they record
the prompt rows of requests that are to be captured, nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from truetap.harness.adapters import rpc_schedule
from truetap.harness.adapters.rpc_schedule import Span
from truetap.harness.adapters.vllm_worker import StagingWorker

if TYPE_CHECKING:
    from truetap.harness.staging import Rows, Staging


class RpcWorker(StagingWorker):
    """Worker methods of the adapter, called by ``truetap.harness.collect``."""

    hashes_everywhere = True
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

    def truetap_tap(self, staging: Staging) -> None:
        """Give the hooks' rows to ``staging``."""
        self._truetap_recorder.sink = staging


class Sink(Protocol):
    """What takes the rows of a pass: a ``Staging``."""

    def put(self, key: str, position: int, token_ids: Sequence[int], rows: Rows) -> None:
        """Take the rows of a request from ``position`` on, one per token id."""

    def stop(self, error: Exception) -> None:
        """Hear that there will be no more rows."""


@dataclass
class Recorder:
    """Gathers the residual stream at some boundaries, pass by pass, and hands it over by request.

    ``spans`` says whose rows the present pass computes. Memory: the rows of one pass at every
    boundary, on the engine's device.
    """

    spans: Callable[[], list[Span]]
    sink: Sink | None = None
    """What takes the rows; until there is one, they are nobody's."""
    _stopped: bool = False
    _step: list[Span] = field(default_factory=list)
    _rows: Any = None
    """``[rows, boundaries, hidden]`` of the present pass."""
    _missing: set[int] = field(default_factory=set)
    """Slots of it that are not filled yet."""

    def attach(self, blocks: Sequence[Any], boundaries: Sequence[int]) -> None:
        """Put hooks on the blocks: boundary k is what block k - 1 leaves, 0 what block 0 gets."""
        parameters = inspect.signature(blocks[0].forward)

        def enter(_block: Any, args: Any, kwargs: Any) -> None:
            given = parameters.bind(*args, **kwargs).arguments
            stream = _stream((given["hidden_states"], given.get("residual")))
            self._begin(len(boundaries), stream)
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

    def _begin(self, slots: int, stream: Any) -> None:
        """Note whose rows this pass computes, and make room for them."""
        import torch

        self._step = self.spans()
        self._missing = set(range(slots))
        rows = max((span.row + len(span.token_ids) for span in self._step), default=0)
        self._rows = torch.empty(
            (rows, slots, stream.shape[-1]), dtype=stream.dtype, device=stream.device
        )

    def _store(self, slot: int, stream: Any) -> None:
        """Copy the pass's rows of one boundary: the engine reuses the memory they are in.

        With the last boundary the rows are complete, and handed over.
        """
        count = len(self._rows)
        rows = stream.reshape(-1, stream.shape[-1])[:count]
        if rows.shape != self._rows[:, slot].shape:
            raise RuntimeError(
                f"a block leaves {tuple(rows.shape)} where rows up to {count} are scheduled: each "
                "rank has a part only"
            )
        if rows.dtype != self._rows.dtype:
            raise RuntimeError(f"blocks leave {rows.dtype} and {self._rows.dtype}")
        self._rows[:, slot] = rows
        self._missing.discard(slot)
        if not self._missing and self.sink:
            for span in self._step:
                theirs = self._rows[span.row : span.row + len(span.token_ids)]
                self.sink.put(span.key, span.position, span.token_ids, partial(_part, theirs))

    def _kept_safe(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Have an exception stop the recording: in a hook it would end the engine instead."""

        def safe(*arguments: Any) -> None:
            if self._stopped:
                return
            try:
                hook(*arguments)
            except Exception as error:
                self._stopped = True
                if self.sink:
                    self.sink.stop(error)

        return safe


def _part(rows: Any, start: int, end: int) -> Any:
    return rows[start:end]


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

"""The reference: transformers, every boundary, one precision above the engine.

The same model run in the engine's own precision gives the *noise floor*: how far a correct capture
may be from the reference for numerical reasons alone. It is measured anew for each verifier, dtype
and prompt, so no tolerance is ever an absolute number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from truetap.harness import compare, verifier
from truetap.harness.errors import CouldNotRun, IntegrityError, UsageError
from truetap.harness.model import Float32

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class ReferenceStates:
    """What the reference says about one prompt of T tokens through n blocks of width H."""

    boundaries: Float32
    """``[n + 1, T, H]``: boundary k at index k, residual added, before any norm."""
    normed_last: Float32
    """``[T, H]``: the last boundary after the final norm."""
    noise: Float32
    """``[n + 1, T]``: relative L2 distance of the engine-precision reference, row by row."""
    logprobs: Float32
    """``[T - 1]``: log-probability of each token from the second on."""
    logprob_noise: Float32
    """``[T - 1]``: absolute difference of the engine-precision reference's log-probabilities."""


class Reference:
    """A verifier in transformers, in two precisions."""

    def __init__(self, model: Path, engine_dtype: str) -> None:
        self.precision = precise_dtype(engine_dtype)
        """What the reference itself computes in."""
        self._precise = _load(model, self.precision)
        self._rough = _load(model, engine_dtype)

    def states(self, token_ids: Sequence[int]) -> ReferenceStates:
        """Run one prompt in both precisions."""
        boundaries, normed, logprobs = _run(self._precise, token_ids)
        rough, _, rough_logprobs = _run(self._rough, token_ids)
        return ReferenceStates(
            boundaries=boundaries,
            normed_last=normed,
            noise=compare.row_distances(rough, boundaries),
            logprobs=logprobs,
            logprob_noise=np.abs(rough_logprobs - logprobs),
        )

    def states_of(self, prompts: Sequence[Sequence[int]]) -> list[ReferenceStates]:
        """Run several prompts, each by itself, in both precisions."""
        return [self.states(token_ids) for token_ids in prompts]

    def logprobs_of_last(self, last: Float32, token_ids: Sequence[int]) -> Float32:
        """Return log_softmax(lm_head(norm(h))) at each next token; ``last`` is ``[T, H]``."""
        import torch

        base, head = self._precise.base_model, self._precise.get_output_embeddings()
        with torch.no_grad():
            hidden = torch.from_numpy(np.ascontiguousarray(last)).to(head.weight.dtype)
            return _next_logprobs(head(base.norm(hidden)), token_ids)

    def preference(self, token_ids: Sequence[int], one: int, other: int) -> tuple[float, float]:
        """Return how far apart two next tokens are, and the noise of that, in nats.

        The noise is the engine-precision reference's typical error over the whole sequence.
        """
        pair = self.states_of([[*token_ids, token] for token in (one, other)])
        gap = abs(float(pair[0].logprobs[-1] - pair[1].logprobs[-1]))
        return gap, float(max(np.mean(states.logprob_noise) for states in pair))

    def next_boundary(self, k: int, state: Float32, *, rough: bool = False) -> Float32:
        """Return ``[T, H]``: what block ``k`` makes of ``state``, boundary k of one prompt.

        ``rough`` computes it in the engine's dtype.
        """
        import torch

        model = self._rough if rough else self._precise
        dtype = model.get_input_embeddings().weight.dtype
        stream = torch.from_numpy(np.ascontiguousarray(state))[None].to(dtype)
        reached: Float32 = through_block(model, k, stream)[0].float().numpy()
        return reached

    def embedding_rows(self, token_ids: Sequence[int]) -> Float32:
        """Return ``[T, H]``: boundary 0 in the engine's dtype, exactly."""
        import torch

        with torch.no_grad():
            rows = self._rough.get_input_embeddings()(torch.tensor([list(token_ids)]))[0]
        found: Float32 = rows.float().numpy()
        return found


def open_reference(
    model: Path,
    engine_dtype: str,
    *,
    kind: str = "auto",
    device: str = "cpu",
    console: Console | None = None,
) -> Reference:
    """Return the reference of a verifier: "whole", or "streamed" through memory block by block.

    "auto" holds it whole where both precisions take at most half of the free memory. Another
    ``device`` than the CPU is for the streamed one. ``console`` shows how far it has come.
    """
    from truetap.harness.streamed_reference import StreamedReference

    if kind == "whole" and device != "cpu":
        raise UsageError(
            f"the whole reference runs on the CPU, not on {device}",
            remedy="--reference streamed, which can run on a GPU",
        )
    if kind == "whole" or (kind == "auto" and device == "cpu" and _whole(model, engine_dtype)):
        return Reference(model, engine_dtype)
    return StreamedReference(model, engine_dtype, device=device, console=console)


def _whole(model: Path, engine_dtype: str) -> bool:
    """Return whether a verifier is one to hold whole: as transformers has it, and small enough."""
    import psutil

    from truetap.harness.streamed_reference import FAMILIES

    config = verifier.describe(model).config
    text = config.get("text_config", config)
    indirect = "text_config" in config or "quantization_config" in config
    if indirect and text.get("model_type") in FAMILIES:
        return False
    stored = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    kept_as = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16")
    weights = stored / _BYTES.get(kept_as, 2)
    needed = weights * (_BYTES[engine_dtype] + _BYTES[precise_dtype(engine_dtype)])
    return bool(needed <= psutil.virtual_memory().available / 2)


_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class _Enough(Exception):
    """Ends a forward pass of which nothing more is wanted."""


def through_block(model: Any, k: int, stream: Any) -> Any:
    """Return what block ``k`` of a transformers model makes of ``stream``; both ``[1, T, H]``.

    Masks and positions are prepared by the model, in ways that differ by family, so the block is
    not called by hand: the model runs as far as it, with another input for it.
    """
    import torch

    found: list[Any] = []

    def give(_module: Any, args: Any, kwargs: Any) -> Any:
        if "hidden_states" in kwargs:
            return args, kwargs | {"hidden_states": stream}
        return (stream, *args[1:]), kwargs

    def take(_module: Any, _inputs: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)
        raise _Enough

    block = model.base_model.layers[k]
    hooks = [
        block.register_forward_pre_hook(give, with_kwargs=True),
        block.register_forward_hook(take),
    ]
    try:
        with torch.no_grad():
            model.base_model(inputs_embeds=stream, use_cache=False)
    except _Enough:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return found[0]


def precise_dtype(engine_dtype: str) -> str:
    """Return the precision above an engine's."""
    return "float64" if engine_dtype == "float32" else "float32"


def how(dtype: str) -> dict[str, Any]:
    """Return what tells transformers, of any release, the dtype and how to compute experts."""
    import torch
    import transformers

    if int(transformers.__version__.partition(".")[0]) < 5:
        return {"torch_dtype": getattr(torch, dtype)}  # beside engines up to vLLM 0.16.0
    # The default, one grouped product over all experts, cannot be had in float64.
    return {"dtype": getattr(torch, dtype), "experts_implementation": "eager"}


def _load(model: Path, dtype: str) -> Any:
    try:
        import torch  # noqa: F401
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise CouldNotRun(
            f"the reference cannot run: {error}", remedy="pip install 'truetap[reference]'"
        ) from error
    logging.disable_progress_bar()
    try:
        made, told = AutoModelForCausalLM.from_pretrained(
            model, output_loading_info=True, **how(dtype)
        )
    except (OSError, ValueError, SafetensorError) as error:
        first = str(error).strip().partition("\n")[0]
        raise CouldNotRun(
            f"transformers cannot load the verifier in {model}: {first}",
            remedy="fetch the verifier again, or use a release of transformers that knows it",
        ) from error
    if missing := sorted(told["missing_keys"]):  # these it has made up
        raise IntegrityError(
            f"the checkpoint in {model} lacks {len(missing)} weights, the first is {missing[0]}",
            remedy="config.json and weights are not of one verifier, or cut short; fetch both",
        )
    return made.eval()


def _run(model: Any, token_ids: Sequence[int]) -> tuple[Float32, Float32, Float32]:
    """Return boundaries ``[n + 1, T, H]``, the normed last state and next-token log-probs."""
    import torch

    last: list[Any] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        last.append(output[0] if isinstance(output, tuple) else output)

    # transformers' tuple ends with the *normed* state; the last boundary comes from the block.
    hook = model.base_model.layers[-1].register_forward_hook(keep)
    try:
        with torch.no_grad():
            out = model(torch.tensor([list(token_ids)]), output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    *early, normed = out.hidden_states
    boundaries = torch.stack([*early, last[0]])[:, 0].float().numpy()
    return boundaries, normed[0].float().numpy(), _next_logprobs(out.logits[0], token_ids)


def _next_logprobs(logits: Any, token_ids: Sequence[int]) -> Float32:
    """Return ``[T - 1]`` log-probabilities of tokens 1.. from logits ``[T, vocabulary]``."""
    import torch

    following = torch.tensor(list(token_ids)[1:], dtype=torch.int64)
    chosen = logits[:-1].float().log_softmax(-1).gather(1, following[:, None])[:, 0]
    result: Float32 = chosen.numpy()
    return result

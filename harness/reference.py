"""The full reference: transformers, every boundary, one precision above the engine.

The same model run in the engine's own precision gives the *noise floor*: how far a correct capture
may be from the reference for numerical reasons alone. It is measured anew for each verifier, dtype
and prompt, so no tolerance is ever an absolute number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from truetap.harness import compare
from truetap.harness.errors import CouldNotRun
from truetap.harness.model import Float32


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
        self.precision = "float64" if engine_dtype == "float32" else "float32"
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
        pair = [self.states([*token_ids, token]) for token in (one, other)]
        gap = abs(float(pair[0].logprobs[-1] - pair[1].logprobs[-1]))
        return gap, float(max(np.mean(states.logprob_noise) for states in pair))

    def next_boundary(self, k: int, state: Float32, *, rough: bool = False) -> Float32:
        """Return ``[T, H]``: what block ``k`` makes of ``state``, boundary k of one prompt.

        ``rough`` computes it in the engine's dtype.
        """
        return _through_block(self._rough if rough else self._precise, k, state)

    def embedding_rows(self, token_ids: Sequence[int]) -> Float32:
        """Return ``[T, H]``: boundary 0 in the engine's dtype, exactly."""
        import torch

        with torch.no_grad():
            rows = self._rough.get_input_embeddings()(torch.tensor([list(token_ids)]))[0]
        found: Float32 = rows.float().numpy()
        return found


class _Enough(Exception):
    """Ends a forward pass of which nothing more is wanted."""


def _through_block(model: Any, k: int, state: Float32) -> Float32:
    """Run the model as far as block ``k``, with another input for it.

    Masks and positions are prepared by the model, in ways that differ by family, so the block is
    not called by hand.
    """
    import torch

    found: list[Any] = []
    dtype = model.get_input_embeddings().weight.dtype
    stream = torch.from_numpy(np.ascontiguousarray(state))[None].to(dtype)

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
            model(torch.zeros((1, len(state)), dtype=torch.int64), use_cache=False)
    except _Enough:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    reached: Float32 = found[0][0].float().numpy()
    return reached


def _load(model: Path, dtype: str) -> Any:
    try:
        import torch
        import transformers
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise CouldNotRun(
            f"the reference cannot run: {error}", remedy="pip install 'truetap[reference]'"
        ) from error
    logging.disable_progress_bar()
    how = {"dtype": getattr(torch, dtype)}
    if int(transformers.__version__.partition(".")[0]) < 5:
        how = {"torch_dtype": getattr(torch, dtype)}  # beside engines up to vLLM 0.16.0
    else:
        # The default, one grouped product over all experts, cannot be had in float64.
        how["experts_implementation"] = "eager"
    return AutoModelForCausalLM.from_pretrained(model, **how).eval()


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

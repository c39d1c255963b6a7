"""The reference for verifiers too large to load twice: one decoder block in memory at a time.

transformers builds the model without weights. To compute block k, its weights are read from the
checkpoint, and the library's own forward pass runs with every other block standing aside: masks,
positions and whatever else differs by family are the library's. All prompts of a call go through a
block in both precisions before the next is read, so the checkpoint is read once a call.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from truetap.harness import compare, verifier
from truetap.harness.checkpoint import Checkpoint, Tensors
from truetap.harness.errors import CouldNotRun, UsageError
from truetap.harness.model import Float32
from truetap.harness.progress import bar
from truetap.harness.reference import Reference, ReferenceStates, how, precise_dtype, through_block

if TYPE_CHECKING:
    from rich.console import Console

FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "qwen3_next": "qwen3_next",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",  # the same blocks by another name
}
"""By the text model's ``model_type``: the family of transformers that computes it."""

VOCABULARY_SLICE = 4096
"""Rows of the output head that are in memory at a time."""


class StreamedReference(Reference):
    """A verifier of which one block is in memory at a time.

    ``device`` is where it is computed: "cpu", or a GPU that the engine leaves alone, "cuda:1".
    Raises UsageError for a verifier of another family or one quantised in a way not read here.
    """

    def __init__(
        self,
        model: Path,
        engine_dtype: str,
        *,
        device: str = "cpu",
        console: Console | None = None,
    ) -> None:
        family = _family(model)
        self._checkpoint = Checkpoint(model)
        self._device = _device(device)
        self._console = console
        self.precision = precise_dtype(engine_dtype)
        self._dtypes = _dtypes(engine_dtype)
        self._model, self._empty = _without_weights(model, family, self._device)
        self._held: tuple[int, Any, Any] | None = None

    def states(self, token_ids: Sequence[int]) -> ReferenceStates:
        """Run one prompt: a whole pass over the checkpoint, so prefer ``states_of``."""
        return self.states_of([token_ids])[0]

    def states_of(self, prompts: Sequence[Sequence[int]]) -> list[ReferenceStates]:
        """Run all prompts in both precisions, in one pass over the checkpoint."""
        if not prompts:
            return []
        precise, rough = self._dtypes
        streams = {dtype: [self._embedded(ids, dtype) for ids in prompts] for dtype in self._dtypes}
        reached = [[_numbers(state[0])] for state in streams[precise]]
        noise = [[_apart(*pair)] for pair in zip(streams[rough], streams[precise], strict=True)]
        told = nullcontext(None) if self._console is None else self._bar(self._console)
        with told as progress:
            for k in range(len(self._empty)):
                for dtype in self._dtypes:
                    streams[dtype] = [self._through(k, dtype, state) for state in streams[dtype]]
                for i, pair in enumerate(zip(streams[rough], streams[precise], strict=True)):
                    noise[i].append(_apart(*pair))
                    reached[i].append(_numbers(pair[1][0]))
                if progress is not None:
                    progress.advance()
        self._release()
        normed = {dtype: self._normed(streams[dtype], dtype) for dtype in self._dtypes}
        logprobs = self._next_logprobs(normed, prompts)
        return [
            ReferenceStates(
                boundaries=np.stack(reached[i]),
                normed_last=_numbers(normed[precise][i]),
                noise=np.stack(noise[i]),
                logprobs=logprobs[precise][i],
                logprob_noise=np.abs(logprobs[rough][i] - logprobs[precise][i]),
            )
            for i in range(len(prompts))
        ]

    def logprobs_of_last(self, last: Float32, token_ids: Sequence[int]) -> Float32:
        """Return log_softmax(lm_head(norm(h))) at each next token; ``last`` is ``[T, H]``.

        Reads the final norm and the output head, nothing else.
        """
        precise = self._dtypes[0]
        self._release()
        normed = self._normed([self._stream(last, precise)], precise)
        return self._next_logprobs({precise: normed}, [token_ids])[precise][0]

    def next_boundary(self, k: int, state: Float32, *, rough: bool = False) -> Float32:
        """Return ``[T, H]``: what block ``k`` makes of ``state``, boundary k of one prompt.

        The block stays in memory for the next call. To read it once, ask for all that is wanted of
        it in turn, with ``rough`` last.
        """
        dtype = self._dtypes[1 if rough else 0]
        return _numbers(self._through(k, dtype, self._stream(state, dtype))[0])

    def embedding_rows(self, token_ids: Sequence[int]) -> Float32:
        """Return ``[T, H]``: boundary 0 in the engine's dtype, exactly."""
        return _numbers(self._embedded(token_ids, self._dtypes[1])[0])

    def _bar(self, console: Console) -> Any:
        return bar(console, "truetap: blocks through the reference", len(self._empty))

    def _stream(self, state: Float32, dtype: Any) -> Any:
        import torch

        return torch.from_numpy(np.ascontiguousarray(state))[None].to(self._device, dtype)

    def _embedded(self, token_ids: Sequence[int], dtype: Any) -> Any:
        with self._checkpoint.opened(self._device) as tensors:
            return tensors.rows(self._checkpoint.embeddings, list(token_ids), dtype)[None]

    def _through(self, k: int, dtype: Any, state: Any) -> Any:
        self._hold(k, dtype)
        return through_block(self._model, k, state)

    def _hold(self, k: int, dtype: Any) -> None:
        """Put block ``k`` into its place, and whatever block was in memory out of it."""
        import torch

        if self._held is not None and self._held[:2] == (k, dtype):
            return
        if self._held is not None and self._held[0] == k and dtype == self._dtypes[1]:
            self._coarsen(self._held[2], dtype)
            self._held = (k, dtype, self._held[2])
            return
        self._release()
        try:
            with self._checkpoint.opened(self._device) as tensors:
                block = self._loaded(f"model.layers.{k}", self._empty[k], dtype, tensors)
        except torch.OutOfMemoryError as error:
            raise CouldNotRun(
                f"block {k} of the verifier does not fit into the memory of {self._device}",
                remedy="--reference-device cpu, or another GPU",
            ) from error
        self._model.base_model.layers[k] = block
        self._held = (k, dtype, block)

    def _release(self) -> None:
        if self._held is not None:
            k = self._held[0]
            self._model.base_model.layers[k] = _standing_aside(self._empty[k])
            self._held = None

    def _loaded(self, name: str, empty: Any, dtype: Any, tensors: Tensors) -> Any:
        """Return a copy of a module with weights from the checkpoint."""
        module = copy.deepcopy(empty)
        weights = {
            part: self._weight(f"{name}.{part}", like.shape, self._kept(part, dtype), tensors)
            for part, like in module.state_dict().items()
        }
        module.load_state_dict(weights, assign=True)
        return module

    def _weight(self, name: str, shape: Sequence[int], dtype: Any, tensors: Tensors) -> Any:
        projections = _FUSED.get(name.rpartition(".")[2], ())
        if "experts" not in name or not projections or self._checkpoint.has(name):
            return tensors.tensor(name, dtype, shape)
        return _fused_experts(name.rpartition(".")[0], projections, shape, dtype, tensors)

    def _coarsen(self, block: Any, dtype: Any) -> None:
        """Round a block's weights, in place: the precise ones hold the checkpoint's exactly."""
        for name, weight in [*block.named_parameters(), *block.named_buffers()]:
            weight.data = weight.data.to(self._kept(name, dtype))

    def _kept(self, name: str, dtype: Any) -> Any:
        """Return the dtype of a weight: some stay in float32 in every coarser model."""
        import torch

        always = getattr(self._model, "_keep_in_fp32_modules_strict", None) or ()
        coarse = dtype in (torch.bfloat16, torch.float16)
        return torch.float32 if coarse and any(part in name for part in always) else dtype

    def _normed(self, states: Sequence[Any], dtype: Any) -> list[Any]:
        """Return ``[T, H]`` each: last boundaries after the final norm."""
        import torch

        with self._checkpoint.opened(self._device) as tensors, torch.no_grad():
            norm = self._loaded("model.norm", self._model.base_model.norm, dtype, tensors)
            return [norm(state)[0] for state in states]

    def _next_logprobs(
        self, normed: dict[Any, list[Any]], prompts: Sequence[Sequence[int]]
    ) -> dict[Any, list[Float32]]:
        """Return ``[T - 1]`` each, by dtype, for normed states ``[T, H]`` of all prompts.

        The head is read once, in slices, whose log-sums are added up.
        """
        import torch

        following = torch.tensor([token for ids in prompts for token in list(ids)[1:]])
        following = following.to(self._device, torch.int64)
        rows = {dtype: torch.cat([state[:-1] for state in normed[dtype]]) for dtype in normed}
        sums = {dtype: torch.full((len(following),), -torch.inf).to(self._device) for dtype in rows}
        chosen = {dtype: torch.zeros(len(following)).to(self._device) for dtype in rows}
        start = 0
        name = self._checkpoint.head or self._checkpoint.embeddings
        with self._checkpoint.opened(self._device) as tensors, torch.no_grad():
            for part in tensors.slices(name, VOCABULARY_SLICE):
                inside = ((following >= start) & (following < start + len(part))).nonzero()[:, 0]
                for dtype, states in rows.items():
                    logits = torch.nn.functional.linear(states, part.to(dtype)).float()
                    sums[dtype] = torch.logaddexp(sums[dtype], logits.logsumexp(-1))
                    chosen[dtype][inside] = logits[inside, following[inside] - start]
                start += len(part)
        lengths = [len(ids) - 1 for ids in prompts]
        return {
            dtype: [_numbers(part) for part in (chosen[dtype] - sums[dtype]).split(lengths)]
            for dtype in rows
        }


_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Weights that transformers holds for all experts at once, and of what in each they are made."""


def _fused_experts(
    name: str, projections: Sequence[str], shape: Sequence[int], dtype: Any, tensors: Tensors
) -> Any:
    """Return ``[experts, rows, columns]`` of projections that the checkpoint has one by one."""
    experts, rows, columns = shape
    each = rows // len(projections)
    fused: Any = None
    for expert in range(experts):
        for i, projection in enumerate(projections):
            part = f"{name}.{expert}.{projection}.weight"
            weight = tensors.tensor(part, dtype, (each, columns))
            fused = weight.new_empty(tuple(shape)) if fused is None else fused
            fused[expert, i * each : (i + 1) * each] = weight
    return fused


def _family(model: Path) -> str:
    config = verifier.describe(model).config
    named = str(config.get("text_config", config).get("model_type"))
    if named not in FAMILIES:
        raise UsageError(
            f"the streamed reference does not know verifiers of the family {named!r}",
            remedy=f"it knows {', '.join(FAMILIES)}; for others use --reference whole",
        )
    return FAMILIES[named]


def _device(device: str) -> str:
    try:
        import torch
    except ImportError as error:
        raise CouldNotRun(
            f"the reference cannot run: {error}", remedy="pip install 'truetap[reference]'"
        ) from error
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise CouldNotRun(
            f"the reference cannot run on {device!r}: {first}",
            remedy="--reference-device cpu, or a GPU that torch sees, such as cuda:0",
        ) from error
    return device


def _dtypes(engine_dtype: str) -> tuple[Any, Any]:
    import torch

    return getattr(torch, precise_dtype(engine_dtype)), getattr(torch, engine_dtype)


def _without_weights(model: Path, family: str, device: str) -> tuple[Any, list[Any]]:
    """Return a model whose blocks stand aside, and its blocks, all without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    whole = verifier.describe(model).config
    text = dict(whole.get("text_config", whole))
    for unwanted in ("model_type", "auto_map", "quantization_config"):
        text.pop(unwanted, None)
    try:
        config = AutoConfig.for_model(family, **text)
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(config, **how("float32")).eval()
    except Exception as error:  # whatever a setting leads to
        raise UsageError(
            f"transformers cannot build a verifier from the config.json in {model}: "
            f"{type(error).__name__}: {error}",
            remedy="fetch the verifier again, or use a release of transformers that knows it",
        ) from error
    made.requires_grad_(requires_grad=False)
    # Angles are computed, not stored, so these need memory and are made anew.
    made.base_model.rotary_emb = type(made.base_model.rotary_emb)(config=config).to(device)
    blocks = list(made.base_model.layers)
    made.base_model.layers = torch.nn.ModuleList(_standing_aside(block) for block in blocks)
    return made, blocks


def _standing_aside(block: Any) -> Any:
    """Return what passes on a block's input, and looks like it to a model's forward pass."""
    import torch

    class StandingAside(torch.nn.Module):
        attention_type = getattr(block, "attention_type", None)

        def forward(self, hidden_states: Any, *_args: Any, **_kwargs: Any) -> Any:
            return hidden_states

    return StandingAside()


def _numbers(values: Any) -> Float32:
    found: Float32 = values.float().cpu().numpy()
    return found


def _apart(rough: Any, precise: Any) -> Float32:
    """Return ``[T]`` row distances of two states ``[1, T, H]``."""
    return compare.row_distances(_numbers(rough[0]), _numbers(precise[0]))

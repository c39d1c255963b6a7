"""One model family of a release, run over symbolic layers.

A state is the set of its summands: the embeddings and one contribution of each block. Block k takes
(hidden, residual) and returns its contribution and their sum, as vLLM's decoder layers do; so what
was captured can be read off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from truetap.harness.surface.link import Linker
from truetap.harness.surface.strict import NotUnderstood, Prepared, Strict, bare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from truetap.harness.surface.wheel import Source

BLOCKS = 8
"""Blocks of the stand-in models; a multiple of 4, so that halves of two stages are whole."""

FAMILIES = {
    "deepseek_v2": "DeepseekV2",
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
}
"""Model file, which is also the family's name, to the prefix of its classes."""

MODELS = "vllm.model_executor.models"
INTERFACES = f"{MODELS}.interfaces"

_SET = "set_aux_hidden_state_layers"


@dataclass(frozen=True)
class State(Strict):
    """A stand-in for hidden states: what was summed up, and whether the final norm was applied."""

    summands: frozenset[str]
    normed: bool = False
    shape: tuple[int, int] = (3, 4)

    def __add__(self, other: object) -> State:
        if not isinstance(other, State):
            return NotImplemented
        if self.normed or other.normed or self.summands & other.summands:
            return State(frozenset({"?"}))
        return State(self.summands | other.summands)


class _Tensors(Strict):
    """A stand-in for what one pipeline stage hands to the next."""

    def __init__(self, tensors: dict[str, State]) -> None:
        self.tensors = tensors

    def __getitem__(self, key: str) -> State:
        return self.tensors[key]


class _Layer(Strict):
    def __init__(self, block: int) -> None:
        self._block = block

    def __call__(
        self, _positions: Any, hidden: State, residual: State | None, *_a: Any, **_k: Any
    ) -> tuple[State, State]:
        stream = hidden if residual is None else hidden + residual
        return State(frozenset({str(self._block)})), stream


def _norm(hidden: State, residual: State | None = None) -> Any:
    stream = hidden if residual is None else hidden + residual
    return (State(stream.summands, normed=True), None)


class Family:
    """One model family of a release, with the stand-ins that its code runs over."""

    def __init__(self, source: Source, name: str, *, method: str = _SET) -> None:
        prefix = FAMILIES[name]
        model, outer = f"{prefix}Model", f"{prefix}ForCausalLM"
        self._stage, self._stages = 0, 1
        only = {model: ("forward", f"_{_SET}"), outer: (method,)}
        linker = Linker(source, _standins(self._group), only)
        self._model = linker.get(f"{MODELS}.{name}", model)
        self._outer = linker.get(f"{MODELS}.{name}", outer)

    def captures(self) -> bool:
        """Return whether the family's models can be told to capture."""
        return hasattr(self._outer, _SET)

    def default_ids(self, getter: str, blocks: int) -> tuple[int, ...]:
        """Return what the method ``getter`` of a model with that many blocks gives."""
        return tuple(getattr(self._build(0, blocks, blocks), getter)())

    def stored(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ids that the model holds after it was told ``ids``."""
        outer = self._build(0, BLOCKS, BLOCKS)
        getattr(outer, _SET)(ids)
        return tuple(outer.model.aux_hidden_state_layers)

    def several(self, ids: tuple[int, ...]) -> list[str]:
        """Return the words for several ids, in the order in which the states came."""
        return [label(state) for state in self._captured(ids, 1)]

    def word(self, layer_id: int, *, stages: int = 1) -> str:
        """Return the word for one id, asked for alone."""
        try:
            captured = self._captured((layer_id,), stages)
        except TypeError as error:
            if "unsupported operand type(s) for +" not in str(error):
                raise
            return "TypeError"
        if len(captured) > 1:
            raise NotUnderstood(f"no word for {len(captured)} states of one id")
        return label(captured[0]) if captured else "not captured"

    def _captured(self, ids: tuple[int, ...], stages: int) -> Sequence[State]:
        per_stage = BLOCKS // stages
        handed: Any = None
        for stage in range(stages):
            self._stage, self._stages = stage, stages
            outer = self._build(stage * per_stage, (stage + 1) * per_stage, BLOCKS)
            getattr(outer, _SET)(ids)
            handed = outer.model.forward(
                input_ids=Prepared("input_ids"),
                positions=Prepared("positions", shape=(3,)),
                intermediate_tensors=handed,
                inputs_embeds=None,
            )
        if isinstance(handed, State):
            return []
        if isinstance(handed, tuple) and len(handed) == 2 and isinstance(handed[1], list):
            return handed[1]
        raise NotUnderstood(f"forward returned a {type(handed).__name__}")

    def _group(self) -> Prepared:
        """Return the group of the pipeline's stages, as the present stage sees it."""
        return Prepared(
            "pipeline_group",
            is_first_rank=self._stage == 0,
            is_last_rank=self._stage == self._stages - 1,
            world_size=self._stages,
        )

    def _build(self, start: int, end: int, blocks: int) -> Any:
        """Return the outer model around a decoder that holds the blocks from start to end."""
        model = bare(
            self._model,
            layers=[_Layer(i) for i in range(blocks)],
            start_layer=start,
            end_layer=end,
            norm=_norm,
            embed_tokens=lambda _ids: State(frozenset({"embeddings"})),
            config=Prepared("config", llama_4_scaling=None),
        )
        # What a model of text and images would have around its decoder.
        return bare(self._outer, ("get_language_model", "language_model"), model=model)


def _standins(group: Callable[[], Any]) -> dict[str, object]:
    def unchanged(cls: type | None = None, **_: Any) -> Any:
        return unchanged if cls is None else cls

    return {
        "torch.nn.Module": type("Module", (), {}),
        "vllm.compilation.decorators.support_torch_compile": unchanged,
        "vllm.distributed.get_pp_group": group,
        "vllm.distributed.parallel_state.get_pp_group": group,
        "vllm.distributed.parallel_state.model_parallel_is_initialized": lambda: True,
        "vllm.sequence.IntermediateTensors": _Tensors,
    }


def label(state: State) -> str:
    """Return the word for what was captured, boundaries written with n, the number of blocks."""
    blocks = sorted(int(s) for s in state.summands if s.isdigit())
    if "embeddings" in state.summands and blocks == list(range(len(blocks))):
        word = f"boundary {_in_n(len(blocks))}"
    elif len(state.summands) == 1 and len(blocks) == 1:
        word = f"block {_in_n(blocks[0])} without residual"
    else:
        word = f"a sum of {', '.join(sorted(state.summands))}"
    return f"{word} after the final norm" if state.normed else word


def _in_n(number: int) -> str:
    names = {
        BLOCKS // 4: "n/4",
        BLOCKS // 2: "n/2",
        BLOCKS * 3 // 4: "3n/4",
        BLOCKS - 1: "n-1",
        BLOCKS: "n",
    }
    return names.get(number, str(number))

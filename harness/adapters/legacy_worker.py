"""What the adapter ``speculators_legacy`` runs inside each vLLM worker.

Written anew after what the worker extension of speculators 0.3.0 did: the first tensor-parallel
rank keeps the stream after each of some layers, pass after pass, and hands out one tensor a layer,
in the order of the layers. It replaced the model's ``forward``; here hooks do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from truetap.harness.adapters import vllm_worker


class LegacyWorker:
    """Worker methods of the adapter; they answer with bare values, as those of 0.3.0 did."""

    model_runner: Any
    vllm_config: Any
    rank: int
    _legacy_states: dict[int, list[Any]]

    def _setup_capture(self, layer_ids: Sequence[int]) -> None:
        """Keep what these layers leave, from now on; layer i is block i, counted from 0."""
        self._legacy_states = {}
        if self.rank % self.vllm_config.parallel_config.tensor_parallel_size:
            return
        layers = self.model_runner.get_model().model.layers
        for layer_id in sorted(set(layer_ids)):
            layers[layer_id].register_forward_hook(partial(self._keep, layer_id))

    def _reset_capture(self) -> None:
        """Drop what earlier passes left."""
        self._legacy_states = {}

    def _get_captured_states(self) -> list[Any] | None:
        """Return one tensor ``[rows of all passes, hidden]`` a layer, or None; forget them."""
        import torch

        states, self._legacy_states = self._legacy_states, {}
        return [torch.cat(states[layer_id]) for layer_id in sorted(states)] or None

    def _engine_facts(self) -> dict[str, Any]:
        """Return facts about this worker that can change what is captured."""
        return vllm_worker.facts(self)

    def _keep(self, layer_id: int, _layer: Any, _inputs: Any, output: Any) -> None:
        hidden, residual = output  # vLLM's blocks return the two apart
        self._legacy_states.setdefault(layer_id, []).append((hidden + residual).clone())

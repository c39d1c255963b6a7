"""A worker that captures hidden states by hooks, the way of the founding pipeline.

Eager mode only, one forward pass, Llama-like blocks: enough to put real states of real workers
through a reply channel. It is no capture path for training.
"""

from __future__ import annotations

from typing import Any

from truetap.harness.probe_worker import ProbeWorker

WORKER = f"{__name__}.HookedWorker"


class HookedWorker(ProbeWorker):
    """Keeps the residual stream after chosen blocks during the next forward pass."""

    model_runner: Any
    _hooked_states: dict[int, Any]

    def hook_boundaries(self, boundaries: list[int]) -> list[int]:
        """Capture these boundaries (1..n) from now on; return them."""
        self._hooked_states = {}
        layers = self.model_runner.get_model().model.layers
        for boundary in boundaries:
            layers[boundary - 1].register_forward_hook(self._keep(boundary))
        return boundaries

    def hook_forget(self) -> None:
        """Drop what warm-up left."""
        self._hooked_states = {}

    def hooked_states(self) -> list[Any]:
        """Return one tensor ``[rows of the last pass, hidden]`` per boundary, on the CPU."""
        states: dict[int, Any] = self._hooked_states
        return [states[boundary] for boundary in sorted(states)]

    def _keep(self, boundary: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            hidden, residual = output  # vLLM's blocks return the two apart
            if boundary not in self._hooked_states:
                self._hooked_states[boundary] = (hidden + residual).detach().clone().cpu()

        return hook

"""Capture with transformers itself: the reference, put through the suite like anybody else.

It shares no code with the oracle in ``truetap.harness.reference`` beyond the library: states are
taken by hooks on the blocks' *inputs*, one prompt at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from truetap.harness import envelope, environment, verifier
from truetap.harness.boundaries import check
from truetap.harness.errors import CouldNotRun
from truetap.harness.model import Capture, CaptureBatch, CaptureRequest, EngineSpec, Environment


class TransformersAdapter:
    """transformers in this process, in the dtype of the specification."""

    name = "transformers"

    def open(self, spec: EngineSpec, *, scratch: Path) -> TransformersSession:  # noqa: ARG002
        """Load the model; needs no scratch folder."""
        return TransformersSession(spec)


class TransformersSession:
    """A verifier held by transformers."""

    def __init__(self, spec: EngineSpec) -> None:
        try:
            import torch
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging
        except ImportError as error:
            raise CouldNotRun(
                f"transformers cannot run: {error}", remedy="pip install 'truetap[reference]'"
            ) from error
        facts = verifier.describe(Path(spec.model))
        self.boundaries = check(spec.boundaries, facts.num_blocks)
        self._spec = spec
        logging.disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            spec.model, dtype=getattr(torch, spec.dtype)
        ).eval()

    def capture(self, requests: Sequence[CaptureRequest]) -> CaptureBatch:
        """Capture one prompt after the other."""
        nonce = envelope.new_nonce()
        captures = tuple(self._capture(request) for request in requests)
        reply = envelope.seal(nonce, 0, 1, lambda: {"requests": len(captures)})
        return CaptureBatch(captures=captures, nonce=nonce, replies=[reply])

    def _capture(self, request: CaptureRequest) -> Capture:
        import torch

        seen: dict[int, Any] = {}
        layers = self._model.base_model.layers
        hooks = []
        for boundary in self.boundaries:
            # Boundary k is what block k takes in; after the last block, what the final norm takes.
            module = layers[boundary] if boundary < len(layers) else self._model.base_model.norm
            hooks.append(
                module.register_forward_pre_hook(
                    lambda _module, inputs, k=boundary: seen.__setitem__(k, inputs[0][0].clone())
                )
            )
        try:
            with torch.no_grad():
                self._model(torch.tensor([list(request.token_ids)]), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        states = torch.stack([seen[boundary] for boundary in self.boundaries], dim=1)
        return Capture(
            key=request.key,
            token_ids=request.token_ids,
            boundaries=self.boundaries,
            states=states.float().numpy(),
            dtype=str(states.dtype).removeprefix("torch."),
        )

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float] | None:
        """Return log-probabilities from the model's own logits."""
        import torch

        with torch.no_grad():
            logits = self._model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        logprobs = logits.float().log_softmax(-1).numpy()
        return [float(x) for x in logprobs[np.arange(len(token_ids) - 1), list(token_ids)[1:]]]

    def environment(self) -> Environment:
        """Return facts about this process."""
        import torch
        import transformers

        facts = {
            "engine": "transformers",
            "engine_version": transformers.__version__,
            "torch_version": str(torch.__version__),
            "device": torch.backends.cpu.get_cpu_capability(),
            "model": self._spec.model,
            "dtype": self._spec.dtype,
            "world_size": 1,
        }
        digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
        return environment.assemble(
            facts,
            boundaries=self.boundaries,
            adapter=TransformersAdapter.name,
            adapter_digest=digest,
        )

    def close(self) -> None:
        """Drop the model."""
        self._model = None

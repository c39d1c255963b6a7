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
from truetap.harness.errors import CouldNotRun, UsageError
from truetap.harness.model import Capture, CaptureBatch, CaptureRequest, EngineSpec, Environment


class TransformersAdapter:
    """transformers in this process, in the dtype of the specification."""

    name = "transformers"

    def open(self, spec: EngineSpec, *, scratch: Path) -> TransformersSession:
        """Load the model."""
        return TransformersSession(spec, scratch / "transformers.log")


class TransformersSession:
    """A verifier held by transformers."""

    def __init__(self, spec: EngineSpec, log: Path | None = None) -> None:
        _refuse(spec)
        try:
            import torch
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging
        except ImportError as error:
            raise CouldNotRun(
                f"transformers cannot run: {error}", remedy="pip install 'truetap[reference]'"
            ) from error
        facts = verifier.describe(Path(spec.model))
        self.boundaries = check(spec.boundaries, facts.num_blocks) if spec.boundaries else ()
        self.log = log
        self._spec = spec
        logging.disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            spec.model, dtype=getattr(torch, spec.dtype)
        ).eval()

    def capture(self, requests: Sequence[CaptureRequest]) -> CaptureBatch:
        """Capture one prompt after the other."""
        for request in requests:
            tokens = len(request.token_ids) + request.max_tokens - 1
            if not request.token_ids or tokens >= self._spec.max_model_len:
                raise UsageError(
                    f"request {request.key!r} needs {tokens} tokens; with max_model_len "
                    f"{self._spec.max_model_len} there may be 1 to {self._spec.max_model_len - 1}",
                    remedy="raise max_model_len or shorten the prompt",
                )
        nonce = envelope.new_nonce()
        captures = tuple(self._capture(request) for request in requests)
        reply = envelope.seal(nonce, 0, 1, lambda: {"requests": len(captures)})
        if self.log is not None:
            with self.log.open("a") as log:
                log.write(f"captured {len(captures)} requests, call {nonce}\n")
        return CaptureBatch(captures=captures, nonce=nonce, replies=[reply])

    def _capture(self, request: CaptureRequest) -> Capture:
        import torch

        seen: dict[int, list[Any]] = {boundary: [] for boundary in self.boundaries}
        layers = self._model.base_model.layers
        hooks = []
        for boundary in self.boundaries:
            # Boundary k is what block k takes in; after the last block, what the final norm takes.
            module = layers[boundary] if boundary < len(layers) else self._model.base_model.norm
            hooks.append(
                module.register_forward_pre_hook(
                    lambda _module, inputs, k=boundary: seen[k].append(inputs[0][0].clone())
                )
            )
        try:
            generated = self._generate(request)
        finally:
            for hook in hooks:
                hook.remove()
        passes = request.max_tokens if self._spec.include_output else 1
        states = _NO_STATES
        dtype = self._spec.dtype
        if self.boundaries:
            rows = [torch.cat(seen[boundary][:passes]) for boundary in self.boundaries]
            dtype = str(rows[0].dtype).removeprefix("torch.")
            states = torch.stack(rows, dim=1).float().numpy()
        return Capture(
            key=request.key,
            token_ids=request.token_ids + generated[: passes - 1],
            boundaries=self.boundaries,
            states=states,
            dtype=dtype,
            generated=generated,
        )

    def _generate(self, request: CaptureRequest) -> tuple[int, ...]:
        """Run the prompt, and greedily what follows it, a token a pass."""
        import torch

        generated: list[int] = []
        step, cache = list(request.token_ids), None
        with torch.no_grad():
            while len(generated) < request.max_tokens:
                out = self._model(
                    torch.tensor([step]), past_key_values=cache, use_cache=request.max_tokens > 1
                )
                cache = out.past_key_values
                step = [int(out.logits[0, -1].argmax())]
                generated += step
        return tuple(generated)

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


_NO_STATES = np.zeros((0, 0, 0), dtype=np.float32)


def _refuse(spec: EngineSpec) -> None:
    """Refuse what one process without a scheduler cannot do."""
    wanted = {
        "tensor parallel": spec.tensor_parallel_size > 1,
        "Ray": spec.executor != "mp",
        "compiled": not spec.enforce_eager,
        "preempting": spec.kv_cache_blocks is not None,
    }
    for what, asked in wanted.items():
        if asked:
            raise UsageError(
                f"the transformers adapter has no {what} engine",
                remedy="use an adapter of an engine that has one",
            )

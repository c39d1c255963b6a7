"""The capture path of ``hf_hooks``, as an adapter that truetap can put through its suite."""

import hashlib
from pathlib import Path

import torch
import transformers
from hf_hooks import HookedModel

from truetap.harness import envelope, environment
from truetap.harness.errors import UsageError
from truetap.harness.model import Capture, CaptureBatch


class HfHooksAdapter:
    """Registered as ``hf_hooks``."""

    name = "hf_hooks"
    model_class = HookedModel

    def open(self, spec, *, scratch):
        """Load the verifier, or refuse what these hooks cannot do."""
        if spec.tensor_parallel_size > 1 or spec.include_output or not spec.boundaries:
            raise UsageError("hf_hooks has one rank, prompts only, and not without capture")
        hooked = self.model_class(spec.model, spec.dtype)
        return Session(self.name, spec, hooked, scratch / "log.txt")


class Session:
    """A loaded verifier."""

    def __init__(self, name, spec, hooked, log):
        self.boundaries, self.log = spec.boundaries, log
        self._name, self._spec, self._hooked = name, spec, hooked

    def capture(self, requests):
        """Capture one prompt after the other; say so with one reply, as there is one rank."""
        if any(len(request.token_ids) > self._spec.max_model_len for request in requests):
            raise UsageError("a prompt is longer than max_model_len")
        nonce = envelope.new_nonce()
        reply = envelope.seal(nonce, 0, 1, lambda: {"requests": len(requests)})
        with self.log.open("a") as log:
            log.write(f"{len(requests)} prompts, call {nonce}\n")
        return CaptureBatch(tuple(map(self._capture, requests)), nonce, [reply])

    def _capture(self, request):
        states, _ = self._hooked.capture(request.token_ids, self.boundaries)
        dtype = str(states.dtype).removeprefix("torch.")
        return Capture(
            request.key, request.token_ids, self.boundaries, states.float().numpy(), dtype
        )

    def prompt_logprobs(self, token_ids):
        """Return the model's own log-probability of each token but the first."""
        return self._hooked.capture(token_ids, self.boundaries)[1]

    def environment(self):
        """Return what a certificate is bound to; truetap adds the verifier and the machine."""
        facts = {
            "engine": "transformers",
            "engine_version": transformers.__version__,
            "torch_version": torch.__version__,
            "model": self._spec.model,
            "dtype": self._spec.dtype,
        }
        sources = [Path(__file__), Path(__file__).with_name("hf_hooks.py")]
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
        return environment.assemble(
            facts, boundaries=self.boundaries, adapter=self._name, adapter_digest=digest
        )

    def close(self):
        """Drop the model."""
        self._hooked = None


class OffByOneModel(HookedModel):
    """Takes a boundary for the number of the block whose output is meant: the usual mistake."""

    def module_of(self, boundary):
        """Return block k, whose output is boundary k + 1."""
        layers = self.model.base_model.layers
        return layers[min(boundary, len(layers) - 1)]


class OffByOneAdapter(HfHooksAdapter):
    """Kept to see the suite fail: registered as ``hf_hooks_off_by_one``."""

    name = "hf_hooks_off_by_one"
    model_class = OffByOneModel

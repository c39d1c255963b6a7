"""Capture by vLLM's own ``extract_hidden_states`` with truetap's KV connector.

No patch: the boundaries are cached by the compiled model itself, copied by
``truetap.harness.adapters.vllm_connector`` in the step that completes a prompt, and written by the
workers while the engine goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from truetap.harness import verifier
from truetap.harness.adapters.vllm_session import VllmSession, greedy
from truetap.harness.boundaries import check
from truetap.harness.engine import Prompt, arguments_of, hidden_states_config, visible_gpus
from truetap.harness.errors import UsageError
from truetap.harness.model import CaptureRequest, EngineSpec

WITHOUT_BOUNDARY_0 = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2"})
"""``model_type`` of verifiers whose model file in vLLM (deepseek_v2.py) dies on id 0: there is no
residual to add before the first block."""

_EMBEDDINGS = "take the embeddings of the token ids: they are the same"

_CONNECTOR = "truetap.harness.adapters.vllm_connector"


class VllmNativeAdapter:
    """truetap's production path: CUDA graphs and compilation kept, CPU and GPU alike."""

    name = "vllm_native"

    def open(self, spec: EngineSpec, *, scratch: Path) -> VllmNativeSession:
        """Start the engine; takes seconds to a minute."""
        return VllmNativeSession(spec, scratch)


class VllmNativeSession(VllmSession):
    """A running vLLM engine with truetap's KV connector."""

    adapter = VllmNativeAdapter.name
    sources = (__name__, _CONNECTOR)
    lost = "keep max_model_len at least two tokens above the longest prompt"

    def __init__(self, spec: EngineSpec, scratch: Path) -> None:
        super().__init__(spec, _supported(spec), _engine_arguments(spec), scratch)
        self._longest = spec.max_model_len - 2
        if not self._engine.prefills_in_chunks:
            self._longest = min(self._longest, spec.max_num_batched_tokens)

    def _prompt(self, key: str, request: CaptureRequest) -> Prompt:
        return Prompt(
            key=key,
            token_ids=request.token_ids,
            sampling=greedy(request) | {"extra_args": {"kv_transfer_params": {"truetap_key": key}}},
        )

    def _refuse_long(self, requests: Sequence[CaptureRequest]) -> None:
        # vLLM skips the drafter, and with it the capture, for a whole step in which the longest
        # sequence plus one draft token would pass max_model_len: other requests would lose rows.
        for request in requests:
            prompt, after = len(request.token_ids), request.max_tokens - 1
            if not 0 < prompt <= self._longest or prompt + after > self._spec.max_model_len - 2:
                raise UsageError(
                    f"request {request.key!r} has {prompt} tokens{_and_more(after)}; with "
                    f"max_model_len {self._spec.max_model_len} and steps of "
                    f"{self._spec.max_num_batched_tokens} tokens a prompt may have 1 to "
                    f"{self._longest}",
                    remedy="raise max_model_len (and, where prompts cannot be prefilled in chunks, "
                    "max_num_batched_tokens) or shorten the prompt",
                )


def _and_more(after: int) -> str:
    return f" and {after + 1} to generate" if after else ""


def _supported(spec: EngineSpec) -> tuple[int, ...]:
    """Return the boundaries, or refuse what this path cannot capture."""
    facts = verifier.describe(Path(spec.model))
    if spec.include_output:
        raise UsageError(
            "vllm_native captures prompts, not what is generated",
            remedy="send prompt and output together as a prompt: the states are the same",
        )
    if not spec.boundaries:
        return ()
    model_type = verifier.kinds(facts.config)["verifier_model_type"]
    if 0 in spec.boundaries and model_type in WITHOUT_BOUNDARY_0:
        raise UsageError(
            f"vLLM cannot give boundary 0 of a {model_type} verifier", remedy=_EMBEDDINGS
        )
    if 0 in spec.boundaries and (visible_gpus() or spec.executor == "ray"):
        # vLLM keeps the embeddings themselves, no copy; the first block's fused norm adds to them
        # in place. Seen on 0.26.0, eager; the code is the same in 0.32.0.
        raise UsageError(
            "vLLM on a GPU gives another state in place of boundary 0", remedy=_EMBEDDINGS
        )
    return check(spec.boundaries, facts.num_blocks)


def _engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    arguments = arguments_of(spec)
    if not spec.boundaries:
        return arguments
    return arguments | {
        "worker_extension_cls": "truetap.harness.adapters.vllm_worker.CaptureWorker",
        "speculative_config": hidden_states_config(spec.boundaries),
        "kv_transfer_config": {
            "kv_connector": "CaptureConnector",
            "kv_connector_module_path": _CONNECTOR,
            "kv_role": "kv_producer",
        },
    }

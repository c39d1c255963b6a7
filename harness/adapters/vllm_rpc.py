"""Capture by hooks in the workers of vLLM 0.11.0 and later, asked for over ``collective_rpc``.

The way of the first extraction pipelines, without their faults: each row is attributed to its
request by the model runner's own schedule, hooks meet no warm-up, and every call goes through
``truetap.harness.collect``. It needs an eager engine and copies every row over the host, so it is
for engines that have no ``extract_hidden_states`` (before vLLM 0.17.0), and a second opinion where
they have it.

Rows of cached tokens never pass through a model, so each request gets a cache salt of its own: it
finds no blocks of others in the prefix cache. After a preemption it may find its own, whose rows it
has already given.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from truetap.harness import verifier
from truetap.harness.adapters.vllm_session import VllmSession, greedy
from truetap.harness.boundaries import check
from truetap.harness.engine import Prompt, arguments_of
from truetap.harness.errors import UsageError
from truetap.harness.model import CaptureRequest, EngineSpec


class VllmRpcAdapter:
    """Hooks on the blocks of an eager vLLM engine, on any release from 0.11.0 on."""

    name = "vllm_rpc"

    def open(self, spec: EngineSpec, *, scratch: Path) -> VllmRpcSession:
        """Start the engine and hook its blocks; takes seconds to a minute.

        Raises ``UsageError`` if the specification does not ask for an eager engine.
        """
        if not spec.enforce_eager:
            raise UsageError(
                f"{self.name} captures with hooks, which a compiled or graph-captured model does "
                "not run",
                remedy="set enforce_eager, or use the adapter vllm_native",
            )
        if spec.include_output:
            raise UsageError(
                f"{self.name} captures prompts, not what is generated",
                remedy="send prompt and output together as a prompt: the states are the same",
            )
        return VllmRpcSession(spec, scratch)


class VllmRpcSession(VllmSession):
    """A running vLLM engine with hooks on its blocks. Every rank's rows are hashed and compared."""

    adapter = VllmRpcAdapter.name
    sources = (
        __name__,
        "truetap.harness.adapters.rpc_schedule",
        "truetap.harness.adapters.rpc_worker",
    )
    lost = (
        "rows of cached or skipped tokens do not pass through the model: switch off what skips "
        "them, or use the adapter vllm_native"
    )

    def __init__(self, spec: EngineSpec, scratch: Path) -> None:
        blocks = verifier.describe(Path(spec.model)).num_blocks
        boundaries = check(spec.boundaries, blocks) if spec.boundaries else ()
        super().__init__(spec, boundaries, _engine_arguments(spec), scratch)
        self._longest = spec.max_model_len - 1
        if not self._engine.prefills_in_chunks:
            self._longest = min(self._longest, spec.max_num_batched_tokens)
        if not boundaries:
            return
        try:
            self._collect("truetap_watch", list(boundaries))
        except BaseException:
            self.close()
            raise

    def _prompt(self, key: str, request: CaptureRequest) -> Prompt:
        return Prompt(
            key=key,
            token_ids=request.token_ids,
            sampling=greedy(request),
            cache_salt=key,
        )

    def _refuse_long(self, requests: Sequence[CaptureRequest]) -> None:
        """Refuse what vLLM would refuse, or cut short, after others of the call have run."""
        for request in requests:
            tokens, after = len(request.token_ids), request.max_tokens - 1
            if not 0 < tokens <= self._longest or tokens + after >= self._spec.max_model_len:
                raise UsageError(
                    f"request {request.key!r} has {tokens} tokens; with max_model_len "
                    f"{self._spec.max_model_len} and steps of {self._spec.max_num_batched_tokens} "
                    f"tokens a prompt may have 1 to {self._longest}, less what it generates",
                    remedy="raise max_model_len or shorten the prompt",
                )


def _engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    return arguments_of(spec) | {
        "worker_extension_cls": "truetap.harness.adapters.rpc_worker.RpcWorker",
    }

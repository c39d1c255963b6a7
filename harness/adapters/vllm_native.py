"""Capture by vLLM's own ``extract_hidden_states`` with truetap's KV connector.

No patch: the boundaries are cached by the compiled model itself, copied by
``truetap.harness.adapters.vllm_connector`` in the step that completes a prompt, written by the
workers to a shard file, and announced by envelopes over ``collective_rpc``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from truetap.harness import envelope, environment, shard, verifier
from truetap.harness.boundaries import check, to_vllm_layer_id
from truetap.harness.engine import Prompt, VllmEngine
from truetap.harness.errors import CheckFailed, UsageError
from truetap.harness.model import Capture, CaptureBatch, CaptureRequest, EngineSpec, Environment

_CONNECTOR = "truetap.harness.adapters.vllm_connector"
_SOURCES = (_CONNECTOR, "truetap.harness.adapters.vllm_worker", "truetap.harness.shard", __name__)


class VllmNativeAdapter:
    """truetap's production path: CUDA graphs and compilation kept, CPU and GPU alike."""

    name = "vllm_native"

    def open(self, spec: EngineSpec, *, scratch: Path) -> VllmNativeSession:
        """Start the engine; takes seconds to a minute."""
        return VllmNativeSession(spec, scratch)


class VllmNativeSession:
    """A running vLLM engine that captures every prompt it is given."""

    def __init__(self, spec: EngineSpec, scratch: Path) -> None:
        facts = verifier.describe(Path(spec.model))
        self.boundaries = check(spec.boundaries, facts.num_blocks)
        self._spec = spec
        self._scratch = scratch
        self._calls = 0
        self._engine = VllmEngine(
            _engine_arguments(spec),
            log=scratch / "engine.log",
            startup_deadline_s=spec.startup_deadline_s,
            call_deadline_s=spec.call_deadline_s,
        )

    def run(
        self, path: Path, requests: Sequence[CaptureRequest], loss_masks: Sequence[bytes]
    ) -> Iterator[str]:
        """Prefill ``requests``, then have the workers write them to ``path``'s partial file.

        Yields each request's key as the engine finishes it. Afterwards ``last_flush`` holds the
        raw replies. The file is not yet published: see ``truetap.harness.shard.publish``.
        """
        self._refuse_long(requests)
        nonce = envelope.new_nonce()
        prompts = (
            Prompt(
                key=f"{nonce}:{index}",
                token_ids=request.token_ids,
                sampling={
                    "max_tokens": 1,
                    "temperature": 0.0,
                    "detokenize": False,
                    "extra_args": {"kv_transfer_params": {"truetap_key": f"{nonce}:{index}"}},
                },
            )
            for index, request in enumerate(requests)
        )
        for finished in self._engine.generate(prompts, in_flight=2 * self._spec.max_num_seqs):
            yield requests[int(finished.key.rpartition(":")[2])].key
        keys = [f"{nonce}:{index}" for index in range(len(requests))]
        self.last_nonce = nonce
        self.last_flush = self._engine.rpc(
            "truetap_flush", nonce, str(path), keys, list(loss_masks)
        )

    def flushed(self, requests: Sequence[CaptureRequest]) -> dict[str, str]:
        """Check the replies of the last ``run``: every rank saw every row. Returns digests."""
        payloads = envelope.unseal(
            self.last_flush,
            nonce=self.last_nonce,
            world_size=self._spec.tensor_parallel_size,
            method="truetap_flush",
        )
        rows = sum(len(request.token_ids) for request in requests)
        for rank, payload in enumerate(payloads):
            if payload["missing"]:
                missing = requests[int(payload["missing"][0].rpartition(":")[2])].key
                raise CheckFailed(
                    f"rank {rank} captured nothing for {len(payload['missing'])} of "
                    f"{len(requests)} requests, the first of them {missing!r}",
                    remedy="keep max_model_len at least two tokens above the longest prompt",
                )
            if payload["rows"] != rows:
                raise CheckFailed(
                    f"rank {rank} saw {payload['rows']} rows where {rows} tokens were sent"
                )
        digests: dict[str, str] = payloads[0]["digests"]
        return digests

    def capture(self, requests: Sequence[CaptureRequest]) -> CaptureBatch:
        """Capture in one call, through the same file that production extraction writes."""
        import torch

        self._calls += 1
        path = self._scratch / f"capture-{self._calls:05d}.safetensors"
        masks = [bytes(len(request.token_ids)) for request in requests]
        for _ in self.run(path, requests, masks):
            pass
        self.flushed(requests)
        shard.publish(path)
        tensors = shard.read(path)
        bounds = tensors["offsets"].tolist()
        captures = tuple(
            Capture(
                key=request.key,
                token_ids=tuple(tensors["token_ids"][start:end].tolist()),
                boundaries=self.boundaries,
                states=tensors["states"][start:end].to(torch.float32).numpy(),
                dtype=str(tensors["states"].dtype).removeprefix("torch."),
            )
            for request, (start, end) in zip(requests, pairwise(bounds), strict=True)
        )
        path.unlink()
        return CaptureBatch(
            captures=captures,
            nonce=self.last_nonce,
            replies=self.last_flush,
            world_size=self._spec.tensor_parallel_size,
        )

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float] | None:
        """Ask the capturing engine itself for the prompt's log-probabilities."""
        return self._engine.prompt_logprobs(token_ids)

    def environment(self) -> Environment:
        """Return facts read from every worker; they must agree."""
        nonce = envelope.new_nonce()
        payloads = envelope.unseal(
            self._engine.rpc("truetap_facts", nonce),
            nonce=nonce,
            world_size=self._spec.tensor_parallel_size,
            method="truetap_facts",
        )
        return environment.assemble(
            environment.agreed(payloads),
            boundaries=self.boundaries,
            adapter=VllmNativeAdapter.name,
            adapter_digest=environment.source_digest(_SOURCES),
        )

    def close(self) -> None:
        """Stop the engine and its processes."""
        self._engine.close()

    def _refuse_long(self, requests: Sequence[CaptureRequest]) -> None:
        # vLLM skips the drafter, and with it the capture, for a whole step in which the longest
        # sequence plus one draft token would pass max_model_len: other requests would lose rows.
        longest = max(requests, key=lambda request: len(request.token_ids))
        if len(longest.token_ids) + 2 > self._spec.max_model_len:
            raise UsageError(
                f"request {longest.key!r} has {len(longest.token_ids)} tokens; with max_model_len "
                f"{self._spec.max_model_len} a prompt may have {self._spec.max_model_len - 2}",
                remedy="raise max_model_len or shorten the prompt",
            )


def _engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    layer_ids = [to_vllm_layer_id(boundary) for boundary in spec.boundaries]
    return {
        "model": spec.model,
        "dtype": spec.dtype,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "max_model_len": spec.max_model_len,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
        "max_num_seqs": spec.max_num_seqs,
        "enforce_eager": spec.enforce_eager,
        "enable_prefix_caching": spec.enable_prefix_caching,
        "seed": spec.seed,
        "skip_tokenizer_init": True,
        "worker_extension_cls": "truetap.harness.adapters.vllm_worker.CaptureWorker",
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}},
        },
        "kv_transfer_config": {
            "kv_connector": "CaptureConnector",
            "kv_connector_module_path": _CONNECTOR,
            "kv_role": "kv_producer",
        },
    }

"""Capture by vLLM's own ``extract_hidden_states`` with truetap's KV connector.

No patch: the boundaries are cached by the compiled model itself, copied by
``truetap.harness.adapters.vllm_connector`` in the step that completes a prompt, written by the
workers to a shard file, and announced by envelopes over ``collective_rpc``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from truetap.harness import envelope, environment, shard, verifier
from truetap.harness.boundaries import check
from truetap.harness.engine import (
    Finished,
    Prompt,
    VllmEngine,
    arguments_of,
    hidden_states_config,
    visible_gpus,
)
from truetap.harness.errors import CheckFailed, UsageError
from truetap.harness.model import Capture, CaptureBatch, CaptureRequest, EngineSpec, Environment

WITHOUT_BOUNDARY_0 = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2"})
"""``model_type`` of verifiers whose model file in vLLM (deepseek_v2.py) dies on id 0: there is no
residual to add before the first block."""

_EMBEDDINGS = "take the embeddings of the token ids: they are the same"

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
        self.boundaries = _supported(spec)
        self.log = scratch / "engine.log"
        self._spec = spec
        self._scratch = scratch
        self._calls = 0
        self._engine = VllmEngine(
            _engine_arguments(spec),
            log=self.log,
            startup_deadline_s=spec.startup_deadline_s,
            call_deadline_s=spec.call_deadline_s,
        )
        self._longest = spec.max_model_len - 2
        if not self._engine.prefills_in_chunks:
            self._longest = min(self._longest, spec.max_num_batched_tokens)

    def run(
        self, path: Path, requests: Sequence[CaptureRequest], loss_masks: Sequence[bytes]
    ) -> Iterator[str]:
        """Prefill ``requests``, then have the workers write them to ``path``'s partial file.

        Yields each request's key as the engine finishes it. Afterwards ``last_flush`` holds the
        raw replies. The file is not yet published: see ``truetap.harness.shard.publish``.
        """
        nonce = envelope.new_nonce()
        for finished in self._generate(nonce, requests):
            yield requests[_index(finished)].key
        self._flush(nonce, path, len(requests), loss_masks)

    def _generate(self, nonce: str, requests: Sequence[CaptureRequest]) -> Iterator[Finished]:
        self._refuse_long(requests)
        prompts = (
            Prompt(
                key=f"{nonce}:{index}",
                token_ids=request.token_ids,
                sampling={
                    "max_tokens": request.max_tokens,
                    "temperature": 0.0,
                    "ignore_eos": True,
                    "detokenize": False,
                    "extra_args": {"kv_transfer_params": {"truetap_key": f"{nonce}:{index}"}},
                },
            )
            for index, request in enumerate(requests)
        )
        return self._engine.generate(prompts, in_flight=2 * self._spec.max_num_seqs)

    def _flush(self, nonce: str, path: Path, count: int, loss_masks: Sequence[bytes]) -> None:
        keys = [f"{nonce}:{index}" for index in range(count)]
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
            if payload["others"]:
                raise CheckFailed(
                    f"rank {rank} holds rows of {payload['others']} requests of no call of ours"
                )
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
            if payload["seen"] != payloads[0]["seen"]:
                raise CheckFailed(f"ranks 0 and {rank} saw other tokens")
        digests: dict[str, str] = payloads[0]["digests"]
        return digests

    def capture(self, requests: Sequence[CaptureRequest]) -> CaptureBatch:
        """Capture in one call, through the same file that production extraction writes."""
        nonce = envelope.new_nonce()
        before = self._preemptions()
        generated = {
            _index(finished): tuple(finished.token_ids)
            for finished in self._generate(nonce, requests)
        }
        if not self.boundaries:
            return CaptureBatch(
                tuple(
                    Capture(r.key, r.token_ids, (), _NO_STATES, self._spec.dtype, False, ids)
                    for r, ids in zip(requests, _in_order(generated), strict=True)
                ),
                nonce,
            )
        self._calls += 1
        path = self._scratch / f"capture-{self._calls:05d}.safetensors"
        self._flush(nonce, path, len(requests), [bytes(len(r.token_ids)) for r in requests])
        self.flushed(requests)
        captures = _read(path, self.boundaries, requests, _in_order(generated)) if requests else ()
        return CaptureBatch(
            captures=captures,
            nonce=nonce,
            replies=self.last_flush,
            world_size=self._spec.tensor_parallel_size,
            by_rank=[reply["payload"]["seen"] for reply in self.last_flush],
            preemptions=None if before is None else self._engine.preemptions() - before,
        )

    def _preemptions(self) -> int | None:
        return self._engine.preemptions() if self._spec.kv_cache_blocks is not None else None

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


_NO_STATES = np.zeros((0, 0, 0), dtype=np.float32)


def _and_more(after: int) -> str:
    return f" and {after + 1} to generate" if after else ""


def _index(finished: Finished) -> int:
    return int(finished.key.rpartition(":")[2])


def _in_order(generated: Mapping[int, tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [generated[index] for index in range(len(generated))]


def _read(
    path: Path,
    boundaries: tuple[int, ...],
    requests: Sequence[CaptureRequest],
    generated: Sequence[tuple[int, ...]],
) -> tuple[Capture, ...]:
    """Publish a shard, read it as production extraction does, and remove it."""
    import torch

    shard.publish(path)
    tensors = shard.read(path)
    bounds = pairwise(tensors["offsets"].tolist())
    captures = tuple(
        Capture(
            key=request.key,
            token_ids=tuple(tensors["token_ids"][start:end].tolist()),
            boundaries=boundaries,
            states=tensors["states"][start:end].to(torch.float32).numpy(),
            dtype=str(tensors["states"].dtype).removeprefix("torch."),
            generated=ids,
        )
        for request, (start, end), ids in zip(requests, bounds, generated, strict=True)
    )
    path.unlink()
    return captures


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
    if 0 in spec.boundaries and visible_gpus():
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

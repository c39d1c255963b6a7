"""Subject under test: vLLM's own ``ExampleHiddenStatesConnector``, driven as its manual says.

The engine caches the requested boundaries (``extract_hidden_states``); the connector writes one
file a request once it has finished; the finished request names the file; vLLM's own
``load_hidden_states`` waits for the writer and reads it. Nothing is added: no trailing request, no
flush, no check.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from truetap.harness import deadline, envelope, environment, verifier
from truetap.harness.adapters.vllm_worker import FactsWorker
from truetap.harness.boundaries import check
from truetap.harness.engine import (
    Finished,
    Prompt,
    VllmEngine,
    arguments_of,
    hidden_states_config,
)
from truetap.harness.errors import CouldNotRun, UsageError
from truetap.harness.model import Capture, CaptureBatch, CaptureRequest, EngineSpec, Environment

PATIENCE_S = 5.0
"""How long one call waits for files. They are there within milliseconds of ``generate``, or never:
``load_hidden_states`` itself would wait for ever for a lock that nobody lifts."""
_WORKER = f"{FactsWorker.__module__}.{FactsWorker.__qualname__}"
_SOURCES = (__name__, FactsWorker.__module__)


class VllmExampleAdapter:
    """vLLM's example connector for hidden states, on a CUDA device."""

    name = "vllm_example"

    def open(self, spec: EngineSpec, *, scratch: Path) -> VllmExampleSession:
        """Start the engine; takes seconds to a minute.

        Raises ``CouldNotRun`` without a CUDA device, ``UsageError`` without boundaries.
        """
        if not spec.boundaries:
            raise UsageError("vLLM's extract_hidden_states needs one layer id or more")
        _refuse_without_cuda()
        return VllmExampleSession(spec, scratch)


class VllmExampleSession:
    """A running vLLM engine with the example connector."""

    def __init__(self, spec: EngineSpec, scratch: Path) -> None:
        facts = verifier.describe(Path(spec.model))
        self.boundaries = check(spec.boundaries, facts.num_blocks)
        self._spec = spec
        self._scratch = scratch
        storage = scratch / "hidden_states"
        storage.mkdir()
        self._engine = VllmEngine(
            _engine_arguments(spec, storage),
            log=scratch / "engine.log",
            startup_deadline_s=spec.startup_deadline_s,
            call_deadline_s=spec.call_deadline_s,
        )

    def capture(self, requests: Sequence[CaptureRequest]) -> CaptureBatch:
        """Run ``requests`` and read their files; one that has none is left out."""
        nonce = envelope.new_nonce()
        asked = {"include_output_tokens": True} if self._spec.include_output else {}
        prompts = [
            Prompt(
                key=f"{nonce}-{index}",
                token_ids=request.token_ids,
                sampling={
                    "max_tokens": request.max_tokens,
                    "ignore_eos": True,
                    "temperature": 0.0,
                    "detokenize": False,
                    "extra_args": {"kv_transfer_params": asked},
                },
            )
            for index, request in enumerate(requests)
        ]
        finished = {
            one.key: one for one in self._engine.generate(prompts, in_flight=len(prompts) or 1)
        }
        until = time.monotonic() + PATIENCE_S
        captures = []
        for request, prompt in zip(requests, prompts, strict=True):
            output = finished[prompt.key]
            tensors = _load(output, max(0.2, until - time.monotonic()))
            if tensors is not None:
                captures.append(self._capture(request, output, tensors))
        return CaptureBatch(
            captures=tuple(captures),
            nonce=nonce,
            replies=[finished[prompt.key].kv_transfer_params for prompt in prompts],
            world_size=self._spec.tensor_parallel_size,
        )

    def _capture(
        self, request: CaptureRequest, output: Finished, tensors: dict[str, Any]
    ) -> Capture:
        states = tensors["hidden_states"]
        return Capture(
            key=request.key,
            token_ids=tuple(tensors["token_ids"].tolist()),
            boundaries=self.boundaries,
            states=states.float().numpy(),
            dtype=str(states.dtype).removeprefix("torch."),
            generated=tuple(output.token_ids),
        )

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float] | None:
        """Ask the capturing engine itself for the prompt's log-probabilities."""
        return self._engine.prompt_logprobs(token_ids)

    def environment(self) -> Environment:
        """Return facts read from every worker; they must agree."""
        by_rank = self._engine.collect(self._engine.llm, "truetap_facts", (), self._scratch)
        return environment.assemble(
            environment.agreed(list(by_rank.values())),
            boundaries=self.boundaries,
            adapter=VllmExampleAdapter.name,
            adapter_digest=environment.source_digest(_SOURCES),
        )

    def close(self) -> None:
        """Stop the engine and its processes."""
        self._engine.close()


def _load(output: Finished, seconds: float) -> dict[str, Any] | None:
    """Return the tensors of a request's file, read vLLM's way; None if it does not come in time."""
    path = (output.kv_transfer_params or {}).get("hidden_states_path")
    if path is None:
        return None
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector

    try:
        loaded: dict[str, Any] = deadline.bounded(
            lambda: example_hidden_states_connector.load_hidden_states(path), seconds
        )
    except (TimeoutError, FileNotFoundError):
        return None
    return loaded


def _refuse_without_cuda() -> None:
    """Say why before an engine is started that would die in the step after its first prompt."""
    try:
        import torch
    except ImportError as error:
        raise CouldNotRun(
            f"torch cannot be imported: {error}", remedy="pip install 'truetap[vllm]'"
        ) from error
    if not torch.cuda.is_available():
        raise CouldNotRun(
            "vLLM's ExampleHiddenStatesConnector copies a finished request into pinned memory "
            "(pin_memory=True), which needs an accelerator: on a CPU the engine dies in the step "
            "after the first prompt",
            remedy="run it on a CUDA GPU; on a CPU use the adapter vllm_native",
        )


def _engine_arguments(spec: EngineSpec, storage: Path) -> dict[str, Any]:
    return arguments_of(spec) | {
        "worker_extension_cls": _WORKER,  # for facts about the engine; it takes no part in capture
        "speculative_config": hidden_states_config(spec.boundaries),
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(storage)},
        },
    }

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

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from truetap.harness import envelope, environment, verifier
from truetap.harness.adapters.rpc_schedule import KEY_PREFIX
from truetap.harness.boundaries import check
from truetap.harness.collect import collect
from truetap.harness.engine import Prompt, VllmEngine, arguments_of
from truetap.harness.errors import CheckFailed, UsageError
from truetap.harness.model import Capture, CaptureBatch, CaptureRequest, EngineSpec, Environment

_SOURCES = (
    __name__,
    "truetap.harness.adapters.rpc_schedule",
    "truetap.harness.adapters.rpc_worker",
    "truetap.harness.collect",
    "truetap.harness.collect_worker",
)


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


class VllmRpcSession:
    """A running vLLM engine with hooks on its blocks.

    Its workers hold the rows of one ``capture`` call in the host's memory until the end of the
    call, each worker all of them.
    """

    def __init__(self, spec: EngineSpec, scratch: Path) -> None:
        facts = verifier.describe(Path(spec.model))
        self.boundaries = check(spec.boundaries, facts.num_blocks) if spec.boundaries else ()
        self.log = scratch / "engine.log"
        self._spec = spec
        self._scratch = scratch
        self._engine = VllmEngine(
            _engine_arguments(spec),
            log=self.log,
            startup_deadline_s=spec.startup_deadline_s,
            call_deadline_s=spec.call_deadline_s,
        )
        self._calls = _Overheard(self._engine.llm)
        self._longest = spec.max_model_len - 1
        if not self._engine.prefills_in_chunks:
            self._longest = min(self._longest, spec.max_num_batched_tokens)
        self._runner = ""
        if not self.boundaries:
            return
        try:
            runners = self._collect("truetap_watch", list(self.boundaries))
        except BaseException:
            self._engine.close()
            raise
        self._runner = f"V{runners[0]}"

    def capture(self, requests: Sequence[CaptureRequest]) -> CaptureBatch:
        """Prefill ``requests``, then take the workers' rows.

        Raises ``CheckFailed`` if a row is missing on any rank, or if the ranks' rows differ.
        """
        self._refuse_long(requests)
        call = envelope.new_nonce()
        keys = [f"{KEY_PREFIX}{call}:{index}" for index in range(len(requests))]
        prompts = (
            Prompt(
                key=key,
                token_ids=request.token_ids,
                sampling={
                    "max_tokens": request.max_tokens,
                    "temperature": 0.0,
                    "ignore_eos": True,
                    "detokenize": False,
                },
                cache_salt=key,
            )
            for key, request in zip(keys, requests, strict=True)
        )
        counts = self._spec.kv_cache_blocks is not None
        before = self._engine.preemptions() if counts else 0
        generated = {
            finished.key: tuple(finished.token_ids)
            for finished in self._engine.generate(prompts, in_flight=2 * self._spec.max_num_seqs)
        }
        if not self.boundaries:
            captures = tuple(
                Capture(r.key, r.token_ids, (), _NO_STATES, self._spec.dtype, False, generated[key])
                for r, key in zip(requests, keys, strict=True)
            )
            return CaptureBatch(captures, call)
        by_rank = self._collect("truetap_take", keys)
        _refuse_gaps(by_rank, requests)
        captures = tuple(
            self._capture(request.key, token_ids, states, generated[key])
            for request, key, token_ids, states in zip(
                requests, keys, by_rank[0]["token_ids"], by_rank[0]["states"], strict=True
            )
        )
        return CaptureBatch(
            captures=captures,
            nonce=self._calls.nonce,
            replies=self._calls.replies,
            world_size=self._spec.tensor_parallel_size,
            by_rank=["".join(taken["digests"]) for taken in by_rank.values()],
            preemptions=self._engine.preemptions() - before if counts else None,
        )

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float] | None:
        """Ask the capturing engine itself for the prompt's log-probabilities."""
        return self._engine.prompt_logprobs(token_ids)

    def environment(self) -> Environment:
        """Return facts read from every worker; they must agree."""
        by_rank = self._collect("truetap_facts")
        return environment.assemble(
            environment.agreed(list(by_rank.values())),
            boundaries=self.boundaries,
            adapter=VllmRpcAdapter.name,
            adapter_digest=environment.source_digest(_SOURCES),
        )

    def close(self) -> None:
        """Stop the engine and its processes."""
        self._engine.close()

    def _collect(self, method: str, *args: Any) -> dict[int, Any]:
        return collect(
            self._calls, method, args, deadline=self._spec.call_deadline_s, folder=self._scratch
        )

    def _capture(
        self, key: str, token_ids: list[int], states: Any, generated: tuple[int, ...]
    ) -> Capture:
        import torch

        return Capture(
            key=key,
            token_ids=tuple(token_ids),
            boundaries=self.boundaries,
            states=states.to(torch.float32).numpy(),
            dtype=str(states.dtype).removeprefix("torch."),
            generated=generated,
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


_NO_STATES = np.zeros((0, 0, 0), dtype=np.float32)


class _Overheard:
    """An ``LLM`` whose last call can be read: the suite judges replies as the engine gave them."""

    def __init__(self, llm: Any) -> None:
        self.llm_engine = llm.llm_engine
        self._llm = llm
        self.nonce = ""
        self.replies: Sequence[Any] = ()

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Sequence[Any]:
        """Call ``method`` on every worker; keep the nonce that was sent and what came back."""
        self.nonce, self.replies = args[0]["nonce"], ()
        self.replies = self._llm.collective_rpc(method, timeout, args, kwargs)
        return self.replies


def _refuse_gaps(by_rank: Mapping[int, Any], requests: Sequence[CaptureRequest]) -> None:
    for rank, taken in by_rank.items():
        for request, rows, tokens in zip(requests, taken["rows"], taken["tokens"], strict=True):
            if not tokens or rows < tokens:
                raise CheckFailed(
                    f"rank {rank} captured {rows} of {len(request.token_ids)} rows of request "
                    f"{request.key!r}",
                    remedy="rows of cached or skipped tokens do not pass through the model: switch "
                    "off what skips them, or use the adapter vllm_native",
                )
        if taken["others"]:
            raise CheckFailed(
                f"rank {rank} holds rows of {taken['others']} requests of other calls"
            )
        for request, digest, first in zip(
            requests, taken["digests"], by_rank[0]["digests"], strict=True
        ):
            if digest != first:
                raise CheckFailed(
                    f"ranks 0 and {rank} hold other states of request {request.key!r}"
                )


def _engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    return arguments_of(spec) | {
        "worker_extension_cls": "truetap.harness.adapters.rpc_worker.RpcWorker",
    }

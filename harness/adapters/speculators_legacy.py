"""Subject under test: capture as the generator of speculators 0.3.0 did it. Not to be used.

Its worker extension keeps the stream after some layers; its driver asks the executor for rank 0's
reply, takes the ``[0]`` of it, and cuts each prompt's rows off by the prompts' lengths, in the
order of submission. That was written for vLLM 0.11.0. On 0.11.1 and later its own driver does not
get that far (other constructors, execution in two phases), so what ran there were ports that kept
``[0]``. This is such a port: vLLM's ``LLM`` schedules, the rest is as it was, nothing is repaired.

The generator brought a scheduler of its own, with a budget of 8192 tokens a step and no prefix
cache. Here the specification decides both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from truetap.harness import envelope, environment, verifier
from truetap.harness.boundaries import check
from truetap.harness.channels.live_engine import executor_of
from truetap.harness.engine import Prompt, VllmEngine, arguments_of
from truetap.harness.errors import CouldNotRun, UsageError
from truetap.harness.model import Capture, CaptureBatch, CaptureRequest, EngineSpec, Environment

_WORKER = "truetap.harness.adapters.legacy_worker"
_SOURCES = (__name__, _WORKER)


class SpeculatorsLegacyAdapter:
    """The way of speculators 0.3.0: states over ``collective_rpc``, unwrapped with ``[0]``."""

    name = "speculators_legacy"

    def open(self, spec: EngineSpec, *, scratch: Path) -> SpeculatorsLegacySession:
        """Start the engine; takes seconds to a minute.

        Raises ``UsageError`` for what the generator had no option for: compiled engines, generated
        tokens, boundary 0, no boundaries at all.
        """
        if not spec.enforce_eager or spec.include_output or not spec.boundaries:
            raise UsageError(
                f"{self.name} captures prompts, at one boundary or more, in an eager engine",
                remedy="set enforce_eager and boundaries, and leave include_output",
            )
        if 0 in spec.boundaries:
            raise UsageError(
                f"{self.name} counts layers by what they leave; none leaves boundary 0"
            )
        return SpeculatorsLegacySession(spec, scratch)


class SpeculatorsLegacySession:
    """A running engine whose core is in this process, so that its executor can be asked."""

    def __init__(self, spec: EngineSpec, scratch: Path) -> None:
        facts = verifier.describe(Path(spec.model))
        self.boundaries = check(spec.boundaries, facts.num_blocks)
        self._spec = spec
        self._engine = VllmEngine(
            _engine_arguments(spec),
            log=scratch / "engine.log",
            startup_deadline_s=spec.startup_deadline_s,
            call_deadline_s=spec.call_deadline_s,
            kind="in-process",
        )
        try:
            self._executor = executor_of(self._engine)
            self._ask("_setup_capture", [boundary - 1 for boundary in self.boundaries])
        except BaseException:
            self._engine.close()
            raise

    def capture(self, requests: Sequence[CaptureRequest]) -> CaptureBatch:
        """Prefill ``requests``; cut what rank 0 replies by their lengths."""
        if any(request.max_tokens > 1 for request in requests):
            raise UsageError("speculators_legacy generates one token a prompt, never more")
        # The generator cut long prompts, without a word, to leave room for the one token.
        kept = [request.token_ids[: self._spec.max_model_len - 1] for request in requests]
        nonce = envelope.new_nonce()  # never sent: these worker methods take none
        sampling = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
        prompts = [Prompt(f"req_{nonce}_{i}", ids, sampling) for i, ids in enumerate(kept)]
        self._ask("_reset_capture")
        generated = {
            finished.key: tuple(finished.token_ids)
            for finished in self._engine.generate(prompts, in_flight=len(prompts) or 1)
        }
        reply = self._ask("_get_captured_states", unique_reply_rank=0)
        layers = _layers(reply)
        captures, offset = [], 0
        for request, prompt in zip(requests, prompts, strict=True):
            end = offset + len(prompt.token_ids)
            captures.append(self._cut(request, prompt, generated, [h[offset:end] for h in layers]))
            offset = end
        return CaptureBatch(
            captures=tuple(captures),
            nonce=nonce,
            replies=reply,
            world_size=self._spec.tensor_parallel_size,
        )

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float] | None:
        """Ask the capturing engine itself for the prompt's log-probabilities."""
        return self._engine.prompt_logprobs(token_ids)

    def environment(self) -> Environment:
        """Return facts read from every worker; they must agree."""
        return environment.assemble(
            environment.agreed(self._ask("_engine_facts")),
            boundaries=self.boundaries,
            adapter=SpeculatorsLegacyAdapter.name,
            adapter_digest=environment.source_digest(_SOURCES),
        )

    def close(self) -> None:
        """Stop the engine and its processes."""
        self._engine.close()

    def _ask(self, method: str, *args: Any, **how: Any) -> Any:
        deadline_s = self._spec.call_deadline_s
        return self._executor.collective_rpc(method, timeout=deadline_s, args=args, **how)

    def _cut(
        self,
        request: CaptureRequest,
        prompt: Prompt,
        generated: dict[str, tuple[int, ...]],
        rows: list[Any],
    ) -> Capture:
        import torch

        states = torch.stack(rows, dim=1).cpu()
        return Capture(
            key=request.key,
            token_ids=tuple(prompt.token_ids),  # what was sent: nothing comes back to compare
            boundaries=self.boundaries,
            states=states.float().numpy(),
            dtype=str(states.dtype).removeprefix("torch."),
            generated=generated[prompt.key],
        )


def _layers(reply: Any) -> list[Any]:
    """Take the reply for a list of one, as 0.3.0 did; what is in it for the layers' tensors.

    0.3.0 then asked ``if not layers``, which a tensor answers with an error. Ports relaxed that.
    """
    found = None if reply is None else reply[0]
    if found is None:
        raise CouldNotRun("rank 0 captured nothing")
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    return arguments_of(spec) | {
        "distributed_executor_backend": "mp",
        "worker_extension_cls": f"{_WORKER}.LegacyWorker",
    }

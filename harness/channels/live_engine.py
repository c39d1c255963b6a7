"""Starts real vLLM engines for reply channels, and reaches for the parts of them that can be asked.

Everything engine-private that a channel needs is here, one function each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from truetap.harness.channel import WORKER
from truetap.harness.engine import VllmEngine
from truetap.harness.model import EngineSpec, Environment

Kind = Literal["llm", "executor", "async"]
"""What is asked: an ``LLM`` with its engine core in another process, the executor of one whose
core is in this process, or an ``AsyncLLM``."""


def start(spec: EngineSpec, kind: Kind, log: Path, *, worker: str = WORKER) -> VllmEngine:
    """Start an engine on ``MultiprocExecutor`` whose workers have the methods of ``worker``."""
    arguments = {
        "model": spec.model,
        "dtype": spec.dtype,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "enforce_eager": True,
        "seed": spec.seed,
        "skip_tokenizer_init": True,
        "distributed_executor_backend": "mp",
        "worker_extension_cls": worker,
    }
    return VllmEngine(
        arguments,
        log=log,
        startup_deadline_s=spec.startup_deadline_s,
        call_deadline_s=spec.call_deadline_s,
        kind="in-process" if kind == "executor" else kind,
    )


def executor_of(engine: VllmEngine) -> Any:
    """Return the executor of an engine whose core is in this process."""
    return engine.llm.llm_engine.engine_core.engine_core.model_executor


def describe(target: Any, world_size: int) -> Environment:
    """Return what a report should say about the engine under test."""
    module = type(target).__module__.partition(".")[0]
    facts = {"engine": module, "asked_through": type(target).__qualname__, "world_size": world_size}
    if module != "vllm":
        return Environment(facts, {})
    import torch
    import vllm

    binding = {**facts, "engine_version": vllm.__version__}
    return Environment(binding, {"torch_version": str(torch.__version__)})

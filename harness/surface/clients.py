"""What the engine's clients make of ``collective_rpc``, found by running the release's own code.

``clients(source)`` says, for the engine core and each public client, whether the executor's reply
comes back ``unchanged``, and which of the executors' own arguments (``reaches``) a caller of the
client can pass. Across processes the reply is encoded on its way; ``crosses`` says so, and the
section ``transport`` what that does to it.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from truetap.harness.surface.link import Linker
from truetap.harness.surface.strict import NotUnderstood, Prepared, bare, section
from truetap.harness.surface.wheel import Source

ARGUMENTS = (
    "kv_output_aggregator",
    "non_block",
    "rank0_reply_only",
    "single_value",
    "unique_reply_rank",
)
"""Parameters of some executor's ``collective_rpc`` that change the shape of its reply."""

_ENGINE = "vllm.v1.engine"


@section
def clients(source: Source) -> dict[str, Any]:
    """Return client -> ``reply``, ``crosses`` (a process boundary) and ``reaches``."""
    reply = ["the executor's very reply"]
    calls: list[tuple[Any, ...]] = []

    def answer(*call: Any, **named: Any) -> list[str]:
        calls.append((*call, named))
        return reply

    async def answer_later(*call: Any, **named: Any) -> list[str]:
        return answer(*call, **named)

    def made(module: str, cls: str, **attributes: object) -> Any:
        wanted = ("collective_rpc", "collective_rpc_async")
        return bare(Linker(source, {}, {cls: wanted}).get(module, cls), **attributes)

    def outcome(client: Any, *, crosses: bool) -> dict[str, Any]:
        calls.clear()
        got = client.collective_rpc("answer", None, (1,), None)
        if inspect.iscoroutine(got):
            got = asyncio.run(got)
        if got is not reply or len(calls) != 1:
            name = type(client).__name__
            raise NotUnderstood(f"{name}.collective_rpc changes a reply to {got!r}")
        accepted = inspect.signature(client.collective_rpc).parameters
        return {
            "crosses": crosses,
            "reaches": [name for name in ARGUMENTS if name in accepted],
            "reply": "unchanged",
        }

    def llm(core: Any) -> Any:
        engine = made(f"{_ENGINE}.llm_engine", "LLMEngine", engine_core=core)
        return made("vllm.entrypoints.llm", "LLM", llm_engine=engine)

    executor = Prepared("executor", collective_rpc=answer)
    core = made(f"{_ENGINE}.core", "EngineCore", model_executor=executor)
    in_process = made(f"{_ENGINE}.core_client", "InprocClient", engine_core=core)
    across = made(f"{_ENGINE}.core_client", "SyncMPClient", call_utility=answer)
    later = made(f"{_ENGINE}.core_client", "AsyncMPClient", call_utility_async=answer_later)
    async_llm = made(f"{_ENGINE}.async_llm", "AsyncLLM", engine_core=later)
    return {
        "async_llm": outcome(async_llm, crosses=True),
        "engine_core": outcome(core, crosses=False),
        "llm": outcome(llm(across), crosses=True),
        "llm_in_process": outcome(llm(in_process), crosses=False),
    }

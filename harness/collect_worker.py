"""What ``truetap.harness.collect`` calls inside each worker of an engine.

Start the engine with ``worker_extension_cls="truetap.harness.collect_worker.CollectWorker"``, or
with a subclass that adds methods of its own; ``self`` is then the worker. Nothing is raised
through the executor: it would lose the error's type and leave other ranks' replies queued for the
next call.
"""

from __future__ import annotations

import sys
from typing import Any

from truetap.harness import call_folder, envelope, parcel, worker_log

VERSION = 1
"""Of the request that the client sends. Both sides must be of the same truetap."""


class CollectWorker:
    """The one method that ``collect`` calls; its name stays clear of vLLM's."""

    rank: int
    vllm_config: Any

    def truetap_collect(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run ``request["method"]`` of this worker and reply with an envelope.

        Payload: ``value``, the tree of the result, and ``sha256`` of the file with its tensors, or
        None; empty on a rank that was not asked for its value. An error says in ``stage`` how far
        the call came: request, lookup, arguments, method, result or file.
        """
        return _answer(self, request)


def _answer(worker: CollectWorker, request: dict[str, Any]) -> dict[str, Any]:
    folder, rank = request["folder"], worker.rank
    stages = ["request"]
    call_folder.mark(folder, rank, "started")
    sealed = envelope.seal(
        request["nonce"],
        rank,
        worker.vllm_config.parallel_config.world_size,
        lambda: _payload(worker, request, stages),
    )
    if error := sealed.get("error"):
        error["stage"] = stages[-1]
        call_folder.mark(folder, rank, "failed", f"{error['type']}: {error['message']}")
    outcome = "failed" if error else "answered"
    worker_log.say(f"rank {rank} {outcome} {request['method']}, call {request['nonce']}")
    call_folder.mark(folder, rank, "done")
    return sealed


def _payload(worker: CollectWorker, request: dict[str, Any], stages: list[str]) -> dict[str, Any]:
    if request["version"] != VERSION:
        raise RuntimeError(
            f"the worker's truetap takes requests of version {VERSION}, not {request['version']}"
        )
    folder = request["folder"]
    stages.append("lookup")
    method = getattr(worker, request["method"])
    stages.append("arguments")
    digest = request["sha256"]
    if digest is not None:
        call_folder.require(folder, worker.rank)
    args, kwargs = parcel.unpack(request["arguments"], call_folder.tensors(folder, None), digest)
    _enter_own_device(worker)
    stages.append("method")
    result = method(*args, **kwargs)
    if request["ranks"] is not None and worker.rank not in request["ranks"]:
        return {}
    stages.append("result")
    tree, tensors = parcel.take_apart(result, "result")
    del result
    stages.append("file")
    if tensors:
        call_folder.require(folder, worker.rank)
    digest = parcel.write(tensors, call_folder.tensors(folder, worker.rank))
    return {"value": tree, "sha256": digest}


def _enter_own_device(worker: Any) -> None:
    """Make the worker's device the current one.

    Torch keeps the current device per thread, and a worker in the client's own process is called
    on a thread that the client made.
    """
    device = getattr(worker, "device", None)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(device, torch.device) or device.index is None:
        return
    kind: Any = getattr(torch, device.type, None)
    if hasattr(kind, "set_device"):
        kind.set_device(device)

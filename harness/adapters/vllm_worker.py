"""What runs inside each vLLM worker, called by name over ``collective_rpc``.

vLLM adds this class to its worker's bases (``worker_extension_cls``); ``self`` is the worker. Only
control data travels in the replies, as envelopes; hidden states go to a file.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from truetap.harness import envelope, shard, worker_log


class CaptureWorker:
    """Worker methods of truetap; every name starts with ``truetap_`` to stay clear of vLLM's."""

    rank: int
    vllm_config: Any
    model_runner: Any

    def truetap_facts(self, nonce: str) -> dict[str, Any]:
        """Reply with facts about this worker that can change what is captured."""
        return self._sealed(nonce, lambda: facts(self))

    def truetap_flush(
        self, nonce: str, path: str, keys: list[str], loss_masks: list[bytes]
    ) -> dict[str, Any]:
        """Write the captures of ``keys``, in that order, to ``path``'s partial file.

        The first tensor-parallel rank writes. Every rank replies with the rows that it saw and a
        digest of their token ids; a key with no rows is named in ``missing`` and nothing is
        written. ``others`` counts requests that were captured and not asked for.
        """
        reply = self._sealed(nonce, lambda: _flush(Path(path), keys, loss_masks))
        rows = reply.get("payload", {}).get("rows")
        worker_log.say(f"rank {self.rank} flushes {len(keys)} requests, {rows} rows, call {nonce}")
        return reply

    def _sealed(self, nonce: str, work: Any) -> dict[str, Any]:
        world_size = self.vllm_config.parallel_config.world_size
        return envelope.seal(nonce, self.rank, world_size, work)


def _flush(path: Path, keys: list[str], loss_masks: list[bytes]) -> dict[str, Any]:
    taken, others = _connector().take(keys)
    seen = hashlib.sha256()
    for key, one in taken.items():
        seen.update(json.dumps([key, one.token_ids]).encode())
    reply: dict[str, Any] = {
        "missing": [key for key in keys if key not in taken],
        "rows": sum(len(one.token_ids) for one in taken.values()),
        "seen": seen.hexdigest(),
        "others": others,
        "digests": {},
    }
    states = [one.states for one in taken.values()]
    if states and not reply["missing"] and all(one is not None for one in states):
        reply["digests"] = shard.write_partial(
            path, states, [one.token_ids for one in taken.values()], loss_masks
        )
    return reply


def _connector() -> Any:
    """Return this worker's connector; the one place that reaches for vLLM's transfer group."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def facts(worker: Any) -> dict[str, Any]:
    """Return facts about a worker that can change what is captured, as builtins."""
    import torch
    import vllm

    config = worker.vllm_config
    runner = type(worker.model_runner)
    cuda = torch.cuda.is_available() and config.device_config.device_type == "cuda"
    return {
        "engine": "vllm",
        "engine_version": vllm.__version__,
        "torch_version": str(torch.__version__),  # a subclass of str
        "cuda_version": torch.version.cuda if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else torch.backends.cpu.get_cpu_capability(),
        "model_runner": f"{runner.__module__}.{runner.__qualname__}",
        "model": config.model_config.model,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "pipeline_parallel_size": config.parallel_config.pipeline_parallel_size,
        "world_size": config.parallel_config.world_size,
        "max_model_len": config.model_config.max_model_len,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "enforce_eager": config.model_config.enforce_eager,
        "enable_prefix_caching": config.cache_config.enable_prefix_caching,
        "enable_chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "block_size": config.cache_config.block_size,
        "kv_connector": config.kv_transfer_config.kv_connector
        if config.kv_transfer_config
        else None,
    }

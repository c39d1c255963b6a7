"""What runs inside each vLLM worker, called by name through ``truetap.harness.collect``.

vLLM adds these classes to its worker's bases (``worker_extension_cls``); ``self`` is the worker.
Only control data travels in the replies; hidden states go to files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from truetap.harness import worker_log
from truetap.harness.collect_worker import CollectWorker
from truetap.harness.staging import Staging


class FactsWorker(CollectWorker):
    """Tells what can change a capture. Names start with ``truetap_``, to stay clear of vLLM's."""

    model_runner: Any

    def truetap_facts(self) -> dict[str, Any]:
        """Return facts about this worker that can change what is captured."""
        return facts(self)


class StagingWorker(FactsWorker):
    """A worker whose rows go to shards. What sees the rows is ``truetap_tap``'s."""

    hashes_everywhere: ClassVar[bool] = False
    """Whether ranks that do not write hash their rows, to be compared with the first's."""
    _truetap_staging: Staging

    def truetap_tap(self, staging: Staging) -> None:
        """Have ``staging`` be given the rows from now on."""
        raise NotImplementedError

    def truetap_stage(self, shape: list[int], dtype: str, pool_bytes: int, threads: int) -> None:
        """Make the pool for rows of this shape and dtype. The first rank is the one that writes."""
        import torch

        boundaries, hidden = shape
        self._truetap_staging = Staging(
            shape=(boundaries, hidden),
            dtype=getattr(torch, dtype),
            pool_bytes=pool_bytes,
            threads=threads,
            pinned=self.vllm_config.device_config.device_type == "cuda",
            writes=self.rank == 0,
            hashes=self.hashes_everywhere,
        )
        self.truetap_tap(self._truetap_staging)

    def truetap_shards(
        self, announced: Sequence[Sequence[Any]], due: Sequence[str], wait_s: float
    ) -> dict[str, Any]:
        """Expect the announced shards; tell what has come of those that are due.

        See ``Staging.expect`` for what is announced, and ``Staging.report`` for the reply.
        """
        if not hasattr(self, "_truetap_staging"):  # nothing was ever ordered
            return {"written": {}, "missing": {}, "others": 0, "failed": None, "status": {}}
        for shard in announced:
            self._truetap_staging.expect(*shard)
        report = self._truetap_staging.report(due, wait_s)
        for name, seen in report["written"].items():
            rows = sum(request["rows"] for request in seen)
            worker_log.say(f"rank {self.rank}: {len(seen)} requests, {rows} rows in {name}")
        return report


class CaptureWorker(StagingWorker):
    """The worker of ``vllm_native``: its rows come from the KV connector."""

    def truetap_tap(self, staging: Staging) -> None:
        """Give ``staging`` to this worker's connector; the one place that reaches for it."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector: Any = get_kv_transfer_group()
        connector.staging = staging


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
        "executor": str(config.parallel_config.distributed_executor_backend),
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

"""vLLM's example connector for hidden states where there is no GPU, for a comparison only.

``ExampleHiddenStatesConnector`` copies a finished request into pinned memory, which torch refuses
without an accelerator: the engine dies in the step after its first prompt. Only that copy is made
anew here, plainly. Scheduling, blocks held until the copy, lock files, writer threads, names and
content of the files are vLLM's own. Load it by ``kv_connector_module_path``, with this folder on
PYTHONPATH. It is written for the release that it was tried with, 0.32.0: it overrides a private
method, and the benchmark checks what comes out.
"""

from __future__ import annotations

import fcntl
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example


class Done:
    """The event of a copy that was over before it was asked for."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class ExampleConnectorCpu(example.ExampleHiddenStatesConnector):
    """The example connector with a copy that needs no device."""

    def _submit_async_write(self, pending: Any) -> None:
        """Copy a finished request's rows out of the cache; have a thread write its file."""
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = blocks[:, None] * self._block_size + torch.arange(self._block_size)
        rows = example.extract_from_kv_cache(
            self._kv_cache, slots.flatten(), len(pending.token_ids)
        )
        tensors = {"hidden_states": rows.contiguous(), "token_ids": pending.token_ids.clone()}
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(f"{pending.filename}.lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        self._req_copy_events[pending.req_id] = Done()
        future = self._executor.submit(self._write_tensors, tensors, Done(), pending.filename, lock)
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))

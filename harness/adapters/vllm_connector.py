"""The KV connector that copies hidden states out of vLLM, inside the engine's own processes.

vLLM's ``extract_hidden_states`` keeps the requested boundaries of every token in a cache layer of
its own, compiled and graph-captured like any other. This connector watches the schedule and hands
a request's rows to the worker's ``Staging`` in the very step that completes its prompt, so that
nothing waits for a later step and nothing is left behind when the last request of a run ends.

The class has two lives. In the scheduler's process it tracks which cache blocks each request owns;
in each worker's process it hands over. vLLM ships the list of copies from one to the other with
every step (``CopyOrders``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from truetap.harness.staging import Staging

KEY_FIELD = "truetap_key"
"""Name under which a request carries its key, in ``extra_args["kv_transfer_params"]``."""


@dataclass(frozen=True)
class CopyOrder:
    """Copy the prompt rows of one request out of these cache blocks, in this step."""

    key: str
    token_ids: list[int]
    block_ids: list[int]


@dataclass
class CopyOrders(KVConnectorMetadata):
    """What the scheduler's half tells the workers' half with one step."""

    orders: list[CopyOrder] = field(default_factory=list)


@dataclass
class _Tracked:
    """A request between its first scheduling and its end, as the scheduler's half sees it."""

    key: str | None
    """None: not to be captured, as a request that only asks for log-probabilities."""
    token_ids: list[int]
    block_ids: list[int]
    ordered: bool = False


class CaptureConnector(KVConnectorBase_V1, SupportsHMA):
    """Delivers the hidden states of every prompt before ``generate()`` returns."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._group = _hidden_state_group(kv_cache_config)
        self._block_size = kv_cache_config.kv_cache_groups[self._group].kv_cache_spec.block_size
        self._tracked: dict[str, _Tracked] = {}
        self._cache: torch.Tensor | None = None
        self.staging: Staging | None = None
        """What takes the rows; until the worker has one, rows are nobody's."""

    # The scheduler's half

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:  # noqa: ARG002
        """Offer no cached tokens: this connector only produces."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing to do: block ids are read from the schedule itself."""

    def build_connector_meta(self, scheduler_output: Any) -> CopyOrders:
        """Follow one step's schedule; order a copy for each prompt that this step completes."""
        meta = CopyOrders()
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            tracked = _Tracked(
                key=_key_of(new),
                token_ids=list(new.prompt_token_ids),
                block_ids=list(new.block_ids[self._group]),
            )
            self._tracked[new.req_id] = tracked
            self._order(meta, tracked, new.num_computed_tokens + scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            tracked, fresh = self._tracked[req_id], cached.new_block_ids[index]
            if req_id in cached.resumed_req_ids:  # after preemption the block table is a new one
                tracked.block_ids = []
            if fresh is not None:
                tracked.block_ids += fresh[self._group]
            self._order(meta, tracked, cached.num_computed_tokens[index] + scheduled[req_id])
        return meta

    @staticmethod
    def _order(meta: CopyOrders, tracked: _Tracked, computed: int) -> None:
        if tracked.key is not None and not tracked.ordered and computed >= len(tracked.token_ids):
            tracked.ordered = True
            meta.orders.append(
                CopyOrder(tracked.key, tracked.token_ids, list(tracked.block_ids)),
            )

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:  # noqa: ARG002
        """Forget a finished request; its blocks may be reused at once."""
        self._tracked.pop(request.request_id, None)
        return False, None

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        """As ``request_finished_all_groups``, for engines with a single cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    # The workers' half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the cache layer that holds the hidden states."""
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        names = get_layers_from_vllm_config(
            self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches)
        )
        (name,) = names
        self._cache = _as_blocks_of_rows(kv_caches[name], self._block_size)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to load."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to do per layer: the whole stack is copied once, after the step."""

    def wait_for_save(self) -> None:
        """Hand over what this step completed: the last hook of a step, after the cache's writes."""
        if not self.has_connector_metadata():
            return
        meta = self._get_connector_metadata()
        assert isinstance(meta, CopyOrders)
        if self.staging is None:
            return
        for order in meta.orders:
            try:
                rows = partial(self._rows, self._indices(order.block_ids))
            except Exception as error:  # in a step it would end the engine
                self.staging.stop(error)
                return
            self.staging.put(order.key, 0, order.token_ids, rows)

    def _indices(self, block_ids: list[int]) -> torch.Tensor:
        """Return block ids on the cache's device. From unpinned memory this would wait for it."""
        assert self._cache is not None
        indices = torch.tensor(block_ids, pin_memory=self._cache.is_cuda)
        return indices.to(self._cache.device, non_blocking=True)

    def _rows(self, blocks: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Return rows of a request, ``[end - start, boundaries, hidden]``, never a view.

        On a GPU the copy is queued behind this step and before the next one, which may give the
        blocks to another request.
        """
        assert self._cache is not None
        first = start // self._block_size
        last = -(-end // self._block_size)
        skipped = start - first * self._block_size
        rows = self._cache.index_select(0, blocks[first:last]).flatten(0, 1)
        return rows[skipped : skipped + end - start]


def _key_of(new_request: Any) -> str | None:
    """Return the caller's key, if there is one: vLLM's own request ids get a random suffix."""
    extra = getattr(new_request.sampling_params, "extra_args", None) or {}
    key = (extra.get("kv_transfer_params") or {}).get(KEY_FIELD)
    return None if key is None else str(key)


def _hidden_state_group(kv_cache_config: Any) -> int:
    """Return the index of the cache group that holds the hidden states, found by layer name.

    Its spec type is no guide: the layer can sit in a uniform group together with others.
    """
    groups = kv_cache_config.kv_cache_groups
    hits = [
        index
        for index, group in enumerate(groups)
        if any("cache_only_layers" in name for name in group.layer_names)
    ]
    if len(hits) != 1:
        raise RuntimeError(
            f"expected one cache group with hidden states, found {len(hits)} of {len(groups)}"
        )
    return hits[0]


def _as_blocks_of_rows(cache: torch.Tensor, block_size: int) -> torch.Tensor:
    """View the cache as ``[blocks, block_size, boundaries, hidden]``, whatever the release.

    From vLLM 0.29 it is ``[blocks, boundaries, block_size, hidden]``; before, the block's rows came
    second. Reading the wrong one gives wrong values without an error, so the release decides.
    """
    import vllm
    from packaging.version import Version

    rows_third = Version(vllm.__version__) >= Version("0.29.0.dev0")
    view = cache.transpose(1, 2) if rows_third else cache
    if view.shape[1] != block_size:
        raise RuntimeError(
            f"hidden-state cache of shape {tuple(cache.shape)} does not have blocks of "
            f"{block_size} rows where vLLM {vllm.__version__} should keep them"
        )
    return view

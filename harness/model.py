"""The records that pass between adapters, the suite and the pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class EngineSpec:
    """How to open a verifier for capture. Everything here can change what is captured.

    A capture path that cannot do what a field asks for must refuse with ``UsageError``, when it is
    opened or asked to capture, and give no data.

    ``boundaries`` are in truetap's spelling: boundary k is the residual stream after k decoder
    blocks, before any norm (0 = embeddings, n = after the last block).
    """

    model: str
    """Directory of the verifier, in Hugging Face layout."""
    boundaries: tuple[int, ...]
    """What to capture, slot by slot. Empty: the same engine without any capture."""
    dtype: str = "bfloat16"
    tensor_parallel_size: int = 1
    executor: str = "mp"
    """Who starts the ranks: "mp" (all on this machine), or "ray" (vLLM asks Ray, on any nodes)."""
    max_model_len: int = 512
    """Longest sequence in tokens. Prompts of up to ``max_model_len - 2`` tokens must be captured
    (one generated token, one draft token), up to ``max_model_len`` captured whole or refused,
    longer ones refused."""
    max_num_batched_tokens: int = 1024
    max_num_seqs: int = 32
    enforce_eager: bool = True
    enable_prefix_caching: bool = True
    kv_cache_blocks: int | None = None
    """Blocks of the KV cache; None: as many as the engine likes. Few of them force preemption."""
    include_output: bool = False
    """Capture the generated tokens' states too: prompt + generated - 1 rows, because the last
    generated token never enters a forward pass. ``Capture.token_ids`` are the ids with rows."""
    seed: int = 0
    startup_deadline_s: float = 300.0
    call_deadline_s: float = 120.0
    """Longest silence of the engine before it is killed, in seconds."""


@dataclass(frozen=True)
class CaptureRequest:
    """One prompt whose hidden states are wanted."""

    key: str
    """The caller's own name for the request; it must come back with the rows."""
    token_ids: tuple[int, ...]
    max_tokens: int = 1
    """How many tokens to generate, greedily, whatever they are (an end token does not stop it)."""


@dataclass(frozen=True)
class Capture:
    """Hidden states of one request.

    ``states`` has shape ``[tokens, boundaries, hidden]``. It is float32 so that numpy can hold it;
    widening from the engine's dtype (named in ``dtype``) is exact.
    """

    key: str
    token_ids: tuple[int, ...]
    boundaries: tuple[int, ...]
    states: Float32
    dtype: str
    last_boundary_normed: bool = False
    """True if the final norm was already applied to the state after the last block."""
    generated: tuple[int, ...] = ()
    """The tokens that the engine generated; empty if it does not say."""


@dataclass(frozen=True)
class CaptureBatch:
    """What one capture call gave: the captures, and the raw replies that announced them."""

    captures: tuple[Capture, ...]
    nonce: str
    """The nonce that this call sent; every reply must echo it."""
    replies: Sequence[Any] = field(default=())
    """One raw reply per worker, untouched (see ``truetap.harness.envelope``)."""
    world_size: int = 1
    by_rank: Sequence[str] = ()
    """For each rank a digest of what it saw of this call: keys, token ids, number of rows, and the
    states if it holds them. May be empty if there is one rank."""
    preemptions: int | None = None
    """How often the engine preempted a request during this call; None if it does not say."""


@dataclass(frozen=True)
class Environment:
    """Facts about a running engine, read from its workers.

    ``binding`` facts must be equal for a certificate to apply; ``recorded`` facts are kept for the
    reader and not compared. Values are JSON scalars, lists and dicts.
    """

    binding: Mapping[str, Any]
    recorded: Mapping[str, Any]

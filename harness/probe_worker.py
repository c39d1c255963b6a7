"""Worker methods whose replies are known beforehand: what recorder and reply channels ask for.

Every value says which rank made it, so that a reply taken from the wrong rank, or from an earlier
call, shows. ``expected_value`` builds the same values without an engine.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from truetap.harness import envelope
from truetap.harness.collect_worker import CollectWorker

if TYPE_CHECKING:
    import torch

WIDTH = 8
"""Hidden size of the states that ``probe_layers`` makes."""


class ProbeWorker(CollectWorker):
    """What vLLM adds to its worker: ``worker_extension_cls`` takes this class's dotted name.

    A worker counts the calls that it runs, to show what ran although its caller got an error.
    """

    def probe_identity(self) -> dict[str, int]:
        """Return this worker's rank and world size."""
        self._probe_counted()
        return {"rank": self.rank, "world_size": self._probe_world()}

    def probe_echo(self, text: str) -> dict[str, Any]:
        """Return ``text`` with this worker's rank: tells a call's reply from an earlier one's."""
        self._probe_counted()
        return {"rank": self.rank, "world_size": self._probe_world(), "text": text}

    def probe_sealed(self, nonce: str) -> dict[str, Any]:
        """Return an envelope (``truetap.harness.envelope``) whose payload is the call count."""
        calls = self._probe_counted()
        return envelope.seal(nonce, self.rank, self._probe_world(), lambda: {"calls": calls})

    def probe_layers(self, count: int, tokens: int) -> list[torch.Tensor]:
        """Return ``count`` bfloat16 states ``[tokens, 8]``; see ``layers``."""
        self._probe_counted()
        return layers(self.rank, count, tokens)

    def probe_value(self, kind: str) -> Any:
        """Return the value called ``kind``, one of ``KINDS``."""
        self._probe_counted()
        return expected_value(kind, self.rank, self._probe_world())

    def probe_raise(self, ranks: Sequence[int], message: str) -> dict[str, Any]:
        """Raise ValueError on ``ranks``; the other ranks return that they did not."""
        self._probe_counted()
        if self.rank in ranks:
            raise ValueError(message)
        return {"rank": self.rank, "raised": False}

    def probe_sleep(self, rank: int, seconds: float) -> dict[str, Any]:
        """Sleep on ``rank``; the other ranks answer at once."""
        self._probe_counted()
        slept = seconds if self.rank == rank else 0.0
        time.sleep(slept)
        return {"rank": self.rank, "slept": slept}

    def probe_end(self, rank: int) -> dict[str, Any]:
        """Kill ``rank``'s own process; the other ranks answer at once."""
        self._probe_counted()
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"rank": self.rank, "killed": False}

    def probe_count(self) -> int:
        """Return how many probe methods this worker has run, this one included."""
        return self._probe_counted()

    def _probe_counted(self) -> int:
        # vLLM never calls an extension's __init__, and calls a worker from one thread.
        count: int = getattr(self, "_probe_calls", 0) + 1
        self._probe_calls = count
        return count

    def _probe_world(self) -> int:
        world_size: int = self.vllm_config.parallel_config.world_size
        return world_size


def layers(rank: int, count: int, tokens: int) -> list[torch.Tensor]:
    """Return ``count`` bfloat16 tensors ``[tokens, 8]``, no two alike over ranks and layers.

    Element i of layer l on rank r is ``((r * count + l) * 8 * tokens + i) % 251``: integers that
    bfloat16 holds exactly, and a prime, so that no two layers begin with the same one.
    """
    import torch

    size = tokens * WIDTH
    first = rank * count * size
    numbers = torch.arange(first, first + count * size) % 251
    return list(numbers.to(torch.bfloat16).reshape(count, tokens, WIDTH).clone())


def expected_value(kind: str, rank: int, world: int) -> Any:
    """Return what ``probe_value(kind)`` returns on ``rank`` of ``world`` workers.

    Raises ValueError for an unknown kind.
    """
    if kind not in _MAKERS:
        raise ValueError(f"{kind!r} is no kind of value; there are: {', '.join(_MAKERS)}")
    return _MAKERS[kind](rank, world)


def _tensor(rank: int, *shape: int, dtype: str = "float32") -> torch.Tensor:
    """Return a tensor of small integers, the first of them ``16 * rank``."""
    import torch

    count = 1
    for extent in shape:
        count *= extent
    numbers = (torch.arange(count) + 16 * rank) % 128
    return numbers.to(getattr(torch, dtype)).reshape(shape)


def _numpy(rank: int, kind: str) -> Any:
    import numpy as np

    if kind == "scalar":
        return np.float32(0.5 + rank)
    count = 2**18 if kind == "mib" else 100
    return np.arange(count, dtype=np.float32).reshape(-1, 4) + rank


def _torch_dtype(rank: int, world: int) -> torch.dtype:  # noqa: ARG001
    import torch

    return torch.bfloat16


_MAKERS: dict[str, Callable[[int, int], Any]] = {
    "none": lambda _rank, _world: None,
    "scalars": lambda rank, _: [True, rank, -(2**63) + rank, 0.1 + rank],
    "text": lambda rank, _: f"rank {rank}: Grüße, 世界",
    "bytes": lambda rank, _: bytes([rank, 0, 255]),
    "dict": lambda rank, world: {"rank": rank, "world_size": world, "rows": [3, 4], "none": None},
    "empty_list": lambda _rank, _world: [],
    "layers": lambda rank, _: layers(rank, 4, 3),
    "tensor": lambda rank, _: _tensor(rank, 20, WIDTH, dtype="bfloat16"),
    "list_of_one_tensor": lambda rank, _: layers(rank, 1, 3),
    "world_many": lambda rank, world: layers(rank, world, 3),
    "tuple_of_tensors": lambda rank, _: tuple(layers(rank, 2, 3)),
    "dict_of_tensors": lambda rank, _: dict(zip("ab", layers(rank, 2, 3), strict=True)),
    "nested": lambda rank, _: {"states": [layers(rank, 2, 3), (_tensor(rank, 2), None)]},
    "set": lambda rank, _: {rank, 100},
    "numpy_array": lambda rank, _: _numpy(rank, "small"),
    "numpy_scalar": lambda rank, _: _numpy(rank, "scalar"),
    "small_tensor": lambda rank, _: _tensor(rank, 4),
    "kib_tensor": lambda rank, _: _tensor(rank, 16, 16),
    "mib_array": lambda rank, _: _numpy(rank, "mib"),
    "fp8": lambda rank, _: _tensor(rank, 4, 4, dtype="float8_e4m3fn"),
    "strided": lambda rank, _: _tensor(rank, 6, WIDTH, dtype="bfloat16")[::2, ::3],
    "zero_dim": lambda rank, _: _tensor(rank)[()],
    "empty_tensor": lambda _rank, _world: _tensor(0, 0, WIDTH, dtype="bfloat16"),
    "torch_dtype": _torch_dtype,
}
KINDS = tuple(_MAKERS)
"""The values that ``probe_value`` knows."""

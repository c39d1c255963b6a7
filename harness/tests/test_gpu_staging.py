"""The copies out of a GPU: right though their memory is written to again at once.

The engine's cache is played by a tensor that each request overwrites. What each request's rows were
is known by checksums that the GPU took of them before they were copied.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from truetap.harness import shard
from truetap.harness.staging import Staging

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

TOKENS, SHAPE = 64, (4, 1024)
PER_SHARD = 500


def checksum(bits: Any, weights: Any) -> Any:
    """Return a sum over the bits of bfloat16 rows that knows their places."""
    import torch

    return (bits.view(torch.int16).to(torch.int64) * weights).sum()


def stream_through(folder: Path, kind: type[Staging], requests: int, *, sleep: int) -> list[int]:
    """Stage so many requests; return those whose rows on the disk are not what the GPU had."""
    import torch

    staging = kind(shape=SHAPE, dtype=torch.bfloat16, pool_bytes=64 << 20, threads=4, pinned=True)
    cache = torch.empty(TOKENS, *SHAPE, dtype=torch.bfloat16, device="cuda")
    weights = torch.arange(cache.numel(), device="cuda").view(cache.shape) % 8191 + 1
    sums, wrong = torch.zeros(requests, dtype=torch.int64, device="cuda"), []
    for start in range(0, requests, PER_SHARD):
        name, count = folder / f"{start}", min(PER_SHARD, requests - start)
        keys = [f"{start + n}" for n in range(count)]
        staging.expect(str(name), str(name), keys, [TOKENS] * count, [bytes(TOKENS)] * count)
        for n, key in enumerate(keys):
            if sleep:
                torch.cuda._sleep(sleep)  # the engine's work is behind
            cache.normal_()
            sums[start + n] = checksum(cache, weights)
            staging.put(key, 0, [0] * TOKENS, lambda a, b: cache[a:b].clone())
            cache.fill_(float("nan"))  # the blocks are another's now
        report = staging.report([str(name)], 120.0)
        assert report["written"], report
        states = shard.read(name)["states"].view(count, TOKENS, *SHAPE).cuda()
        wrong += [
            start + n for n in range(count) if checksum(states[n], weights) != sums[start + n]
        ]
        name.unlink()
    return wrong


def test_ten_thousand_requests_are_on_the_disk_as_the_gpu_had_them(tmp_path: Path) -> None:
    assert stream_through(tmp_path, Staging, 10_000, sleep=0) == []


def test_an_engine_that_is_behind_is_waited_for(tmp_path: Path) -> None:
    assert stream_through(tmp_path, Staging, 100, sleep=2_000_000) == []


class Hasty(Staging):
    """Copies on a stream that waits for nobody."""

    def _copy(self, rows: Any, states: Any) -> Any:
        import torch

        self._stream = self._stream or torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            states.copy_(rows, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        return arrived.synchronize


class Careless(Staging):
    """Does not wait for the copy before it writes."""

    def _copy(self, rows: Any, states: Any) -> Any:
        super()._copy(rows, states)
        return lambda: None


@pytest.mark.parametrize("kind", [Hasty, Careless])
def test_a_copy_that_waits_for_too_little_is_found_out(tmp_path: Path, kind: Any) -> None:
    assert stream_through(tmp_path, kind, 100, sleep=20_000_000)

"""A capture path without an engine, installed beside truetap for other processes to find.

Its states follow from the token ids alone. ``FAKE_ENGINE``, a JSON object, says what goes wrong:
``{"engine": 1, "at": 8, "how": "hang"}`` concerns the eighth shard of engine 1, which leaves half a
shard on the disk and its process id in ``reached`` beside its log. Others make no more than so many
until that is there: an engine may be up when others have made everything.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from truetap.harness import shard
from truetap.harness.engine import Finished
from truetap.harness.errors import CheckFailed, CouldNotRun
from truetap.harness.extraction import Pool, Progress, ShardOrder, WrittenShard
from truetap.harness.model import EngineSpec, Environment

BINDING = {"device": "none", "verifier": {"weights_sha256": "a" * 64}, "boundaries": [3, 12]}


class FakeAdapter:
    name = "fake"

    def open(self, spec: EngineSpec, *, scratch: Path) -> FakeSession:
        return FakeSession(spec, scratch)


class FakeSession:
    """Has up to two shards under way."""

    def __init__(self, spec: EngineSpec, scratch: Path) -> None:
        self.boundaries, self._scratch = spec.boundaries, scratch
        scratch.mkdir(parents=True, exist_ok=True)
        self.calls, self.usable = 0, True
        self.fault = json.loads(os.environ.get("FAKE_ENGINE", "{}"))
        self._mine = f"extract-{self.fault.get('engine')}" == scratch.name
        if self._mine and self.fault["how"] == "start":
            raise CouldNotRun("no device", remedy="see its log")

    def extract(
        self, orders: Iterable[ShardOrder], progress: Progress, pool: Pool
    ) -> Iterator[WrittenShard]:
        assert pool.threads
        under_way: deque[WrittenShard] = deque()
        for order in orders:
            under_way.append(self._write(order, progress))
            if len(under_way) == 2:
                yield under_way.popleft()
        yield from under_way

    def _write(self, order: ShardOrder, progress: Progress) -> WrittenShard:
        import torch

        self.calls += 1
        others = self.fault and not self._mine and self.calls > self.fault["at"]
        while others and not [*self._scratch.parent.glob("*/reached")]:
            time.sleep(0.02)
        path = order.path.with_name(f"{order.path.name}.{secrets.token_hex(4)}")
        if self._mine and self.calls == self.fault["at"]:
            shard.partial_path(path).write_bytes(b"half")
            (self._scratch / "reached").write_text(str(os.getpid()))
            self._fail()
        ids = [request.token_ids for request in order.requests]
        states = [torch.tensor([[[t + 1.0] * 4, [t * 2 + 3.0] * 4] for t in of]) for of in ids]
        shard.write_partial(path, states, ids, order.loss_masks)
        for request in order.requests:
            progress.finished(Finished(request.key, [], "", "length", None, None, None), request)
        pieces = [[(0, len(of), shard.checksum(shard.raw(of)))] for of in states]
        return WrittenShard(order, shard.partial_path(path), pieces)

    def _fail(self) -> None:
        match self.fault["how"]:
            case "hang":
                time.sleep(600)
            case "engine":
                self.usable = False
                raise CouldNotRun("vLLM did not answer", remedy="see its log")
            case "disk":
                raise CouldNotRun("No space left on device", remedy="free disk space")
            case "bad":
                raise CheckFailed("rank 1 saw other tokens")
            case "file":
                raise OSError(28, "No space left on device", "somewhere")
            case "defect":
                raise AttributeError("no such thing")

    def environment(self) -> Environment:
        if not self.usable:
            raise CouldNotRun("this engine was ended after an earlier failure")
        return Environment(BINDING, {"verifier_name": "paper"})

    def close(self) -> None:
        self.usable = False

"""How a session tells an engine's workers of the shards to come. No engine runs here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from truetap.harness.adapters import vllm_session
from truetap.harness.adapters.vllm_native import VllmNativeSession
from truetap.harness.engine import Finished, Prompt
from truetap.harness.errors import CouldNotRun, UsageError
from truetap.harness.extraction import Pool, Progress, ShardOrder
from truetap.harness.model import CaptureRequest, EngineSpec

IDS = (1, 2, 3)
SEEN = {
    "rows": len(IDS),
    "token_ids": hashlib.sha256(np.array(IDS, dtype=np.int64).tobytes()).hexdigest(),
    "pieces": [[0, len(IDS), "x"]],
    "recomputed": 0,
}


class Engine:
    """Finishes one prompt after the other; its workers have every shard that is due at once."""

    prefills_in_chunks = True

    def __init__(self) -> None:
        self.llm = SimpleNamespace(llm_engine=None)
        self.announced: list[list[str]] = []
        """What each call that announced anything did announce."""
        self.calls = 0
        self.sizes: dict[str, int] = {}
        self.early = 0
        """Prompts that came before their shard was announced."""
        self.dies = False

    def collect(self, _llm: Any, method: str, args: Any, _folder: Path) -> dict[int, Any]:
        if method != "truetap_shards":
            return {0: 1}
        self.calls += 1
        told, due, _wait = args
        if told:
            self.announced.append([name for name, *_ in told])
        self.sizes |= {name: len(keys) for name, _partial, keys, *_ in told}
        written = {name: [SEEN] * self.sizes[name] for name in due}
        status = {"queued": 0, "staged": 0, "most_staged": 0, "waited_s": 0.0, "moved": 0}
        rest = {"missing": {}, "others": 0, "failed": None, "status": status}
        return {0: {"written": written, **rest}}

    def generate(self, prompts: Iterator[Prompt], *, in_flight: int) -> Iterator[Finished]:
        running: list[Prompt] = []
        while True:
            while len(running) < in_flight and (prompt := next(prompts, None)):
                name = prompt.key.removeprefix(vllm_session.KEY_PREFIX).rpartition(":")[0]
                self.early += name not in self.sizes
                running.append(prompt)
            if not running:
                return
            if self.dies:
                raise CouldNotRun("the engine died")
            yield Finished(running.pop(0).key, [7], "", "length", None, None, None)


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[VllmNativeSession, Engine]:
    engine = Engine()
    monkeypatch.setattr(vllm_session, "VllmEngine", lambda *_a, **_k: engine)
    size = {"num_hidden_layers": 4, "hidden_size": 8, "vocab_size": 16}
    settings = {"model_type": "llama", "max_position_embeddings": 64, **size}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    spec = EngineSpec(model=str(tmp_path), boundaries=(2, 4), max_model_len=16, max_num_seqs=8)
    return VllmNativeSession(spec, tmp_path), engine


def orders_of(folder: Path, shards: int, requests: int) -> list[ShardOrder]:
    return [
        ShardOrder(
            folder / f"{number}",
            [CaptureRequest(f"{number}-{n}", IDS) for n in range(requests)],
            [bytes(len(IDS))] * requests,
        )
        for number in range(shards)
    ]


@pytest.mark.parametrize(
    ("shards", "requests", "together"),
    [
        (20, 2, [4, 4, 4, 4, 4]),
        (7, 3, [3, 3, 1]),  # no fewer requests than the engine computes at a time
        (3, 8, [1, 1, 1]),
        (2, 50, [1, 1]),
        (9, 1, [8, 1]),
    ],
)
def test_small_shards_are_announced_together(
    session: tuple[VllmNativeSession, Engine],
    tmp_path: Path,
    shards: int,
    requests: int,
    together: list[int],
) -> None:
    """Each call waits for the end of a step: one for each left the GPU idle half the time."""
    captor, engine = session
    orders = orders_of(tmp_path, shards, requests)
    made = list(captor.extract(iter(orders), Progress(), Pool(1 << 20, 2)))
    assert [len(names) for names in engine.announced] == together
    assert engine.early == 0
    assert sorted(one.order.path.name for one in made) == sorted(o.path.name for o in orders)
    assert engine.calls <= len(together) + 3


def test_orders_are_taken_when_the_engine_has_room_for_them(
    session: tuple[VllmNativeSession, Engine], tmp_path: Path
) -> None:
    captor, engine = session
    taken: list[str] = []

    def orders() -> Iterator[ShardOrder]:
        for order in orders_of(tmp_path, 40, 2):
            taken.append(order.path.name)
            yield order

    made = captor.extract(orders(), Progress(), Pool(1 << 20, 2))
    engine.dies = True
    with pytest.raises(CouldNotRun, match="the engine died"):
        list(made)
    assert len(taken) == 8  # 16 requests in flight, as many as two steps compute


def test_a_prompt_that_is_too_long_is_refused_before_its_shard_is_announced(
    session: tuple[VllmNativeSession, Engine], tmp_path: Path
) -> None:
    captor, engine = session
    long = ShardOrder(tmp_path / "long", [CaptureRequest("long", (1,) * 15)], [bytes(15)])
    orders = [*orders_of(tmp_path, 4, 2), long]
    with pytest.raises(UsageError, match="'long' has 15 tokens"):
        list(captor.extract(iter(orders), Progress(), Pool(1 << 20, 2)))
    assert [len(names) for names in engine.announced] == [4]

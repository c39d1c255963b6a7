"""What a run will take is computed beforehand, and a disk that fills up costs one shard."""

from __future__ import annotations

import errno
import io
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from truetap.harness import registry
from truetap.harness.errors import CheckFailed, CouldNotRun, IntegrityError
from truetap.harness.extraction import Pool, ShardOrder
from truetap.harness.model import EngineSpec, Environment
from truetap.pipeline import extract, plan, shard_making
from truetap.pipeline.prepare import Conversation
from truetap.pipeline.shard_making import Pace, make_shards
from truetap.pipeline.store import Store

CONVERSATIONS, TOKENS, WIDTH = 68_000, 1_328, 4_096  # of EAGLE's own training data
GIB = 2**30


@pytest.mark.parametrize(("states", "gigabytes"), [(1, 740), (4, 2_959)])
def test_the_bytes_of_a_known_corpus(states: int, gigabytes: int) -> None:
    """CASE-20: EAGLE-3 keeps three features and a target, four times what EAGLE-1 kept."""
    tokens = CONVERSATIONS * TOKENS
    need = plan.capture_bytes(tokens, states, WIDTH, "bfloat16")
    assert round(need / 1e9) == gigabytes
    assert plan.capture_bytes(tokens, states, WIDTH, "float32") == 2 * need
    assert plan.told(tokens, states, WIDTH, "bfloat16") == (
        f"90,304,000 tokens x {states} states x 4096 values x 2 bytes = {need / 1e9:,.2f} GB"
    )


def test_a_terabyte_holds_one_state_and_not_four() -> None:
    one, four = (plan.capture_bytes(90_304_000, n, WIDTH, "bfloat16") for n in (1, 4))
    plan.require_space(one, 10**12, "disk")
    said = r"the shards need 2,959\.1 GB and disk has 1,000\.0 GB free"
    with pytest.raises(CouldNotRun, match=said) as refused:
        plan.require_space(four, 10**12, "disk")
    assert refused.value.remedy
    plan.require_space(four, four, "disk")
    with pytest.raises(CouldNotRun):
        plan.require_space(four, four - 1, "disk")


def test_hidden_states_in_a_cache_take_what_they_take() -> None:
    """CASE-16: 8,192 tokens at four boundaries of width 4,096."""
    assert plan.capture_bytes(8_192, 4, 4_096, "bfloat16") == 256 * 2**20


SAID = (
    "vLLM failed at start: ValueError: To serve at least one request with the models's max seq len "
    "({tokens}), ({needed} GiB KV cache is needed, which is larger than the available KV cache"
)


@pytest.mark.parametrize(
    ("tokens", "states", "blocks", "width", "needed", "wrong"),
    [
        (8_192, 4, 43, 4_096, "581.48", True),
        (65_536, 1, 24, 1_024, "131.36", True),
        (65_536, 4, 80, 8_192, "20.0", False),  # 4 GiB of states and a large model's own
        (8_192, 4, 43, 4_096, "0.5", False),
    ],
)
def test_an_engine_that_misprices_its_cache_is_told_from_one_that_lacks_room(
    tokens: int, states: int, blocks: int, width: int, needed: str, *, wrong: bool
) -> None:
    most = plan.most_cache_bytes(tokens, states, blocks, width, "bfloat16")
    said = plan.overpriced(SAID.format(tokens=tokens, needed=needed), most)
    assert bool(said) == wrong
    if wrong:
        assert f"at most {most / GIB:.2f} GiB" in said
    assert plan.overpriced("vLLM failed at start: RuntimeError: no such device", most) == ""


@pytest.mark.parametrize(("needed", "said"), [("581.48", "misprices"), ("0.0004", "")])
def test_extraction_says_so(
    paper_verifier: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    needed: str,
    said: str,
) -> None:
    def fails(_spec: Any, *, scratch: Path) -> Any:  # noqa: ARG001
        raise CouldNotRun(SAID.format(tokens=512, needed=needed), remedy="see the log")

    monkeypatch.setattr(registry, "find", lambda _: SimpleNamespace(open=fails))
    spec = EngineSpec(str(paper_verifier), boundaries=(2, 6, 9, 12))
    with pytest.raises(CouldNotRun, match=f"{needed} GiB KV cache.*{said}") as failed:
        extract.opened("vllm_native", spec, tmp_path)
    assert (failed.value.remedy == "see the log") == (not said)


# --- a disk that fills up ----------------------------------------------------------------------


ENVIRONMENT = Environment({"verifier": {}, "boundaries": []}, {"verifier_name": "tiny"})
FACTS: dict[str, Any] = {"boundaries": [1, 2], "dtype": "float32", "verifier": {}}


@pytest.mark.torch
def test_a_disk_that_is_full_at_the_fifth_shard_leaves_four(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_engine: Any
) -> None:
    conversations = [Conversation(f"c{n}", "train", (n, n + 1, n + 2), 1) for n in range(12)]
    jobs = extract._jobs(conversations, 2)
    store = Store(tmp_path)
    write = os.pwrite

    def full(file: int, data: Any, at: int) -> int:
        if "shard-00004" in str(Path(f"/proc/self/fd/{file}").readlink()):
            if at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(file, data[:100], at)
        return write(file, data, at)

    def states_of(order: ShardOrder) -> Any:
        import torch

        return [torch.arange(18).reshape(3, 2, 3).float() + 1 for _ in order.requests]

    def run() -> list[str]:
        todo = extract._unfinished(store, jobs, Console(file=io.StringIO()))
        pool, session = Pool(32 << 20, 2), without_engine(states_of)
        for made in make_shards(session, todo, tmp_path, Pace(), pool, FACTS, ENVIRONMENT):
            store.record(made.entry, made.partial)
        return [job.name for job in todo]

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises((CouldNotRun, OSError), match="No space left on device"):
        run()
    monkeypatch.undo()
    held = list(store.entries())
    assert held == [job.name for job in jobs[: len(held)]]
    assert 1 <= len(held) <= 4
    assert len(store.samples([c.id for c in conversations[: 2 * len(held)]])) == 2 * len(held)
    with pytest.raises(IntegrityError, match="of 12 conversations have no captures"):
        store.samples([c.id for c in conversations])
    store.repair()
    assert run() == [job.name for job in jobs[len(held) :]]
    assert len(store.samples([c.id for c in conversations])) == 12
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".jsonl", *[".safetensors"] * 6]


@pytest.mark.torch
def test_one_bad_shard_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_engine: Any
) -> None:
    """Shards are proven side by side; those that are right are kept, whatever comes beside them."""
    conversations = [Conversation(f"c{n}", "train", (n, n + 1, n + 2), 1) for n in range(12)]
    jobs = extract._jobs(conversations, 2)
    store = Store(tmp_path)

    def states_of(order: ShardOrder) -> Any:
        import torch

        bad = order.path.name in (jobs[1].name, jobs[3].name)
        return [
            torch.arange(18).reshape(3, 2, 3).float() + 1 if not bad else torch.zeros(3, 2, 3)
            for _ in order.requests
        ]

    session, look = without_engine(states_of), shard_making.require_sound

    def late(name: str, states: Any) -> None:
        while session.orders < len(jobs):  # all are under way when the first is found bad
            time.sleep(0.01)
        look(name, states)

    monkeypatch.setattr(shard_making, "require_sound", late)
    pool = Pool(32 << 20, 6)

    def run() -> None:
        for one in make_shards(session, jobs, tmp_path, Pace(), pool, FACTS, ENVIRONMENT):
            store.record(one.entry, one.partial)

    with pytest.raises(CheckFailed, match=f"{jobs[1].name}: slot 0 is all zero"):
        run()
    assert list(store.entries()) == [jobs[n].name for n in (0, 2, 4, 5)]

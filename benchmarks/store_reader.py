"""How fast a store opens and streams: ``python benchmarks/store_reader.py --rate 1305``.

Makes a manifest of ``--lines`` lines without shards and opens it; then streams a store, the given
one or one of its own, against ``--rate``, the tokens/s at which the verifier's states were
extracted. A trainer is never held up while the ratio is well above 1; the goal is 3.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import ending

from truetap.harness import shard
from truetap.pipeline.store import Store, sealed
from truetap.pipeline.store_reader import StoreReader

IDS = 50


def forget(folder: Path) -> None:
    """Take a folder's files out of the page cache, so that they come from the disk."""
    os.sync()
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def anonymous_bytes() -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line
    )
    return int(line.split()[1]) * 1024


def line_of(number: int, digests: dict[str, str], ids: list[str]) -> dict[str, Any]:
    """A line as long as extraction's own."""
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    facts = {f"fact_{n}": f"value {n}" for n in range(18)}
    return {
        "shard": f"shard-{number:05d}.safetensors",
        "requests": len(ids),
        "boundaries": [2, 15, 27, 30],
        "verifier": {"name": "paper", "config_sha256": digest, "weights_sha256": digest},
        "engine": facts | {"adapter": {"name": "vllm_native", "sha256": digest}},
        "certificate": digest,
        "digests": digests,
        "ids": ids,
    }


def open_time(lines: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="store-reader-"))
    try:
        with (folder / "manifest.jsonl").open("w") as file:
            for number in range(lines):
                digest = hashlib.sha256(str(number).encode()).hexdigest()
                ids = [f"conversation-{number:05d}-{n:02d}" for n in range(IDS)]
                line = line_of(number, dict.fromkeys(shard.TENSORS, digest), ids)
                file.write(json.dumps(sealed(line)) + "\n")
        forget(folder)
        began = time.perf_counter()
        reader = StoreReader(Store(folder))
        seconds = time.perf_counter() - began
        size = (folder / "manifest.jsonl").stat().st_size
        return {"lines": lines, "requests": len(reader), "bytes": size, "seconds": seconds}
    finally:
        shutil.rmtree(folder)


def make(folder: Path, shards: int, rows: int, boundaries: int, width: int) -> None:
    import torch

    store, each = Store(folder), rows // IDS
    for number in range(shards):
        ids = [f"conversation-{number:05d}-{n:02d}" for n in range(IDS)]
        digests = shard.write_partial(
            store.path(f"shard-{number:05d}.safetensors"),
            list(torch.randn(IDS, each, boundaries, width).bfloat16()),
            [[number] * each] * IDS,
            [b"\1" * each] * IDS,
        )
        store.record(line_of(number, digests, ids))


def stream(folder: Path, *, rate: float, cold: bool, **how: Any) -> dict[str, Any]:
    """Stream all rows, each copied once as a trainer would; return what it took."""
    ahead = how.pop("ahead", 1)
    if cold:
        forget(folder)
    before, most, rows, size = anonymous_bytes(), 0, 0, 0
    began = time.perf_counter()
    for number, sample in enumerate(StoreReader(Store(folder), **how).stream(ahead=ahead)):
        copied = sample.states.clone()
        rows, size = rows + len(copied), size + copied.nbytes
        if number % IDS == 0:
            most = max(most, anonymous_bytes())
    seconds = time.perf_counter() - began
    return {
        **how,
        "ahead": ahead,
        "cold": cold,
        "rows": rows,
        "rows_per_second": rows / seconds,
        "bytes_per_second": size / seconds,
        "times_the_rate": rows / seconds / rate,
        "memory_grew_by_bytes": max(0, most - before),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, required=True, help="tokens/s of an extraction")
    parser.add_argument("--store", type=Path, help="a folder of shards")
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8_000, help="of one shard")
    parser.add_argument("--boundaries", type=int, default=4)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    made: dict[str, Any] = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
        "rate": args.rate,
        "open": open_time(args.lines),
        "goal": {"open_seconds": 2, "times_the_rate": 3},
    }
    with tempfile.TemporaryDirectory(prefix="store-reader-") as scratch:
        folder = args.store or Path(scratch)
        if args.store is None:
            make(folder, args.shards, args.rows, args.boundaries, args.width)
            made["row"] = [args.boundaries, args.width, "bfloat16"]
        ways = [
            {"cold": cold, "digest_states": digested, "ahead": ahead}
            for cold in (True, False)
            for digested, ahead in ((True, 1), (True, 2), (False, 1))
        ]
        stream(folder, rate=args.rate, cold=False)  # the first one pays for imports
        made["stream"] = [stream(folder, rate=args.rate, **way) for way in ways]
    print(json.dumps(made, indent=1))
    if args.out:
        args.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    ending.run(main)

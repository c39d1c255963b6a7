"""How fast a shard's values are looked at while another thread holds Python's lock.

    python benchmarks/proving.py --threads 4 --out FILE

Extraction proves shards in threads of the process that drives the engine. Here they prove states in
memory, by turns with nobody else in the process (A) and beside a thread that only computes in
Python (B), the worst that a driver can be. Prints both rates, and B over A.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from pathlib import Path

import ending
import torch
from capture_tax import hardware, versions

from truetap.pipeline.shard_making import require_sound


def rate(states: torch.Tensor, threads: int, *, busy: bool) -> float:
    """Return GB/s over all threads, each looking at all of ``states`` once."""
    over = threading.Event()

    def drive() -> None:
        while not over.is_set():
            sum(range(1000))

    driver = threading.Thread(target=drive)
    if busy:
        driver.start()
    readers = [
        threading.Thread(target=require_sound, args=("shard", states)) for _ in range(threads)
    ]
    began = time.monotonic()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    seconds = time.monotonic() - began
    over.set()
    if busy:
        driver.join()
    return threads * states.numel() * states.element_size() / seconds / 1e9


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4096, help="of 4 boundaries of width 4096")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path, help="where the JSON goes, too")
    given = parser.parse_args()
    machine = hardware()
    states = torch.randn(given.rows, 4, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    alone, beside = [], []
    for _ in range(given.pairs):
        alone.append(rate(states, given.threads, busy=False))
        beside.append(rate(states, given.threads, busy=True))
    told = {
        "alone_gb_s": round(statistics.median(alone), 2),
        "beside_a_busy_thread_gb_s": round(statistics.median(beside), 2),
        "ratio": round(statistics.median(b / a for a, b in zip(alone, beside, strict=True)), 3),
    }
    result = {
        "format": "truetap/benchmark/1",
        "measures": "GB/s of states looked at by threads that share Python's lock with another",
        "hardware": machine,
        "versions": versions(),
        "settings": {"threads": given.threads, "rows": given.rows, "pairs": given.pairs},
        "summary": told,
    }
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    ending.run(main)

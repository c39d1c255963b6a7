"""Measures what the whole and the streamed reference take in memory, each in a process of its own.

Run ``python benchmarks/streamed_memory.py``. It builds a Llama of twelve blocks, in bfloat16 as
published verifiers are, runs two prompts through each reference, and prints the peak of resident
memory above what the process had before, in MB. Pages of the checkpoint that are mapped count.
``hoarding`` is the streamed reference with a fault: it keeps every block.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import ending

BLOCKS = 12
VOCABULARY = 16384
TOKENS = 128
PROMPTS = 2
MB = 1e6


def build(folder: Path, hidden: int) -> None:
    """Write a Llama whose embeddings and head are as large as a block or two."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=BLOCKS,
        num_attention_heads=hidden // 64,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def block_values(hidden: int) -> int:
    """Return how many weights a block has."""
    return 4 * hidden * hidden + 3 * hidden * (hidden * 11 // 4) + 2 * hidden


def allowed(hidden: int) -> float:
    """Return the bytes that the streamed reference may take, slack excepted."""
    rows = TOKENS * PROMPTS
    both_precisions = block_values(hidden) * (4 + 2)
    boundaries = (BLOCKS + 2) * rows * hidden * 4 * 2  # kept, and stacked in the end
    inside = TOKENS * (hidden * 11 // 4) * 4 * 3 + rows * hidden * (4 + 2)
    return both_precisions + boundaries + inside


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def measure(kind: str, model: Path) -> dict[str, int]:
    """Return resident bytes of this process before, and at most while a reference is at work."""
    import torch

    from truetap.harness.random_verifier import tiny_llama
    from truetap.harness.reference import Reference
    from truetap.harness.streamed_reference import StreamedReference

    class Hoarding(StreamedReference):
        hoard: ClassVar[list[Any]] = []

        def _hold(self, k: int, dtype: Any) -> None:
            super()._hold(k, dtype)
            self.hoard.append(self._held)

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    shape = (PROMPTS, TOKENS)
    prompts = torch.randint(0, VOCABULARY, shape, generator=generator).tolist()
    made = {"whole": Reference, "streamed": StreamedReference, "hoarding": Hoarding}[kind]
    with tempfile.TemporaryDirectory() as scratch:  # what the libraries take once, by now
        made(tiny_llama(Path(scratch), num_blocks=1), "bfloat16").states_of([[1, 2, 3]] * 2)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    made(model, "bfloat16").states_of(prompts)
    return {"before": before, "peak": _status("VmHWM")}


def in_a_child(kind: str, model: Path) -> int:
    """Return the bytes that a reference takes at its peak, measured in a new process."""
    told = subprocess.run(
        [sys.executable, __file__, "--measure", kind, "--model", str(model)],
        check=True,
        stdout=subprocess.PIPE,
        # Freed blocks go back to the system, so that what is resident is what is held.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
    )
    record: dict[str, int] = json.loads(told.stdout.splitlines()[-1])
    return record["peak"] - record["before"]


def main() -> None:
    """Print one line for each reference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--kinds", nargs="+", default=["whole", "streamed", "hoarding"])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        print(json.dumps(measure(chosen.measure, chosen.model)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        build(Path(scratch), chosen.hidden)
        peaks = {kind: in_a_child(kind, Path(scratch)) for kind in chosen.kinds}
    block = block_values(chosen.hidden)
    facts = {"block_in_float32": block * 4, "allowed": allowed(chosen.hidden), "peaks": peaks}
    if chosen.json:
        print(json.dumps(facts))
        return
    print(f"a block has {block:,} weights: {block * 4 / MB:.0f} MB in float32")
    print(f"one block in both precisions, and activations: {facts['allowed'] / MB:.0f} MB")
    for kind, peak in peaks.items():
        print(f"{kind}: {peak / MB:.0f} MB at its peak, {peak / block / 4:.1f} blocks in float32")


if __name__ == "__main__":
    ending.run(main)

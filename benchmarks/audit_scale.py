"""Does the memory of an audit stay the same however many files there are?

Makes folders of tiny SpecForge files, audits each in a process of its own, and prints files per
second and the highest resident memory of reading them all:

    python benchmarks/audit_scale.py 1000 10000 100000
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ending
import numpy as np

TOKENS, WIDTH, BLOCKS = 12, 32, 12


def make(root: Path, count: int) -> None:
    """Write ``count`` files; states are random, so nothing repeats."""
    import torch

    drawn = torch.Generator().manual_seed(0)
    for index in range(count):
        folder = root / f"rows_{index // 2000 * 2000}-{index // 2000 * 2000 + 2000}"
        folder.mkdir(exist_ok=True)
        torch.save(
            {
                "input_ids": torch.randint(0, 500, (TOKENS,), generator=drawn),
                "loss_mask": torch.tensor([0] * 6 + [1] * 6),
                "hidden_state": torch.randn(1, TOKENS, WIDTH, generator=drawn).bfloat16(),
                "aux_hidden_state": torch.randn(1, TOKENS, 3 * WIDTH, generator=drawn).bfloat16(),
            },
            folder / f"data_{index}.ckpt",
        )


def audit(root: Path, work: Path) -> None:
    """Audit every file, and print what it took. No reference: the verifier has no weights."""
    import torch  # noqa: F401
    from rich.console import Console
    from safetensors.numpy import save_file

    from truetap.harness import verifier as verifiers
    from truetap.pipeline.foreign import audit as auditing
    from truetap.pipeline.foreign.masks import MaskJudge
    from truetap.pipeline.foreign.producers import open_producer
    from truetap.pipeline.foreign.state import AuditState

    model = work / "model"
    model.mkdir(exist_ok=True)
    config = {"num_hidden_layers": BLOCKS, "hidden_size": WIDTH, "vocab_size": 512}
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    save_file({"weight": np.zeros(1, np.float32)}, model / "model.safetensors")
    producer = open_producer("specforge", root, verifiers.describe(model))
    state = AuditState(work / "audit.state", {"path": str(root)}, resume=False)
    masks = MaskJudge(model)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    count = auditing.read_all(producer, state, masks, Console(quiet=True))
    took = time.monotonic() - started
    drawn = state.draw(0, 16, 1024)
    list(state.repeated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mib = (work / "audit.state").stat().st_size / 2**20
    print(
        f"{count:>7,} files: {count / took:6,.0f} files/s, memory {peak / 1024:5.0f} MiB, of that "
        f"{(peak - before) / 1024:4.1f} for the audit; state {mib:.1f} MiB; {len(drawn)} drawn"
    )


def main() -> None:
    """Measure each count in a new process, so that its peak is its own."""
    if sys.argv[1] == "--one":
        audit(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    for count in map(int, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as scratch:
            root, work = Path(scratch) / "data", Path(scratch) / "work"
            root.mkdir()
            work.mkdir()
            make(root, count)
            subprocess.run([sys.executable, __file__, "--one", root, work], check=True)


if __name__ == "__main__":
    ending.run(main)

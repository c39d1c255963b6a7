"""What wrong captures cost a draft head: a run's conversations again, with a fault's states.

    python benchmarks/mutant_captures.py RUN.toml --fault first-boundary-only --into DIR
    python benchmarks/mutant_captures.py RUN.toml --fault off-by-one --seen EARLY.toml --into DIR

Takes the verified shards of a run, makes one of the suite's faults in them and writes shards and a
configuration to train with, DIR/run.toml. Every line says that the gate would have denied it, so
training needs ``--allow-uncertified``. A fault that needs other boundaries than the run has takes
them from ``--seen``, a run of the same conversations that captured those.

Then `truetap train DIR/run.toml --allow-uncertified REASON`, and
`truetap evaluate RUN.toml --head FAULT=DIR/head` serves both heads on the same questions.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import ending
import numpy as np
import same_conversations
import torch

from truetap.harness import shard
from truetap.harness.adapters.faults.fault import Corruptor
from truetap.harness.adapters.mutants import FAULTS
from truetap.harness.errors import CheckFailed, UsageError
from truetap.harness.final_norm import final_norm
from truetap.harness.model import Capture, CaptureBatch, EngineSpec
from truetap.pipeline import config, verifiers
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.store import Store


class Source:
    """A run whose shards are read."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text()
        self.config = config.load(path)
        self.folder = RunFolder(self.config.output.resolve())
        self.store = Store(self.folder.shards)
        self.entries = self.store.entries()
        model = verifiers.directory_of(self.config, print)
        self.spec: EngineSpec = verifiers.spec_of(self.config, model)

    def captures(self, name: str) -> dict[str, Capture]:
        """Return a shard's captures by conversation, every digest compared."""
        entry = self.entries[name]
        tensors = self.store.verified(entry)
        bounds = pairwise(tensors["offsets"].tolist())
        return {
            key: Capture(
                key,
                tuple(tensors["token_ids"][start:end].tolist()),
                tuple(entry["boundaries"]),
                tensors["states"][start:end].float().numpy(),
                entry["dtype"],
            )
            for key, (start, end) in zip(entry["ids"], bounds, strict=True)
        }


def joined(one: Capture, other: Capture) -> Capture:
    """Return the states of two captures of one text, by ascending boundary."""
    if one.token_ids != other.token_ids:
        raise CheckFailed(f"{one.key} has other tokens in the run that was --seen")
    by_boundary = {
        k: held.states[:, slot] for held in (one, other) for slot, k in enumerate(held.boundaries)
    }
    order = tuple(sorted(by_boundary))
    states = np.stack([by_boundary[k] for k in order], axis=1)
    return Capture(one.key, one.token_ids, order, states, one.dtype)


def faulty(
    name: str, fault: str, run: Source, seen: Source | None, context: Corruptor, target: Store
) -> dict[str, Any]:
    """Write one shard with the fault in it; return its manifest line."""
    entry = run.entries[name]
    captures = run.captures(name)
    if seen is not None:
        early = seen.captures(name)
        captures = {key: joined(one, early[key]) for key, one in captures.items()}
    changed = FAULTS[fault].corrupt(context, CaptureBatch(tuple(captures.values()), "")).captures
    masks = run.store.verified(entry)["loss_mask"].numpy().tobytes()
    ends = np.cumsum([0, *(len(one.token_ids) for one in changed)]).tolist()
    dtype = getattr(torch, entry["dtype"])
    digests = shard.write_partial(
        target.path(name),
        [torch.from_numpy(np.ascontiguousarray(one.states)).to(dtype) for one in changed],
        [one.token_ids for one in changed],
        [masks[start:end] for start, end in pairwise(ends)],
    )
    return _line(entry, fault, digests)


def _line(entry: Mapping[str, Any], fault: str, digests: Mapping[str, str]) -> dict[str, Any]:
    kept = {k: v for k, v in entry.items() if k not in ("certificate", "audit", "sha256")}
    said = {"reason": f"the mutant {fault}, made on purpose", "denied": ["adapter"]}
    return {**kept, "digests": dict(digests), "uncertified": said}


def make(run: Source, seen: Source | None, fault: str, target: RunFolder, threads: int) -> None:
    """Write all shards, and what training needs beside them."""
    missing = FAULTS[fault].early and seen is None
    if missing:
        raise UsageError(f"{fault} needs boundaries that the run lacks", remedy="give --seen")
    target.shards.mkdir(parents=True)
    (target.root / "run.toml").write_text(
        re.sub(r"(?m)^output\s*=.*$", f'output = "{target.root}"', run.text, count=1)
    )
    same_conversations.begin(target, run.folder, ("verifier", "data", "capture"))
    norm = final_norm(Path(run.spec.model))
    context = Corruptor(run.spec, norm, norm)
    store = Store(target.shards)
    with ThreadPoolExecutor(threads) as pool:
        making = partial(
            faulty, fault=fault, run=run, seen=seen, context=context, target=store
        )  # fmt: skip
        for entry in pool.map(making, run.entries):
            store.record(entry)


def main() -> None:
    """Read the command line and do it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="configuration of an extracted run")
    parser.add_argument("--fault", required=True, choices=sorted(FAULTS))
    parser.add_argument("--seen", type=Path, help="configuration of a run with more boundaries")
    parser.add_argument("--into", type=Path, required=True, help="folder that is made")
    parser.add_argument("--threads", type=int, default=8)
    given = parser.parse_args()
    seen = Source(given.seen) if given.seen else None
    target = RunFolder(given.into.resolve())
    make(Source(given.run), seen, given.fault, target, given.threads)
    print(f"{target.root / 'run.toml'}: {len(Store(target.shards).entries())} shards")


if __name__ == "__main__":
    ending.run(main)

"""The conversations of a run as the Arrow dataset that speculators' own trainer reads.

Rows hold tokens and loss masks only; the states stay in the run's shards, from where
``truetap.pipeline.speculators_backend`` gives them, verified.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from truetap.harness import verifier
from truetap.harness.errors import CouldNotRun
from truetap.harness.model import EngineSpec
from truetap.harness.progress import bar
from truetap.pipeline import (
    audit_log,
    batches,
    draft_head,
    policy,
    prepare,
    provenance,
    run_folder,
)
from truetap.pipeline.config import RunConfig
from truetap.pipeline.prepare import Conversation
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.store import Store

if TYPE_CHECKING:
    from rich.console import Console

POINTER = "truetap.json"
"""Beside the rows: where the shards are, from this folder."""


def export(config: RunConfig, folder: RunFolder, spec: EngineSpec, console: Console) -> Path:
    """Write ``dataset/`` anew, the training conversations first, and say how to train on it.

    Shards whose chain is broken are refused here already, and conversations whose states must not
    be trained on are left out, as ``truetap train`` does. The draft vocabulary is written beside
    the rows under the names that the trainer looks for.
    """
    store = Store(folder.shards)
    provenance.examine(
        store,
        policy.demands_of(config.gate),
        boundaries=spec.boundaries,
        verifier=verifier.digests(Path(spec.model)),
    )
    audit_log.require_kept(store)
    conversations = prepare.load(folder)
    with bar(console, "shards verified", len(store.entries())) as progress:
        samples = store.samples([c.id for c in conversations], verified=progress.advance)
    batches.require_own_tokens(dict(zip(conversations, samples, strict=True)))
    bad = batches.unusable(samples)
    for name, why in bad.items():
        console.print(f"left out: {name}: {why}", style="yellow", highlight=False, markup=False)
    kept = [c for c in conversations if c.id not in bad]
    training = [c for c in kept if c.split == "train"]
    rows = training + [c for c in kept if c.split != "train"]
    scratch = folder.dataset.with_name(folder.dataset.name + ".partial")
    shutil.rmtree(scratch, ignore_errors=True)
    write_rows(rows, scratch)
    size = config.train.draft_vocabulary
    whole = verifier.describe(Path(spec.model)).vocab_size
    _write_vocabulary(draft_head.vocabulary_of(training, size, whole), whole, scratch)
    run_folder.write_json(
        scratch / POINTER, {"shards": os.path.relpath(folder.shards, folder.dataset)}
    )
    shutil.rmtree(folder.dataset, ignore_errors=True)
    scratch.rename(folder.dataset)
    console.print(
        f"{folder.dataset}: {len(training)} rows for training, {len(rows) - len(training)} for "
        "validation. Train on it with:",
        highlight=False,
    )
    command = _command(config, folder, spec, share(len(training), len(rows)))
    console.print(command, highlight=False, markup=False)
    return folder.dataset


def share(training: int, rows: int) -> float:
    """Return the ratio from which the trainer's rounding down makes exactly ``training`` rows.

    It must leave something for validation, so without validation rows the last one is taken.
    """
    return (min(training, rows - 1) + 0.5) / rows


def _command(config: RunConfig, folder: RunFolder, spec: EngineSpec, share: float) -> str:
    layers = " ".join(map(str, spec.boundaries[:-1]))
    size = config.train.draft_vocabulary
    demanded = f" \\\n    --truetap-policy {config.gate.policy}" if config.gate.policy else ""
    return (
        "  python -m truetap.pipeline.speculators_train --hidden-states-backend truetap \\\n"
        f"    --data-path {folder.dataset} --train-data-ratio {share:.9f} \\\n"
        f"    --verifier-name-or-path {spec.model} \\\n"
        f"    --target-layer-ids {layers} --draft-vocab-size {size} --save-path DIR{demanded}"
    )


def write_rows(rows: Sequence[Conversation], folder: Path) -> None:
    """Write tokens and loss masks as speculators' ``prepare-data`` leaves them."""
    try:
        import datasets
    except ImportError as error:
        raise CouldNotRun(
            f"the dataset cannot be written: {error}", remedy="pip install 'truetap[train]'"
        ) from error
    integers = datasets.Sequence(datasets.Value("int64"))
    features = {"input_ids": integers, "loss_mask": integers, "seq_len": datasets.Value("int64")}
    made = datasets.Dataset.from_dict(
        {
            "input_ids": [list(row.token_ids) for row in rows],
            "loss_mask": [list(row.loss_mask) for row in rows],
            "seq_len": [len(row.token_ids) for row in rows],
        },
        features=datasets.Features(features),
    )
    made.set_format("torch")
    datasets.disable_progress_bars()
    made.save_to_disk(folder)


def _write_vocabulary(kept: Sequence[int], whole: int, folder: Path) -> None:
    """Write the maps as speculators spells them: draft id i is verifier id ``i + d2t[i]``."""
    ids = np.array(kept, dtype=np.int64)
    known = np.zeros(whole, dtype=np.bool_)
    known[ids] = True
    np.save(folder / f"d2t-{len(ids)}.npy", ids - np.arange(len(ids)))
    np.save(folder / f"t2d-{len(ids)}.npy", known)

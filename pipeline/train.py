"""Trains an EAGLE-3 draft head on verified shards.

Model, loss and checkpoint format are those of the speculators library; the loop is ours, on
accelerate. What the loop adds is refusal: a shard that does not verify, a loss mask with nothing in
it or a loss that is not finite ends the run with a non-zero exit, never with a checkpoint.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from truetap.harness.errors import CheckFailed, CouldNotRun, IntegrityError, UsageError
from truetap.harness.model import EngineSpec
from truetap.harness.progress import bar
from truetap.pipeline import prepare, run_folder
from truetap.pipeline.config import RunConfig
from truetap.pipeline.prepare import Conversation
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.store import Sample, Store

if TYPE_CHECKING:
    import torch
    from rich.console import Console

Batch = dict[str, "torch.Tensor"]
KEPT_CHECKPOINTS = 2


@dataclass(frozen=True)
class _Step:
    """One optimiser step: which samples, in which epoch."""

    number: int
    epoch: int
    samples: tuple[int, ...]


def train(config: RunConfig, folder: RunFolder, spec: EngineSpec, console: Console) -> None:
    """Train the run's draft head, continuing from its last checkpoint; export it."""
    settings = config.train
    store = Store(folder.shards)
    provenance = _provenance(store, spec)
    folder.claim("train", settings.model_dump(mode="json") | provenance)
    if (folder.head / "truetap.json").exists():
        console.print("the draft head is trained and exported", highlight=False)
        return
    conversations = prepare.load(folder)
    samples = dict(zip(conversations, store.samples([c.id for c in conversations]), strict=True))
    training = [samples[c] for c in conversations if c.split == "train"]
    validation = [samples[c] for c in conversations if c.split == "validation"]
    vocabulary = draft_vocabulary(
        [c for c in conversations if c.split == "train"],
        settings.draft_vocabulary,
        _vocabulary_size(spec),
    )
    model = build_head(config, spec, vocabulary)
    if not folder.untrained_head.exists():
        _export(model, folder.untrained_head, {**provenance, "steps": 0})
    _loop(config, folder, model, training, validation, console)
    _export(model, folder.head, {**provenance, "steps": len(_schedule(config, training))})


def draft_vocabulary(
    conversations: Sequence[Conversation], size: int, verifier_size: int
) -> list[int]:
    """Return the verifier ids of the draft's vocabulary, ascending.

    Most frequent under the loss mask first, then most frequent in the prompts, then lowest id: a
    corpus with fewer distinct tokens than ``size`` is filled up, so that the size is exact.
    """
    if size > verifier_size:
        raise UsageError(
            f"train.draft_vocabulary is {size}, the verifier has {verifier_size} tokens",
            remedy=f"set it to {verifier_size} or less",
        )
    answered, seen = [0] * verifier_size, [0] * verifier_size
    for conversation in conversations:
        for token, bit in zip(conversation.token_ids, conversation.loss_mask, strict=True):
            answered[token] += bit
            seen[token] += 1
    ranked = sorted(range(verifier_size), key=lambda t: (-answered[t], -seen[t], t))
    return sorted(ranked[:size])


def build_head(config: RunConfig, spec: EngineSpec, vocabulary: Sequence[int]) -> Any:
    """Return speculators' EAGLE-3 model for this verifier, with the seed's initial weights."""
    try:
        import torch
        from speculators.models.eagle3 import Eagle3DraftModel
        from transformers import AutoConfig, LlamaConfig
    except ImportError as error:
        raise CouldNotRun(
            f"training cannot run: {error}", remedy="pip install 'truetap[train]'"
        ) from error
    _quiet()
    verifier = AutoConfig.from_pretrained(spec.model)
    layer = verifier.to_dict() | {"num_hidden_layers": 1, "tie_word_embeddings": False}
    for name in ("architectures", "model_type", "dtype", "torch_dtype"):
        layer.pop(name, None)
    kept = torch.tensor(vocabulary)
    to_draft = torch.zeros(verifier.vocab_size, dtype=torch.bool)
    to_draft[kept] = True
    torch.manual_seed(config.seed)
    model = Eagle3DraftModel.from_training_args(
        LlamaConfig(**layer),
        t2d=to_draft,
        d2t=kept - torch.arange(len(kept)),
        num_layers=1,
        draft_vocab_size=len(kept),
        norm_before_residual=False,
        norm_before_fc=True,
        ttt_steps=config.train.test_time_steps,
        target_layer_ids=list(spec.boundaries[:-1]),
        verifier_name_or_path=spec.model,
        # Flex attention has no backward on CPU.
        draft_attn_impl="simple_flex_attention" if torch.cuda.is_available() else "eager",
    )
    return model.float()


def _quiet() -> None:
    """Keep other libraries' progress bars and notices out of ours."""
    from loguru import logger
    from transformers.utils import logging

    logger.disable("speculators")
    logging.disable_progress_bar()


def aligned(sample: Sample) -> Batch:
    """Return one sample in speculators' alignment: (ids[1:], features[:-1], last[1:], mask[1:]).

    At step t the draft sees token x(t+1) with the features of t, and learns what the verifier says
    after x(t+1). Shifting before packing keeps the shift inside each conversation.
    """
    import torch
    from speculators.models.eagle3.data import shift_batch

    states = sample.states.float()
    tokens = len(sample.token_ids)
    shifted: Batch = shift_batch(
        {
            "input_ids": sample.token_ids,
            "hidden_states": states[:, :-1].flatten(1),
            "verifier_last_hidden_states": states[:, -1],
            "loss_mask": sample.loss_mask,
            "lengths": torch.tensor([tokens]),
            "position_ids": torch.arange(tokens),
        }
    )
    return shifted


def pack(samples: Sequence[Sample]) -> Batch:
    """Concatenate samples into one row, each with its own document id."""
    import torch

    parts = [aligned(sample) for sample in samples]
    names = (
        "input_ids", "hidden_states", "verifier_last_hidden_states", "loss_mask", "position_ids",
    )  # fmt: skip
    packed = {name: torch.cat([part[name] for part in parts])[None] for name in names}
    packed["loss_mask"] = packed["loss_mask"].bool()
    packed["document_ids"] = torch.cat(
        [torch.full((len(part["input_ids"]),), number) for number, part in enumerate(parts)]
    )[None]
    if not bool(packed["loss_mask"].any()):
        raise CheckFailed(
            f"no token of the conversations {[s.id for s in samples]} is under the loss mask",
            remedy="run truetap prepare again and look at the chat template",
        )
    return packed


def _loop(
    config: RunConfig,
    folder: RunFolder,
    model: Any,
    training: Sequence[Sample],
    validation: Sequence[Sample],
    console: Console,
) -> None:
    import torch
    from accelerate import Accelerator
    from speculators.losses import resolve_loss_config

    settings = config.train
    schedule = _schedule(config, training)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), mixed_precision=settings.mixed_precision
    )
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=settings.learning_rate,
        weight_decay=0.0,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, len(schedule))
    )
    prepared, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    implementation = "fused" if accelerator.device.type == "cuda" else "eager"
    loss = {
        "ttt_steps": settings.test_time_steps,
        "loss_config": resolve_loss_config("kl_div", implementation),
    }
    done = _resume(accelerator, folder)
    metrics = folder.train / "metrics.jsonl"
    _forget_after(metrics, done)
    started, tokens = time.monotonic(), 0
    with bar(console, "training steps", len(schedule), done=done) as progress:
        for step in schedule[done:]:
            batch = _on(pack([training[i] for i in step.samples]), accelerator.device)
            prepared.train()
            _, value, measured = prepared(**batch, **loss)
            _require_finite("loss", value.item(), step)
            optimizer.zero_grad()
            accelerator.backward(value)
            norm = accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            _require_finite("gradient's norm", norm.item(), step)
            optimizer.step()
            scheduler.step()
            tokens += batch["input_ids"].numel()
            rate = tokens / (time.monotonic() - started)
            row = _row("step", step, measured, settings.test_time_steps)
            row |= {"learning_rate": scheduler.get_last_lr()[0], "tokens_per_s": round(rate, 1)}
            run_folder.append_line(metrics, row)
            progress.advance(
                note=f"loss {row['loss']:.2f}, right {row['accuracy'][0]:.0%}, {rate:,.0f} tokens/s"
            )
            last = step.number == len(schedule)
            if last or step.number % settings.checkpoint_every == 0:
                if validation:
                    prepared.eval()
                    with torch.no_grad():
                        packed = _on(pack(validation), accelerator.device)
                        _, value, measured = prepared(**packed, **loss)
                    row = _row("validation", step, measured, settings.test_time_steps)
                    run_folder.append_line(metrics, row)
                _checkpoint(accelerator, folder, step)


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the share of the peak learning rate: linear warm-up over 5 %, cosine to 10 %."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    along = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(along, 1.0)))


def _schedule(config: RunConfig, training: Sequence[Sample]) -> list[_Step]:
    """Return all steps of a run, the same for the same seed: resuming is cutting the list."""
    import torch

    if not training:
        raise UsageError("there are no training conversations", remedy="raise data.train")
    steps: list[_Step] = []
    for epoch in range(config.train.epochs):
        generator = torch.Generator().manual_seed(config.seed + epoch)
        order = torch.randperm(len(training), generator=generator).tolist()
        for samples in _filled(order, training, config.train.tokens_per_step):
            steps.append(_Step(len(steps) + 1, epoch, samples))
    return steps


def _filled(
    order: Sequence[int], samples: Sequence[Sample], tokens: int
) -> Iterator[tuple[int, ...]]:
    """Yield groups of samples of about ``tokens`` tokens."""
    group: list[int] = []
    size = 0
    for index in order:
        length = len(samples[index].token_ids)
        if group and size + length > tokens:
            yield tuple(group)
            group, size = [], 0
        group.append(index)
        size += length
    yield tuple(group)


def _row(kind: str, step: _Step, measured: Mapping[str, Any], steps: int) -> dict[str, Any]:
    accuracy = [
        float(measured[f"full_acc_{k}_sum"]) / max(float(measured[f"full_acc_{k}_total"]), 1.0)
        for k in range(steps)
    ]
    return {
        "kind": kind,
        "step": step.number,
        "epoch": step.epoch,
        "loss": float(measured["loss_sum"]),
        "accuracy": [round(share, 4) for share in accuracy],
    }


def _require_finite(name: str, value: float, step: _Step) -> None:
    if not math.isfinite(value):
        raise CheckFailed(
            f"the {name} is {value} at step {step.number}; nothing was saved after the last "
            "checkpoint",
            remedy="lower train.learning_rate; truetap run continues from the last checkpoint",
        )


def _checkpoint(accelerator: Any, folder: RunFolder, step: _Step) -> None:
    """Save everything needed to continue; the newest ones are kept, whole or not at all."""
    target = folder.train / f"checkpoint-{step.number:06d}"
    scratch = target.with_name(target.name + ".partial")
    shutil.rmtree(scratch, ignore_errors=True)
    with _writing(target):
        accelerator.save_state(str(scratch))
        run_folder.write_json(scratch / "step.json", {"step": step.number})
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)
    for old in _checkpoints(folder)[:-KEPT_CHECKPOINTS]:
        shutil.rmtree(old)


def _checkpoints(folder: RunFolder) -> list[Path]:
    found = folder.train.glob("checkpoint-*")
    return sorted(path for path in found if path.suffix != ".partial")


def _resume(accelerator: Any, folder: RunFolder) -> int:
    """Load the newest checkpoint; return how many steps it has behind it."""
    checkpoints = _checkpoints(folder)
    if not checkpoints:
        return 0
    newest = checkpoints[-1]
    try:
        done = int(run_folder.read_json(newest / "step.json")["step"])
        accelerator.load_state(str(newest))
    except Exception as error:  # torch, pickle and safetensors each have their own
        raise IntegrityError(
            f"checkpoint {newest} cannot be read: {error}",
            remedy="delete it; training continues from the one before",
        ) from error
    return done


def _forget_after(metrics: Path, step: int) -> None:
    """Drop metrics of steps that will be done again."""
    rows = [row for row in run_folder.read_lines(metrics) if row["step"] <= step]
    if metrics.exists():
        scratch = metrics.with_name(metrics.name + ".partial")
        scratch.write_text("".join(json.dumps(row) + "\n" for row in rows))
        scratch.rename(metrics)


def _provenance(store: Store, spec: EngineSpec) -> dict[str, Any]:
    """Return what the head is made from; refuse shards that no certificate stands behind."""
    entries = list(store.entries().values())
    if not entries:
        raise UsageError(f"there are no shards in {store.folder}", remedy="run truetap extract")
    for entry in entries:
        if not entry.get("certificate"):
            raise CheckFailed(
                f"{entry['shard']} was made without a certificate",
                remedy="run truetap conform, certify and extract again",
            )
        if entry["boundaries"] != list(spec.boundaries) or entry["last_boundary_normed"]:
            raise CheckFailed(
                f"{entry['shard']} holds boundaries {entry['boundaries']} (last one "
                f"{'after' if entry['last_boundary_normed'] else 'before'} the norm); this run "
                f"needs {list(spec.boundaries)} before the norm"
            )
    return {
        "verifier": entries[0]["verifier"],
        "boundaries": list(spec.boundaries),
        "certificates": sorted({entry["certificate"] for entry in entries}),
        "shards": {entry["shard"]: entry["digests"]["states"] for entry in entries},
    }


def _export(model: Any, target: Path, card: Mapping[str, Any]) -> None:
    """Write the head as an engine loads it, with what it was made from beside it."""
    scratch = target.with_name(target.name + ".partial")
    shutil.rmtree(scratch, ignore_errors=True)
    with _writing(target):
        model.save_pretrained(scratch)
        run_folder.write_json(scratch / "truetap.json", dict(card))
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Turn what torch and safetensors raise on a full disk, which is no OSError, into ours."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CouldNotRun(
            f"{target} cannot be written: {error}",
            remedy="free disk space and run again; training continues from the last checkpoint",
        ) from error


def _vocabulary_size(spec: EngineSpec) -> int:
    from truetap.harness import verifier

    return verifier.describe(Path(spec.model)).vocab_size


def _on(batch: Batch, device: Any) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}

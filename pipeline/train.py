"""Trains an EAGLE-3 draft head on verified shards.

Model, loss and checkpoint format are those of the speculators library; the loop is ours, on
accelerate. What the loop adds is refusal: a shard that does not verify, a loss mask with nothing in
it or a loss that is not finite ends the run with a non-zero exit, never with a checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truetap.harness import verifier
from truetap.harness.errors import CheckFailed, IntegrityError, UsageError
from truetap.harness.model import EngineSpec
from truetap.harness.progress import bar
from truetap.pipeline import (
    audit_log,
    draft_head,
    model_card,
    policy,
    prepare,
    provenance,
    run_folder,
    uncertified,
)
from truetap.pipeline.batches import (
    Batch,
    Step,
    filled,
    pack,
    require_own_tokens,
    schedule,
    unusable,
)
from truetap.pipeline.config import RunConfig
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.store import Sample, Store

if TYPE_CHECKING:
    from rich.console import Console

KEPT_CHECKPOINTS = 2


def train(
    config: RunConfig,
    folder: RunFolder,
    spec: EngineSpec,
    console: Console,
    *,
    allow_uncertified: str | None = None,
) -> None:
    """Train the run's draft head, continuing from its last checkpoint; export it.

    Shards that were captured without a certificate are refused unless ``allow_uncertified`` says
    why they may be used; then every checkpoint and the head say so too.
    """
    _require_alone()
    settings = config.train
    store = Store(folder.shards)
    shards = provenance.examine(
        store,
        policy.demands_of(config.gate),
        boundaries=spec.boundaries,
        verifier=verifier.digests(Path(spec.model)),
    )
    shards.require_certified(unless=allow_uncertified)
    audit_log.require_kept(store)
    made_from = shards.as_dict()
    folder.claim("train", settings.model_dump(mode="json") | made_from)
    if (folder.head / "truetap.json").exists():
        console.print("the draft head is trained and exported", highlight=False)
        uncertified.warn(run_folder.read_json(folder.head / "truetap.json"), console)
        return
    made_from = _with_reasons(folder, made_from, allow_uncertified, console)
    conversations = prepare.load(folder)
    samples = dict(zip(conversations, store.samples([c.id for c in conversations]), strict=True))
    require_own_tokens(samples)
    bad = _left_out(folder, samples.values(), console)
    usable = {c: s for c, s in samples.items() if s.id not in bad}
    training = [s for c, s in usable.items() if c.split == "train"]
    validation = [s for c, s in usable.items() if c.split == "validation"]
    vocabulary = draft_head.vocabulary_of(
        [c for c in conversations if c.split == "train"],
        settings.draft_vocabulary,
        verifier.describe(Path(spec.model)).vocab_size,
    )
    model = draft_head.build(config, spec, vocabulary)

    def export(target: Path, steps: int) -> None:
        card = {**made_from, "steps": steps}
        counts = {"training": len(training), "validation": len(validation)}
        draft_head.save(model, target, card, readme=model_card.render(card, config, **counts))

    if not folder.untrained_head.exists():
        export(folder.untrained_head, 0)
    standing: dict[str, Any] = {
        k: made_from[k] for k in ("certificates", "uncertified") if k in made_from
    }
    _loop(config, folder, model, training, validation, console, standing)
    export(folder.head, len(schedule(config, training)))


def _with_reasons(
    folder: RunFolder, made_from: dict[str, Any], reason: str | None, console: Console
) -> dict[str, Any]:
    """Return what the head records, with why it was trained on uncertified shards; tell that."""
    if "uncertified" not in made_from:
        if reason is not None:
            text = "every shard has a certificate: --allow-uncertified was not needed"
            console.print(text, style="yellow", highlight=False)
        return made_from
    path = folder.train / "uncertified.jsonl"
    given = [row["reason"] for row in run_folder.read_lines(path)]
    if reason not in given:
        run_folder.append_line(path, {"reason": reason})
        given.append(reason)
    recorded = {**made_from, "uncertified": {**made_from["uncertified"], "trained_because": given}}
    uncertified.warn(recorded, console)
    return recorded


def _require_alone() -> None:
    """Refuse a launcher's several processes: each would run all steps and write the same files."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1":
        raise UsageError(
            f"training runs in one process, and this is one of {processes} (WORLD_SIZE)",
            remedy="start truetap train without torchrun or accelerate launch",
        )


def _left_out(folder: RunFolder, samples: Collection[Sample], console: Console) -> dict[str, str]:
    """Return the samples that are not trained on and why; list them for the user and the record."""
    bad = unusable(samples)
    run_folder.write_json(folder.train / "left-out.json", bad)
    if bad:
        console.print(
            f"left out for their states: {len(bad)} of {len(samples)} conversations",
            style="yellow",
            highlight=False,
        )
    for name, why in bad.items():
        console.print(f"  {name}: {why}", highlight=False, markup=False)
    return bad


def _loop(
    config: RunConfig,
    folder: RunFolder,
    model: Any,
    training: Sequence[Sample],
    validation: Sequence[Sample],
    console: Console,
    standing: Mapping[str, Any],
) -> None:
    import torch
    from accelerate import Accelerator
    from speculators.losses import resolve_loss_config

    settings = config.train
    steps = schedule(config, training)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), mixed_precision=settings.mixed_precision
    )
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=settings.learning_rate,
        weight_decay=0.0,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, len(steps))
    )
    prepared, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    implementation = "fused" if accelerator.device.type == "cuda" else "eager"
    loss = {
        "ttt_steps": settings.test_time_steps,
        "loss_config": resolve_loss_config("kl_div", implementation),
    }
    groups = list(filled(range(len(validation)), validation, settings.tokens_per_step))
    done = _resume(accelerator, folder)
    metrics = folder.train / "metrics.jsonl"
    _forget_after(metrics, done)
    started, tokens = time.monotonic(), 0
    with bar(console, "training steps", len(steps), done=done) as progress:
        for step in steps[done:]:
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
            last = step.number == len(steps)
            if last or step.number % settings.checkpoint_every == 0:
                if validation:
                    prepared.eval()
                    measured = Counter()
                    for group in groups:
                        packed = _on(pack([validation[i] for i in group]), accelerator.device)
                        with torch.no_grad():
                            _, _, part = prepared(**packed, **loss)
                        measured.update({name: float(value) for name, value in part.items()})
                    row = _row("validation", step, measured, settings.test_time_steps)
                    run_folder.append_line(metrics, row)
                _checkpoint(accelerator, folder, step, standing)


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the share of the peak learning rate: linear warm-up over 5 %, cosine to 10 %."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    along = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(along, 1.0)))


def _row(kind: str, step: Step, measured: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return one line of metrics; ``measured`` holds sums and totals, of one pack or several."""
    accuracy = [
        float(measured[f"full_acc_{k}_sum"]) / max(float(measured[f"full_acc_{k}_total"]), 1.0)
        for k in range(steps)
    ]
    return {
        "kind": kind,
        "step": step.number,
        "epoch": step.epoch,
        "loss": float(measured["loss_sum"] / measured["loss_total"]),
        "accuracy": [round(share, 4) for share in accuracy],
    }


def _require_finite(name: str, value: float, step: Step) -> None:
    if not math.isfinite(value):
        raise CheckFailed(
            f"the {name} is {value} at step {step.number}; nothing was saved after the last "
            "checkpoint",
            remedy="lower train.learning_rate; truetap run continues from the last checkpoint",
        )


def _checkpoint(
    accelerator: Any, folder: RunFolder, step: Step, standing: Mapping[str, Any]
) -> None:
    """Save everything needed to continue; the newest ones are kept, whole or not at all."""
    target = folder.train / f"checkpoint-{step.number:06d}"
    scratch = target.with_name(target.name + ".partial")
    shutil.rmtree(scratch, ignore_errors=True)
    with draft_head.writing(target):
        accelerator.save_state(str(scratch))
        run_folder.write_json(scratch / "step.json", {"step": step.number, **standing})
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


def _on(batch: Batch, device: Any) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}

"""Trains an EAGLE-3 draft head on verified shards.

Model, loss and checkpoint format are those of the speculators library; the loop is ours, on
accelerate. What the loop adds is refusal: a shard that does not verify, a loss mask with nothing in
it or a loss that is not finite ends the run with a non-zero exit, never with a checkpoint.

Several processes do the same steps on packs of their own and add up their gradients; only the main
one writes (``truetap.pipeline.ranks``).
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truetap.harness import verifier
from truetap.harness.errors import CheckFailed, IntegrityError
from truetap.harness.model import EngineSpec
from truetap.harness.progress import bar
from truetap.pipeline import (
    draft_head,
    model_card,
    prepare,
    run_folder,
    train_claim,
    uncertified,
)
from truetap.pipeline.batches import (
    Batch,
    Step,
    ahead,
    common_length,
    filled,
    pack,
    require_own_tokens,
    schedule,
    shares,
    unusable,
)
from truetap.pipeline.config import RunConfig
from truetap.pipeline.ranks import ALONE, Ranks, require_alone
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.store import Sample, Store

if TYPE_CHECKING:
    from rich.console import Console

KEPT_CHECKPOINTS = 2


@dataclass(frozen=True)
class _Data:
    """What a head is built and trained from."""

    vocabulary: Sequence[int]
    training: Sequence[Sample]
    validation: Sequence[Sample]


def train(
    config: RunConfig,
    folder: RunFolder,
    spec: EngineSpec,
    console: Console,
    *,
    allow_uncertified: str | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Train the run's draft head, continuing from its last checkpoint; export it.

    Shards that were captured without a certificate are refused unless ``allow_uncertified`` says
    why they may be used; then every checkpoint and the head say so too. With ``ranks`` this is one
    of several processes, which call it with the same arguments.
    """
    if ranks.count == 1:
        require_alone("train")
    claimed = ranks.main_does(
        lambda: train_claim.claimed(config, folder, spec, allow_uncertified, ranks.count)
    )
    if (folder.head / "truetap.json").exists():
        console.print("the draft head is trained and exported", highlight=False)
        uncertified.warn(run_folder.read_json(folder.head / "truetap.json"), console)
        return
    reasoned = ranks.main_does(
        lambda: train_claim.with_reasons(folder, claimed or {}, allow_uncertified, console)
    )
    made_from = reasoned or {}  # only the main process needs it: it alone writes
    data = ranks.all_do(lambda: _data(config, folder, spec, console, ranks))
    model = ranks.all_do(lambda: draft_head.build(config, spec, data.vocabulary))

    def export(target: Path, steps: int) -> None:
        card = {**made_from, "steps": steps}
        counts = {"training": len(data.training), "validation": len(data.validation)}
        draft_head.save(model, target, card, readme=model_card.render(card, config, **counts))

    kept = folder.untrained_head.exists()  # all look, only what the main process sees counts
    ranks.main_does(lambda: None if kept else export(folder.untrained_head, 0))
    standing: dict[str, Any] = {
        k: made_from[k] for k in ("certificates", "uncertified") if k in made_from
    }
    _loop(config, folder, model, data, console, standing, ranks)
    steps = schedule(config, data.training, ranks.count)
    ranks.main_does(lambda: export(folder.head, len(steps)))


def _data(
    config: RunConfig, folder: RunFolder, spec: EngineSpec, console: Console, ranks: Ranks
) -> _Data:
    """Read the conversations and their captures, all verified, in each process for itself."""
    conversations = prepare.load(folder)
    store = Store(folder.shards)
    with bar(console, "shards verified", len(store.entries())) as progress:
        found = store.samples([c.id for c in conversations], verified=progress.advance)
    samples = dict(zip(conversations, found, strict=True))
    require_own_tokens(samples)
    bad = unusable(samples.values())
    if ranks.main:
        _tell_left_out(folder, bad, len(samples), console)
    usable = {c: s for c, s in samples.items() if s.id not in bad}
    return _Data(
        draft_head.vocabulary_of(
            [c for c in conversations if c.split == "train"],
            config.train.draft_vocabulary,
            verifier.describe(Path(spec.model)).vocab_size,
        ),
        [s for c, s in usable.items() if c.split == "train"],
        [s for c, s in usable.items() if c.split == "validation"],
    )


def _tell_left_out(folder: RunFolder, bad: Mapping[str, str], count: int, console: Console) -> None:
    """List the samples that are not trained on and why, for the user and the record."""
    run_folder.write_json(folder.train / "left-out.json", bad)
    if bad:
        console.print(
            f"left out for their states: {len(bad)} of {count} conversations",
            style="yellow",
            highlight=False,
        )
    for name, why in bad.items():
        console.print(f"  {name}: {why}", highlight=False, markup=False)


def _loop(
    config: RunConfig,
    folder: RunFolder,
    model: Any,
    data: _Data,
    console: Console,
    standing: Mapping[str, Any],
    ranks: Ranks,
) -> None:
    import torch
    from accelerate import Accelerator

    settings = config.train
    training = data.training
    with ranks.alike():
        steps = schedule(config, training, ranks.count)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=settings.mixed_precision,
        step_scheduler_with_optimizer=False,  # it would make a step for each process
    )
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=settings.learning_rate,
        weight_decay=0.0,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, len(steps))
    )
    # In this mode no DistributedDataParallel is put around it: see Ranks.add_gradients.
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    learner = _Learner(accelerator, prepared, settings.test_time_steps, ranks)
    groups = list(filled(range(len(data.validation)), data.validation, settings.tokens_per_step))
    done = ranks.all_do(lambda: _resume(accelerator, folder))
    metrics = folder.train / "metrics.jsonl"
    ranks.main_does(lambda: _forget_after(metrics, done))
    ranks.require_same(prepared.parameters())
    started, tokens = time.monotonic(), 0
    on_gpu = accelerator.device.type == "cuda"
    # One length for training and validation: each further one is compiled for.
    lengths = (
        common_length((p for s in steps for p in s.packs), training),
        common_length(groups, data.validation),
    )
    length = max(lengths) if on_gpu else 0
    if on_gpu and done < len(steps):
        console.print("the first step compiles the model: a minute or two", highlight=False)
    packs = ahead(steps[done:], training, ranks.rank, length=length, pinned=on_gpu)
    with bar(console, "training steps", len(steps), done=done) as progress:
        for step, packed in packs:
            optimizer.zero_grad()
            measured = learner.learn(step, training, packed)
            norm = accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            with ranks.alike():
                _require_finite("gradient's norm", norm.item(), step)
            optimizer.step()
            scheduler.step()
            tokens += sum(len(training[i].token_ids) - 1 for i in step.samples)
            rate = tokens / (time.monotonic() - started)
            row = _row("step", step, measured, settings.test_time_steps)
            row |= {"learning_rate": scheduler.get_last_lr()[0], "tokens_per_s": round(rate, 1)}
            kept = step.number == len(steps) or step.number % settings.checkpoint_every == 0
            if ranks.main:  # steps after the last checkpoint are made again, whatever is on record
                run_folder.append_line(metrics, row, durable=kept)
            if step.number == done + 1:  # on a GPU most of its time compiles the model
                started, tokens = time.monotonic(), 0
            progress.advance(
                note=f"loss {row['loss']:.2f}, right {row['accuracy'][0]:.0%}, {rate:,.0f} tokens/s"
            )
            if kept:
                if groups:
                    measured = learner.validate(groups, data.validation, length)
                    row = _row("validation", step, measured, settings.test_time_steps)
                    if ranks.main:
                        run_folder.append_line(metrics, row)
                ranks.require_same(prepared.parameters())
                _checkpoint(accelerator, folder, step, standing, ranks)


class _Learner:
    """Learns and measures, each process on packs of its own; what is measured is of all."""

    def __init__(self, accelerator: Any, model: Any, test_time_steps: int, ranks: Ranks) -> None:
        self._accelerator, self._model, self._ranks = accelerator, model, ranks
        self._loss = {"ttt_steps": test_time_steps, "loss_config": draft_head.loss()}
        kinds = ["loss", *(f"full_acc_{k}" for k in range(test_time_steps))]
        self._sums = [f"{kind}_{what}" for kind in kinds for what in ("sum", "total")]

    def learn(
        self, step: Step, training: Sequence[Sample], packed: Future[Batch | None]
    ) -> Mapping[str, Any]:
        """Return what a step measured; its gradients are then the same in every process.

        A pack's loss is a mean over its own tokens. Weighed with the pack's share of the step's
        tokens and summed, losses and gradients are those of one process over all packs. (Draft
        step k divides by the tokens under the mask behind the pack's first k positions. These are
        as many for every k if a pack begins with a prompt of ``test_time_steps`` tokens or more;
        for shorter ones the equality is an approximation.)
        """
        with self._ranks.alike():
            weights = shares(step, training)
        self._model.train()
        loss, measured = None, {}
        if (batch := packed.result()) is not None:
            weight = weights[self._ranks.rank]
            _, loss, measured = self._model(**_on(batch, self._accelerator.device), **self._loss)
            loss = loss * weight
            measured |= {name: measured[name] * weight for name in ("loss_sum", "loss_total")}
        if loss is not None:
            self._accelerator.backward(loss)
        self._ranks.add_gradients(self._model.parameters())
        # Looked at only now: a GPU that is asked for a number idles until it is given more work.
        summed = self._ranks.sums(measured, self._sums)
        with self._ranks.alike():
            _require_finite("loss", float(summed["loss_sum"] / summed["loss_total"]), step)
        return summed

    def validate(
        self, groups: Sequence[tuple[int, ...]], validation: Sequence[Sample], length: int
    ) -> Mapping[str, Any]:
        """Return what all groups measure together; the processes divide them."""
        import torch

        self._model.eval()
        measured: Counter[str] = Counter()
        for group in groups[self._ranks.rank :: self._ranks.count]:
            whole = _on(pack([validation[i] for i in group], length), self._accelerator.device)
            with torch.no_grad():
                _, _, part = self._model(**whole, **self._loss)
            measured.update({name: float(value) for name, value in part.items()})
        return self._ranks.sums(measured, self._sums)


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
    accelerator: Any, folder: RunFolder, step: Step, standing: Mapping[str, Any], ranks: Ranks
) -> None:
    """Save everything needed to continue; the newest ones are kept, whole or not at all."""
    target = folder.train / f"checkpoint-{step.number:06d}"
    scratch = target.with_name(target.name + ".partial")

    def save() -> None:  # each process has a file of its own in it
        with draft_head.writing(target):
            accelerator.save_state(str(scratch))

    def publish() -> None:
        with draft_head.writing(target):
            run_folder.write_json(scratch / "step.json", {"step": step.number, **standing})
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)
        for old in _checkpoints(folder)[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old)

    ranks.main_does(lambda: shutil.rmtree(scratch, ignore_errors=True))
    ranks.all_do(save)
    ranks.main_does(publish)


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
    """Return a batch on the device, its states as the head computes: in 32 bits."""
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    return {name: t.float() if t.is_floating_point() else t for name, t in moved.items()}

"""Batches for EAGLE-3 training: the alignment of tokens and states, packing, and the schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from truetap.harness.errors import CheckFailed, UsageError
from truetap.pipeline.config import RunConfig
from truetap.pipeline.store import Sample

if TYPE_CHECKING:
    import torch

Batch = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class Step:
    """One optimiser step: which samples, in which epoch."""

    number: int
    epoch: int
    samples: tuple[int, ...]


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


def schedule(config: RunConfig, training: Sequence[Sample]) -> list[Step]:
    """Return all steps of a run, the same for the same seed: resuming is cutting the list."""
    import torch

    if not training:
        raise UsageError("there are no training conversations", remedy="raise data.train")
    steps: list[Step] = []
    for epoch in range(config.train.epochs):
        generator = torch.Generator().manual_seed(config.seed + epoch)
        order = torch.randperm(len(training), generator=generator).tolist()
        for samples in filled(order, training, config.train.tokens_per_step):
            steps.append(Step(len(steps) + 1, epoch, samples))
    return steps


def filled(
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

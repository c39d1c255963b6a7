"""Batches for EAGLE-3 training: the alignment of tokens and states, packing, and the schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from truetap.harness.errors import CheckFailed, IntegrityError, UsageError
from truetap.pipeline import float_bits
from truetap.pipeline.config import RunConfig
from truetap.pipeline.prepare import Conversation
from truetap.pipeline.store import READERS, Sample

if TYPE_CHECKING:
    import torch

Batch = dict[str, "torch.Tensor"]
PACKS_AHEAD = 2
FLEX_BLOCK = 128
"""Tokens of a block of torch's flex attention, by default."""
NOBODYS = {"document_ids": -1}
"""What filling tokens have, if not 0: speculators' masks let nobody attend to this document."""
_FIRST = 16
"""Values of a row that are looked at before the rest of it is."""
UNUSABLE_SHARE = 0.01
"""Largest share of samples that may be left out for their states. One bad row in a hundred samples
is an accident; more is a capture path that should not be trained on."""


@dataclass(frozen=True)
class Step:
    """One optimiser step: which samples, in which epoch."""

    number: int
    epoch: int
    packs: tuple[tuple[int, ...], ...]
    """The samples of each process. The last step of an epoch may have fewer packs than there are
    processes: those without one take part in it with nothing."""

    @property
    def samples(self) -> tuple[int, ...]:
        """The samples of all processes."""
        return tuple(chain.from_iterable(self.packs))


def require_own_tokens(samples: Mapping[Conversation, Sample]) -> None:
    """Raise if a shard has a conversation's id and another one's tokens: a line of another store.

    Its digests and its certificate are right then, and its states are another text's.
    """
    for conversation, sample in samples.items():
        same = tuple(sample.token_ids.tolist()) == conversation.token_ids
        if not same or bytes(sample.loss_mask.tolist()) != conversation.loss_mask:
            raise IntegrityError(
                f"the shards hold other tokens for {sample.id!r} than its conversation has",
                remedy="run truetap extract again: it redoes exactly the shards that are bad",
            )


def unusable(samples: Iterable[Sample]) -> dict[str, str]:
    """Return what is wrong with each sample that must not be trained on, by id.

    Raises ``CheckFailed`` if it is more than ``UNUSABLE_SHARE`` of them. They are left out before
    the schedule is made, so every step of it has something to learn from.
    """
    held = list(samples)
    with ThreadPoolExecutor(READERS) as readers:
        faults = zip(held, readers.map(fault_of, held), strict=True)
        bad = {sample.id: wrong for sample, wrong in faults if wrong}
    count = len(held)
    if len(bad) > UNUSABLE_SHARE * count:
        first = next(iter(bad))
        raise CheckFailed(
            f"{len(bad)} of {count} conversations have states that must not be trained on, the "
            f"first of them {first!r}: {bad[first]}",
            remedy="run truetap conform on this capture path, then extract again",
        )
    return bad


def fault_of(sample: Sample) -> str:
    """Return why a sample's states must not be trained on, or ''."""
    states, ids = sample.states, sample.token_ids.numpy()
    if not len(states) == len(ids) == len(sample.loss_mask):
        return f"{len(states)} rows, {len(ids)} tokens and a loss mask of {len(sample.loss_mask)}"
    bits = float_bits.of(states)
    if not bits.finite:
        bad = np.flatnonzero(bits.not_finite(bits.array))
        return f"{len(bad)} of {len(states)} rows are not finite, the first is {bad[0]}"
    rows = bits.array.reshape(len(states), -1)
    first = rows[:, :_FIRST]
    for row in np.flatnonzero(bits.zero(first)):
        if bits.zero(rows[row : row + 1]).all():
            return f"row {row} is all zero"
    # A token that follows itself may well have equal states: there is nothing else to attend to.
    for row in np.flatnonzero((first[1:] == first[:-1]).all(1) & (ids[1:] != ids[:-1])):
        if np.array_equal(rows[row], rows[row + 1]):
            return f"row {row + 1} repeats the one before, of another token"
    return ""


def aligned(sample: Sample) -> Batch:
    """Return one sample in speculators' alignment: (ids[1:], features[:-1], last[1:], mask[1:]).

    At step t the draft sees token x(t+1) with the features of t, and learns what the verifier says
    after x(t+1). Shifting before packing keeps the shift inside each conversation. States stay in
    the engine's dtype.
    """
    import torch
    from speculators.models.eagle3.data import shift_batch

    states = sample.states
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


def pack(samples: Sequence[Sample], length: int = 0) -> Batch:
    """Concatenate samples into one row, each with its own document id.

    ``length``: fill up to so many tokens, with some that belong to no document and are not learnt.
    """
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
    _require_learnable(samples, int(packed["loss_mask"].sum()))
    if lacking := max(0, length - packed["input_ids"].shape[1]):
        for name, tensor in packed.items():
            filling = tensor.new_full((1, lacking, *tensor.shape[2:]), NOBODYS.get(name, 0))
            packed[name] = torch.cat([tensor, filling], dim=1)
    return packed


def common_length(packs: Iterable[Sequence[int]], samples: Sequence[Sample]) -> int:
    """Return a length that every pack can be filled up to, in whole blocks of flex attention.

    speculators' model counts in blocks where a draft step's keys begin; torch refuses other lengths
    at the second draft step. And compiled code is for one length.
    """
    sizes = (sum(len(samples[index].token_ids) - 1 for index in each) for each in packs)
    longest = max(sizes, default=0)
    return -(-longest // FLEX_BLOCK) * FLEX_BLOCK


def shares(step: Step, training: Sequence[Sample]) -> list[float]:
    """Return each pack's share in the tokens that a step learns from.

    Each process knows all packs' shares without asking. Raises ``CheckFailed``, in all of them, if
    a pack has none.
    """
    counts = []
    for indices in step.packs:
        samples = [training[index] for index in indices]
        counts.append(sum(int(sample.loss_mask[1:].count_nonzero()) for sample in samples))
        _require_learnable(samples, counts[-1])
    return [count / sum(counts) for count in counts]


def _require_learnable(samples: Sequence[Sample], tokens: int) -> None:
    if not tokens:
        raise CheckFailed(
            f"no token of the conversations {[s.id for s in samples]} is under the loss mask",
            remedy="run truetap prepare again and look at the chat template",
        )


def ahead(
    steps: Sequence[Step],
    samples: Sequence[Sample],
    rank: int = 0,
    *,
    length: int = 0,
    pinned: bool = False,
) -> Iterator[tuple[Step, Future[Batch | None]]]:
    """Yield each step with a process's pack, which a thread makes while a step before is computed.

    None for a process without a pack in this step. ``length`` is that of ``pack``; ``pinned``: in
    memory that a GPU copies from by itself.
    """

    def packed(step: Step) -> Batch | None:
        if rank >= len(step.packs):
            return None
        batch = pack([samples[index] for index in step.packs[rank]], length)
        return {name: tensor.pin_memory() for name, tensor in batch.items()} if pinned else batch

    with ThreadPoolExecutor(1, "truetap-pack") as maker:
        making: deque[tuple[Step, Future[Batch | None]]] = deque()
        for step in steps:
            making.append((step, maker.submit(packed, step)))
            if len(making) > PACKS_AHEAD:
                yield making.popleft()
        yield from making


def schedule(config: RunConfig, training: Sequence[Sample], processes: int = 1) -> list[Step]:
    """Return all steps of a run, the same for the same seed: resuming is cutting the list.

    It is one list for all processes, so they do equally many steps. Each step takes as many packs
    as there are processes, the last one of an epoch what is left.
    """
    import torch

    if not training:
        raise UsageError("there are no training conversations", remedy="raise data.train")
    steps: list[Step] = []
    for epoch in range(config.train.epochs):
        generator = torch.Generator().manual_seed(config.seed + epoch)
        order = torch.randperm(len(training), generator=generator).tolist()
        packs = list(filled(order, training, config.train.tokens_per_step))
        for first in range(0, len(packs), processes):
            steps.append(Step(len(steps) + 1, epoch, tuple(packs[first : first + processes])))
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
    if group:
        yield tuple(group)

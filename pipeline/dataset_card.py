"""What a run's conversations are, for people (a card) and for counting (token frequencies)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from truetap.pipeline.config import RunConfig
from truetap.pipeline.selection import Selection

if TYPE_CHECKING:
    from truetap.pipeline.prepare import Conversation

TWICE = (
    "The chat template writes a BOS and the tokenizer adds one to any text: whoever tokenises "
    "rendered text must switch special tokens off, or gets a double BOS. The ids here have one."
)
FORMAT = "truetap/token-frequencies/1"


@dataclass(frozen=True)
class Facts:
    """What the conversations themselves do not tell."""

    selection: Selection
    left_out: Counter[str]
    verifier: str
    twice: bool
    """Whether a caller who tokenises rendered text as usual gets a second BOS."""


def frequencies(training: Iterable[Conversation]) -> dict[str, Any]:
    """Return how often each id occurs in conversations, and how often under the loss mask.

    ``counts`` has ``[everywhere, under the mask]`` by id, ascending; ids that never occur are left
    out.
    """
    everywhere: Counter[int] = Counter()
    learnt: Counter[int] = Counter()
    for conversation in training:
        pairs = zip(conversation.token_ids, conversation.loss_mask, strict=True)
        everywhere.update(conversation.token_ids)
        learnt.update(token for token, bit in pairs if bit)
    return {
        "format": FORMAT,
        "tokens": everywhere.total(),
        "loss_tokens": learnt.total(),
        "counts": {str(t): [everywhere[t], learnt[t]] for t in sorted(everywhere)},
    }


def text(config: RunConfig, facts: Facts, conversations: Sequence[Conversation]) -> str:
    """Return the card in Markdown; the same conversations give the same text."""
    chosen, data = facts.selection, config.data
    shape = f", rows of the shape {chosen.shape}" if chosen.shape else ""
    answers = (
        "as the data set gives them"
        if data.answers == "given"
        else f"by {facts.verifier} itself, at temperature {data.temperature:g}, at most "
        f"{data.max_answer_tokens} tokens each"
    )
    learnt = "all answers" if data.loss_on == "answers" else "the last answer of each conversation"
    heldout = sum(c.split == "heldout" for c in chosen.chosen)
    lines = [
        "# Conversations",
        "",
        f"- Source: {chosen.source}{shape}; {chosen.read:,} rows read",
        f"- Answers: {answers}",
        f"- Under the loss mask: {learnt}, with the token that ends an answer",
        f"- Tokens: of {facts.verifier}, rendered with its chat template",
        "",
        "| split | conversations | tokens | under the loss mask |",
        "| --- | --- | --- | --- |",
        *(_split_row(split, conversations) for split in ("train", "validation")),
        f"| held out | {heldout:,} (first questions only) | | |",
        "",
        "## Left out",
        "",
        *_left_out(facts),
    ]
    if facts.twice:
        lines += ["", TWICE]
    return "\n".join(lines) + "\n"


def _split_row(split: str, conversations: Sequence[Conversation]) -> str:
    mine = [c for c in conversations if c.split == split]
    tokens = sum(len(c.token_ids) for c in mine)
    learnt = sum(sum(c.loss_mask) for c in mine)
    return f"| {split} | {len(mine):,} | {tokens:,} | {learnt:,} |"


def _left_out(facts: Facts) -> list[str]:
    lines = [f"- {count:,} for {why}" for why, count in facts.left_out.most_common()]
    if facts.selection.cut:
        lines.append(
            f"- the last turns of {facts.selection.cut:,} conversations, which would not have "
            "fitted or came after an empty answer"
        )
    return lines or ["Nothing."]

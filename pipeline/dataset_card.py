"""What a run's conversations are, for people (a card) and for counting (token frequencies)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    servers: Sequence[Mapping[str, Any]] = ()
    """What was seen of the servers that answered (``server_check.Seen``)."""


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
        else f"by {facts.verifier} {'behind a server' if facts.servers else 'itself'}, at "
        f"temperature {data.temperature:g}, at most {data.max_answer_tokens} tokens each"
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
    if facts.servers:
        lines += ["", "## Answered by a server", "", *_servers(facts)]
    if facts.twice:
        lines += ["", TWICE]
    return "\n".join(lines) + "\n"


def _split_row(split: str, conversations: Sequence[Conversation]) -> str:
    mine = [c for c in conversations if c.split == split]
    tokens = sum(len(c.token_ids) for c in mine)
    learnt = sum(sum(c.loss_mask) for c in mine)
    return f"| {split} | {len(mine):,} | {tokens:,} | {learnt:,} |"


def _servers(facts: Facts) -> list[str]:
    """Tell what each server showed of itself, and what none can."""
    lines = []
    for seen in facts.servers:
        root = f" (from {seen['root']})" if seen["root"] not in ("", seen["model"]) else ""
        version = f", version {seen['version']}" if seen["version"] else ""
        lines += [
            f"- {seen['url']}{version}: model {seen['model']}{root}",
            f"    - its rendering of chats: {seen['rendering']}",
        ]
    proven = (
        "Prompts went to it as token ids and answers came back as token ids; every reply's prompt "
        "was compared with what was sent, every answer's text with its ids. NOT proven: that its "
        f"weights are those of {facts.verifier}; a server does not show them. The hidden states "
        "are the verifier's own in any case: extraction captures these ids anew."
    )
    return [*lines, "", proven]


def _left_out(facts: Facts) -> list[str]:
    lines = [f"- {count:,} for {why}" for why, count in facts.left_out.most_common()]
    if facts.selection.cut:
        lines.append(
            f"- the last turns of {facts.selection.cut:,} conversations, which would not have "
            "fitted or came after an empty answer"
        )
    return lines or ["Nothing."]

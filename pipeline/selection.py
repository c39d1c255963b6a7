"""Chooses a run's dialogues: which are used, in which split, and what was left out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from truetap.harness.errors import CheckFailed, UsageError
from truetap.pipeline import chat, dialogues
from truetap.pipeline.chat import Rendered
from truetap.pipeline.config import RunConfig
from truetap.pipeline.dialogues import Dialogue, Message

SHARED = "an answer that shares a token with the text around it"
STDLIB = "docstrings of Python's standard library"


@dataclass(frozen=True)
class Chosen:
    """A dialogue of the run; for one that is answered, ``messages`` are the questions alone."""

    id: str
    split: str
    messages: tuple[Message, ...]
    prompt: tuple[int, ...]
    """Ids of the first question as a server would see them, system text included."""
    rendered: Rendered | None = None
    """Of answers as given: the whole dialogue."""

    @property
    def text(self) -> str:
        """The first question."""
        return self.messages[len(opening(self.messages)) - 1].content

    @property
    def questions(self) -> int:
        """How many turns are the user's."""
        return sum(m.role == "user" for m in self.messages)


@dataclass
class Selection:
    """What was chosen, and what was not."""

    source: str
    shape: str = ""
    read: int = 0
    chosen: list[Chosen] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    """Dialogues that lost turns, because all of them would not fit."""


def opening(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the messages up to the first question."""
    return messages[: 2 if messages[0].role == "system" else 1]


def longest_prompt(config: RunConfig) -> int:
    """Return how many tokens a prompt may have that leaves room for its answer."""
    return config.capture.max_model_len - config.data.max_answer_tokens - 2


def needed(config: RunConfig) -> int:
    """Return how many dialogues a run wants, in all its splits."""
    return config.data.heldout + config.data.validation + config.data.train


def choose(
    config: RunConfig,
    tokenizer: Any,
    say: Callable[[str], None] = lambda _: None,
    advance: Callable[[], None] = lambda: None,
) -> Selection:
    """Read as much of the data as the run needs: held out first, then validation, then training.

    ``say`` is told what the data is, ``advance`` called for each dialogue that is chosen.
    Raises ``UsageError`` if there is too little, or a dialogue is too long and none may be dropped.
    """
    data = config.data
    made = Selection(str(data.questions) if data.questions else STDLIB)
    wanted = needed(config)

    def said(line: str) -> None:
        made.shape = line.rpartition(" shape ")[2]
        say(line)

    seen = _Seen()
    for dialogue in _dialogues(config, made, said):
        split = _split(config, len(made.chosen))
        if why := seen.why_again(dialogue):
            made.left_out[why] += 1
            continue
        if (chosen := _fitting(config, tokenizer, dialogue, split, made)) is None:
            continue
        seen.add(dialogue, heldout=split == "heldout")
        made.chosen.append(chosen)
        advance()
        if len(made.chosen) == wanted:
            return made
    raise UsageError(
        f"{made.source} has {len(made.chosen)} different questions where {wanted} are needed"
        + (f"; left out: {counts(made.left_out)}" if made.left_out else ""),
        remedy="add questions, or lower data.train, data.validation and data.heldout",
    )


def _split(config: RunConfig, position: int) -> str:
    data = config.data
    if position < data.heldout:
        return "heldout"
    return "validation" if position < data.heldout + data.validation else "train"


def counts(counter: Counter[str]) -> str:
    """Tell what was left out, the most frequent reason first."""
    return "; ".join(f"{count:,} for {why}" for why, count in counter.most_common())


def _dialogues(
    config: RunConfig, made: Selection, say: Callable[[str], None]
) -> Iterator[Dialogue]:
    """Yield the fit dialogues, as they are used; count the others."""
    data = config.data
    if data.questions is None:
        from truetap.pipeline import docstrings

        train, heldout = docstrings.split(
            docstrings.stdlib_questions(config.seed),
            train=data.train + data.validation,
            heldout=data.heldout,
        )
        for question in [*heldout, *train]:
            made.read += 1
            yield Dialogue(question.id, (Message("user", question.text),))
        return
    for dialogue in dialogues.read(data.questions, data.part, say=say):
        made.read += 1
        if why := dialogues.why_unfit(dialogue, data.answers):
            made.left_out[why] += 1
        else:
            yield dialogues.to_use(dialogue, data.answers)


class _Seen:
    """What was chosen so far, to know duplicates, and beginnings that are held out."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._texts: set[str] = set()
        self._heldout: set[str] = set()

    def add(self, dialogue: Dialogue, *, heldout: bool) -> None:
        self._ids.add(dialogue.id)
        self._texts.add(dialogue.digest)
        if heldout:
            self._heldout.add(_first_question(dialogue))

    def why_again(self, dialogue: Dialogue) -> str | None:
        if dialogue.digest in self._texts:
            return "being a duplicate"
        if dialogue.id in self._ids:
            return "an id that another has"
        # Evaluation asks the first question alone, whatever the system text.
        if _first_question(dialogue) in self._heldout:
            return "beginning with a question that is held out"
        return None


def _first_question(dialogue: Dialogue) -> str:
    return dialogues.digest_of(opening(dialogue.messages)[-1:])


def _fitting(
    config: RunConfig, tokenizer: Any, dialogue: Dialogue, split: str, made: Selection
) -> Chosen | None:
    """Return a dialogue as it fits; None, counted in ``made``, if it does not."""
    try:
        if (prompt := _prompt(config, tokenizer, dialogue, made)) is None:
            return None
        plain = Chosen(dialogue.id, split, dialogue.messages, prompt)
        if split == "heldout":
            return plain
        if config.data.answers == "given":
            return _given(config, tokenizer, plain, made)
        if config.data.too_long == "refuse" and plain.questions > 1:
            _require_room(config, tokenizer, plain)
    except CheckFailed as error:
        raise CheckFailed(f"dialogue {dialogue.id!r}: {error}", remedy=error.remedy) from error
    return plain


def _prompt(
    config: RunConfig, tokenizer: Any, dialogue: Dialogue, made: Selection
) -> tuple[int, ...] | None:
    prompt = chat.prompt_ids(tokenizer, opening(dialogue.messages))
    limit = longest_prompt(config)
    if len(prompt) <= limit:
        return prompt
    if config.data.too_long != "refuse":
        made.left_out["a first question that is too long"] += 1
        return None
    raise UsageError(
        f"question {dialogue.id!r} has {len(prompt)} tokens; with max_model_len "
        f"{config.capture.max_model_len} and answers of {config.data.max_answer_tokens} a prompt "
        f"may have {limit}",
        remedy='shorten the question, raise capture.max_model_len, or set data.too_long = "drop"',
    )


def _given(config: RunConfig, tokenizer: Any, plain: Chosen, made: Selection) -> Chosen | None:
    """Render a dialogue with its own answers, without its last turns if they do not fit."""
    limit = config.capture.max_model_len - 2
    policy = config.data.too_long
    messages, last_only = plain.messages, config.data.loss_on == "last_answer"
    try:
        rendered = chat.render(tokenizer, messages, last_only=last_only)
        while len(rendered.token_ids) > limit and policy == "truncate" and len(messages) > 3:
            messages = messages[:-2]
            rendered = chat.render(tokenizer, messages, last_only=last_only)
    except chat.SharedToken:
        made.left_out[SHARED] += 1
        return None
    if len(rendered.token_ids) > limit:
        if policy == "refuse":
            raise UsageError(
                f"dialogue {plain.id!r} has {len(rendered.token_ids)} tokens; with max_model_len "
                f"{config.capture.max_model_len} it may have {limit}",
                remedy='raise capture.max_model_len, or set data.too_long = "drop" or "truncate"',
            )
        made.left_out["being too long"] += 1
        return None
    made.cut += messages != plain.messages
    spans = tuple(chat.with_end(tokenizer, rendered, span) for span in rendered.answers)
    return replace(plain, messages=messages, rendered=replace(rendered, answers=spans))


def longest(config: RunConfig, tokenizer: Any, chosen: Chosen) -> int:
    """Return the tokens that a dialogue may come to with all its answers."""
    if chosen.rendered is not None:
        return len(chosen.rendered.token_ids)
    whole = _before_last_answer(config, tokenizer, chosen) + config.data.max_answer_tokens
    return min(whole, config.capture.max_model_len - 2)


def _before_last_answer(config: RunConfig, tokenizer: Any, chosen: Chosen) -> int:
    if chosen.questions == 1:
        return len(chosen.prompt)
    said: list[Message] = []
    for message in chosen.messages:
        if said and said[-1].role == "user":
            said.append(Message("assistant", "-"))
        said.append(message)
    earlier = (chosen.questions - 1) * config.data.max_answer_tokens
    return len(chat.prompt_ids(tokenizer, said)) + earlier


def _require_room(config: RunConfig, tokenizer: Any, plain: Chosen) -> None:
    """Refuse beforehand a dialogue whose answers may fill the context before its last turn."""
    tokens = _before_last_answer(config, tokenizer, plain)
    if tokens > longest_prompt(config):
        raise UsageError(
            f"the last question of dialogue {plain.id!r} may come after {tokens} tokens; with "
            f"max_model_len {config.capture.max_model_len} and answers of "
            f"{config.data.max_answer_tokens} a prompt may have {longest_prompt(config)}",
            remedy='raise capture.max_model_len, or set data.too_long = "drop" or "truncate"',
        )

"""Has the verifier answer dialogues, turn after turn, each after its own earlier answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from truetap.harness.engine import Finished, Prompt
from truetap.harness.errors import CheckFailed, UsageError
from truetap.pipeline import chat
from truetap.pipeline.chat import Span
from truetap.pipeline.config import RunConfig
from truetap.pipeline.dialogues import Message
from truetap.pipeline.selection import Chosen, longest_prompt

Generate = Callable[[Iterable[Prompt]], Iterator[Finished]]
"""``VllmEngine.generate`` with its limits set."""


@dataclass
class Answered:
    """A dialogue as far as it has come."""

    chosen: Chosen
    said: list[Message]
    """What the next answer comes after."""
    prompt: tuple[int, ...]
    """The ids of it, as a server would see them."""
    waiting: deque[Message]
    ended: list[bool] = field(default_factory=list)
    """Of each answer: whether the verifier ended it, or the limit of its length did."""
    last: Finished | None = None
    given_up: str = ""
    """Why the dialogue is no use; empty if it is."""

    @property
    def finished(self) -> Finished:
        """The last answer."""
        assert self.last is not None
        return self.last

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What the verifier saw and said, its last answer's ids as the engine gave them."""
        return (*self.prompt, *self.finished.token_ids)

    @property
    def messages(self) -> list[Message]:
        """All that was said."""
        return [*self.said, Message("assistant", self.finished.text)]


def answer(
    config: RunConfig, tokenizer: Any, generate: Generate, chosen: Sequence[Chosen]
) -> Iterator[Answered]:
    """Yield each dialogue when its last turn is answered, or it is given up.

    A turn is asked before new dialogues are begun, so that an interruption loses few. Turns that
    become ready when the engine was told that nothing is left are asked in another round.
    """
    ready = deque(_begun(each) for each in chosen)
    asked: dict[str, Answered] = {}
    sampling = {
        "max_tokens": config.data.max_answer_tokens,
        "temperature": config.data.temperature,
    }

    def prompts() -> Iterator[Prompt]:
        while ready:
            dialogue = ready.popleft()
            asked[dialogue.chosen.id] = dialogue
            yield Prompt(dialogue.chosen.id, dialogue.prompt, sampling)

    while ready:
        for finished in generate(prompts()):
            dialogue = asked.pop(finished.key)
            if _has_next(config, tokenizer, dialogue, finished):
                ready.appendleft(dialogue)
            else:
                yield dialogue


def _begun(chosen: Chosen) -> Answered:
    first = next(n for n, m in enumerate(chosen.messages, start=1) if m.role == "user")
    return Answered(
        chosen, list(chosen.messages[:first]), chosen.prompt, deque(chosen.messages[first:])
    )


def _has_next(config: RunConfig, tokenizer: Any, dialogue: Answered, finished: Finished) -> bool:
    """Take an answer in; prepare the next turn if there is one and it fits."""
    dialogue.last = finished
    dialogue.ended.append(finished.finish_reason == "stop")
    # After an empty answer a dialogue has nothing to go on from.
    if not dialogue.waiting or not finished.text.strip():
        return False
    said = [*dialogue.messages, dialogue.waiting[0]]
    prompt = chat.prompt_ids(tokenizer, said)
    if len(prompt) > longest_prompt(config):
        if config.data.too_long == "refuse":
            raise UsageError(
                f"dialogue {dialogue.chosen.id!r} grew to {len(prompt)} tokens, more than "
                "capture.max_model_len holds",
                remedy='set data.too_long = "drop" or "truncate", and another output folder',
            )
        if config.data.too_long == "drop":
            dialogue.given_up = "being too long"
        return False
    dialogue.waiting.popleft()
    dialogue.said, dialogue.prompt = said, prompt
    return True


def masked(config: RunConfig, tokenizer: Any, dialogue: Answered) -> list[Span]:
    """Return the token spans that are learnt; raises ``SharedToken`` where one cannot be told."""
    spans = [(len(dialogue.prompt), len(dialogue.token_ids))]
    if len(dialogue.ended) == 1 or config.data.loss_on == "last_answer":
        return spans
    rendered = chat.render(tokenizer, dialogue.said, open_ended=True)
    if rendered.token_ids != dialogue.prompt:
        raise CheckFailed(f"the prompt of dialogue {dialogue.chosen.id!r} renders otherwise now")
    earlier = zip(rendered.answers, dialogue.ended, strict=False)
    return [
        *(chat.with_end(tokenizer, rendered, span) if ended else span for span, ended in earlier),
        *spans,
    ]

"""The verifier's chat template: token ids as a server would see them, and where the answers are.

Where an answer begins is never searched for: the same words may stand in a question. It begins
where the template's text for everything before it, generation prompt included, ends; a template for
which that does not hold is named. Characters become tokens by the tokenizer's own offsets, and the
ids must be those of ``apply_chat_template``, which is what a server calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unicodedata import normalize

from truetap.harness.errors import CheckFailed, CouldNotRun, UsageError
from truetap.pipeline.dialogues import Message

Span = tuple[int, int]
"""First and one past the last, of characters or of tokens."""


class SharedToken(Exception):
    """A token holds the end of one side's text and the beginning of the other's.

    A server never sees it where an answer begins: it ends the prompt there. Such a dialogue cannot
    be masked exactly, and is left out.
    """


@dataclass(frozen=True)
class Rendered:
    """Messages as token ids, and the tokens of each of the assistant's texts, in order."""

    token_ids: tuple[int, ...]
    answers: tuple[Span, ...]


def load_tokenizer(model: Path) -> Any:
    """Return the verifier's tokenizer; it must have a chat template."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CouldNotRun(
            f"the tokenizer cannot be loaded: {error}", remedy="pip install 'truetap[reference]'"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except Exception as error:  # tokenizers raises plain Exception on a bad file
        raise UsageError(f"{model} has no tokenizer that can be loaded: {error}") from error
    if not tokenizer.chat_template:
        raise UsageError(
            f"the tokenizer in {model} has no chat template",
            remedy="use an instruction-tuned verifier, or add chat_template to its tokenizer",
        )
    return tokenizer


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> tuple[int, ...]:
    """Return the ids that a server gives the model before it answers; refuse a double BOS."""
    ids = _applied(tokenizer, messages, open_ended=True, tokenize=True)
    require_single_bos(tokenizer, ids)
    return tuple(ids)


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    open_ended: bool = False,
    last_only: bool = False,
) -> Rendered:
    """Return the ids of ``messages`` and the token spans of the assistant's texts.

    ``open_ended`` adds the generation prompt; ``last_only`` looks for the last text alone. Raises
    ``SharedToken``, and ``CheckFailed`` for a template that cannot be followed.
    """
    text = _text(tokenizer, messages, open_ended=open_ended)
    positions = [p for p, message in enumerate(messages) if message.role == "assistant"]
    positions = positions[-1:] if last_only else positions
    characters = [_answer_in(tokenizer, text, messages, position) for position in positions]
    ids, offsets = _tokens(tokenizer, text)
    if ids != list(_applied(tokenizer, messages, open_ended=open_ended, tokenize=True)):
        raise CheckFailed(
            "the tokenizer gives other ids for the chat template's text than apply_chat_template",
            remedy="the tokenizer cannot be used for training: what is served would differ",
        )
    require_single_bos(tokenizer, ids)
    spans = [_token_span(offsets, span) for span in characters]
    for position, (first, end), (start, stop) in zip(positions, spans, characters, strict=True):
        if tuple(ids[:first]) != prompt_ids(tokenizer, messages[:position]):
            raise SharedToken  # offsets may leave out a space that the token does hold
        _require_same_text(tokenizer.decode(ids[first:end]), text[start:stop])
    return Rendered(tuple(ids), tuple(spans))


def _require_same_text(decoded: str, said: str) -> None:
    """Raise if tokens are not what their offsets say; decoders differ in spaces and in forms."""
    one, other = ("".join(normalize("NFKC", text).split()) for text in (decoded, said))
    if one != other:
        raise CheckFailed(
            f"the tokenizer's offsets are wrong: {decoded[:60]!r} stands where they show "
            f"{said[:60]!r}",
            remedy="use the verifier's tokenizer as published, and a newer tokenizers",
        )


def with_end(tokenizer: Any, rendered: Rendered, span: Span) -> Span:
    """Widen a span by the token that ends the answer, where the template writes one.

    An engine generates it too; a draft that never saw it would run on after every answer.
    """
    ends = span[1] < len(rendered.token_ids)
    if ends and rendered.token_ids[span[1]] == tokenizer.eos_token_id:
        return span[0], span[1] + 1
    return span


def require_single_bos(tokenizer: Any, ids: Sequence[int]) -> None:
    """Raise if the ids begin with the token of beginning twice."""
    bos = tokenizer.bos_token_id
    if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
        raise CheckFailed(
            f"double BOS: the conversation begins with {tokenizer.bos_token!r} twice",
            remedy="the chat template writes it and something else adds it again: the template "
            "itself, or the data set's first message",
        )


def adds_bos_again(tokenizer: Any) -> bool:
    """Whether text from the template gets a second BOS from a caller who tokenises it as usual."""
    text = _text(tokenizer, [Message("user", "a")], open_ended=True)
    ids = tokenizer(text)["input_ids"]
    bos = tokenizer.bos_token_id
    return bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos


def require_kept_turns(tokenizer: Any) -> None:
    """Raise, before any work, if the template re-writes an earlier answer, as some drop thinking.

    Then no sequence holds what the verifier saw at each of its turns.
    """
    for answer in ("b", "<think>\nc\n</think>\n\nb"):
        messages = [Message("user", "a"), Message("assistant", answer), Message("user", "d")]
        text = _text(tokenizer, messages, open_ended=True)
        _answer_in(tokenizer, text, messages, 1)


_LAST_ONLY = 'set data.loss_on = "last_answer": only the last one is then learnt'


def _answer_in(tokenizer: Any, text: str, messages: Sequence[Message], position: int) -> Span:
    """Return the characters of the assistant's message number ``position`` in ``text``."""
    before = _text(tokenizer, messages[:position], open_ended=True)
    if not text.startswith(before):
        raise CheckFailed(
            "the chat template re-writes earlier turns: its text for the messages before an answer "
            f"({before[-60:]!r} at the end) is no beginning of its text for all of them",
            remedy=_LAST_ONLY,
        )
    said = messages[position].content
    # Templates may trim a message; what they leave must stand right here.
    for kept in (said, said.lstrip(), said.rstrip(), said.strip()):
        if text.startswith(kept, len(before)):
            return len(before), len(before) + len(kept)
    alone = _text(tokenizer, messages[: position + 1], open_ended=False)
    if position + 1 < len(messages) and alone.startswith(said.strip(), len(before)):
        raise CheckFailed(
            "the chat template re-writes earlier turns: an answer that it shows while it is the "
            f"last one ({said[:60]!r}...) is shown otherwise once another turn follows",
            remedy=_LAST_ONLY,
        )
    raise CheckFailed(
        f"the chat template shows {text[len(before) : len(before) + 60]!r} after its generation "
        f"prompt where the answer is {said[:60]!r}",
        remedy='answers as given cannot be learnt with it: set data.answers = "regenerate", and '
        'data.loss_on = "last_answer" for dialogues of several turns',
    )


def _text(tokenizer: Any, messages: Sequence[Message], *, open_ended: bool) -> str:
    return cast("str", _applied(tokenizer, messages, open_ended=open_ended, tokenize=False))


def _applied(
    tokenizer: Any, messages: Sequence[Message], *, open_ended: bool, tokenize: bool
) -> Any:
    """Return the template's text or, tokenised as a server does it, its ids."""
    try:
        return tokenizer.apply_chat_template(
            [m.as_dict() for m in messages],
            add_generation_prompt=open_ended,
            tokenize=tokenize,
            return_dict=False,
        )
    except Exception as error:  # jinja's errors, and whatever a template raises itself
        roles = ", ".join(m.role for m in messages)
        raise CheckFailed(
            f"the chat template refuses a dialogue of {roles}: {error}",
            remedy="leave such dialogues out, or use another template",
        ) from error


def _tokens(tokenizer: Any, text: str) -> tuple[list[int], list[Span]]:
    if not tokenizer.is_fast:
        raise CouldNotRun(
            "the tokenizer gives no offsets, so answers cannot be found in its tokens",
            remedy="use a verifier with a tokenizer.json",
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return list(encoded["input_ids"]), list(encoded["offset_mapping"])


def _token_span(offsets: Sequence[Span], characters: Span) -> Span:
    """Return the tokens that lie in a span of characters; ``SharedToken`` if one lies across."""
    start, end = characters
    inside = []
    for number, (first, last) in enumerate(offsets):
        if first < end and last > start:
            if first < start or last > end:
                raise SharedToken
            inside.append(number)
    if not inside:
        raise SharedToken
    return inside[0], inside[-1] + 1

"""Dialogues from the data sets that people have: five shapes of a row, one form of what it says.

The first row's keys say which shape a source has, and every other row must have the same one. A row
that lacks what its shape needs is the user's to correct, and an error. A row that is in order but
no dialogue that a verifier can be asked, such as one that begins with an answer, is left out by
``why_unfit`` and counted: large collections have some of them in every thousand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from truetap.harness.errors import UsageError
from truetap.pipeline import dialogue_rows


@dataclass(frozen=True)
class Message:
    """What one side says."""

    role: str
    content: str

    def as_dict(self) -> dict[str, str]:
        """Return it as chat templates take it."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True)
class Dialogue:
    """Messages in order, with the data set's own answers where it has any."""

    id: str
    messages: tuple[Message, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of what is said, and by whom."""
        return digest_of(self.messages)


def digest_of(messages: Sequence[Message]) -> str:
    """Return the SHA-256 of messages, which no other way to write them down can change."""
    said = json.dumps([[m.role, m.content] for m in messages], ensure_ascii=False)
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()


class _Malformed(Exception):
    """What a row lacks, in words that follow its place."""


_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}
"""ShareGPT's names among them. Any other role is kept as it is, and the dialogue left out."""


@dataclass(frozen=True)
class Shape:
    """One way to write a dialogue in a row."""

    name: str
    needs: str
    """The key that tells it, and that every row has."""
    example: str
    messages: Callable[[Mapping[str, Any]], list[Message]]


def _text(row: Mapping[str, Any], key: str, *, may_lack: bool = False) -> str:
    value = row.get(key)
    if may_lack and (value is None or value == ""):
        return ""
    if not isinstance(value, str) or (not value.strip() and not may_lack):
        raise _Malformed(f"lacks a text under {key!r}")
    return value


def _said(entries: Any, key: str, role_key: str, text_key: str) -> list[Message]:
    if not isinstance(entries, list):
        raise _Malformed(f"has no list under {key!r}")
    said = []
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, Mapping) or not isinstance(entry.get(role_key), str):
            raise _Malformed(f"has a message {number} without {role_key!r}")
        role = entry[role_key].lower()
        said.append(Message(_ROLES.get(role, role), _content(entry.get(text_key), number)))
    return said


def _content(value: Any, number: int) -> str:
    """Return a message's text; a list of parts is joined if all of them are texts."""
    if isinstance(value, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in value
    ):
        return "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise _Malformed(f"has a message {number} without a text")
    return value


def _turns(row: Mapping[str, Any]) -> list[Message]:
    turns = row["turns"]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise _Malformed("has no list of texts under 'turns'")
    return [Message("user", turn) for turn in turns]


def _alpaca(row: Mapping[str, Any]) -> list[Message]:
    asked = _text(row, "instruction")
    if given := _text(row, "input", may_lack=True).strip():
        asked = f"{asked}\n\n{given}"
    answer = _text(row, "output", may_lack=True)
    return [Message("user", asked), *([Message("assistant", answer)] if answer else [])]


def _prompts(key: str) -> Shape:
    def messages(row: Mapping[str, Any]) -> list[Message]:
        system = _text(row, "system", may_lack=True)
        return [
            *([Message("system", system)] if system else []),
            Message("user", _text(row, key)),
        ]

    return Shape(f"prompts ({key})", key, f'{{"id": "q1", "{key}": "What is a list?"}}', messages)


SHAPES: tuple[Shape, ...] = (
    Shape(
        "ShareGPT",
        "conversations",
        '{"id": "c1", "conversations": [{"from": "human", "value": "What is a list?"}]}',
        lambda row: _said(row["conversations"], "conversations", "from", "value"),
    ),
    Shape(
        "messages",
        "messages",
        '{"id": "c1", "messages": [{"role": "user", "content": "What is a list?"}]}',
        lambda row: _said(row["messages"], "messages", "role", "content"),
    ),
    Shape("Spec-Bench", "turns", '{"question_id": 1, "turns": ["What is a list?"]}', _turns),
    Shape(
        "Alpaca", "instruction", '{"instruction": "Explain", "input": "", "output": ""}', _alpaca
    ),
    *(_prompts(key) for key in ("text", "prompt", "question")),
)
"""In the order in which a first row is tried."""

_IDS = ("id", "question_id", "conversation_id")


def shape_of(row: Any) -> Shape | None:
    """Return the shape that a row's keys tell, if any."""
    if not isinstance(row, Mapping):
        return None
    # A column that another kind of row fills is there in every row of a table, as None.
    return next((shape for shape in SHAPES if row.get(shape.needs) is not None), None)


def read(
    source: Path, part: str = "train", *, say: Callable[[str], None] = lambda _: None
) -> Iterator[Dialogue]:
    """Yield the dialogues of a source, and ``say`` which shape it has.

    Raises ``UsageError``, naming file and line, for a row of another shape or none.
    """
    shape: Shape | None = None
    for where, row in dialogue_rows.read(source, part):
        if shape is None:
            if (shape := shape_of(row)) is None:
                raise UsageError(f"{where} has none of the shapes that are known", remedy=_known())
            say(f"{source}: rows of the shape {shape.name}")
        yield _dialogue(row, shape, where)


def _known() -> str:
    return "a row is like one of: " + "; ".join(shape.example for shape in SHAPES)


def _dialogue(row: Any, shape: Shape, where: str) -> Dialogue:
    remedy = f"each row is like {shape.example}"
    if not isinstance(row, Mapping) or row.get(shape.needs) is None:
        other = shape_of(row)
        told = f"has the shape {other.name}" if other else f"lacks {shape.needs!r}"
        raise UsageError(f"{where} {told}; the first row has {shape.name}", remedy=remedy)
    try:
        messages = tuple(shape.messages(row))
        return Dialogue(_id(row) or digest_of(messages)[:16], messages)
    except _Malformed as lack:
        raise UsageError(f"{where} {lack}", remedy=remedy) from None


def _id(row: Mapping[str, Any]) -> str | None:
    for key in _IDS:
        value = row.get(key)
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
            return str(value)
        if value is not None:
            raise _Malformed(f"has an {key!r} that is neither text nor a number")
    return None


Answers = Literal["regenerate", "given"]


def why_unfit(dialogue: Dialogue, answers: Answers) -> str | None:
    """Say why a dialogue cannot be used, or None: one system text at most, then turns in order."""
    said = list(dialogue.messages)
    if said and said[0].role == "system":
        said = said[1:]
    roles = [m.role for m in said]
    # Questions alone, as in Spec-Bench, are turns too if the verifier answers them.
    alone = answers == "regenerate" and set(roles) == {"user"}
    used = to_use(dialogue, answers).messages
    faults = {
        "a role other than user and assistant": not set(roles) <= {"user", "assistant"},
        "no user's turn at the beginning": roles[:1] != ["user"],
        "an empty message": not all(m.content.strip() for m in used),
        "half a character": any(_is_broken(m.content) for m in used),
        "two turns of one side in a row": not alone and any(a == b for a, b in pairwise(roles)),
        "no answer given": answers == "given" and "assistant" not in roles,
    }
    return next((why for why, holds in faults.items() if holds), None)


def _is_broken(text: str) -> bool:
    """Whether JSON escapes gave one half of a surrogate pair, which no tokenizer takes."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def to_use(dialogue: Dialogue, answers: Answers) -> Dialogue:
    """Return a dialogue as it is used: its questions alone, or up to its last given answer."""
    said = dialogue.messages
    if answers == "regenerate":
        said = tuple(m for m in said if m.role != "assistant")
    elif said and said[-1].role == "user":
        said = said[:-1]
    return Dialogue(dialogue.id, said)

"""Whether a loss mask covers the assistant's text, judged from the token ids alone.

The verifier's chat template says how an assistant's turn begins and which token ends it. Between
the two every token is the assistant's. The ending token and what the template puts after it may be
under the mask or not: producers differ, and either trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truetap.harness.errors import TruetapError
from truetap.pipeline.foreign.producers.sample import Problem

_QUESTION, _ANSWER = "Which?", "Zebra"


@dataclass(frozen=True)
class Turn:
    """Where one assistant's turn is: its text, and what may follow under the mask."""

    start: int
    end: int
    tail: int
    loose_start: bool
    """True if the first token joins the template's last line break with the text."""


class MaskJudge:
    """Judges masks by one verifier's template; ``why_not`` says why it cannot."""

    def __init__(self, model: Path) -> None:
        self.why_not: str | None = None
        self._tokenizer: Any = None
        try:
            from truetap.pipeline import chat

            self._tokenizer = chat.load_tokenizer(model)
            self._marks()
        except TruetapError as error:
            self.why_not = str(error)
        except Exception as error:  # a template is a program of somebody else's
            self.why_not = f"the verifier's chat template cannot be rendered: {error}"

    def _marks(self) -> None:
        """Find the tokens before and after an assistant's text."""
        asked = [{"role": "user", "content": _QUESTION}]
        answered = [*asked, {"role": "assistant", "content": _ANSWER}]
        whole = self._render(answered)
        before = self._render(asked)
        position = whole.index(_ANSWER)
        begin = len(before) if whole.startswith(before) else whole.index(_QUESTION) + len(_QUESTION)
        header, ending = whole[begin:position], whole[position + len(_ANSWER) :]
        self._header = self._ids(header)
        self._stripped = self._ids(header.rstrip())
        self._ending = self._ids(ending)
        special = set(self._tokenizer.all_special_ids) | set(
            self._tokenizer.get_added_vocab().values()
        )
        if not self._stripped:
            self.why_not = "the verifier's chat template marks no assistant's turn"
        elif not self._ending or self._ending[0] not in special:
            self.why_not = "the verifier's chat template ends a turn with no token of its own"

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False)
        return text

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return found

    def turns(self, token_ids: NDArray[np.int64]) -> list[Turn]:
        """Return the assistant's turns."""
        ids = token_ids.tolist()
        found, position = [], 0
        short, full = self._stripped, self._header
        while position <= len(ids) - len(short):
            if ids[position : position + len(short)] != short:
                position += 1
                continue
            exact = ids[position : position + len(full)] == full
            start = position + len(full if exact else short)
            end = next((i for i in range(start, len(ids)) if ids[i] == self._ending[0]), len(ids))
            tail = end
            for expected in self._ending:
                if tail < len(ids) and ids[tail] == expected:
                    tail += 1
            found.append(Turn(start, end, tail, loose_start=not exact))
            position = max(end, position + 1)
        return found

    def judge(
        self,
        token_ids: NDArray[np.int64],
        mask: NDArray[np.int64],
        messages: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Problem] | None:
        """Return what is wrong with a mask; None if it cannot be judged."""
        if self.why_not is not None or len(mask) != len(token_ids):
            return None
        turns = [turn for turn in self.turns(token_ids) if turn.end > turn.start]
        if not turns:
            return None
        covered = mask != 0
        allowed = np.zeros(len(mask), dtype=bool)
        problems = []
        for turn in turns:
            allowed[turn.start : turn.tail] = True
            text = covered[turn.start + turn.loose_start : turn.end]
            if text.any() and not text.all():
                problems.append(
                    Problem(
                        "mask_missing",
                        f"the loss mask misses {int((~text).sum())} of the {len(text)} tokens of "
                        f"an assistant's turn (tokens {turn.start} to {turn.end})",
                    )
                )
        outside = covered & ~allowed
        if outside.any():
            problems.append(self._outside(token_ids, outside, covered & allowed))
        if messages and (problem := self._other_text(token_ids, turns, messages)):
            problems.append(problem)
        return problems

    def _outside(
        self, token_ids: NDArray[np.int64], outside: NDArray[np.bool_], right: NDArray[np.bool_]
    ) -> Problem:
        text = self._tokenizer.decode(token_ids[outside][:24].tolist())
        instead = "" if right.any() else ", and none of the assistant's"
        return Problem(
            "mask_other",
            f"the loss mask covers {int(outside.sum())} tokens that are not the assistant's"
            f"{instead}: {text[:60]!r}",
        )

    def _other_text(
        self,
        token_ids: NDArray[np.int64],
        turns: Sequence[Turn],
        messages: Sequence[Mapping[str, Any]],
    ) -> Problem | None:
        """Compare the last turn with the conversation's: a dataset's columns can come apart."""
        said = [str(m["content"]) for m in messages if m.get("role") == "assistant"]
        last = turns[-1]
        text = self._tokenizer.decode(token_ids[last.start : last.end].tolist()).strip()
        if not said or not text or text in said[-1] or said[-1].strip() in text:
            return None
        return Problem(
            "messages",
            f"its tokens say {text[:40]!r} where the conversation has {said[-1][:40]!r}",
        )

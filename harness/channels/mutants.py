"""Deliberately wrong reply channels: the proof that the REPLY clauses can fail.

``FAULT@CHANNEL`` names one, e.g. ``first-of-list@collect``: a real channel, real answers, and one
fault that somebody's code, or an engine's, really had. The fault ``none`` is the negative control.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truetap.harness import values
from truetap.harness.channel import Channel, ChannelSession
from truetap.harness.errors import UsageError
from truetap.harness.model import EngineSpec, Environment


@dataclass(frozen=True)
class Question:
    """A call on its way to the real channel."""

    session: ChannelSession
    method: str
    args: tuple[Any, ...]
    ranks: tuple[int, ...] | None
    deadline_s: float
    previous: Mapping[int, Any]
    """The answer of the last call that succeeded."""
    failed: bool
    """Whether the call before this one failed."""

    def ask(self, ranks: Sequence[int] | None = (), deadline_s: float = 0) -> Mapping[int, Any]:
        """Ask the real channel; () and 0 stand for what was asked."""
        return self.session.ask(
            self.method,
            *self.args,
            ranks=self.ranks if ranks == () else ranks,
            deadline_s=deadline_s or self.deadline_s,
        )


@dataclass(frozen=True)
class Fault:
    """One fault, and the clause that must catch it."""

    caught_by: str
    says: str
    answer: Callable[[Question], Mapping[int, Any]]


def _each(change: Callable[[Any], Any]) -> Callable[[Question], Mapping[int, Any]]:
    return lambda question: {rank: change(value) for rank, value in question.ask().items()}


def _inside(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Apply ``change`` to every tensor in a value."""

    def deep(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: deep(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(deep(item) for item in value)
        return change(value) if values.is_tensor(value) else value

    return deep


def _descriptor(tensor: Any) -> Any:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), 1]


def _half(tensor: Any) -> Any:
    import torch

    return tensor.to(torch.float16)


def _one_bit(tensor: Any) -> Any:
    import torch

    if not tensor.numel():
        return tensor
    flat = tensor.clone().reshape(-1)
    flat.view(torch.uint8)[0] ^= 1
    return flat.reshape(tensor.shape)


def _swapped(question: Question) -> Mapping[int, Any]:
    answer = question.ask()
    return dict(zip(answer, reversed(list(answer.values())), strict=True))


def _silent(question: Question) -> Mapping[int, Any]:
    try:
        return question.ask()
    except Exception:
        if question.ranks is None or question.method != "probe_raise":
            raise
        return dict.fromkeys(question.ranks)


def _text_only(question: Question) -> Mapping[int, Any]:
    try:
        return question.ask()
    except Exception as error:
        raise RuntimeError(re.sub(r"(?i)\brank \d+", "a worker", str(error))) from None


def _patient(question: Question) -> Mapping[int, Any]:
    if question.method == "probe_sleep":
        return question.ask(deadline_s=10 * question.deadline_s)
    return question.ask()


def _waits_for_the_deadline(question: Question) -> Mapping[int, Any]:
    try:
        return question.ask()
    except Exception:
        if question.args == ("torch_dtype",):
            time.sleep(question.deadline_s / 2)
        raise


def _as_text(question: Question) -> Mapping[int, Any]:
    if question.args == ("torch_dtype",):
        return dict.fromkeys(range(question.session.world_size), "torch.bfloat16")
    return question.ask()


def _stale(question: Question) -> Mapping[int, Any]:
    return question.previous if question.failed and question.previous else question.ask()


def _broadcasts_first(question: Question) -> Mapping[int, Any]:
    try:
        return question.ask()
    except Exception:
        if question.ranks is not None and max(question.ranks) >= question.session.world_size:
            question.session.recover()
            question.session.ask("probe_identity", ranks=None, deadline_s=question.deadline_s)
        raise


def _missing_is_none(question: Question) -> Mapping[int, Any]:
    if question.method == "probe_no_such_method":
        return dict.fromkeys(range(question.session.world_size))
    return question.ask()


FAULTS: dict[str, Fault] = {
    "none": Fault("", "nothing: the negative control", lambda question: question.ask()),
    "ranks-swapped": Fault("REPLY-002", "replies in the order of arrival", _swapped),
    "everybody-answers": Fault(
        "REPLY-002", "all ranks' replies where one was asked", lambda q: q.ask(ranks=None)
    ),
    "first-of-list": Fault(
        "REPLY-003",
        "a list taken for a wrapper: reply[0]",
        _each(lambda value: value[0] if isinstance(value, list) and value else value),
    ),
    "list-kept": Fault("REPLY-003", "a wrapper taken for the payload", _each(lambda v: [v])),
    "tuple-as-list": Fault(
        "REPLY-003",
        "tuples arrive as lists",
        _each(lambda value: list(value) if isinstance(value, tuple) else value),
    ),
    "descriptors": Fault(
        "REPLY-003", "[dtype, shape, index] in place of tensors", _each(_inside(_descriptor))
    ),
    "half-precision": Fault("REPLY-004", "tensors arrive as float16", _each(_inside(_half))),
    "one-bit": Fault("REPLY-004", "one bit of every tensor is flipped", _each(_inside(_one_bit))),
    "silent-rank": Fault("REPLY-005", "a rank that was not asked fails unseen", _silent),
    "nameless-rank": Fault("REPLY-005", "errors do not say which rank failed", _text_only),
    "no-deadline": Fault("REPLY-006", "waits past the deadline", _patient),
    "unserialisable-hangs": Fault(
        "REPLY-007", "a reply that cannot travel is noticed late", _waits_for_the_deadline
    ),
    "unserialisable-as-text": Fault("REPLY-007", "arrives as text instead", _as_text),
    "stale-reply": Fault("REPLY-008", "after a failure, the reply of an earlier call", _stale),
    "broadcast-first": Fault("REPLY-009", "workers run before the refusal", _broadcasts_first),
    "missing-is-none": Fault("REPLY-010", "a missing method returns None", _missing_is_none),
}
"""All faults by name."""


class MutantChannel:
    """A real channel with one fault."""

    def __init__(self, fault: str, inner: Channel) -> None:
        if fault not in FAULTS:
            raise UsageError(
                f"there is no channel mutant named {fault!r}",
                remedy=f"mutants: {', '.join(FAULTS)}",
            )
        self._fault = FAULTS[fault]
        self._inner = inner
        self.name = f"{fault}@{inner.name}"

    def open(self, spec: EngineSpec, *, scratch: Path) -> MutantChannelSession:
        """Open the real channel."""
        return MutantChannelSession(self._fault, self._inner.open(spec, scratch=scratch))


class MutantChannelSession:
    """A real session whose answers are wrong on the way out."""

    def __init__(self, fault: Fault, inner: ChannelSession) -> None:
        self.world_size = inner.world_size
        self._fault, self._inner = fault, inner
        self._previous: Mapping[int, Any] = {}
        self._failed = False

    def ask(
        self, method: str, *args: Any, ranks: Sequence[int] | None, deadline_s: float
    ) -> Mapping[int, Any]:
        """Ask for real, and make the fault."""
        asked = None if ranks is None else tuple(ranks)
        question = Question(
            self._inner, method, args, asked, deadline_s, self._previous, self._failed
        )
        self._failed = True
        answer = self._fault.answer(question)
        self._failed, self._previous = False, answer
        return answer

    def recover(self) -> bool:
        """Recover the real session; what is remembered of the failure stays."""
        return self._inner.recover()

    def environment(self) -> Environment:
        """Pass the real engine's facts through."""
        return self._inner.environment()

    def close(self) -> None:
        """Close the real session."""
        self._inner.close()

"""What a producer's reader hands over: files that it found, and samples read from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from truetap.harness.verifier import VerifierFacts

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with one file, in a word and in a sentence."""

    code: str
    text: str


class BadFile(Exception):
    """A file from which no sample can be read; carries the problem."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.problem = Problem(code, text)


@dataclass(frozen=True)
class Found:
    """A file of a producer's, not opened yet."""

    name: str
    """Path below the folder, with ``/``."""
    path: Path
    size: int
    mtime_ns: int
    problem: Problem | None = None
    """Why it must not be opened, e.g. a link that leaves the folder."""


@dataclass
class Sample:
    """The states of one request, as they lie on disk; nothing in it has been checked."""

    name: str
    token_ids: NDArray[np.int64]
    """``[T]``."""
    loss_mask: NDArray[np.int64] | None
    """One entry a token, or None if the producer keeps none."""
    states: torch.Tensor
    """``[R, slots, hidden]``; R should be T."""
    dtype: str
    """As stored; ``float8_e4m3fn`` states have been multiplied by their scales."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The conversation, if it is there."""
    problems: list[Problem] = field(default_factory=list)
    """What the reader saw that does not keep the sample from being judged."""

    def __post_init__(self) -> None:
        self.states = self.states.detach()  # saved as a parameter, they would ask for gradients


class Producer:
    """Reads one folder. A subclass knows one producer's layout and nothing of right and wrong."""

    name: ClassVar[str]
    pattern: ClassVar[str]
    """Names of its files, for messages."""
    last_norm: ClassVar[Literal["before", "after"]]
    """Where its own trainer wants the last slot: before or after the final norm."""
    why_norm: ClassVar[str]
    whole_mask_is_usual: ClassVar[bool] = False
    """True if it writes a mask of ones unless told otherwise."""

    def __init__(self, root: Path, verifier: VerifierFacts) -> None:
        self.root, self.verifier = root, verifier

    def files(self) -> Iterator[Found]:
        """Yield its files lazily, in any order."""
        raise NotImplementedError

    def read(self, found: Found) -> Iterator[Sample]:
        """Yield the samples of one file; ``BadFile`` if it cannot be read."""
        raise NotImplementedError

    def declared(self) -> tuple[int, ...] | None:
        """Return the boundaries that the data itself says it has, or None."""
        return None

    def notes(self) -> list[str]:
        """Return what else is worth saying about the folder."""
        return []


def joined(
    name: str, aux: torch.Tensor | None, last: torch.Tensor, hidden: int
) -> tuple[torch.Tensor, list[Problem]]:
    """Put ``aux [R, k * hidden]`` and ``last [R, hidden]`` into ``[R, k + 1, hidden]``."""
    import torch

    if last.ndim != 2 or (aux is not None and aux.ndim != 2):
        raise BadFile("shape", f"{name} has states of shape {tuple(last.shape)}, not [rows, width]")
    width = last.shape[1]
    if width != hidden:
        raise BadFile("width", f"its states are {width} wide, the verifier's are {hidden}")
    if aux is None:
        return last[:, None], []
    if aux.shape[1] % hidden or not aux.shape[1]:
        raise BadFile(
            "width",
            f"its states of inner blocks are {aux.shape[1]} wide, no multiple of {hidden}",
        )
    problems = []
    if len(aux) != len(last):
        text = f"{len(aux)} rows from inner blocks and {len(last)} from the last one"
        problems.append(Problem("rows", text))
    if aux.dtype != last.dtype:
        problems.append(Problem("shape", f"inner slots are {aux.dtype}, the last is {last.dtype}"))
    rows = min(len(aux), len(last))
    inner = aux[:rows].reshape(rows, -1, hidden)
    return torch.cat([inner, last[:rows, None].to(aux.dtype)], dim=1), problems


def numbers(value: Any, what: str) -> NDArray[np.int64]:
    """Return ``[T]`` integers out of a tensor or list that may have a batch axis of one."""
    import torch

    try:
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
        if tensor.is_floating_point() and not bool((tensor == tensor.round()).all()):
            raise ValueError("not whole numbers")
        flat = tensor.reshape(-1) if tensor.ndim == 2 and tensor.shape[0] == 1 else tensor
        if flat.ndim != 1:
            raise ValueError(f"of shape {tuple(tensor.shape)}")
        found: NDArray[np.int64] = flat.to(torch.int64).numpy()
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadFile("keys", f"its {what} are no list of whole numbers: {error}") from None
    return found

"""A hypothesis strategy: what goes wrong in a series of calls to an engine's workers.

A schedule says which rank fails how, at which call; whoever plays it, over a stand-in executor or
around a real one's workers, sees to it that this happens. Public names are importable from
``truetap.conformance.strategies``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from hypothesis import strategies as st

FaultKind = Literal["raises", "dies", "late", "junk", "altered", "stale", "twice"]
"""What a rank does at one call: its method ``raises``; it ``dies`` of an exception before the
method, as text through the executor; it is ``late``: past the deadline, its reply comes before the
next call; it sends ``junk``, or its reply ``altered`` in one field; it sends the ``stale`` reply of
its last call in place of its own; it sends its own ``twice``."""

FIELDS = ("truetap", "nonce", "rank", "world_size", "payload")
"""The fields of a reply's envelope that are altered."""


@dataclass(frozen=True)
class Fault:
    """What one rank does wrong at one call."""

    kind: FaultKind
    value: Any = None
    """Of ``junk`` and ``altered``: what is sent in place of the reply, or of the field."""
    field: str = ""
    """Of ``altered``: which one. It is left out if there is no value."""

    def __str__(self) -> str:
        value = f" {self.value!r}" if self.kind == "junk" else ""
        if self.kind == "altered":
            value = f" in {self.field}, to {self.value!r}" if self.value is not None else (
                f" in {self.field}, which is left out"
            )  # fmt: skip
        said = {"late": "is late", "junk": "sends", "altered": "is altered"}
        said |= {"stale": "sends its last reply again", "twice": "replies twice"}
        return said.get(self.kind, self.kind) + value


@dataclass(frozen=True)
class FaultyCall:
    """One call to all ranks."""

    ranks: tuple[int, ...] | None
    """Whose values are asked for; None: all."""
    faults: dict[int, Fault]
    """What goes wrong, by rank."""
    tensors: bool = False
    """Whether the values are tensors, which travel by files."""


@dataclass(frozen=True)
class FaultSchedule:
    """Calls one after the other."""

    world_size: int
    calls: tuple[FaultyCall, ...]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        for number, call in enumerate(self.calls):
            asked = "all" if call.ranks is None else ", ".join(map(str, call.ranks)) or "none"
            wrong = [f"rank {rank} {fault}" for rank, fault in sorted(call.faults.items())]
            yield f"call {number}, ranks {asked}: {'; '.join(wrong) or 'no fault'}"


def junk() -> st.SearchStrategy[Any]:
    """Draw builtins that are no reply of a worker's."""
    scalars = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4)
    return st.recursive(
        scalars | st.sampled_from([["bfloat16", [84, 128], 1], b"", 0.5]),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
        ),
        max_leaves=4,
    )


def faults(*, most_ranks: int = 4, most_calls: int = 8) -> st.SearchStrategy[FaultSchedule]:
    """Draw series of calls: most ranks answer as they should, most of the time."""
    kinds: list[FaultKind] = ["raises", "raises", "raises", "dies", "late", "stale", "twice"]
    wrong = (
        st.sampled_from(kinds).map(Fault)
        | st.builds(Fault, st.just("junk"), junk())
        | st.builds(Fault, st.just("altered"), junk(), st.sampled_from(FIELDS))
    )

    def calls_of(world_size: int) -> st.SearchStrategy[FaultSchedule]:
        rank = st.integers(0, world_size - 1)
        subsets = st.lists(rank, unique=True).map(lambda ranks: tuple(sorted(ranks)))
        call = st.builds(
            FaultyCall,
            ranks=st.none() | subsets,
            faults=st.just({}) | st.dictionaries(rank, wrong, max_size=2),
            tensors=st.booleans(),
        )
        made = st.lists(call, min_size=1, max_size=most_calls).map(tuple)
        return made.map(lambda calls: FaultSchedule(world_size, calls))

    return st.integers(1, most_ranks).flatmap(calls_of)

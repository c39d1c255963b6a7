"""A store of captures: its interface, the samples that it is given, and what one read showed.

A store keeps captures on disk between the engine that made them and the training that reads them.
``truetap.harness.store_script`` drives one with real processes and real faults; the STORE clauses
judge what was seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from truetap.harness.errors import IntegrityError
from truetap.harness.model import Capture, Environment, Float32

SHARD = 3
"""At most so many samples may be held back before they are on disk and readable."""
SLOTS, WIDTH = 4, 64
ROWS = (11, 8, 19, 9, 14, 8, 16, 10, 12, 17)
"""Tokens of each sample."""
DATA_BYTES = min(ROWS) * SLOTS * WIDTH * 2
"""A file smaller than this cannot hold the states of any sample: an index, a lock, a note."""

Kept = tuple[Sequence[int], Float32]
"""Token ids of one capture, and its states ``[tokens, boundaries, hidden]``."""


class CaptureStore(Protocol):
    """One way to keep captures; registered in the entry-point group ``truetap.stores``.

    Instances are sent to other processes by pickle, so their class is one that can be imported.
    """

    name: str

    def write(self, folder: Path, captures: Iterable[Capture]) -> Sequence[str]:
        """Keep the captures that ``folder`` does not hold yet; return the keys written now.

        ``captures`` is asked for one at a time and may fail; no more than ``SHARD`` may be held
        back before they can be read. Whatever goes wrong raises, and the error names the cause.
        """
        ...

    def read(self, folder: Path) -> Mapping[str, Kept]:
        """Return every complete capture by key; an absent folder holds none.

        Damage raises ``IntegrityError``, or leaves the captures out that it hit.
        """
        ...


def samples(changed: int | None = None) -> tuple[Capture, ...]:
    """Return the captures that a store is given: any finite bits of bfloat16, widened.

    The sample numbered ``changed`` has other tokens and states under the same key.
    """
    made = []
    for index, rows in enumerate(ROWS):
        random = np.random.default_rng((index, index == changed))
        bits = random.integers(0, 1 << 16, (rows, SLOTS, WIDTH), dtype=np.uint16)
        bits[(bits & 0x7F80) == 0x7F80] ^= 0x4000  # neither NaN nor infinite
        states = (bits.astype(np.uint32) << 16).view(np.float32)
        tokens = tuple(random.integers(0, 128_000, rows).tolist())
        made.append(Capture(f"sample-{index}", tokens, (2, 6, 9, 12), states, "bfloat16"))
    return tuple(made)


@dataclass(frozen=True)
class Read:
    """What one reading process got."""

    keys: frozenset[str] = frozenset()
    wrong: Mapping[str, str] = field(default_factory=dict)
    """Captures that are not what was written, by key, each with its first difference."""
    error: str = ""
    """Type and message of what was raised, or how the process died."""
    refused: bool = False
    """True if what was raised is an ``IntegrityError``."""

    @property
    def fault(self) -> str:
        """The first thing wrong with what was returned, or what was raised; empty if neither."""
        for key in sorted(self.wrong):
            return f"{key}: {self.wrong[key]}"
        return f"the read raised {self.error}" if self.error else ""


def read(store: CaptureStore, folder: Path, written: Sequence[Capture]) -> Read:
    """Read a folder and compare all that comes with what was written."""
    expected = {capture.key: capture for capture in written}
    try:
        found = store.read(folder)
        wrong = {key: difference(expected.get(key), kept) for key, kept in found.items()}
    except Exception as error:
        return Read(error=told(error), refused=isinstance(error, IntegrityError))
    return Read(frozenset(found), {key: text for key, text in wrong.items() if text})


def difference(written: Capture | None, kept: Kept) -> str:
    """Say where a capture that was read first differs from the one written; empty if nowhere."""
    if written is None:
        return "no capture of that key was ever written"
    ids, states = tuple(kept[0]), np.asarray(kept[1], np.float32)
    if len(ids) != len(written.token_ids):
        return f"{len(ids)} token ids, {len(written.token_ids)} were written"
    for place, (got, sent) in enumerate(zip(ids, written.token_ids, strict=True)):
        if got != sent:
            return f"token {place} is {got}, {sent} was written"
    if states.shape != written.states.shape:
        return f"states {list(states.shape)}, {list(written.states.shape)} were written"
    unequal = states.view(np.uint32) != written.states.view(np.uint32)
    if not unequal.any():
        return ""
    first = tuple(int(axis) for axis in np.argwhere(unequal)[0])
    return (
        f"token {first[0]}, slot {first[1]}, channel {first[2]} is {states[first]:g}, "
        f"{written.states[first]:g} was written ({unequal.sum()} of {unequal.size} values differ)"
    )


def told(error: BaseException | None) -> str:
    """Return types and messages of an error and of what it was raised from."""
    parts = []
    while error is not None:
        parts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return ", from ".join(parts)


@dataclass(frozen=True)
class Outcome:
    """How a writer ended: with the keys that it says it wrote, an error, or a signal."""

    written: tuple[str, ...] | None = None
    error: str = ""

    @property
    def ended(self) -> str:
        """Tell it in words."""
        return f"raised {self.error}" if self.written is None else f"wrote {list(self.written)}"


@dataclass(frozen=True)
class Mended:
    """Something went wrong with a writer or a file; what a reader saw and the next writer did."""

    what: str
    before: frozenset[str]
    """Keys that could be read just before it."""
    read: Read
    resumed: Outcome
    """The next writer, given all samples."""
    rewritten: tuple[str, ...]
    """Files large enough to hold a sample that were whole, and that it wrote again."""
    after: Read
    size: int
    """Bytes of the folder at the end."""
    outcome: Outcome = field(default_factory=Outcome)
    """How the writer ended that met the fault."""
    cause: str = ""
    """What an error of that writer must name."""


@dataclass(frozen=True)
class Damage:
    """One file of a complete store was damaged, and it was read."""

    file: str
    how: str
    read: Read


@dataclass(frozen=True)
class Pair:
    """Two writers of all samples in one folder: the second came when the first was at a place."""

    place: str
    first: Outcome
    second: Outcome
    reads: tuple[tuple[str, Read], ...]
    """What could be read when the first went on after the second's end, by its places; then."""


@dataclass
class StoreObservation:
    """What was seen of one store; each field is named by what was done."""

    everything: frozenset[str]
    """The keys of all samples."""
    clean: Outcome = field(default_factory=Outcome)
    """All samples written, undisturbed."""
    clean_read: Read = field(default_factory=Read)
    files: Mapping[str, int] = field(default_factory=dict)
    """Its files and their bytes."""
    again: Outcome = field(default_factory=Outcome)
    """The same, written once more."""
    rewritten_again: tuple[str, ...] = ()
    held: list[tuple[str, tuple[Read, ...]]] = field(default_factory=list)
    """At each place where the writer was held: what concurrent readers saw."""
    raced: list[tuple[int, Read]] = field(default_factory=list)
    """Readers that read on while a writer worked: how often, and the first bad or the last read."""
    killed: list[Mended] = field(default_factory=list)
    damaged: list[Damage] = field(default_factory=list)
    stopped: Mended | None = None
    """Killed when 6 of 10 samples had been handed over."""
    cut: dict[str, Mended] = field(default_factory=dict)
    """One file of a complete store cut in half, by file."""
    failed: list[Mended] = field(default_factory=list)
    """A write that the system refused, and a source of captures that failed."""
    changed: Outcome = field(default_factory=Outcome)
    """A complete store given all samples, one of them with other tokens under its key."""
    changed_key: str = ""
    changed_read: tuple[Read, Read] = (Read(), Read())
    """Read after that, compared with the old samples and with the new ones."""
    pairs: list[Pair] = field(default_factory=list)
    profile: str = "store"
    """The clauses that judge this."""
    environment: Environment = field(default_factory=lambda: Environment({}, {}))


def after_change(index: int) -> tuple[Capture, ...]:
    """Return the samples as they are after the change of one."""
    old = list(samples())
    old[index] = replace(samples(index)[index], key=old[index].key)
    return tuple(old)

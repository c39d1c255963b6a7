"""A reply channel, and one drive of it: everything that the REPLY clauses judge.

A channel is a way to call a method of an engine's workers and get back what they returned:
truetap's own ``collect``, or the lines somebody wrote around ``collective_rpc``. It is driven once
through a fixed script against real workers; each clause is then a judgement over what was seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from truetap.harness.model import EngineSpec, Environment

DEADLINE_S = 30.0
"""Deadline of calls that should answer at once: generous, as two cores serve several workers."""
SHORT_DEADLINE_S = 3.0
"""Deadline of the call whose worker sleeps twice as long, and of those that meet its late reply."""
KINDS = (
    "none",
    "scalars",
    "text",
    "bytes",
    "dict",
    "empty_list",
    "list_of_one_tensor",
    "world_many",
    "layers",
    "tuple_of_tensors",
    "dict_of_tensors",
    "nested",
    "set",
    "small_tensor",
    "kib_tensor",
    "mib_array",
    "numpy_array",
    "strided",
    "zero_dim",
    "empty_tensor",
)
"""Payloads of ``truetap.harness.probe_worker``, by name."""
FP8 = "fp8"


class ChannelSession(Protocol):
    """A running engine whose workers can be asked."""

    world_size: int

    def ask(
        self, method: str, *args: Any, ranks: Sequence[int] | None, deadline_s: float
    ) -> Mapping[int, Any]:
        """Call a worker method on every rank; return what the ``ranks`` asked for returned.

        None asks all. Whatever goes wrong raises.
        """
        ...

    def recover(self) -> bool:
        """Make the session usable again after a failure; False if only a new one is."""
        ...

    def environment(self) -> Environment:
        """Return facts about the running engine."""
        ...

    def close(self) -> None:
        """Release the engine. Safe to call twice."""
        ...


class Channel(Protocol):
    """One way to ask workers; registered in the entry-point group ``truetap.channels``."""

    name: str

    def open(self, spec: EngineSpec, *, scratch: Path) -> ChannelSession:
        """Start an engine whose workers have the methods of ``WORKER``."""
        ...


WORKER = "truetap.harness.probe_worker.ProbeWorker"
"""The ``worker_extension_cls`` that a channel's engine needs."""


@dataclass(frozen=True)
class Answer:
    """What one call gave."""

    method: str
    args: tuple[Any, ...]
    ranks: tuple[int, ...] | None
    deadline_s: float
    seconds: float
    values: Mapping[int, Any] | None = None
    error: str | None = None
    """Type and message of what was raised, if anything was."""

    @property
    def asked(self) -> str:
        """Name the call in a phrase."""
        return f"{self.method}({', '.join(map(repr, self.args))}) to ranks {self.ranks or 'all'}"


@dataclass
class ChannelObservation:
    """What was seen of one channel; each field is named by what was done."""

    profile: ClassVar[str] = "reply"
    world_size: int
    identity: list[Answer] = field(default_factory=list)
    """All ranks, the last rank alone, and all again."""
    values: dict[str, Answer] = field(default_factory=dict)
    """Each kind of payload, from all ranks."""
    expected: dict[str, list[Any]] = field(default_factory=dict)
    """What the same methods return when called without any engine, by kind: one entry per rank."""
    fp8: Answer | None = None
    """An fp8 tensor; late in the script, as with torch 2.8 it breaks an executor's queue."""
    layers_of_one: Answer | None = None
    """Four states from rank 0 alone: the call of the founding fault."""
    beyond: Answer | None = None
    """A rank that does not exist."""
    counts: tuple[Answer, Answer] | None = None
    """How many calls the workers had run, before and after that."""
    missing: Answer | None = None
    raises: Answer | None = None
    """Rank 0 raises, all are asked: the other ranks' replies are left to be read."""
    after_raises: Answer | None = None
    raises_unasked: Answer | None = None
    """The last rank raises, only rank 0 is asked."""
    unserialisable: Answer | None = None
    after_unserialisable: Answer | None = None
    late: Answer | None = None
    """Rank 0 sleeps past the deadline."""
    after_late: list[Answer] = field(default_factory=list)
    """Asked at once, and again when the sleeper has woken."""
    environment: Environment = field(default_factory=lambda: Environment({}, {}))


class _Driver:
    """Asks, times, and opens a new session when the channel cannot go on with the old one."""

    def __init__(self, channel: Channel, spec: EngineSpec, scratch: Path) -> None:
        self._channel, self._spec, self._scratch = channel, spec, scratch
        self._opened = 0
        self.session = self._open()

    def ask(
        self,
        method: str,
        *args: Any,
        ranks: tuple[int, ...] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> Answer:
        started = time.monotonic()
        values, error = None, None
        try:
            values = self.session.ask(method, *args, ranks=ranks, deadline_s=deadline_s)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        seconds = time.monotonic() - started
        return Answer(method, args, ranks, deadline_s, seconds, values, error)

    def go_on(self) -> None:
        if not self.session.recover():
            self.session.close()
            self.session = self._open()

    def _open(self) -> ChannelSession:
        self._opened += 1
        scratch = self._scratch / f"engine-{self._opened}"
        scratch.mkdir(parents=True)
        return self._channel.open(self._spec, scratch=scratch)


def observe_channel(
    channel: Channel,
    spec: EngineSpec,
    scratch: Path,
    say: Callable[[str], None] = lambda _: None,
    *,
    short_deadline_s: float = SHORT_DEADLINE_S,
) -> ChannelObservation:
    """Drive ``channel`` through the script; takes a minute with a live engine."""
    say(f"opening {channel.name}")
    driver = _Driver(channel, spec, scratch)
    try:
        return _script(driver, short_deadline_s, say)
    finally:
        driver.session.close()


def _script(driver: _Driver, short_s: float, say: Callable[[str], None]) -> ChannelObservation:
    from truetap.harness.probe_worker import expected_value

    world = driver.session.world_size
    last = world - 1
    seen = ChannelObservation(world, environment=driver.session.environment())
    say("asking for values of every kind")
    for ranks in (None, (last,), None):
        seen.identity.append(driver.ask("probe_identity", ranks=ranks))
    for kind in (*KINDS, FP8):
        seen.expected[kind] = [expected_value(kind, rank, world) for rank in range(world)]
    for kind in KINDS:
        seen.values[kind] = driver.ask("probe_value", kind)
    seen.layers_of_one = driver.ask("probe_value", "layers", ranks=(0,))

    say("asking for a rank and a method that are not there")
    before = driver.ask("probe_count")
    seen.beyond = driver.ask("probe_identity", ranks=(world,))
    driver.go_on()
    seen.counts = before, driver.ask("probe_count")
    seen.missing = driver.ask("probe_no_such_method")
    driver.go_on()

    say("letting a rank raise, a value be unserialisable, and a rank sleep")
    seen.raises = driver.ask("probe_raise", [0], "asked to fail")
    seen.after_raises = driver.ask("probe_echo", "after-raises")
    driver.go_on()
    seen.raises_unasked = driver.ask("probe_raise", [last], "asked to fail", ranks=(0,))
    driver.go_on()
    seen.unserialisable = driver.ask("probe_value", "torch_dtype", deadline_s=4 * short_s)
    seen.after_unserialisable = driver.ask("probe_echo", "after-unserialisable")
    driver.go_on()
    seen.fp8 = driver.ask("probe_value", FP8)
    driver.go_on()
    seen.late = driver.ask("probe_sleep", 0, 2 * short_s, deadline_s=short_s)
    seen.after_late.append(driver.ask("probe_echo", "at-once", deadline_s=short_s))
    time.sleep(2 * short_s)  # not to wait for something: the late reply has to be there
    seen.after_late.append(driver.ask("probe_echo", "later", deadline_s=short_s))
    return seen

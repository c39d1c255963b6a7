"""Hypothesis strategies: batches of prompts, engine settings, calls of ``collective_rpc``.

Public: authors of other capture paths and callers can put theirs through the same. ``answer`` is a
small model of vLLM's executors, written by hand from observed behaviour. It shares nothing with
``truetap.harness.reply``, which decides by the facts that the releases' own code gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from packaging.version import Version

from truetap.conformance.strategies_faults import (
    Fault,
    FaultKind,
    FaultSchedule,
    FaultyCall,
    faults,
    junk,
)
from truetap.conformance.strategies_schedules import (
    Job,
    Move,
    Part,
    Schedule,
    Step,
    life,
    schedules,
)
from truetap.harness.reply import ABSENT, Call

__all__ = [
    "BOUNDARY_RELEASES",
    "DRAWS",
    "PAYLOADS",
    "WORLD_SIZES",
    "Fault",
    "FaultKind",
    "FaultSchedule",
    "FaultyCall",
    "Hangs",
    "Job",
    "Move",
    "Part",
    "Schedule",
    "Slice",
    "Step",
    "answer",
    "batches",
    "boundary_lists",
    "calls",
    "chunk_budgets",
    "examples",
    "faults",
    "junk",
    "life",
    "load_draws",
    "payload",
    "payloads",
    "schedules",
    "variants",
    "written",
]

DRAWS = {"dev": 5, "ci": 15, "gpu": 60, "nightly": 400}
"""How many examples each hypothesis profile draws; ``--draws`` chooses. All but ``nightly`` draw
the same ones every time."""


def load_draws(name: str, *, times: int = 1) -> None:
    """Make a hypothesis profile the present one.

    ``times``: how many examples are drawn for one of ``DRAWS``, where none of them asks an engine.
    """
    settings.register_profile(
        f"truetap-{name}",
        max_examples=times * DRAWS[name],
        deadline=None,  # engines are slow at first use
        derandomize=name != "nightly",
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
    )
    settings.load_profile(f"truetap-{name}")
    global _present  # noqa: PLW0603 - as hypothesis itself has one present profile
    _present = name


_present = "ci"


def examples(ci: int) -> int:
    """Return how many examples the present profile draws where ``ci`` draws so many: at least 1.

    For ``max_examples`` of tests whose examples cost more, or less, than others.
    """
    return max(1, ci * DRAWS[_present] // DRAWS["ci"])


@dataclass(frozen=True)
class Slice:
    """The first ``length`` tokens of the prompt with this index."""

    prompt: int
    length: int


def batches(lengths: Sequence[int], *, most: int = 20) -> st.SearchStrategy[list[Slice]]:
    """Draw batches of up to ``most`` prompts, each the beginning of one of the given lengths.

    Lengths lie around blocks of 16 and 64 tokens as often as anywhere; prompts that share their
    beginning, and equal ones, are frequent.
    """
    edges = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129]

    def of(prompt: int) -> st.SearchStrategy[Slice]:
        longest = lengths[prompt]
        near = [length for length in (*edges, longest) if length <= longest]
        any_length = st.integers(1, longest)
        return st.builds(Slice, st.just(prompt), st.sampled_from(near) | any_length)

    return st.lists(st.integers(0, len(lengths) - 1).flatmap(of), min_size=1, max_size=most)


def written(batch: Sequence[Slice]) -> str:
    """Return a batch as text: ``3[:12]`` is the first 12 tokens of prompt 3."""
    return ", ".join(f"{one.prompt}[:{one.length}]" for one in batch)


def boundary_lists(num_blocks: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw lists of boundaries of a verifier: in any order, with duplicates, some out of range."""
    inside = st.lists(st.integers(0, num_blocks), max_size=num_blocks + 2)
    ascending = st.sets(st.integers(0, num_blocks), min_size=1).map(sorted)
    outside = st.lists(st.integers(-2, num_blocks + 2), min_size=1, max_size=4)
    return (ascending | inside | outside).map(tuple)


def chunk_budgets(longest: int) -> st.SearchStrategy[int]:
    """Draw token budgets of a step, around and inside a prompt of ``longest`` tokens."""
    around = st.integers(max(1, longest - 2), longest + 2)
    return around | st.integers(1, longest) | st.sampled_from([16, 64, 128])


BOUNDARY_RELEASES = (
    "0.8.5",
    "0.9.0",
    "0.10.1",
    "0.10.2",
    "0.11.0",
    "0.11.1",
    "0.20.0",
    "0.24.0",
    "0.27.0",
    "0.32.0",
    "0.33.0",
)
"""Releases at which replies, futures or transport changed, each with its predecessor nearby."""

WORLD_SIZES = (1, 2, 4, 8)


class Hangs(Exception):
    """The model's way to say that a call would wait for ever."""


def calls() -> st.SearchStrategy[Call]:
    """Draw calls of an executor: executor, world size, rank and mode."""

    def complete(executor: Any, world: int, mode: dict[str, bool]) -> st.SearchStrategy[Call]:
        local = executor in {"uni", "external_launcher"}
        world = 1 if executor == "uni" else world
        ranks = [ABSENT, None, *range(world), -1, world]
        return st.builds(
            Call,
            executor=st.just(executor),
            world_size=st.just(world),
            rank=st.sampled_from(ranks),
            local_rank=st.integers(0, world - 1) if local else st.just(0),
            non_block=st.just(mode.get("non_block", False)),
            io_pool=st.just(mode.get("io_pool", False)),
            single_value=st.just(mode.get("single_value", False)),
        )

    modes: list[dict[str, bool]] = [
        {},
        {"non_block": True},
        {"non_block": True, "io_pool": True},
        {"single_value": True},
        {"single_value": True, "non_block": True},
    ]
    executors = ("mp", "uni", "external_launcher", "ray", "ray_v2")
    return st.tuples(
        st.sampled_from(executors), st.sampled_from(WORLD_SIZES), st.sampled_from(modes)
    ).flatmap(lambda drawn: complete(*drawn))


def payloads(world_size: int) -> st.SearchStrategy[list[Any]]:
    """Draw what the workers return: one payload per rank, all of one kind, all different."""
    return st.sampled_from(PAYLOADS).map(
        lambda kind: [payload(kind, rank, world_size) for rank in range(world_size)]
    )


PAYLOADS = (
    "none",
    "states",
    "list of one",
    "list of four",
    "list of world size",
    "tuple",
    "dict",
    "empty list",
    "1 MiB",
)
"""Kinds of payload. A list of as many states as there are ranks looks like their replies."""


def payload(kind: str, rank: int, world_size: int) -> Any:
    """Return the payload of one rank; its numbers say which rank and which item they are."""

    def states(item: int) -> Any:
        return np.full((3, 2), 100 * rank + item, dtype=np.float32)

    made: dict[str, Any] = {
        "none": None,
        "states": states(0),
        "list of one": [states(0)],
        "list of four": [states(item) for item in range(4)],
        "list of world size": [states(item) for item in range(world_size)],
        "tuple": (states(0), states(1)),
        "dict": {"rank": rank, "states": [states(0)]},
        "empty list": [],
        "1 MiB": np.full(2**18, rank, dtype=np.float32),
    }
    return made[kind]


def answer(version: str, call: Call, sent: list[Any]) -> Any:
    """Return what ``collective_rpc`` of a release returns to ``call``; ``sent`` has every rank's.

    Raises what the release raises, or ``Hangs``.
    """
    release = Version(version)
    if call.executor in {"uni", "external_launcher"}:
        return _one_process(release, call, sent[call.local_rank])
    if call.executor == "ray":
        return _ray(release, call, sent)
    if call.executor == "ray_v2" and release < Version("0.20.0"):
        raise LookupError("no such executor")
    return _multiproc(release, call, sent)


def _multiproc(release: Version, call: Call, sent: list[Any]) -> Any:
    bare = release >= Version("0.11.1")
    named = call.rank is not ABSENT
    if call.single_value or (release < Version("0.9.0") and (named or call.non_block)):
        raise TypeError("unexpected keyword argument")
    if call.rank is ABSENT or call.rank is None:
        chosen = list(range(call.world_size))
    elif call.rank >= call.world_size:
        raise IndexError("list index out of range")
    else:
        chosen = [call.rank]
    # Rank -1 names the last queue, but no worker: none of them answers.
    hangs = chosen == [-1]
    single = isinstance(call.rank, int)
    if call.non_block and not bare:
        if not call.io_pool:
            raise RuntimeError if release >= Version("0.10.2") else AttributeError
        return [_future(None if hangs else sent[rank], hangs=hangs) for rank in chosen]
    if hangs and not call.non_block:
        raise Hangs
    values = [] if hangs else [sent[rank] for rank in chosen]
    result = values[0] if single and bare and values else values
    return _future(result, hangs=hangs) if call.non_block else result


def _one_process(release: Version, call: Call, value: Any) -> Any:
    if call.rank is not ABSENT:
        raise TypeError("unexpected keyword argument")
    if call.single_value and release < Version("0.11.1"):
        raise TypeError("unexpected keyword argument")
    if call.non_block and release < Version("0.11.0"):
        raise TypeError("unexpected keyword argument")
    if call.non_block and release < Version("0.11.1"):
        return [_future(value)]
    result = value if call.single_value else [value]
    return _future(result) if call.non_block else result


def _ray(release: Version, call: Call, sent: list[Any]) -> Any:
    if release >= Version("0.33.0"):
        raise LookupError("no such executor")
    if call.rank is not ABSENT or call.single_value:
        raise TypeError("unexpected keyword argument")
    if call.non_block and release < Version("0.11.1"):
        raise TypeError("unexpected keyword argument")
    return _future(list(sent)) if call.non_block else list(sent)


def _future(value: Any, *, hangs: bool = False) -> Future[Any]:
    future: Future[Any] = Future()
    if not hangs:
        future.set_result(value)
    return future


def variants(call: Call) -> list[Call]:
    """Return ``call`` as every other executor would be asked, for exhaustive tables."""
    executors: tuple[Any, ...] = ("mp", "uni", "external_launcher", "ray", "ray_v2")
    return [replace(call, executor=executor) for executor in executors]

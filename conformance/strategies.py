"""Hypothesis strategies for ``collective_rpc``: calls, payloads, and what each release answers.

Public: authors of other callers can put theirs through the same calls. ``answer`` is a small model
of vLLM's executors, written by hand from observed behaviour. It shares nothing with
``truetap.harness.reply``, which decides by the facts that the releases' own code gave.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from packaging.version import Version

from truetap.harness.reply import ABSENT, Call

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

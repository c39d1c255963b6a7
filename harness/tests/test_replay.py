"""Replays what real engines replied through the normaliser, against what their workers sent.

Recordings prove that we read what releases said, not what they say today: that is for live runs.
No torch: states are compared by the digests of their bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from truetap.harness import cassette, reply, values
from truetap.harness.cassette import Cassette
from truetap.harness.cassette_tree import Raised, RecordedTensor
from truetap.harness.errors import TruetapError
from truetap.harness.reply import ABSENT, Call, normalise
from truetap.harness.surface import facts

CASSETTES = Path(__file__).resolve().parents[2] / "fixtures" / "cassettes"
FOLDERS = sorted(path.parent for path in CASSETTES.glob("*/*/manifest.json"))
# An fp8 tensor in a reply breaks the executor's queue (torch cannot pickle it); no call is clean.
CLEAN = [folder for folder in FOLDERS if not folder.name.endswith("-fp8")]

read = cache(cassette.read)
surface = cache(facts.load)

DISTURBING = {"probe_raise", "probe_no_such_method", "probe_sleep", "probe_end"}
"""Methods after which replies may be left behind, or workers be gone."""

Normaliser = Callable[..., dict[int, Any]]

IN_TRANSPORT = {
    "layers": "list_of_tensors",
    "tensor": "tensor",
    "list_of_one_tensor": "list_of_tensors",
    "world_many": "list_of_tensors",
    "tuple_of_tensors": "tuple_of_tensors",
    "dict_of_tensors": "dict_of_tensors",
    "numpy_array": "numpy_array",
    "mib_array": "numpy_array",
    "numpy_scalar": "numpy_scalar",
    "small_tensor": "tensor_under_256_bytes",
    "kib_tensor": "tensor",
    "torch_dtype": "torch_dtype",
}
"""Kinds of value in the words of the facts' transport; others are builtins, or not in the facts."""


def states(rank: int, count: int, tokens: int) -> list[RecordedTensor]:
    """What ``probe_worker.layers`` makes, worked out without torch, as digests."""
    size = tokens * 8
    first = rank * count * size
    numbers = (np.arange(first, first + count * size) % 251).astype(np.float32)
    upper = (numbers.view(np.uint32) >> 16).astype(np.uint16)  # small integers: exact in bfloat16
    return [
        RecordedTensor(
            "tensor", "bfloat16", (tokens, 8), hashlib.sha256(part.tobytes()).hexdigest()
        )
        for part in upper.reshape(count, size)
    ]


def sent(call: cassette.Call, rank: int, world: int) -> Any:
    """What the workers returned to a recorded call; KeyError if it is not known without torch."""
    method, args = call.request.method, call.request.args
    if method == "probe_layers":
        return states(rank, *args)
    if method == "probe_identity":
        return {"rank": rank, "world_size": world}
    known: dict[str, Any] = {
        "none": None,
        "scalars": [True, rank, -(2**63) + rank, 0.1 + rank],
        "text": f"rank {rank}: Grüße, 世界",
        "bytes": bytes([rank, 0, 255]),
        "dict": {"rank": rank, "world_size": world, "rows": [3, 4], "none": None},
        "empty_list": [],
        "layers": states(rank, 4, 3),
        "list_of_one_tensor": states(rank, 1, 3),
        "world_many": states(rank, world, 3),
        "tuple_of_tensors": tuple(states(rank, 2, 3)),
        "dict_of_tensors": dict(zip("ab", states(rank, 2, 3), strict=True)),
        "set": {rank, 100},
    }
    if method != "probe_value":
        raise KeyError(method)
    return known[args[0]]


def declared(call: cassette.Call, world: int) -> Call:
    mode = call.mode
    kind = call.request.args[0] if call.request.method == "probe_value" else ""
    if call.request.method == "probe_layers":
        kind = "layers"
    executor: Any = mode.executor
    return Call(
        executor=executor,
        world_size=world,
        rank=ABSENT if mode.rank == "absent" else mode.rank,
        non_block=mode.non_block,
        single_value=mode.single_value,
        io_pool=mode.io_pool,
        transport=mode.transport,
        insecure=mode.insecure,
        carries=IN_TRANSPORT.get(kind, "builtins"),
    )


def asked_for(call: Call) -> list[int]:
    return [call.rank] if isinstance(call.rank, int) else list(range(call.world_size))


def complaint(normaliser: Normaliser, tape: Cassette, call: cassette.Call) -> str:
    """What is wrong with what a normaliser makes of one recorded outcome; '' if nothing is."""
    release, world = tape.session.engine.release, tape.session.world_size
    asked = declared(call, world)
    where = f"vLLM {release}, {asked}, {call.name}"
    outcome = call.outcome
    if not isinstance(outcome, cassette.Reply):
        refusals = (reply.ModeNotOffered, reply.NeverReplies, reply.TensorsLost)
        try:
            normaliser([], asked, surface(release))
        except refusals:
            return ""
        except TruetapError as error:
            return f"{where}: it failed on the engine; here: {type(error).__name__}"
        return f"{where}: {outcome} on the engine, accepted here"
    try:
        got = normaliser(outcome.value, asked, surface(release))
    except reply.NeverReplies:
        futures = outcome.value if isinstance(outcome.value, list) else [outcome.value]
        unanswered = all(isinstance(future, Future) and future.exception() for future in futures)
        return "" if unanswered else f"{where}: called unanswerable, and it answered"
    except reply.TensorsLost:
        arrived = any(isinstance(leaf, RecordedTensor) for _, leaf in values.leaves(outcome.value))
        return f"{where}: refused as lost, and it arrived" if arrived else ""
    except Exception as error:
        return f"{where}: {type(error).__name__}: {error}"
    if list(got) != asked_for(asked):
        return f"{where}: payloads of ranks {list(got)}, asked were {asked_for(asked)}"
    for rank, payload in got.items():
        try:
            expected = sent(call, rank, world)
        except KeyError:
            continue
        crossed = call.mode.transport == "client" and not call.mode.insecure
        if crossed and isinstance(expected, (tuple, set)):
            expected = sorted(expected)  # msgpack knows lists only
        if payload != expected or type(payload) is not type(expected):
            return (
                f"{where}: rank {rank} sent {values.outline(expected)}, "
                f"the caller got {values.outline(payload)}"
            )
    return ""


def undisturbed(tape: Cassette) -> list[cassette.Call]:
    """The calls of a session that no earlier one can have left replies for."""
    clean = []
    for call in tape.calls:
        if call.request.method in DISTURBING:
            break
        if "after" in call.name or call.request.args in {("fp8",), ("torch_dtype",)}:
            break
        clean.append(call)
        if call.mode.non_block and isinstance(call.outcome, Raised):
            break  # refused when the workers had already been asked
    return clean


def ids(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def test_there_are_recordings_of_both_sides_of_the_break() -> None:
    releases = {read(folder).session.engine.release for folder in FOLDERS}
    assert {"0.11.0", "0.11.1", "0.12.0", "0.16.0", "0.20.2", "0.26.0", "0.32.0"} <= releases
    assert len(releases) >= 8


@pytest.mark.parametrize("folder", CLEAN, ids=ids)
def test_a_recording_reads_as_what_its_workers_sent(folder: Path) -> None:
    tape = read(folder)
    calls = undisturbed(tape)
    assert calls
    assert ids(folder) == tape.session.place
    found = [line for call in calls if (line := complaint(normalise, tape, call))]
    assert not found, "\n".join(found)


MUTANTS: dict[str, Normaliser] = {
    "reply[0]": lambda raw, call, _facts: {asked_for(call)[0]: raw[0]},
    "reply": lambda raw, call, _facts: {asked_for(call)[0]: raw},
    "isinstance guess": lambda raw, call, _facts: {
        asked_for(call)[0]: raw[0] if isinstance(raw, list) else raw
    },
}


@pytest.mark.parametrize(
    ("mutant", "release", "caught"),
    [
        ("reply[0]", "0.11.0", False),
        ("reply[0]", "0.11.1", True),
        ("reply[0]", "0.32.0", True),
        ("reply", "0.11.0", True),
        ("reply", "0.11.1", False),
        ("reply", "0.32.0", False),
        ("isinstance guess", "0.11.0", False),
        ("isinstance guess", "0.11.1", True),
        ("isinstance guess", "0.32.0", True),
    ],
)
def test_a_normaliser_that_guesses_is_caught_on_real_replies(
    mutant: str, release: str, caught: bool
) -> None:
    tape = read(CASSETTES / f"vllm-{release}" / "mp-tp2")
    line = complaint(MUTANTS[mutant], tape, tape["layers rank=1"])
    assert bool(line) == caught, line
    if caught:
        assert f"vLLM {release}, mp(unique_reply_rank=1)" in line
        assert "sent [4 x RecordedTensor], the caller got" in line


def own(call: cassette.Call) -> bool:
    """Whether every rank answered this sealed call, and no other."""
    assert isinstance(call.outcome, cassette.Reply)
    (nonce,) = call.request.args
    return all(isinstance(r, dict) and r.get("nonce") == nonce for r in call.outcome.value)


def sealed_calls(folder: Path) -> list[tuple[cassette.Call, Cassette]]:
    tape = read(folder)
    return [(call, tape) for call in tape.calls if call.request.method == "probe_sealed"]


@pytest.mark.parametrize("folder", FOLDERS, ids=ids)
def test_no_stale_reply_passes_a_nonce(folder: Path) -> None:
    """Each sealed call is read with its own nonce: refused if any rank answered another call."""
    for call, tape in sealed_calls(folder):
        if not isinstance(call.outcome, cassette.Reply):
            continue
        asked, release = declared(call, tape.session.world_size), tape.session.engine.release
        (nonce,) = call.request.args
        replies: list[Any] = call.outcome.value
        if own(call):
            assert list(normalise(replies, asked, surface(release), nonce=nonce)) == asked_for(
                asked
            )
        else:
            with pytest.raises(reply.StaleReply, match=f"vLLM {release}"):
                normalise(replies, asked, surface(release), nonce=nonce)


@pytest.mark.parametrize(
    ("case", "least"), [("mp-tp2-raised", 8), ("mp-tp2-timed-out", 8), ("mp-tp8-raised", 2)]
)
def test_every_engine_really_gave_stale_replies(case: str, least: int) -> None:
    """The fault is in all recorded releases; without a nonce it reads as an answer."""
    folders = [folder for folder in FOLDERS if folder.name == case]
    assert len(folders) >= least
    for folder in folders:
        stale = [
            call
            for call, _ in sealed_calls(folder)
            if isinstance(call.outcome, cassette.Reply) and not own(call)
        ]
        assert stale, f"{ids(folder)} holds no stale reply"
        tape = read(folder)
        asked = declared(stale[0], tape.session.world_size)
        assert isinstance(stale[0].outcome, cassette.Reply)
        got = normalise(stale[0].outcome.value, asked, surface(tape.session.engine.release))
        assert list(got) == asked_for(asked)


def test_no_engine_answers_for_a_worker_that_was_killed() -> None:
    """All give the call up in seconds, and say neither which rank is gone nor that one is."""
    folders = [folder for folder in FOLDERS if folder.name.endswith("-killed")]
    assert {read(folder).session.world_size for folder in folders} == {2, 8}
    for folder in folders:
        before, killed, *later = read(folder).calls
        assert isinstance(before.outcome, cassette.Reply)
        for call in (killed, *later):
            assert isinstance(call.outcome, Raised), f"{ids(folder)}, {call.name}"
            assert "killed" not in call.outcome.message
            assert "rank" not in call.outcome.message
        assert killed.seconds < 30

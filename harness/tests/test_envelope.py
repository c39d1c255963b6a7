"""Envelopes: what is wrong with a reply is always seen, and named."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truetap.conformance import strategies
from truetap.harness import envelope
from truetap.harness.errors import CouldNotRun

Replies = list[Any]
WORLD_SIZES = st.sampled_from([1, 2, 4, 8])


def contracted(nonce: str, world_size: int) -> Replies:
    def work(rank: int) -> Callable[[], dict[str, Any]]:
        return lambda: {"rows": 7 * rank, "missing": [], "path": None}

    return [envelope.seal(nonce, rank, world_size, work(rank)) for rank in range(world_size)]


def replaced(replies: Replies, which: int, /, **changes: Any) -> Replies:
    changed = [dict(reply) for reply in replies]
    changed[which] |= changes
    return changed


def without(replies: Replies, rank: int, *keys: str) -> Replies:
    kept = [dict(reply) for reply in replies]
    for key in keys:
        del kept[rank][key]
    return kept


def with_reply(replies: Replies, rank: int, reply: Any) -> Replies:
    return [*replies[:rank], reply, *replies[rank + 1 :]]


def rotated(replies: Replies, rank: int) -> Replies:
    """The same replies in another order; with one rank there is no other."""
    return replies[rank + 1 :] + replies[: rank + 1]


# Another order leaves a correct reply alone where there is only one rank.
FAULTS: dict[str, Callable[[Replies, int], Any]] = {
    "none": lambda replies, _: replies,
    "a tuple, which is as good": lambda replies, _: tuple(replies),
    "one missing": lambda replies, r: replies[:r] + replies[r + 1 :],
    "one twice": lambda replies, r: [*replies[: r + 1], *replies[r:]],
    "an extra one": lambda replies, _: [*replies, replies[0]],
    "another order": rotated,
    "a stale nonce": lambda replies, r: replaced(replies, r, nonce="0" * 16),
    "another rank": lambda replies, r: replaced(replies, r, rank=r + 1),
    "rank as text": lambda replies, r: replaced(replies, r, rank=str(r)),
    "another world size": lambda replies, r: replaced(replies, r, world_size=len(replies) + 1),
    "another version": lambda replies, r: replaced(replies, r, truetap=0),
    "no version": lambda replies, r: without(replies, r, "truetap"),
    "no nonce": lambda replies, r: without(replies, r, "nonce"),
    "no rank": lambda replies, r: without(replies, r, "rank"),
    "no world size": lambda replies, r: without(replies, r, "world_size"),
    "no payload": lambda replies, r: without(replies, r, "payload"),
    "a payload that is a tensor's descriptor": lambda replies, r: replaced(
        replies, r, payload=["bfloat16", [84, 128], 1]
    ),
    "an error that says nothing": lambda replies, r: replaced(
        without(replies, r, "payload"), r, error="boom"
    ),
    "a bare payload": lambda replies, r: with_reply(replies, r, {"rows": 7}),
    "a None among them": lambda replies, r: with_reply(replies, r, None),
    "a tensor's descriptor": lambda replies, r: with_reply(replies, r, ["bfloat16", [84, 128], 1]),
    "wrapped once more": lambda replies, _: [replies],
    "a bare reply": lambda replies, r: replies[r],
    "a list of tensors": lambda replies, _: [np.zeros((3, 4)) for _ in replies],
    "one array": lambda replies, _: np.zeros((len(replies), 4)),
    "None": lambda _replies, _: None,
    "text": lambda _replies, _: "ok",
    "nothing": lambda _replies, _: [],
}


@settings(deadline=None, max_examples=strategies.examples(400))
@given(world_size=WORLD_SIZES, data=st.data(), fault=st.sampled_from(sorted(FAULTS)))
def test_problems_are_found_exactly_where_there_are_some(
    world_size: int, data: st.DataObject, fault: str
) -> None:
    nonce = envelope.new_nonce()
    rank = data.draw(st.integers(0, world_size - 1))
    replies = contracted(nonce, world_size)
    seen = FAULTS[fault](replies, rank)
    found = envelope.problems(seen, nonce=nonce, world_size=world_size)
    same = isinstance(seen, list | tuple) and [*map(id, seen)] == [*map(id, replies)]
    assert bool(found) != same, (fault, found)
    if same:
        payloads = envelope.unseal(seen, nonce=nonce, world_size=world_size, method="flush")
        assert payloads == [reply["payload"] for reply in replies]
    else:
        with pytest.raises(CouldNotRun, match=r"^flush: ") as raised:
            envelope.unseal(seen, nonce=nonce, world_size=world_size, method="flush")
        assert found[0] in str(raised.value)
        assert "restart the engine" in raised.value.remedy


def test_each_problem_names_its_reply_and_what_is_wrong_with_it() -> None:
    replies = contracted("n", 4)
    replies = replaced(replies, 1, nonce="old")
    replies = replaced(replies, 2, rank=3)
    replies = replaced(replies, 3, world_size=8, truetap=2)
    assert envelope.problems([None, *replies[1:]], nonce="n", world_size=4) == [
        "reply 0 is a NoneType, not an envelope",
        "reply 1 answers another call (nonce 'old')",
        "reply 2 comes from rank 3",
        "reply 3 has envelope version 2",
        "reply 3 says world size 8",
    ]
    assert envelope.problems(replies[:1], nonce="n", world_size=4) == [
        "1 replies came from 4 ranks"
    ]
    assert envelope.problems(replies[0], nonce="n", world_size=1) == [
        "the reply is a dict, not a list of one envelope per rank"
    ]


def failing(error: BaseException) -> Callable[[], dict[str, Any]]:
    def work() -> dict[str, Any]:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "cause", "remedy"),
    [
        (KeyError("seven"), "KeyError: 'seven'", "see the engine's log"),
        (OSError(errno.EACCES, "denied"), "PermissionError: .*denied", "see the engine's log"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "OSError: .*No space",
            "free disk space",
        ),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "OSError: .*quota", "free disk space"),
    ],
)
def test_an_exception_travels_as_data_and_comes_out_with_rank_method_and_cause(
    error: Exception, cause: str, remedy: str
) -> None:
    sealed = envelope.seal("n", 1, 2, failing(error))
    assert sealed["error"]["errno"] == getattr(error, "errno", None)
    replies = [contracted("n", 2)[0], sealed]
    assert envelope.problems(replies, nonce="n", world_size=2) == []
    with pytest.raises(CouldNotRun, match=f"^truetap_flush failed on rank 1: {cause}") as raised:
        envelope.unseal(replies, nonce="n", world_size=2, method="truetap_flush")
    assert remedy in raised.value.remedy


def test_the_message_of_an_error_can_always_be_encoded() -> None:
    sealed = envelope.seal("n", 0, 1, failing(FileNotFoundError(2, "no file", "b\udcffd")))
    assert "b\\udcffd" in sealed["error"]["message"]
    assert sealed["error"]["message"].encode()


def test_an_exception_brings_the_last_frames_of_its_traceback() -> None:
    def deeper(levels: int) -> dict[str, Any]:
        if levels:
            return deeper(levels - 1)
        raise ValueError("b\udcff")

    text = envelope.seal("n", 0, 1, lambda: deeper(20))["error"]["traceback"]
    assert text.count("in deeper") == 4
    assert text.splitlines()[-1] == "ValueError: b\\udcff"


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyError


def test_an_exception_that_cannot_be_printed_travels_too() -> None:
    error = envelope.seal("n", 0, 1, failing(Mute()))["error"]
    assert error["type"] == "Mute"
    assert error["message"] == "(no message: its __str__ raises KeyError)"


@pytest.mark.parametrize(
    ("replies", "found"),
    [
        (slice(2, 3), []),
        (slice(0, 1), []),
        (slice(0, 0), ["0 replies came from 1 ranks"]),
        (slice(1, 3), ["2 replies came from 1 ranks"]),
    ],
)
def test_a_local_engine_gives_one_envelope_of_any_rank(replies: slice, found: list[str]) -> None:
    given_ = contracted("n", 4)[replies]
    assert envelope.problems(given_, nonce="n", world_size=4, local=True) == found
    assert envelope.problems(given_, nonce="n", world_size=4) != []


def test_a_local_engine_gives_no_rank_that_there_is_not() -> None:
    (reply,) = replaced(contracted("n", 4)[2:3], 0, rank=4)
    assert envelope.problems([reply], nonce="n", world_size=4, local=True) == [
        "reply 0 comes from rank 4"
    ]


def test_only_errors_are_sealed() -> None:
    with pytest.raises(KeyboardInterrupt):
        envelope.seal("n", 0, 1, failing(KeyboardInterrupt()))


class Text(str):
    """As torch's version, which is a subclass of str, is."""

    __slots__ = ()


@pytest.mark.parametrize(
    ("payload", "where"),
    [
        ({"torch": Text("2.13")}, r"payload\['torch'\] is a .*Text, not a builtin"),
        ({"rows": np.int64(7)}, r"payload\['rows'\] is a numpy.int64"),
        ({"shape": (7, 4)}, r"payload\['shape'\] is a builtins.tuple"),
        ({"keys": [["a"], {"a"}]}, r"payload\['keys'\]\[1\] is a builtins.set"),
        ({"deep": {"er": [0, object()]}}, r"payload\['deep'\]\['er'\]\[1\] is a builtins.object"),
        ({Text("key"): 1}, r"a key of payload is a .*Text"),
        ({"states": np.zeros(3)}, r"payload\['states'\] is a numpy.ndarray"),
        ([(1,)], r"payload\[0\] is a builtins.tuple"),
        ({"bytes": 2**64}, r"payload\['bytes'\] is an integer of more than 64 bits"),
        ({"path": "\udc80"}, r"payload\['path'\] is text that is not UTF-8"),
    ],
)
def test_what_the_serialiser_would_die_of_or_alter_is_refused_by_place(
    payload: Any, where: str
) -> None:
    with pytest.raises(CouldNotRun, match=f"rank 0: TypeError: {where}"):
        envelope.unseal(
            [envelope.seal("n", 0, 1, lambda: payload)], nonce="n", world_size=1, method="m"
        )


def test_all_builtins_pass_unchanged() -> None:
    payload = {"a": [None, True, 1, 2.5, "é", b"\0"], "b": {1: []}}
    sealed = envelope.seal("n", 0, 1, lambda: payload)
    assert sealed["payload"] == payload
    assert "error" not in sealed


def test_nonces_differ() -> None:
    nonces = {envelope.new_nonce() for _ in range(1000)}
    assert len(nonces) == 1000
    assert all(len(bytes.fromhex(nonce)) == 8 for nonce in nonces)

"""Normalising replies: one payload per rank, or a typed error, on every release."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truetap.conformance import strategies
from truetap.harness import envelope, reply, values
from truetap.harness.errors import TruetapError
from truetap.harness.reply import ABSENT, Call, normalise
from truetap.harness.surface import facts

Normaliser = Callable[..., dict[int, Any]]

surface = cache(facts.load)
RELEASES = facts.versions()


def asked_for(call: Call) -> list[int]:
    """The ranks whose payloads a call asks for."""
    if call.executor in {"uni", "external_launcher"}:
        return [call.local_rank]
    if isinstance(call.rank, int):
        return [call.rank]
    return list(range(call.world_size))


def same(sent: Any, got: Any) -> bool:
    places = zip(values.leaves(sent), values.leaves(got), strict=True)
    return values.outline(sent) == values.outline(got) and all(
        left == right and not values.difference(a, b) for (left, a), (right, b) in places
    )


def complaint(normaliser: Normaliser, version: str, call: Call, sent: list[Any]) -> str:
    """What is wrong with what a normaliser makes of a release's answer; '' if nothing is."""
    where = f"vLLM {version}, {call}"
    try:
        raw = strategies.answer(version, call, sent)
    except (TypeError, IndexError, AttributeError, RuntimeError, LookupError, strategies.Hangs):
        try:
            got = normaliser([], call, surface(version))
        except (reply.ModeNotOffered, reply.NeverReplies) as refusal:
            return "" if where in str(refusal) else f"{where}: {refusal} does not say where"
        except Exception as error:
            return f"{where}: {type(error).__name__} in place of a typed refusal"
        return f"{where}: the release refuses, the normaliser made {got!r} of it"
    if isinstance(raw, Future) and not raw.done():
        raw = [raw]
    pending = isinstance(raw, list) and any(isinstance(f, Future) and not f.done() for f in raw)
    try:
        got = normaliser(raw, call, surface(version))
    except reply.NeverReplies:
        return "" if pending else f"{where}: called unanswerable, but it answers"
    except Exception as error:
        return f"{where}: {type(error).__name__}: {error}"
    wanted = asked_for(call)
    if list(got) != wanted:
        return f"{where}: ranks {wanted} were asked, the payloads of {list(got)} came"
    for rank in wanted:
        if not same(sent[rank], got[rank]):
            lost, came = values.outline(sent[rank]), values.outline(got[rank])
            return f"{where}: rank {rank} sent {lost}, the caller got {came}"
    return ""


def every_call(world_sizes: tuple[int, ...] = (1, 2, 4)) -> list[Call]:
    modes: list[dict[str, bool]] = [
        {},
        {"non_block": True},
        {"non_block": True, "io_pool": True},
        {"single_value": True},
        {"single_value": True, "non_block": True},
    ]
    return [
        Call(executor, 1 if executor == "uni" else world, rank, **mode)
        for executor in ("mp", "uni", "external_launcher", "ray", "ray_v2")
        for world in ((1,) if executor == "uni" else world_sizes)
        for rank in (ABSENT, None, *range(world), -1, world)
        for mode in modes
    ]


CALLS = every_call()


@pytest.mark.parametrize("version", RELEASES)
def test_every_mode_of_every_release(version: str) -> None:
    found = [
        complaint(
            normalise,
            version,
            call,
            [strategies.payload(kind, rank, call.world_size) for rank in range(call.world_size)],
        )
        for call in CALLS
        for kind in ("list of four", "list of world size", "none")
    ]
    assert not (found := [line for line in found if line]), "\n".join(found[:10])


@given(
    st.sampled_from(strategies.BOUNDARY_RELEASES),
    strategies.calls().flatmap(
        lambda call: st.tuples(st.just(call), strategies.payloads(call.world_size))
    ),
)
@settings(max_examples=strategies.examples(300), deadline=None)
def test_each_rank_gets_its_own_payload(version: str, drawn: tuple[Call, list[Any]]) -> None:
    call, sent = drawn
    assert not complaint(normalise, version, call, sent)


def rank_of(call: Call) -> int:
    return asked_for(call)[0]


MUTANTS: dict[str, Normaliser] = {
    "reply[0]": lambda raw, call, _facts: {rank_of(call): raw[0]},
    "reply": lambda raw, call, _facts: {rank_of(call): raw},
    "isinstance guess": lambda raw, call, _facts: {
        rank_of(call): raw[0] if isinstance(raw, list) else raw
    },
    "list of world size is one per rank": lambda raw, call, _facts: (
        dict(enumerate(raw))
        if isinstance(raw, list) and len(raw) == call.world_size
        else {rank_of(call): raw}
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_normaliser_that_guesses_is_caught_by_release_and_mode(name: str) -> None:
    """Named rank, four boundaries: right on one side of 0.11.0 / 0.11.1 only, or not at all."""
    four = [strategies.payload("list of four", rank, 2) for rank in range(2)]
    world_many = [strategies.payload("list of world size", rank, 2) for rank in range(2)]
    call = Call("mp", 2, rank=1)
    found = {
        version: complaint(MUTANTS[name], version, call, four)
        or complaint(MUTANTS[name], version, call, world_many)
        for version in ("0.11.0", "0.11.1", "0.33.0")
    }
    caught = {version for version, line in found.items() if line}
    assert (
        caught
        == {
            "reply[0]": {"0.11.1", "0.33.0"},
            "reply": {"0.11.0"},
            "isinstance guess": {"0.11.1", "0.33.0"},
            "list of world size is one per rank": {"0.11.0", "0.11.1", "0.33.0"},
        }[name]
    )
    for version in caught:
        assert f"vLLM {version}, mp(unique_reply_rank=1)" in found[version]
    if name == "reply[0]":
        assert "rank 1 sent [4 x array], the caller got array" in found["0.11.1"]


def sealed(nonce: str, rank: int, world: int) -> dict[str, Any]:
    return envelope.seal(nonce, rank, world, lambda: {"rank": rank})


def corrupt(fault: str, raw: Any, call: Call) -> Any:
    """A reply as a faulty engine, or a faulty caller, would hand it on."""
    if isinstance(raw, Future):
        inner: Future[Any] = Future()
        inner.set_result(corrupt(fault, raw.result(), call))
        return inner
    if isinstance(raw, list) and raw and isinstance(raw[0], Future):
        return [corrupt(fault, future, call) for future in raw]
    wrapped = isinstance(raw, list)
    items = list(raw) if wrapped else [raw]
    changed = {
        "stale": [{**items[0], "nonce": "0" * 16}, *items[1:]],
        "other rank": [{**items[0], "rank": items[0]["rank"] + 1}, *items[1:]],
        "other world": [{**items[0], "world_size": 99}, *items[1:]],
        "one too many": [*items, items[0]],
        "one missing": items[1:],
        "bare payload": [items[0]["payload"], *items[1:]],
        "unwrapped": items[0],
        "reversed": items[::-1] if len(items) > 1 else [[items[0]]],
    }[fault]
    if wrapped or fault in {"unwrapped", "one too many", "one missing"}:
        return [raw] if not wrapped and fault == "unwrapped" else changed
    return changed[0]


FAULTS = (
    "stale",
    "other rank",
    "other world",
    "one too many",
    "one missing",
    "bare payload",
    "unwrapped",
    "reversed",
)


def answered(version: str, call: Call, sent: list[Any]) -> Any:
    """What the release answers, or None where it refuses or waits for ever."""
    try:
        raw = strategies.answer(version, call, sent)
    except (TypeError, IndexError, AttributeError, RuntimeError, LookupError, strategies.Hangs):
        return None
    futures = raw if isinstance(raw, list) else [raw]
    pending = any(isinstance(future, Future) and not future.done() for future in futures)
    return None if pending else raw


ANSWERED = [
    (version, call)
    for version in strategies.BOUNDARY_RELEASES
    for call in every_call(strategies.WORLD_SIZES)
    if answered(version, call, [{}] * call.world_size) is not None
]


@given(st.sampled_from(ANSWERED), st.sampled_from(FAULTS))
@settings(max_examples=strategies.examples(300), deadline=None)
def test_with_a_nonce_no_fault_gets_through(drawn: tuple[str, Call], fault: str) -> None:
    version, call = drawn
    nonce = envelope.new_nonce()
    sent = [sealed(nonce, rank, call.world_size) for rank in range(call.world_size)]
    raw = answered(version, call, sent)
    right = normalise(raw, call, surface(version), nonce=nonce)
    assert right == {rank: {"rank": rank} for rank in asked_for(call)}
    with pytest.raises(TruetapError, match=f"vLLM {version}, {call.executor}"):
        normalise(corrupt(fault, raw, call), call, surface(version), nonce=nonce)


def test_without_a_nonce_a_stale_reply_cannot_be_seen() -> None:
    """Why there are nonces: this is the best that any reader of the reply alone can do."""
    stale = [{"step": 1}, {"step": 2}]
    assert normalise(stale, Call("mp", 2), surface("0.33.0")) == {0: {"step": 1}, 1: {"step": 2}}


@pytest.mark.parametrize("payload", [None, [], [None], "text", np.zeros(2)])
def test_holes_are_payloads(payload: Any) -> None:
    """A method that stores on one rank returns None on the others, which is no failure."""
    got = normalise([payload, None], Call("mp", 2), surface("0.33.0"))
    assert list(got) == [0, 1]
    assert got[0] is payload


@pytest.mark.parametrize(
    ("carries", "insecure", "version", "arrives"),
    [
        ("tensor", False, "0.32.0", False),
        ("tensor", True, "0.32.0", True),
        ("list_of_tensors", True, "0.10.2", False),
        ("list_of_tensors", True, "0.11.0", True),
        ("tuple_of_tensors", True, "0.33.0", False),
        ("torch_dtype", False, "0.33.0", False),
        ("builtins", False, "0.8.5", True),
    ],
)
def test_payloads_that_the_client_loses_are_refused_unseen(
    carries: str, insecure: bool, version: str, arrives: bool
) -> None:
    call = Call("mp", 2, transport="client", insecure=insecure, carries=carries)
    raw = [["bfloat16", [84, 128], 1]] * 2
    if arrives:
        assert normalise(raw, call, surface(version)) == dict(enumerate(raw))
    else:
        with pytest.raises(reply.TensorsLost, match=carries):
            normalise(raw, call, surface(version))


def test_no_client_offers_reply_modes() -> None:
    with pytest.raises(reply.ModeNotOffered, match="no engine client"):
        normalise([1], Call("mp", 2, rank=0, transport="client"), surface("0.33.0"))


def test_data_parallel_replies_are_refused() -> None:
    call = Call("mp", 2, transport="client", data_parallel_size=2)
    with pytest.raises(reply.ModeNotOffered, match="engine 0 only"):
        normalise([1, 2], call, surface("0.33.0"))


def test_http_replies() -> None:
    call = Call("mp", 2, transport="http")
    got = normalise({"results": [{"a": 1}, None]}, call, surface("0.33.0"))
    assert got == {0: {"a": 1}, 1: None}
    for wrong in (["x"], {"results": "tensor(...)"}, {"results": ["tensor(...)", None]}):
        with pytest.raises(reply.ReplyNotAsContracted):
            normalise(wrong, call, surface("0.33.0"))


def test_an_aggregate_belongs_to_its_output_rank() -> None:
    call = Call("mp", 2, rank=1, aggregator=True)
    assert normalise({"kv": 1}, call, surface("0.11.1")) == {1: {"kv": 1}}
    with pytest.raises(reply.ModeNotOffered):
        normalise({"kv": 1}, call, surface("0.11.0"))
    later = Call("mp", 2, aggregator=True, non_block=True)
    future: Future[Any] = Future()
    future.set_result({"kv": 1})
    assert normalise(future, later, surface("0.33.0")) == {0: {"kv": 1}}
    with pytest.raises(reply.ReplyNotAsContracted, match="future_of_aggregate"):
        normalise({"kv": 1}, later, surface("0.33.0"))


def test_the_first_release_named_rank_0_in_another_way() -> None:
    call = Call("mp", 2, rank0_reply_only=True)
    assert normalise([["L0", "L1"]], call, surface("0.8.5")) == {0: ["L0", "L1"]}
    with pytest.raises(reply.ReplyNotAsContracted):
        normalise(["L0", "L1"], call, surface("0.8.5"))
    with pytest.raises(reply.ModeNotOffered):
        normalise([["L0"]], call, surface("0.9.0"))


class AsyncModelRunnerOutput:
    pass


class AsyncOutput(AsyncModelRunnerOutput):
    pass


def test_an_output_still_to_come_is_no_payload() -> None:
    with pytest.raises(reply.UnresolvedOutput, match="rank 0"):
        normalise([AsyncOutput()], Call("uni", 1), surface("0.23.0"))


def test_a_future_that_holds_an_exception_or_nothing() -> None:
    failed: Future[Any] = Future()
    failed.set_exception(ValueError("boom"))
    call = Call("mp", 2, non_block=True)
    with pytest.raises(reply.WorkerRaised, match="ValueError: boom"):
        normalise(failed, call, surface("0.33.0"))
    with pytest.raises(reply.ReplyTimeout, match=r"within 0\.05 s"):
        normalise(Future(), call, surface("0.33.0"), deadline_s=0.05)


def test_facts_decide_and_not_the_version() -> None:
    """Hand a release another one's facts: the reading follows the facts."""
    other: Mapping[str, Any] = {**surface("0.33.0"), "replies": surface("0.11.0")["replies"]}
    assert normalise([[1, 2, 3, 4]], Call("mp", 2, rank=1), other) == {1: [1, 2, 3, 4]}

"""REPLY: what comes back when the workers of an engine are asked, and what when it goes wrong.

These judge a reply channel (``--channel``): truetap's ``collect``, or anybody's lines around
``collective_rpc``.
"""

from __future__ import annotations

from typing import Any

import pytest

from truetap.harness import values
from truetap.harness.channel import FP8, Answer, ChannelObservation
from truetap.harness.pytest_plugin import Saw

LEEWAY_S = 5.0
"""By how much a call may overrun its deadline: time to notice, and to say which rank is late."""


def answered(answer: Answer | None, world_size: int) -> dict[int, Any]:
    """Return the values of a call that must succeed: one for every rank asked."""
    assert answer is not None, "the call was never made"
    assert answer.values is not None, f"{answer.asked} raised {answer.error}"
    wanted = list(answer.ranks or range(world_size))
    assert list(answer.values) == wanted, (
        f"ranks {wanted} were asked, ranks {list(answer.values)} answered"
    )
    return dict(answer.values)


def refused(answer: Answer | None) -> str:
    """Return the error of a call that must fail."""
    assert answer is not None, "the call was never made"
    assert answer.error is not None, f"{answer.asked} returned {answer.values!r} without an error"
    return answer.error


@pytest.mark.clause("REPLY-002")
def test_answers_come_from_the_ranks_asked(channel_seen: ChannelObservation, saw: Saw) -> None:
    """All ranks, one rank, all again: each value comes from its own rank, in rank order."""
    for answer in channel_seen.identity:
        for rank, value in answered(answer, channel_seen.world_size).items():
            assert isinstance(value, dict), f"rank {rank} sent a dict, a {_kind(value)} came"
            assert value.get("rank") == rank, f"rank {rank}'s place holds rank {value.get('rank')}"
            assert value.get("world_size") == channel_seen.world_size, f"world size of {value}"
    saw(f"{len(channel_seen.identity)} calls at world size {channel_seen.world_size}")


@pytest.mark.clause("REPLY-003")
def test_values_keep_their_structure(channel_seen: ChannelObservation, saw: Saw) -> None:
    """No level of nesting is added or lost: one list too few is one boundary of four."""
    calls = [*channel_seen.values.items(), ("layers", channel_seen.layers_of_one)]
    for kind, answer in calls:
        for rank, value in answered(answer, channel_seen.world_size).items():
            sent = channel_seen.expected[kind][rank]
            assert values.outline(value) == values.outline(sent), (
                f"rank {rank} sent {values.outline(sent)}, the caller got {values.outline(value)}"
                + _which_part(sent, value)
            )
    saw(f"{len(channel_seen.values)} kinds of payload")


@pytest.mark.clause("REPLY-004")
def test_values_arrive_bit_for_bit(channel_seen: ChannelObservation, saw: Saw) -> None:
    """Every tensor keeps its dtype, shape and bits; every other value is equal to what was sent."""
    leaves = 0
    for kind, answer in [*channel_seen.values.items(), (FP8, channel_seen.fp8)]:
        for rank, value in answered(answer, channel_seen.world_size).items():
            sent = dict(values.leaves(channel_seen.expected[kind][rank]))
            for place, got in values.leaves(value):
                if place not in sent:
                    continue  # of another structure, which is REPLY-003's to judge
                difference = values.difference(sent[place], got)
                assert not difference, f"{kind} of rank {rank} at value{place}: {difference}"
                leaves += 1
    saw(f"{leaves} values equal, bit for bit")


@pytest.mark.clause("REPLY-005")
def test_a_failing_rank_is_reported(channel_seen: ChannelObservation, saw: Saw) -> None:
    """The error names the rank that failed, the method and the cause, whoever was asked."""
    last = channel_seen.world_size - 1
    for answer, rank in ((channel_seen.raises, 0), (channel_seen.raises_unasked, last)):
        error = refused(answer)
        for part in (f"rank {rank}", "probe_raise", "ValueError", "asked to fail"):
            assert part in error, f"the error does not say {part!r}: {error}"
    saw(error.splitlines()[0])


@pytest.mark.clause("REPLY-006")
def test_no_call_outlives_its_deadline(channel_seen: ChannelObservation, saw: Saw) -> None:
    """A rank that sleeps past the deadline costs the deadline, and the error names the method."""
    error = refused(channel_seen.late)
    assert channel_seen.late is not None
    seconds, deadline = channel_seen.late.seconds, channel_seen.late.deadline_s
    assert seconds < deadline + min(LEEWAY_S, deadline * 0.9), (
        f"with a deadline of {deadline:g} s the call came back after {seconds:.1f} s"
    )
    for part in ("rank 0", "probe_sleep"):
        assert part in error, f"the error does not say {part!r}: {error}"
    saw(f"deadline {deadline:g} s, back after {seconds:.2f} s: {error.splitlines()[0]}")


@pytest.mark.clause("REPLY-007")
def test_a_value_that_cannot_travel_fails_at_once(
    channel_seen: ChannelObservation, saw: Saw
) -> None:
    """Not at the deadline, and not by arriving as something else."""
    error = refused(channel_seen.unserialisable)
    assert channel_seen.unserialisable is not None
    seconds, deadline = channel_seen.unserialisable.seconds, channel_seen.unserialisable.deadline_s
    assert seconds < deadline / 2, f"it took {seconds:.1f} s of a deadline of {deadline:g} s"
    for part in ("rank", "probe_value", "dtype"):
        assert part in error, f"the error does not say {part!r}: {error}"
    saw(f"after {seconds:.2f} s: {error.splitlines()[0]}")


@pytest.mark.clause("REPLY-008")
def test_no_call_gets_the_reply_of_another(channel_seen: ChannelObservation, saw: Saw) -> None:
    """After a failure the next call is refused, or answered by its own reply."""
    calls = [channel_seen.after_raises, channel_seen.after_unserialisable, *channel_seen.after_late]
    refusals = 0
    for answer in calls:
        assert answer is not None, "the call was never made"
        if answer.values is None:
            refusals += 1
            continue
        token = answer.args[0]
        for rank, value in answered(answer, channel_seen.world_size).items():
            own = isinstance(value, dict) and value.get("text") == token
            assert own, f"the call {token!r} was answered on rank {rank} by {value!r}"
    saw(f"{len(calls)} calls after failures: {refusals} refused, the others got their own replies")


@pytest.mark.clause("REPLY-009")
def test_a_rank_out_of_range_is_refused_first(channel_seen: ChannelObservation, saw: Saw) -> None:
    """Refused before any worker runs the method, not after."""
    error = refused(channel_seen.beyond)
    assert channel_seen.counts is not None, "the workers' calls were never counted"
    before, after = (answered(count, channel_seen.world_size) for count in channel_seen.counts)
    for rank, count in after.items():
        counted = isinstance(count, int) and isinstance(before[rank], int)
        assert counted, f"rank {rank} sent a count, {before[rank]!r} and {count!r} came"
        ran = count - before[rank] - 1
        assert ran == 0, f"rank {rank} ran {ran} calls before the refusal: {error}"
    assert str(channel_seen.world_size) in error, f"the error does not name the rank: {error}"
    saw(error.splitlines()[0])


@pytest.mark.clause("REPLY-010")
def test_a_missing_method_is_named(channel_seen: ChannelObservation, saw: Saw) -> None:
    """A method that the workers do not have is an error that names it."""
    error = refused(channel_seen.missing)
    assert "probe_no_such_method" in error, f"the error does not name the method: {error}"
    saw(error.splitlines()[0])


def _kind(value: Any) -> str:
    return type(value).__name__


def _which_part(sent: Any, got: Any) -> str:
    """Say which item of what was sent the caller was left with, if it is one."""
    if isinstance(sent, (list, tuple)):
        for index, item in enumerate(sent):
            if values.outline(item) == values.outline(got) and not values.difference(item, got):
                return f": item {index} of {len(sent)} alone"
    return ""

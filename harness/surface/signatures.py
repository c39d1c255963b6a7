"""Parameters of what capture code calls or subclasses in a release, read from its source.

A parameter is one string, in the order and notation of Python without annotations: ``timeout`` is
required, ``timeout=None`` has a default, ``*`` and ``/`` separate the kinds. ``self`` and ``cls``
are left out. One string per line of the facts file makes a change of a signature one line.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from truetap.harness.surface.definitions import bindings, lineage, own_class, parse
from truetap.harness.surface.strict import NotUnderstood, section

if TYPE_CHECKING:
    from truetap.harness.surface.wheel import Source

_SEARCHED = ("vllm/config", "vllm/entrypoints", "vllm/executor", "vllm/v1", "vllm/worker")
"""Folders that are searched for a class that none of its known files has."""

_MODELS = "vllm/model_executor/models"


@dataclass(frozen=True)
class Place:
    """What is read of a class, or of a module if ``cls`` is empty.

    ``files``: where it has lived, newest first.
    ``members`` are method names, ``*`` for all public ones, or ``fields`` for a dataclass's.
    ``optional``: releases exist that have no such class.
    """

    label: str
    cls: str
    files: tuple[str, ...]
    members: tuple[str, ...]
    optional: bool = False


_CLIENT = ("vllm/v1/engine/core_client.py",)
_RPC = ("collective_rpc",)
_STEP = ("execute_model", "sample_tokens")
_UNI = ("vllm/v1/executor/uniproc_executor.py", "vllm/v1/executor/abstract.py")
_RAY = ("vllm/v1/executor/ray_executor.py", "vllm/v1/executor/ray_distributed_executor.py")

PLACES = (
    Place("AsyncLLM", "AsyncLLM", ("vllm/v1/engine/async_llm.py",), _RPC),
    Place("AsyncMPClient", "AsyncMPClient", _CLIENT, ("collective_rpc_async",)),
    Place("EngineCore", "EngineCore", ("vllm/v1/engine/core.py",), _RPC),
    Place("EngineCoreClient", "EngineCoreClient", _CLIENT, (*_RPC, "collective_rpc_async")),
    Place("Executor", "Executor", ("vllm/v1/executor/abstract.py",), (*_RPC, *_STEP)),
    Place("ExecutorWithExternalLauncher", "ExecutorWithExternalLauncher", _UNI, _RPC),
    Place("GPUModelRunner", "GPUModelRunner", ("vllm/v1/worker/gpu_model_runner.py",), _STEP),
    Place(
        "GPUModelRunner (v2)",
        "GPUModelRunner",
        ("vllm/v1/worker/gpu/model_runner.py",),
        _STEP,
        True,
    ),
    Place("InprocClient", "InprocClient", _CLIENT, _RPC),
    Place("KVCacheConfig", "KVCacheConfig", ("vllm/v1/kv_cache_interface.py",), ("fields",)),
    Place(
        "KVConnectorBase_V1",
        "KVConnectorBase_V1",
        ("vllm/distributed/kv_transfer/kv_connector/v1/base.py",),
        ("*",),
    ),
    Place("LLM", "LLM", ("vllm/entrypoints/llm.py",), (*_RPC, "apply_model")),
    Place("LLMEngine", "LLMEngine", ("vllm/v1/engine/llm_engine.py",), (*_RPC, "apply_model")),
    Place(
        "LlamaModel",
        "LlamaModel",
        (f"{_MODELS}/llama.py",),
        ("embed_input_ids", "forward", "get_input_embeddings"),
    ),
    Place(
        "MultiprocExecutor", "MultiprocExecutor", ("vllm/v1/executor/multiproc_executor.py",), _RPC
    ),
    Place("RayDistributedExecutor", "RayDistributedExecutor", _RAY, _RPC, True),
    Place("RayExecutorV2", "RayExecutorV2", ("vllm/v1/executor/ray_executor_v2.py",), _RPC, True),
    Place("Request", "Request", ("vllm/v1/request.py",), ("__init__",)),
    Place(
        "Scheduler",
        "Scheduler",
        ("vllm/v1/core/sched/scheduler.py",),
        ("__init__", "schedule", "update_from_output"),
    ),
    Place(
        "SchedulerConfig",
        "SchedulerConfig",
        ("vllm/config/scheduler.py", "vllm/config.py"),
        ("fields",),
    ),
    Place("SchedulerOutput", "SchedulerOutput", ("vllm/v1/core/sched/output.py",), ("fields",)),
    Place("SyncMPClient", "SyncMPClient", _CLIENT, _RPC),
    Place("UniProcExecutor", "UniProcExecutor", _UNI, _RPC),
    Place("Worker", "Worker", ("vllm/v1/worker/gpu_worker.py",), _STEP),
    Place("WorkerBase", "WorkerBase", ("vllm/v1/worker/worker_base.py",), _STEP),
    Place(
        "WorkerWrapperBase",
        "WorkerWrapperBase",
        ("vllm/v1/worker/worker_base.py", "vllm/worker/worker_base.py"),
        ("init_worker",),
    ),
    Place(
        "kv_cache_utils",
        "",
        ("vllm/v1/core/kv_cache_planning.py", "vllm/v1/core/kv_cache_utils.py"),
        (
            "get_kv_cache_config",
            "get_kv_cache_config_from_groups",
            "get_kv_cache_configs",
            "unify_kv_cache_configs",
        ),
    ),
)


@section
def facts(source: Source) -> dict[str, Any]:
    """Return label to member to its list of parameters; None for what the release lacks.

    A method counts where it is inherited from another class of the release. Raises ``CouldNotRun``
    if a class is in none of its known files, unless no folder of the engine has it and releases
    without it are known.
    """
    return {place.label: _of_place(source, place) for place in PLACES}


def _of_place(source: Source, place: Place) -> dict[str, Any] | None:
    files = [path for path in place.files if source.text(path) is not None]
    if not place.cls:
        found: dict[str, ast.stmt] = {}
        for path in reversed(files):
            found |= bindings(parse(source, path).body)
        return {name: _parameters(found.get(name), bound=False) for name in place.members}
    homes = [(path, node) for path in files if (node := own_class(source, path, place.cls))]
    if not homes:
        _check_absent(source, place)
        return None
    if place.members == ("fields",):
        return {"fields": _fields(homes[0][1])}
    methods = {
        name: node
        for _, cls in reversed(lineage(source, *homes[0]))
        for name, node in bindings(cls.body).items()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    wanted = place.members
    if wanted == ("*",):
        wanted = tuple(sorted(n for n in methods if not n.startswith("_") or n == "__init__"))
    return {name: _parameters(methods.get(name), bound=True) for name in wanted}


def _check_absent(source: Source, place: Place) -> None:
    """Make sure that the class is gone, and has not moved to a file that nobody told us of.

    Of a class that releases may lack, only a file of the same name counts as its new place: others
    hold namesakes.
    """
    pattern = re.compile(rf"^class {place.cls}\b", re.MULTILINE)
    names = {PurePosixPath(file).name for file in place.files}
    for folder in _SEARCHED:
        for path in source.paths(folder):
            if path in place.files or (place.optional and PurePosixPath(path).name not in names):
                continue
            if pattern.search(source.text(path) or ""):
                raise NotUnderstood(f"{path}: {place.cls} is in none of its known files")
    if not place.optional:
        raise NotUnderstood(f"{place.files[0]} has no class {place.cls}")


def _parameters(node: ast.stmt | None, *, bound: bool) -> list[str] | None:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    found = [_parameter(a, d) for a, d in zip(positional, defaults, strict=True)]
    if args.posonlyargs:
        found.insert(len(args.posonlyargs), "/")
    if bound and found and found[0] in {"self", "cls"}:
        found.pop(0)
    if args.vararg:
        found.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        found.append("*")
    found += [_parameter(a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        found.append(f"**{args.kwarg.arg}")
    return found


def _parameter(arg: ast.arg, default: ast.expr | None) -> str:
    return arg.arg if default is None else f"{arg.arg}={ast.unparse(default)}"


def _fields(cls: ast.ClassDef) -> list[str]:
    """Return the fields of a dataclass in their order, with the source text of their defaults."""
    found = []
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            annotation = ast.unparse(node.annotation)
            if not annotation.startswith("ClassVar"):
                default = "" if node.value is None else f"={ast.unparse(node.value)}"
                found.append(f"{node.target.id}{default}")
    return found

"""What can be wrong with a ``collect`` call before anything is sent: all of it is a UsageError.

Names inside vLLM's engines that are not documented are used here only.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from truetap.harness import parcel
from truetap.harness.collect_worker import CollectWorker
from truetap.harness.errors import UsageError

RPC = CollectWorker.truetap_collect.__name__
WORKER = f"{CollectWorker.__module__}.{CollectWorker.__qualname__}"
LONGEST_S = 7 * 24 * 3600.0  # vLLM waits in milliseconds, counted in 32 bits
_EXTERNAL_LAUNCHER = ("external_launcher", "ExecutorWithExternalLauncher")


def reach(engine: Any) -> tuple[int, bool]:
    """Return the engine's world size, and whether it reaches only the rank of its own process."""
    holder = getattr(engine, "llm_engine", engine)  # LLM; the others hold it themselves
    config = getattr(getattr(holder, "vllm_config", holder), "parallel_config", None)
    if config is None or not callable(getattr(engine, "collective_rpc", None)):
        raise UsageError(
            f"a {type(engine).__name__} is not an engine that collect knows",
            remedy="give it a vLLM LLM, AsyncLLM or executor",
        )
    if config.data_parallel_size > 1:
        raise UsageError(
            f"the engine has data_parallel_size {config.data_parallel_size}; all its engines would "
            "run the method, and the replies of the first alone would come back",
            remedy="use one engine for each replica",
        )
    _require_method(config)
    backend = config.distributed_executor_backend
    names = [kind.__name__ for kind in backend.__mro__] if isinstance(backend, type) else [backend]
    return config.world_size, any(name in _EXTERNAL_LAUNCHER for name in names)


def _require_method(config: Any) -> None:
    """Refuse an engine whose workers are known to lack the method.

    Asking them would leave stale replies behind. A class that this process cannot import is not
    judged here: the workers' own answer tells.
    """
    extension, worker = config.worker_extension_cls, config.worker_cls
    if extension:
        module, _, name = extension.rpartition(".")
        try:
            lacking = not hasattr(getattr(importlib.import_module(module), name), RPC)
        except Exception:
            lacking = False
    else:  # a worker class of the user's own may have the method without an extension
        lacking = isinstance(worker, str) and worker.startswith("vllm.")
    if lacking:
        raise UsageError(
            f"the workers of this engine have no method {RPC}",
            remedy=f'start it with worker_extension_cls="{WORKER}" or a subclass of that',
        )


def deadline(seconds: float) -> float:
    """Return ``seconds`` if they can be waited for."""
    if type(seconds) not in (int, float) or not 0 < seconds <= LONGEST_S:
        raise UsageError(
            f"deadline is {seconds!r}; it must be seconds above 0, at most {LONGEST_S:g}"
        )
    return seconds


def method(name: str) -> str:
    """Return the name of the method if it is one."""
    if type(name) is not str or not name.isidentifier() or not name.isascii():
        raise UsageError(
            f"{name!r} is not the name of a worker method",
            remedy="call by name: a function would travel as pickled code, which vLLM refuses by "
            "default",
        )
    if name == RPC:
        raise UsageError(f"{RPC} is what collect itself calls; name another method")
    return name


def ranks(wanted: Collection[int] | None, world_size: int, *, local: bool) -> list[int] | None:
    """Return the ranks as a list; None stands for all that the engine reaches."""
    if wanted is None:
        return None
    if local:
        raise UsageError(
            "with an external launcher each process reaches its own rank only",
            remedy="leave ranks= out; every process gets its own value",
        )
    if isinstance(wanted, (str, bytes, Mapping)) or not isinstance(wanted, Collection):
        raise UsageError(f"ranks is {wanted!r}; it must be a list of ranks, or None for all")
    for rank in wanted:
        if type(rank) is not int or not 0 <= rank < world_size:
            raise UsageError(f"{rank!r} is not a rank of this engine: it has 0 to {world_size - 1}")
    if len(set(wanted)) < len(wanted):
        raise UsageError(f"ranks is {wanted!r}; it names a rank twice")
    return list(wanted)


def arguments(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> tuple[Any, list[Any]]:
    """Return the tree of ``[args, kwargs]`` and its tensors."""
    if type(args) not in (tuple, list):
        raise UsageError(f"args is a {type(args).__name__}; it must be a tuple or list")
    named = {} if kwargs is None else kwargs
    if type(named) is not dict or not all(type(name) is str for name in named):
        raise UsageError("kwargs must be a dict whose keys are text")
    tree_of_args, tensors = parcel.take_apart(tuple(args), "args")
    tree_of_kwargs, tensors = parcel.take_apart(named, "kwargs", tensors)
    return ["tuple", tree_of_args, tree_of_kwargs], tensors

"""How the failure of a ``collect`` call is told: by method, ranks and cause."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from truetap.harness.errors import FULL_DISK, CouldNotRun, TruetapError, UsageError
from truetap.harness.parcel import CannotTravel


class CollectFailed(CouldNotRun):
    """A call that was made and has no result. Knows its ``method`` and the ``ranks`` at fault."""

    def __init__(
        self, message: str, *, method: str, ranks: Collection[int] = (), remedy: str = ""
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.method = method
        self.ranks = tuple(ranks)


class WorkerFailed(CollectFailed):
    """The method raised on some rank, or its arguments or result could not be read or written."""


class ValueCannotTravel(CollectFailed):
    """The method returned something that would not come back as it was; its place is named."""


class DeadlinePassed(CollectFailed):
    """Not every rank answered in time; ``ranks`` are those not known to have finished."""


class ReplyRefused(CollectFailed):
    """What came back is not what this call's workers must answer; nothing of it is returned."""


class EngineUnusable(CollectFailed):
    """The engine failed, or it failed earlier and its replies can no longer be trusted."""


def before_the_method(errors: Mapping[int, Mapping[str, Any]]) -> bool:
    """Say whether every rank of ``errors`` failed before it called the method."""
    return all(
        error.get("stage") in ("request", "lookup", "arguments") for error in errors.values()
    )


def of_workers(
    method: str, errors: Mapping[int, Mapping[str, Any]], *, everywhere: bool
) -> TruetapError:
    """Return the error that tells those in the envelopes of some ranks, or of all."""
    stages = {error.get("stage") for error in errors.values()}
    kinds = {error.get("type") for error in errors.values()}
    if everywhere and stages == {"lookup"} and kinds == {AttributeError.__name__}:
        return UsageError(
            f"no worker has a method {method!r}; nothing was run",
            remedy="add it to the class that worker_extension_cls names",
        )
    causes: dict[str, list[int]] = {}
    for rank, error in errors.items():
        causes.setdefault(f"{error.get('type')}: {error.get('message')}", []).append(rank)
    told = [(_name(ranks), cause) for cause, ranks in causes.items()]
    if stages == {"result"} and kinds == {CannotTravel.__name__}:
        places = "; ".join(f"{name}: {cause.partition(': ')[2]}" for name, cause in told)
        return ValueCannotTravel(
            f"what {method} returned cannot travel: {places}",
            method=method,
            ranks=errors,
            remedy="return builtins, tensors and numpy arrays only",
        )
    remedy = "see the traceback, in the notes of this error"
    if any(error.get("errno") in FULL_DISK for error in errors.values()):
        remedy = "free space, or give folder= a directory with more room"
    elif stages & {"arguments", "file"}:
        remedy = "give folder= a directory on a filesystem that all workers share"
    failed = WorkerFailed(
        f"{method} failed on " + "; on ".join(f"{name}: {cause}" for name, cause in told),
        method=method,
        ranks=errors,
        remedy=remedy,
    )
    for rank, error in errors.items():
        failed.add_note(f"rank {rank}, last frames:\n{error.get('traceback')}")
    return failed


def progress(missing: Mapping[int, bool], world_size: int, failures: Mapping[int, str]) -> str:
    """Return how far every rank came, in words; see ``call_folder``.

    A rank's error is in its reply, which nobody reads while the executor waits for another rank.
    """
    causes: dict[str, list[int]] = {}
    for rank, cause in failures.items():
        causes.setdefault(f"failed with {cause}", []).append(rank)
    done = [rank for rank in range(world_size) if rank not in missing and rank not in failures]
    groups = {
        **causes,
        "started and did not finish": [
            rank for rank, started in missing.items() if started and rank not in failures
        ],
        "finished": done,
        "not known": [rank for rank, started in missing.items() if not started],
    }
    return "; ".join(f"{_name(ranks)}: {what}" for what, ranks in groups.items() if ranks)


def _name(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

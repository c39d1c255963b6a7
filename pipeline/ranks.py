"""The processes that train one head together: what they tell each other, and how all of them end.

torchrun starts them, accelerate connects them. They differ in two things only:
the main one alone writes and speaks, and each packs samples of its own.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from signal import SIGTERM
from typing import Any, NoReturn, TypeVar

from truetap.harness.errors import CheckFailed, CouldNotRun, TruetapError, UsageError

T = TypeVar("T")
LONGEST_WAIT = timedelta(minutes=30)
"""For a process that neither answers nor ends. One that ends is noticed at once."""


@dataclass(frozen=True)
class Ranks:
    """The processes of one training, seen from one of them. Of one process, all of this is idle."""

    rank: int = 0
    count: int = 1

    @property
    def main(self) -> bool:
        """Whether this process writes and speaks."""
        return self.rank == 0

    def all_do(self, work: Callable[[], T]) -> T:
        """Do this in every process, and wait for all; what fails in one fails in all, alike.

        An error that only one process knew of would leave the others waiting for it.
        """
        if self.count == 1:
            return work()
        from accelerate.utils import gather_object

        fault: TruetapError | OSError | None = None
        try:
            done = work()
        except (TruetapError, OSError) as error:
            fault = error
        faults = [one for one in gather_object([fault]) if one is not None]
        if faults:
            raise _Agreed(faults[0])
        return done

    def main_does(self, work: Callable[[], T]) -> T | None:
        """Do this in the main process, while the others wait; its error is everybody's."""
        return self.all_do(work if self.main else lambda: None)

    def main_first(self, work: Callable[[], T]) -> T:
        """Do this in the main process, then in the others, which find there what it has made."""
        if self.main:
            done = self.all_do(work)
            self.all_do(lambda: None)
            return done
        self.all_do(lambda: None)
        return self.all_do(work)

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Enclose what fails in every process or in none, so that only one of them says why."""
        try:
            yield
        except TruetapError as error:
            if self.count == 1:
                raise
            raise _Agreed(error) from error

    def sums(self, values: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
        """Return the sums over all processes; what one does not have counts as 0."""
        if self.count == 1:
            return values
        import torch
        from accelerate import PartialState
        from accelerate.utils import reduce

        own = [float(values.get(name, 0.0)) for name in names]
        row = torch.tensor(own, dtype=torch.float64, device=PartialState().device)
        return dict(zip(names, reduce(row, "sum").tolist(), strict=True))

    def add_gradients(self, parameters: Iterable[Any]) -> None:
        """Sum every gradient over all processes; one that had nothing to learn from adds zeros.

        This is what DistributedDataParallel does, but for three things that do not go with it: it
        rearranges its buckets after the first step, so that more than two processes would add up
        in another order after a resumption; it waits for a process that has no pack; and it splits
        a compiled forward pass between buckets, which flex attention does not allow.
        """
        if self.count == 1:
            return
        import torch
        from accelerate.utils import reduce

        for parameter in parameters:
            if parameter.requires_grad:
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = reduce(own, "sum")

    def require_same(self, parameters: Iterable[Any]) -> None:
        """Raise ``CheckFailed`` in all processes unless all have the same weights."""
        if self.count == 1:
            return
        import torch
        from accelerate.utils import gather_object

        sums = [float(torch.sum(one.detach(), dtype=torch.float64)) for one in parameters]
        first, *others = gather_object([sums])
        if unlike := [rank for rank, other in enumerate(others, start=1) if other != first]:
            raise _Agreed(
                CheckFailed(
                    f"of {self.count} processes, {unlike} have other weights than process 0",
                    remedy="compare the nodes' packages and the verifier's files on them",
                )
            )


ALONE = Ranks()


class _Agreed(Exception):
    """An error that every process raises; the main one tells it."""

    def __init__(self, fault: TruetapError | OSError) -> None:
        super().__init__(str(fault))
        self.fault = fault


def require_alone(verb: str) -> None:
    """Refuse a launcher's several processes: each would do all of it and write the same files."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1":
        raise UsageError(
            f"truetap {verb} runs in one process, and this is one of {processes} (WORLD_SIZE)",
            remedy="run the stages before training without torchrun or accelerate launch, then "
            f"torchrun --nproc-per-node {processes} -m truetap.pipeline.cli train CONFIG",
        )


def of_launcher(environment: Mapping[str, str]) -> Ranks:
    """Return which of how many processes this is, as torchrun tells it."""
    processes = environment.get("WORLD_SIZE", "1")
    if processes == "1":
        return Ranks()
    told = {n: environment.get(n, "") for n in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR")}
    wrong = [n for n, value in told.items() if not (value if "_A" in n else value.isdecimal())]
    if wrong or not int(told["RANK"]) < int(processes):
        raise UsageError(
            f"WORLD_SIZE is {processes!r}, but this is no process of a launcher: "
            f"{', '.join(f'{n}={environment.get(n)!r}' for n in wrong or ['RANK'])}",
            remedy="start it with torchrun, or unset WORLD_SIZE",
        )
    return Ranks(int(told["RANK"]), int(processes))


@contextmanager
def joined() -> Iterator[Ranks]:
    """Connect this process with the launcher's others; end with them, whoever fails.

    The main process raises what there is to tell. The others end here, silently: all but one that
    met something which the others cannot know, such as a defect.
    """
    ranks = of_launcher(os.environ)
    if ranks.count == 1:
        yield ranks
        return
    try:
        _connect(ranks)
        yield ranks
        _disconnect()
    except _Agreed as agreed:
        if ranks.main:
            raise agreed.fault from None
        end(getattr(agreed.fault, "exit_code", CouldNotRun.exit_code))
    except KeyboardInterrupt as stop:
        if ranks.main:
            raise
        end(128 + SIGTERM if SIGTERM in stop.args else 130)
    except RuntimeError as error:
        if not _lost(error):
            raise
        if ranks.main:
            raise CouldNotRun(
                f"another process of this training has ended: {_first_sentence(error)}",
                remedy="mend what it or the launcher tells, if anything; the same command "
                "continues from the last checkpoint",
            ) from error
        end(CouldNotRun.exit_code)


def end(code: int) -> NoReturn:
    """End this process with an exit code; one of several at once.

    On the way out the threads of a group, even of one that was left in order, may end the process
    by a signal when others are gone already, or wait for them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if os.environ.get("WORLD_SIZE", "1") != "1" and "torch" in sys.modules:
        os._exit(code)
    sys.exit(code)


def _connect(ranks: Ranks) -> None:
    try:
        import torch
        from accelerate import PartialState
    except ImportError as error:
        with ranks.alike():
            raise CouldNotRun(
                f"training cannot run: {error}", remedy="pip install 'truetap[train]'"
            ) from error
    gpus = torch.cuda.device_count()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.count))
    with ranks.alike():
        if 0 < gpus < here:
            raise UsageError(
                f"there are {here} processes here and {gpus} GPUs",
                remedy=f"start {gpus} processes: torchrun --nproc-per-node {gpus}",
            )
    PartialState(cpu=not gpus, timeout=LONGEST_WAIT)


def _disconnect() -> None:
    from accelerate import PartialState

    PartialState().destroy_process_group()


def _first_sentence(error: RuntimeError) -> str:
    """Return what an error of torch says, without where in torch and what to do about it."""
    line = re.sub(r"^\[[^]]*\] ", "", (str(error).splitlines() or [""])[0])
    return line.split(". ")[0]


def _lost(error: RuntimeError) -> bool:
    """Return whether an error is that of a connection: gloo has no class of its own for it."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or "gloo" in str(error)

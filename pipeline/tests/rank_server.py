"""Runs trainings of several processes, one after another, for test_ranks.py; never collected.

A line of JSON on stdin asks for one, a line on stdout tells how each of its processes ended. The
processes are forks of this one, which has imported what takes seconds. A process may be told to
meet with a fault.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import speculators.models.eagle3

from truetap.harness.errors import IntegrityError
from truetap.pipeline import cli, draft_head, train
from truetap.pipeline.store import Store


def at_step(number: int, act: Callable[[Any], None]) -> None:
    learn = train._Learner.learn

    def acting(self: Any, step: Any, *rest: Any) -> Any:
        if step.number == number:
            act(self)
        return learn(self, step, *rest)

    train._Learner.learn = acting  # type: ignore[method-assign]


def not_finite() -> None:
    def spoil(_model: Any, arguments: Any, named: dict[str, Any]) -> Any:
        return arguments, named | {"hidden_states": named["hidden_states"] * float("nan")}

    at_step(3, lambda self: self._model.register_forward_pre_hook(spoil, with_kwargs=True))


def corrupt() -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise IntegrityError("shard 7 is corrupt", remedy="run truetap extract again")

    Store.samples = refuse  # type: ignore[assignment,method-assign]


def disk_full() -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    accelerate.Accelerator.save_state = full  # type: ignore[assignment,method-assign]


def other_weights() -> None:
    build = draft_head.build

    def another(*arguments: Any) -> Any:
        made = build(*arguments)
        made.fc.weight.data[0, 0] += 1e-3
        return made

    draft_head.build = another


def defect() -> None:
    def meet(_: Any) -> None:
        raise ZeroDivisionError("a defect")

    at_step(3, meet)


FAULTS: dict[str, Callable[[], None]] = {
    "killed": lambda: at_step(5, lambda _: os.kill(os.getpid(), signal.SIGKILL)),
    "interrupted": lambda: at_step(3, lambda _: os.kill(os.getpid(), signal.SIGINT)),
    "not-finite": not_finite,
    "corrupt": corrupt,
    "disk-full": disk_full,
    "other-weights": other_weights,
    "defect": defect,
}


def become(rank: int, count: int, port: int, job: dict[str, Any]) -> None:
    """Be one process of a training."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    # A shell's background jobs, and what they start, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    said = os.open(f"{job['said']}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.argv = ["truetap", "train", job["config"]]
    if fault := job["faults"].get(str(rank)):
        FAULTS[fault]()
    cli.main()


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Run one training; kill what has not ended within its deadline."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(job["count"]):
        pid = os.fork()
        if pid == 0:
            become(rank, job["count"], port, job)
        pids.append(pid)
    ends, codes = time.monotonic() + job["deadline_s"], {}
    while len(codes) < len(pids):
        for rank, pid in enumerate(pids):
            if rank not in codes and (status := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(status[1])
            elif rank not in codes and time.monotonic() > ends:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    texts = [Path(f"{job['said']}-{rank}").read_text() for rank in range(job["count"])]
    return {"codes": [codes[rank] for rank in range(job["count"])], "said": texts}


if __name__ == "__main__":
    assert speculators.models.eagle3
    for line in sys.stdin:
        sys.stdout.write(json.dumps(serve(json.loads(line))) + "\n")
        sys.stdout.flush()

"""Kills an engine's processes when the process that started them is gone.

vLLM's engine core outlives a caller that is killed with SIGKILL, and then computes on, or holds
GPU memory, with nobody to answer to. A reaper is a small process of its own that keeps the list of
its owner's descendants and, when the owner disappears, kills those by process id.

Run as ``python -m truetap.harness.reaper PID``; ``watch_over_me`` starts one for this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache

import psutil

POLL_S = 0.5


@cache
def watch_over_me() -> None:
    """Start a reaper for this process, once."""
    # In a session of its own, so that a Ctrl-C meant for the owner does not end it first.
    subprocess.Popen(
        [sys.executable, "-m", "truetap.harness.reaper", str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def kill(processes: list[psutil.Process]) -> None:
    """Kill the given processes; psutil checks the start time, so a reused id is left alone."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=5)


def is_reaper(process: psutil.Process) -> bool:
    """Return whether a process is a reaper, which outlives what it watches over."""
    with suppress(psutil.Error):
        return "truetap.harness.reaper" in process.cmdline()
    return False


def _reap(owner_pid: int) -> None:
    try:
        owner = psutil.Process(owner_pid)
    except psutil.NoSuchProcess:
        return
    me = os.getpid()
    known: set[psutil.Process] = set()
    while _alive(owner):
        for parent in [owner, *known]:
            try:
                known.update(p for p in parent.children(recursive=True) if p.pid != me)
            except psutil.NoSuchProcess:
                continue
        known = {process for process in known if process.is_running()}
        time.sleep(POLL_S)
    kill(list(known))


def _alive(process: psutil.Process) -> bool:
    # A zombie is as gone as a missing process: its parent has just not looked yet.
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    _reap(int(sys.argv[1]))

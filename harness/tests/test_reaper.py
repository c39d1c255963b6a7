"""The reaper: an owner that is killed takes what it started with it, a living one keeps it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil
import pytest

from truetap.harness import reaper

DEADLINE_S = 20.0
"""For things to come up, which a busy machine can delay."""
GONE_WITHIN_S = 5.0
SLEEP = f"{sys.executable!r}, '-c', 'import time; time.sleep(600)'"

OWNER = f"""
import subprocess, sys, time
if sys.argv[1] == "watched":
    from truetap.harness import reaper
    reaper.watch_over_me()
    reaper.watch_over_me()
print(subprocess.Popen([{SLEEP}]).pid, flush=True)
time.sleep(600)
"""

Start = Callable[[str], tuple["subprocess.Popen[str]", psutil.Process]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start an owner and its child; whatever the test does, nothing of it stays."""
    owners: list[subprocess.Popen[str]] = []
    seen: set[psutil.Process] = set()

    def run(how: str) -> tuple[subprocess.Popen[str], psutil.Process]:
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, how], stdout=subprocess.PIPE, text=True
        )
        owners.append(owner)
        assert owner.stdout is not None
        child = psutil.Process(int(owner.stdout.readline()))
        seen.update(psutil.Process(owner.pid).children(recursive=True))
        return owner, child

    yield run
    for process in seen:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    for owner in owners:
        owner.kill()
        owner.wait()
        if owner.stdout is not None:
            owner.stdout.close()


def alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def reapers_of(owner_pid: int) -> list[psutil.Process]:
    wanted = ["-m", "truetap.harness.reaper", str(owner_pid)]
    return [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [])[1:] == wanted]


def polls(watcher: psutil.Process) -> int:
    """Count how often a process went to sleep by itself, as the reaper does once a poll."""
    return int(watcher.num_ctx_switches().voluntary)


@pytest.mark.slow
def test_an_owner_that_is_killed_takes_its_children_with_it(start: Start) -> None:
    owner, child = start("watched")
    watchers = reapers_of(owner.pid)
    assert len(watchers) == 1
    (watcher,) = watchers
    time.sleep(3 * reaper.POLL_S)  # for the reaper to have come up
    before = polls(watcher)
    assert wait_until(lambda: polls(watcher) >= before + 4, DEADLINE_S)
    assert alive(child), "the child of a living owner was killed"
    assert alive(watcher)

    owner.send_signal(signal.SIGKILL)  # and nobody waits for it yet: it is a zombie now
    assert wait_until(lambda: not alive(child), GONE_WITHIN_S)
    assert wait_until(lambda: not alive(watcher), GONE_WITHIN_S)


@pytest.mark.slow
def test_without_a_reaper_the_child_would_have_stayed(start: Start) -> None:
    owner, child = start("alone")
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert not wait_until(lambda: not alive(child), 2 * reaper.POLL_S)


def test_a_reaper_of_nobody_ends_at_once() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    done = subprocess.run(
        [sys.executable, "-m", "truetap.harness.reaper", str(gone.pid)], timeout=30, check=False
    )
    assert done.returncode == 0

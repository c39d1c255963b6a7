"""The deadline of a run: engines die by process id, and a main thread that is stuck with them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

from truetap.harness.run_deadline import COULD_NOT_RUN, DeadlinePassed, RunDeadline

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]

STUCK = """
import signal, subprocess, sys, time
import psutil
from truetap.harness.run_deadline import RunDeadline
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})  # as native code does not look
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(engine.pid, flush=True)
watched = [psutil.Process(engine.pid)]
deadline = RunDeadline(
    0.2, lambda: watched, lambda: print("last words", flush=True), grace_s=0.2
)
time.sleep(600)
"""


def test_the_engine_is_killed_and_the_main_thread_interrupted() -> None:
    engine = subprocess.Popen(SLEEP)
    words: list[str] = []
    deadline = RunDeadline(
        0.2, lambda: [psutil.Process(engine.pid)], lambda: words.append("said"), grace_s=600
    )
    try:
        with pytest.raises(DeadlinePassed):
            time.sleep(600)
        assert deadline.passed
        assert not psutil.pid_exists(engine.pid)  # killed, and reaped by psutil
        assert words == []  # the main thread can speak for itself
    finally:
        deadline.stop()
        engine.kill()


def test_code_under_test_does_not_catch_it() -> None:
    assert not issubclass(DeadlinePassed, Exception)


def test_a_run_that_is_over_in_time_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    engine = subprocess.Popen(SLEEP)
    try:
        deadline = RunDeadline(600, lambda: [psutil.Process(engine.pid)], lambda: None)
        assert signal.getsignal(signal.SIGUSR2) != before
        deadline.stop()
        assert not deadline.passed
        assert engine.poll() is None
        assert signal.getsignal(signal.SIGUSR2) == before
    finally:
        engine.kill()
        engine.wait()


def test_a_process_that_cannot_be_interrupted_ends_with_its_last_words() -> None:
    stuck = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, check=False
    )
    pid, words = stuck.stdout.splitlines()
    assert stuck.returncode == COULD_NOT_RUN, stuck.stderr
    assert words == "last words"
    assert not psutil.pid_exists(int(pid)) or (
        psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
    )

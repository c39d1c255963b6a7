"""A deadline for a whole run of the suite, whatever its engine does.

When it passes, the engine's processes are killed by process id and the main thread is interrupted.
A main thread that cannot be interrupted, because it is inside native code, is given a grace period
and then ended together with its process.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

import psutil

from truetap.harness import reaper

GRACE_S = 30.0
"""What an interrupted run has to close its engine and write its report."""
COULD_NOT_RUN = 3
_SIGNAL = signal.SIGUSR2


class DeadlinePassed(KeyboardInterrupt):
    """Ends the session. No ``Exception``: code under test catches those and goes on."""


class RunDeadline:
    """Watches one run from a thread of its own; made and stopped in the main thread."""

    def __init__(
        self,
        seconds: float,
        processes: Callable[[], list[psutil.Process]],
        last_words: Callable[[], None],
        *,
        grace_s: float = GRACE_S,
    ) -> None:
        """Start the clock.

        ``processes()`` are those to kill. ``last_words`` is called where the main thread cannot be
        interrupted, before this process ends.
        """
        self.passed = False
        self._seconds, self._grace_s = seconds, grace_s
        self._processes, self._last_words = processes, last_words
        self._over = threading.Event()
        self._main = threading.main_thread().ident
        self._before = signal.signal(_SIGNAL, self._interrupt)
        threading.Thread(target=self._watch, daemon=True, name="truetap-deadline").start()

    def stop(self) -> None:
        """Stop the clock; what comes after is the caller's to end."""
        self._over.set()
        signal.signal(_SIGNAL, self._before)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if not self._over.is_set():
            raise DeadlinePassed

    def _watch(self) -> None:
        if self._over.wait(max(0.0, self._seconds)):
            return
        self.passed = True
        reaper.kill(self._processes())
        assert self._main is not None
        signal.pthread_kill(self._main, _SIGNAL)
        if not self._over.wait(self._grace_s):
            reaper.kill(self._processes())  # what was started meanwhile
            try:
                self._last_words()
            finally:
                os._exit(COULD_NOT_RUN)

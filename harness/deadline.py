"""Calls that end in time, whatever they call does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


LOOK_EVERY_S = 1.0
GRACE_S = 5.0
"""So long a call may still take whose other end is gone: its own error tells more."""


class EndGone(Exception):
    """A call was given up because what should answer it is gone."""


def bounded(
    call: Callable[[], T], seconds: float, *, gone: Callable[[], bool] = lambda: False
) -> T:
    """Run ``call`` on a daemon thread; raise TimeoutError if it is not done in time.

    ``EndGone`` if ``gone()``, which is asked every second, says that nothing will answer it. The
    thread runs on after that: nothing in Python can end it.
    """
    outcome: list[T] = []
    raised: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            raised.append(error)
        finally:
            done.set()

    threading.Thread(target=work, daemon=True).start()
    ends = time.monotonic() + seconds
    while not done.wait(min(LOOK_EVERY_S, max(0.0, ends - time.monotonic()))):
        if time.monotonic() >= ends:
            raise TimeoutError
        if gone():
            if done.wait(min(GRACE_S, max(0.0, ends - time.monotonic()))):
                break
            raise EndGone
    if raised:
        raise raised[0]
    return outcome[0]

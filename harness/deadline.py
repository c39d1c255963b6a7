"""Calls that end in time, whatever they call does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def bounded(call: Callable[[], T], seconds: float) -> T:
    """Run ``call`` on a daemon thread; raise TimeoutError if it is not done in time.

    The thread runs on after that: nothing in Python can end it.
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
    if not done.wait(seconds):
        raise TimeoutError
    if raised:
        raise raised[0]
    return outcome[0]

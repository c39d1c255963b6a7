"""What a worker says to the user.

vLLM's workers show log records of vLLM alone, and from a level of their own on. A line on the
standard error stream always arrives: in the engine's log, which errors name.
"""

from __future__ import annotations

import sys
from contextlib import suppress


def say(sentence: str) -> None:
    """Write one line, at once."""
    with suppress(OSError, ValueError):  # a full disk must not keep a reply from its caller
        print(f"truetap: {sentence}", file=sys.stderr, flush=True)  # noqa: T201

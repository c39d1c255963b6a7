"""Errors that a user can act on, each with the exit code that the command line gives for it.

Exit codes: 0 yes, 1 no (non-conformant, denied, failed check), 2 usage, 3 could not run,
4 integrity failure. "Could not run" never looks like yes or like no.
"""

from __future__ import annotations

import errno
from typing import ClassVar

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
"""What the system says of a disk that is full, and of a user's share of one that is."""


class TruetapError(Exception):
    """Base of every error that truetap raises on purpose: one sentence, and a remedy."""

    exit_code: ClassVar[int] = 3

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class CheckFailed(TruetapError):
    """A check ran and said no: non-conformant, denied, or data that must not be trained on."""

    exit_code = 1


class UsageError(TruetapError):
    """The request itself is wrong: a bad configuration, an unknown name, a value out of range."""

    exit_code = 2


class CouldNotRun(TruetapError):
    """The check or stage could not be carried out: missing engine, full disk, a hung worker."""

    exit_code = 3


class NotRecorded(CouldNotRun):
    """A recording was asked for what is not in it, so it says nothing either way."""


class IntegrityError(TruetapError):
    """Bytes on disk are not the bytes that were recorded: bad digest or bad signature."""

    exit_code = 4

"""Processes that write to and read from a store under test, and what is done to them.

A writer is held by its own requests and by nothing of the store: the source of captures waits on a
pipe, and an audit hook waits before each file-system call that Python makes in the folder. A file
size limit of the kernel breaks a write at a chosen byte: with an error, or by ending the process.
Nothing here waits for time to pass.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from truetap.harness import capture_store
from truetap.harness.capture_store import CaptureStore, Outcome, Read
from truetap.harness.model import Capture

DEADLINE_S = 60.0
"""A process that says nothing for so long is taken to hang."""
SETTLE_S = 1.0
"""For so long a process that may be waiting for a held one is left alone. What it does later is
judged the same, so nothing depends on it but how long the run takes."""

_CALLS = ("rename", "link", "symlink", "remove", "rmdir", "mkdir", "truncate", "chmod", "utime")
_EVENTS = {f"os.{call}" for call in _CALLS} | {"shutil.copyfile", "shutil.move"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Fault:
    """What a writer meets when ``after`` samples have been handed over."""

    after: int
    limit: int | None = None
    """Bytes of a file beyond which the kernel refuses to write; None: the source raises."""
    deadly: bool = False
    """True if reaching the limit ends the process instead."""

    def strike(self) -> None:
        """Make it so, in the writer's process."""
        if self.limit is None:
            raise RuntimeError("the engine died")
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if self.deadly else signal.SIG_IGN)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, hard))


class Process:
    """A forked process that reports over a pipe."""

    def __init__(self, work: Callable[[Connection], Any]) -> None:
        self._pipe, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=_run, args=(theirs, work), daemon=True)
        self._process.start()
        theirs.close()

    def next(self, timeout_s: float = DEADLINE_S) -> tuple[str, Any] | None:
        """Return what it reports next; how it died, if it did; None if it says nothing."""
        ready = wait([self._pipe, self._process.sentinel], timeout_s)
        if self._pipe in ready or self._pipe.poll():
            with suppress(EOFError, ConnectionResetError):  # it ended without another word
                message: tuple[str, Any] = self._pipe.recv()
                return message
        elif not ready:
            return None
        self._process.join()
        code = self._process.exitcode or 0
        return "died", signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def go(self) -> None:
        """Let it go on from where it is held."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._pipe.send(None)

    def kill(self) -> None:
        """Kill it, in the middle of whatever it is doing."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _run(pipe: Connection, work: Callable[[Connection], Any]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # a file behind one of them would meet the limit too
        os.dup2(silent, stream)
    try:
        pipe.send(("done", work(pipe)))
    except BaseException as error:
        pipe.send(("raised", capture_store.told(error)))


class Writer:
    """A process that writes ``captures``, held before each and, with ``calls``, in between."""

    def __init__(
        self,
        store: CaptureStore,
        folder: Path,
        captures: Sequence[Capture],
        *,
        calls: bool = False,
        fault: Fault | None = None,
    ) -> None:
        def work(pipe: Connection) -> tuple[str, ...]:
            lock = threading.Lock()

            def hold(place: str) -> None:
                with lock:
                    pipe.send(("at", place))
                    pipe.recv()

            def hook(event: str, arguments: tuple[Any, ...]) -> None:
                if place := _place(event, arguments, folder):
                    hold(place)

            if calls:
                sys.addaudithook(hook)
            return tuple(store.write(folder, _handed(captures, hold, fault)))

        self._process = Process(work)
        self._held = False
        self.outcome: Outcome | None = None
        """How it ended, once it has."""

    def step(self, timeout_s: float = DEADLINE_S) -> str:
        """Return the place where it is held next; empty if it has ended, or says nothing."""
        if self.outcome is not None:
            return ""
        message = self._process.next(timeout_s)
        match message:
            case ("at", place):
                self._held = True
                return str(place)
            case ("done", written):
                self.outcome = Outcome(written=written)
            case ("raised", error):
                self.outcome = Outcome(error=error)
            case ("died", how):
                self.outcome = Outcome(error=f"nothing: it was ended by {how}")
        return ""

    def go(self) -> None:
        """Let it go on."""
        self._held = False
        self._process.go()

    def reach(self, number: int) -> str:
        """Let it go on up to the place of that number, from 0, and hold it there."""
        place = self.step()
        for _ in range(number):
            self.go()
            place = self.step()
        return place

    def finish(self, timeout_s: float = DEADLINE_S) -> Outcome:
        """Let it run to its end."""
        if self._held:
            self.go()
        while self.outcome is None and self.step(timeout_s):
            self.go()
        if self.outcome is None:
            self.outcome = Outcome(error=f"nothing: it hung for {timeout_s:g} s")
        self.kill()
        return self.outcome

    def settle(self) -> None:
        """Let it run to its end, or to where it waits for somebody else."""
        while self.outcome is None and self.step(SETTLE_S):
            self.go()

    def kill(self) -> None:
        """Kill it where it is."""
        self._process.kill()


def _handed(
    captures: Sequence[Capture], hold: Callable[[str], None], fault: Fault | None
) -> Iterator[Capture]:
    for index in range(len(captures) + 1):
        hold(handed(index))
        if fault is not None and fault.after == index:
            fault.strike()
        if index < len(captures):
            yield captures[index]


def handed(count: int) -> str:
    """Name the place where a writer has been given so many samples and asks for more."""
    return f"with {count} samples handed over"


def _place(event: str, arguments: tuple[Any, ...], folder: Path) -> str:
    """Name a call that changes files in the folder; empty for any other."""
    if event == "open":
        if not arguments[2] & _WRITES:
            return ""
    elif event not in _EVENTS:
        return ""
    for path in arguments[:2]:
        if isinstance(path, (str, bytes, os.PathLike)):
            name = os.path.relpath(os.fsdecode(path), folder)
            if not name.startswith(".."):
                return f"before {event.removeprefix('os.')} of {name}"
    return ""


class Reader:
    """A process that reads a folder, or several one after another."""

    def __init__(
        self, store: CaptureStore, folders: Sequence[Path], written: Sequence[Capture]
    ) -> None:
        self._store, self._folders, self._written = store, folders, written
        self._found: list[Read] = []
        self._process = self._start()

    def _start(self) -> Process:
        def work(pipe: Connection) -> None:
            for folder in self._folders[len(self._found) :]:
                pipe.send(("read", capture_store.read(self._store, folder, self._written)))

        return Process(work)

    def results(self, timeout_s: float = DEADLINE_S) -> list[Read] | None:
        """Return what it read, one entry a folder; None if it does not answer so soon."""
        while len(self._found) < len(self._folders):
            match self._process.next(timeout_s):
                case None:
                    return None
                case ("read", found):
                    self._found.append(found)
                    continue
                case ("died", how):
                    self._found.append(Read(error=f"nothing: the process was ended by {how}"))
                case (_, what):
                    self._found.append(Read(error=str(what)))
            self._process.kill()
            self._process = self._start()
        self._process.kill()
        return self._found

    def kill(self) -> None:
        """End it."""
        self._process.kill()

    def wait(self) -> list[Read]:
        """Return what it read; a process that hangs has read nothing."""
        if (found := self.results()) is not None:
            return found
        self._process.kill()
        hung = Read(error=f"nothing: it hung for {DEADLINE_S:g} s")
        return self._found + [hung] * (len(self._folders) - len(self._found))


class LoopingReader:
    """A process that reads a folder over and over until it is told to stop."""

    def __init__(self, store: CaptureStore, folder: Path, written: Sequence[Capture]) -> None:
        def work(pipe: Connection) -> tuple[int, Read]:
            count = 0
            while True:
                last = pipe.poll()  # asked before the read: one read comes after the writer's end
                found = capture_store.read(store, folder, written)
                count += 1
                if last or found.fault:
                    return count, found

        self._process = Process(work)

    def stop(self) -> tuple[int, Read]:
        """Return how often it read, and the first bad read or the last one."""
        self._process.go()
        match self._process.next():
            case ("done", result):
                count, found = result
            case told:
                count, found = 0, Read(error=f"nothing: {told or 'it hung'}")
        self._process.kill()
        return count, found

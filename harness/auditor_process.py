"""Starts an auditor, hands it tasks, and waits for it no longer than was agreed.

An auditor that dies, hangs or cannot run is an error of the caller's (``CouldNotRun``): an audit
that was not made is neither a yes nor a no.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from truetap.harness import reaper
from truetap.harness.auditor import Finding, Task
from truetap.harness.errors import CouldNotRun, IntegrityError, TruetapError

MADE_UP = "then run truetap extract again: it makes up for the audit first"
_KINDS: dict[str, type[TruetapError]] = {
    kind.__name__: kind for kind in (CouldNotRun, IntegrityError)
}


class Checker(Protocol):
    """Somebody who captures samples again. Findings come in the order of the tasks."""

    def submit(self, task: Task) -> None:
        """Hand over a task and return at once, if that can be."""
        ...

    def finished(self) -> Finding | None:
        """Return the next finding if there is one already."""
        ...

    def wait(self) -> Finding:
        """Return the next finding; ``CouldNotRun`` if it does not come in time."""
        ...

    def close(self) -> None:
        """End it, whatever it is doing."""
        ...


class Auditor:
    """A process of the lowest priority that holds the reference; it starts to load at once."""

    def __init__(self, model: Path, dtype: str, *, log: Path, deadline_s: float) -> None:
        self._log, self._deadline_s = log, deadline_s
        reaper.watch_over_me()
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "truetap.harness.auditor", str(model), dtype]
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # The engine has the GPUs; so much as a CUDA context would take memory from it.
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            )
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                with suppress(ValueError):  # torn by the auditor's death, which comes next
                    self._answers.put(json.loads(line))
        self._answers.put(None)

    def submit(self, task: Task) -> None:
        """Hand over a task."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(task)) + "\n")
            self._process.stdin.flush()
        except OSError:
            while True:  # it is gone; this ends with why, in its own words if it had any
                self.wait()

    def finished(self) -> Finding | None:
        """Return the next finding, or None if it is not there yet."""
        try:
            return self._understood(self._answers.get_nowait())
        except queue.Empty:
            return None

    def wait(self) -> Finding:
        """Return the next finding."""
        try:
            return self._understood(self._answers.get(timeout=self._deadline_s))
        except queue.Empty:
            self.close()
            raise CouldNotRun(
                f"the audit was not done within {self._deadline_s:g} s",
                remedy=f"lower audit.max_tokens or raise audit.deadline_s, {MADE_UP}",
            ) from None

    def _understood(self, answer: dict[str, Any] | None) -> Finding:
        if answer is None:
            self._answers.put(None)  # for whoever asks next
            raise self._gone()
        if error := answer.get("error"):
            kind = _KINDS.get(error["kind"], CouldNotRun)
            raise kind(f"the audit failed to run: {error['text']}", remedy=error["remedy"])
        found = answer["finding"]
        return Finding(**found | {"slots": tuple(found["slots"])})

    def _gone(self) -> CouldNotRun:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.close()
            code = self._process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return CouldNotRun(
            f"the auditor {how}, so what was captured since the last audit is unproven",
            remedy=f"see {self._log}; free memory if the system killed it, {MADE_UP} (with "
            "audit.enabled = false nothing more is audited, and the manifest shows it)",
        )

    def close(self) -> None:
        """Kill the process if it still runs."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):  # an unread task in the buffer
                self._process.stdin.close()

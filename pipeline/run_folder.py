"""The folder of one run: where each stage's results are, and what they were made from.

A stage finds its own results and continues them. ``claim`` makes sure that they come from the same
verifier and settings: results of another verifier are never mixed in, nor overwritten.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from truetap.harness.environment import differences
from truetap.harness.errors import CouldNotRun, IntegrityError, UsageError


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    root: Path

    @property
    def report(self) -> Path:
        """Conformance report of this run's capture path."""
        return self.root / "conform" / "report.json"

    @property
    def certificate(self) -> Path:
        """Certificate, present only if the capture path conforms."""
        return self.root / "certificate.json"

    @property
    def conversations(self) -> Path:
        """Questions with the verifier's answers, for training and validation."""
        return self.root / "conversations.jsonl"

    @property
    def heldout(self) -> Path:
        """Questions for evaluation only."""
        return self.root / "heldout.jsonl"

    @property
    def dropped(self) -> Path:
        """Dialogues, or last turns of some, that were given up while they were answered."""
        return self.root / "dropped.jsonl"

    @property
    def servers(self) -> Path:
        """What was seen of the servers that answered; absent unless one did."""
        return self.root / "servers.jsonl"

    @property
    def card(self) -> Path:
        """What the conversations were made from, for people."""
        return self.root / "README.md"

    @property
    def frequencies(self) -> Path:
        """How often each token occurs in the training conversations."""
        return self.root / "token-frequencies.json"

    @property
    def shards(self) -> Path:
        """Captured states."""
        return self.root / "shards"

    @property
    def speed(self) -> Path:
        """How fast the last extraction was, for ``truetap plan``."""
        return self.root / "extract-speed.json"

    @property
    def uncertified(self) -> Path:
        """What the gate said when it was overruled; absent in most folders."""
        return self.root / "uncertified.jsonl"

    @property
    def dataset(self) -> Path:
        """The conversations as speculators' trainer reads them, if exported."""
        return self.root / "dataset"

    @property
    def train(self) -> Path:
        """Checkpoints and metrics of training."""
        return self.root / "train"

    @property
    def head(self) -> Path:
        """The trained draft head, as an engine loads it."""
        return self.root / "head"

    @property
    def untrained_head(self) -> Path:
        """The head before its first step, to compare with."""
        return self.root / "head-untrained"

    @property
    def evaluate(self) -> Path:
        """Acceptance measurements."""
        return self.root / "evaluate"

    @property
    def logs(self) -> Path:
        """What the engines printed."""
        return self.root / "logs"

    def claim(self, section: str, facts: Mapping[str, Any]) -> None:
        """Record what a stage's results are made from, or refuse if they were made otherwise."""
        path = self.root / "made-from.json"
        known: dict[str, Any] = read_json(path) if path.exists() else {}
        made_from = json.loads(json.dumps(facts))
        if section in known and known[section] != made_from:
            changed = [
                text.replace("when certified", "then")
                for text in differences(known[section], made_from)
            ]
            raise UsageError(
                f"{self.root} holds results made otherwise: {'; '.join(changed)}",
                remedy="choose another output folder, or delete this one",
            )
        if section not in known:
            self.root.mkdir(parents=True, exist_ok=True)
            write_json(path, known | {section: made_from})

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder; a second process working in it is refused."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            file = (self.root / ".lock").open("w")
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise UsageError(
                f"the output folder cannot be used: {error}", remedy="choose another output folder"
            ) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CouldNotRun(
                    f"another truetap is working in {self.root}",
                    remedy="wait for it, or stop it",
                ) from None
            yield


def read_json(path: Path) -> Any:
    """Read a JSON file that truetap wrote."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise IntegrityError(
            f"{path} cannot be read: {error}", remedy="delete it and run the stage again"
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that it is there whole or not at all."""
    write_bytes(path, (json.dumps(value, indent=1) + "\n").encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".partial")
    with scratch.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    scratch.rename(path)


def whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a file that end in a newline; none if there is no file.

    A last line without one is being written, or its writer was interrupted: then the next
    ``append_line`` cuts it off. Reading changes nothing.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    return data[: data.rfind(b"\n") + 1].splitlines()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the whole lines of a JSON-lines file."""
    rows = []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            rows.append(json_object(line))
        except ValueError as error:
            raise IntegrityError(
                f"line {number} of {path} is not valid: {error}",
                remedy="delete the line, or the file, and run the stage again",
            ) from error
    return rows


def json_object(line: bytes) -> dict[str, Any]:
    """Return the object in one line; ``ValueError`` for anything else."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("not an object")  # noqa: TRY004
    return row


def append_line(path: Path, row: Mapping[str, Any], *, durable: bool = True) -> None:
    """Append one JSON line, durably; first cut off a line torn by an interruption.

    One that need not outlive the machine itself is on the disk with the next that has to. One
    process at a time: see ``RunFolder.lock``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        _cut_torn_line(file)
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        if durable:
            os.fsync(file.fileno())


def _cut_torn_line(file: BinaryIO) -> None:
    end = file.seek(0, os.SEEK_END)
    if end:
        file.seek(end - 1)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)

"""``truetap audit`` as a user runs it, and an audit that was interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from truetap.pipeline import cli
from truetap.pipeline.foreign import audit as auditing
from truetap.pipeline.foreign import state as state_file
from truetap.pipeline.foreign.producers.modelopt import ModelOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from truetap.pipeline.foreign.producers.sample import Found, Sample


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Run the command in this process, which has torch already; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["truetap", "audit", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    assert isinstance(code, int)
    return code


@pytest.mark.torch
def test_report_and_exit_codes(
    right: list[Any],
    layouts: dict[str, Any],
    verifier: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root, report = tmp_path / "data", tmp_path / "report.json"
    root.mkdir()
    data = [replace(kept, last_normed=True) for kept in right]
    layouts["modelopt"].write(root, data)
    common = (root, "--producer", "modelopt", "--model", verifier, "--report", report)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}

    assert run(monkeypatch, *common, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(report.read_text())
    assert told["format"] == "truetap/audit/1"
    assert len(told["verifier"]["weights_sha256"]) == 64
    assert (tmp_path / "report.json.state").exists()
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before, "only read"

    assert run(monkeypatch, *common, "--boundaries", "1,5,8,12", "--resume") == 1
    told_text = capsys.readouterr().out
    assert "--boundaries says 1, 5, 8, 12; the slots hold 2, 6, 9, 12" in told_text
    assert "verdict: wrong" in told_text
    elsewhere = (*common[:-2], "--state", tmp_path / "state", "--report", "/proc/nowhere.json")
    assert run(monkeypatch, *elsewhere, "--sample", "9" * 30) == 3
    told_both = capsys.readouterr()
    assert "verdict: right" in told_both.out
    assert "the report cannot be written to /proc/nowhere.json" in told_both.err
    assert "--resume keeps what was found" in told_both.err
    (root / "conversation-3.pt").unlink()
    assert run(monkeypatch, *common, "--resume") == 2
    assert "1 files that were audited before are not there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sample", "none"), "--sample is a number from 1 on, or 'all', not 'none'"),
        (("--sample", "0"), "--sample is a number"),
        (("--sample", "²"), "--sample is a number"),
        (("--boundaries", "2;3"), "--boundaries is a list of numbers"),
        (("--producer", "eagle"), "Invalid value for '--producer'"),
    ],
)
def test_what_is_no_request(
    arguments: tuple[str, ...],
    message: str,
    paper_verifier: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    common = (tmp_path, "--producer", "modelopt", "--model", paper_verifier)
    assert run(monkeypatch, *common, *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.torch
@pytest.mark.parametrize(
    ("path", "model", "boundaries", "message"),
    [
        ("nowhere", "verifier", "2,12", "does not exist"),
        ("data", "nowhere", "2,12", "there is no verifier"),
        ("data", "list", "2,12", "does not describe a verifier"),
        ("data", "letters", "2,12", "does not describe a decoder-only verifier"),
        ("data", "verifier", "2,13", "boundary 13 is out of range"),
    ],
)
def test_what_is_not_there(
    path: str,
    model: str,
    boundaries: str,
    message: str,
    paper_verifier: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "data").mkdir()
    for odd, content in (("list", "[]"), ("letters", '{"num_hidden_layers": "x"}')):
        (tmp_path / odd).mkdir()
        (tmp_path / odd / "config.json").write_text(content)
    place = paper_verifier if model == "verifier" else tmp_path / model
    arguments = (tmp_path / path, "--producer", "modelopt", "--model", place)
    assert run(monkeypatch, *arguments, "--boundaries", boundaries) == 2
    assert message in capsys.readouterr().err


class Interrupted(ModelOptimizer):
    """Dies in the middle of its fifth file."""

    def read(self, found: Found) -> Iterator[Sample]:
        """Read, or end the process as a user's kill does."""
        reads = len(READ)
        READ.append(found.name)
        if reads == 4 and DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(found)


READ: list[str] = []
DIES: list[bool] = []


@pytest.mark.torch
def test_an_audit_that_was_killed_continues(
    right: list[Any],
    audited: Callable[..., Any],
    layouts: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state_file, "COMMIT_EVERY", 2)
    root = tmp_path / "data"
    root.mkdir()
    layouts["modelopt"].write(root, [replace(kept, last_normed=True) for kept in right])
    monkeypatch.setattr(
        auditing, "open_producer", lambda _name, path, facts: Interrupted(path, facts)
    )
    READ.clear()
    child = os.fork()
    if child == 0:
        DIES.append(True)
        try:
            audited("modelopt", None, sample=2)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    report = audited("modelopt", None, sample=2, resume=True).report
    assert report["verdict"] == "right"
    # Four were read and kept; now the other four are, and the two of the sample once more.
    assert len(READ) == 4 + 2
    assert report["totals"]["samples"] == 8


@pytest.mark.torch
def test_files_may_come_while_the_folder_is_read(
    right: list[Any],
    audited: Callable[..., Any],
    layouts: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = tmp_path / "data"
    root.mkdir()
    layouts["modelopt"].write(root, [replace(kept, last_normed=True) for kept in right[:2]])

    class Growing(ModelOptimizer):
        def files(self) -> Iterator[Found]:
            yield from super().files()
            (root / "late.pt").write_bytes((root / "conversation-1.pt").read_bytes())

    monkeypatch.setattr(auditing, "open_producer", lambda _name, path, facts: Growing(path, facts))
    report = audited("modelopt", None).report
    assert (report["files"]["found"], report["verdict"]) == (3, "right")


def test_help_teaches() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "truetap.pipeline.cli", "audit", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    for word in ("PATH is only read", "Exit codes", "--resume", "docs/audit.md"):
        assert word in done.stdout

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from truetap.harness.errors import CouldNotRun, IntegrityError, UsageError
from truetap.pipeline import run_folder
from truetap.pipeline.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FACTS = {"verifier": {"weights_sha256": "aa", "config_sha256": "cc"}, "boundaries": (2, 4)}


@pytest.fixture
def claimed(tmp_path: Path) -> RunFolder:
    """A folder with results made from FACTS."""
    folder = RunFolder(tmp_path / "run")
    folder.claim("capture", FACTS)
    folder.shards.mkdir()
    (folder.shards / "shard").write_bytes(b"states")
    return folder


def files_of(folder: RunFolder) -> dict[str, bytes]:
    files = (path for path in folder.root.rglob("*") if path.is_file())
    return {str(path.relative_to(folder.root)): path.read_bytes() for path in files}


def test_the_same_facts_are_accepted_again(claimed: RunFolder) -> None:
    before = files_of(claimed)
    claimed.claim("capture", FACTS)  # a tuple, which JSON gave back as a list
    assert files_of(claimed) == before


def test_another_section_is_added_to_the_first(claimed: RunFolder) -> None:
    claimed.claim("data", {"train": 3})
    made_from = json.loads((claimed.root / "made-from.json").read_text())
    assert made_from["data"] == {"train": 3}
    assert made_from["capture"]["verifier"] == FACTS["verifier"]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            {"verifier": {"weights_sha256": "bb", "config_sha256": "cc"}},
            ["verifier.weights_sha256 was 'aa' then and is 'bb'"],
        ),
        ({"boundaries": [2, 5]}, ["boundaries was [2, 4] then and is [2, 5]"]),
        ({"dtype": "float32"}, ["dtype was 'absent' then and is 'float32'"]),
        (
            {"verifier": {"weights_sha256": "bb", "config_sha256": "dd"}},
            ["verifier.weights_sha256 was", "verifier.config_sha256 was"],
        ),
    ],
)
def test_other_facts_are_refused_and_nothing_is_touched(
    claimed: RunFolder, changed: dict[str, Any], named: list[str]
) -> None:
    before = files_of(claimed)
    with pytest.raises(UsageError) as caught:
        claimed.claim("capture", FACTS | changed)
    for difference in named:
        assert difference in str(caught.value)
    assert str(claimed.root) in str(caught.value)
    assert caught.value.remedy == "choose another output folder, or delete this one"
    assert files_of(claimed) == before


def test_a_made_from_that_is_broken_is_an_integrity_failure(claimed: RunFolder) -> None:
    (claimed.root / "made-from.json").write_text('{"capture": ')
    with pytest.raises(IntegrityError, match=r"made-from\.json cannot be read"):
        claimed.claim("capture", FACTS)


def test_lines_of_a_missing_file_are_none(tmp_path: Path) -> None:
    assert run_folder.read_lines(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("torn", [b'{"id": "c"', b'{"id": "c"}', b"\xff"])
def test_a_torn_last_line_is_not_read_and_the_next_writer_cuts_it_off(
    tmp_path: Path, torn: bytes
) -> None:
    path = tmp_path / "lines.jsonl"
    whole = b'{"id": "a"}\n{"id": "b"}\n'
    path.write_bytes(whole + torn)
    assert [row["id"] for row in run_folder.read_lines(path)] == ["a", "b"]
    assert path.read_bytes() == whole + torn, "a reader must not touch what is being written"
    run_folder.append_line(path, {"id": "c"})
    assert [row["id"] for row in run_folder.read_lines(path)] == ["a", "b", "c"]


@pytest.mark.parametrize("bad", [b'{"id": "b"', b'["b"]', b"", b"\xff\xfe"])
def test_a_corrupt_line_in_the_middle_is_named_and_kept(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    data = b'{"id": "a"}\n' + bad + b'\n{"id": "c"}\n'
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"line 2 of .*lines\.jsonl is not valid"):
        run_folder.read_lines(path)
    assert path.read_bytes() == data


def test_lines_that_need_not_outlive_the_machine_wait_for_one_that_has_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "lines.jsonl", []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(path.read_bytes().count(b"\n")))
    for number in range(5):
        run_folder.append_line(path, {"step": number}, durable=number % 2 == 1)
        assert len(run_folder.read_lines(path)) == number + 1  # whoever reads sees it at once
    assert synced == [2, 4]


@pytest.mark.parametrize("fails_in", ["dump", "fsync"])
def test_json_that_fails_to_be_written_leaves_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_in: str
) -> None:
    path = tmp_path / "value.json"
    run_folder.write_json(path, {"value": 1})
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    value: Any = {"value": 2, "more": object()} if fails_in == "dump" else {"value": 2}
    if fails_in == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    with pytest.raises((TypeError, OSError)):
        run_folder.write_json(path, value)
    assert path.read_bytes() == before
    monkeypatch.undo()
    run_folder.write_json(path, {"value": 2})
    assert run_folder.read_json(path) == {"value": 2}


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds ``tmp_path``."""
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from truetap.pipeline.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).lock():\n print('held', flush=True)\n time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_folder_is_held_by_one_process_until_it_dies(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(CouldNotRun, match=f"another truetap is working in {tmp_path}"):
        folder.lock().__enter__()
    holder.send_signal(signal.SIGKILL)
    holder.wait(10)
    with folder.lock():
        assert folder.root.is_dir()


def test_a_folder_can_be_held_again_after_an_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new" / "run")
    with pytest.raises(ZeroDivisionError), folder.lock():
        _ = 1 / 0
    with folder.lock(), pytest.raises(CouldNotRun), folder.lock():
        pass


@pytest.mark.parametrize("where", ["file", "file/run"])
def test_an_output_that_cannot_be_a_folder_is_refused(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="the output folder cannot be used") as caught:
        RunFolder(tmp_path / where).lock().__enter__()
    assert caught.value.remedy == "choose another output folder"

"""Digests that are remembered: only of the very same file, and never in place of a right one."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from truetap.harness import digest_cache, verifier

LONG_AGO = 10**18


class Counted:
    """How often a file was really digested."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        real = digest_cache._worked_out

        def worked_out(path: Path) -> str:
            self.times += 1
            return real(path)

        monkeypatch.setattr(digest_cache, "_worked_out", worked_out)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, for files of any size and age."""
    monkeypatch.setattr(digest_cache, "user_cache_path", lambda _name: tmp_path / "cache")
    monkeypatch.setattr(digest_cache, "SMALLEST", 1)
    monkeypatch.setattr(digest_cache, "SETTLED_NS", -LONG_AGO)
    digest_cache._known.cache_clear()
    return tmp_path / "cache" / "digests"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def again(path: Path) -> str:
    """Ask as another process would."""
    digest_cache._known.cache_clear()
    return digest_cache.digest_of(path)


def right(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_digest_is_worked_out_once(tmp_path: Path, cache: Path, counted: Counted) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"weights")
    assert [digest_cache.digest_of(path) for _ in range(3)] == [right(path)] * 3
    assert again(path) == right(path)
    assert counted.times == 1
    assert len(list(cache.iterdir())) == 1


def test_other_bytes_of_the_same_size_and_time_are_another_file(
    tmp_path: Path, cache: Path, counted: Counted
) -> None:
    """Times of files can be set; that of the change of the file itself cannot."""
    path = tmp_path / "weights"
    path.write_bytes(b"weights")
    told = path.stat()
    before = digest_cache.digest_of(path)
    while path.stat().st_ctime_ns == told.st_ctime_ns:
        path.write_bytes(b"WEIGHTS")
        os.utime(path, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert path.stat().st_mtime_ns == told.st_mtime_ns
    assert again(path) == right(path) != before
    assert counted.times == 2
    assert len(list(cache.iterdir())) == 1


@pytest.mark.usefixtures("cache")
def test_a_file_moved_over_another_is_another(tmp_path: Path) -> None:
    path, other = tmp_path / "weights", tmp_path / "new"
    for file, content in ((path, b"weights"), (other, b"WEIGHTS")):
        file.write_bytes(content)
        os.utime(file, ns=(LONG_AGO, LONG_AGO))
    digest_cache.digest_of(path)
    other.rename(path)
    assert again(path) == right(path) == hashlib.sha256(b"WEIGHTS").hexdigest()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda _: "",
        lambda _: "{",
        lambda _: "[]",
        lambda _: "null",
        lambda _: "[" * 100_000,
        lambda text: json.dumps(json.loads(text) | {"sha256": "0" * 64}),
        lambda text: json.dumps(json.loads(text) | {"sha256": 7}),
        lambda text: json.dumps(json.loads(text) | {"stamp": "other"}),
        lambda _: "\ud800",
    ],
)
def test_a_damaged_entry_is_worked_out_anew_and_mended(
    tmp_path: Path, cache: Path, counted: Counted, spoil: Any
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"weights")
    digest_cache.digest_of(path)
    (entry,) = cache.iterdir()
    whole = entry.read_text()
    entry.write_text(spoil(whole), errors="surrogatepass")
    assert again(path) == right(path)
    assert counted.times == 2
    assert entry.read_text() == whole


def test_a_cache_that_cannot_be_written_is_only_slow(
    tmp_path: Path, cache: Path, counted: Counted
) -> None:
    cache.parent.write_text("a file where the folder would be")
    path = tmp_path / "weights"
    path.write_bytes(b"weights")
    assert [again(path), again(path)] == [right(path)] * 2
    assert counted.times == 2


def test_a_file_changed_just_now_or_meanwhile_is_not_remembered(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"weights")
    with monkeypatch.context() as patched:
        patched.setattr(digest_cache, "SETTLED_NS", LONG_AGO * 10)
        assert digest_cache.digest_of(path) == right(path)
    real = digest_cache._worked_out

    def changed_meanwhile(file: Path) -> str:
        digest = real(file)
        file.write_bytes(b"weights and more")
        return digest

    monkeypatch.setattr(digest_cache, "_worked_out", changed_meanwhile)
    again(path)
    assert not cache.exists()


def test_small_files_are_not_looked_up(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_cache, "SMALLEST", 8)
    path = tmp_path / "weights"
    path.write_bytes(b"weights")
    assert digest_cache.digest_of(path) == right(path)
    assert not cache.exists()
    path.write_bytes(b"weights!")
    assert digest_cache.digest_of(path) == right(path)
    assert cache.exists()


@pytest.mark.usefixtures("cache")
def test_a_verifiers_weights_are_remembered_and_its_other_files_are_not(
    tmp_path: Path, counted: Counted
) -> None:
    folder = tmp_path / "verifier"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (folder / name).write_bytes(name.encode())
    first = verifier.digests(folder)
    digest_cache._known.cache_clear()
    assert verifier.digests(folder) == first
    assert counted.times == 2
    (folder / "model-2.safetensors").write_bytes(b"other weights")
    digest_cache._known.cache_clear()
    changed = verifier.digests(folder)
    assert changed["weights_sha256"] != first["weights_sha256"]
    assert changed["config_sha256"] == first["config_sha256"]
    assert counted.times == 3

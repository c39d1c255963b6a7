"""Stores at URLs: in memory, which has no rename, and on the disk."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from truetap.harness import shard
from truetap.harness.errors import CouldNotRun, IntegrityError, UsageError
from truetap.pipeline import cli, remote_store, run_folder
from truetap.pipeline.audit_log import AuditLog
from truetap.pipeline.remote_store import RemoteStore
from truetap.pipeline.store import Store, sealed
from truetap.pipeline.store_reader import StoreReader, open_source

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.torch

SHARDS = 5


def write(store: Store, number: int, value: float = 0.0, **more: Any) -> None:
    import torch

    name = f"shard-{number}.safetensors"
    store.folder.mkdir(parents=True, exist_ok=True)
    digests = shard.write_partial(
        store.path(name),
        [torch.full((n, 2, 3), number + n + value) for n in (2, 3)],
        [[number] * 2, [number] * 3],
        [b"\0\1", b"\0\1\1"],
    )
    store.record({"shard": name, "digests": digests, "ids": [f"{number}a", f"{number}b"], **more})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "run" / "shards")
    for number in range(SHARDS):
        write(made, number)
    (made.folder / "certificates").mkdir()
    (made.folder / "certificates" / "c.json").write_text("certified")
    AuditLog(made).set_aside([{"shard": "shard-7", "digests": {"states": "7"}}])
    return made


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/remote/run"
        return
    import fsspec

    memory = fsspec.filesystem("memory")
    yield "memory://bucket/run"
    memory.rm("/bucket", recursive=True)


def publish(store: Store, url: str) -> list[int]:
    return [now for now, _ in remote_store.publish(store, RemoteStore(url))]


def files_at(url: str) -> tuple[Any, str]:
    import fsspec

    files, root = fsspec.url_to_fs(url)
    return files, str(root)


def contents(url: str) -> dict[str, bytes]:
    files, root = files_at(url)
    return {path.rpartition("/run/")[2]: files.cat_file(path) for path in files.find(root)}


def damage(url: str, name: str, at: int) -> None:
    files, root = files_at(f"{url}/{name}")
    data = bytearray(files.cat_file(root))
    data[at] ^= 1
    files.pipe_file(root, bytes(data))


def test_what_is_published_is_read_back_and_nothing_else_is_left(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(remote_store, "BATCH", 2)
    assert publish(store, url) == [0, 2, 4, 5]
    assert sorted(contents(url)) == [
        "audits.jsonl", "certificates/c.json", "manifest.jsonl",
        *(f"shard-{n}.safetensors" for n in range(SHARDS)),
    ]  # fmt: skip
    assert contents(url)["certificates/c.json"] == b"certified"
    assert contents(url)["audits.jsonl"] == AuditLog(store).path.read_bytes()
    assert contents(url)["manifest.jsonl"] == store.manifest.read_bytes()
    there, here = (list(StoreReader(source)) for source in (open_source(url), store))
    assert [sample.id for sample in there] == [sample.id for sample in here]
    for one, other in zip(there, here, strict=True):
        assert torch.equal(one.states, other.states)
        assert torch.equal(one.token_ids, other.token_ids)
    assert publish(store, url) == [SHARDS]


def test_a_shard_captured_again_is_sent_again_and_no_other(store: Store, url: str) -> None:
    publish(store, url)
    write(store, 1, value=0.5)
    assert publish(store, url) == [SHARDS - 1, SHARDS]
    reader = StoreReader(open_source(url))
    assert float(reader["1a"].states[0, 0, 0]) == 3.5
    assert float(reader["2a"].states[0, 0, 0]) == 4.0
    assert list(RemoteStore(url).entries()) == list(store.entries())


def test_an_upload_that_stops_leaves_whole_shards_and_goes_on(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "BATCH", 2)
    remote = RemoteStore(url)
    real = remote._files.put_file
    sent: list[str] = []

    def put(path: str, target: str) -> None:
        if "shard-3" in target:
            raise OSError(28, "No space left on device")
        sent.append(target)
        real(path, target)

    monkeypatch.setattr(remote._files, "put_file", put)
    with pytest.raises(CouldNotRun, match=r"cannot be used: OSError: .*No space left"):
        list(remote_store.publish(store, remote))
    monkeypatch.undo()
    assert sum("shard-" in path for path in sent) == 3  # the third has no line yet
    reader = StoreReader(open_source(url))
    assert list(reader.ids) == ["0a", "0b", "1a", "1b"]
    assert len(list(reader)) == 4
    assert publish(store, url) == [2, SHARDS]


def test_an_upload_that_came_short_is_seen_before_it_counts(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RemoteStore(url)
    real = remote._files.put_file

    def put(path: str, target: str) -> None:
        real(path, target)
        if "shard-2" in target:
            remote._files.pipe_file(target, remote._files.cat_file(target)[:-1])

    monkeypatch.setattr(remote._files, "put_file", put)
    with pytest.raises(IntegrityError, match=r"bytes of shard-2\.safetensors .* came to"):
        list(remote_store.publish(store, remote))
    assert "shard-2.safetensors" not in contents(url)
    assert RemoteStore(url).entries() == {}


def test_a_second_writer_is_found_out(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RemoteStore(url)
    real = remote._files.put_file
    done: list[str] = []

    def put(path: str, target: str) -> None:
        real(path, target)
        if not done:
            done.append(target)
            other = Store(store.folder.parent / "other")
            write(other, 9)
            RemoteStore(url).record(
                [(other.path(name), entry) for name, entry in other.entries().items()]
            )

    monkeypatch.setattr(remote._files, "put_file", put)
    entries = [(store.path(name), entry) for name, entry in store.entries().items()]
    with pytest.raises(CouldNotRun, match="another process has written"):
        remote.record(entries)
    assert list(RemoteStore(url).entries()) == ["shard-9.safetensors"]


def audited(store: Store, *shards: str, verdict: str = "pass") -> None:
    entries = store.entries()
    states = {name: entries[name]["digests"]["states"] for name in shards}
    line = {
        "shard": shards[-1],
        "states": states[shards[-1]],
        "verdict": verdict,
        "answers_for": states if verdict == "pass" else {},
    }
    run_folder.append_line(AuditLog(store).path, sealed(line))


def test_a_shard_goes_out_only_when_an_audit_answers_for_it(store: Store, url: str) -> None:
    five, six = (f"shard-{n}.safetensors" for n in (5, 6))
    for number in (5, 6):
        write(store, number, audit={"promised": True})
    assert publish(store, url)[-1] == SHARDS
    assert not {five, six} & set(contents(url))
    audited(store, five)
    assert remote_store.withheld(store) == [six]
    assert publish(store, url) == [SHARDS, SHARDS + 1]
    audited(store, six, verdict="fail")
    assert publish(store, url) == [SHARDS + 1]
    assert six not in contents(url)


def test_a_damaged_local_shard_is_not_sent(store: Store, url: str) -> None:
    path = store.path("shard-0.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="is corrupt"):
        publish(store, url)
    assert RemoteStore(url).entries() == {}


@pytest.mark.parametrize("at", [-1, 3, 400])
def test_a_changed_byte_in_a_remote_shard_is_found(store: Store, url: str, at: int) -> None:
    publish(store, url)
    damage(url, "shard-1.safetensors", at)
    reader = StoreReader(open_source(url))
    assert reader["0a"].id == "0a"
    with pytest.raises(IntegrityError, match=r"shard-1\.safetensors (is corrupt|cannot be read)"):
        reader["1a"]


def test_every_download_is_compared_not_only_the_first(store: Store, url: str) -> None:
    publish(store, url)
    reader = StoreReader(open_source(url), keep=1)
    assert [reader[name].id for name in ("1a", "0a")] == ["1a", "0a"]
    damage(url, "shard-1.safetensors", -1)
    with pytest.raises(IntegrityError, match="is corrupt"):
        reader["1a"]


def test_a_changed_byte_in_a_remote_manifest_is_found(store: Store, url: str) -> None:
    publish(store, url)
    damage(url, "manifest.jsonl", contents(url)["manifest.jsonl"].index(b'"1a"') + 1)
    with pytest.raises(IntegrityError, match=r"line 2 of .*manifest\.jsonl is not as it was"):
        StoreReader(open_source(url))


def test_a_shard_that_is_not_there_and_a_name_that_leads_out(store: Store, url: str) -> None:
    publish(store, url)
    files, root = files_at(url)
    files.rm(f"{root}/shard-1.safetensors")
    with pytest.raises(IntegrityError, match=r"shard-1\.safetensors is missing"):
        StoreReader(open_source(url))["1a"]
    with pytest.raises(IntegrityError, match="names a shard"):
        RemoteStore(url).mapped({"shard": "../shard-0.safetensors"})


def test_downloads_leave_no_files(
    store: Store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, url)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    kept = list(StoreReader(open_source(url)))
    assert not list(scratch.iterdir())
    assert sum(float(sample.states.sum()) for sample in kept) > 0  # still mapped


def test_packed_shards_are_smaller_and_the_same(store: Store, url: str) -> None:
    import torch

    assert [now for now, _ in remote_store.publish(store, RemoteStore(url), compress=True)][-1] == 5
    assert "shard-0.packed.safetensors" in contents(url)
    assert "shard-0.safetensors" not in contents(url)
    there, here = StoreReader(open_source(url)), StoreReader(store)
    for sample in here:
        assert torch.equal(there[sample.id].states, sample.states)
        assert there[sample.id].token_ids.tolist() == sample.token_ids.tolist()
    assert publish(store, url) == [SHARDS]  # it has them, packed or not
    write(store, 2, value=0.5)
    publish(store, url)
    assert "shard-2.safetensors" in contents(url)
    assert "shard-2.packed.safetensors" not in contents(url)
    assert float(StoreReader(open_source(url))["2a"].states[0, 0, 0]) == 4.5


@pytest.mark.parametrize("part", [0.05, 0.3, 0.5, 0.7, 0.999])
def test_a_changed_byte_in_a_packed_shard_is_found(store: Store, url: str, part: float) -> None:
    list(remote_store.publish(store, RemoteStore(url), compress=True))
    name = "shard-1.packed.safetensors"
    damage(url, name, int(part * len(contents(url)[name])))
    reader = StoreReader(open_source(url))
    with pytest.raises(IntegrityError, match=r"shard-1.*(is corrupt|cannot be read)"):
        reader["1a"]


@pytest.mark.parametrize(
    ("where", "said"),
    [("nothing://x", "is no URL of a store"), ("s3", "is no URL"), ("s3://x/y", "s3fs")],
)
def test_addresses_that_lead_nowhere_are_one_sentence(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
    said: str,
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    code, _, err = truetap(monkeypatch, capsys, store, tmp_path, where)
    assert code == (3 if said == "s3fs" else 2)
    assert said in err
    assert "Traceback" not in err
    with pytest.raises((UsageError, CouldNotRun)):
        RemoteStore("nothing://x" if "://" not in where else where)


def truetap(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, store: Store, folder: Path, *arguments: str
) -> tuple[int, str, str]:
    config = folder / "run.toml"
    config.write_text(f'output = "{store.folder.parent}"\n[verifier]\ndirectory = "/nowhere"\n')
    monkeypatch.setattr(sys, "argv", ["truetap", "publish", str(config), *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_verb_publishes_and_says_so(
    store: Store,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for _ in range(2):
        code, out, _ = truetap(monkeypatch, capsys, store, tmp_path, url, "--compress")
        assert code == 0
        assert f"has all {SHARDS} shards, packed to " in out
    write(store, 7, audit={"promised": True})
    code, out, _ = truetap(monkeypatch, capsys, store, tmp_path, url)
    assert code == 0
    assert "kept back until an audit answers for them: 1 shards" in out
    code, _, err = truetap(monkeypatch, capsys, Store(tmp_path / "x" / "shards"), tmp_path, url)
    assert code == 2
    assert "there are no shards in" in err

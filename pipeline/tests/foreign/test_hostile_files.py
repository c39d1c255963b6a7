"""Files of somebody who means harm, or that are broken: named, never run, never followed."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from truetap.harness.errors import IntegrityError, UsageError
from truetap.harness.verifier import VerifierFacts
from truetap.pipeline.foreign.producers import open_producer, torch_file
from truetap.pipeline.foreign.producers.folder import walk
from truetap.pipeline.foreign.producers.sample import BadFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.torch
LIMIT = 1 << 20


class Touches:
    """A pickle of it creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def saved(content: Any) -> bytes:
    import torch

    raw = io.BytesIO()
    torch.save(content, raw)
    return raw.getvalue()


@pytest.mark.parametrize("wrapped", ["in a zip", "bare", "packed"])
def test_no_code_of_a_file_is_run(wrapped: str, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    content = {"input_ids": Touches(proof)}
    pickle.loads(pickle.dumps(Touches(tmp_path / "it works")))
    assert (tmp_path / "it works").exists(), "loaded by pickle, it does what it is for"
    raw = pickle.dumps(content) if wrapped == "bare" else saved(content)
    path = tmp_path / ("data_0.ckpt.gz" if wrapped == "packed" else "data_0.ckpt")
    path.write_bytes(gzip.compress(raw) if wrapped == "packed" else raw)
    with pytest.raises(BadFile) as refused:
        torch_file.load(path, limit=LIMIT)
    assert refused.value.problem.code == ("unreadable" if wrapped == "bare" else "code")
    assert not proof.exists()


def test_such_a_file_is_listed_and_the_rest_is_judged(
    right: list[Any], audited: Callable[..., Any], tmp_path: Path
) -> None:
    from dataclasses import replace

    audited("specforge", [replace(kept, last_normed=True) for kept in right], sample=1)
    proof = tmp_path / "proof"
    folder = tmp_path / "data" / "rows_0-2000"
    (folder / "data_90.ckpt").write_bytes(saved({"input_ids": Touches(proof)}))
    (folder / "data_91.ckpt").write_bytes(b"no archive at all")
    (folder / "data_92.ckpt").write_bytes((folder / "data_1.ckpt").read_bytes()[:-700])
    (folder / "data_93.ckpt.gz").write_bytes(gzip.compress(b"\0" * 20_000_000))
    (folder / "data_94.ckpt.gz").write_bytes(gzip.compress(b"\0" * 90_000)[:-30])
    (folder / "data_95.ckpt").symlink_to("/etc/hostname")
    (folder / "data_96.ckpt").symlink_to(folder / "data_96.ckpt")
    os.mkfifo(folder / "data_97.ckpt")
    (folder / "data_98.ckpt").write_bytes(b"")
    result = audited("specforge", None, sample=1)
    assert not proof.exists()
    assert result.errors == {
        "code": ["data_90.ckpt"],
        "link": ["data_95.ckpt", "data_96.ckpt"],
        "truncated": ["data_92.ckpt", "data_94.ckpt.gz"],
        "unreadable": ["data_91.ckpt", "data_93.ckpt.gz", "data_97.ckpt", "data_98.ckpt"],
    }
    assert result.report["says"] == "slots: boundary 2, 6, 9, 12 after the final norm"


def test_tensors_that_are_larger_than_their_bytes(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "data_0.ckpt"
    path.write_bytes(saved({"hidden_state": torch.zeros(1).expand(1 << 40)}))
    with pytest.raises(BadFile, match="no plain array"):
        torch_file.load(path, limit=LIMIT)
    path.write_bytes(saved({"hidden_states": [torch.zeros(1).expand(1 << 40)]}))
    with pytest.raises(BadFile, match="no plain array"):
        torch_file.load(path, limit=LIMIT)
    path.write_bytes(saved({"hidden_state": torch.zeros(8)}))
    assert torch_file.load(path, limit=LIMIT)["hidden_state"].shape == (8,)


def test_archives_that_unpack_to_more_than_they_are(tmp_path: Path) -> None:
    path = tmp_path / "data_0.ckpt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 5_000_000)
    with pytest.raises(BadFile, match="not an archive as torch"):
        torch_file.load(path, limit=LIMIT)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 1_050_000)
    with pytest.raises(BadFile, match="not an archive as torch"):
        torch_file.load(path, limit=LIMIT * 2)
    with pytest.raises(BadFile, match="larger than any states of this verifier"):
        torch_file.load(path, limit=LIMIT)


def test_a_small_file_that_unpacks_to_a_large_one(tmp_path: Path) -> None:
    path = tmp_path / "data_0.ckpt.gz"
    path.write_bytes(gzip.compress(b"\0" * (LIMIT + 1)))
    assert path.stat().st_size < LIMIT / 100
    with pytest.raises(BadFile, match="unpacks to more than any states of this verifier"):
        torch_file.load(path, limit=LIMIT)


FACTS = VerifierFacts("v", 12, 32, 512, 1024, {})


@pytest.mark.parametrize(
    ("raw", "code", "text"),
    [
        (b"", "truncated", "cut short: 0 bytes"),
        ((1 << 60).to_bytes(8, "little") + b"{}" * 50, "unreadable", "header is too long"),
        ((1 << 10).to_bytes(8, "little") + b"{}", "truncated", "fewer bytes than its header says"),
        ((4).to_bytes(8, "little") + b"!!!!", "unreadable", "safetensors cannot read it"),
        (None, "truncated", "fewer bytes than its header says"),
    ],
)
def test_safetensors_files_that_lie_about_themselves(
    raw: bytes | None, code: str, text: str, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import save_file

    path = tmp_path / "hs_0.safetensors"
    save_file({"token_ids": torch.arange(9), "hidden_states": torch.zeros(9, 2, 32)}, path)
    producer = open_producer("speculators", tmp_path, FACTS)
    (found,) = producer.files()
    assert len(next(producer.read(found)).token_ids) == 9
    path.write_bytes(path.read_bytes()[:-5] if raw is None else raw)
    with pytest.raises(BadFile, match=text) as refused:
        next(producer.read(found))
    assert refused.value.problem.code == code


def test_walks_below_the_folder_only(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    (inside / "deep" / "deeper").mkdir(parents=True)
    outside.mkdir()
    (outside / "a.pt").touch()
    for name in ("b.pt", "deep/c.pt", "deep/deeper/d.pt", "deep/e.txt"):
        (inside / name).touch()
    (inside / "folder").symlink_to(outside)
    (inside / "loop").symlink_to(inside)
    (inside / "f.pt").symlink_to(outside / "a.pt")
    (inside / "g.pt").symlink_to(inside / "b.pt")
    found = {f.name: f.problem for f in walk(inside, lambda name: name.endswith(".pt"))}
    assert set(found) == {"b.pt", "deep/c.pt", "deep/deeper/d.pt", "f.pt", "g.pt"}
    assert found["f.pt"] is not None
    assert found["f.pt"].code == "link"
    assert [name for name, problem in found.items() if problem] == ["f.pt"]


def test_a_dataset_that_points_out_of_its_folder(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file(
        {"token_ids": torch.arange(9), "hidden_states": torch.zeros(9, 2, 32)},
        tmp_path / "hs_0.safetensors",
    )
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "../data.arrow"}]}')
    producer = open_producer("speculators", tmp_path, FACTS)
    with pytest.raises(UsageError, match=r"names .\.\./data\.arrow., outside its folder"):
        next(producer.read(next(producer.files())))


def test_a_manifest_that_names_a_file_elsewhere(
    right: list[Any], audited: Callable[..., Any], tmp_path: Path
) -> None:
    from truetap.pipeline.store import Store

    audited("truetap", right, sample=1)
    store = Store(tmp_path / "data")
    entry = next(iter(store.entries().values()))
    store.append({**entry, "shard": "../shard-00000.safetensors"})
    with pytest.raises(IntegrityError, match=r"names '\.\./shard-00000\.safetensors'"):
        audited("truetap", None, sample=1)


@pytest.mark.parametrize("kind", ["nothing", "file", "empty"])
def test_a_path_without_data(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "path"
    if kind == "file":
        path.touch()
    elif kind == "empty":
        path.mkdir()
    with pytest.raises(UsageError):
        open_producer("modelopt", path, FACTS)

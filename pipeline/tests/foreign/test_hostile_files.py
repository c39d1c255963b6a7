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


def headed(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


FACTS = VerifierFacts("v", 12, 32, 512, 1024, {})


@pytest.mark.parametrize(
    ("raw", "code", "text"),
    [
        (b"", "truncated", "cut short: 0 bytes"),
        ((1 << 60).to_bytes(8, "little") + b"{}" * 50, "unreadable", "header is too long"),
        ((1 << 10).to_bytes(8, "little") + b"{}", "truncated", "fewer bytes than its header says"),
        ((4).to_bytes(8, "little") + b"!!!!", "unreadable", "safetensors cannot read it"),
        (
            headed(b'{"a":{"data_offsets":[0,Infinity]}}'),
            "unreadable",
            "safetensors cannot read it",
        ),
        (headed(b"[" * 100_000), "unreadable", "safetensors cannot read it"),
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


def test_names_that_are_no_text_are_spelt_out(
    right: list[Any], audited: Callable[..., Any], tmp_path: Path
) -> None:
    from dataclasses import replace

    audited("modelopt", [replace(kept, last_normed=True) for kept in right[:2]], sample=1)
    folder = tmp_path / "data"
    (folder / "conversation-1.pt").rename(folder / os.fsdecode(b"\xff.pt"))
    result = audited("modelopt", None, sample=1)
    assert result.errors == {"unreadable": ["\\udcff.pt"]}, "which torch cannot open either"
    assert result.report["files"] == {"found": 2, "bad": 1}


def test_states_of_odd_kinds(right: list[Any], audited: Callable[..., Any], tmp_path: Path) -> None:
    """Saved with gradients they are right; with no slots, or complex, they are not."""
    import torch
    from safetensors.torch import load_file, save_file

    audited("speculators-0.4", right[:2], sample=1)
    for path in (tmp_path / "data").glob("data_*.pt"):
        content = torch.load(path)
        for slot in content["hidden_states"]:
            slot.requires_grad_()
        torch.save(content, path)
    assert audited("speculators-0.4", None).report["verdict"] == "right"

    root = tmp_path / "new"
    root.mkdir()
    for index, kept in enumerate(right[:4]):
        tensors = {"token_ids": torch.tensor(kept.token_ids), "hidden_states": kept.slots}
        save_file(tensors, root / f"hs_{index}.safetensors")
    for index, change in ((1, lambda s: s[:, :0]), (2, lambda s: s.to(torch.complex64))):
        tensors = dict(load_file(root / f"hs_{index}.safetensors"))
        tensors["hidden_states"] = change(tensors["hidden_states"]).contiguous()
        save_file(tensors, root / f"hs_{index}.safetensors")
    (tmp_path / "data").rename(tmp_path / "old")
    root.rename(tmp_path / "data")
    result = audited("speculators", None)
    assert set(result.errors) == {"shape"}
    assert "it has no slots" in result.told("shape")
    assert "complex64: no real numbers" in result.told("shape")


COLUMNS: dict[str, dict[str, Any]] = {
    "no mask": {"loss_mask": [None, None]},
    "a mask of letters": {"loss_mask": ["x", "y"]},
    "one number": {"loss_mask": [1, 0]},
    "tokens of letters": {"input_ids": ["x", "y"]},
    "tokens in heaps": {"input_ids": [[[1], [2, 3]], [[4]]]},
}


@pytest.mark.parametrize("column", COLUMNS)
def test_a_dataset_of_other_columns_is_a_finding(
    column: str, right: list[Any], audited: Callable[..., Any], tmp_path: Path
) -> None:
    from datasets import Dataset

    audited("speculators", right[:2], sample=1)
    columns = {
        "input_ids": [kept.token_ids for kept in right[:2]],
        "loss_mask": [kept.mask for kept in right[:2]],
    }
    for path in (tmp_path / "data").glob("*.*"):
        path.unlink()
    Dataset.from_dict(columns | COLUMNS[column]).save_to_disk(tmp_path / "data")
    result = audited("speculators", None, sample=1)
    assert result.errors == {"row": ["hs_0.safetensors", "hs_1.safetensors"]}


def test_a_dataset_that_names_other_files_has_them_left_alone(
    right: list[Any], audited: Callable[..., Any], tmp_path: Path
) -> None:
    """A column of images is a column of paths, or addresses, which ``datasets`` would open."""
    import json

    from datasets import Dataset, load_from_disk

    audited("speculators", right[:1], sample=1)
    data = tmp_path / "data"
    for path in data.glob("*.*"):
        path.unlink()
    rows: dict[str, Any] = {"input_ids": [right[0].token_ids], "loss_mask": [right[0].mask]}
    rows["picture"] = [{"bytes": b"", "path": str(tmp_path / "elsewhere.png")}]
    Dataset.from_dict(rows).save_to_disk(data)
    info = json.loads((data / "dataset_info.json").read_text())
    info["features"]["picture"] = {"_type": "Image"}
    (data / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(Exception, match="image"):
        load_from_disk(str(data)).with_format("numpy")[0]
    assert audited("speculators", None).report["verdict"] == "right"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"ids": None}, "shape"),
        ({"ids": ["q0"]}, "shape"),
        ({"ids": ["a", "b", "c", "d"]}, "shape"),
        ({"ids": ["\ud800", "q1", "q2"]}, "shape"),
        ({"digests": [1]}, "digest"),
    ],
)
def test_a_manifest_s_line_that_does_not_fit_its_shard(
    change: dict[str, Any],
    code: str,
    right: list[Any],
    audited: Callable[..., Any],
    tmp_path: Path,
) -> None:
    from truetap.pipeline.store import Store

    audited("truetap", right, sample=1)
    store = Store(tmp_path / "data")
    entry = store.entries()["shard-00000.safetensors"]
    store.append({name: v for name, v in (entry | change).items() if v is not None})
    assert audited("truetap", None, sample=1).errors == {code: ["shard-00000.safetensors"]}
    store.append({**entry, "boundaries": None})
    assert audited("truetap", None, sample=1).report["verdict"] == "right"

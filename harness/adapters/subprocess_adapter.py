"""Capture by an executable of somebody else's, for engines that cannot share our environment.

``subprocess:PATH`` names it. It is run as ``PATH describe`` and as
``PATH capture --request FILE --out DIR``, a new process for each call; what is asked and answered
are files, JSON and safetensors, never pickles. ``conformance/ADAPTERS.md`` tells an author the
format. The reply that the executable gives for each rank is handed to the suite untouched.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import psutil
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, deserialize

from truetap.harness import boundaries, envelope, environment, reaper, verifier
from truetap.harness.errors import CouldNotRun, IntegrityError, UsageError
from truetap.harness.model import Capture, CaptureBatch, CaptureRequest, EngineSpec, Environment

PREFIX = "subprocess:"
FORMAT = "truetap/capture/1"
_DTYPES = {"F32": ("float32", "<f4"), "F16": ("float16", "<f2"), "BF16": ("bfloat16", "<u2")}


class _Captured(BaseModel):
    # May repeat all of its request: what requests hold can grow, and executables must outlive that.
    model_config = ConfigDict(extra="ignore", strict=True)
    key: str
    token_ids: list[int]
    generated: list[int] = []
    prompt_logprobs: list[float] | None = None


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    format: Literal["truetap/capture/1"]


class _Description(_Document):
    engine: str
    engine_version: str
    facts: dict[str, Any] = {}


class _Answer(_Document):
    replies: list[Any]
    boundaries: list[int]
    by_rank: list[str] = []
    preemptions: int | None = None
    captures: list[_Captured]
    last_boundary_normed: bool = False


T = TypeVar("T", bound=_Document)


class SubprocessAdapter:
    """An executable that speaks the protocol."""

    def __init__(self, path: str) -> None:
        self.name = PREFIX + path
        self._path = Path(path).absolute()

    def open(self, spec: EngineSpec, *, scratch: Path) -> SubprocessSession:
        """Have the executable describe itself; its engine starts with each capture."""
        return SubprocessSession(self.name, self._path, spec, scratch)


class SubprocessSession:
    """An executable, and the settings that each of its calls is given."""

    def __init__(self, name: str, path: Path, spec: EngineSpec, scratch: Path) -> None:
        facts = verifier.describe(Path(spec.model))
        self.boundaries = boundaries.check(spec.boundaries, facts.num_blocks)
        self._name, self._path, self._spec, self._scratch = name, path, spec, scratch
        self.log = scratch / "log.txt"
        self._calls = 0
        folder = self._call("describe", deadline_s=spec.startup_deadline_s)
        said = (folder / "output.txt").read_text(errors="replace").strip() or "nothing"
        # The last line: engines talk while they are imported.
        self._described = self._parsed(_Description, said.splitlines()[-1])

    def capture(self, requests: Sequence[CaptureRequest]) -> CaptureBatch:
        """Capture in one call of the executable."""
        nonce = envelope.new_nonce()
        answer, states = self._answer(requests, nonce, prompt_logprobs=False)
        slots, normed = tuple(answer.boundaries), answer.last_boundary_normed
        captures = tuple(
            Capture(
                captured.key,
                tuple(captured.token_ids),
                slots,
                rows,
                dtype,
                normed,
                tuple(captured.generated),
            )
            for captured, (rows, dtype) in zip(answer.captures, states, strict=True)
        )
        return CaptureBatch(
            captures,
            nonce,
            answer.replies,
            self._spec.tensor_parallel_size,
            answer.by_rank,
            answer.preemptions,
        )

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float] | None:
        """Ask in a call of its own: some engines capture otherwise while they score a prompt."""
        request = CaptureRequest("scored", tuple(token_ids))
        answer, _ = self._answer([request], envelope.new_nonce(), prompt_logprobs=True)
        return answer.captures[0].prompt_logprobs if answer.captures else None

    def environment(self) -> Environment:
        """Return what the executable says of its engine, and the digest of the executable."""
        facts = {
            **self._described.model_dump(exclude={"format"}),
            "model": self._spec.model,
            "dtype": self._spec.dtype,
            "world_size": self._spec.tensor_parallel_size,
        }
        digest = hashlib.sha256(self._path.read_bytes()).hexdigest()
        return environment.assemble(
            facts, boundaries=self.boundaries, adapter=self._name, adapter_digest=digest
        )

    def close(self) -> None:
        """Nothing runs between calls."""

    def _answer(
        self, requests: Sequence[CaptureRequest], nonce: str, *, prompt_logprobs: bool
    ) -> tuple[_Answer, list[tuple[np.ndarray[Any, Any], str]]]:
        document = {
            "format": FORMAT,
            "nonce": nonce,
            "spec": asdict(self._spec),
            "requests": [asdict(request) for request in requests],
            "prompt_logprobs": prompt_logprobs,
        }
        deadline_s = self._spec.startup_deadline_s + self._spec.call_deadline_s
        out = self._call("capture", document, deadline_s=deadline_s) / "out"
        try:
            answer = self._parsed(_Answer, (out / "answer.json").read_text())
            tensors = dict(
                deserialize((out / "states.safetensors").read_bytes())  # type: ignore[no-untyped-call]
            )
            states = [_states(tensors[str(i)]) for i in range(len(answer.captures))]
            (out / "states.safetensors").unlink()  # large, and in memory now
        except KeyError as missing:
            raise self._wrong(f"states.safetensors has no tensor {missing}") from None
        except (OSError, ValueError, SafetensorError) as error:
            raise self._wrong(f"it cannot be read: {error}") from None
        return answer, states

    def _call(self, verb: str, document: Any = None, *, deadline_s: float) -> Path:
        """Run one call to its end, or kill it with its children; return its folder."""
        self._calls += 1
        folder = self._scratch / f"call-{self._calls:03d}"
        (folder / "out").mkdir(parents=True)
        command, log = [str(self._path), verb], folder / "log.txt"
        if document:
            (folder / "request.json").write_text(json.dumps(document))
            command += ["--request", str(folder / "request.json"), "--out", str(folder / "out")]
        reaper.watch_over_me()
        with (folder / "output.txt").open("wb") as output, log.open("wb") as errors:
            try:
                streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors}
                process = psutil.Popen(command, **streams)
            except OSError as error:
                raise UsageError(
                    f"{self._path} cannot be run: {error.strerror}",
                    remedy="name an executable file; a script names its interpreter in line 1",
                ) from None
            try:
                code = process.wait(deadline_s)
            except BaseException as ended:
                with suppress(psutil.NoSuchProcess):
                    reaper.kill([process, *process.children(recursive=True)])
                if not isinstance(ended, psutil.TimeoutExpired):
                    raise
                raise CouldNotRun(
                    f"{self._path} {verb} did not end within {deadline_s:.0f} s and was killed",
                    remedy=f"see {log}",
                ) from None
        with self.log.open("a") as everything:
            everything.write(log.read_text(errors="replace"))
        if code != 0:  # 2: the request itself is refused; any other: it could not be answered
            last = (log.read_text(errors="replace").strip() or "it says nothing").splitlines()[-1]
            kind, did = (UsageError, "refused") if code == 2 else (CouldNotRun, "failed")
            raise kind(
                f"{self._path} {verb} {did}, exit code {code}: {last[:400]}", remedy=f"see {log}"
            )
        return folder

    def _parsed(self, kind: type[T], text: str) -> T:
        try:
            return kind.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            raise self._wrong(": ".join(map(str, [*first["loc"], first["msg"]]))) from None

    def _wrong(self, what: str) -> IntegrityError:
        return IntegrityError(
            f"{self._path} gave no answer of format {FORMAT}: {what}",
            remedy="see ADAPTERS.md in truetap.conformance",
        )


def _states(tensor: dict[str, Any]) -> tuple[np.ndarray[Any, Any], str]:
    """Return a tensor widened to float32, which is exact, and the dtype that it came in."""
    if tensor["dtype"] not in _DTYPES:
        raise ValueError(f"states are {tensor['dtype']}, not one of {', '.join(_DTYPES)}")
    name, stored = _DTYPES[tensor["dtype"]]
    values: np.ndarray[Any, Any] = np.ndarray(tensor["shape"], stored, buffer=tensor["data"])
    if name == "bfloat16":  # unknown to numpy: the upper half of a float32
        values = (values.astype("<u4") << 16).view("<f4")
    return values.astype(np.float32), name

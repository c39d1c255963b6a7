"""Records what a live capture path gives to the suite's own calls; judges nothing of it.

The session is driven by ``truetap.harness.observation`` itself, so that a replay is asked what was
recorded. ``truetap.harness.adapters.replay`` plays it back.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from truetap.harness import (
    boundaries,
    capture_cassette,
    cassette,
    random_verifier,
    registry,
    scrub,
    verifier,
)
from truetap.harness.adapter import Session
from truetap.harness.adapters import mutants
from truetap.harness.capture_cassette import Answered, CaptureCassette, Method, VerifierNamed
from truetap.harness.errors import CheckFailed, CouldNotRun, TruetapError, UsageError
from truetap.harness.model import CaptureBatch, CaptureRequest, EngineSpec, Environment
from truetap.harness.observation import observe
from truetap.harness.record import engine_package
from truetap.harness.reference import Reference, ReferenceStates

NARROW = "llama_narrow"
_GIVEN = ("model", "boundaries")
"""Fields of a specification that a recording sets itself."""


class RecordingSession:
    """A real session that remembers each call and what it gave."""

    def __init__(self, inner: Session) -> None:
        self.boundaries = inner.boundaries
        self.log: Path | None = getattr(inner, "log", None)
        self.calls: list[Answered] = []
        self._inner = inner
        self._facts: Environment | None = None

    def capture(self, requests: Sequence[CaptureRequest]) -> CaptureBatch:
        """Capture, and keep the captures or the error."""
        batch: CaptureBatch = self._kept("capture", requests, lambda: self._inner.capture(requests))
        return batch

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float] | None:
        """Ask, and keep the answer."""
        said: list[float] | None = self._kept(
            "prompt_logprobs", token_ids, lambda: self._inner.prompt_logprobs(token_ids)
        )
        return said

    def environment(self) -> Environment:
        """Ask; raises CheckFailed if the engine's facts have changed since it was last asked."""
        found = self._inner.environment()
        if found != (self._facts or found):
            raise CheckFailed("the engine's facts changed while it was recorded")
        self._facts = found
        return found

    def close(self) -> None:
        """Close the real session."""
        self._inner.close()

    def heard(self) -> tuple[str, ...] | None:
        """Return the lines of the log that tell of the recorded calls; None without a log."""
        if self.log is None or not self.log.is_file():
            return None
        batches = [call.gave for call in self.calls]
        nonces = [re.escape(one.nonce) for one in batches if isinstance(one, CaptureBatch)]
        about = re.compile("|".join(nonces) or "$.")
        lines = self.log.read_text(errors="replace").splitlines()
        return tuple(scrub.message(line) for line in lines if about.search(line))

    def _kept(self, method: Method, asked: Sequence[Any], ask: Callable[[], Any]) -> Any:
        try:
            gave = ask()
        except TruetapError as error:
            told = capture_cassette.raised(error)
            self.calls.append(Answered(method, tuple(asked), None, told))
            raise
        self.calls.append(Answered(method, tuple(asked), gave))
        return gave


class _NoReference(Reference):
    """Stands where a reference would judge; nothing is judged while recording."""

    def __init__(self) -> None:
        pass

    def states(self, token_ids: Sequence[int]) -> ReferenceStates:  # noqa: ARG002
        return cast("ReferenceStates", None)


def record_captures(
    adapter: str,
    into: Path,
    *,
    family: str = NARROW,
    seed: int = 0,
    wanted: Sequence[int] = (),
    settings: Mapping[str, Any] = MappingProxyType({}),
    force: bool = False,
    progress: Callable[[str], None] = lambda _line: None,
) -> Path:
    """Record the core workload on a new engine of ``adapter`` into the folder ``into``.

    ``wanted`` are the boundaries, by default EAGLE-3's and the one before each: with those every
    fault of ``adapters.mutants`` that meets the core profile can be made of the recording.
    ``settings`` are further fields of the ``EngineSpec``, as ``read_settings`` returns them. A
    cassette that is there already is kept unless ``force``; an unfinished one leaves nothing.

    Raises what the adapter raises, UsageError for an unknown family or an adapter that is no live
    engine, CheckFailed if the cassette would be too large or tell too much.
    """
    if family not in random_verifier.FAMILIES:
        raise UsageError(
            f"there is no family {family!r}", remedy=f"one of {', '.join(random_verifier.FAMILIES)}"
        )
    subject = registry.find(adapter)
    if (evidence := getattr(subject, "evidence", "live")) != "live":
        raise UsageError(f"{adapter} is {evidence} evidence; only a live engine can be recorded")
    if (into / cassette.MANIFEST).exists() and not force:
        progress(f"{into}: {len(capture_cassette.read(into).calls)} calls, kept")
        return into
    try:
        into.parent.mkdir(parents=True, exist_ok=True)  # before anything that costs time
    except OSError as error:
        raise CouldNotRun(
            f"nothing can be recorded into {into}: {error}", remedy="name a folder to write to"
        ) from error
    with tempfile.TemporaryDirectory(prefix="truetap-record-") as made:
        scratch = Path(made) / "engine"
        scratch.mkdir()
        model = random_verifier.FAMILIES[family](Path(made) / f"{family}-{seed}", seed=seed)
        aux = boundaries.eagle3(verifier.describe(model).num_blocks)
        chosen = tuple(wanted) or mutants.boundaries_for(aux, 1)
        spec = EngineSpec(model=str(model), boundaries=chosen, **settings)
        with closing(RecordingSession(subject.open(spec, scratch=scratch))) as session:
            facts = session.environment()
            observe(session, spec, _NoReference(), {}, progress)
            heard = session.heard()
        capture_cassette.write(
            into,
            CaptureCassette(
                adapter=adapter,
                package=_package(facts),
                spec=spec,
                verifier=VerifierNamed(family, seed, verifier.digests(model)["weights_sha256"]),
                boundaries=session.boundaries,
                environment=facts,
                log=heard,
                calls=tuple(session.calls),
                recorded={
                    "command": f"truetap record --captures --adapter {adapter} --into DIR"
                    + ("" if family == NARROW else f" --family {family}")
                    + (" --spec FILE" if settings else ""),
                    "time": datetime.now(UTC).isoformat(timespec="seconds"),
                },
            ),
        )
    size = sum(path.stat().st_size for path in into.iterdir())
    progress(f"{into}: {len(session.calls)} calls, {size // 1024} KiB")
    return into


def read_settings(path: Path) -> dict[str, Any]:
    """Return an engine's settings from a file of JSON, as ``--spec`` of the suite takes them.

    Raises UsageError if the file cannot be read, or names what no engine has or a recording sets.
    """
    try:
        read = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path}: the engine's settings cannot be read: {error}") from error
    known = {field.name for field in fields(EngineSpec)} - set(_GIVEN)
    if unknown := sorted(read.keys() - known):
        raise UsageError(
            f"{path}: a recording takes no {', '.join(unknown)}",
            remedy=f"it takes {', '.join(sorted(known))}",
        )
    return read


def _package(facts: Environment) -> str:
    if facts.binding["engine"] == "vllm":
        with suppress(CouldNotRun):  # it may be in an environment of its own
            return engine_package()
    return f"{facts.binding['engine']} {facts.binding['engine_version']}"

"""A recorded session in place of an engine: the suite's judgement over it, again and anywhere.

``replay:PATH`` names it; ``truetap record --captures`` makes it. Each call is answered as it was,
in the recorded order. What was not asked then has no answer now: ``NotRecorded``, which no clause
takes for a verdict. A report of a replay has the evidence "replay" and certifies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from truetap.harness import capture_cassette, random_verifier, verifier
from truetap.harness.capture_cassette import CaptureCassette
from truetap.harness.errors import CouldNotRun, NotRecorded, UsageError
from truetap.harness.model import CaptureBatch, CaptureRequest, EngineSpec, Environment

PREFIX = "replay:"
_ANEW = "record anew: truetap record --captures"


class ReplayAdapter:
    """One cassette of captures."""

    evidence = "replay"

    def __init__(self, path: str) -> None:
        self.name = PREFIX + path
        self._path = Path(path)

    @cached_property
    def _recorded(self) -> CaptureCassette:
        if not self._path.is_dir():
            raise UsageError(f"there is no recording at {self._path}", remedy="name its folder")
        return capture_cassette.read(self._path)

    def settings(self, scratch: Path) -> dict[str, Any]:
        """Return the recorded settings, and build the verifier that they are about."""
        recorded = self._recorded
        named = recorded.verifier
        if named.family not in random_verifier.FAMILIES:
            raise CouldNotRun(f"{self._path} is about a verifier {named.family!r}, unknown here")
        folder = scratch / f"{named.family}-{named.seed}"
        model = random_verifier.FAMILIES[named.family](folder, seed=named.seed)
        return asdict(recorded.spec) | {"model": str(model)}

    def open(self, spec: EngineSpec, *, scratch: Path) -> ReplaySession:
        """Check that the recording is of these settings and of this verifier's weights."""
        recorded = self._recorded
        if differing := capture_cassette.differences(recorded.spec, spec):
            told = ", ".join(
                f"{name} {getattr(recorded.spec, name)!r} and not {getattr(spec, name)!r}"
                for name in differing
            )
            raise NotRecorded(f"{self._path} was recorded with {told}", remedy=_ANEW)
        named = recorded.verifier
        digest = verifier.digests(Path(spec.model))["weights_sha256"]
        if digest != named.weights_sha256:
            raise CouldNotRun(
                f"{self._path} was recorded with {named.family} of seed {named.seed}, weights "
                f"{named.weights_sha256[:16]}; those of {Path(spec.model).name} are {digest[:16]}",
                remedy="leave --model out; if the verifier was built here, it is not built as it "
                "was: record anew",
            )
        return ReplaySession(self._path, recorded, scratch)


class ReplaySession:
    """A recorded session, from its beginning."""

    def __init__(self, path: Path, recorded: CaptureCassette, scratch: Path) -> None:
        self.boundaries = recorded.boundaries
        self._path, self._recorded, self._next = path, recorded, 0
        self.log: Path | None = None
        if recorded.log is not None:
            self.log = scratch / "replay.log"
            self.log.write_text("".join(f"{line}\n" for line in recorded.log))

    def capture(self, requests: Sequence[CaptureRequest]) -> CaptureBatch:
        """Give or raise what these requests gave or raised."""
        keys = ", ".join(request.key for request in requests)
        batch: CaptureBatch = self._answer("capture", requests, f"a capture of [{keys}]")
        return batch

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float] | None:
        """Return the log-probabilities that the engine gave."""
        what = f"log-probabilities of {len(token_ids)} tokens"
        said: list[float] | None = self._answer("prompt_logprobs", token_ids, what)
        return said

    def environment(self) -> Environment:
        """Return the facts of the engine that was recorded."""
        return self._recorded.environment

    def close(self) -> None:
        """Nothing runs."""

    def _answer(self, method: str, asked: Sequence[Any], what: str) -> Any:
        """Return the answer of the next call that was the same.

        Never of an earlier one: an engine that has answered other calls since is another one, its
        prefix cache for a start.
        """
        for index in range(self._next, len(self._recorded.calls)):
            call = self._recorded.calls[index]
            if (call.method, call.asked) == (method, tuple(asked)):
                self._next = index + 1
                return call.answer()
        raise NotRecorded(
            f"{self._path} has no answer to call {self._next + 1}, {what}: the suite asks for "
            "other prompts now, or in another order",
            remedy=_ANEW,
        )

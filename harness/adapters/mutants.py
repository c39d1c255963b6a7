"""Deliberately wrong capture paths: the proof that the suite can fail.

A mutant wraps a real adapter, takes real captures from it, and makes one fault that somebody's
pipeline really had. ``FAULT@ADAPTER`` names it, e.g. ``off-by-one@vllm_native``. The fault
``none`` is the negative control: the same wrapping, nothing changed, and nothing may be flagged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from truetap.harness.adapter import Adapter, Session
from truetap.harness.adapters.faults import layers, replies, rows, settings
from truetap.harness.adapters.faults.fault import Corruptor, Fault, of_states, right
from truetap.harness.errors import UsageError
from truetap.harness.final_norm import final_norm
from truetap.harness.model import CaptureBatch, CaptureRequest, EngineSpec, Environment

FAULTS: dict[str, Fault] = {
    "none": Fault("", "nothing: the negative control", of_states(right)),
    **layers.FAULTS,
    **rows.FAULTS,
    **replies.FAULTS,
    **settings.FAULTS,
}
"""All faults by name."""


class MutantAdapter:
    """A real adapter with one fault."""

    def __init__(self, fault: str, inner: Adapter) -> None:
        if fault not in FAULTS:
            raise UsageError(
                f"there is no mutant named {fault!r}", remedy=f"mutants: {', '.join(FAULTS)}"
            )
        self._fault = fault
        self._inner = inner
        self.name = f"{fault}@{inner.name}"
        self.evidence = getattr(inner, "evidence", "live")

    def settings(self, scratch: Path) -> dict[str, Any]:
        """Return the settings that the real adapter can be opened with; empty: any.

        Of its boundaries those remain which are there with what the fault needs to see.
        """
        find = getattr(self._inner, "settings", None)
        own: dict[str, Any] = find(scratch) if find else {}
        if "boundaries" in own:
            seen, early = own["boundaries"], range(FAULTS[self._fault].early + 1)
            own["boundaries"] = tuple(k for k in seen if all(k - e in seen for e in early))
        return own

    def open(self, spec: EngineSpec, *, scratch: Path) -> MutantSession:
        """Open the real adapter at the boundaries that the fault needs to see."""
        seen = boundaries_for(spec.boundaries, FAULTS[self._fault].early)
        inner = self._inner.open(replace(spec, boundaries=seen), scratch=scratch)
        return MutantSession(self._fault, inner, spec)


def boundaries_for(requested: Sequence[int], early: int) -> tuple[int, ...]:
    """Return the requested boundaries and the ``early`` ones before each."""
    return tuple(sorted({k - e for k in requested for e in range(early + 1) if k - e >= 0}))


class MutantSession:
    """A real session whose captures are corrupted on the way out.

    ``inner`` may capture more boundaries than ``spec`` asks for, so that one engine can serve
    several mutants.
    """

    def __init__(self, fault: str, inner: Session, spec: EngineSpec) -> None:
        self.boundaries = tuple(spec.boundaries)
        self._fault, self._name = FAULTS[fault], fault
        self._inner = inner
        self.log = None if self._fault.mute else getattr(inner, "log", None)
        model = Path(spec.model)
        self._context = Corruptor(spec, final_norm(model), final_norm(model, mistaken=True))

    def capture(self, requests: Sequence[CaptureRequest]) -> CaptureBatch:
        """Capture for real, then make the fault; without capture there is none to make."""
        if self._fault.ask is not None:
            requests = self._fault.ask(self._context, requests)
        batch = self._inner.capture(requests)
        if not self.boundaries or not (batch.captures or self._fault.on_nothing):
            return batch
        corrupted = self._fault.corrupt(self._context, batch)
        self._context.earlier.append(batch)
        return replace(
            corrupted,
            captures=tuple(replace(c, boundaries=self.boundaries) for c in corrupted.captures),
        )

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float] | None:
        """Pass the real engine's log-probabilities through."""
        return self._inner.prompt_logprobs(token_ids)

    def environment(self) -> Environment:
        """Return the real environment under the mutant's own name."""
        real = self._inner.environment()
        adapter = dict(real.binding["adapter"])
        adapter["name"] = f"{self._name}@{adapter['name']}"
        binding = {**real.binding, "adapter": adapter, "boundaries": list(self.boundaries)}
        return Environment(binding=binding, recorded=real.recorded)

    def close(self) -> None:
        """Close the real session."""
        self._inner.close()

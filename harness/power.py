"""What the suite was measured to catch: read from ``conformance/calibration.json``.

The file is made by ``python -m truetap.conformance.calibrate`` on live engines. Its keys are
``VERIFIER/DTYPE/ADAPTER/PROFILE``; each measurement has, by fault, the clauses that caught it, and
the clauses that the adapter refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truetap.harness import contract, suite_options
from truetap.harness.errors import CouldNotRun

CONTROL = "none"
"""The fault that changes nothing: a correct capture path in a mutant's clothes."""


@dataclass(frozen=True)
class Power:
    """All measurements, by their keys."""

    measurements: Mapping[str, Any]

    def caught(self, fault: str) -> Counter[str]:
        """Return in how many measurements each clause caught a fault."""
        return Counter(clause for row in self._rows(fault) for clause in row["caught_by"])

    def times(self, fault: str) -> int:
        """Return how many measurements judged a fault."""
        return len(self._rows(fault))

    def missed(self, own: Mapping[str, str]) -> list[str]:
        """Return ``FAULT in MEASUREMENT`` wherever a fault got past its own clause.

        ``own`` names each fault's clause. Where the profile lacks that clause, or the adapter
        refused what it asks for, it could not be caught; a fault that never could is missed, too.
        """
        found = []
        for fault, clause in own.items():
            could = 0
            for key, measurement in self.measurements.items():
                judged = clause in contract.clauses_of(key.rpartition("/")[2])
                if fault in measurement["faults"] and judged:
                    refused = clause in measurement["refused"]
                    caught = clause in measurement["faults"][fault]["caught_by"]
                    could += not refused
                    found += [f"{fault} in {key}"] if not (caught or refused) else []
            if not could:
                found.append(f"{fault}: never measured")
        return found

    def idle(self) -> list[str]:
        """Return MUST clauses about captures that caught nothing."""
        active = {
            clause
            for measurement in self.measurements.values()
            for fault, row in measurement["faults"].items()
            if fault != CONTROL
            for clause in row["caught_by"]
        }
        musts = [c for c in contract.PROFILES["full"] if contract.CLAUSES[c].level == "MUST"]
        return [clause for clause in musts if clause not in active]

    def correct(self) -> dict[str, list[str]]:
        """Return what was flagged in each measurement of correct captures: a false alarm."""
        return {
            key: list(measurement["faults"][CONTROL]["caught_by"])
            for key, measurement in self.measurements.items()
            if CONTROL in measurement["faults"]
        }

    def _rows(self, fault: str) -> list[Any]:
        found = (measurement["faults"].get(fault) for measurement in self.measurements.values())
        return [row for row in found if row is not None]


def measured() -> Power:
    """Return what was measured last; ``CouldNotRun`` if the suite is not installed."""
    folder = suite_options.suite_folder()
    path = (folder or Path()) / "calibration.json"
    if folder is None or not path.is_file():
        raise CouldNotRun(
            "the suite's measurements are not here", remedy="pip install 'truetap[conformance]'"
        )
    return Power(json.loads(path.read_text()))

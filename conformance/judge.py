"""Applies every clause of a profile to one observation, without pytest.

The clauses are the suite's own test functions; this only calls them. It serves the proof of power:
one live engine, many mutants.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from truetap.conformance import test_layers, test_reply, test_rows
from truetap.harness.observation import Observation

Check = Callable[[Observation, Callable[[str], None]], None]


def checks() -> dict[str, list[Check]]:
    """Return the test functions by the clause that they decide."""
    found: dict[str, list[Check]] = {}
    for module in (test_reply, test_rows, test_layers):
        for name, function in vars(module).items():
            if name.startswith("test_"):
                for mark in getattr(function, "pytestmark", ()):
                    if mark.name == "clause":
                        found.setdefault(mark.args[0], []).append(function)
    return found


def failures(observation: Observation) -> dict[str, str]:
    """Return what each failing clause saw, by clause id; empty for a correct capture path."""
    failed = {}
    for clause_id, functions in checks().items():
        for function in functions:
            try:
                function(observation, lambda _sentence: None)
            except (AssertionError, pytest.fail.Exception) as error:
                failed[clause_id] = str(error).splitlines()[0]
    return failed

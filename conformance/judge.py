"""Applies every clause of a profile to one observation, without pytest.

The clauses are the suite's own test functions; this only calls them. It serves the proof of power:
one live engine, many mutants.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest

from truetap.conformance import (
    test_engine,
    test_layers,
    test_parallel,
    test_reply,
    test_reply_channel,
    test_rows,
    test_store,
)
from truetap.harness import contract
from truetap.harness.capture_store import StoreObservation
from truetap.harness.channel import ChannelObservation
from truetap.harness.errors import CouldNotRun
from truetap.harness.observation import Observation
from truetap.harness.pytest_plugin import Refused

Seen = Observation | ChannelObservation | StoreObservation
Check = Callable[[Any, Callable[[str], None]], None]

_MODULES = {
    Observation: (test_reply, test_rows, test_layers, test_parallel, test_engine),
    ChannelObservation: (test_reply_channel,),
    StoreObservation: (test_store,),
}


def checks(kind: type[Seen] = Observation) -> dict[str, list[Check]]:
    """Return the test functions over observations of one kind, by the clause that they decide."""
    found: dict[str, list[Check]] = {}
    for module in _MODULES[kind]:
        for name, function in vars(module).items():
            if name.startswith("test_"):
                for mark in getattr(function, "pytestmark", ()):
                    if mark.name == "clause":
                        found.setdefault(mark.args[0], []).append(function)
    return found


def refused(seen: Seen) -> list[str]:
    """Return the clauses whose demands were refused, where they may be."""
    found = []
    for clause_id, functions in checks(type(seen)).items():
        if clause_id in contract.PROFILES[seen.profile]:
            for function in functions:
                try:
                    function(seen, lambda _sentence: None)
                except Refused:
                    found.append(clause_id)
                except (AssertionError, pytest.fail.Exception, CouldNotRun):
                    continue
    return found


def failures(seen: Seen, clauses: Collection[str] | None = None) -> dict[str, str]:
    """Return what each failing clause saw, by clause id; empty where nothing is wrong.

    ``clauses`` are the only ones asked; by default those of the profile that was observed.
    """
    failed = {}
    wanted = contract.PROFILES[seen.profile] if clauses is None else clauses
    for clause_id, functions in checks(type(seen)).items():
        if clause_id not in wanted:
            continue
        for function in functions:
            try:
                function(seen, lambda _sentence: None)
            except Refused:
                continue
            except (AssertionError, pytest.fail.Exception, CouldNotRun) as error:
                failed[clause_id] = str(error).splitlines()[0]
    return failed

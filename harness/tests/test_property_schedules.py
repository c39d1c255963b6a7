"""The KV connector, both halves, under whatever a scheduler may do: drawn, played, by value.

The engine is played by a paged cache and nothing else: each scheduled token writes its row into its
block. A row is a number that stands for the token and all before it, so rows of other prompts, of
other positions and of earlier owners of a block are told apart.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import Phase, given, settings

from truetap.conformance.kept_rows import KeptRows
from truetap.conformance.strategies import Job, Move, Schedule, life, schedules

pytestmark = pytest.mark.torch

NONCE = "c0ffee"
FIND = settings(max_examples=3000)


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    """Keep the base class from warning at every example that its interface may change."""
    logger = logging.getLogger("vllm.distributed.kv_transfer.kv_connector.v1.base")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


def connector(schedule: Schedule, kind: Any = None) -> Any:
    """Return the real class, both halves in one, with a cache of its own."""
    import torch

    from truetap.harness.adapters.vllm_connector import CaptureConnector

    spec = SimpleNamespace(block_size=schedule.block_size)
    names = (["model.layers.0.self_attn"], ["model.cache_only_layers.12"])
    groups = [SimpleNamespace(layer_names=found, kv_cache_spec=spec) for found in names]
    made = (kind or CaptureConnector)(
        SimpleNamespace(kv_transfer_config=SimpleNamespace(is_kv_producer=True)),
        None,
        SimpleNamespace(kv_cache_groups=groups),
    )
    made.staging = KeptRows()
    made._cache = torch.zeros(schedule.num_blocks + 1, schedule.block_size, 1, 1)
    return made


def sampling(schedule: Schedule) -> list[Any]:
    """Return sampling parameters: with our key, or without one in all the ways that there are."""
    without = [None, {}, {"kv_transfer_params": None}, {"kv_transfer_params": {"other": "x"}}]
    return [
        SimpleNamespace(
            extra_args={"kv_transfer_params": {"truetap_key": f"{NONCE}:{index}"}}
            if job.wanted
            else without[index % len(without)]
        )
        for index, job in enumerate(schedule.jobs)
    ]


def as_vllm_has_it(output: Any) -> Any:
    """Return the installed vLLM's own records; TypeError if one lacks a field, or has another."""
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    return SchedulerOutput(
        **vars(output)
        | {
            "scheduled_new_reqs": [NewRequestData(**vars(n)) for n in output.scheduled_new_reqs],
            "scheduled_cached_reqs": CachedRequestData(**vars(output.scheduled_cached_reqs)),
        }
    )


class Cache:
    """Plays the engine: writes rows into blocks."""

    def __init__(self, schedule: Schedule, rows: Any) -> None:
        self._schedule = schedule
        self._rows = rows
        self._said = {index: list(job.prompt) for index, job in enumerate(schedule.jobs)}
        self._numbers: dict[tuple[int, ...], int] = {}

    def row(self, tokens: tuple[int, ...]) -> int:
        """Return the row of the last of ``tokens``: never 0, which is what a fresh cache holds."""
        return self._numbers.setdefault(tokens, len(self._numbers) + 1)

    def prompt(self, job: int) -> list[int]:
        """Return the rows of a whole prompt."""
        prompt = self._schedule.jobs[job].prompt
        return [self.row(prompt[: i + 1]) for i in range(len(prompt))]

    def step(self, number: int) -> None:
        """Compute a step; RuntimeError if the schedule itself is one that no engine could run."""
        size = self._schedule.block_size
        for part in self._schedule.steps[number].parts:
            said = self._said[part.job]
            said[part.position : part.position + len(part.tokens)] = part.tokens
            places = [divmod(at, size) for at in range(part.position + len(part.tokens))]
            for at, (index, offset) in enumerate(places):
                here = self._rows[part.table[index], offset]
                if at >= part.position:
                    here.fill_(self.row(tuple(said[: at + 1])))
        for part in self._schedule.steps[number].parts:  # they may share what they compute
            for at in range(part.position):
                here = self._rows[part.table[at // size], at % size]
                if here.item() != self.row(tuple(self._said[part.job][: at + 1])):
                    raise RuntimeError(f"step {number} reads what is not there\n{self._schedule}")


def follow(schedule: Schedule, kind: Any = None) -> None:
    """Play ``schedule`` to its end.

    AssertionError if anything but the wanted and completed prompts was ordered, or any of them
    twice, late, or with other rows, or if anything is remembered of a job that has ended.
    """

    def require(holds: bool, what: str) -> None:
        if not holds:
            raise AssertionError(f"{what}\n{schedule}")

    subject = connector(schedule, kind)
    cache = Cache(schedule, subject._cache)
    ids = [f"{NONCE}:{index}-ab12cd34" for index in range(len(schedule.jobs))]
    parameters = sampling(schedule)
    completed = {
        job: number for job, number in schedule.completed().items() if schedule.jobs[job].wanted
    }
    over: set[int] = set()
    for number, step in enumerate(schedule.steps):
        output = schedule.scheduler_output(number, ids=ids, sampling=parameters)
        meta = subject.build_connector_meta(as_vllm_has_it(output))
        ordered = sorted(order.key for order in meta.orders)
        due = sorted(f"{NONCE}:{job}" for job, when in completed.items() if when == number)
        require(ordered == due, f"step {number} ordered {ordered}, completed were {due}")
        cache.step(number)
        subject.bind_connector_metadata(meta)
        subject.wait_for_save()
        subject.clear_connector_metadata()
        for job in step.ended:
            subject.request_finished_all_groups(SimpleNamespace(request_id=ids[job]), ((), ()))
        over |= set(step.ended)
        left = sorted(job for job in over if ids[job] in subject._tracked)
        require(not left, f"after step {number} it still knows of jobs {left}, which have ended")
    if hasattr(subject, "flush"):
        subject.flush()
    kept = subject.staging.puts
    require(
        kept.keys() == {f"{NONCE}:{job}" for job in completed},
        f"kept were {sorted(kept)}, completed were jobs {sorted(completed)}",
    )
    for job in completed:
        (one,) = kept[f"{NONCE}:{job}"]
        prompt = list(schedule.jobs[job].prompt)
        require((one.position, one.token_ids) == (0, prompt), f"job {job}: other token ids")
        require(one.states.flatten().tolist() == cache.prompt(job), f"job {job}: other rows")


@given(schedules())
def test_each_prompt_once_with_its_own_rows(schedule: Schedule) -> None:
    follow(schedule)


@given(schedules(sharing=False))
def test_prompts_that_share_nothing_find_blocks_of_their_own_only(schedule: Schedule) -> None:
    follow(schedule)
    assert all(part.position == 0 for s in schedule.steps for part in s.parts if part.how == "new")


def events(schedule: Schedule) -> Iterator[str]:
    """Yield what happens in a schedule that a connector could get wrong."""
    completed, prompts = schedule.completed(), [len(job.prompt) for job in schedule.jobs]
    first_owner: dict[int, int] = {}
    for number, step in enumerate(schedule.steps):
        done = [part.job for part in step.parts if completed.get(part.job) == number]
        if len(done) > 1:
            yield "several completed in one step"
        for part in step.parts:
            late = completed.get(part.job, number) < number
            if part.how == "resumed":
                yield "resumed after its prompt" if late else "resumed before its prompt"
                if part.position > 0:
                    yield "resumed with cached blocks"
            if part.how == "new" and part.position > 0:
                yield "new with cached blocks"
            if part.how == "running" and part.job in done:
                yield "completed by a later chunk"
            if late and len(part.tokens) > 1 and part.how == "running":
                yield "draft"
            if part.fresh is None:
                yield "no new block"
            if any(first_owner.setdefault(block, part.job) != part.job for block in part.table):
                yield "block of an earlier owner"
            if part.job in done and prompts[part.job] % schedule.block_size == 0:
                yield "prompt of whole blocks"
            if part.job in done and prompts[part.job] == 1:
                yield "prompt of one token"
        for job in step.ended:
            yield "ended after its prompt" if job in completed else "aborted before its prompt"


KINDS = {
    "several completed in one step",
    "resumed after its prompt",
    "resumed before its prompt",
    "resumed with cached blocks",
    "new with cached blocks",
    "completed by a later chunk",
    "draft",
    "no new block",
    "block of an earlier owner",
    "prompt of whole blocks",
    "prompt of one token",
    "ended after its prompt",
    "aborted before its prompt",
}


def test_everything_that_matters_is_drawn_often() -> None:
    found: Counter[str] = Counter()

    @settings(max_examples=300, phases=[Phase.generate])
    @given(schedules())
    def count(schedule: Schedule) -> None:
        found.update(set(events(schedule)))

    count()
    assert found.keys() == KINDS
    assert min(found.values()) >= 5, found


def test_by_hand_as_vllm_has_it() -> None:
    """Two prompts that share a block: cached in the same step, preempted, resumed elsewhere."""
    jobs = [Job((1, 2, 3, 4, 5)), Job((1, 2, 3, 4, 6, 7), wanted=False)]
    schedule = life(
        jobs,
        [
            [Move(0, tokens=4), Move(1, tokens=1, cached=9), Move(0, tokens=1)],
            [Move(1, "preempt"), Move(0, tokens=3)],
            [Move(1, tokens=9, cached=1), Move(0, tokens=2)],
            [Move(0, tokens=3, ends=True), Move(1, tokens=9)],
            [Move(0), Move(1, "end")],
        ],
    )
    assert (
        str(schedule)
        == """\
blocks of 4 rows
job 0: 5 tokens, 5 of them how other prompts begin
job 1: 6 tokens, 6 of them how other prompts begin, not wanted
step 0: job 0 starts: 4 tokens (blocks 1); job 1 starts after 4 cached tokens: 1 token (blocks 1 2)
step 1: job 1 is preempted; job 0 goes on after 4: 1 token (blocks 1 3)
step 2: job 1 resumes after 4 cached tokens: 2 tokens (blocks 1 4); \
job 0 goes on after 5: 2 tokens (blocks 1 3)
step 3: job 0 goes on after 6: 2 tokens (blocks 1 3); \
job 1 goes on after 6: 2 tokens (blocks 1 4); job 0 ends
step 4: job 1 ends"""
    )
    assert schedule.completed() == {0: 1, 1: 2}
    follow(schedule)


def test_a_schedule_that_no_engine_could_run_is_no_test() -> None:
    schedule = life([Job((1, 2, 3, 4, 5))], [[Move(0, tokens=4)], [Move(0)]])
    second = schedule.steps[1].parts[0]
    wrong = replace(schedule.steps[1], parts=(replace(second, table=(3, 2), fresh=(2,)),))
    schedule = replace(schedule, steps=(schedule.steps[0], wrong))
    with pytest.raises(RuntimeError, match="step 1 reads what is not there"):
        follow(schedule)


# ---- mutants: connectors that follow the schedule less well


def altered(output: Any, **changes: Any) -> Any:
    """Return a scheduler's output whose cached requests are told otherwise."""
    cached = SimpleNamespace(**vars(output.scheduled_cached_reqs) | changes)
    return SimpleNamespace(**vars(output) | {"scheduled_cached_reqs": cached})


def mutants() -> dict[str, Any]:
    """Return wrong connectors by what is wrong with them."""
    from truetap.harness.adapters.vllm_connector import CaptureConnector, CopyOrders

    class KeepsOldBlocks(CaptureConnector):
        def build_connector_meta(self, output: Any) -> Any:
            return super().build_connector_meta(altered(output, resumed_req_ids=set()))

    class ForgetsOldBlocks(CaptureConnector):
        def build_connector_meta(self, output: Any) -> Any:
            cached = output.scheduled_cached_reqs
            told = zip(cached.req_ids, cached.new_block_ids, strict=True)
            more = {req_id for req_id, fresh in told if fresh is not None}
            return super().build_connector_meta(altered(output, resumed_req_ids=more))

    class CountsScheduledOnly(CaptureConnector):
        def build_connector_meta(self, output: Any) -> Any:
            cached = output.scheduled_cached_reqs
            output = altered(output, num_computed_tokens=[0] * len(cached.req_ids))
            output.scheduled_new_reqs = [
                SimpleNamespace(**vars(new) | {"num_computed_tokens": 0})
                for new in output.scheduled_new_reqs
            ]
            return super().build_connector_meta(output)

    class CountsNoCachedPrefix(CaptureConnector):
        def build_connector_meta(self, output: Any) -> Any:
            output.scheduled_new_reqs = [
                SimpleNamespace(**vars(new) | {"num_computed_tokens": 0})
                for new in output.scheduled_new_reqs
            ]
            return super().build_connector_meta(output)

    class OrdersAtOnce(CaptureConnector):
        @staticmethod
        def _order(meta: Any, tracked: Any, computed: int) -> None:  # noqa: ARG004
            CaptureConnector._order(meta, tracked, len(tracked.token_ids))

    class OrdersAStepLate(CaptureConnector):
        @staticmethod
        def _order(meta: Any, tracked: Any, computed: int) -> None:
            CaptureConnector._order(meta, tracked, computed - 1)

    class OrdersAgain(CaptureConnector):
        def build_connector_meta(self, output: Any) -> Any:
            for req_id in output.scheduled_cached_reqs.resumed_req_ids:
                self._tracked[req_id].ordered = False
            return super().build_connector_meta(output)

    class OrdersAgainAndAgain(CaptureConnector):
        @staticmethod
        def _order(meta: Any, tracked: Any, computed: int) -> None:
            tracked.ordered = False
            CaptureConnector._order(meta, tracked, computed)

    class ForgetsNothing(CaptureConnector):
        def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:  # noqa: ARG002
            return False, None

    class CapturesEverybody(CaptureConnector):
        def build_connector_meta(self, output: Any) -> Any:
            for new in output.scheduled_new_reqs:
                key = new.req_id.partition("-")[0]
                new.sampling_params = SimpleNamespace(
                    extra_args={"kv_transfer_params": {"truetap_key": key}}
                )
            return super().build_connector_meta(output)

    class OtherGroup(CaptureConnector):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._group = 0

        def _rows(self, blocks: Any, start: int, end: int) -> Any:
            return super()._rows(blocks - 1001, start, end)

    class CopiesWhenAsked(CaptureConnector):
        """As a capture would that hands the blocks to a reader of its own."""

        late: Any = ()

        def wait_for_save(self) -> None:
            meta = self._get_connector_metadata()
            assert isinstance(meta, CopyOrders)
            self.late = [*self.late, *meta.orders]

        def flush(self) -> None:
            for order in self.late:
                rows = partial(self._rows, self._indices(order.block_ids))
                self.staging.put(order.key, 0, order.token_ids, rows)  # type: ignore[union-attr]

    class WholeBlocks(CaptureConnector):
        def _rows(self, blocks: Any, start: int, end: int) -> Any:
            return super()._rows(blocks, start, -(-end // self._block_size) * self._block_size)

    class FirstPieceOnly(CaptureConnector):
        def _rows(self, blocks: Any, start: int, end: int) -> Any:
            return super()._rows(blocks, 0, end - start)

    kinds = [kind for kind in locals().values() if isinstance(kind, type)]
    return {kind.__name__: kind for kind in kinds if kind.__base__ is CaptureConnector}


SMALLEST = {
    # what is said of it; what the smallest schedule shows, and in how many steps at most
    "KeepsOldBlocks": ("other rows", "resumes", 4),
    "ForgetsOldBlocks": ("other rows", "goes on", 3),
    "CountsScheduledOnly": ("completed were", "goes on", 3),
    "CountsNoCachedPrefix": ("completed were", "starts after 4 cached tokens", 3),
    "OrdersAtOnce": ("completed were []", "starts", 2),
    "OrdersAStepLate": ("ordered []", "starts", 2),
    "OrdersAgain": ("completed were []", "resumes", 4),
    "OrdersAgainAndAgain": ("completed were []", "goes on", 3),
    "ForgetsNothing": ("still knows of jobs [", "ends", 2),
    "CapturesEverybody": ("completed were []", "not wanted", 2),
    "OtherGroup": ("other rows", "starts", 2),
    "CopiesWhenAsked": ("other rows", "starts", 3),
    "FirstPieceOnly": ("other rows", "starts", 2),
    "WholeBlocks": ("other rows", "starts", 2),
}


@pytest.mark.parametrize("name", SMALLEST)
def test_the_same_property_finds_a_wrong_connector(name: str) -> None:
    kind = mutants()[name]
    with pytest.raises(AssertionError) as found:
        FIND(given(schedules())(lambda schedule: follow(schedule, kind)))()
    complaint, _, smallest = str(found.value).partition("\n")
    said, shows, steps = SMALLEST[name]
    assert said in complaint, f"{complaint}\n{smallest}"
    assert shows in smallest, smallest
    assert smallest.count("\nstep ") <= steps, smallest
    assert smallest.count("\njob ") <= 2, smallest


def test_every_mutant_is_tried() -> None:
    assert mutants().keys() == SMALLEST.keys()

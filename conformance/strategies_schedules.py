"""A hypothesis strategy: the whole life of a vLLM scheduler, over a few requests.

What is drawn are moves, which may be senseless; ``life`` plays them on a small model of vLLM's
scheduler and block pool, and leaves out what such a scheduler would not do. So a failing schedule
shrinks move by move, and ``life`` can be given moves by hand. Public names are importable from
``truetap.conformance.strategies``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from hypothesis import strategies as st

What = Literal["run", "preempt", "again", "end"]
How = Literal["new", "running", "resumed"]


@dataclass(frozen=True)
class Job:
    """A request to the engine; ``wanted`` says whether its states are to be captured."""

    prompt: tuple[int, ...]
    wanted: bool = True


@dataclass(frozen=True)
class Move:
    """What is tried with one job in one step."""

    job: int
    what: What = "run"
    """``run`` starts, continues or resumes it; ``preempt`` takes its blocks, ``again`` takes them
    and resumes it in the same step; ``end`` aborts it without running it."""
    tokens: int = 1
    """At most so many. When it decodes: 2 add a draft that is rejected, more one that is not."""
    cached: int = 0
    """How many blocks it may find in the prefix cache, at most, when it starts or resumes."""
    ends: bool = False
    """Whether it finishes, or is aborted, after this step."""


@dataclass(frozen=True)
class Part:
    """What one job has in one step."""

    job: int
    how: How
    position: int
    """Of the first of ``tokens``: so many are computed already, here or in the prefix cache."""
    tokens: tuple[int, ...]
    """What the model is given, drafts included."""
    table: tuple[int, ...]
    """All of its blocks, in order."""
    fresh: tuple[int, ...] | None
    """The blocks as the scheduler tells them: the whole table of a new or resumed job, what was
    added to a running one, or None if nothing was."""
    outputs: int
    """How many tokens it had generated before."""


@dataclass(frozen=True)
class Step:
    """One step of the engine: what happens before, in, and after it."""

    preempted: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()
    ended: tuple[int, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """The jobs and every step of their lives; afterwards all have ended."""

    jobs: tuple[Job, ...]
    steps: tuple[Step, ...]
    block_size: int
    num_blocks: int
    """Block ids are 1 to ``num_blocks``."""

    def completed(self) -> dict[int, int]:
        """Return the step in which each job's prompt is complete for the first time."""
        found: dict[int, int] = {}
        for number, step in enumerate(self.steps):
            for part in step.parts:
                if part.position + len(part.tokens) >= len(self.jobs[part.job].prompt):
                    found.setdefault(part.job, number)
        return found

    def scheduler_output(self, number: int, *, ids: Sequence[str], sampling: Sequence[Any]) -> Any:
        """Return step ``number`` as vLLM's ``SchedulerOutput``, or as its stand-in: same fields.

        ``ids`` and ``sampling`` are the jobs' request ids and sampling parameters. There are two
        cache groups; the first has other block ids, 1000 above ours.
        """
        step = self.steps[number]
        before = self.steps[number - 1].ended if number else ()
        cached = [part for part in step.parts if part.how != "new"]
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=ids[part.job],
                    prompt_token_ids=list(self.jobs[part.job].prompt),
                    mm_features=[],
                    sampling_params=sampling[part.job],
                    pooling_params=None,
                    block_ids=_in_groups(part.table),
                    num_computed_tokens=part.position,
                    lora_request=None,
                )
                for part in step.parts
                if part.how == "new"
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[ids[part.job] for part in cached],
                resumed_req_ids={ids[part.job] for part in cached if part.how == "resumed"},
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[_in_groups(part.fresh) for part in cached],
                num_computed_tokens=[part.position for part in cached],
                num_output_tokens=[part.outputs for part in cached],
            ),
            num_scheduled_tokens={ids[part.job]: len(part.tokens) for part in step.parts},
            total_num_scheduled_tokens=sum(len(part.tokens) for part in step.parts),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids={ids[job] for job in before},
            free_encoder_mm_hashes=[],
            preempted_req_ids={ids[job] for job in step.preempted},
        )

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"blocks of {self.block_size} rows"
        seen = {job for step in self.steps for job in (*step.ended, *_jobs(step))}
        for number in sorted(seen):
            job = self.jobs[number]
            shared = sum(token < _OWN for token in job.prompt)
            others = f", {shared} of them how other prompts begin" if shared else ""
            yield (
                f"job {number}: {_counted(len(job.prompt), 'token')}{others}"
                f"{'' if job.wanted else ', not wanted'}"
            )
        for number, step in enumerate(self.steps):
            told = [f"job {job} is preempted" for job in step.preempted]
            told += [_told(part) for part in step.parts]
            told += [f"job {job} ends" for job in step.ended]
            yield f"step {number}: " + "; ".join(told)


def schedules(
    *, most_jobs: int = 4, most_steps: int = 24, sharing: bool = True
) -> st.SearchStrategy[Schedule]:
    """Draw lives of a scheduler: chunks of any size, cached prefixes, preemption, drafts, aborts.

    Prompts lie around whole blocks as often as anywhere, and are short: what matters is where they
    are cut. With ``sharing=False`` no two prompts begin alike, so that a job finds only blocks of
    its own in the prefix cache, after a preemption.
    """
    size = _BLOCK_SIZE
    edges = [1, size, size - 1, size + 1, 2 * size, 2 * size + 1]
    begins = [0, size, 2 * size, 99, *range(3 * size)]
    job = st.tuples(
        st.sampled_from([*edges, *range(1, 3 * size + 3)]),
        st.sampled_from(begins if sharing else [0]),
        st.sampled_from([True, True, True, False]),
    )
    # One choice where there could be two: what a choice costs, in shrinking above all, adds up.
    once: list[tuple[What, bool]] = [("preempt", False), ("again", False), ("end", False)]
    often: list[tuple[What, bool]] = [("run", False)] * 10
    at_last: list[tuple[What, bool]] = [("run", True)] * 2
    sizes = [1, 2, 3, size, size + 1, 2 * size, 99]
    move = st.builds(
        lambda job, way, amount: Move(job, way[0], amount[0], amount[1], way[1]),
        st.integers(0, most_jobs - 1),
        st.sampled_from([*often, *at_last, *once]),
        st.sampled_from([(tokens, cached) for cached in (0, 1, 99) for tokens in sizes]),
    )
    moves = st.lists(move, max_size=2 * most_jobs)
    # Lists in a list are long as often as not, and everything in them can be left out.
    steps = st.lists(st.lists(moves, max_size=most_steps // 3), max_size=3)
    return st.builds(
        lambda drawn, tried, num_blocks, lookahead: life(
            [_job(index, *one) for index, one in enumerate(drawn)],
            [moves for some in tried for moves in some],
            num_blocks=num_blocks,
            lookahead=lookahead,
        ),
        # Always as many: if one could be left out, the moves of the others would not stay theirs.
        st.tuples(*[job] * most_jobs),
        steps,
        st.integers(1, 12),
        st.sampled_from([0, 1]),
    )


def life(
    jobs: Sequence[Job],
    tried: Sequence[Sequence[Move]],
    *,
    num_blocks: int = 8,
    lookahead: int = 0,
) -> Schedule:
    """Play ``tried``, a list of moves for each step, as vLLM's scheduler would have it.

    Left out are a second move of a job in one step, moves of a job that has ended, and jobs that
    get no blocks: they wait. What is alive at the end is aborted. ``lookahead``: rows that are
    allocated beyond those that are scheduled, as an engine with drafts does.
    """
    pool = _Pool(num_blocks)
    alive = {index: _Alive(index, job) for index, job in enumerate(jobs)}
    steps = []
    for moves in tried:
        preempted: list[int] = []
        parts: list[Part] = []
        ended: list[int] = []
        moved: set[int] = set()
        for move in moves:
            if move.job in moved or move.job not in alive:
                continue
            moved.add(move.job)
            one = alive[move.job]
            if move.what in ("preempt", "again") and one.table:
                one.preempt(pool)
                preempted.append(move.job)
            if move.what in ("run", "again"):
                parts += one.run(pool, move, lookahead)
            if move.what == "end" or move.ends:
                ended.append(move.job)
        for job in ended:
            pool.give_back(alive.pop(job).table)
        if preempted or parts or ended:
            steps.append(Step(tuple(preempted), tuple(parts), tuple(ended)))
    if left := tuple(job for job, one in alive.items() if one.started):
        steps.append(Step(ended=left))
    return Schedule(tuple(jobs), tuple(steps), _BLOCK_SIZE, num_blocks)


_BLOCK_SIZE = 4
_OWN = 100  # tokens below begin several prompts; those of job k alone are from (k + 1) * _OWN on


class _Pool:
    """Blocks of rows, and what the full ones hold: vLLM's block pool with its prefix cache."""

    def __init__(self, num_blocks: int) -> None:
        self._free = deque(range(1, num_blocks + 1))  # those given back last are reused last
        self._users = dict.fromkeys(self._free, 0)
        self._holding: dict[tuple[int, ...], int] = {}

    def find(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return the blocks that hold how ``tokens`` begins; at least one token is left over."""
        found: list[int] = []
        for count in range(1, min(most, (len(tokens) - 1) // _BLOCK_SIZE) + 1):
            block = self._holding.get(tuple(tokens[: count * _BLOCK_SIZE]))
            if block is None:
                break
            found.append(block)
        return found

    def use(self, found: Sequence[int], more: int) -> list[int] | None:
        """Return ``more`` blocks and use them and ``found``; None, and nothing, if too few."""
        if len(self._free) - sum(not self._users[block] for block in found) < more:
            return None
        for block in found:
            if not self._users[block]:
                self._free.remove(block)
        fresh = [self._free.popleft() for _ in range(more)]
        for block in (*found, *fresh):
            self._users[block] += 1
        self._holding = {k: block for k, block in self._holding.items() if block not in fresh}
        return fresh

    def hold(self, table: Sequence[int], tokens: Sequence[int]) -> None:
        """Note what the full blocks of ``table`` hold, as soon as it is scheduled."""
        for index in range(len(tokens) // _BLOCK_SIZE):
            self._holding.setdefault(tuple(tokens[: (index + 1) * _BLOCK_SIZE]), table[index])

    def give_back(self, table: Sequence[int]) -> None:
        for block in reversed(table):
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)


@dataclass
class _Alive:
    """A job from its arrival to its end."""

    index: int
    job: Job
    table: list[int] = field(default_factory=list)
    computed: int = 0
    started: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.job.prompt)

    def preempt(self, pool: _Pool) -> None:
        pool.give_back(self.table)
        self.table, self.computed = [], 0

    def run(self, pool: _Pool, move: Move, lookahead: int) -> Iterator[Part]:
        """Schedule what the move asks for, if there are blocks for it."""
        how: How = "running" if self.table else "resumed" if self.started else "new"
        found = [] if self.table else pool.find(self.tokens, move.cached)
        position = self.computed + len(found) * _BLOCK_SIZE
        count = min(move.tokens, len(self.tokens) - position)
        outputs = len(self.tokens) - len(self.job.prompt)
        draft: tuple[int, ...] = ()
        if how == "running" and outputs and len(self.tokens) - position == 1 and move.tokens > 1:
            draft = (self._next() if move.tokens > 2 else _WRONG,)
        upto = position + count + len(draft)
        more = -(-(upto + lookahead) // _BLOCK_SIZE) - len(self.table) - len(found)
        fresh = pool.use(found, max(0, more))
        if fresh is None:
            return
        self.table, self.started = [*self.table, *found, *fresh], True
        pool.hold(self.table, self.tokens[: position + count])
        given = (*self.tokens[position : position + count], *draft)
        told = tuple(self.table) if how != "running" else tuple(fresh) or None
        yield Part(self.index, how, position, given, tuple(self.table), told, outputs)
        self.computed = position + count
        if self.computed == len(self.tokens):
            self.tokens.append(self._next())
            if draft and draft[0] != _WRONG:
                self.computed += 1
                self.tokens.append(self._next())

    def _next(self) -> int:
        return (self.index + 1) * _OWN + len(self.tokens)


_WRONG = 99  # a draft that the verifier does not take


def _job(index: int, length: int, begins: int, wanted: bool) -> Job:
    own = (index + 1) * _OWN
    return Job(tuple(i if i < begins else own + i for i in range(length)), wanted)


def _jobs(step: Step) -> tuple[int, ...]:
    return tuple(part.job for part in step.parts)


def _in_groups(blocks: Sequence[int] | None) -> tuple[list[int], ...] | None:
    return None if blocks is None else ([1000 + block for block in blocks], list(blocks))


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _told(part: Part) -> str:
    starts = {"new": "starts", "resumed": "resumes", "running": "goes on"}[part.how]
    cached = f" after {_counted(part.position, 'cached token')}" if part.position else ""
    if part.how == "running":
        cached = f" after {part.position}"
    blocks = " ".join(map(str, part.table))
    counted = _counted(len(part.tokens), "token")
    return f"job {part.job} {starts}{cached}: {counted} (blocks {blocks})"

"""Audits while extraction runs: which shards, what a miss costs, what an interruption leaves."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from truetap.harness import auditor, shard
from truetap.harness.adapters.mutants import MutantAdapter
from truetap.harness.adapters.transformers import TransformersAdapter
from truetap.harness.auditor import Finding, Task
from truetap.harness.errors import CheckFailed, CouldNotRun, IntegrityError
from truetap.harness.extraction import ShardOrder
from truetap.harness.model import EngineSpec
from truetap.harness.reference import Reference
from truetap.pipeline import audit_log, extract, report, run_folder
from truetap.pipeline.audit_log import AuditLog
from truetap.pipeline.config import Audit, Extract, RunConfig, Verifier
from truetap.pipeline.prepare import Conversation
from truetap.pipeline.run_audit import RunAudit
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.store import Store

pytestmark = pytest.mark.torch

PER_SHARD = 3


def conversations(shards: int) -> list[Conversation]:
    return [
        Conversation(f"c{n}", "train", tuple(range(n, n + 20 + n % 7)), 3)
        for n in range(PER_SHARD * shards)
    ]


class Scripted:
    """Answers as told: shards of which names are bad; ``slow`` ones only when waited for."""

    def __init__(self, bad: Sequence[str] = (), *, slow: bool = False) -> None:
        self.bad, self.slow = bad, slow
        self.tasks: list[Task] = []
        self.answered = 0
        self.starts = 0
        self.dies: Exception | None = None

    def __call__(self) -> Scripted:
        self.starts += 1
        return self

    def submit(self, task: Task) -> None:
        self.tasks.append(task)

    def finished(self) -> Finding | None:
        return None if self.slow else self.wait()

    def wait(self) -> Finding:
        if self.dies:
            raise self.dies
        name = self.tasks[self.answered].shard.rpartition("/")[2]
        self.answered += 1
        right = name not in self.bad
        return Finding(right, "as it should be" if right else f"{name} is wrong", (), 0.5, {})

    def close(self) -> None:
        pass

    @property
    def audited(self) -> list[int]:
        return [int(task.shard[-17:-12]) for task in self.tasks]


class Run:
    """An extraction without an engine: shards are written, published and audited."""

    def __init__(self, folder: Path, console: Console, shards: int, **settings: Any) -> None:
        self.folder, self.console, self.settings = folder, console, Audit(**settings)
        self.store = Store(folder)
        self.jobs = extract._jobs(conversations(shards), PER_SHARD)
        self.made: list[str] = []

    def audit(self, checker: Scripted) -> RunAudit:
        everyone = [c for job in self.jobs for c in job.conversations]
        return RunAudit(self.settings, 7, self.store, everyone, self.console, checker)

    def write(self, job: Any, promise: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        self.folder.mkdir(exist_ok=True)
        whole = job.conversations
        digests = shard.write_partial(
            self.store.path(job.name),
            [torch.tensor(c.token_ids).float()[:, None, None].expand(-1, 2, 4) for c in whole],
            [c.token_ids for c in whole],
            [c.loss_mask for c in whole],
        )
        entry = {"shard": job.name, "digests": digests, "ids": [c.id for c in whole]}
        self.made.append(job.name)
        return self.store.record({**entry, "boundaries": [1, 2], **promise})

    def go(self, checker: Scripted, *, stop_after: int | None = None) -> None:
        """Extract what is missing; ``stop_after`` so many shards the process is killed."""
        self.folder.mkdir(exist_ok=True)
        self.made = []
        audit = self.audit(checker)
        audit.recover()
        todo = extract._unfinished(self.store, self.jobs, self.console)
        audit.begin([job.name for job in todo])
        audit.settle()
        for job in todo:
            entry = self.write(job, audit.promise)
            if len(self.made) == stop_after:
                return
            if not audit.published(entry, last=job is todo[-1]):
                break
        audit.settle()

    def names(self, first: int, end: int) -> list[str]:
        return [job.name for job in self.jobs[first:end]]


@pytest.fixture
def run(tmp_path: Path, console: Console) -> Callable[..., Run]:
    def made(shards: int, **settings: Any) -> Run:
        return Run(tmp_path / "shards", console, shards, **settings)

    return made


@pytest.mark.parametrize(
    ("shards", "every", "audited"),
    [
        (20, 8, [0, 8, 16, 19]),
        (6, 16, [0, 5]),
        (1, 16, [0]),
        (3, 1, [0, 1, 2]),
        (9, 4, [0, 4, 8]),
    ],
)
@pytest.mark.parametrize("slow", [False, True])
def test_the_first_every_nth_and_the_last_are_audited_and_answer_for_all(
    run: Callable[..., Run], shards: int, every: int, audited: list[int], slow: bool
) -> None:
    made, checker = run(shards, every_shards=every), Scripted(slow=slow)
    made.go(checker)
    assert checker.audited == audited
    audit_log.require_kept(made.store)
    lines = AuditLog(made.store).lines()
    answered_for = [list(line["answers_for"]) for line in lines]
    assert list(chain.from_iterable(answered_for)) == made.names(0, shards)
    assert [part[-1] for part in answered_for] == [line["shard"] for line in lines]
    promised = list(made.store.entries().values())[-1]["audit"]
    assert promised.pop("passed_before") in {len(audited) - 1, len(audited) - 2}
    assert promised == {"every_shards": every, "samples": 1, "max_tokens": 1024}
    made.go(checker)
    assert (made.made, checker.audited, checker.starts) == ([], audited, 1)


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("k", [0, 1, 4, 7, 9])
@pytest.mark.parametrize("every", [1, 4])
def test_a_path_that_turns_wrong_is_stopped_and_its_first_shard_named(
    run: Callable[..., Run], every: int, k: int, slow: bool
) -> None:
    made = run(10, every_shards=every)
    checker = Scripted(made.names(k, 10), slow=slow)
    with pytest.raises(CheckFailed) as missed:
        made.go(checker)
    first = made.jobs[k].name
    said = f"the capture path is wrong from {first} on: {first} is wrong; "
    assert str(missed.value).startswith(said)
    assert f"{k} kept" in str(missed.value)
    # Seen by the next audit, which ends before the one after it begins.
    assert len(made.made) - k <= 2 * every
    assert list(made.store.entries()) == made.names(0, k)
    audit_log.require_kept(made.store)
    aside = sorted((made.folder / "rejected").glob("*.safetensors"))
    assert [path.name[:11] for path in aside] == [name[:11] for name in made.made[k:]]
    told = json.loads(aside[0].with_suffix(".json").read_text())
    assert told["reason"] == f"{first}: {first} is wrong"
    assert shard.mismatches(shard.read(aside[0]), told["line"]["digests"]) == []

    good = Scripted()
    made.go(good)
    assert made.made == made.names(k, 10)  # exactly those
    assert min(good.audited) >= k
    audit_log.require_kept(made.store)
    assert len(made.store.samples([f"c{n}" for n in range(30)])) == 30


def test_shards_after_the_first_bad_one_are_not_kept_for_a_good_sample(
    run: Callable[..., Run],
) -> None:
    made = run(8, every_shards=6)
    bad = [made.jobs[n].name for n in (3, 6)]
    with pytest.raises(CheckFailed, match="wrong from shard-00003"):
        made.go(Scripted(bad))
    assert list(made.store.entries()) == made.names(0, 3)


def test_an_audit_that_an_interruption_prevented_is_made_up_for(
    run: Callable[..., Run], console: Console
) -> None:
    made, checker = run(6, every_shards=4), Scripted(slow=True)
    made.go(checker, stop_after=3)  # the first audit is under way, its finding lost
    assert AuditLog(made.store).lines() == []
    with pytest.raises(CheckFailed, match=r"shard-00000.*after the last audit.*like 2 more"):
        audit_log.require_kept(made.store)
    again = Scripted()
    made.go(again)
    assert again.audited == [2, 3, 5]  # what was there, the first new one, the last
    assert list(AuditLog(made.store).lines()[0]["answers_for"]) == made.names(0, 3)
    audit_log.require_kept(made.store)
    assert "3 shards were captured after the last audit" in console.file.getvalue()  # type: ignore[attr-defined]


def test_killed_between_the_last_shard_and_its_audit(run: Callable[..., Run]) -> None:
    made = run(3, every_shards=4)
    made.go(Scripted(), stop_after=3)
    again = Scripted(made.names(2, 3))
    with pytest.raises(CheckFailed, match="wrong from shard-00002"):
        made.go(again)
    assert made.made == []
    assert list(made.store.entries()) == made.names(0, 2)


def test_killed_between_a_miss_and_setting_aside(
    run: Callable[..., Run], console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run(6, every_shards=3)
    monkeypatch.setattr(RunAudit, "_stop", lambda *_: None)
    made.go(Scripted(made.names(2, 6)))
    assert len(made.store.entries()) == 5  # stopped, but all still there
    with pytest.raises(CheckFailed, match=r"shard-00003.* failed its audit and was not redone"):
        audit_log.require_kept(made.store)
    made.go(Scripted())
    assert "4 shards were set aside" in console.file.getvalue()  # type: ignore[attr-defined]
    assert made.made == made.names(1, 6)  # nothing answered for 1, 2 and 4 either
    audit_log.require_kept(made.store)


def test_a_damaged_file_is_no_fault_of_the_capture_path(run: Callable[..., Run]) -> None:
    made = run(4, every_shards=2)

    class Damaging(Scripted):
        def submit(self, task: Task) -> None:
            super().submit(task)
            if task.shard.endswith(self.bad[0]):
                path = made.store.path(self.bad[0])
                path.write_bytes(path.read_bytes()[:-1] + b"\xff")

    with pytest.raises(IntegrityError, match=r"shard-00002\.safetensors is corrupt"):
        made.go(Damaging(made.names(2, 3)))
    assert [line["verdict"] for line in AuditLog(made.store).lines()] == ["pass"]
    assert not (made.folder / "rejected").exists()
    again = Scripted()
    made.go(again)
    assert made.names(2, 3)[0] in made.made
    audit_log.require_kept(made.store)


@pytest.mark.parametrize("at", [1, 4])
def test_an_auditor_that_cannot_run_ends_the_run_and_loses_nothing(
    run: Callable[..., Run], at: int
) -> None:
    made, checker = run(8, every_shards=3), Scripted(slow=True)

    def write(job: Any, promise: Mapping[str, Any]) -> dict[str, Any]:
        if len(made.made) == at:
            checker.dies = CouldNotRun("the auditor was killed by signal 9")
        return Run.write(made, job, promise)

    made.write = write  # type: ignore[method-assign]
    with pytest.raises(CouldNotRun, match="signal 9"):
        made.go(checker)
    assert list(made.store.entries()) == made.made
    assert len(made.made) <= at + 3
    with pytest.raises(CheckFailed, match="after the last audit"):
        audit_log.require_kept(made.store)
    del made.write
    made.go(Scripted())
    audit_log.require_kept(made.store)
    assert len(made.store.entries()) == 8


def test_switched_off_it_is_said_and_nothing_is_promised(
    run: Callable[..., Run], console: Console
) -> None:
    made, checker = run(3, enabled=False), Scripted()
    made.go(checker)
    assert (checker.starts, checker.tasks) == (0, [])
    assert "audit: switched off" in console.file.getvalue()  # type: ignore[attr-defined]
    assert all("audit" not in entry for entry in made.store.entries().values())
    audit_log.require_kept(made.store)


def test_a_promise_is_kept_even_if_audits_are_off_by_now(run: Callable[..., Run]) -> None:
    made = run(3)
    made.go(Scripted(), stop_after=2)
    made.settings = Audit(enabled=False)
    checker = Scripted()
    made.go(checker)
    assert checker.audited == [1]
    audit_log.require_kept(made.store)


def test_a_damaged_line_is_an_audit_that_was_not_made(run: Callable[..., Run]) -> None:
    made = run(5, every_shards=2)
    made.go(Scripted())
    log = AuditLog(made.store)
    data = log.path.read_bytes()
    log.path.write_bytes(data.replace(b'"tokens": [', b'"tokens": [1', 1))
    with pytest.raises(IntegrityError, match=r"line 1 of .*audits\.jsonl is not as it was"):
        audit_log.require_kept(made.store)
    checker = Scripted()
    made.go(checker)
    assert checker.audited == [0]
    audit_log.require_kept(made.store)


def test_another_shards_audit_answers_for_no_other_states(run: Callable[..., Run]) -> None:
    """A shard that is redone after its audit passed needs another."""
    made = run(4, every_shards=2)
    made.go(Scripted())
    made.store.path(made.jobs[1].name).unlink()
    made.jobs[1] = extract.Job(made.jobs[1].name, made.jobs[1].conversations[:2])
    checker = Scripted()
    made.go(checker, stop_after=1)
    with pytest.raises(CheckFailed, match="shard-00001"):
        audit_log.require_kept(made.store)
    made.go(checker)
    assert checker.audited == [1]
    audit_log.require_kept(made.store)


def drawn(made: Run, **settings: Any) -> tuple[Task, dict[str, Any], Mapping[str, Any]]:
    entry = made.store.entries()[made.jobs[1].name]
    made.settings = Audit(**settings)
    task, sample = made.audit(Scripted())._task(entry)
    return task, sample, entry


def test_the_sample_is_drawn_from_seed_and_states_and_lies_where_it_says(
    run: Callable[..., Run],
) -> None:
    made = run(2)
    made.go(Scripted())
    tokens = {c.id: c.token_ids for job in made.jobs for c in job.conversations}
    task, sample, entry = drawn(made, samples=2)
    assert drawn(made, samples=2)[:2] == (task, sample)
    held = made.store.verified(entry)["token_ids"].tolist()
    for first, prompt, name in zip(
        task.first_rows, task.token_ids, sample["requests"], strict=True
    ):
        assert prompt == tokens[name]
        assert tuple(held[first : first + len(prompt)]) == prompt
    assert sample["seed"] == f"7:{entry['digests']['states']}"
    whole = drawn(made, samples=9)[1]
    assert sorted(whole["requests"]) == sorted(entry["ids"])
    cut = drawn(made, samples=3, max_tokens=24)[1]
    assert cut["tokens"] == [8, 8, 8]
    # Which requests are drawn depends on the states: nothing before they are written tells.
    seen, made.settings = set(), Audit()
    for number in range(40):
        other = {**entry, "digests": {"states": f"{number:064x}"}}
        seen.add(made.audit(Scripted())._task(other)[1]["requests"][0])
    assert seen == set(entry["ids"])


# --- the whole of extraction, with a real auditor and no engine --------------------------------

BOUNDARIES = (2, 4, 5, 8)


def turning(without_engine: Any, spec: EngineSpec, folder: Path, fault: str, after: int) -> Any:
    """Return transformers in the engine's precision, which from one shard on makes a fault."""
    import torch

    paths = [
        MutantAdapter(name, TransformersAdapter()).open(spec, scratch=folder)
        for name in ("none", fault)
    ]

    def states_of(order: ShardOrder) -> Any:
        session = paths[opened.orders > after]
        captures = session.capture(order.requests).captures
        return [torch.from_numpy(c.states.copy()).bfloat16() for c in captures]

    opened = without_engine(states_of)
    return opened


class Inline:
    """The same audit without a process of its own."""

    def __init__(self, spec: EngineSpec) -> None:
        self._reference = Reference(Path(spec.model), spec.dtype)

    def submit(self, task: Task) -> None:
        self._finding = auditor.audit(self._reference, task)

    def finished(self) -> Finding | None:
        return self._finding

    def wait(self) -> Finding:
        return self._finding

    def close(self) -> None:
        pass


@pytest.mark.slow
def test_extraction_stops_at_a_fault_keeps_what_is_good_and_then_finishes(
    tmp_path: Path,
    tiny_verifier: Path,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
    without_engine: Any,
) -> None:
    folder = RunFolder(tmp_path / "run")
    for c in conversations(7):
        row = {"id": c.id, "split": c.split, "token_ids": c.token_ids, "prompt_tokens": 3}
        run_folder.append_line(folder.conversations, row | {"question": "?", "answer": "!"})
    config = RunConfig(
        output=folder.root,
        verifier=Verifier(directory=tiny_verifier),
        extract=Extract(requests_per_shard=PER_SHARD),
        audit=Audit(every_shards=3),
    )
    spec = EngineSpec(str(tiny_verifier), BOUNDARIES)
    monkeypatch.setattr(extract, "facts_of", lambda *_: FACTS)
    monkeypatch.setattr(extract, "_without_certificate", lambda *_, **__: set())
    monkeypatch.setattr(extract.Gatekeeper, "standing", lambda _: {"certificate": "c0ffee"})
    path = SimpleNamespace(fault="off-by-one", after=2)
    opened: list[Any] = []

    def open_turning(*_: Any) -> Any:
        opened.append(turning(without_engine, spec, tmp_path, path.fault, path.after))
        return opened[-1]

    monkeypatch.setattr(extract, "opened", open_turning)
    with pytest.raises(CheckFailed) as missed:
        extract.extract(config, folder, spec, console, checker=lambda: Inline(spec))
    # 2 was the first bad one, 3 is audited; some are made meanwhile, and none is recorded.
    assert 5 <= opened[0].orders <= 7
    assert "wrong from shard-00002.safetensors on: the slot for boundary 2 holds boundary 1" in str(
        missed.value
    )
    store = Store(folder.shards)
    assert list(store.entries()) == [f"shard-0000{n}.safetensors" for n in (0, 1)]
    measured = run_folder.read_json(folder.speed)  # of a run that did not end well, too
    captured = sorted(conversations(7), key=lambda c: c.id)[: opened[0].orders * PER_SHARD]
    assert measured["tokens"] == sum(len(c.token_ids) for c in captured)
    assert measured["seconds"] > 0

    path.after = 99
    extract.extract(config, folder, spec, console)
    audit_log.require_kept(store)
    assert len(store.samples([f"c{n}" for n in range(21)])) == 21
    told = report.load(folder.root)
    assert told.proven == 7
    # 0; 3, which missed; 1 and 2, the first bad one; of what was made again 2, 5 and 6.
    assert told.audited.startswith("7 audits, 2 failed; ")
    assert "answer for 7 of 7 shards" in told.audited
    assert told.audited in report.render_html(told)
    shown = io.StringIO()
    report.print_summary(told, Console(file=shown, width=300))
    assert told.audited in shown.getvalue()
    slots = AuditLog(store).lines()[0]["slots"]
    assert [slot["boundary"] for slot in slots] == list(BOUNDARIES)
    assert all(slot["margin"] > 2 and slot["distance"] < 2 * slot["noise"] for slot in slots)


FACTS: dict[str, Any] = {
    "verifier": {"config_sha256": "aa", "weights_sha256": "bb"},
    "boundaries": list(BOUNDARIES),
    "dtype": "bfloat16",
}


# --- several engines ---------------------------------------------------------------------------


def on_engines(
    made: Run, checker: Scripted, engines: str, *, stop_after: int | None = None
) -> RunAudit:
    """Make shard n on the engine ``engines[n]``; killed ``stop_after`` so many."""
    made.folder.mkdir(exist_ok=True)
    audit = made.audit(checker)
    todo = extract._unfinished(made.store, made.jobs, made.console)
    audit.begin([job.name for job in todo])
    audit.settle()
    for count, (job, engine) in enumerate(zip(todo, engines, strict=False), start=1):
        entry = made.write(job, audit.promise_of(engine))
        if count == stop_after:
            return audit
        if not audit.published(entry, last=count == len(todo), engine=engine):
            break
    audit.settle()
    return audit


def answers(made: Run) -> list[tuple[int, list[int]]]:
    lines = AuditLog(made.store).lines()
    return [
        (int(line["shard"][6:11]), [int(name[6:11]) for name in line["answers_for"]])
        for line in lines
    ]


def test_no_engine_vouches_for_another(run: Callable[..., Run]) -> None:
    made = run(9, every_shards=3)
    on_engines(made, Scripted(), "ababbbaab")
    # Each engine's first; b's third after it; a's likewise; at the end what is left, of b.
    assert answers(made) == [(0, [0]), (1, [1]), (5, [3, 4, 5]), (7, [2, 6, 7]), (8, [8])]
    audit_log.require_kept(made.store)


def test_at_the_end_every_engine_is_audited(run: Callable[..., Run]) -> None:
    made = run(6, every_shards=9)
    on_engines(made, Scripted(), "abcabc")
    assert answers(made)[3:] == [(3, [3]), (4, [4]), (5, [5])]
    audit_log.require_kept(made.store)


def test_a_miss_sets_aside_what_that_engine_made_and_no_other(run: Callable[..., Run]) -> None:
    made = run(8, every_shards=3)
    bad = made.names(4, 5)
    with pytest.raises(CheckFailed, match="wrong from shard-00004"):
        on_engines(made, Scripted(bad, slow=True), "abbabaaa")
    # b is audited at the end, with the last shard of all.
    kept = list(made.store.entries())
    assert kept == [name for name in made.names(0, 8) if name not in bad]


def test_after_an_interruption_each_engines_rest_is_audited(run: Callable[..., Run]) -> None:
    made = run(6, every_shards=9)
    on_engines(made, Scripted(), "abaabb", stop_after=5)
    assert answers(made) == [(0, [0]), (1, [1])]
    on_engines(made, Scripted(), "a")
    assert answers(made)[2:] == [(3, [2, 3]), (4, [4]), (5, [5])]
    audit_log.require_kept(made.store)

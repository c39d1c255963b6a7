"""Several engines: room for them, what becomes of them, and the same shards as from one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import module_from_spec, spec_from_file_location
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console

from truetap.harness import reaper, verifier
from truetap.harness.errors import CheckFailed, CouldNotRun, IntegrityError, UsageError
from truetap.harness.extraction import Pool
from truetap.harness.model import EngineSpec
from truetap.pipeline import engine_worker, scale
from truetap.pipeline.engine_worker import (
    Assignment,
    Delivered,
    EngineWorker,
    Failed,
    Hello,
    Lost,
    Opened,
    Progress,
    Want,
)
from truetap.pipeline.extract import Cluster
from truetap.pipeline.prepare import Conversation
from truetap.pipeline.scale import Room, room_for
from truetap.pipeline.shard_making import Job
from truetap.pipeline.store import Store

HERE = Path(__file__).resolve().parent
FAKE = HERE / "fake_engine" / "fake_engine.py"
DEADLINE_S = 120


# --- how many engines there is room for --------------------------------------------------------


def nodes(*each: tuple[float, float]) -> list[dict[str, Any]]:
    """Nodes as ``ray.nodes()`` tells them, by cores and GPUs; one more that is gone."""
    alive = [
        {"Alive": True, "Resources": {"CPU": cpus} | ({"GPU": gpus} if gpus else {})}
        for cpus, gpus in each
    ]
    return [*alive, {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}}]


@pytest.mark.parametrize(
    ("there", "ranks", "wanted", "jobs", "room"),
    [
        (nodes((64, 8), (64, 8)), 1, None, 99, Room(16, 1, 1)),
        (nodes((64, 8), (64, 8)), 4, None, 99, Room(4, 1, 4)),
        (nodes((64, 8), (64, 3)), 4, None, 99, Room(2, 1, 4)),
        (nodes((64, 8), (16, 0)), 2, None, 99, Room(4, 1, 2)),  # a head node without GPUs
        (nodes((64, 8)), 1, 3, 99, Room(3, 1, 1)),
        (nodes((64, 8)), 1, None, 2, Room(2, 1, 1)),
        (nodes((2, 0)), 1, None, 99, Room(1, 2, 0)),
        (nodes((2, 0)), 1, 2, 99, Room(2, 1, 0)),
        (nodes((32, 0), (16, 0)), 1, None, 99, Room(2, 16, 0)),
        (nodes((32, 0), (16, 0)), 1, 5, 99, Room(5, 8, 0)),
        (nodes((16, 0), (3, 0)), 2, 5, 99, Room(5, 3, 0)),  # a fair share would be 5, for three
        (nodes((16, 0), (16, 0)), 1, 3, 99, Room(3, 8, 0)),
        (nodes((32, 0), (3, 0)), 4, 4, 99, Room(4, 8, 0)),
    ],
)
def test_room(there: Any, ranks: int, wanted: int | None, jobs: int, room: Room) -> None:
    spec = EngineSpec("m", (1,), tensor_parallel_size=ranks)
    assert room_for(there, spec, wanted, jobs) == room


@pytest.mark.parametrize(
    ("there", "ranks", "wanted", "said"),
    [
        (nodes((64, 8)), 4, 3, "3 engines of 4 GPUs each do not fit: .* room for 2"),
        (nodes((64, 8), (64, 8)), 16, None, "1 engines of 16 GPUs each .* room for 0"),
        (nodes((2, 0)), 1, 3, "3 engines of 1 CPU cores each .* room for 2"),
        (nodes(), 1, None, "room for 0"),
        (nodes((64, 6), (64, 6)), 4, 3, "room for 2"),
    ],
)
def test_what_does_not_fit_is_refused(
    there: Any, ranks: int, wanted: int | None, said: str
) -> None:
    spec = EngineSpec("m", (1,), tensor_parallel_size=ranks)
    with pytest.raises(UsageError, match=said) as refused:
        room_for(there, spec, wanted, 99)
    assert "--engines" in refused.value.remedy


def test_an_engines_ranks_get_a_gpu_each_and_share_a_node() -> None:
    assert Room(4, 1, 2).bundle == {"CPU": 1, "GPU": 2}
    assert Room(4, 8, 0).bundle == {"CPU": 8}


def test_a_death_is_told_in_one_line() -> None:
    long = (
        "The actor died.\n\tpid: 7\nWorker exit type: SYSTEM_ERROR Worker exit detail: " + "x " * 99
    )
    said = scale._cause(RuntimeError(long))
    assert said.startswith("its process died (SYSTEM_ERROR: x x")
    assert said.endswith(" ...)")
    assert len(said) < 170
    assert scale._cause(RuntimeError("no\n such  thing")) == "no such thing"


def test_ray_is_imported_only_when_it_is_asked_for() -> None:
    code = (
        "import sys, truetap.pipeline.cli, truetap.pipeline.extract, truetap.pipeline.scale; "
        "sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(CouldNotRun) as missing, scale._connected("local"):
        pass
    assert missing.value.remedy == "pip install 'truetap[ray]' on every node"


class RayError(Exception):
    """Stands in for Ray's own base of errors."""


def paper_ray(**does: Any) -> SimpleNamespace:
    """Ray as far as it is talked to here; ``does`` replaces what it does."""
    plain = {
        "is_initialized": lambda: False,
        "init": lambda **_: None,
        "shutdown": lambda: None,
        "exceptions": SimpleNamespace(RayError=RayError),
    }
    return SimpleNamespace(**plain | does)


def test_nobody_at_the_address_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", paper_ray(init=lambda **_: pytest.fail("asked")))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        scale._knock(f"ray://127.0.0.1:{port}")
        for without in ("auto", "local"):
            scale._knock(without)
    said = f"cannot join a Ray cluster at '127.0.0.1:{port}': .*refused"
    with pytest.raises(CouldNotRun, match=said), scale._connected(f"127.0.0.1:{port}"):
        pass


@pytest.mark.parametrize("does", [RayError("no valid token"), SystemExit(15), SystemExit(1), None])
def test_however_ray_starts_sigterm_is_as_before_afterwards(
    monkeypatch: pytest.MonkeyPatch, does: BaseException | None
) -> None:
    """Ray sets a handler of its own, which raises ``SystemExit``: that says nothing to anybody."""

    def init(**_: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        if does:
            raise does

    monkeypatch.setitem(sys.modules, "ray", paper_ray(init=init))
    before = signal.getsignal(signal.SIGTERM)
    try:
        if does is None:
            with scale._connected("auto"):
                assert signal.getsignal(signal.SIGTERM) is scale._interrupted
        else:
            kind = CouldNotRun if isinstance(does, RayError) else KeyboardInterrupt
            with pytest.raises(kind) as ended, scale._connected("auto"):
                pass
            told = "cannot join a Ray cluster at 'auto': no valid token"
            assert ended.value.args == ((told,) if kind is CouldNotRun else (signal.SIGTERM,))
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("gone", ["nodes", "wait"])
def test_a_cluster_that_goes_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gone: str
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RayError("GCS is\n gone")

    class Fleet(scale.RayFleet):
        def _start(self, engine: int, assignment: Any) -> None:
            pass

        def close(self) -> None:
            pass

    ray = paper_ray(nodes=lambda: nodes((2, 0))) if gone == "wait" else paper_ray()
    setattr(ray, gone, fails)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(scale, "RayFleet", Fleet)
    monkeypatch.setattr(scale, "sizes", lambda *_: (1, 1, 1, "float32"))
    extraction: Any = SimpleNamespace(
        console=Console(file=StringIO()),
        folder=SimpleNamespace(logs=tmp_path / "logs"),
        store=SimpleNamespace(folder=tmp_path),
        config=SimpleNamespace(capture=SimpleNamespace(adapter="fake")),
        spec=EngineSpec("m", (1,)),
        facts={},
        pool=Pool(),
    )
    with pytest.raises(CouldNotRun, match="the Ray cluster does not answer: GCS is gone; ") as told:
        scale.capture(extraction, jobs(1), 2, Cluster("auto"))
    assert told.value.remedy
    assert not list(tmp_path.glob("logs/*"))


def test_an_engine_that_is_spread_over_nodes_is_not_one_of_several() -> None:
    extraction: Any = SimpleNamespace(spec=EngineSpec("m", (1,), executor="ray"))
    with pytest.raises(UsageError, match="spreads one engine over nodes") as told:
        scale.capture(extraction, jobs(1), 2, Cluster("auto"))
    assert told.value.remedy


# --- who is silent, and who was only not listened to -------------------------------------------


class Clock:
    """Stands in for ``time`` in ``scale``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class PaperRay:
    """Waits for calls that hold their answer once it is there."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def wait(self, calls: list[Any], *, num_returns: int, timeout: float) -> tuple[Any, Any]:
        there = [call for call in calls if call.answer is not None][:num_returns]
        if not there:
            self.clock.now += timeout
        return there, [call for call in calls if call not in there]

    def get(self, call: Any) -> Any:
        return call.answer


@dataclass(eq=False)
class PaperCall:
    answer: Any = None


class PaperActor:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[PaperCall] = []
        self.events = SimpleNamespace(remote=self._called)

    def _called(self) -> PaperCall:
        self.calls.append(PaperCall())
        return self.calls[-1]


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Three engines that have begun, each asked for its events."""
    clock = Clock()
    monkeypatch.setattr(scale, "time", clock)
    monkeypatch.setattr(scale.RayFleet, "_start", lambda *_: None)
    made: Any = scale.RayFleet(PaperRay(clock), None, Room(3, 1, 0))  # type: ignore[arg-type]
    made.clock = clock
    made._begun = set(made.engines)
    for engine in made.engines:
        made._actors[engine] = PaperActor()
        made._ask(engine, made._actors[engine].events.remote(), scale.SILENCE_S)
    return made


def test_a_head_that_was_busy_takes_nobody_for_lost(fleet: Any) -> None:
    for engine in (1, 2):  # of the third the answer comes later
        fleet._actors[engine].calls[-1].answer = [Want()]
    fleet.clock.now += 2 * scale.SILENCE_S
    seen = []
    for heard_ in fleet.heard():
        seen.append(heard_)
        fleet.clock.now += 2 * scale.SILENCE_S  # an audit
    assert seen == [(1, Want()), (2, Want())]
    assert list(fleet.heard()) == []
    fleet._actors[3].calls[-1].answer = [Want()]
    assert list(fleet.heard()) == [(3, Want())]


def test_an_answer_that_is_there_counts_however_late(fleet: Any) -> None:
    fleet._clock += 2 * scale.SILENCE_S
    for actor in fleet._actors.values():
        actor.calls[-1].answer = [Want()]
    assert list(fleet.heard()) == [(engine, Want()) for engine in (1, 2, 3)]


def test_an_engine_that_is_silent_while_others_speak_is_lost(fleet: Any) -> None:
    seen: list[Any] = []
    rounds = 0
    while not seen and rounds < 2 * scale.SILENCE_S:
        for engine in (1, 3):
            fleet._actors[engine].calls[-1].answer = []
        fleet.clock.now += 1.0
        seen, rounds = list(fleet.heard()), rounds + 1
    assert seen == [(2, Lost("its process did not answer for 120 s"))]
    assert rounds == scale.SILENCE_S + 1


# --- one engine, held in the hand --------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = spec_from_file_location("fake_engine", FAKE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(
        engine_worker,
        "opened",
        lambda _name, spec, scratch: module.FakeAdapter().open(spec, scratch=scratch),
    )
    return module


@pytest.fixture
def assignment(tmp_path: Path, paper_verifier: Path) -> Assignment:
    logs, shards = tmp_path / "logs", tmp_path / "shards"
    logs.mkdir()
    shards.mkdir()
    engine_worker.token_path(logs).write_text("abc")
    facts = {"boundaries": [3, 12], "dtype": "float32"}
    return Assignment(
        "fake",
        EngineSpec(str(paper_verifier), (3, 12), dtype="float32"),
        facts | {"verifier": verifier.digests(paper_verifier)},
        Pool(),
        shards,
        logs,
        "abc",
    )


def jobs(count: int) -> list[Job]:
    every = [Conversation(f"c{n:02}", "train", tuple(range(n, n + 9)), 3) for n in range(2 * count)]
    return [Job(f"shard-{n:05d}.safetensors", every[2 * n : 2 * n + 2]) for n in range(count)]


def heard(worker: EngineWorker) -> Iterator[Any]:
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        yield from worker.events()
    raise TimeoutError


def work(worker: EngineWorker, todo: list[Job]) -> list[Any]:
    """Give an engine jobs as it asks for them; return what it said, up to the end of it."""
    seen: list[Any] = []
    left = list(todo)
    worker.begin(0, 0)
    for event in heard(worker):
        seen.append(event)
        if isinstance(event, Failed | Lost):
            break
        if isinstance(event, Opened | Want):
            worker.tell(left.pop(0) if left else None)
        if len(todo) == sum(isinstance(event, Delivered) for event in seen):
            break
    worker.close()
    return seen


@pytest.mark.torch
def test_a_worker_makes_what_it_is_given_and_publishes_nothing(
    fake: Any, assignment: Assignment
) -> None:
    worker = EngineWorker(1, assignment)
    assert worker.hello() == Hello(os.uname().nodename, os.getpid())
    todo = jobs(3)
    seen = work(worker, todo)
    assert seen[0] == Opened(fake.BINDING)
    order = [type(event).__name__ for event in seen[1:] if not isinstance(event, Progress)]
    assert sorted(order) == ["Delivered"] * 3 + ["Want"] * 3
    assert order[0] == "Want"  # it has room for a second one before the first is made
    assert sum(e.tokens for e in seen if isinstance(e, Progress)) == 3 * 2 * 9
    made = [event for event in seen if isinstance(event, Delivered)]
    assert [event.entry["shard"] for event in made] == [job.name for job in todo]
    assert made[0].entry["ids"] == ["c00", "c01"]
    assert {p.name for p in assignment.shards.iterdir()} == {event.partial for event in made}
    assert all(event.partial.endswith(".partial") for event in made)
    assert made[0].partial != f"{todo[0].name}.partial"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("engine", Lost, "vLLM did not answer (see its log)"),
        ("defect", Lost, "AttributeError: no such thing; see "),
        ("disk", Failed, "No space left on device"),
        ("file", Failed, "No space left on device"),
        ("bad", Failed, "rank 1 saw other tokens"),
        ("start", Lost, "no device (see its log)"),
    ],
)
def test_an_engine_that_is_gone_is_told_from_a_fault_that_all_would_meet(
    fake: Any,  # noqa: ARG001
    assignment: Assignment,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    kind: type,
    said: str,
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"engine": 1, "at": 2, "how": how}))
    last = work(EngineWorker(1, assignment), jobs(3))[-1]
    assert isinstance(last, kind)
    assert said in (last.why if isinstance(last, Lost) else str(last.error))
    if how == "bad":
        assert isinstance(last.error, CheckFailed)
    if how == "file":
        assert isinstance(last.error, OSError)
    if how == "defect":
        assert "Traceback" in (assignment.logs / "extract-1" / "engine.log").read_text()


@pytest.mark.parametrize("wrong", ["token", "no token", "no verifier", "another verifier"])
def test_a_worker_that_sees_another_folder_says_so(
    assignment: Assignment, wrong: str, paper_verifier: Path
) -> None:
    token = engine_worker.token_path(assignment.logs)
    facts, spec = dict(assignment.facts), assignment.spec
    if wrong == "token":
        token.write_text("another run's")
    elif wrong == "no token":
        token.unlink()
    elif wrong == "no verifier":
        spec = EngineSpec(str(paper_verifier) + "-not-here", (3, 12))
    else:
        facts["verifier"] = {"config_sha256": "1", "weights_sha256": "2"}
    changed = replace(assignment, spec=spec, facts=facts)
    (last,) = work(EngineWorker(3, changed), [])
    assert isinstance(last, Failed)
    assert isinstance(last.error, IntegrityError if "another" in wrong else UsageError)
    assert str(last.error).startswith("engine 3 on ")
    assert ("run folder" in str(last.error)) == ("token" in wrong)
    assert "same path on every node" in last.error.remedy


@pytest.mark.parametrize(
    ("error", "kind"),
    [(OSError(28, "full"), Failed), (OSError(122, "quota"), Failed), (OSError(5, "bad"), Lost)],
)
def test_a_full_folder_concerns_all_and_a_bad_device_one(
    assignment: Assignment, monkeypatch: pytest.MonkeyPatch, error: OSError, kind: type
) -> None:
    def opened(*_: Any) -> None:
        raise error

    monkeypatch.setattr(engine_worker, "opened", opened)
    monkeypatch.setattr(reaper, "watch_over_me", lambda: None)
    (last,) = work(EngineWorker(1, assignment), [])
    assert isinstance(last, kind)
    if isinstance(last, Lost):
        assert last.why.startswith("OSError: [Errno 5] bad")


def test_a_worker_that_cannot_begin_says_so(
    assignment: Assignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(1, "not these cores")

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    worker = EngineWorker(1, assignment)
    worker.begin(0, 1)
    (last,) = worker.events()
    assert isinstance(last, Lost)
    assert last.why.startswith("PermissionError: [Errno 1] not these cores")


# --- a cluster of this machine -----------------------------------------------------------------


class Bench:
    """A folder with the fake engine installed in it, and runs of it."""

    def __init__(self, root: Path, model: Path) -> None:
        self.root, self.model = root, model
        self.site = root / "site"
        info = self.site / "fake_engine-1.dist-info"
        info.mkdir(parents=True)
        shutil.copy(FAKE, self.site)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-engine\nVersion: 1\n")
        (info / "entry_points.txt").write_text(
            "[truetap.adapters]\nfake = fake_engine:FakeAdapter\n"
        )

    def config(self, name: str, conversations: int) -> Path:
        out = self.root / name
        out.mkdir()
        with (out / "conversations.jsonl").open("w") as file:
            for n in range(conversations):
                ids = list(range(n, n + 20 + n % 7))
                row = {"id": f"c{n:02}", "split": "train", "token_ids": ids, "prompt_tokens": 3}
                file.write(json.dumps(row) + "\n")
        path = self.root / f"{name}.toml"
        path.write_text(
            f'output = "{out}"\n[verifier]\ndirectory = "{self.model}"\n[capture]\n'
            'adapter = "fake"\nboundaries = [3, 12]\ndtype = "float32"\n'
            "[extract]\nrequests_per_shard = 1\n[audit]\nenabled = false\n"
        )
        return path

    def start(
        self,
        config: Path,
        *options: str,
        command: Sequence[str] = ("-m", "truetap.pipeline.cli"),
        **fault: Any,
    ) -> subprocess.Popen[str]:
        found = [str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])]
        reason = ("--allow-uncertified", "the engine is a fake one")
        return subprocess.Popen(
            [sys.executable, *command, "extract", config, *reason, *options],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(found), "FAKE_ENGINE": json.dumps(fault)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture
def bench(tmp_path: Path, paper_verifier: Path) -> Bench:
    return Bench(tmp_path, paper_verifier)


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, output


def appears(path: Path) -> str:
    until = time.monotonic() + DEADLINE_S
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return path.read_text()


def descendants(pid: int) -> list[psutil.Process]:
    return [
        p
        for p in psutil.Process(pid).children(recursive=True)
        if "truetap.harness.reaper" not in p.cmdline()
    ]


RAY = ("--ray", "local", "--engines", "2")
HANGS = {"engine": 1, "at": 8, "how": "hang"}
"""Of 24 shards, and up to six are under way in an engine: some are recorded by then."""


@pytest.mark.torch
@pytest.mark.slow
def test_one_of_two_engines_is_killed_and_all_shards_are_as_from_one(bench: Bench) -> None:
    one, two = bench.config("one", 24), bench.config("two", 24)
    process = bench.start(two, *RAY, **HANGS)
    code, said = finished(bench.start(one))
    assert code == 0, said
    os.kill(int(appears(bench.root / "two" / "logs" / "extract-1" / "reached")), signal.SIGKILL)
    code, said = finished(process)
    assert code == 0, said
    assert "engine 1 on " in said
    assert " is lost: its process died (" in said
    assert "Traceback" not in said

    first, second = (bench.root / name / "shards" for name in ("one", "two"))
    assert files(first) == files(second)
    assert len(files(first)) == 24
    lines = [json.loads(line) for line in (second / "manifest.jsonl").open()]
    assert sorted(line["shard"] for line in lines) == sorted(files(first))  # each of them once
    for entry in Store(second).entries().values():
        assert len(Store(second).verified(entry)["offsets"]) == 2
    assert list(second.glob("*.partial")) == []


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "number", "code", "said"),
    [
        ("signal", signal.SIGTERM, 143, "ended by SIGTERM; run the same command again to continue"),
        ("signal", signal.SIGINT, 130, "interrupted; run the same command again to continue"),
        ("signal", signal.SIGKILL, -9, ""),
        ("bad", 0, 1, "truetap: rank 1 saw other tokens"),
        ("disk", 0, 3, "remedy: free disk space"),
        ("file", 0, 3, "remedy: free disk space and run again; finished work is kept"),
    ],
)
def test_whatever_ends_it_leaves_nothing_behind_and_is_continued(
    bench: Bench, how: str, number: int, code: int, said: str
) -> None:
    config = bench.config("run", 24)
    shards = bench.root / "run" / "shards"
    fault = {"how": "hang" if how == "signal" else how}
    process = bench.start(config, *RAY, **HANGS | fault)
    if how == "signal":
        appears(bench.root / "run" / "logs" / "extract-1" / "reached")
        started = descendants(process.pid)
        assert started
        process.send_signal(number)
        ended, output = finished(process)
        _, alive = psutil.wait_procs(started, timeout=20)
        assert alive == []
    else:
        ended, output = finished(process)
    assert (ended, said in output) == (code, True), output
    assert "Traceback" not in output
    if number != signal.SIGKILL:
        assert list(shards.glob("*.partial")) == []
    kept = {path: path.stat().st_mtime_ns for path in shards.glob("*.safetensors")}
    assert 0 < len(kept) < 24

    ended, output = finished(bench.start(config, *RAY))
    assert ended == 0, output
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    lines = [json.loads(line)["shard"] for line in (shards / "manifest.jsonl").open()]
    assert len(lines) == len(set(lines)) == 24
    assert list(shards.glob("*.partial")) == []


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.nightly
def test_an_engine_that_stands_still_is_given_up(bench: Bench) -> None:
    config = bench.config("run", 24)
    code = "from truetap.pipeline import cli, scale; scale.SILENCE_S = 4.0; cli.main()"
    process = bench.start(config, *RAY, command=("-c", code), **HANGS)
    os.kill(int(appears(bench.root / "run" / "logs" / "extract-1" / "reached")), signal.SIGSTOP)
    ended, output = finished(process)
    assert ended == 0, output
    assert "is lost: its process did not answer for 4 s" in output
    assert len(files(bench.root / "run" / "shards")) == 24

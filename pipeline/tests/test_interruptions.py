"""The interruption matrix: ``truetap extract`` on a real engine, struck in the middle, run again.

From outside only: the command line, signals, disks, and what ``Store`` reads afterwards. After each
fault every line of the manifest has a sound file, the exit code and the sentence are those that are
documented, and no process is left. The second run then redoes exactly the rest: shards that were
recorded keep inode and time, and all have the digests of an undisturbed run.

The faults take minutes and are for the night; the kill of the driver is in ``test_end_to_end`` too.
Disks are ext4 in a file, which only root can mount. docs/interruptions.md has the table.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest

from truetap.harness.errors import IntegrityError
from truetap.pipeline.run_folder import whole_lines
from truetap.pipeline.store import Store, by_shard, unsealed

DOCUMENTED = Path(__file__).parents[2] / "docs" / "interruptions.md"
DEADLINE_S = 300.0
GONE_WITHIN_S = 15.0
"""A reaper looks twice a second, and a killed process has memory to give back."""
SHARDS, PER_SHARD = 10, 12
EARLY = 3
"""So many shards are recorded when a fault strikes; most are yet to come."""
SILENCE_S = 10
CONFIG = """
output = "{output}"
[verifier]
directory = "{verifier}"
[capture]
dtype = "float32"               # with one request at a time, every run gives the same bits
max_num_seqs = 1
enable_prefix_caching = false
tensor_parallel_size = {ranks}
call_deadline_s = {silence}
[extract]
requests_per_shard = {per_shard}
[audit]
enabled = false                 # the reference would take longer than the engine
"""


@dataclass(frozen=True)
class Look:
    """What is in a run's folder at one moment, and who still works there."""

    sound: Mapping[str, Mapping[str, str]]
    """Digests of the recorded shards whose files hold what their lines say."""
    unsound: tuple[str, ...] = ()
    """What is wrong with the other lines."""
    damaged: str = ""
    """What a reader says of the manifest where it refuses it."""
    stamps: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Inode and time of every shard file, recorded or not."""
    partial: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()


class Run:
    """One run folder, and the commands that are run on it."""

    def __init__(self, folder: Path, verifier: Path, ranks: int, silence: int = 120) -> None:
        self.out, self.config = folder / "out", folder / "run.toml"
        self.shards = self.out / "shards"
        self.manifest = self.shards / "manifest.jsonl"
        self.process: subprocess.Popen[str] | None = None
        self.out.mkdir(parents=True, exist_ok=True)
        values = {"verifier": verifier, "ranks": ranks, "silence": silence, "per_shard": PER_SHARD}
        self.config.write_text(CONFIG.format(output=self.out, **values))
        if not (self.out / "conversations.jsonl").exists():
            (self.out / "conversations.jsonl").write_text("".join(_conversations()))

    def start(self) -> None:
        """Start the command in a session of its own, by which its processes are found."""
        reason = ("--allow-uncertified", "what interruptions do needs no certificate")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "truetap.pipeline.cli", "extract", str(self.config), *reason],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The command's process id, and its session's."""
        assert self.process is not None
        return self.process.pid

    def reach(self, count: int) -> None:
        """Wait until so many shards are recorded."""
        assert self.process is not None
        deadline = time.monotonic() + DEADLINE_S
        while not self.manifest.exists() or self.manifest.read_bytes().count(b"\n") < count:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def finish(self) -> tuple[int, str]:
        """Wait for the command's end; return its exit code and what it printed."""
        assert self.process is not None
        with closing(self):
            printed, _ = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, printed

    def ended(self) -> tuple[int, str, tuple[str, ...]]:
        """As ``finish``, with the processes that outlive the command for too long."""
        assert self.process is not None
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        _, alive = psutil.wait_procs([p for p in self.family() if p.pid != self.pid], GONE_WITHIN_S)
        told = tuple(" ".join(_command(process))[:60] for process in alive)
        return *self.finish(), told

    def family(self) -> list[psutil.Process]:
        """Return all processes of the command that still run, its reaper included."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                watches = _command(process)[-2:] == ["truetap.harness.reaper", str(self.pid)]
                of_us = os.getsid(process.pid) == self.pid or watches
                if of_us and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def close(self) -> None:
        """Kill what still runs, of a test that failed."""
        if self.process:
            for one in self.family():
                with suppress(psutil.NoSuchProcess):
                    one.kill()

    def worker(self, title: str) -> int:
        """Return the process id of an engine's process, by the title that vLLM gives it."""
        (found,) = [p.pid for p in self.family() if title in " ".join(_command(p))]
        return found

    def look(self, processes: tuple[str, ...] = ()) -> Look:
        """Read the folder as training does, and by its names."""
        store, sound, unsound, damaged = Store(self.shards), {}, [], ""
        try:
            entries = store.entries()
        except IntegrityError as wrong:
            damaged = str(wrong)
            entries = by_shard(filter(None, map(unsealed, whole_lines(self.manifest))))
        for name, entry in entries.items():
            try:
                store.verified(entry)
                sound[name] = entry["digests"]
            except IntegrityError as wrong:
                unsound.append(f"{name}: {wrong}")
        stats = {path.name: path.stat() for path in self.shards.glob("*.safetensors")}
        stamps = {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}
        known = {*stamps, self.manifest.name}
        files = {path.name for path in self.shards.iterdir() if path.is_file()}
        partial = tuple(sorted(files - known))
        return Look(sound, tuple(unsound), damaged, stamps, partial, processes)


def _command(process: psutil.Process) -> list[str]:
    return list(process.cmdline())


def _conversations() -> Iterator[str]:
    drawn = random.Random(0)
    for number in range(SHARDS * PER_SHARD):
        ids = [drawn.randrange(2, 512) for _ in range(drawn.randint(200, 480))]
        row = {"id": f"c{number:04d}", "split": "train", "token_ids": ids}
        yield json.dumps(row | {"prompt_tokens": len(ids) // 2}) + "\n"


def faults_of(whole: Mapping[str, Mapping[str, str]], struck: Look, resumed: Look) -> list[str]:
    """Return what is wrong with a folder after a fault and after the run that made up for it.

    ``whole`` has the digests of an undisturbed run.
    """
    found = []
    for when, look in (("after the fault", struck), ("at the end", resumed)):
        found += [f"{when} a line has no sound file: {what}" for what in look.unsound]
        found += [f"{when} {what} was still running" for what in look.processes]
        found += [
            f"{when} {name} holds other states than an undisturbed run's"
            for name, digests in look.sound.items()
            if digests != whole.get(name)
        ]
    found += [f"at the end {resumed.damaged}"] * bool(resumed.damaged)
    found += [
        f"{name} was redone, and was complete"
        for name in struck.sound
        if struck.stamps.get(name) != resumed.stamps.get(name)
    ]
    found += [f"{name} is missing at the end" for name in whole if name not in resumed.sound]
    unknown = sorted({*resumed.stamps, *resumed.partial} - set(whole))
    return found + [f"{name} was left behind" for name in unknown]


# The faults


@dataclass(frozen=True)
class Fault:
    """One row of the matrix."""

    name: str
    exit: int | None
    """Exit code of the struck command, negative for a signal; None: nothing was running."""
    says: str
    """A pattern of the sentence; empty: it can say nothing."""
    strike: Callable[[Run], Callable[[], None] | None]
    """Does it; returns what ends it, if it lasts, to be called before the command runs again."""
    ranks: int = 1
    disk: bool = False
    silence: int = 120


def _signal(number: int, title: str = "") -> Callable[[Run], None]:
    """Send a signal to the command, or to the engine's process of that title."""
    return lambda run: os.kill(run.worker(title) if title else run.pid, number)


def _to_all(number: int) -> Callable[[Run], None]:
    """Send a signal as a terminal, or a scheduler of clusters, does: to every process at once."""
    return lambda run: os.killpg(run.pid, number)


def _fill(run: Run) -> Callable[[], None]:
    """Have a neighbour take all the space that is left."""
    neighbour = run.config.parent / "neighbour"
    with neighbour.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 20)):
            pass
    return neighbour.unlink


def _stall(run: Run) -> Callable[[], None]:
    """Let no write through for half a second, again and again, as a busy file server does."""
    over = threading.Event()

    def stalling() -> None:
        while not over.is_set():
            with frozen(run.config.parent):
                over.wait(0.5)
            over.wait(0.1)

    thread = threading.Thread(target=stalling)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()

    return end


def _stall_for_long(run: Run) -> Callable[[], None]:
    """Let no write through until well after the engine's deadline."""
    held = frozen(run.config.parent)
    held.__enter__()
    timer = threading.Timer(2.5 * SILENCE_S, held.__exit__, (None, None, None))
    timer.start()
    return timer.join


def _tear(run: Run) -> None:
    """Cut the manifest in the middle of its last line."""
    data = run.manifest.read_bytes()
    last = data[:-1].rfind(b"\n") + 1
    run.manifest.write_bytes(data[: (last + len(data)) // 2])


def _zero(run: Run) -> None:
    """Turn half a line into zeros, as some file systems do to what a power cut caught."""
    lines = run.manifest.read_bytes().splitlines(keepends=True)
    half = len(lines[EARLY]) // 2
    lines[EARLY] = lines[EARLY][:half] + bytes(half - 1) + b"\n"
    run.manifest.write_bytes(b"".join(lines))


def _leave_partial(run: Run) -> None:
    """Leave files of another run's, one of them of the name that the next one writes."""
    lines = run.manifest.read_bytes().splitlines(keepends=True)
    name = json.loads(lines.pop(EARLY))["shard"]
    run.manifest.write_bytes(b"".join(lines))
    complete = run.shards / name
    for left in (f"{name}.partial", f"{name}.0123abcd.partial", f".tmp{name}"):
        (run.shards / left).write_bytes(complete.read_bytes()[:100_000])
    (run.shards / "manifest.jsonl.partial").write_bytes(lines[0])
    complete.unlink()


CORE, RANK = "EngineCore", "Worker_TP{}"
LOST = r"truetap: vLLM('s engine process ended during \w+| failed at \w+: .*(died|dead|Dead))"
SILENT = rf"truetap: vLLM did not answer \w+ within {SILENCE_S} s; its processes were killed"
# The engine's log is on that disk, so it cannot even say that its own timeout has passed.
MUTE = SILENT.replace(f"{SILENCE_S} s", f"{SILENCE_S + 10} s")
FULL = r"truetap: .*(No space left on device|no space)"
STOPPED = "interrupted; run the same command again to continue"
ENDED = "ended by SIGTERM; run the same command again to continue"
FAULTS = (
    Fault("kill -9 of truetap", -9, "", _signal(signal.SIGKILL)),
    Fault("kill -9 of the engine core", 3, LOST, _signal(signal.SIGKILL, CORE)),
    Fault("kill -9 of rank 0, which writes", 3, LOST, _signal(9, RANK.format(0)), ranks=2),
    Fault("kill -9 of rank 1", 3, LOST, _signal(9, RANK.format(1)), ranks=2),
    Fault("SIGTERM to truetap", 143, ENDED, _signal(signal.SIGTERM)),
    Fault("SIGTERM to all its processes", 143, ENDED, _to_all(signal.SIGTERM)),
    Fault("SIGINT to truetap", 130, STOPPED, _signal(signal.SIGINT)),
    Fault("Ctrl-C in a terminal", 130, STOPPED, _to_all(signal.SIGINT)),
    Fault("the engine core hangs", 3, SILENT, _signal(signal.SIGSTOP, CORE), silence=SILENCE_S),
    Fault("rank 1 hangs", 3, SILENT, _signal(19, RANK.format(1)), ranks=2, silence=SILENCE_S),
    Fault("the disk fills up", 3, FULL, _fill, disk=True),
    Fault("every write takes half a second", 0, "", _stall, disk=True),
    Fault("the disk hangs", 3, MUTE, _stall_for_long, disk=True, silence=SILENCE_S),
    Fault("the manifest's last line is torn in half", None, "", _tear),
    Fault("half a line of the manifest is zeros", None, "", _zero),
    Fault("partial files of another run", None, "", _leave_partial),
)


# Disks


@contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    """Mount an ext4 of 128 MB, which is half again what a run takes."""
    image, place = folder / "disk.img", folder / "disk"
    with image.open("wb") as file:
        file.truncate(128 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", image], check=True)
    place.mkdir()
    mount = ["mount", "-o", "loop", image, place]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    assert not done.returncode, f"this fault needs a disk that only root can mount: {done.stderr}"
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)
        image.unlink()


@contextmanager
def frozen(place: Path) -> Iterator[None]:
    """Have the kernel hold back every write to the disk that ``place`` is on."""
    freeze, thaw = 0xC0045877, 0xC0045878
    descriptor = os.open(place, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, freeze, 0)
        try:
            yield
        finally:
            fcntl.ioctl(descriptor, thaw, 0)
    finally:
        os.close(descriptor)


# The matrix


Row = tuple[str, str, str, str, str, str]
ROWS: dict[str, Row] = {}
HEADER: Row = ("fault", "exit", "said", "kept", "redone", "left behind")


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path
) -> Callable[[int], Run]:
    """Return a run that nothing disturbed, by its number of ranks."""
    made: dict[int, Run] = {}

    def run(ranks: int) -> Run:
        if ranks not in made:
            one = Run(tmp_path_factory.mktemp("undisturbed"), tiny_verifier, ranks)
            one.start()
            with closing(one):
                code, printed, left = one.ended()
            assert (code, left) == (0, ()), printed
            made[ranks] = one
        return made[ranks]

    return run


@pytest.fixture(scope="module", autouse=True)
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Write down what was seen, as docs/interruptions.md has it."""
    yield
    if ROWS:
        path = tmp_path_factory.mktemp("table") / "table.md"
        path.write_text("".join(_line(row) for row in (HEADER, ("---",) * 6, *ROWS.values())))
        sys.__stdout__.write(f"\n{path.read_text()}\nalso in {path}\n")  # pytest's is captured


@pytest.fixture(scope="module", autouse=True)
def interruptible() -> Iterator[None]:
    """Undo what a shell does to what it starts with ``&``: it and its children ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def place(tmp_path: Path, fault: Fault) -> Iterator[Path]:
    """A folder, on a disk of its own where the fault is one of disks."""
    if not fault.disk:
        yield tmp_path
        return
    with mounted(tmp_path) as disk:
        yield disk


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
@pytest.mark.nightly
@pytest.mark.live
@pytest.mark.torch
@pytest.mark.slow
def test_what_is_complete_stays_and_exactly_the_rest_is_redone(
    fault: Fault, place: Path, tiny_verifier: Path, undisturbed: Callable[[int], Run]
) -> None:
    whole = undisturbed(fault.ranks)
    if fault.exit is None:
        shutil.copytree(whole.out, place / "out")
    run = Run(place, tiny_verifier, fault.ranks, fault.silence)
    with closing(run):
        code, printed, struck = _struck(fault, run)
        run.start()
        end, told, left = run.ended()
        resumed = run.look(left)
    redone = sum(struck.stamps.get(name) != stamp for name, stamp in resumed.stamps.items())
    said = next((line for line in printed.splitlines() if re.search(fault.says, line)), "")
    _record(fault, said if fault.says else "", struck, redone)
    assert code == fault.exit, printed
    assert re.search(fault.says, printed), printed
    assert "Traceback" not in printed
    assert end == 0, told
    assert faults_of(whole.look().sound, struck, resumed) == []
    assert bool(struck.damaged) == (fault.strike is _zero), struck.damaged
    if fault.exit != 0:  # in the middle: something was kept, and something left to do
        assert 0 < len(struck.sound) == len(resumed.sound) - redone < SHARDS


def _struck(fault: Fault, run: Run) -> tuple[int | None, str, Look]:
    """Let the fault strike; return how the command ended, what it printed and what is there."""
    if fault.exit is not None:
        run.start()
        run.reach(EARLY)
    mend = fault.strike(run) or (lambda: None)
    try:
        code, printed, left = run.ended() if run.process else (None, "", ())
    finally:
        mend()
    return code, printed, run.look(left)


def _record(fault: Fault, said: str, struck: Look, redone: int) -> None:
    said = re.sub(r"/\S*/", ".../", said.removeprefix("truetap: "))
    left = [f"{len(struck.partial)} unfinished files, removed by the next run"] * bool(
        struck.partial
    )
    left += [f"{name}, still running" for name in struck.processes]
    ROWS[fault.name] = (
        *(fault.name, "-" if fault.exit is None else str(fault.exit), said or "-"),
        *(str(len(struck.sound)), str(redone), "; ".join(left) or "nothing"),
    )
    sys.stdout.write(_line(ROWS[fault.name]))  # with -s, for the documentation


def _line(row: Row) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n"


def _documented() -> dict[str, list[str]]:
    rows = [line.strip("| \n").split(" | ") for line in DOCUMENTED.open() if line.startswith("| ")]
    return {row[0]: row for row in rows[2:]}


def _loosely(text: str) -> str:
    return re.sub(r"-?\d+|None", "N", text)  # what vLLM says of a death differs in that


@pytest.mark.nightly
def test_the_documented_table_is_what_was_seen() -> None:
    documented = _documented()
    for name, row in ROWS.items():
        assert name in documented, f"docs/interruptions.md lacks the row {_line(row)}"
        assert [_loosely(cell) for cell in documented[name][1:3]] == [
            _loosely(cell) for cell in row[1:3]
        ]


def test_what_is_documented_is_what_the_matrix_demands() -> None:
    documented = _documented()
    faults = {fault.name: fault for fault in FAULTS}
    assert list(documented) == list(faults)
    for name, (_, code, said, kept, redone, left) in documented.items():
        fault = faults[name]
        assert code == ("-" if fault.exit is None else str(fault.exit))
        assert re.search(fault.says, f"truetap: {said}")
        assert int(kept) + int(redone) == SHARDS
        assert "running" not in left


# What judges it, on folders that are wrong

NAMES = [f"shard-{number:05d}.safetensors" for number in range(3)]
WHOLE = {name: {"states": f"digest of {name}"} for name in NAMES}
STRUCK = Look(
    {NAMES[0]: WHOLE[NAMES[0]]},
    stamps={NAMES[0]: (1, 1), NAMES[1]: (2, 2)},  # renamed, and killed before its line
    partial=(f"{NAMES[2]}.partial",),
)
RESUMED = Look(WHOLE, stamps={NAMES[0]: (1, 1), NAMES[1]: (3, 3), NAMES[2]: (4, 4)})
OTHER = {**WHOLE, NAMES[0]: {"states": "of another"}}


def test_a_folder_that_was_made_up_for_is_right() -> None:
    assert faults_of(WHOLE, STRUCK, RESUMED) == []


@pytest.mark.parametrize(
    ("struck", "resumed", "said"),
    [
        ({"unsound": ("shard-1: is missing",)}, {}, "after the fault a line has no sound file"),
        ({"processes": ("VLLM::EngineCore",)}, {}, "after the fault VLLM::EngineCore was still"),
        ({"sound": {NAMES[0]: OTHER[NAMES[0]]}}, {}, "after the fault .* holds other states"),
        ({}, {"unsound": ("shard-1: is corrupt",)}, "at the end a line has no sound file"),
        ({}, {"damaged": "line 1 is not as written"}, "at the end line 1 is not as written"),
        ({}, {"processes": ("VLLM::Worker",)}, "at the end VLLM::Worker was still running"),
        ({}, {"sound": OTHER}, f"at the end {NAMES[0]} holds other states"),
        ({}, {"stamps": {**RESUMED.stamps, NAMES[0]: (1, 5)}}, "was redone, and was complete"),
        ({}, {"sound": {n: WHOLE[n] for n in NAMES[:2]}}, f"{NAMES[2]} is missing at the end"),
        ({}, {"partial": STRUCK.partial}, f"{NAMES[2]}.partial was left behind"),
        ({}, {"stamps": {**RESUMED.stamps, "shard-00009": (9, 9)}}, "shard-00009 was left behind"),
    ],
)
def test_a_folder_that_was_not_is_told(
    struck: dict[str, object], resumed: dict[str, object], said: str
) -> None:
    (told,) = faults_of(WHOLE, replace(STRUCK, **struck), replace(RESUMED, **resumed))  # type: ignore[arg-type]
    assert re.search(said, told)

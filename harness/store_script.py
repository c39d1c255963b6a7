"""One drive of a store of captures: everything that the STORE clauses judge.

Real processes, real faults, and no clock: see ``truetap.harness.store_process``. The drive runs in
a process of its own, which imports what the store imports and otherwise only forks, so that a store
on torch does not import it a hundred times, nor fork with torch's threads about.
"""

from __future__ import annotations

import importlib
import multiprocessing
import platform
import shutil
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from truetap.harness import contract, store_files
from truetap.harness.capture_store import (
    SHARD,
    CaptureStore,
    Damage,
    Mended,
    Outcome,
    Pair,
    Read,
    StoreObservation,
    after_change,
    samples,
    told,
)
from truetap.harness.errors import CouldNotRun
from truetap.harness.model import Environment
from truetap.harness.store_process import (
    SETTLE_S,
    Fault,
    LoopingReader,
    Process,
    Reader,
    Writer,
    handed,
)

STOP = 6
"""Samples handed over before a writer is stopped or its disk is full."""
CHANGED = 3
"""The sample that has other tokens later."""
_READERS = 2


def observe_store(
    store: CaptureStore,
    scratch: Path,
    say: Callable[[str], None] = lambda _: None,
    *,
    clauses: Collection[str] = contract.PROFILES["store"],
) -> StoreObservation:
    """Drive ``store`` through the script; takes seconds. ``scratch`` gets some megabytes.

    Steps that only other clauses than ``clauses`` judge are left out.
    """
    say(f"driving the store {store.name}")
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_observer, args=(theirs, store, scratch, tuple(clauses)))
    process.start()
    theirs.close()
    try:
        seen = ours.recv()
    except EOFError:
        seen = "it ended without a word"
    process.join()
    if not isinstance(seen, StoreObservation):
        raise CouldNotRun(f"the store {store.name} could not be driven: {seen}")
    return seen


def _observer(
    pipe: Connection, store: CaptureStore, scratch: Path, clauses: Collection[str]
) -> None:
    try:
        pipe.send(_Drive(store, scratch).observe(clauses))
    except BaseException as error:
        pipe.send(told(error))


class _Drive:
    """The steps of the script."""

    def __init__(self, store: CaptureStore, scratch: Path) -> None:
        self._store, self._scratch = store, scratch
        self._folders = 0
        self._samples = samples()
        self._complete = self._new()
        """A folder with all samples, which is only copied from."""

    def observe(self, clauses: Collection[str]) -> StoreObservation:
        seen = StoreObservation(frozenset(capture.key for capture in self._samples))
        seen.environment = Environment(
            binding={"machine": platform.machine(), "store": self._store.name},
            recorded={"host_os": platform.platform(), "python": platform.python_version()},
        )
        self._import_what_the_store_imports()
        seen.clean = self._write(self._complete)
        seen.clean_read = self._read(self._complete)
        seen.files = store_files.sizes(self._complete)
        if seen.clean.written is None or not seen.files:
            return seen  # nothing to damage or resume: every clause says so
        steps = {
            self._watch: ("STORE-002",),
            self._race: ("STORE-002",),
            self._kills: ("STORE-003", "STORE-010"),
            self._damage: ("STORE-004",),
            self._stop: ("STORE-005",),
            self._cuts: ("STORE-006",),
            self._failures: ("STORE-007", "STORE-010"),
            self._change: ("STORE-008",),
            self._pairs: ("STORE-009",),
        }
        for step, judged_by in steps.items():
            if not set(judged_by).isdisjoint(clauses):
                step(seen)
        return seen

    def _import_what_the_store_imports(self) -> None:
        folder, store, captures = self._new(), self._store, self._samples

        def work(_: Connection) -> list[str]:
            with suppress(Exception):
                store.write(folder, captures)
                store.read(folder)
            return list(sys.modules)

        process = Process(work)
        match process.next():
            case ("done", names):
                for name in names:
                    with suppress(Exception):
                        importlib.import_module(name)
        process.kill()

    # What is done with one folder.

    def _new(self) -> Path:
        self._folders += 1
        folder = self._scratch / f"store-{self._folders}"
        folder.mkdir(parents=True)
        return folder

    def _copy(self) -> Path:
        folder = self._new()
        shutil.copytree(self._complete, folder, dirs_exist_ok=True)
        return folder

    def _write(self, folder: Path) -> Outcome:
        return Writer(self._store, folder, self._samples).finish()

    def _read(self, folder: Path) -> Read:
        return Reader(self._store, [folder], self._samples).wait()[0]

    def _readable(self, folder: Path) -> frozenset[str]:
        """Return what can be read of a folder whose writer is held; nothing, if a reader waits."""
        reader = Reader(self._store, [folder], self._samples)
        found = reader.results(SETTLE_S)
        if found is None:
            reader.kill()
            return frozenset()
        return found[0].keys

    def _mend(
        self,
        what: str,
        folder: Path,
        before: frozenset[str],
        *,
        broken: str = "",
        outcome: Outcome | None = None,
        cause: str = "",
    ) -> Mended:
        """See what can be read, and let another writer complete it."""
        found = self._read(folder)
        earlier = store_files.stamps(folder)
        resumed = self._write(folder)
        rewritten = tuple(
            f for f in store_files.rewritten(earlier, store_files.stamps(folder)) if f != broken
        )
        after, size = self._read(folder), sum(store_files.sizes(folder).values())
        shutil.rmtree(folder)
        return Mended(
            what, before, found, resumed, rewritten, after, size, outcome or Outcome(), cause
        )

    # The steps.

    def _watch(self, seen: StoreObservation) -> None:
        """Let readers look wherever the writer can be held."""
        folder = self._new()
        writer = Writer(self._store, folder, self._samples, calls=True)
        waiting = False
        while place := writer.step():
            readers = []
            if not waiting:
                readers = [Reader(self._store, [folder], self._samples) for _ in range(_READERS)]
                waiting = any(reader.results(SETTLE_S) is None for reader in readers)
            if waiting and readers:  # they wait for the writer, which is right if they are served
                writer.finish()
            seen.held.append((place, tuple(reader.wait()[0] for reader in readers)))
            if writer.outcome is None:
                writer.go()
        writer.kill()

    def _race(self, seen: StoreObservation) -> None:
        folder = self._new()
        readers = [LoopingReader(self._store, folder, self._samples) for _ in range(_READERS)]
        self._write(folder)
        seen.raced = [reader.stop() for reader in readers]

    def _places(self) -> list[str]:
        """Return where a writer of all samples can be held."""
        writer = Writer(self._store, self._new(), self._samples, calls=True)
        places = []
        while place := writer.step():
            places.append(place)
            writer.go()
        writer.kill()
        return places

    def _kills(self, seen: StoreObservation) -> None:
        """Kill the writer before calls of the middle and the end, between samples, in writes."""
        places = self._places()
        numbers = {name: places.index(name) for name in map(handed, range(11)) if name in places}
        middle = range(numbers.get(handed(4), 0), numbers.get(handed(STOP + 1), 0))
        end = range(numbers.get(handed(10), len(places)), len(places))
        for number in store_files.some([*middle, *end], 10):
            seen.killed.append(self._killed_at(number, calls=True))
        for limit in store_files.limits(seen.files):
            folder, writer, before = self._held_at_stop(Fault(STOP, limit, deadly=True))
            outcome = writer.finish()
            what = f"ended by the kernel at byte {limit} of a file"
            seen.killed.append(self._mend(what, folder, before, outcome=outcome))

    def _killed_at(self, number: int, *, calls: bool, wanted: int = 0) -> Mended:
        """Kill a writer at a place; first give threads of its own time to make so many readable."""
        folder = self._new()
        writer = Writer(self._store, folder, self._samples, calls=calls)
        place = writer.reach(number)
        before = self._readable(folder)
        patience = time.monotonic() + SETTLE_S
        while len(before) < wanted and time.monotonic() < patience:
            before = self._readable(folder)
        writer.kill()
        return self._mend(f"killed {place or 'at its end'}", folder, before)

    def _stop(self, seen: StoreObservation) -> None:
        """Kill it between samples and go on; and write once more what is complete."""
        seen.stopped = self._killed_at(STOP, calls=False, wanted=STOP - SHARD)
        folder = self._copy()
        earlier = store_files.stamps(folder)
        seen.again = self._write(folder)
        seen.rewritten_again = tuple(store_files.rewritten(earlier, store_files.stamps(folder)))

    def _failures(self, seen: StoreObservation) -> None:
        faults = {
            f"no file can grow beyond byte {limit}": (Fault(STOP, limit), "file too large|errno 27")
            for limit in store_files.limits(seen.files)
        }
        faults["the source of captures fails"] = Fault(STOP), "the engine died"
        for what, (fault, cause) in faults.items():
            folder, writer, before = self._held_at_stop(fault)
            outcome = writer.finish()
            seen.failed.append(self._mend(what, folder, before, outcome=outcome, cause=cause))

    def _held_at_stop(self, fault: Fault) -> tuple[Path, Writer, frozenset[str]]:
        folder = self._new()
        writer = Writer(self._store, folder, self._samples, fault=fault)
        writer.reach(STOP)
        before = self._readable(folder)
        return folder, writer, before

    def _damage(self, seen: StoreObservation) -> None:
        done: list[tuple[str, str, Path]] = []
        for file, size in seen.files.items():
            ways: dict[str, Callable[[Path], object]] = {
                "deleted": lambda path: path.unlink(),
                "emptied": lambda path: path.write_bytes(b""),
            }
            if size:
                ways[f"cut at byte {size // 2} of {size}"] = store_files.halve
                ways[f"cut at byte {size - 1} of {size}"] = lambda path: path.write_bytes(
                    path.read_bytes()[:-1]
                )
            for byte in store_files.bytes_to_flip(size, len(seen.files)):
                ways[f"bit 0 of byte {byte} flipped"] = partial(store_files.flip, byte=byte)
            for how, damage in ways.items():
                folder = self._copy()
                damage(folder / file)
                done.append((file, how, folder))
        reads = Reader(self._store, [folder for *_, folder in done], self._samples).wait()
        for *_, folder in done:
            shutil.rmtree(folder, ignore_errors=True)
        seen.damaged = [
            Damage(file, how, found) for (file, how, _), found in zip(done, reads, strict=True)
        ]

    def _cuts(self, seen: StoreObservation) -> None:
        for file in store_files.some(sorted(seen.files), 12):
            folder = self._copy()
            store_files.halve(folder / file)
            what = f"{file} was cut in half"
            seen.cut[file] = self._mend(what, folder, seen.everything, broken=file)

    def _change(self, seen: StoreObservation) -> None:
        folder, new = self._copy(), after_change(CHANGED)
        seen.changed_key = new[CHANGED].key
        seen.changed = Writer(self._store, folder, new).finish()
        (as_new,) = Reader(self._store, [folder], new).wait()
        seen.changed_read = self._read(folder), as_new

    def _pairs(self, seen: StoreObservation) -> None:
        """Start a second writer of all samples where the first is held; then let that one go on."""
        places = self._places()
        until = places.index(handed(4)) if handed(4) in places else len(places)
        for number in store_files.some(range(until), 4):
            folder = self._new()
            first = Writer(self._store, folder, self._samples, calls=True)
            place = first.reach(number)
            second = Writer(self._store, folder, self._samples)
            second.settle()
            reads: list[tuple[str, Reader]] = []
            if second.outcome and second.outcome.written is not None:
                for _ in range(4):
                    first.go()
                    if not (where := first.step()):
                        break
                    reader = Reader(self._store, [folder], self._samples)
                    reads.append((f"first writer held {where}", reader))
                    if reader.results(SETTLE_S) is None:
                        break  # it waits for the first writer, which therefore has to end
            outcomes = first.finish(), second.finish()
            reads.append(("both ended", Reader(self._store, [folder], self._samples)))
            found = tuple((where, reader.wait()[0]) for where, reader in reads)
            seen.pairs.append(Pair(place, *outcomes, found))

"""Extraction on a Ray cluster: one engine per placement group, jobs handed out as they ask.

All that knows Ray is here. The cluster only has to start processes and carry small messages: shards
go through the run folder, which every node must see under the same path, like the verifier. Nobody
restarts an engine; what a lost one had not delivered, another makes.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from truetap.harness import reaper
from truetap.harness.errors import CouldNotRun, UsageError
from truetap.pipeline import plan
from truetap.pipeline.dispatch import Dispatch
from truetap.pipeline.engine_lines import engine_lines
from truetap.pipeline.engine_worker import (
    Assignment,
    EngineWorker,
    Event,
    Hello,
    Lost,
    token_path,
)
from truetap.pipeline.extract import Cluster, Extraction, sizes
from truetap.pipeline.shard_making import Job

if TYPE_CHECKING:
    from truetap.harness.model import EngineSpec

PLACEMENT_S = 600.0
"""Longest wait for room in the cluster, for each engine."""
SILENCE_S = 120.0
"""An engine's process answers every second; one that is silent for longer is taken for lost."""
CLOSE_S = 25.0
KNOCK_S = 10.0
ROUND_S = 5.0
"""Most that counts as waiting for engines between two looks at them: in a longer time this process
was busy itself (a shard's audit takes minutes), which is no engine's silence."""
OBJECT_STORE_BYTES = 128 * 2**20
"""Only token ids and manifest lines go through Ray; its own default is 30 % of memory."""


@dataclass(frozen=True)
class Room:
    """What a cluster has, and what of it each engine gets."""

    engines: int
    cpus: int
    """Each engine's; on machines without GPUs also the number of its cores."""
    gpus: int

    @property
    def bundle(self) -> dict[str, int]:
        """Return the resources of one engine, as Ray spells them."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


def capture(extraction: Extraction, todo: Sequence[Job], total: int, cluster: Cluster) -> None:
    """Make the shards ``todo`` on a cluster; the counterpart of ``Extraction.capture``.

    An engine's own error ends it, with that error. However it ends, the engines end with it.
    """
    if extraction.spec.executor == "ray":
        raise UsageError(
            'executor = "ray" spreads one engine over nodes, --ray gives engines a node each',
            remedy="leave out one of the two",
        )
    console, folder = extraction.console, extraction.folder
    done = total - sum(len(job.conversations) for job in todo)
    console.print(f"to be captured: {plan.told(*sizes(todo, extraction.spec))}", highlight=False)
    with _connected(cluster.address) as ray, _answering(ray):
        room = room_for(ray.nodes(), extraction.spec, cluster.engines, len(todo))
        console.print(
            f"starting {room.engines} engines on Ray, each with {_told(room)}", highlight=False
        )
        token = secrets.token_hex(8)
        folder.logs.mkdir(parents=True, exist_ok=True)
        token_path(folder.logs).write_text(token)
        assignment = Assignment(
            extraction.config.capture.adapter,
            extraction.spec,
            extraction.facts,
            extraction.pool,
            extraction.store.folder,
            folder.logs,
            token,
        )
        fleet = RayFleet(ray, assignment, room)
        try:
            with (
                engine_lines(console, total, done=done) as lines,
                closing(fleet),
            ):
                Dispatch(extraction, todo, fleet, lines).run()
        finally:
            token_path(folder.logs).unlink(missing_ok=True)
            for left in extraction.store.folder.glob("*.partial"):  # of engines that are gone
                left.unlink(missing_ok=True)


def room_for(
    nodes: Sequence[Mapping[str, Any]], spec: EngineSpec, wanted: int | None, jobs: int
) -> Room:
    """Return how many engines a cluster's ``ray.nodes()`` hold, or refuse ``wanted``.

    An engine's ranks share one node. With GPUs there is one for each rank; without, all engines get
    the same number of cores, the largest with which they fit; if none are ``wanted``, there are as
    many as nodes. There are never more engines than jobs.
    """
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    ranks = spec.tensor_parallel_size
    with_gpus = any(node.get("GPU", 0) >= 1 for node in alive)
    held = [int(node.get("GPU" if with_gpus else "CPU", 0)) for node in alive]
    held = [count for count in held if count >= ranks]
    most = sum(count // ranks for count in held)
    what = "GPUs" if with_gpus else "CPU cores"
    if (wanted or 1) > most:
        raise UsageError(
            f"{wanted or 1} engines of {ranks} {what} each do not fit: the cluster's nodes have "
            f"room for {most}",
            remedy="ask for fewer (--engines), lower capture.tensor_parallel_size, or add nodes; "
            "ray status shows what there is",
        )
    if with_gpus:
        return Room(min(wanted or most, jobs), 1, ranks)
    engines = min(wanted or len(held), jobs)
    shares = range(max(held), ranks, -1)
    fits = (share for share in shares if sum(count // share for count in held) >= engines)
    return Room(engines, next(fits, ranks), 0)


def _told(room: Room) -> str:
    return f"{room.gpus} GPUs" if room.gpus else f"{room.cpus} CPU cores"


class RayFleet:
    """Engines as Ray actors, each in a placement group of its own."""

    def __init__(self, ray: Any, assignment: Assignment, room: Room) -> None:
        self._ray, self._room = ray, room
        self.engines = range(1, room.engines + 1)
        self._groups: dict[int, Any] = {}
        self._actors: dict[int, Any] = {}
        self._asked: dict[Any, tuple[int, float]] = {}
        """Calls under way: of whom, and until when, by ``_clock``, the answer must be there."""
        self._clock, self._looked = 0.0, time.monotonic()
        self._of_host: dict[str, int] = {}
        self._begun: set[int] = set()
        for engine in self.engines:
            self._start(engine, assignment)

    def _start(self, engine: int, assignment: Assignment) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group([self._room.bundle], strategy="STRICT_PACK")
        actor = (
            self._ray.remote(EngineWorker)
            .options(
                num_cpus=self._room.cpus,
                num_gpus=self._room.gpus,
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=4,  # ``tell`` and ``close`` while ``events`` waits
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            )
            .remote(engine, assignment)
        )
        self._groups[engine], self._actors[engine] = group, actor
        self._ask(engine, actor.hello.remote(), PLACEMENT_S)

    def _ask(self, engine: int, call: Any, seconds: float) -> None:
        self._asked[call] = engine, self._clock + seconds

    def heard(self) -> Iterator[tuple[int, Event]]:
        """Yield what happened, waiting up to a second for it.

        Who is silent is settled before anything is yielded: the caller may take minutes over that.
        """
        calls = list(self._asked)
        self._ray.wait(calls, num_returns=1, timeout=1.0)
        there, missing = self._ray.wait(calls, num_returns=len(calls), timeout=0)
        now = time.monotonic()
        self._clock += min(now - self._looked, ROUND_S)
        self._looked = now
        late = [call for call in missing if self._clock > self._asked[call][1]]
        for call in there:
            if call in self._asked:  # not dismissed meanwhile
                engine, _ = self._asked.pop(call)
                for event in self._answer(engine, call):
                    yield engine, event
        for call in late:
            if call in self._asked:
                engine, _ = self._asked.pop(call)
                yield engine, Lost(self._silent(engine))

    def _answer(self, engine: int, call: Any) -> Sequence[Event]:
        try:
            answer = self._ray.get(call)
            actor = self._actors[engine]
            if isinstance(answer, Hello):
                position = self._of_host.get(answer.host, 0)
                self._of_host[answer.host] = position + 1
                cores = 0 if self._room.gpus else self._room.cpus
                actor.begin.remote(position, cores)
                self._begun.add(engine)
                answer = [answer]
            self._ask(engine, actor.events.remote(), SILENCE_S)
        except self._ray.exceptions.RayError as error:
            return [Lost(_cause(error))]
        events: Sequence[Event] = answer
        return events

    def _silent(self, engine: int) -> str:
        if engine in self._begun:
            return f"its process did not answer for {SILENCE_S:.0f} s"
        return f"Ray had no room for it, or could not start it, within {PLACEMENT_S:.0f} s"

    def tell(self, engine: int, job: Job | None) -> None:
        """Hand an engine a job; if it is gone, ``heard`` says so."""
        self._actors[engine].tell.remote(job)

    def dismiss(self, engine: int) -> None:
        """Kill an engine's process; its reaper ends what that has started."""
        self._asked = {call: held for call, held in self._asked.items() if held[0] != engine}
        with suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(self._actors.pop(engine))

    def close(self) -> None:
        """End all engines: in order, as far as they can; then by force."""
        from ray.util.placement_group import remove_placement_group

        try:
            closing_calls = [actor.close.remote() for actor in self._actors.values()]
            if closing_calls:
                self._ray.wait(closing_calls, num_returns=len(closing_calls), timeout=CLOSE_S)
        finally:
            for engine in [*self._actors]:
                self.dismiss(engine)
            for group in self._groups.values():
                with suppress(self._ray.exceptions.RayError):
                    remove_placement_group(group)


_EXIT = re.compile(r"Worker exit type: (\S+) Worker exit detail: (.*?)(?: Some common causes|$)")


def _cause(error: Exception) -> str:
    """Return one line of what Ray says of a lost actor or a failed call."""
    said = " ".join(str(error).split())
    if found := _EXIT.search(said):
        said = f"its process died ({found[1]}: {found[2]}"
        return textwrap.shorten(said, 160, placeholder=" ...") + ")"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A failed call's text is a traceback, which ends with the error.
    shown = lines[-1] if type(error).__name__.startswith("RayTaskError") else said
    return textwrap.shorten(shown, 300, placeholder=" ...")


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Connect to a cluster, or start one here; leave it, or stop it, afterwards.

    Meanwhile SIGTERM ends the extraction as Ctrl-C does, in order.
    """
    try:
        import ray
    except ImportError as error:
        raise CouldNotRun(
            f"Ray cannot be imported: {error}", remedy="pip install 'truetap[ray]' on every node"
        ) from error
    if ray.is_initialized():  # by whoever calls us: theirs to stop
        yield ray
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        reaper.watch_over_me()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quiet |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    before = signal.getsignal(signal.SIGTERM)
    try:
        try:
            _knock(address)
            ray.init(address=address, **quiet)
            signal.signal(signal.SIGTERM, _interrupted)  # Ray has set a handler of its own
        except SystemExit:  # what that one raises
            raise KeyboardInterrupt(signal.SIGTERM) from None
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise CouldNotRun(
                f"cannot join a Ray cluster at {address!r}: {textwrap.shorten(str(error), 200)}",
                remedy="start one (ray start --head), or give --ray local",
            ) from error
        yield ray
    finally:
        signal.signal(signal.SIGTERM, before)
        ray.shutdown()


@contextmanager
def _answering(ray: Any) -> Iterator[None]:
    """Tell of a cluster that is gone; of engines that are, ``RayFleet`` tells itself."""
    try:
        yield
    except ray.exceptions.RayError as error:
        raise CouldNotRun(
            f"the Ray cluster does not answer: {_cause(error)}; finished shards are kept",
            remedy="see ray status, then run again",
        ) from error


def _knock(address: str) -> None:
    """Raise ``OSError`` if nobody listens at HOST:PORT: Ray itself tries for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S):
            pass


def _interrupted(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt(signal.SIGTERM)

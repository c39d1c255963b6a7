"""Brings rows from an engine's steps to shard files, on threads, through memory of a fixed size.

An engine's step hands over rows and goes on. They are copied into slots of a pool (on a GPU:
pinned memory, on a stream of its own), hashed, and written to their place in the shard's file; when
a shard has all its rows, another thread brings the file to the disk. A step waits only where no
slot is free: this back-pressure bounds the memory, however slow the disk is.

Nothing is raised into a step, which would kill the engine: a shard's first error is kept, its later
rows are dropped, and ``report`` tells. Each worker of an engine has one ``Staging``.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, cycle
from pathlib import Path
from queue import LifoQueue, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from truetap.harness.shard import Layout, ShardFile, checksum, raw

if TYPE_CHECKING:
    import torch

SYNC_BYTES = 32 << 20
"""How much of a shard is written before the disk is told to take it. The system would wait for
seconds, and the last ``fsync`` for all of it."""
SLOT_BYTES = 8 << 20
"""Size of a slot. Longer requests travel in pieces, so none is too long for the pool."""

Rows = Callable[[int, int], "torch.Tensor"]
"""Returns rows ``[start, end)`` of what is put, on the engine's device and in its queue's order."""


@dataclass
class _Shard:
    """A shard that is being made."""

    partial: Path
    keys: Sequence[str]
    file: ShardFile | None
    left: int
    """Rows that are not written yet, or not counted if this worker writes none."""
    number: int
    """Of all that were announced. One thread brings all of a shard to the disk."""
    under_way: int = 0
    """Pieces in the pool. The file stays open until there are none."""
    unsynced: int = 0
    """Bytes that were written since the disk was told last."""
    error: Exception | None = None
    done: bool = False
    """Complete and, if this worker writes, on the disk."""


@dataclass
class _Request:
    """A request that is to be captured."""

    shard: _Shard
    first_row: int
    lane: int
    """The thread that writes its pieces, one after the other."""
    token_ids: npt.NDArray[np.int64]
    """What the engine computed at each position; -1 where no row was put yet."""
    pieces: list[tuple[int, int, str]] = field(default_factory=list)
    """Of each piece the position, the rows, and the checksum of the rows in memory."""
    recomputed: int = 0


@dataclass(frozen=True)
class _Piece:
    """Rows of a request in a slot."""

    request: _Request
    position: int
    slot: torch.Tensor
    states: torch.Tensor
    """A view of the slot, ``[rows, boundaries, hidden]``."""
    arrived: Callable[[], None]
    """Waits for the copy into the slot."""


class Staging:
    """The pool, the threads and the shards of one worker.

    ``shape`` and ``dtype`` are those of a row's states. A worker that does not write
    (``writes``), a tensor-parallel rank other than the first, notes what it sees; with ``hashes``
    it hashes the rows as well, so that ranks can be compared. ``pinned``: the engine's is a GPU.
    """

    def __init__(
        self,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype,
        pool_bytes: int,
        threads: int,
        pinned: bool = False,
        writes: bool = True,
        hashes: bool = True,
    ) -> None:
        import torch

        self._shape, self._dtype = shape, dtype
        self._writes, self._hashes = writes, writes or hashes
        self._row_bytes = shape[0] * shape[1] * dtype.itemsize
        self._slot_bytes = max(SLOT_BYTES, self._row_bytes)
        self._shards: dict[str, _Shard] = {}
        self._requests: dict[str, _Request] = {}
        self._others: set[str] = set()
        self._announced = 0
        self._news = threading.Condition()  # guards what follows, and every shard's fields
        self._staged = self._most_staged = self._queued = 0
        self._moved = 0  # grows as long as anything reaches the disk
        self._waited_s = 0.0
        self._stopped: Exception | None = None
        self._free: LifoQueue[torch.Tensor] = LifoQueue()  # last in, first out: few are touched
        for _ in range(max(2, pool_bytes // self._slot_bytes) if self._hashes else 0):
            self._free.put(torch.empty(self._slot_bytes, dtype=torch.uint8, pin_memory=pinned))
        self._lanes: list[SimpleQueue[_Piece]] = [SimpleQueue() for _ in range(threads)]
        self._next_lane = cycle(range(threads))  # on over shards: some have few requests
        self._disk: list[SimpleQueue[tuple[_Shard, ShardFile | None]]] = [
            SimpleQueue() for _ in range(threads if writes else 0)
        ]
        self._stream: Any = None
        if self._hashes:
            for lane in self._lanes:
                _thread("truetap-write", self._write_all, lane)
        for queue in self._disk:
            _thread("truetap-sync", self._sync_all, queue)

    def expect(
        self,
        name: str,
        partial: str,
        keys: Sequence[str],
        lengths: Sequence[int],
        masks: Sequence[bytes],
    ) -> None:
        """Announce a shard before the first of its requests reaches the engine; make its file.

        That it could not be made is told by ``report``, as of writing to it. Reports call the shard
        by ``name``; replies are recorded and published, so it should be no path.
        """
        path = Path(partial)
        layout = Layout(tuple(lengths), *self._shape, self._dtype)
        shard = _Shard(path, tuple(keys), None, layout.rows, self._announced)
        if self._writes:
            try:
                shard.file = ShardFile(path, layout, masks)
            except OSError as error:
                shard.error = error
        self._announced += 1
        self._shards[name] = shard
        first_rows = accumulate((0, *lengths))
        for key, row, length in zip(keys, first_rows, lengths, strict=False):
            ids = np.full(length, -1, dtype=np.int64)
            self._requests[key] = _Request(shard, row, next(self._next_lane), ids)

    def put(self, key: str, position: int, token_ids: Sequence[int], rows: Rows) -> None:
        """Take the rows of a request from ``position`` on, one per token id.

        Rows that are there already, because the engine computed them a second time, are left out.
        """
        request = self._requests.get(key)
        if request is None:
            self._others.add(key)
            return
        ids = np.array(token_ids, dtype=np.int64)
        places = request.token_ids[position : position + len(ids)]
        if len(places) < len(ids):
            error = RuntimeError(f"the engine computed more rows than request {key} has tokens")
            self._settle(request.shard, error=error)
            return
        there = places >= 0
        again = len(ids) if there.all() else int(there.argmin())
        if there[again:].any():
            error = RuntimeError(f"the engine computed later rows of request {key} before earlier")
            self._settle(request.shard, error=error)
            return
        request.recomputed += again
        places[again:] = ids[again:]
        if not self._hashes:
            self._settle(request.shard, rows=len(ids) - again)
            return
        per_slot = self._slot_bytes // self._row_bytes
        try:
            for start in range(again, len(ids), per_slot):
                if request.shard.error:
                    return
                end = min(start + per_slot, len(ids))
                self._stage(request, position + start, end - start, rows(start, end))
        except Exception as error:  # an engine's step must not die of it
            self._settle(request.shard, error=error)

    def stop(self, error: Exception) -> None:
        """Hear that no more rows will come, and why."""
        with self._news:
            self._stopped = self._stopped or error
            self._news.notify_all()

    def report(self, due: Collection[str], wait_s: float = 0.0) -> dict[str, Any]:
        """Tell, in builtins, what has come of the shards since the last report.

        ``due`` are shards all of whose requests the engine has finished: what is not there now
        never will be. Waits up to ``wait_s`` seconds until there is news of one of them.

        ``written``: for each complete one, by its name, what was seen of its requests.
        ``missing``: how many rows there are of incomplete requests of due shards. ``others``: how
        many requests were captured that nobody asked for. ``failed``: the first error.
        ``status``: what the user is shown. What is told is forgotten.
        """
        with self._news:
            asked = {name: self._shards[name] for name in due if name in self._shards}
            self._news.wait_for(
                lambda: (
                    not asked
                    or self._stopped
                    or any(shard.done or shard.error for shard in asked.values())
                ),
                wait_s,
            )
            done = [name for name, shard in asked.items() if shard.done]
            failing = {name: shard for name, shard in self._shards.items() if shard.error}
            errors = [self._stopped, *(shard.error for shard in failing.values())]
            status = {
                "queued": self._queued,
                "staged": self._staged,
                "most_staged": self._most_staged,
                "waited_s": self._waited_s,
                "moved": self._moved,
            }
        missing: dict[str, int] = {}
        for name, shard in asked.items():
            gaps = [self._requests[key].token_ids < 0 for key in shard.keys]
            if any(gap.any() for gap in gaps):
                missing |= {
                    key: int((~gap).sum())
                    for key, gap in zip(shard.keys, gaps, strict=True)
                    if gap.any()
                }
                self._settle(shard, error=RuntimeError("rows are missing"))
                failing[name] = shard
        written = {name: self._seen(self._shards.pop(name)) for name in done}
        for name, shard in failing.items():
            del self._shards[name]
            for key in shard.keys:
                del self._requests[key]
        return {
            "written": written,
            "missing": missing,
            "others": len(self._others),
            "failed": next((_told(error) for error in errors if error), None),
            "status": status,
        }

    def _seen(self, shard: _Shard) -> list[dict[str, Any]]:
        """Return what was seen of a shard's requests, in their order; forget them."""
        requests = [self._requests.pop(key) for key in shard.keys]
        return [
            {
                "rows": len(request.token_ids),
                "token_ids": hashlib.sha256(request.token_ids.tobytes()).hexdigest(),
                "pieces": [list(piece) for piece in sorted(request.pieces)],
                "recomputed": request.recomputed,
            }
            for request in requests
        ]

    # From the engine's thread into the pool

    def _stage(self, request: _Request, position: int, count: int, rows: torch.Tensor) -> None:
        if tuple(rows.shape) != (count, *self._shape) or rows.dtype != self._dtype:
            raise RuntimeError(
                f"the engine gives states {list(rows.shape)} of {rows.dtype} for {count} tokens, "
                f"not {[count, *self._shape]} of {self._dtype}"
            )
        slot = self._slot()
        size = count * self._row_bytes
        try:
            states = slot[:size].view(self._dtype).view(rows.shape)
            arrived = self._copy(rows, states)
        except BaseException:
            self._free.put(slot)
            raise
        with self._news:
            request.shard.under_way += 1
            self._queued += 1
            self._staged += size
            self._most_staged = max(self._most_staged, self._staged)
        self._lanes[request.lane].put(_Piece(request, position, slot, states, arrived))

    def _slot(self) -> torch.Tensor:
        """Return a free slot; wait for one if all are in use."""
        began = time.monotonic()
        slot = self._free.get()
        self._waited_s += time.monotonic() - began
        return slot

    def _copy(self, rows: torch.Tensor, states: torch.Tensor) -> Callable[[], None]:
        """Begin to copy; return what waits for the end of it."""
        import torch

        if not rows.is_cuda:
            states.copy_(rows)
            return lambda: None
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        # The copy waits for the engine's work so far, the engine never for the copy.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            states.copy_(rows, non_blocking=True)
            arrived = torch.cuda.Event(blocking=True)  # a thread that waits leaves its core
            arrived.record()
        rows.record_stream(self._stream)  # its memory is not reused before
        wait: Callable[[], None] = arrived.synchronize
        return wait

    # From the pool to the disk

    def _write_all(self, lane: SimpleQueue[_Piece]) -> None:
        while True:
            piece = lane.get()
            shard, rows = piece.request.shard, len(piece.states)
            error = None
            try:
                piece.arrived()
                if not shard.error:
                    self._write(piece)
            except Exception as failed:
                error = failed
            with self._news:
                shard.under_way -= 1
                self._queued -= 1
                self._staged -= rows * self._row_bytes
                self._moved += 1
            self._free.put(piece.slot)
            self._settle(shard, rows=rows, error=error)

    def _write(self, piece: _Piece) -> None:
        request, first, rows = piece.request, piece.position, len(piece.states)
        data = raw(piece.states)
        request.pieces.append((first, rows, checksum(data)))
        if file := request.shard.file:
            file.write(request.first_row + first, data)

    def _sync_all(self, queue: SimpleQueue[tuple[_Shard, ShardFile | None]]) -> None:
        while True:
            shard, file = queue.get()
            if file is None:
                self._sync_some(shard)
                continue
            error = None
            try:
                file.close(np.concatenate([self._requests[k].token_ids for k in shard.keys]))
            except Exception as failed:
                error = failed
            with self._news:
                self._moved += 1
                shard.error = shard.error or error
                shard.done = not shard.error
                self._news.notify_all()

    def _sync_some(self, shard: _Shard) -> None:
        """Have the disk take what there is of a shard that is still being written."""
        with self._news:
            file = shard.file
            shard.under_way += 1  # keeps the file open
        error = None
        try:
            if file:
                file.sync()
        except Exception as failed:
            error = failed
        with self._news:
            self._moved += 1
            shard.under_way -= 1
        self._settle(shard, error=error)

    def _settle(self, shard: _Shard, rows: int = 0, error: Exception | None = None) -> None:
        """Count rows of a shard, or keep its first error; see to its file when it is time."""
        abandoned: ShardFile | None = None
        with self._news:
            shard.left -= rows
            shard.unsynced += rows * self._row_bytes
            shard.error = shard.error or error
            file, idle = shard.file, not shard.under_way  # idle: nobody writes to the file
            if shard.error and file and idle:
                shard.file, abandoned = None, file
            elif not shard.error and not shard.left and file and idle:
                shard.file = None
                self._to_the_disk(shard, file)
            elif not shard.error and file and shard.unsynced >= SYNC_BYTES:
                shard.unsynced = 0
                self._to_the_disk(shard, None)
            elif not shard.error and not shard.left:
                shard.done = not self._writes
            self._news.notify_all()
        if abandoned:
            abandoned.discard()

    def _to_the_disk(self, shard: _Shard, file: ShardFile | None) -> None:
        self._disk[shard.number % len(self._disk)].put((shard, file))


def _thread(name: str, work: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=work, args=arguments, name=name, daemon=True).start()


def _told(error: Exception) -> dict[str, Any]:
    number = error.errno if isinstance(error, OSError) else None
    return {"type": type(error).__name__, "message": str(error), "errno": number}

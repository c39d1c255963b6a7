"""Reads a store: by request in any order, or shard by shard, and neither waits for a full scan.

Opening reads the manifest and no shard. A shard is mapped into memory when it is first asked for,
and compared with its digests then; only a few stay mapped, so memory does not grow with the store.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from truetap.harness import shard
from truetap.harness.errors import IntegrityError
from truetap.pipeline.store import REDO, Sample, Store, require_recorded

if TYPE_CHECKING:
    import torch

SMALL = tuple(name for name in shard.TENSORS if name != "states")
"""Tensors whose digests are always compared: a wrong offset gives one request another's rows."""


class Source(Protocol):
    """Where a manifest and its shards are: a ``Store``, or a ``RemoteStore``."""

    @property
    def folder(self) -> object:
        """Return its name, for messages."""

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return the manifest's lines by shard name, in the order of writing."""

    def mapped(self, entry: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return a shard's tensors, not compared with anything."""

    def signature(self, entry: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Return what tells that a shard is what it was; None if nothing does."""


def open_source(where: str | Path) -> Source:
    """Return the store in a folder, or at a URL such as ``s3://bucket/run``."""
    if isinstance(where, str) and "://" in where:
        from truetap.pipeline.remote_store import RemoteStore

        return RemoteStore(where)
    return Store(Path(where))


class _Shard:
    """A mapped shard and where its requests are."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], ids: Sequence[str], where: object
    ) -> None:
        self._tensors, self._ids = tensors, ids
        self._bounds: list[int] = tensors["offsets"].tolist()
        rows = {len(tensors[name]) for name in ("states", "token_ids", "loss_mask")}
        ordered = self._bounds[:1] == [0] and all(a <= b for a, b in pairwise(self._bounds))
        if not ordered or len(self._bounds) != len(ids) + 1 or rows != {self._bounds[-1]}:
            raise IntegrityError(
                f"shard {where} does not have the rows that its offsets and its line say",
                remedy=REDO,
            )

    def sample(self, index: int) -> Sample:
        rows = slice(self._bounds[index], self._bounds[index + 1])
        return Sample(
            self._ids[index],
            self._tensors["token_ids"][rows],
            self._tensors["loss_mask"][rows],
            self._tensors["states"][rows],
        )


class StoreReader:
    """Captures of a store, by request. One thread may use it.

    ``keep`` is how many shards stay mapped for random access. ``digest_states=False`` leaves the
    states' digests to a ``verify`` that has been over this store before; those of the small tensors
    are compared all the same, and so are the numbers of rows.
    """

    def __init__(self, source: Source, *, keep: int = 4, digest_states: bool = True) -> None:
        self._source, self._keep = source, keep
        self._compared = shard.TENSORS if digest_states else SMALL
        self._entries = source.entries()
        self._places = {
            name: (of, index)
            for of, entry in self._entries.items()
            for index, name in enumerate(entry.get("ids", ()))
        }
        self._mapped: OrderedDict[str, _Shard] = OrderedDict()
        self._proven: dict[str, tuple[tuple[int, ...], Sequence[str]]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[Sample]:
        return self.stream()

    def __getitem__(self, name: str) -> Sample:
        """Return one request's captures; ``IntegrityError`` if they are damaged or not there."""
        if name not in self._places:
            raise IntegrityError(
                f"there are no captures of {name!r} in {self._source.folder}", remedy=REDO
            )
        of, index = self._places[name]
        held = self._mapped.pop(of, None) or self._open(of, self._compared)
        self._mapped[of] = held
        while len(self._mapped) > self._keep:
            self._mapped.popitem(last=False)
        return held.sample(index)

    @property
    def ids(self) -> KeysView[str]:
        """Return all requests."""
        return self._places.keys()

    def samples(self, ids: Iterable[str]) -> Iterator[Sample]:
        """Yield the captures of some requests in the order asked."""
        return (self[name] for name in ids)

    def stream(self, *, ahead: int = 1) -> Iterator[Sample]:
        """Yield all captures, shard by shard, in the order in which they were written.

        Meanwhile the next ``ahead`` shards are mapped and compared, a thread each: at most
        ``ahead + 1`` are mapped at any time, beside those of the samples that the caller keeps.
        """
        names = iter(self._entries)
        with ThreadPoolExecutor(max_workers=ahead) as pool:

            def begin(count: int) -> Iterator[tuple[str, Future[_Shard]]]:
                for name in islice(names, count):
                    yield name, pool.submit(self._open, name, self._compared)

            coming = deque(begin(ahead))
            try:
                while coming:
                    name, future = coming.popleft()
                    held = future.result()
                    coming.extend(begin(1))
                    for index, request in enumerate(self._entries[name]["ids"]):
                        if self._places[request] == (name, index):  # else a later shard has it
                            yield held.sample(index)
            finally:
                pool.shutdown(cancel_futures=True)

    def verify(self) -> Iterator[str]:
        """Compare every shard with all its digests; yield the name of each that is right."""
        for name in self._entries:
            self._open(name, shard.TENSORS)
            yield name

    def _open(self, name: str, compared: Sequence[str]) -> _Shard:
        """Map a shard, and compare it unless it is the very file that was compared before."""
        entry = self._entries[name]
        signature = self._source.signature(entry)
        tensors = self._source.mapped(entry)
        known, of = self._proven.get(name, (None, ()))
        where = f"{self._source.folder}/{name}"
        if signature is None or known != signature or not set(compared) <= set(of):
            require_recorded(tensors, entry, where, compared)
            if signature is not None:
                self._proven[name] = signature, compared
        return _Shard(tensors, entry.get("ids", ()), where)

"""truetap's own shards, read as somebody else's would be: the manifest, then the values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np

from truetap.harness.errors import IntegrityError, UsageError
from truetap.pipeline.foreign.producers.sample import BadFile, Found, Problem, Producer, Sample
from truetap.pipeline.store import Store


class OwnStore(Producer):
    """Reads a folder of shards, or the run folder that has one."""

    name: ClassVar[str] = "truetap"
    pattern: ClassVar[str] = "manifest.jsonl and the shards that it names"
    last_norm: ClassVar[Literal["before", "after"]] = "before"
    why_norm: ClassVar[str] = "training applies the norm itself"

    @cached_property
    def _store(self) -> Store:
        inner = self.root / "shards"
        return Store(inner if (inner / "manifest.jsonl").is_file() else self.root)

    @cached_property
    def _entries(self) -> dict[str, dict[str, Any]]:
        try:
            return self._store.entries()
        except OSError as error:
            raise UsageError(f"the manifest cannot be read: {error}") from error

    def files(self) -> Iterator[Found]:
        """Yield the shards that the manifest names."""
        for name in self._entries:
            path = self._store.path(name)
            try:
                state = path.stat()
            except OSError:
                yield Found(name, path, 0, 0, Problem("digest", "the shard is missing"))
                continue
            yield Found(name, path, state.st_size, state.st_mtime_ns)

    def read(self, found: Found) -> Iterator[Sample]:
        """Yield the samples of a shard, whose digests are checked first."""
        entry = self._entries[found.name]
        if not isinstance(entry.get("digests"), dict):
            raise BadFile("digest", "its line of the manifest has no digests")
        try:
            tensors = self._store.verified(entry)
        except IntegrityError as error:
            raise BadFile("digest", str(error)) from None
        states = tensors["states"]
        for sample_id, rows in _requests(entry, tensors):
            yield Sample(
                name=f"{found.name}#{sample_id}",
                token_ids=tensors["token_ids"][rows].numpy().astype(np.int64),
                loss_mask=tensors["loss_mask"][rows].numpy().astype(np.int64),
                states=states[rows],
                dtype=str(states.dtype).removeprefix("torch."),
            )

    def declared(self) -> tuple[int, ...] | None:
        """Return the boundaries that all lines of the manifest agree on."""
        told = [entry.get("boundaries") for entry in self._entries.values()]
        lists = {tuple(one) if isinstance(one, list) else () for one in told}
        return (lists.pop() or None) if len(lists) == 1 else None

    def notes(self) -> list[str]:
        """Say what the manifest says of certificates and the verifier."""
        without = sum("certificate" not in entry for entry in self._entries.values())
        return [f"{without} shards were made without a certificate"] if without else []


def _requests(entry: Mapping[str, Any], tensors: Mapping[str, Any]) -> list[tuple[str, slice]]:
    """Return the rows of each request; ``BadFile`` if line and tensors do not fit together."""
    told, bounds = entry.get("ids"), tensors["offsets"].tolist()
    ids = told if isinstance(told, list) else []
    rows = {len(tensors[name]) for name in ("states", "token_ids", "loss_mask")}
    fits = (
        all(isinstance(one, str) and one.isprintable() for one in ids)
        and len(bounds) == len(ids) + 1
        and bounds == sorted(bounds)
        and bounds[0] == 0
        and rows == {bounds[-1]}
        and tensors["states"].ndim == 3
    )
    if not fits:
        raise BadFile("shape", "ids in the manifest, offsets and rows do not fit together")
    return [(one, slice(int(a), int(b))) for one, (a, b) in zip(ids, pairwise(bounds), strict=True)]

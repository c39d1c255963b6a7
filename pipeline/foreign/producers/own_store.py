"""truetap's own shards, read as somebody else's would be: the manifest, then the values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np

from truetap.harness.errors import IntegrityError
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
        return self._store.entries()

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
        try:
            tensors = self._store.verified(entry)
        except IntegrityError as error:
            raise BadFile("digest", str(error)) from None
        bounds = tensors["offsets"].tolist()
        states = tensors["states"]
        for index, sample_id in enumerate(entry["ids"]):
            rows = slice(bounds[index], bounds[index + 1])
            yield Sample(
                name=f"{found.name}#{sample_id}",
                token_ids=tensors["token_ids"][rows].numpy().astype(np.int64),
                loss_mask=tensors["loss_mask"][rows].numpy().astype(np.int64),
                states=states[rows],
                dtype=str(states.dtype).removeprefix("torch."),
            )

    def declared(self) -> tuple[int, ...] | None:
        """Return the boundaries that all lines of the manifest agree on."""
        lists = {tuple(entry["boundaries"]) for entry in self._entries.values()}
        return lists.pop() if len(lists) == 1 else None

    def notes(self) -> list[str]:
        """Say what the manifest says of certificates and the verifier."""
        without = sum("certificate" not in entry for entry in self._entries.values())
        return [f"{without} shards were made without a certificate"] if without else []

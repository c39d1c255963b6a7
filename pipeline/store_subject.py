"""truetap's own store put through the STORE clauses, like anybody else's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from truetap.harness import shard
from truetap.harness.capture_store import SHARD, Kept
from truetap.harness.errors import IntegrityError
from truetap.harness.model import Capture
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.store import Store


class ShardStore:
    """The shards of a run folder, written as ``truetap extract`` does, but without an engine."""

    name = "shards"

    def write(self, folder: Path, captures: Iterable[Capture]) -> Sequence[str]:
        """Write the shards that are missing, damaged, or of other captures."""
        run = RunFolder(folder)
        store = Store(run.shards)
        written: list[str] = []
        with run.lock():
            store.folder.mkdir(parents=True, exist_ok=True)
            store.repair()
            entries, coming = store.entries(), iter(captures)
            for number in count():
                if not (group := list(islice(coming, SHARD))):
                    break
                name = f"shard-{number:05d}.safetensors"
                if not _holds(store, entries.get(name), group):
                    _write(store, name, group)
                    written += [capture.key for capture in group]
        return written

    def read(self, folder: Path) -> Mapping[str, Kept]:
        """Return what training would read, every shard verified."""
        store = Store(RunFolder(folder).shards)
        ids = [id_ for entry in store.entries().values() for id_ in entry["ids"]]
        return {
            sample.id: (sample.token_ids.tolist(), sample.states.float().numpy())
            for sample in store.samples(ids)
        }


def _mask(capture: Capture) -> bytes:
    return b"\1" * len(capture.token_ids)


def _holds(store: Store, entry: dict[str, Any] | None, group: Sequence[Capture]) -> bool:
    tokens = chain.from_iterable(capture.token_ids for capture in group)
    mask = chain.from_iterable(_mask(capture) for capture in group)
    try:
        return store.holds(entry, [capture.key for capture in group], tokens, mask)
    except IntegrityError:
        return False


def _write(store: Store, name: str, group: Sequence[Capture]) -> None:
    import torch

    digests = shard.write_partial(
        store.path(name),
        [torch.from_numpy(c.states).to(getattr(torch, c.dtype)) for c in group],
        [capture.token_ids for capture in group],
        [_mask(capture) for capture in group],
    )
    store.record({"shard": name, "digests": digests, "ids": [capture.key for capture in group]})

"""The dataset beside speculators' states: token ids and loss mask of every row."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from truetap.harness.errors import CouldNotRun, UsageError
from truetap.pipeline.foreign.producers.sample import BadFile, Problem, Sample, numbers


class ArrowRows:
    """A dataset folder, memory-mapped."""

    def __init__(self, place: Path) -> None:
        try:
            from datasets import load_from_disk
        except ImportError as error:
            raise CouldNotRun(
                f"the dataset in {place} cannot be read: {error}",
                remedy="pip install 'truetap[audit]'",
            ) from error
        _require_local_files(place)
        try:
            # As Arrow's own values: a column of images would open the files or addresses it names.
            self._data = load_from_disk(str(place)).with_format("arrow")
            missing = {"input_ids", "loss_mask"} - set(self._data.column_names)
        except Exception as error:  # pyarrow and datasets have many kinds
            raise UsageError(
                f"the dataset in {place} cannot be read: {error}",
                remedy="give the folder of states alone, in a place without state.json beside it",
            ) from error
        if missing:
            raise UsageError(f"the dataset in {place} has no column {', '.join(sorted(missing))}")

    def complete(self, sample: Sample, row: int) -> None:
        """Give a sample its row's mask and messages; note a problem if it is another row's."""
        if row >= len(self._data):
            text = f"the dataset has no row {row}: it has {len(self._data)}"
            sample.problems.append(Problem("row", text))
            return
        held = self._data[row]
        try:
            token_ids, mask = (numbers(*_first(held, name)) for name in ("input_ids", "loss_mask"))
        except BadFile as bad:
            sample.problems.append(Problem("row", f"row {row} of the dataset: {bad}"))
            return
        if not np.array_equal(token_ids, sample.token_ids):
            elsewhere = self._by_tokens.get(_digest(sample.token_ids))
            text = f"its token ids are not those of row {row} of the dataset"
            text += "" if elsewhere is None else f", but of row {elsewhere}"
            sample.problems.append(Problem("row", text))
            return
        sample.loss_mask = mask
        sample.messages = _messages(held)

    @cached_property
    def _by_tokens(self) -> dict[bytes, int]:
        """Rows by their token ids: made once, when the first file is in the wrong place."""
        found = {}
        for row, held in enumerate(self._data.select_columns(["input_ids"])):
            with suppress(BadFile):  # said of the file that has this row
                found[_digest(numbers(*_first(held, "input_ids")))] = row
        return found


def _digest(token_ids: Any) -> bytes:
    raw = np.ascontiguousarray(token_ids, dtype=np.int64).tobytes()
    return blake2b(raw, digest_size=8).digest()


def _first(held: Any, name: str) -> tuple[Any, str]:
    return held.column(name)[0].as_py(), name


def _messages(held: Any) -> list[dict[str, Any]] | None:
    try:
        found = [dict(message) for message in held.column("messages")[0].as_py()]
    except (KeyError, TypeError, ValueError):
        return None
    return found if all(isinstance(m.get("content"), str) for m in found) and found else None


def _require_local_files(place: Path) -> None:
    """Refuse a ``state.json`` that points out of its folder."""
    try:
        named = [str(f["filename"]) for f in json.loads((place / "state.json").read_text())[_FILES]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{place / 'state.json'} is not a dataset's: {error}") from error
    for name in named:
        if PurePosixPath(name).name != name or not (place / name).resolve().is_relative_to(
            place.resolve()
        ):
            raise UsageError(f"{place / 'state.json'} names {name!r}, outside its folder")


_FILES = "_data_files"

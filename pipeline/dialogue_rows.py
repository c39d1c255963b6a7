"""Rows of somebody's data set, one after another, each with the words that say where it stands.

What is the user's is only read. A JSON array is held whole, everything else is streamed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from truetap.harness.errors import CouldNotRun, UsageError

HUB = "hub:"
"""What a name begins with that is looked up on the Hugging Face hub."""
_KINDS = (
    "give JSON lines, a .json array, a .parquet file, a folder that datasets saved, or hub:NAME; "
    "or leave data.questions out"
)
_EXTRA = "pip install 'truetap[data]'"

Row = tuple[str, Any]
"""Where the row stands, as in ``line 3 of chats.jsonl``, and its value."""


def read(source: Path, part: str = "train") -> Iterator[Row]:
    """Yield the rows of ``source``; ``part`` names the split where there are several.

    A source that cannot be read, or a row that is no JSON, is a ``UsageError``.
    """
    name = str(source)
    if name.startswith(HUB):
        return _hub(name, part)
    if source.is_dir():
        return _saved_dataset(source, part)
    if source.suffix == ".parquet":
        return _parquet(source)
    return _array(source) if source.suffix == ".json" else _lines(source)


def _lines(path: Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8") as file:
            # A file's own lines: splitlines() would also split at U+2028, which texts may hold.
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"line {number} of {path}"
                    yield where, _parsed(line, where)
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def _array(path: Path) -> Iterator[Row]:
    """Read one JSON array; a file that does not begin like one is read as JSON lines."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    if not text.lstrip().startswith("["):
        yield from _lines(path)
        return
    for number, row in enumerate(_parsed(text, str(path)), start=1):
        yield f"row {number} of {path}", row


def _parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise CouldNotRun(f"{path} cannot be read: {error}", remedy=_EXTRA) from error
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number} of {path}", row
    except (OSError, ArrowException) as error:
        raise _unreadable(path, error) from error


def _saved_dataset(folder: Path, part: str) -> Iterator[Row]:
    library = _datasets(str(folder))
    try:
        yield from _numbered(library.load_from_disk(folder), str(folder), part)
    except UsageError:
        raise
    except Exception as error:  # the library has no base class for what a broken folder raises
        raise _unreadable(folder, error) from error


def _hub(name: str, part: str) -> Iterator[Row]:
    library = _datasets(name)
    try:
        held = library.load_dataset(name.removeprefix(HUB), streaming=True)
        yield from _numbered(held, name, part)
    except UsageError:
        raise
    except Exception as error:  # of the network, the hub, a repository's files: of many kinds
        raise UsageError(
            f"data.questions names {name}, which cannot be loaded: {_first_line(error)}",
            remedy="look at the name and the network, or give a file",
        ) from error


def _numbered(held: Any, name: str, part: str) -> Iterator[Row]:
    if isinstance(held, dict):  # several splits
        if part not in held:
            raise UsageError(
                f"{name} has no split {part!r}", remedy=f"set data.part to one of {sorted(held)}"
            )
        held = held[part]
    for number, row in enumerate(held, start=1):
        yield f"row {number} of {name}", row


def _datasets(name: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise CouldNotRun(f"{name} cannot be read: {error}", remedy=_EXTRA) from error
    return datasets


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(
            f"{where} is not JSON: {error}", remedy="correct it, or delete it"
        ) from None


def _unreadable(path: Path, error: Exception) -> UsageError:
    return UsageError(
        f"data.questions names {path}, which cannot be read: {_first_line(error)}", remedy=_KINDS
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

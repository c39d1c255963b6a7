"""One file of facts for every release: derived from its wheel, written, loaded, compared.

The files are committed, so that a new release is one reviewable diff and an old one cannot change
its meaning unseen: ``check`` derives everything again from the wheels and reports every
difference.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from truetap.harness import progress
from truetap.harness.errors import CheckFailed, CouldNotRun, IntegrityError, UsageError
from truetap.harness.surface import (
    clients,
    failures,
    layer_ids,
    package_index,
    replies,
    signatures,
    transport,
    wheel,
)
from truetap.harness.surface.package_index import ENGINE
from truetap.harness.surface.wheel import Source

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = "truetap/surface/1"

SECTIONS: dict[str, Callable[[Source], Any]] = {
    "clients": clients.clients,
    "eagle3": layer_ids.eagle3,
    "failures": failures.failures,
    "layer_ids": layer_ids.facts,
    "replies": replies.replies,
    "signatures": signatures.facts,
    "transport": transport.facts,
}
"""The sections of a file, and what derives each."""

CALLS = {
    "mp, no rank": ("replies", "mp", "default", "absent"),
    "mp, rank 0": ("replies", "mp", "default", "0"),
    "mp, rank -1": ("replies", "mp", "default", "-1"),
    "mp, rank W": ("replies", "mp", "default", "W"),
    "mp, rank0_reply_only": ("replies", "mp", "rank0_reply_only", "absent"),
    "mp, non_block": ("replies", "mp", "non_block", "absent"),
    "mp, non_block, rank 0": ("replies", "mp", "non_block", "0"),
    "mp, non_block, I/O pool": ("replies", "mp", "non_block_io_pool", "absent"),
    "mp, non_block, I/O pool, rank 0": ("replies", "mp", "non_block_io_pool", "0"),
    "mp, aggregator": ("replies", "mp", "aggregator", "absent"),
    "mp, aggregator, non_block": ("replies", "mp", "non_block_aggregator", "absent"),
    "uni": ("replies", "uni", "default", "absent"),
    "uni, rank 0": ("replies", "uni", "default", "0"),
    "uni, single_value": ("replies", "uni", "single_value", "absent"),
    "uni, non_block": ("replies", "uni", "non_block", "absent"),
    "uni, non_block, single_value": ("replies", "uni", "non_block_single_value", "absent"),
    "uni, an AsyncModelRunnerOutput": ("failures", "uni", "async_output"),
    "external launcher": ("replies", "external_launcher", "default", "absent"),
    "ray": ("replies", "ray", "default", "absent"),
    "ray, non_block": ("replies", "ray", "non_block", "absent"),
    "ray_v2, no rank": ("replies", "ray_v2", "default", "absent"),
    "ray_v2, rank 0": ("replies", "ray_v2", "default", "0"),
}
"""The calls of ``table``, and where their facts are."""

NOTHING = "-"
"""What a table shows where a release has no such executor or mode."""


def derive(source: Source) -> dict[str, Any]:
    """Return all facts of a release, as they are written to its file.

    Raises ``CouldNotRun`` if the release's code cannot be understood.
    """
    return {
        "format": FORMAT,
        "engine": ENGINE,
        "version": source.version,
        "wheel": source.wheel,
        **{name: section(source) for name, section in SECTIONS.items()},
    }


def committed() -> Traversable:
    """Return the folder of the committed files; it may lie in a wheel or in a checkout."""
    return importlib.resources.files("truetap.surfaces")


def versions(folder: Traversable | None = None) -> list[str]:
    """Return the releases that ``folder``, or what is committed, has facts of; oldest first."""
    head, tail = f"{ENGINE}-", ".json"
    names = [item.name for item in (folder or committed()).iterdir()]
    found = [
        name.removeprefix(head).removesuffix(tail)
        for name in names
        if name.startswith(head) and name.endswith(tail)
    ]
    return sorted(found, key=Version)


def load(version: str, folder: Traversable | None = None) -> dict[str, Any]:
    """Return the facts of a release from ``folder``, or of what is committed.

    Raises ``UsageError`` if there are none, ``IntegrityError`` if the file is not what ``write``
    makes.
    """
    file = (folder or committed()).joinpath(_file_name(version))
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        if facts["format"] != FORMAT or facts["version"] != version:
            raise ValueError(f"it is {facts['format']} of {facts['version']}")
    except FileNotFoundError:
        known = versions(folder)
        span = f"{known[0]} to {known[-1]}" if known else "none"
        raise UsageError(
            f"there are no facts of {ENGINE} {version}",
            remedy=f"{len(known)} releases are known, {span}; derive others: truetap surface",
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(
            f"{file.name} is not a file of facts: {error}",
            remedy=f"derive it again: truetap surface {version}",
        ) from error
    return dict(facts)


def write(facts: Mapping[str, Any], folder: Path) -> Path:
    """Write the facts of a release into ``folder`` and return the file; it is never half-written.

    The text depends on the facts alone, so that two runs differ in nothing but what changed.
    """
    text = json.dumps(facts, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
    target = folder / _file_name(facts["version"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=folder)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(text)
            Path(name).chmod(0o644)
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CouldNotRun(
            f"the facts could not be written to {target}: {error}",
            remedy="choose a folder that you can write to",
        ) from error
    return target


def _file_name(version: str) -> str:
    return f"{ENGINE}-{version}.json"


def differences(committed: Mapping[str, Any], derived: Mapping[str, Any]) -> list[str]:
    """Return one line for every fact that is not the same on both sides, in order of their names.

    A fact that only one side has is a difference, an empty object or a null too.
    """
    # Through JSON once, so that a tuple and a list, or 1 and "1" as keys, are no difference.
    return list(_differences("", committed, json.loads(json.dumps(derived))))


def _differences(path: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            inner = f"{path}.{key}" if path else str(key)
            if key not in new:
                yield f"{inner}: committed {_short(old[key])}, the wheel says nothing of it"
            elif key not in old:
                yield f"{inner}: not committed, the wheel says {_short(new[key])}"
            else:
                yield from _differences(inner, old[key], new[key])
    elif isinstance(old, list) and isinstance(new, list):
        yield from _list_differences(path, old, new)
    elif type(old) is not type(new) or old != new:
        yield f"{path}: committed {_short(old)}, the wheel says {_short(new)}"


def _list_differences(path: str, old: list[Any], new: list[Any]) -> Iterator[str]:
    if len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _differences(f"{path}[{index}]", before, after)
        return
    gone = [item for item in map(_short, old) if item not in map(_short, new)]
    come = [item for item in map(_short, new) if item not in map(_short, old)]
    for item in gone:
        yield f"{path}: committed {item}, the wheel says nothing of it"
    for item in come:
        yield f"{path}: not committed, the wheel says {item}"
    if not gone and not come:
        yield f"{path}: committed {_short(old)}, the wheel says {_short(new)}"


def _short(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, sort_keys=True)


@dataclass(frozen=True)
class Table:
    """Calls against ranges of releases that answer all of them alike."""

    columns: list[tuple[str, str]]
    """First and last release of each range; neighbours differ in at least one row."""
    rows: dict[str, list[str]]
    """For each call one word for each column."""


def table(
    all_facts: Iterable[Mapping[str, Any]], calls: Mapping[str, Sequence[str]] = CALLS
) -> Table:
    """Return the replies to ``calls`` over all releases given."""
    columns: list[tuple[str, str]] = []
    answers: list[list[str]] = []
    for facts in sorted(all_facts, key=lambda each: Version(each["version"])):
        version = facts["version"]
        column = [_look_up(facts, path) for path in calls.values()]
        if answers and answers[-1] == column:
            columns[-1] = (columns[-1][0], version)
        else:
            columns.append((version, version))
            answers.append(column)
    rows = {name: [column[i] for column in answers] for i, name in enumerate(calls)}
    return Table(columns, rows)


def _look_up(facts: Any, path: Sequence[str]) -> str:
    for key in path:
        if not isinstance(facts, Mapping) or key not in facts:
            return NOTHING
        facts = facts[key]
    return NOTHING if facts is None else str(facts)


def run_surface(
    wanted: Sequence[str] = (),
    *,
    everything: bool = False,
    check: bool = False,
    into: Path | None = None,
    index: str | None = None,
    cache: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Derive the facts of the releases ``wanted``, or of all, and return them, oldest first.

    All releases are those of the index and those committed. With ``check`` the facts are compared
    with the committed ones: ``CheckFailed`` lists every difference of every release. With ``into``
    they are written to that folder. Progress is shown on ``console``. Raises ``UsageError``,
    ``CouldNotRun`` and ``IntegrityError`` as ``wheel.fetch`` and ``derive`` do.
    """
    if everything == bool(wanted):
        raise UsageError(
            "name releases, or ask for all of them", remedy="truetap surface 0.11.1, or --all"
        )
    names = {*package_index.releases(index), *versions()} if everything else {*wanted}
    known = set(versions()) if check else set()
    found, wrong = [], []
    with ExitStack() as stack:
        bar = console and stack.enter_context(progress.bar(console, "releases", len(names)))
        for name in sorted(names, key=package_index.parse):
            facts = derive(wheel.fetch(name, index=index, cache=cache))
            version = facts["version"]
            if into is not None:
                write(facts, into)
            if check and version not in known:
                wrong.append(f"{ENGINE} {version}: no facts are committed")
            elif check:
                lines = differences(load(version), facts)
                wrong += [f"{ENGINE} {version}: {line}" for line in lines]
            found.append(facts)
            if bar:
                bar.advance(note=version)
    if wrong:
        listed = "\n  ".join(wrong)
        noun = "difference" if len(wrong) == 1 else "differences"
        raise CheckFailed(
            f"{len(wrong)} {noun} between the committed facts and the wheels:\n  {listed}",
            remedy="read what the release changed; then commit its facts: truetap surface --into",
        )
    return found

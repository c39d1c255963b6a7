"""Looks adapters, reply channels and stores of captures up by name.

They come from the entry-point groups ``truetap.adapters``, ``truetap.channels`` and
``truetap.stores``, ours and third parties' alike. The name ``FAULT@NAME`` gives NAME with a fault
of its kind's ``mutants``; ``subprocess:PATH`` is the capture adapter that runs an executable, and
``replay:PATH`` the one that plays a recording back.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from truetap.harness.adapter import Adapter
from truetap.harness.capture_store import CaptureStore
from truetap.harness.channel import Channel
from truetap.harness.errors import UsageError

ADAPTERS = "truetap.adapters"
CHANNELS = "truetap.channels"
STORES = "truetap.stores"
_WHAT = {ADAPTERS: "capture adapter", CHANNELS: "reply channel", STORES: "store of captures"}
_MUTANTS = {ADAPTERS: "MutantAdapter", CHANNELS: "MutantChannel", STORES: "MutantStore"}


def names(group: str = ADAPTERS) -> list[str]:
    """Return the names of all that is installed in a group, sorted."""
    return sorted({point.name for point in entry_points(group=group)})


def find(name: str) -> Adapter:
    """Return a new adapter by name, or raise ``UsageError`` listing what there is."""
    adapter: Adapter = _find(ADAPTERS, name)
    return adapter


def find_channel(name: str) -> Channel:
    """Return a new reply channel by name, or raise ``UsageError`` listing what there is."""
    channel: Channel = _find(CHANNELS, name)
    return channel


def find_store(name: str) -> CaptureStore:
    """Return a new store by name, or raise ``UsageError`` listing what there is."""
    store: CaptureStore = _find(STORES, name)
    return store


def _find(group: str, name: str) -> Any:
    if group == ADAPTERS and name.startswith("subprocess:"):
        from truetap.harness.adapters import subprocess_adapter

        return subprocess_adapter.SubprocessAdapter(name.removeprefix(subprocess_adapter.PREFIX))
    if group == ADAPTERS and name.startswith("replay:"):
        from truetap.harness.adapters import replay

        return replay.ReplayAdapter(name.removeprefix(replay.PREFIX))
    fault, at, inner = name.partition("@")  # at the first: a path may hold another
    if at:
        mutants = import_module(f"truetap.harness.{group.removeprefix('truetap.')}.mutants")
        return getattr(mutants, _MUTANTS[group])(fault, _find(group, inner))
    for point in entry_points(group=group):
        if point.name == name:
            return point.load()()
    raise UsageError(
        f"there is no {_WHAT[group]} named {name!r}",
        remedy=f"installed: {', '.join(names(group)) or 'none'}",
    )

"""Looks adapters and reply channels up by name.

They come from the entry-point groups ``truetap.adapters`` and ``truetap.channels``, ours and third
parties' alike. The name ``FAULT@NAME`` gives NAME with a fault of ``adapters.mutants`` or
``channels.mutants``; ``subprocess:PATH`` is the capture adapter that runs an executable.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from truetap.harness.adapter import Adapter
from truetap.harness.channel import Channel
from truetap.harness.errors import UsageError

ADAPTERS = "truetap.adapters"
CHANNELS = "truetap.channels"


def names(group: str = ADAPTERS) -> list[str]:
    """Return the names of all that is installed in a group, sorted."""
    return sorted({point.name for point in entry_points(group=group)})


def find(name: str) -> Adapter:
    """Return a new adapter by name, or raise ``UsageError`` listing what there is."""
    if name.startswith("subprocess:"):
        from truetap.harness.adapters import subprocess_adapter

        return subprocess_adapter.SubprocessAdapter(name.removeprefix(subprocess_adapter.PREFIX))
    fault, at, inner = name.partition("@")  # at the first: a path may hold another
    if at:
        from truetap.harness.adapters import mutants

        return mutants.MutantAdapter(fault, find(inner))
    adapter: Adapter = _load(ADAPTERS, name, "capture adapter")
    return adapter


def find_channel(name: str) -> Channel:
    """Return a new reply channel by name, or raise ``UsageError`` listing what there is."""
    fault, _, inner = name.rpartition("@")
    if fault:
        from truetap.harness.channels import mutants

        return mutants.MutantChannel(fault, find_channel(inner))
    channel: Channel = _load(CHANNELS, name, "reply channel")
    return channel


def _load(group: str, name: str, what: str) -> Any:
    for point in entry_points(group=group):
        if point.name == name:
            return point.load()()
    raise UsageError(
        f"there is no {what} named {name!r}",
        remedy=f"installed: {', '.join(names(group)) or 'none'}",
    )

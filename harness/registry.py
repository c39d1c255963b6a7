"""Looks adapters up by name.

Adapters come from the entry-point group ``truetap.adapters``, ours and third parties' alike. The
name ``FAULT@NAME`` gives adapter NAME with a fault of ``truetap.harness.adapters.mutants``.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from truetap.harness.adapter import Adapter
from truetap.harness.errors import UsageError

GROUP = "truetap.adapters"


def names() -> list[str]:
    """Return the names of all installed adapters, sorted."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def find(name: str) -> Adapter:
    """Return a new adapter by name, or raise ``UsageError`` listing what there is."""
    fault, _, inner = name.rpartition("@")
    if fault:
        from truetap.harness.adapters import mutants

        return mutants.MutantAdapter(fault, find(inner))
    for point in entry_points(group=GROUP):
        if point.name == name:
            adapter: Adapter = point.load()()
            return adapter
    raise UsageError(
        f"there is no capture adapter named {name!r}",
        remedy=f"installed adapters: {', '.join(names()) or 'none'}",
    )

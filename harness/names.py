"""Names out of files that somebody else may have written: none may lead out of its folder."""

from __future__ import annotations

LONGEST = 200


def fault_of(name: object, *, slashes: bool = False) -> str | None:
    """Return what is wrong with a name, in words; None if nothing is.

    ``slashes`` allows paths, as in ``subprocess:PATH``, but no step up in them.
    """
    if not isinstance(name, str) or not name:
        return "it is empty" if name == "" else "it is no text"
    parts = name.replace("\\", "/").split("/")
    faults = {
        f"it is longer than {LONGEST} characters": len(name) > LONGEST and not slashes,
        "it has control characters": not name.isprintable(),
        "it leads out of its folder": ".." in parts or any(p.endswith(":..") for p in parts),
        "it is a path, or hidden": not slashes and (len(parts) > 1 or name.startswith(".")),
    }
    return next((text for text, found in faults.items() if found), None)

"""Names out of files that somebody else may have written: none may lead out of its folder."""

from __future__ import annotations

LONGEST = 200


def fault_of(name: object, *, slashes: bool = False) -> str | None:
    """Return what is wrong with a name, in words; None if nothing is.

    ``slashes`` allows paths, as in ``subprocess:PATH``, but no step up in them.
    """
    if not isinstance(name, str):
        return "it is no text"
    if not name:
        return "it is empty"
    if len(name) > LONGEST and not slashes:
        return f"it is longer than {LONGEST} characters"
    if not name.isprintable():
        return "it has control characters"
    parts = name.replace("\\", "/").split("/")
    if ".." in parts or any(part.endswith(":..") for part in parts):
        return "it leads out of its folder"
    if not slashes and (len(parts) > 1 or name.startswith(".")):
        return "it is a path, or hidden"
    return None

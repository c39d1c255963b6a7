"""The folder of one ``collect`` call: tensors on their way, and how far every rank has come.

Private, made anew by the client for each call and removed by it in every case. Workers use it only
while it is there; they never make it, so that one that is late leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from truetap.harness.errors import UsageError

_MEMORY = Path("/dev/shm")
_ROOM = 1 << 30  # bytes; containers often have 64 MB there
_LONGEST = 1000  # bytes of an error's text in a mark; the reply has all of it


def make(parent: Path | None, needed: int) -> Path:
    """Make a folder for a call whose arguments take ``needed`` bytes.

    Under ``parent`` if given, else in memory if there is room, else in the temporary directory.
    Raises ``UsageError`` if that cannot be done.
    """
    if parent is None:
        parent = _MEMORY if _has_room(_MEMORY, needed) else Path(tempfile.gettempdir())
    try:
        folder = Path(tempfile.mkdtemp(prefix="truetap-", dir=parent.absolute()))
        str(folder).encode()
    except OSError as error:
        raise UsageError(
            f"no folder for the call can be made in {parent}: {error.strerror}",
            remedy="give folder= a directory that client and workers can write to",
        ) from error
    except UnicodeEncodeError as error:
        folder.rmdir()
        raise UsageError(f"{parent!a} is a path that cannot be sent to the workers") from error
    return folder


def remove(folder: Path) -> None:
    """Remove the folder, also from under a worker that is late."""
    gone = folder.with_name(folder.name + "-over")
    try:
        folder.rename(gone)  # first: from now on nothing can be created in it
    except OSError:
        gone = folder
    shutil.rmtree(gone, ignore_errors=True)


def require(folder: str, rank: int) -> None:
    """Raise FileNotFoundError, naming rank and host, if the folder is not there for this worker."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"rank {rank} on {socket.gethostname()} cannot see {folder}")


def tensors(folder: str | Path, rank: int | None) -> Path:
    """Return the path of a rank's tensors, or of the arguments' (None)."""
    return Path(folder, f"{'arguments' if rank is None else f'rank-{rank}'}.safetensors")


def mark(folder: str, rank: int, what: str, text: str = "") -> None:
    """Show that ``rank`` has ``started`` the call, has ``failed`` in it, or is ``done``.

    The reply itself comes later, or never, if another rank keeps the executor waiting.
    """
    with suppress(OSError):
        descriptor = os.open(f"{folder}/rank-{rank}.{what}", os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            os.write(descriptor, text.encode(errors="backslashreplace")[:_LONGEST])
        finally:
            os.close(descriptor)


def unfinished(folder: Path, world_size: int) -> dict[int, bool]:
    """Return the ranks without the mark ``done``, and whether they have the mark ``started``.

    A rank on another host may have no marks because it cannot see the folder.
    """
    seen = {path.name for path in folder.glob("rank-*")}
    return {
        rank: f"rank-{rank}.started" in seen
        for rank in range(world_size)
        if f"rank-{rank}.done" not in seen
    }


def failures(folder: Path) -> dict[int, str]:
    """Return what the ranks that are marked ``failed`` say, in rank order."""
    found = {}
    for path in folder.glob("rank-*.failed"):
        with suppress(OSError):
            rank = int(path.stem.removeprefix("rank-"))
            found[rank] = path.read_text(errors="replace")
    return dict(sorted(found.items()))


def _has_room(directory: Path, needed: int) -> bool:
    with suppress(OSError):
        return os.access(directory, os.W_OK) and shutil.disk_usage(directory).free > _ROOM + needed
    return False

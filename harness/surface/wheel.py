"""Brings the Python files of a vLLM release onto disk, without its megabytes of kernels.

The wheel is read over HTTP ranges where the index allows it: a release costs 3 to 12 MB instead of
250 to 440. The files are kept in the user's cache, so a release is fetched once.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from packaging.version import Version

from truetap.harness.errors import CouldNotRun, IntegrityError
from truetap.harness.surface import package_index
from truetap.harness.surface.package_index import ENGINE, OLDEST, REMEDY, TIMEOUT_S

if TYPE_CHECKING:
    import requests

KEPT = (
    "vllm/config",
    "vllm/core",
    "vllm/distributed/kv_transfer",
    "vllm/engine",
    "vllm/entrypoints",
    "vllm/executor",
    "vllm/model_executor/models",
    "vllm/models",
    "vllm/ray",
    "vllm/transformers_utils/configs",
    "vllm/utils",
    "vllm/v1/core",
    "vllm/v1/engine",
    "vllm/v1/executor",
    "vllm/v1/spec_decode",
    "vllm/v1/worker",
    "vllm/worker",
)
"""Folders that are kept with all ``.py`` files below them; of ``vllm`` and ``vllm/v1`` only the
files directly in them. What capture code meets is here; kernels and quantisation are not."""

_KEPT_FLAT = ("vllm", "vllm/v1")
_RECORD = "wheel.json"
"""Written last into a release's folder; it says which wheel the files are from."""
_READ_AHEAD = 1 << 20


@dataclass(frozen=True)
class Source:
    """The Python files of one release: ``root`` is the folder that holds ``vllm/``."""

    version: str
    root: Path
    wheel: dict[str, str]
    """``file`` (the wheel's name) and ``sha256``, as the index states them."""

    def text(self, path: str) -> str | None:
        """Return the file's text, such as ``vllm/v1/request.py``; None if the release lacks it."""
        try:
            return (self.root / path).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None

    def paths(self, prefix: str) -> list[str]:
        """Return all kept files below the folder ``prefix``, sorted, relative to ``root``."""
        found = (self.root / prefix).rglob("*.py")
        return sorted(path.relative_to(self.root).as_posix() for path in found)


def fetch(version: str, *, index: str | None = None, cache: Path | None = None) -> Source:
    """Return the files of release ``version``, fetched unless the cache has them.

    ``index`` is the root of a Simple API that answers in JSON, else ``PIP_INDEX_URL``, else PyPI.
    ``cache`` is the folder to keep files in, else truetap's in the user's cache. With ranges the
    wheel's digest is recorded as the index states it, and the files are checked against the
    wheel's own checksums; a wheel that is downloaded whole is checked against the digest. Raises
    ``UsageError`` for a version that is none or that the index lacks, ``CouldNotRun`` if the
    files cannot be had, ``IntegrityError`` if they are damaged.
    """
    wanted = package_index.parse(version)
    folder = _cache_folder(cache) / f"{ENGINE}-{wanted}-{_selection()}"
    kept = _kept(wanted, folder)
    if kept is not None:
        return kept
    with package_index.open_session() as session:
        files = package_index.wheels(session, index)
        file = package_index.choose(
            wanted, [file for candidate, file in files if candidate == wanted]
        )
        try:
            _unpack(session, file, folder)
        except package_index.network_errors() as error:
            why = package_index.reason(error)
            raise CouldNotRun(
                f"the wheel {file['filename']} could not be fetched: {why}",
                remedy=REMEDY,
            ) from error
        except OSError as error:
            raise CouldNotRun(
                f"the files of {ENGINE} {wanted} could not be written to {folder}: {error}",
                remedy="free some space (30 MB a release), or name another cache folder",
            ) from error
    kept = _kept(wanted, folder)
    if kept is None:
        raise CouldNotRun(
            f"the cache folder {folder} was removed or damaged while it was being filled",
            remedy="run the command again",
        )
    return kept


def _cache_folder(cache: Path | None) -> Path:
    if cache is not None:
        return cache
    from platformdirs import user_cache_path

    return user_cache_path("truetap") / "surface"


def _selection() -> str:
    """Return what tells files kept by another choice of folders apart from ours."""
    return hashlib.sha256("\n".join((*KEPT, *_KEPT_FLAT)).encode()).hexdigest()[:8]


def _is_complete(folder: Path) -> bool:
    return _kept(OLDEST, folder) is not None


def _kept(version: Version, folder: Path) -> Source | None:
    """Return what the cache has, if all of it is there: caches get cleaned file by file."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        if record["files"] != sum(1 for _ in folder.rglob("*.py")):
            return None
        wheel = {"file": str(record["file"]), "sha256": str(record["sha256"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Source(str(version), folder, wheel)


def _is_kept(name: str) -> bool:
    path = PurePosixPath(name)
    if path.suffix != ".py" or ".." in path.parts or path.is_absolute():
        return False
    return str(path.parent) in _KEPT_FLAT or any(name.startswith(f"{prefix}/") for prefix in KEPT)


def _unpack(session: requests.Session, file: dict[str, Any], folder: Path) -> None:
    """Fill ``folder`` with the kept files of the wheel; it is never seen half-filled."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
        work = Path(name)
        target = work / "files"
        target.mkdir()
        try:
            with ExitStack() as stack:
                archive = _open(session, file, work, stack)
                count = _extract(archive, target)
        except (zipfile.BadZipFile, EOFError) as error:
            raise IntegrityError(
                f"the wheel {file['filename']} is damaged: {error}",
                remedy="fetch it again, or from another index",
            ) from error
        if not count:
            raise CouldNotRun(
                f"the wheel {file['filename']} holds none of {ENGINE}'s Python files",
                remedy=REMEDY,
            )
        record = {"file": file["filename"], "sha256": file["hashes"]["sha256"], "files": count}
        (target / _RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if not _is_complete(folder):
            # Whatever is there was left by an interrupted removal; a complete one stays.
            shutil.rmtree(folder, ignore_errors=True)
            try:
                target.rename(folder)
            except OSError:
                # Another process was first. Its files are the same.
                if not _is_complete(folder):
                    raise


def _extract(archive: zipfile.ZipFile, target: Path) -> int:
    infos = [info for info in archive.infolist() if _is_kept(info.filename)]
    # In the order of the bytes, so that reading ahead pays.
    for info in sorted(infos, key=lambda info: info.header_offset):
        path = target / info.filename
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(archive.read(info))
    return len(infos)


def _open(
    session: requests.Session, file: dict[str, Any], work: Path, stack: ExitStack
) -> zipfile.ZipFile:
    """Return the wheel, read by ranges; downloaded whole into ``work`` where ranges are refused."""
    import remotezip

    try:
        archive: zipfile.ZipFile = stack.enter_context(
            remotezip.RemoteZip(
                file["url"],
                session=session,
                fetcher=_read_ahead_fetcher(),
                support_suffix_range=True,
                timeout=TIMEOUT_S,
            )
        )
    except (remotezip.RangeNotSupported, remotezip.RemoteIOError):
        # Some servers refuse ranges that count from the end, with an error of their own.
        pass
    else:
        return archive
    path = work / "wheel.whl"
    digest = hashlib.sha256()
    with path.open("wb") as out:
        for chunk in _chunks(session, file["url"]):
            digest.update(chunk)
            out.write(chunk)
    if digest.hexdigest() != file["hashes"]["sha256"]:
        raise IntegrityError(
            f"the wheel {file['filename']} does not have the sha256 that the index states",
            remedy="fetch it again, or from another index",
        )
    return stack.enter_context(zipfile.ZipFile(path))


def _chunks(session: requests.Session, url: str) -> Iterator[bytes]:
    with session.get(url, stream=True, timeout=TIMEOUT_S) as answer:
        answer.raise_for_status()
        yield from answer.iter_content(1 << 20)


def _read_ahead_fetcher() -> type:
    """Return remotezip's fetcher with reading ahead: its own asks once for every file."""
    import io

    import remotezip

    class ReadAhead(remotezip.RemoteFetcher):  # type: ignore[misc]
        _first, _block = 0, b""

        def fetch(self, data_range: tuple[int, int | None], stream: bool = False) -> IO[bytes]:
            first, last = data_range
            if first < 0 or last is None:
                return super().fetch(data_range, stream)  # type: ignore[no-any-return]
            size = last - first + 1
            start = first - self._first
            if start < 0 or start + size > len(self._block):
                upto = first + max(size, _READ_AHEAD) - 1
                # Beyond the end the server gives what there is.
                self._block, self._first = super().fetch((first, upto)).read(), first
                start = 0
            part = self._block[start : start + size]
            return remotezip.PartialBuffer(io.BytesIO(part), first, size, stream)  # type: ignore[no-any-return]

    return ReadAhead

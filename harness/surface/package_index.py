"""Reads the package index: which releases of the engine there are, and which wheel to take."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from truetap.harness.errors import CouldNotRun, UsageError

if TYPE_CHECKING:
    import requests

ENGINE = "vllm"
OLDEST = Version("0.8.5")
"""First release that truetap looks at."""

PYPI = "https://pypi.org/simple"
REMEDY = (
    "check the network, or name an index that answers PEP 691 JSON with --index or PIP_INDEX_URL"
)
TIMEOUT_S = 60.0
_JSON = "application/vnd.pypi.simple.v1+json"


def releases(index: str | None = None) -> list[str]:
    """Return the final releases from 0.8.5 on that the index has a wheel of, oldest first.

    A release that was withdrawn (yanked) as a whole is left out. Raises ``CouldNotRun`` if the
    index does not answer.
    """
    with open_session() as session:
        files = wheels(session, index)
    return [str(version) for version in sorted({v for v, file in files if not _yanked(file)})]


def parse(version: str) -> Version:
    """Return the version of a final release; raises ``UsageError`` for anything else."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        raise UsageError(
            f"{version!r} is not a version", remedy="give a release such as 0.11.0"
        ) from None
    if not _is_final(parsed) or parsed < OLDEST:
        raise UsageError(
            f"{version} is not a final {ENGINE} release from {OLDEST} on",
            remedy="give a final release such as 0.11.0; facts are kept for those only",
        )
    # 0.11 is 0.11.0, and must not become a second set of files.
    numbers = (*parsed.release, 0, 0)[: max(3, len(parsed.release))]
    return Version(".".join(map(str, numbers)))


def _is_final(version: Version) -> bool:
    parts = (version.pre, version.post, version.dev, version.local)
    return all(part is None for part in parts)


def open_session() -> requests.Session:
    """Return a connection to the index; raises ``CouldNotRun`` if the packages are missing."""
    try:
        import remotezip  # noqa: F401
        import requests
    except ImportError as error:
        raise CouldNotRun(
            f"reading {ENGINE}'s wheels needs the package {error.name}, which is not installed",
            remedy='pip install "truetap[surface]"',
        ) from error
    return requests.Session()


def network_errors() -> tuple[type[Exception], ...]:
    """Return what reading a wheel over the network may raise."""
    import remotezip
    import requests
    import urllib3

    # remotezip reads from urllib3's response, so that errors in mid-transfer are urllib3's.
    return (
        requests.RequestException,
        remotezip.RemoteZipError,
        urllib3.exceptions.HTTPError,
    )


def reason(error: BaseException) -> str:
    """Return the innermost cause in one line: urllib3 wraps the same failure several times."""
    while error.__context__ is not None:
        error = error.__context__
    return public(" ".join(str(error).split()) or type(error).__name__)


def _index_url(index: str | None) -> str:
    root = index or os.environ.get("PIP_INDEX_URL") or PYPI
    return f"{root.rstrip('/')}/{ENGINE}/"


def wheels(session: requests.Session, index: str | None) -> list[tuple[Version, dict[str, Any]]]:
    """Return (version, file) of all wheels of final releases, addresses made absolute."""
    import requests

    url = _index_url(index)
    try:
        answer = session.get(url, headers={"Accept": _JSON}, timeout=TIMEOUT_S)
        answer.raise_for_status()
        files = answer.json()["files"]
        found = []
        for file in files:
            try:
                _, version, _, _ = parse_wheel_filename(file["filename"])
            except (InvalidWheelFilename, InvalidVersion):
                continue
            if _is_final(version) and version >= OLDEST:
                found.append((version, {**file, "url": urljoin(answer.url, file["url"])}))
    except requests.JSONDecodeError as error:
        raise CouldNotRun(
            f"the index {public(url)} does not answer in JSON (PEP 691)", remedy=REMEDY
        ) from error
    except requests.RequestException as error:
        raise CouldNotRun(
            f"the index {public(url)} could not be read: {reason(error)}",
            remedy=REMEDY,
        ) from error
    except (KeyError, TypeError) as error:
        raise CouldNotRun(
            f"the index {public(url)} answers JSON that is not a list of files (PEP 691)",
            remedy=REMEDY,
        ) from error
    return found


def public(text: str) -> str:
    """Return the text without the password that an index address may carry."""
    return re.sub(r"://[^/@\s]+@", "://", text)


def _yanked(file: dict[str, Any]) -> bool:
    return file.get("yanked", False) is not False


def choose(version: Version, files: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the x86-64 manylinux wheel of a release, of the highest build; any if there is none.

    Wheels of a release may differ, so everybody must derive facts from the same one.
    """
    if not files:
        raise UsageError(
            f"the index has no wheel of {ENGINE} {version}",
            remedy="choose a release that the index lists: truetap surface --all",
        )
    usable = [file for file in files if not _yanked(file)]
    if not usable:
        why = files[0]["yanked"]
        said = f" ({why})" if isinstance(why, str) and why else ""
        raise UsageError(
            f"{ENGINE} {version} was withdrawn from the index{said}",
            remedy="choose a release that is not yanked",
        )

    def rank(file: dict[str, Any]) -> tuple[bool, Any, str]:
        name = file["filename"]
        build = parse_wheel_filename(name)[2]
        return ("manylinux" in name and "x86_64" in name, build, name)

    chosen = max(usable, key=rank)
    if "sha256" not in chosen.get("hashes", {}):
        raise CouldNotRun(f"the index states no sha256 of {chosen['filename']}", remedy=REMEDY)
    return chosen

"""Keeps what identifies a machine or a person out of files that are published.

Recordings are scrubbed by allow-list: only named fields are written. The one free text in them, an
error's message, goes through ``message``. ``leaks`` then reads the finished text once more.

A conformance report names the verifier's folder and perhaps an executable:
``python -m truetap.harness.scrub REPORT INTO`` writes it with the last part of each path alone.
"""

from __future__ import annotations

import getpass
import json
import re
import socket
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_PATH = re.compile(r"(?<![\w.:/\\-])~?/(?:[\w.+@%-]+/)+[\w.+@%-]*|\bfile:/+\S+")
_FOLDERS = re.compile(r"(?:(?<=subprocess:)|(?<![\w.:/\\<-]))~?/(?:[^/\s\"']+/)+")
_DRIVE = re.compile(r"\b[A-Za-z]:\\[^\s\"']+")
_IPV4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}\b")
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|sk-[\w-]{16,}"
    r"|AKIA[A-Z0-9]{12,}|xox[abp]-[\w-]{8,}|pypi-[\w-]{16,}|eyJ[\w-]{16,}\.[\w-]+)"
    r"|(?i:\b(?:bearer|authorization|password|api[_-]?key)\b[\"']?\s*[:= ]\s*[\"']?[\w.+/-]{8,})"
)
_PATTERNS = {
    "a token": _TOKEN,
    "an absolute path": _PATH,
    "an executable's path": re.compile(r"\bsubprocess:/\S*"),
    "a drive's path": _DRIVE,
    "an IPv4 address": _IPV4,
}
_NOBODY = {"root", "user", "localhost", "ubuntu", "runner", "nobody"}
"""Names of users and hosts that tell nothing, and that are words of error messages."""


def message(text: str, *, length: int = 300) -> str:
    """Return an error's text on one line, cut to ``length``, without what ``leaks`` would find."""
    for name, pattern in (*_PATTERNS.items(), ("an address", _ADDRESS)):
        text = pattern.sub(f"<{name.split()[-1]}>", text)
    for kind, name in _own_names():
        text = re.sub(rf"\b{re.escape(name)}\b", f"<{kind}>", text)
    return textwrap.shorten(text, length, placeholder=" ...")


def leaks(text: str) -> list[str]:
    """Return what in ``text`` must not be published, each with its place; empty if nothing."""
    found = []
    for name, pattern in _PATTERNS.items():
        found += [f"{name} ({hit[0]!r})" for hit in pattern.finditer(text)]
    for kind, name in _own_names():
        if re.search(rf"\b{re.escape(name)}\b", text):
            found.append(f"the {kind} ({name!r})")
    return found


def published(value: Any) -> Any:
    """Return a report's JSON value with each absolute path cut to its last part.

    Of the operating system only its kind is left.
    """
    if isinstance(value, dict):
        cut = {key: published(part) for key, part in value.items()}
        return cut | {"host_os": cut["host_os"].partition("-")[0]} if "host_os" in cut else cut
    if isinstance(value, list):
        return [published(part) for part in value]
    return _FOLDERS.sub("", value) if isinstance(value, str) else value


def _own_names() -> Iterator[tuple[str, str]]:
    """Yield this machine's and this user's names, where they would identify either."""
    names = {("host name", socket.gethostname()), ("host name", socket.getfqdn())}
    with suppress(OSError, KeyError):  # a user without an entry has no name
        names.add(("user name", getpass.getuser()))
    for kind, name in sorted(names):
        if len(name) > 2 and name not in _NOBODY:
            yield kind, name


if __name__ == "__main__":
    _source, _into = map(Path, sys.argv[1:])
    _text = json.dumps(published(json.loads(_source.read_text())), indent=1) + "\n"
    if _found := leaks(_text):
        sys.exit(f"{_source} is not published: it holds {', '.join(_found)}")
    _into.write_text(_text)

"""Envelopes: what our worker methods return over ``collective_rpc``.

A reply's shape depends on the engine release, the executor and the call mode, and replies carry no
call id, so a reply of an *earlier* call can arrive after a failure. An envelope settles both: it is
a plain dict of builtins (never mistaken for a list wrapper, never turned into a tensor descriptor
by the serialiser) that echoes the caller's nonce with the worker's rank and world size.
"""

from __future__ import annotations

import secrets
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from truetap.harness.errors import FULL_DISK, CouldNotRun

VERSION = 1
_SCALARS = (type(None), bool, int, float, str, bytes)
_FRAMES = 4  # of a traceback: where it was raised, and how the method came there


def new_nonce() -> str:
    """Return a fresh call id; 64 random bits, hex."""
    return secrets.token_hex(8)


def seal(
    nonce: str, rank: int, world_size: int, work: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Run ``work`` on a worker and wrap its payload, or the error it raised, in an envelope.

    An exception must travel as data: raised through the executor it would lose its type and leave
    stale replies of other ranks queued for the next call.
    """
    sealed: dict[str, Any] = {
        "truetap": VERSION,
        "nonce": nonce,
        "rank": rank,
        "world_size": world_size,
    }
    try:
        payload = work()
        _require_builtins(payload, "payload")
        sealed["payload"] = payload
    except Exception as error:
        sealed["error"] = {
            "type": type(error).__name__,
            "message": _encodable(_message(error)),
            "errno": error.errno if isinstance(error, OSError) else None,
            "traceback": _encodable("".join(traceback.format_exception(error, limit=-_FRAMES))),
        }
    return sealed


def _message(error: Exception) -> str:
    try:
        return str(error)
    except Exception as worse:  # an exception's own __str__ is anybody's code
        return f"(no message: its __str__ raises {type(worse).__name__})"


def _encodable(text: str) -> str:
    """Return ``text`` without what the serialiser dies of, as the name of a file can hold."""
    return text.encode(errors="backslashreplace").decode()


def _require_builtins(value: Any, where: str) -> None:
    """Raise TypeError unless ``value`` is made of builtins only, subclasses of them excluded.

    vLLM's serialiser dies on anything else in the engine's output thread, after which the caller
    waits for ever; and it turns tensors into ``[dtype, shape, index]`` with their data lost.
    """
    kind = type(value)
    if kind is dict:
        for key, item in value.items():
            _require_builtins(key, f"a key of {where}")
            _require_builtins(item, f"{where}[{key!r}]")
    elif kind is list:
        for index, item in enumerate(value):
            _require_builtins(item, f"{where}[{index}]")
    elif kind is int and not -(2**63) <= value < 2**64:
        raise TypeError(f"{where} is an integer of more than 64 bits")
    elif kind is str and not _is_utf8(value):
        raise TypeError(f"{where} is text that is not UTF-8")
    elif kind not in _SCALARS:
        raise TypeError(f"{where} is a {kind.__module__}.{kind.__qualname__}, not a builtin")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def problems(replies: Any, *, nonce: str, world_size: int, local: bool = False) -> list[str]:
    """Return what is wrong with a raw reply, one sentence each; empty if it is as contracted.

    The contract: a list of ``world_size`` envelopes in rank order, each echoing ``nonce``.
    ``local``: of one envelope, from any rank. With an external launcher every rank is a process of
    its own and each engine reaches its own rank only.
    """
    if not isinstance(replies, Sequence) or isinstance(replies, (str, bytes)):
        return [f"the reply is a {type(replies).__name__}, not a list of one envelope per rank"]
    found = []
    due = 1 if local else world_size
    if len(replies) != due:
        found.append(f"{len(replies)} replies came from {due} ranks")
    for position, reply in enumerate(replies):
        if not isinstance(reply, Mapping) or "nonce" not in reply:
            found.append(f"reply {position} is a {type(reply).__name__}, not an envelope")
            continue
        if reply.get("truetap") != VERSION:
            found.append(f"reply {position} has envelope version {reply.get('truetap')!r}")
        if reply["nonce"] != nonce:
            found.append(f"reply {position} answers another call (nonce {reply['nonce']!r})")
        allowed = range(world_size) if local else (position,)
        if reply.get("rank") not in allowed:
            found.append(f"reply {position} comes from rank {reply.get('rank')!r}")
        if reply.get("world_size") != world_size:
            found.append(f"reply {position} says world size {reply.get('world_size')!r}")
        if not isinstance(reply.get("payload", reply.get("error")), Mapping):
            found.append(f"reply {position} holds neither a payload nor an error")
    return found


def unseal(replies: Any, *, nonce: str, world_size: int, method: str) -> list[dict[str, Any]]:
    """Return one payload per rank, in rank order, or raise naming rank, method and cause."""
    wrong = problems(replies, nonce=nonce, world_size=world_size)
    if wrong:
        raise CouldNotRun(
            f"{method}: {'; '.join(wrong)}",
            remedy="restart the engine: after a failed call its queues may hold stale replies",
        )
    for reply in replies:
        if error := reply.get("error"):
            full_disk = error.get("errno") in FULL_DISK
            raise CouldNotRun(
                f"{method} failed on rank {reply['rank']}: {error['type']}: {error['message']}",
                remedy="free disk space and run again; finished shards are kept"
                if full_disk
                else "see the engine's log",
            )
    return [reply["payload"] for reply in replies]

"""Whether a server is one whose answers can be kept: which model, which rendering, which ids.

Compared is all that a server shows of itself. That its weights are the verifier's it cannot show:
the card says so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from truetap.harness.engine import Prompt
from truetap.harness.errors import CheckFailed, CouldNotRun, UsageError
from truetap.pipeline import chat, run_folder, selection
from truetap.pipeline.completion_server import CompletionServer
from truetap.pipeline.config import Data, RunConfig
from truetap.pipeline.dialogues import Message
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.selection import Chosen

PATIENCE_S = 15.0
"""How long a server that has not answered yet is waited for: a wrong address is told at once."""

_CHATS = 4
"""How many of the run's own dialogues are rendered on both sides."""


@dataclass(frozen=True)
class Seen:
    """What was seen of a server, for ``servers.jsonl`` and the card."""

    url: str
    model: str
    root: str
    """Where the server says that it has the model from; empty if it does not."""
    version: str
    """The engine's version; empty if the server does not tell."""
    rendering: str
    """How its rendering of chats compares with ours, in words."""
    compared: bool
    """Whether that was compared at all."""
    aliases: tuple[str, ...] = ()
    """Further names of the same model: vLLM answers as the first one, whichever was asked for."""

    def as_dict(self) -> dict[str, Any]:
        """Return what is kept, for JSON."""
        return {name: value for name, value in asdict(self).items() if name != "aliases"}


def key_of(data: Data) -> str | None:
    """Return the server's key from the environment; None if it needs none."""
    if data.server_key is None:
        return None
    key = os.environ.get(data.server_key, "").strip()  # a key read from a file ends in a line break
    if not key:
        # What looks like no variable may be the key itself: it is not repeated.
        name = data.server_key if re.fullmatch(r"[A-Z][A-Z0-9_]*", data.server_key) else ""
        raise UsageError(
            f"data.server_key names the environment variable {name or '(not shown)'}, which is "
            "not set",
            remedy=f"export {name or 'THE_NAME'}=...; server_key is its name, never the key",
        )
    if not re.fullmatch(r"[!-~]+", key):
        raise UsageError(
            "the key in the environment variable of data.server_key has blanks or characters "
            "that no header can carry",
            remedy="set the variable to the key alone",
        )
    return key


def examine(
    server: CompletionServer,
    config: RunConfig,
    tokenizer: Any,
    dialogues: Sequence[Chosen],
    *,
    vocab_size: int,
    patience_s: float = PATIENCE_S,
) -> Seen:
    """Return what the server is, or refuse it before it is asked anything that costs time."""
    with server.without_key():
        status, reply = server.ask("/models", patience_s=patience_s)
        if status != 200:
            raise server.refused(status, reply)
        card = _card(reply, config.data.server_model, server.url)
        model, aliases = str(card["id"]), _aliases(reply, card)
        _require_length(config, card)
        rendering, compared = _rendering(server, tokenizer, model, dialogues, patience_s)
        _require_ids(server, model, aliases, dialogues[0], vocab_size)
        return Seen(
            url=server.url,
            model=model,
            root=server.hide(str(card.get("root") or "")),
            version=server.hide(_version(server, patience_s)),
            rendering=rendering,
            compared=compared,
            aliases=aliases,
        )


def record(folder: RunFolder, seen: Seen) -> None:
    """Write down a server, unless answers of another model are already kept.

    The same model may come to another address. Raises ``UsageError`` for another model.
    """
    earlier = run_folder.read_lines(folder.servers)
    kept = any(map(run_folder.whole_lines, (folder.conversations, folder.dropped)))
    if earlier and not kept:  # seen, and never answered: nothing is theirs
        folder.servers.unlink()
        earlier = []
    for row in earlier:
        _require_same(row, seen)
    if seen.as_dict() not in earlier:
        run_folder.append_line(folder.servers, seen.as_dict())


def _require_same(earlier: Mapping[str, Any], seen: Seen) -> None:
    """Raise if a server that answered before shows another model than this one."""
    then = str(earlier.get("root") or ""), str(earlier.get("model") or "")
    roots = [path.rstrip("/").rpartition("/")[2] for path in (then[0], seen.root)]
    if then[1] != seen.model or (all(roots) and roots[0] != roots[1]):
        told = [f"{name!r} (from {root!r})" for root, name in (then, (seen.root, seen.model))]
        raise UsageError(
            f"answers of {told[0]} are kept in this run; {seen.url} has {told[1]}",
            remedy="serve the same model under the same name, or use another output folder",
        )


def _cards(reply: Any) -> list[Mapping[str, Any]]:
    listed = reply.get("data") if isinstance(reply, Mapping) else None
    if not isinstance(listed, list):
        return []
    return [c for c in listed if isinstance(c, Mapping) and isinstance(c.get("id"), str)]


def _aliases(reply: Any, card: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the other names that come from the same place, and are no adapters over it."""
    if not (root := card.get("root")):
        return ()
    same = [c for c in _cards(reply) if c.get("root") == root and not c.get("parent")]
    return tuple(str(c["id"]) for c in same if c["id"] != card["id"])


def _card(reply: Any, wanted: str | None, url: str) -> Mapping[str, Any]:
    """Return the entry of the model that answers."""
    cards = _cards(reply)
    if not cards:
        raise CouldNotRun(
            f"{url}/models lists no models", remedy='data.server is the address that ends in "/v1"'
        )
    names = ", ".join(repr(card["id"]) for card in cards)
    if wanted is None and len(cards) > 1:
        raise UsageError(
            f"{url} has several models: {names}", remedy="name the verifier in data.server_model"
        )
    found = next((card for card in cards if wanted in (None, card["id"])), None)
    if found is None:
        raise UsageError(
            f"{url} has no model {wanted!r}; it has {names}", remedy="correct data.server_model"
        )
    if found.get("parent"):
        raise UsageError(
            f"{found['id']!r} is an adapter over {found['parent']!r}, not the verifier's own "
            "weights",
            remedy="name the model without an adapter in data.server_model, or merge the adapter "
            "into the verifier's directory",
        )
    return found


def _require_length(config: RunConfig, card: Mapping[str, Any]) -> None:
    held = card.get("max_model_len")
    needed = selection.longest_prompt(config) + config.data.max_answer_tokens
    if isinstance(held, int) and held < needed:
        raise UsageError(
            f"the server holds {held} tokens of a conversation; with capture.max_model_len "
            f"{config.capture.max_model_len} one may have {needed}",
            remedy="raise the server's context length, or lower capture.max_model_len",
        )


def _version(server: CompletionServer, patience_s: float) -> str:
    """Return the engine's version; empty if the server does not tell, for whatever reason."""
    try:
        status, reply = server.ask("//version", patience_s=patience_s)
    except CouldNotRun:
        return ""
    told = reply.get("version") if status == 200 and isinstance(reply, Mapping) else None
    return str(told or "")


def _require_ids(
    server: CompletionServer,
    model: str,
    aliases: tuple[str, ...],
    chosen: Chosen,
    vocab_size: int,
) -> None:
    """Have one token said: a server that tells no ids is refused once, not for every request."""
    sampling = {"max_tokens": 1, "temperature": 0.0}
    prompt = Prompt(chosen.id, chosen.prompt, sampling)
    for _ in server.generate([prompt], model=model, vocab_size=vocab_size, aliases=aliases):
        pass


def _rendering(
    server: CompletionServer,
    tokenizer: Any,
    model: str,
    dialogues: Sequence[Chosen],
    patience_s: float,
) -> tuple[str, bool]:
    """Compare the ids of chats with those of the server's own template, where it shows them."""
    several = [c for c in dialogues if c.questions > 1][:_CHATS]
    samples = [_messages(chosen) for chosen in (*several, *dialogues)][:_CHATS]
    for said in samples:
        body = {
            "model": model,
            "messages": [m.as_dict() for m in said],
            "add_generation_prompt": True,
        }
        try:
            status, reply = server.ask("//tokenize", body, patience_s=patience_s)
        except CouldNotRun:
            return "not compared: /tokenize gave no answer", False
        theirs = reply.get("tokens") if isinstance(reply, Mapping) else None
        if status != 200 or not isinstance(theirs, list):
            return f"not compared: /tokenize answers with status {status}", False
        _require_equal(tokenizer, list(chat.prompt_ids(tokenizer, said)), theirs)
    return f"equal to ours for {len(samples)} of this run's chats", True


def _messages(chosen: Chosen) -> list[Message]:
    """Return a dialogue's questions with something between them, as at its last turn."""
    said: list[Message] = []
    for message in chosen.messages:
        if said and said[-1].role == message.role == "user":
            said.append(Message("assistant", "That is so.\n\nIs it?"))
        said.append(message)
    return said


def _require_equal(tokenizer: Any, ours: list[int], theirs: list[Any]) -> None:
    if ours == theirs:
        return
    pairs = zip(ours, theirs, strict=False)
    at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    window = slice(max(at - 4, 0), at + 8)
    try:
        shown = [repr(tokenizer.decode(ids[window])) for ids in (ours, theirs)]
    except Exception:  # ids that are none of ours: another tokenizer altogether
        shown = [str(ids[window]) for ids in (ours, theirs)]
    raise CheckFailed(
        f"the server renders the same chat otherwise, from token {at} on: {shown[1]}, and ours "
        f"{shown[0]}",
        remedy="serve the verifier's own directory, with its tokenizer and chat template, and no "
        "other --chat-template or default template settings",
    )

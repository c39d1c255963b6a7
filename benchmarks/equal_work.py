"""Whether two routes did the same work: the same tokens, complete, under the same settings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from truetap.harness.errors import CheckFailed, CouldNotRun
from truetap.pipeline.prepare import Conversation
from truetap.pipeline.store import Store

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""As safetensors spells them."""
_CONFIG = re.compile(r"V1 LLM engine \(v([^)]*)\) with config: (.*)")
_CORES = re.compile(r"local_rank=\d+, core ids=(\[[^]]*\])")


def require_all(
    states: Path, prompts: Sequence[Sequence[int]], *, boundaries: int, width: int, dtype: str
) -> dict[str, int]:
    """Count tokens and bytes of the files; raise unless each prompt has its own, and complete."""
    from safetensors import safe_open

    tokens, size = 0, 0
    for row, prompt in enumerate(prompts):
        path = states / f"hs_{row}.safetensors"
        if not path.exists():
            raise CheckFailed(f"speculators left out prompt {row}: the comparison is void")
        with safe_open(path, framework="numpy") as file:
            held = file.get_tensor("token_ids").tolist()
            part = file.get_slice("hidden_states")
            shape, kind = list(part.get_shape()), part.get_dtype()
        if held != list(prompt):
            raise CheckFailed(f"{path} has other tokens than prompt {row}: the comparison is void")
        if shape != [len(prompt), boundaries, width] or kind != DTYPES[dtype]:
            raise CheckFailed(
                f"{path} has states {shape} in {kind}, not {[len(prompt), boundaries, width]} in "
                f"{DTYPES[dtype]}: the comparison is void"
            )
        tokens, size = tokens + len(prompt), size + path.stat().st_size
    return {"tokens": tokens, "bytes": size, "files": len(prompts)}


def counted(store: Store, conversations: Sequence[Conversation]) -> dict[str, Any]:
    """Count tokens and bytes of a store; raise unless it holds exactly these conversations."""
    asked, entries = {one.id: one for one in conversations}, list(store.entries().values())
    held = Counter(name for entry in entries for name in entry["ids"])
    if lacking := Counter(list(asked)) - held:
        raise CheckFailed(f"truetap left out {len(lacking)} prompts: the comparison is void")
    if extra := held - Counter(list(asked)):
        raise CheckFailed(f"truetap did {len(extra)} prompts too many: the comparison is void")
    tokens, size = 0, 0
    for entry in entries:
        these = [asked[name] for name in entry["ids"]]
        ids = [token for one in these for token in one.token_ids]
        if not store.holds(entry, entry["ids"], ids, b"".join(one.loss_mask for one in these)):
            raise CheckFailed(f"{entry['shard']} holds other tokens: the comparison is void")
        tokens, size = tokens + len(ids), size + store.path(entry["shard"]).stat().st_size
    uncertified = any("uncertified" in entry for entry in entries)
    return {"tokens": tokens, "bytes": size, "files": len(entries), "uncertified": uncertified}


def engine_settings(log: Path) -> dict[str, str]:
    """Return what an engine's log says that it runs with, by name, its version included."""
    text = log.read_text(errors="replace")
    said = _CONFIG.search(text)
    if said is None:
        raise CouldNotRun(
            "an engine's log does not say its settings",
            remedy=f"see {log}; VLLM_LOGGING_LEVEL must be INFO or DEBUG",
        )
    pairs = (part.partition("=") for part in split_outside_brackets(said[2]))
    cores = _CORES.findall(text)
    told = {name.strip(): value for name, _, value in pairs}
    return {"version": said[1], **told, "cores": " ".join(cores)}


def split_outside_brackets(text: str) -> Iterator[str]:
    """Yield the parts between commas that stand in no bracket."""
    depth, start = 0, 0
    for index, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    yield text[start:]


def require_equal(first: dict[str, Any], second: dict[str, Any], ignored: Sequence[str]) -> None:
    """Raise unless two runs did the same work under the same settings."""
    if first["tokens"] != second["tokens"]:
        raise CheckFailed(
            f"{first['tokens']} tokens against {second['tokens']}: the comparison is void"
        )
    mine, other = first["engine"], second["engine"]
    names = sorted({*mine, *other} - {*ignored})
    if differ := [name for name in names if mine.get(name) != other.get(name)]:
        told = "; ".join(f"{n}: {mine.get(n)} and {other.get(n)}" for n in differ)
        raise CheckFailed(
            f"the engines run with other settings ({told}): the comparison is void",
            remedy="if that cannot change their speed, name it with --ignore-setting",
        )

"""The card of an exported head: what a stranger must know before serving it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from truetap.pipeline import uncertified
from truetap.pipeline.config import RunConfig

BOUNDARY = (
    "Boundary k is the residual stream after k decoder blocks, the residual added, before any "
    "norm; 0 is the embeddings. `eagle_aux_hidden_state_layer_ids` in `config.json` has the same "
    "numbers, which is what vLLM (0.18.0 and later) reads. The last boundary was captured before "
    "the verifier's final norm."
)
CERTIFIED = (
    "The capture path passed truetap's conformance suite, live, in the very environment in which "
    "these states were captured. The certificates' files lie beside the shards."
)
DENIED = "Nothing proves that the hidden states in those shards are the right ones."
SERVE = (
    "The verifier it was trained for, and no other. vLLM's `speculative_config`: "
    """`{"method": "eagle3", "model": "THIS FOLDER", "num_speculative_tokens": 3}`."""
)


def render(card: Mapping[str, Any], config: RunConfig, *, training: int, validation: int) -> str:
    """Return ``README.md`` of a head from its ``truetap.json``; the same head, the same text.

    ``training`` and ``validation`` are the numbers of conversations that were used.
    """
    verifier = dict(card["verifier"])
    name = verifier.pop("name")
    *features, last = card["boundaries"]
    told = uncertified.told(card)
    parts = [
        *([f"> **UNCERTIFIED.** This head was {_plain(told)}.\n>\n> {DENIED}"] if told else []),
        f"# EAGLE-3 draft head for {_code(name)}",
        f"Made by truetap. {_steps(card['steps'])} `truetap.json` has all of it for machines.",
        "## Serve it with",
        SERVE,
        _table({"Verifier": name, **verifier, "Dtype of the states": config.capture.dtype}),
        "## Boundaries",
        f"Features: boundaries {', '.join(map(str, features))}. Targets: boundary {last}.",
        BOUNDARY,
        "## Data",
        _table({"For training": training, "For validation": validation, **_data(card, config)}),
        "## Training",
        _table({**config.train.model_dump(mode="json"), "seed": config.seed}),
        "## Certificates",
        *_certificates(card),
    ]
    return "\n\n".join(parts) + "\n"


def _data(card: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    asked = config.data.questions
    return {
        "Questions": asked.name if asked else "docstrings of Python's standard library",
        "Answered by": f"the verifier itself, at temperature {config.data.temperature:g}",
        "Captured by": config.capture.adapter,
        "Shards": len(card["shards"]),
    }


def _certificates(card: Mapping[str, Any]) -> list[str]:
    listed = [f"- sha256 `{digest}`" for digest in card["certificates"]]
    parts = [CERTIFIED, "\n".join(listed)] if listed else []
    if made := card.get("uncertified"):
        shards = "\n".join(f"- {_code(name)}" for name in made["shards"])
        parts.append(f"No certificate stands behind these shards:\n\n{shards}")
    return parts


def _steps(steps: int) -> str:
    if steps == 0:
        return "It is **untrained**: a start to compare with, not to serve."
    return f"Trained for {steps:,} step{'s' if steps > 1 else ''}."


def _table(rows: Mapping[str, Any]) -> str:
    lines = [f"| {name.replace('_', ' ')} | {_code(value)} |" for name, value in rows.items()]
    return "\n".join(["| | |", "| --- | --- |", *lines])


def _plain(text: object) -> str:
    """Return text that Markdown shows as it is: a reason is somebody's, and may hold anything."""
    kept = " ".join(str(text).split())
    return "".join(f"\\{char}" if char in "\\`*_[]<>|#" else char for char in kept)


def _code(text: object) -> str:
    kept = " ".join(str(text).split()).replace("`", "'").replace("|", "/")
    return f"`{kept}`"

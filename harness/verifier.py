"""Facts about a verifier's directory: its size, and digests of what an engine would load."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truetap.harness import digest_cache
from truetap.harness.errors import IntegrityError, UsageError

CHUNK = 1 << 20


@dataclass(frozen=True)
class VerifierFacts:
    """What truetap needs to know of a verifier without loading it."""

    name: str
    num_blocks: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    config: dict[str, Any]


def describe(directory: Path) -> VerifierFacts:
    """Read ``config.json`` of a verifier in Hugging Face layout."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(
            f"there is no verifier at {directory}: no config.json",
            remedy="give a directory in Hugging Face layout, or builtin = 'smollm2-135m-instruct'",
        ) from None
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} does not describe a verifier: it is no table of settings")
    text = config.get("text_config", config)  # multimodal verifiers nest the decoder's settings
    try:
        return VerifierFacts(
            name=directory.resolve().name,
            num_blocks=int(text["num_hidden_layers"]),
            hidden_size=int(text["hidden_size"]),
            vocab_size=int(text["vocab_size"]),
            max_positions=int(text["max_position_embeddings"]),
            config=config,
        )
    except KeyError as missing:
        raise UsageError(
            f"{path} has no {missing}; it does not describe a decoder-only verifier"
        ) from None
    except (TypeError, ValueError) as wrong:
        raise UsageError(f"{path} does not describe a decoder-only verifier: {wrong}") from None


def kinds(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what kind of verifier a ``config.json`` describes, for expectations to be about."""
    text = config.get("text_config", config)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    positions = rope.get("rope_type", rope.get("type"))
    if positions is None:  # some families have a table for each kind of block
        tables = [table for table in rope.values() if isinstance(table, Mapping)]
        positions = "+".join(sorted({str(table.get("rope_type", "default")) for table in tables}))
    return {
        "verifier_model_type": text.get("model_type"),
        "verifier_rope_type": positions or "default",
    }


def digests(directory: Path) -> dict[str, str]:
    """Return SHA-256 of the configuration and of all weights, hex.

    The weights' digest covers every ``*.safetensors`` file, by name and content.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UsageError(
            f"{directory} has no *.safetensors files",
            remedy="truetap reads verifiers in safetensors format only",
        )
    return {
        "config_sha256": _file_digest(directory / "config.json"),
        "weights_sha256": _weights_digest(files),
    }


def _weights_digest(files: Sequence[Path]) -> str:
    whole = hashlib.sha256()
    for file in files:
        whole.update(f"{file.name}\0{digest_cache.digest_of(file)}\n".encode())
    return whole.hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

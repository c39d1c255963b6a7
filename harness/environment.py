"""The facts that a certificate is bound to, and how two sets of them differ."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from truetap.harness import verifier
from truetap.harness.errors import CheckFailed
from truetap.harness.model import Environment


def assemble(
    worker: Mapping[str, Any], *, boundaries: Sequence[int], adapter: str, adapter_digest: str
) -> Environment:
    """Join what a worker reports with what its verifier's files say.

    ``worker`` is the payload of ``truetap_facts``: the engine's own settings, not the ones we asked
    it for. The verifier is digested at the path that the worker says it loaded.
    """
    facts = dict(worker)
    model = Path(facts.pop("model"))
    described = verifier.describe(model)
    binding = {
        "machine": platform.machine(),
        **facts,
        "verifier": {
            "num_blocks": described.num_blocks,
            "hidden_size": described.hidden_size,
            **verifier.digests(model),
        },
        "boundaries": list(boundaries),
        "adapter": {"name": adapter, "sha256": adapter_digest},
    }
    recorded = {
        "verifier_name": described.name,
        **verifier.kinds(described.config),
        "host_os": platform.platform(),
        "python": platform.python_version(),
        "truetap": _installed("truetap"),
        "transformers": _installed("transformers"),
    }
    return Environment(binding=binding, recorded=recorded)


def binding_digest(binding: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a binding in a stable spelling, hex."""
    return hashlib.sha256(json.dumps(binding, sort_keys=True).encode()).hexdigest()


def agreed(by_rank: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the facts of rank 0, which all ranks must share; raise ``CheckFailed`` if not."""
    first = by_rank[0]
    for rank, facts in enumerate(by_rank):
        if facts != first:
            names = {*facts, *first}
            differing = sorted(
                k for k in names if (k in facts, facts.get(k)) != (k in first, first.get(k))
            )
            raise CheckFailed(f"ranks 0 and {rank} differ in {', '.join(differing)}")
    return first


def source_digest(modules: Sequence[str]) -> str:
    """Return the SHA-256 of the modules' code, hex, so that a certificate covers no other."""
    digest = hashlib.sha256()
    for name in modules:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        digest.update(Path(spec.origin).read_bytes())
    return digest.hexdigest()


FAMILIES: dict[str, tuple[str, ...]] = {
    "weights": ("verifier",),
    "adapter": ("adapter",),
    "engine-release": ("engine", "engine_version"),
    "torch": ("torch_version",),
    "cuda": ("cuda_version",),
    "gpu": ("device",),
    "tensor-parallel": ("tensor_parallel_size", "pipeline_parallel_size", "world_size"),
    "boundaries": ("boundaries",),
    "prefix-caching": ("enable_prefix_caching",),
}
"""What a difference is about, by fact, in the order in which a user should look at them. All other
facts are of the family "environment"."""


def same(certified: Mapping[str, Any], present: Mapping[str, Any]) -> bool:
    """Return whether two bindings are equal as JSON, where 1 is not true and absent is not null."""
    return binding_digest(certified) == binding_digest(present)


def differences(certified: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each binding fact that differs, nested facts by dotted name."""
    was, now = _flat(certified), _flat(present)
    return [_told(name, was, now) for name in _changed(was, now)]


def differing(certified: Mapping[str, Any], present: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return family and sentence for each binding fact that differs, the first to fix first."""
    was, now = _flat(certified), _flat(present)
    order = [*FAMILIES, "environment"]
    told = [(_family(name), _told(name, was, now)) for name in _changed(was, now)]
    return sorted(told, key=lambda one: order.index(one[0]))


def _family(name: str) -> str:
    fact = name.partition(".")[0]
    return next((family for family, facts in FAMILIES.items() if fact in facts), "environment")


def _changed(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name in sorted(was.keys() | now.keys())
        if was.get(name, "absent") != now.get(name, "absent")
    ]


def _told(name: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    before, after = was.get(name, "absent"), now.get(name, "absent")
    # A name is somebody's text as much as a value is, and is not quoted.
    shown = name if name.isprintable() else repr(name)
    return f"{shown} was {before!r} when certified and is {after!r}"


def _flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None

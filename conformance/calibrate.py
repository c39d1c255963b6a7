"""Measures what the suite's tolerances rest on, and its power: correct captures, and every mutant.

Run ``python -m truetap.conformance.calibrate --adapter NAME --out FILE`` when a rule, a number in
``truetap.harness.compare`` or a mutant changes. For each fault it writes the worst value of each
rule's quantity over all slots, and the clauses that catch it. ``calibration.json`` holds what was
measured last; ``truetap clauses --mutants`` shows it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from truetap.conformance import judge, strategies
from truetap.conformance.remembering import Remembering
from truetap.harness import boundaries, compare, contract, random_verifier, registry, verifier
from truetap.harness.adapter import Session
from truetap.harness.adapters import mutants
from truetap.harness.errors import CouldNotRun, UsageError
from truetap.harness.model import EngineSpec
from truetap.harness.observation import Observation, observe
from truetap.harness.reference import Reference, ReferenceStates, open_reference
from truetap.harness.scenes import play

COSTLY = ("ROWS-010", "LAYERS-008")
"""Clauses that run an engine or the verifier: asked about their own mutants and the control."""


def main() -> None:
    """Measure one adapter on one verifier."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapter", default="vllm_native")
    parser.add_argument("--model", type=Path, help="verifier directory")
    parser.add_argument("--family", default="llama", choices=sorted(random_verifier.FAMILIES))
    parser.add_argument("--seed", type=int, default=0, help="of a random verifier")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--profile", default="full", choices=["core", "full"])
    parser.add_argument("--reference", default="auto", choices=["auto", "whole", "streamed"])
    parser.add_argument("--reference-device", default="cpu", help="cuda:0: streamed, on the GPU")
    parser.add_argument("--control", action="store_true", help="correct captures only, no mutants")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model, name = chosen.model, ""
        if model is None:
            name = f"random-{chosen.family}-{chosen.seed}"
            model = random_verifier.FAMILIES[chosen.family](Path(scratch) / name, seed=chosen.seed)
        facts = verifier.describe(model)
        wanted = boundaries.eagle3(facts.num_blocks)
        spec = EngineSpec(
            model=str(model),
            boundaries=wanted,
            dtype=chosen.dtype,
            # vLLM's CPU build cannot copy the state of delta nets between cache blocks.
            enable_prefix_caching=facts.config["model_type"] != "qwen3_next",
        )
        faults = ["none"] if chosen.control else list(mutants.FAULTS)
        reference = open_reference(
            model, chosen.dtype, kind=chosen.reference, device=chosen.reference_device
        )
        measured = measure(chosen.adapter, spec, Path(scratch), chosen.profile, faults, reference)
    key = f"{name or facts.name}/{chosen.dtype}/{chosen.adapter}/{chosen.profile}"
    known = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
    chosen.out.write_text(json.dumps(known | {key: measured}, indent=1) + "\n")


def measure(
    adapter: str,
    spec: EngineSpec,
    scratch: Path,
    profile: str,
    faults: Sequence[str],
    reference: Reference,
) -> dict[str, Any]:
    """Judge every fault by every clause, and measure it; return a record of JSON values."""
    rows: dict[str, Any] = {}
    refused: list[str] = []
    clauses = contract.PROFILES[profile]

    def asked(fault: str) -> list[str]:
        own = mutants.FAULTS[fault].caught_by
        return [c for c in clauses if c not in COSTLY or own in {"", c}]

    for fault, seen, failures in judged(adapter, spec, scratch, profile, faults, asked, reference):
        rows[fault] = {**_quantities(seen), "caught_by": sorted(failures)}
        if fault == "none":
            refused = judge.refused(seen)
        print(fault, rows[fault], flush=True)
    facts = seen.environment.binding
    keep = ("engine", "engine_version", "torch_version", "device", "model_runner")
    return {
        "environment": {key: facts.get(key) for key in keep},
        "spec": {k: v for k, v in asdict(spec).items() if k != "model"},
        "refused": refused,
        "faults": rows,
    }


def judged(
    adapter: str,
    spec: EngineSpec,
    scratch: Path,
    profile: str,
    faults: Sequence[str],
    asked: Callable[[str], Sequence[str]],
    reference: Reference,
) -> Iterator[tuple[str, Observation, dict[str, str]]]:
    """Open a real adapter once for each setting; yield what each fault's failing clauses saw."""
    references: dict[str, ReferenceStates] = {}
    opened: dict[EngineSpec, Remembering | UsageError | CouldNotRun] = {}
    # Correct captures alone are taken at the boundaries asked for, as the suite does.
    early = 0 if list(faults) == ["none"] else 1

    def session(fault: str, wanted: EngineSpec) -> Session:
        seen = replace(wanted, boundaries=mutants.boundaries_for(wanted.boundaries, early))
        if seen not in opened:
            folder = scratch / f"engine-{len(opened)}"
            folder.mkdir()
            try:
                opened[seen] = Remembering(registry.find(adapter).open(seen, scratch=folder))
            except (UsageError, CouldNotRun) as error:
                opened[seen] = error
        found = opened[seen]
        if isinstance(found, Exception):
            raise found
        return mutants.MutantSession(fault, found, wanted)

    strategies.load_draws("dev")
    with ExitStack() as stack:
        for fault in faults:
            base = session(fault, spec)
            stack.callback(base.close)
            seen = observe(base, spec, reference, references, profile=profile)
            if profile == "full":
                seen = play(seen, lambda other, _, fault=fault: session(fault, other), asked(fault))
            yield fault, seen, judge.failures(seen, asked(fault))


def _quantities(observation: Observation) -> dict[str, Any]:
    captures = [
        c
        for c in observation.batch.captures
        if c.states.shape == (len(c.token_ids), len(c.boundaries), observation.hidden_size)
        and c.key in observation.references
    ]
    if not captures:
        return {}
    readings = [
        compare.read_slot(
            boundary,
            [c.states[:, slot] for c in captures],
            [observation.references[c.key] for c in captures],
        )
        for slot, boundary in enumerate(observation.spec.boundaries)
    ]
    return {
        "smallest_margin": _rounded(min(r.margin for r in readings)),
        "median_excess": _rounded(max(r.median_excess for r in readings)),
        "worst_row": _rounded(max(r.worst_row for r in readings)),
        "bad_rows": max(r.bad_rows for r in readings),
    }


def _rounded(value: float) -> float | str:
    return float(f"{value:.3g}") if np.isfinite(value) else "inf"


if __name__ == "__main__":
    main()

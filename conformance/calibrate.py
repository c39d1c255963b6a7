"""Measures what the suite's tolerances rest on: correct captures, and every mutant.

Run ``python -m truetap.conformance.calibrate --adapter NAME --model DIR --out FILE`` when a rule or
a number in ``truetap.harness.compare`` changes. For each fault it prints the worst value of each
rule's quantity over all slots, and the clauses that catch it; ``calibration.json`` keeps them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from truetap.conformance import judge
from truetap.harness import boundaries, compare, random_verifier, registry, verifier
from truetap.harness.adapters import mutants
from truetap.harness.model import EngineSpec
from truetap.harness.observation import Observation, observe
from truetap.harness.reference import Reference


def main() -> None:
    """Measure one adapter on one verifier."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapter", default="vllm_native")
    parser.add_argument("--model", help="verifier directory (default: a small random Llama)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = chosen.model or str(random_verifier.tiny_llama(Path(scratch) / "tiny-llama"))
        facts = verifier.describe(Path(model))
        wanted = boundaries.eagle3(facts.num_blocks)
        spec = EngineSpec(model=model, boundaries=wanted, dtype=chosen.dtype)
        measured = measure(chosen.adapter, spec, Path(scratch))
    name = f"{facts.name}/{chosen.dtype}/{chosen.adapter}"
    known = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
    chosen.out.write_text(json.dumps(known | {name: measured}, indent=1) + "\n")


def measure(adapter: str, spec: EngineSpec, scratch: Path) -> dict[str, Any]:
    """Open the adapter once, and judge it and every mutant of it."""
    seen = replace(spec, boundaries=mutants.boundaries_for(spec.boundaries, 1))
    reference, references = Reference(Path(spec.model), spec.dtype), {}
    rows: dict[str, Any] = {}
    with closing(registry.find(adapter).open(seen, scratch=scratch)) as session:
        environment = session.environment()
        for fault in mutants.FAULTS:
            mutant = mutants.MutantSession(fault, session, spec)
            observation = observe(mutant, spec, reference, references)
            rows[fault] = {
                **_quantities(observation),
                "caught_by": sorted(judge.failures(observation)),
            }
            print(fault, rows[fault])
    keep = ("engine", "engine_version", "torch_version", "device", "model_runner")
    return {
        "environment": {key: environment.binding.get(key) for key in keep},
        "spec": {k: v for k, v in asdict(spec).items() if k != "model"},
        "faults": rows,
    }


def _quantities(observation: Observation) -> dict[str, Any]:
    captures = [c for c in observation.batch.captures if len(c.states) == len(c.token_ids)]
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

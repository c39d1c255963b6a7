"""How long the gate takes once the engine is up: ``python benchmarks/gate_time.py``.

Prints the time of the verifier's digests, cold and remembered, and of the decision. Without
``--model`` it measures files of its own, ``--gigabytes`` in all, in a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import ending

from truetap.harness import certificate, digest_cache, report, signing, verifier
from truetap.harness.suite_options import suite_digest
from truetap.pipeline import gate, policy

SHARD = 256 << 20


def paper_verifier(folder: Path, size: int) -> Path:
    (folder / "config.json").write_text("{}")
    block = os.urandom(1 << 20)
    for number in range(max(1, size // SHARD)):
        with (folder / f"model-{number:05}.safetensors").open("wb") as file:
            for _ in range(SHARD >> 20):
                file.write(block)
    time.sleep(digest_cache.SETTLED_NS / 1e9 + 0.1)  # younger files are not remembered
    return folder


def digests_elsewhere(model: Path, cache: Path) -> tuple[float, dict[str, str]]:
    """Digest in a process of its own, which remembers nothing but what is in the cache."""
    code = (
        "import json, sys, time; from pathlib import Path; from truetap.harness import verifier\n"
        "began = time.perf_counter(); told = verifier.digests(Path(sys.argv[1]))\n"
        "print(json.dumps([time.perf_counter() - began, told]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, told = signing.strict_json(done.stdout.encode())
    return seconds, told


def decision(folder: Path, digests: dict[str, str]) -> float:
    """Return the seconds from the workers' facts to the decision, policy and suite included."""
    binding = {"verifier": digests, "adapter": {"name": "vllm_native", "sha256": "a" * 64}}
    facts = {"binding": binding, "recorded": {"verifier_name": "measured"}}
    suite = suite_digest()
    made = report.blank(
        "core",
        evidence="live",
        adapter="a",
        spec={},
        suite_digest=suite,
        started="",
        environment=facts,
    )
    for clause in made.clauses:
        clause.add("pass", "")
    private, public, _ = signing.new_key("measured", folder)
    path, demanded = folder / "certificate.json", folder / "policy.toml"
    stated = certificate.issue(made, now=datetime.now(UTC))
    certificate.write(stated, path, signing.signer_from(private))
    demanded.write_text(f'signers = ["{public.name}"]\n')
    began = time.perf_counter()
    demands = policy.load(demanded).demands("core", suite_digest(), datetime.now(UTC), binding)
    allowed = gate.decide([path], demands).allowed
    seconds = time.perf_counter() - began
    assert allowed
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a verifier's folder")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: Path(scratch) / name for name in ("model", "cache", "gate")}
        for folder in folders.values():
            folder.mkdir()
        size = int(asked.gigabytes * (1 << 30))
        model = asked.model or paper_verifier(folders["model"], size)
        read = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        cold, digests = digests_elsewhere(model, folders["cache"])
        warm, again = digests_elsewhere(model, folders["cache"])
        assert digests == again == verifier.digests(model)
        decided = decision(folders["gate"], digests)
    print(f"digests of {read / 1e9:.2f} GB of weights, read:       {cold:8.3f} s")
    print(f"the same, remembered:                    {warm:8.3f} s")
    print(f"decision on the workers' facts:          {decided:8.3f} s")


if __name__ == "__main__":
    ending.run(main)

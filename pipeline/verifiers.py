"""Finds the verifier of a run, building the built-in one if needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from truetap.harness import boundaries, verifier
from truetap.harness.errors import UsageError
from truetap.harness.model import EngineSpec
from truetap.pipeline.config import RunConfig


def directory_of(config: RunConfig, report: Callable[[str], None] = lambda _: None) -> Path:
    """Return the verifier's directory; a built-in one is made once and kept in the user's cache."""
    if config.verifier.directory is not None:
        return config.verifier.directory.resolve()
    from platformdirs import user_cache_path

    from truetap.pipeline import smollm2

    target = user_cache_path("truetap") / "verifiers" / "SmolLM2-135M-Instruct"
    return smollm2.build(target, report=report)


def spec_of(config: RunConfig, directory: Path) -> EngineSpec:
    """Return the engine settings of a run's captures; refuses boundaries the verifier lacks."""
    facts = verifier.describe(directory)
    settings = config.capture.model_dump(exclude={"adapter", "boundaries"})
    wanted = boundaries.check(
        config.capture.boundaries or boundaries.eagle3(facts.num_blocks), facts.num_blocks
    )
    if config.capture.max_model_len > facts.max_positions:
        raise UsageError(
            f"capture.max_model_len is {config.capture.max_model_len}, but {facts.name} has "
            f"{facts.max_positions} positions",
            remedy=f"set it to {facts.max_positions} or less",
        )
    if wanted[-1] != facts.num_blocks:
        raise UsageError(
            f"capture.boundaries ends with {wanted[-1]}; the training targets need the state after "
            f"the last of {facts.num_blocks} blocks",
            remedy=f"add {facts.num_blocks} to capture.boundaries",
        )
    return EngineSpec(
        model=str(directory),
        boundaries=wanted,
        seed=config.seed,
        **settings,
    )


def facts_of(config: RunConfig, directory: Path) -> dict[str, object]:
    """Return what every result of a run depends on, for ``RunFolder.claim``."""
    spec = asdict(spec_of(config, directory))
    return {
        "verifier": verifier.digests(directory),
        "boundaries": list(spec["boundaries"]),
        "dtype": spec["dtype"],
    }

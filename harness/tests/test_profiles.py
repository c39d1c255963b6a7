"""Profiles of capture adapters: the weaker is part of the stronger; ``shapes`` sees no value."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from truetap.conformance import judge
from truetap.harness import contract, observation, pytest_plugin, reference, registry, suite_options
from truetap.harness.model import Capture, CaptureBatch, CaptureRequest, EngineSpec, Environment
from truetap.harness.power import CONTROL, measured

DOC = Path(__file__).parents[2] / "docs" / "gate.md"
WIDTH = 16
pytest_plugins = "pytester"


def test_each_profile_requires_all_that_the_weaker_one_does_and_more() -> None:
    for weaker, stronger in itertools.pairwise(contract.STRENGTHS):
        assert set(contract.PROFILES[weaker]) < set(contract.PROFILES[stronger])
        assert contract.stronger(weaker, stronger) == stronger
        assert contract.stronger(stronger, weaker) == stronger
    assert all(contract.CLAUSES[id_].level == "MUST" for id_ in contract.PROFILES["shapes"])


def let_through() -> list[str]:
    """Mutants that a stronger profile caught where it was measured, and no clause of shapes did."""
    power = measured()
    faults = {fault for row in power.measurements.values() for fault in row["faults"]} - {CONTROL}
    shapes = set(contract.PROFILES["shapes"])
    return sorted(
        fault for fault in faults if power.caught(fault) and not shapes & set(power.caught(fault))
    )


def test_the_guide_lists_exactly_what_shapes_alone_lets_through() -> None:
    text = DOC.read_text()
    (block,) = re.findall(r"<!-- let through by shapes -->\n```\n(.*?)```", text, re.DOTALL)
    assert block.split() == let_through()
    total = {fault for row in measured().measurements.values() for fault in row["faults"]}
    assert f"{len(let_through())} of {len(total - {CONTROL})}" in text


class Narrow:
    """A capture path without an engine: right in number, width and dtype, and nothing else."""

    boundaries = (2, 6, 9, 12)
    log = None

    def __init__(self, fault: str = "") -> None:
        self.calls, self.fault = 0, fault

    def capture(self, requests: Sequence[CaptureRequest]) -> CaptureBatch:
        self.calls += 1
        width = WIDTH // 2 if self.fault == "width" else WIDTH
        dtype = "float16" if self.fault == "dtype" else "float32"
        rng = np.random.default_rng(self.calls)
        captures = []
        for request in requests:
            rows = len(request.token_ids) - (self.fault == "rows")
            slots = len(self.boundaries) - (self.fault == "slots")
            states = rng.standard_normal((rows, slots, width), dtype=np.float32)
            ids = request.token_ids[::-1] if self.fault == "ids" else request.token_ids
            captures.append(Capture(request.key, ids, self.boundaries, states, dtype))
        if self.fault == "count":
            captures = captures[:-1]
        nonce = f"nonce-{self.calls}"
        told = "nonce-1" if self.fault == "reply" else nonce
        reply = {"truetap": 1, "nonce": told, "rank": 0, "world_size": 1, "payload": {}}
        return CaptureBatch(tuple(captures), nonce, [reply])

    def prompt_logprobs(self, _ids: Sequence[int]) -> list[float] | None:
        raise AssertionError("shapes asks for no log-probabilities")

    def environment(self) -> Environment:
        return Environment(binding={"adapter": {"name": "narrow"}}, recorded={})

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    """A verifier that has a configuration and no weights: whoever loads it fails."""
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 12, "hidden_size": 16, "vocab_size": 512,'
        ' "max_position_embeddings": 1024}'
    )
    return EngineSpec(model=str(tmp_path), boundaries=Narrow.boundaries, dtype="float32")


FAULTS = {
    "": set(),
    "rows": {"ROWS-001"},
    "count": {"ROWS-001"},
    "ids": {"ROWS-002"},
    "width": {"LAYERS-004"},
    "slots": {"LAYERS-004"},
    "dtype": {"LAYERS-004"},
    "reply": {"REPLY-001"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_shapes_catches_what_it_is_for_and_flags_nothing_else(fault: str, spec: EngineSpec) -> None:
    seen = observation.observe(Narrow(fault), spec, None, {}, profile="shapes")
    assert set(judge.failures(seen)) == FAULTS[fault]
    assert set(FAULTS["rows"] | FAULTS["ids"] | FAULTS["width"] | FAULTS["reply"]) == set(
        contract.PROFILES["shapes"]
    )


def test_a_run_of_shapes_loads_no_reference(
    monkeypatch: pytest.MonkeyPatch, spec: EngineSpec, tmp_path: Path
) -> None:
    class Loaded(Exception):
        pass

    def refuse(*_: Any, **__: Any) -> None:
        raise Loaded

    adapter = SimpleNamespace(name="narrow", open=lambda *_, **__: Narrow())
    monkeypatch.setattr(registry, "find", lambda _: adapter)
    monkeypatch.setattr(reference, "open_reference", refuse)
    monkeypatch.setattr(suite_options, "spec", lambda *_: spec)
    options = {"adapter": "narrow", "profile": "shapes"}
    config: Any = SimpleNamespace(getoption=lambda name, default=None: options.get(name, default))
    seen = pytest_plugin.SuiteRun(config, tmp_path).observe()
    assert (seen.profile, seen.reference) == ("shapes", None)
    options["profile"] = "core"
    with pytest.raises(Loaded):
        pytest_plugin.SuiteRun(config, tmp_path).observe()


@pytest.mark.torch
def test_a_capture_one_block_off_passes_shapes(pytester: pytest.Pytester) -> None:
    from truetap.harness import report

    pytester.makefile(".ini", empty="[pytest]\n")
    done = pytester.runpytest_subprocess(
        *("-c", "empty.ini", "-p", "no:cacheprovider", "--pyargs", "truetap.conformance"),
        *("--adapter", "off-by-one@transformers", "--profile", "shapes", "--report", "report.json"),
        timeout=300,
    )
    assert done.ret == 0, done.stdout.str()
    made = report.load(pytester.path / "report.json")
    assert (made.verdict, made.profile, made.evidence) == ("conformant", "shapes", "live")
    assert {clause.id: clause.outcome for clause in made.clauses} == dict.fromkeys(
        contract.PROFILES["shapes"], "pass"
    )

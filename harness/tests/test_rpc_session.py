"""What the adapter ``vllm_rpc`` refuses, without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from truetap.harness.adapters.vllm_rpc import VllmRpcAdapter
from truetap.harness.errors import UsageError
from truetap.harness.model import EngineSpec


def test_an_engine_that_is_not_eager_is_refused_before_it_starts(tmp_path: Path) -> None:
    spec = EngineSpec(model="nowhere", boundaries=(1,), enforce_eager=False)
    with pytest.raises(UsageError, match="hooks") as refused:
        VllmRpcAdapter().open(spec, scratch=tmp_path)
    assert "enforce_eager" in refused.value.remedy
    assert list(tmp_path.iterdir()) == []

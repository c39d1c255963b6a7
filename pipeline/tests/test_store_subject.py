"""truetap's own store holds to every STORE clause: killed, damaged, out of space, in company."""

from __future__ import annotations

from pathlib import Path

import pytest

from truetap.conformance import judge
from truetap.harness.store_script import observe_store
from truetap.harness.stores.mutants import MutantStore
from truetap.pipeline.store_subject import ShardStore

pytestmark = pytest.mark.torch


def test_the_shards_conform(tmp_path: Path) -> None:
    seen = observe_store(ShardStore(), tmp_path)
    assert judge.failures(seen) == {}
    index = "shards/manifest.jsonl"
    assert sum(damage.file == index for damage in seen.damaged) > 30
    assert sum(case.what.startswith("killed before rename") for case in seen.killed) > 0


def test_a_swallowed_error_over_them_is_caught(tmp_path: Path) -> None:
    failures = judge.failures(observe_store(MutantStore("swallowed-error", ShardStore()), tmp_path))
    assert "STORE-007" in failures

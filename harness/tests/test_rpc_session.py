"""What the adapter ``vllm_rpc`` refuses, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from truetap.harness.adapters import vllm_rpc
from truetap.harness.adapters.vllm_rpc import VllmRpcAdapter
from truetap.harness.errors import CheckFailed, UsageError
from truetap.harness.model import CaptureRequest, EngineSpec

REQUESTS = (CaptureRequest("a", (5, 6)), CaptureRequest("b", (7,)))
ONE = {"rows": [2, 1], "tokens": [2, 1], "digests": ["x", "y"], "others": 0}


def test_an_engine_that_is_not_eager_is_refused_before_it_starts(tmp_path: Path) -> None:
    spec = EngineSpec(model="nowhere", boundaries=(1,), enforce_eager=False)
    with pytest.raises(UsageError, match="hooks") as refused:
        VllmRpcAdapter().open(spec, scratch=tmp_path)
    assert "enforce_eager" in refused.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_complete_and_equal_ranks_pass() -> None:
    vllm_rpc._refuse_gaps({0: ONE, 1: deepcopy(ONE)}, REQUESTS)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda taken: taken.update(rows=[1, 1]), "rank 1 captured 1 of 2 rows of request 'a'"),
        (lambda taken: taken.update(rows=[2, 0], tokens=[2, 0]), "0 of 1 rows of request 'b'"),
        (
            lambda taken: taken.update(digests=["x", "z"]),
            "0 and 1 hold other states of request 'b'",
        ),
        (lambda taken: taken.update(others=3), "rank 1 holds rows of 3 requests of other calls"),
    ],
)
def test_a_rank_that_differs_is_named(spoil: Callable[[dict[str, Any]], None], said: str) -> None:
    other = deepcopy(ONE)
    spoil(other)
    with pytest.raises(CheckFailed, match=said):
        vllm_rpc._refuse_gaps({0: ONE, 1: other}, REQUESTS)

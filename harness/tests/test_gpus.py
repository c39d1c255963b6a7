"""Which GPUs an engine gets: by position in what the caller was given, or a clear refusal."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from truetap.harness import gpus
from truetap.harness.errors import CouldNotRun, UsageError


def unasked() -> int:
    raise AssertionError("the machine was asked although the caller had said")


@pytest.mark.parametrize(
    ("visible", "worker", "per_worker", "mine"),
    [
        ("4,5,6,7", 0, 2, "4,5"),
        ("4,5,6,7", 1, 2, "6,7"),
        ("4,5,6,7", 3, 1, "7"),
        ("4, 5 ,6,7", 1, 2, "6,7"),
        ("7,3", 0, 1, "7"),
        ("GPU-8932f937,GPU-d72614c1", 1, 1, "GPU-d72614c1"),
        ("MIG-GPU-8932/1/0,MIG-4f1c", 0, 2, "MIG-GPU-8932/1/0,MIG-4f1c"),
        ("2,3,-1,4", 0, 2, "2,3"),
        ("0", 0, 1, "0"),
    ],
)
def test_a_worker_gets_its_places_in_the_callers_list(
    visible: str, worker: int, per_worker: int, mine: str
) -> None:
    assert gpus.share(visible, worker=worker, per_worker=per_worker, count=unasked) == mine


@pytest.mark.parametrize(
    ("visible", "worker", "per_worker", "says"),
    [
        ("4,5,6,7", 2, 2, "engine 3 of 2 GPUs each needs 6 in all; .*'4,5,6,7' gives 4"),
        ("4", 0, 2, "needs 2 in all"),
        ("", 0, 1, "gives 0"),
        ("-1", 0, 1, "gives 0"),
        ("2,3,-1,4", 1, 2, "gives 2"),
        ("1,1", 0, 1, "names a GPU twice"),
        ("0,1", 0, 0, "are none"),
        ("0,1", 0, -1, "are none"),
    ],
)
def test_too_few_are_refused(visible: str, worker: int, per_worker: int, says: str) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        gpus.share(visible, worker=worker, per_worker=per_worker, count=unasked)
    assert refused.value.remedy


def test_where_the_caller_says_nothing_the_machine_is_asked() -> None:
    assert gpus.share(None, worker=1, per_worker=2, count=lambda: 4) == "2,3"
    with pytest.raises(UsageError, match="this machine has 2"):
        gpus.share(None, worker=1, per_worker=2, count=lambda: 2)


LISTED = """GPU 0: NVIDIA H200 (UUID: GPU-8932f937-d72c-4106-c12f-20bd9faed9f6)
GPU 1: NVIDIA H200 (UUID: GPU-d72614c1-31f4-4ebc-8b9c-d3a1c9c9a2a1)
"""
SPLIT = LISTED + "  MIG 1g.18gb     Device  0: (UUID: MIG-4f1c2b1d-0000-0000-0000-000000000000)\n"


def test_what_nvidia_smi_lists() -> None:
    assert gpus.listed(LISTED) == 2
    assert gpus.listed("No devices found.\n") == 0
    with pytest.raises(CouldNotRun, match="MIG") as refused:
        gpus.listed(SPLIT)
    assert gpus.VARIABLE in refused.value.remedy


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("nvidia-smi"),
        subprocess.CalledProcessError(9, "nvidia-smi"),
        subprocess.TimeoutExpired("nvidia-smi", 30),
    ],
)
def test_without_an_answer_of_nvidia_smi_it_is_said(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(CouldNotRun, match="CUDA_VISIBLE_DEVICES is not set") as refused:
        gpus.count()
    assert "leave --gpus out" in refused.value.remedy

"""The auditor: what it finds in a shard, and what becomes of it when it cannot look."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import pytest

from truetap.harness import auditor, reaper, shard
from truetap.harness.adapters.mutants import FAULTS, MutantAdapter
from truetap.harness.adapters.transformers import TransformersAdapter
from truetap.harness.auditor import Task, audit
from truetap.harness.auditor_process import Auditor
from truetap.harness.errors import CouldNotRun, IntegrityError
from truetap.harness.model import CaptureRequest, EngineSpec

pytestmark = pytest.mark.torch

BOUNDARIES = (2, 4, 5, 8)
LENGTHS = (40, 33, 57, 24, 48)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from truetap.harness.random_verifier import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("verifier") / "tiny", num_blocks=8)


@pytest.fixture(scope="module")
def reference(verifier: Path) -> Any:
    from truetap.harness.reference import Reference

    return Reference(verifier, "bfloat16")


def prompts(seed: int = 0) -> list[tuple[int, ...]]:
    import torch

    drawn = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(2, 512, (n,), generator=drawn).tolist()) for n in LENGTHS]


Captured = Callable[..., Path]


@pytest.fixture(scope="module")
def captured(verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Captured:
    """Write a shard as the engine would, in its precision, with one fault or with none."""
    folder = tmp_path_factory.mktemp("shards")

    def write(fault: str, seed: int = 0) -> Path:
        import torch

        path = folder / f"{fault}-{seed}.safetensors"
        if path.exists():
            return path
        spec = EngineSpec(str(verifier), BOUNDARIES)
        session = MutantAdapter(fault, TransformersAdapter()).open(spec, scratch=folder)
        requests = [CaptureRequest(str(i), ids) for i, ids in enumerate(prompts(seed))]
        captures = session.capture(requests).captures
        shard.write_partial(
            path,
            [torch.from_numpy(c.states.copy()).bfloat16() for c in captures],
            [request.token_ids for request in requests],
            [bytes(len(request.token_ids)) for request in requests],
        )
        shard.publish(path)
        return path

    return write


def task(path: Path, which: Sequence[int] = (0,), *, seed: int = 0, most: int = 1024) -> Task:
    firsts = [0, *accumulate(LENGTHS)]
    wanted = prompts(seed)
    return Task(
        str(path),
        BOUNDARIES,
        tuple(firsts[i] for i in which),
        tuple(wanted[i][:most] for i in which),
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_correct_path_is_never_flagged(reference: Any, captured: Captured, seed: int) -> None:
    path = captured("none", seed)
    for which, most in (*(((i,), 1024) for i in range(len(LENGTHS))), ((0, 3), 1024), ((2,), 16)):
        found = audit(reference, task(path, which, seed=seed, most=most))
        assert found.right, found.saw
        assert [slot["boundary"] for slot in found.slots] == list(BOUNDARIES)
        rows = sum(min(LENGTHS[i], most) for i in which)
        assert {slot["rows"] for slot in found.slots} == {rows}


SEEN = {
    "first-boundary-only": "the slot for boundary 4 holds boundary 2",
    "off-by-one": "the slot for boundary 2 holds boundary 1",
    "middle-boundary-early": "the slot for boundary 4 holds boundary 3",
    "last-boundary-early": "the slot for boundary 8 holds boundary 7",
    "residual-missing": "holds the output of block 2 without the residual",
    "last-boundary-post-norm": "boundary 8 after the final norm",
    "last-boundary-mistaken-norm": "the slot for boundary 8",
    "double-norm": "the slot for boundary 8",
    "slots-permuted": "the slot for boundary 2 holds boundary 8",
    "slot-duplicated": "the slot for boundary 4 holds boundary 2",
    "scaled": "the slot for boundary 2",
    "zero-slot": "the slot for boundary 2",
    "nan-row": "rows that are not its own",
    "rows-shifted": "of the token before",
    "rows-reversed": "the slot for boundary 2",
    "neighbours-rows": "the slot for boundary 2",
    "row-from-neighbour": "rows that are not its own",
    "stale-chunk-tail": "rows that are not its own",
    "zero-tail": "rows that are not its own",
}


@pytest.mark.parametrize("fault", SEEN)
def test_a_fault_is_seen_in_one_request_and_named(
    reference: Any, captured: Captured, fault: str
) -> None:
    found = audit(reference, task(captured(fault)))
    assert fault in FAULTS
    assert not found.right
    assert SEEN[fault] in found.saw
    assert json.loads(json.dumps(found.slots), parse_constant=pytest.fail)  # no NaN, no Infinity


def test_another_requests_states_are_seen_where_they_are(
    reference: Any, captured: Captured
) -> None:
    """The two longest requests have each other's rows; a sample of the others is right."""
    path = captured("requests-swapped")
    told = [audit(reference, task(path, (index,))).right for index in range(len(LENGTHS))]
    assert told == [True, True, False, True, False]
    assert not audit(reference, task(path, range(len(LENGTHS)))).right


def test_a_shard_of_other_tokens_or_slots_is_no_right_one(
    reference: Any, captured: Captured
) -> None:
    asked = task(captured("none"))
    other = Task(asked.shard, BOUNDARIES, (1,), asked.token_ids)
    assert "rows 1 to 40 are of other tokens than were sent" in audit(reference, other).saw
    beyond = Task(asked.shard, BOUNDARIES, (sum(LENGTHS) - 5,), asked.token_ids)
    assert "other tokens" in audit(reference, beyond).saw
    fewer = Task(asked.shard, BOUNDARIES[:3], (0,), asked.token_ids)
    found = audit(reference, fewer)
    assert (found.right, found.saw) == (False, "it has 4 slots for 3 boundaries")


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to ...")],
)
def test_a_reference_out_of_memory_could_not_run(error: Exception) -> None:
    said = auditor.told(error)
    assert said["kind"] == "CouldNotRun"
    assert said["text"] == "the reference ran out of memory"
    assert "audit.max_tokens" in said["remedy"]


# --- the process -------------------------------------------------------------------------------


@pytest.fixture
def started(verifier: Path, tmp_path: Path) -> Iterator[Callable[..., Auditor]]:
    made: list[Auditor] = []

    def start(deadline_s: float = 120) -> Auditor:
        made.append(
            Auditor(verifier, "bfloat16", log=tmp_path / "audit.log", deadline_s=deadline_s)
        )
        return made[-1]

    yield start
    for process in made:
        process.close()


@pytest.mark.slow
def test_findings_come_in_order_and_an_error_is_the_last_word(
    started: Callable[..., Auditor], captured: Captured, tmp_path: Path
) -> None:
    with closing(started()) as process:
        process.submit(task(captured("none")))
        assert process.finished() is None  # it still loads
        assert process.wait().right
        it = psutil.Process(process.pid)
        assert it.nice() == auditor.NICENESS
        assert it.environ()["CUDA_VISIBLE_DEVICES"] == ""
        process.submit(task(captured("off-by-one")))
        found = process.wait()
        assert not found.right
        assert "holds boundary 1" in found.saw
        assert set(found.reference) == {"transformers", "torch", "precision"}
        process.submit(task(tmp_path / "none.safetensors"))
        with pytest.raises(IntegrityError, match="cannot be read back"):
            process.wait()
        with pytest.raises(CouldNotRun, match="ended with exit code 1"):
            process.wait()
    assert not psutil.pid_exists(process.pid)


def test_a_killed_auditor_is_said(started: Callable[..., Auditor], captured: Captured) -> None:
    process = started()
    process.submit(task(captured("none")))
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(CouldNotRun, match=r"was killed by signal 9, .* is unproven") as died:
        process.wait()
    assert "makes up for the audit" in died.value.remedy
    with pytest.raises(CouldNotRun, match="was killed by signal 9"):
        process.submit(task(captured("none")))


def test_an_auditor_that_is_late_is_ended(
    started: Callable[..., Auditor], captured: Captured
) -> None:
    process = started(deadline_s=0.1)
    process.submit(task(captured("none")))
    with pytest.raises(CouldNotRun, match=r"not done within 0\.1 s"):
        process.wait()
    assert not psutil.pid_exists(process.pid)


def test_without_transformers_it_says_what_to_install(
    started: Callable[..., Auditor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('no transformers here')\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", path)
    with pytest.raises(CouldNotRun, match="no transformers here") as missing:
        started().wait()
    assert missing.value.remedy == "pip install 'truetap[reference]'"


OWNER = """
import sys, time
from pathlib import Path
from truetap.harness.auditor_process import Auditor
print(Auditor(Path(sys.argv[1]), "bfloat16", log=Path(sys.argv[2]), deadline_s=60).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_an_owner_that_is_killed_takes_the_auditor_with_it(verifier: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(verifier), str(tmp_path / "audit.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        process = psutil.Process(int(owner.stdout.readline()))
        try:
            assert process.is_running()
            time.sleep(3 * reaper.POLL_S)  # for the reaper to have come up
            owner.kill()
            deadline = time.monotonic() + 15
            while _alive(process) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not _alive(process)
        finally:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False

"""Takes samples of a shard again by the reference, in a process of its own.

The other side of ``truetap.harness.auditor_process``. A process of its own, because the engine's
has torch settings that change arithmetic, and because the lowest priority is to hold for the
audit alone. It shares nothing with the capture path but the verifier's files: token ids come with
the task, states from the published shard.

Run as ``python -m truetap.harness.auditor MODEL DTYPE``: it loads the reference at once, reads one
task a line from standard input, and answers each with a line on standard output.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from truetap.harness import compare
from truetap.harness.errors import CouldNotRun, IntegrityError, TruetapError

if TYPE_CHECKING:
    import torch

    from truetap.harness.reference import Reference

NICENESS = 19
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


@dataclass(frozen=True)
class Task:
    """Requests of one shard that are to be captured again."""

    shard: str
    """Path of the published file."""
    boundaries: tuple[int, ...]
    first_rows: tuple[int, ...]
    """Where each request's rows begin in it."""
    token_ids: tuple[tuple[int, ...], ...]
    """What was sent, not what the shard says; a beginning of a request is enough."""


@dataclass(frozen=True)
class Finding:
    """What one audit found; JSON values throughout."""

    right: bool
    saw: str
    """One sentence over all slots: the wrong ones if there are any."""
    slots: tuple[Mapping[str, Any], ...]
    """For each boundary what its slot holds, distance, noise floor, margin and bad rows; a number
    that is not finite is None. Empty if the shard holds other tokens."""
    seconds: float
    reference: Mapping[str, str]
    """Library, its versions, and the precision of the reference."""


def audit(reference: Reference, task: Task) -> Finding:
    """Compare what the shard holds with what the reference makes of the same tokens."""
    began = time.monotonic()
    held = _held(task)
    wrong = _other_tokens(task, held)
    if wrong:
        return Finding(False, wrong, (), round(time.monotonic() - began, 3), versions(reference))
    truth = reference.states_of(task.token_ids)
    readings = {
        boundary: compare.read_slot(
            boundary, [states[:, slot].float().numpy() for states, _ in held], truth
        )
        for slot, boundary in enumerate(task.boundaries)
    }
    return Finding(
        right=all(reading.right for reading in readings.values()),
        saw=compare.summary(readings),
        slots=tuple(_told(reading) for reading in readings.values()),
        seconds=round(time.monotonic() - began, 3),
        reference=versions(reference),
    )


def _held(task: Task) -> list[tuple[torch.Tensor, Sequence[int]]]:
    """Read each request's states and token ids, and nothing else, from the shard on disk."""
    from safetensors import safe_open

    held = []
    try:
        with safe_open(task.shard, framework="pt") as file:
            states, ids = file.get_slice("states"), file.get_slice("token_ids")
            for first, prompt in zip(task.first_rows, task.token_ids, strict=True):
                rows = slice(first, first + len(prompt))
                held.append((states[rows], ids[rows].tolist()))
    except Exception as error:  # safetensors has its own error type, and corrupt headers many
        raise IntegrityError(
            f"shard {task.shard} cannot be read back: {error}",
            remedy="check the disk, then run truetap extract again",
        ) from error
    return held


def _other_tokens(task: Task, held: Sequence[tuple[torch.Tensor, Sequence[int]]]) -> str:
    for first, prompt, (states, ids) in zip(task.first_rows, task.token_ids, held, strict=True):
        if len(states) != len(prompt) or list(ids) != list(prompt):
            return f"rows {first} to {first + len(prompt) - 1} are of other tokens than were sent"
        if states.shape[1] != len(task.boundaries):
            return f"it has {states.shape[1]} slots for {len(task.boundaries)} boundaries"
    return ""


def _told(reading: compare.SlotReading) -> dict[str, Any]:
    told = asdict(reading)
    noise = reading.requested_distance / reading.median_excess if reading.median_excess else 0.0
    told = {
        "boundary": told["requested"],
        "right": reading.right,
        "holds": told["holds"],
        "distance": told["requested_distance"],
        "noise": noise,
        "runner_up": told["runner_up"],
        "margin": told["margin"],
        "worst_row": told["worst_row"],
        "bad_rows": told["bad_rows"],
        "rows": told["rows"],
    }
    return {name: _finite(value) for name, value in told.items()}


def _finite(value: Any) -> Any:
    """Return a number to four digits; None for one that JSON has no word for."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else None


def versions(reference: Reference) -> dict[str, str]:
    """Return what the reference is made of."""
    import torch
    import transformers

    return {
        "transformers": transformers.__version__,
        "torch": str(torch.__version__),
        "precision": reference.precision,
    }


def told(error: BaseException) -> dict[str, str]:
    """Return an error as it travels: its kind, one sentence, the remedy."""
    if isinstance(error, TruetapError):
        return {"kind": type(error).__name__, "text": str(error), "remedy": error.remedy}
    if isinstance(error, MemoryError) or any(w in str(error).lower() for w in OUT_OF_MEMORY):
        return {
            "kind": CouldNotRun.__name__,
            "text": "the reference ran out of memory",
            "remedy": "free memory (the reference holds the verifier in two precisions), lower "
            "audit.max_tokens, or set audit.enabled = false, which the manifest shows",
        }
    text = f"the reference cannot run: {type(error).__name__}: {error}"
    return {"kind": CouldNotRun.__name__, "text": text, "remedy": "see logs/audit.log"}


def _serve(model: str, dtype: str, tasks: TextIO, answers: TextIO) -> None:
    """Answer each task; end with the first error, because there is no audit after it."""

    def answer(value: Mapping[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        from truetap.harness.reference import open_reference

        reference = open_reference(Path(model), dtype)
        for line in tasks:
            wanted = json.loads(line)
            answer({"finding": asdict(audit(reference, Task(**wanted)))})
    except Exception as error:
        answer({"error": told(error)})
        raise  # the log gets the traceback


def _main(model: str, dtype: str) -> None:
    os.nice(NICENESS)
    with suppress(OSError):  # where memory runs out, the engine is not to be the victim
        Path("/proc/self/oom_score_adj").write_text("1000")
    # Ctrl-C is for the owner, who closes our standard input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Whatever a library prints goes to the log, not between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _limit_threads()
    _serve(model, dtype, sys.stdin, answers)


def _limit_threads() -> None:
    """Leave half of the cores to the engine; being nice does not help it at a barrier."""
    try:
        import torch
    except ImportError:
        return  # the reference says so, with the remedy
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))


if __name__ == "__main__":
    _main(*sys.argv[1:])

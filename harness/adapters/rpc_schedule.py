"""Whose rows a forward pass computes: read from the model runner that runs it, during the pass.

A step's batch mixes requests in an order of the runner's own, cuts prompts into chunks, decodes
some requests while it prefills others, and is padded. Nothing outside the runner knows that order,
and the order of submission is not it. vLLM has two model runners; each has its own function here,
and nothing else reaches into them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

KEY_PREFIX = "truetap:"
"""How the ids of requests to be captured begin. Any other request's rows are left alone."""


@dataclass(frozen=True)
class Span:
    """Rows of one forward pass that are consecutive prompt tokens of one request."""

    key: str
    """The request's id as the caller gave it."""
    row: int
    """The first of the rows, counted from the start of the batch."""
    position: int
    """Of the first row's token in the prompt."""
    token_ids: list[int]
    """What the model was given in these rows: one row each."""
    prompt_length: int


@dataclass(frozen=True)
class _Scheduled:
    """Rows of one request in the present pass, prompt or not."""

    req_id: str
    row: int
    count: int
    position: int
    prompt_length: int


def runner_version(runner: Any) -> int:
    """Return 1 or 2 for vLLM's model runners, told apart by where they keep their requests."""
    if hasattr(runner, "req_states"):
        return 2
    if hasattr(runner, "input_batch") and hasattr(runner, "requests"):
        return 1
    raise RuntimeError(f"{type(runner).__qualname__} is not a model runner that truetap can read")


def spans(runner: Any) -> list[Span]:
    """Return the prompt rows of the present forward pass that are to be captured.

    Call it while the model runs. Warm-up and dummy passes have none; rows of generated tokens and
    of padding belong to no span.
    """
    ids, scheduled = (_of_v1 if runner_version(runner) == 1 else _of_v2)(runner)
    found = []
    for one in scheduled:
        count = min(one.count, one.prompt_length - one.position)
        if count > 0:
            tokens = ids[one.row : one.row + count].tolist()
            found.append(Span(_key(one.req_id), one.row, one.position, tokens, one.prompt_length))
    return found


def _of_v1(runner: Any) -> tuple[Any, Iterator[_Scheduled]]:
    """Return the pass's input ids, and what is scheduled, of Model Runner V1.

    Run on 0.11.0, 0.16.0, 0.26.0 and 0.32.0; the sources of all from 0.11.0 to 0.33.0 agree.
    ``_prepare_inputs`` fills these buffers for every step, just before the model runs. A dummy run
    leaves the last step's in place; it is told by its missing attention metadata.
    """
    from vllm.forward_context import get_forward_context

    def scheduled() -> Iterator[_Scheduled]:
        if get_forward_context().attn_metadata is None:
            return
        starts = runner.query_start_loc.np
        for index, req_id in enumerate(runner.input_batch.req_ids):
            if _wanted(req_id):
                yield _Scheduled(
                    req_id=req_id,
                    row=int(starts[index]),
                    count=int(starts[index + 1] - starts[index]),
                    position=int(runner.input_batch.num_computed_tokens_cpu[index]),
                    prompt_length=len(runner.requests[req_id].prompt_token_ids),
                )

    return runner.input_ids.cpu, scheduled()


def _of_v2(runner: Any) -> tuple[Any, Iterator[_Scheduled]]:
    """Return the pass's input ids, and what is scheduled, of Model Runner V2.

    Run on 0.26.0, on an H200: V2 needs a GPU. Read in the sources of 0.12.0 to 0.33.0. While the
    model runs, V2 keeps the batch in a local variable of ``execute_model`` and nowhere else, so it
    is read off the call stack. A dummy batch has request ids of its own.
    """
    batch = _local_of_caller(runner, "execute_model", "input_batch")

    def scheduled() -> Iterator[_Scheduled]:
        starts, lengths = batch.query_start_loc_np, runner.req_states.prompt_len
        lengths = getattr(lengths, "np", lengths)  # an array up to 0.16, then a pair of buffers
        for index, req_id in enumerate(batch.req_ids):
            if _wanted(req_id):
                row = int(starts[index])
                yield _Scheduled(
                    req_id=req_id,
                    row=row,
                    count=int(starts[index + 1]) - row,
                    position=int(batch.positions[row]),
                    prompt_length=int(lengths[batch.idx_mapping_np[index]]),
                )

    return batch.input_ids, scheduled()


def _local_of_caller(owner: Any, function: str, name: str) -> Any:
    """Return a local variable of the innermost call of ``owner``'s method that is running."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_locals.get("self") is owner:
            if name in frame.f_locals:
                return frame.f_locals[name]
            break
        frame = frame.f_back
    raise RuntimeError(f"{type(owner).__qualname__}.{function} keeps no {name} while it runs")


def _wanted(req_id: str) -> bool:
    return req_id.startswith(KEY_PREFIX)


def _key(req_id: str) -> str:
    """Return the caller's id: vLLM appends "-" and random characters from 0.14 on."""
    return req_id.partition("-")[0]

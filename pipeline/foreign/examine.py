"""The judgement of one sample without a reference: everything that can be seen of every file.

Knows no file format: it gets a ``Sample`` and says what is wrong with it. Values are looked at in
blocks of rows, so that memory does not grow with the length of a request.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from truetap.harness.verifier import VerifierFacts
from truetap.pipeline.foreign.masks import MaskJudge
from truetap.pipeline.foreign.producers.sample import Problem, Sample
from truetap.pipeline.foreign.state import Examined

if TYPE_CHECKING:
    import torch

BLOCK = 256
"""Rows looked at together."""
_FIRST_PREFIX = 8
"""Equal first rows of different tokens are looked for from this many rows on, at every doubling.
Prompts of one template begin alike, so fewer would seldom tell them apart."""


def examine(
    sample: Sample, verifier: VerifierFacts, masks: MaskJudge, *, whole_mask_is_usual: bool = False
) -> Examined:
    """Say what can be seen of a sample without running the verifier."""
    states, token_ids = sample.states, sample.token_ids
    rows, slots, width = states.shape
    problems = list(sample.problems)
    if width != verifier.hidden_size:
        text = f"its states are {width} wide, the verifier's are {verifier.hidden_size}"
        problems.append(Problem("width", text))
    if not slots:
        problems.append(Problem("shape", "it has no slots"))
    if not states.is_floating_point():
        problems.append(Problem("shape", f"its states are {sample.dtype}: no real numbers"))
    if rows != len(token_ids) and not any(p.code == "rows" for p in problems):
        problems.append(Problem("rows", f"{rows} rows for {len(token_ids)} tokens"))
    problems += _vocabulary(token_ids, verifier.vocab_size)
    seen = _values(states, token_ids) if states.numel() else []
    mask_problems, judged = _mask(sample, masks, whole_mask_is_usual)
    return Examined(
        name=sample.name,
        rows=rows,
        tokens=len(token_ids),
        slots=slots,
        dtype=sample.dtype,
        width=width,
        masked=None if sample.loss_mask is None else int((sample.loss_mask != 0).sum()),
        mask_judged=judged,
        problems=problems + seen + mask_problems,
        # Zeros are zeros, and nothing is nothing; that they repeat says nothing more.
        prefixes=[]
        if not states.numel() or any(p.code == "zeros" for p in seen)
        else prefixes(states, token_ids),
    )


def _vocabulary(token_ids: NDArray[np.int64], size: int) -> list[Problem]:
    if not len(token_ids):
        return [Problem("rows", "it has no tokens")]
    outside = token_ids[(token_ids < 0) | (token_ids >= size)]
    if not len(outside):
        return []
    text = f"token id {int(outside[0])} is not in the verifier's vocabulary of {size}"
    return [Problem("vocabulary", text)]


def _values(states: torch.Tensor, token_ids: NDArray[np.int64]) -> list[Problem]:
    """Look for values that no capture has, block by block."""
    import torch

    rows, slots, _ = states.shape
    infinite = 0
    zero = torch.zeros(rows, slots, dtype=torch.bool)
    differ = torch.zeros(slots, slots, dtype=torch.bool)
    repeats: list[int] = []
    before: torch.Tensor | None = None
    for start in range(0, rows, BLOCK):
        block = states[start : start + BLOCK].float()
        infinite += int((~torch.isfinite(block)).flatten(1).any(1).sum())
        zero[start : start + BLOCK] = ~block.any(-1)
        for i in range(slots):
            for j in range(i):
                differ[i, j] |= not torch.equal(block[:, i], block[:, j])
        repeats += _repeats(block, before, start, token_ids)
        before = block[-1:]
    problems = []
    if infinite:
        problems.append(Problem("nan", f"{infinite} of {rows} rows have values that are no number"))
    problems += _zeros(zero)
    if not any(p.code == "zeros" for p in problems):
        problems += [
            Problem("equal_slots", f"slots {j} and {i} are equal in every row")
            for i in range(slots)
            for j in range(i)
            if rows and not differ[i, j]
        ]
        if repeats:
            text = f"row {repeats[0]} equals the row before, of another token"
            more = f"; {len(repeats)} rows do" if len(repeats) > 1 else ""
            problems.append(Problem("equal_rows", text + more))
    return problems


def _repeats(
    block: torch.Tensor, before: torch.Tensor | None, start: int, token_ids: NDArray[np.int64]
) -> list[int]:
    """Return rows equal to the one before them, although their tokens differ.

    Of equal tokens they may be: a prompt that begins with one token several times has equal rows.
    """
    import torch

    joined = block if before is None else torch.cat([before, block])
    first = start + 1 if before is None else start
    equal = (joined[1:] == joined[:-1]).flatten(1).all(1)
    found = [first + int(i) for i in equal.nonzero().flatten()]
    return [r for r in found if r < len(token_ids) and token_ids[r] != token_ids[r - 1]]


def _zeros(zero: torch.Tensor) -> list[Problem]:
    if not len(zero):
        return []
    if bool(zero.all()):
        return [Problem("zeros", "all states are zero")]
    slots = [str(i) for i in range(zero.shape[1]) if bool(zero[:, i].all())]
    if slots:
        return [Problem("zeros", f"slot {', '.join(slots)} is all zero")]
    rows = zero.any(1).nonzero().flatten()
    if not len(rows):
        return []
    return [Problem("zeros", f"{len(rows)} rows have zero states, the first is row {int(rows[0])}")]


def _mask(sample: Sample, masks: MaskJudge, whole_is_usual: bool) -> tuple[list[Problem], bool]:
    mask = sample.loss_mask
    if mask is None or (len(mask) and mask.all() and whole_is_usual):
        return [], False
    if len(mask) != len(sample.token_ids):
        text = f"a loss mask of {len(mask)} for {len(sample.token_ids)} tokens"
        return [Problem("mask_length", text)], False
    if not set(np.unique(mask).tolist()) <= {0, 1}:
        return [Problem("mask_length", "a loss mask of other numbers than 0 and 1")], False
    if not mask.any():
        return [Problem("mask_empty", "the loss mask is empty: it trains nothing")], True
    if mask.all():
        return [Problem("mask_whole", "the loss mask covers every token, the user's too")], True
    judged = masks.judge(sample.token_ids, mask, sample.messages)
    return judged or [], judged is not None


def prefixes(states: torch.Tensor, token_ids: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Return (rows, digest of their states, digest of their token ids) at every doubling.

    Two files with one digest of states and two of tokens: one has the other's states.
    """
    import torch

    rows = min(len(states), len(token_ids))
    lengths = [_FIRST_PREFIX << k for k in range(40) if _FIRST_PREFIX << k < rows]
    if rows >= _FIRST_PREFIX:
        lengths.append(rows)
    of_states, found, start = blake2b(digest_size=8), [], 0
    raw = np.ascontiguousarray(token_ids).tobytes()
    for length in lengths:
        for begin in range(start, length, BLOCK):
            block = states[begin : min(begin + BLOCK, length)].contiguous()
            of_states.update(memoryview(block.flatten().view(torch.uint8).numpy()))
        start = length
        of_tokens = blake2b(raw[: 8 * length], digest_size=8)
        found.append((length, _number(of_states.digest()), _number(of_tokens.digest())))
    return found


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "little", signed=True)

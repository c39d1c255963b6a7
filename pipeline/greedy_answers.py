"""Greedy answers with a draft head against those without: a draft must not change what comes out.

A verifier that checks drafts computes in other batches than one that decodes alone. Where it finds
two tokens equally likely but for rounding, it may then choose the other one, and everything after
that differs. So where an answer parts from the other, the verifier alone is asked how likely it
finds both tokens there: only where it is undecided may they part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from truetap.harness.errors import CheckFailed

if TYPE_CHECKING:
    from rich.console import Console

Outputs = Mapping[str, Sequence[int]]
"""The answer's token ids by question."""
Likelihood = Callable[[Sequence[int]], float]
"""Returns the log-probability, in nats, of the last of some tokens, given those before it."""

UNDECIDED = {"bfloat16": 0.5}
"""By the verifier's dtype: two tokens' difference in log-probability, in nats, that is rounding.

Measured (SmolLM2-135M, vLLM 0.32.0 on a CPU, bfloat16, 96 answers of 96 tokens, three heads): six
answers part with each head, at most 0.25 apart, which is two steps of bfloat16 at a logit of 16 to
32. On an H200 (vLLM 0.26.0, 480 answers of 256 tokens) 220 parted; of 110 of them the two tokens
are at most 0.37 apart in float32. In other dtypes nothing is allowed for: none was seen to need it
(float32: 64 answers of 64 tokens in ``make demo``), and none was measured.
"""


@dataclass(frozen=True)
class Parted:
    """Answers with one head that part from those without."""

    answers: int
    largest_gap: float
    """Between the two tokens where an answer parts, in nats, as the verifier alone has it."""
    question: str
    """Whose answer that is."""
    position: int
    """Of the answer's token."""

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON, which has no infinity: None."""
        finite = self.largest_gap if math.isfinite(self.largest_gap) else None
        return {**asdict(self), "largest_gap": finite}


def identical(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return, for each head, how many greedy outputs equal those without one, and of how many."""
    greedy = greedy_outputs(runs)
    plain = greedy.get("none", {})  # empty if temperature 0 is not among those measured
    return {
        head: [sum(outputs[key] == plain[key] for key in plain), len(plain)]
        for head, outputs in greedy.items()
        if head != "none"
    }


def greedy_outputs(runs: Sequence[Mapping[str, Any]]) -> dict[str, Outputs]:
    """Return the outputs at temperature 0 by head."""
    return {run["head"]: run["outputs"] for run in runs if run["temperature"] == 0}


def parted(
    prompts: Mapping[str, Sequence[int]], plain: Outputs, other: Outputs, likelihood: Likelihood
) -> Parted | None:
    """Return where answers part, and how decided the verifier is there; None if they never do."""
    gaps = []
    for key in plain:
        pairs = enumerate(zip_longest(plain[key], other[key]))
        place = next((at for at, (one, another) in pairs if one != another), None)
        if place is None:
            continue
        before = [*prompts[key], *plain[key][:place]]
        tokens = [answer[place : place + 1] for answer in (plain[key], other[key])]
        if all(tokens):
            one, another = (likelihood([*before, *token]) for token in tokens)
            gap = abs(one - another)
            gaps.append((gap if math.isfinite(gap) else math.inf, key, place))
        else:  # one answer ends where the other goes on, which no token explains
            gaps.append((math.inf, key, place))
    return Parted(len(gaps), *max(gaps)) if gaps else None


def require_equal(
    same: Mapping[str, Sequence[int]],
    parted_by_head: Mapping[str, Parted],
    dtype: str,
    console: Console,
) -> None:
    """Tell how many answers are equal; raise if one parts where the verifier is decided."""
    for head, (equal, total) in same.items():
        text = f"greedy output with the {head} head equals the output without it: {equal} of"
        where = parted_by_head.get(head)
        if where is None:
            console.print(f"{text} {total}", highlight=False)
            continue
        told = f"where the verifier finds two tokens {where.largest_gap:.3f} nats apart or less"
        console.print(f"{text} {total}; the others part {told}", highlight=False)
        rounding = UNDECIDED.get(dtype, 0.0)
        if not where.largest_gap <= rounding:
            raise CheckFailed(
                f"{where.answers} of {total} greedy answers differ with the {head} head, and "
                f"{where.question!r} parts at token {where.position}, where the verifier itself "
                f"is decided: by {where.largest_gap:.2f} nats ({rounding:g} can be rounding in "
                f"{dtype})",
                remedy="serve in float32 (evaluate.dtype); if they still differ, speculative "
                "decoding is broken here",
            )

"""Whose text a loss mask covers, from the token ids."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from truetap.pipeline.foreign.masks import MaskJudge

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch

# <|im_start|> 1, <|im_end|> 2, line break 3, user 4, assistant 5
USER, ASSISTANT, END = [1, 4, 3], [1, 5, 3], [2, 3]
TURNS = [
    *USER,
    20,
    21,
    *END,
    *ASSISTANT,
    30,
    31,
    32,
    *END,
    *USER,
    22,
    *END,
    *ASSISTANT,
    33,
    34,
    *END,
]
FIRST, SECOND = range(10, 13), range(24, 26)


@pytest.fixture(scope="module")
def judge(verifier: Path) -> MaskJudge:
    found = MaskJudge(verifier)
    assert found.why_not is None
    return found


def codes(judge: MaskJudge, covered: Any, ids: list[int] = TURNS, **more: Any) -> list[str] | None:
    mask = np.zeros(len(ids), dtype=np.int64)
    mask[list(covered)] = 1
    found = judge.judge(np.array(ids), mask, **more)
    return None if found is None else [problem.code for problem in found]


@pytest.mark.parametrize(
    "covered",
    [
        [*FIRST, *SECOND],
        [*FIRST, 13, 14, *SECOND, 26, 27],
        [*SECOND],
        [*SECOND, 26],
        [*FIRST],
    ],
    ids=["text", "with ends", "last turn only", "its end token", "first turn only"],
)
def test_all_of_the_assistant_s_text_and_nothing_else(judge: MaskJudge, covered: list[int]) -> None:
    assert codes(judge, covered) == []


@pytest.mark.parametrize(
    ("covered", "expected"),
    [
        ([9, *FIRST, *SECOND], ["mask_other"]),
        ([*FIRST, *SECOND, 3], ["mask_other"]),
        ([*range(3, 7)], ["mask_other"]),
        ([*FIRST[:-1], *SECOND], ["mask_missing"]),
        ([*FIRST[1:], *SECOND], ["mask_missing"]),
        ([9, *FIRST[:-1]], ["mask_missing", "mask_other"]),
        (range(len(TURNS)), ["mask_other"]),
    ],
    ids=[
        "one early",
        "a token of the user",
        "the user's",
        "one short",
        "one late",
        "shifted",
        "all",
    ],
)
def test_anything_else(judge: MaskJudge, covered: Any, expected: list[str]) -> None:
    assert codes(judge, covered) == expected


def test_an_answer_that_was_cut_off(judge: MaskJudge) -> None:
    ids = [*USER, 20, *END, *ASSISTANT, 30, 31]
    assert codes(judge, [9, 10], ids) == []
    assert codes(judge, [9], ids) == ["mask_missing"]


def test_tokens_without_a_turn_are_not_judged(judge: MaskJudge) -> None:
    assert codes(judge, [2, 3], list(range(20, 40))) is None


def test_another_mask_s_length_is_not_judged(judge: MaskJudge) -> None:
    assert judge.judge(np.array(TURNS), np.ones(3, dtype=np.int64)) is None


def test_the_conversation_beside_the_tokens(judge: MaskJudge) -> None:
    asked = {"role": "user", "content": "anything"}
    right = [asked, {"role": "assistant", "content": "w25 w26"}]
    other = [asked, {"role": "assistant", "content": "w7 w8 w9"}]
    assert codes(judge, [*SECOND], messages=right) == []
    assert codes(judge, [*SECOND], messages=other) == ["messages"]


def test_a_verifier_without_a_tokenizer_or_template(paper_verifier: Path) -> None:
    judge = MaskJudge(paper_verifier)
    assert judge.why_not is not None
    assert "tokenizer" in judge.why_not
    assert codes(judge, [*FIRST]) is None


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "marks no assistant's turn"),
        (
            "{% for m in messages %}{{ m['role'] + '\n' + m['content'] + '\n' }}{% endfor %}",
            "ends a turn with no token of its own",
        ),
        ("{{ raise_exception('no') }}", "cannot be rendered"),
    ],
)
def test_templates_that_tell_nothing(
    template: str, why: str, verifier: Path, tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(verifier, tmp_path / "v")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "v" / name).unlink(missing_ok=True)
    kept = json.loads((verifier / "tokenizer_config.json").read_text())
    (tmp_path / "v" / "tokenizer_config.json").write_text(
        json.dumps(kept | {"chat_template": template})
    )
    judge = MaskJudge(tmp_path / "v")
    assert judge.why_not is not None
    assert why in judge.why_not

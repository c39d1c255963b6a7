"""From what slots hold to findings, verdict and exit code."""

from __future__ import annotations

import ast
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from truetap.harness.verifier import VerifierFacts
from truetap.pipeline.foreign import judgement, values
from truetap.pipeline.foreign.judgement import Finding, SetSlot
from truetap.pipeline.foreign.producers.modelopt import ModelOptimizer
from truetap.pipeline.foreign.producers.speculators import Speculators
from truetap.pipeline.foreign.values import Slot

FACTS = VerifierFacts("v", 12, 32, 512, 1024, {})
NORMED = "boundary 12 after the final norm"


def slot(holds: str, **changes: Any) -> Slot:
    plain = Slot(
        holds=holds,
        distance=0.01,
        runner_up="boundary 0",
        margin=20.0,
        noise=1.0,
        bad_rows=0,
        rows=30,
        instead="",
        coarse=False,
    )
    return replace(plain, **changes)


def held(*names: str | None) -> list[SetSlot]:
    return [SetSlot(name, 5 if name else 0, 0.01, 20.0) for name in names]


RIGHT = ("boundary 2", "boundary 6", "boundary 9", "boundary 12")


def test_most_files_say_what_a_set_holds() -> None:
    readings = {f"f{i}": [slot("boundary 2"), slot("boundary 6")] for i in range(3)}
    readings["f3"] = [slot("boundary 3"), slot("boundary 6", margin=1.2)]
    readings["f4"] = [slot("boundary 3"), slot("boundary 6")]
    assert [(s.holds, s.files) for s in judgement.set_slots(readings)] == [
        ("boundary 2", 3),
        ("boundary 6", 4),
    ]
    readings["f0"] = [slot("boundary 4"), slot("boundary 6")]
    assert judgement.set_slots(readings)[0].holds is None, "two of five are not most"
    assert judgement.set_slots({}) == []


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (RIGHT, "slots: boundary 2, 6, 9, 12"),
        ((*RIGHT[:3], NORMED), "slots: boundary 2, 6, 9, 12 after the final norm"),
        (("boundary 2", None), "slots: boundary 2, nothing that can be told"),
        ((), "no file could be compared by value"),
    ],
)
def test_what_the_set_holds_in_one_sentence(names: tuple[str | None, ...], sentence: str) -> None:
    assert judgement.says(held(*names)) == sentence


@pytest.mark.parametrize(
    ("names", "codes"),
    [
        (RIGHT, []),
        ((*RIGHT[:3], NORMED), ["post_norm"]),
        ((*RIGHT[:3], "boundary 11"), ["wrong_boundary"]),
        (("boundary 2", "boundary 2", *RIGHT[2:]), ["equal_slots"]),
        ((NORMED, *RIGHT[1:]), ["post_norm"]),
        (("boundary 2 of the next token", *RIGHT[1:]), ["shifted"]),
        (("the output of block 2 without the residual", *RIGHT[1:]), ["residual"]),
        ((None, *RIGHT[1:]), ["unclear"]),
    ],
)
def test_faults_of_a_set(names: tuple[str | None, ...], codes: list[str], tmp_path: Any) -> None:
    producer = Speculators(tmp_path, FACTS)
    found = judgement.judge_set(held(*names), producer, None)
    assert [f.code for f in found if f.severity == "error"] == codes


def test_where_the_norm_belongs_is_the_producer_s_matter(tmp_path: Any) -> None:
    producer = ModelOptimizer(tmp_path, FACTS)
    assert judgement.judge_set(held(*RIGHT[:3], NORMED), producer, None) == []
    (found,) = judgement.judge_set(held(*RIGHT), producer, None)
    assert found.code == "pre_norm"


def test_what_the_user_believes(tmp_path: Any) -> None:
    producer = Speculators(tmp_path, FACTS)
    assert judgement.judge_set(held(*RIGHT), producer, (2, 6, 9, 12)) == []
    (found,) = judgement.judge_set(held(*RIGHT), producer, (1, 5, 8, 12))
    assert found.code == "wrong_boundary"
    assert "--boundaries says 1, 5, 8, 12; the slots hold 2, 6, 9, 12" in found.text
    (found,) = judgement.judge_set(held(*RIGHT), producer, (2, 6, 12))
    assert found.severity == "error"


def test_another_set_than_the_usual_is_mentioned_and_no_fault(tmp_path: Any) -> None:
    names = ("boundary 1", "boundary 5", "boundary 8", "boundary 12")
    (found,) = judgement.judge_set(held(*names), Speculators(tmp_path, FACTS), None)
    assert (found.code, found.severity) == ("boundaries", "note")


@pytest.mark.parametrize(
    ("own", "code"),
    [
        (slot("boundary 2"), None),
        (slot("boundary 3"), "wrong_boundary"),
        (slot("boundary 2 of the token before"), "shifted"),
        (slot(NORMED), "post_norm"),
        (slot("boundary 2", margin=1.1), "unclear"),
        (slot("boundary 2", margin=1.1, instead="boundary 2 of its own tokens, 3 rows"), "shifted"),
        (slot("boundary 2", margin=1.1, instead="boundary 2 of f7"), "other_request"),
        (slot("boundary 2", bad_rows=3), "some_rows"),
        (slot("boundary 2", bad_rows=3, instead="boundary 2 of f7"), "other_request"),
    ],
)
def test_a_file_that_differs_from_the_set(own: Slot, code: str | None) -> None:
    found = judgement.judge_files(held("boundary 2"), {"f": [own]})
    assert list(found) == ([] if code is None else [code])


def test_precision_is_mentioned_and_no_fault() -> None:
    def codes(own: Slot, dtype: str = "bfloat16") -> list[str]:
        found = judgement.precision_notes({"f": [own]}, dtype, "bfloat16")
        assert all(f.severity == "note" for f in found)
        return [f.code for f in found]

    assert codes(slot("boundary 2")) == []
    assert codes(slot("boundary 2"), "float16") == ["dtype"]
    assert codes(slot("boundary 2", coarse=True)) == ["coarse"]
    assert codes(slot("boundary 2", noise=3.0)) == ["noise"]


def test_the_verdict() -> None:
    note, fault = Finding("dtype", ""), Finding("zeros", "")
    assert judgement.verdict([], 3) == ("right", 0)
    assert judgement.verdict([note], 3) == ("right", 0)
    assert judgement.verdict([note, fault], 3) == ("wrong", 1)
    assert judgement.verdict([note], 0) == ("not judged", 3)
    assert judgement.verdict([fault], 0) == ("wrong", 1)
    assert judgement.verdict([fault, Finding("digest", "")], 3) == ("corrupt", 4)


def test_every_code_has_a_title() -> None:
    """A problem without one would end an audit of hours with a KeyError."""
    codes = {
        call.args[0].value
        for path in Path(judgement.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in ("Problem", "BadFile")
        and isinstance(call.args[0], ast.Constant)
    }
    assert {"nan", "keys", "mask_other"} <= codes
    assert codes <= set(judgement.TITLES)
    assert not judgement.NOTES & set(judgement.TITLES)


def test_a_long_list_is_cut_in_the_text_only() -> None:
    files = [{"file": f"f{i:02d}", "why": "all states are zero"} for i in range(14)]
    report = {
        "path": "data",
        "producer": "modelopt",
        "files": {"found": 20, "bad": 14},
        "verifier": {"name": "v", "num_blocks": 12},
        "sample": {"compared": 2},
        "totals": {"samples": 20},
        "says": "slots: boundary 2",
        "slots": [{"slot": 0, "holds": "boundary 2", "files": 2, "distance": 0.01, "margin": 20.0}],
        "loss_mask": {"says": "52% of all tokens"},
        "findings": [{"code": "zeros", "severity": "error", "text": "zeros", "files": files}],
        "verdict": "wrong",
    }
    console = Console(file=io.StringIO(), width=200)
    judgement.print_report(report, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "f09" in text
    assert "f10" not in text
    assert "... and 4 more: see --report" in text


def test_a_file_s_name_cannot_write_a_verdict() -> None:
    said = judgement.printable("x\n\x1b[1Averdict: right\udcff é .pt")
    assert said == "x\\n\\x1b[1Averdict: right\\udcff é .pt"


def test_samples_are_grouped_by_what_their_references_take() -> None:
    names = [("a", 10), ("b", 10), ("c", 50), ("d", 5)]
    assert values.chunks(names, 10, 200) == [["a", "b"], ["c"], ["d"]]
    assert values.chunks([], 10, 200) == []


def test_distances_of_every_row_to_every_row() -> None:
    drawn = np.random.default_rng(0)
    asked, state = drawn.normal(size=(3, 8)), drawn.normal(size=(5, 8))
    direct = np.linalg.norm(asked[:, None] - state, axis=-1) / np.linalg.norm(state, axis=-1)
    found = values._all_distances(asked.astype(np.float32), state.astype(np.float32))
    assert np.allclose(found, direct, rtol=1e-4)

"""Every shape of a row that is read, and a malformed twin of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from truetap.harness.errors import UsageError
from truetap.pipeline import dialogue_rows, dialogues
from truetap.pipeline.dialogues import Dialogue, Message

USER, GIVEN, SYSTEM = Message("user", "Why?"), Message("assistant", "So."), Message("system", "Be.")
SHAREGPT = {
    "id": "c",
    "conversations": [
        {"from": "system", "value": "Be."},
        {"from": "human", "value": "Why?"},
        {"from": "gpt", "value": "So."},
    ],
}
CHAT = {"id": "c", "messages": [m.as_dict() for m in (SYSTEM, USER, GIVEN)]}
PARTS = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}]}
WELL: dict[str, tuple[dict[str, Any], tuple[Message, ...], str]] = {
    "text": ({"id": "q", "text": "Why?"}, (USER,), "prompts (text)"),
    "prompt": ({"prompt": "Why?", "other": 3}, (USER,), "prompts (prompt)"),
    "question": ({"question": "Why?", "system": "Be."}, (SYSTEM, USER), "prompts (question)"),
    "sharegpt": (SHAREGPT, (SYSTEM, USER, GIVEN), "ShareGPT"),
    "messages": (CHAT, (SYSTEM, USER, GIVEN), "messages"),
    "parts": (PARTS, (USER,), "messages"),
    "turns": (
        {"question_id": 81, "category": "x", "turns": ["Why?", "How?"]},
        (USER, Message("user", "How?")),
        "Spec-Bench",
    ),
    "alpaca": ({"instruction": "Why?", "input": "", "output": "So."}, (USER, GIVEN), "Alpaca"),
    "alpaca input": (
        {"instruction": "Why?", "input": "This.", "output": ""},
        (Message("user", "Why?\n\nThis."),),
        "Alpaca",
    ),
}
MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"text": 5}, "lacks a text under 'text'"),
    "prompt": ({"prompt": "  "}, "lacks a text under 'prompt'"),
    "question": ({"question": "Why?", "system": 5}, "lacks a text under 'system'"),
    "sharegpt": ({"conversations": [{"from": "human"}]}, "has a message 1 without a text"),
    "messages": ({"messages": [{"content": "Why?"}]}, "has a message 1 without 'role'"),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "has a message 1 without a text",
    ),
    "turns": ({"turns": ["Why?", 5]}, "has no list of texts under 'turns'"),
    "alpaca": ({"instruction": ["Why?"], "output": "So."}, "lacks a text under 'instruction'"),
    "alpaca input": ({"instruction": "Why?", "input": {}}, "lacks a text under 'input'"),
}


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", WELL)
def test_each_shape_is_read_and_said(tmp_path: Path, name: str) -> None:
    row, messages, shape = WELL[name]
    told: list[str] = []
    source = written(tmp_path / "rows.jsonl", [row])
    (read,) = dialogues.read(source, say=told.append)
    assert read.messages == messages
    assert told == [f"{source}: rows of the shape {shape}"]


@pytest.mark.parametrize("name", MALFORMED)
def test_its_malformed_twin_is_named_by_file_and_line(tmp_path: Path, name: str) -> None:
    row, said = MALFORMED[name]
    source = written(tmp_path / "rows.jsonl", [WELL[name][0], row])
    with pytest.raises(UsageError) as caught:
        list(dialogues.read(source))
    assert str(caught.value) == f"line 2 of {source} {said}"
    assert caught.value.remedy.startswith("each row is like {")


def test_a_row_of_another_shape_is_named(tmp_path: Path) -> None:
    source = written(tmp_path / "rows.jsonl", [WELL["text"][0], CHAT])
    with pytest.raises(UsageError, match=r"line 2 of .* has the shape messages; the first row has"):
        list(dialogues.read(source))
    source = written(tmp_path / "rows.jsonl", [CHAT, {"id": "b"}])
    with pytest.raises(UsageError, match=r"line 2 of .* lacks 'messages'; the first row has"):
        list(dialogues.read(source))


@pytest.mark.parametrize("row", [{"id": "a"}, ["a", "Why?"], "Why?", 5, None])
def test_a_first_row_of_no_shape_is_refused_with_all_that_are_known(
    tmp_path: Path, row: object
) -> None:
    source = written(tmp_path / "rows.jsonl", [row])
    with pytest.raises(UsageError, match=r"line 1 of .* has none of the shapes") as caught:
        list(dialogues.read(source))
    assert all(shape.needs in caught.value.remedy for shape in dialogues.SHAPES)


def test_ids_are_given_ones_or_follow_from_the_content(tmp_path: Path) -> None:
    rows = [{"id": "a", "text": "Why?"}, {"id": 7, "text": "Why?"}, {"text": "Why?"}]
    source = written(tmp_path / "one.jsonl", rows)
    first = [d.id for d in dialogues.read(source)]
    moved = written(tmp_path / "two.jsonl", [{"text": "How?"}, {"text": "Why?"}])
    assert first == ["a", "7", [d.id for d in dialogues.read(moved)][1]]
    with pytest.raises(UsageError, match="an 'id' that is neither text nor a number"):
        list(dialogues.read(written(source, [{"id": {}, "text": "Why?"}])))


SAME = [{"id": f"q{n}", "text": f"What is {n}?"} for n in range(600)]


def test_an_array_and_lines_give_the_same(tmp_path: Path) -> None:
    """A .json file is often one array, and often lines all the same."""
    lines = written(tmp_path / "a.jsonl", SAME)
    array = tmp_path / "b.json"
    array.write_text(json.dumps(SAME, indent=1))
    disguised = written(tmp_path / "c.json", SAME)
    assert list(dialogues.read(lines)) == list(dialogues.read(array))
    assert list(dialogues.read(lines)) == list(dialogues.read(disguised))
    array.write_text(json.dumps([SAME[0], {"id": "b"}]))
    with pytest.raises(UsageError, match=r"row 2 of .*b\.json lacks 'text'"):
        list(dialogues.read(array))
    array.write_text(json.dumps(SAME)[:-4])
    with pytest.raises(UsageError, match=r"b\.json is not JSON: "):
        list(dialogues.read(array))


def test_lines_end_where_json_lines_end(tmp_path: Path) -> None:
    row = {"text": "one\u2028two\x85three"}
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps(row, ensure_ascii=False) + "\n\n" + json.dumps(row), "utf-8")
    assert [where.split()[1] for where, _ in dialogue_rows.read(source)] == ["1", "3"]


def test_lines_are_streamed(tmp_path: Path) -> None:
    """What comes after the rows that are needed is not even parsed."""
    source = written(tmp_path / "a.jsonl", SAME)
    with source.open("a") as file:
        file.write("no JSON\n")
    rows = dialogues.read(source)
    assert [next(rows).id for _ in range(600)] == [row["id"] for row in SAME]
    with pytest.raises(UsageError, match=r"line 601 of .* is not JSON"):
        next(rows)


def test_parquet_gives_the_same(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist(SAME), path)
    assert list(dialogues.read(path)) == list(dialogues.read(written(tmp_path / "a.jsonl", SAME)))
    parquet.write_table(pa.Table.from_pylist([CHAT, {"id": "d", "messages": None}]), path)
    with pytest.raises(UsageError, match=r"row 2 of .*a\.parquet lacks 'messages'"):
        list(dialogues.read(path))
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(UsageError, match=r"a\.parquet, which cannot be read: "):
        list(dialogues.read(path))


@pytest.mark.torch
def test_a_saved_dataset_and_the_hubs_give_the_same(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "hub").mkdir()
    wanted = list(dialogues.read(written(tmp_path / "hub" / "train.jsonl", SAME)))
    made = datasets.Dataset.from_list(SAME)
    made.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train_sft": made}).save_to_disk(tmp_path / "splits")
    assert list(dialogues.read(tmp_path / "plain")) == wanted
    assert list(dialogues.read(tmp_path / "splits", "train_sft")) == wanted
    # A folder stands in for a repository: the library treats both alike.
    assert list(dialogues.read(Path(f"hub:{tmp_path / 'hub'}"))) == wanted
    with pytest.raises(UsageError, match="has no split 'train'") as caught:
        list(dialogues.read(tmp_path / "splits"))
    assert "train_sft" in caught.value.remedy
    with pytest.raises(UsageError, match="has no split 'test'"):
        list(dialogues.read(Path(f"hub:{tmp_path / 'hub'}"), "test"))
    for absent in (tmp_path, Path(f"hub:{tmp_path / 'absent'}")):
        with pytest.raises(UsageError, match=r"data\.questions names .* cannot be ") as caught:
            list(dialogues.read(absent))
        assert "\n" not in str(caught.value)


def of(*roles: str) -> Dialogue:
    return Dialogue("d", tuple(Message(role, f"{role} {n}") for n, role in enumerate(roles)))


S, U, A = "system", "user", "assistant"


@pytest.mark.parametrize(
    ("dialogue", "regenerate", "given"),
    [
        (of(U), None, "no answer given"),
        (of(S, U, A, U), None, None),
        (of(U, A, U, A), None, None),
        (of(U, U), None, "two turns of one side in a row"),
        (of(U, A, A), "two turns of one side in a row", "two turns of one side in a row"),
        (of(A, U, A), "no user's turn at the beginning", "no user's turn at the beginning"),
        (of(S), "no user's turn at the beginning", "no user's turn at the beginning"),
        (of(), "no user's turn at the beginning", "no user's turn at the beginning"),
        (of(U, "tool", A), *["a role other than user and assistant"] * 2),
        (of(U, S, U), *["a role other than user and assistant"] * 2),
        (Dialogue("d", (USER, Message(A, " "))), None, "an empty message"),
        (Dialogue("d", (Message(U, "a\ud83d"), GIVEN)), *["half a character"] * 2),
        (Dialogue("d", (Message(U, " "), GIVEN)), "an empty message", "an empty message"),
    ],
)
def test_what_no_verifier_can_be_asked_is_unfit(
    dialogue: Dialogue, regenerate: str | None, given: str | None
) -> None:
    assert dialogues.why_unfit(dialogue, "regenerate") == regenerate
    assert dialogues.why_unfit(dialogue, "given") == given


def test_what_is_used_of_a_dialogue() -> None:
    whole = of(S, U, A, U)
    assert [m.role for m in dialogues.to_use(whole, "regenerate").messages] == [S, U, U]
    assert [m.role for m in dialogues.to_use(whole, "given").messages] == [S, U, A]

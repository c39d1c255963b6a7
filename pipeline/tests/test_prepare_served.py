"""Conversations answered by a server: the same as an engine's, kept on the way, and told of."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from truetap.harness.errors import CheckFailed, UsageError
from truetap.pipeline import chat, prepare, run_folder
from truetap.pipeline.config import Capture, Data, RunConfig, Verifier
from truetap.pipeline.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

pytestmark = pytest.mark.torch


@pytest.fixture
def tokenizer(served: Any, trained: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The trained tokenizer, on both sides; the server answers with the question's last word."""
    monkeypatch.setattr(chat, "load_tokenizer", lambda _: trained)
    monkeypatch.setattr(prepare, "VllmEngine", None)  # none may be started

    def answer(ids: list[int]) -> tuple[list[int], str]:
        text = f"the answer {trained.decode(ids).split('<|im_end|>')[-2].split()[-1]}"
        return trained(text + "<|im_end|>")["input_ids"], text

    served.answer = answer
    served.render = lambda messages: list(
        trained.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    )
    return trained


@pytest.fixture
def model(paper_verifier: Path, tmp_path: Path) -> Path:
    """A verifier that has all of the tokenizer's tokens."""
    directory = tmp_path / "paper"
    shutil.copytree(paper_verifier, directory)
    config = json.loads((directory / "config.json").read_text()) | {"vocab_size": 1500}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


ROWS = [
    {"id": f"d{n}", "turns": [f"What is {n} in turn {turn}?" for turn in range(1 + n % 3)]}
    for n in range(12)
]


def config_of(tmp_path: Path, url: str, **data: Any) -> RunConfig:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings = {"train": 8, "validation": 2, "heldout": 2, "max_answer_tokens": 20} | data
    return RunConfig(
        output=tmp_path / "out",
        verifier=Verifier(directory=tmp_path),
        capture=Capture(max_model_len=512),
        data=Data(questions=source, server=url, **settings),
    )


def prepared(config: RunConfig, model: Path, console: Console) -> dict[str, dict[str, Any]]:
    folder = RunFolder(config.output)
    prepare.prepare(config, folder, model, console)
    return {row["id"]: row for row in run_folder.read_lines(folder.conversations)}


def test_each_turn_is_what_the_server_saw_and_said(
    tmp_path: Path, model: Path, served: Any, tokenizer: Any, console: Console
) -> None:
    rows = prepared(config_of(tmp_path, served.url, temperature=0.0), model, console)
    assert sorted(rows) == sorted(f"d{n}" for n in range(2, 12))
    asked = [body["prompt"] for body in served.asked[1:]]  # the first one was the examination
    assert len(asked) == sum(len(row["turns"]) for row in ROWS[2:])
    for row in rows.values():
        said = row.get("messages") or [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]
        for position in (n for n, m in enumerate(said) if m["role"] == "assistant"):
            assert served.render(said[:position]) in asked
        prompt = served.render(said[:-1])
        ids, _ = served.answer(prompt)
        assert row["token_ids"] == [*prompt, *ids]
        learnt = [tokenizer.decode(row["token_ids"][a:b]) for a, b in row.get("masked", [])]
        if learnt:
            answers = [m["content"] for m in said if m["role"] == "assistant"]
            assert learnt == [f"{text}<|im_end|>" for text in answers]
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "answers 10 questions as tiny; its rendering of chats is equal to ours" in shown
    assert "answers: 10 of 10" in shown


@pytest.mark.usefixtures("tokenizer")
def test_the_card_tells_the_server_and_what_it_cannot_show(
    tmp_path: Path, model: Path, served: Any, console: Console
) -> None:
    config = config_of(tmp_path, served.url)
    prepared(config, model, console)
    card = (config.output / "README.md").read_text()
    assert "- Answers: by paper behind a server, at temperature 0.7" in card
    assert f"- {served.url}, version 0.32.0: model tiny (from org/Tiny)" in card
    assert "rendering of chats: equal to ours for 4 of this run's chats" in card
    assert "NOT proven: that its weights are those of paper" in card
    served.server_close()
    prepared(config, model, console)  # all is there: nobody is asked
    assert (config.output / "README.md").read_text() == card
    made = run_folder.read_json(config.output / "made-from.json")["data"]
    assert made["answered_by"] == "a server"
    assert "server" not in made
    alone = Data(**config.data.model_dump(exclude_unset=True, exclude={"server"}))
    with pytest.raises(UsageError, match="answered_by") as caught:
        prepared(config.model_copy(update={"data": alone}), model, console)
    assert "another output folder" in caught.value.remedy


@pytest.mark.usefixtures("tokenizer")
def test_answers_that_came_before_a_failure_are_not_asked_for_again(
    tmp_path: Path, model: Path, served: Any, console: Console
) -> None:
    """The server goes in the middle, for good, and comes back at another address."""
    counted = itertools.count(1)

    def going(reply: dict[str, Any]) -> dict[str, Any]:
        if next(counted) == 6:
            served.faults = deque(["404"])
        return reply

    served.change = going
    config = config_of(tmp_path, served.url, server_requests=1)
    with pytest.raises(UsageError, match="refuses with status 404"):
        prepared(config, model, console)
    kept = run_folder.read_lines(RunFolder(config.output).conversations)
    assert 0 < len(kept) < 10
    served.change = lambda reply: reply
    served.models[0]["root"] = "org/Other"
    with pytest.raises(UsageError, match=r"answers of 'tiny' \(from 'org/Tiny'\) are kept"):
        prepared(config, model, console)
    served.models[0]["root"] = "org/Tiny"
    served.faults.clear()
    served.asked.clear()
    moved = served.url.replace("127.0.0.1", "localhost")
    rows = prepared(config_of(tmp_path, moved), model, console)
    assert list(rows.values())[: len(kept)] == kept
    assert len(rows) == 10
    names = {row["id"] for row in kept}
    turns = sum(len(row["turns"]) for row in ROWS[2:] if row["id"] not in names)
    assert len(served.asked) == 1 + turns
    card = (config.output / "README.md").read_text()
    assert all(f"- {url}, version" in card for url in (config.data.server, moved))


def test_ids_that_are_another_text_are_not_learnt(
    tmp_path: Path, model: Path, served: Any, tokenizer: Any, console: Console
) -> None:
    right = served.answer
    served.answer = lambda ids: (tokenizer("the question<|im_end|>")["input_ids"], right(ids)[1])
    with pytest.raises(CheckFailed, match="the masked text of conversation 'd"):
        prepared(config_of(tmp_path, served.url), model, console)

"""Dialogues of several turns and answers as given, from the file to ``conversations.jsonl``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from truetap.harness.engine import Finished, Prompt
from truetap.harness.errors import CheckFailed, UsageError
from truetap.pipeline import chat, prepare, run_folder, run_records, selection
from truetap.pipeline.config import Capture, Data, RunConfig, Verifier
from truetap.pipeline.dialogues import Message
from truetap.pipeline.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

pytestmark = pytest.mark.torch


class FakeEngine:
    """Answers with a number and the question's last word; takes two requests at a time."""

    tokenizer: Any
    cut: frozenset[str] = frozenset()
    """Keys whose first answer reaches the limit of its length."""
    silent: frozenset[str] = frozenset()
    """Keys that are answered with nothing."""
    fails_after: int | None = None
    prompts: list[Prompt]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.answers: Counter[str] = Counter()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, prompts: Iterable[Prompt], *, in_flight: int) -> Iterator[Finished]:
        assert in_flight > 2
        waiting, running, exhausted = iter(prompts), list[Prompt](), False
        while True:
            while not exhausted and len(running) < 2:
                if (prompt := next(waiting, None)) is None:
                    exhausted = True
                else:
                    running.append(prompt)
            if not running:
                return
            yield self._finished(running.pop(0))

    def _finished(self, prompt: Prompt) -> Finished:
        if self.fails_after is not None and self.answers.total() >= self.fails_after:
            raise KeyboardInterrupt
        self.prompts.append(prompt)
        self.answers[prompt.key] += 1
        turn = self.answers[prompt.key]
        last = self.tokenizer.decode(list(prompt.token_ids)).split("<|im_end|>")[-2].split()[-1]
        text = "" if prompt.key in self.silent else f"the answer {turn} {last}"
        cut = prompt.key in self.cut and turn == 1
        ids = self.tokenizer(text + ("" if cut else "<|im_end|>"))["input_ids"]
        return Finished(prompt.key, ids, text, "length" if cut else "stop", None, None, None)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, trained: Any) -> type[FakeEngine]:
    """A fake engine in place of vLLM, with the trained tokenizer for any verifier."""

    class Engine(FakeEngine):
        tokenizer = trained
        prompts: list[Prompt] = []  # noqa: RUF012

    monkeypatch.setattr(prepare, "VllmEngine", Engine)
    monkeypatch.setattr(chat, "load_tokenizer", lambda _: Engine.tokenizer)
    return Engine


SYSTEM = {"role": "system", "content": "Be brief."}


def row(number: int, turns: int, *, system: bool = False) -> dict[str, Any]:
    said = [SYSTEM] if system else []
    for turn in range(turns):
        said.append({"role": "user", "content": f"What is {number} in turn {turn}?"})
        said.append({"role": "assistant", "content": f"It is {number} in turn {turn}."})
    return {"id": f"d{number}", "messages": said}


ROWS = [row(0, 2), row(1, 1), *(row(n, 3, system=n % 2 == 0) for n in range(2, 7))]


def config_of(tmp_path: Path, rows: list[dict[str, Any]], **data: Any) -> RunConfig:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"train": 4, "validation": 1, "heldout": 2, "max_answer_tokens": 20} | data
    max_model_len = settings.pop("max_model_len", 512)
    return RunConfig(
        output=tmp_path / "out",
        verifier=Verifier(directory=tmp_path),
        capture=Capture(max_model_len=max_model_len),
        data=Data(questions=source, **settings),
    )


def prepared(
    config: RunConfig, model: Path, console: Console
) -> tuple[dict[str, dict[str, Any]], RunFolder]:
    folder = RunFolder(config.output)
    prepare.prepare(config, folder, model, console)
    return {row["id"]: row for row in run_folder.read_lines(folder.conversations)}, folder


def served(tokenizer: Any, messages: list[dict[str, str]], *, ask: bool) -> list[int]:
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=ask, tokenize=True, return_dict=False
    )
    return list(ids)


def masked_texts(tokenizer: Any, row: dict[str, Any]) -> list[str]:
    return [tokenizer.decode(row["token_ids"][first:end]) for first, end in row["masked"]]


def test_each_turn_is_answered_after_the_verifiers_own_answers(
    tmp_path: Path, paper_verifier: Path, engine: type[FakeEngine], console: Console
) -> None:
    engine.cut = frozenset({"d4"})
    rows, folder = prepared(config_of(tmp_path, ROWS), paper_verifier, console)
    assert sorted(rows) == [f"d{n}" for n in range(2, 7)]
    assert len(engine.prompts) == 15
    for name, row in rows.items():
        asked = [p.token_ids for p in engine.prompts if p.key == name]
        said = [Message(**m) for m in row["messages"]]
        users = [n for n, m in enumerate(said) if m.role == "user"]
        assert [m.content for m in said if m.role == "assistant"] == [
            f"the answer {turn} {turn - 1}?" for turn in (1, 2, 3)
        ]
        for ids, position in zip(asked, users, strict=True):
            assert list(ids) == served(engine.tokenizer, row["messages"][: position + 1], ask=True)
        assert row["token_ids"][: len(asked[-1])] == list(asked[-1])
        ends = ["" if name == "d4" else "<|im_end|>", "<|im_end|>", "<|im_end|>"]
        assert masked_texts(engine.tokenizer, row) == [
            f"the answer {turn} {turn - 1}?{end}" for turn, end in zip((1, 2, 3), ends, strict=True)
        ]
        assert row["messages"][0] == (SYSTEM if name in {"d2", "d4", "d6"} else said[0].as_dict())
    held = run_folder.read_lines(folder.heldout)
    assert [row["question"] for row in held] == ["What is 0 in turn 0?", "What is 1 in turn 0?"]
    for conversation in prepare.load(folder):
        spans = rows[conversation.id]["masked"]
        wanted = {n for first, end in spans for n in range(first, end)}
        assert {n for n, bit in enumerate(conversation.loss_mask) if bit} == wanted
        assert conversation.prompt_tokens == spans[0][0]
    answered = run_records.load(config_of(tmp_path, ROWS).output)
    assert answered.loss_tokens == sum(sum(c.loss_mask) for c in prepare.load(folder))


def test_an_interruption_loses_what_was_in_flight_and_nothing_else(
    tmp_path: Path, paper_verifier: Path, engine: type[FakeEngine], console: Console
) -> None:
    config = config_of(tmp_path, ROWS)
    engine.fails_after = 8
    with pytest.raises(KeyboardInterrupt):
        prepared(config, paper_verifier, console)
    kept = run_folder.read_lines(RunFolder(config.output).conversations)
    assert 0 < len(kept) < 5
    engine.fails_after = None
    engine.prompts.clear()
    rows, _ = prepared(config, paper_verifier, console)
    assert len(rows) == 5
    assert not {row["id"] for row in kept} & {p.key for p in engine.prompts}
    engine.prompts.clear()
    prepared(config, paper_verifier, console)
    assert not engine.prompts, "what was answered is answered again"


def test_a_dialogue_ends_with_an_empty_answer(
    tmp_path: Path, paper_verifier: Path, engine: type[FakeEngine], console: Console
) -> None:
    engine.silent = frozenset({"d3"})
    rows, folder = prepared(config_of(tmp_path, ROWS), paper_verifier, console)
    assert [p.key for p in engine.prompts].count("d3") == 1
    assert "masked" not in rows["d3"]
    assert rows["d3"]["token_ids"][rows["d3"]["prompt_tokens"] :] == [engine.tokenizer.eos_token_id]
    assert run_folder.read_lines(folder.dropped) == [{"id": "d3", "turns": 2}]
    assert "came after an empty answer" in folder.card.read_text()


def test_answers_as_given_need_no_engine(
    tmp_path: Path, paper_verifier: Path, engine: type[FakeEngine], console: Console
) -> None:
    rows, _ = prepared(config_of(tmp_path, ROWS, answers="given"), paper_verifier, console)
    assert not engine.prompts
    assert len(rows) == 5
    for number, row in ((n, rows[f"d{n}"]) for n in range(2, 7)):
        assert masked_texts(engine.tokenizer, row) == [
            f"It is {number} in turn {t}.<|im_end|>" for t in range(3)
        ]
        assert row["token_ids"] == served(engine.tokenizer, row["messages"], ask=False)


@pytest.mark.usefixtures("engine")
def test_a_row_of_one_turn_is_as_it_was_before_there_were_several(
    tmp_path: Path, paper_verifier: Path, console: Console
) -> None:
    rows, folder = prepared(
        config_of(tmp_path, [{"id": f"q{n}", "text": f"What is {n}?"} for n in range(7)]),
        paper_verifier,
        console,
    )
    keys = ["id", "split", "question", "answer", "token_ids", "prompt_tokens", "finish_reason"]
    assert {tuple(row) for row in rows.values()} == {tuple(keys)}
    made_from = run_folder.read_json(folder.root / "made-from.json")["data"]
    assert not {"part", "answers", "loss_on", "too_long"} & set(made_from)


@pytest.mark.parametrize("answers", ["regenerate", "given"])
def test_the_last_answer_alone_can_be_learnt(
    tmp_path: Path, paper_verifier: Path, engine: type[FakeEngine], console: Console, answers: str
) -> None:
    dropping = copy(engine.tokenizer)
    dropping.chat_template = dropping.chat_template.replace(
        "{{ m['content'] }}",
        "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}",
    )
    engine.tokenizer = dropping
    config = config_of(tmp_path, ROWS, answers=answers)
    if answers == "regenerate":
        with pytest.raises(CheckFailed, match="re-writes earlier turns"):
            prepared(config, paper_verifier, console)
        assert not engine.prompts, "an engine was started for nothing"
    config = config_of(tmp_path, ROWS, answers=answers, loss_on="last_answer")
    folder = RunFolder(tmp_path / "last")
    prepare.prepare(config, folder, paper_verifier, console)
    for conversation in prepare.load(folder):
        bits = zip(conversation.token_ids, conversation.loss_mask, strict=True)
        learnt = dropping.decode([token for token, bit in bits if bit])
        number = conversation.id[1:]
        told = {"regenerate": "the answer 3 2?", "given": f"It is {number} in turn 2."}
        assert learnt == told[answers] + "<|im_end|>"


LONG = [*ROWS[:3], row(3, 9), *ROWS[4:], row(7, 3)]


@pytest.mark.parametrize("answers", ["regenerate", "given"])
def test_too_long_dialogues_are_refused_dropped_or_cut_at_a_turn(
    tmp_path: Path, paper_verifier: Path, engine: type[FakeEngine], console: Console, answers: str
) -> None:
    limits = {"max_model_len": 200, "answers": answers}
    with pytest.raises(UsageError, match="dialogue 'd3' ") as caught:
        prepared(config_of(tmp_path, LONG, **limits), paper_verifier, console)
    assert 'data.too_long = "drop" or "truncate"' in caught.value.remedy
    made = {}
    for policy in ("drop", "truncate"):
        config = config_of(tmp_path, LONG, too_long=policy, **limits)
        folder = RunFolder(tmp_path / policy)
        prepare.prepare(config, folder, paper_verifier, console)
        made[policy] = {row["id"]: row for row in run_folder.read_lines(folder.conversations)}
        assert all(len(c.token_ids) <= 198 for c in prepare.load(folder))
        before = len(engine.prompts)
        prepare.prepare(config, folder, paper_verifier, console)
        assert len(engine.prompts) == before, "a dialogue that was given up is asked again"
        assert ("1 for being too long" in folder.card.read_text()) == (policy == "drop")
        told = "- the last turns of 1 conversations, which would not have fitted"
        assert (told in folder.card.read_text()) == (policy == "truncate")
    assert "d3" not in made["drop"]
    assert "left out: 1 for being too long" in console.file.getvalue()  # type: ignore[attr-defined]
    cut = made["truncate"]["d3"]
    assert 1 < len(cut["masked"]) < 9
    assert len(cut["messages"]) == 2 * len(cut["masked"])
    if answers == "given":
        one_more = LONG[3]["messages"][: len(cut["messages"]) + 2]
        assert len(served(engine.tokenizer, one_more, ask=False)) > 198
    assert made["truncate"]["d4"]["token_ids"] == made["drop"]["d4"]["token_ids"]


def test_what_is_left_out_is_counted_and_told(
    tmp_path: Path, paper_verifier: Path, engine: type[FakeEngine], console: Console
) -> None:
    shared = row(20, 1)
    shared["messages"][1]["content"] = "\n\nIt is."  # joins the template's line break
    again = row(21, 2)
    again["messages"][0]["content"] = ROWS[0]["messages"][0]["content"]
    bad = [
        ROWS[2] | {"id": "twin"},
        ROWS[2] | {"id": "d3"} | {"messages": ROWS[2]["messages"]},
        row(22, 1) | {"id": "d2"},
        again,
        shared,
        {"id": "late", "messages": ROWS[3]["messages"][1:]},
    ]
    config = config_of(tmp_path, [*ROWS[:3], *bad, *ROWS[3:]], answers="given")
    _, folder = prepared(config, paper_verifier, console)
    card = folder.card.read_text()
    for line in (
        "- 2 for being a duplicate",
        "- 1 for an id that another has",
        "- 1 for beginning with a question that is held out",
        f"- 1 for {selection.SHARED}",
        "- 1 for no user's turn at the beginning",
        f"- Source: {config.data.questions}, rows of the shape messages; 13 rows read",
        "- Answers: as the data set gives them",
        "| held out | 2 (first questions only) | | |",
    ):
        assert line in card.splitlines()
    again_text = card
    prepare.prepare(config, folder, paper_verifier, console)
    assert folder.card.read_text() == again_text
    with pytest.raises(UsageError, match=r"7 different .* 8 are needed; left out: 2 for being a"):
        selection.choose(
            config_of(tmp_path, [*ROWS, *bad], answers="given", train=5), engine.tokenizer
        )


@pytest.mark.usefixtures("engine")
def test_the_frequencies_are_those_of_training(
    tmp_path: Path, paper_verifier: Path, console: Console
) -> None:
    _, folder = prepared(config_of(tmp_path, ROWS), paper_verifier, console)
    told = run_folder.read_json(folder.frequencies)
    training = [c for c in prepare.load(folder) if c.split == "train"]
    assert len(training) == 4
    everywhere = Counter(token for c in training for token in c.token_ids)
    learnt = Counter(
        token for c in training for token, bit in zip(c.token_ids, c.loss_mask, strict=True) if bit
    )
    assert told["counts"] == {str(t): [everywhere[t], learnt[t]] for t in everywhere}
    assert (told["tokens"], told["loss_tokens"]) == (everywhere.total(), learnt.total())


def test_settings_that_were_refused_can_be_corrected(
    tmp_path: Path, paper_verifier: Path, engine: type[FakeEngine], console: Console
) -> None:
    with pytest.raises(UsageError, match="has 7 different questions where 8 are needed"):
        prepared(config_of(tmp_path, ROWS, train=5), paper_verifier, console)
    rows, _ = prepared(config_of(tmp_path, ROWS), paper_verifier, console)
    assert len(rows) == 5
    with pytest.raises(UsageError, match="holds results made otherwise: answers"):
        prepared(config_of(tmp_path, ROWS, answers="given"), paper_verifier, console)
    assert len(engine.prompts) == 15


def test_what_is_foreseen_is_an_upper_bound(
    tmp_path: Path, paper_verifier: Path, engine: type[FakeEngine], console: Console
) -> None:
    config = config_of(tmp_path, ROWS)
    folder = RunFolder(config.output)
    foreseen = prepare.longest_lengths(config, folder, paper_verifier)
    given = prepare.longest_lengths(
        config_of(tmp_path, ROWS, answers="given"), folder, paper_verifier
    )
    prepare.prepare(config, folder, paper_verifier, console)
    lengths = {c.id: len(c.token_ids) for c in prepare.load(folder)}
    assert lengths.keys() == foreseen.keys()
    answers = sum(len(engine.tokenizer("the answer 1 0?")["input_ids"]) for _ in range(3))
    for name, length in lengths.items():
        # Each answer at its longest in place of what it was, give or take what stood in for it.
        assert 0 <= foreseen[name] - (length + 3 * 20 - answers) <= 3
    kept, _ = prepared(
        config_of(tmp_path, ROWS, answers="given").model_copy(update={"output": tmp_path / "g"}),
        paper_verifier,
        console,
    )
    assert given == {name: len(row["token_ids"]) for name, row in kept.items()}


def test_docstrings_have_no_answers_to_keep() -> None:
    with pytest.raises(ValueError, match="docstrings have no answers"):
        Data(answers="given")

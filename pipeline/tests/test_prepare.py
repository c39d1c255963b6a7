from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from truetap.harness.engine import Finished
from truetap.harness.errors import CheckFailed, IntegrityError, UsageError
from truetap.pipeline import answering, chat, prepare, selection
from truetap.pipeline.config import Capture, Data, RunConfig, Verifier
from truetap.pipeline.prepare import Conversation
from truetap.pipeline.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

# As in ChatML: the prompt ends with a line break, which is the only text before the answer.
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Any:
    """A tokenizer with a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|start|>", "<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = byte_tokenizer()
    made.chat_template = TEMPLATE
    return made


def ids_of(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def config_with(questions: Path | None, *, max_model_len: int = 512, **data: Any) -> RunConfig:
    return RunConfig(
        output=Path("out"),
        verifier=Verifier(directory=Path("verifier")),
        capture=Capture(max_model_len=max_model_len),
        data=Data(**{"train": 4, "validation": 2, "heldout": 3, "questions": questions} | data),
    )


def write_questions(path: Path, texts: Sequence[str]) -> Path:
    rows = [{"id": f"q{number}", "text": text} for number, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Words:
    """A tokenizer of words, for what needs no real one."""

    bos_token_id = None

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return [len(word) for m in messages for word in m["content"].split()]


def texts_of(config: RunConfig) -> list[tuple[str, str]]:
    return [(c.id, c.text) for c in selection.choose(config, Words()).chosen]


NINE = [f"What is {number}?" for number in range(9)]


@pytest.mark.parametrize(
    ("tokens", "prompt", "mask"), [(5, 2, b"\0\0\1\1\1"), (3, 3, b"\0\0\0"), (2, 0, b"\1\1")]
)
def test_the_loss_mask_covers_the_answer(tokens: int, prompt: int, mask: bytes) -> None:
    assert Conversation("c", "train", tuple(range(tokens)), prompt).loss_mask == mask


@pytest.mark.torch
@pytest.mark.parametrize("ending", ["<|end|>", "", "\n<|end|>"])
@pytest.mark.parametrize("answer", ["A list holds items.", " With a space.", "\nBelow", "å 語"])
def test_only_the_exact_mask_passes(tokenizer: Any, answer: str, ending: str) -> None:
    """One token early takes in only the template's line break, which looks like nothing."""
    prompt = ids_of(tokenizer, "<|start|>user\nWhat?<|end|>\n<|start|>assistant\n")
    right = Conversation(
        "c7", "train", prompt + ids_of(tokenizer, answer + ending), prompt_tokens=len(prompt)
    )
    prepare.require_masked_text(right, answer, tokenizer)
    for shift in (-2, -1, 2 if answer[0] == " " else 1):
        wrong = dataclasses.replace(right, prompt_tokens=len(prompt) + shift)
        with pytest.raises(CheckFailed, match="the masked text of conversation 'c7' is "):
            prepare.require_masked_text(wrong, answer, tokenizer)


@pytest.mark.torch
def test_an_answer_cut_inside_a_character_passes(tokenizer: Any) -> None:
    prompt, answer = ids_of(tokenizer, "Q\n"), ids_of(tokenizer, "Text: 語")
    cut = Conversation("c", "train", prompt + answer[:-1], len(prompt))
    prepare.require_masked_text(cut, "Text:", tokenizer)  # as vLLM shows it
    with pytest.raises(CheckFailed):
        prepare.require_masked_text(cut, "Text", tokenizer)


class Syllables:
    """Tokens of several bytes, each whole characters, the beginning of one, or both."""

    tokens = (b"a", b"so" + b"\xd0", b"s", b"\xe4\xbd", b"\xa0", b"\xd1")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return b"".join(self.tokens[i] for i in ids).decode(errors="replace")


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        ((0, 2, 1), "as"),  # the letters that come with the torn character are lacking too
        ((0, 2, 3, 5), "as"),  # two tokens are held back
        ((0, 3, 4), "a你"),
        ((0, 1, 2), "aso�s"),  # torn in the middle
    ],
)
def test_an_answer_is_compared_as_a_decoder_shows_it_that_waits_for_whole_characters(
    ids: tuple[int, ...], shown: str
) -> None:
    conversation = Conversation("c", "train", (0, *ids), 1)
    prepare.require_masked_text(conversation, shown, Syllables())
    for wrong in (shown[:-1], shown + "a", "a" + shown):
        with pytest.raises(CheckFailed, match=r"the masked text of .* from character \d+ on"):
            prepare.require_masked_text(conversation, wrong, Syllables())


@pytest.mark.torch
def test_an_empty_answer_fails(tokenizer: Any) -> None:
    prompt = ids_of(tokenizer, "Q\n")
    with pytest.raises(CheckFailed, match="'c' has no token under its loss mask") as caught:
        prepare.require_masked_text(Conversation("c", "train", prompt, len(prompt)), "", tokenizer)
    assert "chat template" in caught.value.remedy


@pytest.mark.torch
def test_a_row_keeps_the_engines_own_tokens(tokenizer: Any, tmp_path: Path) -> None:
    config = config_with(write_questions(tmp_path / "q", NINE))
    question = selection.choose(config, tokenizer).chosen[-1]
    answer = ids_of(tokenizer, "It is 8.<|end|>")
    finished = Finished(
        key=question.id,
        token_ids=list(answer),
        text="It is 8.",
        finish_reason="stop",
        prompt_logprobs=None,
        logprobs=None,
        accepted_histogram=None,
    )
    (answered,) = answering.answer(
        config, tokenizer, lambda prompts: (finished for _ in prompts), [question]
    )
    row = prepare._row(config, answered, tokenizer)
    assert tokenizer.decode(row["token_ids"]) == (
        "<|start|>user\nWhat is 8?<|end|>\n<|start|>assistant\nIt is 8.<|end|>"
    )
    assert row["token_ids"][row["prompt_tokens"] :] == list(answer)
    assert (row["id"], row["split"], row["question"]) == ("q8", "train", "What is 8?")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b'{"id": "a", "text": "\xff"}\n', "which cannot be read"),
        (b"", "has 0 different questions where 9 are needed"),
        (b'{"id": "a", "text": "What?"}\n{"id": "b"}\n', "line 2 of .* lacks 'text'"),
        (b'{"id": "a", "text": "  "}\n', "line 1 of .* lacks a text under 'text'"),
        (b'{"text": "What?"}\n', "has 1 different questions where 9 are needed"),
        (b"What is a list?\n", "line 1 of .* is not JSON"),
        (b'["a", "What?"]\n', "line 1 of .* has none of the shapes"),
        (b'{"id": "a", "text": "What?"}\n{"id": "b", "te', "line 2 of .* is not JSON"),
    ],
)
def test_a_question_file_that_cannot_serve_is_refused(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "questions.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=said) as caught:
        texts_of(config_with(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy
    if content is not None:
        assert path.read_bytes() == content, "a user's file was changed"


def test_a_folder_that_is_no_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"which cannot be read: Directory") as caught:
        texts_of(config_with(tmp_path))
    assert caught.value.remedy


@pytest.mark.parametrize("last", [b'{"id": "q9", "text": "Last?"}', b"\n\n"])
def test_a_file_without_a_final_line_break_is_read_whole(tmp_path: Path, last: bytes) -> None:
    path = write_questions(tmp_path / "questions.jsonl", NINE)
    path.write_bytes(path.read_bytes() + last)
    before = path.read_bytes()
    train = 5 if b"Last" in last else 4
    assert len(texts_of(config_with(path, train=train))) == train + 5
    assert path.read_bytes() == before


@pytest.mark.parametrize("again", [("q9", NINE[0]), ("q0", "Another text?"), ("q0", NINE[0])])
def test_a_duplicate_is_no_question_more(tmp_path: Path, again: tuple[str, str]) -> None:
    path = write_questions(tmp_path / "questions.jsonl", NINE)
    with path.open("a") as file:
        file.write(json.dumps({"id": again[0], "text": again[1]}) + "\n")
    texts = texts_of(config_with(path))
    assert sorted(text for _, text in texts) == NINE
    assert len({question_id for question_id, _ in texts}) == 9
    with pytest.raises(UsageError, match="has 9 different questions where 10 are needed") as caught:
        texts_of(config_with(path, train=5))
    assert "lower data.train" in caught.value.remedy


@pytest.mark.torch
def test_every_question_is_in_one_split(tmp_path: Path, tokenizer: Any) -> None:
    """With a text twice under two ids, which must not be asked in training and held out both."""
    path = write_questions(tmp_path / "questions.jsonl", [*NINE, NINE[0], NINE[8]])
    questions = selection.choose(config_with(path), tokenizer).chosen
    splits: dict[str, set[str]] = {"heldout": set(), "validation": set(), "train": set()}
    for question in questions:
        splits[question.split].add(question.text)
    assert {name: len(texts) for name, texts in splits.items()} == {
        "heldout": 3,
        "validation": 2,
        "train": 4,
    }
    assert set.union(*splits.values()) == set(NINE)


@pytest.mark.torch
def test_the_longest_prompt_that_fits_is_taken(tmp_path: Path, tokenizer: Any) -> None:
    path = write_questions(tmp_path / "questions.jsonl", [*NINE[:8], "Long" * 10])
    config = config_with(path, max_model_len=100, max_answer_tokens=30)
    longest = len(selection.choose(config, tokenizer).chosen[-1].prompt)
    assert longest == len("user\n" + "Long" * 10 + "\nassistant\n") + 3
    fits = config_with(path, max_model_len=longest + 32, max_answer_tokens=30)
    assert selection.choose(fits, tokenizer).chosen[-1].prompt
    too_long = config_with(path, max_model_len=longest + 31, max_answer_tokens=30)
    with pytest.raises(UsageError, match=f"question 'q8' has {longest} tokens") as caught:
        selection.choose(too_long, tokenizer)
    assert f"a prompt may have {longest - 1}" in str(caught.value)
    assert "capture.max_model_len" in caught.value.remedy


@pytest.mark.torch
@pytest.mark.parametrize("with_template", [True, False])
def test_a_tokenizer_needs_a_chat_template(tmp_path: Path, *, with_template: bool) -> None:
    made = byte_tokenizer()
    if with_template:
        made.chat_template = TEMPLATE
    made.save_pretrained(tmp_path)
    if with_template:
        assert chat.load_tokenizer(tmp_path).chat_template == TEMPLATE
        return
    with pytest.raises(UsageError, match=f"the tokenizer in {tmp_path} has no chat template"):
        chat.load_tokenizer(tmp_path)


@pytest.mark.torch
@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
def test_a_tokenizer_that_cannot_be_loaded_is_refused(tmp_path: Path, content: str | None) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    if content is None:
        for file in tmp_path.iterdir():
            file.unlink()
    else:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UsageError, match=f"{tmp_path} has no tokenizer that can be loaded"):
        chat.load_tokenizer(tmp_path)


ROWS = [
    {"id": f"{split}{number}", "split": split, "token_ids": [1, 2, number], "prompt_tokens": 2}
    for split in ("train", "validation")
    for number in range(6)
]


def test_the_order_of_conversations_does_not_depend_on_that_of_lines(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    loaded = []
    for seed in range(3):
        lines = random.Random(seed).sample(ROWS, len(ROWS))
        folder.conversations.write_text("".join(json.dumps(row) + "\n" for row in lines))
        loaded.append(prepare.load(folder))
    assert loaded[0] == loaded[1] == loaded[2]
    assert [c.id for c in loaded[0]] == [row["id"] for row in ROWS]
    assert loaded[0][5] == Conversation("train5", "train", (1, 2, 5), 2)


def test_a_line_without_tokens_is_an_integrity_failure(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.conversations.write_text('{"id": "a", "split": "train", "prompt_tokens": 1}\n')
    with pytest.raises(IntegrityError, match=r"jsonl has a line without 'token_ids'"):
        prepare.load(folder)


def test_no_conversations_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there are no conversations") as caught:
        prepare.load(RunFolder(tmp_path))
    assert caught.value.remedy == "run truetap prepare first"


def test_a_mask_that_covers_next_to_nothing_fails() -> None:
    most = [Conversation("a", "train", tuple(range(150)), 149)]
    with pytest.raises(CheckFailed, match=r"only 0\.67% of all tokens are under the loss mask"):
        prepare._check_mask_share(most)
    prepare._check_mask_share([*most, Conversation("b", "train", (1, 2), 0)])

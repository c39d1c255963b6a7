"""Masks cover exactly the assistant's text, and ids are those that a server would see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truetap.harness.errors import CheckFailed, CouldNotRun
from truetap.pipeline import chat
from truetap.pipeline.chat import SharedToken, Span
from truetap.pipeline.dialogues import Message

pytestmark = pytest.mark.torch

# What is changed in the template of the tokenizer that tests use.
CONTENT = "{{ m['content'] }}"
TRIMMED = "{{ m['content'] | trim }}"
THINKING_DROPPED = "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}"
THINKING_ADDED = (
    "{{ ('<think>\n\n</think>\n\n' if m['role'] == 'assistant' else '') + m['content'] }}"
)


def with_template(tokenizer: Any, template: str) -> Any:
    """The same tokenizer with another template."""
    made = copy(tokenizer)
    made.chat_template = template
    return made


def with_content(tokenizer: Any, shown: str) -> Any:
    """The same tokenizer with a template that shows messages otherwise."""
    assert CONTENT in tokenizer.chat_template
    return with_template(tokenizer, tokenizer.chat_template.replace(CONTENT, shown))


def said(*texts: str, system: str = "") -> list[Message]:
    """A dialogue of texts in turn, the user's first."""
    turns = [Message(("user", "assistant")[n % 2], text) for n, text in enumerate(texts)]
    return [Message("system", system), *turns] if system else turns


# The same few pieces on both sides, so that answers repeat questions, and begin and end with
# what tokenizers join to their neighbours.
PIECES = st.sampled_from(
    [
        "the answer",
        " the",
        "is",
        "\n",
        "\n\n",
        "  ",
        " ",
        "42",
        "å",
        "語",
        "🙂",
        "e\u0301",
        ".",
        "assistant",
    ]
)
TEXTS = st.lists(PIECES, min_size=1, max_size=6).map("".join).filter(str.strip)


@st.composite
def dialogues(draw: st.DrawFn) -> list[Message]:
    turns = 2 * draw(st.integers(1, 3))
    texts = [draw(TEXTS) for _ in range(turns)]
    if draw(st.booleans()):
        texts[1] = texts[0]
    return said(*texts, system=draw(st.sampled_from(["", "Be brief: the answer."])))


def served(tokenizer: Any, messages: Sequence[Message], *, ask: bool) -> list[int]:
    ids = tokenizer.apply_chat_template(
        [m.as_dict() for m in messages],
        add_generation_prompt=ask,
        tokenize=True,
        return_dict=False,
    )
    return list(ids)


def fault_of(
    tokenizer: Any, messages: Sequence[Message], ids: Sequence[int], spans: Sequence[Span]
) -> str:
    """Say what is wrong with ids and spans, by decoding; '' if nothing is."""
    if list(ids) != served(tokenizer, messages, ask=False):
        return "other ids than the server's"
    positions = [n for n, m in enumerate(messages) if m.role == "assistant"]
    if len(spans) != len(positions):
        return "another number of answers"
    for position, (first, end) in zip(positions, spans, strict=True):
        if list(ids[:first]) != served(tokenizer, messages[:position], ask=True):
            return f"answer {position} does not follow the prompt that a server would see"
        if tokenizer.decode(list(ids[first:end])) != messages[position].content:
            return f"answer {position} is not what is masked"
    return ""


def cannot_be_masked(tokenizer: Any, messages: Sequence[Message]) -> bool:
    """Whether no span at all would do for one of the answers: tried, not reasoned."""
    ids = served(tokenizer, messages, ask=False)
    for position, message in enumerate(messages):
        if message.role == "assistant":
            prompt = served(tokenizer, messages[:position], ask=True)
            first = len(prompt)
            ends = range(first + 1, len(ids) + 1)
            if ids[:first] != prompt or not any(
                tokenizer.decode(ids[first:end]) == message.content for end in ends
            ):
                return True
    return False


def searched(tokenizer: Any, messages: Sequence[Message]) -> list[Span]:
    """The mutant: an answer is where its text is first found."""
    text = chat._text(tokenizer, messages, open_ended=False)
    _, offsets = chat._tokens(tokenizer, text)
    found = [(text.find(m.content), m.content) for m in messages if m.role == "assistant"]
    return [chat._token_span(offsets, (start, start + len(each))) for start, each in found]


def check(tokenizer: Any, messages: list[Message]) -> None:
    try:
        rendered = chat.render(tokenizer, messages)
    except SharedToken:
        assert cannot_be_masked(tokenizer, messages)
        return
    spans = rendered.answers
    assert fault_of(tokenizer, messages, rendered.token_ids, spans) == ""
    for shift in ((-1, 0), (1, 0), (0, -1), (0, 1)):
        wrong = [*spans[:-1], (spans[-1][0] + shift[0], spans[-1][1] + shift[1])]
        assert fault_of(tokenizer, messages, rendered.token_ids, wrong)
    ended = [chat.with_end(tokenizer, rendered, span) for span in spans]
    assert ended == [(first, end + 1) for first, end in spans]
    assert {rendered.token_ids[end - 1] for _, end in ended} == {tokenizer.eos_token_id}


def test_the_mask_covers_exactly_the_assistants_text(trained: Any) -> None:
    seen = {"masked": 0, "shared": 0}

    @settings(max_examples=150, deadline=None, database=None, derandomize=True)
    @given(dialogues())
    def drawn(messages: list[Message]) -> None:
        check(trained, messages)
        seen["shared" if cannot_be_masked(trained, messages) else "masked"] += 1

    drawn()
    assert min(seen.values()) > 10, "one of the two was hardly tried"


@pytest.mark.live
def test_the_same_on_smollm2() -> None:
    """Live because building the verifier takes as long as an engine."""
    from truetap.pipeline import config, verifiers

    wanted = config.RunConfig(
        output=Path("out"), verifier=config.Verifier(builtin="smollm2-135m-instruct")
    )
    tokenizer = chat.load_tokenizer(verifiers.directory_of(wanted))

    @settings(max_examples=150, deadline=None, database=None, derandomize=True)
    @given(dialogues())
    def drawn(messages: list[Message]) -> None:
        check(tokenizer, messages)

    drawn()
    chat.require_kept_turns(tokenizer)
    assert not chat.adds_bos_again(tokenizer)


def test_a_search_for_the_text_is_caught(trained: Any) -> None:
    apart = said("Which?", "Zebra.")
    ids = served(trained, apart, ask=False)
    assert fault_of(trained, apart, ids, searched(trained, apart)) == ""
    repeats = said("the answer is 42, or not?", "the answer is 42")
    ids = served(trained, repeats, ask=False)
    assert "server would see" in fault_of(trained, repeats, ids, searched(trained, repeats))
    check(trained, repeats)
    assert chat.render(trained, repeats).answers != tuple(searched(trained, repeats))


def test_the_last_answer_alone(trained: Any) -> None:
    messages = said("Why?", "So.", "How?", "Thus.")
    whole = chat.render(trained, messages)
    assert len(whole.answers) == 2
    assert chat.render(trained, messages, last_only=True).answers == whole.answers[-1:]


PLAIN = (
    "{% for m in messages %}{{ m['role'] + ':' + gap + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{{ gap }}{% endif %}"
)


@pytest.mark.parametrize(
    ("gap", "answer", "shared"),
    [
        ("\n", "So.", False),
        ("\n", "So.\n", True),  # one token holds its line break and the template's
        ("\n", "\n\nSo.", True),
        (" ", "the answer", True),  # whose offsets, trimmed, show nothing of the space
    ],
)
def test_a_token_of_two_sides_is_seen(trained: Any, gap: str, answer: str, *, shared: bool) -> None:
    from tokenizers.processors import ByteLevel

    plain = with_template(deepcopy(trained), f"{{% set gap = {gap!r} %}}" + PLAIN)
    plain.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    messages = said("Why?", answer)
    assert cannot_be_masked(plain, messages) == shared
    if shared:
        with pytest.raises(SharedToken):
            chat.render(plain, messages)
    else:
        rendered = chat.render(plain, messages)
        assert fault_of(plain, messages, rendered.token_ids, rendered.answers) == ""
        # Where no token ends an answer, none is added.
        assert chat.with_end(plain, rendered, rendered.answers[0]) == rendered.answers[0]


def test_a_template_that_trims_is_followed(trained: Any) -> None:
    trimming = with_content(trained, TRIMMED)
    messages = said(" Why? ", "\n the answer \n", "How?", "is")
    rendered = chat.render(trimming, messages)
    masked = [trimming.decode(list(rendered.token_ids[a:b])) for a, b in rendered.answers]
    assert masked == ["the answer", "is"]


def test_a_template_that_drops_earlier_thinking_is_named(trained: Any) -> None:
    dropping = with_content(trained, THINKING_DROPPED)
    thinking = said("Why?", "<think>\nhm\n</think>\n\nSo.", "How?", "<think>\nh\n</think>\n\nThus.")
    with pytest.raises(CheckFailed, match="re-writes earlier turns: an answer that") as caught:
        chat.render(dropping, thinking)
    assert 'loss_on = "last_answer"' in caught.value.remedy
    assert chat.render(dropping, thinking, last_only=True).answers
    chat.render(dropping, said("Why?", "So.", "How?", "Thus."))
    with pytest.raises(CheckFailed, match="re-writes earlier turns"):
        chat.require_kept_turns(dropping)
    chat.require_kept_turns(trained)


def test_a_template_that_writes_of_later_turns_earlier_is_named(trained: Any) -> None:
    with pytest.raises(CheckFailed, match="re-writes earlier turns: its text for the messages"):
        chat.render(
            with_template(trained, "{{ messages | length }} turns\n" + trained.chat_template),
            said("Why?", "So."),
        )


def test_a_template_that_adds_to_an_answer_is_named(trained: Any) -> None:
    with pytest.raises(CheckFailed, match=r"shows '<think>.*where the answer is 'So\.'"):
        chat.render(with_content(trained, THINKING_ADDED), said("Why?", "So."))


def test_a_template_that_refuses_a_role_is_told_in_one_sentence(trained: Any) -> None:
    refusing = with_template(trained, "{{ raise_exception('no system') }}")
    with pytest.raises(CheckFailed, match="refuses a dialogue of system, user: no system"):
        chat.prompt_ids(refusing, said("Why?", system="Be."))


def test_a_double_bos_is_named(trained: Any) -> None:
    once, twice = (with_template(trained, bos + trained.chat_template) for bos in ("<s>", "<s><s>"))
    messages = said("Why?", "So.")
    assert chat.render(once, messages).token_ids[0] == trained.bos_token_id
    with pytest.raises(CheckFailed, match="double BOS: the conversation begins with '<s>' twice"):
        chat.render(twice, messages)
    with pytest.raises(CheckFailed, match="double BOS"):
        chat.prompt_ids(twice, messages[:1])


def test_a_tokenizer_that_would_add_a_second_bos_is_known(trained: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    assert not chat.adds_bos_again(with_template(trained, "<s>" + trained.chat_template))
    adding = with_template(deepcopy(trained), "<s>" + trained.chat_template)
    adding.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", adding.bos_token_id)]
    )
    assert chat.adds_bos_again(adding)
    check(adding, said("Why?", "So."))


class Wrapped:
    """A tokenizer with one thing wrong."""

    def __init__(self, tokenizer: Any, **wrong: Any) -> None:
        self._tokenizer, self._wrong = tokenizer, wrong

    def __getattr__(self, name: str) -> Any:
        return self._wrong[name] if name in self._wrong else getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        encoded = self._tokenizer(text, **options)
        change: Callable[[Any], Any] = self._wrong.get("encoded", lambda held: held)
        return change(dict(encoded))


def test_tokenizers_that_cannot_be_trusted_are_refused(trained: Any) -> None:
    messages = said("Why?", "So. The answer.")
    with pytest.raises(CouldNotRun, match="gives no offsets"):
        chat.render(Wrapped(trained, is_fast=False), messages)
    other = Wrapped(trained, encoded=lambda e: e | {"input_ids": [5, *e["input_ids"][1:]]})
    with pytest.raises(CheckFailed, match="other ids for the chat template's text"):
        chat.render(other, messages)

    def late(encoded: dict[str, Any]) -> dict[str, Any]:
        # What follows the answer is said to be part of it.
        offsets = list(encoded["offset_mapping"])
        end = next(n for n, i in enumerate(encoded["input_ids"][::-1]) if i == trained.eos_token_id)
        offsets[-end - 1] = offsets[-end - 2]
        return encoded | {"offset_mapping": offsets}

    with pytest.raises(CheckFailed, match=r"the tokenizer's offsets are wrong: 'So\. The answer"):
        chat.render(Wrapped(trained, encoded=late), messages)

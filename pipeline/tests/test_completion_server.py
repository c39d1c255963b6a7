"""Answers from a server: what is asked again, what is refused, and what is never taken."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from truetap.harness.engine import Finished, Prompt
from truetap.harness.errors import CheckFailed, CouldNotRun, TruetapError, UsageError
from truetap.pipeline import run_folder, server_check
from truetap.pipeline.completion_server import CompletionServer
from truetap.pipeline.config import Capture, Data, RunConfig, Verifier
from truetap.pipeline.dialogues import Message
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.selection import Chosen

Open = Callable[..., CompletionServer]


@pytest.fixture
def opened(served: Any) -> Iterator[Open]:
    """Open clients of the server; all are closed, and none may leave its thread behind."""
    clients: list[CompletionServer] = []

    def open_(**settings: Any) -> CompletionServer:
        clients.append(CompletionServer(served.url, **{"first_pause_s": 0.001} | settings))
        return clients[-1]

    yield open_
    served.released.set()
    for client in clients:
        client.close()
        assert not client._thread.is_alive()


def prompts(count: int, *, max_tokens: int = 8) -> list[Prompt]:
    sampling = {"max_tokens": max_tokens, "temperature": 0.7}
    return [Prompt(f"q{n}", (7, 8, n), sampling) for n in range(count)]


def answers(server: CompletionServer, count: int = 1, **settings: Any) -> list[Finished]:
    return list(server.generate(prompts(count, **settings), model="tiny", vocab_size=500))


def refusal(kind: type[TruetapError], ask: Callable[[], object]) -> TruetapError:
    with pytest.raises(kind) as caught:
        ask()
    assert "\n" not in str(caught.value)
    assert caught.value.remedy
    return caught.value


def test_ids_go_and_come_back_untouched(served: Any, opened: Open) -> None:
    served.answer = lambda ids: ([ids[2], 4], f"text {ids[2]}")
    found = {f.key: f for f in answers(opened(key="s3cret"), 9)}
    assert {key: (f.token_ids, f.text, f.finish_reason) for key, f in found.items()} == {
        f"q{n}": ([n, 4], f"text {n}", "stop") for n in range(9)
    }
    body = served.asked[0]
    assert (body["model"], body["prompt"][:2], body["max_tokens"]) == ("tiny", [7, 8], 8)
    assert body["return_token_ids"] is True
    # Else the server's generation_config.json decides, and answers are not those of an engine.
    assert {name: body[name] for name in ("temperature", "top_p", "top_k", "min_p")} == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
    }
    assert body["repetition_penalty"] == 1.0
    assert served.keys == {"Bearer s3cret"}


@pytest.mark.parametrize("limit", [1, 3])
def test_only_so_many_are_asked_at_a_time(served: Any, opened: Open, limit: int) -> None:
    """The server waits until ``limit`` have met; prompts are drawn when there is room, not before.

    A generator that is drawn dry at once could not put a dialogue's next turn before new ones.
    """
    served.meeting = threading.Barrier(limit)
    drawn: list[str] = []

    def drawing() -> Iterator[Prompt]:
        for prompt in prompts(12):
            drawn.append(prompt.key)
            yield prompt

    server = opened(in_flight=limit)
    for number, _ in enumerate(server.generate(drawing(), model="tiny", vocab_size=500), start=1):
        assert len(drawn) <= number + 2 * limit
    assert len(drawn) == 12
    assert served.most == limit


@pytest.mark.parametrize("fault", ["429", "503", "500", "drop", "abort"])
def test_what_passes_by_itself_is_asked_again(served: Any, opened: Open, fault: str) -> None:
    said: list[str] = []
    served.faults = deque([fault, fault])
    server = opened(say=said.append)
    assert [f.key for f in answers(server)] == ["q0"]
    assert server.again == 2
    assert len(said) == 1, "a cause is told once"
    assert said[0].startswith(f"{served.url}: ")


@pytest.mark.parametrize("fault", ["hang", "trickle", "429"])
def test_a_deadline_ends_every_wait(served: Any, opened: Open, fault: str) -> None:
    """A server that keeps sending something is as silent as one that hangs."""
    served.faults = deque([fault] * (10_000 if fault == "429" else 1))
    seconds = 1.0 if fault == "429" else 0.15  # the one that answers needs time to do so
    error = refusal(CouldNotRun, lambda: answers(opened(deadline_s=seconds)))
    assert f"/v1/completions gave no answer within {seconds:g} s" in str(error)
    assert "run again to continue" in error.remedy
    assert ("the last attempt: status 429" in str(error)) == (fault == "429")


def test_what_was_good_is_kept_before_a_failure_ends_the_rest(served: Any, opened: Open) -> None:
    """Of those that are done together too, in whatever order they are looked at."""
    served.change = lambda reply: (
        reply if reply["choices"][0]["prompt_token_ids"][2] != 3 else {"choices": []}
    )
    server = opened(in_flight=30)

    def drawing() -> Iterator[Prompt]:
        yield from prompts(20)
        while len(served.asked) < 20 or asyncio.all_tasks(server._loop):
            time.sleep(0.005)
        server._begin(asyncio.sleep(0)).result()  # what was done before this is told by now

    kept: list[str] = []
    found = server.generate(drawing(), model="tiny", vocab_size=500)
    with pytest.raises(CouldNotRun, match="is no completion"):
        kept.extend(finished.key for finished in found)
    assert sorted(kept) == sorted(f"q{n}" for n in range(20) if n != 3)


def test_a_caller_that_stops_leaves_nothing_running(served: Any, opened: Open) -> None:
    served.faults = deque(["hang"])
    server = opened(in_flight=2)
    found: Any = server.generate(prompts(2), model="tiny", vocab_size=500)
    assert next(found).key in {"q0", "q1"}
    found.close()
    server.close()
    server.close()
    assert not server._thread.is_alive()


@pytest.mark.parametrize(
    ("status", "remedy"),
    [("401", "server_key"), ("404", "server_model"), ("400", "0.10.2"), ("418", "log")],
)
def test_a_no_is_no(served: Any, opened: Open, status: str, remedy: str) -> None:
    served.faults = deque([status])
    server = opened(key="s3cret")
    error = refusal(UsageError, lambda: answers(server))
    assert f"refuses with status {status}: because of {status}" in str(error)
    assert remedy in error.remedy
    assert "s3cret" not in str(error) + error.remedy
    assert server.again == 0


def test_a_page_is_no_answer(served: Any, opened: Open) -> None:
    served.faults = deque(["html"])
    error = refusal(CouldNotRun, lambda: answers(opened()))
    assert str(error) == "the server's answer to 'q0' is no completion: no JSON"


def changed(**entries: Any) -> Callable[[dict[str, Any]], Any]:
    def change(reply: dict[str, Any]) -> dict[str, Any]:
        choice = reply["choices"][0] | entries
        return {"choices": [{k: v for k, v in choice.items() if v is not None}]}

    return change


@pytest.mark.parametrize(
    ("wrong", "kind", "said"),
    [
        ({"token_ids": None}, UsageError, "does not tell token ids"),
        ({"prompt_token_ids": None}, UsageError, "does not tell token ids"),
        ({"token_ids": ["a"]}, UsageError, "does not tell token ids"),
        ({"token_ids": [True]}, UsageError, "does not tell token ids"),
        ({"prompt_token_ids": [1, 7, 8, 0]}, CheckFailed, "token 0 is another"),
        ({"prompt_token_ids": [7, 8]}, CheckFailed, "2 tokens in place of 3"),
        ({"token_ids": [1, 500]}, CheckFailed, "token 500; the verifier has 500"),
        ({"token_ids": [-1]}, CheckFailed, "token -1"),
        ({"token_ids": [1] * 9}, CheckFailed, "after 9 of 8 tokens"),
        ({"finish_reason": "repetition"}, CheckFailed, "for the reason 'repetition'"),
        ({"finish_reason": "length"}, CheckFailed, "cuts answers at 3 tokens"),
        ({"text": None}, CouldNotRun, "is no completion"),
    ],
)
def test_what_is_no_answer_to_these_ids_is_not_taken(
    served: Any, opened: Open, wrong: dict[str, Any], kind: type[TruetapError], said: str
) -> None:
    served.change = changed(**wrong)
    with pytest.raises(kind, match=said) as caught:
        answers(opened())
    assert "\n" not in str(caught.value)


def test_an_answer_that_fills_its_limit_is_one(opened: Open) -> None:
    assert [f.finish_reason for f in answers(opened(), max_tokens=3)] == ["length"]


class Words:
    """A tokenizer of words by their lengths, which a server can know as well."""

    bos_token_id = None

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return [len(word) for m in messages for word in f"{m['role']} {m['content']}".split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join("x" * n for n in ids)


def config_of(**data: Any) -> RunConfig:
    return RunConfig(
        output=Path("out"),
        verifier=Verifier(directory=Path("verifier")),
        capture=Capture(max_model_len=512),
        data=Data(server="http://127.0.0.1:1/v1", **data),
    )


def chosen(name: str, *questions: str) -> Chosen:
    messages = tuple(Message("user", text) for text in questions)
    return Chosen(name, "train", messages, (7, 8, 9))


DIALOGUES = [chosen("q0", "What is it?"), chosen("q1", "Why is that?", "And then?")]


def examined(server: CompletionServer, **data: Any) -> server_check.Seen:
    return server_check.examine(
        server, config_of(**data), Words(), DIALOGUES, vocab_size=500, patience_s=5
    )


def test_a_server_is_what_it_shows(served: Any, opened: Open) -> None:
    rendered: list[list[str]] = []

    def render(messages: list[dict[str, str]]) -> list[int]:
        rendered.append([m["role"] for m in messages])
        return Words().apply_chat_template(messages)

    served.render = render
    served.models = [{"id": "tiny", "root": "org/Tiny", "max_model_len": 510}]
    seen = examined(opened())
    assert (seen.model, seen.root, seen.version) == ("tiny", "org/Tiny", "0.32.0")
    assert (seen.rendering, seen.compared) == ("equal to ours for 3 of this run's chats", True)
    assert ["user", "assistant", "user"] in rendered, "a later turn was not compared"
    assert [body["max_tokens"] for body in served.asked] == [1]


@pytest.mark.parametrize("at", ["first", "later"])
def test_another_rendering_is_named(served: Any, opened: Open, at: str) -> None:
    def render(messages: list[dict[str, str]]) -> list[int]:
        ids = Words().apply_chat_template(messages)
        return [11, *ids] if at == "first" or len(messages) > 1 else ids

    served.render = render
    error = refusal(CheckFailed, lambda: examined(opened()))
    assert "renders the same chat otherwise, from token 0 on: 'xxxxxxxxxxx xxxx " in str(error)
    assert "chat template" in error.remedy
    assert not served.asked, "it was asked to answer all the same"


def test_a_server_that_shows_no_rendering_is_said_to_be_uncompared(opened: Open) -> None:
    seen = examined(opened())
    assert not seen.compared
    assert seen.rendering == "not compared: /tokenize answers with status 404"


@pytest.mark.parametrize(
    ("models", "data", "said"),
    [
        ([{"id": "a"}, {"id": "b"}], {}, "has several models: 'a', 'b'"),
        ([{"id": "a"}, {"id": "b"}], {"server_model": "c"}, "has no model 'c'; it has 'a', 'b'"),
        ([{"id": "a", "parent": "b"}], {}, "'a' is an adapter over 'b'"),
        ([{"id": "a", "max_model_len": 509}], {}, "holds 509 tokens .* may have 510"),
    ],
)
def test_a_model_that_cannot_be_the_verifier_is_refused(
    served: Any, opened: Open, models: list[dict[str, Any]], data: dict[str, Any], said: str
) -> None:
    served.models = models
    with pytest.raises(UsageError, match=said) as caught:
        examined(opened(), **data)
    assert caught.value.remedy
    served.models = [{"id": "a"}, {"id": "b", "parent": "a"}]
    assert examined(opened(), server_model="a").model == "a"


def test_a_server_without_ids_is_refused_once(served: Any, opened: Open) -> None:
    served.change = changed(token_ids=None)
    error = refusal(UsageError, lambda: examined(opened()))
    assert "does not tell token ids" in str(error)
    assert "leave data.server out" in error.remedy
    assert len(served.asked) == 1


def test_nobody_there_is_told_soon() -> None:
    with (
        CompletionServer("http://127.0.0.1:1/v1", first_pause_s=0.001) as server,
        pytest.raises(CouldNotRun, match=r"gave no answer within 1 s; .*ConnectError"),
    ):
        server_check.examine(server, config_of(), Words(), DIALOGUES, vocab_size=5, patience_s=1)


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert server_check.key_of(config_of().data) is None
    data = config_of(server_key="THE_SERVERS_KEY").data
    monkeypatch.setenv("THE_SERVERS_KEY", "s3cret")
    assert server_check.key_of(data) == "s3cret"
    monkeypatch.delenv("THE_SERVERS_KEY")
    with pytest.raises(UsageError, match="THE_SERVERS_KEY, which is not set"):
        server_check.key_of(data)


@pytest.mark.parametrize("name", ["sk_s3cret", "s3cret", "Sk_LIVE"])
def test_what_may_be_the_key_in_place_of_its_name_is_not_shown(name: str) -> None:
    error = refusal(UsageError, lambda: server_check.key_of(config_of(server_key=name).data))
    assert "which is not set" in str(error)
    assert name not in str(error) + error.remedy


def test_a_key_is_what_a_header_can_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    data = config_of(server_key="THE_SERVERS_KEY").data
    monkeypatch.setenv("THE_SERVERS_KEY", " s3cret\n")
    assert server_check.key_of(data) == "s3cret"
    for bad in ("s3cret\nmore", "s3cret more", "s3cret\x7f", "s3crét"):
        monkeypatch.setenv("THE_SERVERS_KEY", bad)
        error = refusal(UsageError, lambda: server_check.key_of(data))
        assert "no header can carry" in str(error)
        assert "s3cr" not in str(error) + error.remedy


def test_a_header_that_cannot_be_sent_ends_at_once_and_is_not_shown(opened: Open) -> None:
    said: list[str] = []
    server = opened(key="s3cret\n", say=said.append, deadline_s=20)
    error = refusal(UsageError, lambda: answers(server))
    assert "s3cret" not in "".join([str(error), error.remedy, *said])
    assert server.again == 0


@pytest.mark.parametrize("key", ["s3cret-and-longer", "quoted'\\\"s3cret"])
def test_a_proxy_that_repeats_the_key_is_told_without_it(
    served: Any, opened: Open, key: str
) -> None:
    """Where its text is cut, too; and in a name, which stands in quotes in what is told."""
    served.faults = deque(["echo"])
    error = refusal(UsageError, lambda: answers(opened(key=key)))
    assert "refuses with status 403: ......" in str(error)
    assert "Bearer" in str(error)
    assert not any(part in str(error) for part in (key[:6], "s3cret"))
    served.change = changed(finish_reason=f"for {key}")
    error = refusal_of(CheckFailed, lambda: answers(opened(key=key)))
    assert "for the reason" in error
    assert "[the key]" in error
    assert "s3cret" not in error
    served.change = lambda reply: reply
    served.faults = deque(["noise"])
    said: list[str] = []
    assert len(answers(opened(key=key, say=said.append))) == 1
    assert "RemoteProtocolError" in said[0]
    assert "s3cret" not in said[0]
    served.version = f"1 {key}"
    served.models = [{"id": "tiny", "root": f"org/{key}"}]
    seen = examined(opened(key=key))
    assert (seen.version, seen.root) == ("1 [the key]", "org/[the key]")
    served.models = [{"id": key}, {"id": "b"}]
    error = refusal_of(UsageError, lambda: examined(opened(key=key)))
    assert "has several models: '[the key]', 'b'" in error.replace('"', "'")


def refusal_of(kind: type[TruetapError], ask: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        ask()
    return str(caught.value)


@pytest.mark.parametrize("key", [None, "x", "EMPTY"])
def test_a_key_that_hides_nothing_spoils_no_message(opened: Open, key: str | None) -> None:
    assert opened(key=key).hide("exit of the proxy") == "exit of the proxy"


@pytest.mark.parametrize("url", ["http://xn--a/v1", "http://127.0.0.1:abc/v1"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    error = refusal(UsageError, lambda: CompletionServer(url))
    assert "cannot be asked" in str(error)


def test_what_fails_below_or_beside_the_transport_is_told_in_one_sentence(
    served: Any, opened: Open
) -> None:
    with CompletionServer("http://127.0.0.1:99999/v1", first_pause_s=0.001) as server:
        error = refusal(CouldNotRun, lambda: server.ask("/models", patience_s=0.3))
    assert "the last attempt: OverflowError (connect(): port must be" in str(error)
    served.faults = deque(["encoding"])
    said: list[str] = []
    assert [f.key for f in answers(opened(say=said.append))] == ["q0"]
    assert "DecodingError" in said[0]


def test_an_optional_question_without_an_answer_is_no_obstacle(served: Any, opened: Open) -> None:
    served.render = Words().apply_chat_template
    served.broken = {"/tokenize", "/version"}
    server = opened(deadline_s=60)
    began = time.monotonic()
    seen = server_check.examine(
        server, config_of(), Words(), DIALOGUES, vocab_size=500, patience_s=0.3
    )
    assert time.monotonic() - began < 30, "the deadline of answers was waited for"
    assert (seen.version, seen.compared) == ("", False)
    assert seen.rendering == "not compared: /tokenize gave no answer"


@pytest.mark.parametrize(("told", "good"), [("tiny", True), ("other", False), ([1], False)])
def test_an_answer_of_another_model_is_not_taken(
    served: Any, opened: Open, told: Any, good: bool
) -> None:
    served.change = lambda reply: reply | {"model": told}
    if good:
        assert len(answers(opened())) == 1
    else:
        error = refusal(CheckFailed, lambda: answers(opened()))
        assert f"was asked for 'tiny' and answers as {told!r}" in str(error)


def test_a_model_of_several_names_may_answer_with_its_first(served: Any, opened: Open) -> None:
    """As vLLM does; a model from another place, or an adapter, is none of its names."""
    served.models = [
        {"id": "first", "root": "org/Tiny"},
        {"id": "tiny", "root": "org/Tiny"},
        {"id": "adapter", "root": "org/Tiny", "parent": "first"},
        {"id": "other", "root": "org/Other"},
    ]
    served.change = lambda reply: reply | {"model": "first"}
    seen = examined(opened(), server_model="tiny")
    assert (seen.model, seen.aliases) == ("tiny", ("first",))
    assert "aliases" not in seen.as_dict()
    served.change = lambda reply: reply | {"model": "adapter"}
    with pytest.raises(CheckFailed, match="answers as 'adapter'"):
        examined(opened(), server_model="tiny")


def seen_of(**shown: str) -> server_check.Seen:
    facts = {"url": "http://a/v1", "model": "tiny", "root": "org/Tiny", "version": "1"} | shown
    return server_check.Seen(**facts, rendering="", compared=False)


def test_a_run_is_continued_by_the_same_model_only(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    server_check.record(folder, seen_of(model="wrong"))
    server_check.record(folder, seen_of())  # nothing was kept of the wrong one's
    assert [row["model"] for row in run_folder.read_lines(folder.servers)] == ["tiny"]
    run_folder.append_line(folder.conversations, {"id": "q0"})
    good = [{}, {"url": "http://b/v1", "version": "2"}, {"root": "/elsewhere/Tiny/"}, {"root": ""}]
    for shown in good:
        server_check.record(folder, seen_of(**shown))
    rows = run_folder.read_lines(folder.servers)
    assert len(rows) == 4, "one is written twice, or not at all"
    for shown in ({"model": "other"}, {"root": "org/Other"}):
        error = refusal(
            UsageError, lambda shown=shown: server_check.record(folder, seen_of(**shown))
        )
        assert "answers of 'tiny' (from 'org/Tiny') are kept in this run" in str(error)
        assert "another output folder" in error.remedy
    assert run_folder.read_lines(folder.servers) == rows
    folder.conversations.rename(folder.dropped)  # given up after its answers: those count as well
    with pytest.raises(UsageError, match="are kept in this run"):
        server_check.record(folder, seen_of(model="other"))

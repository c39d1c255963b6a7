"""A real verifier answers: several turns by its engine, and the same ids through a real server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import pytest
from rich.console import Console

from truetap.pipeline import chat, prepare, run_folder, verifiers
from truetap.pipeline.config import Capture, Data, RunConfig, Verifier
from truetap.pipeline.prepare import Conversation
from truetap.pipeline.run_folder import RunFolder

pytestmark = [pytest.mark.live, pytest.mark.torch, pytest.mark.slow, pytest.mark.nightly]

DIALOGUES = [
    ["What is a list in Python?", "And how do I add to it?", "Thank you. Which is faster?"],
    ["Name three colours.", "Which of them has the longest name?"],
    ["Translate 'good morning' into French.", "Now into German, please."],
    ["What is 7 times 8?"],
    ["Écris une phrase sur la mer.", "Encore une, plus courte."],
    ["Who wrote Hamlet?", "When?", "Where was he born?"],
    ["What does len('añb') give?", "Why?"],
]
"""The first one is held out and the second for validation; the others are trained on."""


def sharegpt(number: int, questions: list[str]) -> dict[str, Any]:
    said = [{"from": "system", "value": "You are brief."}] if number % 2 else []
    for question in questions:
        said += [{"from": "human", "value": question}, {"from": "gpt", "value": "(not this)"}]
    return {"id": f"c{number}", "conversations": said}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Greedy and in float32: at a near-tie, rounding would choose between equals."""
    folder = tmp_path_factory.mktemp("answers")
    source = folder / "chats.jsonl"
    rows = [sharegpt(n, questions) for n, questions in enumerate(DIALOGUES)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunConfig(
        output=folder / "engine",
        verifier=Verifier(builtin="smollm2-135m-instruct"),
        capture=Capture(max_model_len=512, dtype="float32", max_num_seqs=8),
        data=Data(
            questions=source,
            train=5,
            validation=1,
            heldout=1,
            max_answer_tokens=32,
            temperature=0.0,
        ),
    )


@pytest.fixture(scope="module")
def model(config: RunConfig) -> Path:
    return verifiers.directory_of(config)


@pytest.fixture(scope="module")
def by_engine(config: RunConfig, model: Path) -> dict[str, dict[str, Any]]:
    """What the engine that truetap starts itself made of the dialogues."""
    return prepared(config, model)


def prepared(config: RunConfig, model: Path) -> dict[str, dict[str, Any]]:
    folder = RunFolder(config.output)
    prepare.prepare(config, folder, model, Console(quiet=True))
    return {row["id"]: row for row in run_folder.read_lines(folder.conversations)}


def test_several_turns_are_the_ids_of_the_chat_template(
    by_engine: dict[str, dict[str, Any]], config: RunConfig, model: Path
) -> None:
    tokenizer = chat.load_tokenizer(model)
    assert sorted(by_engine) == [f"c{n}" for n in range(1, 7)]
    conversations = {c.id: c for c in prepare.load(RunFolder(config.output))}
    for number, questions in enumerate(DIALOGUES[1:], start=1):
        row = by_engine[f"c{number}"]
        said = row.get("messages") or [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]
        assert [m["content"] for m in said if m["role"] == "user"] == questions
        assert said[0]["role"] == ("system" if number % 2 else "user")
        _assert_rendered(tokenizer, row, said)
        _assert_masked(tokenizer, conversations[row["id"]], said)


def _assert_rendered(tokenizer: Any, row: dict[str, Any], said: list[dict[str, str]]) -> None:
    """The ids are those of the whole by ``apply_chat_template``, up to the last answer's end."""
    prompt = _served(tokenizer, said[:-1], ask=True)
    assert row["token_ids"][: len(prompt)] == prompt
    whole = _served(tokenizer, said, ask=False)
    assert whole[: len(row["token_ids"])] == row["token_ids"]


def _assert_masked(tokenizer: Any, conversation: Conversation, said: list[dict[str, str]]) -> None:
    pairs = zip(conversation.token_ids, conversation.loss_mask, strict=True)
    learnt = tokenizer.decode([token for token, bit in pairs if bit], skip_special_tokens=True)
    answers = [m["content"] for m in said if m["role"] == "assistant"]
    assert "(not this)" not in learnt
    assert "".join(learnt.split()) == "".join("".join(answers).split())


def _served(tokenizer: Any, messages: list[dict[str, str]], *, ask: bool) -> list[int]:
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=ask, tokenize=True, return_dict=False
    )
    return list(ids)


def test_a_real_server_gives_the_engines_ids(
    by_engine: dict[str, dict[str, Any]], config: RunConfig, model: Path, tmp_path: Path
) -> None:
    with _vllm(config, model, tmp_path / "server.log") as url:
        data = config.data.model_copy(update={"server": url, "server_model": "verifier"})
        served = config.model_copy(update={"output": tmp_path / "served", "data": data})
        rows = prepared(served, model)
    assert {name: row["token_ids"] for name, row in rows.items()} == {
        name: row["token_ids"] for name, row in by_engine.items()
    }
    assert rows == by_engine
    (seen,) = run_folder.read_lines(RunFolder(served.output).servers)
    assert (seen["model"], seen["root"], seen["compared"]) == ("verifier", str(model), True)
    assert seen["version"]


@contextmanager
def _vllm(config: RunConfig, model: Path, log: Path) -> Iterator[str]:
    """``vllm serve`` on a free port, ended with all its processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = {
        "model": str(model),
        "served-model-name": "verifier",
        "host": "127.0.0.1",
        "port": str(port),
        "dtype": config.capture.dtype,
        "max-model-len": str(config.capture.max_model_len),
        "max-num-seqs": "24",
        "max-num-batched-tokens": str(config.capture.max_num_batched_tokens),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [part for name, value in arguments.items() for part in (f"--{name}", value)]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        _await(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        for one in (process, *family):
            with suppress(psutil.NoSuchProcess):
                one.kill()


def _await(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3_000:]
        with suppress(URLError, ConnectionError), urlopen(url, timeout=5) as reply:
            if reply.status == 200:
                return
        time.sleep(0.5)
    pytest.fail(f"the server did not start: {log.read_text()[-3_000:]}")

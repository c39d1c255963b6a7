"""What several test modules need: a silent console, and a small verifier on disk."""

from __future__ import annotations

import io
import json
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from truetap.harness import certificate, report
from truetap.harness.engine import Finished
from truetap.harness.errors import CouldNotRun
from truetap.harness.extraction import Pool, Progress, ShardOrder, Status, WrittenShard
from truetap.harness.model import Environment

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CERTIFIED = datetime(2026, 11, 29, 12, tzinfo=UTC)


@pytest.fixture(scope="session")
def certify() -> Callable[..., str]:
    """Keep a certificate for a binding beside some shards; return its digest."""

    def made(
        shards: Path,
        binding: Mapping[str, Any],
        *,
        created: datetime = CERTIFIED,
        validity: timedelta = timedelta(days=30),
    ) -> str:
        passed = report.blank(
            "core",
            evidence="live",
            adapter="vllm_native",
            spec={},
            suite_digest="5" * 64,
            started=created.isoformat(),
            environment={"binding": binding, "recorded": {"verifier_name": "tiny"}},
        )
        for clause in passed.clauses:
            clause.add("pass", "")
        folder = shards / "certificates"
        folder.mkdir(parents=True, exist_ok=True)
        statement = certificate.issue(passed, now=created, validity=validity)
        digest = certificate.write(statement, folder / "new.json")
        (folder / "new.json").rename(folder / f"{digest}.json")
        return digest

    return made


class WithoutEngine:
    """A session that gets states from a function and writes them as an engine's worker does."""

    def __init__(self, states_of: Callable[[ShardOrder], Any]) -> None:
        self._states_of = states_of
        self.orders = 0

    def extract(
        self, orders: Iterable[ShardOrder], progress: Progress, pool: Pool
    ) -> Iterator[WrittenShard]:
        """Make one shard after the other, through a real ``Staging``."""
        from truetap.harness.staging import Staging

        staging = None
        for order in orders:
            self.orders += 1
            states = self._states_of(order)
            if staging is None:
                staging = Staging(
                    shape=tuple(states[0].shape[1:]),
                    dtype=states[0].dtype,
                    pool_bytes=pool.size_bytes,
                    threads=pool.threads,
                )
            partial = order.path.with_name(f"{order.path.name}.{self.orders}.partial")
            keys = [f"{self.orders}:{r.key}" for r in order.requests]
            lengths = [len(r.token_ids) for r in order.requests]
            staging.expect(order.path.name, str(partial), keys, lengths, list(order.loss_masks))
            for key, request, rows in zip(keys, order.requests, states, strict=True):
                staging.put(key, 0, request.token_ids, lambda a, b, rows=rows: rows[a:b])
                progress.finished(Finished(key, [], "", "length", None, None, None), request)
            report = staging.report([order.path.name], 60.0)
            if failed := report["failed"]:
                raise CouldNotRun(failed["message"], remedy="finished shards are kept")
            progress.status = Status(**report["status"])
            (seen,) = report["written"].values()
            yield WrittenShard(order, partial, [[tuple(p) for p in r["pieces"]] for r in seen])

    def environment(self) -> Environment:
        """Return the facts of no engine."""
        return Environment({"verifier": {}, "boundaries": []}, {"verifier_name": "tiny"})

    def close(self) -> None:
        """Nothing to stop."""


@pytest.fixture
def without_engine() -> type[WithoutEngine]:
    """The class of sessions that write without an engine; needs torch."""
    return WithoutEngine


@pytest.fixture
def console() -> Console:
    """A console whose text is read with ``console.file.getvalue()``."""
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(scope="session")
def paper_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that describes a verifier of 12 blocks; its weights are no weights.

    Enough for everything that does not load it, and made without torch.
    """
    from safetensors.numpy import save_file

    directory = tmp_path_factory.mktemp("verifiers") / "paper"
    directory.mkdir()
    config = {
        "model_type": "llama",
        "num_hidden_layers": 12,
        "hidden_size": 16,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"weight": np.arange(4, dtype=np.float32)}, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real Llama of 8 blocks, width 128, vocabulary 512, with random weights; needs torch."""
    from truetap.harness.random_verifier import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("verifiers") / "tiny", num_blocks=8)


@pytest.fixture(scope="session")
def trained() -> Any:
    """A byte-level BPE with merges over spaces and line breaks, as real ones have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<|im_start|>", "<|im_end|>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text()
    core.train_from_iterator([text, "\n\n\n\n" * 50, "the answer is the answer " * 50], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", bos_token="<s>")
    made.chat_template = CHATML
    return made


GIVES_UP_S = 10.0
"""How long the server below hangs: a client without deadlines fails its test, and in time."""


class FakeServer(ThreadingHTTPServer):
    """An OpenAI-compatible server on a port of its own; ``faults`` befall its next completions."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.models: list[dict[str, Any]] = [{"id": "tiny", "root": "org/Tiny"}]
        self.version = "0.32.0"
        self.answer: Callable[[list[int]], tuple[list[int], str]] = lambda _: ([1, 2, 3], "a b c")
        self.render: Callable[[list[dict[str, str]]], list[int]] | None = None
        self.faults: deque[str] = deque()
        self.broken: set[str] = set()
        """Paths that answer with status 503, each time."""
        self.change: Callable[[dict[str, Any]], Any] = lambda reply: reply
        """Done to every completion before it is sent."""
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.released = threading.Event()
        """Set when the test is over: what hangs then ends."""
        self.meeting: threading.Barrier | None = None
        self.working = self.most = 0
        self.lock = threading.Lock()

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that went away."""

    def completion(self, body: dict[str, Any]) -> Any:
        with self.lock:
            self.asked.append(body)
            self.working += 1
            self.most = max(self.most, self.working)
        if self.meeting is not None:
            self.meeting.wait(timeout=20)
        ids, text = self.answer(body["prompt"])
        ids = ids[: body["max_tokens"]]
        choice = {
            "index": 0,
            "text": text,
            "finish_reason": "stop" if len(ids) < body["max_tokens"] else "length",
            "prompt_token_ids": body["prompt"],
            "token_ids": ids,
        }
        with self.lock:
            self.working -= 1
        return self.change({"object": "text_completion", "choices": [choice]})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.keys.add(self.headers["Authorization"])
        if self.path in self.server.broken:
            self._send(503, {})
        elif self.path == "/v1/models":
            self._send(200, {"data": self.server.models})
        elif self.path == "/version":
            self._send(200, {"version": self.server.version})
        else:
            self._send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.keys.add(self.headers["Authorization"])
        if self.path in self.server.broken:
            self._send(503, {})
        elif self.path == "/tokenize" and self.server.render is not None:
            self._send(200, {"tokens": self.server.render(body["messages"])})
        elif self.path != "/v1/completions":
            self._send(404, {"detail": "Not Found"})
        elif self.server.faults:
            self._fail(self.server.faults.popleft(), body)
        else:
            self._send(200, self.server.completion(body))

    def _fail(self, fault: str, body: dict[str, Any]) -> None:
        self.close_connection = True
        if fault == "hang":
            self.server.released.wait(GIVES_UP_S)
        elif fault == "trickle":
            self._head(200, 10**9)
            ends = time.monotonic() + GIVES_UP_S
            while not self.server.released.wait(0.01) and time.monotonic() < ends:
                self.wfile.write(b" ")
                self.wfile.flush()
        elif fault == "drop":
            whole = json.dumps(self.server.completion(body)).encode()
            self._head(200, len(whole))
            self.wfile.write(whole[: len(whole) // 2])
        elif fault == "abort":
            self._send(200, {"choices": [{"text": "", "finish_reason": "abort"}]})
        elif fault == "html":
            self._head(200, 6)
            self.wfile.write(b"<html>")
        elif fault == "echo":  # as a proxy that shows what it was sent
            shown = f"{'.' * 285}{self.headers['Authorization']}"
            self._send(403, {"error": {"message": shown}})
        elif fault == "noise":
            self.wfile.write(f"{self.headers['Authorization']}\r\n\r\n".encode())
        elif fault == "encoding":
            self._head(200, 6, "gzip")
            self.wfile.write(b"<html>")
        else:
            self._send(int(fault), {"error": {"message": f"because\nof {fault}"}})

    def _head(self, status: int, length: int, encoding: str = "") -> None:
        self.send_response(status)
        if encoding:
            self.send_header("Content-Encoding", encoding)
        if status == 429:
            self.send_header("Retry-After", "0")
        if self.close_connection:
            self.send_header("Connection", "close")  # else the client may use it once more
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _send(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self._head(status, len(data))
        self.wfile.write(data)


@pytest.fixture
def served() -> Iterator[FakeServer]:
    """A server that answers, until it is told to do something else."""
    with FakeServer() as made:
        threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
        yield made
        made.released.set()
        made.shutdown()

"""The comparison with speculators' route: it must not compare unequal work."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from truetap.harness.errors import CheckFailed, CouldNotRun, UsageError
from truetap.harness.model import EngineSpec
from truetap.pipeline.prepare import Conversation

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [[5, 6, 7], [8, 9]]
FORM: dict[str, Any] = {"boundaries": 2, "width": 4, "dtype": "float32"}
SPEC = EngineSpec(
    model="some/verifier", boundaries=(2, 5), dtype="bfloat16", max_model_len=64,
    max_num_batched_tokens=32, max_num_seqs=8, enforce_eager=True, enable_prefix_caching=False,
)  # fmt: skip
LOG = (
    "(EngineCore pid=7) INFO 01-02 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with "
    "config: model='m', speculative_config=S(method='x', n=1), skip_tokenizer_init=False, "
    "compilation_config={{'mode': <M: 0>, 'sizes': [1, 2]}}, enable_prefix_caching={caching}\n"
    "(EngineCore pid=7) INFO 01-02 [omp.py:185] \tlocal_rank=0, core ids=[0, 1]\n"
)


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the scripts are, as when one of them is run."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.fixture
def against() -> Any:
    return importlib.import_module("against_speculators")


@pytest.fixture
def equal() -> Any:
    return importlib.import_module("equal_work")


@pytest.fixture
def route() -> Any:
    return importlib.import_module("speculators_route")


def written(folder: Path, row: int, ids: Sequence[int], shape: Sequence[int]) -> None:
    states = np.ones(shape, dtype=np.float32)
    save_file(
        {"token_ids": np.array(ids), "hidden_states": states}, folder / f"hs_{row}.safetensors"
    )


class TestWork:
    @pytest.fixture
    def states(self, tmp_path: Path) -> Path:
        for row, prompt in enumerate(PROMPTS):
            written(tmp_path, row, prompt, (len(prompt), 2, 4))
        return tmp_path

    def test_all_of_it(self, equal: Any, states: Path) -> None:
        held = equal.require_all(states, PROMPTS, **FORM)
        size = sum(path.stat().st_size for path in states.iterdir())
        assert held == {"tokens": 5, "bytes": size, "files": 2}

    def test_a_skipped_prompt(self, equal: Any, states: Path) -> None:
        (states / "hs_1.safetensors").unlink()
        with pytest.raises(CheckFailed, match="left out prompt 1"):
            equal.require_all(states, PROMPTS, **FORM)

    @pytest.mark.parametrize(
        ("ids", "shape", "says"),
        [
            ([8, 1], (2, 2, 4), "other tokens than prompt 1"),
            ([8, 9], (1, 2, 4), r"\[1, 2, 4\]"),
            ([8, 9], (2, 1, 4), r"\[2, 1, 4\]"),
        ],
    )
    def test_other_work(
        self, equal: Any, states: Path, ids: list[int], shape: tuple[int, ...], says: str
    ) -> None:
        written(states, 1, ids, shape)
        with pytest.raises(CheckFailed, match=says):
            equal.require_all(states, PROMPTS, **FORM)

    def test_another_dtype(self, equal: Any, states: Path) -> None:
        with pytest.raises(CheckFailed, match=r"in F32, not .* in BF16"):
            equal.require_all(states, PROMPTS, **FORM | {"dtype": "bfloat16"})

    def test_the_store(self, equal: Any, tmp_path: Path) -> None:
        asked = [Conversation(str(n), "train", tuple(p), 1) for n, p in enumerate(PROMPTS)]
        (tmp_path / "s").write_bytes(b"1234")

        class Held:
            ids, tokens = ["0", "1"], [5, 6, 7, 8, 9]

            def entries(self) -> Any:
                return {"s": {"shard": "s", "ids": self.ids}}

            def path(self, name: str) -> Path:
                return tmp_path / name

            def holds(self, _entry: Any, _ids: Any, tokens: Any, _masks: Any) -> bool:
                return bool(tokens == self.tokens)

        store = Held()
        told = {"tokens": 5, "bytes": 4, "files": 1, "uncertified": False}
        assert equal.counted(store, asked) == told
        for ids, tokens, says in (
            (["0"], [5, 6, 7], "left out 1"),
            (["0", "1"], [5, 6, 7, 8, 8], "other tokens"),
            (["0", "1", "1"], [], "1 prompts too many"),
            (["0", "1", "x"], [], "1 prompts too many"),
        ):
            store.ids, store.tokens = ids, tokens
            with pytest.raises(CheckFailed, match=says):
                equal.counted(store, asked)


class TestSettings:
    @staticmethod
    def logged(folder: Path, **settings: str) -> Path:
        path = folder / "log"
        path.write_text(LOG.format(**settings))
        return path

    def test_by_name(self, equal: Any, tmp_path: Path) -> None:
        assert equal.engine_settings(self.logged(tmp_path, caching="True")) == {
            "version": "0.32.0",
            "model": "'m'",
            "speculative_config": "S(method='x', n=1)",
            "skip_tokenizer_init": "False",
            "compilation_config": "{'mode': <M: 0>, 'sizes': [1, 2]}",
            "enable_prefix_caching": "True",
            "cores": "[0, 1]",
        }

    def test_a_silent_log(self, equal: Any, tmp_path: Path) -> None:
        (tmp_path / "log").write_text("nothing\n")
        with pytest.raises(CouldNotRun, match="does not say"):
            equal.engine_settings(tmp_path / "log")

    def test_compared(self, equal: Any, tmp_path: Path) -> None:
        one, other = (
            {"tokens": 5, "engine": equal.engine_settings(self.logged(tmp_path, caching=caching))}
            for caching in ("True", "False")
        )
        equal.require_equal(one, one, [])
        with pytest.raises(CheckFailed, match="enable_prefix_caching: True and False"):
            equal.require_equal(one, other, ["skip_tokenizer_init"])
        equal.require_equal(one, other, ["enable_prefix_caching"])
        with pytest.raises(CheckFailed, match="5 tokens against 6"):
            equal.require_equal(one, one | {"tokens": 6}, [])

    def test_the_server_gets_those_of_the_run(self, route: Any) -> None:
        command = route.server_command(SPEC, "stand-in", Path("staged"), 80, ["--seed=1"])
        told = " ".join(command)
        for part in (
            "some/verifier", "--dtype bfloat16", "--max-model-len 64", "--no-enable-prefix-caching",
            "--max-num-batched-tokens 32", "--max-num-seqs 8", "--enforce-eager",
            '"eagle_aux_hidden_state_layer_ids": [2, 5]', '"shared_storage_path": "staged"',
            '"kv_connector_module_path": "example_connector_cpu"',
        ):  # fmt: skip
            assert part in told
        assert "tokenizer" not in told
        assert command[-1] == "--seed=1"
        compiled = route.server_command(
            replace(SPEC, enforce_eager=False), "example", Path(), 1, []
        )
        assert "--no-enforce-eager" in compiled
        assert not any("module_path" in part for part in compiled)


class TestServer:
    """Its life, without an engine."""

    SERVES = (
        "import http.server as h, subprocess, sys\n"
        "class H(h.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        "    def log_message(self, *a): pass\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "h.HTTPServer(('127.0.0.1', {port}), H).serve_forever()\n"
    )

    @staticmethod
    def serves(route: Any, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
        def command(_spec: Any, _connector: str, _folder: Path, port: int, _more: Any) -> list[str]:
            return [sys.executable, "-c", code.replace("{port}", str(port))]

        monkeypatch.setattr(route, "server_command", command)

    def test_nothing_is_left(
        self, route: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        self.serves(route, monkeypatch, self.SERVES)
        with route.served(SPEC, "stand-in", tmp_path, [], patience_s=20) as (address, seconds):
            child = int((tmp_path / "server.log").read_text())
            assert psutil.pid_exists(child)
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", address)
            assert 0 < seconds < 20
        assert not psutil.pid_exists(child)

    def test_one_that_dies(
        self, route: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        self.serves(route, monkeypatch, "raise ValueError('no such model')")
        with (
            pytest.raises(CouldNotRun, match="no such model"),
            route.served(SPEC, "stand-in", tmp_path, [], patience_s=20),
        ):
            pass

    def test_one_that_hangs(
        self, route: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        self.serves(route, monkeypatch, "import time; time.sleep(600)")
        with (
            pytest.raises(CouldNotRun, match="did not answer"),
            route.served(SPEC, "stand-in", tmp_path, [], patience_s=0.3),
        ):
            pass


class TestExtract:
    def test_another_folder_and_nothing_else(self, against: Any) -> None:
        text = '# output = "no"\noutput = "a" # ours\nseed = 1\n[data]\nquestions = "output = x"\n'
        changed = against.moved(text, Path('/b "c'))
        assert changed == text.replace('output = "a" # ours', 'output = "/b \\"c"')
        for bad in ("seed = 1\n", text + text):
            with pytest.raises(UsageError, match="lines 'output"):
                against.moved(bad, Path("b"))

    def test_when_the_engine_starts(self, against: Any, tmp_path: Path) -> None:
        says = f"import time; time.sleep(0.2); print({against.STARTING!r})"
        began = time.time()
        assert against.told_at([sys.executable, "-c", says], tmp_path / "log") >= began + 0.2
        with pytest.raises(CouldNotRun, match="did not say"):
            against.told_at([sys.executable, "-c", "print('other')"], tmp_path / "log")
        fails = "print('truetap: the gate denies'); raise SystemExit(1)"
        with pytest.raises(CouldNotRun, match="exit code 1: truetap: the gate denies"):
            against.told_at([sys.executable, "-c", fails], tmp_path / "log")

    def test_the_product_still_says_so(self, against: Any) -> None:
        sources = (ROOT / "pipeline").glob("*.py")
        assert any(against.STARTING in path.read_text() for path in sources)


def test_both_have_as_many_requests_at_a_time(
    against: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unless another number is asked for; the result tells both."""
    session = (ROOT / "harness/adapters/vllm_session.py").read_text()
    assert "in_flight=2 * self._spec.max_num_seqs" in session, "B has another number by now"
    handed: list[list[str]] = []

    @contextlib.contextmanager
    def served(*_: Any, **__: Any) -> Any:
        yield "address", 1.0

    def generate(_a: Any, _m: Any, _d: Any, options: list[str], **_: Any) -> dict[str, float]:
        handed.append(options)
        return {}

    monkeypatch.setattr(against.rival, "served", served)
    monkeypatch.setattr(against.rival, "generate", generate)
    monkeypatch.setattr(against.arrow_dataset, "write_rows", lambda *_: None)
    monkeypatch.setattr(against.verifier, "describe", lambda _: SimpleNamespace(name="tiny"))
    monkeypatch.setattr(against.verifier, "digests", lambda _: {"weights_sha256": ""})
    monkeypatch.setattr(against, "summary", lambda _: {})
    for more, number in (([], 16), (["--concurrency", "5"], 5)):
        given = against.arguments().parse_args(["run.toml", *more])
        task = against.Task(tmp_path, tmp_path, SPEC, [], given)
        against.generated(task, tmp_path)
        assert handed[-1] == ["--concurrency", str(number)]
        told = against.told_of(task, {}, [{"engine": {}}])["settings"]["requests_at_a_time"]
        assert told == {"speculators": number, "truetap": 16}


def test_ratios_are_of_medians(against: Any) -> None:
    def run(route: str, seconds: float) -> dict[str, Any]:
        times = dict.fromkeys((*against.RATIOS, "engine_start"), seconds)
        return {"route": route, "tokens": 90, **times}

    told = against.summary(
        [run("speculators", s) for s in (6, 30, 5)] + [run("truetap", s) for s in (3, 2, 99)]
    )
    assert told["ratio"] == dict.fromkeys(against.RATIOS, 2.0)
    assert told["tokens_per_second"] == {"speculators": 15, "truetap": 30}


@pytest.mark.nightly  # imports vLLM; each run of the benchmark proves the same by value
@pytest.mark.torch
def test_the_stand_in_writes_a_requests_own_rows(tmp_path: Path) -> None:
    """Out of scattered blocks, with the lock held until the file is there, and then it is done."""
    import fcntl
    from concurrent.futures import ThreadPoolExecutor

    import torch
    from safetensors.torch import load_file

    module = importlib.import_module("example_connector_cpu")
    connector = module.ExampleConnectorCpu.__new__(module.ExampleConnectorCpu)
    cache = torch.randn(5, 2, 4, 3)  # blocks, boundaries, rows of a block, width
    path = tmp_path / "staged" / "one.safetensors"
    connector._is_tp_rank_zero, connector._block_size, connector._kv_cache = True, 4, cache
    connector.use_lock, connector._lock_fds = True, {}
    connector._req_futures, connector._req_copy_events = {}, {}
    connector._accumulated_finished_req_ids, connector._connector_metadata = set(), None
    connector._executor, free = ThreadPoolExecutor(1), threading.Event()
    connector._executor.submit(free.wait)
    ids = torch.tensor([7, 8, 9, 10, 11, 12])
    connector._submit_async_write(module.example.PendingSave("r", str(path), ids, [3, 1]))
    assert connector.get_finished({"r"}) == ({"r"}, None)
    cache_then = cache.clone()
    cache.zero_()  # the blocks are another request's now
    lock = os.open(f"{path}.lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    free.set()
    connector._executor.shutdown(wait=True)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)
    held = load_file(path)
    rows = torch.cat([cache_then[3].transpose(0, 1), cache_then[1].transpose(0, 1)])[:6]
    assert torch.equal(held["hidden_states"], rows)
    assert torch.equal(held["token_ids"], ids)

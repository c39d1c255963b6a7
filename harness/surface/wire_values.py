"""The values that are sent over a release's wire, and the words for how they arrived.

The words are in the docstring of ``truetap.harness.surface.transport``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from truetap.harness.surface.torch_standin import DType, Tensor


@dataclass
class Record:
    """A worker's value of a type of its own."""

    rows: int
    name: str


class Text(str):
    """A worker's value that looks like text and is not, as ``torch.__version__`` is."""

    __slots__ = ()


def a_function(worker: object) -> object:
    """Be a callable that a client sends or a worker returns."""
    return worker


def worker_values() -> dict[str, Any]:
    """Return fresh worker values: kind to value. Tensors are bfloat16, of 512 or 64 bytes."""
    import numpy as np

    return {
        "bool": True,
        "bytes": b"\x00\xff",
        "callable": a_function,
        "dataclass": Record(rows=3, name="a"),
        "dict": {"rank": 0, "rows": [1, 2], "note": None},
        "dict_of_tensors": {"a": _tensor(), "b": _tensor()},
        "float": 0.5,
        "int": 7,
        "list": [1, "two", None],
        "list_of_tensors": [_tensor(), _tensor()],
        "none": None,
        "numpy_array": np.arange(128, dtype=np.float32),
        "numpy_array_under_256_bytes": np.arange(8, dtype=np.float32),
        "numpy_scalar": np.float32(1.5),
        "set": {1, 2},
        "str": "text",
        "str_subclass": Text("2.9.0"),
        "tensor": _tensor(),
        "tensor_on_device": _tensor(device="cuda"),
        "tensor_under_256_bytes": _tensor(rows=4),
        "torch_dtype": DType("bfloat16"),
        "tuple": (1, "two"),
        "tuple_of_tensors": (_tensor(), _tensor()),
    }


def request_values() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return what a client can send: kind to (method, args) of ``collective_rpc``."""
    return {
        "callable_argument": ("method", (a_function,)),
        "callable_method": (a_function, ()),
        "tensor_argument": ("method", (_tensor(),)),
        "tuple_argument": ("method", ((1, "two"),)),
    }


def _tensor(rows: int = 32, device: str = "cpu") -> Tensor:
    data = bytes(range(rows * 16 % 256)) + bytes(rows * 16 - rows * 16 % 256)
    return Tensor(data, "bfloat16", (rows, 8), device)


def word_for(sent: Any, arrived: Any) -> str | None:
    """Return the word for how ``sent`` arrived; None if there is none."""
    import numpy as np

    if isinstance(sent, Tensor | np.ndarray):
        return _word_of_array(sent, arrived)
    if isinstance(sent, list | tuple | dict):
        return _word_of_container(sent, arrived)
    if type(arrived) is type(sent) and arrived == sent:
        return "same"
    plain = {
        "dict": isinstance(sent, Record) and arrived == vars(sent),
        "list": isinstance(sent, set) and type(arrived) is list and set(arrived) == sent,
        "str": isinstance(sent, str) and type(arrived) is str and arrived == str(sent),
    }
    return next((word for word, fits in plain.items() if fits), None)


def _word_of_array(sent: Any, arrived: Any) -> str | None:
    import numpy as np

    if isinstance(arrived, Tensor):
        return "same" if isinstance(sent, Tensor) and arrived.equal(sent) else None
    if isinstance(arrived, np.ndarray):
        if not isinstance(sent, np.ndarray) or not np.array_equal(sent, arrived):
            return None
        return "same" if arrived.flags.writeable else "read_only"
    match arrived if type(arrived) is list else None:
        case [str(), dims, int()] if dims == list(sent.shape):
            return "descriptor_data_lost"
        case [str(), dims, memoryview() | bytes()] if dims == list(sent.shape):
            return "descriptor_with_data"
    return None


def _word_of_container(sent: Any, arrived: Any) -> str | None:
    if not isinstance(arrived, list | tuple | dict) or len(arrived) != len(sent):
        return None
    pairs: Any
    if isinstance(sent, dict):
        if not isinstance(arrived, dict) or list(sent) != list(arrived):
            return None
        pairs = [(sent[key], arrived[key]) for key in sent]
    else:
        pairs = list(zip(sent, arrived, strict=True))
    words = {word_for(a, b) for a, b in pairs}
    if len(words) != 1 or None in words:
        return None
    inner = words.pop()
    outer = type(arrived).__name__
    if inner == "same":
        return "same" if type(arrived) is type(sent) else outer
    return f"{outer}_of_{inner}"

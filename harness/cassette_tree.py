"""Replies as trees: JSON that keeps exactly which Python objects came back.

The structure of a reply is what is under test, so nothing of it is tidied. A tree is JSON's null,
true, false, integer or text for that very value, and else an object of one key, the kind: ``list``,
``tuple``, ``set``, ``frozenset`` (items); ``dict`` (pairs, in order); ``float`` (text); ``bytes``,
``bytearray``, ``memoryview`` (hex); ``tensor``, ``ndarray`` (a name in the cassette's ``tensors``);
``numpy_scalar`` (dtype and hex); ``future`` (its class, and what it resolved to or raised);
``object`` (the class's name; what was in it is not kept).
"""

from __future__ import annotations

import builtins
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, Literal

from truetap.harness import scrub

KEPT_UP_TO = 16 * 1024
"""Bytes up to which a tensor is kept; of a larger one only dtype, shape and digest are."""


@dataclass(frozen=True)
class RecordedTensor:
    """A tensor or array that was not asked for, or whose bytes were not kept."""

    kind: Literal["tensor", "ndarray"]
    dtype: str
    """As torch names it ("bfloat16"), or as numpy spells it ("<f4")."""
    shape: tuple[int, ...]
    sha256: str
    """Of the raw bytes in C order, hex."""


@dataclass(frozen=True)
class RecordedObject:
    """An object that is neither a builtin nor an array: only its class's name was kept."""

    name: str


class RecordedError(Exception):
    """A recorded exception whose class is no builtin; the message starts with its name."""


@dataclass(frozen=True)
class Raised:
    """The call raised; ``message`` was scrubbed of paths and names, and shortened."""

    type: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Describe ``error``."""
        return cls(type(error).__name__, scrub.message(str(error)))

    def error(self) -> Exception:
        """Return an exception of the recorded class if it is a builtin, else a RecordedError."""
        kind = getattr(builtins, self.type, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            return kind(self.message)
        return RecordedError(f"{self.type}: {self.message}")


class Encoder:
    """Turns values into trees, and keeps what their tensors and arrays hold.

    Encode a reply before the next call is made: a view of the engine's buffers changes.
    """

    def __init__(self, *, kept_up_to: int = KEPT_UP_TO) -> None:
        self._kept_up_to = kept_up_to
        self.described: dict[str, dict[str, Any]] = {}
        """Kind, dtype, shape and digest of every tensor, by the name that trees give it."""
        self.blobs: dict[str, bytes] = {}
        """The raw bytes of those that are kept."""
        self._writers: dict[type, Callable[[Any], Any]] = {
            float: repr,
            list: self._items,
            tuple: self._items,
            # In a stable order: a set's own differs from run to run.
            set: lambda items: sorted(self._items(items), key=json.dumps),
            frozenset: lambda items: sorted(self._items(items), key=json.dumps),
            dict: lambda pairs: [[self.encode(k), self.encode(v)] for k, v in pairs.items()],
            bytes: bytes.hex,
            bytearray: bytearray.hex,
            memoryview: lambda view: bytes(view).hex(),
        }

    def encode(self, value: Any) -> Any:
        """Return the tree of ``value``, waiting for the futures in it; keep its tensors' bytes."""
        kind = type(value)
        if value is None or kind in {bool, int, str}:
            return value
        if kind in self._writers:
            return {kind.__name__: self._writers[kind](value)}
        if isinstance(value, Future):
            return {"future": {"class": _name(kind), **self._resolved(value)}}
        return self._array(value) or {"object": _name(kind)}

    def _items(self, items: Iterable[Any]) -> list[Any]:
        return [self.encode(item) for item in items]

    def _resolved(self, future: Future[Any]) -> dict[str, Any]:
        try:
            # Without a timeout: some of vLLM's futures refuse one.
            result = future.result()
        except Exception as error:
            return {"raised": asdict(Raised.of(error))}
        return {"result": self.encode(result)}

    def _array(self, value: Any) -> dict[str, Any] | None:
        import numpy as np

        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.Tensor:
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            dtype = str(value.dtype).removeprefix("torch.")
            return {"tensor": self._keep("tensor", dtype, value.shape, flat.numpy().tobytes())}
        if type(value) is np.ndarray and not value.dtype.hasobject:
            raw = value.tobytes(order="C")
            return {"ndarray": self._keep("ndarray", value.dtype.str, value.shape, raw)}
        if isinstance(value, np.generic) and not value.dtype.hasobject:
            return {"numpy_scalar": [value.dtype.str, value.tobytes().hex()]}
        return None

    def _keep(self, kind: str, dtype: str, shape: Any, raw: bytes) -> str:
        digest = hashlib.sha256(raw).hexdigest()
        described = {
            "kind": kind,
            "dtype": dtype,
            "shape": list(shape),
            "sha256": digest,
            "kept": len(raw) <= self._kept_up_to,
        }
        for name, earlier in self.described.items():
            if earlier == described:
                return name
        name = f"t{len(self.described)}"
        self.described[name] = described
        if described["kept"]:
            self.blobs[name] = raw
        return name


class Decoder:
    """Turns trees into Python objects."""

    def __init__(
        self,
        described: Mapping[str, Mapping[str, Any]],
        blobs: Mapping[str, bytes],
        *,
        with_torch: bool,
    ) -> None:
        self._described, self._blobs, self._with_torch = described, blobs, with_torch
        self._readers: dict[str, Callable[[Any], Any]] = {
            "float": float,
            "list": self._items,
            "tuple": lambda items: tuple(self._items(items)),
            "set": lambda items: set(self._items(items)),
            "frozenset": lambda items: frozenset(self._items(items)),
            "dict": lambda pairs: {self.value(key): self.value(item) for key, item in pairs},
            "bytes": bytes.fromhex,
            "bytearray": bytearray.fromhex,
            "memoryview": lambda digits: memoryview(bytes.fromhex(digits)),
            "tensor": self._array,
            "ndarray": self._array,
            "numpy_scalar": _numpy_scalar,
            "future": self._future,
            "object": RecordedObject,
        }

    def value(self, tree: Any) -> Any:
        """Return the value of ``tree``; raises KeyError or ValueError if it is none."""
        if tree is None or isinstance(tree, (bool, int, str)):
            return tree
        ((kind, content),) = tree.items()
        return self._readers[kind](content)

    def _items(self, trees: list[Any]) -> list[Any]:
        return [self.value(tree) for tree in trees]

    def _future(self, content: Mapping[str, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        if "raised" in content:
            future.set_exception(Raised(**content["raised"]).error())
        else:
            future.set_result(self.value(content["result"]))
        return future

    def _array(self, name: str) -> Any:
        entry, raw = self._described[name], self._blobs.get(name)
        kind, dtype, shape = entry["kind"], entry["dtype"], tuple(entry["shape"])
        if raw is None or (kind == "tensor" and not self._with_torch):
            return RecordedTensor(kind, dtype, shape, entry["sha256"])
        if kind == "ndarray":
            import numpy as np

            return np.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
        import torch

        if not raw:
            return torch.empty(shape, dtype=getattr(torch, dtype))
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        return flat.view(getattr(torch, dtype)).reshape(shape)


def _numpy_scalar(content: list[str]) -> Any:
    import numpy as np

    dtype, digits = content
    return np.frombuffer(bytes.fromhex(digits), dtype=dtype)[0]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"

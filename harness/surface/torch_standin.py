"""The few parts of torch that a release's serialiser touches, over bytes.

A tensor here is bytes, a dtype's name, dims and a device. What is not written down is
``NotUnderstood``, so that a release that needs more of torch is noticed.
"""

from __future__ import annotations

from typing import Any

from truetap.harness.surface.strict import Prepared, Strict

_BYTES = {"uint8": 1, "bfloat16": 2, "float32": 4}


class DType:
    """A torch dtype; pickled by name, as torch does."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DType) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class Tensor(Strict):
    """A contiguous tensor."""

    def __init__(self, data: Any, dtype: str, shape: tuple[int, ...], device: str = "cpu") -> None:
        self._data = data
        self.dtype = DType(dtype)
        self.shape = shape
        self.device = device
        self.is_cpu = device == "cpu"
        self.nbytes = len(data)

    def equal(self, other: Tensor) -> bool:
        """Return whether dtype, dims and bytes are equal, on whatever device."""
        return (self.dtype, self.shape) == (other.dtype, other.shape) and (
            bytes(self._data) == bytes(other._data)
        )

    def numel(self) -> int:
        """Return the number of elements."""
        return self.nbytes // _BYTES[self.dtype.name]

    def contiguous(self) -> Tensor:
        """Return itself: every tensor here is contiguous."""
        return self

    def flatten(self) -> Tensor:
        """Return it with one dimension."""
        return self.view((self.numel(),))

    def clone(self) -> Tensor:
        """Return a copy."""
        return Tensor(bytes(self._data), self.dtype.name, self.shape, self.device)

    def cpu(self) -> Tensor:
        """Return it on the CPU."""
        return Tensor(self._data, self.dtype.name, self.shape)

    def view(self, to: Any) -> Tensor:
        """Return the same bytes with other dims, or, of a flat tensor, as another dtype."""
        if isinstance(to, DType):
            shape: tuple[int, ...] = (self.nbytes // _BYTES[to.name],)
            return Tensor(self._data, to.name, shape, self.device)
        return Tensor(self._data, self.dtype.name, tuple(to), self.device)

    def numpy(self) -> Any:
        """Return an array over the same memory; torch's errors for what numpy cannot hold."""
        import numpy as np

        if not self.is_cpu:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy")
        if self.dtype.name == "bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return np.frombuffer(self._data, dtype=self.dtype.name).reshape(self.shape)


Tensor.__module__, Tensor.__qualname__ = "torch", "Tensor"


def torch_module() -> Prepared:
    """Return the stand-in module."""
    dtypes = {name: DType(name) for name in _BYTES}

    def frombuffer(buffer: Any, *, dtype: DType) -> Tensor:
        data = memoryview(buffer).cast("B")
        return Tensor(data, dtype.name, (len(data) // _BYTES[dtype.name],))

    return Prepared(
        "torch",
        Tensor=Tensor,
        dtype=DType,
        frombuffer=frombuffer,
        **dtypes,
    )

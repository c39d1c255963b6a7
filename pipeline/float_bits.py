"""Floats as the unsigned integers that hold them: a few numpy calls look at every value.

Numpy, unlike torch, computes in the thread that asks, without Python's lock and without threads of
its own. So many threads look at many tensors at once, and after each call a thread has to wait for
the lock again, which another may hold long: the fewer calls the better.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


class FloatBits(NamedTuple):
    """Bits of floats, in the shape of their tensor."""

    array: npt.NDArray[Any]
    sign: int
    """The sign's bit."""
    infinite: int
    """Infinity; what is larger, without its sign, is no number."""

    @property
    def finite(self) -> bool:
        """Whether every value is finite."""
        # Bits of floats order as their size does, and infinity's are a limit; those with a sign are
        # the largest of all as unsigned numbers, and negative as signed ones.
        if not self.array.size:
            return True
        signed = self.array.view(f"i{self.array.itemsize}")
        return bool(self.array.max() < self.sign + self.infinite and signed.max() < self.infinite)

    def not_finite(self, some: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return which of some rows of the array hold a value that is not finite."""
        flat = (some & (self.sign - 1)).reshape(len(some), -1)
        held: npt.NDArray[Any] = np.any(flat >= self.infinite, axis=1)
        return held

    def zero(self, some: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return which of some rows of the array hold nothing but zeros."""
        flat = (some & (self.sign - 1)).reshape(len(some), -1)
        held: npt.NDArray[Any] = ~np.any(flat, axis=1)
        return held


def of(states: torch.Tensor) -> FloatBits:
    """Return the bits of a tensor of 2 or 4 bytes a value, without copying it."""
    import torch

    size = states.element_size()
    kind = {2: torch.int16, 4: torch.int32}[size]
    infinite = torch.tensor(float("inf"), dtype=states.dtype).view(kind)
    array: npt.NDArray[Any] = states.view(kind).numpy().view(f"u{size}")
    return FloatBits(array, 1 << (8 * size - 1), int(infinite))

"""Values that travel between processes and come back exactly as they were.

An engine's own serialisers alter values silently (tuples to lists, tensors to ``[dtype, shape,
index]`` with their data lost) or die of them, depending on release and settings. A value is
therefore taken apart: containers and scalars into a tree of builtins that no serialiser changes,
tensors and arrays into a file next to it.

The tree. None, bool, int of 64 bits, float, text in UTF-8 and bytes stand for themselves. All else
is a list that begins with a tag: ``list``, ``tuple``, ``set``, ``frozenset`` (elements follow),
``dict`` (pairs follow, flat), ``int`` (hexadecimal), ``str`` (bytes, surrogates kept), ``scalar``
(numpy dtype, bytes), ``tensor`` and ``array`` (dtype, shape, number of the entry in the file).

The file is safetensors: entry ``"0"``, ``"1"``, ... in order, each uint8 of one dimension, the raw
bytes of one tensor in row-major order. Its SHA-256 travels with the tree.
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from truetap.harness.errors import IntegrityError, UsageError

MAX_DEPTH = 100
"""Containers within containers. Serialisers give up at some depth: better here, and with a name."""

_SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_AS_THEY_ARE = (type(None), bool, float, bytes)
_SCALARS = "biufcmM"  # kinds of numpy dtype: bool, numbers, times; not text, objects or records
_ARRAYS = _SCALARS + "SU"


class CannotTravel(UsageError):
    """A value, or something in it, cannot be taken apart; the message names its place and type."""


def take_apart(value: Any, where: str, tensors: Sequence[Any] = ()) -> tuple[Any, list[Any]]:
    """Return the tree of ``value``, and its tensors and arrays in the order of their numbers.

    ``where`` is what errors call the value; ``tensors`` come before its own. Raises
    ``CannotTravel`` for subclasses of builtins, for cycles, and for anything else that would not
    come back as it was. A container that occurs twice comes back as two. Of a parameter, its tensor
    travels.
    """
    all_tensors = list(tensors)
    return _take_apart(value, where, (), all_tensors), all_tensors


def put_together(tree: Any, entries: Sequence[np.ndarray[Any, Any]]) -> Any:
    """Return the value of a tree; ``entries`` are the file's, and are used as memory.

    Tensors are on the CPU and own their memory. Raises ``IntegrityError`` if the tree is not one
    that ``take_apart`` makes, or does not fit the entries.
    """
    left = set(range(len(entries)))

    def claim(number: Any, size: int) -> np.ndarray[Any, Any]:
        if type(number) is not int or number not in left:
            raise IntegrityError(f"there is no entry {number!r} left in the file")
        left.remove(number)
        if len(entries[number]) != size:
            raise IntegrityError(
                f"entry {number} has {len(entries[number])} bytes where {size} are due"
            )
        return entries[number]

    try:
        value = _put_together(tree, claim)
    except IntegrityError:
        raise
    except Exception as error:  # whatever a foreign tree makes torch, numpy or a container say
        raise IntegrityError(f"no value can be made: {type(error).__name__}: {error}") from error
    if left:
        raise IntegrityError(f"{len(left)} entries of the file are not part of the value")
    return value


def write(tensors: Sequence[Any], path: Path) -> str | None:
    """Write tensors and arrays to a new file; return its SHA-256, hex, or None for no tensors.

    Raises OSError, with nothing left behind, if the file exists, its folder does not, or the disk
    is full.
    """
    if not tensors:
        return None
    header: dict[str, Any] = {}
    end = 0
    for number, tensor in enumerate(tensors):
        start, end = end, end + tensor.nbytes
        header[str(number)] = {
            "dtype": "U8",
            "shape": [tensor.nbytes],
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    # By hand, not by the library: it copies every tensor before it writes the first, and tells a
    # full disk in the text of its error only.
    with path.open("xb") as file:
        try:
            for part in _parts(len(text).to_bytes(8, "little") + text, tensors):
                file.write(part)
                digest.update(part)
            file.flush()
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    return digest.hexdigest()


def read(path: Path, sha256: str | None) -> list[np.ndarray[Any, Any]]:
    """Return the entries of a file in the order of their numbers, in memory of their own.

    Raises ``IntegrityError`` unless the file has this digest. No digest: no file, no entries.
    """
    if sha256 is None:
        return []
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            raise IntegrityError(f"{path.name} is torn or not the worker's: its digest is {found}")
        with safe_open(path, framework="np") as entries:
            return [entries.get_tensor(str(number)) for number in range(len(entries.keys()))]
    except (OSError, SafetensorError) as error:
        raise IntegrityError(f"{path.name} cannot be read: {error}") from error


def unpack(tree: Any, path: Path, sha256: str | None) -> Any:
    """Return the value of a tree and of the file at ``path``; see ``read`` and ``put_together``."""
    return put_together(tree, read(path, sha256))


def _take_apart(value: Any, where: str, above: tuple[int, ...], tensors: list[Any]) -> Any:
    if _is_itself(value):
        return value
    kind = type(value)
    if kind is dict or kind in _SEQUENCES.values():
        if id(value) in above:
            raise CannotTravel(f"{where} is a {kind.__name__} that contains itself")
        if len(above) == MAX_DEPTH:
            raise CannotTravel(f"{where} lies more than {MAX_DEPTH} containers deep")
        return [kind.__name__, *_elements(value, where, (*above, id(value)), tensors)]
    if kind is int:
        return ["int", hex(value)]
    if kind is str:
        return ["str", value.encode(errors="surrogatepass")]
    if isinstance(value, np.generic) and value.dtype.kind in _SCALARS:
        return ["scalar", value.dtype.str, value.tobytes()]
    return _take_out(value, where, tensors)


def _elements(value: Any, where: str, above: tuple[int, ...], tensors: list[Any]) -> Iterator[Any]:
    """Yield the trees of what a container holds; of a dictionary, each key before its value."""
    if type(value) is dict:
        for key, item in value.items():
            yield _take_apart(key, f"a key of {where}", above, tensors)
            yield _take_apart(item, f"{where}[{reprlib.repr(key)}]", above, tensors)
        return
    ordered = type(value) in (list, tuple)
    for index, item in enumerate(value):
        if _is_itself(item):  # no place is spelled out for each of a million token ids
            yield item
        else:
            place = f"{where}[{index}]" if ordered else f"an element of {where}"
            yield _take_apart(item, place, above, tensors)


def _take_out(value: Any, where: str, tensors: list[Any]) -> list[Any]:
    """Add a tensor or array to ``tensors``; return the tree that stands for it."""
    if type(value) is np.ndarray and value.dtype.kind in _ARRAYS:
        tag, name = "array", value.dtype.str
    else:
        value = _plain_tensor(value, where)
        tag, name = "tensor", str(value.dtype).removeprefix("torch.")
    tensors.append(value)
    return [tag, name, list(value.shape), len(tensors) - 1]


def _is_itself(value: Any) -> bool:
    """Say whether a value stands for itself in a tree."""
    kind = type(value)
    if kind is int:
        return bool(-(2**63) <= value < 2**64)
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
        return True
    return kind in _AS_THEY_ARE


def _plain_tensor(value: Any, where: str) -> Any:
    """Return the tensor that travels for ``value``; raise ``CannotTravel`` if there is none."""
    torch = sys.modules.get("torch")  # whoever has a tensor has it loaded
    if torch is None or not isinstance(value, torch.Tensor):
        raise CannotTravel(f"{where} is a {_name(type(value))}", remedy=_remedy(value))
    if isinstance(value, torch.nn.Parameter):
        value = value.detach().as_subclass(torch.Tensor)
    if type(value) is not torch.Tensor:
        raise CannotTravel(
            f"{where} is a {_name(type(value))}, a subclass of tensor",
            remedy="give a plain tensor of what is meant",
        )
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        raise CannotTravel(
            f"{where} is a tensor that is sparse, nested or quantized",
            remedy="give its parts as plain tensors",
        )
    if value.is_meta:
        raise CannotTravel(f"{where} is a tensor without data, on the device meta")
    return value.detach()


def _parts(header: bytes, tensors: Sequence[Any]) -> Iterator[Any]:
    """Yield the bytes of a file, one tensor at a time."""
    yield header
    for tensor in tensors:
        if not tensor.nbytes:
            continue
        if isinstance(tensor, np.ndarray):
            yield np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
            continue
        yield _flat_bytes(tensor).numpy().data


def _flat_bytes(tensor: Any) -> Any:
    """Return a tensor's bytes in row-major order, uint8 of one dimension, on the CPU."""
    import torch

    # As integers of the same size: not every dtype can be copied.
    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain = tensor.resolve_conj().resolve_neg()
    plain = plain.view(same_size.get(plain.itemsize, plain.dtype)).cpu().contiguous()
    # Not flatten: what has one element may count as contiguous and keep a stride of its own.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _put_together(tree: Any, claim: Callable[[Any, int], np.ndarray[Any, Any]]) -> Any:
    if _is_itself(tree):
        return tree
    if type(tree) is not list:
        raise IntegrityError(f"a {_name(type(tree))} is not part of a value")
    tag, *rest = tree
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](_put_together(item, claim) for item in rest)
    if tag == "dict":
        whole = [_put_together(item, claim) for item in rest]
        return dict(zip(whole[::2], whole[1::2], strict=True))
    if tag not in _MAKERS:
        raise IntegrityError(f"{tag!r} is not the tag of a value")
    return _MAKERS[tag](claim, *rest)


def _scalar(_: Any, name: str, raw: bytes) -> Any:
    return np.frombuffer(raw, _dtype(name, _SCALARS))[0]


def _array(claim: Any, name: str, shape: list[int], number: int) -> Any:
    dtype = _dtype(name, _ARRAYS)
    return np.ndarray(shape, dtype, buffer=claim(number, _count(shape) * dtype.itemsize))


def _tensor(claim: Any, name: str, shape: list[int], number: int) -> Any:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise IntegrityError(f"torch {torch.__version__} has no dtype {name!r}")
    entry = claim(number, _count(shape) * dtype.itemsize)
    if not len(entry):
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(entry).view(dtype).reshape(shape)


_MAKERS: dict[str, Callable[..., Any]] = {
    "int": lambda _, digits: int(digits, 16),
    "str": lambda _, raw: raw.decode(errors="surrogatepass"),
    "scalar": _scalar,
    "array": _array,
    "tensor": _tensor,
}


def _count(shape: list[int]) -> int:
    if not all(type(size) is int and size >= 0 for size in shape):
        raise IntegrityError(f"{shape!r} is not a shape")
    return math.prod(shape)


def _dtype(name: str, kinds: str) -> np.dtype[Any]:
    """Return a numpy dtype; not one that holds pointers, whatever a foreign tree says."""
    dtype = np.dtype(name)
    if dtype.kind not in kinds:
        raise IntegrityError(f"{name!r} is not a dtype that travels")
    return dtype


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _remedy(value: Any) -> str:
    # As torch's version is, and its sizes, named tuples and members of many enumerations.
    for base in (str, bytes, int, float, tuple, list, dict, set, frozenset):
        if isinstance(value, base):
            return f"only {base.__name__} itself travels, no subclass: convert it"
    return "convert it to builtins, tensors or numpy arrays"

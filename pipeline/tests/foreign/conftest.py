"""A small verifier with a tokenizer, its real states, and writers of every producer's layout."""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from rich.console import Console

from truetap.harness import shard
from truetap.pipeline.foreign import audit as auditing
from truetap.pipeline.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

BLOCKS, WIDTH = 12, 32
USUAL = (2, 6, 9, 12)
TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)


@dataclass(frozen=True)
class Kept:
    """What is written for one request; a test changes it before."""

    token_ids: list[int]
    mask: list[int]
    every: torch.Tensor
    """``[T, 13, 32]``: all boundaries, in bfloat16."""
    normed: torch.Tensor
    boundaries: tuple[int, ...] = USUAL
    last_normed: bool = False
    states: torch.Tensor | None = None
    """In place of what ``boundaries`` and ``last_normed`` say."""

    @property
    def slots(self) -> torch.Tensor:
        if self.states is not None:
            return self.states
        chosen = self.every[:, list(self.boundaries)].clone()
        if self.last_normed:
            chosen[:, -1] = self.normed
        return chosen.contiguous()

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Kept:
        return replace(self, states=change(self.slots).contiguous())


@pytest.fixture(scope="session")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 12 blocks, width 32, with a chat template of ChatML's kind."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from truetap.harness.random_verifier import narrow_llama

    directory = narrow_llama(tmp_path_factory.mktemp("audit") / "narrow")
    words = ["<pad>", "<|im_start|>", "<|im_end|>", "\n", "user", "assistant", "Which?", "Zebra"]
    words += [f"w{number}" for number in range(500)]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
    raw = Tokenizer(model)
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def conversation(index: int) -> tuple[list[int], list[int]]:
    """Token ids and mask of a question and an answer; all begin alike, no two have one length."""
    drawn = np.random.default_rng(index).integers(8, 508, size=40).tolist()
    question, answer = drawn[: 6 + index], drawn[20 : 36 + index]
    prompt = [1, 4, 3, *question, 2, 3, 1, 5, 3]
    ids = [*prompt, *answer, 2, 3]
    return ids, [0] * len(prompt) + [1] * len(answer) + [1, 0]


@pytest.fixture(scope="session")
def right(verifier: Path) -> list[Kept]:
    """Right data of eight requests: the verifier's own states in bfloat16."""
    import torch

    from truetap.harness import reference

    rough = reference._load(verifier, "bfloat16")
    kept = []
    for index in range(8):
        ids, mask = conversation(index)
        boundaries, normed, _ = reference._run(rough, ids)
        every = torch.from_numpy(boundaries).transpose(0, 1).to(torch.bfloat16)
        kept.append(Kept(ids, mask, every, torch.from_numpy(normed).to(torch.bfloat16)))
    return kept


def write_truetap(root: Path, data: Sequence[Kept]) -> None:
    store = Store(root)
    for number in range(0, len(data), 3):
        part = data[number : number + 3]
        name = f"shard-{number:05d}.safetensors"
        path = store.path(name)
        states = [kept.slots for kept in part]
        ids = [kept.token_ids[: len(s)] for kept, s in zip(part, states, strict=True)]
        masks = [bytes(kept.mask[: len(s)]) for kept, s in zip(part, states, strict=True)]
        digests = shard.write_partial(path, states, ids, masks)
        entry = {"shard": name, "digests": digests, "certificate": "0" * 64}
        entry |= {"ids": [f"q{number + i}" for i in range(len(part))], "boundaries": list(USUAL)}
        store.record(entry)


def write_speculators(root: Path, data: Sequence[Kept], *, fp8: bool = False) -> None:
    """As 0.5 to 0.9 do; ``test_library_files`` compares it with the library's own code."""
    from datasets import Dataset
    from safetensors.torch import save_file

    (root / "hidden_states").mkdir()
    for index, kept in enumerate(data):
        tensors = {"token_ids": tensor(kept.token_ids), "hidden_states": kept.slots}
        if fp8:
            from hs_connectors.fp8_utils import quantize_tensor_to_fp8

            states, scales = quantize_tensor_to_fp8(kept.slots)
            tensors |= {"hidden_states": states, "hidden_states_scales": scales}
        save_file(tensors, root / "hidden_states" / f"hs_{index}.safetensors")
    columns = {
        "input_ids": [kept.token_ids for kept in data],
        "loss_mask": [kept.mask for kept in data],
        "seq_len": [len(kept.token_ids) for kept in data],
    }
    Dataset.from_dict(columns).with_format("torch").save_to_disk(root)


def write_speculators_old(root: Path, data: Sequence[Kept]) -> None:
    """As 0.3 and 0.4 did: a list of states, one a slot."""
    import torch

    torch.save({1: 2}, root / "token_freq.pt")
    for index, kept in enumerate(data):
        content = {
            "input_ids": tensor(kept.token_ids),
            "loss_mask": tensor(kept.mask),
            "hidden_states": [slot.clone() for slot in kept.slots.unbind(1)],
        }
        torch.save(content, root / f"data_{index}.pt")


def write_specforge(root: Path, data: Sequence[Kept], *, packed: bool = False) -> None:
    """As SpecForge's ``scripts/prepare_hidden_states.py`` does."""
    import torch

    folder = root / "rows_0-2000"
    folder.mkdir()
    for index, kept in enumerate(data):
        content = {
            "input_ids": tensor(kept.token_ids),
            "loss_mask": tensor(kept.mask),
            "hidden_state": kept.slots[:, -1].clone()[None],
            "aux_hidden_state": kept.slots[:, :-1].flatten(1).clone()[None],
        }
        raw = io.BytesIO()
        torch.save(content, raw)
        path = folder / (f"data_{index}.ckpt" + ".gz" * packed)
        path.write_bytes(gzip.compress(raw.getvalue()) if packed else raw.getvalue())


def write_modelopt(root: Path, data: Sequence[Kept], *, masks: bool = True) -> None:
    """As Model-Optimizer's ``collect_hidden_states/compute_hidden_states_hf.py`` does."""
    import torch

    for index, kept in enumerate(data):
        content = {
            "input_ids": tensor(kept.token_ids),
            "hidden_states": kept.slots[:, -1].clone(),
            "aux_hidden_states": kept.slots[:, :-1].flatten(1).clone(),
            "conversation_id": f"conversation-{index}",
        }
        if masks:
            content["loss_mask"] = tensor(kept.mask)
        torch.save(content, root / f"conversation-{index}.pt")


def tensor(values: Sequence[int]) -> torch.Tensor:
    import torch

    return torch.tensor(values)


@dataclass(frozen=True)
class Layout:
    producer: str
    write: Callable[..., None]
    last_normed: bool
    """What its trainer wants."""


LAYOUTS = {
    "truetap": Layout("truetap", write_truetap, last_normed=False),
    "speculators": Layout("speculators", write_speculators, last_normed=False),
    "speculators-0.4": Layout("speculators", write_speculators_old, last_normed=False),
    "specforge": Layout("specforge", write_specforge, last_normed=True),
    "modelopt": Layout("modelopt", write_modelopt, last_normed=True),
}


class Audited:
    """A report, with what tests ask of it."""

    def __init__(self, report: dict[str, Any], console: Console) -> None:
        self.report, self.console = report, console

    @property
    def errors(self) -> dict[str, list[str]]:
        """Codes of faults, each with the files that have it (their last part)."""
        return {
            finding["code"]: [one["file"].rpartition("/")[2] for one in finding["files"]]
            for finding in self.report["findings"]
            if finding["severity"] == "error"
        }

    def told(self, code: str) -> str:
        """Everything said under a code."""
        return json.dumps([f for f in self.report["findings"] if f["code"] == code])


@pytest.fixture
def audited(verifier: Path, tmp_path: Path) -> Callable[..., Audited]:
    """Write data in a layout and audit it; all of it by value unless told otherwise."""

    def run(layout: str, data: Sequence[Kept] | None, **options: Any) -> Audited:
        root = tmp_path / "data"
        if data is not None:
            root.mkdir()
            LAYOUTS[layout].write(root, data, **options.pop("how", {}))
        options = {"sample": None, "state": tmp_path / "audit.state"} | options
        console = Console(file=io.StringIO(), width=200)
        producer = LAYOUTS[layout].producer
        request = auditing.Request(root, producer, verifier, **options)
        return Audited(auditing.audit_folder(request, console), console)

    return run


@pytest.fixture(scope="session")
def layouts() -> dict[str, Layout]:
    """Every producer's layout by name."""
    return LAYOUTS

"""The EAGLE-3 draft head: its vocabulary, its model and its files.

Model and checkpoint format are those of the speculators library; vLLM loads what ``save`` writes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from truetap.harness.errors import CouldNotRun, UsageError
from truetap.harness.model import EngineSpec
from truetap.pipeline import export_check, run_folder
from truetap.pipeline.config import RunConfig
from truetap.pipeline.prepare import Conversation


def vocabulary_of(
    conversations: Sequence[Conversation], size: int, verifier_size: int
) -> list[int]:
    """Return the verifier ids of the draft's vocabulary, ascending.

    Most frequent under the loss mask first, then most frequent in the prompts, then lowest id: a
    corpus with fewer distinct tokens than ``size`` is filled up, so that the size is exact.
    """
    if size > verifier_size:
        raise UsageError(
            f"train.draft_vocabulary is {size}, the verifier has {verifier_size} tokens",
            remedy=f"set it to {verifier_size} or less",
        )
    answered, seen = [0] * verifier_size, [0] * verifier_size
    for conversation in conversations:
        for token, bit in zip(conversation.token_ids, conversation.loss_mask, strict=True):
            answered[token] += bit
            seen[token] += 1
    ranked = sorted(range(verifier_size), key=lambda t: (-answered[t], -seen[t], t))
    return sorted(ranked[:size])


def build(config: RunConfig, spec: EngineSpec, vocabulary: Sequence[int]) -> Any:
    """Return speculators' EAGLE-3 model for this verifier, with the seed's initial weights."""
    try:
        import torch
        from speculators.models.eagle3 import Eagle3DraftModel
        from transformers import AutoConfig, LlamaConfig
    except ImportError as error:
        raise CouldNotRun(
            f"training cannot run: {error}", remedy="pip install 'truetap[train]'"
        ) from error
    _quiet()
    verifier = AutoConfig.from_pretrained(spec.model)
    layer = verifier.to_dict() | {"num_hidden_layers": 1, "tie_word_embeddings": False}
    for name in ("architectures", "model_type", "dtype", "torch_dtype"):
        layer.pop(name, None)
    kept = torch.tensor(vocabulary)
    to_draft = torch.zeros(verifier.vocab_size, dtype=torch.bool)
    to_draft[kept] = True
    torch.manual_seed(config.seed)
    model = Eagle3DraftModel.from_training_args(
        LlamaConfig(**layer),
        t2d=to_draft,
        d2t=kept - torch.arange(len(kept)),
        num_layers=1,
        draft_vocab_size=len(kept),
        norm_before_residual=False,
        norm_before_fc=True,
        ttt_steps=config.train.test_time_steps,
        target_layer_ids=list(spec.boundaries[:-1]),
        verifier_name_or_path=spec.model,
        # Flex attention has no backward on CPU.
        draft_attn_impl="simple_flex_attention" if torch.cuda.is_available() else "eager",
    )
    return model.float()


def loss() -> Any:
    """Return the loss, as speculators configures it: the same on every device.

    On a GPU speculators compiles it. Its "fused" kernels would save memory there, but torch up to
    2.11 cannot compile a model with them (pytorch/pytorch#177874).
    """
    from speculators.losses import resolve_loss_config

    return resolve_loss_config("kl_div", "eager")


def _quiet() -> None:
    """Keep other libraries' progress bars and notices out of ours."""
    from loguru import logger
    from transformers.utils import logging

    logger.disable("speculators")
    logging.disable_progress_bar()


def save(model: Any, target: Path, card: Mapping[str, Any], *, readme: str = "") -> None:
    """Write the head as an engine loads it, with what it was made from and its card beside it.

    Raises ``CheckFailed``, and leaves what was there before, if that is not the whole head.
    """
    scratch = target.with_name(target.name + ".partial")
    shutil.rmtree(scratch, ignore_errors=True)
    with writing(target):
        model.save_pretrained(scratch)
        run_folder.write_json(scratch / "truetap.json", dict(card))
        if readme:
            run_folder.write_bytes(scratch / "README.md", readme.encode())
    export_check.require_whole(scratch, model, card["boundaries"][:-1])
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turn what torch and safetensors raise on a full disk, which is no OSError, into ours."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CouldNotRun(
            f"{target} cannot be written: {error}",
            remedy="free disk space and run again; training continues from the last checkpoint",
        ) from error

"""What several test modules need: a silent console, and a small verifier on disk."""

from __future__ import annotations

import io
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from truetap.harness import certificate, report
from truetap.harness.engine import Finished
from truetap.harness.errors import CouldNotRun
from truetap.harness.extraction import Pool, Progress, ShardOrder, Status, WrittenShard
from truetap.harness.model import Environment

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CERTIFIED = datetime(2026, 11, 29, 12, tzinfo=UTC)


@pytest.fixture
def certify() -> Callable[..., str]:
    """Keep a certificate for a binding beside some shards; return its digest."""

    def made(
        shards: Path,
        binding: Mapping[str, Any],
        *,
        created: datetime = CERTIFIED,
        validity: timedelta = timedelta(days=30),
    ) -> str:
        passed = report.blank(
            "core",
            evidence="live",
            adapter="vllm_native",
            spec={},
            suite_digest="5" * 64,
            started=created.isoformat(),
            environment={"binding": binding, "recorded": {"verifier_name": "tiny"}},
        )
        for clause in passed.clauses:
            clause.add("pass", "")
        folder = shards / "certificates"
        folder.mkdir(parents=True, exist_ok=True)
        statement = certificate.issue(passed, now=created, validity=validity)
        digest = certificate.write(statement, folder / "new.json")
        (folder / "new.json").rename(folder / f"{digest}.json")
        return digest

    return made


class WithoutEngine:
    """A session that gets states from a function and writes them as an engine's worker does."""

    def __init__(self, states_of: Callable[[ShardOrder], Any]) -> None:
        self._states_of = states_of
        self.orders = 0

    def extract(
        self, orders: Iterable[ShardOrder], progress: Progress, pool: Pool
    ) -> Iterator[WrittenShard]:
        """Make one shard after the other, through a real ``Staging``."""
        from truetap.harness.staging import Staging

        staging = None
        for order in orders:
            self.orders += 1
            states = self._states_of(order)
            if staging is None:
                staging = Staging(
                    shape=tuple(states[0].shape[1:]),
                    dtype=states[0].dtype,
                    pool_bytes=pool.size_bytes,
                    threads=pool.threads,
                )
            partial = order.path.with_name(f"{order.path.name}.{self.orders}.partial")
            keys = [f"{self.orders}:{r.key}" for r in order.requests]
            lengths = [len(r.token_ids) for r in order.requests]
            staging.expect(str(partial), keys, lengths, list(order.loss_masks))
            for key, request, rows in zip(keys, order.requests, states, strict=True):
                staging.put(key, 0, request.token_ids, lambda a, b, rows=rows: rows[a:b])
                progress.finished(Finished(key, [], "", "length", None, None, None), request)
            report = staging.report([str(partial)], 60.0)
            if failed := report["failed"]:
                raise CouldNotRun(failed["message"], remedy="finished shards are kept")
            progress.status = Status(**report["status"])
            (seen,) = report["written"].values()
            yield WrittenShard(order, partial, [[tuple(p) for p in r["pieces"]] for r in seen])

    def environment(self) -> Environment:
        """Return the facts of no engine."""
        return Environment({"verifier": {}, "boundaries": []}, {"verifier_name": "tiny"})

    def close(self) -> None:
        """Nothing to stop."""


@pytest.fixture
def without_engine() -> type[WithoutEngine]:
    """The class of sessions that write without an engine; needs torch."""
    return WithoutEngine


@pytest.fixture
def console() -> Console:
    """A console whose text is read with ``console.file.getvalue()``."""
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(scope="session")
def paper_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that describes a verifier of 12 blocks; its weights are no weights.

    Enough for everything that does not load it, and made without torch.
    """
    from safetensors.numpy import save_file

    directory = tmp_path_factory.mktemp("verifiers") / "paper"
    directory.mkdir()
    config = {
        "model_type": "llama",
        "num_hidden_layers": 12,
        "hidden_size": 16,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"weight": np.arange(4, dtype=np.float32)}, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real Llama of 8 blocks, width 128, vocabulary 512, with random weights; needs torch."""
    from truetap.harness.random_verifier import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("verifiers") / "tiny", num_blocks=8)


@pytest.fixture(scope="session")
def trained() -> Any:
    """A byte-level BPE with merges over spaces and line breaks, as real ones have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<|im_start|>", "<|im_end|>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text()
    core.train_from_iterator([text, "\n\n\n\n" * 50, "the answer is the answer " * 50], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", bos_token="<s>")
    made.chat_template = CHATML
    return made

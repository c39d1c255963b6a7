from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from itertools import chain, count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from truetap.harness import shard, verifier
from truetap.harness.auditor import Finding
from truetap.harness.errors import CheckFailed, CouldNotRun, IntegrityError, UsageError
from truetap.harness.model import EngineSpec
from truetap.pipeline import audit_log, batches, draft_head, run_folder, train
from truetap.pipeline.config import Gate, RunConfig, Train, Verifier
from truetap.pipeline.prepare import Conversation
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.store import Sample, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch
    from rich.console import Console

pytestmark = pytest.mark.torch

WIDTH, BLOCKS, VOCABULARY = 128, 8, 512  # of the tiny verifier
BOUNDARIES = (2, 4, 5, 8)
DRAFT = 64


# --- alignment ---------------------------------------------------------------------------------


def telling_sample(document: int, tokens: int, mask: Sequence[int], width: int = 3) -> Sample:
    """A sample in which every number tells its document, token, boundary and channel."""
    import torch

    where = 1000 * document + 10 * torch.arange(tokens)
    states = where[:, None, None] + torch.tensor(BOUNDARIES)[None, :, None] / 10
    return Sample(
        f"document-{document}",
        token_ids=where,
        loss_mask=torch.tensor(mask, dtype=torch.uint8),
        states=(states + torch.arange(width) / 1000).float(),
    )


def test_one_conversation_is_aligned_as_eagle3_learns() -> None:
    import torch

    sample = telling_sample(1, 5, [0, 0, 1, 1, 0])
    got = batches.aligned(sample)
    assert got["input_ids"].tolist() == [1010, 1020, 1030, 1040]
    assert got["position_ids"].tolist() == [1, 2, 3, 4]
    assert got["loss_mask"].tolist() == [0, 1, 1, 0]
    # Features of the token before: boundaries 2, 4 and 5 beside each other.
    channels = [2 / 10 + c / 1000 for c in range(3)]
    channels += [4 / 10 + c / 1000 for c in range(3)] + [5 / 10 + c / 1000 for c in range(3)]
    features = torch.tensor([[1000 + 10 * t + c for c in channels] for t in range(4)])
    torch.testing.assert_close(got["hidden_states"], features, rtol=0, atol=1e-3)
    # Targets of the token itself: the last boundary.
    last = torch.tensor([[1000 + 10 * t + 0.8 + c / 1000 for c in range(3)] for t in range(1, 5)])
    torch.testing.assert_close(got["verifier_last_hidden_states"], last, rtol=0, atol=1e-3)


def test_packing_does_not_leak_over_document_borders() -> None:
    import torch

    samples = [
        telling_sample(1, 5, [0, 0, 1, 1, 1]),
        telling_sample(2, 2, [1, 0]),
        telling_sample(3, 4, [0, 1, 0, 1]),
    ]
    packed = batches.pack(samples)
    assert {name: tuple(tensor.shape) for name, tensor in packed.items()} == {
        "input_ids": (1, 8),
        "hidden_states": (1, 8, 9),
        "verifier_last_hidden_states": (1, 8, 3),
        "loss_mask": (1, 8),
        "position_ids": (1, 8),
        "document_ids": (1, 8),
    }
    assert packed["document_ids"][0].tolist() == [0, 0, 0, 0, 1, 2, 2, 2]
    assert packed["position_ids"][0].tolist() == [1, 2, 3, 4, 1, 1, 2, 3]
    assert packed["input_ids"][0].tolist() == [1010, 1020, 1030, 1040, 2010, 3010, 3020, 3030]
    assert packed["loss_mask"].dtype is torch.bool
    assert packed["loss_mask"][0].int().tolist() == [0, 1, 1, 1, 0, 1, 0, 1]
    # Which document and token each row's features and targets come from.
    features = (packed["hidden_states"][0] // 10).unique(dim=1)[:, 0]
    targets = (packed["verifier_last_hidden_states"][0] // 10).unique(dim=1)[:, 0]
    assert features.tolist() == [100, 101, 102, 103, 200, 300, 301, 302]
    assert targets.tolist() == [101, 102, 103, 104, 201, 301, 302, 303]


@pytest.mark.parametrize("mask", [[0, 0, 0, 0], [1, 0, 0, 0]])
def test_a_pack_in_which_nothing_would_be_learnt_fails(mask: list[int]) -> None:
    """The first token's mask bit is shifted out: no position predicts after it."""
    samples = [telling_sample(7, 4, mask), telling_sample(8, 4, mask)]
    with pytest.raises(CheckFailed, match=r"document-7.*document-8.* is under the loss mask"):
        batches.pack(samples)


# --- a small run -------------------------------------------------------------------------------


def config_of(output: Path, verifier: Path, **settings: Any) -> RunConfig:
    small: dict[str, Any] = {
        "draft_vocabulary": DRAFT,
        "epochs": 2,
        "tokens_per_step": 24,
        "mixed_precision": "no",
        "test_time_steps": 2,
        "checkpoint_every": 2,
    }
    return RunConfig(
        output=output, verifier=Verifier(directory=verifier), train=Train(**small | settings)
    )


def spec_of(verifier: Path) -> EngineSpec:
    return EngineSpec(str(verifier), BOUNDARIES)


def random_conversations() -> list[Conversation]:
    import torch

    generator = torch.Generator().manual_seed(7)
    made = []
    for number in range(8):
        ids = torch.randint(2, VOCABULARY, (8 + number % 3,), generator=generator).tolist()
        split = "validation" if number > 5 else "train"
        made.append(Conversation(f"c{number}", split, tuple(ids), prompt_tokens=3))
    return made


def random_states(conversation: Conversation, *, spoilt: bool = False) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(sum(conversation.token_ids))
    shape = (len(conversation.token_ids), len(BOUNDARIES), WIDTH)
    states = torch.randn(shape, generator=generator).bfloat16()
    if spoilt:
        with_nan(states)
    return states


@pytest.fixture
def begin(
    tmp_path: Path, tiny_verifier: Path, certify: Callable[..., str]
) -> Callable[..., RunFolder]:
    """Make run folders whose conversations are captured, as far as training can tell."""

    def made(name: str, *, spoilt: str = "", uncertified: bool = False) -> RunFolder:
        folder = RunFolder(tmp_path / name)
        store = Store(folder.shards)
        folder.shards.mkdir(parents=True)
        conversations = random_conversations()
        for c in conversations:
            row = {"id": c.id, "split": c.split, "token_ids": c.token_ids}
            run_folder.append_line(folder.conversations, row | {"prompt_tokens": c.prompt_tokens})
        digests = verifier.digests(tiny_verifier)
        binding = ENGINE | {"verifier": digests, "boundaries": list(BOUNDARIES)}
        standing: dict[str, Any] = {"certificate": certify(folder.shards, binding)}
        if uncertified:
            standing = {"uncertified": {"reason": "a trial of ours", "denied": ["LAYERS-001"]}}
        write_shard(store, SHARD, conversations, spoilt, {**entry_of(digests), **standing})
        return folder

    return made


SHARD = "shard-00000.safetensors"
ENGINE: dict[str, Any] = {
    "engine_version": "0.32.0",
    "dtype": "bfloat16",
    "adapter": {"name": "vllm_native", "sha256": "b" * 64},
}


def entry_of(digests: dict[str, str]) -> dict[str, Any]:
    """Return what a shard's line says, but for its certificate."""
    return {
        "boundaries": list(BOUNDARIES),
        "last_boundary_normed": False,
        "dtype": "bfloat16",
        "verifier": {"name": "tiny", **digests},
        "engine": ENGINE,
        "made": "2026-11-30T12:00:00+00:00",
    }


def write_shard(
    store: Store,
    name: str,
    conversations: Sequence[Conversation],
    spoilt: str,
    entry: dict[str, Any],
) -> None:
    digests = shard.write_partial(
        store.path(name),
        [random_states(c, spoilt=c.id == spoilt) for c in conversations],
        [c.token_ids for c in conversations],
        [c.loss_mask for c in conversations],
    )
    ids = [c.id for c in conversations]
    store.record({"shard": name, "digests": digests, "ids": ids} | entry)


def random_samples() -> list[Sample]:
    import torch

    return [
        Sample(
            c.id,
            torch.tensor(c.token_ids),
            torch.frombuffer(bytearray(c.loss_mask), dtype=torch.uint8),
            random_states(c),
        )
        for c in random_conversations()
    ]


@pytest.fixture(scope="module")
def head(tiny_verifier: Path) -> Any:
    """An untrained head with a full draft vocabulary."""
    config = config_of(tiny_verifier, tiny_verifier)
    return draft_head.build(config, spec_of(tiny_verifier), range(VOCABULARY))


def logits_and_gradients(head: Any, samples: Sequence[Sample]) -> tuple[Any, Any]:
    """Return one draft step's logits, and the loss's gradient in them."""
    from speculators.losses import resolve_loss_config

    seen: list[Any] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        output.retain_grad()
        seen.append(output)

    hook = head.lm_head.register_forward_hook(keep)
    try:
        eager = resolve_loss_config("kl_div", "eager")
        _, loss, _ = head(**batches.pack(samples), ttt_steps=1, loss_config=eager)
        loss.backward()
    finally:
        hook.remove()
        head.zero_grad()
    (logits,) = seen
    return logits.detach()[0], logits.grad[0]


@pytest.mark.parametrize(
    "spans", [[(5, 8)], [(1, 3), (6, 8)], [(0, 3)], [(4, 5)], [(9, 10)], [(0, 10)]]
)
def test_exactly_the_shifted_span_receives_loss(head: Any, spans: list[tuple[int, int]]) -> None:
    """CASE-23: with a mask that is not shifted like ids and targets, a stale row is supervised."""
    import torch

    masked = sorted(t for start, end in spans for t in range(start, end))
    mask = torch.zeros(10, dtype=torch.uint8)
    mask[masked] = 1
    sample = replace(random_samples()[2], loss_mask=mask)
    _, gradient = logits_and_gradients(head, [sample])
    assert gradient.abs().sum(1).nonzero().flatten().tolist() == [t - 1 for t in masked if t > 0]


def test_a_mask_left_unshifted_is_seen_by_that_probe(
    head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASE-23, as it was: a stale position is supervised, and one that is due is not."""
    import torch

    aligned = batches.aligned

    def stale(sample: Sample) -> batches.Batch:
        return {**aligned(sample), "loss_mask": sample.loss_mask[:-1]}

    monkeypatch.setattr(batches, "aligned", stale)
    mask = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 0, 0], dtype=torch.uint8)
    _, gradient = logits_and_gradients(head, [replace(random_samples()[2], loss_mask=mask)])
    assert gradient.abs().sum(1).nonzero().flatten().tolist() == [5, 6, 7]  # due: 4, 5, 6


def test_a_packed_conversation_is_seen_as_if_alone(head: Any) -> None:
    import torch

    first, second = random_samples()[:2]
    packed, _ = logits_and_gradients(head, [first, second])
    alone = [logits_and_gradients(head, [sample])[0] for sample in (first, second)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-4)
    exchanged, _ = logits_and_gradients(head, [second, first])
    assert not torch.allclose(exchanged[: len(alone[0])], alone[0], atol=1e-2)


# --- draft vocabulary --------------------------------------------------------------------------


def test_the_draft_vocabulary_prefers_answers_then_prompts_then_low_ids() -> None:
    answers = Conversation("a", "train", (3, 3, 3, 9, 7, 9), prompt_tokens=3)
    prompts = Conversation("b", "train", (3, 5, 7), prompt_tokens=2)
    by_size = [draft_head.vocabulary_of([answers, prompts], n, 12) for n in range(1, 13)]
    added = [set(more) - set(fewer) for fewer, more in zip([[], *by_size], by_size, strict=False)]
    # 7 and 9 are answered twice each; 3 is asked four times, 5 once; the rest is never seen.
    assert [min(one) for one in added] == [7, 9, 3, 5, 0, 1, 2, 4, 6, 8, 10, 11]
    assert all(listed == sorted(listed) for listed in by_size)
    assert [len(listed) for listed in by_size] == list(range(1, 13))


def test_a_draft_vocabulary_larger_than_the_verifiers_is_refused() -> None:
    with pytest.raises(UsageError, match="draft_vocabulary is 13, the verifier has 12") as caught:
        draft_head.vocabulary_of([], 13, 12)
    assert caught.value.remedy == "set it to 12 or less"


@pytest.mark.parametrize("vocabulary", [[0, 1, 5, 6, 14], [511], range(1, VOCABULARY)])
def test_the_heads_vocabulary_maps_are_each_others_inverse(
    tiny_verifier: Path, vocabulary: Sequence[int]
) -> None:
    """CASE-25: vLLM reads d2t as an offset; a map that is absent or wrong only costs acceptance."""
    import torch
    from safetensors.torch import load_file

    config = config_of(tiny_verifier, tiny_verifier)
    made = draft_head.build(config, spec_of(tiny_verifier), vocabulary)
    ids = torch.arange(len(vocabulary)) + made.d2t
    assert ids.tolist() == list(vocabulary)
    assert made.t2d.nonzero().flatten().tolist() == list(vocabulary)
    assert len(made.t2d) == VOCABULARY
    verifier_head = load_file(tiny_verifier / "model.safetensors")["lm_head.weight"]
    assert torch.equal(made.lm_head.weight, verifier_head[list(vocabulary)])
    assert made.config.eagle_aux_hidden_state_layer_ids == list(BOUNDARIES[:-1])
    if vocabulary == [0, 1, 5, 6, 14]:
        assert made.d2t.tolist() == [0, 0, 3, 3, 10]


def test_a_full_draft_vocabulary_needs_no_maps(head: Any) -> None:
    assert (head.d2t, head.t2d) == (None, None)
    assert len(head.lm_head.weight) == VOCABULARY


def test_the_same_seed_builds_the_same_head(tiny_verifier: Path) -> None:
    import torch

    def weights(seed: int) -> Any:
        config = config_of(tiny_verifier, tiny_verifier).model_copy(update={"seed": seed})
        return draft_head.build(config, spec_of(tiny_verifier), range(DRAFT)).fc.weight

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


# --- schedule ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_per_step", [1, 24, 10_000])
def test_every_epoch_has_every_sample_once(tmp_path: Path, tokens_per_step: int) -> None:
    samples = random_samples()
    config = config_of(tmp_path, tmp_path, epochs=3, tokens_per_step=tokens_per_step)
    steps = batches.schedule(config, samples)
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert [step.epoch for step in steps] == sorted(step.epoch for step in steps)
    orders = []
    for epoch in range(3):
        orders.append([i for step in steps if step.epoch == epoch for i in step.samples])
        assert Counter(orders[-1]) == Counter(range(len(samples)))
    assert orders[0] != orders[1]
    for step in steps:
        tokens = sum(len(samples[i].token_ids) for i in step.samples)
        assert tokens <= tokens_per_step or len(step.samples) == 1


def test_no_samples_make_no_group() -> None:
    """All that were held back for validation may be left out for their states."""
    assert list(batches.filled([], [], 100)) == []
    assert batches.common_length([], []) == 0


def test_the_schedule_follows_from_the_seed(tmp_path: Path) -> None:
    samples, config = random_samples(), config_of(tmp_path, tmp_path)
    assert batches.schedule(config, samples) == batches.schedule(config, samples)
    other = config.model_copy(update={"seed": 5})
    assert batches.schedule(other, samples) != batches.schedule(config, samples)


def test_a_schedule_needs_samples(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no training conversations"):
        batches.schedule(config_of(tmp_path, tmp_path), [])


@pytest.mark.parametrize("steps", [1, 7, 100, 951])
def test_the_learning_rate_rises_to_its_peak_once_and_falls_to_a_tenth(steps: int) -> None:
    factors = [train.learning_rate_factor(step, steps) for step in range(steps)]
    peak = factors.index(1.0)
    assert peak == max(1, steps // 20) - 1
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert all(0 < factor <= 1 for factor in factors)
    if steps >= 100:
        assert train.learning_rate_factor(steps, steps) == pytest.approx(0.1)
        assert factors[-1] == pytest.approx(0.1, abs=0.001)
        middle = (steps + peak) // 2
        assert factors[middle] == pytest.approx(0.55, abs=0.02)


# --- the loop ----------------------------------------------------------------------------------


def tensors_of(head: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    loaded: dict[str, Any] = load_file(head / "model.safetensors")
    return loaded


def checkpoints(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.train.glob("checkpoint-*"))


def measured(folder: RunFolder) -> list[dict[str, Any]]:
    rows = run_folder.read_lines(folder.train / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k != "tokens_per_s"} for row in rows]


def test_a_resumed_training_ends_as_an_uninterrupted_one(
    begin: Callable[..., RunFolder],
    tiny_verifier: Path,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    spec = spec_of(tiny_verifier)
    through, broken = begin("through"), begin("broken")
    train.train(config_of(through.root, tiny_verifier), through, spec, console)
    assert [r["step"] for r in measured(through) if r["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in measured(through) if r["kind"] == "validation"] == [2, 4, 6]
    assert checkpoints(through) == ["checkpoint-000004", "checkpoint-000006"]

    append = run_folder.append_line

    def killed_in_step_5(path: Path, row: dict[str, Any], **how: Any) -> None:
        append(path, row, **how)
        if row.get("step") == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(run_folder, "append_line", killed_in_step_5)
    with pytest.raises(KeyboardInterrupt):
        train.train(config_of(broken.root, tiny_verifier), broken, spec, console)
    monkeypatch.undo()
    assert checkpoints(broken) == ["checkpoint-000002", "checkpoint-000004"]
    assert not broken.head.exists()
    train.train(config_of(broken.root, tiny_verifier), broken, spec, console)

    assert measured(broken) == measured(through)
    ours, theirs, untrained = map(tensors_of, (broken.head, through.head, broken.untrained_head))
    assert ours.keys() == theirs.keys() == untrained.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    changed = {name for name in ours if not torch.equal(ours[name], untrained[name])}
    assert {"fc.weight", "norm.weight"} <= changed
    assert not changed & {"lm_head.weight", "d2t", "t2d"}


def test_the_rate_leaves_out_the_first_step_which_compiles(
    begin: Callable[..., RunFolder],
    tiny_verifier: Path,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes 100 seconds here, all others one; then a rate is that of the steps after it."""
    clock = chain([0.0, 100.0, 100.0], count(101.0))
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    folder = begin("run")
    config = config_of(folder.root, tiny_verifier)
    train.train(config, folder, spec_of(tiny_verifier), console)
    rows = run_folder.read_lines(folder.train / "metrics.jsonl")
    first, *later = [row["tokens_per_s"] for row in rows if row["kind"] == "step"]
    steps = batches.schedule(config, random_samples()[:6])
    tokens = [sum(len(random_samples()[i].token_ids) - 1 for i in s.samples) for s in steps]
    assert first == round(tokens[0] / 100, 1)
    assert later == [round(sum(tokens[1:n]) / (n - 1), 1) for n in range(2, len(tokens) + 1)]


@pytest.mark.gpu
def test_a_gpu_trains_compiled_from_shards_to_a_head(
    begin: Callable[..., RunFolder], tiny_verifier: Path, console: Console
) -> None:
    """What it learns from a pack is compared with a CPU in test_flex_attention.py."""
    import torch

    folder = begin("run")
    config = config_of(folder.root, tiny_verifier, mixed_precision="bf16", epochs=4)
    train.train(config, folder, spec_of(tiny_verifier), console)
    assert torch.cuda.max_memory_allocated() > 0
    losses = [row["loss"] for row in measured(folder) if row["kind"] == "step"]
    assert len(losses) == 12
    assert losses[-1] < 0.9 * losses[0]
    changed = tensors_of(folder.head)["fc.weight"] != tensors_of(folder.untrained_head)["fc.weight"]
    assert changed.float().mean() > 0.5


def test_the_exported_head_is_what_an_engine_loads(
    begin: Callable[..., RunFolder], tiny_verifier: Path, console: Console
) -> None:
    import torch
    from speculators import SpeculatorModel

    folder, spec = begin("run"), spec_of(tiny_verifier)
    config = config_of(folder.root, tiny_verifier, epochs=1)
    train.train(config, folder, spec, console)
    entry = Store(folder.shards).entries()["shard-00000.safetensors"]
    for head, steps in ((folder.untrained_head, 0), (folder.head, 3)):
        assert json.loads((head / "truetap.json").read_text()) == {
            "verifier": entry["verifier"],
            "boundaries": list(BOUNDARIES),
            "certificates": [entry["certificate"]],
            "shards": {"shard-00000.safetensors": entry["digests"]["states"]},
            "steps": steps,
        }
        assert (head / "README.md").read_text().startswith("# EAGLE-3 draft head for `tiny`")
    loaded = SpeculatorModel.from_pretrained(str(folder.head)).state_dict()
    saved = tensors_of(folder.head)
    assert {"fc.weight", "lm_head.weight", "d2t", "t2d"} <= saved.keys() <= loaded.keys()
    assert all(torch.equal(loaded[name].to(saved[name].dtype), saved[name]) for name in saved)
    answered = draft_head.vocabulary_of(
        [c for c in random_conversations() if c.split == "train"], DRAFT, VOCABULARY
    )
    assert (saved["d2t"] + torch.arange(DRAFT)).tolist() == answered
    assert not list(folder.root.rglob("*.partial"))

    before = (folder.head / "model.safetensors").stat().st_mtime_ns
    train.train(config, folder, spec, console)
    assert (folder.head / "model.safetensors").stat().st_mtime_ns == before, "trained again"


def test_tokens_that_only_validation_has_are_not_preferred(
    begin: Callable[..., RunFolder], tiny_verifier: Path, console: Console
) -> None:
    folder = begin("run")
    config = config_of(folder.root, tiny_verifier, epochs=1, checkpoint_every=100)
    train.train(config, folder, spec_of(tiny_verifier), console)
    kept = set(tensors_of(folder.head)["t2d"].nonzero().flatten().tolist())
    seen: dict[str, set[int]] = {"train": set(), "validation": set()}
    for conversation in random_conversations():
        seen[conversation.split] |= set(conversation.token_ids)
    fill = DRAFT - len(seen["train"])
    unseen = [token for token in range(VOCABULARY) if token not in seen["train"]]
    assert fill > 0
    assert kept == seen["train"] | set(unseen[:fill])
    assert seen["validation"] - kept


# Each makes one sample's states wrong.
def with_nan(states: torch.Tensor) -> None:
    states[4, 1, 5] = float("nan")


def with_infinity(states: torch.Tensor) -> None:
    states[4:6, 3, 0] = float("-inf")


def with_zeros(states: torch.Tensor) -> None:
    states[3] = 0


def with_zeros_of_both_signs(states: torch.Tensor) -> None:
    states[3] = 0
    states[3, 1, 2:] = -0.0


def with_a_repeated_row(states: torch.Tensor) -> None:
    states[6] = states[5]


WRONG_STATES: list[tuple[Callable[[Any], None], str]] = [
    (with_nan, "1 of 8 rows are not finite, the first is 4"),
    (with_infinity, "2 of 8 rows are not finite, the first is 4"),
    (with_zeros, "row 3 is all zero"),
    (with_zeros_of_both_signs, "row 3 is all zero"),
    (with_a_repeated_row, "row 6 repeats the one before, of another token"),
]


@pytest.mark.parametrize(("spoil", "said"), WRONG_STATES)
def test_states_that_must_not_be_trained_on_are_named(
    spoil: Callable[[Any], None], said: str
) -> None:
    good = random_samples()[0]
    assert batches.fault_of(good) == ""
    states = good.states.clone()
    spoil(states)
    assert batches.fault_of(replace(good, states=states)) == said


def test_a_token_that_follows_itself_may_have_equal_states() -> None:
    good = random_samples()[0]
    states, ids = good.states.clone(), good.token_ids.clone()
    states[6], ids[6] = states[5], ids[5]
    assert batches.fault_of(replace(good, states=states, token_ids=ids)) == ""


def test_rows_that_only_begin_with_zeros_or_as_the_one_before_are_right() -> None:
    good = random_samples()[0]
    states = good.states.clone()
    states[3].flatten()[:-1] = 0
    states[6].flatten()[:-1] = states[5].flatten()[:-1]
    assert batches.fault_of(replace(good, states=states)) == ""


def test_rows_without_a_token_or_a_mask_are_named() -> None:
    good = random_samples()[0]
    said = batches.fault_of(replace(good, states=good.states[:-1]))
    assert said == "7 rows, 8 tokens and a loss mask of 8"
    said = batches.fault_of(replace(good, loss_mask=good.loss_mask[1:]))
    assert said == "8 rows, 8 tokens and a loss mask of 7"


@pytest.mark.parametrize(("bad", "count", "stops"), [(1, 99, True), (1, 100, False), (8, 8, True)])
def test_more_than_one_bad_sample_in_a_hundred_stops(bad: int, count: int, *, stops: bool) -> None:
    good = random_samples()[0]
    states = good.states.clone()
    with_nan(states)
    samples = [replace(good, id=f"s{n}", states=states if n < bad else good.states)
               for n in range(count)]  # fmt: skip
    if not stops:
        assert batches.unusable(samples) == {"s0": WRONG_STATES[0][1]}
        return
    with pytest.raises(CheckFailed, match=f"{bad} of {count} conversations .* first of them 's0'"):
        batches.unusable(samples)


def test_what_is_left_out_is_listed_and_the_rest_is_trained_on(
    begin: Callable[..., RunFolder],
    tiny_verifier: Path,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CASE-21. Left out before the schedule is made: no step is without data, none is missing."""
    folder = begin("run", spoilt="c3")
    config = config_of(folder.root, tiny_verifier, epochs=1, checkpoint_every=100)
    said = "1 of 8 conversations have states that must not be trained on, the first of them 'c3'"
    with pytest.raises(CheckFailed, match=said):
        train.train(config, folder, spec_of(tiny_verifier), console)
    assert not folder.head.exists()
    monkeypatch.setattr(batches, "UNUSABLE_SHARE", 0.2)
    train.train(config, folder, spec_of(tiny_verifier), console)
    left_out = json.loads((folder.train / "left-out.json").read_text())
    assert left_out == {"c3": "1 of 8 rows are not finite, the first is 4"}
    assert "left out for their states: 1 of 8 conversations" in console.file.getvalue()  # type: ignore[attr-defined]
    kept = [sample for sample in random_samples()[:6] if sample.id != "c3"]
    planned = batches.schedule(config, kept)
    rows = [row for row in measured(folder) if row["kind"] == "step"]
    assert [row["step"] for row in rows] == [step.number for step in planned]
    assert all(0 < row["loss"] < 100 for row in rows)
    assert json.loads((folder.head / "truetap.json").read_text())["steps"] == len(planned)


@pytest.mark.parametrize("processes", ["2", "8"])
def test_one_of_several_processes_is_refused(
    tmp_path: Path,
    tiny_verifier: Path,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
    processes: str,
) -> None:
    """CASE-27: without being told that it is one of several, each would do all of it."""
    monkeypatch.setenv("WORLD_SIZE", processes)
    folder = RunFolder(tmp_path)
    with pytest.raises(UsageError, match=f"this is one of {processes}") as refused:
        train.train(config_of(tmp_path, tiny_verifier), folder, spec_of(tiny_verifier), console)
    assert "torchrun" in refused.value.remedy
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UsageError, match="there are no shards"):
        train.train(config_of(tmp_path, tiny_verifier), folder, spec_of(tiny_verifier), console)


def test_a_loss_that_is_nan_ends_the_run_before_the_next_checkpoint(
    begin: Callable[..., RunFolder],
    tiny_verifier: Path,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train, "unusable", lambda _: {})
    config = config_of(begin("x").root, tiny_verifier)
    order = batches.schedule(config, random_samples()[:6])
    spoilt = f"c{order[2].samples[0]}"  # not before step 3
    folder = begin("run", spoilt=spoilt)
    with pytest.raises(CheckFailed, match="the loss is nan at step 3; nothing was saved"):
        train.train(config, folder, spec_of(tiny_verifier), console)
    assert checkpoints(folder) == ["checkpoint-000002"]
    assert not folder.head.exists()


def test_a_gradient_that_is_not_finite_is_never_applied(
    begin: Callable[..., RunFolder],
    tiny_verifier: Path,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the last step no later loss would show it, and the exported head would be all NaN."""
    build = draft_head.build

    def build_with_overflow(*arguments: Any) -> Any:
        made = build(*arguments)
        made.fc.weight.register_hook(lambda gradient: gradient * float("inf"))
        return made

    monkeypatch.setattr(draft_head, "build", build_with_overflow)
    folder = begin("run")
    config = config_of(folder.root, tiny_verifier, epochs=1, tokens_per_step=1000)
    with pytest.raises(CheckFailed, match=r"the gradient's norm is (nan|inf) at step 1"):
        train.train(config, folder, spec_of(tiny_verifier), console)
    assert checkpoints(folder) == []
    assert not folder.head.exists()


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.bin", "step.json"])
def test_a_torn_checkpoint_is_named_and_the_one_before_is_used(
    begin: Callable[..., RunFolder], tiny_verifier: Path, console: Console, file: str
) -> None:
    folder, spec = begin("run"), spec_of(tiny_verifier)
    config = config_of(folder.root, tiny_verifier)
    train.train(config, folder, spec, console)
    final = tensors_of(folder.head)
    shutil.rmtree(folder.head)
    torn = folder.train / "checkpoint-000006" / file
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    with pytest.raises(IntegrityError, match=r"checkpoint-000006.* cannot be read") as caught:
        train.train(config, folder, spec, console)
    assert "delete it" in caught.value.remedy
    assert not folder.head.exists()
    shutil.rmtree(torn.parent)
    train.train(config, folder, spec, console)
    again = tensors_of(folder.head)
    assert all(again[name].equal(final[name]) for name in final)


def test_a_disk_that_is_full_leaves_no_half_checkpoint(
    begin: Callable[..., RunFolder],
    tiny_verifier: Path,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """safetensors and torch say it with exceptions of their own, which are no OSError."""
    from accelerate import Accelerator
    from safetensors import SafetensorError

    def full(*_: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(Accelerator, "save_state", full)
    folder = begin("run")
    config = config_of(folder.root, tiny_verifier)
    with pytest.raises(CouldNotRun, match="checkpoint-000002 cannot be written") as caught:
        train.train(config, folder, spec_of(tiny_verifier), console)
    assert "free disk space" in caught.value.remedy
    assert not train._checkpoints(folder)


# --- where the states come from ----------------------------------------------------------------

WHY = "we know that it is wrong, and want to see how"


def test_shards_of_other_boundaries_or_another_verifier_are_refused(
    begin: Callable[..., RunFolder], tiny_verifier: Path, console: Console, tmp_path: Path
) -> None:
    folder = begin("run")
    config, spec = config_of(folder.root, tiny_verifier), spec_of(tiny_verifier)
    with pytest.raises(CheckFailed, match=r"this run needs \[2, 3, 5, 8\] before the norm"):
        train.train(config, folder, replace(spec, boundaries=(2, 3, 5, 8)), console)
    shutil.copytree(tiny_verifier, tmp_path / "same-name")
    (tmp_path / "same-name" / "more.safetensors").write_bytes(b"")
    other = replace(spec, model=str(tmp_path / "same-name"))
    with pytest.raises(CheckFailed, match="it is of another verifier: weights_sha256 "):
        train.train(config, folder, other, console)
    assert not folder.train.exists()


def test_uncertified_shards_are_trained_on_for_a_reason_and_the_head_says_so(
    begin: Callable[..., RunFolder], tiny_verifier: Path, console: Console
) -> None:
    folder, spec = begin("run", uncertified=True), spec_of(tiny_verifier)
    config = config_of(folder.root, tiny_verifier, epochs=1)
    with pytest.raises(CheckFailed, match="1 of 1 shards were captured without a certificate"):
        train.train(config, folder, spec, console)
    assert not folder.train.exists()
    assert not folder.untrained_head.exists()

    train.train(config, folder, spec, console, allow_uncertified=WHY)
    said = {
        "shards": [SHARD],
        "reasons": ["a trial of ours"],
        "denied": ["LAYERS-001"],
        "trained_because": [WHY],
    }
    for head in (folder.head, folder.untrained_head):
        card = json.loads((head / "truetap.json").read_text())
        assert (card["uncertified"], card["certificates"]) == (said, [])
        readme = (head / "README.md").read_text()
        assert readme.startswith("> **UNCERTIFIED.** This head was trained on 1 of 1 shards")
        assert all(text in readme for text in ("a trial of ours", WHY, "LAYERS-001"))
    for name in checkpoints(folder):
        step = json.loads((folder.train / name / "step.json").read_text())
        assert step["uncertified"] == said
    assert "UNCERTIFIED: the head is trained on 1 of 1" in console.file.getvalue()  # type: ignore[attr-defined]

    # Neither forgetting the flag nor a certificate that came later launders what was made.
    with pytest.raises(CheckFailed, match="captured without a certificate"):
        train.train(config, folder, spec, console)
    again = begin("certified")
    shutil.rmtree(folder.shards)
    shutil.copytree(again.shards, folder.shards)
    with pytest.raises(UsageError, match=r"holds results made otherwise: .*uncertified"):
        train.train(config, folder, spec, console)


def test_a_promised_audit_that_failed_or_is_missing_ends_training(
    begin: Callable[..., RunFolder], tiny_verifier: Path, console: Console
) -> None:
    """Refused before anything is claimed, so that the next extraction can mend it."""
    folder = begin("audited")
    store = Store(folder.shards)
    (entry,) = store.entries().values()
    store.append(entry | {"audit": {"every_shards": 16}})
    config = config_of(folder.root, tiny_verifier)
    with pytest.raises(CheckFailed, match=r"shard-00000\.safetensors was captured after the last"):
        train.train(config, folder, spec_of(tiny_verifier), console)
    found = Finding(False, "the slot for boundary 4 holds boundary 2", (), 0.1, {})
    audit_log.AuditLog(store).record(entry, found, answers_for=[entry], sample={})
    with pytest.raises(CheckFailed, match=r"shard-00000\.safetensors failed its audit") as failed:
        train.train(config, folder, spec_of(tiny_verifier), console)
    assert "truetap extract" in failed.value.remedy
    assert not (folder.root / "made-from.json").exists()


def test_a_policy_that_the_kept_certificates_do_not_meet_ends_training(
    begin: Callable[..., RunFolder], tiny_verifier: Path, console: Console
) -> None:
    """Neither a forged manifest nor one of the days before the policy gets past it."""
    folder = begin("development")
    demanded = folder.root / "policy.toml"
    demanded.write_text(f'signers = ["ed25519:{"a" * 64}"]')
    config = config_of(folder.root, tiny_verifier)
    config = config.model_copy(update={"gate": Gate(policy=demanded)})
    for reason in (None, WHY):
        with pytest.raises(CheckFailed, match="it is not signed, and the policy demands"):
            train.train(config, folder, spec_of(tiny_verifier), console, allow_uncertified=reason)
    assert not (folder.root / "made-from.json").exists()


def test_a_reason_that_was_not_needed_is_not_recorded(
    begin: Callable[..., RunFolder], tiny_verifier: Path, console: Console
) -> None:
    folder = begin("run")
    config = config_of(folder.root, tiny_verifier, epochs=1)
    train.train(config, folder, spec_of(tiny_verifier), console, allow_uncertified=WHY)
    assert "--allow-uncertified was not needed" in console.file.getvalue()  # type: ignore[attr-defined]
    made = [path.read_text() for path in folder.root.rglob("*.json")]
    made += [path.read_text() for path in folder.root.rglob("*.md")]
    assert not [text for text in made if "uncertified" in text.lower() or WHY in text]


def test_a_shard_with_a_conversations_id_and_anothers_tokens_is_refused(
    begin: Callable[..., RunFolder], tiny_verifier: Path, console: Console
) -> None:
    """A line and a shard of another store, rightly certified there: only the tokens tell."""
    folder = begin("run")
    store = Store(folder.shards)
    mine = store.entries()[SHARD]
    first, second, *rest = random_conversations()
    moved = [replace(second, id=first.id), second, *rest]
    keep = ("boundaries", "last_boundary_normed", "dtype", "verifier", "engine", "made")
    entry = {name: mine[name] for name in (*keep, "certificate")}
    write_shard(store, SHARD, moved, "", entry)
    with pytest.raises(IntegrityError, match="the shards hold other tokens for 'c0'"):
        train.train(config_of(folder.root, tiny_verifier), folder, spec_of(tiny_verifier), console)
    assert not folder.head.exists()

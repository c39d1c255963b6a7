"""speculators' own trainer, reading a truetap run's shards through its registry of backends."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from truetap.harness import shard, verifier
from truetap.harness.errors import CheckFailed, IntegrityError, TruetapError, UsageError
from truetap.harness.model import EngineSpec
from truetap.pipeline import arrow_dataset, batches, prepare, run_folder
from truetap.pipeline.config import Gate, RunConfig, Train, Verifier
from truetap.pipeline.prepare import Conversation
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.store import Store

if TYPE_CHECKING:
    import torch
    from rich.console import Console

pytestmark = pytest.mark.torch

WIDTH, VOCABULARY, DRAFT, BOUNDARIES = 128, 512, 64, (2, 4, 5, 8)
WHY = "we know that it is wrong, and want to see how"
ENGINE: dict[str, Any] = {
    "engine_version": "0.32.0",
    "dtype": "bfloat16",
    "adapter": {"name": "vllm_native", "sha256": "b" * 64},
}


def conversations() -> list[Conversation]:
    import torch

    generator = torch.Generator().manual_seed(7)
    made = []
    for number in range(12):
        ids = torch.randint(2, VOCABULARY, (8 + number % 3,), generator=generator).tolist()
        split = "validation" if number in (1, 10) else "train"
        made.append(Conversation(f"c{number}", split, tuple(ids), prompt_tokens=3))
    return made


def states_of(conversation: Conversation) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(sum(conversation.token_ids))
    shape = (len(conversation.token_ids), len(BOUNDARIES), WIDTH)
    return torch.randn(shape, generator=generator).bfloat16()


@pytest.fixture
def folder(tmp_path: Path, tiny_verifier: Path, certify: Callable[..., str]) -> RunFolder:
    """A run whose conversations are captured into three shards of four."""
    made = RunFolder(tmp_path / "run")
    store = Store(made.shards)
    made.shards.mkdir(parents=True)
    digests = verifier.digests(tiny_verifier)
    bound = ENGINE | {"verifier": digests, "boundaries": list(BOUNDARIES)}
    certificate = certify(made.shards, bound)
    whole = conversations()
    for c in whole:
        row = {"id": c.id, "split": c.split, "token_ids": c.token_ids}
        run_folder.append_line(made.conversations, row | {"prompt_tokens": c.prompt_tokens})
    for number in range(3):
        part = whole[4 * number : 4 * number + 4]
        name = f"shard-{number:05d}.safetensors"
        written = shard.write_partial(
            store.path(name),
            [states_of(c) for c in part],
            [c.token_ids for c in part],
            [c.loss_mask for c in part],
        )
        store.record(
            {
                "shard": name,
                "boundaries": list(BOUNDARIES),
                "last_boundary_normed": False,
                "dtype": "bfloat16",
                "verifier": {"name": "tiny", **digests},
                "engine": ENGINE,
                "made": "2026-11-30T12:00:00+00:00",
                "certificate": certificate,
                "digests": written,
                "ids": [c.id for c in part],
            }
        )
    return made


@pytest.fixture
def dataset(folder: RunFolder, tiny_verifier: Path, console: Console) -> Path:
    """The run's conversations, exported."""
    return export(folder, tiny_verifier, console)


def export(folder: RunFolder, model: Path, console: Console, gate: Gate | None = None) -> Path:
    config = RunConfig(
        output=folder.root,
        verifier=Verifier(directory=model),
        gate=gate or Gate(),
        train=Train(draft_vocabulary=DRAFT),
    )
    return arrow_dataset.export(config, folder, EngineSpec(str(model), BOUNDARIES), console)


def change_line(folder: RunFolder, number: int, **changed: Any) -> None:
    """Write a shard's line anew, as if it had been made so."""
    store = Store(folder.shards)
    entry = store.entries()[f"shard-{number:05d}.safetensors"] | changed
    store.append({name: value for name, value in entry.items() if value is not None})


def flip_a_bit(folder: RunFolder, number: int) -> Path:
    path = folder.shards / f"shard-{number:05d}.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # well inside the states
    path.write_bytes(data)
    return path


def options(dataset: Path, model: Path, **changed: Any) -> argparse.Namespace:
    given: dict[str, Any] = {
        "truetap_shards": None,
        "truetap_policy": None,
        "truetap_allow_uncertified": None,
        "verifier_name_or_path": str(model),
        "target_layer_ids": [2, 4, 5],
        "from_pretrained": "",
        "data_path": str(dataset),
        "save_path": str(dataset.parent / "saved"),
    }
    return argparse.Namespace(**given | changed)


def transfer_of(dataset: Path, model: Path, **changed: Any) -> Any:
    from truetap.pipeline.speculators_backend import TruetapBackend

    return TruetapBackend.from_train_args(options(dataset, model, **changed), str(dataset))


# --- what is exported --------------------------------------------------------------------------


def test_the_dataset_has_the_conversations_training_ones_first(
    folder: RunFolder, dataset: Path, console: Console
) -> None:
    from datasets import load_from_disk

    order = sorted(prepare.load(folder), key=lambda c: c.split != "train")
    rows = load_from_disk(str(dataset))
    assert [row["input_ids"].tolist() for row in rows] == [list(c.token_ids) for c in order]
    assert [row["loss_mask"].tolist() for row in rows] == [list(c.loss_mask) for c in order]
    assert [int(row["seq_len"]) for row in rows] == [len(c.token_ids) for c in order]
    assert json.loads((dataset / "truetap.json").read_text()) == {"shards": "../shards"}
    # Told and exact: the trainer rounds rows times this ratio down.
    told = console.file.getvalue()  # type: ignore[attr-defined]
    ratio = float(told.split("--train-data-ratio ")[1].split()[0])
    assert int(len(rows) * ratio) == 10
    assert "--target-layer-ids 2 4 5 --draft-vocab-size 64" in told
    ids = np.load(dataset / "d2t-64.npy") + np.arange(DRAFT)
    assert np.load(dataset / "t2d-64.npy").nonzero()[0].tolist() == ids.tolist()
    assert not list(folder.root.rglob("*.partial"))


@pytest.mark.parametrize(("training", "rows"), [(280, 300), (1, 2), (99_999, 100_000), (5, 5)])
def test_the_ratio_told_splits_where_the_splits_are(training: int, rows: int) -> None:
    share = float(f"{arrow_dataset.share(training, rows):.9f}")
    assert int(rows * share) == min(training, rows - 1)
    assert 0 < share < 1


def test_conversations_with_bad_states_are_not_exported(
    folder: RunFolder, tiny_verifier: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import load_from_disk

    monkeypatch.setattr(batches, "fault_of", lambda s: "odd" if s.id == "c3" else "")
    with pytest.raises(CheckFailed, match="1 of 12 conversations have states"):
        export(folder, tiny_verifier, console)
    monkeypatch.setattr(batches, "UNUSABLE_SHARE", 0.2)
    assert len(load_from_disk(str(export(folder, tiny_verifier, console)))) == 11
    assert "left out: c3: odd" in console.file.getvalue()  # type: ignore[attr-defined]


def test_shards_with_a_broken_chain_are_not_exported(
    folder: RunFolder, tiny_verifier: Path, console: Console
) -> None:
    change_line(folder, 1, certificate=None)
    with pytest.raises(CheckFailed, match=r"made without a certificate: shard-00001\.safetensors"):
        export(folder, tiny_verifier, console)
    assert not folder.dataset.exists()


# --- what is read ------------------------------------------------------------------------------


def test_each_row_gets_the_states_of_its_own_tokens(
    folder: RunFolder, dataset: Path, tiny_verifier: Path
) -> None:
    import torch
    from datasets import load_from_disk

    transfer = transfer_of(dataset, tiny_verifier)
    by_tokens = {c.token_ids: states_of(c) for c in prepare.load(folder)}
    for row, held in enumerate(load_from_disk(str(dataset))):
        got = transfer.get_cached(row)
        assert torch.equal(got["token_ids"], held["input_ids"])
        assert torch.equal(got["hidden_states"], by_tokens[tuple(held["input_ids"].tolist())])
        assert got["hidden_states"].dtype is torch.bfloat16
    again = pickle.loads(pickle.dumps(transfer))
    assert torch.equal(
        again.get_cached(5)["hidden_states"], transfer.get_cached(5)["hidden_states"]
    )
    made_from = json.loads((dataset.parent / "saved" / "truetap.json").read_text())
    assert len(made_from["shards"]) == 3
    assert len(made_from["certificates"]) == 1
    assert "uncertified" not in made_from


def test_rows_in_another_order_still_get_their_own_states(
    dataset: Path, tiny_verifier: Path
) -> None:
    import torch
    from datasets import load_from_disk

    shuffled = dataset.parent / "shuffled"
    load_from_disk(str(dataset)).shuffle(seed=3).save_to_disk(str(shuffled))
    transfer = transfer_of(shuffled, tiny_verifier, truetap_shards=str(dataset.parent / "shards"))
    tokens = [row["input_ids"] for row in load_from_disk(str(shuffled))]
    assert [t.tolist() for t in tokens] != [
        row["input_ids"].tolist() for row in load_from_disk(str(dataset))
    ]
    assert all(
        torch.equal(transfer.get_cached(row)["token_ids"], ids) for row, ids in enumerate(tokens)
    )


def lose_certificate(folder: RunFolder) -> None:
    change_line(folder, 2, certificate=None)


def lose_certificate_file(folder: RunFolder) -> None:
    shutil.rmtree(folder.shards / "certificates")


def normed(folder: RunFolder) -> None:
    change_line(folder, 0, last_boundary_normed=True)


def other_weights(folder: RunFolder) -> None:
    change_line(folder, 0, verifier={"name": "tiny", "weights_sha256": "0" * 64})


def expired(folder: RunFolder) -> None:
    change_line(folder, 0, made="2026-12-29T12:00:01+00:00")


def uncertified(folder: RunFolder) -> None:
    said = {"reason": "a trial of ours", "denied": ["LAYERS-001"]}
    change_line(folder, 2, certificate=None, uncertified=said)


def lose_shard(folder: RunFolder) -> None:
    (folder.shards / "shard-00001.safetensors").unlink()


def flip_a_token(folder: RunFolder) -> None:
    from safetensors.torch import load_file, save_file

    path = folder.shards / "shard-00001.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors["token_ids"][3] ^= 1
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("spoil", "kind", "said"),
    [
        (lose_certificate, CheckFailed, "made without a certificate: shard-00002"),
        (lose_certificate_file, IntegrityError, "3 of 3 shards .* is not in .*certificates"),
        (normed, CheckFailed, "last one after the norm.* this run needs"),
        (other_weights, CheckFailed, "it is of another verifier"),
        (expired, CheckFailed, "had expired when it was made"),
        (uncertified, CheckFailed, "1 of 3 shards were captured without a certificate"),
        (lose_shard, IntegrityError, "shard-00001.safetensors is missing"),
        (flip_a_token, IntegrityError, "shard-00001.* is corrupt: token_ids differ"),
    ],
)
def test_data_that_is_not_verified_is_refused_before_training(
    folder: RunFolder,
    dataset: Path,
    tiny_verifier: Path,
    spoil: Callable[[RunFolder], None],
    kind: type[TruetapError],
    said: str,
) -> None:
    spoil(folder)
    with pytest.raises(kind, match=said):
        transfer_of(dataset, tiny_verifier)
    assert not (dataset.parent / "saved").exists()


def test_a_flipped_bit_is_seen_when_the_sample_is_asked_for_and_after_it_was_read(
    folder: RunFolder, dataset: Path, tiny_verifier: Path
) -> None:
    transfer = transfer_of(dataset, tiny_verifier)
    transfer.get_cached(0)  # shard 0, read and verified
    flip_a_bit(folder, 0)
    with pytest.raises(IntegrityError, match=r"shard-00000\.safetensors is corrupt: states differ"):
        transfer.get_cached(0)
    transfer.get_cached(9)  # another shard
    path = folder.shards / "shard-00002.safetensors"
    before = path.stat()
    flip_a_bit(folder, 2)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(IntegrityError, match=r"shard-00002\.safetensors is corrupt: states differ"):
        transfer.get_cached(9)
    folder.shards.joinpath("shard-00000.safetensors").unlink()
    with pytest.raises(IntegrityError, match=r"shard-00000\.safetensors is missing"):
        transfer.get_cached(0)


def test_states_that_must_not_be_trained_on_are_refused(
    folder: RunFolder, dataset: Path, tiny_verifier: Path
) -> None:
    """Verified as captured, and still no states to learn from."""
    store = Store(folder.shards)
    part = conversations()[:4]
    states = [states_of(c) for c in part]
    states[2][1] = 0
    name = "shard-00000.safetensors"
    digests = shard.write_partial(
        store.path(name), states, [c.token_ids for c in part], [c.loss_mask for c in part]
    )
    shard.publish(store.path(name))
    change_line(folder, 0, digests=digests)
    transfer = transfer_of(dataset, tiny_verifier)
    with pytest.raises(CheckFailed, match=r"the states of 'c2' .* row 1 is all zero"):
        [transfer.get_cached(row) for row in range(12)]


def test_uncertified_shards_are_read_for_a_reason_which_is_recorded(
    folder: RunFolder, dataset: Path, tiny_verifier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uncertified(folder)
    transfer_of(dataset, tiny_verifier, truetap_allow_uncertified=WHY).get_cached(9)
    made_from = json.loads((dataset.parent / "saved" / "truetap.json").read_text())
    assert made_from["uncertified"]["shards"] == ["shard-00002.safetensors"]
    assert made_from["uncertified"]["trained_because"] == [WHY]
    assert "UNCERTIFIED" in caplog.text
    with pytest.raises(UsageError, match="a reason of 10 characters or more"):
        transfer_of(dataset, tiny_verifier, truetap_allow_uncertified="because")


def test_a_policy_is_asked_of_the_certificates(
    folder: RunFolder, dataset: Path, tiny_verifier: Path, console: Console, tmp_path: Path
) -> None:
    demanded = tmp_path / "policy.toml"
    demanded.write_text(f'signers = ["ed25519:{"a" * 64}"]')
    with pytest.raises(CheckFailed, match="it is not signed, and the policy demands"):
        transfer_of(dataset, tiny_verifier, truetap_policy=str(demanded))
    with pytest.raises(CheckFailed, match="it is not signed, and the policy demands"):
        export(folder, tiny_verifier, console, Gate(policy=demanded))
    demanded.write_text("production = false\nunsigned = true")
    export(folder, tiny_verifier, console, Gate(policy=demanded))
    assert f"--truetap-policy {demanded}" in console.file.getvalue()  # type: ignore[attr-defined]
    transfer_of(dataset, tiny_verifier, truetap_policy=str(demanded))


def test_shards_that_no_audit_answers_for_are_refused(
    folder: RunFolder, dataset: Path, tiny_verifier: Path, console: Console
) -> None:
    change_line(folder, 1, audit={"every_shards": 16})
    for ask in (
        lambda: transfer_of(dataset, tiny_verifier),
        lambda: export(folder, tiny_verifier, console),
    ):
        with pytest.raises(CheckFailed, match=r"shard-00001\.safetensors was captured after"):
            ask()


def test_heads_made_from_other_shards_are_not_continued(
    folder: RunFolder, dataset: Path, tiny_verifier: Path
) -> None:
    """The trainer goes on from the newest checkpoint in its folder, whatever that was made of."""
    certified = Store(folder.shards).entries()["shard-00002.safetensors"]
    uncertified(folder)
    transfer_of(dataset, tiny_verifier, truetap_allow_uncertified=WHY)
    again = "as we said the day before"
    transfer_of(dataset, tiny_verifier, truetap_allow_uncertified=again)
    saved = dataset.parent / "saved" / "truetap.json"
    said = json.loads(saved.read_text())
    assert said["uncertified"]["trained_because"] == [WHY, again]
    Store(folder.shards).append(certified)
    with pytest.raises(UsageError, match="holds heads made from other shards") as refused:
        transfer_of(dataset, tiny_verifier)
    assert "another --save-path" in refused.value.remedy
    assert json.loads(saved.read_text()) == said
    transfer_of(dataset, tiny_verifier, save_path=str(dataset.parent / "other"))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"target_layer_ids": [2, 3, 5]}, r"this run needs \[2, 3, 5, 8\] before the norm"),
        # The default of 8 blocks is 2, 4, 5: right here, and no accident.
        ({"target_layer_ids": [5, 4, 2]}, r"this run needs \[5, 4, 2, 8\] before the norm"),
        ({"verifier_name_or_path": "tiny-org/tiny"}, "is no directory"),
    ],
)
def test_a_trainer_set_for_other_states_is_refused(
    dataset: Path, tiny_verifier: Path, changed: dict[str, Any], said: str
) -> None:
    transfer_of(dataset, tiny_verifier, target_layer_ids=None)
    with pytest.raises(TruetapError, match=said):
        transfer_of(dataset, tiny_verifier, **changed)


def test_a_verifier_of_other_weights_is_refused(dataset: Path, tiny_verifier: Path) -> None:
    same_name = dataset.parent / tiny_verifier.name
    shutil.copytree(tiny_verifier, same_name)
    transfer_of(dataset, same_name)
    (same_name / "more.safetensors").write_bytes(b"")
    with pytest.raises(CheckFailed, match=r"3 of 3 shards .* it is of another verifier: weights"):
        transfer_of(dataset, same_name)


def test_a_dataset_whose_rows_have_no_states_is_refused(dataset: Path, tiny_verifier: Path) -> None:
    from datasets import load_from_disk

    other = dataset.parent / "other"
    rows = load_from_disk(str(dataset))
    changed = rows.map(
        lambda row, number: {**row, "input_ids": row["input_ids"] + int(number > 9)},
        with_indices=True,
    )
    changed.save_to_disk(str(other))
    with pytest.raises(UsageError, match="does not say which shards"):
        transfer_of(other, tiny_verifier)
    with pytest.raises(IntegrityError, match=r"2 of 12 rows .* have no states .* first is row 10"):
        transfer_of(other, tiny_verifier, truetap_shards=str(dataset.parent / "shards"))


def test_nothing_is_taken_from_a_running_engine(dataset: Path, tiny_verifier: Path) -> None:
    from truetap.pipeline.speculators_backend import TruetapBackend

    with pytest.raises(UsageError, match="takes no states from a running engine"):
        transfer_of(dataset, tiny_verifier).get_generated({"handle": "x"})
    with pytest.raises(UsageError, match="launches no engine"):
        TruetapBackend.build_kv_transfer_config(argparse.Namespace())


# --- the trainer itself ------------------------------------------------------------------------


def test_a_batch_of_the_trainers_own_loader_is_what_ours_makes(
    folder: RunFolder, dataset: Path, tiny_verifier: Path
) -> None:
    import torch
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.dataloader import create_train_val_loaders

    loader, _ = create_train_val_loaders(
        data_path=str(dataset),
        total_seq_len=64,
        hidden_states_dtype=torch.float32,
        transfer=transfer_of(dataset, tiny_verifier),
        vllm_endpoint="none",
        on_missing="raise",
        verifier_name_or_path=str(tiny_verifier),
        request_timeout=None,
        max_retries=0,
        generation_validation_retries=0,
        max_consecutive_generation_failures=1,
        hidden_size=WIDTH,
        num_target_layers=3,
        num_workers=0,
        prefetch_factor=1,
        preprocess=shift_batch,
        train_data_ratio=10.5 / 12,
    )
    samples = {tuple(s.token_ids.tolist()): s for s in Store(folder.shards).samples(
        [c.id for c in prepare.load(folder)])}  # fmt: skip
    by_rest = {ids[1:]: sample for ids, sample in samples.items()}
    seen = 0
    for theirs in loader:
        ids, documents = theirs["input_ids"][0], theirs["document_ids"][0]
        packed = [
            by_rest[tuple(ids[documents == number].tolist())]
            for number in range(int(documents.max()) + 1)
        ]
        ours = batches.pack(packed)
        rows = ours["input_ids"].shape[1]
        assert int((documents >= 0).sum()) == rows
        for name, tensor in ours.items():
            assert torch.equal(theirs[name][:, :rows].to(tensor.dtype), tensor), name
        seen += len(packed)
    assert seen == 10
    assert theirs["error_records"] == 0


@pytest.fixture
def train_on_cpu(monkeypatch: pytest.MonkeyPatch, tiny_verifier: Path) -> Callable[..., None]:
    """Run the trainer's command line, unmodified but for where it takes its device from."""
    import torch
    from speculators.train import checkpointer, trainer

    from truetap.pipeline import speculators_train

    cpu, set_up = torch.device("cpu"), trainer.Trainer.setup_trainer

    def set_up_on_cpu(self: Any) -> None:
        self.device_type = "cpu"
        set_up(self)

    monkeypatch.setattr(trainer.Trainer, "setup_trainer", set_up_on_cpu)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    monkeypatch.setattr(trainer, "get_local_rank", lambda: cpu)
    monkeypatch.setattr(checkpointer, "get_current_device", lambda: "cpu")

    def run(dataset: Path, *more: str) -> None:
        command = (
            f"speculators.train --hidden-states-backend truetap --data-path {dataset} "
            f"--verifier-name-or-path {tiny_verifier} --target-layer-ids 2 4 5 "
            f"--draft-vocab-size {DRAFT} --save-path {dataset.parent / 'saved'} "
            "--train-data-ratio 0.875 --total-seq-len 64 --epochs 1 --num-workers 0 "
            "--draft-attn-impl eager --loss-implementation eager --mask-token-id 1 "
            "--hidden-states-dtype float32 --ttt-steps 2"
        )
        monkeypatch.setattr("sys.argv", [*command.split(), *more])
        speculators_train.main()

    return run


def test_an_error_of_a_loading_process_is_told_as_one_sentence() -> None:
    from torch._utils import ExceptionWrapper

    from truetap.pipeline.speculators_train import sentence

    try:
        raise IntegrityError("shard x is corrupt: states differ", remedy="extract again")
    except IntegrityError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(IntegrityError) as told:
        wrapped.reraise()
    assert "Traceback" in str(told.value)
    assert sentence(told.value) == "shard x is corrupt: states differ"
    assert sentence(CheckFailed("no: it is bad")) == "no: it is bad"


def weights(saved: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    (newest,) = saved.glob("0/model.safetensors")
    held: dict[str, Any] = load_file(newest)
    return held


def test_speculators_own_trainer_trains_on_verified_shards(
    dataset: Path, train_on_cpu: Callable[..., None]
) -> None:
    import torch

    train_on_cpu(dataset)
    saved = dataset.parent / "saved"
    config = json.loads((saved / "0" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    trained = weights(saved)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in trained.values())
    ids = np.load(dataset / "d2t-64.npy")
    assert trained["d2t"].tolist() == ids.tolist()
    assert len(json.loads((saved / "truetap.json").read_text())["shards"]) == 3


@pytest.mark.parametrize(
    ("spoil", "code", "said"),
    [
        (lambda folder: flip_a_bit(folder, 1), 4, "shard-00001.safetensors is corrupt: states"),
        (lose_certificate, 1, "made without a certificate: shard-00002.safetensors"),
    ],
    ids=["bit", "certificate"],
)
def test_unverified_data_ends_that_training_with_one_sentence(
    folder: RunFolder,
    dataset: Path,
    train_on_cpu: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[RunFolder], Any],
    code: int,
    said: str,
) -> None:
    spoil(folder)
    with pytest.raises(SystemExit) as ended:
        train_on_cpu(dataset)
    assert ended.value.code == code
    told = capsys.readouterr().err
    assert f"truetap: {'1 of 3' if code == 1 else 'shard'}" in told
    assert said in told
    assert "remedy: run truetap extract again" in told
    assert not list((dataset.parent / "saved").rglob("model.safetensors"))

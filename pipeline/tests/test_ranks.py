"""Training in several processes: the schedule they share, what they compute, and how they end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from truetap.harness import shard, verifier
from truetap.harness.errors import CheckFailed, UsageError
from truetap.pipeline import batches, cli, config, draft_head, ranks, run_folder, train, train_claim
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.store import Sample, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from rich.console import Console

    from truetap.pipeline.config import RunConfig

BOUNDARIES, WIDTH, VOCABULARY = [2, 4, 5, 8], 128, 512  # of the tiny verifier
ANSWERS = (4, 19, 6, 11, 3, 16, 9)
"""Tokens that are learnt from, by training conversation: ranks have unequal numbers of them."""
PROMPT = 4
DEADLINE_S = 120
"""For one training, imports included; measured on an idle machine: 10."""

# --- who may be one of several -----------------------------------------------------------------

LAUNCHED = {"WORLD_SIZE": "8", "RANK": "7", "LOCAL_RANK": "3", "MASTER_ADDR": "node-0"}


def test_a_launcher_tells_which_process_this_is() -> None:
    assert ranks.of_launcher(LAUNCHED) == ranks.Ranks(7, 8)
    assert not ranks.of_launcher(LAUNCHED).main
    assert ranks.of_launcher(LAUNCHED | {"RANK": "0"}).main
    for alone in ({}, {"WORLD_SIZE": "1", "RANK": "0"}):
        assert ranks.of_launcher(alone) == ranks.Ranks(0, 1)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"RANK": ""}, "RANK=''"),
        ({"RANK": "8"}, "RANK='8'"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK='x'"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR=''"),
        ({"WORLD_SIZE": "all"}, "WORLD_SIZE='all'"),
    ],
)
def test_a_stray_world_size_is_refused(wrong: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError, match=named) as refused:
        ranks.of_launcher(LAUNCHED | wrong)
    assert "unset WORLD_SIZE" in refused.value.remedy


@pytest.mark.parametrize(
    "verb",
    ["run", "conform", "certify", "gate", "prepare", "extract", "export-dataset", "evaluate"],
)
def test_every_other_stage_refuses_several_processes(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [verb, str(tmp_path / "absent.toml")]
    with pytest.raises(UsageError, match="there is no configuration"):
        cli.app(arguments, standalone_mode=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(UsageError, match=f"truetap {verb} runs in one process") as refused:
        cli.app(arguments, standalone_mode=False)
    assert "torchrun --nproc-per-node 8 -m truetap.pipeline.cli train" in refused.value.remedy


@pytest.mark.parametrize(("processes", "says"), [("1", "on the way out\n"), ("2", "")])
def test_one_of_several_processes_ends_at_once(processes: str, says: str) -> None:
    """A group's threads, ended by Python on its way out, were seen to abort with all work done."""
    code = (
        "import atexit, sys, types; sys.modules['torch'] = types.ModuleType('torch'); "
        "atexit.register(print, 'on the way out'); "
        "from truetap.pipeline import ranks; ranks.end(4)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment() | {"WORLD_SIZE": processes},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (4, says)


@pytest.mark.torch
def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for name, value in (LAUNCHED | {"RANK": "0", "LOCAL_WORLD_SIZE": "8"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    with pytest.raises(UsageError, match="8 processes here and 7 GPUs") as refused, ranks.joined():
        pass
    assert "torchrun --nproc-per-node 7" in refused.value.remedy


# --- the schedule ------------------------------------------------------------------------------


def samples_of(answers: Sequence[int]) -> list[Sample]:
    import torch

    made = []
    for number, answer in enumerate(answers):
        mask = torch.tensor([0] * PROMPT + [1] * answer, dtype=torch.uint8)
        ids = torch.arange(len(mask))
        made.append(Sample(f"s{number}", ids, mask, ids[:, None, None].float()))
    return made


def config_of(path: Path, **settings: Any) -> RunConfig:
    given = {"output": path, "verifier": {"directory": path}, "train": settings}
    return config.RunConfig.model_validate(given)


@pytest.mark.torch
@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [1, 40, 10_000])
@pytest.mark.parametrize("count", [1, 7, 16])
def test_processes_share_out_every_epoch(
    tmp_path: Path, processes: int, tokens: int, count: int
) -> None:
    """CASE-27: one list for all, so each does as many steps; every sample once, none for two."""
    samples = samples_of([3 + 5 * n % 17 for n in range(count)])
    settings = config_of(tmp_path, epochs=3, tokens_per_step=tokens)
    steps = batches.schedule(settings, samples, processes)
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    alone = batches.schedule(settings, samples)
    for epoch in range(3):
        own = [step for step in steps if step.epoch == epoch]
        assert Counter(i for step in own for i in step.samples) == Counter(range(count))
        # The packs are those of one process: each is about tokens_per_step, none is rearranged.
        packs = [pack for step in own for pack in step.packs]
        assert packs == [step.samples for step in alone if step.epoch == epoch]
        assert all(len(step.packs) == processes for step in own[:-1])
        assert 1 <= len(own[-1].packs) <= processes


@pytest.mark.torch
def test_a_packs_share_is_of_the_tokens_that_are_learnt_from() -> None:
    samples = samples_of([1, 2, 5])
    assert batches.shares(batches.Step(1, 0, ((0,), (2, 1))), samples) == [1 / 8, 7 / 8]
    assert batches.shares(batches.Step(1, 0, ((2,),)), samples) == [1.0]
    samples[0].loss_mask[:] = 0
    samples[0].loss_mask[0] = 1  # nothing predicts the first token
    with pytest.raises(CheckFailed, match="'s0'"):
        batches.shares(batches.Step(1, 0, ((1,), (0,))), samples)


# --- small runs --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def begin(
    tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path, certify: Callable[..., str]
) -> Callable[[], Path]:
    """Make configurations of runs that are captured, as far as training can tell."""
    import torch

    def made() -> Path:
        root = tmp_path_factory.mktemp("run")
        folder, generator = RunFolder(root / "out"), torch.Generator().manual_seed(11)
        rows: dict[str, list[Any]] = {"ids": [], "states": [], "masks": []}
        for number, answer in enumerate((*ANSWERS, 5, 5, 5)):
            length = PROMPT + answer
            ids = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
            states = torch.randn((length, len(BOUNDARIES), WIDTH), generator=generator).bfloat16()
            split = "train" if number < len(ANSWERS) else "validation"
            row = {"id": f"c{number}", "split": split, "token_ids": ids, "prompt_tokens": PROMPT}
            run_folder.append_line(folder.conversations, row)
            rows["ids"].append(ids)
            rows["states"].append(states)
            rows["masks"].append(bytes([0] * PROMPT + [1] * answer))
        digests = verifier.digests(tiny_verifier)
        engine = {
            "engine_version": "0.32.0",
            "dtype": "bfloat16",
            "adapter": {"name": "vllm_native", "sha256": "b" * 64},
        }
        binding = engine | {"verifier": digests, "boundaries": BOUNDARIES}
        store, name = Store(folder.shards), "shard-00000.safetensors"
        folder.shards.mkdir()
        written = shard.write_partial(store.path(name), rows["states"], rows["ids"], rows["masks"])
        store.record(
            {
                "shard": name,
                "digests": written,
                "ids": [f"c{n}" for n in range(len(rows["ids"]))],
                "certificate": certify(folder.shards, binding),
                "boundaries": BOUNDARIES,
                "last_boundary_normed": False,
                "dtype": "bfloat16",
                "verifier": {"name": "tiny", **digests},
                "engine": engine,
                "made": "2026-11-30T12:00:00+00:00",
            }
        )
        path = root / "run.toml"
        path.write_text(
            f'output = "{folder.root}"\nverifier.directory = "{tiny_verifier}"\n'
            "[train]\ndraft_vocabulary = 64\nepochs = 4\ntokens_per_step = 24\n"
            'mixed_precision = "no"\ntest_time_steps = 2\ncheckpoint_every = 2\n'
            "learning_rate = 0.01\n[capture]\nmax_model_len = 64\n"
        )
        return path

    return made


def folder_of(path: Path) -> RunFolder:
    return RunFolder(config.load(path).output)


def head_of(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    loaded: dict[str, Any] = load_file(folder_of(path).head / "model.safetensors")
    return loaded


def measured(path: Path) -> list[dict[str, Any]]:
    rows = run_folder.read_lines(folder_of(path).train / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k != "tokens_per_s"} for row in rows]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    return kept | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def launched(begin: Callable[[], Path]) -> Path:
    """A run whose head two processes have trained, started as the documentation says."""
    path = begin()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", "2", "-m", "truetap.pipeline.cli", "train", str(path)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("training steps: 12 of 12") == 1, "both spoke"
    return path


Server = subprocess.Popen[str]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    script = str(__file__).replace("test_ranks", "rank_server")
    with subprocess.Popen(
        [sys.executable, script],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=10)


def trained(server: Server, path: Path, **faults: str) -> tuple[list[int], list[str]]:
    """Train in two processes; return their exit codes and what they said but for progress."""
    by_rank = {name.removeprefix("rank_"): fault for name, fault in faults.items()}
    said = str(path.with_name("said"))
    job = {"config": str(path), "count": 2, "faults": by_rank, "said": said}
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(job | {"deadline_s": DEADLINE_S / 2}) + "\n")
    server.stdin.flush()
    answer = json.loads(server.stdout.readline())
    return answer["codes"], [
        text.removeprefix("shards verified: 1 of 1\n") for text in answer["said"]
    ]


@pytest.mark.torch
def test_two_processes_do_the_steps_of_one_list(launched: Path) -> None:
    settings, folder = config.load(launched), folder_of(launched)
    planned = batches.schedule(settings, samples_of(ANSWERS), 2)
    assert any(len(step.packs) == 1 for step in planned), "no process ever lacks a pack"
    rows = measured(launched)
    assert [r["step"] for r in rows if r["kind"] == "step"] == [step.number for step in planned]
    assert [r["step"] for r in rows if r["kind"] == "validation"] == list(range(2, 13, 2))
    newest = folder.train / "checkpoint-000012"
    assert {f"random_states_{rank}.pkl" for rank in range(2)} <= {p.name for p in newest.iterdir()}
    assert json.loads((folder.head / "truetap.json").read_text())["steps"] == len(planned)
    assert json.loads((folder.root / "made-from.json").read_text())["train"]["processes"] == 2
    assert not list(folder.root.rglob("*.partial"))


def by_one_process(path: Path, weigh: Callable[[batches.Step], list[float] | None]) -> Any:
    """Train as one process does on whatever the two had; return losses and weights.

    ``weigh`` returns each pack's weight, or None: then all samples of a step are one pack.
    """
    import torch
    from speculators.losses import resolve_loss_config

    from truetap.pipeline import prepare, verifiers

    settings, folder = config.load(path), folder_of(path)
    conversations = [c for c in prepare.load(folder) if c.split == "train"]
    samples = Store(folder.shards).samples([c.id for c in conversations])
    model = draft_head.build(
        settings,
        verifiers.spec_of(settings, verifiers.directory_of(settings)),
        draft_head.vocabulary_of(conversations, 64, VOCABULARY),
    )
    steps = batches.schedule(settings, samples, 2)
    learnt = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=settings.train.learning_rate, weight_decay=0.0)
    factor = lambda step: train.learning_rate_factor(step, len(steps))  # noqa: E731
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    loss_config, losses = resolve_loss_config("kl_div", "eager"), []
    for step in steps:
        weights = weigh(step)
        packs = [step.samples] if weights is None else step.packs
        total = torch.tensor(0.0)
        for pack, weight in zip(packs, weights or [1.0], strict=True):
            batch = batches.pack([samples[i] for i in pack])
            batch = {n: t.float() if t.is_floating_point() else t for n, t in batch.items()}
            total = total + weight * model(**batch, ttt_steps=2, loss_config=loss_config)[1]
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(float(total.detach()))
    return losses, model.state_dict()


def distance(path: Path, other: tuple[list[float], dict[str, Any]]) -> tuple[float, float]:
    """Return the largest relative difference of a loss, and the weights' from what they learnt."""
    import torch
    from safetensors.torch import load_file

    losses, weights = other
    ours = [row["loss"] for row in measured(path) if row["kind"] == "step"]
    begun = load_file(folder_of(path).untrained_head / "model.safetensors")
    head = {n: t.float() for n, t in head_of(path).items() if t.is_floating_point()}
    apart = torch.cat([(head[n] - weights[n]).flatten() for n in head]).norm()
    learnt = torch.cat([(head[n] - begun[n].float()).flatten() for n in head]).norm()
    worst = max(abs(a / b - 1) for a, b in zip(ours, losses, strict=True))
    return worst, float(apart / learnt)


@pytest.mark.torch
def test_two_processes_compute_what_one_does_on_all_their_packs(launched: Path) -> None:
    """Measured: 4e-6 of a loss, 5e-5 of what was learnt; that is rounding, which Adam enlarges.

    The mutant is the mean over processes, to which a token in a small pack is worth more than one
    in a large pack: measured 0.18 and 0.75.
    """
    loss, learnt = distance(launched, by_one_process(launched, lambda _: None))
    assert loss < 2e-5
    assert learnt < 5e-4
    mean = by_one_process(launched, lambda step: [1 / len(step.packs)] * len(step.packs))
    loss, learnt = distance(launched, mean)
    assert loss > 0.02
    assert learnt > 0.05


@pytest.mark.torch
def test_a_killed_process_ends_both_and_the_next_run_continues_to_the_same_bits(
    server: Server, begin: Callable[[], Path], launched: Path, console: Console
) -> None:
    import torch

    path = begin()
    codes, (said, silent) = trained(server, path, rank_1="killed")
    assert codes == [3, -9]
    assert said.startswith("truetap: another process of this training has ended: ")
    assert "continues from the last checkpoint" in said
    assert silent == ""
    kept = sorted(p.name for p in folder_of(path).train.glob("checkpoint-*"))
    assert kept == ["checkpoint-000002", "checkpoint-000004"]

    alone = "was begun with 2 processes, and cannot go on exactly with 1"
    with pytest.raises(UsageError, match=alone) as refused:
        trained_alone(path, console)
    assert "torchrun --nproc-per-node 2" in refused.value.remedy
    assert not folder_of(path).head.exists()

    codes, _ = trained(server, path)
    assert codes == [0, 0]
    assert measured(path) == measured(launched)
    ours, theirs = head_of(path), head_of(launched)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def trained_alone(path: Path, console: Console) -> None:
    from truetap.pipeline import verifiers

    settings = config.load(path)
    spec = verifiers.spec_of(settings, verifiers.directory_of(settings))
    train.train(settings, folder_of(path), spec, console)


@pytest.mark.torch
def test_a_head_that_is_trained_is_taken_as_it_is_by_one_process(
    launched: Path, console: Console
) -> None:
    """So that the rest of a run goes on without a launcher."""
    trained_alone(launched, console)
    assert "the draft head is trained and exported" in console.file.getvalue()  # type: ignore[attr-defined]


def test_what_one_process_began_is_not_continued_by_several(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert train_claim._processes(folder, 1) == {}, "folders of one process say nothing of it"
    assert train_claim._processes(folder, 4) == {"processes": 4}
    folder.claim("train", {})
    assert train_claim._processes(folder, 1) == {}
    with pytest.raises(UsageError, match="begun with 1 process, and cannot") as refused:
        train_claim._processes(folder, 4)
    assert refused.value.remedy == "start it without torchrun"


SENTENCES = {
    "not-finite": "truetap: the loss is nan at step [34]; nothing was saved",
    "corrupt": r"truetap: shard 7 is corrupt\nremedy: run truetap extract again",
    "disk-full": "truetap: .*checkpoint-000002 cannot be written: .*No space left",
    "other-weights": r"truetap: of 2 processes, \[1\] have other weights than process 0",
    "interrupted": r"\s*interrupted; run the same command again to continue",
}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("faults", "codes"),
    [
        ({"rank_0": "not-finite"}, [1, 1]),
        ({"rank_1": "not-finite"}, [1, 1]),
        ({"rank_1": "corrupt"}, [4, 4]),
        ({"rank_0": "disk-full"}, [3, 3]),
        ({"rank_1": "disk-full"}, [3, 3]),
        ({"rank_1": "other-weights"}, [1, 1]),
        ({"rank_0": "interrupted", "rank_1": "interrupted"}, [130, 130]),
    ],
)
def test_a_fault_of_one_process_ends_both_with_its_code_and_one_sentence(
    server: Server, begin: Callable[[], Path], faults: dict[str, str], codes: list[int]
) -> None:
    path = begin()
    ended, (said, silent) = trained(server, path, **faults)
    assert ended == codes
    sentence = SENTENCES[next(iter(faults.values()))]
    assert re.match(sentence, said), said
    assert said.count("truetap: ") <= 1
    assert silent.strip() == ""
    assert not folder_of(path).head.exists()


@pytest.mark.torch
def test_what_only_one_process_can_tell_it_tells(server: Server, begin: Callable[[], Path]) -> None:
    """Nobody else knows of a defect that it met: silence would hide it."""
    codes, (said, alone) = trained(server, begin(), rank_1="defect")
    assert codes == [3, 3]
    assert said.startswith("truetap: another process of this training has ended: ")
    assert "ZeroDivisionError: a defect" in alone

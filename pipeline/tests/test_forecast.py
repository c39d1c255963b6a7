"""What is left of an extraction, before anything is started."""

from __future__ import annotations

import json
import shutil
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from truetap.harness.errors import CheckFailed, IntegrityError
from truetap.pipeline import chat, cli, forecast, prepare, run_folder, selection, verifiers
from truetap.pipeline import config as configuration
from truetap.pipeline.dialogues import Message
from truetap.pipeline.forecast import Lengths
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.selection import Chosen, Selection
from truetap.pipeline.store import Store

if TYPE_CHECKING:
    from pathlib import Path

    from truetap.pipeline.config import RunConfig

CORPUS = {f"c{n}": 1_328 for n in range(68_000)}
SHAPE: dict[str, Any] = {"states": 4, "width": 4_096, "dtype": "bfloat16", "staging_bytes": 50}


def disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))


def test_a_corpus_of_three_terabytes_is_refused_on_one_and_fits_on_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = 68_000 * 1_328 * 4 * 4_096 * 2
    assert round(need / 1e12, 2) == 2.96
    disk(monkeypatch, need)
    seen = forecast.forecast_of(Lengths(CORPUS, {}), set(), **SHAPE, disk=tmp_path)
    seen.require_space()
    assert (seen.tokens, seen.bytes, seen.fits) == (90_304_000, need, True)
    assert "90,304,000 tokens x 4 states x 4096 values x 2 bytes = 2,959.08 GB" in told(seen)
    disk(monkeypatch, need - 1)
    refused = forecast.forecast_of(Lengths(CORPUS, {}), set(), **SHAPE, disk=tmp_path)
    assert "NOT ENOUGH" in told(refused)
    with pytest.raises(CheckFailed, match=r"need 2,959\.1 GB and .* has 2,959\.1 GB free") as no:
        refused.require_space()
    assert no.value.exit_code == 1
    assert no.value.remedy


def told(seen: forecast.Forecast) -> str:
    return "\n".join(seen.told())


def test_what_is_captured_needs_no_room_and_what_is_unanswered_counts_in_full(
    tmp_path: Path,
) -> None:
    lengths = Lengths({"a": 10, "b": 20}, {"c": 300})
    seen = forecast.forecast_of(
        lengths, {"a", "of-another-run"}, states=2, width=4, dtype="float32", staging_bytes=2,
        disk=tmp_path / "not" / "yet", speed=(1_000, 4.0),
    )  # fmt: skip
    assert (seen.conversations, seen.answered, seen.captured, seen.tokens) == (3, 2, 1, 320)
    assert seen.bytes == 320 * 2 * 4 * 4
    assert seen.seconds == pytest.approx(320 / 250)
    assert "at most 320 tokens" in told(seen)
    assert "250 tokens/s, measured here over 1,000 tokens" in told(seen)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 seconds"), (119, "119 seconds"), (120, "2.0 minutes"), (7_200, "2.0 hours"),
     (1e7, "115.7 days")],
)  # fmt: skip
def test_durations_are_told_in_a_fitting_unit(seconds: float, said: str) -> None:
    assert forecast.duration(seconds) == said


@pytest.fixture
def path(tmp_path: Path, paper_verifier: Path) -> Path:
    made = tmp_path / "run.toml"
    made.write_text(
        f'output = "{tmp_path}/run"\n[verifier]\ndirectory = "{paper_verifier}"\n'
        "[data]\ntrain = 3\nvalidation = 1\nmax_answer_tokens = 50\n"
    )
    return made


def answer(folder: RunFolder, tokens: dict[str, int]) -> None:
    folder.root.mkdir(exist_ok=True)
    rows = [
        {"id": name, "split": "train", "token_ids": [1] * n, "prompt_tokens": 1}
        for name, n in tokens.items()
    ]
    folder.conversations.write_text("".join(json.dumps(row) + "\n" for row in rows))


def foresee(path: Path) -> tuple[RunConfig, RunFolder, forecast.Forecast]:
    config = configuration.load(path)
    folder = RunFolder(config.output)
    spec = verifiers.spec_of(config, config.verifier.directory)  # type: ignore[arg-type]
    return config, folder, forecast.foresee(config, folder, spec)


def test_prompts_count_with_the_longest_answer_until_there_is_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = {"a": 55, "b": 56, "c": 57, "d": 58}
    monkeypatch.setattr(prepare, "longest_lengths", lambda *_: longest)
    folder = RunFolder(path.parent / "run")
    answer(folder, {"b": 30})
    with folder.conversations.open("a") as file:
        file.write('{"id": "c", "token_ids": [1,')  # being written
    assert foresee(path)[2].tokens == 55 + 30 + 57 + 58
    answer(folder, {"a": 10, "b": 20, "c": 30, "d": 40})
    monkeypatch.delattr(prepare, "longest_lengths")  # nothing is left to be asked of a tokenizer
    seen = foresee(path)[2]
    assert (seen.tokens, seen.answered) == (100, 4)
    Store(folder.shards).append({"shard": "shard-00000.safetensors", "ids": ["a", "d"]})
    assert foresee(path)[2].tokens == 50


def test_what_is_held_out_or_given_up_is_never_captured(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = (Message("user", "Why?"),)
    asked = [
        Chosen(name, split, question, (1,) * length)
        for name, split, length in (
            ("h", "heldout", 7), ("v", "validation", 5), ("t", "train", 3), ("d", "train", 4)
        )
    ]  # fmt: skip
    monkeypatch.setattr(chat, "load_tokenizer", lambda _: None)
    monkeypatch.setattr(selection, "choose", lambda *_: Selection("", chosen=asked))
    config = configuration.load(path)
    folder = RunFolder(config.output)
    run_folder.append_line(folder.dropped, {"id": "d", "why": "being too long"})
    run_folder.append_line(folder.dropped, {"id": "t", "turns": 2})
    assert prepare.longest_lengths(config, folder, path) == {"v": 55, "t": 53}


@pytest.mark.parametrize("line", ["[]", "{}", '{"id": "a", "token_ids": 7}', "{"])
def test_a_damaged_conversation_is_an_integrity_failure(path: Path, line: str) -> None:
    folder = RunFolder(path.parent / "run")
    answer(folder, {})
    folder.conversations.write_text(line + "\n")
    with pytest.raises(IntegrityError, match="line 1 of"):
        foresee(path)


def test_a_measured_speed_counts_under_the_same_settings_only(path: Path) -> None:
    answer(RunFolder(path.parent / "run"), {"a": 10, "b": 20, "c": 30, "d": 40})
    config, folder, unknown = foresee(path)
    assert unknown.seconds is None
    assert "not known" in told(unknown)
    forecast.record_speed(folder, config, 0, 3.0)
    assert not folder.speed.exists()
    forecast.record_speed(folder, config, 500, 10.0)
    assert foresee(path)[2].seconds == pytest.approx(2.0)
    path.write_text(path.read_text() + "[capture]\ncall_deadline_s = 900\n")
    assert foresee(path)[2].seconds == pytest.approx(2.0)  # it changes no speed
    path.write_text(path.read_text() + "max_num_seqs = 8\n")
    assert foresee(path)[2].seconds is None
    folder.speed.write_text("{}")
    with pytest.raises(IntegrityError, match=r"extract-speed\.json is not as it was written"):
        foresee(path)


def test_the_verb_says_it_and_refuses_what_no_disk_holds(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def truetap(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["truetap", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    folder = RunFolder(tmp_path / "run")
    answer(folder, {"a": 10, "b": 20, "c": 30, "d": 40})
    before = sorted(p.name for p in folder.root.iterdir())
    code, out, err = truetap("plan", path, "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert (said["tokens"], said["bytes"], said["fits"]) == (100, 100 * 4 * 16 * 2, True)
    assert said["seconds"] is None
    assert sorted(p.name for p in folder.root.iterdir()) == before
    model = tmp_path / "model"
    model.mkdir()
    facts = {
        "num_hidden_layers": 12, "hidden_size": 2**50, "vocab_size": 5,
        "max_position_embeddings": 1024,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(facts))
    too_much = tmp_path / "huge.toml"
    too_much.write_text(
        f'output = "{tmp_path}/run"\n[verifier]\ndirectory = "{model}"\n'
        "[data]\ntrain = 3\nvalidation = 1\n"
    )
    for options in ((), ("--json",)):
        code, out, err = truetap("plan", too_much, *options)
        assert code == 1
        assert "GB free" in err
        assert "remedy: free disk space" in err
    assert json.loads(out)["fits"] is False

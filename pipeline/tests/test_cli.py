from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import click
import pytest

from truetap.harness import contract, report
from truetap.harness.errors import CheckFailed, CouldNotRun, IntegrityError, UsageError
from truetap.pipeline import cli

if TYPE_CHECKING:
    from pathlib import Path

VERBS = [
    *("adapters", "audit", "certify", "clauses", "conform", "doctor", "evaluate"),
    *("export-dataset", "extract", "gate", "keys", "matrix", "plan", "prepare", "publish"),
    *("record", "run", "surface", "train", "verify"),
]
WITHOUT_CONFIG = {
    *("adapters", "audit", "clauses", "doctor", "keys", "matrix", "record", "surface", "verify")
}
MUSTS = [id_ for id_ in contract.PROFILES["core"] if contract.CLAUSES[id_].level == "MUST"]


@pytest.fixture
def config(tmp_path: Path, paper_verifier: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(f'output = "{tmp_path}/run"\n[verifier]\ndirectory = "{paper_verifier}"\n')
    return path


def truetap(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does; whatever it says, it is no traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "truetap.pipeline.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert "Traceback" not in done.stderr + done.stdout
    return done


def test_help_names_every_verb_and_exit_code() -> None:
    done = truetap("--help")
    assert done.returncode == 0
    commands = done.stdout.split("Commands:\n")[1].split("\n\n")[0]
    assert [line.split()[0] for line in commands.splitlines()] == VERBS
    for code in (
        "0 yes",
        "1 no",
        "2 usage",
        "3 could not run",
        "4 integrity",
        "130 interrupted",
        "143 ended",
    ):
        assert code in " ".join(done.stdout.split())


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in WITHOUT_CONFIG])
def test_a_missing_configuration_is_one_sentence(verb: str, tmp_path: Path) -> None:
    done = truetap(verb, tmp_path / "none.toml", *(["memory://x"] if verb == "publish" else []))
    assert done.returncode == 2
    assert done.stderr == (
        f"truetap: there is no configuration at {tmp_path}/none.toml\n"
        "remedy: see examples/smollm2-cpu.toml\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gate"], "Missing argument 'CONFIG'"),
        (["train", "{config}", "--epochs", "3"], "No such option"),
        (["trian", "{config}"], "No such command 'trian'"),
        (["gate", "{folder}"], "is a directory"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(
    config: Path, arguments: list[str], said: str
) -> None:
    done = truetap(*(text.format(config=config, folder=config.parent) for text in arguments))
    assert done.returncode == 2
    assert said in done.stderr


def test_an_unknown_mutant_is_refused_and_all_there_are_are_listed(config: Path) -> None:
    from truetap.harness.adapters.mutants import FAULTS

    done = truetap("conform", config, "--mutant", "off-by-two")
    assert done.returncode == 2
    assert "'off-by-two' is no mutant" in done.stderr
    listed = [line.split(":")[0] for line in done.stderr.splitlines() if line.startswith("  ")]
    assert [name.strip() for name in listed] == list(FAULTS)


def test_mutants_are_listed_without_a_configuration() -> None:
    from truetap.harness.adapters.mutants import FAULTS

    done = truetap("run", "--mutant", "list")
    assert done.returncode == 0
    assert [line.split(":")[0].strip() for line in done.stdout.splitlines()] == list(FAULTS)


def test_mutants_named_in_the_help_exist() -> None:
    from truetap.harness.adapters.mutants import FAULTS

    (told,) = [
        option.help
        for option in cli.app.commands["gate"].params
        if isinstance(option, click.Option) and option.name == "mutant"
    ]
    assert told
    named = told.split(": ", 1)[1].split(", ...")[0].split(", ")
    assert len(named) >= 3
    assert set(named) <= set(FAULTS)


@pytest.mark.parametrize(
    ("verb", "said", "remedy"),
    [
        ("certify", "there is no conformance report at ", "run truetap conform first"),
        ("extract", "there are no conversations in ", "run truetap prepare first"),
        ("train", "there are no shards in ", "run truetap extract"),
        ("export-dataset", "there are no shards in ", "run truetap extract"),
        ("evaluate", "there is no trained head in ", "run truetap train"),
    ],
)
def test_a_stage_without_the_one_before_says_which(
    config: Path, verb: str, said: str, remedy: str
) -> None:
    done = truetap(verb, config)
    assert done.returncode == 2
    sentence, then = done.stderr.splitlines()
    assert sentence.startswith(f"truetap: {said}{config.parent}/run")
    assert then == f"remedy: {remedy}"


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": "other"}'])
def test_a_corrupt_report_is_an_integrity_failure(config: Path, content: str) -> None:
    path = config.parent / "run" / "conform" / "report.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    done = truetap("certify", config)
    assert done.returncode == 4
    assert f"truetap: {path} is not a" in done.stderr
    assert "remedy: " in done.stderr
    assert not (config.parent / "run" / "certificate.json").exists()


def write_failing_report(config: Path) -> list[str]:
    """Put a report into the run folder in which two clauses failed; return their ids."""
    made = report.blank(
        "core",
        evidence="live",
        adapter="vllm_native",
        spec={},
        suite_digest="5" * 64,
        started="2026-11-29T12:00:00+00:00",
        environment={"binding": {}, "recorded": {}},
    )
    failed = [MUSTS[1], MUSTS[4]]
    for clause in made.clauses:
        if clause.id in failed:
            clause.add("fail", f"[seen] in {clause.id}")  # brackets, which rich takes for a style
        else:
            clause.add("pass", "")
    path = config.parent / "run" / "conform" / "report.json"
    path.parent.mkdir(parents=True)
    made.write(path)
    return failed


def test_a_failing_report_gets_no_certificate_and_every_failure_is_named(config: Path) -> None:
    failed = write_failing_report(config)
    done = truetap("certify", config)
    assert done.returncode == 1
    assert done.stderr.startswith("truetap: no certificate: ")
    assert all(f"{clause} fail: [seen] in {clause}" in done.stderr for clause in failed)
    assert not (config.parent / "run" / "certificate.json").exists()


def test_a_gate_that_denies_gives_every_reason_on_the_terminal(config: Path) -> None:
    failed = write_failing_report(config)
    done = truetap("gate", config)
    assert done.returncode == 1
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines[0] == "gate: denied"
    codes = [line.split(":")[0] for line in lines[1:] if not line.startswith("remedy: ")]
    assert codes == [*failed, "certificate"]
    assert sum(line.startswith("remedy: ") for line in lines) == 3
    assert f"Seen: [seen] in {failed[0]}" in done.stdout
    assert done.stderr == (
        f"truetap: the gate denies this run: {', '.join(codes)}; nothing was extracted\n"
    )


def test_a_gate_that_denies_gives_every_reason_as_json(config: Path) -> None:
    failed = write_failing_report(config)
    done = truetap("gate", config, "--json")
    assert done.returncode == 1
    decision = json.loads(done.stdout)
    assert decision.keys() == {
        *("allowed", "certificate", "path", "signer", "workers_checked", "reasons")
    }
    assert decision["allowed"] is False
    assert [reason["code"] for reason in decision["reasons"]] == [*failed, "certificate"]
    assert "gate: denied" in done.stderr


def test_a_mutant_has_a_folder_of_its_own(config: Path) -> None:
    """The right run's failing report is not the mutant's, and its folder is not touched."""
    write_failing_report(config)
    run = config.parent / "run"
    before = {path.name for path in run.iterdir()}
    done = truetap("gate", config, "--json", "--mutant", "off-by-one")
    assert [reason["code"] for reason in json.loads(done.stdout)["reasons"]] == ["certificate"]
    assert {path.name for path in run.iterdir()} - before == {"mutants"}
    assert [path.name for path in (run / "mutants").iterdir()] == ["off-by-one"]


@pytest.mark.parametrize("verb", ["run", "extract", "train"])
def test_a_reason_that_is_none_is_refused_before_anything_is_looked_at(
    verb: str, tmp_path: Path
) -> None:
    done = truetap(verb, tmp_path / "none.toml", "--allow-uncertified", "because")
    assert done.returncode == 2
    assert "--allow-uncertified needs a reason of 10 characters or more" in done.stderr


def test_a_mutant_is_not_let_past_the_gate(config: Path) -> None:
    done = truetap(
        *("run", config, "--mutant", "off-by-one"),
        *("--allow-uncertified", "let us see what it does"),
    )
    assert done.returncode == 2
    assert "a run with --mutant ends at the gate" in done.stderr
    assert not (config.parent / "run").exists()


def test_doctor_gives_json_and_an_exit_code_that_agrees() -> None:
    done = truetap("doctor", "--json")
    diagnosis = json.loads(done.stdout)
    assert done.returncode == (0 if diagnosis["can_run_demo"] else 3)
    states = {finding["name"]: finding["state"] for finding in diagnosis["findings"]}
    assert {"disk", "torch"} <= states.keys()


def test_an_output_that_is_a_file_is_one_sentence(config: Path) -> None:
    (config.parent / "run").write_text("")
    done = truetap("certify", config)
    assert done.returncode == 2
    assert "truetap: the output folder cannot be used" in done.stderr


def test_a_folder_in_use_is_could_not_run(config: Path) -> None:
    from truetap.pipeline.run_folder import RunFolder

    with RunFolder(config.parent / "run").lock():
        done = truetap("certify", config)
    assert done.returncode == 3
    assert "another truetap is working in" in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (CheckFailed("no.", remedy="fix it"), 1, "truetap: no.\nremedy: fix it\n"),
        (UsageError("what?"), 2, "truetap: what?\n"),
        (CouldNotRun("gone.", remedy="wait"), 3, "truetap: gone.\nremedy: wait\n"),
        (IntegrityError("bad.", remedy="redo"), 4, "truetap: bad.\nremedy: redo\n"),
        (
            OSError(28, "No space left on device", "/x"),
            3,
            "truetap: no space: [Errno 28] No space left on device: '/x'\nremedy: free disk space",
        ),
        (OSError(122, "Disk quota exceeded"), 3, "truetap: no space: "),
        (OSError(5, "Input/output error"), 3, "truetap: [Errno 5] Input/output error"),
        (TimeoutError(), 3, "truetap: TimeoutError"),
        (KeyboardInterrupt(), 130, "interrupted; run the same command again to continue"),
        (SystemExit(7), 7, ""),
    ],
    ids=[
        "no",
        "usage",
        "could-not-run",
        "integrity",
        "full",
        "quota",
        "disk",
        "mute",
        "interrupt",
        "exit",
    ],
)
def test_what_a_verb_raises_becomes_its_exit_code(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    said: str,
) -> None:
    stderr = run_with(config, monkeypatch, capsys, error, code)
    assert said in stderr
    assert "Traceback" not in stderr


def test_sigterm_ends_a_verb_in_order_with_a_code_of_its_own(config: Path) -> None:
    """Batch systems end jobs with it; Python's own way is to die without a word."""
    code = (
        "import os, signal, sys; from truetap.pipeline import cli, conform\n"
        "def certify(*_, **__):\n"
        "    try: os.kill(os.getpid(), signal.SIGTERM); signal.pause()\n"
        "    finally: print('closed')\n"
        "conform.certify = certify; sys.argv[1:] = ['certify', sys.argv[1]]; cli.main()"
    )
    command = [sys.executable, "-c", code, str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (143, "closed\n")
    assert done.stderr.strip() == "ended by SIGTERM; run the same command again to continue"


def test_a_defect_of_ours_never_reads_as_no(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's own exit code for an exception is 1, which is what a gate that denies gives."""
    stderr = run_with(config, monkeypatch, capsys, ZeroDivisionError("ours"), 3)
    assert "ZeroDivisionError: ours" in stderr


def test_the_suites_reference_computes_where_the_configuration_says(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from truetap.pipeline import conform

    started: list[list[str]] = []

    def popen(command: list[str], **_: Any) -> None:
        started.append(command)
        raise CouldNotRun("that was all")

    config.write_text(config.read_text() + '[gate]\nreference_device = "cuda:1"\n')
    monkeypatch.setattr(conform.subprocess, "Popen", popen)
    monkeypatch.setattr(sys, "argv", ["truetap", "conform", str(config)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == CouldNotRun.exit_code
    (command,) = started
    assert command[command.index("--reference-device") + 1] == "cuda:1"


def run_with(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
) -> str:
    """Run a verb that raises ``error``; return what was said."""
    from truetap.pipeline import conform

    def certify(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(conform, "certify", certify)
    monkeypatch.setattr(sys, "argv", ["truetap", "certify", str(config)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    return capsys.readouterr().err

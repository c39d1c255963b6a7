"""The verbs about engines: what they print, refuse, and end with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from truetap.harness.surface import facts
from truetap.pipeline import cli, cli_engine

DOCS = Path(__file__).resolve().parents[2] / "docs" / "replies.md"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["truetap", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def all_facts() -> list[dict[str, object]]:
    return [facts.load(version) for version in facts.versions()]


def test_the_table_is_what_the_documentation_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "surface", "--table") == 0
    printed = capsys.readouterr().out
    assert printed.splitlines() == cli_engine.reply_lines(all_facts())
    assert f"```\n{printed}```" in DOCS.read_text()
    assert max(map(len, printed.splitlines())) < 100


def test_the_table_names_the_break(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "surface", "--table", "--json") == 0
    table = json.loads(capsys.readouterr().out)
    assert table["mp, rank 0"] == {
        "0.8.5": "raises_TypeError",
        "0.9.0 to 0.11.0": "list_of_one_rank",
        "0.11.1 to 0.33.0": "bare",
    }


def test_the_table_follows_the_facts() -> None:
    known = {"version": "1.0", "replies": {"mp": {"default": {"0": "bare"}}}}
    moved = {"version": "1.1", "replies": {"mp": {"default": {"0": "list_of_one_rank"}}}}
    assert cli_engine.reply_table([known, moved])["mp, rank 0"] == {
        "1.0": "bare",
        "1.1": "list_of_one_rank",
    }


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["surface"], 2, "name releases"),
        (["surface", "--table", "--all"], 2, "derives none"),
        (["surface", "--table", "0.0.1"], 2, "no facts of vllm 0.0.1"),
        (["surface", "not a version"], 2, "not a version"),
        (["record"], 2, "--into"),
        (["record", "--into", "{here}", "--case", "nonsense"], 2, "nonsense"),
        (["record", "--into", "{here}", "--adapter", "vllm_rpc"], 2, "go with --captures"),
        (["record", "--into", "{here}", "--captures"], 2, "--captures takes --adapter"),
        (
            ["record", "--into", "{here}", "--captures", "--adapter", "vllm_rpc", "--case", "uni"],
            *(2, "neither --case"),
        ),
        (["record", "--into", "{here}", "--captures", "--adapter", "nobodys"], 2, "nobodys"),
        (
            ["record", "--into", "{here}", "--captures", "--adapter", "vllm_rpc", "--family", "x"],
            *(2, "no family 'x'"),
        ),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [argument.replace("{here}", str(tmp_path / "new")) for argument in arguments]
    assert run(monkeypatch, *given) == code
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())

"""Going on although the gate denies: loud, recorded in every shard, and never laundered."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from truetap.harness import reaper
from truetap.harness.certificate import Reason
from truetap.harness.errors import CheckFailed, CouldNotRun, UsageError
from truetap.pipeline import (
    conform,
    evaluate,
    extract,
    gatekeeper,
    model_card,
    report,
    run,
    run_folder,
    uncertified,
)
from truetap.pipeline.config import Extract, Gate, RunConfig, Verifier
from truetap.pipeline.gate import Decision
from truetap.pipeline.prepare import Conversation
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.store import Store

if TYPE_CHECKING:
    from rich.console import Console

WHY = "the node is new, and this is [b]a trial[/b]"
DENIED = Decision(
    (
        Reason("LAYERS-001", "each slot holds [the] boundary: fail", "fix the capture path"),
        Reason("certificate", "there is no certificate", "run truetap certify"),
    ),
    None,
    workers_checked=True,
)
ALLOWED = Decision((), "a" * 64, workers_checked=True)
EXPIRED = Decision((Reason("expired", "it expired", "certify again"),), "a" * 64, True)


def told(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("text", ["", "   ", "because", "a b c d e", "because \n  ", "\u200b" * 10])
def test_a_reason_must_be_one(text: str) -> None:
    with pytest.raises(UsageError, match="needs a reason of 10 characters or more") as refused:
        uncertified.checked_reason(text)
    assert "recorded in every shard" in refused.value.remedy


def test_a_reason_is_kept_on_one_line() -> None:
    assert uncertified.checked_reason(" the node\n is\tnew  ") == "the node is new"
    assert uncertified.checked_reason("the node\x1b[2J is new") == "the node [2J is new"
    assert uncertified.checked_reason(None) is None


# --- extraction --------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.shards.mkdir(parents=True)
    return made


@pytest.fixture
def keeper(
    folder: RunFolder,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
    certify: Callable[..., str],
) -> Callable[..., list[dict[str, Any]]]:
    """Have the gate answer so, one after the other; return what each shard's line would say."""
    bound = {
        "adapter": {"name": "vllm_native", "sha256": "b" * 64},
        "verifier": {"weights_sha256": "a" * 64},
    }
    digest = certify(folder.root, bound)
    (folder.root / "certificates" / f"{digest}.json").rename(folder.certificate)

    def ask(*decisions: Decision, reason: str | None) -> list[dict[str, Any]]:
        judged = {"certificate": digest, "path": folder.certificate}
        answers = iter([replace(d, **judged) if d.certificate else d for d in decisions])
        monkeypatch.setattr(gatekeeper, "ask_gate", lambda *_, **__: next(answers))
        config = RunConfig(output=folder.root, verifier=Verifier(directory=folder.root))
        made = gatekeeper.Gatekeeper(config, folder, {}, reason, console)
        return [made.standing() for _ in decisions]

    return ask


def test_an_allowed_run_keeps_its_certificate_beside_the_shards(
    keeper: Callable[..., Any], folder: RunFolder, console: Console
) -> None:
    one, two = keeper(ALLOWED, ALLOWED, reason=None)
    kept = folder.shards / "certificates" / f"{one['certificate']}.json"
    assert kept.read_bytes() == folder.certificate.read_bytes()
    assert one.keys() == {"made", "certificate"}
    assert one["made"] < two["made"]
    assert told(console).count("gate: allowed by these very workers") == 1


def test_a_denied_run_without_a_reason_ends(keeper: Callable[..., Any], folder: RunFolder) -> None:
    with pytest.raises(CheckFailed, match="the gate denies this run: LAYERS-001, certificate"):
        keeper(DENIED, reason=None)
    assert not folder.uncertified.exists()


def test_a_denied_run_with_a_reason_goes_on_loudly_and_every_shard_says_so(
    keeper: Callable[..., Any], folder: RunFolder, console: Console
) -> None:
    lines = keeper(DENIED, DENIED, DENIED, reason=WHY)
    said = {"reason": WHY, "denied": ["LAYERS-001", "certificate"]}
    assert [line["uncertified"] for line in lines] == [said] * 3
    assert all("certificate" not in line for line in lines)
    text = told(console)
    assert text.count("UNCERTIFIED: the gate denies this run") == 1
    assert f"reason given: {WHY}" in text
    assert "LAYERS-001: each slot holds [the] boundary: fail" in text
    assert "certificate: there is no certificate" in text
    (row,) = uncertified.rows(folder)
    assert [why["code"] for why in row["reasons"]] == ["LAYERS-001", "certificate"]


def test_a_reason_that_is_not_needed_is_not_recorded(
    keeper: Callable[..., Any], folder: RunFolder, console: Console
) -> None:
    (line,) = keeper(ALLOWED, reason=WHY)
    assert "uncertified" not in line
    assert not folder.uncertified.exists()
    assert "--allow-uncertified is not needed" in told(console)
    assert "UNCERTIFIED:" not in told(console)


def test_a_certificate_that_expires_meanwhile_ends_the_run_and_keeps_what_is_good(
    keeper: Callable[..., Any],
) -> None:
    with pytest.raises(CheckFailed, match=r"the rest of this run: expired.*so far are kept"):
        keeper(ALLOWED, ALLOWED, EXPIRED, reason=None)


def test_with_a_reason_the_shards_after_it_are_the_uncertified_ones(
    keeper: Callable[..., Any], console: Console
) -> None:
    lines = keeper(ALLOWED, ALLOWED, EXPIRED, EXPIRED, reason=WHY)
    assert ["uncertified" in line for line in lines] == [False, False, True, True]
    assert ["certificate" in line for line in lines] == [True, True, False, False]
    assert told(console).count("UNCERTIFIED: the gate denies this run") == 1


def test_what_was_captured_uncertified_is_captured_again_by_a_run_that_must_be_certified(
    folder: RunFolder, console: Console
) -> None:
    store = Store(folder.shards)
    conversations = [Conversation(f"c{n}", "train", (n, n + 1), 1) for n in range(4)]
    jobs = extract._jobs(conversations, 1)
    names = [job.name for job in jobs]
    said = {"reason": WHY, "denied": ["expired"]}
    store.append({"shard": names[0], "uncertified": said})
    store.append({"shard": names[1], "uncertified": said})
    store.append({"shard": names[2]})  # says nothing: no reason makes up for that
    lacking = extract._without_certificate(Gate(), store, jobs, console, allowed=False)
    assert lacking == set(names[:3])
    assert f"{names[0]}, {names[1]}: captured uncertified; to be captured again" in told(console)
    lacking = extract._without_certificate(Gate(), store, jobs, console, allowed=True)
    assert lacking == {names[2]}


def test_what_was_captured_under_another_policy_is_captured_again(
    folder: RunFolder, console: Console, certify: Callable[..., str], tmp_path: Path
) -> None:
    store, name = Store(folder.shards), "shard-00000.safetensors"
    engine = {"dtype": "bfloat16", "adapter": {"name": "vllm_native", "sha256": "b" * 64}}
    made = {"verifier": {"weights_sha256": "a" * 64}, "boundaries": [2, 12]}
    digest = certify(folder.shards, engine | made)
    line = {"shard": name, "engine": engine, "dtype": "bfloat16", "certificate": digest, **made}
    store.append(line | {"made": datetime(2026, 11, 30, tzinfo=UTC).isoformat()})
    jobs = extract._jobs([Conversation("c0", "train", (0, 1), 1)], 1)
    assert extract._without_certificate(Gate(), store, jobs, console, allowed=False) == set()
    (tmp_path / "policy.toml").write_text(f'signers = ["ed25519:{"a" * 64}"]')
    gate = Gate(policy=tmp_path / "policy.toml")
    for allowed in (False, True):
        assert extract._without_certificate(gate, store, jobs, console, allowed=allowed) == {name}
    assert "it is not signed, and the policy demands a signature; to be" in told(console)


# --- the whole run -----------------------------------------------------------------------------


@pytest.fixture
def stages(
    folder: RunFolder, console: Console, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Any]]:
    """Run all stages over stand-ins that leave what a denied run's leave."""
    done: list[Any] = []

    def verb(
        name: str, _stage: Any, accept: Sequence[int] = (0,), options: Sequence[str] = ()
    ) -> None:
        done.append((name, tuple(accept), tuple(options)))
        if name == "extract":
            uncertified.record(folder, WHY, DENIED, datetime.now(UTC))
            Store(folder.shards).append(shard(0, uncertified.entry_of(WHY, DENIED)))
            Store(folder.shards).append(shard(1, None))

    def whole(*, error: Exception, decision: Decision, reason: str | None) -> list[Any]:
        def no_certificate(*_: Any) -> str:
            raise error

        monkeypatch.setattr(run, "_verb", verb)
        monkeypatch.setattr(reaper, "watch_over_me", lambda: None)
        monkeypatch.setattr(conform, "still_certified", lambda *_: False)
        monkeypatch.setattr(conform, "certify", no_certificate)
        monkeypatch.setattr(gatekeeper, "ask_gate", lambda *_, **__: decision)
        config = RunConfig(output=folder.root, verifier=Verifier(directory=folder.root))
        stage = SimpleNamespace(
            config=config, folder=folder, console=console, adapter="a", spec=None, mutant=None
        )
        run.run(stage, allow_uncertified=reason)  # type: ignore[arg-type]
        return done

    return whole


def shard(number: int, said: Mapping[str, Any] | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "shard": f"shard-{number:05d}.safetensors",
        "requests": 5,
        "rows": 50,
        "bytes": 1000,
        "boundaries": [2, 15, 27, 30],
        "dtype": "bfloat16",
        "verifier": {"name": "verifier", "weights_sha256": "cd" * 32},
    }
    return entry | ({"uncertified": said} if said else {"certificate": "a" * 64})


@pytest.mark.parametrize(
    "error", [CheckFailed("no certificate: LAYERS-001 fail"), UsageError("there is no report")]
)
def test_a_run_without_any_certificate_goes_on_and_tells_it_first_and_last(
    stages: Callable[..., Any], folder: RunFolder, console: Console, error: Exception
) -> None:
    done = stages(error=error, decision=DENIED, reason=WHY)
    flag = ("--allow-uncertified", WHY)
    assert [(name, options) for name, _, options in done] == [
        *(("conform", ()), ("prepare", ()), ("extract", flag), ("train", flag), ("evaluate", ())),
    ]
    assert done[0][1] == (0, 1, 3)
    text = told(console)
    failed = isinstance(error, CheckFailed)
    assert ("the capture path did not pass" if failed else "there is no report") in text
    assert ("the capture path did not pass" in text) == failed
    banners = [at for at in range(len(text)) if text.startswith("UNCERTIFIED: the gate deni", at)]
    assert len(banners) >= 3, "the banner at the gate, the verdict, and the banner at the end"
    assert text.rindex("UNCERTIFIED") > text.index("report: ")
    assert text[text.index("report: ") :].count("each slot holds [the] boundary: fail") == 1
    page = (folder.root / "report.html").read_text()
    assert '<h1 class="bad">UNCERTIFIED: the gate denied this run and was overruled</h1>' in page
    assert "1 of 2 shards were captured although the gate denied" in page
    assert "shard-00000.safetensors" in page
    assert "shard-00001.safetensors" not in page
    assert "LAYERS-001, certificate" in page


@pytest.mark.parametrize("error", [CheckFailed("no"), CouldNotRun("no report")])
def test_without_the_flag_a_denied_run_ends_at_the_gate(
    stages: Callable[..., Any], folder: RunFolder, console: Console, error: Exception
) -> None:
    with pytest.raises((CheckFailed, CouldNotRun)):
        stages(error=error, decision=DENIED, reason=None)
    assert not folder.shards.joinpath("manifest.jsonl").exists()
    assert "UNCERTIFIED" not in told(console)


def test_a_key_that_cannot_be_read_is_told_before_the_suite_runs(
    stages: Callable[..., Any], console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(conform.KEY_VARIABLE, "/nowhere/release.pem")
    for reason in (None, WHY):
        with pytest.raises(UsageError, match=r"no private key at /nowhere/release\.pem"):
            stages(error=CheckFailed("no"), decision=DENIED, reason=reason)
    assert "conform" not in told(console)


# --- what outlives it --------------------------------------------------------------------------

CARD: dict[str, Any] = {
    "verifier": {"name": "verifier", "config_sha256": "c" * 64, "weights_sha256": "a" * 64},
    "boundaries": [2, 15, 27, 30],
    "certificates": ["d" * 64],
    "shards": {"shard-00000.safetensors": "e" * 64, "shard-00001.safetensors": "f" * 64},
    "steps": 589,
}
OVERRULED = {
    "shards": ["shard-00001.safetensors"],
    "reasons": [WHY],
    "denied": ["expired"],
    "trained_because": ["the expiry | was a *holiday*"],
}


def card_of(tmp_path: Path, card: dict[str, Any]) -> str:
    config = RunConfig(output=tmp_path, verifier=Verifier(directory=tmp_path), extract=Extract())
    text = model_card.render(card, config, training=280, validation=20)
    assert text == model_card.render(card, config, training=280, validation=20)
    return text


def test_a_certified_heads_card_says_what_it_is(tmp_path: Path) -> None:
    text = card_of(tmp_path, CARD)
    assert text.startswith("# EAGLE-3 draft head for `verifier`\n")
    assert "UNCERTIFIED" not in text
    for words in (
        "Trained for 589 steps.", "a" * 64, "d" * 64, "boundaries 2, 15, 27. Targets: boundary 30.",
        "eagle_aux_hidden_state_layer_ids", "before the verifier's final norm",
        "| learning rate | `0.001` |", "| For training | `280` |", "| Shards | `2` |",
    ):  # fmt: skip
        assert words in text, words
    assert "untrained" in card_of(tmp_path, CARD | {"steps": 0})


def test_an_uncertified_heads_card_says_that_first_whatever_the_reason_holds(
    tmp_path: Path,
) -> None:
    text = card_of(tmp_path, CARD | {"uncertified": OVERRULED})
    banner, heading = text.split("\n\n")[:2]
    assert banner.startswith("> **UNCERTIFIED.** This head was trained on 1 of 2 shards")
    assert heading == "# EAGLE-3 draft head for `verifier`"
    assert r"this is \[b\]a trial\[/b\]; the expiry \| was a \*holiday\*" in banner
    assert "No certificate stands behind these shards:\n\n- `shard-00001.safetensors`" in text
    assert "d" * 64 in text


def test_the_report_of_a_head_made_of_uncertified_shards_says_so_when_the_shards_are_not(
    folder: RunFolder,
) -> None:
    """Its shards were captured again, certified: the head was not trained again."""
    Store(folder.shards).append(shard(0, None))
    run_folder.write_json(folder.head / "truetap.json", CARD)
    assert report.load(folder.root).uncertified == ""
    run_folder.write_json(folder.head / "truetap.json", CARD | {"uncertified": OVERRULED})
    summary = report.load(folder.root)
    assert "the head was trained on 1 such shards" in summary.uncertified
    assert report.headline(summary).tone == "bad"
    assert report.headline(summary).verdict.startswith("UNCERTIFIED")


@pytest.mark.parametrize("made", [CARD, CARD | {"uncertified": OVERRULED}])
def test_it_survives_the_evaluation(
    folder: RunFolder, console: Console, monkeypatch: pytest.MonkeyPatch, made: dict[str, Any]
) -> None:
    def runs_of(head: str, *_: Any) -> list[dict[str, Any]]:
        length = {"none": 1.0, "untrained": 1.0, "trained": 1.5}[head]
        return [{"head": head, "temperature": 0, "acceptance_length": length, "outputs": {}}]

    monkeypatch.setattr(evaluate, "_runs_of", runs_of)
    run_folder.write_json(folder.head / "truetap.json", made)
    config = RunConfig(output=folder.root, verifier=Verifier(directory=folder.root))
    evaluate.evaluate(config, folder, folder.root, console)
    results = json.loads((folder.evaluate / "results.json").read_text())
    assert results.get("uncertified") == made.get("uncertified")
    assert told(console).count("UNCERTIFIED") == (2 if "uncertified" in made else 0)

"""Keys, certify, verify and gate on the command line, without an engine."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from truetap.harness import certificate, report, signing
from truetap.harness.errors import CheckFailed, IntegrityError
from truetap.harness.report import Outcome
from truetap.harness.suite_options import suite_digest
from truetap.pipeline import cli, conform, gatekeeper, policy, run
from truetap.pipeline import config as configuration
from truetap.pipeline import report as pages
from truetap.pipeline.extract import Cluster
from truetap.pipeline.gate import Decision
from truetap.pipeline.run_folder import RunFolder

BINDING: dict[str, Any] = {
    "engine_version": "0.32.0",
    "verifier": {"weights_sha256": "a" * 64},
    "boundaries": [2, 6, 9, 12],
    "adapter": {"name": "vllm_native", "sha256": "b" * 64},
}


class Said(NamedTuple):
    code: int
    out: str
    err: str


Truetap = Callable[..., Said]


@pytest.fixture
def truetap(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Truetap:
    """The command line as a user gives it, in this process."""
    monkeypatch.delenv(conform.KEY_VARIABLE, raising=False)
    monkeypatch.setattr(conform, "workers_binding", lambda *_: BINDING)

    def call(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["truetap", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert isinstance(ended.value.code, int)
        return Said(ended.value.code, out, err)

    return call


class Run:
    """A configuration, and the report of its capture path."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.config, self.folder = folder / "run.toml", RunFolder(folder / "run")
        self._head = f'output = "{folder}/run"\n[verifier]\ndirectory = "{model}"\n'
        self.set("")
        self.keys = folder / "keys"
        self.key, self.public, self.id = signing.new_key("ours", self.keys)
        self.policy = folder / "policy.toml"
        self.policy.write_text(f'signers = ["keys/{self.public.name}"]\n')

    def set(self, gate: str) -> None:
        self.config.write_text(f"{self._head}[gate]\n{gate}\n")

    def report(self, profile: str = "core", **outcomes: tuple[Outcome, str]) -> None:
        made = report.blank(
            profile,
            evidence="live",
            adapter="vllm_native",
            spec={},
            suite_digest=suite_digest(),
            started=datetime.now(UTC).isoformat(),
            environment={"binding": BINDING, "recorded": {"verifier_name": "paper"}},
        )
        for clause in made.clauses:
            outcome, clause.expected = outcomes.get(clause.id.replace("-", "_"), ("pass", ""))
            clause.add(outcome, "seen")
        self.folder.report.parent.mkdir(parents=True, exist_ok=True)
        made.write(self.folder.report)


@pytest.fixture
def here(tmp_path: Path, paper_verifier: Path) -> Run:
    return Run(tmp_path, paper_verifier)


def test_keys_are_made_once_and_shown(truetap: Truetap, tmp_path: Path) -> None:
    made = truetap("keys", "new", "release", "--into", tmp_path / "keys")
    assert made.code == 0
    told = made.out.split()[-1]
    assert signing.KEY_ID.fullmatch(told)
    for file in ("release.pem", "release.pub"):
        assert str(tmp_path / "keys" / file) in made.out
        assert truetap("keys", "show", tmp_path / "keys" / file) == (0, f"{told}\n", "")
    again = truetap("keys", "new", "release", "--into", tmp_path / "keys")
    assert (again.code, again.out) == (2, "")
    assert "never overwritten" in again.err
    assert truetap("keys", "new", "../release", "--into", tmp_path / "keys").code == 2
    assert truetap("keys", "show", tmp_path / "none").code == 2


@pytest.mark.parametrize("named_by", ["option", "environment", "configuration"])
def test_a_signed_certificate_passes_the_production_gate(
    truetap: Truetap, here: Run, monkeypatch: pytest.MonkeyPatch, named_by: str
) -> None:
    here.report()
    options: list[object] = []
    wrong = here.keys / "none.pem"  # what counts comes first, and is the only one looked at
    if named_by == "option":
        options = ["--key", here.key]
        monkeypatch.setenv(conform.KEY_VARIABLE, str(wrong))
    elif named_by == "environment":
        monkeypatch.setenv(conform.KEY_VARIABLE, str(here.key))
        here.set(f'key = "{wrong}"')
    else:
        here.set(f'key = "{here.key}"')
    made = truetap("certify", here.config, *options, "--valid-days", "3")
    assert made.code == 0, made.err
    assert f"signed by {here.id}" in made.out
    assert "UNSIGNED" not in made.out
    decided = truetap("gate", here.config, "--policy", here.policy, "--json")
    assert decided.code == 0, decided.err
    decision = json.loads(decided.out)
    assert decision["allowed"]
    assert (decision["workers_checked"], decision["signer"]) == (True, here.id)
    held = certificate.load(here.folder.certificate)
    valid = datetime.fromisoformat(held.predicate["notAfter"]) - datetime.fromisoformat(
        held.predicate["timeCreated"]
    )
    assert valid == timedelta(days=3)


def test_an_unsigned_certificate_is_loud_and_for_development_only(
    truetap: Truetap, here: Run
) -> None:
    here.report()
    made = truetap("certify", here.config)
    assert made.code == 0
    assert "UNSIGNED, for development only" in made.out
    allowed = truetap("gate", here.config)
    assert (allowed.code, allowed.out) == (
        0,
        "gate: allowed by these very workers (unsigned: development only)\n",
    )
    denied = truetap("gate", here.config, "--policy", here.policy)
    assert denied.code == 1
    assert denied.out.startswith("gate: denied\n  unsigned: ")
    here.set(f'policy = "{here.policy}"')
    assert truetap("gate", here.config).code == 1
    assert "(unsigned" not in truetap("certify", here.config, "--key", here.key).out
    assert truetap("gate", here.config).out == "gate: allowed by these very workers\n"


def test_other_workers_are_denied_with_every_reason(
    truetap: Truetap, here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.report()
    truetap("certify", here.config)
    others = BINDING | {"boundaries": [2, 12], "engine_version": "0.33.0"}
    monkeypatch.setattr(conform, "workers_binding", lambda *_: others)
    denied = truetap("gate", here.config)
    assert denied.code == 1
    told = [line.split(":")[0].strip() for line in denied.out.splitlines()]
    assert told == ["gate", "engine-release", "remedy", "boundaries", "remedy"]


def test_no_engine_is_started_where_the_files_deny(
    truetap: Truetap, here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conform, "workers_binding", lambda *_: pytest.fail("started"))
    assert truetap("gate", here.config).code == 1


def test_named_certificates_stand_in_for_the_runs_own(truetap: Truetap, here: Run) -> None:
    here.report()
    truetap("certify", here.config, "--key", here.key)
    good = here.folder.certificate.rename(here.keys / "good.json")
    own = truetap("gate", here.config, "--policy", here.policy)
    assert own.code == 1
    named = ("--certificate", here.keys / "none.json", "--certificate", good)
    assert truetap("gate", here.config, "--policy", here.policy, *named).code == 0
    here.set(f'certificates = ["{good}"]\npolicy = "{here.policy}"')
    assert truetap("gate", here.config).code == 0
    # A broken capture is not judged by the certificate of the right one.
    broken = truetap("gate", here.config, "--mutant", "off-by-one")
    assert broken.code == 1
    assert "certificate: there is no certificate at " in broken.out
    truetap("certify", here.config)  # unsigned
    bad = (
        *("--certificate", here.keys / "none.json"),
        *("--certificate", here.folder.certificate),
    )
    denied = truetap("gate", here.config, *bad)
    assert denied.out.startswith(
        f"gate: denied; of 2 certificates {here.folder.certificate} comes nearest\n  unsigned: "
    )


def test_verify_needs_no_configuration_and_no_engine(truetap: Truetap, here: Run) -> None:
    here.report()
    truetap("certify", here.config, "--key", here.key)
    path = here.folder.certificate
    said = truetap("verify", path, "--policy", here.policy)
    assert said.code == 0
    assert said.out.splitlines()[0] == f"{path}: valid"
    assert "vllm_native on paper, profile core, until " in said.out
    assert f"signed by {here.id}" in said.out
    free = truetap("verify", path)
    assert free.code == 0
    assert "no policy was named: anybody's signature was accepted" in free.out
    (told,) = json.loads(truetap("verify", path, "--json").out)
    assert told["valid"]
    assert told["reasons"] == []
    assert (told["signer"], told["profile"], told["result"]) == (here.id, "core", "pass")


def test_verify_says_by_its_exit_code_what_kind_of_no(truetap: Truetap, here: Run) -> None:
    here.report()
    truetap("certify", here.config)
    good = here.folder.certificate
    said = truetap("verify", good, "--policy", here.policy)
    assert said.code == 1
    assert "unsigned: " in said.out
    assert "1 of 1 certificates do not hold: unsigned" in said.err
    assert truetap("verify", here.keys / "none.json").code == 2
    damaged = here.keys / "damaged.json"
    damaged.write_bytes(good.read_bytes()[:-3])
    said = truetap("verify", good, damaged, here.keys / "none.json", "--json")
    assert said.code == 4
    codes = [[reason["code"] for reason in one["reasons"]] for one in json.loads(said.out)]
    assert codes == [[], ["malformed"], ["certificate"]]
    assert truetap("verify").code == 2
    assert truetap("verify", good, "--policy", here.keys / "none.toml").code == 2


def test_a_report_of_a_weaker_profile_is_not_certified(truetap: Truetap, here: Run) -> None:
    here.report("shapes")
    refused = truetap("certify", here.config)
    assert refused.code == 1
    assert "the report is of profile shapes, not core" in refused.err
    here.set('profile = "shapes"')
    assert truetap("certify", here.config).code == 0
    assert truetap("gate", here.config).code == 0
    assert truetap("certify", here.config, "--profile", "full").code == 1
    # A policy asks for more than the configuration does.
    here.set(f'profile = "shapes"\npolicy = "{here.policy}"')
    assert truetap("certify", here.config, "--key", here.key).code == 1
    assert conform.profile_of(configuration.load(here.config)) == "core"


def test_expected_failures_are_certified_on_request_and_allowed_by_name(
    truetap: Truetap, here: Run
) -> None:
    here.report(ROWS_003=("fail", "keeps no log (docs/x.md)"))
    assert truetap("certify", here.config, "--key", here.key).code == 1
    assert truetap("certify", here.config, "--key", here.key, "--with-expectations").code == 0
    denied = truetap("gate", here.config, "--policy", here.policy)
    assert denied.code == 1
    assert "expected-failure: clause ROWS-003 failed, as was expected: keeps no log" in denied.out
    here.policy.write_text(here.policy.read_text() + 'expectations = ["ROWS-003"]\n')
    assert truetap("gate", here.config, "--policy", here.policy).code == 0
    here.set(f'policy = "{here.policy}"')
    assert truetap("certify", here.config, "--key", here.key).code == 0


@pytest.mark.parametrize("key", ["none.pem", "ours.pub"])
def test_a_wrong_key_certifies_nothing(truetap: Truetap, here: Run, key: str) -> None:
    here.report()
    refused = truetap("certify", here.config, "--key", here.keys / key)
    assert refused.code == 2
    assert not here.folder.certificate.exists()


class Stage:
    """A stage of a run whose verbs are only noted."""

    def __init__(self, here: Run, console: Console, *, mutant: str | None = None) -> None:
        self.path, self.mutant, self.console = here.config, mutant, console
        self.config, self.folder = configuration.load(here.config), here.folder
        self.adapter, self.spec = "vllm_native", None


@pytest.fixture
def verbs(here: Run, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []

    def verb(name: str, *_: Any, options: Sequence[str] = (), **__: Any) -> None:
        done.append(" ".join((name, *options)))
        if name == "conform":
            here.report()

    monkeypatch.delenv(conform.KEY_VARIABLE, raising=False)
    monkeypatch.setattr(run, "_verb", verb)
    monkeypatch.setattr(run.reaper, "watch_over_me", lambda: None)
    monkeypatch.setattr(pages, "print_summary", lambda *_: None)
    monkeypatch.setattr(conform, "still_certified", lambda *_: False)
    return done


STAGES = ["prepare", "extract", "train", "evaluate"]


def test_a_run_without_a_key_says_once_that_it_is_for_development(
    here: Run, verbs: list[str], console: Console
) -> None:
    run.run(Stage(here, console))  # type: ignore[arg-type]
    assert verbs == ["conform", *STAGES]
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.count("no key is configured: the certificate is UNSIGNED") == 1
    assert "gate: allowed so far, from the files (unsigned: development only)" in said


@pytest.mark.parametrize(
    ("cluster", "options"),
    [(Cluster("auto"), " --ray auto"), (Cluster("h:1", 4), " --ray h:1 --engines 4")],
)
def test_a_run_on_a_cluster_makes_its_shards_there(
    here: Run, verbs: list[str], console: Console, cluster: Cluster, options: str
) -> None:
    run.run(Stage(here, console), cluster=cluster)  # type: ignore[arg-type]
    assert verbs == ["conform", *(name + options * (name == "extract") for name in STAGES)]


def test_a_run_with_key_and_policy_signs_and_is_held_to_them(
    here: Run, verbs: list[str], console: Console
) -> None:
    here.set(f'policy = "{here.policy}"')
    with pytest.raises(CheckFailed, match="the gate denies this run: unsigned"):
        run.run(Stage(here, console))  # type: ignore[arg-type]
    assert verbs == ["conform"]
    here.set(f'policy = "{here.policy}"\nkey = "{here.key}"')
    run.run(Stage(here, console))  # type: ignore[arg-type]
    assert verbs[1:] == ["conform", *STAGES]
    assert certificate.load(here.folder.certificate).signer == here.id


def test_a_certificate_changed_after_it_was_judged_is_not_kept(here: Run) -> None:
    path = here.keys / "good.json"
    path.write_text("as judged")
    digest = hashlib.sha256(b"as judged").hexdigest()
    decision = Decision((), digest, workers_checked=False, path=path)
    conform.keep(decision, here.folder)
    assert here.folder.certificate.read_text() == "as judged"
    path.write_text("changed")
    with pytest.raises(IntegrityError, match="was changed since the gate judged it"):
        conform.keep(decision, here.folder)
    assert here.folder.certificate.read_text() == "as judged"


def test_a_run_that_names_certificates_makes_none(
    here: Run, verbs: list[str], console: Console, truetap: Truetap
) -> None:
    here.report()
    truetap("certify", here.config, "--key", here.key)
    good = here.folder.certificate.rename(here.keys / "good.json")
    here.set(f'certificates = ["{good}"]\npolicy = "{here.policy}"')
    run.run(Stage(here, console))  # type: ignore[arg-type]
    assert verbs == STAGES
    assert here.folder.certificate.read_bytes() == good.read_bytes()
    decision = gatekeeper.ask_gate(configuration.load(here.config), here.folder, binding=BINDING)
    assert (decision.allowed, decision.path) == (True, good)


@pytest.mark.parametrize(
    "changed", ["", "spec", "no spec", "adapter", "policy", "damage", "expired"]
)
def test_the_suite_is_spared_only_for_a_certificate_of_these_settings(
    truetap: Truetap, here: Run, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from truetap.pipeline import verifiers
    from truetap.pipeline.run_folder import write_json

    loaded = configuration.load(here.config)
    assert loaded.verifier.directory is not None
    spec = verifiers.spec_of(loaded, loaded.verifier.directory)
    here.report()
    truetap("certify", here.config)
    from dataclasses import asdict

    # A deadline is no property of what is captured.
    recorded = (
        asdict(spec) | {"call_deadline_s": 7} | ({"max_num_seqs": 3} if changed == "spec" else {})
    )
    write_json(here.folder.report.parent / "spec.json", [1] if changed == "no spec" else recorded)
    if changed == "policy":
        here.set(f'policy = "{here.policy}"')
    if changed == "damage":
        here.folder.certificate.write_bytes(here.folder.certificate.read_bytes()[:-1])
    if changed == "expired":

        class Later(datetime):
            @classmethod
            def now(cls, _zone: Any = None) -> datetime:  # type: ignore[override]
                return datetime(2199, 1, 1, tzinfo=UTC)

        monkeypatch.setattr(policy, "datetime", Later)
    adapter = "vllm_rpc" if changed == "adapter" else "vllm_native"
    held = conform.still_certified(adapter, spec, configuration.load(here.config), here.folder)
    assert held == (not changed)

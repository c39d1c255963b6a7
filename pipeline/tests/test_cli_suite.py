"""The verbs about the suite."""

from __future__ import annotations

import json

from click.testing import CliRunner

from truetap.harness import contract
from truetap.harness.adapters import mutants as of_adapters
from truetap.harness.channels import mutants as of_channels
from truetap.harness.stores import mutants as of_stores
from truetap.pipeline import cli_suite


def test_every_clause_is_told_with_its_reason_and_references() -> None:
    said = CliRunner().invoke(cli_suite.clauses).output
    for clause in contract.CLAUSES.values():
        assert f"{clause.id}  {clause.level}  {clause.title}" in said
        assert clause.reason in said
        assert all(reference in said for reference in clause.references)


def test_every_mutant_stands_under_its_clause() -> None:
    told = CliRunner().invoke(cli_suite.clauses, ["--mutants", "--json"]).output
    by_clause = {row["id"]: row["mutants"] for row in json.loads(told)}
    for table in (of_adapters.FAULTS, of_channels.FAULTS, of_stores.FAULTS):
        for name, fault in table.items():
            if name != "none":
                assert by_clause[fault.caught_by][name] == fault.says
    assert not any("none" in names for names in by_clause.values())


def test_every_must_clause_has_a_mutant() -> None:
    told = CliRunner().invoke(cli_suite.clauses, ["--mutants", "--json"]).output
    bare = [row["id"] for row in json.loads(told) if not row["mutants"] and row["level"] == "MUST"]
    assert bare == []


def test_a_profile_narrows_the_list() -> None:
    told = CliRunner().invoke(cli_suite.clauses, ["--profile", "reply", "--json"]).output
    assert tuple(row["id"] for row in json.loads(told)) == contract.PROFILES["reply"]
    assert CliRunner().invoke(cli_suite.clauses, ["--profile", "none"]).exit_code == 2


def test_installed_adapters_channels_and_stores_are_listed() -> None:
    found = json.loads(CliRunner().invoke(cli_suite.adapters, ["--json"]).output)
    assert {"transformers", "vllm_native"} <= set(found["adapters"])
    assert {"collect", "speculators_legacy"} <= set(found["channels"])
    assert {"plain", "shards"} <= set(found["stores"])

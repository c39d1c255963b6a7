"""Makes the conformance report of a run out of pytest's test reports, and tells it at the end.

It lives in the process that the user started: under xdist it hears of tests, and hands out GPUs
and the deadline, but runs none.
"""

from __future__ import annotations

import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest

from truetap.harness import report, suite_options
from truetap.harness.report import ClauseResult, Outcome
from truetap.harness.run_deadline import COULD_NOT_RUN

CLAUSE, OUTCOME, SAW = "truetap_clause", "truetap_outcome", "truetap_saw"
REPRODUCE, EXPECTED = "truetap_reproduce", "truetap_expected"
"""Properties of a test; they travel with its report, and into JUnit files."""
FACTS = "truetap_facts"
"""Attribute of a test's report: where it ran, on what evidence, and how many tests its clause
has."""
SLOT, UNTIL = "truetap_slot", "truetap_until"
"""What an xdist worker is told: its place among the workers, and when the run ends."""


class Reporter:
    """Collects clause outcomes and writes the conformance report."""

    def __init__(self, config: pytest.Config) -> None:
        suite_options.check(config)
        self._config = config
        self._path = config.getoption("report", None)
        self._seconds = config.getoption("deadline", suite_options.DEADLINE_S)
        self._started = time.monotonic()
        self._until = self._started + self._seconds
        self._report = report.blank(
            suite_options.profile(config),
            evidence="live",
            adapter=suite_options.subject(config),
            spec=suite_options.spec_record(config),
            suite_digest=suite_options.suite_digest(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self._clauses = {clause.id: clause for clause in self._report.clauses}
        for clause in self._report.clauses:
            clause.reproduce = suite_options.reproduce(config, clause.id)
        self._chosen = suite_options.chosen(config)
        self._tests: dict[str, int] = {}
        self._finished: defaultdict[str, set[str]] = defaultdict(set)
        self._slots: dict[str, int] = {}
        self._expected = suite_options.expectations(config)
        today = datetime.now(UTC).date()
        self._overdue = self._expected.overdue(today) if self._expected else []
        self._late = False
        self._told: list[str] = []
        self._surprises: list[str] = []

    def pytest_report_header(self) -> list[str]:
        """Say what is put through the suite, and what is expected of it."""
        lines = list(suite_options.header(self._config))
        if self._expected and self._expected.source:
            count = len(self._expected.entries)
            lines.append(f"truetap: expectations: {self._expected.source}, {count} in all")
        return lines + [f"truetap: WARNING: {sentence}" for sentence in self._overdue]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell an xdist worker its place, which a replacement takes over, and the deadline."""
        taken = set(self._slots.values())
        slot = next(index for index in range(len(taken) + 1) if index not in taken)
        self._slots[node.gateway.id] = slot
        node.workerinput |= {SLOT: slot, UNTIL: self._until}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Free the place of a worker that is gone."""
        self._slots.pop(node.gateway.id, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one phase of a clause's test."""
        properties = dict(report.user_properties)
        clause = self._clauses.get(str(properties.get(CLAUSE)))
        outcome = properties.get(OUTCOME)
        if clause is None:
            return
        facts = getattr(report, FACTS, {})
        self._tests[clause.id] = facts.get("tests", 0)
        if environment := facts.get("environment"):
            self._report.environment = environment
        # One test on a recording, and no part of the run speaks for an engine.
        if (evidence := facts.get("evidence", "live")) != "live":
            self._report.evidence = evidence
        refused = report.when == "setup" and outcome == "refused"
        if outcome is not None and (report.when == "call" or report.failed or refused):
            self._finished[clause.id].add(report.nodeid)
            clause.add(cast("Outcome", outcome), str(properties.get(SAW, "")))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the report; fail the run for an expectation that did not come true."""
        self.finish(late=time.monotonic() >= self._until)
        if self._late:
            session.exitstatus = COULD_NOT_RUN
        elif self._surprises and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        elif self._nothing_ran() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED  # all skipped: pytest says 0

    def _nothing_ran(self) -> bool:
        asked = suite_options.subject(self._config) and not self._config.getoption("collectonly")
        return bool(asked) and not self._finished

    def finish(self, *, late: bool) -> None:
        """Settle what did not run, compare with what was expected, write the report."""
        for clause in self._report.clauses:
            self._settle(clause, late=late and bool(suite_options.subject(self._config)))
        if self._late:
            self._told.append(f"the deadline of {self._seconds:g} s passed; the engine was killed")
        if self._expected:
            from truetap.harness import expectations

            found = expectations.compare(self._report, self._expected)
            self._surprises = found.surprises
            self._told += [f"failed as expected: {phrase}" for phrase in found.foretold]
        if self._path:
            self._report.seconds = round(time.monotonic() - self._started, 1)
            self._report.write(Path(self._path))

    def _settle(self, clause: ClauseResult, *, late: bool) -> None:
        """Take back what a clause may not claim: it holds only if all of its tests ran."""
        ran, tests = len(self._finished.get(clause.id, ())), self._tests.get(clause.id, 0)
        if clause.outcome == "fail" or ran >= tests > 0:
            return
        if late and clause.id in self._chosen:
            self._late = True
            clause.outcome = "error"
            clause.saw = f"not run before the deadline of {self._seconds:g} s passed"
        elif clause.outcome in ("pass", "refused"):
            clause.outcome, clause.saw = "not_run", f"{ran} of {tests} tests ran: {clause.saw}"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Tell the verdict, and everything that was not as expected."""
        if not suite_options.subject(self._config):
            return
        terminalreporter.section("truetap")
        for sentence in self._told:
            terminalreporter.write_line(sentence)
        for sentence in self._overdue:
            terminalreporter.write_line(f"WARNING: {sentence}", yellow=True, bold=True)
        for sentence in self._surprises:
            terminalreporter.write_line(f"NOT AS EXPECTED: {sentence}", red=True, bold=True)
        if self._path:
            terminalreporter.write_line(f"report: {self._path}")
        terminalreporter.write_line(
            f"{self._report.adapter}, profile {self._report.profile}: {self._report.verdict}"
        )

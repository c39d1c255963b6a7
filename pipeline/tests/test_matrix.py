"""The matrix of reports: what it says, that foreign text stays text, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from truetap.harness import contract, report
from truetap.harness.errors import IntegrityError, UsageError
from truetap.harness.report import ClauseResult, Outcome, Report
from truetap.pipeline import matrix

FIXTURES = Path(__file__).parents[2] / "fixtures" / "reports"
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>'\"&{{ 1234 * 1234 }}"


def made(
    profile: str, adapter: str, release: str, verifier: str, **outcomes: Outcome | tuple[str, ...]
) -> Report:
    """Return a report in which all passed but the clauses named, by id with underscores.

    A tuple is an outcome, what was seen, and what was expected.
    """
    option = "channel" if profile == "reply" else "adapter"
    command = f"pytest --pyargs truetap.conformance --{option} {adapter} --clause"
    one = report.blank(
        profile,
        evidence="live",
        adapter=adapter,
        spec={"dtype": "bfloat16", "boundaries": [2, 6, 9, 12]},
        suite_digest="5" * 64,
        started="2026-11-29T16:00:00+00:00",
        seconds=34.5,
    )
    binding = {"engine": "vllm", "engine_version": release, "dtype": "bfloat16"}
    binding |= {"tensor_parallel_size": "1", "device": "AVX512"}
    one.environment = {"binding": binding, "recorded": {"verifier_name": verifier}}
    for clause in one.clauses:
        told = outcomes.get(clause.id.replace("-", "_"), "pass")
        outcome, seen, expected = (told, "", "") if isinstance(told, str) else (*told, "", "")[:3]
        if outcome != "not_run":
            clause.add(outcome, seen or "1384 rows for 15 requests")  # type: ignore[arg-type]
        clause.expected = expected
        clause.reproduce = f"{command} {clause.id}"
    return one


def synthetic() -> list[Report]:
    """Return four runs with every outcome that there is."""
    wrong_slot = (
        "the slot for boundary 15 holds boundary 2 (median distance 4.4e-03, to boundary 15 "
        "7.0e-01); the slot for boundary 27 holds boundary 2 (median distance 4.4e-03, to "
        "boundary 27 7.0e-01)"
    )
    known = "the CPU kernel turns wrong rows (https://github.com/vllm-project/vllm/pull/12777)"
    right = made("core", "vllm_native", "0.32.0", "SmolLM2-135M-Instruct")
    plain = made(
        *("core", "vllm_native", "0.32.0", "tiny-deepseek-v3-plain"),
        ROWS_003=("fail", "boundary 2 of request 'prompt-3' differs by up to 431 times", known),
        LAYERS_001=("fail", "the slot for boundary 2 holds nothing known", known),
        LAYERS_002=("fail", "some rows of the last state are wrong", known),
    )
    broken = made(
        *("core", "vllm_rpc", "0.11.0", "tiny-llama"),
        LAYERS_001=("fail", wrong_slot),
        ROWS_001=("refused", "a prompt of 511 tokens was refused"),
        REPLY_001="not_run",
        LAYERS_004=("error", "vLLM did not answer step within 120 s; its processes were killed"),
    )
    channel = made(
        *("reply", "speculators_legacy", "0.12.0", "tiny-llama"),
        REPLY_003=(
            "fail",
            "rank 0 sent [4 x tensor], the caller got tensor: item 0 of 4 alone",
            "reply[0] takes one boundary of four (https://github.com/o/r/issues/225)",
        ),
    )
    nothing = report.blank(
        *("core",),
        evidence="live",
        adapter="subprocess:/opt/engine",
        spec={},
        suite_digest="5" * 64,
        started="2026-11-29T16:00:00+00:00",
    )
    return [right, plain, broken, channel, nothing]


class Page(HTMLParser):
    """What a browser would make of a page: elements, and the text in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def said(page: Page, clause_id: str, run: int) -> str:
    """Return what the cell of a clause in a run says, colour aside."""
    (label,) = [
        str(cell["aria-label"])
        for cell in page.of("button")
        if (cell.get("data-c"), cell.get("data-r")) == (clause_id, str(run))
    ]
    return label.rpartition(": ")[2]


def test_every_outcome_is_told_in_words() -> None:
    page = Page(matrix.render(synthetic()))
    assert said(page, "LAYERS-001", 1) == "pass"
    assert said(page, "LAYERS-001", 2) == "expected fail"
    assert said(page, "LAYERS-001", 3) == "fail"
    assert said(page, "ROWS-001", 3) == "refused"
    assert said(page, "REPLY-001", 3) == "not run"
    assert said(page, "LAYERS-004", 3) == "error"
    assert said(page, "REPLY-003", 4) == "expected fail"
    assert {said(page, c, 5) for c in contract.PROFILES["core"]} == {"not run"}
    words = {text.strip() for text in page.texts}
    assert {"pass", "refused", "expected fail", "fail", "error", "not run"} <= words
    absent = [mark for mark in page.of("span") if mark.get("class") == "absent"]
    core, reply = (len(contract.PROFILES[profile]) for profile in ("core", "reply"))
    assert len(absent) == 4 * reply + core
    assert {mark["aria-label"] for mark in absent} == {"not in the profile"}
    shown = {(cell["data-c"], cell["data-r"]) for cell in page.of("button") if "data-c" in cell}
    assert shown == {
        (clause.id, str(number))
        for number, one in enumerate(synthetic(), 1)
        for clause in one.clauses
    }


def test_verdicts_head_the_columns_and_nothing_ran_is_inconclusive() -> None:
    columns = matrix.lay_out(synthetic()).columns
    assert [column.verdict for column in columns] == [
        *("conformant", "non-conformant", "non-conformant", "non-conformant", "inconclusive")
    ]
    text = matrix.render(synthetic())
    shown = re.findall(r'class="verdict tag [\w-]+">([\w-]+)<', text)
    assert shown == [column.verdict for column in columns]


def test_an_expected_failure_conforms_no_more_than_any_other() -> None:
    one = made("core", "a", "1", "v", ROWS_003=("fail", "seen", "known (docs/x.md)"))
    assert matrix.lay_out([one]).columns[0].verdict == "non-conformant"


def test_a_file_that_claims_a_verdict_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    synthetic()[2].write(path)
    path.write_text(path.read_text().replace('"non-conformant"', '"conformant"'))
    (found,) = matrix.gather([path])
    assert matrix.lay_out([found]).columns[0].verdict == "non-conformant"


def test_the_panel_has_what_was_seen_the_command_the_facts_and_the_expectation() -> None:
    page = Page(matrix.render(synthetic()))
    text = "".join(page.texts)
    for part in (
        "the slot for boundary 15 holds boundary 2",
        "pytest --pyargs truetap.conformance --adapter vllm_rpc --clause LAYERS-001",
        "pytest --pyargs truetap.conformance --channel speculators_legacy --clause REPLY-003",
        "the CPU kernel turns wrong rows",
        "binding.device",
        contract.CLAUSES["REPLY-003"].reason,
    ):
        assert part in text, part
    links = {link["href"] for link in page.of("a")}
    assert links == {
        "https://github.com/vllm-project/vllm/pull/12777",
        "https://github.com/o/r/issues/225",
    }


def test_there_is_no_percentage() -> None:
    text = "".join(Page(matrix.render(synthetic())).texts)
    style = text[text.index(":root") : text.index("@media print")]
    assert "%" not in text.replace(style, "")


def hostile() -> Report:
    """Return a report that carries markup, script and addresses wherever text can stand."""
    one = made("core", HOSTILE, HOSTILE, HOSTILE, ROWS_001=("fail", HOSTILE, HOSTILE))
    one.profile = one.started = one.evidence = HOSTILE
    one.spec = {HOSTILE: HOSTILE}
    one.environment["binding"][HOSTILE] = [HOSTILE]
    link = 'known (javascript:alert(3)) https://a.example/"onmouseover=alert(4)'
    one.clauses.append(ClauseResult(HOSTILE, HOSTILE, HOSTILE, "fail", 1, HOSTILE, link, HOSTILE))
    return one


def test_foreign_text_stays_text() -> None:
    page = Page(matrix.render([hostile()]))
    assert len(page.of("script")) == 1
    assert page.of("img") == []
    assert not [name for _, attributes in page.elements for name in attributes if name[:2] == "on"]
    assert [link["href"] for link in page.of("a")] == ["https://a.example/"]
    assert HOSTILE in "".join(page.texts)
    assert "1522756" not in "".join(page.texts)


def test_text_that_is_let_through_would_be_seen() -> None:
    page = Page(matrix.render([hostile()]).replace("&lt;", "<").replace("&gt;", ">"))
    assert len(page.of("script")) > 1
    assert page.of("img")


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = matrix.render(synthetic())
    page = Page(text)
    assert not page.of("link")
    assert all("src" not in attributes for _, attributes in page.elements)
    assert "url(" not in text
    assert "@import" not in text


def test_clauses_that_this_truetap_does_not_know_stand_under_their_family() -> None:
    one = made("core", "a", "1", "v")
    one.clauses.append(ClauseResult("ROWS-999", "of the future", "MUST", "pass", 1, "x"))
    one.clauses.append(ClauseResult("OTHER-001", "of others", "MUST", "pass", 1, "x"))
    families = {name: rows for name, _, rows in matrix.lay_out([one]).families}
    assert [row.id for row in families["ROWS"]][-1] == "ROWS-999"
    assert [row.title for row in families["OTHER"]] == ["of others"]


def test_a_folder_stands_for_the_reports_in_it(tmp_path: Path) -> None:
    for number, one in enumerate(synthetic()):
        one.write(tmp_path / f"{number}.json")
    (tmp_path / "spec.json").write_text('{"dtype": "float32"}')
    (tmp_path / "list.json").write_text("[1]")
    found = matrix.gather([tmp_path, *FIXTURES.glob("*.json")])
    assert [one.adapter for one in found[:5]] == [one.adapter for one in synthetic()]
    assert len(found) == 5 + len(list(FIXTURES.glob("*.json")))
    assert matrix.write_page([tmp_path], tmp_path / "page.html") == 5
    assert (tmp_path / "page.html").read_text() == matrix.render(found[:5])


def test_a_folder_without_reports_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text("{}")
    with pytest.raises(UsageError, match="no conformance report in"):
        matrix.gather([tmp_path])


@pytest.mark.parametrize("text", ["", '{"schema": "truetap/conformance-report/1", "adap'])
def test_a_torn_report_in_a_folder_is_not_left_out(tmp_path: Path, text: str) -> None:
    synthetic()[0].write(tmp_path / "a.json")
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(IntegrityError, match=r"b\.json cannot be read"):
        matrix.gather([tmp_path])


def verb(*arguments: str | Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "truetap.pipeline.cli", "matrix", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    return done.returncode, done.stdout + done.stderr


def with_type(name: str, value: Any) -> str:
    document = json.loads((next(FIXTURES.glob("*.json"))).read_text())
    document["clauses"][0][name] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        (None, 2, "there is no conformance report at"),
        ("{", 4, "is not a readable conformance report"),
        ('{"schema": "other"}', 4, "is not a conformance report of a kind"),
        (with_type("saw", {"a": 1}), 4, "saw of REPLY-001 is not text"),
        (with_type("title", None), 4, "title of REPLY-001 is not text"),
    ],
)
def test_what_is_no_report_is_one_sentence_and_an_exit_code(
    tmp_path: Path, text: str | None, code: int, says: str
) -> None:
    if text is not None:
        (tmp_path / "r.json").write_text(text)
    returned, output = verb(tmp_path / "r.json", "--out", tmp_path / "page.html")
    assert returned == code, output
    assert says in output
    assert "Traceback" not in output
    assert not (tmp_path / "page.html").exists()


def test_the_verb_writes_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, output = verb(FIXTURES, "--out", page)
    assert (code, output) == (0, f"{page}: {len(list(FIXTURES.glob('*.json')))} reports\n")
    assert "SmolLM2-135M-Instruct" in page.read_text()
    assert verb(FIXTURES, "--out", tmp_path / "gone" / "page.html")[0] == 2
    assert verb(FIXTURES)[0] == 2

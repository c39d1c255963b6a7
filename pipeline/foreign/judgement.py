"""From what an audit saw to its verdict, and the report of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from truetap.harness import boundaries as spellings
from truetap.pipeline.foreign.values import Slot, boundary_of, normed

if TYPE_CHECKING:
    from rich.console import Console

    from truetap.pipeline.foreign.producers.sample import Problem, Producer
    from truetap.pipeline.foreign.state import AuditState

FORMAT = "truetap/audit/1"
Severity = Literal["error", "note"]
NOTES = {"boundaries", "coarse", "dtype", "noise", "folder", "mask"}
"""Codes of what is said and makes nothing wrong."""
MOSTLY = 0.5
"""Share of the compared files that must agree before a slot is said to hold something."""
TITLES = {
    "code": "would run code",
    "unreadable": "unreadable",
    "truncated": "truncated",
    "link": "leads out of the folder",
    "digest": "not what was written",
    "keys": "not this producer's",
    "width": "other width than the verifier's",
    "shape": "other shape than the rest",
    "rows": "rows and tokens differ in number",
    "row": "not the dataset's row",
    "vocabulary": "token ids of another verifier",
    "nan": "values that are no numbers",
    "zeros": "zeros",
    "equal_slots": "two slots are one",
    "equal_rows": "equal rows of different tokens",
    "repeated": "another file's states",
    "mask_empty": "loss mask empty",
    "mask_whole": "loss mask covers everything",
    "mask_other": "loss mask covers others' text",
    "mask_missing": "loss mask misses the assistant's text",
    "mask_length": "loss mask is none",
    "messages": "tokens and conversation differ",
    "wrong_boundary": "another boundary",
    "post_norm": "after the final norm",
    "pre_norm": "before the final norm",
    "shifted": "rows shifted",
    "residual": "residual missing",
    "other_request": "another request's states",
    "some_rows": "rows that are not their own",
    "unclear": "no state of this verifier",
}


@dataclass(frozen=True)
class Finding:
    """One kind of fault, and the files that have it; none if it is the whole set's."""

    code: str
    text: str
    files: list[tuple[str, str]] = field(default_factory=list)

    @property
    def severity(self) -> Severity:
        """Whether it makes the data wrong."""
        return "note" if self.code in NOTES else "error"

    def as_dict(self) -> dict[str, Any]:
        """Return builtins."""
        files = [{"file": name, "why": why} for name, why in self.files]
        return {"code": self.code, "severity": self.severity, "text": self.text, "files": files}


@dataclass(frozen=True)
class SetSlot:
    """What one slot holds over all compared files."""

    holds: str | None
    """None if they do not agree, or nothing is clear."""
    files: int
    distance: float
    margin: float


def set_slots(readings: Mapping[str, Sequence[Slot]]) -> list[SetSlot]:
    """Return what the slots hold, by the vote of the compared files."""
    found = []
    for index in range(max((len(slots) for slots in readings.values()), default=0)):
        column = [slots[index] for slots in readings.values() if index < len(slots)]
        votes = Counter(slot.holds for slot in column if slot.clear)
        holds, count = votes.most_common(1)[0] if votes else (None, 0)
        if count <= MOSTLY * len(column):
            holds = None
        agree = [s for s in column if s.holds == holds and s.clear] or column
        distances, margins = sorted(s.distance for s in agree), sorted(s.margin for s in agree)
        middle = len(agree) // 2
        found.append(SetSlot(holds, count if holds else 0, distances[middle], margins[middle]))
    return found


def says(slots: Sequence[SetSlot]) -> str:
    """Return one sentence about what the set holds: ``slots: boundary 2, 14, 25, 27``."""
    if not slots:
        return "no file could be compared by value"
    parts: list[str] = []
    for slot in slots:
        held = slot.holds or "nothing that can be told"
        follows = bool(parts) and held.startswith("boundary ")
        parts.append(held.removeprefix("boundary ") if follows else held)
    return f"slots: {', '.join(parts)}"


def judge_set(
    slots: Sequence[SetSlot],
    producer: Producer,
    believed: Sequence[int] | None,
) -> list[Finding]:
    """Return what is wrong with the set as a whole."""
    n = producer.verifier.num_blocks
    findings = []
    for index, slot in enumerate(slots):
        last = index == len(slots) - 1
        finding = _slot_fault(index, slot, n, last=last)
        if finding is None and last:
            finding = _last_fault(slot, producer)
        findings += [finding] if finding else []
    held = [_number(slot.holds, n) for slot in slots]
    for index, k in enumerate(held):
        if k is not None and k in held[:index]:
            first = held.index(k)
            if {slots[first].holds, slots[index].holds} == {f"boundary {k}"}:
                text = f"slots {first} and {index} both hold boundary {k}"
                findings.append(Finding("equal_slots", text))
    return findings + _against(held, believed, producer)


def _number(holds: str | None, num_blocks: int) -> int | None:
    if holds is None:
        return None
    return num_blocks if holds == normed(num_blocks) else boundary_of(holds)


def _slot_fault(index: int, slot: SetSlot, n: int, *, last: bool) -> Finding | None:
    if slot.holds is None:
        text = f"slot {index} holds nothing that can be told, in most files"
        return Finding("unclear", text)
    if boundary_of(slot.holds) is not None or (last and slot.holds == normed(n)):
        return None
    return Finding(fault_code(slot.holds), f"slot {index} holds {slot.holds}")


def fault_code(holds: str) -> str:
    """Return the code of what a slot holds that is no boundary."""
    if "without the residual" in holds:
        return "residual"
    if "after the final norm" in holds:
        return "post_norm"
    return "shifted" if "token" in holds else "wrong_boundary"


def _last_fault(slot: SetSlot, producer: Producer) -> Finding | None:
    n = producer.verifier.num_blocks
    k = _number(slot.holds, n)
    if k != n:
        text = f"the last slot holds {slot.holds}; training takes it for boundary {n}, the last"
        return Finding("wrong_boundary", text)
    is_normed = slot.holds == normed(n)
    if is_normed == (producer.last_norm == "after"):
        return None
    where = "after" if is_normed else "before"
    text = f"the last slot holds boundary {n} {where} the final norm; {producer.why_norm}"
    return Finding("post_norm" if is_normed else "pre_norm", text)


def _against(
    held: Sequence[int | None], believed: Sequence[int] | None, producer: Producer
) -> list[Finding]:
    """Compare with what the user or the data itself says; without either, with the usual set."""
    declared = producer.declared()
    findings = []
    named = (
        ("--boundaries", tuple(believed) if believed else None),
        ("the manifest", declared),
    )
    for source, wanted in named:
        if wanted is None or not held or None in held:
            continue
        if tuple(held) != wanted:
            text = (
                f"{source} says {', '.join(map(str, wanted))}; the slots hold "
                f"{', '.join(map(str, held))}"
            )
            findings.append(Finding("wrong_boundary", text))
    n = producer.verifier.num_blocks
    if not believed and declared is None and n >= 8 and held and None not in held:
        usual = spellings.eagle3(n)
        if tuple(held) != usual:
            text = (
                f"these are not EAGLE-3's usual boundaries {', '.join(map(str, usual))}: serve the "
                "draft with those that were found, and give --boundaries to have them compared"
            )
            findings.append(Finding("boundaries", text))
    return findings


def judge_files(
    slots: Sequence[SetSlot], readings: Mapping[str, Sequence[Slot]]
) -> dict[str, list[tuple[str, str]]]:
    """Return by code the compared files that differ from the set, each with what it holds."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, own in readings.items():
        for index, slot in enumerate(own):
            expected = slots[index].holds
            if (fault := _file_fault(index, slot, expected)) is not None:
                found.setdefault(fault[0], []).append((name, fault[1]))
                break  # the same fault is in its other slots; the first tells it
    return found


def _file_fault(index: int, slot: Slot, expected: str | None) -> tuple[str, str] | None:
    if not slot.clear:
        if slot.instead:
            own = slot.instead.partition(" of ")[2].startswith("its own tokens")
            code = "shifted" if own else "other_request"
            return code, f"slot {index} holds {slot.instead}"
        text = (
            f"slot {index} is like no state of this verifier for its tokens: nearest is "
            f"{slot.holds} at {slot.distance:.2f}"
        )
        return "unclear", text
    if expected is not None and slot.holds != expected:
        code = "wrong_boundary" if boundary_of(slot.holds) is not None else fault_code(slot.holds)
        return code, f"slot {index} holds {slot.holds}, in most files {expected}"
    if slot.bad_rows:
        text = f"{slot.bad_rows} of {slot.rows} rows of slot {index} are not its own"
        if slot.instead and "its own tokens" not in slot.instead:
            return "other_request", f"{text}: {slot.instead}"
        return "some_rows", text + (f": {slot.instead}" if slot.instead else "")
    return None


def precision_notes(
    readings: Mapping[str, Sequence[Slot]], dtype: str, computed: str | None
) -> list[Finding]:
    """Return what the numbers say of the precision that the states went through."""
    every = [slot for slots in readings.values() for slot in slots]
    findings = []
    if computed and dtype != computed:
        text = f"states are stored as {dtype}, the verifier's weights are {computed}"
        findings.append(Finding("dtype", text))
    if sum(slot.coarse for slot in every) > MOSTLY * len(every) > 0:
        findings.append(
            Finding("coarse", f"values were in a coarser format than {dtype} before they were kept")
        )
    noisy = [slot.noise for slot in every if slot.noise is not None and slot.noise > 2]
    if len(noisy) > MOSTLY * len(every) > 0:
        eight_bits = dtype.startswith("float8")
        text = (
            f"states are up to {max(noisy):.0f} times as noisy as "
            f"{'bfloat16' if eight_bits else dtype} explains: "
        ) + ("8 bits do" if eight_bits else "another arithmetic, or a quantised verifier or cache")
        findings.append(Finding("noise", text))
    return findings


def grouped(problems: Iterable[tuple[str, Problem]]) -> list[Finding]:
    """Return one finding for each kind of problem, with its files."""
    by_code: dict[str, list[tuple[str, str]]] = {}
    for name, problem in problems:
        by_code.setdefault(problem.code, []).append((name, problem.text))
    return [Finding(code, TITLES[code], files) for code, files in by_code.items()]


def repeats(state: AuditState, compared: set[str]) -> Finding | None:
    """Return the files whose first rows another one has too, unless their values were compared.

    Of two such files one may be right, and its values tell which.
    """
    files = [
        (name, f"its first {rows} rows are those of {other}, whose tokens differ")
        for name, other, rows in state.repeated()
        if name not in compared
    ]
    return Finding("repeated", TITLES["repeated"], files) if files else None


def verdict(findings: Sequence[Finding], compared: int) -> tuple[str, int]:
    """Return the verdict and the exit code."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if any(finding.code == "digest" for finding in errors):
        return "corrupt", 4
    if errors:
        return "wrong", 1
    return ("right", 0) if compared else ("not judged", 3)


SHOWN = 10
"""Files of one finding that the text lists; the JSON report has all."""


def printable(text: str) -> str:
    """Spell out what would move a terminal's cursor: names of files are somebody else's."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Tell a report on a terminal."""

    def say(text: str) -> None:
        console.print(printable(text), highlight=False, markup=False)

    files, sample, mask = report["files"], report["sample"], report["loss_mask"]
    say(f"{report['path']}: {report['producer']}, {files['found']:,} files, {files['bad']:,} bad")
    say(f"  verifier   {report['verifier']['name']}, {report['verifier']['num_blocks']} blocks")
    say(f"  compared   {sample['compared']:,} of {report['totals']['samples']:,} by value")
    say(f"  holds      {report['says']}")
    for slot in report["slots"]:
        say(
            f"    slot {slot['slot']}   {slot['holds'] or 'nothing that can be told'}: "
            f"{slot['distance']:.1e} away, the next is {slot['margin']:.0f}x further "
            f"({slot['files']} of {sample['compared']} files)"
        )
    say(f"  loss mask  {mask['says']}")
    for finding in report["findings"]:
        mark = "fault" if finding["severity"] == "error" else "note "
        count = f" ({len(finding['files']):,} files)" if finding["files"] else ""
        say(f"  {mark}      {finding['text']}{count}")
        for one in finding["files"][:SHOWN]:
            say(f"    {one['file']}: {one['why']}")
        if len(finding["files"]) > SHOWN:
            say(f"    ... and {len(finding['files']) - SHOWN:,} more: see --report")
    say(f"verdict: {report['verdict']}")

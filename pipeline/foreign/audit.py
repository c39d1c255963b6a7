"""An audit of somebody's files: every file cheaply, a sample by value, one report."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truetap.harness import boundaries as spellings
from truetap.harness import verifier as verifiers
from truetap.harness.errors import CouldNotRun
from truetap.harness.progress import bar
from truetap.harness.verifier import VerifierFacts
from truetap.pipeline.foreign import judgement, values
from truetap.pipeline.foreign.examine import examine
from truetap.pipeline.foreign.judgement import Finding
from truetap.pipeline.foreign.masks import MaskJudge
from truetap.pipeline.foreign.producers import open_producer
from truetap.pipeline.foreign.producers.sample import BadFile, Found, Problem, Producer, Sample
from truetap.pipeline.foreign.state import AuditState, Drawn, Examined
from truetap.pipeline.foreign.values import Slot

if TYPE_CHECKING:
    from rich.console import Console

    from truetap.harness.reference import Reference, ReferenceStates

REFERENCE_BYTES = 1 << 30
"""What the references of samples compared together may take."""
_EXACT = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Request:
    """What the user asks for."""

    path: Path
    producer: str
    model: Path
    state: Path
    sample: int | None = 16
    """Samples compared by value; None for all."""
    seed: int = 0
    boundaries: tuple[int, ...] | None = None
    """What the user believes that the slots are."""
    resume: bool = False


def audit_folder(request: Request, console: Console) -> dict[str, Any]:
    """Audit a folder; return the report, with ``verdict`` and ``exit_code``."""
    _require_torch()
    facts = verifiers.describe(request.model)
    if request.boundaries is not None:
        spellings.check(request.boundaries, facts.num_blocks)
    producer = open_producer(request.producer, request.path, facts)
    digests = verifiers.digests(request.model)
    about = {
        "format": judgement.FORMAT,
        "path": str(request.path.resolve()),
        "producer": request.producer,
        "verifier": digests,
    }
    state = AuditState(request.state, about, resume=request.resume)
    try:
        masks = MaskJudge(request.model)
        found = read_all(producer, state, masks, console)
        names = _compare(producer, state, request, console)
        return _report(request, producer, state, masks, digests, found, names)
    except sqlite3.Error as error:
        raise CouldNotRun(
            f"the state of the audit cannot be kept in {request.state}: {error}",
            remedy="free disk space, or wait for the other audit that uses it; --resume goes on",
        ) from error
    finally:
        state.close()


def _require_torch() -> None:
    """Refuse to begin where torch cannot be imported: every file would seem to be unreadable."""
    try:
        import torch  # noqa: F401
    except Exception as error:  # a broken installation fails in any way
        raise CouldNotRun(
            f"torch cannot be imported: {error}", remedy="pip install 'truetap[audit]'"
        ) from error


def read_all(producer: Producer, state: AuditState, masks: MaskJudge, console: Console) -> int:
    """Read every file once; return how many there are."""
    total = sum(1 for _ in producer.files())
    started, read, seen = time.monotonic(), 0, 0
    with bar(console, "files", total) as progress:
        for found in producer.files():
            seen += 1
            if state.has(found):
                progress.advance(note="read before")
                continue
            _read_one(producer, found, state, masks)
            read += 1
            progress.advance(note=f"{read / max(time.monotonic() - started, 1e-6):,.0f} files/s")
    state.commit()
    state.require_present(seen)  # not ``total``: somebody may have added files meanwhile
    return seen


def _read_one(producer: Producer, found: Found, state: AuditState, masks: MaskJudge) -> None:
    if found.problem is not None:
        state.record(found, [], found.problem)
        return
    examined: list[Examined] = []
    problem = None
    usual = producer.whole_mask_is_usual
    try:
        for sample in producer.read(found):
            one = examine(sample, producer.verifier, masks, whole_mask_is_usual=usual)
            examined.append(one)
    except BadFile as bad:
        problem = bad.problem
    except OSError as error:
        problem = Problem("unreadable", f"cannot be read: {error.strerror or error}")
    state.record(found, examined, problem)


def _compare(
    producer: Producer, state: AuditState, request: Request, console: Console
) -> list[str]:
    """Compare a random sample by value; return the names of the samples drawn."""
    most = producer.verifier.max_positions
    drawn = state.draw(request.seed, request.sample, most)
    room = 2 * max(len(drawn), request.sample or 0)
    names = {one.name for one in drawn}
    # Whoever shares first rows with another is asked too, so that the right one is not accused.
    for name, _, _ in state.repeated():
        if len(drawn) >= room:
            break
        if name not in names and (one := state.drawn(name, most)):
            drawn.append(one)
    todo = [one for one in drawn if not state.is_judged(one.name)]
    if todo:
        _compare_some(producer, state, todo, request.model, console)
    return [one.name for one in drawn]


def _compare_some(
    producer: Producer,
    state: AuditState,
    todo: Sequence[Drawn],
    model: Path,
    console: Console,
) -> None:
    from truetap.harness.reference import open_reference

    facts, most = producer.verifier, values.MOST_ROWS
    (_, _, dtype, _), *_ = state.shapes()
    files = {one.name: one.file for one in todo}
    lengths = [(one.name, min(one.tokens, most)) for one in todo]
    per_row = 4 * (facts.num_blocks + 2) * facts.hidden_size
    console.print("loading the verifier for the reference", highlight=False)
    known = dtype if dtype in _EXACT else "bfloat16"
    reference = open_reference(model, known, console=console)
    done = 0
    for group in values.chunks(lengths, per_row, REFERENCE_BYTES):
        # All prompts of a group are known before the reference is asked.
        held = {s.name: s for s in _samples(producer, {n: files[n] for n in group})}
        console.print(f"the verifier's own states of {len(held)} samples", highlight=False)
        references = _references(reference, held)
        with bar(console, "compared by value", len(todo), done=done) as progress:
            for name, sample in held.items():
                states = values.as_array(sample.states, most)
                slots = values.read_slots(states, sample.dtype, name, references)
                state.keep_reading(name, {"slots": [slot.as_dict() for slot in slots]})
                progress.advance()
        done += len(held)
        state.commit()


def _references(reference: Reference, held: Mapping[str, Sample]) -> dict[str, ReferenceStates]:
    prompts = [sample.token_ids[: values.MOST_ROWS].tolist() for sample in held.values()]
    return dict(zip(held, reference.states_of(prompts), strict=True))


def _samples(producer: Producer, wanted: Mapping[str, str]) -> Iterator[Sample]:
    """Yield samples by name, each file opened once."""
    files = set(wanted.values())
    for found in producer.files():
        if found.name not in files:
            continue
        try:
            yield from (sample for sample in producer.read(found) if sample.name in wanted)
        except BadFile as bad:
            raise CouldNotRun(
                f"{found.name} has changed since it was read a moment ago: {bad}",
                remedy="audit the folder when nobody writes to it",
            ) from None


def _report(
    request: Request,
    producer: Producer,
    state: AuditState,
    masks: MaskJudge,
    digests: Mapping[str, str],
    found: int,
    names: Sequence[str],
) -> dict[str, Any]:
    readings = {
        name: [Slot.from_dict(kept) for kept in held["slots"]]
        for name, held in state.readings(names).items()
    }
    shapes = state.shapes()
    usual = shapes[0] if shapes else None
    if usual is not None:  # a file of another number of slots is named for that
        readings = {n: slots for n, slots in readings.items() if len(slots) == usual[0]}
    slots = judgement.set_slots(readings)
    by_file = judgement.judge_files(slots, readings)
    findings = judgement.judge_set(slots, producer, request.boundaries)
    findings += [Finding(code, judgement.TITLES[code], f) for code, f in by_file.items()]
    findings += judgement.grouped(state.problems())
    if usual is not None:
        findings += judgement.grouped(state.of_other_shape(*usual[:3]))
        findings += judgement.precision_notes(readings, usual[2], _weights_dtype(producer))
    if shared := judgement.repeats(state, set(readings)):
        findings.append(shared)
    findings += [Finding("folder", note) for note in producer.notes()]
    findings.sort(key=lambda finding: finding.severity != "error")
    result, code = judgement.verdict(findings, len(readings))
    bad = {n for f in findings if f.severity == "error" for n, _ in f.files}
    facts: VerifierFacts = producer.verifier
    return {
        "format": judgement.FORMAT,
        "path": str(request.path),
        "producer": request.producer,
        "verifier": {
            "name": facts.name,
            "num_blocks": facts.num_blocks,
            "hidden_size": facts.hidden_size,
            **digests,
        },
        "files": {"found": found, "bad": len(bad)},
        "totals": state.totals(),
        "sample": {"seed": request.seed, "compared": len(readings), "names": sorted(readings)},
        "slots": [
            {
                "slot": index,
                "holds": slot.holds,
                "files": slot.files,
                "distance": slot.distance,
                "margin": slot.margin,
            }
            for index, slot in enumerate(slots)
        ],
        "says": judgement.says(slots),
        "loss_mask": _mask_summary(state.totals(), masks, producer),
        "findings": [finding.as_dict() for finding in findings],
        "verdict": result,
        "exit_code": code,
    }


def _weights_dtype(producer: Producer) -> str | None:
    config = producer.verifier.config
    text = config.get("text_config", config)
    found = text.get("dtype") or text.get("torch_dtype") or config.get("dtype")
    return found if isinstance(found, str) else None


def _mask_summary(
    totals: Mapping[str, int], masks: MaskJudge, producer: Producer
) -> dict[str, Any]:
    judged, masked = totals["masks_judged"], totals["masked_tokens"]
    share = masked / totals["tokens"] if totals["tokens"] else 0.0
    if not totals["with_mask"]:
        text = f"not judged: {producer.name} keeps none in these files"
    elif masks.why_not:
        text = f"{share:.1%} of all tokens; whose text that is was not judged: {masks.why_not}"
    elif not judged:
        text = f"{share:.1%} of all tokens; not judged: no assistant's turn was found in the tokens"
    else:
        text = (
            f"{share:.1%} of all tokens; compared with the assistant's turns in {judged:,} of "
            f"{totals['samples']:,} samples"
        )
    return {"says": text, "judged": judged, "share": share}

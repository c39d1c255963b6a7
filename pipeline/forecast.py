"""What the rest of a run's extraction will take: tokens, bytes, disk, and time if it was measured.

Prompts are known before anything is answered; answers are bounded by ``data.max_answer_tokens``
until they are there. The time is only told from a measurement in this very run folder, under the
same settings of capture: nothing else would be more than a guess.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from truetap.harness import verifier
from truetap.harness.errors import CheckFailed, IntegrityError
from truetap.harness.model import EngineSpec
from truetap.pipeline import plan, prepare, run_folder
from truetap.pipeline.config import RunConfig
from truetap.pipeline.run_folder import RunFolder
from truetap.pipeline.store import Store


@dataclass(frozen=True)
class Lengths:
    """Tokens of conversations, by id."""

    answered: Mapping[str, int]
    unanswered: Mapping[str, int]
    """Prompts with the longest answers that they may get."""


@dataclass(frozen=True)
class Forecast:
    """What is still to be captured, and what it takes."""

    conversations: int
    answered: int
    """Conversations whose length is known exactly; of the others the most is taken."""
    captured: int
    """Conversations that the manifest has already, by its word."""
    tokens: int
    states: int
    hidden_size: int
    dtype: str
    bytes: int
    staging_bytes: int
    """The most that the worker holds of them in memory."""
    folder: str
    free_bytes: int
    tokens_per_second: float | None
    measured_tokens: int
    """Over how many tokens that was measured."""

    @property
    def fits(self) -> bool:
        """Return whether the disk has room for it."""
        return self.bytes <= self.free_bytes

    @property
    def seconds(self) -> float | None:
        """Return the time that capturing will take; None if it was never measured."""
        return self.tokens / self.tokens_per_second if self.tokens_per_second else None

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {**asdict(self), "fits": self.fits, "seconds": self.seconds}

    def require_space(self) -> None:
        """Raise ``CheckFailed`` if it does not fit."""
        if not self.fits:
            raise CheckFailed(
                f"the shards need {self.bytes / 1e9:,.1f} GB and {self.folder} has "
                f"{self.free_bytes / 1e9:,.1f} GB free",
                remedy="free disk space, choose another output folder, or lower data.train, "
                "data.max_answer_tokens or the number of capture.boundaries",
            )

    def told(self) -> Iterator[str]:
        """Yield the forecast in words, a line each."""
        whole = self.answered == self.conversations
        yield f"conversations  {self.conversations:,}, {self.answered:,} of them answered"
        yield f"captured       {self.captured:,} of them, by the manifest"
        most = "" if whole else "at most "
        yield f"to be captured {most}" + plan.told(
            self.tokens, self.states, self.hidden_size, self.dtype
        )
        yield (
            f"memory         {self.staging_bytes / 1e9:,.2f} GB at most in the worker that writes, "
            "however many they are"
        )
        verdict = "enough" if self.fits else "NOT ENOUGH"
        yield f"disk           {self.free_bytes / 1e9:,.1f} GB free in {self.folder}: {verdict}"
        if self.seconds is None or not self.tokens_per_second:
            yield "time           not known: no extraction with these settings was measured here"
        else:
            yield (
                f"time           {most}{duration(self.seconds)}: {self.tokens_per_second:,.0f} "
                f"tokens/s, measured here over {self.measured_tokens:,} tokens"
            )


def foresee(config: RunConfig, folder: RunFolder, spec: EngineSpec) -> Forecast:
    """Return what is left of a run's extraction. Changes nothing, starts no engine."""
    done = {name for entry in Store(folder.shards).entries().values() for name in entry["ids"]}
    width = verifier.describe(Path(spec.model)).hidden_size
    return forecast_of(
        lengths_of(config, folder, Path(spec.model)),
        done,
        states=len(spec.boundaries),
        width=width,
        dtype=spec.dtype,
        staging_bytes=config.extract.staging_mib << 20,
        disk=folder.shards,
        speed=_speed(folder, config),
    )


def forecast_of(
    lengths: Lengths,
    done: set[str],
    *,
    states: int,
    width: int,
    dtype: str,
    staging_bytes: int,
    disk: Path,
    speed: tuple[int, float] | None = None,
) -> Forecast:
    """Do the arithmetic. ``speed`` is tokens and seconds of an earlier extraction."""
    every = {**lengths.answered, **lengths.unanswered}
    left = [tokens for name, tokens in every.items() if name not in done]
    tokens, seconds = speed or (0, 0.0)
    return Forecast(
        conversations=len(every),
        answered=len(lengths.answered),
        captured=len(every) - len(left),
        tokens=sum(left),
        states=states,
        hidden_size=width,
        dtype=dtype,
        bytes=plan.capture_bytes(sum(left), states, width, dtype),
        staging_bytes=staging_bytes,
        folder=str(disk),
        free_bytes=_free(disk),
        tokens_per_second=tokens / seconds if tokens and seconds else None,
        measured_tokens=tokens,
    )


def lengths_of(config: RunConfig, folder: RunFolder, model: Path) -> Lengths:
    """Return how long the conversations of a run are, or may become."""
    answered = dict(_answered(folder.conversations))
    if len(answered) >= config.data.train + config.data.validation:
        return Lengths(answered, {})
    longest = prepare.longest_lengths(config, folder, model)
    return Lengths(answered, {name: n for name, n in longest.items() if name not in answered})


def _answered(path: Path) -> Iterator[tuple[str, int]]:
    """Yield id and tokens of each conversation, without holding them all."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):  # being written
                return
            try:
                row = run_folder.json_object(line)
                yield row["id"], len(row["token_ids"])
            except (ValueError, TypeError, KeyError) as error:
                raise IntegrityError(
                    f"line {number} of {path} is not valid: {error!r}",
                    remedy="delete the line, or the file, and run truetap prepare again",
                ) from error


def _free(path: Path) -> int:
    """Return the bytes that are free where a folder is, or will be made."""
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    return shutil.disk_usage(there).free


def record_speed(folder: RunFolder, config: RunConfig, tokens: int, seconds: float) -> None:
    """Keep how fast an extraction was, and with which settings."""
    if not tokens:
        return
    held = {"tokens": tokens, "seconds": seconds, "capture": _settings(config)}
    with suppress(OSError):  # a full disk has ended the extraction with an error of its own
        run_folder.write_json(folder.speed, held)


def _speed(folder: RunFolder, config: RunConfig) -> tuple[int, float] | None:
    """Return tokens and seconds of the last extraction, unless it had other settings."""
    if not folder.speed.exists():
        return None
    held = run_folder.read_json(folder.speed)
    try:
        if held["capture"] != _settings(config):
            return None
        return int(held["tokens"]), float(held["seconds"])
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(
            f"{folder.speed} is not as it was written: {error!r}", remedy="delete it"
        ) from error


def _settings(config: RunConfig) -> Any:
    return json.loads(config.capture.model_dump_json(exclude={"call_deadline_s"}))


def duration(seconds: float) -> str:
    """Return a length of time in the unit that suits it."""
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.0f} seconds"

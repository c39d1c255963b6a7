"""Any list of boundaries, and any settings of an engine's steps: whole and right, or refused.

Lists are drawn in any order, with duplicates, out of range. A verifier's folder without weights
tells what is refused before anything is loaded from what is not.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from truetap.conformance import strategies
from truetap.harness import boundaries, compare, random_verifier
from truetap.harness.adapter import Adapter
from truetap.harness.adapters import vllm_session
from truetap.harness.adapters.transformers import TransformersAdapter, TransformersSession
from truetap.harness.adapters.vllm_native import VllmNativeAdapter, VllmNativeSession
from truetap.harness.adapters.vllm_rpc import VllmRpcAdapter, VllmRpcSession
from truetap.harness.engine import Prompt
from truetap.harness.errors import UsageError
from truetap.harness.model import Capture, CaptureBatch, CaptureRequest, EngineSpec, Float32

pytestmark = pytest.mark.torch

BLOCKS = 12
PROMPT = CaptureRequest("prompt", tuple(range(3, 12)))
FIND = settings(max_examples=2000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Llama of 12 blocks."""
    return random_verifier.tiny_llama(tmp_path_factory.mktemp("model") / "llama", num_blocks=BLOCKS)


@pytest.fixture(scope="module")
def hollow(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the same configuration and no weights."""
    folder = tmp_path_factory.mktemp("hollow")
    shutil.copy(model / "config.json", folder)
    return folder


@pytest.fixture(scope="module")
def every(model: Path) -> Float32:
    """Return ``[tokens, 13, hidden]``: all boundaries, each proven by value."""
    from truetap.harness.reference import Reference

    spec = EngineSpec(model=str(model), boundaries=tuple(range(BLOCKS + 1)))
    batch = TransformersSession(spec).capture([PROMPT])
    states = batch.captures[0].states
    reference = Reference(model, spec.dtype).states(PROMPT.token_ids)
    for k in spec.boundaries:
        reading = compare.read_slot(k, [states[:, k]], [reference])
        assert reading.right, str(reading)
    assert compare.duplicate_slots(states) == []
    return states


def refused(call: Callable[[], Any]) -> bool:
    """Say whether a call is refused; any other end of it, an error too, is no refusal."""
    try:
        call()
    except UsageError:
        return True
    except Exception:
        return False
    return False


def follow(asked: tuple[int, ...], adapter: Any, model: Path, every: Float32, tmp: Path) -> None:
    """Capture at ``asked``: AssertionError unless slot i holds the i-th of them, bit for bit."""
    session = adapter.open(EngineSpec(model=str(model), boundaries=asked), scratch=tmp)
    (capture,) = session.capture([PROMPT]).captures
    told = f"{list(asked)}: the slots are said to be of boundaries {list(capture.boundaries)}"
    assert capture.boundaries == asked, told
    assert session.boundaries == asked, told
    held = [holder(capture.states[:, slot], every) for slot in range(capture.states.shape[1])]
    assert held == list(asked), f"{list(asked)}: the slots hold boundaries {held}"


def holder(states: Float32, every: Float32) -> int | None:
    """Return which boundary a slot holds; None if none of them."""
    found = [k for k in range(BLOCKS + 1) if np.array_equal(states, every[:, k])]
    return found[0] if found else None


class Unloaded(Exception):
    """An engine was started: what was asked for is not refused before."""


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_arguments: Any, **_named: Any) -> None:
        raise Unloaded

    monkeypatch.setattr(vllm_session, "VllmEngine", start)


@pytest.mark.usefixtures("no_engine")
def test_every_adapter_refuses_the_same_lists_before_it_loads(hollow: Path, tmp_path: Path) -> None:
    adapters: list[Adapter] = [TransformersAdapter(), VllmNativeAdapter(), VllmRpcAdapter()]
    seen = {True: 0, False: 0}

    @given(strategies.boundary_lists(BLOCKS))
    def holds(asked: tuple[int, ...]) -> None:
        if not asked:
            return  # an engine without any capture
        spec = EngineSpec(model=str(hollow), boundaries=asked)
        due = refused(lambda: boundaries.check(asked, BLOCKS))
        assert due == (sorted(set(asked) & set(range(BLOCKS + 1))) != list(asked))
        for adapter in adapters:
            got = refused(lambda adapter=adapter: adapter.open(spec, scratch=tmp_path))  # type: ignore[misc]
            assert got == due, f"{adapter.name} {'refuses' if got else 'takes'} {list(asked)}"
        seen[due] += 1

    holds()
    assert min(seen.values()) > strategies.examples(20), seen


@pytest.mark.parametrize(
    "setting",
    [
        {"tensor_parallel_size": 2},
        {"executor": "ray"},
        {"enforce_eager": False},
        {"kv_cache_blocks": 9},
    ],
)
def test_transformers_refuses_what_it_has_not(
    hollow: Path, tmp_path: Path, setting: dict[str, Any]
) -> None:
    spec = EngineSpec(model=str(hollow), boundaries=(1, BLOCKS), **setting)
    with pytest.raises(UsageError, match="the transformers adapter has no"):
        TransformersAdapter().open(spec, scratch=tmp_path)


def test_any_list_comes_back_slot_for_slot(
    model: Path, hollow: Path, every: Float32, tmp_path: Path
) -> None:
    seen = {"refused": 0, "delivered": 0}

    @given(strategies.boundary_lists(BLOCKS))
    def holds(asked: tuple[int, ...]) -> None:
        spec = EngineSpec(model=str(hollow), boundaries=asked)
        if refused(lambda: TransformersAdapter().open(spec, scratch=tmp_path)):
            seen["refused"] += 1
        else:
            follow(asked, TransformersAdapter(), model, every, tmp_path)
            seen["delivered"] += 1

    holds()
    assert min(seen.values()) > strategies.examples(20), seen


class Engine:
    """A capture path that takes any list, and does with it what engines do; no model is loaded."""

    def __init__(self, every: Float32, slots: Callable[[list[int]], list[int]]) -> None:
        self._every, self._slots = every, slots

    def open(self, spec: EngineSpec, *, scratch: Path) -> Any:  # noqa: ARG002
        held = self._slots([min(max(k, 0), BLOCKS) for k in spec.boundaries])

        def capture(requests: Any) -> CaptureBatch:
            states = self._every[:, held]
            return CaptureBatch(
                tuple(
                    Capture(r.key, r.token_ids, spec.boundaries, states, spec.dtype)
                    for r in requests
                ),
                "nonce",
            )

        return SimpleNamespace(boundaries=spec.boundaries, capture=capture)


@pytest.mark.parametrize(
    ("slots", "smallest"),
    [
        (sorted, "[1, 0]: the slots hold boundaries [0, 1]"),
        (lambda asked: list(dict.fromkeys(asked)), "[0, 0]: the slots hold boundaries [0]"),
        (lambda asked: sorted(asked, key=str), "[2, 10]: the slots hold boundaries [10, 2]"),
        (lambda asked: [min(k + 1, BLOCKS) for k in asked], "[0]: the slots hold boundaries [1]"),
        (lambda asked: asked[:1] * len(asked), "[0, 1]: the slots hold boundaries [0, 0]"),
        (lambda asked: asked, "[-1]: the slots hold boundaries [0]"),
    ],
    ids=["sorted", "no duplicates", "sorted as text", "one off", "one for all", "clamped"],
)
def test_the_same_property_finds_a_list_that_was_changed(
    every: Float32, tmp_path: Path, slots: Any, smallest: str
) -> None:
    @FIND
    @given(strategies.boundary_lists(BLOCKS))
    def holds(asked: tuple[int, ...]) -> None:
        follow(asked, Engine(every, slots), tmp_path, every, tmp_path)

    with pytest.raises(AssertionError) as found:
        holds()
    assert str(found.value).splitlines()[0] == smallest


# ---- prompts and the budget of a step


class Sent(Exception):
    """Requests reached the engine: those it was given."""

    def __init__(self, prompts: list[Prompt]) -> None:
        super().__init__(f"{len(prompts)} prompts")
        self.prompts = prompts


class Scheduler:
    """Stands in for an engine: knows what its scheduler can run, and runs nothing."""

    def __init__(self, spec: EngineSpec, *, chunks: bool) -> None:
        self.spec, self.prefills_in_chunks = spec, chunks
        self.llm = SimpleNamespace(llm_engine=None)

    def preemptions(self) -> int:
        return 0

    def collect(self, _llm: Any, method: str, _args: Any, _folder: Path) -> dict[int, Any]:
        if method != "truetap_shards":
            return {0: 1}
        nothing = {"written": {}, "missing": {}, "others": 0, "failed": None, "status": {}}
        return {0: nothing}

    def generate(self, prompts: Iterator[Prompt], *, in_flight: int) -> Iterator[Any]:  # noqa: ARG002
        raise Sent(list(prompts))

    def troubles(self, tokens: int, generated: int, *, drafts: int) -> str:
        """Return why a request would be refused, wait for ever or lose rows; "" if it would not."""
        if tokens < 1:
            return "there is nothing to run"
        if tokens + generated > self.spec.max_model_len:
            return "vLLM refuses it: it does not fit in max_model_len"
        if not self.prefills_in_chunks and tokens > self.spec.max_num_batched_tokens:
            return "it is never scheduled: no step has so large a budget"
        # In its last step the sequence has all but one of its generated tokens, and the drafts
        # that are checked; vLLM skips the drafter if one more draft does not fit.
        checked = drafts if generated > 1 else 0
        if drafts and tokens + generated - 1 + checked + drafts > self.spec.max_model_len:
            return "its step has no drafter, so nobody's rows are captured"
        return ""


@st.composite
def settings_of_steps(draw: st.DrawFn) -> tuple[EngineSpec, bool, list[CaptureRequest]]:
    """Draw an engine's settings, whether it cuts prompts, and requests around its limits."""
    longest = draw(st.sampled_from([3, 4, 8, 17, 64, 129]))
    spec = EngineSpec(
        model="",
        boundaries=(2, 4),
        max_model_len=longest,
        max_num_batched_tokens=draw(strategies.chunk_budgets(longest)),
        kv_cache_blocks=draw(st.none() | st.integers(2, 9)),
    )
    edges = st.sampled_from([longest, spec.max_num_batched_tokens])
    near = st.builds(lambda edge, by: max(0, edge + by), edges, st.integers(-3, 2))
    lengths = st.lists(near | st.integers(0, longest + 1), min_size=1, max_size=3)
    requests = [
        CaptureRequest(str(i), tuple(range(n)), max_tokens=draw(st.sampled_from([1, 1, 2, 5])))
        for i, n in enumerate(draw(lengths))
    ]
    return spec, draw(st.booleans()), requests


PATHS: dict[str, tuple[Any, int, int]] = {
    # the adapter's session, drafts in flight, and how many tokens it may do without
    "vllm_native": (VllmNativeSession, 1, 2),
    "vllm_rpc": (VllmRpcSession, 0, 1),
}


def try_steps(path: str, drawn: Any, hollow: Path, tmp: Path, kind: Any = None) -> str:
    """Send the drawn requests; return "sent" or "refused".

    AssertionError if one that the engine cannot run is sent, or if all that were refused are such
    as a capture path must take.
    """
    session_of, drafts, spare = PATHS[path]
    spec, chunks, requests = drawn
    engine = Scheduler(spec, chunks=chunks)
    session = _opened(kind or session_of, replace(spec, model=str(hollow)), engine, tmp)
    note(f"{spec.max_model_len=} {spec.max_num_batched_tokens=} {chunks=}")
    try:
        session.capture(requests)
    except UsageError:
        takes = [
            not engine.troubles(len(r.token_ids), r.max_tokens, drafts=drafts)
            and len(r.token_ids) + r.max_tokens - 1 <= spec.max_model_len - spare
            for r in requests
        ]
        assert not all(takes), "refused, though the engine can run all of it"
        return "refused"
    except Sent as sent:
        prompts = sent.prompts
    assert len(prompts) == len(requests)
    for prompt in prompts:
        tokens, generated = len(prompt.token_ids), prompt.sampling["max_tokens"]
        trouble = engine.troubles(tokens, generated, drafts=drafts)
        assert not trouble, (
            f"{tokens} tokens and {generated} to generate were sent, with max_model_len "
            f"{spec.max_model_len}, steps of {spec.max_num_batched_tokens} and "
            f"{'' if chunks else 'no '}chunks: {trouble}"
        )
    return "sent"


def _opened(session_of: Any, spec: EngineSpec, engine: Any, tmp: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_session, "VllmEngine", lambda *_a, **_k: engine)
        return session_of(spec, tmp)


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_sent_that_no_step_could_run(path: str, hollow: Path, tmp_path: Path) -> None:
    seen = {"sent": 0, "refused": 0}

    @given(settings_of_steps())
    def holds(drawn: Any) -> None:
        seen[try_steps(path, drawn, hollow, tmp_path)] += 1

    holds()
    assert min(seen.values()) > strategies.examples(20), seen


class Unaware(VllmNativeSession):
    """Takes it that every engine cuts prompts into chunks."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._longest = self._spec.max_model_len - 2


class Greedy(VllmNativeSession):
    """Leaves no room for a draft."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._longest += 2


class Forgetful(VllmNativeSession):
    """Looks at prompts alone, not at what is to be generated."""

    def _refuse_long(self, requests: Any) -> None:
        super()._refuse_long([replace(request, max_tokens=1) for request in requests])


class Fearful(VllmNativeSession):
    """Refuses the longest prompts that there may be."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._longest -= 1


class OneByOne(VllmNativeSession):
    """Looks at the first request only."""

    def _refuse_long(self, requests: Any) -> None:
        super()._refuse_long(requests[:1])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Unaware, "it is never scheduled"),
        (Greedy, "were sent"),
        (Forgetful, "were sent"),
        (Fearful, "refused, though"),
        (OneByOne, "were sent"),
    ],
)
def test_the_same_property_finds_a_wrong_limit(
    kind: Any, said: str, hollow: Path, tmp_path: Path
) -> None:
    @FIND
    @given(settings_of_steps())
    def holds(drawn: Any) -> None:
        try_steps("vllm_native", drawn, hollow, tmp_path, kind)

    with pytest.raises(AssertionError, match=said):
        holds()

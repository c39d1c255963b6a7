"""The reference that holds one block: it says what the whole one says, and tells blocks apart."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from truetap.harness import compare, random_verifier, streamed_reference
from truetap.harness.errors import CouldNotRun, IntegrityError, UsageError
from truetap.harness.final_norm import final_norm
from truetap.harness.model import CaptureRequest, EngineSpec, Float32
from truetap.harness.observation import Observation, Scene
from truetap.harness.reference import Reference, ReferenceStates, open_reference
from truetap.harness.streamed_reference import FAMILIES, StreamedReference

pytestmark = pytest.mark.torch

PROMPTS = [np.random.default_rng(7).integers(0, 512, n).tolist() for n in (41, 1, 17)]
SAME = 1e-5
"""How far two references may be apart in any row, relative L2. Measured over all families: equal
bit for bit, prompts of one token excepted (1.1e-6), whose products round by where weights lie."""
SAME_NOISE = 0.1
"""How far their noise floors, in units of the median one. Measured: 0, for one token 2e-5."""
SAME_LOGPROBS = 1e-5
"""How far their log-probabilities, in nats. Measured: 1.9e-6, from adding up the head's slices."""
BUILDERS = {k: b for k, b in random_verifier.FAMILIES.items() if "narrow" not in k} | {
    "kimi": random_verifier.tiny_kimi
}


@pytest.fixture(scope="module", params=list(BUILDERS))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BUILDERS[family](tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_verifier.tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def text_model(family: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as transformers has them: Kimi's text model is a DeepSeek-V3."""
    if family != "kimi":
        return model
    return random_verifier.tiny_deepseek_v3(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def whole(text_model: Path) -> Reference:
    return Reference(text_model, "bfloat16")


@pytest.fixture(scope="module")
def streamed(model: Path) -> StreamedReference:
    return StreamedReference(model, "bfloat16")


def differences(ours: list[ReferenceStates], theirs: list[ReferenceStates]) -> list[str]:
    """Return what two references say differently."""
    found = []
    for mine, other in zip(ours, theirs, strict=True):
        away = compare.row_distances(mine.boundaries, other.boundaries).max(-1)
        found += [f"boundary {k}: {away[k]:.1e}" for k in np.flatnonzero(away > SAME)]
        if compare.row_distances(mine.normed_last, other.normed_last).max() > SAME:
            found.append("the normed last state")
        if np.abs(mine.noise - other.noise).max() > SAME_NOISE * np.median(other.noise):
            found.append("noise")
        if np.abs(mine.logprobs - other.logprobs).max(initial=0) > SAME_LOGPROBS:
            found.append("log-probabilities")
        if np.abs(mine.logprob_noise - other.logprob_noise).max(initial=0) > SAME_LOGPROBS:
            found.append("noise of log-probabilities")
    return found


def test_it_says_what_the_whole_reference_says(
    whole: Reference, streamed: StreamedReference
) -> None:
    assert differences(streamed.states_of(PROMPTS), whole.states_of(PROMPTS)) == []
    (one,) = whole.states_of(PROMPTS[:1])
    state = one.boundaries[5]
    for k in (0, 5, 11):
        for rough in (False, True):
            ours = streamed.next_boundary(k, state, rough=rough)
            theirs = whole.next_boundary(k, state, rough=rough)
            assert compare.row_distances(ours, theirs).max() < SAME
    assert compare.row_distances(streamed.next_boundary(5, state), one.boundaries[6]).max() < SAME
    np.testing.assert_array_equal(
        streamed.embedding_rows(PROMPTS[0]), whole.embedding_rows(PROMPTS[0])
    )
    last = streamed.logprobs_of_last(one.boundaries[-1], PROMPTS[0])
    np.testing.assert_allclose(last, one.logprobs, atol=SAME_LOGPROBS)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_have_a_precision_above_them_too(llama: Path, dtype: str) -> None:
    ours = StreamedReference(llama, dtype).states_of(PROMPTS)
    theirs = Reference(llama, dtype).states_of(PROMPTS)
    for mine, other in zip(ours, theirs, strict=True):
        assert compare.row_distances(mine.boundaries, other.boundaries).max() < SAME
        assert np.median(mine.noise[1:]) == pytest.approx(np.median(other.noise[1:]), rel=0.5)


class _Neighbour(StreamedReference):
    """Takes each block's weights from the one before."""

    def _weight(self, name: str, *rest: Any) -> Any:
        parts = name.split(".")
        if parts[1] == "layers" and int(parts[2]) > 1:
            name = ".".join([*parts[:2], str(int(parts[2]) - 1), *parts[3:]])
        return super()._weight(name, *rest)


class _WrongStream(StreamedReference):
    """Gives the block the stream of the other precision."""

    def _through(self, k: int, _dtype: Any, state: Any) -> Any:
        other = self._dtypes[0]
        return super()._through(k, other, state.to(other)).to(state.dtype)


class _NoResidual(StreamedReference):
    """Leaves out what a block is added to."""

    def _through(self, k: int, dtype: Any, state: Any) -> Any:
        return super()._through(k, dtype, state) - (state if k == 6 else 0)


class _PostNorm(StreamedReference):
    """Takes the last boundary after the norm."""

    def _through(self, k: int, dtype: Any, state: Any) -> Any:
        reached = super()._through(k, dtype, state)
        return self._normed([reached], dtype)[0][None] if k == 11 else reached


class _Rounded(StreamedReference):
    """Makes the precise block of weights that were rounded before."""

    def _weight(self, name: str, shape: Any, dtype: Any, tensors: Any) -> Any:
        return super()._weight(name, shape, self._dtypes[1], tensors).to(dtype)


class _OtherTokens(StreamedReference):
    """Takes log-probabilities of other tokens."""

    def _next_logprobs(self, normed: Any, prompts: Any) -> Any:
        shifted = [[token + 1 for token in ids] for ids in prompts]
        return super()._next_logprobs(normed, shifted)


@pytest.mark.parametrize(
    "fault", [_Neighbour, _WrongStream, _NoResidual, _PostNorm, _Rounded, _OtherTokens]
)
def test_a_fault_in_it_is_seen(llama: Path, fault: type[StreamedReference]) -> None:
    right = Reference(llama, "bfloat16").states_of(PROMPTS[:1])
    assert differences(fault(llama, "bfloat16").states_of(PROMPTS[:1]), right) != []


# What is in memory, and how often it is read.


class _Counting(StreamedReference):
    """Remembers which blocks and norms were read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.read: list[str] = []

    def _loaded(self, name: str, *rest: Any) -> Any:
        self.read.append(name)
        return super()._loaded(name, *rest)


class _Weighing(_Counting):
    """Remembers the most bytes of tensors that were alive while some blocks were at work."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.most = 0
        self.before = _tensor_bytes()

    def _through(self, k: int, dtype: Any, state: Any) -> Any:
        reached = super()._through(k, dtype, state)
        if k in {0, 5, 11} and len(state[0]) == len(PROMPTS[2]):  # finding all tensors takes time
            self.most = max(self.most, _tensor_bytes() - self.before)
        return reached


class _Hoarding(_Weighing):
    """Keeps every block."""

    def _release(self) -> None:
        vars(self).setdefault("hoard", []).append(self._held)
        super()._release()


def _tensor_bytes() -> int:
    """Return the bytes of all tensors that are alive, each storage once."""
    import torch

    alive = [
        x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.device.type != "meta"
    ]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive}
    return sum(storages.values())


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve blocks four times as large as the small verifiers', 2.4 MB each."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=12,
        num_attention_heads=4,
    )
    folder = tmp_path_factory.mktemp("wide")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_one_block_is_in_memory_and_each_is_read_once(wide: Path) -> None:
    block = 4 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256)
    # Thirteen boundaries, and every prompt's stream in both precisions before and after a block.
    activations = (13 + 3) * sum(map(len, PROMPTS)) * 256 * 4
    weighing = _Weighing(wide, "bfloat16")
    weighing.states_of(PROMPTS)
    assert weighing.read == [*(f"model.layers.{k}" for k in range(12)), *["model.norm"] * 2]
    assert activations < block / 2
    assert block < weighing.most < block + activations

    hoarding = _Hoarding(wide, "bfloat16")
    hoarding.states_of(PROMPTS)
    assert hoarding.most > 4 * block


def test_the_clause_about_blocks_reads_each_once(llama: Path) -> None:
    from truetap.conformance.test_layers import block_distances

    (states,) = Reference(llama, "bfloat16").states_of(PROMPTS[:1])
    drawn = np.random.default_rng(0).standard_normal(states.boundaries.shape, np.float32)
    slots = dict(enumerate(states.boundaries * (1 + 0.1 * drawn)))  # not what any block leads to
    counting = _Counting(llama, "bfloat16")
    away, floors = block_distances(counting, slots, 12)
    assert counting.read == [f"model.layers.{k}" for k in range(12)]
    whole = Reference(llama, "bfloat16")
    assert away.keys() == floors.keys() == set(range(1, 12))
    for k in range(1, 12):
        assert away[k].keys() == {k - 1, k, k + 1} - {12}
        own = whole.next_boundary(k, slots[k])
        rough = whole.next_boundary(k, slots[k], rough=True)
        assert floors[k] == pytest.approx(np.median(compare.row_distances(rough, own)), rel=0.1)
        for j in away[k].keys() - {k}:
            other = compare.row_distances(slots[k + 1], whole.next_boundary(j, slots[k]))
            assert away[k][j] == pytest.approx(np.median(other), rel=1e-4)


def test_the_head_is_read_in_slices_that_add_up(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary of 512 in three parts, the last one shorter."""
    right = Reference(llama, "bfloat16").states_of(PROMPTS)
    monkeypatch.setattr(streamed_reference, "VOCABULARY_SLICE", 200)
    assert differences(StreamedReference(llama, "bfloat16").states_of(PROMPTS), right) == []


def test_a_block_too_large_for_the_device_is_told(llama: Path) -> None:
    import torch

    class TooLarge(StreamedReference):
        def _loaded(self, *_: Any) -> Any:
            raise torch.OutOfMemoryError

    with pytest.raises(CouldNotRun, match="block 0 of the verifier does not fit") as told:
        TooLarge(llama, "bfloat16").states(PROMPTS[0])
    assert "--reference-device" in told.value.remedy


def test_self_consistency_needs_the_norm_and_the_head_alone(llama: Path) -> None:
    (states,) = Reference(llama, "bfloat16").states_of(PROMPTS[:1])
    counting = _Counting(llama, "bfloat16")
    found = counting.logprobs_of_last(states.boundaries[-1], PROMPTS[0])
    assert counting.read == ["model.norm"]
    np.testing.assert_allclose(found, states.logprobs, atol=SAME_LOGPROBS)


def test_a_norm_of_gemmas_kind_is_the_right_one(tmp_path: Path) -> None:
    """The log-probabilities come from the verifier's own norm, not from the plain kind."""
    model = random_verifier.tiny_qwen3_next(tmp_path, num_blocks=4)
    (states,) = Reference(model, "bfloat16").states_of(PROMPTS[:1])
    last, streamed = states.boundaries[-1], StreamedReference(model, "bfloat16")
    (ours,) = streamed.states_of(PROMPTS[:1])
    right, wrong = (final_norm(model, mistaken=m)(last) for m in (False, True))
    assert compare.row_distances(ours.normed_last, right).max() < SAME
    assert compare.row_distances(ours.normed_last, wrong).min() > 0.3
    found = streamed.logprobs_of_last(last, PROMPTS[0])
    np.testing.assert_allclose(found, states.logprobs, atol=SAME_LOGPROBS)
    assert np.abs(streamed.logprobs_of_last(wrong, PROMPTS[0]) - states.logprobs).max() > 0.1


def test_two_likely_tokens_are_compared_in_one_pass(llama: Path) -> None:
    counting = _Counting(llama, "bfloat16")
    found = counting.preference(PROMPTS[0], 5, 6)
    assert len(counting.read) == 12 + 2
    expected = Reference(llama, "bfloat16").preference(PROMPTS[0], 5, 6)
    assert found == pytest.approx(expected, abs=1e-4)
    assert counting.states_of([]) == []


# Captures judged by it: right ones pass, each wrong one is seen.


def captured(model: Path, reference: Reference) -> Observation:
    """Return all boundaries of two prompts in the engine's dtype, as the full profile sees them."""
    from truetap.harness.adapters.transformers import TransformersSession

    spec = EngineSpec(str(model), tuple(range(1, 13)))
    session = TransformersSession(spec)
    requests = tuple(CaptureRequest(f"p{i}", tuple(PROMPTS[i])) for i in (0, 2))
    together = session.capture(requests)
    states = reference.states_of([request.token_ids for request in requests])
    references = dict(zip((r.key for r in requests), states, strict=True))
    known: dict[str, Any] = {field.name: None for field in fields(Observation)}
    known |= {
        "spec": spec,
        "hidden_size": 128,
        "num_blocks": 12,
        "batch": together,
        "requests": requests,
        "reference": reference,
        "references": references,
        "logprobs": {r.key: session.prompt_logprobs(r.token_ids) for r in requests},
        "scenes": {"every-boundary": Scene(spec, requests, together, {}, references)},
    }
    assert all(field.default is MISSING or field.name in known for field in fields(Observation))
    return Observation(**known)


def with_fault(seen: Observation, change: Callable[[Float32], Float32]) -> Observation:
    """Return the observation with ``change`` made to states ``[T, 12, H]`` of every capture."""
    captures = [replace(c, states=change(c.states.copy())) for c in seen.batch.captures]
    batch = replace(seen.batch, captures=tuple(captures))
    scene = replace(seen.scenes["every-boundary"], together=batch)
    return replace(seen, batch=batch, scenes={"every-boundary": scene})


def _early(states: Float32) -> Float32:
    states[:, 6] = states[:, 5]
    return states


def _late(states: Float32) -> Float32:
    states[:, 6] = states[:, 7]
    return states


def _without_residual(states: Float32) -> Float32:
    states[:, 6] -= states[:, 5]
    return states


def _of_another_row(states: Float32) -> Float32:
    states[:, 6] = np.roll(states[:, 6], 1, axis=0)
    return states


VALUES, BLOCKS, LAST = "LAYERS-005", "LAYERS-008", "LAYERS-002"


def failing(seen: Observation) -> dict[str, str]:
    from truetap.conformance import judge

    return judge.failures(seen, [VALUES, BLOCKS, LAST])


def test_neighbouring_boundaries_are_told_apart(
    text_model: Path, streamed: StreamedReference
) -> None:
    seen = captured(text_model, streamed)
    assert failing(seen) == {}
    for fault, holds in ((_early, 6), (_late, 8)):
        found = failing(with_fault(seen, fault))
        assert f"the slot for boundary 7 holds boundary {holds}" in found[VALUES]
        assert BLOCKS in found


def test_other_faults_are_seen_by_value_and_by_block(llama: Path) -> None:
    seen = captured(llama, StreamedReference(llama, "bfloat16"))
    norm = final_norm(llama)

    def post_norm(states: Float32) -> Float32:
        states[:, -1] = norm(states[:, -1])
        return states

    for fault in (_without_residual, _of_another_row):
        assert set(failing(with_fault(seen, fault))) >= {VALUES, BLOCKS}
    assert set(failing(with_fault(seen, post_norm))) == {VALUES, BLOCKS, LAST}


# Quantised verifiers.


def _quantise(model: Path, change: Callable[[str, Any], dict[str, Any] | None]) -> tuple[Any, Any]:
    """Return weights with some of them changed, and the same with what the change stands for."""
    from safetensors.torch import load_file

    from truetap.harness import checkpoint

    coded, plain = {}, {}
    for name, weight in load_file(model / "model.safetensors").items():
        made = change(name, weight)
        coded.update(made or {name: weight})
        plain[name] = weight
        if made and f"{name}_scale_inv" in made:
            scale = made[f"{name}_scale_inv"]
            plain[name] = checkpoint.from_fp8(made[name], scale, (128, 128), name)
        elif made:
            words, scale, shape = (made[f"{name}_{part}"] for part in ("packed", "scale", "shape"))
            plain[name] = checkpoint.from_int4(words, scale, shape.tolist(), name)
    return coded, plain


def _fp8(name: str, weight: Any) -> dict[str, Any] | None:
    import torch

    if not name.endswith("_proj.weight"):
        return None
    blocks = [-(-size // 128) for size in weight.shape]
    scale = torch.rand(blocks, generator=torch.Generator().manual_seed(1)) + 0.5
    return {name: (weight * 16).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale / 16}


def _int4(name: str, weight: Any) -> dict[str, Any] | None:
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    if ".experts." not in name:
        return None
    groups = weight.view(len(weight), -1, 32)
    scale = (groups.abs().amax(-1) / 7).to(torch.bfloat16)
    values = (groups / scale[..., None]).round().clamp(-8, 7).view(weight.shape).to(torch.int8)
    return {
        f"{name}_packed": pack_to_int32(values, 4),
        f"{name}_scale": scale,
        f"{name}_shape": torch.tensor(weight.shape),
    }


@pytest.mark.parametrize(
    ("build", "change", "told"),
    [
        (random_verifier.tiny_deepseek_v3, _fp8, {"quant_method": "fp8"}),
        (
            random_verifier.tiny_kimi,
            _int4,
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        ),
    ],
    ids=["fp8-deepseek", "int4-kimi"],
)
def test_a_quantised_verifier_is_what_its_numbers_stand_for(
    build: Any, change: Any, told: dict[str, str], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    model = build(tmp_path, num_blocks=3)
    coded, plain = _quantise(model, change)
    before = StreamedReference(model, "bfloat16").states_of(PROMPTS[:1])
    save_file(plain, model / "model.safetensors")
    expected = StreamedReference(model, "bfloat16").states_of(PROMPTS[:1])
    save_file(coded, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": told}))
    found = open_reference(model, "bfloat16")  # which transformers cannot hold whole on a CPU
    assert isinstance(found, StreamedReference)
    states = found.states_of(PROMPTS[:1])
    assert differences(states, expected) == []
    assert differences(states, before) != []


# Which of the two is opened.


@contextmanager
def free_memory(monkeypatch: pytest.MonkeyPatch, size: float) -> Any:
    import psutil

    with monkeypatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: type("", (), {"available": size}))
        yield


def test_what_fits_twice_is_held_whole(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both precisions, in half of what is free: 6 bytes a weight where the file has 4."""
    needed = (llama / "model.safetensors").stat().st_size / 4 * 6
    with free_memory(monkeypatch, 2 * needed + 1):
        assert type(open_reference(llama, "bfloat16")) is Reference
        assert type(open_reference(llama, "bfloat16", kind="streamed")) is StreamedReference
        assert type(open_reference(llama, "float32")) is StreamedReference  # 12 bytes a weight
    with free_memory(monkeypatch, 2 * needed - 1):
        assert type(open_reference(llama, "bfloat16")) is StreamedReference
        assert type(open_reference(llama, "bfloat16", kind="whole")) is Reference


def test_what_cannot_be_opened_is_refused_in_a_sentence(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="runs on the CPU") as refused:
        open_reference(llama, "bfloat16", kind="whole", device="cuda:0")
    assert "--reference streamed" in refused.value.remedy
    for device in ("cuda:99", "nowhere"):
        with pytest.raises(CouldNotRun, match=f"cannot run on '{device}'"):
            open_reference(llama, "bfloat16", device=device)
    config = json.loads((llama / "config.json").read_text()) | {"model_type": "gpt_oss"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="family 'gpt_oss'") as unknown:
        open_reference(tmp_path, "bfloat16", kind="streamed")
    assert all(name in unknown.value.remedy for name in FAMILIES)


@pytest.mark.parametrize("setting", [{"num_attention_heads": 0}, {"hidden_act": "nonesuch"}])
def test_a_configuration_of_which_no_model_can_be_built(
    setting: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    shutil.copytree(llama, tmp_path / "copy")
    config = json.loads((llama / "config.json").read_text()) | setting
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="transformers cannot build a verifier"):
        open_reference(tmp_path / "copy", "bfloat16", kind="streamed")


def test_a_verifier_that_cannot_be_held_whole(llama: Path, tmp_path: Path) -> None:
    """transformers makes up the weights that a checkpoint lacks, and right captures would fail."""
    from safetensors.torch import load_file, save_file

    copy = tmp_path / "copy"
    shutil.copytree(llama, copy)
    file, weights = copy / "model.safetensors", load_file(llama / "model.safetensors")
    weights.pop("model.layers.3.mlp.up_proj.weight")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match=r"lacks 1 weights, the first is .*3\.mlp\.up_proj"):
        Reference(copy, "bfloat16")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CouldNotRun, match="transformers cannot load the verifier"):
        Reference(copy, "bfloat16")
    file.unlink()
    with pytest.raises(CouldNotRun, match="transformers cannot load the verifier"):
        Reference(copy, "bfloat16")
    config = json.loads((copy / "config.json").read_text()) | {"model_type": "nonesuch"}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CouldNotRun, match="model type `nonesuch`"):
        Reference(copy, "bfloat16")


def test_every_family_that_it_knows_is_tested() -> None:
    with_own_name = FAMILIES.keys() - {"kimi_k2"}  # which is "kimi" here
    assert with_own_name == BUILDERS.keys() - {"kimi"}


@pytest.mark.nightly
def test_resident_memory_is_one_block_and_activations() -> None:
    """In processes of their own: a block of 51 MB in float32, twelve of them."""
    script = Path(__file__).parents[2] / "benchmarks" / "streamed_memory.py"
    command = [sys.executable, str(script), "--kinds", "streamed", "hoarding", "--json"]
    told = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert told["peaks"]["streamed"] <= told["allowed"]
    assert told["peaks"]["hoarding"] > 2 * told["allowed"]

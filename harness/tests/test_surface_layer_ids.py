"""Facts about layer ids, on small releases written here; no torch, no network."""

from pathlib import Path

import pytest

from truetap.harness.errors import CouldNotRun
from truetap.harness.surface import layer_ids
from truetap.harness.surface.wheel import Source

MODELS = "model_executor/models"

PREAMBLE = """
import torch
from torch import nn
from vllm.distributed import get_pp_group
from vllm.sequence import IntermediateTensors
from vllm.compilation.decorators import support_torch_compile
from .interfaces import SupportsEagle3, SupportsLoRA
"""

MODEL = """
@support_torch_compile
class PrefixModel(nn.Module):
    mapper = support_torch_compile("weights")

    def __init__(self, *, vllm_config):
        self.layers = make_layers(vllm_config)
        self.aux_hidden_state_layers = ()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def forward(self, input_ids, positions, intermediate_tensors, inputs_embeds=None):
        if get_pp_group().is_first_rank:
            hidden, residual = self.embed_input_ids(input_ids), None
        else:
            hidden = intermediate_tensors["hidden_states"]
            residual = intermediate_tensors["residual"]
        aux = []
        for idx, layer in enumerate(self.layers[self.start_layer:self.end_layer]):
            if idx in self.aux_hidden_state_layers:
                aux.append(hidden + residual)
            hidden, residual = layer(positions, hidden, residual)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden, "residual": residual})
        stream = hidden + residual
        hidden, _ = self.norm(hidden, residual)
        if len(aux) > 0:
            return hidden, aux
        return hidden

class PrefixForCausalLM(nn.Module, SupportsLoRA, SupportsEagle3):
    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.model.aux_hidden_state_layers = layers
"""

INTERFACES = """
from typing import ClassVar, Literal, Protocol, runtime_checkable
import torch

class SupportsLoRA(Protocol):
    embedding_modules = torch.nn.ModuleDict()

@runtime_checkable
class SupportsEagle3(Protocol):
    supports_eagle3: ClassVar[Literal[True]] = True

    def set_aux_hidden_state_layers(self, layers): ...

    def get_eagle3_default_aux_hidden_state_layers(self):
        n = len(self.model.layers)
        return 2, n // 2, n - 3
"""

RUNNER = """
class GPUModelRunner:
    def load_model(self):
        self.model.get_eagle3_default_aux_hidden_state_layers()

    def _get_eagle3_aux_layers_from_config(self):
        config = self.speculative_config.draft_model_config.hf_config
        ids = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
        other = getattr(config, "dflash_config", None)
        if other:
            ids = [i + 1 for i in other.get("target_layer_ids") or []]
        return tuple(ids) if ids else None
"""

SPECULATIVE = """
class SpeculativeConfig:
    def _verify(self):
        supported = ["llama", "qwen"]
        if self.model_type not in supported:
            raise ValueError(f"eagle3 is only supported for {supported} models")
"""


def release(tmp_path: Path, *changes: tuple[str, str], **files: str) -> Source:
    """Return a small release whose four families are ``MODEL`` with (old, new) replaced."""
    model = MODEL
    for old, new in changes:
        assert old in model
        model = model.replace(old, new)
    texts = {
        f"{MODELS}/interfaces.py": files.get("interfaces", INTERFACES),
        "v1/worker/gpu_model_runner.py": files.get("runner", RUNNER),
        "config/speculative.py": files.get("speculative", SPECULATIVE),
    }
    for name, prefix in layer_ids.FAMILIES.items():
        texts[f"{MODELS}/{name}.py"] = PREAMBLE + model.replace("Prefix", prefix)
    for name, text in texts.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Source("9.9.9", tmp_path, {"file": "x.whl", "sha256": "0"})


def test_capture_before_each_block(tmp_path):
    facts = layer_ids.facts(release(tmp_path))
    assert set(facts) == {"deepseek_v2", "llama", "qwen2", "qwen3"}
    assert facts["llama"] == {
        "0": "TypeError",
        "1": "boundary 1",
        "n-1": "boundary n-1",
        "n": "not captured",
        "before_final_norm": True,
        "duplicates": "dropped",
        "order": "ascending",
        "pipeline": {
            "0": "TypeError",
            "n/4": "boundary 3n/4",
            "n/2": "not captured",
            "3n/4": "not captured",
            "n": "not captured",
            "earlier_stages": "lost",
            "ids": "per stage",
        },
        "residual_included": True,
        "stored": "as given",
    }


AFTER = (
    "            if idx in self.aux_hidden_state_layers:\n"
    "                aux.append(hidden + residual)\n"
    "            hidden, residual = layer(positions, hidden, residual)\n"
)
AFTER_BLOCK = (
    "            hidden, residual = layer(positions, hidden, residual)\n"
    "            if idx + 1 in self.aux_hidden_state_layers:\n"
    "                aux.append(hidden + residual)\n"
)
GLOBAL = ("self.end_layer]):", "self.end_layer], start=self.start_layer):")
SORTED = (
    "aux_hidden_state_layers = layers",
    "aux_hidden_state_layers = tuple(sorted(set(layers)))",
)
LAST = "        stream = hidden + residual\n"
APPEND = "aux.append(hidden + residual)"
CAPTURE_N = "        if 8 in self.aux_hidden_state_layers:\n            aux.append(stream)\n"
BY_ID = "return hidden, [a for i in self.aux_hidden_state_layers for k, a in aux if k == i]"


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ([(AFTER, AFTER_BLOCK)], {"0": "not captured", "n": "boundary n"}),
        ([(LAST, LAST + CAPTURE_N)], {"n": "boundary n"}),
        (
            [(APPEND, "aux.append(hidden)")],
            {"0": "boundary 0", "1": "block 0 without residual", "residual_included": False},
        ),
        (
            [(APPEND, "aux.append(self.norm(hidden, residual)[0])")],
            {"1": "boundary 1 after the final norm", "before_final_norm": False},
        ),
        (
            [(APPEND, "aux.append((idx, hidden + residual))"), ("return hidden, aux", BY_ID)],
            {"order": "as given", "duplicates": "kept"},
        ),
        (
            [(APPEND, "aux += [hidden + residual] * self.aux_hidden_state_layers.count(idx)")],
            {"order": "ascending", "duplicates": "kept"},
        ),
        ([SORTED], {"stored": "sorted, without duplicates"}),
    ],
)
def test_a_changed_forward_changes_the_facts(tmp_path, changes, wanted):
    facts = layer_ids.facts(release(tmp_path, *changes))["qwen2"]
    assert {key: facts[key] for key in wanted} == wanted


def test_ids_that_count_over_all_stages(tmp_path):
    pipeline = layer_ids.facts(release(tmp_path, GLOBAL))["llama"]["pipeline"]
    assert pipeline["ids"] == "global"
    assert pipeline["earlier_stages"] == "lost"
    assert pipeline["n/4"] == "not captured"
    assert pipeline["n/2"] == "boundary n/2"


def test_states_that_earlier_stages_hand_on(tmp_path):
    hand_on = ('"residual": residual}', '"residual": residual, "aux": aux}')
    take = (
        "        aux = []\n",
        '        aux = intermediate_tensors["aux"] if intermediate_tensors else []\n',
    )
    pipeline = layer_ids.facts(release(tmp_path, GLOBAL, hand_on, take))["llama"]["pipeline"]
    assert pipeline["earlier_stages"] == "relayed"
    assert pipeline["n/4"] == "boundary n/4"


def test_a_family_without_capture_is_none(tmp_path):
    without = (", SupportsEagle3", ""), ("def set_aux_hidden_state_layers", "def set_nothing")
    assert layer_ids.facts(release(tmp_path, *without)) == dict.fromkeys(layer_ids.FAMILIES)


def test_methods_of_the_protocol_are_inherited(tmp_path):
    own = MODEL[MODEL.index("    def set_aux") :]
    setter = "def set_aux_hidden_state_layers(self, layers): ..."
    mixed = INTERFACES.replace(
        setter,
        setter.replace(" ...", "\n        self.model.aux_hidden_state_layers = layers"),
    )
    source = release(tmp_path, (own, "    pass\n"), interfaces=mixed)
    assert layer_ids.facts(source)["llama"]["1"] == "boundary 1"
    assert layer_ids.eagle3(source)["default_ids"] == {"n=32": [2, 16, 29]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("self.norm(hidden, residual)", "self.last_norm(hidden, residual)"), "last_norm"),
        (("aux = []", "aux = new_function()"), "new_function"),
        (
            ("        aux = []", "        aux = torch.empty()"),
            r"deepseek_v2\.py line \d+: no stand-in for torch\.empty",
        ),
        (("layer(positions, hidden, residual)", "layer()"), "argument"),
        (("return hidden, aux", "return {'aux': aux}"), "forward returned a dict"),
        (("return hidden, aux", "return hidden, aux[::-1]"), "no word"),
        (("class PrefixModel", "class PrefixDecoder"), "Model"),
        (("aux.append(hidden + residual)", "aux += [hidden + residual] * 2"), "no word"),
    ],
)
def test_what_is_not_understood_is_an_error_and_no_fact(tmp_path, change, said):
    with pytest.raises(CouldNotRun, match=said) as raised:
        layer_ids.facts(release(tmp_path, change))
    assert "9.9.9" in str(raised.value)


def test_a_missing_model_file_is_named(tmp_path):
    source = release(tmp_path)
    (tmp_path / "vllm" / MODELS / "qwen3.py").unlink()
    with pytest.raises(CouldNotRun, match="qwen3"):
        layer_ids.facts(source)
    (tmp_path / "vllm" / MODELS / "interfaces.py").unlink()
    with pytest.raises(CouldNotRun, match=r"no file vllm/.*/interfaces\.py"):
        layer_ids.eagle3(source)


def test_eagle3_of_the_small_release(tmp_path):
    facts = layer_ids.eagle3(release(tmp_path))
    assert facts["protocol"] == [
        "get_eagle3_default_aux_hidden_state_layers",
        "set_aux_hidden_state_layers",
    ]
    assert facts["classes"] == {
        "direct": [f"{p}ForCausalLM" for p in ("DeepseekV2", "Llama", "Qwen2", "Qwen3")],
        "inherited": [],
    }
    assert facts["getter"] == "get_eagle3_default_aux_hidden_state_layers"
    assert facts["default_ids"] == {"n=32": [2, 16, 29]}
    assert facts["model_types"] == ["llama", "qwen"]
    assert facts["config"]["v2"] is None
    assert facts["config"]["v1"]["eagle_aux_hidden_state_layer_ids"] == "as given"
    assert facts["config"]["v1"]["dflash_config.target_layer_ids"] == "plus 1"
    assert facts["config"]["v1"]["eagle_config.layer_ids"] == "ignored"


def test_classes_that_inherit_the_interface(tmp_path):
    source = release(tmp_path)
    path = tmp_path / "vllm" / MODELS / "mistral.py"
    mistral = "Base = LlamaForCausalLM\nclass MistralForCausalLM(Base):\n    pass\n"
    path.write_text(mistral + "class Other(nn.Module):\n    pass\n")
    assert layer_ids.eagle3(source)["classes"]["inherited"] == ["MistralForCausalLM"]


@pytest.mark.parametrize(
    ("old", "new", "where", "wanted"),
    [
        ("n - 3", "n - 4", "interfaces", {"default_ids": {"n=32": [2, 16, 28]}}),
        ('["llama", "qwen"]', '["llama"]', "speculative", {"model_types": ["llama"]}),
        ("is only supported for {supported}", "is fine", "speculative", {"model_types": None}),
        (
            "class SupportsEagle3",
            "class Supports",
            "interfaces",
            {"protocol": None, "classes": None},
        ),
    ],
)
def test_a_changed_release_changes_eagle3(tmp_path, old, new, where, wanted):
    text = {"interfaces": INTERFACES, "speculative": SPECULATIVE}[where].replace(old, new)
    changes = []
    if where == "interfaces" and "class Supports" in new:
        getter = (
            "    def get_eagle3_default_aux_hidden_state_layers(self):\n        return 2, 16, 29\n"
        )
        changes = [("(nn.Module, SupportsLoRA, SupportsEagle3):\n", f"(nn.Module):\n{getter}\n")]
    facts = layer_ids.eagle3(release(tmp_path, *changes, **{where: text}))
    assert {key: facts[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("self.model.get_eagle3_default_aux_hidden_state_layers()", "pass", "asks for default ids"),
        ("_get_eagle3_aux_layers_from_config", "_ids_from_config", "yet it reads ids"),
        ("i + 1 for i", "i + 2 for i", "no word"),
    ],
)
def test_a_runner_that_is_not_understood(tmp_path, old, new, said):
    with pytest.raises(CouldNotRun, match=said):
        layer_ids.eagle3(release(tmp_path, runner=RUNNER.replace(old, new)))


def test_a_list_that_cannot_be_found(tmp_path):
    text = SPECULATIVE.replace("supported = [", "known = [")
    with pytest.raises(CouldNotRun, match="no list supported"):
        layer_ids.eagle3(release(tmp_path, speculative=text))

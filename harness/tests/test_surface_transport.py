"""Facts about the wire, on small releases written here; no torch, no engine, no network."""

from pathlib import Path

import pytest

from truetap.harness.errors import CouldNotRun
from truetap.harness.surface import transport
from truetap.harness.surface.torch_standin import Tensor
from truetap.harness.surface.wheel import Source
from truetap.harness.surface.wire_values import Record, Text, word_for

ENVS = """
import os
environment_variables = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION":
    lambda: bool(int(os.getenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "0"))),
}

def __getattr__(name):
    if name in environment_variables:
        return environment_variables[name]()
    raise AttributeError(name)
"""

ENGINE = """
import enum
from typing import Optional
import msgspec
from vllm.v1.metrics.stats import SchedulerStats

class UtilityResult:
    def __init__(self, r=None):
        self.result = r

class UtilityOutput(msgspec.Struct, array_like=True):
    call_id: int
    failure_message: Optional[str] = None
    result: Optional[UtilityResult] = None

class EngineCoreOutput(msgspec.Struct):
    tokens: SomethingOfTorch

class EngineCoreOutputs(msgspec.Struct, array_like=True):
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: Optional[SchedulerStats] = None
    utility_output: Optional[UtilityOutput] = None

class EngineCoreRequestType(enum.Enum):
    UTILITY = b"3"
"""

CORE = """
from vllm.v1.engine import (EngineCoreOutputs, EngineCoreRequestType, UtilityOutput, UtilityResult)
from vllm.v1.serial_utils import MsgpackEncoder
from vllm.platforms import far_too_much

class EngineCore:
    platform = far_too_much()

    def collective_rpc(self, method: far_too_much, timeout, args, kwargs):
        return self.model_executor.collective_rpc(method, timeout, args, kwargs)

class EngineCoreProc(EngineCore):
    def _handle_client_request(self, request_type, request):
        client, call_id, name, args = request
        output = UtilityOutput(call_id)
        try:
            output.result = UtilityResult(getattr(self, name)(*args))
        except BaseException as error:
            output.failure_message = str(error)
        self.output_queue.put_nowait((client, EngineCoreOutputs(utility_output=output)))

    def process_output_sockets(self):
        encoder = MsgpackEncoder()
"""

CLIENT = """
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackDecoder

def start(self):
    self.decoder = MsgpackDecoder(EngineCoreOutputs)

def _process_utility_output(output, waiting):
    waiting.pop(output.call_id).set_result(output.result.result)
"""

SERIAL = """
import importlib
import pickle
from types import FunctionType
import msgspec
import torch
from msgspec import msgpack
from vllm import envs
from vllm.v1.engine import UtilityResult

class MsgpackEncoder:
    def __init__(self):
        self.encoder = msgpack.Encoder(enc_hook=self.enc_hook)

    def encode(self, obj):
        self.buffers = [b""]
        self.buffers[0] = self.encoder.encode(obj)
        return self.buffers

    def enc_hook(self, obj):
        if isinstance(obj, UtilityResult):
            kinds = [(type(r).__module__, type(r).__qualname__) for r in obj.result]
            return (kinds if envs.VLLM_ALLOW_INSECURE_SERIALIZATION else None), obj.result
        if isinstance(obj, torch.Tensor):
            self.buffers.append(obj.cpu().view(torch.uint8).numpy().data)
            return str(obj.dtype)[6:], obj.shape, len(self.buffers) - 1
        if hasattr(obj, "dtype") and hasattr(obj, "shape") and obj.shape:
            self.buffers.append(obj.data)
            return obj.dtype.str, obj.shape, len(self.buffers) - 1
        if not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
            raise TypeError("not serializable")
        return msgpack.Ext(1, pickle.dumps(obj))

class MsgpackDecoder:
    def __init__(self, t=None):
        args = () if t is None else (t,)
        self.decoder = msgpack.Decoder(*args, ext_hook=self.ext_hook, dec_hook=self.dec_hook)

    def decode(self, frames):
        self.buffers = frames
        return self.decoder.decode(frames[0])

    def ext_hook(self, code, data):
        return pickle.loads(data)

    def dec_hook(self, t, obj):
        if t is UtilityResult:
            kinds, result = obj
            if kinds is not None:
                result = [self.typed(k, r) for k, r in zip(kinds, result)]
            return UtilityResult(result)
        if t is torch.Tensor:
            dtype, shape, index = obj
            data = torch.frombuffer(self.buffers[index], dtype=torch.uint8)
            return data.view(getattr(torch, dtype)).view(shape)
        if t.__name__ == "ndarray":
            import numpy as np
            return np.frombuffer(self.buffers[obj[2]], dtype=obj[0]).reshape(obj[1])
        return obj

    def typed(self, kind, value):
        if kind[1] == "NoneType":
            return value
        wanted = getattr(importlib.import_module(kind[0]), kind[1])
        return msgspec.convert(value, wanted, dec_hook=self.dec_hook)
"""

FILES = {
    "envs.py": ENVS,
    "v1/engine/__init__.py": ENGINE,
    "v1/engine/core.py": CORE,
    "v1/engine/core_client.py": CLIENT,
    "v1/serial_utils.py": SERIAL,
}


def release(tmp_path: Path, *changes: tuple[str, str, str]) -> Source:
    """Return the small release with (file, old, new) replaced."""
    files = dict(FILES)
    for name, old, new in changes:
        assert old in files[name]
        files[name] = files[name].replace(old, new)
    for name, text in files.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Source("9.9.9", tmp_path, {"file": "x.whl", "sha256": "0"})


def test_facts_of_the_small_release(tmp_path):
    reply = transport.facts(release(tmp_path))["reply"]
    assert reply["tensor"] == {"default": "descriptor_data_lost", "insecure": "same"}
    assert reply["tensor_on_device"]["default"] == "descriptor_data_lost"
    assert reply["list_of_tensors"] == {
        "default": "list_of_descriptor_data_lost",
        "insecure": "list_of_descriptor_data_lost",
    }
    assert reply["tuple_of_tensors"]["insecure"] == "tuple_of_descriptor_data_lost"
    assert reply["tuple"] == {"default": "list", "insecure": "same"}
    assert reply["torch_dtype"] == {"default": "raises_TypeError", "insecure": "same"}
    assert reply["str_subclass"]["default"] == "raises_TypeError"
    assert reply["dataclass"] == {"default": "dict", "insecure": "same"}
    for kind in ("none", "bool", "int", "float", "str", "bytes", "dict", "list"):
        assert reply[kind] == {"default": "same", "insecure": "same"}
    # The type of a function cannot be looked up by name: the client's reader ends.
    assert reply["callable"]["insecure"] == "client_raises_AttributeError"


def test_requests(tmp_path):
    request = transport.facts(release(tmp_path))["request"]
    assert request["callable_method"] == {"default": "raises_TypeError", "insecure": "same"}
    assert request["tensor_argument"]["insecure"] == "descriptor_data_lost"
    assert request["tuple_argument"]["default"] == "list"


@pytest.mark.parametrize(
    ("change", "kind", "setting", "word"),
    [
        (
            ("v1/serial_utils.py", "obj.cpu().", "obj."),
            "tensor_on_device",
            "default",
            "raises_TypeError",
        ),
        (
            ("v1/serial_utils.py", "reshape(obj[1])", "reshape(obj[1]).copy()"),
            "numpy_array",
            "insecure",
            "same",
        ),
        (
            ("v1/serial_utils.py", 'raise TypeError("not serializable")', "pass"),
            "torch_dtype",
            "default",
            "same",
        ),
        (("envs.py", '"0"', '"1"'), "tensor", "default", "same"),
    ],
)
def test_a_changed_body_changes_the_fact(tmp_path, change, kind, setting, word):
    assert transport.facts(release(tmp_path, change))["reply"][kind][setting] == word


def test_read_only_memory_is_noticed(tmp_path):
    change = ("v1/serial_utils.py", "self.buffers[obj[2]],", "bytes(self.buffers[obj[2]]),")
    assert (
        transport.facts(release(tmp_path, change))["reply"]["numpy_array"]["insecure"]
        == "read_only"
    )


def test_flags_read_at_import_are_read_anew_for_each_setting(tmp_path):
    changes = [
        (
            "v1/serial_utils.py",
            "class MsgpackEncoder:",
            "OPEN = envs.VLLM_ALLOW_INSECURE_SERIALIZATION\n\nclass MsgpackEncoder:",
        ),
        ("v1/serial_utils.py", "if not envs.VLLM_ALLOW_INSECURE_SERIALIZATION", "if not OPEN"),
        ("v1/serial_utils.py", "if envs.VLLM_ALLOW_INSECURE_SERIALIZATION else", "if OPEN else"),
    ]
    reply = transport.facts(release(tmp_path, *changes))["reply"]
    assert reply["torch_dtype"] == {"default": "raises_TypeError", "insecure": "same"}
    assert reply["tensor"] == {"default": "descriptor_data_lost", "insecure": "same"}


def test_a_name_without_a_stand_in_is_named_when_it_is_used(tmp_path):
    new = "from vllm.new_place import Thing\nfrom vllm import envs"
    unused = ("v1/serial_utils.py", "from vllm import envs", new)
    assert transport.facts(release(tmp_path, unused))
    used = ("v1/serial_utils.py", "isinstance(obj, torch.Tensor)", "isinstance(obj, Thing)")
    with pytest.raises(CouldNotRun, match=r"9\.9\.9.*serial_utils\.py.*vllm\.new_place\.Thing"):
        transport.facts(release(tmp_path, unused, used))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("v1/serial_utils.py", "view(torch.uint8)", "view(torch.int3)"), r"torch\.int3"),
        (("v1/serial_utils.py", "obj.cpu()", "obj.detach()"), r"Tensor\.detach"),
        # A stand-in called in a new way is no TypeError of the release.
        (("v1/serial_utils.py", "obj.cpu()", "obj.cpu(0)"), "argument"),
        (("v1/serial_utils.py", ".view(shape)", ".clone().view((8, 32))"), "no word"),
        (("v1/engine/core.py", "output.result =", "output.lost ="), "engine core failed"),
        (("v1/engine/core.py", "_handle_client_request", "_handle_call"), "_handle_client_request"),
        (
            ("v1/engine/core.py", "MsgpackEncoder()", "MsgpackEncoder(9)"),
            r"core\.py.*MsgpackEncoder",
        ),
        (
            ("v1/engine/core_client.py", "def _process_utility_output", "def _process"),
            "_process_utility_output",
        ),
        (("envs.py", "VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_OTHER"), "VLLM_ALLOW_INSECURE"),
        (("v1/serial_utils.py", "class MsgpackEncoder", "class Encoder"), "no MsgpackEncoder"),
    ],
)
def test_what_is_not_understood_is_an_error_and_no_fact(tmp_path, change, said):
    with pytest.raises(CouldNotRun, match=said) as raised:
        transport.facts(release(tmp_path, change))
    assert raised.value.remedy


def test_a_missing_file_is_named(tmp_path):
    source = release(tmp_path)
    (tmp_path / "vllm/v1/serial_utils.py").unlink()
    with pytest.raises(CouldNotRun, match="serial_utils"):
        transport.facts(source)


@pytest.mark.parametrize(
    ("sent", "arrived", "word"),
    [
        (7, 7, "same"),
        (7, 7.0, None),
        (True, 1, None),
        ("a", "b", None),
        (Text("a"), "a", "str"),
        ({1, 2}, [2, 1], "list"),
        ({1, 2}, [2, 3], None),
        ((1, "a"), [1, "a"], "list"),
        ((1, "a"), [1], None),
        ({"a": 1}, {"b": 1}, None),
        (Record(1, "a"), {"rows": 1, "name": "a"}, "dict"),
        (Record(1, "a"), {"rows": 2, "name": "a"}, None),
        (Tensor(b"ab", "bfloat16", (1,)), ["bfloat16", [1], 1], "descriptor_data_lost"),
        (Tensor(b"ab", "bfloat16", (1,)), ["bfloat16", [2], 1], None),
        (Tensor(b"ab", "bfloat16", (1,)), ["bfloat16", [1], b"ab"], "descriptor_with_data"),
        (Tensor(b"ab", "bfloat16", (1,)), ("bfloat16", [1], 1), None),
        (Tensor(b"ab", "bfloat16", (1,)), Tensor(b"ab", "bfloat16", (1,)), "same"),
        (Tensor(b"ab", "bfloat16", (1,)), Tensor(b"xb", "bfloat16", (1,)), None),
        (Tensor(b"ab", "bfloat16", (1,)), Tensor(b"ab", "float32", (1,)), None),
    ],
)
def test_words(sent, arrived, word):
    assert word_for(sent, arrived) == word

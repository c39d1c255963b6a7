"""What arrives at the client of a value that a worker returned, per release and setting.

Found by running the release's own code over the whole way of a ``collective_rpc`` reply: the engine
core's handling of the client's request, its msgpack encoder, the client's decoder, and the client's
unpacking of the reply. msgspec and numpy are the real ones; torch is a stand-in. The pickled way
from worker to engine core keeps types and is no part of this.

Words for a worker's value, seen in the list of replies that the client gets:

- ``same``: same type, same value
- ``read_only``: the same, but an array that cannot be written to
- ``list``, ``dict``: the same content in a plain list or dict
- ``descriptor_data_lost``: ``[dtype, dims, number of a buffer that nobody has any more]``
- ``descriptor_with_data``: ``[dtype, dims, memoryview]``
- ``list_of_X``, ``dict_of_X``, ``tuple_of_X``: a container whose elements arrived so
- ``raises_TypeError``: encoding raises in the engine core's output thread, and the caller waits for
  ever; of a request, it raises at the caller
- ``client_raises_X``: decoding raises in the client's reader thread, and the caller waits for ever
- ``str``: plain text in place of a subclass of it
"""

from __future__ import annotations

import importlib
import pickle
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from truetap.harness.errors import CouldNotRun
from truetap.harness.surface.link import Linker
from truetap.harness.surface.strict import NotUnderstood, Prepared, bare, section
from truetap.harness.surface.torch_standin import torch_module
from truetap.harness.surface.wire_values import request_values, word_for, worker_values

if TYPE_CHECKING:
    from truetap.harness.surface.wheel import Source

FLAGS = {"default": {}, "insecure": {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}}
"""Setting to the environment variables that make it."""

WORLD_SIZE = 2

_ENGINE = "vllm.v1.engine"
_CORE = "vllm.v1.engine.core"
_CLIENT = "vllm.v1.engine.core_client"
_SERIAL = "vllm.v1.serial_utils"
_HANDLE = "_handle_client_request"
_ONLY = {"EngineCoreProc": (_HANDLE, "collective_rpc")}
_MULTIMODAL = ("MultiModalKwargs", "MultiModalKwargsItem", "MultiModalKwargsItems")


@section
def facts(source: Source) -> dict[str, Any]:
    """Return ``{"reply": {kind: {setting: word}}, "request": {kind: {setting: word}}}``.

    Raises ``CouldNotRun`` if msgspec is not installed, the release has names that the stand-ins do
    not cover, or a value arrives in a form that has no word.
    """
    try:
        import msgspec  # noqa: F401
    except ImportError as error:
        raise CouldNotRun(
            "finding out what arrives at a client needs msgspec, which is not installed",
            remedy='pip install "truetap[surface]"',
        ) from error
    _check_constructors(source)
    replies: dict[str, dict[str, str]] = {}
    requests: dict[str, dict[str, str]] = {}
    for setting, variables in FLAGS.items():
        wire = Wire(source, variables)
        for kind, value in worker_values().items():
            word = wire.word_of_reply(value, kind)
            replies.setdefault(kind, {})[setting] = word
        for kind, (method, args) in request_values().items():
            requests.setdefault(kind, {})[setting] = wire.word_of_request(method, args, kind)
    return {"reply": replies, "request": requests}


class Wire:
    """The release's engine core, encoder, decoder and client under one setting."""

    def __init__(self, source: Source, variables: dict[str, str]) -> None:
        self._linker = Linker(source, _standins(variables), _ONLY)
        self._encoder = self._linker.get(_SERIAL, "MsgpackEncoder")()
        decoder = self._linker.get(_SERIAL, "MsgpackDecoder")
        self._decoder = decoder(self._linker.get(_ENGINE, "EngineCoreOutputs"))
        self._request_decoder = decoder()

    def word_of_reply(self, value: Any, kind: str) -> str:
        """Return the word for a value that each of ``WORLD_SIZE`` workers returned."""
        outputs = self._handled([value] * WORLD_SIZE, kind)
        frames = self._encoded(outputs, kind)
        if isinstance(frames, str):
            return frames
        arrived = self._received(frames, kind)
        if isinstance(arrived, str):
            return arrived
        if type(arrived) is not list or len(arrived) != WORLD_SIZE:
            raise _unclear(kind, f"the list of replies arrived as {arrived!r:.80}")
        words = {word_for(value, slot) for slot in arrived}
        if len(words) != 1 or None in words:
            raise _unclear(kind, f"arrived as {arrived[0]!r:.80}")
        return str(words.pop())

    def word_of_request(self, method: Any, args: tuple[Any, ...], kind: str) -> str:
        """Return the word for the method, or for its only argument if there is one."""
        call = (0, 1, "collective_rpc", (method, None, args, None))
        frames = self._encoded(call, kind)
        if isinstance(frames, str):
            return frames
        _, _, _, (method_arrived, _, args_arrived, _) = self._request_decoder.decode(frames)
        sent, arrived = (args[0], args_arrived[0]) if args else (method, method_arrived)
        word = word_for(sent, arrived)
        if word is None:
            raise _unclear(kind, f"arrived as {arrived!r:.80}")
        return word

    def _handled(self, reply: list[Any], kind: str) -> Any:
        """Return what the engine core queues for the client when its executor answers ``reply``."""
        queue: deque[Any] = deque()
        linker = self._linker
        core = bare(
            linker.get(_CORE, "EngineCoreProc"),
            output_queue=Prepared("output_queue", put_nowait=queue.append),
            model_executor=Prepared("executor", collective_rpc=lambda *_a, **_k: reply),
        )
        if linker.has(_CORE, "EngineShutdownState"):
            core.shutdown_state = linker.get(_CORE, "EngineShutdownState").RUNNING
        call: tuple[Any, ...] = (1, "collective_rpc", ["method", None, [], None])
        utility = linker.get(_ENGINE, "EngineCoreRequestType").UTILITY
        handle = getattr(core, _HANDLE)
        try:
            handle(utility, (0, *call))
        except ValueError:
            # Before 0.9.1 a request did not carry the client's number.
            handle(utility, call)
        queued = queue.pop()
        outputs = queued[1] if isinstance(queued, tuple) else queued
        failure = outputs.utility_output.failure_message
        if failure is not None:
            raise _unclear(kind, f"the engine core failed: {failure}")
        return outputs

    def _encoded(self, message: Any, kind: str) -> list[memoryview] | str:
        """Return the frames as the other side receives them, or the word for an error."""
        try:
            frames = self._encoder.encode(message)
        except TypeError as error:
            # A stand-in was called with arguments that it does not know.
            if "argument" in str(error):
                raise _unclear(kind, f"encoding raised {error!r}") from error
            return "raises_TypeError"
        except Exception as error:
            raise _unclear(kind, f"encoding raised {error!r}") from error
        # Received frames are writable memory, as pyzmq's are.
        return [memoryview(bytearray(frame)) for frame in frames]

    def _received(self, frames: list[memoryview], kind: str) -> Any:
        """Return the reply that the caller gets, or the word for an error."""
        waiting: Future[Any] = Future()
        try:
            output = self._decoder.decode(frames).utility_output
        except AttributeError:
            # Not a gap of ours: what a stand-in lacks is NotUnderstood.
            return "client_raises_AttributeError"
        except Exception as error:
            raise _unclear(kind, f"decoding raised {error!r}") from error
        self._linker.get(_CLIENT, "_process_utility_output")(output, {1: waiting})
        return waiting.result(timeout=0)


def _unclear(kind: str, what: str) -> NotUnderstood:
    return NotUnderstood(f"no word for a value of kind {kind}: {what}")


def _check_constructors(source: Source) -> None:
    """Check that engine and client build encoder and decoder as ``Wire`` does."""
    calls = {_CORE: "MsgpackEncoder()", _CLIENT: "MsgpackDecoder(EngineCoreOutputs)"}
    for module, call in calls.items():
        path = f"{module.replace('.', '/')}.py"
        if call not in (source.text(path) or ""):
            raise NotUnderstood(f"{path} does not call {call}")


def _standins(variables: dict[str, str]) -> dict[str, object]:
    torch = torch_module()

    def import_module(name: str) -> Any:
        """Import what the decoder looks a value's type up in, by name."""
        return torch if name == "torch" else importlib.import_module(name)

    return {
        "cloudpickle": pickle,
        "importlib": Prepared("importlib", import_module=import_module),
        "torch": torch,
        "vllm.envs.os": Prepared("os", getenv=variables.get),
        "vllm.utils.torch_utils.PIN_MEMORY": False,
        "vllm.utils.platform_utils.is_pin_memory_available": lambda: False,
        # Replies to utility calls leave these fields at their defaults.
        f"{_ENGINE}.EngineCoreOutput": Any,
        "vllm.v1.metrics.stats.SchedulerStats": Any,
        "zmq": Prepared("zmq", Frame=type("Frame", (), {})),
        **{f"vllm.multimodal.inputs.{name}": type(name, (), {}) for name in _MULTIMODAL},
    }

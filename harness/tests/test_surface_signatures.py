"""Signatures read from small sources written here; no torch, no network."""

from pathlib import Path

import pytest

from truetap.harness.errors import CouldNotRun
from truetap.harness.surface import signatures
from truetap.harness.surface.signatures import Place
from truetap.harness.surface.wheel import Source

EXECUTOR = """
from vllm.v1.base import Executor

class UniProcExecutor(Executor):
    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple = (),
                       kwargs=None, *, non_block: bool = False, single: int) -> list:
        return []

class External(UniProcExecutor):
    def _hidden(self): ...
    @classmethod
    def public(cls, a, /, b=[1, 2], *rest, c=3, **more): ...
"""
BASE = """
class Executor:
    async def sample_tokens(self, grammar): ...
    def collective_rpc(self, method): ...
"""
FIELDS = """
class KVCacheConfig:
    \"\"\"Docs.\"\"\"
    kind: ClassVar[str] = "x"
    num_blocks: int
    tensors: list[int] = field(default_factory=list)
    def method(self): ...
"""

FILES = {
    "vllm/v1/executor/uniproc_executor.py": EXECUTOR,
    "vllm/v1/base.py": BASE,
    "vllm/v1/kv.py": FIELDS,
    "vllm/v1/functions.py": "from vllm.v1.base import Executor\ndef plan(config, *, size=1): ...\n",
}
UNI = ("vllm/v1/executor/uniproc_executor.py",)


def release(tmp_path: Path, **changed: str) -> Source:
    for name, text in {**FILES, **changed}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Source("9.9.9", tmp_path, {"file": "x.whl", "sha256": "0"})


def read(source: Source, place: Place, monkeypatch):
    monkeypatch.setattr(signatures, "PLACES", (place,))
    return signatures.facts(source)[place.label]


def test_parameters_have_name_kind_and_default_in_order(tmp_path, monkeypatch):
    place = Place("uni", "UniProcExecutor", UNI, ("collective_rpc", "gone"))
    assert read(release(tmp_path), place, monkeypatch) == {
        "collective_rpc": [
            "method",
            "timeout=None",
            "args=()",
            "kwargs=None",
            "*",
            "non_block=False",
            "single",
        ],
        "gone": None,
    }


def test_all_public_methods_with_the_inherited_ones(tmp_path, monkeypatch):
    found = read(release(tmp_path), Place("ext", "External", UNI, ("*",)), monkeypatch)
    assert found["public"] == ["a", "/", "b=[1, 2]", "*rest", "c=3", "**more"]
    assert found["sample_tokens"] == ["grammar"]
    assert len(found["collective_rpc"]) == 7  # the nearer base's, not Executor's
    assert "_hidden" not in found


def test_a_changed_default_changes_the_fact(tmp_path, monkeypatch):
    place = Place("uni", "UniProcExecutor", UNI, ("collective_rpc",))
    text = EXECUTOR.replace("non_block: bool = False", "non_block: bool = True")
    found = read(release(tmp_path, **{UNI[0]: text}), place, monkeypatch)
    assert "non_block=True" in found["collective_rpc"]


def test_fields_of_a_dataclass(tmp_path, monkeypatch):
    place = Place("kv", "KVCacheConfig", ("vllm/v1/kv.py",), ("fields",))
    assert read(release(tmp_path), place, monkeypatch) == {
        "fields": ["num_blocks", "tensors=field(default_factory=list)"]
    }


def test_functions_of_a_module_keep_their_first_parameter(tmp_path, monkeypatch):
    place = Place("f", "", ("vllm/v1/gone.py", "vllm/v1/functions.py"), ("plan", "Executor"))
    assert read(release(tmp_path), place, monkeypatch) == {
        "plan": ["config", "*", "size=1"],
        "Executor": None,
    }


def test_the_newest_known_file_wins(tmp_path, monkeypatch):
    new = "class UniProcExecutor:\n    def collective_rpc(self, only): ...\n"
    source = release(tmp_path, **{"vllm/v1/new.py": new})
    place = Place("uni", "UniProcExecutor", ("vllm/v1/new.py", *UNI), ("collective_rpc",))
    assert read(source, place, monkeypatch) == {"collective_rpc": ["only"]}


def test_a_class_that_releases_may_lack_is_none(tmp_path, monkeypatch):
    place = Place(
        "ray", "RayExecutor", ("vllm/v1/executor/ray.py",), ("collective_rpc",), optional=True
    )
    assert read(release(tmp_path), place, monkeypatch) is None


@pytest.mark.parametrize("optional", [False, True])
def test_a_class_that_moved_is_an_error_and_not_missing(tmp_path, monkeypatch, optional):
    source = release(tmp_path, **{"vllm/v1/elsewhere/ray.py": "class RayExecutor:\n    pass\n"})
    place = Place("ray", "RayExecutor", ("vllm/v1/executor/ray.py",), ("collective_rpc",), optional)
    with pytest.raises(CouldNotRun, match=r"9\.9\.9: vllm/v1/elsewhere/ray\.py: RayExecutor"):
        read(source, place, monkeypatch)


def test_a_class_that_is_gone_is_an_error_unless_known(tmp_path, monkeypatch):
    place = Place("gone", "Gone", ("vllm/v1/gone.py",), ("collective_rpc",))
    with pytest.raises(CouldNotRun, match="no class Gone"):
        read(release(tmp_path), place, monkeypatch)


def test_a_file_that_does_not_parse_is_named(tmp_path, monkeypatch):
    source = release(tmp_path, **{"vllm/v1/kv.py": "class KVCacheConfig(:\n"})
    place = Place("kv", "KVCacheConfig", ("vllm/v1/kv.py",), ("fields",))
    with pytest.raises(CouldNotRun, match=r"vllm-9\.9\.9/vllm/v1/kv\.py"):
        read(source, place, monkeypatch)


def test_every_place_says_what_it_reads():
    labels = [place.label for place in signatures.PLACES]
    assert len(labels) == len(set(labels))
    assert all(place.files and place.members for place in signatures.PLACES)

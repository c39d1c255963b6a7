"""Running parts of a release, on small releases written here; no torch, no engine, no network."""

from pathlib import Path
from typing import Any

import pytest

from truetap.harness.errors import CouldNotRun, UsageError
from truetap.harness.surface import standins
from truetap.harness.surface.link import Linker
from truetap.harness.surface.strict import NotUnderstood, Prepared, bare, section
from truetap.harness.surface.symbolic_model import State
from truetap.harness.surface.torch_standin import Tensor
from truetap.harness.surface.wheel import Source


def release(folder: Path, **texts: str) -> Source:
    """Write the modules ``vllm.NAME`` of a release."""
    (folder / "vllm/deep").mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / "vllm" / f"{name.replace('__', '/')}.py").write_text(text)
    return Source("7.8.9", folder, {})


def value(folder: Path, text: str, *, standins: Any = None, **more: str) -> Any:
    """Return what the function ``go`` of the module ``vllm.a`` returns."""
    return Linker(release(folder, a=text, **more), standins or {}).get("vllm.a", "go")()


BASE = """
def shared():
    return LIMIT

LIMIT = 40

class Base:
    table = {}

    def helper(self):
        return 1 + super().__sizeof__() * 0

    def unwanted(self, like=no_such_name):
        return like
"""
NEEDED = """
import torch
from vllm.b import Base, shared as common

class Needed(Base):
    size: torch.Tensor = None
    device = torch.device("cuda")

    def go(self) -> torch.Tensor:
        return self.helper() + common()

    def by_name(self, name="helper"):
        return getattr(self, name)() + common()

    def never(self, size=torch.zeros(3)):
        return size
"""


@pytest.mark.parametrize("member", ["go", "by_name"])
def test_a_class_is_reduced_to_what_is_mentioned(tmp_path: Path, member: str) -> None:
    source = release(tmp_path, a=NEEDED, b=BASE)
    linked = Linker(source, {}, {"Needed": (member,)}).get("vllm.a", "Needed")
    assert getattr(linked(), member)() == 41
    assert {"never", "device", "unwanted", "table"}.isdisjoint(dir(linked))
    with pytest.raises(NotUnderstood, match=r"name no_such_name in vllm/b\.py"):
        Linker(source, {}, {"Needed": (member, "unwanted")}).get("vllm.a", "Needed")
    with pytest.raises(NotUnderstood, match="no stand-in for torch"):
        Linker(source, {}, {"Needed": (member, "never")}).get("vllm.a", "Needed")
    with pytest.raises(NotUnderstood, match="no_such_name"):
        Linker(source, {}).get("vllm.a", "Needed")


def test_a_subclass_that_wants_more_of_a_linked_base_is_noticed(tmp_path: Path) -> None:
    only = {"Base": ("helper",), "Needed": ("more",)}
    text = "from vllm.b import Base\nclass Needed(Base):\n    def more(self): return self.table"
    source = release(tmp_path, a=text, b=BASE)
    first = Linker(source, {}, only)
    assert first.get("vllm.a", "Needed")().more() == {}
    assert first.get("vllm.b", "Base")().helper() == 1
    late = Linker(source, {}, only)
    late.get("vllm.b", "Base")
    with pytest.raises(NotUnderstood, match=r"Base of vllm/b\.py is linked without \['table'\]"):
        late.get("vllm.a", "Needed")


def test_a_class_that_is_whole_needs_whole_bases(tmp_path: Path) -> None:
    base = "class Base:\n    def first(self): return 1\n    def second(self): return 2\n"
    text = "from vllm.b import Base\nclass Whole(Base):\n    def go(self): return self.second()"
    source = release(tmp_path, a=text, b=base)
    words = r"Base of vllm/b\.py is linked without \['second'\]"
    linker = Linker(source, {}, {"Base": ("first",)})
    with pytest.raises(NotUnderstood, match=words):
        linker.get("vllm.a", "Whole")
    assert linker.get("vllm.b", "Base")().first() == 1
    late = Linker(source, {}, {"Base": ("first",)})
    late.get("vllm.b", "Base")
    with pytest.raises(NotUnderstood, match=words):
        late.get("vllm.a", "Whole")
    # A reduced class may build on one that is whole.
    linker = Linker(source, {}, {"Whole": ("go",)})
    assert linker.get("vllm.b", "Base")().first() == 1
    assert linker.get("vllm.a", "Whole")().go() == 2


def test_a_property_keeps_its_setter(tmp_path: Path) -> None:
    text = """
class Box:
    @property
    def size(self):
        return self.inner

    @size.setter
    def size(self, value):
        self.inner = value + 1
"""
    box = Linker(release(tmp_path, a=text), {}, {"Box": ("size",)}).get("vllm.a", "Box")()
    box.size = 2
    assert box.size == 3


@pytest.mark.parametrize(
    "reach",
    [
        "nowhere",
        "torch.zeros(3)",
        "torch.nn",
        "Thing",
        "Thing.part",
        "isinstance(3, Thing)",
        "box.missing",
        "getattr(box, 'missing', 0)",
        "known.missing",
        "hasattr(known, 'missing')",
        "time.sleep(0)",
        "[broken for _ in '1']",
        "unreadable",
    ],
)
@pytest.mark.parametrize("handler", ["Exception", "ImportError", "AttributeError", "NameError"])
def test_a_release_cannot_handle_what_is_not_prepared(
    tmp_path: Path, reach: str, handler: str
) -> None:
    text = f"""
import time
import torch
from vllm.elsewhere import Thing
from vllm.given import box
broken = [][0]
from vllm.wrong import unreadable

def go(known):
    try:
        return {reach}
    except {handler}:
        return "handled"
"""
    standins = {
        "time": Prepared("time", monotonic=float),
        "torch.Tensor": int,
        "vllm.given.box": Prepared("box"),
    }
    go = Linker(release(tmp_path, a=text, wrong="def ("), standins).get("vllm.a", "go")
    with pytest.raises(NotUnderstood):
        go(bare(type("Known", (), {})))


@pytest.mark.parametrize(
    "statement",
    [
        "import torch",
        "import torch.cuda",
        "import torch as t",
        "from torch import zeros",
        "from vllm.elsewhere import Thing",
        "from .elsewhere import Thing",
        "from vllm.b import nothing",
        "import vllm.elsewhere",
        "import importlib; importlib.import_module('vllm.b')",
        "__import__('torch')",
    ],
)
def test_an_import_in_a_function_is_looked_up_too(tmp_path: Path, statement: str) -> None:
    text = f"""
def go():
    try:
        {statement}
    except ImportError:
        return "handled"
"""
    source = release(tmp_path, a=text, b="")
    with pytest.raises(NotUnderstood, match=r"torch|Thing|elsewhere|nothing|import_module"):
        Linker(source, {}).get("vllm.a", "go")()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def go():\n    from vllm.b import LIMIT\n    return LIMIT", 40),
        ("def go():\n    from .b import shared\n    return shared()", 40),
        ("def go():\n    import vllm.b\n    return vllm.b.LIMIT", 40),
        ("def go():\n    import vllm.b as b\n    return b.LIMIT", 40),
        ("from . import b\ndef go(): return b.LIMIT", 40),
        ("from vllm import b as other\ndef go(): return other.shared()", 40),
        ("from .deep.c import up\ndef go(): return up()", 40),
        ("import os.path\ndef go(): return os.path.basename('x/y')", "y"),
        ("from collections import deque as d\ndef go(): return d([1]).pop()", 1),
        # Stand-ins go before what the release defines, and before modules that exist.
        ("from vllm.b import GIVEN\ndef go(): return GIVEN", "given"),
        ("import vllm.b\ndef go(): return vllm.b.of_given()", "given"),
        ("import time\ndef go(): return time.monotonic()", 7.0),
        ("from time import monotonic\ndef go(): return monotonic()", 7.0),
        ("def go():\n    from time import monotonic\n    return monotonic()", 7.0),
        ("import torch\ndef go(): return torch.nn.Module", "module"),
        ("from torch import nn\ndef go(): return nn.Module", "module"),
        # A name of the module goes before a builtin of the same name.
        ("def len(x): return 'own'\ndef go(): return len([])", "own"),
        ("from vllm.b import shared as max\ndef go(): return max()", 40),
        # The last binding counts, and what only type checkers see is none.
        ("def go(): return 1\ndef go(): return 2", 2),
        ("if TYPE_CHECKING:\n    X = 1\nelse:\n    X = 2\ndef go(): return X", 2),
        ("X = 2\nif typing.TYPE_CHECKING:\n    X: int = 1\ndef go(): return X", 2),
        ("try:\n    X = 1\nexcept ImportError:\n    X = None\ndef go(): return X", 1),
        ("A, (B, C) = 1, (2, 3)\ndef go(): return A + B + C", 6),
        ("class X: pass\nX.y = 3\ndef go(): return X.__name__", "X"),
        # A module's own look-up of names.
        ("import vllm.c as c\ndef go(): return c.LAZY", "lazy LAZY"),
        ("from vllm.logger import init_logger\ndef go(): return init_logger('a').info('x')", None),
    ],
)
def test_what_a_name_stands_for(tmp_path: Path, text: str, expected: object) -> None:
    standins = {
        "time": Prepared("time", monotonic=lambda: 7.0),
        "torch.nn.Module": "module",
        "vllm.b.GIVEN": "given",
    }
    more = "\nGIVEN = 1\ndef of_given(): return GIVEN\n"
    lazy = """
def __getattr__(name):
    if name.isupper():
        return f"lazy {name}"
    raise AttributeError(name)
"""
    deep = "from ..b import shared as up\n"
    texts = {"b": BASE + more, "c": lazy, "deep__c": deep}
    assert value(tmp_path, text, standins=standins, **texts) == expected


def test_a_module_whose_own_look_up_finds_nothing(tmp_path: Path) -> None:
    lazy = "def __getattr__(name): raise AttributeError(name)"
    with pytest.raises(NotUnderstood, match=r"vllm/c\.py has no thing"):
        value(tmp_path, "import vllm.c as c\ndef go(): return c.thing", c=lazy)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("X = X + 1\ndef go(): return X", r"name X in vllm/a\.py"),
        ("X = int('y')\ndef go(): return X", r"X of vllm/a\.py raises ValueError"),
        ("def other(): pass", r"vllm/a\.py has no go"),
        ("from vllm.gone import go", r"no stand-in for vllm\.gone\.go"),
    ],
)
def test_what_cannot_be_defined_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(NotUnderstood, match=words):
        value(tmp_path, text)


def test_annotations_count_where_msgspec_reads_them(tmp_path: Path) -> None:
    import msgspec

    text = """
import msgspec
from vllm.b import Part

class Whole(msgspec.Struct):
    parts: list[Part] = []

def go(unknown: torch.Tensor = 3) -> torch.Tensor:
    return Whole
"""
    part = "import msgspec\nclass Part(msgspec.Struct):\n    size: int"
    whole = value(tmp_path / "right", text, b=part)
    assert msgspec.convert({"parts": [{"size": 3}]}, whole).parts[0].size == 3
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"parts": [{"size": "x"}]}, whole)
    with pytest.raises(NotUnderstood, match="Tensor"):
        value(tmp_path / "wrong", text.replace("list[Part]", "Tensor"), b=part)


def test_a_release_that_does_not_parse_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotUnderstood, match=r"vllm-7\.8\.9/vllm/a\.py does not parse"):
        value(tmp_path, "def go(:")


def test_a_section_names_release_file_and_line(tmp_path: Path) -> None:
    @section
    def derive(source: Source) -> dict[str, Any]:
        return {"x": Linker(source, {"vllm.given": Prepared("given")}).get("vllm.a", "go")()}

    text = "from vllm import given\ndef go():\n    return {}"
    assert derive(release(tmp_path, a=text.format(3))) == {"x": 3}
    for reached, words in (
        ("given.part", r"vllm 7\.8\.9, vllm/a\.py line 3: no stand-in for given\.part"),
        ("nowhere", r"vllm 7\.8\.9, vllm/a\.py line 3: no stand-in for the name nowhere"),
        ("[][0]", r"vllm 7\.8\.9, vllm/a\.py line 3: raises IndexError"),
    ):
        with pytest.raises(CouldNotRun, match=words) as caught:
            derive(release(tmp_path, a=text.format(reached)))
        assert caught.value.remedy
    with pytest.raises(CouldNotRun, match=r"vllm 7\.8\.9: vllm/a\.py has no go"):
        derive(release(tmp_path, a=""))


@pytest.mark.parametrize("error", [UsageError("a", remedy="b"), ZeroDivisionError()])
def test_a_section_leaves_other_errors_alone(tmp_path: Path, error: Exception) -> None:
    @section
    def derive(_: Source) -> dict[str, Any]:
        raise error

    with pytest.raises(type(error)) as caught:
        derive(release(tmp_path))
    assert caught.value is error


def test_a_prepared_object_says_what_was_read() -> None:
    prepared = Prepared("config", size=3)
    assert prepared.size == 3
    with pytest.raises(NotUnderstood, match=r"config\.depth"):
        _ = prepared.depth
    assert prepared.reached == {"size", "depth"}
    assert not hasattr(prepared, "__len__")


def test_a_bare_instance_has_what_it_was_given() -> None:
    class Engine:
        def __init__(self) -> None:
            raise AssertionError

        def twice(self) -> int:
            return 2 * self.size  # type: ignore[attr-defined, no-any-return]

    engine = bare(Engine, ("tool",), size=4)
    assert engine.twice() == 8
    assert isinstance(engine, Engine)
    assert not hasattr(engine, "tool")
    with pytest.raises(NotUnderstood, match=r"Engine\.twins"):
        _ = engine.twins


def test_stand_ins_lack_what_nobody_wrote() -> None:
    tensor = Tensor(b"ab", "bfloat16", (1,))
    for standin in (tensor, State(frozenset()), standins.Worker(0)):
        with pytest.raises(NotUnderstood, match=rf"{type(standin).__name__}\.split"):
            _ = getattr(standin, "split", None)
    assert not hasattr(standins.Worker(0), standins.MISSING_METHOD)

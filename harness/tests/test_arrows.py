"""Which package may import which, and when torch and the engines are imported."""

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("harness", "conformance", "pipeline")
FORBIDDEN = {
    "harness": ("truetap.conformance", "truetap.pipeline"),
    "conformance": ("truetap.pipeline",),
    "pipeline": (),
}
HEAVY = ("torch", "vllm", "transformers", "speculators", "hs_connectors", "datasets")

# Subclasses of somebody else's classes, loaded by their program (the engine's workers, speculators'
# trainer), where torch is there anyway; nothing else imports them.
WORKER_MODULES = {"harness/adapters/vllm_connector.py", "pipeline/speculators_backend.py"}


def own_sources() -> list[Path]:
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted(path for path in found if path.relative_to(ROOT).parts[1] != "tests")


def imported_names(node: ast.AST) -> list[str]:
    """All names that may be modules: `from a import b` gives a and a.b."""
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(level=0, module=str(module)):
            return [module, *(f"{module}.{alias.name}" for alias in node.names)]
        case ast.Call(
            func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            return [name]
    return []


def is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name | ast.Attribute) and ast.unparse(test).endswith(
        "TYPE_CHECKING"
    )


def executed_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs when the module is imported, class bodies and `if` branches too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and is_type_checking(child.test):
            for branch in child.orelse:
                yield branch
                yield from executed_on_import(branch)
            continue
        yield child
        yield from executed_on_import(child)


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def arrows_broken(tree: ast.Module, package: str) -> list[str]:
    names = [(node, name) for node in ast.walk(tree) for name in imported_names(node)]
    return [
        f"line {node.lineno}: {package} must not import {name}"  # type: ignore[attr-defined]
        for node, name in names
        if within(name, FORBIDDEN[package])
    ]


def relative_imports(tree: ast.Module) -> list[str]:
    return [
        f"line {node.lineno}: relative import"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]


def heavy_on_import(tree: ast.Module) -> list[str]:
    names = [(node, name) for node in executed_on_import(tree) for name in imported_names(node)]
    return [
        f"line {node.lineno}: {name} is imported with the module"  # type: ignore[attr-defined]
        for node, name in names
        if within(name, HEAVY)
    ]


def parse(snippet: str) -> ast.Module:
    return ast.parse(textwrap.dedent(snippet))


def test_there_are_sources_of_every_package() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in own_sources()} == set(PACKAGES)


@pytest.mark.parametrize("path", own_sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_rules(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    name = path.relative_to(ROOT).as_posix()
    broken = arrows_broken(tree, name.split("/")[0]) + relative_imports(tree)
    if name not in WORKER_MODULES:
        broken += heavy_on_import(tree)
    assert not broken


@pytest.mark.parametrize("name", sorted(WORKER_MODULES))
def test_worker_modules_need_their_exception(name: str) -> None:
    assert heavy_on_import(ast.parse((ROOT / name).read_text("utf-8")))


@pytest.mark.parametrize(
    ("package", "snippet"),
    [
        ("harness", "import truetap.pipeline"),
        ("harness", "import numpy, truetap.conformance.strategies as s"),
        ("harness", "from truetap import pipeline"),
        ("harness", "from truetap.pipeline.gate import check"),
        ("harness", "def f():\n    from truetap.conformance import strategies"),
        ("harness", "if TYPE_CHECKING:\n    from truetap.pipeline import config"),
        ("harness", "importlib.import_module('truetap.pipeline.cli')"),
        ("harness", "__import__('truetap.conformance')"),
        ("conformance", "from truetap.pipeline import store"),
    ],
)
def test_a_forbidden_arrow_is_seen(package: str, snippet: str) -> None:
    assert arrows_broken(parse(snippet), package)


@pytest.mark.parametrize(
    ("package", "snippet"),
    [
        ("harness", "from truetap.harness import pipelines"),
        ("harness", "import truetap_pipeline"),
        ("conformance", "from truetap.conformance import strategies"),
        ("conformance", "import truetap.harness.compare"),
        ("pipeline", "from truetap.harness import compare"),
    ],
)
def test_an_allowed_arrow_is_not_reported(package: str, snippet: str) -> None:
    assert not arrows_broken(parse(snippet), package)


@pytest.mark.parametrize("snippet", ["from . import x", "from .x import y", "from ..x import y"])
def test_a_relative_import_is_seen(snippet: str) -> None:
    assert relative_imports(parse(f"def f():\n    {snippet}"))
    assert not relative_imports(parse("from truetap.harness import model"))


@pytest.mark.parametrize(
    "snippet",
    [
        "import torch",
        "import os, torch.nn as nn",
        "from vllm.config import VllmConfig",
        "from transformers import AutoConfig",
        "class C:\n    import speculators.models",
        "try:\n    import torch\nexcept ImportError:\n    torch = None",
        "if sys.version_info > (3,):\n    import torch",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import torch",
        "torch = importlib.import_module('torch')",
    ],
)
def test_a_heavy_import_is_seen(snippet: str) -> None:
    assert heavy_on_import(parse(snippet))


@pytest.mark.parametrize(
    "snippet",
    [
        "def f():\n    import torch",
        "class C:\n    async def f(self):\n        import vllm",
        "if TYPE_CHECKING:\n    import torch",
        "if typing.TYPE_CHECKING:\n    from vllm import LLM",
        "import torchless",
        "from truetap.harness.adapters import transformers",
    ],
)
def test_a_late_import_is_not_reported(snippet: str) -> None:
    assert not heavy_on_import(parse(snippet))


IMPORT_ALL = """
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {heavy}:
            raise ImportError("refused: " + name)

sys.meta_path.insert(0, Refuse())
for name in {names}:
    importlib.import_module(name)
"""


def import_without_heavy(names: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IMPORT_ALL.format(heavy=set(HEAVY), names=names)]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def test_everything_but_the_worker_modules_imports_without_torch(tmp_path: Path) -> None:
    sources = [path.relative_to(ROOT) for path in own_sources()]
    modules = [path.with_suffix("") for path in sources if str(path) not in WORKER_MODULES]
    names = [".".join(["truetap", *module.parts]).removesuffix(".__init__") for module in modules]
    assert "truetap.harness.adapters" in names
    done = import_without_heavy(names, tmp_path)
    assert done.returncode == 0, done.stderr


def test_an_indirect_import_of_torch_is_seen(tmp_path: Path) -> None:
    (tmp_path / "innocent.py").write_text("import torch\n", "utf-8")
    done = import_without_heavy(["innocent"], tmp_path)
    assert done.returncode == 1
    assert "refused: torch" in done.stderr

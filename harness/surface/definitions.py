"""What the files of a release define, read without running them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from truetap.harness.surface.strict import NotUnderstood, file_name

if TYPE_CHECKING:
    from truetap.harness.surface.wheel import Source


def find_path(source: Source, module: str) -> str | None:
    """Return the file of a dotted module name, such as ``vllm/v1/request.py``, if it exists."""
    stem = module.replace(".", "/")
    return next(
        (path for path in (f"{stem}.py", f"{stem}/__init__.py") if (source.root / path).is_file()),
        None,
    )


def parse(source: Source, path: str) -> ast.Module:
    """Return the syntax tree of a file of the release; nobody may change it."""
    text = source.text(path)
    if text is None:
        raise NotUnderstood(f"no file {path}")
    return _parse(text, file_name(source, path))


@lru_cache(maxsize=40)
def _parse(text: str, name: str) -> ast.Module:
    try:
        return ast.parse(text, name)
    except SyntaxError as error:
        raise NotUnderstood(
            f"{name} does not parse with this Python, a newer one may do: {error.msg}"
        ) from error


def bindings(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Return what the statements of a module or class bind: name to statement, the last if several.

    What only type checkers see, and what handles a failed import, binds nothing.
    """
    return dict(_bindings(body))


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                yield name, node
            case ast.Import(aliases) | ast.ImportFrom(names=aliases):
                for alias in aliases:
                    yield bound_by(alias), node
            case ast.Assign(targets):
                for each in (each for target in targets for each in ast.walk(target)):
                    if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                        yield each.id, node
            case ast.AnnAssign(target=ast.Name(name)):
                yield name, node
            case ast.If(test, then, otherwise):
                if "TYPE_CHECKING" not in ast.unparse(test):
                    yield from _bindings(then)
                yield from _bindings(otherwise)
            case ast.Try(then, orelse=otherwise):
                yield from _bindings([*then, *otherwise])


def bound_by(alias: ast.alias) -> str:
    """Return the name that an import binds."""
    return alias.asname or alias.name.partition(".")[0]


def absolute(path: str, name: str | None, level: int) -> str:
    """Return the dotted name of a module that the file ``path`` imports, ``level`` dots up."""
    above = path.split("/")[:-level] if level else []
    return ".".join([*above, *([name] if name else [])])


def own_class(source: Source, path: str, name: str) -> ast.ClassDef | None:
    """Return the definition of a class in the file ``path`` itself."""
    node = bindings(parse(source, path).body).get(name)
    return node if isinstance(node, ast.ClassDef) else None


def find_class(source: Source, path: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """Return file and definition of a class of the release that ``path`` defines or imports."""
    node = bindings(parse(source, path).body).get(name)
    if isinstance(node, ast.ClassDef):
        return path, node
    if isinstance(node, ast.ImportFrom):
        there = find_path(source, absolute(path, node.module, node.level))
        if there is not None and there != path:
            original = next(alias.name for alias in node.names if bound_by(alias) == name)
            return find_class(source, there, original)
    return None


def lineage(source: Source, path: str, cls: ast.ClassDef) -> list[tuple[str, ast.ClassDef]]:
    """Return file and definition of the class and of all its bases in the release, itself first.

    The bases of a base come before the next base, which is the order in which Python looks for a
    method in all but diamonds.
    """
    found = [(path, cls)]
    for base in cls.bases:
        home = find_class(source, path, base.id) if isinstance(base, ast.Name) else None
        if home is not None and home[1] is not cls:
            found += [each for each in lineage(source, *home) if each not in found]
    return found

"""Runs single classes and functions of a release without importing the release.

A release's modules cannot be imported here: they need torch, a GPU's libraries, a hundred other
modules. But the few methods that decide a fact need little. ``Linker`` executes a top-level
statement of a release's file, unmodified, when something asks for the name that it binds: a caller,
or running code of the release. A name stands for a stand-in of the caller's, the release's own
definition, or a module that is imported for real; anything else is ``NotUnderstood``, because a
wrong guess would become a wrong fact.

Code of the release is executed. That is as much trust as installing it takes, no more and no less.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from truetap.harness.surface.definitions import (
    absolute,
    bindings,
    bound_by,
    find_path,
    lineage,
    parse,
)
from truetap.harness.surface.package_index import ENGINE
from truetap.harness.surface.strict import NotUnderstood, Prepared, file_name, silent

if TYPE_CHECKING:
    from truetap.harness.surface.wheel import Source

Node = TypeVar("Node", bound=ast.AST)

_REAL = sys.stdlib_module_names | {"msgspec", "numpy", "truetap"}
"""Top-level modules that are imported for real, unless there is a stand-in; truetap because pickle
imports where a value's type is from in the name of the code that calls it."""

_LEVELS = ("debug", "info", "warning", "error", "exception")
_LOGGER = Prepared(
    "logger",
    **dict.fromkeys([name for level in _LEVELS for name in (level, f"{level}_once")], silent),
)
_ALWAYS = {
    "importlib": Prepared("importlib"),
    f"{ENGINE}.logger.init_logger": lambda _name: _LOGGER,
}


class Linker:
    """The executed parts of one release.

    ``standins`` maps dotted names (``torch``, ``vllm.sequence.IntermediateTensors``) to what takes
    their place. ``only`` maps the name of a class to the members that are wanted: what these
    mention comes along, the rest of the class and of its bases is left out, because much of what
    runs in a class body needs torch.
    """

    def __init__(
        self,
        source: Source,
        standins: Mapping[str, object],
        only: Mapping[str, Iterable[str]] | None = None,
    ) -> None:
        self._source = source
        self._standins = {**_ALWAYS, **standins}
        self._only = only or {}
        self._scopes: dict[str, _Scope] = {}
        self._kept: dict[tuple[str, str], set[str]] = {}

    def get(self, module: str, name: str) -> Any:
        """Return the module's ``name``, ready to run; ``NotUnderstood`` if there is none."""
        full = f"{module}.{name}"
        scope = self._scope(module)
        if full in self._standins or self.has(module, name):
            return self.define(scope, name) if scope else self._standins[full]
        if self._exists(full):
            return _Module(self, full)
        if self.has(module, "__getattr__"):
            with suppress(AttributeError):
                return self.get(module, "__getattr__")(name)
        raise NotUnderstood(f"{scope.path} has no {name}" if scope else f"no stand-in for {full}")

    def has(self, module: str, name: str) -> bool:
        """Tell whether the release's module binds ``name`` at its top level."""
        scope = self._scope(module)
        return scope is not None and (name in scope.globals or name in scope.waiting)

    def define(self, scope: _Scope, name: str) -> Any:
        """Return the value of a module's global ``name``; give it one first if it has none."""
        if name in scope.globals:
            return scope.globals[name]
        # Whoever asks again while the statement runs finds nothing, rather than runs it again.
        node = scope.waiting.pop(name, None)
        if (full := f"{scope.module}.{name}") in self._standins:
            scope.globals[name] = self._standins[full]
        elif node is None:
            raise NotUnderstood(f"no stand-in for the name {name} in {scope.path}")
        else:
            self._execute(scope, node, name)
        return scope.globals[name]

    def imported(self, path: str, name: str, wanted: tuple[str, ...], level: int) -> Any:
        """Return what Python's ``__import__`` returns to the release's file ``path``."""
        full = absolute(path, name, level)
        top = full.partition(".")[0]
        if top in _REAL and top not in self._standins:
            return builtins.__import__(full, {}, {}, wanted)
        if not self._exists(full):
            names = ", ".join(f"{full}.{each}" for each in wanted) or full
            raise NotUnderstood(f"no stand-in for {names}")
        module = full if wanted else top
        return self._standins.get(module) or _Module(self, module)

    def _execute(self, scope: _Scope, node: ast.stmt, name: str) -> None:
        flags = annotations.compiler_flag  # Annotations name half of torch: nobody reads them.
        if isinstance(node, ast.Import | ast.ImportFrom):
            node = _changed(node, names=[each for each in node.names if bound_by(each) == name])
        elif isinstance(node, ast.ClassDef):
            if any("Struct" in ast.unparse(base) for base in node.bases):
                flags = 0  # But msgspec does.
            node = self._reduced(scope.path, node)
        where = file_name(self._source, scope.path)
        code = compile(ast.Module([node], []), where, "exec", flags=flags, dont_inherit=True)
        try:
            exec(code, scope.globals)
        except Exception as error:
            # It ran when the release was imported: what it lacks here is a stand-in.
            raise NotUnderstood(f"{name} of {scope.path} raises {error!r}") from error

    def _reduced(self, path: str, node: ast.ClassDef) -> ast.ClassDef:
        """Return the class with its wanted members only, if it or a subclass is in ``only``.

        Every identifier counts as a mention. Too many do no harm, because functions look for names
        when they run, and not before.
        """
        wanted = self._wanted(path, node)
        whole = wanted is None
        classes = lineage(self._source, path, node)
        members = [(name, each) for _, cls in classes for name, each in _members(cls)]
        found = {name for name, _ in members} if whole else set()
        while wanted and wanted - found:
            found |= wanted
            wanted = {each for name, member in members if name in found for each in _names(member)}
        for place, cls in classes[1:]:
            before = self._wanted(place, cls)
            linked = place in self._scopes and cls.name in self._scopes[place].globals
            if before is not None and (linked or whole):
                # A second copy of the class would not know the enums and exceptions of the first.
                if more := found & {name for name, _ in _members(cls)} - before:
                    raise NotUnderstood(f"{cls.name} of {place} is linked without {sorted(more)}")
            elif not (linked or whole):
                self._kept.setdefault((place, cls.name), set()).update(found)
        if whole:
            return node
        self._kept[path, node.name] = found
        body = [member for member in node.body if found & bindings([member]).keys()]
        return _changed(node, body=body or [ast.copy_location(ast.Pass(), node)])

    def _wanted(self, path: str, cls: ast.ClassDef) -> set[str] | None:
        """Return the members that the class is reduced to as far as is known; None if it is not."""
        asked = self._only.get(cls.name)
        kept = self._kept.get((path, cls.name))
        return None if asked is None and kept is None else {*(asked or ()), *(kept or ())}

    def _exists(self, module: str) -> bool:
        """Tell whether the release or the stand-ins have such a module, or something inside it."""
        return find_path(self._source, module) is not None or any(
            f"{name}.".startswith(f"{module}.") for name in self._standins
        )

    def _scope(self, module: str) -> _Scope | None:
        path = find_path(self._source, module)
        if path is not None and path not in self._scopes:
            waiting = bindings(parse(self._source, path).body)
            self._scopes[path] = _Scope(self, module, path, waiting)
        return self._scopes.get(path or "")


class _Scope(dict[str, Any]):
    """Globals of a module, as its builtins: where Python looks last, so that names come late."""

    def __init__(
        self, linker: Linker, module: str, path: str, waiting: dict[str, ast.stmt]
    ) -> None:
        super().__init__({k: v for k, v in vars(builtins).items() if k not in waiting})
        self["__import__"] = self._import
        self.globals: dict[str, Any] = {"__name__": module, "__builtins__": self}
        self.module, self.path, self.waiting, self._linker = module, path, waiting, linker

    def __missing__(self, name: str) -> Any:
        return self._linker.define(self, name)

    def _import(
        self, name: str, _globals: Any = None, _locals: Any = None, wanted: Any = (), level: int = 0
    ) -> Any:
        return self._linker.imported(self.path, name, wanted or (), level)


class _Module:
    """A module as the release's code sees it."""

    def __init__(self, linker: Linker, module: str) -> None:
        self._linker, self._name = linker, module

    def __getattr__(self, name: str) -> Any:
        return self._linker.get(self._name, name)


def _changed(node: Node, **fields: Any) -> Node:
    """Return a copy with these fields; the tree is shared with other readers."""
    same = {name: getattr(node, name) for name in node._fields}
    return ast.copy_location(type(node)(**{**same, **fields}), node)


def _members(node: ast.ClassDef) -> list[tuple[str, ast.stmt]]:
    """Return name and definition of the class's members; a property's setter is one more."""
    return [(name, member) for member in node.body for name in bindings([member])]


def _names(node: ast.stmt) -> Iterator[str]:
    """Yield whatever may be a member's name, a string for ``getattr`` too."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute):
            yield each.attr
        elif isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value

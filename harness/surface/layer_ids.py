"""Which layer ids a release can capture, and what each of them captures.

Found by running the release's own code over stand-ins: the methods that set the ids, and the
model's ``forward`` over symbolic layers. Ids and boundaries are written with n, the number of
blocks.

Words for an id: ``boundary K``; ``boundary K after the final norm``; ``block K without residual``;
``not captured``, no error; ``TypeError``, raised in the forward pass (embeddings plus no residual).
"""

from __future__ import annotations

import ast
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from truetap.harness.surface.definitions import bindings, find_class, find_path, parse
from truetap.harness.surface.link import Linker
from truetap.harness.surface.strict import NotUnderstood, bare, section
from truetap.harness.surface.symbolic_model import BLOCKS, FAMILIES, Family

if TYPE_CHECKING:
    from truetap.harness.surface.wheel import Source

_RUNNERS = {
    "v1": ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._get_eagle3_aux_layers_from_config"),
    "v2": (
        "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils",
        "get_eagle3_aux_layers_from_config",
    ),
}
"""Model runner to what reads the ids from a draft's configuration."""

_INTERFACES = "vllm/model_executor/models/interfaces.py"
_SPECULATIVE = ("vllm.config.speculative", "vllm.config")


@section
def facts(source: Source) -> dict[str, Any]:
    """Return family to what its ids capture; None for a family without capture in this release.

    Per family: the word of the ids ``0``, ``1``, ``n-1`` and ``n`` asked for alone; ``order`` of
    several; ``duplicates`` dropped or kept; ``stored``, the ids that the model says it has;
    ``residual_included`` and ``before_final_norm`` of all that was captured; and ``pipeline``: two
    stages of n/2 blocks, the word of some ids as the last stage returns them.
    """
    return {name: _family(Family(source, name)) for name in FAMILIES}


@section
def eagle3(source: Source) -> dict[str, Any]:
    """Return what the release has of EAGLE-3's capture interface.

    ``protocol``: the methods of ``SupportsEagle3``, None if there is none; ``classes``: the model
    classes that name it as a base, and those that inherit it; ``default_ids``: what the release
    gives for a Llama of 32 blocks; ``getter``: the method that the model runner asks for it;
    ``model_types``: the allow-list of substrings of ``model_type``, None if there is none;
    ``config``: per model runner, what it makes of ids at the places where a draft's
    configuration can hold them, None if that runner reads none.
    """
    protocol = find_class(source, _INTERFACES, "SupportsEagle3")
    getter = _getter(source)
    llama = Family(source, "llama", method=getter)
    return {
        "classes": _implementers(source) if protocol else None,
        "config": {runner: _config(source, *where) for runner, where in _RUNNERS.items()},
        "default_ids": {"n=32": list(llama.default_ids(getter, 32))},
        "getter": getter,
        "model_types": _model_types(source),
        "protocol": sorted(_functions(protocol[1])) if protocol else None,
    }


def _functions(cls: ast.ClassDef) -> list[str]:
    return [name for name, node in bindings(cls.body).items() if isinstance(node, ast.FunctionDef)]


# Layer ids


def _family(family: Family) -> dict[str, Any] | None:
    if not family.captures():
        return None
    n = BLOCKS
    words = {key: family.word(i) for key, i in {"0": 0, "1": 1, "n-1": n - 1, "n": n}.items()}
    low, mid, high = (family.word(i) for i in (2, 5, 6))
    order = _one_of(
        family, (5, 2, 6), {(low, mid, high): "ascending", (mid, low, high): "as given"}
    )
    duplicates = _one_of(family, (2, 2, 5), {(low, mid): "dropped", (low, low, mid): "kept"})
    captured = [word for word in words.values() if word not in ("not captured", "TypeError")]
    return {
        **words,
        "before_final_norm": not any("after the final norm" in word for word in captured),
        "duplicates": duplicates,
        "order": order,
        "pipeline": _pipeline(family),
        "residual_included": not any("without residual" in word for word in captured),
        "stored": _stored(family),
    }


def _one_of(family: Family, ids: tuple[int, ...], words: dict[tuple[str, ...], str]) -> str:
    captured = tuple(family.several(ids))
    if captured not in words:
        raise NotUnderstood(f"no word for the ids {ids}, which gave {captured}")
    return words[captured]


def _stored(family: Family) -> str:
    asked = (6, 2, 2)
    stored = tuple(family.stored(asked))
    words = {asked: "as given", (2, 6): "sorted, without duplicates"}
    if stored not in words:
        raise NotUnderstood(f"no word for the ids {asked} stored as {stored}")
    return words[stored]


def _pipeline(family: Family) -> dict[str, str]:
    ids = {"0": 0, "n/4": BLOCKS // 4, "n/2": BLOCKS // 2, "3n/4": BLOCKS * 3 // 4, "n": BLOCKS}
    words = {key: family.word(i, stages=2) for key, i in ids.items()}
    early, late = family.word(BLOCKS // 4), family.word(BLOCKS * 3 // 4)
    if words["3n/4"] == late:
        counting = "global"
    elif words["n/4"] == late:
        counting = "per stage"
    else:
        raise NotUnderstood(f"no word for two stages that gave {words}")
    return {
        **words,
        "earlier_stages": "relayed" if words["n/4"] == early else "lost",
        "ids": counting,
    }


# EAGLE-3's interface


def _getter(source: Source) -> str:
    module, _ = _RUNNERS["v1"]
    path = f"{module.replace('.', '/')}.py"
    names = set(re.findall(r"\.(get_eagle3\w*aux_hidden_state_layers)\(", source.text(path) or ""))
    if len(names) != 1:
        raise NotUnderstood(f"{path} asks for default ids by {sorted(names) or 'nothing'}")
    return str(names.pop())


def _model_types(source: Source) -> list[str] | None:
    """Return the list that the release's refusal names: "... is only supported for {LIST}"."""
    for module in _SPECULATIVE:
        path = find_path(source, module)
        text = source.text(path) if path else None
        named = re.search(r"only supported for \{(\w+)\}", text or "")
        if path is None or text is None or named is None:
            continue
        for node in ast.walk(parse(source, path)):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == named[1]:
                return [str(name) for name in ast.literal_eval(node.value)]
        raise NotUnderstood(f"{path} has no list {named[1]}")
    return None


def _config(source: Source, module: str, name: str) -> dict[str, str] | None:
    """Return place in a draft's configuration to what the runner makes of ids there."""
    path = find_path(source, module)
    if path is None:
        return None
    cls, _, function = name.rpartition(".")
    if f"def {function}(" not in (source.text(path) or ""):
        if "aux_hidden_state_layer_ids" in (source.text(path) or ""):
            raise NotUnderstood(f"{path} has no {name}, and yet it reads ids")
        return None
    linker = Linker(source, {}, {cls: (function,)})
    found = linker.get(module, cls or function)

    def read(config: SimpleNamespace) -> Any:
        speculative = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
        if not cls:
            return found(speculative)
        return getattr(bare(found, speculative_config=speculative), function)()

    return {place: _made_of_ids(path, read(_draft(place))) for place in _PLACES}


_PLACES = (
    "dflash_config.layer_ids",
    "dflash_config.target_layer_ids",
    "dspark_target_layer_ids",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config.eagle_aux_hidden_state_layer_ids",
    "eagle_config.layer_ids",
    "target_layer_ids",
)
_IDS = [3, 5, 7]


def _draft(place: str) -> SimpleNamespace:
    outer, _, inner = place.rpartition(".")
    ids = list(_IDS)
    return SimpleNamespace(**({outer: {inner: ids}} if outer else {inner: ids}))


def _made_of_ids(path: str, made: Any) -> str:
    if not made:
        return "ignored"
    if list(made) == _IDS:
        return "as given"
    if list(made) == [i + 1 for i in _IDS]:
        return "plus 1"
    raise NotUnderstood(f"no word for {made}, which {path} made of {_IDS}")


_HEADER = re.compile(r"^class \w+\s*\(.*?\):", re.MULTILINE | re.DOTALL)
_ALIAS = re.compile(r"^ *(\w+) = (\w+)$", re.MULTILINE)


def _implementers(source: Source) -> dict[str, list[str]]:
    """Return the model classes that name ``SupportsEagle3`` as a base, and their subclasses.

    By name: a class that exists twice, for two makes of GPU, counts if one of them does.
    """
    bases: dict[str, set[str]] = {}
    classes: set[str] = set()
    for folder in ("vllm/model_executor/models", "vllm/models"):
        for path in source.paths(folder):
            text = source.text(path) or ""
            for alias, name in _ALIAS.findall(text):
                bases.setdefault(alias, set()).add(name)
            for header in _HEADER.finditer(text):
                cls = ast.parse(f"{header[0]} pass").body[0]
                if isinstance(cls, ast.ClassDef) and cls.name != "SupportsEagle3":
                    names = {ast.unparse(base).rpartition(".")[2] for base in cls.bases}
                    bases.setdefault(cls.name, set()).update(names)
                    classes.add(cls.name)
    direct = {name for name, of in bases.items() if "SupportsEagle3" in of}
    known = set(direct)
    while more := {name for name, of in bases.items() if of & known} - known:
        known |= more
    return {"direct": sorted(direct), "inherited": sorted((known - direct) & classes)}

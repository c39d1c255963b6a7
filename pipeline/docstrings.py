"""Questions for a language model, made from the documentation in Python's standard library.

Every machine that runs truetap has this text, so a demo needs no data set and no network. The files
are parsed, never imported: importing the whole standard library has side effects.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import os
import re
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from truetap.harness.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MAX_CHARACTERS = 700
"""Longest question, so that the prompt leaves room for the answer in a small verifier's context."""
SHARED_RUN = 13
"""Two texts that share this many words in a row count as the same material."""

_PARAGRAPH_CHARACTERS = range(40, 401)
_SIGNATURE_CHARACTERS = 200
_FEWEST_WORDS = 7
_LEAST_PROSE = 0.7
"""Share of a paragraph's words that must be ordinary ones, with letters and punctuation only."""
_PLAIN_WORD = re.compile(r"""["'(]?[A-Za-z][a-z'-]*["').,;:!?]*""")
_SENTENCE_END = re.compile(r"""[.!?]["')]*$""")

# Tests, vendored code and programs rather than a library that a reader would ask about.
_SKIPPED_FOLDERS = frozenset(
    {
        "dist-packages",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_Noun = Literal["class", "function", "method", "property"]

# The phrasings of each kind of question, filled with what is asked about and the documentation.
_ABOUT_ANYTHING: dict[str, tuple[str, ...]] = {
    "explain": (
        (
            "The Python documentation says this about {subject}:\n\n{quote}\n\n"
            "Explain in plain words what it does."
        ),
        (
            'What does {subject} do? Its documentation reads: "{quote}" '
            "Please explain that in your own words."
        ),
        (
            "I don't quite understand this passage about {subject} in Python:\n\n> {quote}\n\n"
            "Can you explain what it means?"
        ),
    ),
    "when": (
        "When would I use {subject} in Python? The documentation only says:\n\n{quote}",
        (
            "Here is what Python says about {subject}:\n\n{quote}\n\n"
            "Describe a situation in which it is useful, and one in which it is not."
        ),
        'Python has {subject}: "{quote}" What problem does it solve in a real program?',
    ),
    "rewrite": (
        "Rewrite this documentation of {subject} for somebody who is new to Python:\n\n{quote}",
        (
            "Please make this description of {subject} easier to read for a beginner, and keep it "
            "short:\n\n> {quote}"
        ),
        (
            'My students find this description of {subject} too hard: "{quote}" '
            "How would you put it to them?"
        ),
    ),
}
# These need a signature to quote.
_EXAMPLE = (
    (
        "Write a short example in Python that uses {subject}.\n\nSignature: {signature}\n\n"
        "Documentation: {quote}"
    ),
    (
        "Show me how to call {subject}. Its signature is\n\n    {signature}\n\n"
        "and its documentation begins: {quote}"
    ),
    (
        "Give a small usage example with comments for this Python {noun}:\n\n"
        "    {signature}\n\n{quote}"
    ),
)
_ARGUMENTS = (
    "What are the arguments of {subject}, and what does it return?\n\n    {signature}\n\n{quote}",
    (
        "Go through the parameters of this Python {noun} one by one and say what it gives back:\n\n"
        "    {signature}\n\n{quote}"
    ),
    (
        "The documentation of {subject} is: {quote}\n\nThe signature is: {signature}\n\n"
        "What should I pass, and what do I get back?"
    ),
)


@dataclass(frozen=True)
class Question:
    """One question about one thing in the standard library."""

    id: str
    """Source and kind, such as ``shutil.copytree:explain``; it does not depend on the seed."""
    text: str
    source: str
    """Dotted name of what is asked about, such as ``shutil.copytree``."""
    quoted: tuple[str, ...]
    """The parts of ``text`` that are Python's and not ours: the paragraph, then any signature."""


@dataclass(frozen=True)
class _Entry:
    """A documented public definition."""

    source: str
    noun: _Noun
    paragraph: str
    signature: str
    """How it is called, or an empty string if it is not called or that is too long to quote."""
    takes_arguments: bool


def stdlib_questions(seed: int) -> list[Question]:
    """Ask one question for each distinct docstring, in an order that ``seed`` picks."""
    root = Path(sysconfig.get_path("stdlib"))
    sources: set[str] = set()
    paragraphs: set[tuple[str, ...]] = set()
    questions: list[Question] = []
    for entry in _entries(root):
        words = tuple(_words(entry.paragraph))
        if entry.source in sources or words in paragraphs:
            continue
        question = _ask(entry)
        if question is not None:
            sources.add(entry.source)
            paragraphs.add(words)
            questions.append(question)
    # Sorting by a digest shuffles as well as a generator does, and one question more or less in
    # the next Python release leaves the order of all the others as it was.
    return sorted(questions, key=lambda question: _digest(f"{seed}:{question.id}"))


def split(
    questions: Sequence[Question], *, train: int, heldout: int
) -> tuple[list[Question], list[Question]]:
    """Take the first ``heldout`` questions, and ``train`` others that have nothing in common.

    Nothing in common means: no source, no quoted paragraph, and no run of ``SHARED_RUN`` words of
    quoted documentation. The held-out questions do not depend on how many are trained on.
    """
    if train < 0 or heldout < 0:
        raise UsageError(
            f"Cannot split off {train} train and {heldout} held-out questions.",
            remedy="Ask for zero or more of each.",
        )
    kept_out = list(questions[:heldout])
    sources = {question.source for question in kept_out}
    material = {piece for question in kept_out for piece in _material(question)}
    usable = [
        question
        for question in questions[heldout:]
        if question.source not in sources and material.isdisjoint(_material(question))
    ]
    if len(kept_out) < heldout or len(usable) < train:
        raise UsageError(
            f"{train} train and {heldout} held-out questions were asked for, but the "
            f"{len(questions)} questions at hand give {len(usable)} and {len(kept_out)}.",
            remedy=f"Ask for at most {len(usable)} and {len(kept_out)}.",
        )
    return usable[:train], kept_out


def _material(question: Question) -> Iterator[tuple[str, ...]]:
    """List what a question gives away of the documentation: its paragraph and its runs of words."""
    yield tuple(_words(question.quoted[0]))
    for text in question.quoted:
        # Whichever way a reader counts words: the lone signs of "x >= 0" may be words or not.
        for words in (_words(text), text.casefold().split()):
            for start in range(len(words) - SHARED_RUN + 1):
                yield tuple(words[start : start + SHARED_RUN])


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _ask(entry: _Entry) -> Question | None:
    """Ask about ``entry`` in a kind and phrasing that follow from it alone, not from the seed.

    Gives None if every phrasing would be too long.
    """
    phrasings = [(kind, text) for kind, texts in _ABOUT_ANYTHING.items() for text in texts]
    if entry.signature:
        phrasings += [("example", text) for text in _EXAMPLE]
    if entry.signature and entry.takes_arguments:
        phrasings += [("arguments", text) for text in _ARGUMENTS]
    subject = f"the {entry.noun} `{entry.source}`"
    first = int.from_bytes(_digest(entry.source)[:8]) % len(phrasings)
    for kind, phrasing in phrasings[first:] + phrasings[:first]:
        text = phrasing.format(
            subject=subject, noun=entry.noun, quote=entry.paragraph, signature=entry.signature
        )
        if len(text) <= MAX_CHARACTERS:
            signature = (entry.signature,) if "{signature}" in phrasing else ()
            return Question(
                id=f"{entry.source}:{kind}",
                text=text,
                source=entry.source,
                quoted=(entry.paragraph, *signature),
            )
    return None


def _entries(root: Path) -> Iterator[_Entry]:
    """Find every documented public definition under ``root``, file by file and line by line."""
    for path in sorted(_public_files(root)):
        try:
            with warnings.catch_warnings():
                # Old code warns of its invalid escapes when parsed: none of our user's business.
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue  # templates, samples in other encodings: not every file is meant to parse
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield from _entries_in(tree.body, module, inside_class=False)


def _public_files(root: Path) -> Iterator[Path]:
    # Folders whose names are not identifiers, such as lib-dynload, hold no importable Python.
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if name.isidentifier() and not name.startswith("_") and name not in _SKIPPED_FOLDERS
        ]
        for name in files:
            if name.endswith(".py") and (name == "__init__.py" or not name.startswith("_")):
                yield Path(folder, name)


def _entries_in(body: Iterable[ast.stmt], prefix: str, *, inside_class: bool) -> Iterator[_Entry]:
    """Find the definitions among ``body`` and, for classes, within them; not inside functions."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            # Definitions that depend on the platform or on an optional module.
            branches = [*node.body, *node.orelse]
            if isinstance(node, ast.Try):
                branches += [statement for each in node.handlers for statement in each.body]
            yield from _entries_in(branches, prefix, inside_class=inside_class)
        elif isinstance(node, _Definition) and not node.name.startswith("_"):
            source = f"{prefix}.{node.name}"
            paragraph = _first_paragraph(node)
            if paragraph is not None:
                noun = _noun(node, inside_class=inside_class)
                arguments, returns = _call(node, noun)
                signature = f"{source}({arguments}){returns}"
                if noun in {"class", "property"} or len(signature) > _SIGNATURE_CHARACTERS:
                    signature = ""
                yield _Entry(source, noun, paragraph, signature, takes_arguments=arguments != "")
            if isinstance(node, ast.ClassDef):
                yield from _entries_in(node.body, source, inside_class=True)


def _first_paragraph(node: _Definition) -> str | None:
    """Give the docstring's first paragraph on one line, if it is prose of a useful length."""
    docstring = ast.get_docstring(node)
    if docstring is None or _has_written_out_newline(node):
        return None
    paragraph = " ".join(re.split(r"\n\s*\n", docstring, maxsplit=1)[0].split())
    return paragraph if _is_prose(paragraph) else None


def _has_written_out_newline(node: _Definition) -> bool:
    r"""Tell whether the docstring spells a newline as ``\n``, which garbles what is quoted."""
    literal = node.body[0]
    assert isinstance(literal, ast.Expr)
    assert isinstance(literal.value, ast.Constant)
    lines = literal.end_lineno - literal.lineno if literal.end_lineno else 0
    return str(literal.value.value).count("\n") > lines


def _is_prose(text: str) -> bool:
    """Whether ``text`` reads as whole sentences, not as a signature, list, table or session."""
    if len(text) not in _PARAGRAPH_CHARACTERS or not text.isprintable():
        return False
    if any(mark in text for mark in (">>>", "->", "\\", "::", "...", " - ", "@param")):
        return False
    words = text.split()
    plain = sum(_PLAIN_WORD.fullmatch(word) is not None for word in words)
    return (
        text[0].isupper()
        and _SENTENCE_END.search(text) is not None
        and len(words) >= _FEWEST_WORDS
        and plain >= _LEAST_PROSE * len(words)
    )


def _noun(node: _Definition, *, inside_class: bool) -> _Noun:
    if isinstance(node, ast.ClassDef):
        return "class"
    if not inside_class:
        return "function"
    decorators = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
    return "property" if decorators & {"property", "cached_property"} else "method"


def _call(node: _Definition, noun: _Noun) -> tuple[str, str]:
    """Give the argument list and the return annotation of a function or method as source text.

    The first argument of a method is left out: Python passes it by itself.
    """
    if isinstance(node, ast.ClassDef):
        return "", ""
    arguments = copy.deepcopy(node.args)
    decorators = {ast.unparse(each) for each in node.decorator_list}
    if noun == "method" and "staticmethod" not in decorators:
        (arguments.posonlyargs or arguments.args)[:1] = []
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return ast.unparse(arguments), returns

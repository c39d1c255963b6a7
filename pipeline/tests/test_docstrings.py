from __future__ import annotations

import ast
import itertools
import re
import sysconfig
from pathlib import Path

import pytest

from truetap.harness.errors import UsageError
from truetap.pipeline import docstrings
from truetap.pipeline.docstrings import Question, split, stdlib_questions

STDLIB = Path(sysconfig.get_path("stdlib"))


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return stdlib_questions(7)


def file_of(source: str) -> Path:
    """The file that defines ``source``: the longest leading part that names a module."""
    parts = source.split(".")
    for end in range(len(parts) - 1, 0, -1):
        base = STDLIB.joinpath(*parts[:end])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
    raise AssertionError(f"no module defines {source}")


def squeezed(text: str) -> str:
    return "".join(text.split()).replace("\\", "")


def ngrams(text: str, length: int) -> set[str]:
    """Runs of words, told apart another way than the code under test does it."""
    words = re.sub(r"[^a-z0-9_]+", " ", text.lower()).split()
    return {" ".join(words[i : i + length]) for i in range(len(words) - length + 1)}


def made_up(name: str, paragraph: str, signature: str | None = None) -> Question:
    quoted = (paragraph,) if signature is None else (paragraph, signature)
    return Question(f"m.{name}:explain", "Explain: " + " ".join(quoted), f"m.{name}", quoted)


def test_same_seed_gives_the_same_questions_and_another_seed_another_order(
    questions: list[Question],
) -> None:
    assert stdlib_questions(7) == questions
    other = stdlib_questions(8)
    assert other != questions
    assert sorted(other, key=lambda q: q.id) == sorted(questions, key=lambda q: q.id)


def test_order_is_shuffled(questions: list[Question]) -> None:
    modules = [question.source.partition(".")[0] for question in questions]
    neighbours = sum(a == b for a, b in itertools.pairwise(modules))
    assert neighbours < len(questions) / 4


def test_there_are_enough_of_every_kind(questions: list[Question]) -> None:
    assert len(questions) > 1000
    kinds = [question.id.rpartition(":")[2] for question in questions]
    assert set(kinds) == {"explain", "when", "rewrite", "example", "arguments"}
    assert all(kinds.count(kind) > len(kinds) / 12 for kind in set(kinds))


def test_no_duplicates(questions: list[Question]) -> None:
    for field in (
        [question.id for question in questions],
        [question.source for question in questions],
        [squeezed(question.quoted[0]).lower() for question in questions],
    ):
        assert len(set(field)) == len(field)


def test_questions_are_short_and_quote_what_they_say_they_quote(questions: list[Question]) -> None:
    for question in questions:
        assert len(question.text) <= 700
        assert question.id.startswith(question.source + ":")
        rest = question.text
        for part in question.quoted:
            assert part in rest
            rest = rest.replace(part, "")
        assert "{" not in rest, "a phrasing was left unfilled"
        if question.id.endswith((":example", ":arguments")):
            assert question.quoted[1].startswith(question.source + "(")


def test_quoted_paragraph_occurs_in_the_source_file(questions: list[Question]) -> None:
    texts: dict[Path, str] = {}
    for question in questions:
        path = file_of(question.source)
        if path not in texts:
            texts[path] = squeezed(path.read_text(encoding="utf-8", errors="replace"))
        assert squeezed(question.quoted[0]) in texts[path], question.source


def test_quoted_signature_has_the_argument_names_of_the_definition(
    questions: list[Question],
) -> None:
    asked = {q.source: q for q in questions if len(q.quoted) == 2}
    tree = ast.parse((STDLIB / "shutil.py").read_bytes())
    checked = 0
    for node in tree.body:
        question = asked.get(f"shutil.{getattr(node, 'name', '')}")
        if isinstance(node, ast.FunctionDef) and question is not None:
            names = [a.arg for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
            assert all(re.search(rf"\b{name}\b", question.quoted[1]) for name in names)
            checked += 1
    assert checked


def test_private_names_and_skipped_folders_are_absent(questions: list[Question]) -> None:
    for question in questions:
        parts = question.source.split(".")
        assert not any(part.startswith("_") for part in parts), question.source
        assert not {"site-packages", "idlelib", "lib2to3", "turtledemo", "ensurepip"} & set(parts)
        assert "test" not in parts[:-1]


def test_split_shares_nothing_with_the_held_out_questions(questions: list[Question]) -> None:
    train, heldout = split(questions, train=800, heldout=200)
    assert (len(train), len(heldout)) == (800, 200)
    assert not {q.source for q in train} & {q.source for q in heldout}
    assert not {q.quoted[0].lower() for q in train} & {q.quoted[0].lower() for q in heldout}
    seen = set().union(*(ngrams(part, 13) for q in heldout for part in q.quoted))
    assert seen
    for question in train:
        for part in question.quoted:
            assert not ngrams(part, 13) & seen, question.id


def test_the_standard_library_really_has_runs_that_split_must_keep_apart(
    questions: list[Question],
) -> None:
    """Without this, the test above could pass on a split that does nothing."""
    seen = set().union(*(ngrams(part, 13) for q in questions[:200] for part in q.quoted))
    assert any(ngrams(part, 13) & seen for q in questions[200:] for part in q.quoted)


def test_split_is_stable_when_more_train_questions_are_asked_for(questions: list[Question]) -> None:
    few, heldout = split(questions, train=50, heldout=100)
    more, again = split(questions, train=500, heldout=100)
    assert again == heldout
    assert more[:50] == few


LONG = "one two three four five six seven eight nine ten eleven twelve thirteen"


def test_split_drops_a_shared_run_whatever_its_case_and_punctuation() -> None:
    held = made_up("a", f"Start. {LONG}. End.")
    shouted = made_up("b", f"Other start, {LONG.upper().replace(' ', ', ')}; other end.")
    free = made_up("c", LONG.removesuffix(" thirteen") + " and so on and so forth for ever.")
    assert split([held, shouted, free], train=1, heldout=1) == ([free], [held])
    with pytest.raises(UsageError):
        split([held, shouted, free], train=2, heldout=1)


def test_split_drops_a_shared_run_that_counts_signs_as_words() -> None:
    formula = "a + b + c + d = e - f - g"
    held, other = made_up("a", f"First: {formula} here."), made_up("b", f"Second: {formula} there.")
    free = made_up("c", "A formula: a + b + c = d - e - f.")
    assert split([held, other, free], train=1, heldout=1) == ([free], [held])


def test_split_drops_a_shared_signature_run_and_a_shared_short_paragraph() -> None:
    arguments = ", ".join(LONG.split())
    held = made_up("a", "A short paragraph.", f"m.a({arguments})")
    same_signature = made_up("b", "Something else.", f"m.b({arguments})")
    same_paragraph = made_up("c", "A  short paragraph")
    same_source = Question("m.a:when", "When? Hm.", "m.a", ("Hm.",))
    free = made_up("d", "Another one.")
    asked = [held, same_signature, same_paragraph, same_source, free]
    assert split(asked, train=1, heldout=1) == ([free], [held])


def test_words_of_the_templates_do_not_count() -> None:
    template = "Explain in plain words what the following thing does and when it is of use to me: "
    held, other = (
        Question(f"m.{name}:explain", template + quote, f"m.{name}", (quote,))
        for name, quote in (("a", "First thing."), ("b", "Second thing."))
    )
    assert split([held, other], train=1, heldout=1) == ([other], [held])


@pytest.mark.parametrize(("train", "heldout"), [(10**6, 10), (10, 10**6), (-1, 1), (1, -1)])
def test_impossible_split_is_refused_with_a_remedy(
    questions: list[Question], train: int, heldout: int
) -> None:
    with pytest.raises(UsageError) as refused:
        split(questions, train=train, heldout=heldout)
    assert str(train) in str(refused.value)
    assert str(heldout) in str(refused.value)
    assert refused.value.remedy


def test_small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken and what is passed over, on a library small enough to see through."""
    prose = "Do the thing that was asked for, in variant {} of many."
    (tmp_path / "good.py").write_text(
        f'''
def public(first, /, *, key=None) -> int:
    """{prose.format("one")}

    A second paragraph.
    """
def _private():
    """{prose.format("two")}"""
def twice():
    """{prose.format("one").replace("that was", "that    was")}"""
def listing():
    """public(x) -> the value of x, which is a thing of the same kind."""
def short():
    """Too short."""
def escaped():
    """Read until a newline such as '\\n' is found in the stream."""
class Thing:
    """{prose.format("three")}"""
    def method(self):
        """{prose.format("four")}"""
    @property
    def prop(self):
        """{prose.format("five")}"""
    def __len__(self):
        """{prose.format("six")}"""
if True:
    def conditional():
        """{prose.format("seven")}"""
        def nested():
            """{prose.format("eight")}"""
'''
    )
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "undecodable.py").write_bytes(b'"""\xff\xfe"""\n')
    (tmp_path / "nul.py").write_bytes(b"x = 1\0\n")
    for hidden in ("_private.py", "test/inner.py", "site-packages/inner.py", "pack/_mod.py"):
        path = tmp_path / hidden
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'def f():\n    """{prose.format("nine")}"""\n')
    (tmp_path / "pack" / "__init__.py").write_text(f'def g():\n    """{prose.format("ten")}"""\n')
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))  # noqa: ARG005
    found = {question.source: question for question in stdlib_questions(0)}
    assert set(found) == {
        "good.public",
        "good.Thing",
        "good.Thing.method",
        "good.Thing.prop",
        "good.conditional",
        "pack.g",
    }
    assert found["good.public"].quoted[0] == prose.format("one")
    # Only something that takes arguments is asked about its arguments.
    assert not found["good.Thing.method"].id.endswith(":arguments")
    assert len(found["good.Thing.prop"].quoted) == 1


@pytest.mark.parametrize(
    ("definition", "signature"),
    [
        ("def f(self, a, /, b=1, *, c: int = 2) -> str: ...", "m.f(a, /, b=1, *, c: int=2) -> str"),
        ("@staticmethod\ndef f(a, b): ...", "m.f(a, b)"),
        ("@classmethod\ndef f(cls, *args): ...", "m.f(*args)"),
        ("async def f(self, **kwargs): ...", "m.f(**kwargs)"),
    ],
)
def test_method_signatures(definition: str, signature: str) -> None:
    node = ast.parse(definition).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    arguments, returns = docstrings._call(node, "method")
    assert f"m.f({arguments}){returns}" == signature

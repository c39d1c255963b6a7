"""Files of facts: written, loaded, compared; and what the committed ones say of every release."""

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from truetap.harness.errors import CheckFailed, CouldNotRun, IntegrityError, UsageError
from truetap.harness.surface import facts, failures, package_index, replies, wheel
from truetap.harness.surface.wheel import Source

NAMES = """
0.8.5 0.9.0 0.9.0.1 0.9.1 0.9.2 0.10.0 0.10.1 0.10.1.1 0.10.2 0.11.0 0.11.1 0.11.2 0.12.0 0.13.0
0.14.0 0.14.1 0.15.0 0.15.1 0.16.0 0.17.0 0.17.1 0.18.0 0.18.1 0.19.0 0.19.1 0.20.0 0.20.1 0.20.2
0.21.0 0.22.0 0.22.1 0.23.0 0.24.0 0.25.0 0.25.1 0.26.0 0.27.0 0.27.1 0.28.0 0.29.0 0.30.0 0.31.0
0.32.0 0.33.0
"""
RELEASES = NAMES.split()


def example(version: str, rank_0: str = "bare", **more: Any) -> dict[str, Any]:
    found = {
        "format": facts.FORMAT,
        "engine": "vllm",
        "version": version,
        "wheel": {"file": f"vllm-{version}.whl", "sha256": "0" * 64},
        "replies": {"mp": {"default": {"absent": "list_per_rank", "0": rank_0}}},
        "signatures": {"LLM": [{"name": "model", "default": None}]},
    }
    return found | more


def test_what_is_written_is_what_is_loaded(tmp_path: Path) -> None:
    made = example("0.11.1")
    file = facts.write(made, tmp_path / "new")
    assert file.name == "vllm-0.11.1.json"
    assert facts.load("0.11.1", tmp_path / "new") == made
    assert facts.versions(tmp_path / "new") == ["0.11.1"]
    text = file.read_text()
    assert text.endswith("}\n")
    assert text == json.dumps(made, sort_keys=True, indent=1) + "\n"
    # The order in which facts were found must not show.
    assert facts.write(dict(reversed(made.items())), tmp_path / "again").read_text() == text
    assert [path.name for path in (tmp_path / "new").iterdir()] == [file.name]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CouldNotRun, match="could not be written"):
        facts.write(example("0.11.1"), tmp_path / "file")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "truetap/surface/2", "version": "0.11.1"}', "{"]
)
def test_a_damaged_file_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "vllm-0.11.1.json").write_text(text)
    with pytest.raises(IntegrityError, match=r"vllm-0\.11\.1\.json"):
        facts.load("0.11.1", tmp_path)


def test_a_file_under_another_name_is_refused(tmp_path: Path) -> None:
    facts.write(example("0.11.1"), tmp_path).rename(tmp_path / "vllm-0.11.0.json")
    with pytest.raises(IntegrityError):
        facts.load("0.11.0", tmp_path)


def test_an_unknown_release_is_said_with_what_is_known(tmp_path: Path) -> None:
    facts.write(example("0.9.0"), tmp_path)
    facts.write(example("0.10.0"), tmp_path)
    with pytest.raises(UsageError) as caught:
        facts.load("0.11.1", tmp_path)
    assert "2 releases are known, 0.9.0 to 0.10.0" in caught.value.remedy


def test_every_kind_of_difference_is_one_line() -> None:
    committed, derived = example("0.11.1"), example("0.11.1")
    assert facts.differences(committed, derived) == []
    derived["replies"]["mp"]["default"]["0"] = "list_of_one_rank"
    del derived["replies"]["mp"]["default"]["absent"]
    derived["failures"] = {}
    derived["signatures"]["LLM"][0]["default"] = False
    del committed["wheel"]["file"]
    assert facts.differences(committed, derived) == [
        "failures: not committed, the wheel says {}",
        "replies.mp.default.0: committed bare, the wheel says list_of_one_rank",
        "replies.mp.default.absent: committed list_per_rank, the wheel says nothing of it",
        "signatures.LLM[0].default: committed null, the wheel says false",
        "wheel.file: not committed, the wheel says vllm-0.11.1.whl",
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [(None, {}), ({}, None), ([], None), ([1], [1, 2]), (1, True), ("1", 1), ({"a": 1}, [1])],
)
def test_values_that_python_might_take_for_equal_are_different(old: Any, new: Any) -> None:
    assert len(facts.differences({"x": old}, {"x": new})) == 1
    assert facts.differences({"x": new}, {"x": new}) == []


def test_lists_of_other_lengths_differ_by_their_items() -> None:
    assert facts.differences({"x": ["a", "b", "c"]}, {"x": ["a", "c", "d", {"e": 1}]}) == [
        "x: committed b, the wheel says nothing of it",
        "x: not committed, the wheel says d",
        'x: not committed, the wheel says {"e": 1}',
    ]
    assert facts.differences({"x": ["a", "b"]}, {"x": ["a", "b", "a"]}) == [
        'x: committed ["a", "b"], the wheel says ["a", "b", "a"]'
    ]
    assert len(facts.differences({"x": ["a", "b"]}, {"x": ["b", "a"]})) == 2


def test_tuples_become_lists_on_the_way_to_the_file() -> None:
    assert facts.differences({"x": [1, 2]}, {"x": (1, 2)}) == []


def test_a_table_joins_neighbours_that_answer_alike() -> None:
    calls = {
        "rank 0": ("replies", "mp", "default", "0"),
        "ray": ("replies", "ray", "default", "0"),
    }
    releases = [
        example("0.11.1"),
        example("0.9.0", "list_of_one_rank"),
        example("0.10.0", "list_of_one_rank"),
        example("0.12.0"),
        example("0.13.0", "list_of_one_rank"),
    ]
    table = facts.table(releases, calls)
    assert table.columns == [("0.9.0", "0.10.0"), ("0.11.1", "0.12.0"), ("0.13.0", "0.13.0")]
    assert table.rows == {
        "rank 0": ["list_of_one_rank", "bare", "list_of_one_rank"],
        "ray": ["-", "-", "-"],
    }


class Wheels:
    """In place of an index: made-up facts of some releases, and a folder of committed ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.derived: dict[str, dict[str, Any]] = {}

    def commit(self, made: Mapping[str, Any]) -> None:
        facts.write(made, self.folder)

    def fetch(self, version: str, **_: Any) -> Source:
        return Source(version, self.folder, self.derived[version]["wheel"])

    def derive(self, source: Source) -> dict[str, Any]:
        return self.derived[source.version]


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wheels]:
    wheels = Wheels(tmp_path / "committed")
    monkeypatch.setattr(facts, "committed", lambda: wheels.folder)
    monkeypatch.setattr(facts, "derive", wheels.derive)
    monkeypatch.setattr(wheel, "fetch", wheels.fetch)
    monkeypatch.setattr(package_index, "releases", lambda _: sorted(wheels.derived))
    for version in ("0.10.0", "0.11.0"):
        wheels.derived[version] = example(version, "list_of_one_rank")
        wheels.commit(wheels.derived[version])
    return wheels


@pytest.mark.usefixtures("wheels")
def test_facts_that_agree_pass_the_check() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=False)
    found = facts.run_surface(everything=True, check=True, console=console)
    assert [each["version"] for each in found] == ["0.10.0", "0.11.0"]
    assert "releases: 2 of 2" in shown.getvalue()


def test_the_check_lists_every_difference_of_every_release(wheels: Wheels) -> None:
    wheels.derived["0.10.0"] = example("0.10.0", "bare")
    wheels.derived["0.11.0"] = example("0.11.0", "list_of_one_rank", eagle3={})
    wheels.derived["0.12.0"] = example("0.12.0")
    with pytest.raises(CheckFailed) as caught:
        facts.run_surface(everything=True, check=True)
    assert str(caught.value).splitlines()[1:] == [
        "  vllm 0.10.0: replies.mp.default.0: committed list_of_one_rank, the wheel says bare",
        "  vllm 0.11.0: eagle3: not committed, the wheel says {}",
        "  vllm 0.12.0: no facts are committed",
    ]
    assert "3 differences" in str(caught.value)


def test_a_deleted_fact_and_a_deleted_file_fail_the_check(wheels: Wheels) -> None:
    damaged = example("0.10.0", "list_of_one_rank")
    del damaged["replies"]["mp"]["default"]["0"]
    wheels.commit(damaged)
    (wheels.folder / "vllm-0.11.0.json").unlink()
    with pytest.raises(CheckFailed) as caught:
        facts.run_surface(everything=True, check=True)
    assert str(caught.value).splitlines()[1:] == [
        "  vllm 0.10.0: replies.mp.default.0: not committed, the wheel says list_of_one_rank",
        "  vllm 0.11.0: no facts are committed",
    ]


def test_a_committed_release_that_the_index_lost_is_checked_too(wheels: Wheels) -> None:
    wheels.commit(example("0.9.0"))
    wheels.derived["0.9.0"] = example("0.9.0", "list_of_one_rank")
    listed = {name: made for name, made in wheels.derived.items() if name != "0.9.0"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package_index, "releases", lambda _: list(listed))
        with pytest.raises(CheckFailed, match=r"0\.9\.0: replies"):
            facts.run_surface(everything=True, check=True)


def test_a_new_release_is_written_where_it_is_asked_for(wheels: Wheels, tmp_path: Path) -> None:
    wheels.derived["0.12.0"] = example("0.12.0")
    assert facts.run_surface(["0.12.0"], into=tmp_path / "new") == [example("0.12.0")]
    assert facts.versions(tmp_path / "new") == ["0.12.0"]
    assert "0.12.0" not in facts.versions(wheels.folder)


@pytest.mark.parametrize("request_", [{}, {"wanted": ["0.11.0"], "everything": True}])
def test_a_request_for_nothing_or_for_two_things_is_refused(request_: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        facts.run_surface(**request_)


# What is committed. The expectations are written by hand from what is known of the releases.


@pytest.fixture(scope="module")
def known() -> dict[str, dict[str, Any]]:
    return {version: facts.load(version) for version in facts.versions()}


def test_every_final_release_is_committed(known: dict[str, dict[str, Any]]) -> None:
    assert list(known) == RELEASES


def test_committed_files_are_as_write_makes_them(tmp_path: Path) -> None:
    for version in facts.versions():
        text = facts.committed().joinpath(f"vllm-{version}.json").read_text()
        assert facts.write(json.loads(text), tmp_path).read_text() == text


def test_committed_files_have_every_section_and_every_cell(known: dict[str, Any]) -> None:
    head = {"format", "engine", "version", "wheel"}
    for version, each in known.items():
        assert set(each) == head | set(facts.SECTIONS), version
        assert each["wheel"]["file"].startswith(f"vllm-{version}-")
        assert len(each["wheel"]["sha256"]) == 64
        for modes in each["replies"].values():
            assert set(modes) | {"non_block_io_pool"} == set(replies.MODES), version
            assert all(set(ranks) == set(replies.RANKS) for ranks in modes.values()), version
        assert set(each["failures"]) == set(each["replies"])


SPANS = [
    # (executor, mode, rank) -> the last release of each answer
    (("mp", "default", "absent"), [("list_per_rank", "0.33.0")]),
    (
        ("mp", "default", "0"),
        [("raises_TypeError", "0.8.5"), ("list_of_one_rank", "0.11.0"), ("bare", "0.33.0")],
    ),
    (
        ("mp", "default", "-1"),
        [("raises_TypeError", "0.8.5"), ("never_replies", "0.33.0")],
    ),
    (
        ("mp", "non_block", "absent"),
        [
            ("raises_TypeError", "0.8.5"),
            ("raises_AttributeError", "0.10.1.1"),
            ("raises_RuntimeError", "0.11.0"),
            ("future_of_list", "0.33.0"),
        ],
    ),
    (
        ("mp", "non_block_io_pool", "1"),
        [(None, "0.8.5"), ("list_of_one_future", "0.11.0"), ("future_of_bare", "0.33.0")],
    ),
    (
        ("mp", "rank0_reply_only", "absent"),
        [("list_of_one_rank", "0.8.5"), ("raises_TypeError", "0.33.0")],
    ),
    (
        ("mp", "aggregator", "1"),
        [("raises_TypeError", "0.11.0"), ("aggregate", "0.33.0")],
    ),
    (("uni", "default", "absent"), [("list_of_one_local", "0.33.0")]),
    (("uni", "default", "0"), [("raises_TypeError", "0.33.0")]),
    (
        ("uni", "single_value", "absent"),
        [("raises_TypeError", "0.11.0"), ("bare", "0.33.0")],
    ),
    (
        ("external_launcher", "non_block", "absent"),
        [
            ("raises_TypeError", "0.10.2"),
            ("list_of_one_future", "0.11.0"),
            ("future_of_list_of_one", "0.33.0"),
        ],
    ),
    (("ray", "default", "absent"), [("list_per_rank", "0.32.0"), (None, "0.33.0")]),
    (("ray_v2", "default", "0"), [(None, "0.19.1"), ("bare", "0.33.0")]),
]


@pytest.mark.parametrize(("cell", "spans"), SPANS)
def test_committed_replies_change_where_the_releases_did(
    known: dict[str, Any], cell: tuple[str, str, str], spans: list[tuple[str | None, str]]
) -> None:
    executor, mode, rank = cell
    expected: list[str | None] = []
    for word, last in spans:
        expected += [word] * (RELEASES.index(last) + 1 - len(expected))
    found = [
        known[version]["replies"].get(executor, {}).get(mode, {}).get(rank) for version in RELEASES
    ]
    assert found == expected


@pytest.mark.parametrize(
    ("executor", "event", "before", "first", "after"),
    [
        ("mp", "negative_timeout", "passed_on", "0.27.0", "clamped"),
        ("mp", "unpicklable_reply", "kills_the_worker_loop", "0.24.0", "reported"),
        ("uni", "async_output", "unresolved", "0.24.0", "resolved"),
        ("ray", "timeout", "ignored", "0.11.1", "raises_GetTimeoutError"),
    ],
)
def test_committed_failures_change_where_the_releases_did(
    known: dict[str, Any], executor: str, event: str, before: str, first: str, after: str
) -> None:
    for index, version in enumerate(RELEASES):
        found = known[version]["failures"].get(executor, {}).get(event)
        expected = after if index >= RELEASES.index(first) else before
        assert found in {expected, None}, version


def test_stale_replies_are_in_every_release(known: dict[str, Any]) -> None:
    for version, each in known.items():
        mp = each["failures"]["mp"]
        assert mp["after_rank0_raises"]["next"] == "stale_rank_1", version
        assert mp["after_late_reply"]["next"] == "stale_rank_1", version
        assert mp["silent_rank_raises"] == "not_reported", version
        tolerant = mp["after_rank0_raises_fault_tolerant"]
        assert (tolerant is not None) == (version == "0.33.0")


def test_no_client_reaches_the_modes_of_an_executor(known: dict[str, Any]) -> None:
    for each in known.values():
        assert [client["reaches"] for client in each["clients"].values()] == [[]] * 4


def test_the_committed_words_are_the_documented_ones(known: dict[str, Any]) -> None:
    shapes = {
        shape
        for each in known.values()
        for modes in each["replies"].values()
        for ranks in modes.values()
        for shape in ranks.values()
    }
    told = replies.__doc__ or ""
    for shape in shapes:
        raised = shape.removeprefix("future_").startswith("raises_")
        assert raised or f"``{shape}``" in told, shape
    events = {
        name for each in known.values() for event in each["failures"].values() for name in event
    }
    for name in events:
        assert f"``{name}``" in (failures.__doc__ or ""), name

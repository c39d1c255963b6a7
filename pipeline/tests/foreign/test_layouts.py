"""Each producer's layout: right data passes, and every fault is named, with its files."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from truetap.harness.errors import UsageError
from truetap.pipeline.foreign import judgement

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

pytestmark = pytest.mark.torch

NAMES = ("truetap", "speculators", "speculators-0.4", "specforge", "modelopt")
FILE = {
    "truetap": "shard-00000.safetensors#qN",
    "speculators": "hs_N.safetensors",
    "speculators-0.4": "data_N.pt",
    "specforge": "data_N.ckpt",
    "modelopt": "conversation-N.pt",
}


@pytest.fixture
def good(right: list[Any], layouts: dict[str, Any]) -> Callable[[str], list[Any]]:
    """Right data for a layout: the last slot before or after the norm, as its trainer wants it."""

    def make(layout: str) -> list[Any]:
        return [replace(kept, last_normed=layouts[layout].last_normed) for kept in right]

    return make


@pytest.mark.parametrize("layout", NAMES)
def test_right_data_passes_and_is_described(
    layout: str, good: Callable[[str], list[Any]], audited: Callable[..., Any]
) -> None:
    result = audited(layout, good(layout), boundaries=(2, 6, 9, 12))
    report = result.report
    assert (report["verdict"], report["exit_code"], result.errors) == ("right", 0, {})
    norm = " after the final norm" if layout in ("specforge", "modelopt") else ""
    assert report["says"] == f"slots: boundary 2, 6, 9, 12{norm}"
    assert report["sample"]["compared"] == 8
    assert report["loss_mask"]["judged"] == 8
    judgement.print_report(report, result.console)
    assert "verdict: right" in result.console.file.getvalue()


def shifted(states: torch.Tensor) -> torch.Tensor:
    return states.roll(1, dims=0)


@pytest.mark.parametrize("layout", NAMES)
def test_wrong_copies_are_named_each_for_what_it_is(
    layout: str, good: Callable[[str], list[Any]], audited: Callable[..., Any]
) -> None:
    data = good(layout)
    data[1] = replace(data[1], boundaries=(3, 7, 10, 12))
    data[2] = replace(data[2], last_normed=not data[2].last_normed)
    data[4] = data[4].changed(shifted)
    data[5] = data[5].changed(lambda states: states * 0)
    result = audited(layout, data)
    assert result.report["exit_code"] == 1
    one, two, four, five = (FILE[layout].replace("N", str(n)) for n in (1, 2, 4, 5))
    if layout == "truetap":
        four, five = (name.replace("00000", "00003") for name in (four, five))
    expected = {"wrong_boundary": [one], "post_norm": [two], "shifted": [four], "zeros": [five]}
    if data[0].last_normed:  # the other way round: plain boundary 12, where the rest are normed
        expected |= {"wrong_boundary": [one, two]}
        del expected["post_norm"]
    assert {code: sorted(files) for code, files in result.errors.items()} == expected
    assert "slot 0 holds boundary 3, in most files boundary 2" in result.told("wrong_boundary")
    assert "slot 0 holds boundary 2 of the token before" in result.told("shifted")
    assert "all states are zero" in result.told("zeros")
    if not data[0].last_normed:
        assert "slot 3 holds boundary 12 after the final norm" in result.told("post_norm")


@pytest.mark.parametrize("layout", NAMES)
def test_a_set_that_is_wrong_throughout(
    layout: str, good: Callable[[str], list[Any]], audited: Callable[..., Any]
) -> None:
    data = [replace(kept, boundaries=(1, 5, 8, 12)) for kept in good(layout)]
    result = audited(layout, data, boundaries=(2, 6, 9, 12))
    assert result.report["says"].startswith("slots: boundary 1, 5, 8, 12")
    assert set(result.errors) == {"wrong_boundary"}
    assert "--boundaries says 2, 6, 9, 12; the slots hold 1, 5, 8, 12" in result.told(
        "wrong_boundary"
    )


@pytest.mark.parametrize("layout", NAMES)
def test_the_norm_of_a_whole_set(
    layout: str, good: Callable[[str], list[Any]], audited: Callable[..., Any]
) -> None:
    data = [replace(kept, last_normed=not kept.last_normed) for kept in good(layout)]
    result = audited(layout, data)
    expected = "pre_norm" if layout in ("specforge", "modelopt") else "post_norm"
    assert set(result.errors) == {expected}
    where = "before" if expected == "pre_norm" else "after"
    assert f"the last slot holds boundary 12 {where} the final norm" in result.told(expected)


def test_a_set_shifted_throughout(right: list[Any], audited: Callable[..., Any]) -> None:
    result = audited("speculators", [kept.changed(shifted) for kept in right])
    assert set(result.errors) == {"shifted"}
    assert "slot 3 holds boundary 12 of the token before" in result.told("shifted")


def test_a_set_of_zeros_is_wrong_though_nothing_can_be_compared(
    right: list[Any], audited: Callable[..., Any]
) -> None:
    result = audited("speculators", [kept.changed(lambda s: s * 0) for kept in right])
    assert list(result.errors) == ["zeros"]
    assert len(result.errors["zeros"]) == 8
    assert result.report["exit_code"] == 1


def test_a_missing_residual_and_a_last_slot_that_is_not_the_last(
    right: list[Any], audited: Callable[..., Any]
) -> None:
    def delta(kept: Any) -> Any:
        states = kept.slots
        states[:, 1] = kept.every[:, 6] - kept.every[:, 5]
        states[:, 3] = kept.every[:, 11]
        return replace(kept, states=states)

    result = audited("speculators", [delta(kept) for kept in right])
    assert set(result.errors) == {"residual", "wrong_boundary"}
    assert "slot 1 holds the output of block 6 without the residual" in result.told("residual")
    assert "holds boundary 11; training takes it for boundary 12" in result.told("wrong_boundary")


Change = tuple[str, str, "Callable[[list[Any], Any], Any]"]
VALUES: dict[int, Change] = {
    0: ("nan", "1 of 32 rows", lambda _, k: k.changed(lambda s: _set(s, 4, float("nan")))),
    1: ("zeros", "slot 1 is all zero", lambda _, k: k.changed(lambda s: _zero_slot(s, 1))),
    3: ("rows", "35 rows for 38 tokens", lambda _, k: k.changed(lambda s: s[:-3])),
    4: (
        "shifted",
        "boundary 2 of its own tokens, 3 rows later",
        lambda _, k: k.changed(lambda s: s.roll(-3, dims=0)),
    ),
    6: (
        "other_request",
        "boundary 2 of hidden_states/hs_7.safetensors",
        lambda d, k: replace(k, states=d[7].slots[: len(k.token_ids)].contiguous()),
    ),
    5: ("some_rows", "7 of 41 rows of slot 0", lambda _, k: k.changed(lambda s: _tail(s, 7))),
}
SMALL: dict[int, Change] = {
    0: ("zeros", "2 rows have zero states, the first is row 3", lambda _, k: k.changed(_two_zero)),
    1: ("equal_rows", "row 9 equals the row before", lambda _, k: k.changed(_repeat)),
    2: (
        "equal_slots",
        "slots 0 and 1 are equal",
        lambda _, k: replace(k, boundaries=(2, 2, 9, 12)),
    ),
    3: (
        "vocabulary",
        "token id 9999 is not in the verifier's vocabulary of 512",
        lambda _, k: replace(k, token_ids=[*k.token_ids[:-1], 9999]),
    ),
    4: ("mask_other", "and none of the assistant's", lambda _, k: replace(k, mask=_users(k))),
    5: ("mask_missing", "misses 3 of the 20 tokens", lambda _, k: replace(k, mask=_cut(k))),
    6: ("mask_empty", "trains nothing", lambda _, k: replace(k, mask=[0] * len(k.mask))),
    7: ("mask_whole", "every token", lambda _, k: replace(k, mask=[1] * len(k.mask))),
}


def _set(states: torch.Tensor, row: int, value: float) -> torch.Tensor:
    states = states.clone()
    states[row] = value
    return states


def _two_zero(states: torch.Tensor) -> torch.Tensor:
    return _set(_set(states, 3, 0), 5, 0)


def _zero_slot(states: torch.Tensor, slot: int) -> torch.Tensor:
    states = states.clone()
    states[:, slot] = 0
    return states


def _repeat(states: torch.Tensor) -> torch.Tensor:
    states = states.clone()
    states[9] = states[8]
    return states


def _tail(states: torch.Tensor, count: int) -> torch.Tensor:
    """The last rows are as long as they were and point elsewhere."""
    states = states.clone()
    states[-count:] = states[-count:].flip(-1)
    return states


def _users(kept: Any) -> list[int]:
    return [int(3 <= i < 9) for i in range(len(kept.mask))]


def _cut(kept: Any) -> list[int]:
    return [*kept.mask[:-5], 0, 0, 0, 0, 0]


@pytest.mark.parametrize("changes", [VALUES, SMALL], ids=["values", "small"])
def test_other_faults_are_named_with_their_files(
    changes: dict[int, Change], right: list[Any], audited: Callable[..., Any]
) -> None:
    data = [changes[i][2](right, kept) if i in changes else kept for i, kept in enumerate(right)]
    result = audited("speculators", data)
    expected = {code: [f"hs_{i}.safetensors"] for i, (code, _, _) in changes.items()}
    if changes is SMALL:  # seen by value too
        expected |= {"wrong_boundary": ["hs_2.safetensors"], "some_rows": ["hs_1.safetensors"]}
    assert result.errors == expected
    for code, text, _ in changes.values():
        assert text in result.told(code), result.told(code)


def test_files_that_share_states_are_compared_whatever_was_drawn(
    right: list[Any], audited: Callable[..., Any]
) -> None:
    data = list(right)
    data[2] = replace(data[2], states=data[5].slots[: len(data[2].token_ids)].contiguous())
    result = audited("speculators", data, sample=2, seed=1)
    assert result.errors == {"other_request": ["hs_2.safetensors"]}, "hs_5 is right"
    names = result.report["sample"]["names"]
    assert {"hidden_states/hs_2.safetensors", "hidden_states/hs_5.safetensors"} <= set(names)
    assert len(names) <= 4


def test_fp8_states_are_told_apart_and_their_precision_is_mentioned(
    right: list[Any], audited: Callable[..., Any]
) -> None:
    result = audited("speculators", right, how={"fp8": True})
    assert result.report["exit_code"] == 0, result.report["findings"]
    assert result.report["says"] == "slots: boundary 2, 6, 9, 12"
    assert "float8_e4m3fn" in result.told("dtype")


def test_values_that_were_in_a_coarser_format(
    right: list[Any], audited: Callable[..., Any]
) -> None:
    def stored(states: torch.Tensor) -> torch.Tensor:
        import torch

        return states.to(torch.float32)

    result = audited("speculators", [kept.changed(stored) for kept in right])
    assert result.report["exit_code"] == 0
    assert "coarser format than float32" in result.told("coarse")


def test_packed_specforge_files(
    good: Callable[[str], list[Any]], audited: Callable[..., Any]
) -> None:
    result = audited("specforge", good("specforge"), how={"packed": True})
    assert result.report["verdict"] == "right"


def test_model_optimizer_without_masks(
    good: Callable[[str], list[Any]], audited: Callable[..., Any]
) -> None:
    result = audited("modelopt", good("modelopt"), how={"masks": False})
    assert result.report["verdict"] == "right"
    assert result.report["loss_mask"]["says"].startswith("not judged")


def test_files_that_were_prepared_anew_in_another_order(
    right: list[Any], audited: Callable[..., Any], tmp_path: Path
) -> None:
    audited("speculators", right)
    states = tmp_path / "data" / "hidden_states"
    (states / "hs_1.safetensors").rename(states / "x")
    (states / "hs_4.safetensors").rename(states / "hs_1.safetensors")
    (states / "x").rename(states / "hs_9.safetensors")
    result = audited("speculators", None)
    assert result.errors == {"row": ["hs_1.safetensors", "hs_9.safetensors"]}
    assert "not those of row 1 of the dataset, but of row 4" in result.told("row")
    assert "the dataset has no row 9" in result.told("row")


def test_a_damaged_shard_of_ours_is_an_integrity_failure(
    right: list[Any], audited: Callable[..., Any], tmp_path: Path
) -> None:
    audited("truetap", right)
    shard = tmp_path / "data" / "shard-00003.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-9] ^= 1
    shard.write_bytes(raw)
    result = audited("truetap", None)
    assert result.errors == {"digest": ["shard-00003.safetensors"]}
    assert (result.report["verdict"], result.report["exit_code"]) == ("corrupt", 4)


def test_another_verifier_s_width_is_one_finding(
    right: list[Any], audited: Callable[..., Any]
) -> None:
    result = audited("specforge", [kept.changed(lambda s: s[..., :24]) for kept in right])
    assert list(result.errors) == ["width"]
    assert "24 wide, the verifier's are 32" in result.told("width")


def test_the_wrong_producer_is_named(right: list[Any], audited: Callable[..., Any]) -> None:
    audited("specforge", right)
    with pytest.raises(UsageError, match="has no files of speculators") as refused:
        audited("speculators", None)
    assert refused.value.remedy == "--producer specforge finds some there"


def test_a_producer_with_files_of_the_same_name_is_told_by_their_keys(
    right: list[Any], audited: Callable[..., Any]
) -> None:
    audited("speculators-0.4", right)
    result = audited("modelopt", None)
    assert "these are the keys of --producer speculators" in result.told("keys")


def test_the_sample_is_drawn_by_the_seed(right: list[Any], audited: Callable[..., Any]) -> None:
    first = audited("modelopt", right, sample=3, seed=1).report["sample"]
    again = audited("modelopt", None, sample=3, seed=1).report["sample"]
    other = audited("modelopt", None, sample=3, seed=2).report["sample"]
    assert first == again
    assert len(first["names"]) == 3
    assert first["names"] != other["names"]

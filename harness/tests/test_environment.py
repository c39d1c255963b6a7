"""Facts of a running engine: all its ranks must tell the same."""

from __future__ import annotations

from typing import Any

import pytest

from truetap.harness import environment
from truetap.harness.errors import CheckFailed

FACTS = {"dtype": "bfloat16", "world_size": 2, "device": None}


def test_facts_that_all_ranks_share_are_those_of_the_engine() -> None:
    assert environment.agreed([FACTS, dict(FACTS)]) == FACTS


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (FACTS | {"dtype": "float16"}, "dtype"),
        ({"dtype": "bfloat16", "world_size": 2}, "device"),
        (FACTS | {"more": None}, "more"),
    ],
)
def test_a_rank_that_differs_is_named_with_what_differs(other: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckFailed, match=f"ranks 0 and 1 differ in {named}$"):
        environment.agreed([FACTS, other])


def test_a_facts_name_is_shown_without_what_steers_a_terminal() -> None:
    for name in ("\x1b[2J", "\ud800"):
        (told,) = environment.differences({name: 1, "torch": 2}, {"torch": 2})
        assert told.isprintable()
        assert repr(name) in told

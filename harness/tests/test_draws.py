"""Hypothesis profiles: how much is drawn, here and in the suite, is what ``--draws`` says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truetap.conformance import strategies


def drawn() -> list[int]:
    """Return what the present profile draws."""
    found = []

    @given(st.integers(0, 10**6))
    def note(number: int) -> None:
        found.append(number)

    note()
    return found


def test_these_tests_draw_what_was_asked_for(pytestconfig: pytest.Config) -> None:
    asked = pytestconfig.getoption("draws")
    assert len(drawn()) == settings().max_examples == 10 * strategies.DRAWS[asked]


@pytest.mark.parametrize("name", strategies.DRAWS)
def test_a_profile_draws_in_proportion(name: str) -> None:
    strategies.load_draws(name)
    assert settings().max_examples == strategies.DRAWS[name]
    assert strategies.examples(150) == 10 * strategies.DRAWS[name]
    assert strategies.examples(1) >= 1
    assert settings().derandomize == (name != "nightly")


def test_a_larger_profile_sees_more() -> None:
    strategies.load_draws("dev")
    few = drawn()
    strategies.load_draws("gpu")
    assert len(set(few)) <= strategies.DRAWS["dev"] < len(set(drawn()))

"""Failpoints: their names, their positions in the code, and their silence without a listener."""

from __future__ import annotations

import re

import pytest

from millpond.statestore.failpoint import FAILPOINTS, listening, reach
from tests import tidy

_PLACED = re.compile(r'(?:\breach|_failpoint)\("([a-z_.]+)"\)')


def test_the_list_and_the_code_agree() -> None:
    """Every failpoint of the list is in the code, and the code has no other."""
    placed = [
        name
        for source in tidy.repository_sources()
        if source.is_package_code and source.room != "testing"
        for name in _PLACED.findall(source.text)
    ]

    assert set(placed) == set(FAILPOINTS)


def test_a_listener_hears_until_the_end_of_its_block() -> None:
    """Who listens is called with each name that is reached, and not any more afterwards."""
    heard: list[str] = []
    with listening(heard.append):
        reach("commit.done")
        with listening(lambda _: None):
            reach("compaction.read")
        reach("lease.taken")
    reach("commit.done")

    assert heard == ["commit.done", "lease.taken"]


def test_what_a_listener_raises_is_raised_at_the_place() -> None:
    """A listener can end the process that it listens to."""

    def die(name: str) -> None:
        raise KeyboardInterrupt(name)

    with listening(die), pytest.raises(KeyboardInterrupt, match=r"lease\.taken"):
        reach("lease.taken")
    reach("lease.taken")

"""Failpoints: the list, their places in the code, and listeners."""

from __future__ import annotations

import re

import pytest

from millpond.statestore.failpoint import FAILPOINTS, listening, reach
from tests import tidy

_PLACED = re.compile(r'(?:\breach|_failpoint)\("([a-z_.]+)"\)')


def test_list_and_code_agree() -> None:
    placed = [
        name
        for source in tidy.repository_sources()
        if source.is_package_code and source.room != "testing"
        for name in _PLACED.findall(source.text)
    ]

    assert set(placed) == set(FAILPOINTS)


def test_listener_ends_with_its_block() -> None:
    heard: list[str] = []
    with listening(heard.append):
        reach("commit.done")
        with listening(lambda _: None):
            reach("compaction.read")
        reach("lease.taken")
    reach("commit.done")

    assert heard == ["commit.done", "lease.taken"]


def test_error_of_listener_is_raised_at_failpoint() -> None:
    """A listener can end the process."""

    def die(name: str) -> None:
        raise KeyboardInterrupt(name)

    with listening(die), pytest.raises(KeyboardInterrupt, match=r"lease\.taken"):
        reach("lease.taken")
    reach("lease.taken")

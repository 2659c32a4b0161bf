"""The pause of Python's cycle collector."""

from __future__ import annotations

import gc

import pytest

from millpond.statestore.system import collector_paused


def test_the_collector_works_again_after_the_outer_pause() -> None:
    """A pause within another one does not end it, and neither does an error within."""

    @collector_paused()
    def fail() -> None:
        raise KeyError

    with collector_paused():
        with pytest.raises(KeyError):
            fail()

        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_function_can_be_a_pause() -> None:
    """Each of its calls is one."""

    @collector_paused()
    def is_collected() -> bool:
        return bool(gc.isenabled())

    assert [is_collected(), is_collected(), gc.isenabled()] == [False, False, True]

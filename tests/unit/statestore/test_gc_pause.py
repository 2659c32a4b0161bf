"""The pause of Python's cycle collector."""

from __future__ import annotations

import gc

import pytest

from millpond.statestore.system import collector_paused


def test_collector_resumes_after_outer_pause() -> None:
    """An error within an inner pause does not resume it."""

    @collector_paused()
    def fail() -> None:
        raise KeyError

    with collector_paused():
        with pytest.raises(KeyError):
            fail()

        assert not gc.isenabled()
    assert gc.isenabled()


def test_pause_can_decorate_function() -> None:
    @collector_paused()
    def is_collected() -> bool:
        return bool(gc.isenabled())

    assert [is_collected(), is_collected(), gc.isenabled()] == [False, False, True]

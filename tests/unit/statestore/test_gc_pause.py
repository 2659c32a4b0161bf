"""Python's cycle collector, paused and slowed."""

from __future__ import annotations

import gc
import weakref
from threading import Event, Thread

import pytest

from millpond.statestore.system import collector_paused, collector_slowed


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


class TestSlowCollector:
    def test_thresholds_return_after_the_last_thread(self) -> None:
        before = gc.get_threshold()
        inside, leave = Event(), Event()

        def hold() -> None:
            with collector_slowed():
                inside.set()
                leave.wait(60)

        thread = Thread(target=hold)
        with collector_slowed():
            thread.start()
            assert inside.wait(60)
        during = gc.get_threshold()
        leave.set()
        thread.join(60)

        assert (during[0], gc.get_threshold()) == (10_000, before)

    def test_cycles_are_collected(self) -> None:
        with collector_slowed():
            made = [_cycle() for _ in range(100_000)]
            alive = sum(weak() is not None for weak in made)

        assert alive < 20_000

    @pytest.mark.parametrize("young", [0, 50_000])
    def test_thresholds_of_the_program_stay(self, young: int) -> None:
        before = gc.get_threshold()
        gc.set_threshold(young, *before[1:])
        try:
            with collector_slowed():
                assert gc.get_threshold() == (young, *before[1:])
            assert gc.get_threshold() == (young, *before[1:])
        finally:
            gc.set_threshold(*before)


class _Part:
    def __init__(self) -> None:
        self.itself = self


def _cycle() -> weakref.ref[_Part]:
    return weakref.ref(_Part())

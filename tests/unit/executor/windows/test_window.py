"""Windows as half-open intervals of event time."""

from __future__ import annotations

from millpond.executor.time.instants import INSTANT_MAX_US
from millpond.executor.windows.window import GLOBAL_WINDOW, Window


def test_last_instant_is_a_microsecond_before_the_end() -> None:
    assert Window(0, 10).last_at == 9


def test_touching_windows_do_not_overlap() -> None:
    assert not Window(0, 10).overlaps(Window(10, 20))
    assert Window(0, 11).overlaps(Window(10, 20))


def test_span_covers_both_windows() -> None:
    assert Window(5, 20).span(Window(0, 7)) == Window(0, 20)


def test_global_window_ends_at_the_last_instant_of_records() -> None:
    assert GLOBAL_WINDOW.is_global
    assert GLOBAL_WINDOW.last_at == INSTANT_MAX_US

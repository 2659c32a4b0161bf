"""Windows: half-open intervals of event time."""

from __future__ import annotations

from millpond.executor.time.instants import INSTANT_MAX_US
from millpond.executor.windows.window import GLOBAL_WINDOW, Window


def test_a_window_ends_before_its_end() -> None:
    """The last instant of a window is a microsecond before its end."""
    assert Window(0, 10).last_at == 9


def test_touching_windows_do_not_overlap() -> None:
    """Windows overlap only where they share an instant."""
    assert not Window(0, 10).overlaps(Window(10, 20))
    assert Window(0, 11).overlaps(Window(10, 20))


def test_the_span_holds_both() -> None:
    """The span of two windows starts with the earlier and ends with the later."""
    assert Window(5, 20).span(Window(0, 7)) == Window(0, 20)


def test_the_global_window_ends_where_records_end() -> None:
    """The last instant of the global window is the last that a record can carry."""
    assert GLOBAL_WINDOW.is_global
    assert GLOBAL_WINDOW.last_at == INSTANT_MAX_US

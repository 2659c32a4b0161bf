"""Assignment, merging and arguments of window functions."""

from __future__ import annotations

import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.windows.window import GLOBAL_WINDOW, Element, Merge, Window, WindowFn, check_merges
from millpond.executor.windows.window_fns import (
    CalendarWindows,
    FixedWindows,
    GlobalWindows,
    Sessions,
    SlidingWindows,
    UnalignedFixedWindows,
)
from millpond.statestore.errors import InvalidError

_FUNCTIONS = [
    GlobalWindows(),
    FixedWindows("10us", "3us"),
    UnalignedFixedWindows("10us"),
    SlidingWindows("10us", "3us"),
    Sessions("10us"),
    CalendarWindows("days", zone="Europe/Berlin"),
    CalendarWindows("weeks", 2),
    CalendarWindows("months", 3),
    CalendarWindows("years"),
]

_TIMES = st.integers(-(10**15), 10**16)


def _at(at: int, key: str = "k") -> Element:
    return Element(value=None, at=at, key=key)


@pytest.mark.parametrize("window_fn", _FUNCTIONS, ids=repr)
@given(at=_TIMES)
def test_element_is_inside_its_windows(window_fn: WindowFn, at: int) -> None:
    windows = window_fn.assign(_at(at))

    assert windows
    assert all(window.start <= at < window.end for window in windows)


@pytest.mark.parametrize("window_fn", _FUNCTIONS, ids=repr)
def test_window_function_survives_pickling(window_fn: WindowFn) -> None:
    assert pickle.loads(pickle.dumps(window_fn)).assign(_at(12_345)) == window_fn.assign(_at(12_345))


@given(at=_TIMES)
def test_sliding_windows_of_four_periods_contain_each_instant_four_times(at: int) -> None:
    assert len(SlidingWindows("40us", "10us").assign(_at(at))) == 4


@given(st.integers(-500, 500), st.integers(1, 50), st.integers(1, 60), st.integers(-100, 100))
def test_sliding_windows_equal_a_search_over_all_starts(at: int, size: int, period: int, offset: int) -> None:
    """A period longer than the size leaves gaps."""
    starts = [start for start in range(at - size + 1, at + 1) if (start - offset) % period == 0]

    assert SlidingWindows(f"{size}us", f"{period}us", f"{offset}us").assign(_at(at)) == tuple(
        Window(start, start + size) for start in starts
    )


def test_unaligned_windows_differ_from_key_to_key() -> None:
    """A key's phase never changes."""
    window_fn = UnalignedFixedWindows("1s")
    starts = {window_fn.assign(_at(0, f"key{number}"))[0].start for number in range(100)}

    assert len(starts) > 90
    assert window_fn.assign(_at(0, "a")) == UnalignedFixedWindows("1s").assign(_at(0, "a"))


def test_global_windows_assign_one_window() -> None:
    assert GlobalWindows().assign(_at(-5)) == (GLOBAL_WINDOW,)


def test_calendar_day_follows_daylight_saving_time() -> None:
    """Berlin's days have 23 and 25 hours when summer time begins and ends."""
    window_fn = CalendarWindows("days", zone="Europe/Berlin")
    hours = [
        (window.end - window.start) // 3_600_000_000
        for window in (window_fn.assign(_at(at))[0] for at in (1_774_742_400_000_000, 1_792_886_400_000_000))
    ]

    assert hours == [23, 25]


@given(times=st.lists(st.integers(0, 200), min_size=1, max_size=20))
def test_merged_sessions_do_not_overlap(times: list[int]) -> None:
    sessions = Sessions("10us")
    windows = sorted({sessions.assign(_at(at))[0] for at in times})
    merges = check_merges(windows, sessions.merge(windows))
    left = set(windows) - {source for merge in merges for source in merge.sources}
    left |= {merge.result for merge in merges}

    ordered = sorted(left)
    assert all(first.end <= second.start for first, second in itertools.pairwise(ordered))


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedWindows(0),
        lambda: SlidingWindows("10us", 0),
        lambda: SlidingWindows("1s", "1us"),
        lambda: Sessions("-1us"),
        lambda: UnalignedFixedWindows("0s"),
        lambda: CalendarWindows("days", 0),
        lambda: CalendarWindows("fortnights"),  # type: ignore[arg-type]
        lambda: CalendarWindows("days", zone="Mars/Olympus"),
    ],
)
def test_invalid_arguments_are_refused(make) -> None:
    with pytest.raises(InvalidError):
        make()


@pytest.mark.parametrize(
    "merge",
    [
        Merge((Window(0, 5), Window(7, 9)), Window(0, 9)),
        Merge((Window(0, 10),), Window(0, 5)),
        Merge((Window(0, 10),), Window(0, 20)),
    ],
)
def test_invalid_merges_are_refused(merge: Merge) -> None:
    """A merge joins known windows; its result contains them and equals no unmerged window."""
    with pytest.raises(InvalidError):
        check_merges([Window(0, 10), Window(0, 20)], [merge])

"""The book's version of the example: nine scores, and the panes that the author's own tests expect.

Those tests follow Beam: the on-time pane comes even without new scores, and early panes come a minute
after the first score of a pane rather than at whole minutes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import millpond as mp
from examples.streaming102.play import Shown, Step, play
from examples.streaming102.story import NOON_US, SECOND_US, Score, Story, clock_us
from examples.streaming102.tables import facts, rows, window_us

_MILLISECOND_US: Final = 1_000


@lru_cache(maxsize=1)
def book() -> Mapping[str, Any]:
    """All of ``book.yaml``."""
    return facts("book.yaml")


def book_cases() -> list[str]:
    """Return the cases that Millpond must reproduce; the file lists the excluded ones with reasons."""
    return [case["name"] for case in book()["cases"]]


def _case(name: str) -> Mapping[str, Any]:
    cases: dict[str, Mapping[str, Any]] = {case["name"]: case for case in book()["cases"]}
    return cases[name]


# -- what happens ----------------------------------------------------------------------------


def _story(name: str) -> Story:
    now = NOON_US
    scores: list[Score] = []
    marks: list[tuple[int, int | None]] = []
    for kind, *arguments in rows(book()["streams"][name]):
        if kind == "clock":
            now = clock_us(arguments[0])
        elif kind == "score":
            scores.append(Score(value=int(arguments[0]), at_us=clock_us(arguments[1]), seen_us=now))
        else:
            marks.append((now, None if arguments == ["infinity"] else clock_us(arguments[0])))
    return Story(name=name, scores=tuple(scores), marks=tuple(marks))


# -- windows and triggers -----------------------------------------------------------------------------


_WINDOWS: Final[Mapping[str, mp.WindowFn]] = {
    "global": mp.GlobalWindows(),
    "fixed": mp.FixedWindows("2m"),
    "sessions": mp.Sessions("1m"),
}
_TRIGGERS: Final[Mapping[str, mp.Trigger]] = {
    "default": mp.Default(),
    "each": mp.Repeatedly(mp.AfterCount(1)),
    "after_two_minutes": mp.Repeatedly(mp.AfterProcessingTime("2m")),
    "early_and_late": mp.AfterWatermark(early=mp.AfterProcessingTime("1m"), late=mp.AfterCount(1)),
}


def _step(case: Mapping[str, Any]) -> Step:
    def step(scores: mp.DataflowStream) -> mp.WindowedStream:
        return scores.window(
            _WINDOWS[case["windows"]],
            trigger=_TRIGGERS[case["trigger"]],
            accumulation=case["accumulation"],
            allowed_lateness=case["allowed_lateness"],
            # Beam's last word comes with the end of a window; without a watermark's trigger that is all of it.
            closing="always" if case["trigger"] == "after_two_minutes" else "if_non_empty",
        )

    return step


def play_book(name: str) -> list[Shown]:
    """The panes of a case, on the local runner."""
    case = _case(name)
    return play(_story(case["stream"]), {"sums": _step(case)})["sums"].panes


# -- what must come ----------------------------------------------------------------------------


def book_differences(name: str, shown: Sequence[Shown]) -> list[str]:
    """Return panes that only Beam or only Millpond has; empty if they agree.

    ``is_last`` is not compared. Beam's windows expire when the watermark reaches their end plus lateness, Millpond's a
    moment later, because an element at exactly that time is still accepted. The order of panes is not compared either: the
    book's checks treat panes as an unordered collection.
    """
    expected = sorted(map(_fields_expected, rows(_case(name)["panes"])))
    ours = sorted(map(_fields_shown, shown))
    missing = [f"missing: {pane}" for pane in expected if pane not in ours]
    return missing + [f"too much: {pane}" for pane in ours if pane not in expected]


def _fields_expected(row: Sequence[str]) -> tuple[Any, ...]:
    window, value, timing, index, nonspeculative_index = row
    bounds = window_us(window) or ()
    return (
        bounds,
        int(index),
        int(value),
        (bounds[1] - _MILLISECOND_US) // SECOND_US if bounds else None,
        timing,
        int(nonspeculative_index),
    )


def _fields_shown(pane: Shown) -> tuple[Any, ...]:
    return (
        pane.window or (),
        pane.index,
        pane.value,
        pane.at_us // SECOND_US if pane.window else None,
        pane.timing,
        pane.nonspeculative_index,
    )

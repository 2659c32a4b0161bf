"""
The book's version of the example: nine scores, and the panes that the author's own tests expect.

Those are Beam's: the on-time pane comes even without news, and early panes come a minute after
the first score of a pane rather than at whole minutes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import millpond as mp
from examples.shared_data import need
from examples.streaming102.article import DATA
from examples.streaming102.play import Shown, Step, play
from examples.streaming102.story import MINUTE_US, NOON_US, SECOND_US, Score, Story

__all__ = ["book", "book_cases", "book_differences", "play_book"]

_KEY: Final = "TeamX"
_SHRINKING: Final = "ValidityWindows"
_TIMINGS: Final = {"EARLY": "early", "ON_TIME": "on_time", "LATE": "late"}
_GLOBAL_END: Final = "END_OF_GLOBAL_WINDOW"


@lru_cache(maxsize=1)
def book() -> Mapping[str, Any]:
    """
    All of the file.
    """
    found: Mapping[str, Any] = json.loads(need(DATA / "book_9_events.json").read_text(encoding="utf-8"))
    return found


def book_cases() -> list[str]:
    """
    The cases that Millpond is held to.

    Left out are the window function that makes windows smaller, which Millpond refuses, and the
    one of which the author himself says not to pay attention to its panes.
    """
    return [
        case["name"]
        for case in book()["cases"]
        if case["name"] != _SHRINKING and "author_warning" not in case
    ]


def _case(name: str) -> Mapping[str, Any]:
    cases: dict[str, Mapping[str, Any]] = {case["name"]: case for case in book()["cases"]}
    return cases[name]


def _us(text: str) -> int:
    hours, minutes, seconds = map(int, text.split(":"))
    return ((hours * 60 + minutes) * 60 + seconds) * SECOND_US


# -- what happens ----------------------------------------------------------------------------


def _story(name: str) -> Story:
    stream = book()["streams"][name]
    if isinstance(stream, dict):
        scores = _scores(stream["input"], NOON_US + 5 * MINUTE_US)
        return Story(name=name, scores=scores, marks=((NOON_US + 10 * MINUTE_US, None),))
    now = NOON_US
    told: list[Score] = []
    marks: list[tuple[int, int | None]] = []
    for step in stream:
        ((kind, argument),) = step.items()
        if kind == "clock":
            now = _us(argument)
        elif kind == "input":
            told += _scores(argument, now)
        else:
            marks.append((now, None if argument == "infinity" else _us(argument)))
    return Story(name=name, scores=tuple(told), marks=tuple(marks))


def _scores(listed: Sequence[Sequence[Any]], seen_us: int) -> tuple[Score, ...]:
    return tuple(Score(value=value, at_us=_us(at), seen_us=seen_us, key=_KEY) for value, at in listed)


# -- what is asked -----------------------------------------------------------------------------


def _windows(text: str) -> mp.WindowFn:
    if text == "global":
        return mp.GlobalWindows()
    return mp.FixedWindows("2m") if text == "fixed 2 min" else mp.Sessions("1m")


def _trigger(text: str) -> mp.Trigger:
    each = mp.AfterCount(1)
    if text == "default":
        return mp.Default()
    if text == "every element, repeated":
        return mp.Repeatedly(each)
    if text.startswith("processing time 2 minutes"):
        return mp.Repeatedly(mp.AfterProcessingTime("2m"))
    return mp.AfterWatermark(early=mp.AfterProcessingTime("1m"), late=each)


def _lateness(case: Mapping[str, Any]) -> str | int:
    text = case["lateness"]
    return text.replace(" days", "d").replace(" minutes", "m") if isinstance(text, str) else int(text)


def _step(case: Mapping[str, Any]) -> Step:
    def step(scores: mp.DataflowStream) -> mp.WindowedStream:
        return scores.window(
            _windows(case["window"]),
            trigger=_trigger(case["trigger"]),
            accumulation=case["mode"] or "discarding",
            allowed_lateness=_lateness(case),
            # Beam's last word comes with the end of a window; without a watermark's trigger that is all of it.
            closing="always" if case["trigger"].startswith("processing time") else "if_non_empty",
        )

    return step


def play_book(name: str) -> list[Shown]:
    """
    The panes of a case, on the local runner.
    """
    case = _case(name)
    return play(_story(case["stream"]), {"sums": _step(case)})["sums"].panes


# -- what must come ----------------------------------------------------------------------------


def book_differences(name: str, shown: Sequence[Shown]) -> list[str]:
    """
    Panes that Beam has and we do not, and the other way round; none where they agree.

    Whether a pane is the last is not compared: Beam's windows end with the watermark at their end
    plus lateness, ours the moment after, for an element at that very time is still taken. The order of panes is not the book's, whose checks compare them as an unordered collection.
    """
    expected = sorted(_fields_expected(pane) for pane in _case(name)["expect"])
    ours = sorted(_fields_shown(pane) for pane in shown)
    missing = [f"missing: {pane}" for pane in expected if pane not in ours]
    return missing + [f"too much: {pane}" for pane in ours if pane not in expected]


def _fields_expected(pane: Mapping[str, Any]) -> tuple[Any, ...]:
    window = pane["window"]
    at = pane["timestamp"]
    return (
        () if window == "global" else tuple(map(_us, window)),
        pane["index"],
        pane["value"],
        -1 if at == _GLOBAL_END else _us(at),
        _TIMINGS[pane["timing"]],
        pane["nonspeculative_index"],
        pane["first"],
    )


def _fields_shown(pane: Shown) -> tuple[Any, ...]:
    return (
        pane.window or (),
        pane.index,
        pane.value,
        -1 if pane.window is None else pane.at_us // SECOND_US * SECOND_US,
        pane.timing,
        pane.nonspeculative_index,
        pane.index == 0,
    )

"""
The article's data: its ten scores in two orders, its watermarks, and the panes of its figures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from examples.shared_data import need, shared_data
from examples.streaming102.story import MINUTE_US, NOON_US, Score, Story, shifted

__all__ = ["DATA", "ExpectedPane", "article", "expected_panes", "stories", "table_1"]

DATA: Final = shared_data("streaming102")
"""Where the files of the article and of the book lie."""

_END_MS: Final = 600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedPane:
    """
    A pane as the article draws it.

    Attributes:
        value: the number in the picture; negative for a retraction.
        window: start and end in microseconds; ``None`` for the global window.
        seen_us: when it is shown, exactly: at a whole minute, when a score is seen, or when the
            watermark passes the window's end.
        timing: ``early``, ``on_time`` or ``late``; ``None`` where the article does not say.
    """

    value: int
    window: tuple[int, int] | None
    seen_us: int
    timing: str | None


@lru_cache(maxsize=1)
def article() -> Mapping[str, Any]:
    """
    All of the file.
    """
    found: Mapping[str, Any] = json.loads(need(DATA / "article_10_events.json").read_text(encoding="utf-8"))
    return found


def _us(article_ms: int) -> int:
    """
    Milliseconds after noon as microseconds since 1970.
    """
    return NOON_US + article_ms * 1_000


def _scores(events: Sequence[Mapping[str, Any]]) -> tuple[Score, ...]:
    scores = (
        Score(
            value=event["value"],
            at_us=_us(event["event_time_ms"]),
            seen_us=_us(event["processing_time_ms"]),
            key=event["key"],
        )
        for event in events
    )
    return tuple(sorted(scores, key=lambda score: score.seen_us))


def _marks(name: str) -> tuple[tuple[int, int | None], ...]:
    steps = article()["watermark_step_functions"][name]
    return tuple((_us(step["processing_time_ms"]), _us(step["watermark_ms"])) for step in steps)


def _line(name: str) -> tuple[tuple[int, int], ...]:
    samples = article()["watermarks"][name]["samples_every_ninth_of_a_minute"]
    return tuple((_us(event_ms), _us(seen_ms)) for seen_ms, event_ms in samples)


def _told(name: str, scores: tuple[Score, ...], watermark: str) -> Story:
    return Story(name=name, scores=scores, marks=_marks(watermark), line=_line(watermark))


def _batch(scores: tuple[Score, ...]) -> Story:
    return Story(name="batch", scores=scores, marks=((_us(_END_MS), None),))


def _ingress(name: str, scores: tuple[Score, ...]) -> Story:
    """
    The scores happen when they are seen, and the watermark is the clock on the wall.
    """
    arrived = tuple(
        Score(value=one.value, at_us=one.seen_us, seen_us=one.seen_us, key=one.key) for one in scores
    )
    first, last = min(one.seen_us for one in scores) // MINUTE_US * MINUTE_US, _us(_END_MS)
    return Story(name=name, scores=arrived, line=((first, first), (last, last)), by_ingress=True)


def session_times() -> dict[int, int]:
    """
    Event times that are moved where sessions have to overlap: by a few seconds, as in the author's own test.
    """
    scores = {one["value"]: one["event_time_ms"] for one in article()["ordering_1"] if one["value"] in (7, 9)}
    moved = article()["sessions_event_time_override"]["events"]
    return {_us(scores[one["value"]]): _time(one["event_time"]) for one in moved}


def _time(text: str) -> int:
    hours, minutes, seconds = map(int, text.split(":"))
    return ((hours * 60 + minutes) * 60 + seconds) * 1_000_000


@lru_cache(maxsize=1)
def stories() -> Mapping[str, Story]:
    """
    What happens in the figures, by name.
    """
    first, second = _scores(article()["ordering_1"]), _scores(article()["ordering_2_figure_12"])
    six = _scores([article()["extra_event_figure_8"]])
    with_six = tuple(sorted([*first, *six], key=lambda score: score.seen_us))
    told = (
        _batch(first),
        _told("perfect", first, "perfect_ordering_1"),
        _told("heuristic", first, "heuristic_ordering_1"),
        _told("with_a_late_six", with_six, "heuristic_ordering_1"),
        _told("second_order", second, "heuristic_ordering_2"),
        _told("for_sessions", shifted(first, session_times()), "heuristic_ordering_1"),
        _ingress("ingress", first),
        _ingress("ingress_second_order", second),
    )
    return {story.name: story for story in told}


def expected_panes(figure: int, side: str | None = None) -> list[ExpectedPane]:
    """
    What the article shows.

    Where it errs (figures 14 and 15, right), the values are those that its own data add up to; in
    figure 17 the windows begin and end at the times of `session_times`.

    Args:
        figure: its number.
        side: the key of the file's half, such as ``right``; ``None`` for figures with one half.
    """
    (found,) = (one for one in article()["figures"] if one["figure"] == figure)
    panes = found["panes"] if side is None else found[side]["panes"]
    values = [pane["value"] for pane in panes]
    if side in found.get("values_computed_from_the_data", {}):
        values = found["values_computed_from_the_data"][side]
    moved = session_times() if figure == 17 else {}
    exact = {
        (pane["drawn_at_ms"], pane["timing"]): pane["watermark_passes_window_end_ms"]
        for pane in panes
        if "watermark_passes_window_end_ms" in pane
    }
    shown = [
        _expected(pane, value, exact.get((pane["drawn_at_ms"], pane["timing"]), pane["drawn_at_ms"]), moved)
        for pane, value in zip(panes, values, strict=True)
    ]
    return sorted(shown, key=lambda one: (one.seen_us, one.value >= 0, one.window or (0, 0)))


def _expected(pane: Mapping[str, Any], value: int, seen_ms: int, moved: Mapping[int, int]) -> ExpectedPane:
    timing = pane["timing"]
    return ExpectedPane(
        value=value,
        window=None if pane["window"] == "global" else _moved(tuple(map(_us, pane["window"])), moved),
        seen_us=_us(seen_ms),
        timing=None if timing is None else timing.replace("-", "_"),
    )


def _moved(window: tuple[int, ...], moved: Mapping[int, int]) -> tuple[int, int]:
    start, end = window
    if start not in moved:
        return start, end
    # A session of a single score ends with its gap; a longer one ends by a score that has not moved.
    by = moved[start] - start
    return start + by, end + by if end - start == MINUTE_US else end


def table_1() -> list[dict[str, list[int]]]:
    """
    The article's table: the panes of [12:02, 12:04) in each mode.
    """
    rows: list[dict[str, list[int]]] = article()["table_1"]["rows"]
    return rows

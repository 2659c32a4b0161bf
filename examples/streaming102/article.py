"""The article's data: its ten scores in two orders, its watermarks, and the panes of its figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from examples.streaming102.story import MINUTE_US, NOON_US, Score, Story, clock_us, shifted
from examples.streaming102.tables import facts, rows, window_us

_END_US: Final = NOON_US + 10 * MINUTE_US
_FIRST_NINTH: Final = 46


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedPane:
    """A pane as the article draws it.

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
    """All of ``article.yaml``."""
    return facts("article.yaml")


def _scores(table: str, seen: int = 2) -> tuple[Score, ...]:
    """The scores of a table in the order in which they are seen, by the column ``seen``."""
    scores = (
        Score(value=int(row[0]), at_us=clock_us(row[1]), seen_us=clock_us(row[seen])) for row in rows(table)
    )
    return tuple(sorted(scores, key=lambda score: score.seen_us))


def _marks(name: str) -> tuple[tuple[int, int | None], ...]:
    table = article()["watermarks"][name]["steps"]
    return tuple((clock_us(seen), clock_us(mark)) for seen, mark in rows(table))


def _line(name: str) -> tuple[tuple[int, int], ...]:
    marks = article()["watermarks"][name]["curve"].split()
    return tuple(
        (clock_us(f"12:{mark}"), NOON_US + ninth * MINUTE_US // 9)
        for ninth, mark in enumerate(marks, start=_FIRST_NINTH)
    )


def _told(name: str, scores: tuple[Score, ...], watermark: str) -> Story:
    return Story(name=name, scores=scores, marks=_marks(watermark), line=_line(watermark))


def _batch(scores: tuple[Score, ...]) -> Story:
    return Story(name="batch", scores=scores, marks=((_END_US, None),))


def _ingress(name: str, scores: tuple[Score, ...]) -> Story:
    """The scores happen when they are seen, and the watermark is the clock on the wall."""
    arrived = tuple(replace(score, at_us=score.seen_us) for score in scores)
    first = min(score.seen_us for score in scores) // MINUTE_US * MINUTE_US
    return Story(name=name, scores=arrived, line=((first, first), (_END_US, _END_US)), by_ingress=True)


def _session_times(scores: tuple[Score, ...]) -> dict[int, int]:
    """Event times that move where sessions have to overlap."""
    times = {score.value: score.at_us for score in scores}
    return {times[int(value)]: clock_us(at) for value, at in rows(article()["for_sessions"])}


@lru_cache(maxsize=1)
def stories() -> Mapping[str, Story]:
    """What happens in the figures, by name."""
    first, second = _scores(article()["scores"]), _scores(article()["scores"], seen=3)
    six = _scores(article()["late_six"])
    with_six = tuple(sorted([*first, *six], key=lambda score: score.seen_us))
    told = (
        _batch(first),
        _told("perfect", first, "perfect"),
        _told("heuristic", first, "heuristic"),
        _told("with_a_late_six", with_six, "heuristic"),
        _told("second_order", second, "heuristic_second_order"),
        _told("for_sessions", shifted(first, _session_times(first)), "heuristic"),
        _ingress("ingress", first),
        _ingress("ingress_second_order", second),
    )
    return {story.name: story for story in told}


def expected_panes(figure: int, side: str = "panes") -> list[ExpectedPane]:
    """Return the panes that the article shows.

    The article errs in figures 14 and 15, right: there the values are the sums of its data. In figure 17 the sessions
    begin and end at the times of the story ``for_sessions``. ``side`` is the figure's half, such as ``heuristic``, or
    ``panes`` for figures without halves.
    """
    return [
        ExpectedPane(
            value=int(value),
            window=window_us(window),
            seen_us=clock_us(seen),
            timing=None if timing == "-" else timing,
        )
        for seen, window, timing, value in rows(article()["figures"][figure][side])
    ]


def table_1() -> list[dict[str, list[int]]]:
    """The article's table: the panes of 12:02 to 12:04 in each mode."""
    table: list[dict[str, list[int]]] = article()["table_1"]
    return table

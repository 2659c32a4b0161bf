"""A story: what happens to a pipeline, and when by the clock on the wall."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

SECOND_US: Final = 1_000_000
MINUTE_US: Final = 60 * SECOND_US
NOON_US: Final = 12 * 60 * MINUTE_US
"""Noon of 1970-01-01, UTC: the article names no day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One event: points of a team.

    Attributes:
        value: the points.
        at_us: when it happened.
        seen_us: when it was seen.
        key: whose points they are.
    """

    value: int
    at_us: int
    seen_us: int
    key: str = "TeamX"


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Scores, and the watermark that comes with them.

    Attributes:
        scores: in the order in which they are seen.
        marks: the times at which the watermark moves, with its values; ``None`` is the end of all input.
        line: the watermark to be drawn, as pairs of event time and processing time.
        percentile: the percentile of a second watermark, if the story has one.
        percentile_marks: as ``marks``, for the second watermark.
        percentile_line: as ``line``, for the second watermark.
        by_ingress: event time is the time of arrival.
        signals: the times at which the signal ``show`` is given for all windows.
    """

    name: str
    scores: tuple[Score, ...]
    marks: tuple[tuple[int, int | None], ...] = ()
    line: tuple[tuple[int, int], ...] = ()
    percentile: float | None = None
    percentile_marks: tuple[tuple[int, int | None], ...] = ()
    percentile_line: tuple[tuple[int, int], ...] = ()
    by_ingress: bool = False
    signals: tuple[int, ...] = ()
    end_us: int = NOON_US + 10 * MINUTE_US


@dataclass(frozen=True, slots=True)
class Moment:
    """What happens at one time of the clock; watermarks come with their percentile, and a signal before them."""

    seen_us: int
    scores: tuple[Score, ...] = ()
    marks: tuple[tuple[float, int | None], ...] = ()
    has_signal: bool = False


def moments(story: Story) -> list[Moment]:
    """The story in order: its scores, its marks, and every whole minute, at which clocks strike.

    A score that is seen at a full minute is seen just before it, as in the figures.
    """
    marks = [(seen, 100.0, at) for seen, at in story.marks]
    if story.percentile is not None:
        marks += [(seen, story.percentile, at) for seen, at in story.percentile_marks]
    start = min([score.seen_us for score in story.scores] + [seen for seen, _, _ in marks])
    first_minute = -(-start // MINUTE_US) * MINUTE_US
    seen = {score: _just_before(score.seen_us) for score in story.scores}
    times: set[int] = {*seen.values(), *(at for at, _, _ in marks), *story.signals}
    times |= set(range(first_minute, story.end_us + 1, MINUTE_US))
    return [
        Moment(
            at,
            tuple(score for score in story.scores if seen[score] == at),
            tuple((percentile, mark) for when, percentile, mark in marks if when == at),
            at in story.signals,
        )
        for at in sorted(times)
    ]


def _just_before(seen_us: int) -> int:
    return seen_us if seen_us % MINUTE_US else seen_us - 1_000


def clock_text(at_us: int) -> str:
    """A time as the article writes it.

    Example:
        >>> clock_text(NOON_US + 90 * SECOND_US)
        '12:01:30'
    """
    minutes, seconds = divmod(round(at_us / SECOND_US), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"


def clock_us(text: str) -> int:
    """The time that a clock shows, as hours, minutes and perhaps seconds.

    Example:
        >>> clock_us("00:01:02.5"), clock_us("00:02")
        (62500000, 120000000)
    """
    hours, minutes, seconds = [*text.split(":"), "0"][:3]
    whole, _, part = seconds.partition(".")
    return ((int(hours) * 60 + int(minutes)) * 60 + int(whole)) * SECOND_US + int(f"{part:0<6}")


def shifted(scores: Iterable[Score], times: dict[int, int]) -> tuple[Score, ...]:
    """The scores, some of them at other event times."""
    return tuple(
        Score(value=one.value, at_us=times.get(one.at_us, one.at_us), seen_us=one.seen_us, key=one.key)
        for one in scores
    )

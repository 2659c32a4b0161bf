"""``python -m examples.streaming102.pictures``: the pictures of docs/windows.md, from runs.

Each picture has the article's ten scores and one answer to where, when or how, drawn from the panes of a real run.
Windows are drawn as bars over event time, triggers and modes as panes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from zoneinfo import ZoneInfo

import click
from PIL import Image

import millpond as mp
from examples.streaming102.article import stories
from examples.streaming102.lanes import draw_windows
from examples.streaming102.picture import View, draw_small
from examples.streaming102.play import Outcome, Shown, Step, play
from examples.streaming102.story import MINUTE_US, NOON_US, SECOND_US, Score, Story

_HOUR_US: Final = 60 * MINUTE_US
_ZONE: Final = "America/New_York"
_VIEW: Final = View(
    event=(NOON_US, NOON_US + 8 * MINUTE_US), seen=(NOON_US + 5 * MINUTE_US, NOON_US + 10 * MINUTE_US)
)
_SIGNALS: Final = (NOON_US + 6 * MINUTE_US + 45 * SECOND_US, NOON_US + 9 * MINUTE_US)
_TICKS: Final = range(NOON_US, NOON_US + 8 * MINUTE_US + 1, MINUTE_US)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A picture's run: the name of its story, and the windowed step."""

    step: Step
    story: str = "heuristic"


def _by(
    trigger: mp.Trigger, windows: mp.WindowFn | None = None, accumulation: str = "accumulating", **more: Any
) -> Drawn:
    story = more.pop("story", "heuristic")
    options: dict[str, Any] = {"allowed_lateness": "1d", "emit_empty_on_time": False} | more

    def step(scores: mp.DataflowStream) -> mp.WindowedStream:
        return scores.window(
            windows or mp.FixedWindows("2m"), trigger=trigger, accumulation=accumulation, **options
        )

    return Drawn(step=step, story=story)


class _Asking(mp.Repeatedly):
    """Fires with each element, and asks for the contribution of each pane to be kept or cleared."""

    def __init__(self, contents: mp.windows.Contents) -> None:
        mp.Repeatedly.__init__(self, mp.AfterCount(1))
        object.__setattr__(self, "contents", contents)

    def on_fire(self, context: mp.windows.TriggerContext) -> bool:
        context.ask(self.contents)  # type: ignore[attr-defined]
        return mp.Repeatedly.on_fire(self, context)


def _is_odd(total: int) -> bool:
    return total % 2 == 1


def _ten_points(score: dict[str, int], so_far: int | None) -> tuple[bool, int]:
    points = score["points"] + (so_far or 0)
    return points >= 10, points


_EACH: Final = mp.AfterCount(1)
_EVERY_MINUTE: Final = mp.AtPeriod(0, "1m")
_THREE: Final = mp.AfterWatermark(early=_EVERY_MINUTE, late=_EACH)

TRIGGERS: Final[Mapping[str, Drawn]] = {
    "default": _by(mp.Default()),
    "after_watermark": _by(_THREE),
    "watermark_percentile": _by(
        mp.AfterEach(mp.windows.WatermarkPercentile(90), mp.windows.WatermarkPercentile(100)),
        story="two_percentiles",
        emit_empty_on_time=True,
    ),
    "after_count": _by(mp.AfterCount(2)),
    "after_bytes": _by(mp.windows.AfterBytes(100)),
    "should_emit": _by(mp.windows.ShouldEmit(_ten_points)),
    "result_is": _by(mp.Repeatedly(mp.windows.ResultIs(_is_odd))),
    "after_signal": _by(mp.Repeatedly(mp.AfterSignal("show")), story="two_signals"),
    "after_processing_time": _by(mp.AfterProcessingTime("1m")),
    "after_delay": _by(mp.windows.AfterDelay("30s", "event")),
    "at_period": _by(mp.AtPeriod(0, "1m")),
    "after_all": _by(mp.AfterAll(mp.AfterCount(2), mp.AfterWatermark())),
    "after_any": _by(mp.AfterAny(mp.AfterCount(3), mp.AfterWatermark())),
    "after_each": _by(mp.AfterEach(_EACH, mp.AfterCount(2), _EACH)),
    "repeatedly": _by(mp.Repeatedly(_EVERY_MINUTE)),
    "repeat_count": _by(mp.windows.RepeatCount(_EACH, 2)),
    "repeat_until": _by(mp.windows.RepeatUntil(_EACH, mp.AfterWatermark())),
    "or_finally": _by(mp.windows.OrFinally(mp.Repeatedly(_EVERY_MINUTE), mp.AfterCount(3))),
    "never": _by(mp.windows.Never(), allowed_lateness=0),
}
"""A picture of each trigger, on windows of two minutes."""

MODES: Final[Mapping[str, Drawn]] = {
    "discarding": _by(_THREE, accumulation="discarding"),
    "accumulating": _by(_THREE),
    "retracting": _by(_THREE, accumulation="retracting"),
    "clear_by_default": _by(
        mp.AfterEach(_EACH, _Asking(mp.windows.Contents.KEEP)), accumulation="clear_by_default"
    ),
    "accumulate_by_default": _by(
        mp.AfterEach(_EACH, _Asking(mp.windows.Contents.CLEAR)), accumulation="accumulate_by_default"
    ),
    "incremental": _by(_THREE, accumulation="discarding", incremental=True),
    "sessions_retracting": _by(_THREE, mp.Sessions("1m"), accumulation="retracting", story="for_sessions"),
    "allowed_lateness": _by(_THREE, allowed_lateness="1m", story="with_a_late_six"),
}
"""A picture of each mode, and of what depends on time running out."""


class _AsLongAsGreat(mp.WindowFn):
    """A window function of a user: as many times ten seconds as the score has points."""

    def assign(self, element: mp.windows.Element) -> list[mp.Window]:
        return [mp.Window(element.at, element.at + element.value["points"] * 10 * SECOND_US)]


WINDOWS: Final[Mapping[str, Drawn]] = {
    "global_windows": _by(mp.Default(), mp.GlobalWindows(), story="batch"),
    "fixed_windows": _by(mp.Default(), mp.FixedWindows("2m"), story="batch"),
    "unaligned_fixed_windows": _by(mp.Default(), mp.windows.UnalignedFixedWindows("2m"), story="two_teams"),
    "sliding_windows": _by(mp.Default(), mp.SlidingWindows("2m", "1m"), story="batch"),
    "sessions": _by(mp.Default(), mp.Sessions("50s"), story="batch"),
    "calendar_windows": _by(mp.Default(), mp.CalendarWindows.days(1, _ZONE), story="spring"),
    "ingress_time": _by(mp.Default(), mp.FixedWindows("2m"), story="ingress"),
    "custom_windows": _by(mp.Default(), _AsLongAsGreat(), story="batch"),
}
"""A picture of each window function."""


def names() -> list[str]:
    """The pictures' files."""
    return [f"{name}.png" for group in (WINDOWS, TRIGGERS, MODES) for name in group]


def _told() -> dict[str, Story]:
    """The article's stories and some more: marks of two percentiles, two teams, and a night with 23 hours."""
    known = dict(stories())
    fast = known["heuristic"]
    percentiles = replace(
        known["perfect"], percentile=90.0, percentile_marks=fast.marks, percentile_line=fast.line
    )
    teams = tuple(replace(one, key=f"Team{'AB'[one.value % 2]}") for one in known["batch"].scores)
    midnight = int(datetime(2026, 3, 7, tzinfo=ZoneInfo(_ZONE)).timestamp()) * SECOND_US
    hours = {5: 4, 7: 14, 3: 27, 4: 40, 8: 46, 9: 49, 1: 66}
    spring = tuple(
        Score(value=value, at_us=midnight + hour * _HOUR_US, seen_us=NOON_US + 5 * MINUTE_US)
        for value, hour in hours.items()
    )
    end = ((NOON_US + 10 * MINUTE_US, None),)
    return known | {
        "two_percentiles": percentiles,
        "two_signals": replace(fast, name="two_signals", signals=_SIGNALS),
        "two_teams": Story(name="two_teams", scores=teams, marks=end),
        "spring": Story(name="spring", scores=spring, marks=end),
    }


def _play_all(told: Mapping[str, Story]) -> dict[str, Outcome]:
    """Run all pictures; those with the same story share a pipeline."""
    outcomes: dict[str, Outcome] = {}
    drawn = {**WINDOWS, **TRIGGERS, **MODES}
    for name, story in told.items():
        steps = {picture: one.step for picture, one in drawn.items() if one.story == name}
        if steps:
            outcomes |= play(story, steps)
    return outcomes


def draw_all(folder: Path) -> None:
    """Run and draw every picture into a folder."""
    told = _told()
    outcomes = _play_all(told)
    for name, one in {**TRIGGERS, **MODES}.items():
        view = replace(_VIEW, event=(NOON_US, NOON_US + 9 * MINUTE_US)) if "sessions" in name else _VIEW
        draw_small(folder / f"{name}.png", told[one.story], outcomes[name].panes, view)
    for name, one in WINDOWS.items():
        _draw_bars(folder / f"{name}.png", told[one.story], outcomes[name].panes)
    for name in names():
        _shrink(folder / name)


def _shrink(path: Path) -> None:
    """A picture of few colours needs no more than a palette: a third of the bytes."""
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(colors=128, method=Image.Quantize.MEDIANCUT)
    small.save(path, optimize=True)


def _draw_bars(path: Path, story: Story, panes: list[Shown]) -> None:
    panes = sorted(panes, key=lambda pane: (pane.window or (0, 0), pane.key))
    if story.name == "spring":
        days = sorted({edge for pane in panes for edge in pane.window or ()})
        draw_windows(path, story.scores, panes, (days[0], days[-1]), days, tick_text=_day, bar_text=_hours)
        return
    ticks = [at + 4 * MINUTE_US for at in _TICKS][:7] if story.by_ingress else list(_TICKS)
    draw_windows(path, story.scores, panes, (ticks[0], ticks[-1]), ticks)


def _day(at_us: int) -> str:
    return f"{datetime.fromtimestamp(at_us / SECOND_US, UTC).astimezone(ZoneInfo(_ZONE)):%-d %b}"


def _hours(pane: Shown) -> str:
    start, end = pane.window or (0, 0)
    return f"{pane.value}  ({(end - start) // _HOUR_US} h)"


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs/pictures"), show_default=True)
def main(out: Path) -> None:
    """Draw the pictures."""
    draw_all(out)
    largest = max((out / name).stat().st_size for name in names())
    click.echo(f"{len(names())} pictures in {out}, the largest of {largest / 1024:.0f} KiB")


if __name__ == "__main__":
    main()

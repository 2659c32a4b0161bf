"""The figures as pipelines: what each asks of the scores, in the words of the library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import millpond as mp
from examples.streaming102.article import ExpectedPane, expected_panes, stories
from examples.streaming102.play import Shown, Step, play

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One half of a figure, or all of it.

    Attributes:
        title: the difference from the other half.
        story: the name of the sequence of events.
        step: the windowed step.
        side: the name of its panes in ``article.yaml``.
        note: an error of the article, or a necessary change.
    """

    title: str
    story: str
    step: Step
    side: str = "panes"
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of the article."""

    number: int
    title: str
    panels: tuple[Panel, ...]

    def name(self, panel: Panel) -> str:
        """What a panel's step is called."""
        return f"figure_{self.number}_{self.panels.index(panel)}"

    def expected(self, panel: Panel) -> list[ExpectedPane]:
        """What the article shows there."""
        return expected_panes(self.number, panel.side)


def _batch_global(scores: mp.DataflowStream) -> mp.WindowedStream:
    return scores.window(mp.GlobalWindows())


def _batch_fixed(scores: mp.DataflowStream) -> mp.WindowedStream:
    return scores.window(mp.FixedWindows("2m"))


def _at_the_watermark(scores: mp.DataflowStream) -> mp.WindowedStream:
    return scores.window(mp.FixedWindows("2m"), trigger=mp.AfterWatermark())


_EARLY_AND_LATE: Final = mp.AfterWatermark(early=mp.AtPeriod(0, "1m"), late=mp.AfterCount(1))


def _early_and_late(scores: mp.DataflowStream) -> mp.WindowedStream:
    return scores.window(
        mp.FixedWindows("2m"),
        trigger=_EARLY_AND_LATE,
        accumulation="accumulating",
        allowed_lateness="1d",
        emit_empty_on_time=False,
    )


def _a_minute_late(scores: mp.DataflowStream) -> mp.WindowedStream:
    return scores.window(
        mp.FixedWindows("2m"),
        trigger=_EARLY_AND_LATE,
        accumulation="accumulating",
        allowed_lateness="1m",
        emit_empty_on_time=False,
    )


def _discarding(scores: mp.DataflowStream) -> mp.WindowedStream:
    return scores.window(
        mp.FixedWindows("2m"),
        trigger=_EARLY_AND_LATE,
        accumulation="discarding",
        allowed_lateness="1d",
        emit_empty_on_time=False,
    )


def _retracting(scores: mp.DataflowStream) -> mp.WindowedStream:
    return scores.window(
        mp.FixedWindows("2m"),
        trigger=_EARLY_AND_LATE,
        accumulation="retracting",
        allowed_lateness="1d",
        emit_empty_on_time=False,
    )


def _every_two_minutes(scores: mp.DataflowStream) -> mp.WindowedStream:
    return scores.window(mp.GlobalWindows(), trigger=mp.Repeatedly(mp.AtPeriod(0, "2m")))


def _ingress(scores: mp.DataflowStream) -> mp.WindowedStream:
    return scores.window(mp.FixedWindows("2m"))


def _sessions(scores: mp.DataflowStream) -> mp.WindowedStream:
    return scores.window(
        mp.Sessions("1m"),
        trigger=_EARLY_AND_LATE,
        accumulation="retracting",
        allowed_lateness="1d",
        emit_empty_on_time=False,
    )


_SUM_NOTE: Final = "the article says 36, where its own scores add up to 40"
_SESSION_NOTE: Final = (
    "the 7 and the 9 happen 2 s earlier, so that sessions overlap, as in the author's own test"
)

FIGURES: Final[Mapping[int, Figure]] = {
    figure.number: figure
    for figure in (
        Figure(
            number=2,
            title="Classic batch",
            panels=(Panel(title="global window", story="batch", step=_batch_global),),
        ),
        Figure(
            number=4,
            title="Windowed batch",
            panels=(Panel(title="fixed windows of two minutes", story="batch", step=_batch_fixed),),
        ),
        Figure(
            number=6,
            title="Windows shown when the watermark passes their end",
            panels=(
                Panel(title="perfect watermark", story="perfect", step=_at_the_watermark, side="perfect"),
                Panel(
                    title="heuristic watermark", story="heuristic", step=_at_the_watermark, side="heuristic"
                ),
            ),
        ),
        Figure(
            number=7,
            title="Early, on-time and late panes, accumulating",
            panels=(
                Panel(title="perfect watermark", story="perfect", step=_early_and_late, side="perfect"),
                Panel(title="heuristic watermark", story="heuristic", step=_early_and_late, side="heuristic"),
            ),
        ),
        Figure(
            number=8,
            title="One minute of allowed lateness",
            panels=(Panel(title="and a late 6", story="with_a_late_six", step=_a_minute_late),),
        ),
        Figure(
            number=9,
            title="Discarding",
            panels=(Panel(title="heuristic watermark", story="heuristic", step=_discarding),),
        ),
        Figure(
            number=10,
            title="Accumulating and retracting",
            panels=(Panel(title="heuristic watermark", story="heuristic", step=_retracting),),
        ),
        Figure(
            number=13,
            title="Event-time windows: two orders, the same results",
            panels=(
                Panel(title="first order", story="heuristic", step=_early_and_late, side="first_order"),
                Panel(title="second order", story="second_order", step=_early_and_late, side="second_order"),
            ),
        ),
        Figure(
            number=14,
            title="Processing-time windows by triggers: two orders, different results",
            panels=(
                Panel(title="first order", story="heuristic", step=_every_two_minutes, side="first_order"),
                Panel(
                    title="second order",
                    story="second_order",
                    step=_every_two_minutes,
                    side="second_order",
                    note=_SUM_NOTE,
                ),
            ),
        ),
        Figure(
            number=15,
            title="Processing-time windows by ingress time",
            panels=(
                Panel(title="first order", story="ingress", step=_ingress, side="first_order"),
                Panel(
                    title="second order",
                    story="ingress_second_order",
                    step=_ingress,
                    side="second_order",
                    note=_SUM_NOTE,
                ),
            ),
        ),
        Figure(
            number=17,
            title="Sessions with a gap of a minute, retracting",
            panels=(
                Panel(title="heuristic watermark", story="for_sessions", step=_sessions, note=_SESSION_NOTE),
            ),
        ),
    )
}
"""The figures that show panes, by number."""


def play_figures(
    numbers: Iterable[int], spark: SparkSession | None = None
) -> dict[int, list[tuple[Panel, list[Shown]]]]:
    """Run figures and return the panels of each with their panes; figures with the same story share a pipeline.

    Without ``spark`` the local runner is used.
    """
    figures = [FIGURES[number] for number in numbers]
    asked: dict[str, dict[str, Step]] = {}
    for figure in figures:
        for panel in figure.panels:
            asked.setdefault(panel.story, {})[figure.name(panel)] = panel.step
    shown: dict[str, list[Shown]] = {}
    for story, steps in asked.items():
        outcomes = play(stories()[story], steps, spark)
        shown |= {name: outcome.panes for name, outcome in outcomes.items()}
    return {
        figure.number: [(panel, shown[figure.name(panel)]) for panel in figure.panels] for figure in figures
    }


def differences(expected: list[ExpectedPane], shown: list[Shown]) -> list[str]:
    """Return panes that differ from the article's; empty if they agree."""
    ours = [
        ExpectedPane(
            value=-one.value if one.is_retraction else one.value,
            window=one.window,
            seen_us=one.seen_us,
            timing=one.timing,
        )
        for one in shown
    ]
    found = [f"{len(shown)} panes instead of {len(expected)}"] if len(shown) != len(expected) else []
    return found + [
        f"{mine} instead of {theirs}"
        for theirs, mine in zip(expected, ours, strict=False)
        if (mine.value, mine.window, mine.seen_us) != (theirs.value, theirs.window, theirs.seen_us)
        or theirs.timing not in (None, mine.timing)
    ]

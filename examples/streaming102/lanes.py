"""Draws windows as bars over the time that they stand for: where in event time, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from examples.streaming102.picture import STYLE
from examples.streaming102.play import Shown
from examples.streaming102.story import Score, clock_text

_INK: Final = "#2b2f36"
_BARS: Final = ("#3a78b8", "#b3402f")


def draw_windows(
    path: Path,
    scores: Sequence[Score],
    panes: Sequence[Shown],
    span: tuple[int, int],
    ticks: Sequence[int],
    *,
    tick_text: Callable[[int], str] = lambda at: clock_text(at)[:5],
    bar_text: Callable[[Shown], str] = lambda pane: str(pane.value),
) -> None:
    """Draw scores on a line, and above it a bar for each window with its value, into a PNG file.

    Windows that overlap lie in lanes above each other; each key has a colour.
    """
    keys = sorted({score.key for score in scores})
    bars = [(*(pane.window or span), pane) for pane in panes]
    lanes = _lanes(bars)
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE | {"font.size": 7.5}):
        high = 0.36 * (max(lanes) + 1) + 0.36 * len(keys) + 0.42
        figure = Figure(figsize=(4.4, high), dpi=100, facecolor="white")
        axes = figure.add_axes((0.05, 0.24 / high, 0.9, 1 - 0.3 / high))
        axes.set_xlim(*span)
        axes.set_ylim(-len(keys) - 0.1, max(lanes) + 1.1)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xticks(list(ticks), [tick_text(at) for at in ticks])
        for score in scores:
            _draw_score(axes, score, keys.index(score.key))
        for (start, end, pane), lane in zip(bars, lanes, strict=True):
            visible = max(start, span[0]), min(end, span[1])
            _draw_bar(axes, visible, lane, bar_text(pane), _BARS[keys.index(pane.key)])
        figure.savefig(path)


def _draw_score(axes: Axes, score: Score, lane: int) -> None:
    place, colour = (score.at_us, -lane - 0.5), _BARS[lane]
    axes.plot(*place, "o", ms=12, color="white", mec=colour, mew=1.1, clip_on=False)
    axes.text(*place, str(score.value), ha="center", va="center_baseline", fontsize=7, color=_INK)


def _draw_bar(axes: Axes, bounds: tuple[int, int], lane: int, text: str, colour: str) -> None:
    left, right = axes.get_xlim()
    inset = (right - left) / 400
    start, end = bounds[0] + inset, bounds[1] - inset
    axes.add_patch(Rectangle((start, lane + 0.14), end - start, 0.72, fc=colour, alpha=0.18, lw=0))
    for edge in (start, end):
        axes.plot([edge, edge], [lane + 0.14, lane + 0.86], color=colour, lw=1.4, clip_on=False)
    place = (start + end) / 2, lane + 0.5
    axes.text(*place, text, ha="center", va="center_baseline", fontweight="bold", color=colour)


def _lanes(bars: Sequence[tuple[int, int, Shown]]) -> list[int]:
    """A lane for each bar, so that none overlaps another in its lane."""
    ends: list[int] = []
    found = []
    for start, end, _ in bars:
        lane = next((place for place, taken in enumerate(ends) if taken <= start), len(ends))
        ends[lane : lane + 1] = [end]
        found.append(lane)
    return found

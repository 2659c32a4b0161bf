"""Draws panes as the article does: event time to the right, processing time upwards.

A circle is a score where it happened and was seen; a box is a pane, as wide as its window, from
where the window began to fill (or the pane before it) up to the moment at which it was shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from examples.streaming102.play import Shown
from examples.streaming102.story import MINUTE_US, Story, clock_text

_INK: Final = "#2b2f36"
_FAINT: Final = "#7a828e"
_RULE: Final = "#e6e8eb"
_IDEAL: Final = "#b6bcc6"
_MARK: Final = "#2f7d5b"
_COLOURS: Final = {"early": "#e0a22c", "on_time": "#3a78b8", "late": "#b3402f"}
_RETRACTION: Final = "#8d2f5f"
_NAMES: Final = {"early": "early", "on_time": "on time", "late": "late"}

STYLE: Final[Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": _RULE,
    "grid.linewidth": 0.8,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What of time a picture shows, in microseconds."""

    event: tuple[int, int]
    seen: tuple[int, int]

    @classmethod
    def of(cls, story: Story, panes: Sequence[Shown]) -> View:
        """All scores and panes, and whole minutes around them."""
        happened = [score.at_us for score in story.scores]
        happened += [edge for pane in panes if pane.window is not None for edge in pane.window]
        seen = [score.seen_us for score in story.scores] + [pane.seen_us for pane in panes]
        return cls(event=_minutes(happened), seen=_minutes(seen))


def _minutes(times: Sequence[int]) -> tuple[int, int]:
    return min(times) // MINUTE_US * MINUTE_US, -(-max(times) // MINUTE_US) * MINUTE_US


def draw(
    path: Path,
    title: str,
    panels: Sequence[tuple[str, Story, Sequence[Shown], str]],
    *,
    caption: str = "",
) -> None:
    """Draw panels side by side into a PNG file.

    Args:
        path: the file; replaced when it exists.
        title: above all of it.
        panels: of each its title, the story, the panes in the order in which they came, and a note.
        caption: under the title.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        width = 6.6 * len(panels) + 0.5
        figure = Figure(figsize=(width, 6.4), dpi=110, facecolor="white")
        left = 0.72 / width
        figure.text(left, 0.952, title, fontsize=14, fontweight="bold")
        figure.text(left, 0.92, caption, fontsize=9.5, color=_FAINT)
        grid = figure.add_gridspec(
            1, len(panels), left=left, right=1 - 0.3 / width, top=0.86, bottom=0.165, wspace=0.15
        )
        for column, (name, story, panes, note) in enumerate(panels):
            axes = figure.add_subplot(grid[column])
            draw_panel(axes, story, panes, View.of(story, panes))
            axes.set_title(name, loc="left", fontsize=10.5, fontweight="bold", pad=8)
            if note:
                axes.text(1, -0.105, note, transform=axes.transAxes, ha="right", fontsize=8, color=_FAINT)
        shown = [pane for _, _, panes, _ in panels for pane in panes]
        figure.legend(
            handles=_legend([story for _, story, _, _ in panels], shown),
            loc="lower left",
            bbox_to_anchor=(left - 0.01, 0.0),
            ncols=7,
            handlelength=1.2,
            handletextpad=0.5,
            columnspacing=1.1,
        )
        figure.savefig(path)


def draw_small(path: Path, story: Story, panes: Sequence[Shown], view: View) -> None:
    """Draw one story and its panes into a PNG file for a page of text: small, and without words."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE | {"font.size": 7.5}):
        figure = Figure(figsize=(4.4, 3.3), dpi=100, facecolor="white")
        axes = figure.add_axes((0.095, 0.085, 0.875, 0.9))
        draw_panel(axes, story, panes, view, scale=0.72)
        axes.set_xlabel("")
        axes.set_ylabel("")
        figure.savefig(path)


def draw_panel(axes: Axes, story: Story, panes: Sequence[Shown], view: View, *, scale: float = 1.0) -> None:
    """Draw one story and its panes.

    Args:
        axes: where.
        story: what happened.
        panes: what came of it.
        view: what of time is shown.
        scale: how big circles and numbers are.
    """
    axes.set_xlim(view.event[0], view.event[1])
    axes.set_ylim(view.seen[0], view.seen[1] + 0.08 * MINUTE_US)
    _time_axis(axes.xaxis, view.event)
    _time_axis(axes.yaxis, view.seen)
    axes.tick_params(axis="x", pad=6)
    axes.set_xlabel("event time")
    axes.set_ylabel("processing time")
    _draw_marks(axes, story, view)
    _draw_boxes(axes, story, panes, view, scale)
    for score in story.scores:
        axes.plot(
            score.at_us,
            score.seen_us,
            "o",
            ms=15 * scale,
            color="white",
            mec=_INK,
            mew=1.3 * scale,
            zorder=6,
            clip_on=False,
        )
        axes.annotate(
            str(score.value),
            (score.at_us, score.seen_us),
            ha="center",
            va="center_baseline",
            fontsize=9 * scale,
            zorder=7,
            annotation_clip=False,
        )


def _time_axis(axis: Any, span: tuple[int, int]) -> None:
    minutes = (span[1] - span[0]) // MINUTE_US
    step = max(1, -(-minutes // 9)) * MINUTE_US
    ticks = list(range(span[0], span[1] + 1, step))
    axis.set_ticks(ticks, [clock_text(at)[:5] for at in ticks])


def _draw_marks(axes: Axes, story: Story, view: View) -> None:
    start, end = min(view.event[0], view.seen[0]), max(view.event[1], view.seen[1])
    axes.plot([start, end], [start, end], ":", color=_IDEAL, lw=1.6, zorder=1.5)
    for line, style in ((story.line, "-"), (story.percentile_line, "--")):
        if line:
            axes.plot(*zip(*line, strict=True), style, color=_MARK, lw=1.8, zorder=4)
    for seen_us in story.signals:
        axes.axhline(seen_us, ls=(0, (5, 3)), color=_RETRACTION, lw=1.1, zorder=1.6)


def _draw_boxes(axes: Axes, story: Story, panes: Sequence[Shown], view: View, scale: float) -> None:
    floors: dict[tuple[int, int], int] = {}
    for pane in panes:
        window = pane.window or view.event
        if pane.is_retraction:
            continue
        floor = floors.get(window, _first_seen(story, window, pane.seen_us))
        floors[window] = pane.seen_us
        colour = _COLOURS[pane.timing]
        box = (window[0], floor)
        size = window[1] - window[0], max(pane.seen_us - floor, 1)
        axes.add_patch(Rectangle(box, *size, facecolor=colour, alpha=0.13, lw=0, zorder=2))
        axes.add_patch(Rectangle(box, *size, fill=False, edgecolor=colour, lw=0.9, alpha=0.8, zorder=3))
        axes.plot(window, [pane.seen_us] * 2, color=colour, lw=2.6 * scale, zorder=5, solid_capstyle="butt")
        _label(axes, story, pane, window, panes, view, scale)


def _first_seen(story: Story, window: tuple[int, int], before: int) -> int:
    times = [one.seen_us for one in story.scores if window[0] <= one.at_us < window[1]]
    return min((at for at in times if at <= before), default=before)


def _label(
    axes: Axes,
    story: Story,
    pane: Shown,
    window: tuple[int, int],
    panes: Sequence[Shown],
    view: View,
    scale: float,
) -> None:
    """The pane's value on its line, and the retracted value, where no score is in the way."""
    taken = [one for one in panes if one.is_retraction and _is_replaced(one, pane, window)]
    shown = [(f"\N{MINUS SIGN}{one.value}", _RETRACTION) for one in taken] + [
        (str(pane.value), _COLOURS[pane.timing])
    ]
    width = window[1] - window[0]
    apart = min(0.75 * width / len(shown), (view.event[1] - view.event[0]) / 13)
    first = (window[0] + window[1] - apart * (len(shown) - 1)) / 2
    places = [first + apart * place for place in range(len(shown))]
    room = (width - apart * (len(shown) - 1)) / 2 - 0.02 * (view.event[1] - view.event[0])
    shift = max(
        (part * room for part in (0, -0.3, 0.3, -0.6, 0.6, -0.9, 0.9)),
        key=lambda by: (_free(story, [place + by for place in places], pane.seen_us, view), -abs(by)),
    )
    for place, (text, colour) in zip(places, shown, strict=True):
        axes.annotate(
            text,
            (place + shift, pane.seen_us),
            xytext=(0, -3),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=12 * scale,
            fontweight="bold",
            color=colour,
            zorder=8,
            bbox={"boxstyle": "round,pad=0.12", "facecolor": "white", "alpha": 0.75, "lw": 0},
        )


def _is_replaced(one: Shown, pane: Shown, window: tuple[int, int]) -> bool:
    inside = one.window is None or (window[0] <= one.window[0] and one.window[1] <= window[1])
    return one.seen_us == pane.seen_us and one.key == pane.key and inside


def _free(story: Story, places: Sequence[float], seen_us: int, view: View) -> bool:
    """Whether no score is drawn where labels at these places would be, right under a line."""
    wide, high = (view.event[1] - view.event[0]) / 19, (view.seen[1] - view.seen[0]) / 13
    return not any(
        abs(score.at_us - place) < wide and -high < score.seen_us - seen_us < high / 2.2
        for score in story.scores
        for place in places
    )


def _legend(stories: Sequence[Story], panes: Sequence[Shown]) -> list[Any]:
    handles: list[Any] = [
        Line2D([], [], ls="", marker="o", ms=9, color="white", mec=_INK, label="score"),
    ]
    if any(story.line for story in stories):
        handles.append(Line2D([], [], color=_MARK, lw=2, label="watermark"))
    handles.append(Line2D([], [], color=_IDEAL, lw=1.6, ls=":", label="ideal"))
    timings = {pane.timing for pane in panes}
    handles += [
        Patch(facecolor=colour, alpha=0.8, label=_NAMES[timing])
        for timing, colour in _COLOURS.items()
        if timing in timings
    ]
    if any(pane.is_retraction for pane in panes):
        handles.append(Patch(facecolor=_RETRACTION, label="retraction"))
    return handles

"""Two pictures: the year in cancellations, with the weeks of the blizzard against the model; and two alarms."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.zeitgeist.results import Results, days_of, days_only_in

_INK: Final = "#2b2f36"
_FAINT: Final = "#6f7782"
_QUIET: Final = "#a9bccf"
_RULE: Final = "#e3e6ea"
_BAND: Final = "#cfe0f1"
_COUNT: Final = "#2f6ea8"
_CANCELLED: Final = "#d9822b"
_ALERT: Final = "#b3261e"

_WEEKS: Final = (pd.Timestamp("2013-02-01"), pd.Timestamp("2013-02-15"))
_AIRPORTS: Final = {"EWR": "Newark", "JFK": "John F. Kennedy", "LGA": "LaGuardia"}
_NAMED_DAYS: Final = 7


def draw(results: Results, path: Path) -> None:
    """Draw the picture into a PNG file.

    Args:
        results: the job's tables.
        path: the file; replaced when it exists.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(13, 12.4), dpi=110, facecolor="white")
        rows = figure.add_gridspec(
            4, 1, height_ratios=[1.55, 1, 1, 1], hspace=0.42, left=0.055, right=0.985, top=0.905, bottom=0.035
        )
        _titles(figure, results)
        _draw_year(figure.add_subplot(rows[0]), results)
        first: Axes | None = None
        for row, origin in enumerate(_AIRPORTS, start=1):
            axes = figure.add_subplot(rows[row], sharex=first, sharey=first)
            first = first or axes
            _draw_airport(axes, results, origin, with_legend=row == 1)
        figure.savefig(path)


def draw_what_if(results: Results, sensitive: Results, path: Path) -> None:
    """Draw the alerts of the run and of the replay with the more sensitive alarm, day by day, into a PNG file."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(13, 6.2), dpi=110, facecolor="white")
        figure.text(0.055, 0.93, "If the alarm had been twice as sensitive", fontsize=19, fontweight="bold")
        days = days_only_in(sensitive, results)
        subtitle = (
            f"{len(sensitive.final_alerts):,} alerts in place of {len(results.final_alerts):,}; "
            f"{len(days)} days have alerts only then"
        )
        figure.text(0.055, 0.885, subtitle, fontsize=11.5, color=_FAINT)
        _draw_alarms(figure.add_axes((0.055, 0.07, 0.93, 0.74)), results, sensitive)
        figure.savefig(path)


def _draw_alarms(axes: Axes, results: Results, sensitive: Results) -> None:
    days = pd.DatetimeIndex(results.counts["time"].dt.normalize().unique())
    before, after = (_alerts_a_day(table, days) for table in (results, sensitive))
    new = days_only_in(sensitive, results).index
    is_new = days.isin(new)
    axes.bar(days[~is_new], after[~is_new], width=1.0, color=_QUIET, label="twice as sensitive")
    axes.bar(days[is_new], after[is_new], width=1.0, color=_CANCELLED, label="a day that only it finds")
    axes.bar(days, before, width=1.0, color=_ALERT, label="as it was")
    for rank, day in enumerate(new[:_NAMED_DAYS], start=1):
        _name_day(axes, after, day, rank)
    _month_axis(axes, days)
    axes.set_ylim(0, max(float(after.max()) * 1.14, 1))
    axes.set_title("Alerts a day; new days numbered by the strength of theirs", **_TITLE)
    axes.legend(loc="upper right", ncols=3)


def _alerts_a_day(results: Results, days: pd.DatetimeIndex) -> pd.Series:
    alerts = results.final_alerts
    return alerts.groupby(alerts["time"].dt.normalize()).size().reindex(days, fill_value=0)


_STYLE: Final[Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _RULE,
    "grid.linewidth": 0.8,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
}


def _titles(figure: Figure, results: Results) -> None:
    flights, alerts = int(results.counts["flights"].sum()), len(results.final_alerts)
    figure.text(0.055, 0.968, "Zeitgeist of New York's airports, 2013", fontsize=19, fontweight="bold")
    subtitle = f"{flights:,} flights, hour by hour, against a model of what is normal; {alerts} alerts"
    figure.text(0.055, 0.946, subtitle, fontsize=11.5, color=_FAINT)


def _draw_year(axes: Axes, results: Results) -> None:
    daily = results.counts.groupby(results.counts["time"].dt.normalize())["cancelled"].sum()
    days = days_of(results)
    alerted = daily.index.isin(days.index)
    axes.bar(daily.index[~alerted], daily[~alerted], width=1.0, color=_QUIET, label="day without an alert")
    axes.bar(daily.index[alerted], daily[alerted], width=1.4, color=_ALERT, label="day with alerts")
    for rank, day in enumerate(days.index[:_NAMED_DAYS], start=1):
        _name_day(axes, daily, day, rank)
    _month_axis(axes, daily.index)
    axes.set_ylim(0, float(daily.max()) * 1.14)
    axes.set_title("Cancelled flights a day, numbered by the strength of their alerts", **_TITLE)
    axes.legend(loc="upper right", ncols=2)


_TITLE: Final[dict[str, Any]] = {"loc": "left", "fontsize": 12, "fontweight": "bold", "pad": 9}


def _name_day(axes: Axes, daily: pd.Series, day: pd.Timestamp, rank: int) -> None:
    """Write rank and date above the bar, clear of a higher neighbouring bar."""
    week = pd.Timedelta(days=7)
    before, after = daily[day - week : day].max(), daily[day : day + week].max()
    side = "left" if before > daily[day] else "right" if after > daily[day] else "center"
    axes.annotate(
        f"{rank}  {day.day} {day:%b}",
        (day, float(daily[day])),
        xytext=({"left": 3, "right": -3, "center": 0}[side], 4 if side == "center" else 0),
        textcoords="offset points",
        ha=side,
        va="bottom" if side == "center" else "top",
        fontsize=9.5,
        fontweight="bold" if rank <= 2 else "normal",
    )


def _month_axis(axes: Axes, days: pd.DatetimeIndex) -> None:
    axes.set_xlim(days.min() - pd.Timedelta(days=2), days.max() + pd.Timedelta(days=2))
    months = pd.date_range(days.min(), days.max(), freq="MS")
    axes.set_xticks(months.to_pydatetime(), months.strftime("%b"))


def _draw_airport(axes: Axes, results: Results, origin: str, *, with_legend: bool) -> None:
    counts = _hourly(results.counts, origin)
    expected = _hourly(results.expectations, origin)
    mean, deviation = _field(expected, "mean"), _field(expected, "deviation")
    low, high = (mean - 4 * deviation).clip(lower=0), mean + 4 * deviation
    axes.fill_between(mean.index, low, high, color=_BAND, linewidth=0, label="normal: mean ± 4 deviations")
    axes.plot(counts.index, counts["departed"], color=_COUNT, linewidth=1.5, label="departed")
    edges = pd.date_range(*_WEEKS, freq="h")
    axes.stairs(counts["cancelled"].fillna(0), edges, fill=True, color=_CANCELLED, label="cancelled")
    _mark_alerts(axes, results, origin)
    axes.set_title(f"{origin}  {_AIRPORTS[origin]}: flights an hour", **_TITLE)
    _day_axis(axes)
    if with_legend:
        axes.legend(
            loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=5, handlelength=1.4, columnspacing=1.4
        )


def _mark_alerts(axes: Axes, results: Results, origin: str) -> None:
    alerts = results.final_alerts
    alerts = alerts[(alerts["origin"] == origin) & alerts["time"].between(*_WEEKS)]
    for kind, marker, height in (("spike", "^", 43.0), ("dip", "v", 48.0)):
        times = alerts.loc[alerts["kind"] == kind, "time"].drop_duplicates() + pd.Timedelta(minutes=30)
        axes.scatter(
            times, [height] * len(times), marker=marker, s=20, color=_ALERT, label=f"{kind} alert", lw=0
        )


def _hourly(table: pd.DataFrame, origin: str) -> pd.DataFrame:
    """One airport's rows in the weeks shown, with a hole for each hour of the night, so that lines break there."""
    hours = pd.date_range(*_WEEKS, freq="h", inclusive="left")
    mine: pd.DataFrame = table[(table["origin"] == origin) & table["time"].isin(hours)]
    return mine.set_index("time").reindex(hours)


def _field(expected: pd.DataFrame, name: str) -> pd.Series:
    return expected["departed"].map(lambda pair: pair[name], na_action="ignore").astype(float)


def _day_axis(axes: Axes) -> None:
    axes.set_xlim(*_WEEKS)
    days = pd.date_range(*_WEEKS, inclusive="left")
    axes.set_xticks(days.to_pydatetime(), days.strftime("%a %d %b"), ha="left")
    axes.set_ylim(0, 52)
    axes.set_yticks([0, 10, 20, 30, 40])
    axes.grid(visible=True, axis="x")

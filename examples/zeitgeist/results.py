"""The job's results: its three tables, for people and for the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pandas as pd

import millpond as mp
from examples.zeitgeist.hours import NEW_YORK
from examples.zeitgeist.job import OUTPUTS
from examples.zeitgeist.oracle import Answer

_TOTALS: Final = ("flights", "departed", "cancelled", "delay")
_EXPECTED: Final = ("departed", "cancelled", "delay", "silent")
_ALERT_PLACE: Final = ["origin", "hour", "kind", "measure", "stage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The job's tables; each has a column ``time`` with New York's local time.

    Attributes:
        counts: a row for each origin and hour from its first flight on, also for hours without a flight.
        expectations: a row for each origin and hour with an expectation.
        alerts: spikes at once, and everything once more when its hour is complete.
    """

    counts: pd.DataFrame
    expectations: pd.DataFrame
    alerts: pd.DataFrame

    @property
    def final_alerts(self) -> pd.DataFrame:
        """The alerts with their final numbers, strongest first."""
        final = self.alerts[self.alerts["stage"] == "final"]
        return final.sort_values(["strength", "hour", "origin"], ascending=[False, True, True])

    @property
    def standstills(self) -> pd.DataFrame:
        """The dips of hours in which a whole airport stood still, in the order of time: nothing left it, or it was silent."""
        dips = self.alerts[self.alerts["kind"] == "dip"]
        still = ((dips["measure"] == "departed") & (dips["value"] == 0)) | (dips["measure"] == "silent")
        return dips[still].sort_values(["hour", "origin"])

    def answer(self, late: int) -> Answer:
        """The results in the oracle's terms, to be compared with its own."""
        return Answer(
            counts={_place(row): _totals(row) for row in _rows(self.counts)},
            expectations={_place(row): _expected(row) for row in _rows(self.expectations)},
            alerts={
                tuple(row[name] for name in _ALERT_PLACE): (row["value"], row["expected"], row["strength"])
                for row in _rows(self.alerts)
            },
            late=late,
        )


def read_results(output: Path) -> Results:
    """Read the tables that the job's sinks have written into ``output``.

    A row that was delivered twice would show here: nothing is made unique on the way.
    """
    tables = {name: mp.read_table(output / name).to_pandas() for name in OUTPUTS}
    return Results(**{name: _with_time(table) for name, table in tables.items()})


def days_of(results: Results) -> pd.DataFrame:
    """The days with alerts, strongest first; a day's strength is the sum of its alerts'."""
    alerts = results.final_alerts.assign(day=lambda table: table["time"].dt.normalize())
    days = alerts.groupby("day").agg(
        strength=("strength", "sum"),
        spikes=("kind", lambda kinds: int((kinds == "spike").sum())),
        dips=("kind", lambda kinds: int((kinds == "dip").sum())),
        origins=("origin", lambda names: ", ".join(sorted(set(names)))),
    )
    totals = results.counts.assign(day=lambda table: table["time"].dt.normalize())
    totals = totals.groupby("day")[["flights", "cancelled"]].sum()
    return days.join(totals).sort_values("strength", ascending=False)


def days_only_in(results: Results, other: Results) -> pd.DataFrame:
    """The days with alerts on which the other results have none, strongest first."""
    days = days_of(results)
    return days[~days.index.isin(days_of(other).index)]


def _with_time(table: pd.DataFrame) -> pd.DataFrame:
    time = pd.to_datetime(table["hour"], utc=True, format="%Y-%m-%dT%H:%MZ")
    local = time.dt.tz_convert(NEW_YORK).dt.tz_localize(None)
    return table.assign(time=local).sort_values(["time", "origin"]).reset_index(drop=True)


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.to_dict("records")
    return rows


def _place(row: dict[str, Any]) -> tuple[str, str]:
    return row["origin"], row["hour"]


def _totals(row: dict[str, Any]) -> dict[str, int]:
    return {name: row[name] for name in _TOTALS}


def _expected(row: dict[str, Any]) -> dict[str, tuple[float, float]]:
    return {name: (row[name]["mean"], row[name]["deviation"]) for name in _EXPECTED}

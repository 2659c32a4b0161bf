"""The same answer without Millpond: one table in memory, sorted, and a loop.

Written from the description of the job and sharing no code with it, so that agreement means that both are right.
It processes the whole year at once, which a stream cannot do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pandas as pd

_MEASURES: Final = ("departed", "cancelled", "delay", "silent")
_STEPS: Final = {"cancelled": 3, "delay": 300}


@dataclass(frozen=True, slots=True)
class Answer:
    """What the job must come to.

    Attributes:
        counts: (origin, hour) → the hour's totals.
        expectations: (origin, hour) → mean and deviation of each measure.
        alerts: (origin, hour, kind, measure, stage) → (value, expected, strength).
        late: number of flights that were too late to be counted.
    """

    counts: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    expectations: dict[tuple[str, str], dict[str, tuple[float, float]]] = field(default_factory=dict)
    alerts: dict[tuple[str, ...], tuple[float, float, float]] = field(default_factory=dict)
    late: int = 0


def compute(arrivals: pd.DataFrame, sensitivity: float = 1) -> Answer:
    """The answer for these flights, by an alarm of this sensitivity."""
    on_time = arrivals[~(arrivals["delay_minutes"] > 300).fillna(False).astype(bool)]
    answer = Answer(late=len(arrivals) - len(on_time))
    table = _hourly(on_time)
    for (origin, _), days in table.groupby(["origin", "local_hour"]):
        _follow(answer, str(origin), days.sort_values("start"), sensitivity)
    return answer


def differences(answer: Answer, found: Answer) -> list[str]:
    """Return the deviations of the results from this answer; empty if they agree."""
    lines = [] if answer.late == found.late else [f"late: {found.late} instead of {answer.late}"]
    for name in ("counts", "expectations", "alerts"):
        ours, theirs = getattr(answer, name), getattr(found, name)
        lines += [f"{name}: {place} is missing" for place in ours.keys() - theirs.keys()]
        lines += [f"{name}: {place} is too much" for place in theirs.keys() - ours.keys()]
        both = ours.keys() & theirs.keys()
        lines += [
            f"{name}: {place} is {theirs[place]} instead of {ours[place]}"
            for place in both
            if not _close(ours[place], theirs[place])
        ]
    return sorted(lines)


def _hourly(flights: pd.DataFrame) -> pd.DataFrame:
    start = flights["scheduled"].dt.floor("h")
    delay = flights["delay_minutes"].astype("Float64")
    table = pd.DataFrame(
        {
            "origin": flights["origin"],
            "start": start,
            "departed": delay.notna().astype(int),
            "cancelled": delay.isna().astype(int),
            "delay": delay.fillna(0).clip(lower=0).astype(int),
        }
    )
    table = table.groupby(["origin", "start"]).sum()
    table = pd.concat([_every_hour(origin, hours) for origin, hours in table.groupby("origin")])
    local = table["start"].dt.tz_convert("America/New_York")
    return table.assign(local_hour=local.dt.hour, day=local.dt.tz_localize(None).dt.normalize())


def _every_hour(origin: str, hours: pd.DataFrame) -> pd.DataFrame:
    """An airport's hours from its first flight to its last, those without a flight too."""
    hours = hours.droplevel("origin")
    whole = pd.date_range(hours.index.min(), hours.index.max(), freq="h", name="start")
    silent = (~whole.isin(hours.index)).astype(int)
    return hours.reindex(whole, fill_value=0).assign(silent=silent).reset_index().assign(origin=origin)


def _follow(answer: Answer, origin: str, days: pd.DataFrame, sensitivity: float) -> None:
    """One hour of the day at one airport, through the year."""
    models: dict[str, _Model] = {measure: _Model(measure) for measure in _MEASURES}
    expected: dict[str, tuple[float, float]] | None = None
    expected_day: Any = None
    for day in days.itertuples():
        place = (origin, day.start.strftime("%Y-%m-%dT%H:%MZ"))
        totals = {measure: int(getattr(day, measure)) for measure in _MEASURES}
        answer.counts[place] = {**totals, "flights": totals["departed"] + totals["cancelled"]}
        del answer.counts[place]["silent"]
        if expected is not None and expected_day == day.day:
            answer.alerts.update(_judge(place, totals, expected, sensitivity))
        for measure, model in models.items():
            model.learn(totals[measure])
        if models["delay"].days >= 14:
            expected = {measure: model.expectation() for measure, model in models.items()}
            expected_day = day.day + pd.Timedelta(days=1)
            answer.expectations[origin, _same_time(expected_day, day.local_hour)] = expected


def _same_time(day: Any, local_hour: int) -> str:
    wall = day + pd.Timedelta(hours=local_hour)
    # The hour that the clocks skip in March is the next one, and of the two in November it is the first.
    local = wall.tz_localize("America/New_York", ambiguous=True, nonexistent="shift_forward")
    return str(local.tz_convert("UTC").strftime("%Y-%m-%dT%H:%MZ"))


def _judge(
    place: tuple[str, str],
    totals: dict[str, int],
    expected: dict[str, tuple[float, float]],
    sensitivity: float,
) -> Iterator[tuple[tuple[str, ...], tuple[float, float, float]]]:
    for measure, step in _STEPS.items():
        mean, deviation = expected[measure]
        total, limit = totals[measure], mean + deviation * 6 / sensitivity
        if total > limit:
            steps = [number for number in range(step, total + 1, step) if number > limit]
            first = steps[0] if steps else total
            for stage, value in (("at once", first), ("final", total)):
                yield (*place, "spike", measure, stage), (value, mean, abs(value - mean) / deviation)
    mean, deviation = expected["departed"]
    if totals["departed"] < mean - deviation * 4 / sensitivity:
        strength = (mean - totals["departed"]) / deviation
        yield (*place, "dip", "departed", "final"), (totals["departed"], mean, strength)
    share, deviation = expected["silent"]
    if totals["silent"] and 1 - share > deviation * 6 / sensitivity:
        yield (*place, "dip", "silent", "final"), (1, share, (1 - share) / deviation)


class _Model:
    def __init__(self, measure: str) -> None:
        self.grain, self.base = {"delay": (20, 60), "silent": (0.02, 1)}.get(measure, (1, 1))
        self.is_tame = measure == "silent"
        self.days = 0
        self.mean = self.variance = 0.0

    def deviation(self) -> float:
        return math.sqrt(max(self.variance, self.grain * (self.mean + self.base)))

    def expectation(self) -> tuple[float, float]:
        return round(self.mean, 3), round(self.deviation(), 3)

    def learn(self, value: int) -> None:
        weight = max(0.1, 1 / (self.days + 1))
        surprise = value - self.mean
        if self.days >= 5 and not self.is_tame and abs(surprise) > 3 * self.deviation():
            surprise = math.copysign(3 * self.deviation(), surprise)
        self.mean += weight * surprise
        self.variance = (1 - weight) * (self.variance + weight * surprise**2) if self.days else 0.0
        self.days += 1


def _close(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_close(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, Sequence):
        return len(ours) == len(theirs) and all(map(_close, ours, theirs))
    return math.isclose(ours, theirs, rel_tol=1e-6, abs_tol=0.011)

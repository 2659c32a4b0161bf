"""The three computations of Zeitgeist: count each hour, learn the normal values, report deviations.

::

    flights --> WindowCounter --counts--> HourModel --expectations--> Detector --> alerts
                    |  |                                               ^   ^
                    |  +---counts--------------------------------------+   |
                    +------progress----------------------------------------+

The answer is a function of the flights alone. The alerts are the same however the stream is cut into batches, and
wherever a run was killed and resumed, because

- an hour's numbers are sums, and event timers close the hour, never the wall clock; they also close hours without a
  flight, so that the model learns which hours are silent. The watermark decides about an unusual silence, because no
  record would report it (§2);
- the flight itself determines if it is too late to be counted (`PATIENCE_MINUTES`), not the batch;
- an hour is judged by the one expectation that was made for it, from the days before;
- an alert depends on total and expectation, but not on which of the two arrives first.

State is plain JSON with names in it, because people read it in SQL.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import millpond as mp
from examples.zeitgeist.hours import end_of, hour_of, local_hour, local_time, next_day, next_hour
from examples.zeitgeist.normal import (
    MEASURES,
    SPIKING,
    Expectation,
    expectation,
    first_step_above,
    learned,
)

PATIENCE_MINUTES: Final = 5 * 60
"""A flight that leaves later than this after its schedule is late: counted as such, and in no hour."""

_NOTHING: Final[Mapping[str, int]] = {"flights": 0, "departed": 0, "cancelled": 0, "delay": 0}
_END_OF_TIME_US: Final = 2**63 - 1

WARM_UP_DAYS: Final = 14
"""A model that has seen fewer days expects nothing."""


class WindowCounter(mp.Computation):
    """Key: origin. Counts the flights of each hour; produces totals as they grow, and once more at the end.

    From an airport's first flight on, every hour has totals, even without a flight: the timer of an hour sets the timer of
    the next one. After the last flight this continues up to the watermark before the end of the input, since the time after
    the end is not silence.
    """

    def process_records(self, context: mp.Context, records: mp.Records) -> None:
        """Count flights in their hours; progress is produced whenever a total passes a step."""
        state = context.state.get({"late": 0, "next": None, "hours": {}})
        for record in records:
            delay = record.value["delay_minutes"]
            if record.late or (delay or 0) > PATIENCE_MINUTES:
                state["late"] += 1
                continue
            hour = hour_of(record.at)
            if state["next"] is None or hour < state["next"]:
                self._close_next(context, state, hour)
            self._count(context, state["hours"], hour, delay)
        context.state.set(state)

    def process_timer(self, context: mp.Context, timer: mp.Timer) -> None:
        """No flight of the hour is still to come: produce its totals, forget it, and wait for the next one."""
        state = context.state.get()
        hour = state["next"]
        totals = state["hours"].pop(hour, dict(_NOTHING))
        place = {"origin": context.key, "hour": hour, "local_hour": local_hour(hour)}
        context.produce("counts", place | totals | {"silent": int(totals["flights"] == 0)})
        state["next"] = None
        if state["hours"] or context.watermark < _END_OF_TIME_US:
            self._close_next(context, state, next_hour(hour))
        context.state.set(state)

    def _close_next(self, context: mp.Context, state: dict[str, Any], hour: str) -> None:
        state["next"] = hour
        _set_timer_at_end(context, hour, tag="next")

    def _count(self, context: mp.Context, hours: dict[str, Any], hour: str, delay: int | None) -> None:
        totals = hours.setdefault(hour, dict(_NOTHING))
        steps = _steps(totals)
        totals["flights"] += 1
        totals["cancelled" if delay is None else "departed"] += 1
        totals["delay"] += max(delay or 0, 0)
        if _steps(totals) != steps:
            context.produce("progress", {"origin": context.key, "hour": hour} | _steps(totals))


class HourModel(mp.Computation):
    """Key: origin and hour of the day. Learns the normal values, and produces the expectation for the next day.

    An hour is thus judged by earlier days only, and its expectation is known most of a day ahead.
    """

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """Learn from the day, then produce the expectation for the next one."""
        count = record.value
        state = context.state.get({"days": 0})
        for name, measure in MEASURES.items():
            state[name] = learned(state.get(name), state["days"], count[name], measure)
        state["days"] += 1
        context.state.set(state)
        if state["days"] >= WARM_UP_DAYS:
            context.produce("expectations", _expectations(state, count["origin"], next_day(count["hour"])))


class Detector(mp.Computation):
    """Key: origin. Compares totals with expectations: reports spikes at once, and dips when the hour is over.

    A spike needs no complete picture, since delayed data would only add to a total that is too high already
    (§4.6). A dip does: a timer waits until the low watermark has passed the end of the hour. ``sensitivity`` divides the
    distance from the normal value to the alarm.
    """

    def __init__(self, sensitivity: float = 1) -> None:
        self._sensitivity = sensitivity

    def process_records(self, context: mp.Context, records: mp.Records) -> None:
        """Store running totals, final ones and expectations, and report a spike as soon as it shows."""
        hours = context.state.get({})
        for record in records:
            hour = record.value["hour"]
            if hour not in hours:
                hours[hour] = {"raised": []}
                _set_timer_at_end(context, hour)
            entry = hours[hour]
            if record.stream == "expectations":
                entry["expected"] = {name: record.value[name] for name in MEASURES}
            else:
                entry["totals"] = _larger(entry.get("totals", {}), record.value)
            self._report_spikes(context, hour, entry)
        context.state.set(hours)

    def process_timer(self, context: mp.Context, timer: mp.Timer) -> None:
        """The hour is complete: report dips, and every spike once more with its final total.

        A closed airport reports cancelled flights. A total absence of records is a dip too, if the hour is seldom silent. An
        hour that was never counted, because the input had ended, is not judged.
        """
        hours = context.state.get()
        entry = hours.pop(timer.tag)
        context.state.set(hours)
        if "expected" not in entry or "departed" not in entry.get("totals", {}):
            return
        for name in entry["raised"]:
            _produce_alert(context, timer.tag, entry, kind="spike", measure=name)
        departed, silent = (Expectation(**entry["expected"][name]) for name in ("departed", "silent"))
        if entry["totals"]["departed"] < departed.dip_limit(self._sensitivity):
            _produce_alert(context, timer.tag, entry, kind="dip", measure="departed")
        if entry["totals"]["silent"] > silent.spike_limit(self._sensitivity):
            _produce_alert(context, timer.tag, entry, kind="dip", measure="silent")

    def _report_spikes(self, context: mp.Context, hour: str, entry: dict[str, Any]) -> None:
        if "expected" not in entry or "totals" not in entry:
            return
        for name, step in SPIKING.items():
            limit = Expectation(**entry["expected"][name]).spike_limit(self._sensitivity)
            total = entry["totals"][name]
            if total > limit and name not in entry["raised"]:
                entry["raised"].append(name)
                seen = min(first_step_above(limit, step), total)
                _produce_alert(context, hour, entry, kind="spike", measure=name, seen=seen)


def _set_timer_at_end(context: mp.Context, hour: str, tag: str | None = None) -> None:
    """What the timer produces belongs to the hour: its time is the last microsecond of it."""
    context.set_timer(end_of(hour), tag=tag or hour, output_at=end_of(hour) - 1)


def _steps(totals: Mapping[str, int]) -> dict[str, int]:
    return {name: totals[name] // step * step for name, step in SPIKING.items()}


def _larger(known: Mapping[str, int], update: Mapping[str, Any]) -> dict[str, int]:
    """Totals only grow, so the larger total is the newer, in whatever order updates arrive."""
    names = [name for name in MEASURES if name in known or name in update]
    return {name: max(known.get(name, 0), update.get(name, 0)) for name in names}


def _expectations(state: Mapping[str, Any], origin: str, hour: str) -> dict[str, Any]:
    expected = {name: expectation(state[name], measure) for name, measure in MEASURES.items()}
    place = {"origin": origin, "hour": hour, "local_hour": local_hour(hour), "days": state["days"]}
    return place | {name: {"mean": e.mean, "deviation": e.deviation} for name, e in expected.items()}


def _produce_alert(
    context: mp.Context,
    hour: str,
    entry: Mapping[str, Any],
    *,
    kind: str,
    measure: str,
    seen: int | None = None,
) -> None:
    expected = Expectation(**entry["expected"][measure])
    value = entry["totals"][measure] if seen is None else seen
    alert = {
        "origin": context.key,
        "hour": hour,
        "local_time": f"{local_time(hour):%Y-%m-%d %H:%M}",
        "kind": kind,
        "measure": measure,
        "stage": "final" if seen is None else "at once",
        "value": value,
        "expected": expected.mean,
        "strength": expected.strength(value),
    }
    context.produce("alerts", alert, at=end_of(hour) - 1)

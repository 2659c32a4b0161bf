"""An oracle without an engine for the panes of windows, computed the slow and obvious way.

It keeps every element, asks every trigger, and knows neither state, nor rows, nor bundles on disk.
It is written from the semantics of windows (the Dataflow model, Beam, the windowing patent and the
transcripts' format) and shares no code with `millpond.executor.windows`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from typing import Any, Final, NamedTuple, TypeAlias
from zoneinfo import ZoneInfo

from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US
from tests.oracles.trigger import (
    EXACT,
    Moment,
    OracleTrigger,
    TriggerSpec,
    percentiles_of,
    waits_for_signal,
)
from tests.oracles.triggers import oracle_trigger

_SECOND_US: Final = 1_000_000
_GLOBAL: Final = (TIME_MIN_US, TIME_MAX_US)
_EXPIRY: Final = EXACT + 1
_LAST_INSTANT_US: Final = 253_402_300_799_999_999
"""The last microsecond of the year 9999: no pane is later."""

Bounds: TypeAlias = tuple[int, int]


class Arrival(NamedTuple):
    """One element: key, event time in microseconds, and value, an integer."""

    key: str
    at: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec:
    """A windowing strategy as plain data.

    Attributes:
        window_fn: a name and seconds, for example ``("SlidingWindows", 10, 5)``.
        trigger: see `TriggerSpec`.
        mode: how panes relate.
        lateness: allowed lateness in microseconds.
        combiner: the timestamp combiner of panes.
        closing: whether an expiring window emits a last pane.
        empty_on_time: whether the on-time pane is emitted even if no element arrived.
        shift: how far elements are moved before they get windows, in microseconds.
        horizon: how far that step holds the watermark back, in microseconds.
        incremental: whether each pane is preceded by a retraction of the previous one, in any mode.
        asked: ``element``: triggers are asked after each element, in order of arrival; ``bundle``: once for all.
    """

    window_fn: tuple[Any, ...]
    trigger: TriggerSpec
    mode: str = "discarding"
    lateness: int = 0
    combiner: str = "OUTPUT_AT_EOW"
    closing: str = "if_non_empty"
    empty_on_time: bool = True
    asked: str = "bundle"
    incremental: bool = False
    shift: int = 0
    horizon: int = 0


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class OraclePane:
    """One pane, with sorted ``values``."""

    key: str
    window: Bounds
    index: int
    is_retraction: bool
    values: tuple[int, ...]
    at: int
    nonspeculative_index: int
    timing: str
    is_last: bool
    share: float | None


@dataclass(slots=True)
class _Window:
    bounds: Bounds
    trigger: OracleTrigger
    values: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    since_last_pane: int = 0
    index: int = 0
    nonspeculative_index: int = 0
    has_ended: bool = False
    shown: list[OraclePane] = field(default_factory=list)
    is_finished: bool = False


class WindowOracle:
    """The windows of all keys of one step.

    Args:
        spec: the strategy.
        wall: the initial wall time.
        kept: the percentiles whose watermarks the pipeline maintains; the step's own by default.
        phases: the start of each key's unaligned windows, in microseconds.
        by_ingress: whether elements have the time of their arrival, and the watermark follows the clock.

    Attributes:
        panes: all panes so far.
        dropped: elements all of whose windows had expired.
        after_last: elements of windows whose trigger had finished.
    """

    def __init__(
        self,
        spec: WindowSpec,
        wall: int = 0,
        kept: Iterable[int] | None = None,
        *,
        phases: Mapping[str, int] | None = None,
        by_ingress: bool = False,
    ) -> None:
        self.spec = spec
        self._phases = phases or {}
        self._by_ingress = by_ingress
        own = percentiles_of(spec.trigger)
        self._own = (*own, EXACT)
        self._promised: dict[int, int] = dict.fromkeys({*(own if kept is None else kept), EXACT}, TIME_MIN_US)
        self.wall: int = wall
        self.panes: list[OraclePane] = []
        self.dropped: int = 0
        self.after_last: int = 0
        self._keys: dict[str, dict[Bounds, _Window]] = {}

    # -- what happens ----------------------------------------------------------------------

    def feed(self, arrivals: Iterable[Arrival]) -> None:
        """Process a bundle: each key's elements in the order of their times, or each element as a bundle."""
        moved = [self._moved(arrival) for arrival in arrivals]
        if self._by_ingress and self.spec.shift and moved:
            # The step that moves elements has seen their arrival before.
            self._promise(min(self.wall, min(each.at for each in moved) + self.spec.horizon), EXACT)
        if self.spec.asked == "element":
            for arrival in moved:
                self._add(arrival.key, [arrival])
                self._ring(arrival.key)
        else:
            by_key: dict[str, list[Arrival]] = {}
            for arrival in sorted(moved, key=lambda arrival: arrival.at):
                by_key.setdefault(arrival.key, []).append(arrival)
            for key, members in by_key.items():
                self._add(key, members)
                self._ring(key)
        if self._by_ingress and moved:
            self.move_watermark(self.wall)

    def _moved(self, arrival: Arrival) -> Arrival:
        at = self.wall if self._by_ingress else arrival.at
        return arrival._replace(at=at + self.spec.shift)

    @property
    def watermark(self) -> int:
        return self._promised[EXACT]

    def move_watermark(self, at: int, percentile: int = EXACT) -> None:
        """Advance a watermark through all times up to ``at``; ignore an unmaintained one."""
        if percentile not in self._promised:
            return
        self._promise(at, percentile)
        for key in self._keys:
            self._ring(key)

    def _promise(self, at: int, percentile: int) -> None:
        held = at if at == TIME_MAX_US else at - self.spec.horizon
        self._promised[percentile] = max(self._promised[percentile], held)

    def move_wall(self, micros: int) -> None:
        self.wall += micros
        if self._by_ingress:
            self._promise(self.wall, EXACT)
        for key in self._keys:
            self._ring(key)

    def signal(self, key: str) -> None:
        """Signal all windows of a key, if the step's trigger waits for a signal."""
        if not waits_for_signal(self.spec.trigger):
            return
        for bounds, window in sorted(self._keys.get(key, {}).items()):
            if not window.is_finished:
                moment = self._moment(bounds)
                window.trigger.signal(moment)
                self._ask(key, window, moment, by_event_time=False)
        if key in self._keys:
            self._ring(key)

    # -- elements --------------------------------------------------------------------------

    def _add(self, key: str, members: Sequence[Arrival]) -> None:
        windows = self._keys.setdefault(key, {})
        assigned: dict[Bounds, list[Arrival]] = {}
        for member in members:
            windows_of = _assigned(self.spec.window_fn, member.at, self._phases.get(key, 0))
            live = [bounds for bounds in windows_of if self.watermark < self._expiry(bounds)]
            self.dropped += bool(windows_of) and not live
            for bounds in live:
                assigned.setdefault(bounds, []).append(member)
        if self.spec.window_fn[0] == "Sessions":
            assigned = self._merged(key, windows, assigned)
        for bounds, arrived in assigned.items():
            window = windows.setdefault(bounds, _Window(bounds, oracle_trigger(self.spec.trigger)))
            if window.is_finished:
                self.after_last += len(arrived)
                continue
            moment = self._moment(bounds)
            window.values += [arrival.value for arrival in arrived]
            moment.values = window.values
            for arrival in arrived:
                window.trigger.element(arrival.at, arrival.value, moment)
                window.since_last_pane += 1
                if self.watermark <= (stands_for := self._stands_for(arrival.at)):
                    window.times.append(stands_for)
            self._ask(key, window, moment, by_event_time=False)

    def _stands_for(self, at: int) -> int:
        is_custom = self.spec.window_fn[0] == "CustomTimestampingFixedWindowsWindowFn"
        shift = is_custom and self.spec.combiner == "OUTPUT_AT_EARLIEST_TRANSFORMED"
        return at + 100 * _SECOND_US * shift

    def _merged(
        self, key: str, windows: dict[Bounds, _Window], assigned: dict[Bounds, list[Arrival]]
    ) -> dict[Bounds, list[Arrival]]:
        homes: dict[Bounds, list[Arrival]] = {}
        for group in _overlapping([*windows, *assigned]):
            bounds = (min(start for start, _ in group), max(end for _, end in group))
            there = [windows.pop(part) for part in group if part in windows]
            if there:
                windows[bounds] = there[0] if len(group) == 1 else self._joined(bounds, there)
            arrived = [arrival for part in group for arrival in assigned.get(part, ())]
            if arrived:
                homes[bounds] = arrived
        self._keys[key] = windows
        return homes

    def _joined(self, bounds: Bounds, sources: Sequence[_Window]) -> _Window:
        joined = _Window(bounds, oracle_trigger(self.spec.trigger))
        for source in sources:
            if source.bounds == bounds:
                joined.index, joined.nonspeculative_index = source.index, source.nonspeculative_index
                joined.has_ended = source.has_ended
        unfinished = [source for source in sources if not source.is_finished]
        joined.is_finished = not unfinished
        for source in unfinished:
            joined.values += source.values
            joined.times += source.times
            joined.since_last_pane += source.since_last_pane
            joined.shown += source.shown
        if unfinished:
            moment = self._moment(bounds)
            moment.values = joined.values
            joined.trigger.merge([source.trigger for source in unfinished], moment)
        return joined

    # -- time ------------------------------------------------------------------------------

    def _expiry(self, bounds: Bounds) -> int:
        return min(bounds[1] + self.spec.lateness + 1, TIME_MAX_US)

    def _mark(self, percentile: int) -> int:
        """A watermark is never behind the watermarks of greater percentiles."""
        return max(at for promised, at in self._promised.items() if promised >= percentile)

    def _moment(self, bounds: Bounds, at: int | None = None, clock: int = EXACT) -> Moment:
        """Return the clocks as a timer of ``clock`` sees them at ``at``.

        Watermarks of lower percentiles have reached that time; higher ones are just before it.
        """
        marks = {percentile: self._mark(percentile) for percentile in self._own}
        if at is not None:
            marks = {
                percentile: min(mark, at if percentile <= clock else at - 1)
                for percentile, mark in marks.items()
            }
        return Moment(marks=marks, wall=self.wall, end=bounds[1])

    def _ring(self, key: str) -> None:
        windows = self._keys[key]
        while True:
            alarms = [
                (at, clock, bounds)
                for bounds, window in windows.items()
                for at, clock in window.trigger.all_alarms()
                if not window.is_finished
            ]
            # Among alarms due at one time, lower percentiles ring first, and windows expire after all triggers.
            alarms += [(self._expiry(bounds), _EXPIRY, bounds) for bounds in windows]
            due = sorted(alarm for alarm in alarms if alarm[0] <= self._now(alarm[1]))
            if not due:
                return
            at, clock, bounds = due[0]
            window = windows[bounds]
            if clock == _EXPIRY:
                self._expire(key, window, at)
                del windows[bounds]
                continue
            window.trigger.silence((at, clock))
            is_event = clock <= EXACT
            moment = self._moment(bounds, at, clock) if is_event else self._moment(bounds)
            self._ask(key, window, moment, by_event_time=is_event)

    def _now(self, clock: int) -> int:
        if clock == _EXPIRY:
            return self.watermark
        return self._mark(clock) if clock <= EXACT else self.wall

    def _expire(self, key: str, window: _Window, at: int) -> None:
        closing = self.spec.closing
        is_empty = not window.since_last_pane
        if window.is_finished or closing == "never" or (closing == "if_non_empty" and is_empty):
            return
        moment = self._moment(window.bounds, at)
        self._show(key, window, moment, is_last=True, by_event_time=True, even_empty=True)

    # -- panes -----------------------------------------------------------------------------

    def _ask(self, key: str, window: _Window, moment: Moment, *, by_event_time: bool) -> None:
        if not window.trigger.is_ready(moment):
            return
        finished = window.trigger.fire(moment)
        self._show(key, window, moment, is_last=finished, by_event_time=by_event_time, even_empty=False)
        if finished:
            window.is_finished = True
            window.values, window.times, window.shown, window.since_last_pane = [], [], [], 0

    def _show(
        self,
        key: str,
        window: _Window,
        moment: Moment,
        *,
        is_last: bool,
        by_event_time: bool,
        even_empty: bool,
    ) -> None:
        is_retracting = self.spec.incremental or self.spec.mode == "retracting"
        is_early = moment.watermark < window.bounds[1]
        is_on_time = not is_early and by_event_time and not window.has_ended
        window.has_ended |= not is_early
        if is_on_time and self.spec.empty_on_time and not is_retracting:
            even_empty = True
        if not window.since_last_pane and not even_empty:
            return
        pane = OraclePane(
            key=key,
            window=window.bounds,
            values=tuple(sorted(window.values)),
            at=self._pane_at(window),
            index=window.index,
            nonspeculative_index=-1 if is_early else window.nonspeculative_index,
            timing="early" if is_early else "on_time" if is_on_time else "late",
            is_last=is_last,
            is_retraction=False,
            share=None if not is_early and not is_on_time else moment.share,
        )
        if is_retracting:
            self.panes += [
                replace(old, is_retraction=True, timing=pane.timing, is_last=False, share=pane.share)
                for old in window.shown
            ]
            window.shown = [pane]
        self.panes.append(pane)
        window.index += 1
        window.nonspeculative_index += not is_early
        window.since_last_pane, window.times = 0, []
        if self._clears(moment.asked):
            window.values = []

    def _clears(self, asked: str | None) -> bool:
        match self.spec.mode:
            case "discarding":
                return True
            case "clear_by_default":
                return asked != "keep"
            case "accumulate_by_default":
                return asked == "clear"
        return False

    def _pane_at(self, window: _Window) -> int:
        if self.spec.combiner == "OUTPUT_AT_EOW" or not window.times:
            return min(window.bounds[1] - 1, _LAST_INSTANT_US)
        return max(window.times) if self.spec.combiner == "OUTPUT_AT_LATEST" else min(window.times)


def _assigned(window_fn: tuple[Any, ...], at: int, phase: int) -> list[Bounds]:
    match window_fn:
        case ("GlobalWindows",):
            return [_GLOBAL]
        case ("Sessions", gap):
            return [(at, at + gap * _SECOND_US)]
        case ("FixedWindows" | "CustomTimestampingFixedWindowsWindowFn", size, *offset):
            return _covering(at, size, size, *offset)
        case ("UnalignedFixedWindows", size):
            number = (at - phase) // (size * _SECOND_US)
            return [tuple(phase + edge * size * _SECOND_US for edge in (number, number + 1))]
        case ("CalendarWindows", unit, count, zone):
            return [_on_the_calendar(unit.strip("'"), count, ZoneInfo(zone.strip("'")), at)]
        case ("SlidingWindows", size, period, *offset):
            return _covering(at, size, period, *offset)
    raise ValueError(f"the oracle knows no {window_fn}")


def _on_the_calendar(unit: str, count: int, zone: ZoneInfo, at: int) -> Bounds:
    """Return all instants whose local dates lie in the same piece of the calendar, found by search."""

    def piece(instant: int) -> int:
        day = datetime.fromtimestamp(instant // _SECOND_US, zone).date()
        months = (day.year - 1970) * 12 + day.month - 1
        weeks = (day.toordinal() - date(1970, 1, 5).toordinal()) // 7
        days = day.toordinal() - date(1970, 1, 1).toordinal()
        number = {"days": days, "weeks": weeks, "months": months, "years": day.year - 1970}[unit]
        return number // count

    here, reach = piece(at), (count + 1) * 367 * 86_400 * _SECOND_US
    instants = range(at - reach, at + reach)
    return (
        instants[bisect_left(instants, here, key=piece)],
        instants[bisect_left(instants, here + 1, key=piece)],
    )


def _covering(at: int, size: int, period: int, offset: int = 0) -> list[Bounds]:
    """Return all windows that contain the time and start a whole number of periods away from the offset."""
    around = at // (period * _SECOND_US)
    reach = size // period + 2 + offset // period
    starts = [(number * period + offset) * _SECOND_US for number in range(around - reach, around + reach)]
    return [(start, start + size * _SECOND_US) for start in starts if start <= at < start + size * _SECOND_US]


def _overlapping(windows: Iterable[Bounds]) -> list[list[Bounds]]:
    """Return groups of windows in which each overlaps another of the group."""
    groups: list[list[Bounds]] = []
    for window in sorted(set(windows)):
        if groups and window[0] < max(end for _, end in groups[-1]):
            groups[-1].append(window)
        else:
            groups.append([window])
    return groups

"""Turns of keys whose windows do nothing but wait for their end, in a fraction of the time of `KeyWindows`.

Most windows get elements before their end, emit one pane when the watermark passes it, and expire. `KeyWindows` has
the whole semantics: it makes objects of windows, triggers and timers, and asks each. Here the same turn is arithmetic on
the row's JSON. The result is the same to the byte, and a turn in which anything else happens is left to `KeyWindows`: late
elements, retractions, triggers with state, rows of other settings, and whatever raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import orjson

from millpond.executor.computation.quick_turn import QuickTurn
from millpond.executor.computation.records import RecordColumns
from millpond.executor.computation.state import StoredState
from millpond.executor.computation.timers import Timer, Timers, firing_order
from millpond.executor.computation.values import ArrowValues, copied
from millpond.executor.time.clocks import EXACT, Clocks
from millpond.executor.time.instants import INSTANT_MAX_US
from millpond.executor.windows.combiners import (
    CombineFn,
    Count,
    CountDistinct,
    Last,
    Max,
    Mean,
    Min,
    Quantiles,
    StdDev,
    Sum,
    ToList,
    TopN,
    ToSet,
    ValueExtractor,
    extract,
)
from millpond.executor.windows.key_windows import EXPIRY, Finish
from millpond.executor.windows.pane import Pane, Timing, element_value
from millpond.executor.windows.strategy import Accumulation, WindowingStrategy
from millpond.executor.windows.time_triggers import Default
from millpond.executor.windows.trigger import TriggerTimer
from millpond.executor.windows.window import Element, TimestampCombiner, Window
from millpond.executor.windows.window_fns import (
    FixedWindows,
    SlidingWindows,
    UnalignedFixedWindows,
)
from millpond.statestore.durations import duration_us
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.rows.value_text import encode_value

_OF_ONE_SIZE: Final = frozenset({FixedWindows, UnalignedFixedWindows, SlidingWindows})
_OF_FIELD: Final = frozenset(
    {Sum, Mean, StdDev, Min, Max, TopN, Last, ToList, ToSet, CountDistinct, Quantiles}
)
END: Final = TriggerTimer("", "", TimeDomain.EVENT).to_text()
_WAITING: Final = ["window", "accumulator", "news", "is_held", "timers"]
_ENDED: Final = frozenset({"window", "accumulator", "index", "nonspeculative_index", "has_ended"})
# Of texts with types.
_MARK: Final = " "
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1


def more_than_waiting(strategy: WindowingStrategy) -> str | None:
    """Return what windows of this strategy do besides waiting for their end; ``None`` if nothing, without late elements."""
    found = {
        "the trigger is not the default one": type(strategy.trigger) is not Default,
        f"accumulation is {strategy.accumulation.value}": strategy.accumulation
        not in (Accumulation.DISCARDING, Accumulation.ACCUMULATING),
        "panes are incremental": strategy.incremental,
        "panes have another time than the end of their window": strategy.timestamp_combiner
        is not TimestampCombiner.END_OF_WINDOW,
        f"closing is {strategy.closing}": strategy.closing != "if_non_empty",
        "it has a state_version": strategy.state_version > 0,
    }
    return next((reason for reason, holds in found.items() if holds), None)


def has_short_turns(strategy: WindowingStrategy) -> bool:
    """Return True if keys whose windows only wait may take short turns."""
    return type(strategy.window_fn) in _OF_ONE_SIZE


class ShownPanes:
    """The envelopes of one bundle's panes, all of which are emitted at the ends of their windows.

    Attributes:
        json: the pane itself, as JSON.
    """

    def __init__(self, strategy: WindowingStrategy, clocks: Clocks, finish: Finish | None) -> None:
        self._pane = Pane(
            index=0,
            nonspeculative_index=0,
            timing=Timing.ON_TIME,
            is_last=False,
            watermark_percentile=EXACT,
            produced_at=clocks.wall_time,
            trigger=strategy.trigger.label,
        )
        self._fields = self._pane.to_json()
        self._finish = finish
        self.json: str = orjson.dumps(self._fields).decode()

    def texts(self, key: str, value: Any, start: int, end: int) -> list[str]:
        """Return the envelopes of a window's results as text; whatever ``finish`` raises is raised."""
        if self._finish is None:
            return [self._text(value, start, end)]
        results = self._finish(key, value, Window(start, end), self._pane)
        return [self._text(result, start, end) for result in results]

    def _text(self, value: Any, start: int, end: int) -> str:
        text = _text_of_value(value)
        if text[0] == _MARK:
            return encode_value({"value": value, "window": [start, end], "at": end - 1, "pane": self._fields})
        return f'{{"value":{text},"window":[{start},{end}],"at":{end - 1},"pane":{self.json}}}'


class _OtherTurnError(Exception):
    """Something happens in the turn that only `KeyWindows` knows."""


class WaitingWindows:
    """The turns of one bundle: the stored state and timers of a key in, what the key's row becomes out.

    All windows have one size, so they are known by their starts.
    """

    def __init__(
        self,
        strategy: WindowingStrategy,
        combine: CombineFn,
        stream: str,
        clocks: Clocks,
        columns: RecordColumns,
        *,
        of: ValueExtractor = None,
        finish: Finish | None = None,
    ) -> None:
        self._stream = stream
        self._of = of
        self._watermark = clocks.watermark
        self._columns = columns
        self._size_us: int = duration_us(strategy.window_fn.size)  # type: ignore[attr-defined]  # `has_short_turns` says so
        self._lateness_us = strategy.allowed_lateness_us + 1
        self._accumulates = strategy.accumulation is Accumulation.ACCUMULATING
        self._assign = strategy.window_fn.assign
        self._starts: list[int] | None = None
        if type(strategy.window_fn) is FixedWindows:
            at, offset_us = columns.times(), duration_us(strategy.window_fn.offset)
            self._starts = (at - (at - offset_us) % self._size_us).tolist()
        self._cells: list[Any] | None = None
        self._combine = combine
        if of is None and columns.at and isinstance(columns.values, ArrowValues):
            self._cells, self._combine = _by_column(combine, columns.values)
        # A user's function may change its argument.
        self._copies = finish is not None and self._accumulates
        self._panes = ShownPanes(strategy, clocks, finish)

    def turn(
        self, key: str, stored: StoredState | None, timers: Timers, start: int, stop: int
    ) -> QuickTurn | None:
        """Return a key's turn with the records ``start`` to ``stop``; ``None`` if it is one for `KeyWindows`."""
        try:
            return self._turn(key, stored, timers, start, stop)
        except Exception:  # noqa: BLE001 - `KeyWindows` meets it again, and makes a dead letter of it
            return None

    def _turn(self, key: str, stored: StoredState | None, timers: Timers, start: int, stop: int) -> QuickTurn:
        for timer in timers:
            if timer.domain is not TimeDomain.EVENT or timer.percentile != EXACT:
                raise _OtherTurnError
        turn = QuickTurn(stored)
        is_due = bool(timers) and timers[0].at <= self._watermark
        if start == stop and not is_due:
            return turn
        windows = {} if stored is None else self._windows_of(stored)
        pending = self._fire(key, timers, windows, turn) if is_due else list(timers)
        for window, values in self._assigned(key, start, stop).items() if stop > start else ():
            fields = windows.get(window)
            if fields is None:
                fields = windows[window] = self._open(window, pending)
            else:
                self._check_waiting(fields, window)
            fields["accumulator"] = self._combine.add_all(fields["accumulator"], values)
            fields["news"] += len(values)
        turn.state = self._text_of(windows)
        if is_due or len(pending) > len(timers):
            ordered = firing_order(pending)
            turn.timers = None if ordered == timers else ordered
        return turn

    def _fire(
        self, key: str, timers: Timers, windows: dict[int, dict[str, Any]], turn: QuickTurn
    ) -> list[Timer]:
        """Fire the timers that are due, which are the first, and return the timers that are pending then."""
        size_us, lateness_us, watermark = self._size_us, self._lateness_us, self._watermark
        due = [timer for timer in timers if timer.at <= watermark]
        turn.fired = len(due)
        pending, ended = list(timers[turn.fired :]), set[int]()
        for tag, _, at, output_at, *_ in due:
            if tag[0] == EXPIRY:
                window = at - lateness_us - size_us
                if tag != _expiry_tag(window, size_us) or not _ENDED.issuperset(windows.pop(window)):
                    raise _OtherTurnError
                ended.discard(window)
                continue
            window = at - size_us
            if tag != _end_tag(window, size_us) or output_at != at - 1:
                raise _OtherTurnError
            self._end(key, window, windows[window], turn)
            if at + lateness_us <= watermark:
                ended.add(window)
                continue
            # From now on only a late pane can come, so no consumer has to wait for one.
            expiry = _expiry_tag(window, size_us)
            late_at = at + lateness_us
            (place,) = [place for place, timer in enumerate(pending) if timer.tag == expiry]
            if pending[place].at != late_at:
                # Code with another lateness has set it.
                raise _OtherTurnError
            pending[place] = pending[place]._replace(output_at=min(late_at, INSTANT_MAX_US))
        if ended:
            raise _OtherTurnError
        return pending

    def _end(self, key: str, window: int, fields: dict[str, Any], turn: QuickTurn) -> None:
        """Emit the pane of a window whose end has come."""
        self._check_waiting(fields, window)
        end = window + self._size_us
        value = self._combine.extract(fields["accumulator"])
        if self._copies and isinstance(value, dict | list):
            value = copied(value)
        texts = self._panes.texts(key, value, window, end)
        turn.productions += [(self._stream, text, end - 1) for text in texts]
        if not self._accumulates:
            del fields["accumulator"]
        del fields["news"], fields["is_held"], fields["timers"]
        fields |= {"index": 1, "nonspeculative_index": 1, "has_ended": True}

    def _open(self, window: int, pending: list[Timer]) -> dict[str, Any]:
        """Return an empty window, and add the timers of its end and of its expiry."""
        size_us = self._size_us
        end = window + size_us
        if end + self._lateness_us > INSTANT_MAX_US:
            raise _OtherTurnError
        pending.append(Timer(_end_tag(window, size_us), TimeDomain.EVENT, end, end - 1))
        expiry = _expiry_tag(window, size_us)
        pending.append(Timer(expiry, TimeDomain.EVENT, end + self._lateness_us, end - 1))
        return {
            "window": [window, end],
            "accumulator": self._combine.create(),
            "news": 0,
            "is_held": True,
            "timers": {END: end},
        }

    def _assigned(self, key: str, start: int, stop: int) -> dict[int, list[Any]]:
        """Return the values by window, all of which end after the watermark."""
        values = self._values(start, stop)
        assigned: dict[int, list[Any]] = {}
        earliest = self._watermark - self._size_us
        if self._starts is not None:
            for window, value in zip(self._starts[start:stop], values, strict=True):
                members = assigned.get(window)
                if members is None:
                    assigned[window] = [value]
                else:
                    members.append(value)
            if min(assigned) <= earliest:
                # It is late.
                raise _OtherTurnError
            return assigned
        for at, value in zip(self._columns.at[start:stop], values, strict=True):
            windows = self._assign(Element(value, at, key))
            if not windows or windows[0].start <= earliest:
                raise _OtherTurnError
            for each in windows:
                assigned.setdefault(each.start, []).append(value)
        return assigned

    def _values(self, start: int, stop: int) -> list[Any]:
        columns = self._columns
        if self._cells is not None:
            return list(map(self._cells.__getitem__, columns.sources[start:stop]))
        values = map(element_value, map(columns.read, columns.sources[start:stop]), columns.at[start:stop])
        return list(values) if self._of is None else [extract(self._of, value) for value in values]

    def _windows_of(self, stored: StoredState) -> dict[int, dict[str, Any]]:
        if type(stored) is not str or stored.startswith(_MARK):
            raise _OtherTurnError
        state = orjson.loads(stored)
        if len(state) > 1:
            raise _OtherTurnError
        windows = {fields["window"][0]: fields for fields in state["windows"]}
        for window, fields in windows.items():
            if fields["window"][1] != window + self._size_us:
                raise _OtherTurnError
        return windows

    def _text_of(self, windows: Mapping[int, dict[str, Any]]) -> str | None:
        if not windows:
            return None
        texts = [_text_of_window(windows[window]) for window in sorted(windows)]
        if any(text.startswith(_MARK) for text in texts):
            return encode_value({"windows": [windows[window] for window in sorted(windows)]})
        return f'{{"windows":[{",".join(texts)}]}}'

    def _check_waiting(self, fields: dict[str, Any], window: int) -> None:
        is_waiting = list(fields) == _WAITING and fields["is_held"] is True
        if not is_waiting or fields["timers"] != {END: window + self._size_us}:
            raise _OtherTurnError


def _text_of_value(value: Any) -> str:
    return str(value) if type(value) is int and _INT_MIN <= value <= _INT_MAX else encode_value(value)


def _text_of_window(fields: dict[str, Any]) -> str:
    accumulator = fields.get("accumulator")
    if type(accumulator) is int and "news" in fields and _INT_MIN <= accumulator <= _INT_MAX:
        start, end = fields["window"]
        # The text of most windows, in a third of the time.
        return (
            f'{{"window":[{start},{end}],"accumulator":{accumulator},"news":{fields["news"]},"is_held":true,'
            f'"timers":{{"{END}":{end}}}}}'
        )
    return encode_value(fields)


def _by_column(combine: CombineFn, values: ArrowValues) -> tuple[list[Any] | None, CombineFn]:
    """Return the cells that are combined, and the combiner of bare cells; no cells where whole rows have to be read."""
    if type(combine) is Count and combine.of is None:
        return values.field(None), combine
    of = getattr(combine, "of", None)
    if type(combine) not in _OF_FIELD or not isinstance(of, str):
        return None, combine
    cells = values.field(of)
    bare: CombineFn = combine if cells is None else replace(combine, of=None)  # type: ignore[type-var]
    return cells, bare


def _end_tag(window: int, size_us: int) -> str:
    return f"{window}/{window + size_us}|{END}"


def _expiry_tag(window: int, size_us: int) -> str:
    return f"{EXPIRY}{window}/{window + size_us}"

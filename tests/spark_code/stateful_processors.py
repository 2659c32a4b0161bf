"""Spark processors that compare ``transformWithState`` in Spark and in Millpond.

Each yields everything it observes, so equal outputs mean equal inputs, states and timers.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pandas as pd
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)
from pyspark.sql.types import Row

SEEN = "seen string"
"""The output's schema: what was seen, as text."""


class Remembering(StatefulProcessor):
    """A value, a list and a map, changed as the column ``do`` of each row demands."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._value = handle.getValueState("value", "n long")
        self._list = handle.getListState("list", "n long")
        self._map = handle.getMapState("map", "word string", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        told = sorted((row.do, row.n) for row in rows)
        for do, n in told:
            if do == "update":
                self._value.update((n,))
            elif do == "append":
                self._list.appendValue((n,))
                self._list.appendList([(n + 1,), (n + 2,)])
            elif do == "put":
                self._list.put([(n,)])
            elif do == "map":
                self._map.updateValue((f"w{n % 3}",), (n,))
            elif do == "remove":
                self._map.removeKey((f"w{n % 3}",))
            elif do == "clear":
                for variable in (self._value, self._list, self._map):
                    variable.clear()
        words = sorted(self._map.keys())
        yield Row(
            seen=f"{key} {told} {self._value.exists()} {self._value.get()} {self._list.exists()} "
            f"{list(self._list.get())} {self._map.exists()} {sorted(self._map.iterator())} {words} "
            f"{sorted(self._map.values())} {[self._map.getValue(word) for word in words]} "
            f"{self._map.containsKey(('w0',))} {timerValues.getCurrentWatermarkInMs()} "
            f"{timerValues.getCurrentProcessingTimeInMs()}"
        )


class AllTypes(StatefulProcessor):
    """A value, a list and a map key of every type; the first row of a key writes, the others read."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        schema = (
            "i int, l long, f double, g float, s string, b boolean, d date, t timestamp, n timestamp_ntz, "
            "c decimal(10,2), y binary, a array<int>, m map<string,int>, r struct<x:int,z:string>"
        )
        self._value = handle.getValueState("value", schema)
        self._list = handle.getListState("list", schema)
        self._map = handle.getMapState("map", "d date, c decimal(5,1)", schema)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        given = sorted(map(repr, rows))
        found = self._value.get()
        listed = [tuple(one) for one in self._list.get()]
        mapped = [(tuple(one), tuple(other)) for one, other in self._map.iterator()]
        if found is None:
            moment = datetime(2020, 1, 2, 3, 4, 5, 6)  # noqa: DTZ001 - local time, as Spark takes it
            full = (
                *(1, 2, 0.5, 1.5, "s", True, date(2020, 1, 2), moment, moment, Decimal("1.20"), b"\0\xff"),
                *([1, None], {"a": 1}, Row(x=1, z="q")),
            )
            self._value.update(full)
            self._list.put([full, (None,) * len(full)])
            self._map.updateValue((date(2020, 1, 2), Decimal("1.5")), full)
        yield Row(seen=f"{key} {given} {None if found is None else tuple(found)} {listed} {mapped}")


class Timers(StatefulProcessor):
    """Sets and deletes timers as each row, and the time of each fired timer, demands."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        given = list(rows)
        for row in given:
            for at_ms in row.set or ():
                self._handle.registerTimer(at_ms)
            for at_ms in row.unset or ():
                self._handle.deleteTimer(at_ms)
        times = sorted(row.t.timestamp() for row in given if row.t is not None)
        yield Row(
            seen=f"rows {key} {len(given)} {times} {timerValues.getCurrentWatermarkInMs()} {self._timers()}"
        )

    def handleExpiredTimer(
        self,
        key: Any,
        timerValues: TimerValues,
        expiredTimerInfo: ExpiredTimerInfo,
    ) -> Iterator[Row]:
        """At 5,000 set a due timer twice and a later one; at 5,500 delete a due one."""
        at_ms, before = expiredTimerInfo.getExpiryTimeInMs(), self._timers()
        if at_ms == 5_000:
            for other_ms in (5_001, 6_500, 5_000):
                self._handle.registerTimer(other_ms)
        if at_ms == 5_500:
            self._handle.deleteTimer(6_000)
        watermark_ms = timerValues.getCurrentWatermarkInMs()
        yield Row(seen=f"timer {key} {at_ms} {watermark_ms} {before} {self._timers()}")

    def _timers(self) -> list[int]:
        return sorted(self._handle.listTimers())


class Alarms(StatefulProcessor):
    """Sets and deletes timers of processing time, relative to the batch's time.

    The output does not depend on when the batches run.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._set_at = handle.getValueState("set_at", "ms long")
        self._fired = handle.getValueState("fired", "n int")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        now_ms = timerValues.getCurrentProcessingTimeInMs()
        self._set_at.update((now_ms,))
        for row in rows:
            for after_ms in row.set or ():
                self._handle.registerTimer(now_ms + after_ms)
            for after_ms in row.unset or ():
                self._handle.deleteTimer(now_ms + after_ms)
        timers = sorted(at_ms - now_ms for at_ms in self._handle.listTimers())
        yield Row(seen=f"rows {key} {timers} {timerValues.getCurrentWatermarkInMs()}")

    def handleExpiredTimer(
        self,
        key: Any,
        timerValues: TimerValues,
        expiredTimerInfo: ExpiredTimerInfo,
    ) -> Iterator[Row]:
        now_ms, at_ms = timerValues.getCurrentProcessingTimeInMs(), expiredTimerInfo.getExpiryTimeInMs()
        found = self._fired.get()
        fired = 1 if found is None else found[0] + 1
        self._fired.update((fired,))
        set_at_ms = (self._set_at.get() or (0,))[0]
        timers = sorted(other_ms - set_at_ms for other_ms in self._handle.listTimers())
        if key[0] == "again":
            timers = []
            if fired < 4:
                self._handle.registerTimer(now_ms + 1)
        after_ms = None if key[0] == "again" else at_ms - set_at_ms
        yield Row(seen=f"timer {key} {fired} {after_ms} {now_ms >= at_ms} {timers}")


class Fading(StatefulProcessor):
    """Variables that live for a millisecond, until the micro-batch ends, and others that live for years."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._variables = [
            (
                handle.getValueState(f"value{ttl_ms}", "n long", ttl_ms),
                handle.getListState(f"list{ttl_ms}", "n long", ttl_ms),
                handle.getMapState(f"map{ttl_ms}", "k long", "n long", ttl_ms),
            )
            for ttl_ms in (1, 10**11)
        ]

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        numbers = sorted(row.n for row in rows)
        for value, elements, entries in self._variables:
            before = _what_is_in(value, elements, entries)
            for n in numbers:
                value.update((n,))
                elements.appendValue((n,))
                entries.updateValue((n % 2,), (n,))
            yield Row(seen=f"{key} {numbers} {before} {_what_is_in(value, elements, entries)}")


def _what_is_in(value: Any, elements: Any, entries: Any) -> str:
    exists = [one.exists() for one in (value, elements, entries)]
    listed = [tuple(one) for one in elements.get()]
    mapped = sorted((tuple(one), tuple(other)) for one, other in entries.iterator())
    return f"{exists} {value.get()} {listed} {mapped} {entries.containsKey((1,))} {entries.getValue((0,))}"


class PandasCounter(StatefulProcessor):
    """Counts and sums frames of ``transformWithStateInPandas``, and sets a timer."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._totals = handle.getValueState("totals", "count long, sum double")

    def handleInputRows(
        self,
        key: Any,
        rows: Iterator[pd.DataFrame],
        timerValues: TimerValues,
    ) -> Iterator[pd.DataFrame]:
        count, total = self._totals.get() or (0, 0.0)
        for frame in rows:
            count += len(frame)
            total += float(frame["n"].sum())
            if count == len(frame):
                self._handle.registerTimer(int(frame["t"].max().timestamp() * 1_000))
        self._totals.update((count, total))
        yield pd.DataFrame({"seen": [f"{key} {count} {total}"]})

    def handleExpiredTimer(
        self,
        key: Any,
        timerValues: TimerValues,
        expiredTimerInfo: ExpiredTimerInfo,
    ) -> Iterator[pd.DataFrame]:
        seen = f"timer {tuple(key)} {expiredTimerInfo.getExpiryTimeInMs()} {self._totals.get()}"
        self._totals.clear()
        yield pd.DataFrame({"seen": [seen, None]})


class Seeded(StatefulProcessor):
    """A sum that begins with an initial state."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._sum = handle.getValueState("sum", "n long")

    def handleInitialState(self, key: Any, initialState: Row, timerValues: TimerValues) -> None:
        self._sum.update((self._before() + initialState.initial,))

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        self._sum.update((self._before() + sum(row.n for row in rows),))
        yield Row(seen=f"{key} {self._sum.get()}")

    def _before(self) -> int:
        found = self._sum.get()
        return 0 if found is None else int(found[0])


class Keys(StatefulProcessor):
    """Yields the values and types of its key, for rows and for timers.

    The fields of its rows are read by name: some are not in the output schema, and some rows lack the schema's.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._count = handle.getValueState("count", "n int")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        found = self._count.get()
        count = (0 if found is None else found[0]) + len(list(rows))
        self._count.update((count,))
        self._handle.registerTimer(1)
        yield Row(other="left out", seen=f"{_told(key)} {count}")
        yield Row(other="left out")

    def handleExpiredTimer(
        self,
        key: Any,
        timerValues: TimerValues,
        expiredTimerInfo: ExpiredTimerInfo,
    ) -> Iterator[Row]:
        yield Row(seen=f"timer {key!r} {self._count.get()}")


def _told(key: tuple[Any, ...]) -> list[str]:
    # Spark converts times to the session's zone; the moments are the same.
    return [
        f"{type(value).__name__} {value.timestamp() if isinstance(value, datetime) else value}"
        for value in key
    ]


class Failing(StatefulProcessor):
    """Updates its state, and fails at a row whose ``n`` is negative."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._sum = handle.getValueState("sum", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        for row in rows:
            found = self._sum.get()
            self._sum.update(((0 if found is None else found[0]) + row.n,))
            if row.n < 0:
                raise ValueError("a negative number")
            yield Row(seen=f"{key} {self._sum.get()}")


class Sums(StatefulProcessor):
    """A state initialised with Spark's buffers of a count, a sum and a mean."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._sums = handle.getValueState("sums", "count long, total long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        count, total = self._sums.get() or (0, 0)
        for row in rows:
            count, total = count + 1, total + row.n
        self._sums.update((count, total))
        yield Row(seen=f"{key[0]} {count} {total} {total / count}")

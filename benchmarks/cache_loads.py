"""The loads of the cache benchmark: which rows supersteps use, and which timers they set."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

import millpond as mp
from examples.zeitgeist.data import arrivals, load_flights
from examples.zeitgeist.hours import NEW_YORK
from millpond.executor.pipeline.nodes import ComputationNode

_MINUTE_US: Final = 60_000_000
_HOUR_US: Final = 60 * _MINUTE_US
_STATE_BYTES: Final = 400
_FLIGHTS_AT_ONCE: Final = 60


@dataclass(frozen=True, slots=True)
class Step:
    """The records of a superstep, and the watermark that it begins with.

    Attributes:
        keys: their keys.
        at: their times, in microseconds.
        watermark: low watermark, in microseconds.
    """

    keys: Sequence[str]
    at: npt.NDArray[np.int64]
    watermark: int


@dataclass(frozen=True, slots=True)
class Load:
    """Records, and the timers that they set.

    Attributes:
        size_us: how long after a record its key's last timer may fire.
        period_us: timers fire at multiples of this; 0: ``size_us`` after the last record; negative: none is set.
        steps: makes the records.
        window_fn: counts the records in these windows, in place of the rows and timers.
    """

    name: str
    size_us: int
    period_us: int
    steps: Callable[[], Iterator[Step]]
    window_fn: mp.WindowFn | None = None

    def node(self) -> ComputationNode:
        """Return the computation that keeps the state."""
        if self.window_fn is None:
            return ComputationNode(name="rows", computation=Rows(self), subscriptions=())
        pipeline = mp.Pipeline("cache")
        pipeline.inject("in", key="key", at="at").window(self.window_fn).combine(mp.Count(), name="rows")
        return pipeline.check().computations["rows"]


class Rows(mp.Computation):
    """Keeps incompressible bytes, and sets timers as its load requires."""

    codec = mp.BytesCodec()

    def __init__(self, load: Load) -> None:
        self._size_us = load.size_us
        self._period_us = load.period_us

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """Change the state, and set the key's timer."""
        self._change(context, int(record.at))
        if self._period_us >= 0:
            context.set_timer(self._next(int(record.at)))

    def process_timer(self, context: mp.Context, timer: mp.Timer) -> None:
        """Change the state; of sliding windows there are more to come."""
        last = int.from_bytes(context.state.get(bytes(8))[:8], "little")
        self._change(context, last)
        if self._period_us and int(timer.at) + self._period_us <= last + self._size_us:
            context.set_timer(int(timer.at) + self._period_us)

    def _next(self, at: int) -> int:
        return (at // self._period_us + 1) * self._period_us if self._period_us else at + self._size_us

    def _change(self, context: mp.Context, last: int) -> None:
        before = context.state.get(context.key.encode())
        context.state.set(last.to_bytes(8, "little") + hashlib.shake_128(before).digest(_STATE_BYTES - 8))


@cache
def _flights() -> pd.DataFrame:
    # A benchmark plays the load once for each policy; reading a year's flights takes seconds.
    return arrivals(load_flights()).head(18_000)


def _zeitgeist() -> Iterator[Step]:
    """The flights of three weeks in the order of their reports; a route's counts of an hour are complete a day later."""
    flights = _flights()
    at = flights["scheduled"].astype("int64").to_numpy() // (
        1_000 if flights["scheduled"].dt.unit == "ns" else 1
    )
    hours = flights["scheduled"].dt.tz_convert(NEW_YORK).dt.strftime(" %H")
    keys = (flights["origin"] + " " + flights["destination"] + hours).to_list()
    newest = np.maximum.accumulate(at)
    for start in range(0, len(keys), _FLIGHTS_AT_ONCE):
        stop = min(start + _FLIGHTS_AT_ONCE, len(keys))
        yield Step(keys[start:stop], at[start:stop], int(newest[stop - 1]) - 22 * _HOUR_US)


def _sessions() -> Iterator[Step]:
    """Users who come back after hours: eight records two minutes apart, and half an hour until the session ends."""
    rng = np.random.default_rng(1)
    users, minutes = 6_000, 300
    starts = rng.integers(-60, minutes, users * 2)
    who = rng.integers(0, users, users * 2)
    gaps = rng.exponential(2.0, (len(starts), 8)).cumsum(axis=1)
    at = (starts[:, None] + gaps).ravel()
    yield from _by_minute(np.repeat(who, 8), at, minutes, lag=0)


def _sliding() -> Iterator[Step]:
    """Keys of which each has a record in some of the windows, an hour long and one every ten minutes."""
    rng = np.random.default_rng(2)
    keys, minutes, records = 5_000, 240, 40_000
    who = (rng.beta(0.7, 2.0, records) * keys).astype(np.int64)
    yield from _by_minute(who, rng.uniform(0, minutes, records), minutes, lag=2)


def _zipf() -> Iterator[Step]:
    """A few keys have most of the records; a row wakes up at the end of its hour."""
    rng = np.random.default_rng(3)
    keys, minutes, records = 15_000, 240, 60_000
    who = rng.zipf(1.2, records * 2)
    who = who[who <= keys][:records] - 1
    yield from _by_minute(who, rng.uniform(0, minutes, len(who)), minutes, lag=2)


def _scan() -> Iterator[Step]:
    """A tenth of the keys have nearly all of the records, but every hour each key has one."""
    rng = np.random.default_rng(4)
    keys, minutes, records = 6_000, 240, 40_000
    hot = rng.integers(0, keys // 10, records)
    scans = [np.arange(keys) for _ in range(60, minutes, 60)]
    times = [start + np.linspace(0, 20, keys) for start in range(60, minutes, 60)]
    who = np.concatenate([hot, *scans])
    at = np.concatenate([rng.uniform(0, minutes, records), *times])
    yield from _by_minute(who, at, minutes, lag=2)


def _by_minute(
    who: npt.NDArray[np.int64], at_minutes: npt.NDArray[np.float64], minutes: int, *, lag: int
) -> Iterator[Step]:
    order = np.argsort(at_minutes, kind="stable")
    who, at = who[order], (at_minutes[order] * _MINUTE_US).astype(np.int64)
    for minute in range(0, minutes, 2):
        begin, end = np.searchsorted(at, [minute * _MINUTE_US, (minute + 2) * _MINUTE_US])
        # Keys come in no order of their numbers.
        keys = [f"{number * 2_654_435_761 % 2**32:08x}-{number}" for number in who[begin:end].tolist()]
        yield Step(keys, at[begin:end], (minute + 2 - lag) * _MINUTE_US)


LOADS: Final[Mapping[str, Load]] = {
    load.name: load
    for load in (
        Load("zeitgeist", 0, _HOUR_US, _zeitgeist),
        Load("zeitgeist_counts", 0, _HOUR_US, _zeitgeist, mp.FixedWindows("1h")),
        Load("sessions", 30 * _MINUTE_US, 0, _sessions),
        Load("session_counts", 30 * _MINUTE_US, 0, _sessions, mp.Sessions("30m")),
        Load("sliding", _HOUR_US, 10 * _MINUTE_US, _sliding),
        Load("zipf", 0, _HOUR_US, _zipf),
        Load("scan", 0, -1, _scan),
    )
}
"""The loads by name."""

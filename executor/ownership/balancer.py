"""The balancer: watches the load of a pipeline's intervals, and decides which keys to cut again (MillWheel §7.1).

Load is measured superstep by superstep. Manual cuts come from outside: a position in the table requests one, and the
commit that makes the cut answers it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import ceil
from statistics import median
from typing import Final

import pyarrow as pa

from millpond.executor.interval.row_update import Manifest
from millpond.executor.ownership.cuts import Cut, boundaries_of, middle_of, waiting_requests
from millpond.executor.ownership.ownership import Ownership
from millpond.statestore.arguments import check_count, check_number
from millpond.statestore.durations import accepts_old_durations, duration_ms
from millpond.statestore.interval import Interval
from millpond.statestore.log.action import JsonValue
from millpond.statestore.types import Clock

_LOG = logging.getLogger("millpond")
# The table may have thousands of transactions, so the search for requests is not done in every superstep.
_ASKED_EVERY_US: Final = 1_000_000

# Parts of one split: a sample of a few hundred keys supports no more.
_PARTS_MAX: Final = 16
# Cuts made at a time; each is a commit.
_CUTS_MAX: Final = 4
_INTERVALS_A_TASK: Final = 8

# A key whose load alone is more than its interval may have, and its interval.
HotKey = tuple[Interval, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalLoad:
    """The load of an interval in a superstep, as the median of the last ones."""

    work_ms: float  # processing time of its bundles, of a processor where the runner can measure that
    records: float
    keys: tuple[str, ...] = ()  # sampled; a key with more work occurs more often
    home: str = ""  # the process that ran it last; empty for the coordinator's


@dataclass(slots=True)
class _Seen:
    bundles: deque[tuple[int, int, tuple[str, ...]]]  # work in µs, records and timers, sampled keys
    home: str = ""


class Loads:
    """The loads of each interval in the last ``window`` supersteps."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._seen: dict[Interval, _Seen] = {}

    def record(self, manifests: Iterable[Manifest], live: Iterable[Interval]) -> None:
        by_interval = {manifest.interval: manifest for manifest in manifests}
        for interval in live:
            seen = self._seen.get(interval)
            if seen is None:
                seen = self._seen[interval] = _Seen(deque(maxlen=self._window))
            manifest = by_interval.get(interval)
            if manifest is None:
                seen.bundles.append((0, 0, ()))
            else:
                statistics = manifest.result.statistics
                records = statistics.records + statistics.timers
                seen.bundles.append((manifest.work_us, records, manifest.result.key_sample))
                seen.home = manifest.home

    def forget(self, intervals: Iterable[Interval]) -> None:
        for interval in intervals:
            self._seen.pop(interval, None)

    def of(self, intervals: Iterable[Interval]) -> Mapping[Interval, IntervalLoad] | None:
        """Return the loads of some intervals; ``None`` while one of them lacks a full window."""
        chosen = list(intervals)
        is_known = all(
            interval in self._seen and len(self._seen[interval].bundles) == self._window
            for interval in chosen
        )
        return self.so_far(chosen) if is_known else None

    def so_far(self, intervals: Iterable[Interval]) -> Mapping[Interval, IntervalLoad]:
        return {
            interval: IntervalLoad(
                work_ms=median(work_us for work_us, _, _ in seen.bundles) / 1_000,
                records=median(records for _, records, _ in seen.bundles),
                keys=tuple(key for *_, keys in seen.bundles for key in keys),
                home=seen.home,
            )
            for interval in intervals
            if (seen := self._seen.get(interval)) is not None
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancePolicy:
    """The load at which intervals are split and merged (MillWheel §7.1).

    The fair share of an interval is its computation's work divided by the number of intervals, or by the number of
    tasks that run at once if that is greater. Between ``hot`` and ``cold`` nothing happens, so a cut does not
    call for the next one.

    Args:
        every: supersteps between two looks at the load; the median of that many counts.
        hot: an interval with more than this many fair shares is split into parts of about one.
        cold: neighbours that have less than this part of a fair share together are merged.
        least_work: a computation that takes less work a superstep than this is left alone.
        intervals_max: the most intervals of a computation; ``None``: eight times the tasks that run at once.

    Raises:
        InvalidError: under these bounds a cut would call for the opposite one.

    Example:
        ``mp.SparkRunner(store, balance=mp.BalancePolicy(hot=3.0))``
    """

    every: int = 4
    hot: float = 2.0
    cold: float = 0.25
    least_work: str | timedelta = "50ms"
    intervals_max: int | None = None

    def __post_init__(self) -> None:
        """Refuse bounds without a gap between hot and cold."""
        duration_ms("least_work", self.least_work)
        check_count("every", self.every)
        check_number("hot", self.hot, least=1.5)
        check_number("cold", self.cold, least=0, most=0.5)
        if self.intervals_max is not None:
            check_count("intervals_max", self.intervals_max)


BalancePolicy.__init__ = accepts_old_durations(BalancePolicy.__init__)  # type: ignore[method-assign]


def cuts_for(
    loads: Mapping[Interval, IntervalLoad], policy: BalancePolicy, *, parallelism: int
) -> tuple[Cut, ...]:
    """Return the splits that the load of a computation calls for; without any, the merges.

    ``loads`` has all its intervals, in key order; ``parallelism`` is the number of tasks that run at once.
    """
    fair = _fair_share(loads, policy, parallelism)
    if fair is None:
        return ()
    most = policy.intervals_max or max(len(loads), _INTERVALS_A_TASK * parallelism)
    # Never fewer intervals than tasks: otherwise a merge would leave a task without work.
    return _splits(loads, policy, fair, most - len(loads)) or _merges(
        loads, policy, fair, len(loads) - parallelism
    )


def hot_keys(
    loads: Mapping[Interval, IntervalLoad], policy: BalancePolicy, *, parallelism: int
) -> tuple[HotKey, ...]:
    """Return the keys that are hot alone: no cut divides the load of their intervals."""
    fair = _fair_share(loads, policy, parallelism)
    if fair is None:
        return ()
    return tuple(
        (interval, load.keys[0])
        for interval, load in loads.items()
        if load.work_ms > policy.hot * fair and load.keys and middle_of(interval, load.keys) is None
    )


def _fair_share(
    loads: Mapping[Interval, IntervalLoad], policy: BalancePolicy, parallelism: int
) -> float | None:
    """Return the fair share of an interval in milliseconds, or ``None`` if the computation is left alone."""
    total = sum(load.work_ms for load in loads.values())
    return (
        total / max(len(loads), parallelism)
        if loads and total >= duration_ms("least_work", policy.least_work)
        else None
    )


def _splits(
    loads: Mapping[Interval, IntervalLoad], policy: BalancePolicy, fair: float, room: int
) -> tuple[Cut, ...]:
    cuts: list[Cut] = []
    hottest = sorted(loads.items(), key=lambda pair: -pair[1].work_ms)
    for interval, load in hottest[:_CUTS_MAX]:
        parts = min(ceil(load.work_ms / fair), _PARTS_MAX, room + 1)
        if load.work_ms <= policy.hot * fair or parts < 2:
            break
        keys = _keys_between(interval, load.keys, parts)
        if keys:
            cuts.append(Cut.split(interval, keys))
            room -= len(keys)
    return tuple(cuts)


def _keys_between(interval: Interval, sample: Sequence[str], parts: int) -> Sequence[str]:
    inside = [key for key in sample if interval.contains(key)]
    keys = boundaries_of(pa.array(inside, pa.string()), parts)
    if not keys:
        # The least key of the sample has more than a part, so all even cuts fall on it.
        middle = middle_of(interval, inside)
        keys = () if middle is None else (middle,)
    return [key for key in keys if interval.low < key]


def _merges(
    loads: Mapping[Interval, IntervalLoad], policy: BalancePolicy, fair: float, surplus: int
) -> tuple[Cut, ...]:
    """Merge the longest runs of neighbours that are cold together, by at most ``surplus`` intervals."""
    cuts: list[Cut] = []
    run: list[Interval] = []
    weight = 0.0
    for interval, load in [*loads.items(), (None, None)]:
        is_cold = load is not None and weight + load.work_ms < policy.cold * fair
        if interval is not None and load is not None and is_cold and len(run) <= surplus:
            run.append(interval)
            weight += load.work_ms
            continue
        if len(run) > 1 and len(cuts) < _CUTS_MAX:
            cuts.append(Cut.merge(run))
            surplus -= len(run) - 1
        run, weight = [], 0.0
        if interval is not None and load is not None and load.work_ms < policy.cold * fair:
            run, weight = [interval], load.work_ms
    return tuple(cuts)


class Balancer:
    """Decides on cuts of the computations' keys between supersteps; its caller makes them.

    Without a policy it only answers requests.
    """

    def __init__(
        self, ownership: Ownership, computations: Sequence[str], clock: Clock, policy: BalancePolicy | None
    ) -> None:
        self._ownership = ownership
        self._computations = computations
        self._clock = clock
        self._policy = policy
        self.parallelism: int = 1  # tasks that run at once, set by the runner
        self.loads: Loads = Loads(1 if policy is None else policy.every)  # recorded only with a policy
        self._supersteps = 0
        self._warned: set[HotKey] = set()
        self.is_on: bool = policy is not None
        self.ask_us: int = 0  # the monotonic time of the next search for requests

    def record(self, manifests: Iterable[Manifest]) -> None:
        if self._policy is not None:
            self._supersteps += 1
            live = [interval for name in self._computations for interval in self._intervals(name)]
            self.loads.record(manifests, live)

    def apply(self, cut: Cut) -> None:
        """Drop the replaced intervals: the new ones are judged once they have run for a full window."""
        self.loads.forget(cut.replaced)

    def continue_from(self, former: Balancer) -> None:
        """Take over the knowledge of the intervals that the pipeline had before it changed."""
        self.parallelism, self.loads = former.parallelism, former.loads

    def due(self, txns: Mapping[str, int]) -> Iterator[tuple[Cut, Mapping[str, int]]]:
        """Yield the cuts to make now, each with the positions to record in its commit.

        ``txns`` are the transactions of the table, some of which may be requests.
        """
        now_us = self._clock.monotonic_us()
        if now_us >= self.ask_us:
            self.ask_us = now_us + _ASKED_EVERY_US
            for request in waiting_requests(txns):
                intervals = self._intervals(request.computation)
                cut = request.cut(intervals) if intervals else None
                if cut is not None:
                    yield cut, request.answer
                elif intervals:
                    # The keys are cut like that already: only a commit of the answer ends the request.
                    self._ownership.record(request.answer)
        policy = self._policy
        if policy is None or self._supersteps < policy.every:
            return
        # A run that has nothing to do calls again and again, and the same load must not be judged twice.
        self._supersteps = 0
        for name in self._computations:
            loads = self.loads.of(self._intervals(name))
            if loads is not None:
                for hot in set(hot_keys(loads, policy, parallelism=self.parallelism)) - self._warned:
                    self._warned.add(hot)
                    _LOG.warning(
                        "key %r of %s takes more work than an interval should, and one key cannot be split: "
                        "combine its records before they come here, or lift its combiner",
                        hot[1],
                        name,
                    )
                for cut in cuts_for(loads, policy, parallelism=self.parallelism):
                    yield cut, {}

    def report(self) -> Mapping[str, JsonValue]:
        """Return the loads for the next commit's metadata; empty but every so many supersteps."""
        policy = self._policy
        if policy is None or self._supersteps + 1 < policy.every:
            return {}
        return {
            interval.app_id: {"work_ms": load.work_ms, "records": load.records, "home": load.home}
            for name in self._computations
            for interval, load in self.loads.so_far(self._intervals(name)).items()
        }

    def _intervals(self, computation: str) -> list[Interval]:
        return [owned.interval for owned in self._ownership.of(computation)]

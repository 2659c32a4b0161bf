"""Which cuts the load of a computation calls for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Final

import pyarrow as pa

from millpond.executor.balance.loads import IntervalLoad
from millpond.executor.balance.policy import BalancePolicy
from millpond.executor.ownership.boundaries import boundaries_of, middle_of
from millpond.executor.ownership.cut import Cut
from millpond.statestore.interval import Interval

_PARTS_MAX: Final = 16
"""Into how many parts one cut may split: a sample of a few hundred keys says no more."""

_CUTS_MAX: Final = 4
"""How many cuts are made at a time; each is a commit."""

_INTERVALS_A_TASK: Final = 8


HotKey = tuple[Interval, str]
"""A key whose load alone is more than its interval may have, and its interval."""


def cuts_for(
    loads: Mapping[Interval, IntervalLoad], policy: BalancePolicy, *, parallelism: int
) -> tuple[Cut, ...]:
    """The splits that the load of a computation calls for; without any, the merges.

    Args:
        loads: the load of each of its intervals, in key order.
        policy: what is hot and what is cold.
        parallelism: how many tasks run at once.
    """
    fair = _fair_share(loads, policy, parallelism)
    if fair is None:
        return ()
    most = policy.intervals_max or max(len(loads), _INTERVALS_A_TASK * parallelism)
    return _splits(loads, policy, fair, most - len(loads)) or _merges(
        loads, policy, fair, len(loads) - parallelism
    )


def hot_keys(
    loads: Mapping[Interval, IntervalLoad], policy: BalancePolicy, *, parallelism: int
) -> tuple[HotKey, ...]:
    """The keys that are hot alone: no cut parts the load of their intervals."""
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
    """The fair share of an interval, in milliseconds; ``None`` for a computation that is left alone."""
    total = sum(load.work_ms for load in loads.values())
    return total / max(len(loads), parallelism) if loads and total >= policy.least_ms else None


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
        # The even cuts all fall on the least key of the sample, which has more than its share of it.
        middle = middle_of(interval, inside)
        keys = () if middle is None else (middle,)
    return [key for key in keys if interval.low < key]


def _merges(
    loads: Mapping[Interval, IntervalLoad], policy: BalancePolicy, fair: float, surplus: int
) -> tuple[Cut, ...]:
    """The longest runs of neighbours that are cold together; tasks are not left without an interval."""
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

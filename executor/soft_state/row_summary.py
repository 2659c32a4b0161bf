"""What soft state needs to know about all rows at once, without decoding them.

When a new owner scans its rows (MillWheel §7.1), there may be millions: their next timers,
holds and sizes are computed on whole columns, and only rows that fit the cache are decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.timer import KeyTimes
from millpond.executor.event_time.clocks import EXACT, FREE, parse_timer_clock
from millpond.executor.soft_state.eviction import NEVER, Waits
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.rows.row_shape import lengths_of

ROW_BYTES: Final = 240
"""What a cached row costs in CPython without its characters: two strings and its share of a dict."""

TIMER_BYTES: Final = 160
"""What a cached timer costs without its tag. Only a waiting record's tag is long, and is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSummary:
    """Next timers, holds and costs of merged rows.

    Attributes:
        event: the earliest event timer of each key that has one.
        wall: the same for wall timers.
        percentiles: the same for those that wait for a percentile watermark, by percentile.
        hold: the oldest output time that the timers of each key hold, for keys that hold any.
        waits: for each row, the time of its next timer on either clock; `NEVER`: none.
        weights: for each row, what it costs in the cache, by estimate.
    """

    event: KeyTimes
    wall: KeyTimes
    percentiles: Mapping[float, KeyTimes]
    hold: KeyTimes
    waits: Waits
    weights: npt.NDArray[np.int64]


def summarise_rows(merged: pa.Table) -> RowSummary:
    """Summarise merged rows, one per key."""
    keys = merged.column("key").combine_chunks()
    lists = merged.column("timers").combine_chunks()
    rows = pc.list_parent_indices(lists).to_numpy()
    flat = lists.flatten()
    at = flat.field("at").view(pa.int64()).to_numpy(zero_copy_only=False)
    output_at = flat.field("output_at").view(pa.int64()).to_numpy(zero_copy_only=False)
    clock_of = flat.field("domain")
    waits = np.full(merged.num_rows, NEVER)
    np.minimum.at(waits, rows, at.astype(np.float64))

    def earliest(names: list[str]) -> KeyTimes:
        if not names:
            return _earliest(keys, rows[:0], at[:0])
        of_clock = pc.is_in(clock_of, pa.array(names, pa.string())).to_numpy(zero_copy_only=False)
        return _earliest(keys, rows[of_clock], at[of_clock])

    clocks = clock_names(clock_of)
    is_holding = pc.invert(pc.ends_with(clock_of, FREE)).to_numpy(zero_copy_only=False)
    return RowSummary(
        event=earliest(clocks.event),
        wall=earliest(clocks.wall),
        percentiles={percentile: earliest(names) for percentile, names in clocks.percentiles.items()},
        hold=_earliest(keys, rows[is_holding], output_at[is_holding]),
        waits=waits,
        weights=_weights(merged, lists),
    )


@dataclass(frozen=True, slots=True)
class ClockNames:
    """The names of the clocks that timers wait for; one clock may have several names.

    Records that wait for the low watermark count as its timers.
    """

    event: list[str] = field(default_factory=list)
    wall: list[str] = field(default_factory=list)
    percentiles: dict[float, list[str]] = field(default_factory=dict)


def clock_names(clocks: pa.Array) -> ClockNames:
    """The names of the clocks that timers wait for; holds wait for none."""
    names = ClockNames()
    for name in pc.unique(clocks).to_pylist():
        domain, percentile, _ = parse_timer_clock(name)
        if domain is TimeDomain.WALL:
            names.wall.append(name)
        elif domain is TimeDomain.RECORD or (domain is TimeDomain.EVENT and percentile == EXACT):
            names.event.append(name)
        elif domain is TimeDomain.EVENT:
            names.percentiles.setdefault(percentile, []).append(name)
    return names


def _earliest(keys: pa.StringArray, rows: npt.NDArray[np.int64], at: npt.NDArray[np.int64]) -> KeyTimes:
    """The earliest time of each row; ``rows`` is sorted."""
    if not len(rows):
        return KeyTimes(keys.slice(0, 0), at)
    owners, starts = np.unique(rows, return_index=True)
    return KeyTimes(keys.take(pa.array(owners)), np.minimum.reduceat(at, starts))


def _weights(merged: pa.Table, timers: pa.ListArray) -> npt.NDArray[np.int64]:
    characters = np.zeros(merged.num_rows, np.int64)
    for name in ("key", "state", "state_bytes"):
        column = merged.column(name)
        if column.null_count < len(column):
            lengths = pc.binary_length(column)
            lengths = pc.fill_null(lengths, 0) if lengths.null_count else lengths
            characters += lengths.to_numpy(zero_copy_only=False)
    counts = lengths_of(timers)
    if len(timers.values):
        flat = timers.flatten()
        waits = pc.equal(flat.field("domain"), TimeDomain.RECORD.value).to_numpy(zero_copy_only=False)
        if waits.any():
            lengths = pc.binary_length(flat.field("tag")).to_numpy(zero_copy_only=False)
            np.add.at(characters, pc.list_parent_indices(timers).to_numpy()[waits], lengths[waits])
    weights: npt.NDArray[np.int64] = ROW_BYTES + characters + TIMER_BYTES * counts
    return weights

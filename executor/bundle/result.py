"""The result of a bundle, and the manifest with which a task reports it.

Both are plain values: they travel from a worker to the driver, which commits them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from millpond.executor.bundle.bundle import BundleStatistics, DeadLetter, ProductionSummary
from millpond.executor.bundle.weak_productions import WeakProductions
from millpond.executor.event_time.clocks import PercentileTimes
from millpond.statestore.interval import Interval
from millpond.statestore.quick_pickle import quickly_pickled
from millpond.statestore.rows.files import RowFile
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import EventTimeMicros, WallTimeMicros


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class BundleResult:
    """The result of a bundle.

    Attributes:
        updates: row updates with `ROW_SCHEMA`, sorted by key; ``None`` when nothing changed.
        next_event_timer: earliest pending event-domain firing time of the whole interval.
        next_wall_timer: earliest pending wall-domain firing time of the whole interval.
        hold: oldest output timestamp that any row of the interval still owes.
        next_percentile_timers: earliest firing time of the timers that wait for each percentile watermark.
        percentile_holds: oldest output timestamps when a share of the rows is left out, by percentile.
        productions: one summary per stream of the productions that rows keep.
        weak: the productions to be delivered within the superstep; ``None`` if there are none.
        key_sample: some of the bundle's keys, a key the more often the more records it had.
        retried: the names of the dead letters that were given once more; those that failed again are among
            ``dead_letters``.
    """

    updates: pa.Table | None
    statistics: BundleStatistics
    next_event_timer: EventTimeMicros | None = None
    next_wall_timer: WallTimeMicros | None = None
    hold: EventTimeMicros | None = None
    next_percentile_timers: PercentileTimes = field(default_factory=dict)
    percentile_holds: PercentileTimes = field(default_factory=dict)
    productions: tuple[ProductionSummary, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    weak: WeakProductions | None = None
    key_sample: tuple[str, ...] = ()
    retried: tuple[str, ...] = ()


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A task's report of one interval; only collected manifests are committed (F12).

    Attributes:
        file: the row updates, written but not yet committed; ``None`` when nothing changed.
        result: the bundle's result; its ``updates`` may be ``None``, because they are in ``file``.
        home: the process that ran it; empty for that of the coordinator.
        work_us: how long the bundle was processed, by the worker's stopwatch.
    """

    interval: Interval
    fence: Fence
    file: RowFile | None
    result: BundleResult
    work_us: int = 0
    home: str = ""

"""The initial scan: what a new owner must know about the rows before it works.

It finds the pending timers and the holds of each interval in the committed files (MillWheel
§6.2, §7.1). The rows stay in their files; a worker's soft state reads them when it needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.timer import oldest_but
from millpond.executor.event_time.clocks import EXACT, PercentileTimes
from millpond.executor.soft_state.row_summary import clock_names
from millpond.statestore.interval import Interval
from millpond.statestore.log.live_file import LiveFile
from millpond.statestore.rows.files import LARGE_BYTES, read_row_files
from millpond.statestore.rows.merge import MERGE_COLUMNS, combine_updates
from millpond.statestore.rows.row import ROW_SCHEMA
from millpond.statestore.types import EventTimeMicros, Objects, WallTimeMicros

_STATE_COLUMNS = ("state", "state_bytes", "state_version")
_SCAN_COLUMNS = tuple(name for name in MERGE_COLUMNS if name not in _STATE_COLUMNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalSummary:
    """What the driver keeps about an interval between supersteps.

    Attributes:
        next_event_timer: earliest pending timer in event time.
        next_wall_timer: earliest pending timer in wall time.
        hold: oldest output timestamp that a row still owes.
        next_percentile_timers: earliest pending timer for each percentile watermark.
        percentile_holds: oldest output timestamps when a share of the rows is left out, by percentile.
    """

    next_event_timer: EventTimeMicros | None = None
    next_wall_timer: WallTimeMicros | None = None
    hold: EventTimeMicros | None = None
    next_percentile_timers: PercentileTimes = field(default_factory=dict)
    percentile_holds: PercentileTimes = field(default_factory=dict)

    def is_due(self, now: WallTimeMicros, mark: Callable[[float], EventTimeMicros]) -> bool:
        """Whether a pending timer fires now.

        Args:
            now: the wall time.
            mark: the computation's input watermark at a percentile.
        """
        if self.next_wall_timer is not None and self.next_wall_timer <= now:
            return True
        if self.next_event_timer is not None and self.next_event_timer <= mark(EXACT):
            return True
        return any(at <= mark(percentile) for percentile, at in self.next_percentile_timers.items())


def scan_interval(
    objects: Objects, interval: Interval, files: Sequence[LiveFile], percentiles: Collection[float] = ()
) -> IntervalSummary:
    """Read the timers and holds of an interval from its files.

    Args:
        objects: where the files are.
        interval: the interval.
        files: all its live files.
        percentiles: the percentile watermarks that the pipeline keeps.

    Raises:
        DataError: a file is missing or its bytes are wrong.
    """
    if not files:
        return IntervalSummary()
    # State is the bulk of a row and does not affect timers or holds, so it is not read.
    updates = read_row_files(
        objects,
        [file.path for file in files],
        columns=list(_SCAN_COLUMNS),
        interval=interval,
        large={file.path for file in files if file.size_bytes >= LARGE_BYTES},
    )
    for name in _STATE_COLUMNS:
        updates = updates.append_column(name, pa.nulls(updates.num_rows, ROW_SCHEMA.field(name).type))
    rows = combine_updates(updates)
    timers = rows.column("timers").combine_chunks()
    flat = pc.list_flatten(timers)
    holds = rows.column("hold").cast(pa.int64()).drop_null().to_numpy()
    clocks = clock_names(flat.field("domain"))
    timers_by_percentile = {
        percentile: _earliest(flat, names) for percentile, names in clocks.percentiles.items()
    }
    event = _earliest(flat, clocks.event)
    wall = _earliest(flat, clocks.wall)
    return IntervalSummary(
        next_event_timer=None if event is None else EventTimeMicros(event),
        next_wall_timer=None if wall is None else WallTimeMicros(wall),
        hold=EventTimeMicros(int(holds.min())) if len(holds) else None,
        next_percentile_timers={
            percentile: EventTimeMicros(at)
            for percentile, at in timers_by_percentile.items()
            if at is not None
        },
        percentile_holds=oldest_but(holds, percentiles) if len(holds) else {},
    )


def _earliest(timers: pa.StructArray, names: Sequence[str]) -> int | None:
    if not names:
        return None
    chosen = timers.filter(pc.is_in(timers.field("domain"), pa.array(names, pa.string())))
    earliest = pc.min(chosen.field("at").cast(pa.int64())).as_py()
    return None if earliest is None else int(earliest)

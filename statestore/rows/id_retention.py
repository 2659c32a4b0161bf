"""How long record ids are kept: for as long as a sender may repeat the record (MillWheel §6.1.1).

An id goes when the slack has passed twice: on the wall clock since the record first arrived, and in event time
since the record's own time. Event time alone forgets too early: one record from a clock that is hours fast moves the
low watermark past all honest ones, and a late record is behind it on arrival. The wall clock alone forgets
too early when the pipeline stands still while its senders wait.

Arrivals are stored in whole minutes, rounded up, so that a file has few distinct ones, which compress to a
byte each at most. An id without an arrival counts as having arrived when it is first compacted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.rows.row import RECORD_ID_TYPE, TIMESTAMP
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros, WallTimeMicros

ID_SLACK_US: Final = 3 * 3_600_000_000
"""How long a sender may repeat a record, unless its injector says otherwise: three hours."""

_MINUTE_US: Final = 60_000_000


def arrival_us(wall_time: WallTimeMicros) -> WallTimeMicros:
    """The arrival that is stored for ids that are consumed at ``wall_time``: never earlier, and less than a minute later.

    Example:
        >>> arrival_us(WallTimeMicros(60_000_001))
        120000000
    """
    return WallTimeMicros(-(-wall_time // _MINUTE_US) * _MINUTE_US)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdRetention:
    """The record ids that a compaction keeps: those that satisfy either bound.

    Attributes:
        at_from: ids of records of this event time and later ones.
        arrived_from: ids of records that arrived at this wall time or later.
        unknown_arrived_at: the arrival of ids that have none.
    """

    at_from: EventTimeMicros
    arrived_from: WallTimeMicros
    unknown_arrived_at: WallTimeMicros

    @staticmethod
    def of(watermark: EventTimeMicros, wall_time: WallTimeMicros, slack_us: int) -> IdRetention:
        """What to keep at a low watermark and a wall time.

        Args:
            watermark: the computation's input low watermark. Before the first and after the last one nothing tells how
                old a repetition may be, so everything is kept.
            wall_time: now.
            slack_us: how long a sender may repeat a record.
        """
        is_known = watermark not in {TIME_MIN_US, TIME_MAX_US}
        return IdRetention(
            at_from=EventTimeMicros(max(watermark - slack_us, TIME_MIN_US)) if is_known else TIME_MIN_US,
            arrived_from=WallTimeMicros(max(wall_time - slack_us, TIME_MIN_US)),
            unknown_arrived_at=arrival_us(wall_time),
        )

    def keeps(self, ids: pa.StructArray) -> npt.NDArray[np.bool_]:
        """Which of the ids, of `RECORD_ID_TYPE`, are kept."""
        kept: npt.NDArray[np.bool_] = (_micros(ids, "at") >= self.at_from) | (
            _micros(ids, "arrived_at") >= self.arrived_from
        )
        return kept

    def with_arrivals(self, ids: pa.StructArray) -> pa.StructArray:
        """The same ids; those without an arrival have arrived now."""
        arrived_at = ids.field("arrived_at")
        if not arrived_at.null_count:
            return ids
        stamped = pc.fill_null(arrived_at, pa.scalar(self.unknown_arrived_at).cast(TIMESTAMP))
        return pa.StructArray.from_arrays(
            [ids.field("id"), ids.field("at"), stamped], fields=list(RECORD_ID_TYPE)
        )


def _micros(ids: pa.StructArray, name: str) -> npt.NDArray[np.int64]:
    # What is not known is taken for recent.
    micros = ids.field(name).view(pa.int64())
    known = pc.fill_null(micros, TIME_MAX_US) if micros.null_count else micros
    times: npt.NDArray[np.int64] = known.to_numpy()
    return times

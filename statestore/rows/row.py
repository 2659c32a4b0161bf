"""The row: all durable data of one key of one computation (MillWheel §7.1).

One Parquet row is one *row update*: the new value of a key's row after a bundle,
appended and never updated in place (a "blind write", §6.1.2). The reader's rule,
which `millpond.statestore.view` implements once for all readers:

- updates of a key are ordered by (``sequencer``, ``commit_number``);
- the state, with its ``state_version``, is that of the last update that set or deleted it
  (``state`` or ``state_bytes`` not null, or ``deleted``); a null version is 0;
- the timers are those of the last update whose ``timers`` is not null or which is
  ``deleted`` (a deleting update with null ``timers`` leaves none);
- the hold is the last update's;
- ``record_ids`` are the union; ``productions`` count until they are consumed;
- a key whose state is deleted and which has no timers has no row for those who ask for
  state; whole rows, with ids and productions, also exist where nothing else does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import pyarrow as pa

from millpond.statestore.quick_pickle import quickly_pickled
from millpond.statestore.types import CommitNumber, Sequencer

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
"""Type of every time in a row: UTC microseconds."""

TIMER_TYPE: Final = pa.struct(
    [
        pa.field("tag", pa.string()),
        pa.field("domain", pa.string()),
        pa.field("at", TIMESTAMP),
        pa.field("output_at", TIMESTAMP),
    ]
)
"""
A pending timer: its tag, its clock, the time when it fires, and its hold on the output watermark.

The clock is a `TimeDomain`, or ``event@`` and the number of a percentile watermark; ``/free`` after it says that the
timer does not hold the output watermark. A record that waits for its turn in time is an entry too, and its tag has the
record (`TimeDomain.RECORD`).
"""

RECORD_ID_TYPE: Final = pa.struct(
    [pa.field("id", pa.binary()), pa.field("at", TIMESTAMP), pa.field("arrived_at", TIMESTAMP)]
)
"""
The id of a consumed external record, that record's event time, and the wall time of its first arrival.

The arrival is rounded up to the minute (`millpond.statestore.rows.id_retention`). It is null in files of older
versions, and where another engine has rewritten the files of a table that was created by one.
"""

PRODUCTION_TYPE: Final = pa.struct(
    [
        pa.field("stream", pa.string()),
        pa.field("key", pa.string()),
        pa.field("value", pa.string()),
        pa.field("value_bytes", pa.binary()),
        pa.field("at", TIMESTAMP),
    ]
)
"""A produced record, checkpointed before its delivery (strong productions, §6.1.2)."""

PARTITION_COLUMN: Final = "computation"
"""The Delta partition column; the path and the add action hold it, the files do not."""

STATE_VERSION: Final = "state_version"
"""The column that says which version of the code's state a row has; null is version 0."""

ROW_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.string()),
        pa.field("sequencer", pa.int64()),
        pa.field("commit_number", pa.int64()),
        pa.field("superstep", pa.int64()),
        pa.field("state", pa.string()),
        pa.field("state_bytes", pa.binary()),
        pa.field("timers", pa.list_(TIMER_TYPE)),
        pa.field("record_ids", pa.list_(RECORD_ID_TYPE)),
        pa.field("productions", pa.list_(PRODUCTION_TYPE)),
        pa.field("hold", TIMESTAMP),
        pa.field("deleted", pa.bool_()),
        pa.field(STATE_VERSION, pa.int32()),
    ]
)
"""
Schema of a row-update file, sorted by ``key``; the table adds the partition column.

Files whose states all have version 0 do not have the column ``state_version``.
"""

_COMMIT_BITS: Final = 32


class TimeDomain(StrEnum):
    """The clock that a timer waits for (MillWheel §4.6)."""

    EVENT = "event"
    WALL = "wall"
    HOLD = "hold"
    """No clock: a state's hold on the output watermark (§5.2), stored as a timer that never fires."""

    RECORD = "record"
    """
    A record that waits for the low watermark to pass its time, stored as a timer: ``at`` is a microsecond after the
    record's time, and the tag is the record as JSON.
    """


@quickly_pickled
@dataclass(frozen=True, slots=True, order=True)
class Fence:
    """The part of the table that names an interval's owner: its sequencer and its last commit's number."""

    sequencer: Sequencer
    commit_number: CommitNumber

    def follows(self, stored: Fence | None) -> bool:
        """Whether a commit under this fence may follow the ``stored`` one; ``None`` if none is stored.

        The first commit under a lease follows any smaller sequencer; every other commit
        follows the commit number before its own under the same sequencer.

        Example:
            >>> stored = Fence(Sequencer(3), CommitNumber(7))
            >>> Fence(Sequencer(3), CommitNumber(8)).follows(stored)
            True
            >>> Fence(Sequencer(4), CommitNumber(1)).follows(stored)
            False
        """
        if self.commit_number == 0:
            return stored is None or stored.sequencer < self.sequencer
        return stored is not None and (stored.sequencer, stored.commit_number + 1) == (
            self.sequencer,
            self.commit_number,
        )


def pack_fence(sequencer: Sequencer, commit_number: CommitNumber) -> int:
    """The Delta ``txn`` version of an interval: sequencer in the high bits, commit number in the low 32.

    Example:
        >>> pack_fence(Sequencer(3), CommitNumber(7)) == (3 << 32) + 7
        True
    """
    return (sequencer << _COMMIT_BITS) + commit_number


def unpack_fence(version: int) -> Fence:
    """The fence that a ``txn`` version encodes; the inverse of `pack_fence`."""
    return Fence(Sequencer(version >> _COMMIT_BITS), CommitNumber(version & ((1 << _COMMIT_BITS) - 1)))

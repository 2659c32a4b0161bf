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

Envelopes: how a windowed step's panes travel, and what only looks like one.

A pane is a JSON object with four fields, ``value``, ``window``, ``at`` and ``pane``, the last of which has nine of
its own (`millpond.executor.windows.pane` defines what they mean). A row from outside may have the same fields. It is
a `PlainObject` then, in memory, and stays one as JSON text: that begins with a space, which no other value's text does.

The rest of a row: its record ids and its undelivered productions, of all its updates together.

State, timers and hold of a key follow from its last updates (`millpond.statestore.rows.merge`); ids and
productions are spread over all of them. They are read separately, so that reading state does not pay for
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.quick_pickle import quickly_pickled
from millpond.statestore.rows.codec import PlainObject
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, CommitNumber, Sequencer, Superstep

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

The arrival is rounded up to the minute (`millpond.statestore.rows.bloom`). It is null in files of older
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


_FIELDS: Final = frozenset({"value", "window", "at", "pane"})
_FIELD_COUNT: Final = len(_FIELDS)
_PANE_FIELDS: Final = frozenset(
    {
        "index",
        "nonspeculative_index",
        "timing",
        "is_first",
        "is_last",
        "is_retraction",
        "watermark_percentile",
        "produced_at",
        "trigger",
    }
)
_BOUNDS: Final = 2
_ALL_TIME: Final = (TIME_MIN_US, TIME_MAX_US)
PLAIN_MARK: Final = " "
"""What the text of an object begins with that has the fields of an envelope and is none."""


def has_envelope_fields(value: object) -> bool:
    """Whether a value is an object with exactly the four fields of an envelope, whatever they hold."""
    # Called for each record: the length check settles most values.
    return isinstance(value, dict) and len(value) == _FIELD_COUNT and value.keys() == _FIELDS


def is_envelope(value: object) -> bool:
    """Whether a record's value is a windowed step's pane in its envelope."""
    if type(value) is not dict or len(value) != _FIELD_COUNT or value.keys() != _FIELDS:
        return False
    window, pane = value["window"], value["pane"]
    has_bounds = type(window) is list and len(window) == _BOUNDS
    return has_bounds and type(pane) is dict and pane.keys() == _PANE_FIELDS


def change_envelope(value: Any, at: int, *, is_retraction: bool) -> dict[str, Any]:
    """A change of a source's table as an envelope: an element of no window yet, or the retraction of one.

    Args:
        value: the row.
        at: its event time.
        is_retraction: whether the change takes it back.
    """
    pane = {
        "index": 0,
        "nonspeculative_index": 0,
        "timing": "on_time",
        "is_first": True,
        "is_last": False,
        "is_retraction": is_retraction,
        "watermark_percentile": None,
        "produced_at": 0,
        "trigger": "change",
    }
    return {"value": value, "window": list(_ALL_TIME), "at": at, "pane": pane}


def has_marks(texts: pa.StringArray) -> bool:
    """Whether any of these values is an object that only looks like an envelope."""
    return bool(pc.any(pc.starts_with(texts, PLAIN_MARK)).as_py())


def decode_value(text: str) -> Any:
    """A record's value of its JSON text, an object that only looks like an envelope as what it is.

    Raises:
        orjson.JSONDecodeError: the text is not JSON.
    """
    value = orjson.loads(text)
    return PlainObject(value) if text[:1] == PLAIN_MARK and type(value) is dict else value


_ORDER: Final = ("key", "sequencer", "commit_number")
ID_COLUMNS: Final = (*_ORDER, "record_ids")
"""The columns of an update that say which ids its key has."""

PRODUCTION_COLUMNS: Final = (*_ORDER, "superstep", "productions")
"""The columns of an update that say what its key has produced."""


def lists_by_key(updates: pa.Table, name: str) -> pa.Table:
    """The lists of a column, joined by key, oldest update first; only keys whose list is not empty.

    Args:
        updates: row updates in any order, with `ID_COLUMNS` or `PRODUCTION_COLUMNS`.
        name: ``record_ids`` or ``productions``.

    Returns:
        ``key`` and the column, sorted by key.
    """
    filled = updates.filter(pc.greater(pc.fill_null(pc.list_value_length(updates.column(name)), 0), 0))
    ordered = filled.sort_by([(column, "ascending") for column in _ORDER]).combine_chunks()
    lists = pa.array([], ROW_SCHEMA.field(name).type)
    if ordered.num_rows:
        lists = ordered.column(name).combine_chunks()
    keys = ordered.column("key").combine_chunks().dictionary_encode()
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
    # Updates of a key lie together now, so its values do too: only the ends of the lists change.
    per_key = np.bincount(keys.indices.to_numpy(), weights=lengths, minlength=len(keys.dictionary))
    offsets = np.concatenate([[0], np.cumsum(per_key)]).astype(np.int32)
    joined = pa.ListArray.from_arrays(offsets, lists.flatten(), type=ROW_SCHEMA.field(name).type)
    return pa.table({"key": keys.dictionary, name: joined})


def pending_only(updates: pa.Table, pending_from: Superstep) -> pa.Table:
    """The updates whose productions no later superstep has delivered.

    Args:
        updates: row updates with `PRODUCTION_COLUMNS`.
        pending_from: the pipeline's last superstep; what earlier ones produced has been delivered.
    """
    return updates.filter(pc.greater_equal(updates.column("superstep"), pending_from))


class ListsOfKeys:
    """Looks up the lists of `lists_by_key` by key.

    Args:
        by_key: a result of `lists_by_key`.
        name: the column.
    """

    def __init__(self, by_key: pa.Table, name: str) -> None:
        lists = by_key.column(name).combine_chunks()
        self._rows: dict[str, int] = {key: row for row, key in enumerate(by_key.column("key").to_pylist())}
        self._none = len(lists)
        self._lists = pa.concat_arrays([lists, pa.array([[]], lists.type)])

    def at(self, keys: pa.Array | pa.ChunkedArray) -> pa.Array:
        """The lists of these keys, in their order; an empty one for a key that has none."""
        rows = [self._rows.get(key, self._none) for key in keys.to_pylist()]
        return self._lists.take(pa.array(rows, pa.int64()))

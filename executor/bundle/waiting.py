"""Records that wait in their key's row until the low watermark has passed them.

Each is an entry among the row's timers, because like a timer it must wake its key, hold the output watermark and
survive the process: `TimeDomain.RECORD`. Its tag is the record as JSON, together with the types that JSON lacks, so
that the code gets the same value as without the wait. A number makes each tag unique within its key.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa

from millpond.executor.bundle.letter_value import is_whole, read_worded, typed_text, typed_value, worded
from millpond.executor.computation.record_columns import RecordColumns
from millpond.executor.computation.timer import Timer
from millpond.executor.computation.values import PythonValues
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.rows.codec import PlainObject, has_non_finite
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.types import TIME_MIN_US

_MARK: Final = "$"
_MARK_BYTES: Final = b'"$":'
_MARKED: Final = frozenset({datetime, date, time, timedelta, Decimal, bytes})
_NESTED: Final = frozenset({dict, list})
_OPTIONS: Final = (
    orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_SUBCLASS
)
_LOST: Final = "a record that waits for its turn in time has a value that no text can keep"


def waiting_timer(columns: RecordColumns, index: int, superstep: int, lag_us: int) -> Timer:
    """The entry of a record among its key's timers.

    Args:
        columns: the records of a bundle.
        index: the record's index.
        superstep: the bundle's superstep; with the record's position in the bundle it makes the entry unique.
        lag_us: how far before the record's time its productions may be.

    Raises:
        InvalidError: the value has parts that have no text form.
    """
    at, record_id = columns.at[index], columns.scoped_id(index)
    header: dict[str, Any] = {"stream": columns.streams[index], "number": [superstep, columns.sources[index]]}
    if record_id is not None:
        header["id"] = base64.b64encode(record_id).decode()
    value = columns.value(index)
    if type(value) is PlainObject:
        # It has the fields of a pane and is none, which must still hold when it is read again.
        header["plain"], value = True, dict(value)
    text, marks = _marked_text(value)
    if text is None:
        described = typed_text(value)
        if not is_whole(described.types):
            raise InvalidError(_LOST, type=type(value).__qualname__)
        text, header["types"] = described.text, dict(described.types)
    elif marks:
        header["marks"] = marks
    return Timer(
        tag=f'{orjson.dumps(header).decode()[:-1]},"value":{text}}}',
        domain=TimeDomain.RECORD,
        at=at + 1,
        output_at=max(TIME_MIN_US, at - lag_us),
    )


def _marked_text(value: Any) -> tuple[str | None, int]:
    """A value as JSON in which each part whose type JSON lacks is an object with its type and text.

    Returns:
        The text and the number of these parts; no text if the value has such an object itself or has other types,
        which take `typed_text`, a slower way.
    """
    marks = 0

    def mark(part: Any) -> dict[str, Any]:
        nonlocal marks
        if type(part) not in _MARKED:
            raise TypeError(type(part).__qualname__)
        marks += 1
        return {_MARK: worded(part)}

    try:
        encoded = orjson.dumps(value, default=mark, option=_OPTIONS)
    except TypeError:
        return None, 0
    # orjson writes NaN and infinities as null, so a null may stand for one of them.
    if encoded.count(_MARK_BYTES) != marks or (b"null" in encoded and has_non_finite(value)):
        return None, 0
    return encoded.decode(), marks


def _unmarked(value: Any) -> Any:
    if type(value) is list:
        return [_unmarked(part) for part in value]
    if type(value) is not dict:
        return value
    if _MARK in value:
        return read_worded(*value[_MARK])
    return {name: _unmarked(part) if type(part) in _NESTED else part for name, part in value.items()}


def waiting_columns(timers: Sequence[Timer]) -> RecordColumns:
    """The records that wait under these entries, in the same order; none of them is late.

    Raises:
        DataError: an entry is not one of `waiting_timer`.
    """
    entries = [_read(timer) for timer in timers]
    ids = [entry.get("id") for entry in entries]
    has_ids = any(record_id is not None for record_id in ids)
    return RecordColumns(
        np.array([timer.at - 1 for timer in timers], np.int64),
        [entry["stream"] for entry in entries],
        np.arange(len(entries), dtype=np.int64),
        PythonValues([entry["value"] for entry in entries]),
        pa.array([None if text is None else base64.b64decode(text) for text in ids], pa.binary())
        if has_ids
        else None,
        TIME_MIN_US,
    )


def _read(timer: Timer) -> dict[str, Any]:
    try:
        # A value with types takes another parser: it may have integers of more than 64 bits.
        entry: dict[str, Any] = json.loads(timer.tag) if '"types":' in timer.tag else orjson.loads(timer.tag)
        if "marks" in entry:
            entry["value"] = _unmarked(entry["value"])
        if "types" in entry:
            entry["value"] = typed_value(entry["value"], entry["types"])
        if "plain" in entry:
            entry["value"] = PlainObject(entry["value"])
    except (ValueError, LookupError, TypeError) as cause:
        raise DataError("a waiting record cannot be read", at=timer.at - 1, tag=timer.tag[:200]) from cause
    return entry

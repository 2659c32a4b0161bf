"""Timers of a load, converted to the form in which rows store them.

A timer has ``tag``, ``domain``, ``at`` and ``output_at``; only ``at`` is required. The domain names a clock: ``event``,
``wall``, ``event@`` and a percentile, or ``hold``, followed by ``/free`` if the timer does not hold the output watermark.
The defaults match `Context.set_timer`: event time, and the firing time as output time; a wall timer without an
``output_at`` holds nothing.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.errors import InvalidError
from millpond.statestore.loading.source import Column, first_line, is_text
from millpond.statestore.rows.merge import nulls
from millpond.statestore.rows.row import TimeDomain, lengths_of, lists_of

_FIELDS: Final = ("tag", "domain", "at", "output_at")
_FREE: Final = "/free"
_PERCENTILE: Final = "event@"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROS: Final = 1_000_000
_EARLIEST: Final = int((datetime.min.replace(tzinfo=UTC) - _EPOCH).total_seconds()) * _MICROS
_LATEST: Final = int((datetime.max.replace(tzinfo=UTC) - _EPOCH).total_seconds()) * _MICROS
_UNHELD: Final = np.iinfo(np.int64).max
_UTC: Final = pa.timestamp("us", tz="UTC")

# A row's timers on their way into a store; times are microseconds.
TIMERS: Final = pa.list_(
    pa.struct({"tag": pa.string(), "domain": pa.string(), "at": pa.int64(), "output_at": pa.int64()})
)


def read_timers(column: Column | None, keys: pa.StringArray) -> tuple[pa.ListArray, pa.Int64Array]:
    """Convert a column of timers: lists of structs or mappings, or JSON of such lists; ``keys`` are for errors.

    Return the timers of each row in firing order, as `TIMERS`, and its earliest held time; null for a row without one.
    """
    lists = None if column is None else _as_lists(column, keys)
    if lists is None or not pc.sum(pc.list_value_length(lists)).as_py():
        return nulls(TIMERS, len(keys)), pa.nulls(len(keys), pa.int64())
    counts = lengths_of(lists)
    owners = np.repeat(np.arange(len(keys), dtype=np.int64), counts)
    fields = _fields(lists.flatten())
    at = _times(fields["at"], "at")
    if at.null_count:
        row = int(owners[pc.index(at.is_null(), True).as_py()])
        raise _malformed("one has no time", field="at", key=keys[row].as_py())
    encoded = pc.fill_null(_text(fields["domain"], "domain"), TimeDomain.EVENT.value).dictionary_encode()
    clocks = [_clock(name) for name in encoded.dictionary.to_pylist()]
    domains, names = (
        pa.array(parts, pa.string()).take(encoded.indices) for parts in zip(*clocks, strict=True)
    )
    output_at = _times(fields["output_at"], "output_at")
    tags = pc.fill_null(_text(fields["tag"], "tag"), "")
    # Like `Context.set_timer`: a wall timer without an ``output_at`` holds nothing.
    is_bare_wall = pc.and_(pc.equal(names, TimeDomain.WALL.value), output_at.is_null())
    names = pc.if_else(is_bare_wall, TimeDomain.WALL.value + _FREE, names)
    output_at = pc.coalesce(output_at, at)
    if counts.max() > 1:
        percentiles = [
            float(name.removesuffix(_FREE).partition("@")[2] or 100.0) for name in names.to_pylist()
        ]
        columns = {"row": owners, "at": at, "domain": domains, "percentile": percentiles, "tag": tags}
        order = _firing_order(pa.table(columns), keys)
        at, names, tags, output_at = (array.take(order) for array in (at, names, tags, output_at))
    is_holding = pc.invert(pc.ends_with(names, _FREE)).to_numpy(zero_copy_only=False)
    holds = np.full(len(keys), _UNHELD, np.int64)
    np.minimum.at(holds, owners[is_holding], output_at.to_numpy()[is_holding])
    values = pa.StructArray.from_arrays([tags, names, at, output_at], fields=list(TIMERS.value_type))
    found = lists_of(values, counts, TIMERS, pa.array(counts == 0))
    return found, pa.array(holds, mask=holds == _UNHELD)


def _as_lists(column: Column, keys: pa.StringArray) -> pa.Array | None:
    """Return lists of structs; ``None`` if all are null."""
    if isinstance(column, pa.Array) and pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if isinstance(column, pa.Array) and is_text(column.type):
        texts = column.to_pylist()
        column = [_parsed(text, keys, row) if text else None for row, text in enumerate(texts)]
    if not isinstance(column, pa.Array):
        try:
            column = pa.array([None if timers is None else list(timers) for timers in column])
        except (pa.ArrowException, TypeError, ValueError) as cause:
            raise _malformed(first_line(cause)) from cause
    if column.null_count == len(column):
        return None
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise _malformed(f"they are {column.type}")
    return column


def _parsed(text: str, keys: pa.StringArray, row: int) -> list[Any] | None:
    try:
        timers = orjson.loads(text)
    except orjson.JSONDecodeError as cause:
        raise _malformed(str(cause), key=keys[row].as_py()) from cause
    if not isinstance(timers, list | None):
        raise _malformed("they are not a list", key=keys[row].as_py())
    return timers


def _fields(structs: pa.Array) -> dict[str, pa.Array]:
    if not pa.types.is_struct(structs.type):
        raise _malformed(f"each is {structs.type}")
    if structs.null_count:
        raise _malformed("one is null")
    names = [field.name for field in structs.type]
    if unknown := sorted(set(names) - {*_FIELDS}):
        raise _malformed("unknown fields", fields=unknown, known=list(_FIELDS))
    parts = dict(zip(names, structs.flatten(), strict=True))
    return {name: parts.get(name, pa.nulls(len(structs))) for name in _FIELDS}


def _times(column: pa.Array, name: str) -> pa.Int64Array:
    """Convert integers, timestamps with a zone, or ISO 8601 text with a zone to microseconds."""
    kind = column.type
    try:
        if pa.types.is_null(kind) or pa.types.is_integer(kind):
            times = column.cast(pa.int64())
        elif pa.types.is_timestamp(kind) and kind.tz is not None:
            times = column.cast(_UTC, safe=False).cast(pa.int64())
        elif is_text(kind):
            times = column.cast(pa.string()).cast(_UTC).cast(pa.int64())
        else:
            raise _malformed("a time must be microseconds or have a zone", field=name, type=kind)
    except pa.ArrowException as cause:
        raise _malformed(first_line(cause), field=name) from cause
    bounds = pc.min_max(times).as_py()
    if bounds["min"] is not None and (bounds["min"] < _EARLIEST or bounds["max"] > _LATEST):
        raise _malformed("a time must be in the years 1 to 9999", field=name)
    return times


def _text(column: pa.Array, name: str) -> pa.StringArray:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _text(column.dictionary_decode(), name)
    if not is_text(kind) and not pa.types.is_null(kind):
        raise _malformed("it is not text", field=name, type=kind)
    return column.cast(pa.string())


def _clock(name: str) -> tuple[str, str]:
    bare, free = name.removesuffix(_FREE), _FREE if name.endswith(_FREE) else ""
    if bare in (TimeDomain.EVENT, TimeDomain.WALL, TimeDomain.HOLD):
        return bare, name
    percentile = bare.removeprefix(_PERCENTILE)
    try:
        share = float(percentile) if percentile != bare else -1.0
    except ValueError:
        share = -1.0
    if not 0 < share < 100:
        raise _malformed("there is no such clock", domain=name)
    return TimeDomain.EVENT.value, f"{_PERCENTILE}{share!r}{free}"


def _firing_order(table: pa.Table, keys: pa.StringArray) -> pa.Array:
    """Return the order by row, time, domain, percentile and tag, which are the columns of ``table``."""
    same = table.group_by(["row", "domain", "tag"]).aggregate([("at", "count")])
    repeated = same.filter(pc.greater(same.column("at_count"), 1))
    if repeated.num_rows:
        first = repeated.slice(0, 1).to_pylist()[0]
        raise _malformed("two have one tag and domain", key=keys[first["row"]].as_py(), tag=first["tag"])
    return pc.sort_indices(table, [(name, "ascending") for name in table.column_names])


def _malformed(reason: str, **details: object) -> InvalidError:
    return InvalidError("the timers of a row are malformed", reason=reason, **details)

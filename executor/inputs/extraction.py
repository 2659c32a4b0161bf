"""Extraction: outside rows become records, or dead letters (MillWheel §5.2).

An injector declares where key, event time and id of a row are; a consumer may take its key from elsewhere
(§4.2). A row without a readable key, time or id gets an error and does not disturb the others. Rows are Arrow
columns or Python dicts, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, time
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.values import (
    ArrowValues,
    ChangedValues,
    PythonValues,
    Values,
    total_bytes,
)
from millpond.executor.inputs.changes import change_errors, change_signs, images, signed_ids
from millpond.executor.inputs.keys import KeyExtractor, KeyField, extract_key_column, extract_keys, key_names
from millpond.executor.inputs.payload import (
    ROW_DICTS,
    TEXT_TYPES,
    Payload,
    UndecodedRow,
    decoded_rows,
    python_rows,
    reason_of_text,
    value_of_row,
)
from millpond.executor.inputs.record_size import RECORD_BYTES_MAX, error_of_size
from millpond.executor.inputs.reserved import refuse_repeated_fields, refuse_reserved
from millpond.executor.time.instants import (
    DEFAULT_READING,
    InstantColumn,
    TimeReading,
    instant_column_us,
    parse_instant_us,
)
from millpond.executor.time.observations import (
    DEFAULT_MEMBER,
    AheadLimit,
    DelaySketch,
    InputObservation,
    TimesSeen,
    Watch,
)
from millpond.executor.time.watermark_policies import IngressTime, MarkColumn, WatermarkPolicy
from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.statestore.loading.parquet_files import row_bytes, without_views
from millpond.statestore.rows.key_text import check_key_value
from millpond.statestore.rows.record_ids import ID_SLACK_US
from millpond.statestore.rows.row import has_envelope_fields, one_array
from millpond.statestore.rows.value_text import PlainObject
from millpond.statestore.types import TIME_MIN_US, EventTimeMicros

_Read = TypeVar("_Read")
_FIRST_ROWS: Final = 1_000
_ID_TYPES: Final = TEXT_TYPES | {pa.binary(), pa.large_binary()}

Rows: TypeAlias = "pa.Table | Sequence[Mapping[str, Any]]"
"""Outside rows: an Arrow table, or one mapping of fields per row."""


FieldExtractor: TypeAlias = str | Callable[[Any], Any]
"""Where an injector finds a time, id or member: a column's name, or a function of the row as a ``dict``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectorNode:
    """A declared injector; `Pipeline.inject` explains its arguments.

    Attributes:
        stream: the stream that it feeds, which also names its input for the runners.
        signals: on the stream of signals, which never ends, the names that each windowed step waits for.
        is_assumed: the user gave no watermark policy, so the default is only assumed.
        keeps_null_times: as in Spark's operators, rows whose time is null are records, which are never late and move
            no watermark.
    """

    stream: str
    key: KeyField
    at: FieldExtractor | IngressTime
    id: FieldExtractor | None
    watermark: WatermarkPolicy
    idle_after_us: int | None = None
    members: tuple[str, ...] = ()
    member: FieldExtractor | None = None
    skew_limit_us: int | None = None
    id_slack_us: int = ID_SLACK_US
    times: TimeReading = DEFAULT_READING
    signals: Mapping[str, frozenset[str]] = field(default_factory=dict)
    change: str | None = None
    payload: Payload | None = None
    is_assumed: bool = False
    keeps_null_times: bool = False
    ahead: AheadLimit | None = None
    max_record_bytes: int | None = RECORD_BYTES_MAX

    @property
    def is_unit_assumed(self) -> bool:
        """Its records have times, and numbers are taken for microseconds because no unit was declared."""
        return not isinstance(self.at, IngressTime) and not self.times.is_unit_given

    def check_member(self, member: str | None) -> None:
        if member is not None and member not in self.members:
            raise InvalidError(
                "no such member is expected", stream=self.stream, member=member, members=list(self.members)
            )


def rows_to_extract(node: InjectorNode, rows: Any) -> Any:
    """Return rows as the injector's extractors see them: with the payload decoded, if there is one."""
    if node.payload is None:
        return rows
    return decoded_rows(node.payload, rows, stream=node.stream, max_bytes=node.max_record_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """One consumer's view of outside rows, column by column.

    Attributes:
        keys: null where ``errors`` has an entry about the key.
        at: event times in microseconds; meaningless where ``errors`` has an entry.
        errors: the reason why a row is unreadable, by its position.
        untimed: positions of the rows whose time is unreadable, or a null that the injector keeps.
    """

    keys: pa.StringArray
    at: npt.NDArray[np.int64]
    ids: pa.BinaryArray | None = None
    errors: Mapping[int, str] = field(default_factory=dict)
    untimed: frozenset[int] = frozenset()


def read_injected(
    node: InjectorNode,
    key: KeyExtractor,
    rows: Rows,
    stamp_at: EventTimeMicros | None = None,
    garbled: Mapping[int, str] = MappingProxyType({}),
) -> Injected:
    """Read key, time and id of every row.

    ``key=None`` keeps the injector's, ``stamp_at`` is the arrival time, ``garbled`` has the errors of `mended_texts`.
    """
    wanted = node.key if key is None else key
    if isinstance(rows, pa.Table):
        keys = extract_key_column(wanted, rows)
    else:
        keys = extract_keys(wanted, pa.nulls(len(rows), pa.string()), rows.__getitem__)
    times = _event_times(node, rows, stamp_at)
    at, ahead_errors = _not_ahead(node, times.at, stamp_at)
    ids, id_errors = _ids(node.id, rows)
    errors = {**ahead_errors, **id_errors, **_time_errors(node, rows, times), **keys.errors, **garbled}
    limit = node.max_record_bytes
    if limit is not None and (large := too_large(rows, limit)):
        errors |= dict.fromkeys(large, error_of_size(limit))
    if node.change is not None:
        errors |= change_errors(rows)
        ids = None if ids is None else signed_ids(ids, change_signs(rows))
    return Injected(keys=keys.keys, at=at, ids=ids, errors=errors, untimed=frozenset(times.errors))


def _not_ahead(
    node: InjectorNode, at: npt.NDArray[np.int64], arrived_at: EventTimeMicros | None
) -> tuple[npt.NDArray[np.int64], Mapping[int, str]]:
    """Return times within the stream's `AheadLimit`, and the errors of rows that are beyond."""
    if node.ahead is None or arrived_at is None:
        return at, {}
    latest = node.ahead.latest(arrived_at)
    if node.ahead.on_ahead == "clamp":
        return np.minimum(at, latest), {}
    return at, {} if node.ahead.on_ahead == "hold" else dict.fromkeys(
        np.flatnonzero(at > latest).tolist(), node.ahead.error
    )


def _time_errors(node: InjectorNode, rows: Rows, times: InstantColumn) -> Mapping[int, str]:
    if not (node.keeps_null_times and times.errors and isinstance(rows, pa.Table)):
        return times.errors
    is_null = rows.column(str(node.at)).is_null().to_pylist()
    return {row: error for row, error in times.errors.items() if not is_null[row]}


def mended_texts(table: pa.Table) -> tuple[pa.Table, dict[int, str]]:
    """Return a table in which every text can be read, and by row the reason why it could not be.

    Parquet files and Spark pass on text that is no UTF-8; it makes its own record unreadable. In a column of text the bytes that are no UTF-8 are replaced; another value that has some becomes null.
    """
    errors: dict[int, str] = {}
    for place, name in enumerate(table.column_names):
        column = table.column(place)
        if not _is_readable_text(column):
            cells, bad = _readable_cells(column)
            errors |= dict.fromkeys(bad, f"the text of column {name} is no UTF-8")
            table = table.set_column(place, table.schema.field(place), pa.array(cells, column.type))
    return table, errors


def _is_readable_text(column: pa.ChunkedArray) -> bool:
    if pa.types.is_primitive(column.type):
        return True
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _readable_cells(column: pa.ChunkedArray) -> tuple[list[Any], list[int]]:
    cells, bad = list[Any](), list[int]()
    for row, cell in enumerate(column):
        try:
            cells.append(cell.as_py())
        except UnicodeDecodeError as error:
            bad.append(row)
            is_text = cell.type in (pa.string(), pa.large_string(), pa.string_view())
            cells.append(error.object.decode(errors="replace") if is_text else None)
    return cells, bad


def too_large(rows: Rows, limit: int | None) -> list[int]:
    """Return the positions of the rows above ``limit`` bytes: of all columns of a table, of text and bytes in a mapping."""
    # No row is larger than all of them together, which costs little to know.
    if limit is None or total_bytes(rows) <= limit:
        return []
    if isinstance(rows, pa.Table):
        found: list[int] = np.flatnonzero(row_bytes(rows) > limit).tolist()
        return found
    return [place for place, row in enumerate(rows) if total_bytes((row,)) > limit]


def check_fields(node: InjectorNode, keys: Iterable[KeyExtractor], rows: Sequence[Any]) -> None:
    """Refuse rows if none of the first thousand can be read: then the program is wrong, not a single row."""
    mappings = [row for row in rows[:_FIRST_ROWS] if isinstance(row, Mapping)]
    if not mappings:
        return
    refuse_reserved(set().union(*mappings))
    for extractor in {node.key if key is None else key for key in keys}:
        for name in key_names(extractor):
            _check_key_cells(node.stream, name, _check_field(node.stream, "key", name, mappings))
    for use, field_of in (("time", node.at), ("id", node.id), ("member", node.member)):
        if isinstance(field_of, str):
            _check_field(node.stream, use, field_of, mappings)
    if isinstance(node.watermark, MarkColumn) and isinstance(node.watermark.column, str):
        _check_marks(node, node.watermark.column, mappings)


def _check_marks(node: InjectorNode, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse marks none of which is a time; a source may give its first mark after any number of rows."""
    cells = [row[name] for row in rows if row.get(name) is not None]
    if not cells and did_you_mean(name, [field for field in rows[0] if isinstance(field, str)]):
        _check_field(node.stream, "mark", name, rows)
    for number, cell in enumerate(cells, 1):
        try:
            parse_instant_us(cell, node.times)
        except InvalidError as error:
            if number == len(cells):
                reason = str(error)
                raise InvalidError(
                    "no row has a mark that is a time", stream=node.stream, field=name, reason=reason
                ) from error
        else:
            return


def _check_field(stream: str, use: str, name: str, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    cells = [row[name] for row in rows if name in row]
    if not cells:
        fields = [field for field in rows[0] if isinstance(field, str)]
        hint = did_you_mean(name, fields)
        raise InvalidError(
            f"no row has the field of the {use}{hint}", stream=stream, field=name, fields=fields
        )
    return cells


def _check_key_cells(stream: str, name: str, cells: Sequence[Any]) -> None:
    """Refuse a field whose values are all of types without keys; a value without one makes a dead letter alone."""
    reasons: dict[str, str] = {}
    for kind, cell in {type(cell): cell for cell in cells}.items():
        try:
            check_key_value(cell)
        except InvalidError as error:
            reasons[kind.__name__] = error.message
        else:
            return
    first = min(reasons)
    raise InvalidError(
        f"{reasons[first]}; or convert it, for example with key=lambda row: str(row[{name!r}])",
        stream=stream,
        field=name,
        type=first,
    )


def member_names(node: InjectorNode, rows: Rows) -> list[str | None] | None:
    """Return the sender of each row, ``None`` where unreadable; ``None`` for a stream without members."""
    if node.member is None:
        return None
    if isinstance(node.member, str) and isinstance(rows, pa.Table):
        cells = _existing(rows, node.member, "member").to_pylist()
    else:
        plain = python_rows(rows) if isinstance(rows, pa.Table) else rows
        cells, _ = _cells(node.member, plain, lambda cell: cell, None)
    return [cell if isinstance(cell, str) and cell else None for cell in cells]


def scoped_ids(ids: pa.BinaryArray | None, scope: bytes) -> pa.BinaryArray | None:
    if ids is None or not scope:
        return ids
    return pc.binary_join_element_wise(pa.scalar(scope, pa.binary()), ids, pa.scalar(b"", pa.binary()))


def observe_times(
    watch: Watch,
    at: npt.NDArray[np.int64],
    members: Sequence[str | None] | None = None,
    *,
    records: int | None = None,
    counted: npt.NDArray[np.bool_] | None = None,
) -> InputObservation:
    """Summarise the times of readable records; ``records`` overrides their number, ``members`` names the senders.

    Where ``at`` repeats a record, ``counted`` marks the one time that counts.
    """
    count = len(at) if records is None else records
    once = np.ones(len(at), np.bool_) if counted is None else counted
    if not len(at):
        return InputObservation(stream=watch.stream, records=count)
    if watch.ahead is not None and watch.ahead.on_ahead == "hold" and watch.stamp_at is not None:
        # The record keeps its time, but moves no watermark beyond the limit.
        at = np.minimum(at, watch.ahead.latest(watch.stamp_at))
    by_member = {}
    if members is not None:
        senders = np.array(["" if member is None else member for member in members], dtype=object)
        for name in sorted({member for member in members if member is not None}):
            own = senders == name
            by_member[name] = _times_seen(watch, at[own], name, once[own])
    times = _times_seen(watch, at, DEFAULT_MEMBER, once)
    return InputObservation(
        stream=watch.stream,
        records=count,
        times=times,
        members=by_member,
        in_1970=count_in_1970(at) and count_in_1970(at[once]),
    )


_YEAR_US: Final = 365 * 86_400_000_000


def count_in_1970(at: npt.NDArray[np.int64]) -> int:
    """Return how many times lie in 1970, where clocks that were never set and times in a wrong unit are."""
    if not len(at) or at.min() >= _YEAR_US:
        return 0
    return int(np.count_nonzero((at >= 0) & (at < _YEAR_US)))


def _times_seen(
    watch: Watch, at: npt.NDArray[np.int64], member: str, once: npt.NDArray[np.bool_]
) -> TimesSeen:
    known = watch.newest.get(member)
    delays = None
    # Without a committed record there was no watermark to be late for.
    if watch.with_delays and known is not None:
        delays = DelaySketch()
        delays.add(np.maximum(known - at[once], 0))
    return TimesSeen(
        newest_at=EventTimeMicros(int(at.max())), oldest_at=EventTimeMicros(int(at.min())), delays=delays
    )


def with_marks(
    seen: InputObservation,
    node: InjectorNode,
    rows: Rows,
    members: Sequence[str | None] | None,
    arrived_at: EventTimeMicros | None = None,
) -> InputObservation:
    """Add the source's greatest mark, overall and by member, if the injector's policy uses marks.

    A mark is no record's time: beyond the stream's `AheadLimit` it is clamped.
    """
    if seen.times is None or not isinstance(node.watermark, MarkColumn):
        return seen
    times = _times(node.watermark.column, rows, node.times)
    if node.ahead is not None and arrived_at is not None:
        times = replace(times, at=np.minimum(times.at, node.ahead.latest(arrived_at)))
    is_marked = np.ones(len(times.at), np.bool_)
    is_marked[list(times.errors)] = False
    senders = np.array(members or [], dtype=object)
    return replace(
        seen,
        times=replace(seen.times, mark_at=_greatest(times.at[is_marked])),
        members={
            name: replace(sent, mark_at=_greatest(times.at[is_marked & (senders == name)]))
            for name, sent in seen.members.items()
        },
    )


def _greatest(at: npt.NDArray[np.int64]) -> EventTimeMicros | None:
    return EventTimeMicros(int(at.max())) if len(at) else None


def oldest_time(node: InjectorNode, rows: Rows, arrived_at: EventTimeMicros) -> EventTimeMicros | None:
    """Return a bound on the times that rows will have if they arrive now or later; ``None`` without a readable one."""
    at = readable_times(node, rows)
    if not len(at):
        return None
    oldest = EventTimeMicros(int(at.min()))
    return oldest if node.ahead is None else min(oldest, node.ahead.latest(arrived_at))


def silences(node: InjectorNode, rows: Rows, arrived_at: EventTimeMicros, share: int) -> list[int]:
    """Return the rows before which the stream is silent for longer than one in ``share`` of the time of all rows.

    All rows before such a silence are older than all rows after it.
    """
    times = _event_times(node, rows)
    at, ahead_errors = _not_ahead(node, times.at, arrived_at)
    readable = np.setdiff1d(np.arange(len(at)), [*times.errors, *ahead_errors])
    at = at[readable]
    if len(at) < 2:
        return []
    pauses = np.minimum.accumulate(at[::-1])[::-1][1:] - np.maximum.accumulate(at)[:-1]
    found: list[int] = readable[1:][pauses > (at.max() - at.min()) // share].tolist()
    return found


def readable_times(
    node: InjectorNode, rows: Rows, arrived_at: EventTimeMicros | None = None
) -> npt.NDArray[np.int64]:
    """Return the times of the rows whose time is readable and, given their arrival, not too far ahead of it."""
    times = _event_times(node, rows)
    at, ahead_errors = _not_ahead(node, times.at, arrived_at)
    unreadable = [*times.errors, *ahead_errors]
    return np.delete(at, unreadable) if unreadable else at


def sorted_by_time(node: InjectorNode, rows: Rows) -> tuple[Rows, npt.NDArray[np.int64]]:
    """Return rows and times, stably sorted by time; unreadable times count as the beginning of time."""
    times = _event_times(node, rows)
    at = times.at.copy()
    at[list(times.errors)] = TIME_MIN_US
    if (at[1:] >= at[:-1]).all():
        return rows, at
    order = np.argsort(at, kind="stable")
    if isinstance(rows, pa.Table):
        return rows.take(pa.array(order)), at[order]
    return [rows[row] for row in order.tolist()], at[order]


def delivered_values(node: InjectorNode, rows: Rows, at: npt.NDArray[np.int64]) -> Values:
    """Return the rows as record values; rows of a change stream come in envelopes."""
    if node.payload is not None:
        return row_values([value_of_row(row) for row in rows])
    if node.change is None:
        return row_values(rows)
    return ChangedValues(row_values(images(rows)), change_signs(rows), at)


def row_values(rows: Rows) -> Values:
    if isinstance(rows, pa.Table):
        return ArrowValues(rows)
    if any(map(has_envelope_fields, rows)):
        return PythonValues([PlainObject(row) if has_envelope_fields(row) else row for row in rows])
    return PythonValues(rows)


def _cells(
    extractor: FieldExtractor, rows: Sequence[Mapping[str, Any]], read: Callable[[Any], _Read], absent: _Read
) -> tuple[list[_Read], dict[int, str]]:
    """Apply ``read`` to each row's cell; where it fails the result is ``absent`` and an error."""
    cells: list[_Read] = []
    errors: dict[int, str] = {}
    for position, row in enumerate(rows):
        try:
            cells.append(read(_cell(extractor, row)))
        except InvalidError as error:
            cells.append(absent)
            errors[position] = str(error)
        except Exception as error:  # noqa: BLE001 - an object's methods may raise anything, and so may the error's own
            cells.append(absent)
            errors[position] = f"reading the row raised {type(error).__name__}"
    return cells, errors


def _cell(extractor: FieldExtractor, row: Any) -> Any:
    if isinstance(row, UndecodedRow):
        raise InvalidError(row.reason)
    if isinstance(extractor, str):
        if not isinstance(row, Mapping):
            raise InvalidError("the row has no fields", type=type(row).__name__, **reason_of_text(row))
        if extractor not in row:
            raise InvalidError("the row has no such field", field=extractor)
        return row[extractor]
    try:
        return extractor(row)
    except Exception as cause:
        raise InvalidError(f"the injector's function raised {type(cause).__name__}: {cause}") from cause


def _event_times(node: InjectorNode, rows: Rows, stamp_at: EventTimeMicros | None = None) -> InstantColumn:
    if isinstance(node.at, IngressTime):
        return InstantColumn(at=np.full(row_count(rows), stamp_at or 0, np.int64))
    return _times(node.at, rows, node.times)


def _times(extractor: FieldExtractor, rows: Rows, reading: TimeReading) -> InstantColumn:
    if isinstance(rows, pa.Table):
        if isinstance(extractor, str):
            return instant_column_us(_existing(rows, extractor, "time"), extractor, reading)
        rows = python_rows(rows)
    numbers = _numbers(extractor, rows)
    if numbers is not None:
        times = instant_column_us(numbers, str(extractor), reading)
        if not times.errors:
            return times
    at, errors = _cells(extractor, rows, lambda cell: parse_instant_us(cell, reading), EventTimeMicros(0))
    return InstantColumn(at=np.array(at, dtype=np.int64), errors=errors)


def _numbers(extractor: FieldExtractor, rows: Sequence[Mapping[str, Any]]) -> pa.Array | None:
    """Return a field as a column if it is a whole number in every row."""
    if not isinstance(extractor, str) or not ROW_DICTS.issuperset(map(type, rows)):
        return None
    cells = [row.get(extractor) for row in rows]
    if set(map(type, cells)) != {int}:
        return None
    try:
        return pa.array(cells, pa.int64())
    except OverflowError:
        return None


def _ids(extractor: FieldExtractor | None, rows: Rows) -> tuple[pa.BinaryArray | None, Mapping[int, str]]:
    if extractor is None:
        return None, {}
    if isinstance(rows, pa.Table):
        if isinstance(extractor, str):
            return _id_column(extractor, _existing(rows, extractor, "id")), {}
        rows = python_rows(rows)
    ids, errors = _cells(extractor, rows, _id_bytes, None)
    return pa.array(ids, pa.binary()), errors


def _id_column(name: str, column: pa.ChunkedArray) -> pa.BinaryArray:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    is_number = pa.types.is_integer(kind)
    if not is_number and kind not in _ID_TYPES:
        raise InvalidError(
            "the id column is neither text nor binary nor a whole number: cast it to text",
            column=name,
            type=kind,
        )
    plain = column.cast(kind)
    made = (plain.cast(pa.string()) if is_number else plain).cast(pa.binary())
    return one_array(made)


def _id_bytes(value: Any) -> bytes | None:
    match value:
        case None | bytes():
            return value
        case str():
            return value.encode("utf-8", "surrogatepass")
        case int() if not isinstance(value, bool):
            return str(value).encode()
    raise InvalidError("the id is neither text nor bytes nor a whole number", type=type(value).__name__)


def _existing(rows: pa.Table, name: str, use: str) -> pa.ChunkedArray:
    if name not in rows.column_names:
        hint = did_you_mean(name, rows.column_names)
        raise InvalidError(
            f"the input has no such {use} column{hint}", column=name, columns=rows.column_names
        )
    return rows.column(name)


def row_count(rows: Rows) -> int:
    return int(rows.num_rows) if isinstance(rows, pa.Table) else len(rows)


RowsLike: TypeAlias = Any
"""An Arrow or pandas table, anything with Arrow's C stream interface, a mapping, or an iterable of mappings."""


def rows_from(given: RowsLike) -> Rows:
    """Return the rows as an Arrow table, or as a list of copied mappings.

    Example:
        >>> rows_from({"city": "Bergen"})
        [{'city': 'Bergen'}]
    """
    if isinstance(given, pa.Table):
        return _checked_table(given)
    if isinstance(given, Mapping):
        return [dict(given)]
    if getattr(given, "isStreaming", False):
        raise InvalidError(
            "a streaming frame has no end that could be read here: run it with SparkRunner, or read it with spark.read",
            type=f"{type(given).__module__}.{type(given).__name__}",
        )
    if hasattr(given, "__arrow_c_stream__") or isinstance(given, pa.RecordBatch):
        return _table(given)
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InvalidError(
            "rows are a table or an iterable of mappings: give dicts, an Arrow table or a data frame",
            type=type(given).__name__,
        )
    return [dict(row) if isinstance(row, Mapping) else row for row in given]


def _table(given: RowsLike) -> pa.Table:
    try:
        if isinstance(given, pa.RecordBatch):
            return _checked_table(pa.Table.from_batches([given]))
        # The index of a pandas frame is not a column of the data.
        is_pandas = type(given).__module__.split(".")[0] == "pandas"
        table = pa.Table.from_pandas(given, preserve_index=False) if is_pandas else pa.table(given)
    except (pa.ArrowException, TypeError, ValueError) as cause:
        raise InvalidError(
            "the table cannot be read as Arrow: give a column one type, or pass a list of dicts",
            type=type(given).__name__,
            reason=str(cause).partition("\n")[0],
        ) from cause
    if is_pandas:
        _refuse_lost_zones(given, table)
    return _checked_table(table)


def _checked_table(table: pa.Table) -> pa.Table:
    refuse_repeated_fields(table.schema)
    refuse_lost_types(table.schema)
    return without_views(table)


def refuse_lost_types(schema: pa.Schema) -> None:
    """Refuse periods and intervals, of which Python would get a number and two ends, without their meaning."""
    for column in schema:
        # Without pandas the name of the type is in the metadata.
        told = (column.metadata or {}).get(b"ARROW:extension:name", b"").decode()
        kind = getattr(column.type, "extension_name", told)
        if kind in ("pandas.period", "pandas.interval"):
            raise InvalidError(
                "a column has periods or intervals, which values cannot be: make it text, or a column of each end",
                column=column.name,
                type=kind,
            )


def _refuse_lost_zones(frame: Any, table: pa.Table) -> None:
    """Refuse times of day with a zone, which Arrow drops, and datetimes with and without one, which it mixes up."""
    for place, (name, kind) in enumerate(zip(table.column_names, table.schema.types, strict=True)):
        is_time = pa.types.is_time(kind)
        if str(frame.dtypes.iloc[place]) != "object" or not (is_time or pa.types.is_timestamp(kind)):
            continue
        cells = frame.iloc[:, place].dropna()
        zones = [cell.tzinfo is None for cell in cells if isinstance(cell, time | datetime)]
        if not all(zones) and (is_time or any(zones)):
            raise InvalidError(
                "a column has times of day with a zone: make them text"
                if is_time
                else "a column has times with and without a zone: give all of them one",
                column=name,
            )


def rows_between(rows: Rows, start: int, stop: int) -> Rows:
    """Return the rows from ``start`` to ``stop``; nothing is copied of a table."""
    return rows.slice(start, max(stop - start, 0)) if isinstance(rows, pa.Table) else rows[start:stop]


def pieces(rows: Rows, records_max: int) -> Iterator[tuple[int, Rows]]:
    """Yield the rows in pieces of at most ``records_max``, each with its number of rows."""
    count = row_count(rows)
    if count <= records_max:
        if count:
            yield count, rows
        return
    for start in range(0, count, records_max):
        stop = min(start + records_max, count)
        yield stop - start, rows_between(rows, start, stop)

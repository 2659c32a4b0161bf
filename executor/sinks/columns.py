"""Sink columns: productions as the columns of a table outside of Millpond, and a sink's record of its store.

Without a schema a sink has the columns ``key``, ``at`` and ``value`` as JSON text. With a schema, ``key`` and
``at`` are the record's own and every other column is the field of that name in the value; a value that is not
an object fills the column ``value``. Fields outside the schema are left out; a column without a field is
null. The columns of a pane are fields of the inner value, or else ``window_start``, ``window_end`` (null for the global
window), ``is_retraction`` and the envelope's own fields.
"""

from __future__ import annotations

import logging
import math
import re
from base64 import b64decode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.time.instants import INSTANT_MAX_US, INSTANT_MIN_US, parse_instant_us
from millpond.statestore.app_ids import AppId, sink_app_id
from millpond.statestore.errors import DataError, InvalidError, did_you_mean
from millpond.statestore.history.lineage import Lineage
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.rows.row import TIMESTAMP, is_envelope, with_value_texts
from millpond.statestore.rows.state_schema import value_fields
from millpond.statestore.rows.value_text import PLAIN_MARK, decode_value, encode_value, has_marks
from millpond.statestore.types import Superstep

SINK_SCHEMA: Final = pa.schema(
    [pa.field("key", pa.string()), pa.field("at", TIMESTAMP), pa.field("value", pa.string())]
)
"""Columns of a sink without a schema; ``value`` is JSON text."""

ROW_SCHEMA_BY_WINDOW: Final = pa.schema(
    [
        pa.field("key", pa.string()),
        pa.field("window_start", TIMESTAMP),
        pa.field("window_end", TIMESTAMP),
        pa.field("at", TIMESTAMP),
        pa.field("value", pa.string()),
    ]
)
"""Columns of an upsert sink without a schema: one row per key and window; ``value`` is JSON text."""

TYPED_FIELD: Final = {b"millpond.column": b"typed"}
"""Metadata of a column that is a typed field of the value, even under the name ``key`` or ``at``.

Typed fields of earlier versions have bytes as Base64, maps as lists of pairs, and non-finite floats by their names.
"""

_OWN: Final = ("key", "at")
_ENVELOPE: Final = frozenset({"value", "window", "at", "pane"})
_WINDOW_BOUNDS: Final = {"window_start": 0, "window_end": 1}
_IS_RETRACTION: Final = "is_retraction"
_VALUE: Final = "value"
PANE_COLUMNS: Final = (_ENVELOPE | {*_OWN, *_WINDOW_BOUNDS, _IS_RETRACTION}) - {_VALUE}
"""Columns that a sink fills from the record and its pane."""

_LOG: Final = logging.getLogger("millpond")
_DOUBLE_BITS: Final = 64
_TAKEN_AS_THEY_ARE: Final[Mapping[pa.DataType, frozenset[type]]] = {
    column: frozenset({cell, type(None)})
    for column, cell in ((pa.string(), str), (pa.int64(), int), (pa.float64(), float), (pa.bool_(), bool))
}
_NANOSECONDS: Final = re.compile(r"\.[0-9]{6}[0-9]*[1-9]")
_MISFITS: Final = (pa.ArrowException, ValueError, TypeError, ArithmeticError, InvalidError)


class ColumnWatch:
    """Warns of columns that no value has: they would stay null, and the intended field would be lost."""

    def __init__(self, schema: pa.Schema | None, sink: str) -> None:
        names = () if schema is None or schema is ROW_SCHEMA_BY_WINDOW else schema.names
        self._unseen = [name for name in names if name not in _OWN]
        self._sink = sink

    def look(self, values: Sequence[Any]) -> None:
        if not self._unseen or not values:
            return
        # Only the first superstep with values is searched: later ones would pay for a warning given already.
        unseen = [name for name in self._unseen if not any(_has(value, name) for value in values)]
        self._unseen = []
        if unseen:
            fields = sorted({str(name) for value in values for name in _fields(value)})
            _LOG.warning(
                "no value that the sink got so far has these columns, so they stay null; produce fields of these names, or "
                "take them out of the schema: "
                "sink=`%s` columns=`%s` fields=`%s`",
                self._sink,
                unseen,
                fields,
            )


def sink_table(
    productions: pa.Table,
    schema: pa.Schema | None,
    sink: str,
    watch: ColumnWatch | None = None,
    required: Collection[str] = (),
) -> pa.Table:
    """Return productions as rows of a sink's table; the ``required`` columns take no nulls."""
    _refuse_bytes(productions, sink)
    table = _rows(productions, schema, sink, watch)
    for name in required:
        nulls = table.column(name).is_null()
        if (row := nulls.index(True).as_py()) >= 0:
            raise InvalidError(
                "a value is null, and its column of the sink's table takes no nulls: produce it, or let the column take them",
                sink=sink,
                column=name,
                key=productions.column("key")[row],
            )
    return table


def _rows(productions: pa.Table, schema: pa.Schema | None, sink: str, watch: ColumnWatch | None) -> pa.Table:
    if schema is not None and schema is not ROW_SCHEMA_BY_WINDOW:
        table = _of_cells(productions, schema, watch)
        if table is not None:
            return table
    productions = with_value_texts(productions)
    if schema is None:
        return _as_texts(productions.select(SINK_SCHEMA.names).cast(SINK_SCHEMA))
    values = _decoded(productions, sink)
    if schema is ROW_SCHEMA_BY_WINDOW:
        values = [_with_text(value) for value in values]
    if schema is not ROW_SCHEMA_BY_WINDOW and _VALUE not in schema.names:
        _refuse_plain(productions, values, schema, sink)
    if watch is not None:
        watch.look(values)
    columns = [_column(productions, values, field, sink) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _cells(productions: pa.Table) -> pa.StructArray | None:
    """Return the values of productions as columns, if all of them have one schema."""
    for field in value_fields(productions.schema):
        column = productions.column(field.name).combine_chunks()
        if not column.null_count:
            return column
    return None


def _of_cells(productions: pa.Table, schema: pa.Schema, watch: ColumnWatch | None) -> pa.Table | None:
    """Return rows whose columns are those of the values, unchanged; ``None`` where a value has to be converted or refused."""
    cells = _cells(productions)
    if cells is None:
        return None
    names = [field.name for field in cells.type]
    columns = []
    for field in schema:
        if field.name in _OWN and not _is_typed(field):
            column = productions.column(field.name).combine_chunks()
        elif field.name in names:
            column = cells.field(field.name)
        else:
            column = pa.nulls(len(cells), field.type)
        if column.type != field.type or (column.null_count and not field.nullable):
            return None
        columns.append(column)
    if watch is not None:
        watch.look([dict.fromkeys(names)])
    return pa.Table.from_arrays(columns, schema=schema)


def _as_texts(table: pa.Table) -> pa.Table:
    """Strip the space that, only within a store, marks an object that looks like a pane."""
    column = table.column(_VALUE)
    if not has_marks(column):
        return table
    return table.set_column(
        table.column_names.index(_VALUE), SINK_SCHEMA.field(_VALUE), pc.utf8_ltrim(column, PLAIN_MARK)
    )


def retractions(productions: pa.Table, sink: str) -> list[bool]:
    if _cells(productions) is not None:
        # Panes have no schema.
        return [False] * productions.num_rows
    values = _decoded(with_value_texts(productions), sink)
    return [is_envelope(value) and bool(value["pane"]["is_retraction"]) for value in values]


def _with_text(value: Any) -> Any:
    """Return the value with its inner value as JSON text; window bounds are kept."""
    if is_envelope(value):
        return {**value, _VALUE: encode_value(value[_VALUE]).lstrip(PLAIN_MARK)}
    return encode_value(value).lstrip(PLAIN_MARK)


def _refuse_bytes(productions: pa.Table, sink: str) -> None:
    blobs = productions.column("value_bytes")
    if blobs.null_count < len(blobs):
        raise InvalidError(
            "a Delta sink has no column for values that are plain bytes: produce them in a field of a dict, as text",
            sink=sink,
        )


def _refuse_plain(productions: pa.Table, values: list[Any], schema: pa.Schema, sink: str) -> None:
    if not set(schema.names) - {*_OWN, *_ENVELOPE, *_WINDOW_BOUNDS, _IS_RETRACTION}:
        return
    for row, value in enumerate(values):
        inner = value[_VALUE] if is_envelope(value) else value
        if inner is not None and not isinstance(inner, Mapping):
            raise InvalidError(
                "a value has no fields for the columns of the sink: produce a dict, or add a column named value",
                sink=sink,
                columns=schema.names,
                key=productions.column("key")[row],
                value=inner,
            )


def _fields(value: Any) -> Sequence[Any]:
    inner = value[_VALUE] if is_envelope(value) else value
    return list(inner) if isinstance(inner, Mapping) else [_VALUE]


def _has(value: Any, name: str) -> bool:
    if is_envelope(value):
        return name in {*value, *_WINDOW_BOUNDS, _IS_RETRACTION} or name in _fields(value)
    return name in _fields(value)


def _decoded(productions: pa.Table, sink: str) -> list[Any]:
    texts = productions.column(_VALUE).to_pylist()
    try:
        return [None if text is None else decode_value(text) for text in texts]
    except orjson.JSONDecodeError as cause:
        raise DataError("a production's value is not JSON", sink=sink) from cause


def _column(productions: pa.Table, values: list[Any], field: pa.Field, sink: str) -> pa.Array:
    if field.name in _OWN and not _is_typed(field):
        column = productions.column(field.name).combine_chunks()
        return column if column.type == field.type else _own_column(column, field, sink)
    cells = [_cell(value, field.name) for value in values]
    try:
        return _array(cells, field)
    except _MISFITS as cause:
        row = next(row for row, cell in enumerate(cells) if not _fits(cell, field))
        error = InvalidError(
            "a value does not fit its column of the sink: produce it in that type, or give the column another",
            sink=sink,
            column=field.name,
            type=field.type,
            key=productions.column("key")[row],
            value=cells[row],
            **({"reason": cause} if isinstance(cause, InvalidError) else {}),
        )
        raise error from cause


def _own_column(column: pa.Array, field: pa.Field, sink: str) -> pa.Array:
    """Return a record's key or time in another type, that keeps values apart: "007" and "7" are two keys."""
    lost, cause = column, None
    try:
        cast = column.cast(field.type)
        lost = column.filter(pc.fill_null(pc.not_equal(cast.cast(column.type), column), fill_value=False))
        if not len(lost):
            return cast
    except pa.ArrowException as error:
        cause = error
    raise InvalidError(
        "a record's key or time does not fit its column of the sink: leave out its type, or produce the value in a field "
        "of another name",
        sink=sink,
        column=field.name,
        type=field.type,
        **({"value": lost[0].as_py()} if cause is None else {"reason": str(cause).partition("\n")[0]}),
    ) from cause


def _cell(value: Any, name: str) -> Any:
    if is_envelope(value):
        return _pane_cell(value, name)
    if isinstance(value, Mapping):
        return value.get(name)
    return value if name == _VALUE else None


def _pane_cell(envelope: Mapping[str, Any], name: str) -> Any:
    inner = envelope[_VALUE]
    if isinstance(inner, Mapping) and name in inner:
        return inner[name]
    if name in _WINDOW_BOUNDS:
        bound = envelope["window"][_WINDOW_BOUNDS[name]]
        return bound if INSTANT_MIN_US <= bound <= INSTANT_MAX_US else None
    return envelope["pane"][name] if name == _IS_RETRACTION else envelope.get(name)


def _array(cells: list[Any], field: pa.Field) -> pa.Array:
    # Arrow takes most columns' cells unchanged: one look at their types spares a call for each.
    if not _TAKEN_AS_THEY_ARE.get(field.type, frozenset()).issuperset(map(type, cells)):
        cells = list(map(_converter(field.type, is_typed=_is_typed(field)), cells))
    array = pa.array(cells, field.type)
    if array.null_count and not field.nullable:
        raise InvalidError("the column does not take nulls", column=field.name)
    return array


def _is_typed(field: pa.Field) -> bool:
    return field.metadata is not None and field.metadata.items() >= TYPED_FIELD.items()


def _converter(kind: pa.DataType, *, is_typed: bool) -> Callable[[Any], Any]:
    """Return a function that makes of a cell what Arrow takes for a type: times and decimals out of text, no value changed.

    Cells of a typed field also have bytes and floats as text.
    """
    convert = _nested_converter(kind, partial(_part_converter, is_typed=is_typed)) or _lone_converter(
        kind, is_typed=is_typed
    )
    return partial(_optional, convert)


def _part_converter(part: pa.Field, *, is_typed: bool) -> Callable[[Any], Any]:
    convert = _converter(part.type, is_typed=is_typed)
    return convert if part.nullable else partial(_required, part.name, convert)


def _nested_converter(
    kind: pa.DataType, of_part: Callable[[pa.Field], Callable[[Any], Any]]
) -> Callable[[Any], Any] | None:
    types = pa.types
    if types.is_struct(kind):
        return partial(_struct, {field.name: of_part(field) for field in kind})
    if types.is_map(kind):
        return partial(_pairs, of_part(kind.key_field), of_part(kind.item_field))
    if types.is_list(kind) or types.is_large_list(kind):
        return partial(_parts, of_part(kind.value_field))
    return None


def _lone_converter(kind: pa.DataType, *, is_typed: bool) -> Callable[[Any], Any]:
    types = pa.types
    if types.is_timestamp(kind):
        return lambda cell: pa.scalar(_instant_us(cell), TIMESTAMP).cast(kind)
    if types.is_date(kind):
        return _date
    if types.is_decimal(kind):
        return lambda cell: Decimal(str(cell))
    if types.is_binary(kind) or types.is_large_binary(kind):
        return _bytes if is_typed else partial(_only, bytes)
    if types.is_string(kind) or types.is_large_string(kind):
        return partial(_only, str)
    if types.is_floating(kind):
        return partial(_float, kind if kind.bit_width < _DOUBLE_BITS else None, is_typed=is_typed)
    return _whole if types.is_integer(kind) else partial(_only, bool)


def _optional(convert: Callable[[Any], Any], cell: Any) -> Any:
    return None if cell is None else convert(cell)


def _required(name: str, convert: Callable[[Any], Any], cell: Any) -> Any:
    if cell is None:
        raise InvalidError("the column does not take nulls", column=name)
    return convert(cell)


def _only(kind: type, cell: Any) -> Any:
    # Arrow would take text for bytes, bytes for text, and text for a list of letters.
    if not isinstance(cell, kind):
        raise TypeError(cell)
    return cell


def _bytes(cell: Any) -> bytes:
    return cell if isinstance(cell, bytes) else b64decode(cell)


def _struct(fields: Mapping[str, Callable[[Any], Any]], cell: Any) -> Any:
    # The fields of a value may go to no column, but each field in a cell is meant.
    unknown = sorted(map(str, _only(dict, cell).keys() - fields.keys()))
    if unknown:
        hint = did_you_mean(unknown[0], fields)
        raise InvalidError(
            f"the column's struct has no such field{hint}", unknown=unknown, fields=list(fields)
        )
    return {name: convert(cell.get(name)) for name, convert in fields.items()}


def _pairs(key: Callable[[Any], Any], value: Callable[[Any], Any], cell: Any) -> Any:
    pairs = cell.items() if isinstance(cell, Mapping) else [_only(list, pair) for pair in _only(list, cell)]
    return [(key(name), value(part)) for name, part in pairs]


def _parts(convert: Callable[[Any], Any], cell: Any) -> Any:
    return list(map(convert, _only(list, cell)))


def _whole(cell: Any) -> Any:
    # Arrow would cut the fraction off in silence.
    if not isinstance(cell, float | Decimal):
        return cell
    whole = int(cell)
    if whole != cell:
        raise ValueError(cell)
    return whole


def _instant_us(cell: Any) -> int:
    if isinstance(cell, str) and _NANOSECONDS.search(cell):
        raise InvalidError("a time is no whole number of microseconds", value=cell)
    return parse_instant_us(_whole(cell))


def _date(cell: Any) -> date:
    # A datetime is a date to Python, and would lose its time of day.
    return cell if type(cell) is date else date.fromisoformat(cell)


def _float(narrow: pa.DataType | None, cell: Any, *, is_typed: bool) -> Any:
    if isinstance(cell, bool):
        # Arrow would take it for 1.0 or 0.0.
        raise TypeError(cell)
    number = float(cell) if is_typed else cell
    if narrow is None or not isinstance(number, int | float) or not math.isfinite(number):
        return number
    # Arrow makes an infinity of a number that is too large, and 0 of one that is too small.
    narrowed = pa.scalar(float(number), narrow).as_py()
    if math.isinf(narrowed) or (number and not narrowed):
        raise ValueError(number)
    return number


def _fits(cell: Any, field: pa.Field) -> bool:
    try:
        _array([cell], field)
    except _MISFITS:
        return False
    return True


@dataclass(frozen=True, slots=True)
class SinkRecord:
    """A sink's record of a store in the sink's table: the last superstep of each incarnation.

    A superstep's number is unique only within one incarnation of a store, so the record's name has the incarnation. A
    sink refuses a store that was restored from an older copy if the table has later supersteps, and refuses a copy
    that writes into the table of its original, or the reverse. ``reached`` is the store's last superstep when the
    sink is opened, if known. ``expected`` is a superstep that the sink must have: without it the table is gone.
    """

    lineage: Lineage
    pipeline: str
    name: str
    reached: Superstep | None = None
    expected: int = 0

    @staticmethod
    def of_store(store_id: str, pipeline: str, name: str) -> SinkRecord:
        """Return the record of a store that is known only by its id."""
        return SinkRecord(Lineage.of(store_id, {}), pipeline, name)

    @property
    def app_id(self) -> str:
        """The transaction that this incarnation's deliveries advance."""
        return sink_app_id(self.lineage.store_id, self.pipeline, self.name, self.lineage.current.id)

    def delivered(self, txns: Mapping[str, int]) -> Superstep:
        """Return this store's last superstep in the table; 0 before the first."""
        # Another copy's supersteps are not this store's: counting them would skip deliveries.
        known = {incarnation.id for incarnation in self.lineage.incarnations}
        reached = (
            (at, self.lineage.left_at(one, self.pipeline)) for one, at in self.records(txns) if one in known
        )
        return Superstep(max((at if left is None else min(at, left) for at, left in reached), default=0))

    @property
    def owner_app_id(self) -> str:
        """The transaction with which this incarnation takes the table over from other copies of the store."""
        return AppId.SINK_OWNER.of(self.lineage.store_id, self.pipeline, self.name, self.lineage.current.id)

    def owner(self, txns: Mapping[str, int]) -> str | None:
        """Return the incarnation that took the table over last; ``None`` if none ever did."""
        prefix = f"{AppId.SINK_OWNER.of(self.lineage.store_id, self.pipeline, self.name)}/"
        taken = {
            at: unquote(app_id.removeprefix(prefix))
            for app_id, at in txns.items()
            if app_id.startswith(prefix)
        }
        return taken[max(taken)] if taken else None

    def limits_of_others(self, txns: Mapping[str, int]) -> dict[str, int]:
        """Return the superstep up to which this store shares each other copy's deliveries; 0 for its forks."""
        known = {incarnation.id for incarnation in self.lineage.incarnations}
        return {
            app_id: (self.lineage.left_at(one, self.pipeline) or 0) if one in known else 0
            for app_id, one in self.app_ids(txns)
            if self.lineage.is_of_another_copy(one)
        }

    def is_writer(self, txns: Mapping[str, int]) -> bool:
        """Return True if this copy of the store has written to the table, and no other copy has taken it over."""
        owner = self.owner(txns)
        return (owner is None or not self.lineage.is_of_another_copy(owner)) and any(
            superstep and not self.lineage.is_of_another_copy(one) for one, superstep in self.records(txns)
        )

    def records(self, txns: Mapping[str, int]) -> Iterator[tuple[str, int]]:
        """Yield the last superstep of each incarnation of the store that has written to the table."""
        return ((incarnation, txns[app_id]) for app_id, incarnation in self.app_ids(txns))

    def limits(self, txns: Mapping[str, int], reached: Superstep) -> dict[str, int]:
        """Return the highest superstep of each transaction of this copy that fits a store at superstep ``reached``."""
        limits = {}
        for app_id, incarnation in self.app_ids(txns):
            if not self.lineage.is_of_another_copy(incarnation):
                left = self.lineage.left_at(incarnation, self.pipeline)
                limits[app_id] = int(reached) if left is None else left
        return limits

    def app_ids(self, txns: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Yield the transactions of this sink, each with the incarnation that advances it."""
        first = sink_app_id(self.lineage.store_id, self.pipeline, self.name)
        for app_id in txns:
            if app_id == first or app_id.startswith(f"{first}/"):
                yield app_id, unquote(app_id.removeprefix(first).removeprefix("/")) or self.lineage.store_id

    def check(self, snapshot: Snapshot) -> None:
        """Refuse a table that another copy of the store writes, or that is ahead of where an incarnation was left."""
        # Runs again with each commit, because another copy may begin to write after the sink was opened.
        owner = self.owner(snapshot.txns)
        writers = dict(self.records(snapshot.txns))
        for incarnation in (*writers,) if owner is None else (owner,):
            if self.lineage.is_of_another_copy(incarnation):
                raise InvalidError(
                    "another copy of this store writes into the sink's table: give this one a separate sink, or take the "
                    "table over (`millpond take-over STORE TABLE`)",
                    sink=self.name,
                    table=(snapshot.metadata.name if snapshot.metadata else None) or self.name,
                    incarnation=self.lineage.current.id,
                    other=incarnation,
                )
        for incarnation, superstep in writers.items():
            if self.lineage.is_of_another_copy(incarnation):
                continue
            left = self.lineage.left_at(incarnation, self.pipeline)
            if left is not None:
                refuse_sink_ahead(self.name, superstep, left)

    def check_on_opening(self, snapshot: Snapshot, path: str = "") -> None:
        """Refuse a table that another copy writes or that is ahead of the store; warn of rows from another store."""
        self.check(snapshot)
        self._warn_of_others(snapshot, path)
        delivered = self.delivered(snapshot.txns)
        # A crash may have come between the store's last superstep and its delivery, which is then repeated.
        if self.expected != self.reached:
            self.refuse_loss(delivered, path)
        if self.reached is not None:
            refuse_sink_ahead(self.name, delivered, self.reached)

    def refuse_loss(self, delivered: int, path: str) -> None:
        """Refuse a table that lacks a superstep that the store has delivered to it."""
        if delivered < self.expected:
            raise DataError(
                "the sink's table lacks rows that this store delivered to it: it was removed or replaced, or is an older "
                "copy. Put it back; or begin it anew with what comes next (`millpond take-over STORE TABLE`); or give the "
                "sink another path",
                sink=self.name,
                path=path,
                delivered=delivered,
                expected=self.expected,
            )

    def _warn_of_others(self, snapshot: Snapshot, path: str) -> None:
        """Warn of rows from another store: if that store is gone, its rows will be delivered a second time."""
        writers = (AppId.SINK.parts(name)[0] for name in snapshot.txns if name.startswith(AppId.SINK))
        others = sorted(set(writers) - {self.lineage.store_id})
        if others and not self.delivered(snapshot.txns):
            _LOG.warning(
                "the sink's table has rows of another store, and this one adds its own: if that store is gone, they are "
                "there twice in the end; give the sink another path, or remove the table: sink=`%s` path=`%s` stores=`%s`",
                self.name,
                path,
                others,
            )


def refuse_sink_ahead(sink: str, delivered: int, reached: int) -> None:
    if delivered > reached:
        raise DataError(
            "the sink is ahead of the store, which was restored from an older copy: its next deliveries "
            "may differ from the rows of the sink. Put the newer store back; or continue with this one and "
            "write to a new sink, or revert the sink (`millpond adopt STORE --as restored --take-back SINK`)",
            sink=sink,
            delivered=delivered,
            store=reached,
        )

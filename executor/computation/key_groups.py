"""A whole bundle as a table: the arguments and the effects of ``process_table``.

Nothing that the code gives is applied before it has returned, so an attempt that raises leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.context import Context
from millpond.executor.computation.state import ADD_ONLY, COMBINING_ONLY
from millpond.executor.computation.values import UNHELD, ArrowValues
from millpond.executor.time.clocks import EXACT
from millpond.executor.time.instants import Moment, to_micros
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.schema_columns import as_array, fitted_rows
from millpond.statestore.rows.state_schema import UTC_TIMESTAMP, AddendCodec, SchemaCodec, cells_of
from millpond.statestore.types import EventTimeMicros, WallTimeMicros

_Index = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


class TableContext:
    """The context of ``process_table``: the times and the counters of the computation, for all keys of a bundle.

    States and productions are in `KeyGroups`. Timers can only be set by hooks of one key.
    """

    __slots__ = ("_context",)

    def __init__(self, context: Context) -> None:
        self._context = context

    @property
    def watermark(self) -> EventTimeMicros:
        """The computation's input low watermark."""
        return self._context.watermark

    @property
    def late_before(self) -> EventTimeMicros:
        """The time before which records are late."""
        return self._context.late_before

    @property
    def wall_time(self) -> WallTimeMicros:
        """The wall time of the superstep."""
        return self._context.wall_time

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams that the computation may produce to."""
        return self._context.streams

    def watermark_at(self, percentile: float = EXACT) -> EventTimeMicros:
        """Return the watermark of a percentile, as `Context.watermark_at`."""
        return self._context.watermark_at(percentile)

    def count(self, counter: str, amount: int = 1) -> None:
        """Add to a counter of the computation, as `Context.count`."""
        self._context.count(counter, amount)

    def __getattr__(self, name: str) -> NoReturn:
        # Python calls this only for names that the class lacks.
        if not name.startswith("_") and hasattr(Context, name):
            self._context.refuse_use(
                f"process_table has many keys, so its context has no {name}: states and productions are in groups, and "
                "timers are set by process_record or process_records",
                method=name,
            )
        raise AttributeError(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRecords:
    """The records of some keys, sorted by key, without their values.

    Attributes:
        bounds: the records of key *i* are ``bounds[i]`` to ``bounds[i + 1]``; each key has one.
        oldest_at: the earliest time at which each key may produce.
        late_before: records before this time are late.
        streams: returns the stream of each record.
        ids: returns the publisher's id of each record.
    """

    keys: pa.StringArray
    bounds: _Index
    at: _Index
    oldest_at: _Index
    late_before: int
    streams: Callable[[], pa.Array]
    ids: Callable[[], pa.BinaryArray]


@dataclass(frozen=True, slots=True)
class TableProduction:
    """Values that a table produced to one stream, by its whole name; ``owners`` has the index of each one's key."""

    stream: str
    codec: SchemaCodec
    values: pa.StructArray
    owners: _Index
    at: _Index


class KeyGroups:
    """The keys of the table that ``process_table`` gets, with their states; and where its results go.

    The table's rows are sorted by key, then event time, then arrival (see ``in_order_of_arrival``), and each key has at
    least one. Arrays of keys have an entry for each key, arrays of records one for each row of the table.

    Attributes:
        keys: the keys as text, sorted; `decode_key` has the values of a typed key.
        bounds: the rows of key *i* are ``bounds[i]`` up to ``bounds[i + 1]``; one entry more than keys.

    Example::

        def process_table(self, context, table, groups):
            volume = np.add.reduceat(table["volume"].to_numpy(), groups.bounds[:-1])
            before = groups.state("volume").fill_null(0).to_numpy()
            groups.set_states({"volume": before + volume})
    """

    __slots__ = (
        "_at",
        "_changed",
        "_codec",
        "_context",
        "_ids",
        "_late",
        "_new",
        "_owners",
        "_produced",
        "_read_states",
        "_records",
        "_states",
        "_streams",
        "bounds",
        "keys",
    )

    def __init__(
        self,
        context: Context,
        records: GroupedRecords,
        codec: SchemaCodec | None,
        read_states: Callable[[], pa.StructArray],
    ) -> None:
        self._context = context
        self._records = records
        self._codec = codec
        self._read_states = read_states
        self.keys: pa.StringArray = records.keys
        self.bounds: _Index = _fixed(records.bounds)
        self._at: _Index = _fixed(records.at)
        self._states: pa.StructArray | None = None
        self._owners: _Index | None = None
        self._late: _Mask | None = None
        self._ids: pa.BinaryArray | None = None
        self._streams: pa.Array | None = None
        self._new: pa.StructArray | None = None
        self._changed: _Mask | None = None
        self._produced: list[TableProduction] = []

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.keys)

    # ------------------------------------------------------------- records

    @property
    def owners(self) -> npt.NDArray[np.int64]:
        """The index of each record's key among `keys`."""
        if self._owners is None:
            self._owners = _fixed(np.repeat(np.arange(len(self)), np.diff(self.bounds)))
        return self._owners

    @property
    def at(self) -> npt.NDArray[np.int64]:
        """The event time of each record, in microseconds since 1970 UTC."""
        return self._at

    @property
    def late(self) -> npt.NDArray[np.bool_]:
        """Whether each record is late: before the low watermark."""
        if self._late is None:
            self._late = _fixed(self._at < self._records.late_before)
        return self._late

    @property
    def ids(self) -> pa.BinaryArray:
        """The publisher's id of each record; null where it has none."""
        if self._ids is None:
            self._ids = self._records.ids()
        return self._ids

    @property
    def streams(self) -> pa.Array:
        """The stream on which each record arrived, as text."""
        if self._streams is None:
            self._streams = self._records.streams()
        return self._streams

    # ------------------------------------------------------------- states

    @property
    def states(self) -> pa.StructArray:
        """The state of each key in the types of the computation's ``state=`` schema; null for a key without one."""
        if self._states is None:
            self._schema("groups.states")
            self._states = self._read_states()
        return self._states

    def state(self, name: str) -> pa.Array:
        """Return a field of all states; null for a key without a state."""
        states = self.states
        index = states.type.get_field_index(name)
        if index < 0:
            self._context.refuse_use("the schema of the states has no such field", field=name)
        return states.flatten()[index]

    def set_states(self, states: Any, changed: Any = None) -> None:
        """Set the states of all keys: an array of structs, a table, or a dict of columns, with an entry for each key.

        A null entry of an array of structs deletes the key's state. A field that is left out is null. What does not fit
        the schema is refused at once. Without a call all keys keep their states; of several calls for a key, the last
        one counts.

        Args:
            states: the states, which fit the computation's ``state=`` schema.
            changed: which keys take theirs, as an array of truth values; the others keep what they have. By default
                all. A key that is set to its present state is not written.
        """
        codec = self._schema("groups.set_states")
        rows = fitted_rows(states, codec, "state")
        self._check_length("states", len(rows))
        chosen = np.ones(len(self), np.bool_) if changed is None else _mask(changed)
        self._check_length("changed", len(chosen))
        _check_held(rows, "state")
        if self._new is not None and self._changed is not None and not chosen.all():
            both = np.where(chosen, np.arange(len(self)) + len(self), np.arange(len(self)))
            rows = pa.concat_arrays([self._new, rows]).take(pa.array(both))
            chosen = self._changed | chosen
        self._new, self._changed = rows, chosen

    def add_states(self, values: Any) -> None:
        """Add to the states of all keys, which are a `CombiningState`: an array of structs, a table, or a dict of columns.

        There is an entry for each key. A field that is left out or null adds nothing, and so does a null entry of an array
        of structs. Several calls add up.
        """
        codec = self._schema("groups.add_states", adds=True)
        rows = fitted_rows(values, codec, "state")
        self._check_length("values", len(rows))
        rows = rows if self._new is None else _summed(self._new, rows)
        self._new, self._changed = rows, rows.is_valid().to_numpy(zero_copy_only=False)

    def settled_states(self) -> tuple[pa.StructArray, _Mask] | None:
        """Return states, and of which keys they were set, for the engine; ``None`` if none was."""
        return None if self._new is None or self._changed is None else (self._new, self._changed)

    def _schema(self, asks: str, *, adds: bool = False) -> SchemaCodec:
        if self._codec is None:
            self._context.refuse_use(
                f"{asks} needs the schema of the states: give the computation state=, an Arrow schema"
            )
        if isinstance(self._codec, AddendCodec) is not adds:
            self._context.refuse_use(COMBINING_ONLY if adds else ADD_ONLY)
        return self._codec

    # ------------------------------------------------------------- productions

    def produce(self, stream: str, values: Any, owners: Any = None, at: Any = None) -> None:
        """Produce records to all consumers of ``stream``, each with the key that owns it.

        Args:
            stream: one of the streams in the computation's ``produces``, which gives its schema.
            values: the values, as an array of structs, a table, or a dict of columns, which fit the schema.
            owners: the index of each value's key among `keys`. By default there is a value for each key.
            at: the event time: an array of microseconds or of timestamps with a zone, or one time for all. It must not
                be before the oldest record of the key. By default the time of its newest record.
        """
        name, codec = self._context.typed_stream(stream)
        rows = fitted_rows(values, codec, "value")
        if rows.null_count:
            raise InvalidError("a produced value must not be null", stream=stream)
        _check_held(rows, "value")
        if owners is None:
            self._check_length("values", len(rows))
            places = np.arange(len(self))
        else:
            places = _indices(owners, len(self))
            if len(places) != len(rows):
                raise InvalidError(
                    "owners must have an entry for each value",
                    stream=stream,
                    owners=len(places),
                    values=len(rows),
                )
        times = self._times(at, places)
        if len(rows):
            self._produced.append(TableProduction(name, codec, rows, places, times))

    def settled_productions(self) -> Sequence[TableProduction]:
        """Return what was produced, for the engine."""
        return self._produced

    def _times(self, at: Any, owners: _Index) -> _Index:
        if at is None:
            return self._newest()[owners]
        if isinstance(at, pa.Array | pa.ChunkedArray | np.ndarray | list):
            times = _instants(at)
        else:
            moment: Moment = at
            times = np.full(len(owners), to_micros(moment), np.int64)
        if len(times) != len(owners):
            raise InvalidError("at must have an entry for each value", at=len(times), values=len(owners))
        oldest = self._records.oldest_at[owners]
        if bool((times < oldest).any()):
            first = int(np.flatnonzero(times < oldest)[0])
            raise InvalidError(
                "a time must not be before the input's: use a later one, or declare a late_data_horizon",
                key=self.keys[int(owners[first])].as_py(),
                input_at=int(oldest[first]),
                at=int(times[first]),
            )
        return times

    def _newest(self) -> _Index:
        newest: _Index = np.maximum.reduceat(self._at, self.bounds[:-1])
        return newest

    def _check_length(self, what: str, length: int) -> None:
        if length != len(self):
            raise InvalidError(f"{what} must have an entry for each key", keys=len(self), found=length)


def _summed(one: pa.StructArray, other: pa.StructArray) -> pa.StructArray:
    is_null = pc.and_(one.is_null(), other.is_null())
    fields = [
        pc.if_else(
            pc.and_(left.is_null(), right.is_null()),
            None,
            pc.add_checked(pc.fill_null(left, 0), pc.fill_null(right, 0)),
        )
        for left, right in zip(one.flatten(), other.flatten(), strict=True)
    ]
    return pa.StructArray.from_arrays(fields, fields=list(one.type), mask=is_null)


def _fixed(array: Any) -> Any:
    """Return a read-only view, because a retry must see the input of the first attempt."""
    view = array.view()
    view.flags.writeable = False
    return view


def _check_held(rows: pa.StructArray, whole: str) -> None:
    """Refuse values that Python cannot hold, such as dates of other years: the reader of the row would fail."""
    # A look at the columns' bounds is enough for plain types; others are decoded, which is slow but certain.
    if ArrowValues(rows.filter(rows.is_valid())).is_held:
        return
    try:
        cells_of(rows)
    except UNHELD as error:
        raise InvalidError(
            "a value of the columns cannot be read by Python", part=whole, reason=error
        ) from error


def _mask(changed: Any) -> _Mask:
    column = as_array(changed, "changed")
    if not pa.types.is_boolean(column.type) or column.null_count:
        raise InvalidError("changed must be truth values without nulls", type=str(column.type))
    mask: _Mask = column.to_numpy(zero_copy_only=False)
    return mask


def _indices(owners: Any, keys: int) -> _Index:
    column = as_array(owners, "owners")
    if not len(column):
        return np.empty(0, np.int64)
    if not pa.types.is_integer(column.type) or column.null_count:
        raise InvalidError("owners must be indices of keys without nulls", type=str(column.type))
    # A copy, here and below, because the code may change its array later.
    indices: _Index = column.cast(pa.int64()).to_numpy().copy()
    if int(indices.min()) < 0 or int(indices.max()) >= keys:
        raise InvalidError(
            "owners must be indices of keys", keys=keys, least=int(indices.min()), greatest=int(indices.max())
        )
    return indices


def _instants(at: Any) -> _Index:
    column = as_array(at, "at")
    is_time = pa.types.is_timestamp(column.type) and column.type.tz is not None
    if (len(column) and not is_time and not pa.types.is_integer(column.type)) or column.null_count:
        raise InvalidError(
            "at must be whole microseconds or timestamps with a zone, without nulls", type=str(column.type)
        )
    try:
        micros = column.cast(UTC_TIMESTAMP).view(pa.int64()) if is_time else column.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise InvalidError(
            "a time is no whole microsecond of 64 bits", type=str(column.type), reason=error
        ) from error
    times: _Index = micros.to_numpy().copy()
    return times

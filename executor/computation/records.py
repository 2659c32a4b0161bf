"""Records: the input of a computation's hooks (MillWheel §4.1).

A bundle's records are columns. Iteration creates a `Record` when it reaches one, and the record decodes its
value on first access, so a computation that only counts pays for neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.executor.computation.values import ArrowValues, Values, no_such_field
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import EventTimeMicros


@dataclass(slots=True)
class InputTime:
    """The event time of the input that user code is processing, in microseconds.

    Productions have the time ``at`` by default. None may be smaller than ``floor_at``, the time of the oldest source
    record, by more than ``slack_us``, the computation's late data horizon (MillWheel §4.5).
    """

    at: int = 0
    floor_at: int = 0
    slack_us: int = 0


@dataclass(slots=True, kw_only=True)
class RecordColumns:
    """A bundle's records, column by column, sorted by key, then time (unless by arrival), then arrival.

    ``sources`` has each record's index in ``values`` and ``ids``, which are in order of arrival.
    """

    at: list[int]
    streams: Sequence[str]
    sources: Sequence[int]
    values: Values
    ids: pa.Array | None
    watermark: int
    by_time: bool = True
    # Set once user code has read a value, because it will probably read the others too: from then on each
    # value is decoded when its record is made, which is cheaper than on demand.
    values_are_wanted: bool = False
    read: Callable[[int], Any] = field(init=False)
    _fields: dict[str, pa.Array] = field(init=False, default_factory=dict)
    _times: npt.NDArray[np.int64] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.read = self.values.value

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the least and the greatest time of the records ``start`` to ``stop``, all of one key."""
        at = self.at
        if self.by_time:
            return at[start], at[stop - 1]
        times = at[start:stop]
        return min(times), max(times)

    def value(self, index: int) -> Any:
        return self.read(self.sources[index])

    def times(self) -> npt.NDArray[np.int64]:
        if self._times is None:
            self._times = np.array(self.at, np.int64)
        return self._times

    def field(self, name: str, start: int, stop: int) -> pa.Array:
        """Return a field of the records ``start`` to ``stop``; columns are sorted once for all keys."""
        if not isinstance(self.values, ArrowValues):
            return _field_of([self.value(index) for index in range(start, stop)], name)
        whole = self._fields.get(name)
        if whole is None:
            whole = self._fields[name] = self.values.column(name).take(pa.array(self.sources, pa.int64()))
        return whole.slice(start, stop - start)

    def scoped_id(self, index: int) -> bytes | None:
        """Return the record's id with its stream's scope, the form that is deduplicated."""
        scoped: bytes | None = None if self.ids is None else self.ids[self.sources[index]].as_py()
        return scoped

    def id(self, index: int) -> bytes | None:
        scoped = self.scoped_id(index)
        # With several streams, each id begins with its stream's name: see `Topology.id_scope`.
        return None if scoped is None else scoped.removeprefix(f"{self.streams[index]}\0".encode())


def _field_of(values: Sequence[Any], name: str) -> pa.Array:
    cells = []
    for value in values:
        if not isinstance(value, Mapping) or name not in value:
            raise no_such_field(name, value)
        cells.append(value[name])
    try:
        return pa.array(cells)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidError(
            "the values of the field make no column: read the records one by one", field=name, reason=error
        ) from error


@dataclass(slots=True)
class Record:
    """One record, as delivered to one key.

    Attributes:
        key: the consumer's key.
        value: the decoded value; each consumer has its own copy.
        at: the event time in microseconds since 1970 UTC.
        stream: the stream on which the record arrived.
        late: True if the record is before the low watermark that the hook sees.
        id: the publisher's id; ``None`` if the record has none.
    """

    key: str
    value: Any
    at: EventTimeMicros
    stream: str
    late: bool = False
    id: bytes | None = field(default=None, repr=False)
    _columns: RecordColumns = field(init=False, repr=False, compare=False)
    _index: int = field(init=False, repr=False, compare=False)

    def __getattr__(self, name: str) -> Any:
        # Python calls this only while the slot is empty; a record of a bundle fills it on first access.
        if name == "value":
            columns = self._columns
            columns.values_are_wanted = True
            self.value = value = columns.value(self._index)
            return value
        if name == "id":
            self.id = record_id = self._columns.id(self._index)
            return record_id
        if name == "stream":
            self.stream = stream = self._columns.streams[self._index]
            return stream
        if name == "late":
            self.late = is_late = self._columns.at[self._index] < self._columns.watermark
            return is_late
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Record, (self.key, self.value, self.at, self.stream, self.late, self.id))


class Records(Sequence[Record]):
    """All records of one key in a bundle, in order of event time, then arrival.

    With ``in_order_of_arrival`` only arrival counts. The sequence is valid until its hook returns; single
    records stay valid. During iteration a production gets the time of the current record by default; before
    and after the iteration, the time of the newest record. No production may be before the oldest record.

    `column`, `at`, `late` and `ids` have the same records as columns, in the same order, and make no `Record`.

    Example::

        def process_records(self, context, records):
            volume = pc.sum(records.column("volume")).as_py() or 0
            context.state.set(context.state.get(0) + volume)
    """

    __slots__ = ("_columns", "_input", "_key", "_start", "_stop")

    def __init__(self, columns: RecordColumns, input_time: InputTime) -> None:
        self._columns = columns
        self._input = input_time
        self._key = ""
        self._start = 0
        self._stop = 0

    def bind(self, key: str, start: int, stop: int) -> None:
        """Switch to the records ``start`` to ``stop``, all of ``key``, for the engine."""
        self._key = key
        self._start = start
        self._stop = stop
        self._input.floor_at, self._input.at = self._columns.span(start, stop)

    @property
    def columns(self) -> RecordColumns:
        """The columns behind the records, for the engine."""
        return self._columns

    @property
    def range(self) -> tuple[int, int]:
        """The first record's index in `columns`, and one past the last, for the engine."""
        return self._start, self._stop

    def column(self, name: str) -> pa.Array:
        """Return a field of all values, in Arrow's type: of an outside column its own, otherwise that of the values.

        Raises `InvalidError` if a value lacks the field, or if the values have no common type.
        """
        return self._columns.field(name, self._start, self._stop)

    @property
    def at(self) -> npt.NDArray[np.int64]:
        """The event times, in microseconds since 1970 UTC."""
        return self._columns.times()[self._start : self._stop]

    @property
    def late(self) -> npt.NDArray[np.bool_]:
        """Whether each record is before the low watermark that the hook sees."""
        return self.at < self._columns.watermark

    @property
    def ids(self) -> pa.BinaryArray:
        """The publishers' ids; null where a record has none."""
        return pa.array(map(self._columns.id, range(self._start, self._stop)), pa.binary())

    def __len__(self) -> int:
        return self._stop - self._start

    def __iter__(self) -> Iterator[Record]:
        return self._each(moves_floor=False)

    def one_by_one(self) -> Iterator[Record]:
        """Iterate the records as ``process_record`` sees them: no production may be before the current one."""
        return self._each(moves_floor=True)

    def _each(self, *, moves_floor: bool) -> Iterator[Record]:
        # The hottest loop of the engine: it repeats `_made` to save a second generator.
        input_time, new, columns, key = self._input, Record.__new__, self._columns, self._key
        at, sources = columns.at, columns.sources
        for index in range(self._start, self._stop):
            record = new(Record)
            record.key = key
            input_time.at = record.at = moment = at[index]  # type: ignore[assignment]
            if moves_floor:
                input_time.floor_at = moment
            record._columns = columns  # noqa: SLF001 - made here rather than in a slower __init__
            record._index = index  # noqa: SLF001
            if columns.values_are_wanted:
                try:
                    record.value = columns.read(sources[index])
                except Exception:  # noqa: BLE001 - raised again if code reads this value, on demand as at first
                    columns.values_are_wanted = False
            yield record
        if not moves_floor:
            input_time.at = columns.span(self._start, self._stop)[1]

    def _made(self, indices: Iterable[int]) -> Iterator[Record]:
        new, columns, key = Record.__new__, self._columns, self._key
        for index in indices:
            record = new(Record)
            record.key = key
            record.at = columns.at[index]  # type: ignore[assignment]
            record._columns = columns  # noqa: SLF001
            record._index = index  # noqa: SLF001
            yield record

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        chosen = range(self._start, self._stop)[index]
        return next(self._made((chosen,))) if isinstance(chosen, int) else list(self._made(chosen))

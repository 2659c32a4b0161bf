"""Accumulators of many windows as a column: numbers that are added up, objects of other combiners, or several of these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.values import ArrowValues, ConcatenatedValues, Values, copied
from millpond.executor.windows.combiners import (
    CombineFields,
    CombineFn,
    Count,
    Last,
    Max,
    Mean,
    Min,
    StdDev,
    Sum,
    extract,
)
from millpond.executor.windows.exact_sum import NOTHING, with_numbers
from millpond.executor.windows.pane import element_value
from millpond.statestore.rows.state_schema import plain_cells
from millpond.statestore.rows.value_text import OF_PYTHON, PLAIN_MARK, encode_value, has_utf8

_Index = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]
Accumulators: TypeAlias = npt.NDArray[Any]
"""One accumulator for each window: 64-bit integers, pairs of floats, Python's objects, or records of several."""

# Sums stay far from the bounds of their column.
_SUM_MAX: Final = float(1 << 61)
_OF_ANY_ORDER: Final = frozenset({Count, Sum, Mean, StdDev})
# Their functions change no accumulator in place, so an undone bundle leaves no trace.
_PURE: Final = frozenset({Count, Sum, Mean, Min, Max, StdDev, Last})


class TypedAccumulatorError(Exception):
    """An accumulator or a result has types that JSON lacks, so the text of its whole row has another form."""


class CombinerError(Exception):
    """A combiner has refused an element, or a function of results has raised."""


class WideSumError(Exception):
    """An exact sum of floats has more digits than two floats."""


@contextmanager
def combining() -> Iterator[None]:
    """Turn an exception of a combiner, or of a function of results, into `CombinerError`."""
    try:
        yield
    except Exception as error:
        raise CombinerError from error


@dataclass(frozen=True, slots=True)
class FieldCells:
    """A field of a bundle's values: a column of a table, or the objects that hooks get.

    Without a field there are no cells. Values that ``is_odd`` marks are for turns: they have no such field, are not
    readable, or are retractions or late panes.
    """

    cells: pa.Array | list[Any] | None
    is_odd: _Mask | None
    count: int


Cells: TypeAlias = FieldCells | Mapping[str, FieldCells]
"""The cells of a combiner, or of each combiner of `CombineFields`."""


def cells_of(values: Values, combine: CombineFn, times: _Index) -> Cells | None:
    """Return the cells that a combiner with a column adds up; ``None`` for columns that are nested or not Python's.

    A pane's cells are inside its value. ``times`` are the records' times.
    """
    combiners = _parts_of(combine)
    fields = _fields_of(values, [part.of for part in combiners.values()], times)  # type: ignore[attr-defined]  # `has_column` says so
    if fields is None:
        return None
    return dict(zip(combiners, fields, strict=True)) if isinstance(combine, CombineFields) else fields[0]


def _parts_of(combine: CombineFn) -> Mapping[str, CombineFn]:
    return combine.fields if isinstance(combine, CombineFields) else {"": combine}


def _fields_of(values: Values, names: Sequence[str | None], times: _Index) -> list[FieldCells] | None:
    if isinstance(values, ArrowValues) or (
        isinstance(values, ConcatenatedValues) and all(isinstance(part, ArrowValues) for part in values.parts)
    ):
        fields = []
        for of in names:
            column = None if of is None else values.plain_column(of)
            is_there = values.is_held if of is None else column is not None
            if not is_there:
                return None
            fields.append(FieldCells(column, None, len(values)))
        return fields
    rows: list[list[Any]] = []
    odd: list[int] = []
    for index, at in enumerate(times.tolist()):
        row = [None] * len(names)
        try:
            value = element_value(values.value(index), at)
            row = [None if of is None else extract(of, value) for of in names]
        except Exception:  # noqa: BLE001 - it raises again in the value's turn, which makes a dead letter of it
            odd.append(index)
        rows.append(row)
    is_odd = None
    if odd:
        is_odd = np.zeros(len(rows), np.bool_)
        is_odd[odd] = True
    return [
        FieldCells(None if of is None else [row[place] for row in rows], is_odd, len(rows))
        for place, of in enumerate(names)
    ]


class AccumulatorColumn(Protocol):
    """What a combiner does, for the accumulators of many windows at once."""

    window_bytes: int
    """The memory of a window, by estimate."""

    def of(self, stored: Sequence[Any]) -> Accumulators:
        """Return accumulators as a column that `holds` them; ``None`` is no accumulator."""

    def holds(self, stored: Any) -> bool: ...

    def added(self, field: Any, held: Accumulators) -> tuple[Any, _Mask | None] | None:
        """Return what each value adds, and which must be added by a turn; ``None`` if the column cannot hold it.

        ``field`` are the `Cells` of its combiner, and ``held`` all accumulators.
        """

    def grouped(self, cells: Any, order: _Index, firsts: _Index) -> Accumulators:
        """Return what groups of cells add, which begin at ``firsts`` of ``order``."""

    def merged(self, both: Accumulators, is_arrived: _Mask, firsts: _Index) -> Accumulators:
        """Return the accumulators of windows, given former and arrived ones in the order of the windows."""

    def without(self, accumulators: Accumulators, is_cleared: _Mask) -> Accumulators: ...

    def widened(self, accumulators: Accumulators) -> tuple[AccumulatorColumn, Accumulators]:
        """Return a column for sums that two floats do not hold, and the accumulators in it; the same if it holds them."""

    def texts(self, accumulators: Accumulators) -> pa.StringArray:
        """Return the accumulators as JSON."""

    def results(self, accumulators: Accumulators) -> pa.StringArray:
        """Return the results as JSON."""

    def values(self, accumulators: Accumulators) -> list[Any]:
        """Return the results as Python's objects, none of which is part of an accumulator."""


def has_column(combine: CombineFn) -> bool:
    """Return True for a combiner of one field, or of none, whose accumulators can be a column; or for several of them."""
    if type(combine) is CombineFields:
        return all(
            has_utf8(name) and type(part) is not CombineFields and has_column(part)
            for name, part in combine.fields.items()
        )
    of = getattr(combine, "of", None)
    return type(combine) in _PURE and (isinstance(of, str) or (of is None and type(combine) is Count))


def keeps_no_order(combine: CombineFn) -> bool:
    """Return True if the order of elements and of merged accumulators changes nothing."""
    return all(type(part) in _OF_ANY_ORDER for part in _parts_of(combine).values())


def column_of(combine: CombineFn, cells: Cells | None = None, *, is_wide: bool = False) -> AccumulatorColumn:
    """Return an empty column for the accumulators of such values; ``is_wide``: two floats do not hold their sums."""
    if isinstance(combine, CombineFields):
        of_parts = cells if isinstance(cells, Mapping) else {}
        return Several(
            {
                name: column_of(part, of_parts.get(name), is_wide=is_wide)
                for name, part in combine.fields.items()
            }
        )
    field = cells if isinstance(cells, FieldCells) else None
    if type(combine) is Count:
        return WholeNumbers(counts=True)
    if type(combine) is Sum:
        if field is None or _are_whole(field.cells):
            return WholeNumbers(counts=False)
        if not is_wide and _float_column(field.cells) is not None:
            return FloatSums(combine)
    return Objects(combine)


def _are_whole(cells: pa.Array | list[Any] | None) -> bool:
    if isinstance(cells, pa.Array):
        return bool(pa.types.is_integer(cells.type))
    return {int, type(None)}.issuperset(map(type, cells or ()))


class WholeNumbers:
    """Counts, and sums of whole numbers."""

    window_bytes: int = 48

    def __init__(self, *, counts: bool) -> None:
        self._counts = counts

    def of(self, stored: Sequence[Any]) -> Accumulators:
        return np.array([0 if number is None else number for number in stored], np.int64)

    def holds(self, stored: Any) -> bool:
        return type(stored) is int and abs(stored) <= _SUM_MAX

    def added(self, field: FieldCells, held: Accumulators) -> tuple[Any, _Mask | None] | None:
        cells, is_odd = field.cells, field.is_odd
        if cells is None:
            return np.ones(field.count, np.int64), is_odd
        if self._counts:
            if not isinstance(cells, list):
                return np.array(cells.is_valid(), np.int64), is_odd
            # Other objects may be missing values of NumPy or Pandas.
            is_plain = {*OF_PYTHON, type(None)}.issuperset(map(type, cells))
            return (np.array([cell is not None for cell in cells], np.int64), is_odd) if is_plain else None
        column = _whole_column(cells)
        if column is None:
            return None
        numbers = pc.fill_null(column, 0).to_numpy()
        most = max(abs(int(numbers.max())), abs(int(numbers.min()))) * len(numbers)
        # The sum of nulls alone is null, which the column does not hold: such keys have turns.
        for_turns = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
        return (numbers, for_turns) if float(most) + float(np.abs(held).max(initial=0)) < _SUM_MAX else None

    def grouped(self, cells: Any, order: _Index, firsts: _Index) -> Accumulators:
        return np.add.reduceat(cells[order], firsts)

    def merged(self, both: Accumulators, is_arrived: _Mask, firsts: _Index) -> Accumulators:  # noqa: ARG002
        return np.add.reduceat(both, firsts)

    def without(self, accumulators: Accumulators, is_cleared: _Mask) -> Accumulators:
        return np.where(is_cleared, 0, accumulators)

    def widened(self, accumulators: Accumulators) -> tuple[AccumulatorColumn, Accumulators]:
        return self, accumulators

    def texts(self, accumulators: Accumulators) -> pa.StringArray:
        return pa.array(accumulators).cast(pa.string())

    def results(self, accumulators: Accumulators) -> pa.StringArray:
        return self.texts(accumulators)

    def values(self, accumulators: Accumulators) -> list[Any]:
        numbers: list[Any] = accumulators.tolist()
        return numbers


def _whole_column(cells: pa.Array | list[Any]) -> pa.Array | None:
    """Return whole numbers as 64-bit integers, null for the cells of odd values; ``None`` for other cells."""
    if not _are_whole(cells):
        return None
    try:
        return pa.array(cells, pa.int64()) if isinstance(cells, list) else cells.cast(pa.int64())
    except (OverflowError, pa.ArrowInvalid):
        return None


class FloatSums:
    """Exact sums of floats, as `exact_sum` keeps them: the number of floats, the sum rounded once, and what is left.

    Two floats hold any sum whose digits span 106 bits, so nearly all.
    """

    window_bytes: int = 64

    def __init__(self, combine: Sum) -> None:
        self._combine = combine

    def of(self, stored: Sequence[Any]) -> Accumulators:
        totals = [_NO_FLOATS if total is None else total for total in stored]
        return np.array([(total["floats"], *(*total["parts"], 0.0, 0.0)[:2]) for total in totals], _FLOAT_SUM)

    def holds(self, stored: Any) -> bool:
        if type(stored) is not dict or stored.keys() != _NO_FLOATS.keys():
            return False
        floats, parts = stored["floats"], stored["parts"]
        is_list = type(parts) is list and len(parts) <= _PARTS_MAX
        return (
            is_list
            and type(floats) is int
            and all(type(part) is float and abs(part) < _FLOAT_MAX for part in parts)
        )

    def added(self, field: FieldCells, held: Accumulators) -> tuple[Any, _Mask | None] | None:  # noqa: ARG002
        column = _float_column(field.cells)
        if column is None:
            return None
        numbers = column.to_numpy(zero_copy_only=False)
        # Nulls are NaN here. Infinities and the rest have sums of another form.
        for_turns = ~(np.abs(numbers) < _FLOAT_MAX)
        return (np.where(for_turns, 0.0, numbers), for_turns) if for_turns.any() else (numbers, None)

    def grouped(self, cells: Any, order: _Index, firsts: _Index) -> Accumulators:
        ordered = cells[order]
        counts = np.diff(np.append(firsts, len(ordered)))
        found = np.zeros(len(firsts), _FLOAT_SUM)
        found["floats"], found["high"] = counts, ordered[firsts]
        for number in range(1, min(int(counts.max()), _ROUNDS_MAX)):
            here = np.flatnonzero((counts > number) & (counts <= _ROUNDS_MAX))
            found[here] = _added_up(found[here], ordered[firsts[here] + number], 0.0, 1)
        found["floats"] = counts
        for group in np.flatnonzero(counts > _ROUNDS_MAX).tolist():
            start = firsts[group]
            total = with_numbers(NOTHING, ordered[start : start + counts[group]].tolist())
            if not self.holds(total):
                raise WideSumError
            found[group : group + 1] = self.of([total])
        return found

    def merged(self, both: Accumulators, is_arrived: _Mask, firsts: _Index) -> Accumulators:  # noqa: ARG002
        found = both[firsts]
        counts = np.diff(np.append(firsts, len(both)))
        for number in range(1, int(counts.max(initial=0))):
            here = np.flatnonzero(counts > number)
            more = both[firsts[here] + number]
            found[here] = _added_up(found[here], more["high"], more["low"], more["floats"])
        return found

    def without(self, accumulators: Accumulators, is_cleared: _Mask) -> Accumulators:
        kept = accumulators.copy()
        kept[is_cleared] = 0
        return kept

    def widened(self, accumulators: Accumulators) -> tuple[AccumulatorColumn, Accumulators]:
        column = Objects(self._combine)
        stored = [
            {"floats": floats, "parts": [part for part in parts if part]} if floats else None
            for floats, *parts in accumulators.tolist()
        ]
        return column, column.of(stored)

    def texts(self, accumulators: Accumulators) -> pa.StringArray:
        high, low = accumulators["high"], accumulators["low"]
        high_text = pc.if_else(pa.array(high != 0), _float_texts(high), "")
        parts = pc.if_else(
            pa.array(low != 0), pc.binary_join_element_wise(high_text, _float_texts(low), ","), high_text
        )
        floats = pa.array(accumulators["floats"]).cast(pa.string())
        return pc.binary_join_element_wise('{"floats":', floats, ',"parts":[', parts, "]}", "")

    def results(self, accumulators: Accumulators) -> pa.StringArray:
        return _float_texts(accumulators["high"])

    def values(self, accumulators: Accumulators) -> list[Any]:
        numbers: list[Any] = _unsigned(accumulators["high"]).tolist()
        return numbers


_FLOAT_SUM: Final = np.dtype([("floats", np.int64), ("high", np.float64), ("low", np.float64)])
_NO_FLOATS: Final[dict[str, Any]] = {"floats": 0, "parts": []}
_PARTS_MAX: Final = 2
# Sums of so many floats as there are stay far below the greatest float.
_FLOAT_MAX: Final = 2.0**900
# A larger group costs less as a list than as so many additions of columns.
_ROUNDS_MAX: Final = 16


def _float_column(cells: pa.Array | list[Any] | None) -> pa.Array | None:
    """Return floats as a column, null for the cells of odd values; ``None`` for other cells."""
    if isinstance(cells, pa.Array):
        return cells.cast(pa.float64()) if pa.types.is_floating(cells.type) else None
    if cells is None or not {float, type(None)}.issuperset(map(type, cells)):
        return None
    return pa.array(cells, pa.float64())


def _added_up(sums: Accumulators, high: Any, low: Any, floats: Any) -> Accumulators:
    """Add to sums, or raise `WideSumError` where two floats do not hold the result (Knuth's exact addition)."""
    total, rest = _exactly(sums["high"], high)
    lows, more = _exactly(sums["low"], low)
    rest, most = _exactly(rest, lows)
    if more.any() or most.any():
        raise WideSumError
    found = np.empty(len(sums), _FLOAT_SUM)
    found["floats"] = sums["floats"] + floats
    found["high"], found["low"] = _exactly(total, rest)
    return found


def _exactly(one: Any, other: Any) -> tuple[Any, Any]:
    """Return the rounded sum, and what rounding has left out."""
    total = one + other
    part = total - one
    return total, (one - (total - part)) + (other - part)


def _float_texts(numbers: npt.NDArray[np.float64]) -> pa.StringArray:
    if not len(numbers):
        return pa.array([], pa.string())
    text = orjson.dumps(_unsigned(numbers), option=orjson.OPT_SERIALIZE_NUMPY)
    return pa.array(text[1:-1].decode().split(","), pa.string())


def _unsigned(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the numbers, with a zero that has no sign, as in JSON."""
    return np.ascontiguousarray(numbers + 0.0)


class Objects:
    """The accumulators of a combiner whose functions change none in place."""

    window_bytes: int = 400

    def __init__(self, combine: CombineFn) -> None:
        # Of cells, so that no record is made.
        self._combine: CombineFn = replace(combine, of=None)  # type: ignore[type-var]

    def of(self, stored: Sequence[Any]) -> Accumulators:
        return _objects(stored)

    def holds(self, stored: Any) -> bool:
        return stored is not None

    def added(self, field: FieldCells, held: Accumulators) -> tuple[Any, _Mask | None] | None:  # noqa: ARG002
        cells = field.cells
        return (plain_cells(cells) if isinstance(cells, pa.Array) else cells), field.is_odd

    def grouped(self, cells: Any, order: _Index, firsts: _Index) -> Accumulators:
        ordered = list(map(cells.__getitem__, order.tolist()))
        starts = firsts.tolist()
        return _objects(
            [ordered[start:end] for start, end in zip(starts, [*starts[1:], len(ordered)], strict=True)]
        )

    def merged(self, both: Accumulators, is_arrived: _Mask, firsts: _Index) -> Accumulators:
        add_all, merge, create = self._combine.add_all, self._combine.merge, self._combine.create
        accumulators, arrived = both.tolist(), is_arrived.tolist()
        found = []
        starts = firsts.tolist()
        with combining():
            for start, end in zip(starts, [*starts[1:], len(accumulators)], strict=True):
                accumulator = create() if arrived[start] else accumulators[start]
                for place in range(start if arrived[start] else start + 1, end):
                    part = accumulators[place]
                    accumulator = add_all(accumulator, part) if arrived[place] else merge([accumulator, part])
                found.append(accumulator)
        return _objects(found)

    def without(self, accumulators: Accumulators, is_cleared: _Mask) -> Accumulators:
        kept = accumulators.copy()
        kept[is_cleared] = None
        return kept

    def widened(self, accumulators: Accumulators) -> tuple[AccumulatorColumn, Accumulators]:
        return self, accumulators

    def texts(self, accumulators: Accumulators) -> pa.StringArray:
        return _texts(accumulators.tolist())

    def results(self, accumulators: Accumulators) -> pa.StringArray:
        return _texts(self._extracted(accumulators))

    def values(self, accumulators: Accumulators) -> list[Any]:
        # Former accumulators stay, for an undone bundle.
        return list(map(copied, self._extracted(accumulators)))

    def _extracted(self, accumulators: Accumulators) -> list[Any]:
        with combining():
            return list(map(self._combine.extract, accumulators.tolist()))


class Several:
    """The accumulators of several combiners, each in a separate column: the fields of one array of records."""

    def __init__(self, columns: Mapping[str, AccumulatorColumn]) -> None:
        self._columns = columns
        self._names = [f"{orjson.dumps(name).decode()}:" for name in columns]
        self.window_bytes: int = sum(column.window_bytes for column in columns.values())

    def _joined(self, parts: Sequence[Accumulators]) -> Accumulators:
        # Numbers are safe names of an array's fields.
        joined = np.empty(len(parts[0]), [(f"{place}", part.dtype) for place, part in enumerate(parts)])
        for place, part in enumerate(parts):
            joined[f"{place}"] = part
        return joined

    def _parts(self, accumulators: Accumulators) -> list[tuple[AccumulatorColumn, Accumulators]]:
        return [(column, accumulators[f"{place}"]) for place, column in enumerate(self._columns.values())]

    def of(self, stored: Sequence[Any]) -> Accumulators:
        return self._joined(
            [
                column.of([None if one is None else one[name] for one in stored])
                for name, column in self._columns.items()
            ]
        )

    def holds(self, stored: Any) -> bool:
        return (
            type(stored) is dict
            and stored.keys() == self._columns.keys()
            and all(column.holds(stored[name]) for name, column in self._columns.items())
        )

    def added(self, field: Mapping[str, FieldCells], held: Accumulators) -> tuple[Any, _Mask | None] | None:
        cells, for_turns = [], None
        for cells_of_part, (column, part) in zip(field.values(), self._parts(held), strict=True):
            added = column.added(cells_of_part, part)
            if added is None:
                return None
            cells.append(added[0])
            if added[1] is not None:
                for_turns = added[1] if for_turns is None else for_turns | added[1]
        return cells, for_turns

    def grouped(self, cells: Any, order: _Index, firsts: _Index) -> Accumulators:
        return self._joined(
            [
                column.grouped(part, order, firsts)
                for column, part in zip(self._columns.values(), cells, strict=True)
            ]
        )

    def merged(self, both: Accumulators, is_arrived: _Mask, firsts: _Index) -> Accumulators:
        return self._joined([column.merged(part, is_arrived, firsts) for column, part in self._parts(both)])

    def without(self, accumulators: Accumulators, is_cleared: _Mask) -> Accumulators:
        return self._joined([column.without(part, is_cleared) for column, part in self._parts(accumulators)])

    def widened(self, accumulators: Accumulators) -> tuple[AccumulatorColumn, Accumulators]:
        wide = [column.widened(part) for column, part in self._parts(accumulators)]
        columns = dict(zip(self._columns, [column for column, _ in wide], strict=True))
        return Several(columns), self._joined([part for _, part in wide])

    def texts(self, accumulators: Accumulators) -> pa.StringArray:
        return self._object_of([column.texts(part) for column, part in self._parts(accumulators)])

    def results(self, accumulators: Accumulators) -> pa.StringArray:
        return self._object_of([column.results(part) for column, part in self._parts(accumulators)])

    def _object_of(self, texts: Sequence[pa.StringArray]) -> pa.StringArray:
        fields: list[Any] = []
        for name, text in zip(self._names, texts, strict=True):
            fields += [f",{name}" if fields else f"{{{name}", text]
        return pc.binary_join_element_wise(*fields, "}", "")

    def values(self, accumulators: Accumulators) -> list[Any]:
        values = [column.values(part) for column, part in self._parts(accumulators)]
        return [dict(zip(self._columns, row, strict=True)) for row in zip(*values, strict=True)]


def _objects(objects: Sequence[Any]) -> Accumulators:
    return np.fromiter(objects, object, len(objects))


def _texts(values: Sequence[Any]) -> pa.StringArray:
    with combining():
        texts = list(map(encode_value, values))
    if any(text.startswith(PLAIN_MARK) for text in texts):
        raise TypedAccumulatorError
    return pa.array(texts, pa.string())

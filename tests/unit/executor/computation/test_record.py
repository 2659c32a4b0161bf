"""Records and the sequence of a key's records."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millpond.executor.computation.records import InputTime, Record, RecordColumns, Records
from millpond.executor.computation.values import ArrowValues, JsonValues, Values
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.types import EventTimeMicros


def columns_of(texts: list[str] | None = None) -> RecordColumns:
    return RecordColumns(
        at=[10, 20, 30],
        streams=["a", "b", "a"],
        sources=[1, 2, 0],
        values=JsonValues(pa.array(texts or ["30", "10", "20"])),
        ids=pa.array([b"z", None, b"y"]),
        watermark=20,
    )


def records_of(columns: RecordColumns, start: int = 0, stop: int = 3) -> tuple[Records, InputTime]:
    input_time = InputTime()
    records = Records(columns, input_time)
    records.bind("k", start, stop)
    return records, input_time


def summary(record: Record) -> tuple[Any, ...]:
    return (record.key, record.value, record.at, record.stream, record.late, record.id)


ALL = [
    ("k", 10, 10, "a", True, None),
    ("k", 20, 20, "b", False, b"y"),
    ("k", 30, 30, "a", False, b"z"),
]


def test_iterating_indexing_and_slicing_agree() -> None:
    records, _ = records_of(columns_of())

    for _ in range(2):
        assert [summary(record) for record in records] == ALL
        assert [summary(record) for record in records.one_by_one()] == ALL
        assert [summary(records[index]) for index in range(-3, 0)] == ALL
        assert [summary(record) for record in records[1:]] == ALL[1:]


def test_indices_stay_within_the_keys_records() -> None:
    records, _ = records_of(columns_of(), 1, 2)

    assert (len(records), summary(records[-1])) == (1, ALL[1])
    with pytest.raises(IndexError):
        records[1]
    with pytest.raises(IndexError):
        records[-2]


def test_record_stays_valid_when_the_sequence_is_bound_to_another_key() -> None:
    records, _ = records_of(columns_of(), 0, 1)
    kept = records[0]
    records.bind("other", 1, 3)

    assert summary(kept) == ALL[0]


def test_one_by_one_sets_default_and_floor_to_each_records_time() -> None:
    records, input_time = records_of(columns_of())
    seen = [(input_time.at, input_time.floor_at) for _ in records.one_by_one()]

    assert seen == [(10, 10), (20, 20), (30, 30)]


def test_iteration_keeps_the_oldest_time_as_the_floor() -> None:
    """The default is the newest time, except during the iteration."""
    records, input_time = records_of(columns_of())
    before = (input_time.at, input_time.floor_at)
    during = [(input_time.at, input_time.floor_at) for _ in records]

    assert before == (30, 10) == (input_time.at, input_time.floor_at)
    assert during == [(10, 10), (20, 10), (30, 10)]


def test_broken_value_raises_only_where_it_is_read() -> None:
    records, _ = records_of(columns_of(["30", "10", "{"]))
    read = [record.value for record in records if record.at != 20]

    assert read == [10, 30]
    assert [record.at for record in records] == [10, 20, 30]
    with pytest.raises(DataError):
        [record.value for record in records]


def test_records_compare_copy_and_pickle_by_their_fields() -> None:
    """A pickle must not include the whole bundle."""
    records, _ = records_of(columns_of())
    record = records[1]

    assert record == Record("k", 20, EventTimeMicros(20), "b", late=False, id=b"y")
    assert record == copy.deepcopy(record) == pickle.loads(pickle.dumps(record))
    assert record != records[0]
    assert repr(record) == "Record(key='k', value=20, at=20, stream='b', late=False)"


def test_unknown_attribute_is_an_attribute_error() -> None:
    """The lazily filled fields must not swallow typing mistakes."""
    with pytest.raises(AttributeError, match="valeu"):
        _ = records_of(columns_of())[0][0].valeu  # type: ignore[attr-defined]


AMOUNTS = {
    "arrow": ArrowValues(pa.table({"n": pa.array([3, None, 2], pa.int32()), "s": ["c", "a", "b"]})),
    "json": JsonValues(pa.array(['{"n":3,"s":"c"}', '{"n":null,"s":"a"}', '{"n":2,"s":"b"}'])),
}


@pytest.mark.parametrize("values", AMOUNTS.values(), ids=AMOUNTS)
def test_columns_have_the_records_in_their_order(values: Values) -> None:
    """Outside columns keep their type."""
    columns = columns_of()
    columns.values = values
    columns.read = values.value
    records, _ = records_of(columns)
    others, _ = records_of(columns, 1, 2)

    assert records.column("n").to_pylist() == [record.value["n"] for record in records] == [None, 2, 3]
    assert records.column("s").to_pylist() == ["a", "b", "c"]
    assert others.column("n").to_pylist() == [2]
    assert isinstance(values, JsonValues) or records.column("n").type == pa.int32()
    assert records.at.tolist() == [record.at for record in records]
    assert records.late.tolist() == [record.late for record in records]
    assert records.late.dtype == np.bool_
    assert records.ids.to_pylist() == [record.id for record in records]
    with pytest.raises(InvalidError, match="no such field; did you mean 'n'"):
        records.column("nn")


def test_only_records_with_a_common_type_make_a_column() -> None:
    numbers_and_text, _ = records_of(columns_of(['{"n":"x"}', '{"n":1}', '{"n":2}']))
    with pytest.raises(InvalidError, match="make no column: read the records one by one"):
        numbers_and_text.column("n")
    lacking, _ = records_of(columns_of(['{"n":3}', '{"n":1}', "7"]))
    with pytest.raises(InvalidError, match="no such field"):
        lacking.column("n")

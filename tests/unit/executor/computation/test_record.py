"""Records and the sequence of a key's records."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millpond.executor.computation.records import InputTime, Record, RecordColumns, Records
from millpond.executor.computation.values import JsonValues
from millpond.statestore.errors import DataError
from millpond.statestore.types import EventTimeMicros


def columns_of(texts: list[str] | None = None) -> RecordColumns:
    """Three records that arrived in the order 2, 0, 1."""
    return RecordColumns(
        at=np.array([10, 20, 30]),
        streams=["a", "b", "a"],
        sources=np.array([1, 2, 0]),
        values=JsonValues(pa.array(texts or ["30", "10", "20"])),
        ids=pa.array([b"z", None, b"y"]),
        watermark=20,
    )


def records_of(columns: RecordColumns, start: int = 0, stop: int = 3) -> tuple[Records, InputTime]:
    """The key's records, bound."""
    input_time = InputTime()
    records = Records(columns, input_time)
    records.bind("k", start, stop)
    return records, input_time


def summary(record: Record) -> tuple[Any, ...]:
    """All of a record's fields."""
    return (record.key, record.value, record.at, record.stream, record.late, record.id)


ALL = [
    ("k", 10, 10, "a", True, None),
    ("k", 20, 20, "b", False, b"y"),
    ("k", 30, 30, "a", False, b"z"),
]


def test_every_way_of_looking_gives_the_same_records() -> None:
    """Iterating, iterating one by one, indexing and slicing agree, again and again."""
    records, _ = records_of(columns_of())

    for _ in range(2):
        assert [summary(record) for record in records] == ALL
        assert [summary(record) for record in records.one_by_one()] == ALL
        assert [summary(records[index]) for index in range(-3, 0)] == ALL
        assert [summary(record) for record in records[1:]] == ALL[1:]


def test_a_key_sees_its_own_records_only() -> None:
    """Length, indices and negative indices stay within the key's part."""
    records, _ = records_of(columns_of(), 1, 2)

    assert (len(records), summary(records[-1])) == (1, ALL[1])
    with pytest.raises(IndexError):
        records[1]
    with pytest.raises(IndexError):
        records[-2]


def test_a_record_outlives_the_hook() -> None:
    """Binding the sequence to another key does not change an existing record."""
    records, _ = records_of(columns_of(), 0, 1)
    kept = records[0]
    records.bind("other", 1, 3)

    assert summary(kept) == ALL[0]


def test_one_by_one_moves_default_and_floor() -> None:
    """Each record is an input of its own: its time is default and floor of what is produced."""
    records, input_time = records_of(columns_of())
    seen = [(input_time.at, input_time.floor_at) for _ in records.one_by_one()]

    assert seen == [(10, 10), (20, 20), (30, 30)]


def test_together_the_floor_is_the_oldest_and_the_default_the_newest_or_last_seen() -> None:
    """Before and after iteration productions get the newest time, during it that of the record."""
    records, input_time = records_of(columns_of())
    before = (input_time.at, input_time.floor_at)
    during = [(input_time.at, input_time.floor_at) for _ in records]

    assert before == (30, 10) == (input_time.at, input_time.floor_at)
    assert during == [(10, 10), (20, 10), (30, 10)]


def test_an_unread_value_may_be_broken() -> None:
    """Broken values raise where they are read and nowhere else, also after others were read."""
    records, _ = records_of(columns_of(["30", "10", "{"]))
    read = [record.value for record in records if record.at != 20]

    assert read == [10, 30]
    assert [record.at for record in records] == [10, 20, 30]
    with pytest.raises(DataError):
        [record.value for record in records]


def test_records_compare_copy_and_travel_by_their_fields() -> None:
    """Equality, deep copies and pickles know fields only, not the bundle behind them."""
    records, _ = records_of(columns_of())
    record = records[1]

    assert record == Record("k", 20, EventTimeMicros(20), "b", late=False, id=b"y")
    assert record == copy.deepcopy(record) == pickle.loads(pickle.dumps(record))
    assert record != records[0]
    assert repr(record) == "Record(key='k', value=20, at=20, stream='b', late=False)"


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    """The lazily filled fields do not swallow typing mistakes."""
    with pytest.raises(AttributeError, match="valeu"):
        _ = records_of(columns_of())[0][0].valeu  # type: ignore[attr-defined]

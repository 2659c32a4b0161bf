"""The reader's rule against a model, and round trips of row files."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from millpond.statestore.interval import Interval
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.files import read_row_files, write_row_file
from millpond.statestore.rows.merge import MERGE_COLUMNS, combine_updates, merge_updates
from millpond.statestore.rows.row import ROW_SCHEMA, Fence
from millpond.statestore.rows.row_format import IpcRowFormat, ParquetRowFormat, RowFormat
from millpond.statestore.types import CommitNumber, Sequencer, Superstep
from tests.fixtures.row_updates import merged_rows, row_histories, row_updates

_TIME_COLUMNS = {"hold", "at", "output_at"}


def micros(table: pa.Table) -> list[dict[str, Any]]:
    """Return the rows as dicts with integer times, in the columns' common order."""
    schema = pa.schema([(field.name, _with_int_times(field.type)) for field in table.schema])
    names = sorted(table.column_names)
    return list(table.cast(schema).select(names).to_pylist())


def _with_int_times(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(type_):
        return pa.int64()
    if pa.types.is_list(type_):
        return pa.list_(_with_int_times(type_.value_type))
    if pa.types.is_struct(type_):
        return pa.struct([(field.name, _with_int_times(field.type)) for field in type_])
    return type_


def sorted_items(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [dict(sorted(row.items())) for row in rows]


@given(row_histories())
def test_merge_equals_the_model(updates: list[dict[str, Any]]) -> None:
    """Updates are in any order, and results sorted by key."""
    merged = merge_updates(row_updates(updates))

    assert sorted_items(merged_rows(updates)) == micros(merged)


@given(row_histories(), st.integers(1, 5))
def test_merging_in_parts_equals_merging_at_once(updates: list[dict[str, Any]], cut: int) -> None:
    """The older part is compacted first."""
    names = [*MERGE_COLUMNS, "record_ids", "productions"]
    older = row_updates([update for update in updates if update["sequencer"] < cut]).select(names)
    newer = row_updates([update for update in updates if update["sequencer"] >= cut]).select(names)
    whole = combine_updates(pa.concat_tables([older, newer]))
    parts = pa.concat_tables([combine_updates(older), combine_updates(newer)])

    assert whole.equals(combine_updates(parts))


@given(row_histories(), st.sampled_from([ParquetRowFormat(), IpcRowFormat()]), st.booleans())
def test_rows_round_trip_through_a_file(
    updates: list[dict[str, Any]], row_format: RowFormat, chunked: bool
) -> None:
    latest = {update["key"]: update for update in updates} or {"k": {"key": "k"}}
    table = row_updates(latest[key] for key in sorted(latest))
    if chunked:
        table = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    objects = MemoryObjects()
    file = write_row_file(
        objects,
        Interval("c"),
        table,
        superstep=Superstep(1),
        fence=Fence(Sequencer(9), CommitNumber(0)),
        token="0" * 32,
        row_format=row_format,
    )

    read = read_row_files(objects, [file.path])
    assert read.schema == ROW_SCHEMA
    assert table.equals(read)


@given(
    row_histories(),
    st.none() | st.sets(st.sampled_from(["", "a", "ä", "zz"])),
    st.none() | st.tuples(st.sampled_from(["", "a", "b"]), st.sampled_from(["ab", "b", None])),
)
def test_reading_by_keys_and_interval_equals_a_filter(
    updates: list[dict[str, Any]], keys: set[str] | None, bounds: tuple[str, str | None] | None
) -> None:
    objects = MemoryObjects()
    interval = None if bounds is None else Interval("c", *bounds)
    paths = []
    for number, order in enumerate(sorted({(u["sequencer"], u["commit_number"]) for u in updates})):
        rows = [u for u in updates if (u["sequencer"], u["commit_number"]) == order]
        file = write_row_file(
            objects,
            Interval("c"),
            row_updates(sorted(rows, key=lambda u: str(u["key"]))),
            superstep=Superstep(1),
            fence=Fence(Sequencer(order[0]), CommitNumber(order[1])),
            token=f"{number:032x}",
        )
        paths.append(file.path)
    everything = read_row_files(objects, paths).to_pylist()

    read = read_row_files(objects, paths, ["state", "commit_number"], keys=keys, interval=interval)
    assert [
        {"state": row["state"], "commit_number": row["commit_number"]}
        for row in everything
        if (keys is None or row["key"] in keys) and (interval is None or interval.contains(row["key"]))
    ] == read.to_pylist()

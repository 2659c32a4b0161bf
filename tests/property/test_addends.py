"""What updates add to a state that they have not read, summed in Arrow and in SQL, against a walk over the updates."""

from __future__ import annotations

import json
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.gc.compaction import CompactionRules, compact_updates
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.rows.files import join_updates
from millpond.statestore.rows.merge import (
    SqlDialect,
    combine_updates,
    merge_updates,
    rows_query,
    split_rows,
)
from millpond.statestore.rows.record_ids import IdRetention
from millpond.statestore.rows.row import ROW_SCHEMA
from millpond.statestore.rows.state_schema import AddendCodec, SchemaCodec, addend_columns_among

_SCHEMA = pa.schema([("count", pa.int64()), ("its-sum", pa.int64())])
_LARGER = pa.schema([*_SCHEMA, ("more", pa.int64())])
_STATES = {schema: SchemaCodec(schema).column for schema in (_SCHEMA, _LARGER)}
_ADDENDS = {schema: AddendCodec(schema).column for schema in (_SCHEMA, _LARGER)}
_ROWS = pa.schema([*ROW_SCHEMA, *_STATES.values(), *_ADDENDS.values()])

_numbers = st.none() | st.integers(-(2**40), 2**40)
_small = st.fixed_dictionaries({"count": _numbers, "its-sum": _numbers})
_large = st.fixed_dictionaries({"count": _numbers, "its-sum": _numbers, "more": _numbers})
_keys = st.sampled_from("abc")
_updates = st.lists(
    st.tuples(_keys, st.sampled_from(["state", "text", "deleted", "addend", "addend", "none"]), _small)
    | st.tuples(_keys, st.sampled_from(["state", "addend", "addend"]), _large),
    max_size=12,
)
_Update = tuple[str, str, dict[str, int | None]]


def _table(updates: list[_Update]) -> pa.Table:
    rows = []
    for number, (key, kind, cells) in enumerate(updates):
        row: dict[str, Any] = {
            "key": key,
            "sequencer": number // 3,
            "commit_number": number,
            "superstep": number,
        }
        row["deleted"] = kind == "deleted"
        schema = _LARGER if "more" in cells else _SCHEMA
        if kind == "state":
            row[_STATES[schema].name] = cells
        elif kind == "text":
            row["state"] = json.dumps(cells)
        elif kind == "addend":
            row[_ADDENDS[schema].name] = cells
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=_ROWS)


def _walk(updates: list[_Update]) -> dict[str, dict[str, int | None]]:
    """Return the state of each key after one update at a time."""
    states: dict[str, dict[str, int | None]] = {}
    for key, kind, cells in updates:
        if kind in ("state", "text"):
            states[key] = dict(cells)
        elif kind == "deleted":
            states.pop(key, None)
        elif kind == "addend":
            state = states.setdefault(key, dict.fromkeys(cells))
            for name, number in cells.items():
                before = state.setdefault(name, None)
                state[name] = before if number is None else (before or 0) + number
    return states


def _states(rows: pa.Table) -> dict[str, Any]:
    assert not addend_columns_among(rows.column_names)
    columns = ["state", *(column.name for column in _STATES.values())]
    found = {}
    for row in rows.to_pylist():
        (state,) = [row[name] for name in columns if row[name] is not None]
        found[row["key"]] = json.loads(state) if isinstance(state, str) else state
    return found


@given(_updates, st.randoms(use_true_random=False))
def test_rows_have_the_sums_in_any_order_of_the_updates(updates: list[_Update], random: Any) -> None:
    table = _table(updates)
    order = list(range(len(updates)))
    random.shuffle(order)

    assert _states(merge_updates(table)) == _walk(updates)
    assert merge_updates(table.take(pa.array(order, pa.int64()))) == merge_updates(table)


@given(_updates, st.integers(0, 12), st.integers(0, 12))
def test_parts_of_the_updates_may_be_combined_first(updates: list[_Update], one: int, other: int) -> None:
    table, (first, second) = _table(updates), sorted((one, other))
    parts = [
        table.slice(0, first),
        table.slice(first, max(second - first, 0)),
        table.slice(max(second, first)),
    ]

    joined = pa.concat_tables([combine_updates(part).select(_combined_names()) for part in parts])

    assert combine_updates(joined) == combine_updates(table)
    assert merge_updates(joined) == merge_updates(table)


def _combined_names() -> list[str]:
    return combine_updates(_ROWS.empty_table()).column_names


@given(_updates, st.integers(0, 12))
def test_a_compaction_keeps_the_sums(updates: list[_Update], first: int) -> None:
    rules = CompactionRules(ids=IdRetention(at_from=0, arrived_from=0, unknown_arrived_at=0), pending_from=0)
    table = _table(updates)

    older = compact_updates(table.slice(0, first), rules, is_complete=True)
    newer = compact_updates(table.slice(min(first, len(updates))), rules, is_complete=False)

    assert _states(merge_updates(join_updates([older, newer]))) == _walk(updates)


@given(_updates)
def test_sql_has_the_sums(updates: list[_Update]) -> None:
    addends = {column.name: schema.names for schema, column in _ADDENDS.items()}
    query = rows_query("history", SqlDialect.DUCKDB, [column.name for column in _STATES.values()], addends)
    with duckdb.connect() as connection:
        connection.register("history", _table(updates))
        rows = connection.sql(query).to_arrow_table()

    assert _states(rows) == _walk(updates)
    merged = merge_updates(_table(updates))
    others = ["key", "state_version", "superstep", "sequencer", "commit_number"]
    assert rows.select(others).cast(merged.select(others).schema).sort_by("key") == merged.select(others)


def test_a_sum_that_leaves_64_bits_is_an_error() -> None:
    most = {"count": 2**63 - 1, "its-sum": -(2**63)}
    fits = [("a", "addend", most), ("a", "addend", {"count": -1, "its-sum": 1})]
    assert _states(merge_updates(_table(fits))) == {"a": {"count": 2**63 - 2, "its-sum": 1 - 2**63}}

    for one in ({"count": 1, "its-sum": None}, {"count": None, "its-sum": -1}):
        with pytest.raises(DataError, match="does not fit into 64 bits"):
            merge_updates(_table([("a", "state", most), ("a", "addend", one)]))


def test_addends_to_a_state_of_other_code_are_an_error() -> None:
    addend = ("a", "addend", {"count": 1, "its-sum": 1})
    table = _table([("a", "state", {"count": 1, "its-sum": 1}), addend])
    place = table.column_names.index("state_version")
    newer = table.set_column(place, _ROWS.field("state_version"), pa.array([1, None], pa.int32()))
    blob = _table([("a", "none", {}), addend])
    place = table.column_names.index("state_bytes")
    blob = blob.set_column(place, _ROWS.field("state_bytes"), pa.array([b"1", None]))

    for of_other_code in (newer, blob):
        with pytest.raises(DataError, match="cannot be added to"):
            merge_updates(of_other_code)


def test_addends_of_schemas_that_do_not_grow_are_an_error() -> None:
    other = AddendCodec(pa.schema([("count", pa.int64()), ("other", pa.int64())])).column
    table = _table([("a", "addend", {"count": 1, "its-sum": 1, "more": 1})])
    beside = table.append_column(other, pa.array([{"count": 1, "other": 1}], other.type))

    with pytest.raises(DataError, match="none has all fields of the others"):
        merge_updates(pa.concat_tables([beside, beside]))


def test_a_key_without_a_sum_has_no_row() -> None:
    rows, others = split_rows(_table([("a", "none", {}), ("b", "addend", {"count": 1, "its-sum": None})]))

    assert _states(rows) == {"b": {"count": 1, "its-sum": None}}
    assert others.column("key").to_pylist() == ["a"]


@pytest.mark.parametrize("kind", [pa.int32(), pa.float64(), pa.decimal128(10, 2), pa.string()])
def test_only_whole_numbers_of_64_bits_are_summed(kind: pa.DataType) -> None:
    with pytest.raises(InvalidError, match="each field is a nullable int64"):
        AddendCodec(pa.schema([("total", kind)]))

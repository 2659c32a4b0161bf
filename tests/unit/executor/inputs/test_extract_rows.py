"""Extraction of records from outside rows."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from millpond.executor.inputs.extraction import check_fields, read_injected, row_count, row_values
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.time.watermark_policies import MarkColumn
from millpond.statestore.errors import InvalidError

ROWS = [
    {"city": "Bergen", "time": 5, "id": "x"},
    {"city": "Oslo", "time": 7, "id": "y"},
]


def node(**changes: object):
    arguments = {"key": "city", "at": "time", "id": "id", **changes}
    pipeline = EnginePipeline("p")
    pipeline.inject("s", **arguments)
    return pipeline.check().injector("s")


@pytest.mark.parametrize("rows", [ROWS, pa.Table.from_pylist(ROWS)])
class TestBothForms:
    def test_named_fields_give_key_time_and_id(self, rows):
        injected = read_injected(node(), None, rows)

        assert injected.keys.to_pylist() == ["Bergen", "Oslo"]
        assert injected.at.tolist() == [5, 7]
        assert injected.ids.to_pylist() == [b"x", b"y"]
        assert not injected.errors

    def test_functions_get_the_row_as_a_dict(self, rows):
        functions = {
            "key": lambda row: row["city"][0],
            "at": lambda row: datetime.fromtimestamp(row["time"], UTC),
            "id": lambda row: row["time"],
        }

        injected = read_injected(node(**functions), None, rows)

        assert injected.keys.to_pylist() == ["B", "O"]
        assert injected.at.tolist() == [5_000_000, 7_000_000]
        assert injected.ids.to_pylist() == [b"5", b"7"]

    def test_consumers_key_overrides_the_injectors(self, rows):
        assert read_injected(node(), "id", rows).keys.to_pylist() == ["x", "y"]
        assert read_injected(node(), lambda row: row["city"].upper(), rows).keys.to_pylist() == [
            "BERGEN",
            "OSLO",
        ]

    def test_injector_without_an_id_extracts_none(self, rows):
        assert read_injected(node(id=None), None, rows).ids is None

    def test_value_is_the_whole_row_as_a_dict(self, rows):
        values = row_values(rows)

        assert row_count(rows) == len(values) == 2
        assert values.value(1) == ROWS[1]

    def test_raising_function_fails_only_its_row(self, rows):
        injected = read_injected(node(at=lambda row: 1 // (row["time"] - 5)), None, rows)

        assert list(injected.errors) == [0]
        assert "ZeroDivisionError" in injected.errors[0]


class TestUnreadable:
    def test_time_that_raises_fails_only_its_row(self):
        class Odd:
            def __index__(self) -> int:
                raise RuntimeError

        injected = read_injected(node(), None, [{"city": "a", "time": Odd(), "id": "a"}, *ROWS])

        assert injected.errors == {0: "reading the row raised RuntimeError"}

    def test_unreadable_rows_get_errors_and_others_stay(self):
        rows = [
            {"city": None, "time": 5, "id": "a"},
            {"city": "b", "time": "soon", "id": "b"},
            {"city": "c", "time": None, "id": "c"},
            {"city": "d", "time": 5, "id": 1.5},
            {"city": "e"},
            "no row at all",
            {"city": "g", "time": 5, "id": None},
        ]

        injected = read_injected(node(), None, rows)

        assert sorted(injected.errors) == [0, 1, 2, 3, 4, 5]
        assert injected.ids.to_pylist()[6] is None
        assert injected.keys.to_pylist()[6] == "g"

    @pytest.mark.parametrize(
        ("column", "kind"), [("city", pa.list_(pa.int64())), ("time", pa.float64()), ("id", pa.float64())]
    )
    def test_column_of_the_wrong_type_is_refused_by_name(self, column, kind):
        rows = pa.Table.from_pylist(ROWS).drop_columns([column]).append_column(column, pa.nulls(2, kind))

        with pytest.raises(InvalidError, match=f"column=`{column}`"):
            read_injected(node(), None, rows)

    @pytest.mark.parametrize("column", ["city", "time", "id"])
    def test_missing_column_is_refused_by_name(self, column):
        with pytest.raises(InvalidError, match=f"column=`{column}`"):
            read_injected(node(), None, pa.Table.from_pylist(ROWS).drop_columns([column]))

    @pytest.mark.parametrize(
        ("ids", "expected"),
        [
            (pa.array([1, None]), [b"1", None]),
            (pa.array(["x", "y"]).dictionary_encode(), [b"x", b"y"]),
            (pa.array([b"x", None], pa.large_binary()), [b"x", None]),
            (pa.nulls(2), [None, None]),
        ],
    )
    def test_text_bytes_integers_and_nulls_become_ids(self, ids, expected):
        rows = pa.table({"city": ["a", "b"], "time": [1, 2], "id": ids})

        assert read_injected(node(), None, rows).ids.to_pylist() == expected


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [{"qury": "cat", "t": 1}],
            r"no row has the field of the key; did you mean 'qury'\?.*`query`.*`\['qury', 't'\]`",
        ),
        ([{"query": "cat"}], "no row has the field of the time.*field=`t`"),
        (
            [{"query": [7], "t": 1}, {"query": [8], "t": 1}],
            r"no values of this type.*str\(row\['query'\]\).*type=`list`",
        ),
    ],
)
def test_rows_that_all_lack_a_field_are_refused(rows: list[Any], words: str) -> None:
    """Otherwise a misspelt key would turn every row into a dead letter."""
    queries = node(key="query", at="t", id=None)

    with pytest.raises(InvalidError, match=words):
        check_fields(queries, [None], rows)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"member": "sendr", "members": ("a",)},
            r"no row has the field of the member; did you mean 'sender'\?",
        ),
        ({"watermark": MarkColumn("marc")}, r"no row has the field of the mark; did you mean 'mark'\?"),
        ({"watermark": MarkColumn("mark")}, "no row has a mark that is a time.*field=`mark`.*reason="),
    ],
)
def test_senders_and_marks_that_no_row_has_are_refused(options: dict[str, Any], words: str) -> None:
    """Otherwise the watermark would never move, without a word."""
    rows = [{"query": "cat", "t": 1, "sender": "a", "mark": "2001-09-09T02:00:00"}]

    with pytest.raises(InvalidError, match=words):
        check_fields(node(key="query", at="t", id=None, **options), [None], rows)


def test_marks_may_come_later_and_be_wrong() -> None:
    marked = node(key="query", at="t", id=None, watermark=MarkColumn("mark"))

    check_fields(marked, [None], [{"query": "cat", "t": 1}])
    check_fields(marked, [None], [{"query": "cat", "t": 1, "mark": mark} for mark in (None, "soon", 7)])


def test_one_readable_row_passes_the_check() -> None:
    """The others become dead letters."""
    queries = node(key="query", at="t", id=None)

    check_fields(queries, [None], [{"query": 7}, {"query": "cat", "t": 1}, "no row"])
    check_fields(queries, [None], [{"query": None, "t": 1}])
    check_fields(queries, [None], ["no row"])


def test_row_with_a_value_that_python_cannot_hold_has_an_error():
    days = pa.array([0, 2**31 - 1], pa.int32()).cast(pa.date32())
    rows = pa.table({"city": ["Bergen", "Oslo"], "time": [5, 7], "id": ["x", "y"], "day": days})

    for changes in ({"key": lambda row: row["city"]}, {"at": lambda row: row["time"]}):
        injected = read_injected(node(**changes), None, rows)
        assert list(injected.errors) == [1]
        assert "a value of the row cannot be read" in injected.errors[1]
        assert injected.keys[0].as_py() == "Bergen"

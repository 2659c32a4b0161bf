"""State variables as typed columns of views."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import IntegerType, NullType, Row, StructField, StructType

import millpond as mp
from millpond.executor.spark_compat.group_state import ApplyInPandasWithState
from millpond.executor.spark_compat.transform_with_state import TransformWithState
from millpond.statestore.errors import InvalidError
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

_MAP_SCHEMAS = ("day date", "cents decimal(10,2), notes array<string>")
_FOR_EVER_MS = 10**12


class Wallet(StatefulProcessor):
    """A value, a list and a map, with times to live if given, and any declarations of a test."""

    def __init__(
        self, declare: Callable[[StatefulProcessorHandle], object] = lambda _: None, ttl_ms: int | None = None
    ) -> None:
        self._declare = declare
        self._ttl_ms = ttl_ms

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._total = handle.getValueState("total", "cents long", self._ttl_ms)
        self._seen = handle.getListState("seen", "at timestamp", self._ttl_ms)
        self._limits = handle.getMapState("limits", *_MAP_SCHEMAS, self._ttl_ms)
        self._declare(handle)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        for row in rows:
            self._total.update((row.cents,))
            self._seen.appendValue((dt.datetime(2026, 11, 23, 17, 36, 50, tzinfo=dt.UTC),))
            self._limits.updateValue((dt.date(2026, 11, 23),), (Decimal("10.5"), ["a", None]))
        return iter(())


def _store() -> Store:
    return Store.in_memory(clock=ManualClock(), rng=SeededRng(1))


def _run(
    store: Store, computation: mp.Computation, *rows: dict[str, Any], name: str = "wallets", **options: Any
) -> None:
    pipeline = mp.Pipeline("p")
    stream = pipeline.inject("in", key=["card"], at=mp.IngressTime())
    stream.apply(computation, name=name, on_error="stop", **options)
    runner = mp.LocalRunner(
        store, clock=ManualClock(), rng=SeededRng("r"), progress=False, dead_letter_limit=None
    )
    run = runner.start(pipeline, stepping=True)
    if rows:
        run.inject("in", list(rows))
    run.run_until_quiet()
    run.stop()


def _wallet(**options: Any) -> TransformWithState:
    time_mode = "ProcessingTime" if "ttl_ms" in options else "None"
    return TransformWithState(Wallet(**options), "n int", time_mode)


def test_state_variables_are_typed_columns() -> None:
    """The column ``state`` is unchanged."""
    store = _store()

    _run(store, _wallet(), {"card": 1, "cents": 300}, {"card": 2, "cents": -5})

    table = store.rows_view("wallets").to_arrow()
    at = dt.datetime(2026, 11, 23, 17, 36, 50, tzinfo=dt.UTC)
    assert table.column_names[:6] == ["key", "card", "total", "seen", "limits", "state"]
    assert table.column("total").to_pylist() == [300, -5]
    assert table.column("seen").type == pa.list_(pa.timestamp("us", "UTC"))
    assert table.column("seen").to_pylist() == [[at], [at]]
    limit = (dt.date(2026, 11, 23), {"cents": Decimal("10.50"), "notes": ["a", None]})
    assert table.column("limits").to_pylist() == [[limit], [limit]]
    with store.sql() as database:
        found = database.sql(
            "select card, total, seen[1] = '2026-11-23 17:36:50Z'::timestamptz, "
            "limits[date '2026-11-23'].cents, state ->> '$.total.cents' from wallets where total > 0"
        ).fetchall()
    assert found == [(1, 300, True, Decimal("10.50"), "300")]


def test_times_to_live_have_their_own_columns() -> None:
    """They have the variable's form: a time, a list or a map of times."""
    store = _store()

    _run(store, _wallet(ttl_ms=_FOR_EVER_MS), {"card": 1, "cents": 300})

    (row,) = store.rows_view("wallets").to_arrow().to_pylist()
    expires_at = row["total_expires_at"]
    assert expires_at.year > 2050
    assert (row["seen_expires_at"], row["limits_expires_at"]) == (
        [expires_at],
        [(dt.date(2026, 11, 23), expires_at)],
    )


def test_columns_follow_the_declared_variables() -> None:
    """A new variable is null until written, and a removed one is hidden."""
    store = _store()
    _run(store, _wallet(), {"card": 1, "cents": 300})
    before = store.snapshot().version

    _run(store, _wallet(declare=lambda handle: handle.getValueState("more", "a int, b string")))

    assert store.rows_view("wallets").to_arrow().select(["total", "more"]).to_pylist() == [
        {"total": 300, "more": None}
    ]
    assert "more" not in store.rows_view("wallets", before).to_arrow().column_names
    _run(store, _wallet(), name="purses", renamed_from="wallets")
    assert store.rows_view("purses").to_arrow().column_names[2:6] == ["total", "seen", "limits", "state"]


@pytest.mark.parametrize("schema", ["more int", "more string, other int"])
def test_variable_with_another_schema_is_refused(schema: str) -> None:
    """Its stored values would be misread; a new name is the way out."""
    store = _store()
    _run(
        store,
        _wallet(declare=lambda handle: handle.getValueState("more", "more long")),
        {"card": 1, "cents": 3},
    )
    version = store.snapshot().version

    with pytest.raises(InvalidError, match="another schema") as refused:
        _run(store, _wallet(declare=lambda handle: handle.getValueState("more", schema)))

    assert "more" in str(refused.value)
    assert "long" in str(refused.value)
    assert store.snapshot().version == version


def test_group_state_has_a_column_for_each_field() -> None:
    def keep(_key: Any, frames: Any, state: Any) -> Any:
        state.update((sum(len(frame) for frame in frames), dt.date(2026, 11, 23)))
        return iter(())

    store = _store()
    _run(store, ApplyInPandasWithState(keep, "n int", "count long, day date"), {"card": 1, "cents": 300})

    assert store.rows_view("wallets").to_arrow().select(["count", "day"]).to_pylist() == [
        {"count": 1, "day": dt.date(2026, 11, 23)}
    ]


@pytest.mark.parametrize(
    "schema",
    [
        StructType([StructField("a", IntegerType()), StructField("A", IntegerType())]),
        StructType([StructField("a", NullType())]),
    ],
)
def test_variable_that_sql_cannot_show_is_only_in_state(schema: StructType) -> None:
    """The view must stay readable."""
    store = _store()

    _run(store, _wallet(declare=lambda handle: handle.getValueState("odd", schema)), {"card": 1, "cents": 3})

    assert "odd" not in store.rows_view("wallets").to_arrow().column_names
    with store.sql() as database:
        assert database.sql("select total from wallets").fetchall() == [(3,)]


@pytest.mark.spark
def test_spark_has_the_names_types_and_values_of_arrow(spark_as_reader: SparkSession, tmp_path: Path) -> None:
    with mp.Store.open(tmp_path / "pond") as store:
        _run(store, _wallet(ttl_ms=_FOR_EVER_MS), {"card": 1, "cents": 300}, {"card": 2, "cents": -5})
        view = store.rows_view("wallets")
        frame, table = view.to_spark(spark_as_reader), view.to_arrow()
        frame.createOrReplaceTempView("wallets")

        typed = [column.field.name for column in view.shown]
        assert frame.columns == table.column_names
        shown = frame.orderBy("key").select(*typed).toArrow()
        assert shown.to_pylist() == table.select(typed).to_pylist()
        found = spark_as_reader.sql(
            "select card, limits[date '2026-11-23'].cents from wallets where total = 300"
        )
        assert [tuple(row) for row in found.collect()] == [(1, Decimal("10.50"))]

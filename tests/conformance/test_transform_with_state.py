"""The same processor over the same micro-batches: Spark's own operator and Millpond, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.state import GroupStateTimeout
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import millpond as mp
from millpond.executor.spark_compat.spark_query import (
    apply_in_arrow_with_state,
    apply_in_pandas_with_state,
    drop_duplicates,
    transform_with_state,
)
from millpond.statestore.errors import InvalidError
from tests.fixtures.micro_batches import micro_batches
from tests.spark_code.group_functions import grouped, grouped_in_arrow
from tests.spark_code.stateful_processors import (
    SEEN,
    AllTypes,
    Failing,
    Keys,
    PandasCounter,
    Remembering,
    Seeded,
    Timers,
)
from tests.spark_code.window_processors import WindowEchoes, Windowed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from millpond.executor.spark.run import SparkRun

pytestmark = [pytest.mark.spark, pytest.mark.slow]

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """A user's query: each batch is a file, and each file a micro-batch."""

    spark: SparkSession
    folder: Path
    processor: StatefulProcessor
    batches: Sequence[Sequence[Row]]
    schema: str
    keys: tuple[str, ...] = ("k",)
    time_mode: str = "None"
    delay: str | None = None
    in_pandas: bool = False
    initial: Sequence[Row] = ()

    def frame(self) -> DataFrame:
        frame = micro_batches(self.spark, self.folder / "in", self.batches, self.schema)
        return frame if self.delay is None else frame.withWatermark("t", self.delay)

    def _initial(self) -> DataFrame | None:
        if not self.initial:
            return None
        return self.spark.createDataFrame([dict(row) for row in self.initial], "k string, initial long")

    def in_spark(self) -> list[str | None]:
        grouped = self.frame().groupBy(*self.keys)
        initial = self._initial()
        operator = grouped.transformWithStateInPandas if self.in_pandas else grouped.transformWithState
        output = operator(
            self.processor,
            SEEN,
            "Update",
            self.time_mode,
            **({} if initial is None else {"initialState": initial.groupBy(*self.keys)}),
        )
        return self.written(output)

    def written(self, output: DataFrame) -> list[str | None]:
        table = str(self.folder / "spark")
        query = (
            output.writeStream.outputMode("update")
            .option("checkpointLocation", str(self.folder / "checkpoint"))
            .foreachBatch(lambda frame, _: frame.write.format("delta").mode("append").save(table))
        )
        query.trigger(availableNow=True).start().awaitTermination()
        return _seen(table)

    def in_millpond(self, **options: Any) -> list[str | None]:
        run = transform_with_state(
            self.frame(),
            keys=self.keys,
            processor=self.processor,
            output_schema=SEEN,
            time_mode=self.time_mode,
            initial_state=self._initial(),
            rows_as="pandas" if self.in_pandas else "row",
            **self.place,
            **options,
        )
        return self.run(run)

    @property
    def place(self) -> dict[str, Any]:
        return {
            "store": self.folder / "pond",
            "sink": mp.DeltaSink(str(self.folder / "millpond")),
            "trigger": {"availableNow": True},
            "spark": self.spark,
            "progress": False,
        }

    def run(self, run: SparkRun) -> list[str | None]:
        try:
            run.await_termination()
        finally:
            run.stop()
        return _seen(str(self.folder / "millpond"))


def _seen(table: str) -> list[str | None]:
    return sorted(DeltaTable(table).to_pyarrow_table().column("seen").to_pylist(), key=str)


def _timed(key: str, second: float, set_: Sequence[int] = (), unset: Sequence[int] = ()) -> Row:
    return {"k": key, "t": f"1970-01-01T00:00:{second:06.3f}Z", "set": set_, "unset": unset}


TIMED = "k string, t timestamp, set array<long>, unset array<long>"


def test_timers_and_late_rows_equal_sparks(rocksdb: SparkSession, tmp_path: Path) -> None:
    batches = [
        [_timed("a", 5, [5_000, 5_500, 6_000, 7_000, 100]), _timed("b", 5, [5_000])],
        [_timed("a", 7, (), [7_000]), _timed("c", 1)],
        [_timed("a", 4.999), _timed("a", 5), _timed("b", 5.001), _timed("a", 8, [9_000]), _timed("b", 10)],
        [_timed("b", 7), _timed("a", 7.5), _timed("a", 5.5), _timed("b", 8.5)],
        [_timed("z", 10)],
    ]
    job = Job(rocksdb, tmp_path, Timers(), batches, TIMED, time_mode="EventTime", delay="1 second")

    assert job.in_millpond() == job.in_spark()


def _untimed(key: str) -> Row:
    return {"k": key, "t": None, "set": (), "unset": ()}


def test_first_watermark_is_1970_as_in_spark(rocksdb: SparkSession, tmp_path: Path) -> None:
    """A row at or before it is late, and a timer set to it fires at once."""
    batches = [
        [
            {**_timed("a", 0, [1]), "t": "1969-12-31T23:59:59Z"},
            _timed("b", 0, [1]),
            _timed("c", 0.001, [0]),
            _timed("d", 5, [-7, 0, 1]),
        ],
        [_timed("c", 0.002)],
    ]
    job = Job(rocksdb, tmp_path, Timers(), batches, TIMED, time_mode="EventTime", delay="10 seconds")

    assert job.in_millpond() == job.in_spark()


def test_rows_without_event_time_equal_sparks(rocksdb: SparkSession, tmp_path: Path) -> None:
    """They are never late, and move no watermark; they neither fire nor keep a timer."""
    batches = [
        [_untimed("a"), _untimed("b")],
        [_timed("a", 5, [6_000]), _untimed("a"), _timed("c", 9)],
        [_untimed("a"), _untimed("d"), _timed("c", 2)],
        [_untimed("d")],
    ]
    job = Job(rocksdb, tmp_path, Timers(), batches, TIMED, time_mode="EventTime", delay="1 second")

    assert job.in_millpond() == job.in_spark()


@pytest.mark.spark_all
@pytest.mark.parametrize(
    ("keys", "within"),
    [(["k"], False), (["k", "t"], False), (["k"], True)],
    ids=["for ever", "key with the event time", "within the watermark"],
)
def test_duplicates_without_event_time_equal_sparks(
    rocksdb: SparkSession, tmp_path: Path, keys: list[str], within: bool
) -> None:
    batches = [
        [{"k": key, "t": time, "seen": f"{number} {key} {time}"} for key, time in batch.items()]
        for number, batch in enumerate(
            (
                {"a": None, "b": "2024-01-01T00:00:31Z"},
                {"a": None, "b": "2024-01-01T00:10:31Z"},
                {"a": None, "c": "2024-01-01T00:00:00Z"},
                {"a": None},
            )
        )
    ]
    job = Job(rocksdb, tmp_path, Timers(), batches, "k string, t timestamp, seen string", delay="10 seconds")
    frame = job.frame()
    theirs = frame.dropDuplicatesWithinWatermark(keys) if within else frame.dropDuplicates(keys)

    run = drop_duplicates(job.frame(), keys, within_watermark=within, **job.place)
    assert job.run(run) == job.written(theirs)


@pytest.mark.spark_all
def test_time_mode_none_has_no_late_rows_as_in_spark(rocksdb: SparkSession, tmp_path: Path) -> None:
    batches = [
        [{"k": "a", "do": "update", "n": second, "t": f"1970-01-01T00:00:{second:02d}Z"}]
        for second in (30, 31, 2, 3)
    ]
    schema = "k string, do string, n long, t timestamp"
    job = Job(rocksdb, tmp_path, Remembering(), batches, schema, delay="1 second")

    assert job.in_millpond() == job.in_spark()


@pytest.mark.parametrize(
    ("limit", "value"),
    [("maxRecordsPerBatch", "-1"), ("maxRecordsPerBatch", "2"), ("maxBytesPerBatch", "1b")],
)
def test_frames_equal_sparks(rocksdb: SparkSession, tmp_path: Path, limit: str, value: str) -> None:
    """A missing value of ``transformWithStateInPandas`` is null. The code sees where a key's first frame ends."""
    setting = f"spark.sql.execution.arrow.{limit}"
    rocksdb.conf.set(setting, value)
    batches = [
        [
            {"k": key, "t": f"1970-01-01T00:00:{second:02d}Z", "n": second}
            for key in "ab"
            for second in seconds
        ]
        for seconds in ((1, 2, 3), (9, 4), (20,))
    ]
    job = Job(
        *(rocksdb, tmp_path, PandasCounter(), batches, "k string, t timestamp, n long"),
        time_mode="eventtime",
        delay="1 second",
        in_pandas=True,
    )

    try:
        assert job.in_millpond() == job.in_spark()
    finally:
        rocksdb.conf.unset(setting)


@pytest.mark.spark_all
def test_state_variables_equal_sparks(rocksdb: SparkSession, tmp_path: Path) -> None:
    words = ("update", "append", "map", "put", "remove", "clear", "map", "append")
    batches = [
        [
            {"k": key, "do": words[(number + step) % len(words)], "n": number + step}
            for step in range(3)
            for key in "ab"
        ]
        for number in range(8)
    ]
    job = Job(rocksdb, tmp_path, Remembering(), batches, "k string, do string, n long")

    assert job.in_millpond() == job.in_spark()


@pytest.mark.spark_all
def test_values_of_all_types_equal_sparks(rocksdb: SparkSession, tmp_path: Path) -> None:
    """Values read back from state keep their types."""
    row = {"k": "a", "t": "2024-01-01T00:00:00Z", "c": 1.5, "n": 1, "x": None}
    job = Job(
        *(rocksdb, tmp_path, AllTypes(), [[row], [row, row]]),
        "k string, t timestamp, c decimal(10,2), n long, x array<date>",
    )

    assert job.in_millpond() == job.in_spark()


@pytest.mark.spark_all
def test_keys_of_any_type_equal_sparks(rocksdb: SparkSession, tmp_path: Path) -> None:
    """A decimal loses its trailing zeros."""
    rows = [
        {"a": "x", "b": 1, "c": 1.25, "d": "2020-01-02", "e": True, "t": "2024-01-01T00:00:00Z"},
        {"a": None, "b": None, "c": None, "d": None, "e": None, "t": "2024-01-01T00:00:00Z"},
        {"a": "x\ty", "b": -(2**40), "c": -1.25, "d": "1969-12-31", "e": False, "t": "2024-01-01T00:00:00Z"},
    ]
    job = Job(
        *(
            rocksdb,
            tmp_path,
            Keys(),
            [rows, rows],
            "a string, b long, c decimal(9,2), d date, e boolean, t timestamp",
        ),
        keys=("a", "b", "c", "d", "e"),
        time_mode="EventTime",
        delay="1 second",
    )

    assert job.in_millpond() == job.in_spark()


@pytest.mark.spark_all
def test_initial_state_equals_sparks(rocksdb: SparkSession, tmp_path: Path) -> None:
    batches = [[{"k": key, "n": number} for key in "abc"] for number in (1, 2)]
    initial = [{"k": "a", "initial": 100}, {"k": "b", "initial": 200}, {"k": "z", "initial": 300}]
    job = Job(rocksdb, tmp_path, Seeded(), batches, "k string, n long", initial=initial)

    assert job.in_millpond() == job.in_spark()


def test_failure_ends_the_run_without_a_trace(spark: SparkSession, tmp_path: Path) -> None:
    """In Millpond, the rows of the key may be a dead letter instead."""
    batches = [
        [{"k": key, "n": 1} for key in "ab"],
        [{"k": "a", "n": 1}, {"k": "a", "n": -1}, {"k": "b", "n": 1}],
    ]
    job = Job(spark, tmp_path, Failing(), batches, "k string, n long")

    with pytest.raises(InvalidError, match="a negative number"):
        job.in_millpond()

    assert _seen(str(tmp_path / "millpond")) == ["('a',) (1,)", "('b',) (1,)"]
    assert job.in_millpond(on_error="dead_letter", dead_letter_limit=None) == [
        "('a',) (1,)",
        "('b',) (1,)",
        "('b',) (2,)",
    ]


def test_function_of_groups_equals_sparks(rocksdb: SparkSession, tmp_path: Path) -> None:
    def row(key: str, second: float, do: str = "", n: int = 0) -> Row:
        return {"k": key, "t": f"1970-01-01T00:00:{second:06.3f}Z", "do": do, "n": n}

    batches = [
        [
            row("a", 5, "update", 1),
            row("a", 5, "timeout", 6_000),
            row("b", 5, "update", 99),
            row("b", 5, "timeout", 6_500),
        ],
        [row("c", 7, "update", 3), row("c", 7, "timeout", 9_000), row("d", 7, "timeout", 8_000)],
        [row("a", 6.5), row("b", 9), row("c", 6.2, "update", 4)],
        [row("e", 12, "update", 5), row("c", 12), row("c", 12, "remove")],
        [row("z", 20)],
        [row("z", 30)],
    ]
    job = Job(
        *(rocksdb, tmp_path, Timers(), batches, "k string, t timestamp, do string, n long"), delay="1 second"
    )
    timeout = GroupStateTimeout.EventTimeTimeout
    in_arrow = replace(job, folder=tmp_path / "arrow")
    in_arrow.folder.mkdir()

    ours = _groups(job, apply_in_pandas_with_state, grouped, timeout)

    theirs = (
        job.frame()
        .groupBy("k")
        .applyInPandasWithState(grouped, SEEN, "n long, word string", "Update", timeout)
    )
    assert ours == job.written(theirs)
    assert ours == _groups(in_arrow, apply_in_arrow_with_state, grouped_in_arrow, timeout)


def _groups(
    job: Job, apply: Callable[..., SparkRun], function: Callable[..., Any], timeout: str
) -> list[str | None]:
    run = apply(
        *(job.frame(),),
        keys="k",
        function=function,
        output_schema=SEEN,
        state_schema="n long, word string",
        timeout=timeout,
        **job.place,
    )
    return job.run(run)


CHAINED = "k string, t timestamp, seen string"


def _chained_in_spark(job: Job, first: StatefulProcessor, second: StatefulProcessor) -> list[str | None]:
    mid = job.frame().groupBy("k").transformWithState(first, CHAINED, "Append", "EventTime", None, "t")
    return job.written(
        mid.groupBy("k").transformWithState(second, "seen string", "Append", "EventTime", None)
    )


def _chained_in_millpond(job: Job, first: StatefulProcessor, second: StatefulProcessor) -> list[str | None]:
    pipeline = mp.Pipeline("chain")
    rows = pipeline.inject("rows", key=["k"], at="t")
    mid = rows.apply(
        mp.spark.TransformWithState(first, CHAINED, "EventTime", event_time_column_name="t"),
        name="first",
        on_late="drop",
        on_error="stop",
    )
    last = mid.apply(
        mp.spark.TransformWithState(second, "seen string", "EventTime"), name="last", on_error="stop"
    )
    last.sink("out", mp.DeltaSink(str(job.folder / "millpond"), pa.schema([("seen", pa.string())])))
    runner = mp.SparkRunner(job.folder / "pond", spark=job.spark, progress=False, tick="1d")
    run = runner.start(pipeline, {"rows": job.frame()}, trigger={"availableNow": True})
    return job.run(run)


def test_chained_operators_equal_sparks(rocksdb: SparkSession, tmp_path: Path) -> None:
    """Rows from the first operator's timers reach the second's timers by their event time."""
    batches = [
        [{"k": key, "t": f"1970-01-01T00:{at // 60:02d}:{at % 60:02d}Z"} for key, at in some]
        for some in (
            [("a", 1), ("a", 2), ("b", 3)],
            [("a", 12), ("b", 13)],
            [("a", 5), ("b", 25)],
            [("c", 60)],
            [("c", 90)],
        )
    ]
    job = Job(rocksdb, tmp_path, Windowed(), batches, "k string, t timestamp", delay="1 second")

    assert _chained_in_millpond(job, Windowed(), WindowEchoes()) == _chained_in_spark(
        job, Windowed(), WindowEchoes()
    )


def test_row_behind_the_watermark_ends_the_query(rocksdb: SparkSession, tmp_path: Path) -> None:
    """A processor must not yield an event time that has passed."""
    batches = [[{"k": "a", "t": f"1970-01-01T00:{at // 60:02d}:{at % 60:02d}Z"}] for at in (1, 20, 40)]
    job = Job(rocksdb, tmp_path, Windowed(), batches, "k string, t timestamp", delay="1 second")

    with pytest.raises(InvalidError, match="at or before the watermark"):
        _chained_in_millpond(job, Windowed(back_s=15), WindowEchoes())
    with pytest.raises(StreamingQueryException, match="EMITTING_ROWS_OLDER_THAN_WATERMARK"):
        _chained_in_spark(job, Windowed(back_s=15), WindowEchoes())

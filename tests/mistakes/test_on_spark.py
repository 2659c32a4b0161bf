"""Mistakes with frames, queries, checkpoints and workers of Spark."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

import millpond as mp
from tests.mistakes.catalogue import Told
from tests.mistakes.code_of_users import ROWS, Does, counting, held_in_memory

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = "query string, at long, n long"
MODULE = "module_of_mistakes"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[mp.Store]:
    with mp.Store.open(tmp_path / "pond", leases=held_in_memory()) as opened:
        yield opened


@pytest.fixture
def frame(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame([tuple(row.values()) for row in ROWS], COLUMNS)


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> DataFrame:
    """A streaming frame over a folder with one file."""
    folder = tmp_path / "queries"
    folder.mkdir()
    (folder / "1.json").write_bytes(b"\n".join(map(orjson.dumps, ROWS)))
    return spark.readStream.schema(COLUMNS).json(str(folder))


def run(pipeline: mp.Pipeline, store: mp.Store, queries: Any, **options: Any) -> mp.RunSummary:
    runner = mp.SparkRunner(store, progress=False, intervals=1, upkeep=None)
    return runner.run(pipeline, {"queries": queries}, **options)


@pytest.mark.mistake("frame-without-column")
def test_frame_without_the_key_column(
    told: Told, spark: SparkSession, store: mp.Store, frame: DataFrame
) -> None:
    with told.by_error("query", "'querys'"):
        run(counting(), store, frame.withColumnRenamed("query", "querys"))


@pytest.mark.mistake("frame-with-a-dot")
def test_column_with_a_dot_in_its_name(
    told: Told, spark: SparkSession, store: mp.Store, frame: DataFrame
) -> None:
    """Spark reads the dot as access to a struct's field."""
    with told.by_error("user.name"):
        run(counting(), store, frame.withColumnRenamed("n", "user.name"))


@pytest.mark.mistake("frame-of-local-times")
def test_column_of_times_without_a_zone(
    told: Told, spark: SparkSession, store: mp.Store, frame: DataFrame
) -> None:
    local = frame.selectExpr("query", "TIMESTAMP_NTZ'2024-05-01 12:00:00' AS at")

    with told.by_error("column=`at`", "timestamp_ntz"):
        run(counting(), store, local)


@pytest.mark.mistake("rows-for-a-frame")
def test_rows_in_place_of_a_frame(told: Told, spark: SparkSession, store: mp.Store) -> None:
    with told.by_error("queries", "list"):
        run(counting(), store, ROWS)


@pytest.mark.mistake("stream-for-rows")
def test_streaming_frame_on_the_local_runner(
    told: Told, spark: SparkSession, store: mp.Store, stream: DataFrame
) -> None:
    with told.by_error("DataFrame"):
        mp.LocalRunner(store, progress=False).run(counting(), {"queries": stream})


@pytest.mark.mistake("spark-connect")
def test_frame_of_spark_connect(told: Told, spark: SparkSession, store: mp.Store) -> None:
    """Its dependencies are not locked, so a class with its module's name replaces it."""
    connected = type("DataFrame", (), {"__module__": "pyspark.sql.connect.dataframe", "isStreaming": True})

    with told.by_error("pyspark.sql.connect.dataframe.DataFrame", "queries"):
        run(counting(), store, connected())


@pytest.mark.mistake("bounded-frame-for-a-stream")
def test_bounded_frame_for_a_stateful_processor(
    told: Told, spark: SparkSession, store: mp.Store, frame: DataFrame
) -> None:
    """Spark's own operator runs on streams only."""
    with told.by_error("query"):
        mp.transform_with_state(frame, keys="query", processor=None, output_schema=COLUMNS, store=store)  # type: ignore[arg-type]


@pytest.mark.mistake("event-time-without-watermark")
def test_event_time_without_a_watermark(
    told: Told, spark: SparkSession, store: mp.Store, stream: DataFrame
) -> None:
    """Only ``withWatermark`` names the column of event time."""
    with told.by_error("query", "withWatermark"):
        mp.transform_with_state(
            stream,
            keys="query",
            processor=None,  # type: ignore[arg-type]
            output_schema=COLUMNS,
            time_mode="EventTime",
            store=store,
        )


@pytest.mark.mistake("keys-of-no-column")
def test_missing_keys_of_a_frame(told: Told, spark: SparkSession, store: mp.Store, stream: DataFrame) -> None:
    with told.by_error("quer", "'query'"):
        mp.transform_with_state(stream, keys="quer", processor=None, output_schema=COLUMNS, store=store)  # type: ignore[arg-type]


@pytest.mark.mistake("batch-function-by-hand")
def test_batch_function_called_without_a_query(
    told: Told, spark: SparkSession, tmp_path: Path, frame: DataFrame
) -> None:
    """The query of a batch decides whether it was consumed before."""
    function = counting().foreach_batch(tmp_path / "unmade", into="queries")

    with told.by_error("queries"):
        function(frame, 0)


@pytest.mark.mistake("batch-function-of-no-stream")
def test_batch_function_of_an_unknown_stream(told: Told, spark: SparkSession, tmp_path: Path) -> None:
    with told.by_error("searches", "querys", "'queries'"):
        counting().foreach_batch(tmp_path / "unmade", into="querys")


@pytest.mark.mistake("bounded-frame-grown")
def test_grown_bounded_frame(told: Told, spark: SparkSession, store: mp.Store, frame: DataFrame) -> None:
    """Its new rows cannot be distinguished from the old ones."""
    run(counting(), store, frame, finish=False)

    with told.by_error("queries", "rows=`4`", "consumed=`2`"):
        run(counting(), store, frame.union(frame), finish=False)


@pytest.mark.mistake("checkpoint-deleted")
def test_deleted_checkpoint(told: Told, spark: SparkSession, store: mp.Store, stream: DataFrame) -> None:
    """Spark would deliver all input again."""
    run(counting(), store, stream, finish=False)
    shutil.rmtree(Path(store.path) / "checkpoints")

    with told.by_error("queries", "known="):
        run(counting(), store, stream, finish=False)


@pytest.mark.mistake("checkpoint-of-two-drivers")
def test_entry_of_the_last_batch_that_another_driver_has_overwritten(
    told: Told, spark: SparkSession, store: mp.Store, stream: DataFrame, tmp_path: Path
) -> None:
    """Spark would continue behind records that the store has not consumed."""
    run(counting(), store, stream, finish=False)
    for number in (2, 3):
        (tmp_path / f"queries/{number}.json").write_bytes(b"\n".join(map(orjson.dumps, ROWS)))
    # The entry has the first file's time of change.
    shutil.copystat(tmp_path / "queries/1.json", tmp_path / "queries/2.json")
    checkpoint = Path(store.path) / "checkpoints/queries"
    note = (checkpoint / "sources/0/0").read_text()
    (checkpoint / "sources/0/1").write_text(note.replace("1.json", "2.json").replace(":0}", ":1}"))
    entry = checkpoint / "offsets/0"
    entry.write_text(entry.read_text().replace('{"logOffset":0}', '{"logOffset":1}'))
    entry.with_name(".0.crc").unlink()

    with told.by_error("queries", "batch=`0`", '{"logOffset":1}', '{"logOffset":0}'):
        run(counting(), store, stream, finish=False)


@pytest.mark.mistake("session-without-s3a")
def test_session_that_cannot_reach_the_checkpoints(
    told: Told, spark: SparkSession, store: mp.Store, stream: DataFrame
) -> None:
    """Otherwise Spark answers with a hundred lines of Java."""
    runner = mp.SparkRunner(store, progress=False, upkeep=None, checkpoint_location="s3://bucket/checkpoints")

    with told.by_error("s3://bucket/checkpoints", "S3AFileSystem"):
        runner.start(counting(), {"queries": stream})
    assert store.committer.refresh().version == 0, "no lease was taken"


@pytest.mark.mistake("checkpoints-among-rows")
def test_checkpoints_among_the_files_of_the_store(told: Told, store: mp.Store) -> None:
    """Garbage collection would delete them, or find foreign files."""
    with told.by_error("rows/checkpoints", store.path):
        mp.SparkRunner(store, checkpoint_location=f"{store.path}/rows/checkpoints")


@pytest.mark.mistake("code-raises-on-spark")
def test_code_that_fails_in_a_worker(
    told: Told, spark: SparkSession, store: mp.Store, frame: DataFrame
) -> None:
    """The error must not be hidden in a trace of the JVM."""

    def fails(context: mp.Context, record: mp.Record) -> None:
        raise KeyError("user")

    pipeline = mp.Pipeline("searches")
    pipeline.inject("queries", key="query", at="at").apply(Does(fails), name="counter", on_error="stop")

    with told.by_error("counter", "queries", "KeyError: 'user'"):
        run(pipeline, store, frame)


@pytest.mark.mistake("module-not-there-for-workers")
def test_module_missing_on_workers(
    told: Told, spark: SparkSession, store: mp.Store, frame: DataFrame, tmp_path: Path
) -> None:
    """Code in modules is pickled by name."""
    (tmp_path / f"{MODULE}.py").write_text(
        "import millpond as mp\n\n\nclass Counter(mp.Computation):\n    pass\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        counter = __import__(MODULE).Counter
        pipeline = mp.Pipeline("searches")
        pipeline.inject("queries", key="query", at="at").apply(counter(), name="counter")
        with told.by_error(MODULE):
            run(pipeline, store, frame)
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop(MODULE, None)


@pytest.mark.mistake("workers-of-another-python")
def test_workers_without_their_python(
    told: Told, spark: SparkSession, store: mp.Store, frame: DataFrame
) -> None:
    """A session records ``PYSPARK_PYTHON`` as its workers' program."""
    context: Any = spark.sparkContext
    python, context.pythonExec = context.pythonExec, "/nowhere/bin/python3"
    try:
        with told.by_error("PYSPARK_PYTHON", "/nowhere/bin/python3"):
            run(counting(), store, frame)
    finally:
        context.pythonExec = python

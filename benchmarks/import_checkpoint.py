"""The import of a Spark query with a million keys and a timer each: time, memory, and proof that nothing is lost.

    python -m benchmarks.import_checkpoint --keys 1000000 --json build/bench/import_checkpoint.json

Spark runs ``transformWithState`` over the first half of the files and stops. The import reads its checkpoint. The
resulting rows are compared with Spark's state data source, value by value and timer by timer. Then
Millpond runs over the other half, and all counts and fired timers are compared with the files.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Row
from pyspark.sql import functions as F  # noqa: N812 - the name that every Spark user knows
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from rich.console import Console

import millpond as mp
from benchmarks.transform_with_state import best_settings, start
from examples.quiet_spark import quiet_spark
from millpond.statestore.system import SystemClock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FILES: Final = 4
_OUTPUT: Final = "key long, count long, fired long"
_HOUR_MS: Final = 3_600_000
_BEGIN_US: Final = 1_700_000_000_000_000


class CountWithTimer(StatefulProcessor):
    """Counts the rows of each key, and sets one timer with the first."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """A number and a list."""
        self._handle = handle
        self._count = handle.getValueState("count", "count long")
        self._first = handle.getListState("first", "at timestamp")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        """One get and one update for all rows of the key."""
        known = self._count.get()
        count = 0 if known is None else known[0]
        for row in rows:
            if not count:
                self._first.appendValue((row.at,))
                self._handle.registerTimer(int(row.at.timestamp() * 1_000) + _HOUR_MS)
            count += 1
        self._count.update((count,))
        yield Row(key=key[0], count=count, fired=0)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        """Tell when it was."""
        yield Row(key=key[0], count=0, fired=expiredTimerInfo.getExpiryTimeInMs())


@click.command(help=__doc__)
@click.option("--keys", default=1_000_000, show_default=True)
@click.option(
    "--json", "path", type=click.Path(path_type=Path), default=Path("build/bench/import_checkpoint.json")
)
@click.option("--master", default="local[2]", show_default=True, help="Where Spark runs.")
def main(keys: int, path: Path, master: str) -> None:
    """Move the query, compare, write the JSON."""
    console = Console()
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"spark.driver.memory": "4g"}
    spark = quiet_spark("millpond-import", master=master, log=path.parent / "spark.log", options=options)
    try:
        with tempfile.TemporaryDirectory(prefix="millpond-import-") as name:
            report = _moved(spark, Path(name), keys, console)
    finally:
        spark.stop()
    path.write_text(f"{json.dumps(report, indent=2)}\n", encoding="utf-8")
    console.print_json(data=report)
    if report["differences"]:
        raise SystemExit(1)


def _moved(spark: SparkSession, folder: Path, keys: int, console: Console) -> dict[str, Any]:
    inputs = folder / "in"
    inputs.mkdir()
    for number in range(_FILES // 2):
        _write(inputs, number, keys)
    console.print(f"Spark: {keys:,} keys, {_FILES // 2} rows each …")
    spark_s = _timed(lambda: _in_spark(spark, folder))
    console.print("import …")
    found: list[mp.spark.ImportedCheckpoint] = []
    import_s = _timed(
        lambda: found.append(
            mp.import_checkpoint(
                folder / "checkpoint", computation="counts", into=folder / "pond", spark=spark
            )
        )
    )
    moved = found[0]
    console.print("comparing with Spark's state data source …")
    differences = _state_differences(spark, folder)
    for number in range(_FILES // 2, _FILES):
        _write(inputs, number, keys)
    # A row a day later lets all timers fire.
    late = pa.table({"key": [-1], "at": pa.array([_BEGIN_US + 86_400_000_000], pa.timestamp("us", "UTC"))})
    pq.write_table(late, inputs / f"{_FILES:04d}.parquet")
    console.print("Millpond …")
    resume_s = _timed(lambda: _in_millpond(spark, folder))
    differences |= _output_differences(spark, folder, keys)
    return {
        "keys": moved.rows,
        "timers": moved.timers,
        "spark_s": round(spark_s, 2),
        "import_s": round(import_s, 2),
        "keys_per_second": round(moved.rows / import_s),
        "resume_s": round(resume_s, 2),
        "differences": {name: count for name, count in differences.items() if count},
    }


def _write(inputs: Path, number: int, keys: int) -> None:
    rng = np.random.default_rng(number)
    at = _BEGIN_US + number * 1_000_000 + rng.integers(0, 1_000, keys) * 1_000
    table = pa.table({"key": rng.permutation(keys), "at": pa.array(at, pa.timestamp("us", "UTC"))})
    pq.write_table(table, inputs / f"{number:04d}.parquet")


def _frame(spark: SparkSession, folder: Path) -> DataFrame:
    reader = spark.readStream.schema("key long, at timestamp").option("maxFilesPerTrigger", 1)
    return reader.parquet(str(folder / "in")).withWatermark("at", "10 seconds")


def _in_spark(spark: SparkSession, folder: Path) -> None:
    with best_settings(spark):
        grouped = _frame(spark, folder).groupBy("key")
        output = grouped.transformWithState(CountWithTimer(), _OUTPUT, "Update", "EventTime")
        start(output, folder / "checkpoint", availableNow=True).awaitTermination()


def _in_millpond(spark: SparkSession, folder: Path) -> None:
    run = mp.transform_with_state(
        _frame(spark, folder),
        keys="key",
        processor=CountWithTimer(),
        output_schema=_OUTPUT,
        time_mode="EventTime",
        name="counts",
        store=folder / "pond",
        sink=folder / "out",
        trigger={"availableNow": True},
        spark=spark,
        progress=False,
    )
    run.await_termination()
    run.stop()


def _state_differences(spark: SparkSession, folder: Path) -> dict[str, int]:
    """Return the number of keys or timers that differ between the store and Spark's state data source."""

    def theirs(**options: Any) -> DataFrame:
        reader = spark.read.format("statestore").options(**options)
        return reader.load(str(folder / "checkpoint"))

    counts = theirs(stateVarName="count").selectExpr("key.key", "value.count")
    firsts = theirs(stateVarName="first").selectExpr("key.key", "unix_millis(list_element.at) AS first")
    timers = theirs(readRegisteredTimers=True).selectExpr("key.key", "expiration_timestamp_ms AS timer")
    expected = counts.join(firsts, "key", "full").join(timers, "key", "full")
    with mp.Store.open(folder / "pond", read_only=True) as store:
        rows = store.rows_view("counts").to_arrow()
    table = folder / "rows.parquet"
    times = pa.chunked_array(
        [chunk.flatten().field("at").cast(pa.int64()) for chunk in rows.column("timers").chunks]
    )
    pq.write_table(
        pa.table({"key": rows.column("key"), "state": rows.column("state"), "timer": times}), table
    )
    found = (
        spark.read.parquet(str(table))
        .selectExpr(
            "CAST(substring(key, 3) AS LONG) AS number",
            "key AS text",
            "CAST(get_json_object(state, '$.count.count') AS LONG) AS count",
            "unix_millis(CAST(get_json_object(state, '$.first[0].at') AS TIMESTAMP)) AS first",
            "timer DIV 1000 AS timer",
        )
        .selectExpr("number AS key", "count", "first", "timer")
    )
    columns = ["key", "count", "first", "timer"]
    return {
        "missing rows": expected.select(columns).exceptAll(found.select(columns)).count(),
        "other rows": found.select(columns).exceptAll(expected.select(columns)).count(),
    }


def _output_differences(spark: SparkSession, folder: Path, keys: int) -> dict[str, int]:
    """How many keys have another count than rows in all files, and how many timers did not fire once at their time."""
    rows = spark.read.parquet(str(folder / "in")).where("key >= 0")
    output = spark.read.format("delta").load(str(folder / "out")).where("key >= 0")
    last = output.where("fired = 0").groupBy("key").agg(F.max("count").alias("count"))
    counted = rows.groupBy("key").agg(F.count("*").alias("count"))
    first_file = spark.read.parquet(str(folder / "in" / "0000.parquet"))
    due = first_file.selectExpr("key", f"unix_millis(at) + {_HOUR_MS} AS fired")
    fired = output.where("fired > 0").select("key", "fired")
    return {
        "counts": counted.exceptAll(last).count() + last.exceptAll(counted).count(),
        "timers that did not fire": due.exceptAll(fired).count(),
        "timers that fired otherwise": fired.exceptAll(due).count(),
        "outputs": abs(output.where("fired = 0").count() - keys * (_FILES - _FILES // 2)),
    }


def _timed(work: Callable[[], object]) -> float:
    clock = SystemClock()
    started = clock.monotonic_us()
    work()
    return (clock.monotonic_us() - started) / 1e6


if __name__ == "__main__":
    main()

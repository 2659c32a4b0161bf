"""A processor written for Spark, on Spark's operator and on Millpond, over the same files in one session.

    python -m benchmarks.drop_in --json build/bench/drop_in.json

Each reads all rows of a key in a micro-batch, gets and updates one number, and yields one row. A function for
``applyInPandasWithState`` does the same, and once more in Arrow, for which Spark has only that operator of pandas to
compare with. Spark's output is thrown away (``noop``); Millpond's is kept in the store, as all productions are. Spark's
operator has RocksDB with a change log, and as many partitions as cores, as in `benchmarks.transform_with_state`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import pandas as pd
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from rich.console import Console
from rich.table import Table

import millpond as mp
from benchmarks.batches import COLUMNS, Load, write_batches
from benchmarks.engine_result import EngineResult, batch_times
from benchmarks.transform_with_state import best_settings, run_to_end
from examples.quiet_spark import quiet_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# By the eighth batch the JVM has compiled what either engine runs.
LOAD: Final = Load(rows_per_batch=50_000, keys_per_batch=10_000, batches=8, warm_up=8)
WARM_UP: Final = Load(rows_per_batch=20_000, keys_per_batch=4_000, batches=4, warm_up=0)
GOALS: Final = {"row": 4, "pandas": 10}
"""The required ratio of Millpond's rate to that of Spark's operator, by what rows are given as."""

GROUPS: Final = ("pandas groups", "arrow groups")
"""What has a ``GroupState``."""

_OUTPUT: Final = "key string, count long"
_STATE: Final = "count long"


class RowCounter(StatefulProcessor):
    """Counts the rows of each key, row by row."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """One number per key."""
        self._count = handle.getValueState("count", "count long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        """One get and one update for all rows of the key."""
        known = self._count.get()
        count = 0 if known is None else known[0]
        for row in rows:
            count += row.id is not None
        self._count.update((count,))
        yield Row(key=key[0], count=count)


class PandasCounter(RowCounter):
    """Counts the rows of each key, frame by frame."""

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any
    ) -> Iterator[pd.DataFrame]:  # type: ignore[override]
        """One get and one update for all rows of the key."""
        known = self._count.get()
        count = 0 if known is None else known[0]
        for frame in rows:
            count += int(frame["id"].count())
        self._count.update((count,))
        yield pd.DataFrame({"key": [key[0]], "count": [count]})


def count_frames(key: Any, frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Count the rows of a key, frame by frame."""
    known = state.getOption
    count = (0 if known is None else known[0]) + sum(int(frame["id"].count()) for frame in frames)
    state.update((count,))
    yield pd.DataFrame({"key": [key[0]], "count": [count]})


def count_batches(key: Any, batches: Iterator[pa.RecordBatch], state: GroupState) -> Iterator[pa.RecordBatch]:
    """Count the rows of a key by Arrow."""
    known = state.getOption
    count = 0 if known is None else known[0]
    for batch in batches:
        ids = batch.column("id")
        count += len(ids) - ids.null_count
    state.update((count,))
    yield pa.record_batch({"key": [key[0]], "count": [count]})


@click.command(help=__doc__)
@click.option("--json", "path", type=click.Path(path_type=Path), default=Path("build/bench/drop_in.json"))
@click.option("--master", default="local[2]", show_default=True, help="Where Spark runs.")
def main(path: Path, master: str) -> None:
    """Measure, write the JSON, print a table."""
    console = Console()
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"spark.driver.memory": "3g"}
    spark = quiet_spark("millpond-drop-in", master=master, log=path.parent / "spark.log", options=options)
    report = {}
    try:
        for rows_as in ("row", "pandas", *GROUPS):
            _side_by_side(spark, rows_as, WARM_UP)
            console.print(
                f"rows as {rows_as}: {LOAD.rows_per_batch:,} over {LOAD.keys_per_batch:,} keys a batch …"
            )
            report[rows_as] = _side_by_side(spark, rows_as, LOAD)
    finally:
        spark.stop()
    table = Table("rows as", "Spark's operator, rows/s", "Millpond, rows/s", "ratio", "goal")
    ratios = {}
    for rows_as, (theirs, ours) in report.items():
        ratio = round(ours.records_per_second / theirs.records_per_second, 2)
        goal = GOALS.get(rows_as)
        ratios[rows_as] = {"ratio": ratio, "goal": goal}
        rates = [f"{one.records_per_second:,.0f}" for one in (theirs, ours)]
        table.add_row(rows_as, *rates, str(ratio), "" if goal is None else str(goal))
    results = [one.to_json() for pair in report.values() for one in pair]
    path.write_text(f"{json.dumps({'results': results, 'ratios': ratios}, indent=2)}\n", encoding="utf-8")
    console.print(table, f"Every raw time is in {path}.")


def _side_by_side(spark: SparkSession, rows_as: str, load: Load) -> tuple[EngineResult, EngineResult]:
    """Run both engines over the same files."""
    with tempfile.TemporaryDirectory(prefix="millpond-drop-in-") as name:
        inputs = write_batches(Path(name, "inputs"), load)
        return (
            _on_spark(spark, Path(name, "checkpoint"), rows_as, load, inputs),
            _on_millpond(spark, Path(name, "pond"), rows_as, load, inputs),
        )


def _on_spark(spark: SparkSession, checkpoint: Path, rows_as: str, load: Load, inputs: Path) -> EngineResult:
    with best_settings(spark):
        frame = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).parquet(str(inputs))
        grouped = frame.groupBy("key")
        if rows_as in GROUPS:
            timeout = GroupStateTimeout.NoTimeout
            output = grouped.applyInPandasWithState(count_frames, _OUTPUT, _STATE, "Update", timeout)
        else:
            operator = grouped.transformWithState if rows_as == "row" else grouped.transformWithStateInPandas
            processor = RowCounter() if rows_as == "row" else PandasCounter()
            output = operator(processor, _OUTPUT, "Update", "None")
        times = run_to_end(output, checkpoint)
    return EngineResult(engine=f"spark-{rows_as}", load=load, times=times)


def _on_millpond(spark: SparkSession, store: Path, rows_as: str, load: Load, inputs: Path) -> EngineResult:
    frame = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).parquet(str(inputs))
    place: dict[str, Any] = {
        "keys": "key",
        "output_schema": _OUTPUT,
        "store": store,
        "trigger": {"availableNow": True},
        "spark": spark,
        "progress": False,
    }
    if rows_as == "pandas groups":
        run = mp.spark.apply_in_pandas_with_state(frame, function=count_frames, state_schema=_STATE, **place)
    elif rows_as == "arrow groups":
        run = mp.spark.apply_in_arrow_with_state(frame, function=count_batches, state_schema=_STATE, **place)
    elif rows_as == "pandas":
        run = mp.transform_with_state(frame, processor=PandasCounter(), rows_as="pandas", **place)
    else:
        run = mp.transform_with_state(frame, processor=RowCounter(), **place)
    run.await_termination()
    times = batch_times(run.queries[0])
    run.stop()
    return EngineResult(engine=f"millpond-{rows_as}", load=load, times=times)


if __name__ == "__main__":
    main()

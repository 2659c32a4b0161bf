"""Spark's other ways to count by key: on frames of pandas, in its older interface, and in its own aggregation.

Each in its best form, as `transform_with_state` has it: RocksDB with a change log, as many partitions as cores, one get
and one update for each key and batch, and nothing emitted but the counts of Spark's own aggregation, which cannot leave
them out. None drops repeated ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.batches import Load
from benchmarks.engine_result import EngineResult
from benchmarks.transform_with_state import CountProcessor, measure_count

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.state import GroupState


class CountFrames(CountProcessor):
    """Counts the records of each key, which come as frames of pandas."""

    def _number(self, rows: Iterator[pd.DataFrame]) -> int:
        return sum(map(len, rows))


def count_in_state(
    key: tuple[str],
    frames: Iterable[pd.DataFrame],
    state: GroupState,
) -> Iterator[pd.DataFrame]:
    """Add the records of a key to its count, for ``applyInPandasWithState``."""
    (count,) = state.get if state.exists else (0,)
    state.update((count + sum(map(len, frames)),))
    return iter(())


def _by_frames(rows: DataFrame) -> DataFrame:
    return rows.groupBy("key").transformWithStateInPandas(
        CountFrames(), outputStructType="key STRING", outputMode="Update", timeMode="None"
    )


def _by_older_interface(rows: DataFrame) -> DataFrame:
    return rows.groupBy("key").applyInPandasWithState(
        count_in_state, "key STRING", "count BIGINT", "update", "NoTimeout"
    )


def _by_spark(rows: DataFrame) -> DataFrame:
    return rows.groupBy("key").count()


COUNTS: Final[Mapping[str, Callable[[DataFrame], DataFrame]]] = {
    "spark-tws-python-pandas": _by_frames,
    "spark-apply-in-pandas": _by_older_interface,
    "spark-native": _by_spark,
}
"""The queries, by engine."""


def _measure(name: str, spark: SparkSession, folder: Path, load: Load, inputs: Path) -> EngineResult:
    return measure_count(name, COUNTS[name], spark, folder, load, inputs)


KEYS_MAX: Final[Mapping[str, int]] = {"spark-tws-python-pandas": 10_000, "spark-apply-in-pandas": 10_000}
"""The keys of a batch that an engine can count in seconds: these make a frame of pandas for each key."""

ENGINES: Final = {name: partial(_measure, name) for name in COUNTS}
"""The engines by name, each of the arguments of `transform_with_state.measure`."""

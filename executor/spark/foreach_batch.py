"""
Embedding: one computation as the ``foreachBatch`` of the user's own streaming query.
"""

from __future__ import annotations

import atexit
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from millpond.executor.computation.computation import Computation
from millpond.executor.event_time.duration import Duration
from millpond.executor.injectors.policy import BoundedDisorder, WatermarkPolicy
from millpond.executor.pipeline.nodes import FieldExtractor
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.sinks.sink import Sink
from millpond.executor.spark.run import SparkRun
from millpond.executor.spark.runner import SparkRunner, SparkRunnerOptions
from millpond.statestore.store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["ForeachBatch", "foreach_batch"]

INPUT = "input"
"""Name of the injected stream of an embedded computation."""


class ForeachBatch:
    """
    A function for ``writeStream.foreachBatch`` that keeps a computation's state in a store.

    The first batch takes the leases; `close`, a failure or the end of the process gives them back.
    After a failure the next batch, of a query that was started again, takes them again.
    """

    def __init__(self, runner: SparkRunner, pipeline: EnginePipeline, *, tick_ms: float) -> None:
        self._runner = runner
        self._pipeline = pipeline
        self._tick_ms = tick_ms
        self._lock = threading.Lock()
        self._run: SparkRun | None = None

    def __call__(self, frame: DataFrame, batch: int) -> None:
        """
        Consume one micro-batch in exactly one superstep and one commit.

        Raises:
            MillpondError: the error that ended the superstep; Spark stops the query.
        """
        run = self._opened()
        try:
            run.on_batch(INPUT)(frame, batch)
        except BaseException:
            self._forget(run)
            run.abandon()
            raise

    def close(self) -> None:
        """
        Give the leases back; everything committed stays.
        """
        with self._lock:
            run = self._run
        if run is not None:
            self._forget(run)
            run.stop()

    def _forget(self, run: SparkRun) -> None:
        with self._lock:
            if self._run is run:
                self._run = None
                atexit.unregister(self.close)

    def _opened(self) -> SparkRun:
        with self._lock:
            if self._run is None:
                self._run = self._runner.open(self._pipeline)
                self._run.start_ticker(self._tick_ms)
                atexit.register(self.close)
            return self._run


def foreach_batch(
    store: Store | str | Path,
    computation: Computation,
    *,
    key: FieldExtractor,
    at: FieldExtractor,
    id: FieldExtractor | None = None,  # noqa: A002 - the word of the paper and of the users
    watermark: WatermarkPolicy = BoundedDisorder("0s"),  # noqa: B008 - frozen
    id_slack: Duration = "3h",
    name: str | None = None,
    sink: Sink | None = None,
    tick_ms: float = 250,
    **runner_options: Unpack[SparkRunnerOptions],
) -> ForeachBatch:
    """
    Embed a computation in the user's own streaming query.

    Args:
        store: path of the store, or an open one.
        computation: what to run for each key.
        key: column (or function of the row) with the key.
        at: column (or function of the row) with the event time.
        id: column (or function of the row) with the record's id; records with the same id count once.
        watermark: how the low watermark follows from the records.
        id_slack: how long a sender may repeat a record; see `Pipeline.inject`.
        name: the computation's name in the store; its class's name otherwise.
        sink: where its productions go, those to the stream with the computation's name.
        tick_ms: how long the query must be silent before due timers fire without a batch.
        runner_options: further options of the `SparkRunner`.

    Example::

        df.writeStream.foreachBatch(
            foreach_batch("pond", SpikeDetector(), key="query", at="time")
        ).option("checkpointLocation", "…").start()
    """
    chosen = name or type(computation).__name__
    pipeline = EnginePipeline(chosen)
    stream = pipeline.inject(INPUT, key=key, at=at, id=id, watermark=watermark, id_slack=id_slack)
    output = stream.apply(computation, name=chosen)
    if sink is not None:
        output.sink(chosen, sink)
    return ForeachBatch(SparkRunner(store, **runner_options), pipeline, tick_ms=tick_ms)

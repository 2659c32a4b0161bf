"""
Embedding: one computation as the ``foreachBatch`` of the user's own streaming query.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack

from millpond.executor.computation.computation import Computation
from millpond.executor.event_time.duration import Duration
from millpond.executor.event_time.time_reading import TimeUnit
from millpond.executor.injectors.ingress_time import IngressTime
from millpond.executor.injectors.policy import WatermarkPolicy
from millpond.executor.pipeline.backfill import Backfill
from millpond.executor.pipeline.key_extractor import KeyField
from millpond.executor.pipeline.nodes import FieldExtractor, OnError, OnLate
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.pipeline.stream import ComputationOptions
from millpond.executor.pipeline.weak import ProductionMode
from millpond.executor.sinks.sink import Sink
from millpond.executor.spark.run import SparkRun
from millpond.executor.spark.runner import SparkRunner, SparkRunnerOptions
from millpond.statestore.errors import InvalidError
from millpond.statestore.store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["ForeachBatch", "ForeachBatchOptions", "foreach_batch"]

_LOG = logging.getLogger("millpond")

INPUT = "input"
"""Name of the injected stream of an embedded computation."""


class ForeachBatch:
    """
    A function for ``writeStream.foreachBatch`` that keeps a computation's state in a store.

    The first batch takes the leases; `close`, a failure or the end of the process gives them back.
    After a failure the next batch, of a query that was started again, takes them again. `close` also
    does the work that is due by then; the end of the process is too late for that.
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
        run = self._opened(frame)
        try:
            run.on_batch(INPUT)(frame, batch)
        except BaseException:
            self._forget(run)
            run.abandon()
            raise

    def close(self) -> None:
        """
        Do all the work that the batches so far have made due, and give the leases back.

        Call it when the query has ended: after an ``availableNow`` query all productions are then
        delivered, all timers that the watermark has passed have fired, and the sink is written.

        Raises:
            MillpondError: what that work has failed with; the leases are released anyway.
        """
        run = self._released()
        if run is None:
            return
        try:
            run.run_until_quiet()
        except BaseException:
            run.abandon()
            raise
        run.stop()

    def _close_at_exit(self) -> None:
        """
        Give the leases back at the end of the process, which is too late for any work.
        """
        run = self._released()
        if run is None:
            return
        if run.has_work():
            _LOG.warning("work is due that the next run will do: call close() when the query has ended")
        run.stop()

    def _released(self) -> SparkRun | None:
        with self._lock:
            run = self._run
        if run is not None:
            self._forget(run)
        return run

    def _forget(self, run: SparkRun) -> None:
        with self._lock:
            if self._run is run:
                self._run = None
                atexit.unregister(self._close_at_exit)

    def _opened(self, frame: DataFrame) -> SparkRun:
        with self._lock:
            if self._run is None:
                # The columns of a batch carry the query's own watermark.
                self._run = self._runner.open(self._pipeline, {INPUT: frame})
                self._run.start_ticker(self._tick_ms)
                atexit.register(self._close_at_exit)
            return self._run


class ForeachBatchOptions(SparkRunnerOptions, total=False):
    """
    The further options of `foreach_batch`: those of `Pipeline.inject`, of a computation, and of the runner.

    `Pipeline.inject`, `ComputationOptions` and `SparkRunner` explain each.
    """

    at_unit: TimeUnit | None
    at_zone: str | None
    change: str | None
    idle_after: Duration | None
    members: Sequence[str]
    member: FieldExtractor | None
    skew_limit: Duration | None
    exactly_once: bool
    on_error: OnError
    retries: int
    on_late: OnLate | Mapping[str, OnLate]
    productions: ProductionMode
    user_code_timeout_ms: float | None
    feedback: Collection[str]
    renamed_from: str | None
    time_sorted: bool
    backfill: Backfill | None


def foreach_batch(
    store: Store | str | Path,
    computation: Computation,
    *,
    key: KeyField,
    at: FieldExtractor | IngressTime,
    id: FieldExtractor | None = None,  # noqa: A002 - the word of the paper and of the users
    watermark: WatermarkPolicy | None = None,
    id_slack: Duration = "3h",
    name: str | None = None,
    produces: str | Sequence[str] | None = None,
    sink: Sink | Mapping[str, Sink] | None = None,
    tick_ms: float = 250,
    pipeline: str | None = None,
    drop: Sequence[str] = (),
    **options: Unpack[ForeachBatchOptions],
) -> ForeachBatch:
    """
    Embed a computation in the user's own streaming query.

    Args:
        store: path of the store, or an open one.
        computation: what to run for each key.
        key: column, list of columns (or function of the row) with the key; see `Pipeline.inject`.
        at: column (or function of the row) with the event time, or `IngressTime`.
        id: column (or function of the row) with the record's id; records with the same id count once.
        watermark: how the low watermark follows from the records; by default the delay of the query's own
            ``withWatermark`` on the column ``at``, and without one they arrive in the order of their times.
        id_slack: how long a sender may repeat a record; see `Pipeline.inject`.
        name: the computation's name in the store; its class's name otherwise.
        produces: the stream or streams that the computation produces to; by default one with its name.
        sink: where its productions go: one sink for the first of its streams, or a mapping of streams to
            sinks. `DEAD_LETTERS` is a stream, too.
        tick_ms: how long the query must be silent before due timers fire without a batch.
        pipeline: under which name the store keeps how far it has consumed the query: the computation's
            when the query was started first. By default ``renamed_from``, or else the computation's name.
            Keep ``renamed_from`` or ``pipeline`` in the code, for the query keeps its first name.
        drop: former computations of this pipeline whose rows are removed; see `Pipeline`.
        options: all other options of `Pipeline.inject`, of the computation and of the `SparkRunner`;
            ``intervals`` is the computation's.

    Raises:
        InvalidError: an option is unknown, or wrong in itself.

    Example::

        df.writeStream.foreachBatch(
            foreach_batch("pond", SpikeDetector(), key="query", at="time", on_error="stop")
        ).option("checkpointLocation", "…").start()
    """
    chosen = name or type(computation).__name__
    of_stream, of_code, of_runner = _sorted_out(options)
    # The store and its sinks know the query by its first name.
    first = pipeline or of_code.get("renamed_from") or chosen
    graph = EnginePipeline(first, drop=drop)
    if watermark is not None:
        of_stream["watermark"] = watermark
    stream = graph.inject(INPUT, key=key, at=at, id=id, id_slack=id_slack, **of_stream)
    output = stream.apply(computation, name=chosen, produces=produces, **of_code)
    sinks = sink if isinstance(sink, Mapping) else {} if sink is None else {output.name: sink}
    for produced, target in sinks.items():
        # A store knows the sink of the first stream by the computation's name.
        graph.add_sink(first if produced == output.name else f"{first}.{produced}", produced, target)
    graph.check()
    return ForeachBatch(SparkRunner(store, **of_runner), graph, tick_ms=tick_ms)


_STREAM_OPTIONS: Final = frozenset(signature(EnginePipeline.inject).parameters)
_CODE_OPTIONS: Final = frozenset(ComputationOptions.__annotations__)


def _sorted_out(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """
    The options of the stream, of the computation and of the runner.
    """
    known = _STREAM_OPTIONS | _CODE_OPTIONS | SparkRunnerOptions.__annotations__.keys()
    for option in options.keys() - known:
        raise InvalidError(
            "no such option", option=option, options=sorted(ForeachBatchOptions.__annotations__)
        )
    of_stream = {name: value for name, value in options.items() if name in _STREAM_OPTIONS}
    of_code = {name: value for name, value in options.items() if name in _CODE_OPTIONS}
    rest = {name: value for name, value in options.items() if name not in of_stream and name not in of_code}
    return of_stream, of_code, rest

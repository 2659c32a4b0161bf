"""The Spark runner: runs a pipeline on Spark over a store (architecture §5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millpond.executor.maintenance.policy import CompactionWorkers, UpkeepPolicy
from millpond.executor.ownership.balancer import BalancePolicy
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.run.options import RunnerOptions, SparkRunnerOptions
from millpond.executor.run.run import RunSummary
from millpond.executor.spark.bounded import consume_frames
from millpond.executor.spark.compactions import SparkCompactions
from millpond.executor.spark.engine import SparkEngine
from millpond.executor.spark.frames import InputFrames, checkpoint_path
from millpond.executor.spark.queries import refuse_changed_files
from millpond.executor.spark.run import SparkRun
from millpond.executor.spark.session import (
    check_reach,
    check_session,
    is_one_machine,
    refuse_connect,
    spark_calls,
    spark_session,
    worker_calls,
)
from millpond.statestore.arguments import check_flags
from millpond.statestore.history.lineage import local_folder
from millpond.statestore.objects.local import LocalObjects
from millpond.statestore.store import Store

_UPKEEP = UpkeepPolicy()
_BALANCE = BalancePolicy()


class SparkRunner:
    """Runs pipelines on Spark; all state is in the store, so any process may continue a pipeline.

    Args:
        store: path of the store, created if it does not exist, or an open `Store`, which stays open.
        options: see `SparkRunnerOptions`.

    Raises:
        InvalidError: an option is unknown or out of its range.

    Example::

        runner = SparkRunner("pond")
        runner.run(pipeline, {"queries": df})                        # to the end of the input
        runner.run(pipeline, {"queries": stream}, finish=False)     # the input of now; more will follow
        run = runner.start(pipeline, {"queries": stream})            # until run.stop()
    """

    def __init__(self, store: Store | str | Path, **options: Unpack[SparkRunnerOptions]) -> None:
        known = SparkRunnerOptions.__annotations__
        self._options = RunnerOptions.given(store, options, known, upkeep=_UPKEEP, balance=_BALANCE)
        refuse_connect(self._options.spark)

    def run(
        self, pipeline: EnginePipeline, inputs: Mapping[str, DataFrame], *, finish: bool = True
    ) -> RunSummary:
        """Consume the inputs to their end, then fire every timer in event time.

        A streaming DataFrame is consumed up to the data of now (``availableNow``). A bounded DataFrame is
        one superstep; with ``finish`` a large one is consumed in pieces, in the order of event time, so that
        windows close on the way and no record is late. Records of a later run are refused, because windows are closed. To resume a run
        that was killed, run it again.

        With ``finish=False`` more input will follow: the run does all the work that its input has made
        due, and leaves the watermarks to their policies. A later run continues with the new data of its
        streams. Spark reads a file only once, so a run is refused if a consumed file of this machine has changed
        since. A bounded DataFrame is consumed once, and refused if it has changed since; next to
        streams it is complete and ends, as in `start`, so that it does not hold back their watermark.

        Args:
            pipeline: the pipeline.
            inputs: a DataFrame per injected stream.
            finish: the inputs end with their present data.

        Returns:
            Counts, the streams that have ended, and by stream the reason why nothing was read.

        Raises:
            InvalidError: pipeline, inputs or checkpoint do not fit, a bounded input has changed, there are new
                records although an earlier run has ended the input, or more records became dead letters than
                ``dead_letter_limit`` allows.
            FencedError: another process has taken over.
            UnavailableError: ZooKeeper or the object store cannot be reached, or Spark's JVM has ended.
            DataError: bytes of the store are missing or wrong.
        """
        check_flags(finish=finish)
        with self.open(pipeline, inputs) as run:
            run.expect_bounded_input()
            streams = [stream for stream, frame in inputs.items() if frame.isStreaming]
            for stream in streams:
                self._refuse_changed_files(stream)
            in_steps = finish and not streams and run.topology.has_feedback
            consume_frames(run, inputs, finish=finish or bool(streams), in_steps=in_steps)
            self._start_queries(run, inputs, trigger={"availableNow": True})
            run.await_termination()
            if finish:
                run.finish_inputs()
                run.note_end()
            return run.stop()

    def start(
        self,
        pipeline: EnginePipeline,
        inputs: Mapping[str, DataFrame],
        *,
        trigger: Mapping[str, Any] | None = None,
    ) -> SparkRun:
        """Start a run that consumes the inputs until it is stopped.

        With ``trigger={"availableNow": True}`` it consumes the present data; `SparkRun.await_termination`
        returns when all the work that the data has made due is done.

        Args:
            pipeline: the pipeline.
            inputs: a DataFrame per injected stream; bounded DataFrames are consumed, and end, before this returns.
            trigger: arguments of Spark's ``DataStreamWriter.trigger``; ``None`` takes each batch as soon as
                the one before it is done.

        Returns:
            The running pipeline: ``await_termination``, ``summary``, ``stop``.

        Raises:
            InvalidError: pipeline, inputs or checkpoint do not fit.
            ConflictError: another process holds the pipeline and ``on_held`` is ``refuse``, or another
                query writes the same checkpoint.
            FencedError: another process has taken the pipeline in the meantime.
            UnavailableError: ZooKeeper or the object store cannot be reached, or Spark's JVM has ended.
        """
        run = self.open(pipeline, inputs)
        try:
            consume_frames(run, inputs, finish=True)
            self._start_queries(run, inputs, trigger=trigger or {})
            run.start_ticker()
        except BaseException:
            run.abandon()
            raise
        return run

    def open(self, pipeline: EnginePipeline, inputs: Mapping[str, DataFrame] | None = None) -> SparkRun:
        """Check the pipeline, open the store and take the leases; the caller feeds the run itself.

        Backfills are complete once this returns.

        Raises:
            InvalidError: pipeline or inputs do not fit, or the workers cannot import a module of the code.
        """
        with spark_calls(), worker_calls():
            topology = pipeline.check(inputs)
            spark = self._options.spark or self._session(pipeline.name)
            check_session(spark)
            frames = InputFrames(spark, inputs or {})
            topology = frames.fit(topology)
            intervals = self._options.intervals or max(1, spark.sparkContext.defaultParallelism)
            options = replace(self._options, intervals=intervals)
            workers = self._compaction_workers(spark.sparkContext)

            def start(store: Store, release: Callable[[], None]) -> SparkRun:
                if any(frame.isStreaming for frame in (inputs or {}).values()):
                    check_reach(spark, options.checkpoints)
                coordinator = options.open_coordinator(store, topology, compaction_workers=workers)
                engine = SparkEngine(spark, coordinator, options)
                return SparkRun(engine, coordinator, options, release=release, frames=frames)

            run = options.open_run(start)
        try:
            run.backfill(inputs or {})
        except BaseException:
            run.abandon()
            raise
        return run

    def checkpoint(self, stream: str) -> str:
        """Return the location of the checkpoint of a stream's query."""
        return checkpoint_path(self._options.checkpoints, stream)

    def _refuse_changed_files(self, stream: str) -> None:
        folder = local_folder(self.checkpoint(stream))
        if folder is not None and folder.is_dir():
            refuse_changed_files(stream, LocalObjects(folder, "os_cache"))

    def _session(self, name: str) -> SparkSession:
        options = self._options
        storage_options = options.storage_options
        if isinstance(options.store, Store):
            storage_options = options.store.storage_options
        return spark_session(name, store=options.place, storage_options=storage_options)

    def _compaction_workers(self, context: SparkContext) -> CompactionWorkers | None:
        """Return the maker of compaction jobs; ``None`` on one machine, where they would take the supersteps' slots."""
        upkeep, rng = self._options.upkeep, self._options.rng
        place = "thread" if upkeep is None else upkeep.place
        if place in {"process", "thread"} or (place == "auto" and is_one_machine(context.master or "local")):
            return None
        return lambda name, at_once: SparkCompactions(context, tag=f"{name}-{rng.token()}", at_once=at_once)

    def _start_queries(
        self, run: SparkRun, inputs: Mapping[str, DataFrame], trigger: Mapping[str, Any]
    ) -> None:
        folder = local_folder(self._options.checkpoints)
        if folder is not None:
            # Spark would write through a link.
            LocalObjects(folder, "os_cache").refuse_links()
        starts = {
            stream: partial(self._start_query, run, stream, frame, trigger)
            for stream, frame in inputs.items()
            if frame.isStreaming
        }
        is_bounded = bool({"availableNow", "once"} & trigger.keys())
        run.start_queries(starts, is_bounded=is_bounded)

    def _start_query(
        self, run: SparkRun, stream: str, frame: DataFrame, trigger: Mapping[str, Any]
    ) -> StreamingQuery:
        writer = (
            frame.writeStream.queryName(f"millpond-{stream}")
            .foreachBatch(run.on_batch(stream))
            .option("checkpointLocation", self.checkpoint(stream))
        )
        if trigger:
            writer = writer.trigger(**trigger)
        return writer.start()

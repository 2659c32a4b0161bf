"""The Spark runner: runs a pipeline on Spark over a store (architecture §5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from millpond.executor.maintenance.policy import CompactionWorkers, UpkeepPolicy
from millpond.executor.ownership.balancer import BalancePolicy
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.pipeline.topology import Topology
from millpond.executor.run.options import TICK, RunnerOptions
from millpond.executor.run.run import RunSummary
from millpond.executor.spark.compactions import SparkCompactions
from millpond.executor.spark.engine import SparkEngine
from millpond.executor.spark.frames import InputFrames, checkpoint_path
from millpond.executor.spark.run import SparkRun
from millpond.executor.spark.session import (
    check_session,
    is_one_machine,
    refuse_connect,
    spark_calls,
    spark_session,
    worker_calls,
)
from millpond.executor.superstep.dead_letters import DeadLetterLimit
from millpond.statestore.durations import accepts_old_durations
from millpond.statestore.history.lineage import local_folder, place_of
from millpond.statestore.leases.lease import OnHeld
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity
from millpond.statestore.objects.local import LocalObjects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Clock, Durability, Rng

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_UPKEEP = UpkeepPolicy()
_BALANCE = BalancePolicy()
_DEAD_LETTER_LIMIT = DeadLetterLimit()


class SparkRunnerOptions(TypedDict, total=False):
    """The options of `SparkRunner` except its store; `SparkRunner` explains each."""

    spark: SparkSession | None
    zookeeper: str | None
    zookeeper_security: ZooKeeperSecurity | None
    storage_options: Mapping[str, str] | None
    durability: Durability | None
    intervals: int | None
    cache_mib: int
    disk_mib: int | None
    disk_folder: str | Path | None
    on_held: OnHeld
    accept_ended: bool
    pause_timeout: str | timedelta
    accept_checkpoint: bool
    upkeep: UpkeepPolicy | None
    balance: BalancePolicy | None
    progress: bool
    dead_letter_limit: DeadLetterLimit | None
    clock: Clock | None
    rng: Rng | None


class SparkRunner:
    """Runs pipelines on Spark; all state is in the store, so any process may continue a pipeline.

    Args:
        store: path of the store, created if it does not exist, or an open `Store`, which stays open.
        spark: the session; ``None`` takes the active session or creates one.
        zookeeper: ``host:port,…`` of an ensemble; ``None`` runs one server next to the store.
        zookeeper_security: TLS and credentials for the ensemble; by default from the environment.
        storage_options: credentials and endpoints of an object store; see `Store.open`.
        durability: what commits to a local folder survive: ``"disk"`` a power cut; ``"os_cache"``, the default,
            the end of a process, but **no power cut**. See `Store.open`.
        intervals: number of key intervals into which a computation is divided at its first input, unless
            it declares a number; ``None`` takes Spark's default parallelism.
        cache_mib: soft-state budget of a worker process, for all its intervals, in MiB.
        disk_mib: disk budget of each machine for row files of an object store, for all its workers, in MiB; 0 for
            none. ``None`` takes 8 GiB, or a tenth of the free space, and nothing for a store in a local folder.
        disk_folder: folder for these files on each machine; ``None`` takes ``millpond-UID`` in its temporary folder.
            No other user may write to it.
        tick: silence of the input after which undelivered work runs without it.
        on_held: reaction to another process that holds the pipeline: ``take`` it over (the next commit
            of the other process fails), ``wait`` as a standby, or ``refuse``.
        pause_timeout: longest wait for ZooKeeper or the object store to come back.
        accept_checkpoint: continue with a streaming checkpoint that is unknown to this store.
        accept_ended: accept records of a stream whose input an earlier run has ended, as late records.
        upkeep: when the store is compacted and its garbage collected; ``None`` leaves that to
            ``millpond gc``.
        balance: when key intervals are split and merged by their load; ``None`` leaves that to
            ``millpond intervals``.
        progress: show a progress line in a terminal and log every superstep.
        dead_letter_limit: share of records that may become dead letters before the run stops; ``None``
            accepts all, as ``on_error="dead_letter"`` alone would.
        clock: source of time.
        rng: source of file names.

    Raises:
        InvalidError: an option is out of its range.

    Example::

        runner = SparkRunner("pond")
        runner.run(pipeline, {"queries": df})                        # to the end of the input
        runner.run(pipeline, {"queries": stream}, finish=False)     # the input of now; more will follow
        run = runner.start(pipeline, {"queries": stream})            # until run.stop()
    """

    @accepts_old_durations
    def __init__(
        self,
        store: Store | str | Path,
        *,
        spark: SparkSession | None = None,
        zookeeper: str | None = None,
        zookeeper_security: ZooKeeperSecurity | None = None,
        storage_options: Mapping[str, str] | None = None,
        durability: Durability | None = None,
        intervals: int | None = None,
        cache_mib: int = 512,
        disk_mib: int | None = None,
        disk_folder: str | Path | None = None,
        tick: str | timedelta = TICK,
        on_held: OnHeld = "take",
        pause_timeout: str | timedelta = "5m",
        accept_checkpoint: bool = False,
        accept_ended: bool = False,
        upkeep: UpkeepPolicy | None = _UPKEEP,
        balance: BalancePolicy | None = _BALANCE,
        progress: bool = True,
        dead_letter_limit: DeadLetterLimit | None = _DEAD_LETTER_LIMIT,
        clock: Clock | None = None,
        rng: Rng | None = None,
    ) -> None:
        self._options = RunnerOptions(
            store=store,
            zookeeper=zookeeper,
            zookeeper_security=zookeeper_security,
            storage_options=storage_options,
            durability=durability,
            intervals=intervals,
            cache_mib=cache_mib,
            disk_mib=disk_mib,
            disk_folder=disk_folder,
            spark=spark,
            tick=tick,
            accept_checkpoint=accept_checkpoint,
            pause_timeout=pause_timeout,
            on_held=on_held,
            accept_ended=accept_ended,
            upkeep=upkeep,
            balance=balance,
            progress=progress,
            dead_letter_limit=dead_letter_limit,
            clock=clock or SystemClock(),
            rng=rng or SystemRng(),
        )
        refuse_connect(spark)

    def run(
        self, pipeline: EnginePipeline, inputs: Mapping[str, DataFrame], *, finish: bool = True
    ) -> RunSummary:
        """Consume the inputs to their end, then fire every timer in event time.

        A streaming DataFrame is consumed up to the data of now (``availableNow``), a bounded DataFrame in
        one superstep. Records of a later run are refused, because windows are closed. To resume a run
        that was killed, run it again.

        With ``finish=False`` more input will follow: the run does all the work that its input has made
        due, and leaves the watermarks to their policies. A later run continues with the new data of its
        streams. A bounded DataFrame is consumed once, and refused if it has grown since; next to
        streams it is complete and ends, as in `start`, so that it does not hold back their watermark.

        Args:
            pipeline: the pipeline.
            inputs: a DataFrame per injected stream.
            finish: the inputs end with their present data.

        Returns:
            Counts, the streams that have ended, and by stream the reason why nothing was read.

        Raises:
            InvalidError: pipeline, inputs or checkpoint do not fit, a bounded input has grown, there are new
                records although an earlier run has ended the input, or more records became dead letters than
                ``dead_letter_limit`` allows.
            FencedError: another process has taken over.
            UnavailableError: ZooKeeper or the object store cannot be reached, or Spark's JVM has ended.
            DataError: bytes of the store are missing or wrong.
        """
        with self.open(pipeline, inputs) as run:
            has_streams = any(frame.isStreaming for frame in inputs.values())
            _consume_bounded(run, inputs, finish=finish or has_streams)
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
            _consume_bounded(run, inputs, finish=True)
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
            spark = self._options.spark or spark_session(pipeline.name)
            check_session(spark)
            frames = InputFrames(spark, inputs or {})
            topology = frames.fit(topology)
            run = self._options.open_run(
                lambda store, release: self._open_run(topology, spark, store, release, frames)
            )
        try:
            run.backfill(inputs or {})
        except BaseException:
            run.abandon()
            raise
        return run

    def checkpoint(self, stream: str) -> str:
        """Return the location of the checkpoint of a stream's query, in the store's folder."""
        return checkpoint_path(self._root, stream)

    @property
    def _root(self) -> str:
        store = self._options.store
        return store.path if isinstance(store, Store) else place_of(store)

    def _open_run(
        self,
        topology: Topology,
        spark: SparkSession,
        store: Store,
        release: Callable[[], None],
        frames: InputFrames,
    ) -> SparkRun:
        intervals = self._options.intervals or max(1, spark.sparkContext.defaultParallelism)
        options = replace(self._options, intervals=intervals)
        coordinator = options.open_coordinator(
            store, topology, compaction_workers=self._compaction_workers(spark.sparkContext)
        )
        engine = SparkEngine(spark, coordinator, options)
        return SparkRun(engine, coordinator, options, release=release, frames=frames)

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
        root = local_folder(self._root)
        if root is not None:
            # Spark would write through a link.
            LocalObjects(root / "checkpoints", "os_cache").refuse_links()
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


def _consume_bounded(run: SparkRun, inputs: Mapping[str, DataFrame], *, finish: bool) -> None:
    for stream, frame in inputs.items():
        if not frame.isStreaming:
            run.consume_bounded(stream, frame, finish=finish)

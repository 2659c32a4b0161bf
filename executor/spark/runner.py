"""
The Spark runner: runs a pipeline on Spark over a store (architecture §5).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.maintenance.workers import CompactionWorkers
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.pipeline.topology import Topology
from millpond.executor.reporting.progress import Progress
from millpond.executor.reporting.summary import RunSummary
from millpond.executor.spark.compactions import SparkCompactions, SparkCompactionWorker, is_one_machine
from millpond.executor.spark.engine import SparkEngine
from millpond.executor.spark.run import SparkRun
from millpond.executor.spark.session import spark_session
from millpond.executor.superstep.coordinator import Coordinator
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.lease import OnHeld
from millpond.statestore.store import Store, place_of
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Clock, Rng

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["SparkRunner"]

_MIB = 1 << 20
_UPKEEP = UpkeepPolicy()


class SparkRunner:
    """
    Runs pipelines on Spark; all state is in the store, so any process may go on where one stopped.

    Args:
        store: path of the store, made when it is not there, or an open `Store` (which stays open).
        spark: the session; ``None`` takes the active one or makes one.
        zookeeper: ``host:port,…`` of a real ensemble; ``None`` runs one server beside the store.
        storage_options: credentials and endpoints of an object store; see `Store.open`.
        intervals: key intervals a computation is cut into at its first input; ``None`` takes
            Spark's default parallelism. A computation's own number wins.
        cache_mib: soft-state budget of one interval in a worker process.
        tick_ms: how long the input must be silent before undelivered work runs without it.
        on_held: what to do when another process holds the pipeline: ``take`` it over (the other
            one's next commit fails), ``wait`` as a standby, or ``refuse``.
        pause_timeout_ms: how long to wait for ZooKeeper or the object store to come back.
        accept_checkpoint: go on with a streaming checkpoint that this store has never seen.
        upkeep: how the store is kept small while the pipeline runs; ``None`` leaves that to
            ``millpond gc``.
        progress: show a progress line in a terminal and log every superstep.
        clock: the source of time.
        rng: the source of file names.

    Example::

        runner = SparkRunner("pond")
        runner.run(pipeline, {"queries": df})               # to the end of the input
        run = runner.start(pipeline, {"queries": stream})   # until run.stop()
    """

    def __init__(
        self,
        store: Store | str | Path,
        *,
        spark: SparkSession | None = None,
        zookeeper: str | None = None,
        storage_options: Mapping[str, str] | None = None,
        intervals: int | None = None,
        cache_mib: int = 256,
        tick_ms: float = 250,
        on_held: OnHeld = "take",
        pause_timeout_ms: float = 300_000,
        accept_checkpoint: bool = False,
        upkeep: UpkeepPolicy | None = _UPKEEP,
        progress: bool = True,
        clock: Clock | None = None,
        rng: Rng | None = None,
    ) -> None:
        self._store = store
        self._spark = spark
        self._zookeeper = zookeeper
        self._storage_options = storage_options
        self._intervals = intervals
        self._cache_bytes = cache_mib * _MIB
        self._tick_ms = tick_ms
        self._on_held = on_held
        self._pause_timeout_ms = pause_timeout_ms
        self._accept_checkpoint = accept_checkpoint
        self._upkeep = upkeep
        self._progress = progress
        self._clock = clock or SystemClock()
        self._rng = rng or SystemRng()

    def run(self, pipeline: EnginePipeline, inputs: Mapping[str, DataFrame]) -> RunSummary:
        """
        Consume the inputs to their end, then let every timer in event time fire.

        A streaming DataFrame is consumed as far as there is data now (``availableNow``); a
        bounded one in one superstep. Either way the input counts as finished afterwards:
        records that come in a later run are late. A run that was killed is resumed by
        running it again.

        Args:
            pipeline: what to run.
            inputs: a DataFrame per injected stream.

        Raises:
            InvalidError: pipeline, inputs or checkpoint do not fit.
            FencedError: another process has taken over.
            DataError: bytes of the store are missing or wrong.
        """
        run = self.open(pipeline, inputs)
        try:
            for stream, frame in inputs.items():
                if not frame.isStreaming:
                    run.consume_bounded(stream, frame)
            self._start_queries(run, inputs, trigger={"availableNow": True})
            run.await_termination()
            run.finish_inputs()
        except BaseException:
            run.abandon()
            raise
        return run.stop()

    def start(
        self,
        pipeline: EnginePipeline,
        inputs: Mapping[str, DataFrame],
        *,
        trigger: Mapping[str, Any] | None = None,
    ) -> SparkRun:
        """
        Run until stopped.

        Args:
            pipeline: what to run.
            inputs: a DataFrame per injected stream; bounded ones are consumed before this returns.
            trigger: arguments of Spark's ``DataStreamWriter.trigger``; ``None`` takes batches as
                fast as they come.

        Returns:
            The running pipeline: ``await_termination``, ``summary``, ``stop``.
        """
        run = self.open(pipeline, inputs)
        try:
            for stream, frame in inputs.items():
                if not frame.isStreaming:
                    run.consume_bounded(stream, frame)
            self._start_queries(run, inputs, trigger=trigger or {})
            run.start_ticker(self._tick_ms)
        except BaseException:
            run.abandon()
            raise
        return run

    def open(self, pipeline: EnginePipeline, inputs: Mapping[str, DataFrame] | None = None) -> SparkRun:
        """
        Check the pipeline, open the store and take the leases; the caller feeds the run itself.
        """
        topology = pipeline.check(inputs)
        _check_frames(inputs or {})
        spark = self._spark or spark_session(pipeline.name)
        store, owned = self._open_store()
        try:
            return self._open_run(topology, spark, store, owned=owned)
        except BaseException:
            if owned:
                store.close()
            raise

    def checkpoint(self, stream: str) -> str:
        """
        Where the streaming query of an input keeps its checkpoint: inside the store's folder.
        """
        root = self._store.path if isinstance(self._store, Store) else place_of(self._store)
        return f"{root}/checkpoints/{quote(stream, safe='')}"

    def _open_store(self) -> tuple[Store, bool]:
        if isinstance(self._store, Store):
            return self._store, False
        store = Store.open(
            self._store,
            self._zookeeper,
            storage_options=self._storage_options,
            clock=self._clock,
            rng=self._rng,
        )
        return store, True

    def _open_run(self, topology: Topology, spark: SparkSession, store: Store, *, owned: bool) -> SparkRun:
        parallelism = max(1, spark.sparkContext.defaultParallelism)
        coordinator = Coordinator(
            store,
            topology,
            clock=self._clock,
            rng=self._rng,
            intervals=self._intervals or parallelism,
            accept_checkpoint=self._accept_checkpoint,
            pause_timeout_ms=self._pause_timeout_ms,
            on_held=self._on_held,
            upkeep=self._upkeep,
            compaction_workers=self._compaction_workers(spark.sparkContext),
        )
        coordinator.open()
        engine = SparkEngine(spark, store, coordinator, slots=parallelism, cache_bytes=self._cache_bytes)
        return SparkRun(
            engine,
            coordinator,
            clock=self._clock,
            progress=Progress(topology.name, clock=self._clock, enabled=self._progress),
            release=store.close if owned else _nothing,
        )

    def _compaction_workers(self, context: SparkContext) -> CompactionWorkers | None:
        """
        How compactions become Spark jobs, or ``None``: on the driver's machine they would take the supersteps' slots.
        """
        place = "thread" if self._upkeep is None else self._upkeep.place
        if place in {"process", "thread"} or (place == "auto" and is_one_machine(context.master or "local")):
            return None
        return lambda name, at_once: SparkCompactionWorker(
            SparkCompactions(context, tag=f"{name}-{self._rng.token()}", at_once=at_once)
        )

    def _start_queries(
        self, run: SparkRun, inputs: Mapping[str, DataFrame], trigger: Mapping[str, Any]
    ) -> None:
        for stream, frame in inputs.items():
            if not frame.isStreaming:
                continue
            writer = (
                frame.writeStream.queryName(f"millpond-{stream}")
                .foreachBatch(run.on_batch(stream))
                .option("checkpointLocation", self.checkpoint(stream))
            )
            if trigger:
                writer = writer.trigger(**trigger)
            run.add_query(writer.start())


def _nothing() -> None:
    """
    The store belongs to the caller, who closes it.
    """


def _check_frames(inputs: Mapping[str, object]) -> None:
    from pyspark.sql import DataFrame

    for stream, frame in inputs.items():
        if not isinstance(frame, DataFrame):
            raise InvalidError("the input is no Spark DataFrame", input=stream, type=type(frame).__name__)

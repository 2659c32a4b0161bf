"""Replay on Spark: the code reads the same sources again, from where a version of the original had come to in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.replay.replay import Replayed, begin_replay, with_own_sinks
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.spark.session import refuse_connect
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Clock, Rng

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def replay_on_spark(
    store: Store,
    path: str | Path,
    pipeline: EnginePipeline,
    inputs: Mapping[str, DataFrame],
    *,
    version: int,
    spark: SparkSession | None = None,
    zookeeper: str | None = None,
    cache_mib: int = 512,
    progress: bool = False,
    clock: Clock | None = None,
    rng: Rng | None = None,
) -> Replayed:
    """Run a pipeline on Spark over the sources of a past run, on a fork that begins with an older version.

    As `replay`, with all that the sources have now, in batches that Spark cuts again. Checkpoints of streaming queries
    that lie in the original's folder are copied, and go on from what the version had consumed of each source. A source
    of files that are not on this machine gives what the original had read after the version in one batch. The original
    is only read; the sinks of the replay are tables in its own folder.

    Args:
        store: the original; read-only is enough.
        path: where the replay's store is to lie.
        pipeline: the same code or other code, under the same pipeline name.
        inputs: by injected stream, a DataFrame of the same source.
        version: the version of the original to begin with.
        spark: the session; one is made if there is none.
        zookeeper: ``host:port,…`` of an ensemble for the replay's store; ``None`` runs a server next to it.
        cache_mib: soft-state budget of a process, in MiB.
        progress: show a progress line and log supersteps.
        clock: the source of time.
        rng: the source of names.

    Raises:
        InvalidError: see `replay`; or a bounded input has grown since.
        ConflictError: the version has been collected.
        DataError: bytes of the store are missing or wrong.
        UnavailableError: a store, ZooKeeper or Spark cannot be reached.

    Example::

        with mp.Store.open("pond", read_only=True) as store:
            mp.spark.replay_on_spark(store, "what_if", pipeline, {"payments": stream}, version=120)
    """
    refuse_connect(spark)
    for stream, frame in inputs.items():
        refuse_connect(frame, input=stream)
    clock, rng = clock or SystemClock(), rng or SystemRng()
    plan = begin_replay(store, path, pipeline, version, None, recorded=False, clock=clock, rng=rng)
    with Store.open(
        path, zookeeper, storage_options=store.storage_options, clock=clock, rng=rng, create=False
    ) as fork:
        runner = SparkRunner(
            fork,
            spark=spark,
            cache_mib=cache_mib,
            progress=progress,
            dead_letter_limit=None,
            clock=clock,
            rng=rng,
        )
        own = with_own_sinks(pipeline, fork, clock, rng)
        summary = runner.run(own, inputs, finish=plan.has_ended)
        return Replayed(
            version=plan.first.version,
            until=plan.last.version,
            supersteps=0,
            records=summary.run.records,
            newest=fork.snapshot().version,
        )

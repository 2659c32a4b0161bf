"""
One script, either runner: a pipeline is played step by step, restarted, and asked how it stands.

Tests that say what time means are written once against `Play` and run on both runners; the
store stays the same through a restart, and so does the injected clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from millpond.executor.duration import Instant
from millpond.executor.injector_time import Standing
from millpond.executor.local_runner import LocalRunner
from millpond.executor.pipeline import Pipeline
from millpond.executor.position import input_positions
from millpond.executor.spark_runner import SparkRunner
from millpond.executor.summary import RunSummary
from millpond.executor.superstep_plan import InputPosition
from millpond.statestore.memory_lease import MemoryLeases, MemoryRegistry
from millpond.statestore.store import Store
from millpond.statestore.system import SystemRng
from millpond.statestore.types import Clock, EventTimeMicros

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["LocalPlay", "Play", "SparkPlay", "plays"]


class _Run(Protocol):
    def watermark(self, computation: str) -> EventTimeMicros: ...
    def summary(self) -> RunSummary: ...
    def stop(self) -> RunSummary: ...


class Play:
    """
    A running pipeline that does nothing by itself.

    Args:
        make: makes the pipeline, anew after each restart.
        folder: where the store is.
        clock: the source of time.
    """

    def __init__(self, make: Callable[[], Pipeline], folder: Path, clock: Clock) -> None:
        self.make = make
        self.clock = clock
        self._folder = folder
        self._registry = MemoryRegistry()
        self.store = self._open_store()

    @property
    def run(self) -> _Run:
        """
        The run, of whichever runner.
        """
        raise NotImplementedError

    def inject(self, stream: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """
        One superstep with these rows.
        """
        raise NotImplementedError

    def settle(self) -> None:
        """
        Supersteps without input, until there is nothing to do.
        """
        raise NotImplementedError

    def advance(self, stream: str, at: Instant, member: str | None = None) -> None:
        """
        Promise a watermark, and let it take effect.
        """
        raise NotImplementedError

    def declare(self, stream: str, standing: Standing, member: str | None = None) -> None:
        """
        Declare a stream or member idle, gone or expected, and let it take effect.
        """
        raise NotImplementedError

    def start(self) -> None:
        """
        Run the pipeline on the store as it is.
        """
        raise NotImplementedError

    def watermark(self, computation: str) -> int:
        """
        The computation's input low watermark.
        """
        return self.run.watermark(computation)

    def states(self, computation: str) -> dict[str, str]:
        """
        The committed state of each key, as its codec wrote it.
        """
        rows = self.store.rows_view(computation).to_arrow().to_pylist()
        return {row["key"]: row["state"] for row in rows}

    def restart(self) -> None:
        """
        Stop, let go of everything in memory, and go on from the store.
        """
        self.stop()
        self.store = self._open_store()
        self.start()

    def stop(self) -> RunSummary:
        """
        Stop the run and close the store.
        """
        summary = self.run.stop()
        self.store.close()
        return summary

    def _open_store(self) -> Store:
        return Store.open(
            self._folder / "pond",
            clock=self.clock,
            rng=SystemRng(),
            leases=lambda _, writer_id: MemoryLeases(self._registry, self.clock, writer_id=writer_id),
        )


class LocalPlay(Play):
    """
    On the local runner, stepping.
    """

    def start(self) -> None:
        """
        Run the pipeline on the store as it is.
        """
        runner = LocalRunner(self.store, clock=self.clock, progress=False, intervals=2)
        self._run = runner.start(self.make(), stepping=True)

    @property
    def run(self) -> _Run:
        """
        The run.
        """
        return self._run

    def inject(self, stream: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """
        One superstep with these rows.
        """
        self._run.inject(stream, list(rows))
        self._run.step()

    def settle(self) -> None:
        """
        Supersteps without input, until there is nothing to do.
        """
        self._run.run_until_quiet(supersteps_max=100)

    def advance(self, stream: str, at: Instant, member: str | None = None) -> None:
        """
        Promise a watermark, and let it take effect.
        """
        self._run.advance_watermark(stream, at, member=member)
        self.settle()

    def declare(self, stream: str, standing: Standing, member: str | None = None) -> None:
        """
        Declare a stream or member idle, gone or expected, and let it take effect.
        """
        self._run.declare(stream, standing, member=member)
        self.settle()


class SparkPlay(Play):
    """
    On Spark, each batch a bounded frame; `spark` must be set before `start`.
    """

    spark: SparkSession

    def start(self) -> None:
        """
        Run the pipeline on the store as it is.
        """
        runner = SparkRunner(self.store, spark=self.spark, clock=self.clock, progress=False, intervals=2)
        self._run = runner.open(self.make())

    @property
    def run(self) -> _Run:
        """
        The run.
        """
        return self._run

    def inject(self, stream: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """
        One superstep with these rows.
        """
        pipeline = self.make().name
        known = input_positions(self.store.committer.snapshot.txns, pipeline, stream)
        position = InputPosition(stream=stream, source="play", batch=known.get("play", -1) + 1)
        # A data frame of plain rows, in their order, in one partition.
        self._run.consume(self.spark.createDataFrame([dict(row) for row in rows]).coalesce(1), position)

    def settle(self) -> None:
        """
        Supersteps without input, until there is nothing to do.
        """
        for _ in range(100):
            if not self._run.has_work():
                return
            self._run.advance()

    def advance(self, stream: str, at: Instant, member: str | None = None) -> None:
        """
        Promise a watermark, and let it take effect.
        """
        self._run.advance_watermark(stream, at, member=member)
        self._run.advance()
        self.settle()

    def declare(self, stream: str, standing: Standing, member: str | None = None) -> None:
        """
        Declare a stream or member idle, gone or expected, and let it take effect.
        """
        self._run.declare(stream, standing, member=member)
        self._run.advance()
        self.settle()


@contextmanager
def plays(
    folder: Path, clock_of: Callable[[], Clock], spark: SparkSession | None = None
) -> Iterator[Callable[[Callable[[], Pipeline]], Play]]:
    """
    Starts pipelines, and stops them at the end.

    Args:
        folder: where the store is.
        clock_of: makes the clock of each.
        spark: where they run; ``None`` is the local runner.
    """
    opened: list[Play] = []

    def start(make: Callable[[], Pipeline]) -> Play:
        play: Play
        if spark is None:
            play = LocalPlay(make, folder, clock_of())
        else:
            play = SparkPlay(make, folder, clock_of())
            play.spark = spark
        play.start()
        opened.append(play)
        return play

    try:
        yield start
    finally:
        for each in opened:
            each.stop()

"""
What runs a transcript: the real runners, stepped by hand, over one store that outlives restarts.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import orjson
import pyarrow as pa

from millpond.dataflow.combiners import ToList
from millpond.dataflow.pane import WindowedValue
from millpond.dataflow.pipeline import Pipeline
from millpond.dataflow.strategy import WindowingStrategy
from millpond.dataflow.windowed_computation import WindowedComputation
from millpond.executor.clocks import EXACT
from millpond.executor.duration import INSTANT_MAX_US
from millpond.executor.injector import ManualWatermark
from millpond.executor.local_runner import LocalRunner
from millpond.executor.position import input_positions
from millpond.executor.spark_runner import SparkRunner
from millpond.executor.superstep_plan import InputPosition
from millpond.statestore.memory_lease import MemoryLeases, MemoryRegistry
from millpond.statestore.objects import MemoryObjects
from millpond.statestore.store import Store
from millpond.statestore.types import Clock, Rng, Superstep
from millpond.testing.determinism import ManualClock, SeededRng
from millpond.testing.transcript import Arrived, pane_fields

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "INPUT",
    "LocalTranscriptRun",
    "Shelf",
    "SparkTranscriptRun",
    "TranscriptRun",
    "dropped_in",
    "value_of",
]

_STEP: Final = "windows"
INPUT: Final = "input"
"""The injected stream."""

_PIPELINE: Final = "transcript"
_SUPERSTEPS_MAX: Final = 1_000


class TranscriptRun(Protocol):
    """
    A windowed step on a runner, moved by hand.
    """

    def inject(self, elements: Sequence[Arrived]) -> None:
        """
        Hand over a bundle, and come to rest.
        """
        ...

    def advance_watermarks(self, marks: Mapping[float, int | None]) -> None:
        """
        Move watermarks by percentile (``None``: to the end of all input), and come to rest.
        """
        ...

    def advance_clock(self, micros: int) -> None:
        """
        Move the clock on the wall, and come to rest.
        """
        ...

    def restart(self) -> None:
        """
        Stop, and start again from the store.
        """
        ...

    def panes(self) -> list[dict[str, Any]]:
        """
        The panes since the last call.
        """
        ...

    def dropped(self) -> int:
        """
        How many elements were too late.
        """
        ...

    def close(self) -> None:
        """
        Stop, and forget the store.
        """
        ...


class Shelf:
    """
    A sink that keeps what it gets where the next run finds it.
    """

    def __init__(self, identity: str = "memory://transcript") -> None:
        self.identity = identity
        self.delivered = Superstep(0)
        self.panes: list[tuple[str, WindowedValue]] = []

    def open(
        self, store_id: str, pipeline: str, name: str, *, clock: Clock | None = None, rng: Rng | None = None
    ) -> Shelf:
        """
        The sink is its own writer.
        """
        del store_id, pipeline, name, clock, rng
        return self

    def write(self, superstep: Superstep, productions: pa.Table) -> None:
        """
        Keep the panes.
        """
        if superstep <= self.delivered:
            return
        self.delivered = superstep
        for row in productions.select(["key", "value"]).to_pylist():
            self.panes.append((row["key"], WindowedValue.from_json(orjson.loads(row["value"]))))

    def take(self) -> list[tuple[str, WindowedValue]]:
        """
        The panes since the last call, with their keys.
        """
        taken, self.panes = self.panes, []
        return taken

    def __reduce__(self) -> tuple[Any, ...]:
        """
        Its place is in this process; a copy elsewhere would keep nothing.
        """
        return (Shelf, (self.identity,))


def value_of(row: Mapping[str, Any]) -> Any:
    """
    The value of an injected row.
    """
    return orjson.loads(row["value"])


def _pipeline(strategy: WindowingStrategy, shelf: Shelf) -> Pipeline:
    pipeline = Pipeline(_PIPELINE)
    stream = pipeline.inject(INPUT, key="key", at="at", id="id", watermark=ManualWatermark())
    computation = WindowedComputation(strategy, ToList(), _STEP, of=value_of)
    stream.apply(computation, name=_STEP, on_error="stop").sink("panes", shelf)
    return pipeline


def _row(element: Arrived) -> dict[str, Any]:
    return {
        "key": element.key,
        "at": element.at_us,
        "id": element.id,
        "value": orjson.dumps(element.value).decode(),
    }


def dropped_in(store: Store, step: str) -> int:
    """
    How many elements were too late for a step.
    """
    states = store.rows_view(step).to_arrow()["state"].to_pylist()
    return sum(orjson.loads(state).get("dropped", 0) for state in states if state is not None)


class LocalTranscriptRun:
    """
    A step on the local runner, over a store in memory.

    Args:
        strategy: what is run.
    """

    def __init__(self, strategy: WindowingStrategy) -> None:
        self._strategy = strategy
        self._shelf = Shelf()
        self._clock = ManualClock(0)
        self._disk, self._registry = MemoryObjects(), MemoryRegistry()
        # One for all restarts: a process that draws the names of the one before would meet its files.
        self._rng = SeededRng(1)
        self._start()

    def _pipeline(self) -> Pipeline:
        return _pipeline(self._strategy, self._shelf)

    def _start(self) -> None:
        self._store = Store.in_memory(
            objects=self._disk, registry=self._registry, clock=self._clock, rng=self._rng
        )
        runner = LocalRunner(self._store, clock=self._clock, rng=self._rng, progress=False)
        self._run = runner.start(self._pipeline(), stepping=True)

    def inject(self, elements: Sequence[Arrived]) -> None:
        """
        Hand over a bundle, and come to rest.
        """
        if elements:
            self._run.inject(INPUT, [_row(element) for element in elements])
        self._rest()

    def advance_watermark(self, at_us: int | None) -> None:
        """
        Move the low watermark, and come to rest.
        """
        self.advance_watermarks({EXACT: at_us})

    def advance_watermarks(self, marks: Mapping[float, int | None]) -> None:
        """
        Move watermarks by percentile, and come to rest.
        """
        for percentile, at_us in marks.items():
            if percentile == EXACT and at_us is None:
                self._run.finish(INPUT)
            else:
                at = INSTANT_MAX_US if at_us is None else at_us
                self._run.advance_watermark(INPUT, at, percentile=percentile)
        self._rest()

    def advance_clock(self, micros: int) -> None:
        """
        Move the clock on the wall, and come to rest.
        """
        self._clock.advance_ms(micros / 1_000)
        self._rest()

    def _rest(self) -> None:
        self._run.run_until_quiet(supersteps_max=_SUPERSTEPS_MAX)

    def restart(self) -> None:
        """
        Stop, and start again from the store.
        """
        self._run.stop()
        self._store.close()
        self._start()

    def panes(self) -> list[dict[str, Any]]:
        """
        The panes since the last call.
        """
        return [pane_fields(key, shown) for key, shown in self._shelf.take()]

    def dropped(self) -> int:
        """
        How many elements were too late.
        """
        return dropped_in(self._store, _STEP)

    def close(self) -> None:
        """
        Stop, and forget the store.
        """
        self._run.abandon()
        self._store.close()


class SparkTranscriptRun:
    """
    A step on the Spark runner, over a store in a folder of its own.

    Args:
        strategy: what is run.
        spark: the session.
    """

    _SCHEMA = "key string, at long, id string, value string"

    def __init__(self, strategy: WindowingStrategy, spark: SparkSession) -> None:
        self._strategy = strategy
        self._spark = spark
        self._shelf = Shelf()
        self._clock = ManualClock(0)
        self._registry = MemoryRegistry()
        self._rng = SeededRng(3)
        self._folder = Path(tempfile.mkdtemp(prefix="millpond-transcript-"))
        self._start()

    def _pipeline(self) -> Pipeline:
        return _pipeline(self._strategy, self._shelf)

    def _start(self) -> None:
        self._store = Store.open(
            self._folder / "pond",
            clock=self._clock,
            rng=self._rng,
            leases=lambda _, writer_id: MemoryLeases(self._registry, self._clock, writer_id=writer_id),
        )
        runner = SparkRunner(self._store, spark=self._spark, clock=self._clock, progress=False, intervals=1)
        self._run = runner.open(self._pipeline())

    def inject(self, elements: Sequence[Arrived]) -> None:
        """
        Hand over a bundle, and come to rest.
        """
        if elements:
            rows = [tuple(_row(element).values()) for element in elements]
            frame = self._spark.createDataFrame(rows, self._SCHEMA).coalesce(1)
            known = input_positions(self._store.committer.snapshot.txns, _PIPELINE, INPUT)
            position = InputPosition(stream=INPUT, source="test", batch=known.get("test", -1) + 1)
            self._run.consume(frame, position)
        self._rest()

    def advance_watermark(self, at_us: int | None) -> None:
        """
        Move the low watermark, and come to rest.
        """
        self.advance_watermarks({EXACT: at_us})

    def advance_watermarks(self, marks: Mapping[float, int | None]) -> None:
        """
        Move watermarks by percentile, and come to rest.
        """
        for percentile, at_us in marks.items():
            if percentile == EXACT and at_us is None:
                self._run._coordinator.finish_input(INPUT)  # noqa: SLF001 - Spark's sources have no such verb
            else:
                at = INSTANT_MAX_US if at_us is None else at_us
                self._run.advance_watermark(INPUT, at, percentile=percentile)
        self._rest()

    def advance_clock(self, micros: int) -> None:
        """
        Move the clock on the wall, and come to rest.
        """
        self._clock.advance_ms(micros / 1_000)
        self._rest()

    def _rest(self) -> None:
        # One superstep more than there is work for: it waits for the sinks of the one before,
        # and it journals a watermark that nobody has waited for.
        for _ in range(_SUPERSTEPS_MAX):
            has_work = self._run._coordinator.has_work()  # noqa: SLF001 - the ticker's question
            self._run.advance()
            if not has_work:
                return

    def restart(self) -> None:
        """
        Stop, and start again from the store.
        """
        self._run.stop()
        self._store.close()
        self._start()

    def panes(self) -> list[dict[str, Any]]:
        """
        The panes since the last call.
        """
        return [pane_fields(key, shown) for key, shown in self._shelf.take()]

    def dropped(self) -> int:
        """
        How many elements were too late.
        """
        return dropped_in(self._store, _STEP)

    def close(self) -> None:
        """
        Stop, and forget the store.
        """
        self._run.abandon()
        self._store.close()
        shutil.rmtree(self._folder, ignore_errors=True)

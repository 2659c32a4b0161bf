"""Runs that play transcripts: windowed steps side by side on a real runner, advanced explicitly.

Steps of one run share its clock, its store and its restarts; each has a separate input and
watermark, so its results do not depend on its neighbours.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson
import pyarrow as pa

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.inputs.positions import counts_by_computation, input_positions
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.spark.run import SparkRun
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.superstep.plan import InputPosition
from millpond.executor.time.clocks import EXACT
from millpond.executor.time.instants import INSTANT_MAX_US
from millpond.executor.windows.pane import WindowedValue
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.strategy import WindowingStrategy
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.row_format import ParquetRowFormat, RowFormat
from millpond.statestore.store import Store
from millpond.statestore.types import Superstep
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from millpond.testing.fixtures.own_writer import OwnWriter
from millpond.testing.transcripts.setting import Stage
from millpond.testing.transcripts.transcript import Arrived, Signalled, pane_fields

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PIPELINE: Final = "transcript"
_SUPERSTEPS_MAX: Final = 1_000


INPUT: Final = "input_0"
"""The injected stream of the first step."""

_BUNDLES: Final = "bundles"
_TEXT: Final = pa.string()
_SCHEMAS: Final = (
    pa.schema({"key": _TEXT, "at": pa.int64(), "id": _TEXT, "value": _TEXT}),
    pa.schema({"key": _TEXT, "at": pa.int64(), "rows": _TEXT}),
)
"""The input of Spark: the rows of one step, or the bundles of several."""


def _bundle(step: int) -> str:
    return f"bundle_{step}"


def _input(step: int) -> str:
    return f"input_{step}"


def _windows(step: int) -> str:
    return f"windows_{step}"


class Shelf(OwnWriter):
    """A sink that keeps its rows in this process, where the next run finds them."""

    def __init__(self, identity: str) -> None:
        super().__init__(identity)
        self.panes: list[tuple[str, WindowedValue]] = []

    def write(self, superstep: Superstep, productions: pa.Table) -> None:
        """Keep the panes."""
        if superstep <= self.delivered:
            return
        self.delivered = superstep
        for row in productions.select(["key", "value"]).to_pylist():
            self.panes.append((row["key"], WindowedValue.from_json(orjson.loads(row["value"]))))

    def take(self) -> list[tuple[str, WindowedValue]]:
        """The panes since the last call, with their keys."""
        taken, self.panes = self.panes, []
        return taken

    def __reduce__(self) -> tuple[Any, ...]:
        """By identity: rows live in this process, and a copy in another would keep nothing."""
        return (Shelf, (self.identity,))


def dropped_in(store: Store, step: str) -> int:
    """Number of elements that were too late for a step."""
    counts = counts_by_computation(store.committer.snapshot.txns, _PIPELINE)
    return counts.get(step, {}).get("dropped", 0)


class _Hands(Computation):
    """Distributes the bundles of one record, whose key is the step and whose value is the rows."""

    def process_record(self, context: Context, record: Record) -> None:
        """Produce the rows on their step's stream."""
        for row in orjson.loads(record.value["rows"]):
            context.produce(_bundle(int(record.key)), row, key=row["key"], at=row["at"])


def _row(element: Arrived) -> dict[str, Any]:
    return {
        "key": element.key,
        "at": element.at_us,
        "id": element.id,
        "value": orjson.dumps(element.value).decode(),
    }


class TranscriptRun:
    """Windowed steps side by side on a runner, over a store that persists through restarts.

    Every action takes effect before panes are read, before the next action on the same step, before
    the clock moves and before a restart; actions on several steps in between take effect together.

    Args:
        strategies: one per step; a `Stage` is a step with surrounding steps.
    """

    def __init__(self, strategies: Sequence[WindowingStrategy | Stage]) -> None:
        self._stages = tuple(
            strategy if isinstance(strategy, Stage) else Stage(strategy) for strategy in strategies
        )
        self._shelves = tuple(Shelf(f"memory://{_windows(step)}") for step in range(len(self._stages)))
        self._clock = ManualClock(0)
        self._registry = MemoryRegistry()
        # Shared by all restarts: repeated draws would give file names that already exist.
        self._rng = SeededRng(1)
        self._touched: set[int] = set()
        self._bundles: dict[int, list[dict[str, Any]]] = {}
        self._store = self._open_store()
        self._run = self._start(self.pipeline())

    # -- runner specific -------------------------------------------------------------------

    def _open_store(self) -> Store:
        raise NotImplementedError

    def _start(self, pipeline: Pipeline) -> LocalRun | SparkRun:
        raise NotImplementedError

    def _bring(self, bundles: Mapping[int, Sequence[dict[str, Any]]]) -> None:
        """Inject the bundle of each of these steps."""
        raise NotImplementedError

    def _rest(self) -> None:
        """Run until no work is left, and everything is delivered and durable."""
        raise NotImplementedError

    # -- actions ---------------------------------------------------------------------------

    def inject(self, elements: Sequence[Arrived], step: int = 0) -> None:
        """Inject a bundle into a step."""
        self._touch(step)
        if elements:
            self._bundles[step] = [_row(element) for element in elements]

    def advance_watermark(self, at_us: int | None, step: int = 0) -> None:
        """Advance the low watermark of a step (``None``: to the end of all input)."""
        self.advance_watermarks({EXACT: at_us}, step)

    def advance_watermarks(self, marks: Mapping[float, int | None], step: int = 0) -> None:
        """Advance watermarks of a step by percentile (``None``: to the end of all input)."""
        self._touch(step)
        for percentile, at_us in marks.items():
            if percentile == EXACT and at_us is None:
                self._run.finish(_input(step))
            else:
                at = INSTANT_MAX_US if at_us is None else at_us
                self._run.advance_watermark(_input(step), at, percentile=percentile)

    def signal(self, signal: Signalled, step: int = 0) -> None:
        """Give a signal to a step."""
        self.settle()
        name = _windows(step)
        self._run.signal(signal.name, signal.key, signal.window, step=name, id=signal.id)
        self._touch(step)

    def advance_clock(self, micros: int) -> None:
        """Advance the wall clock, for all steps."""
        self.settle()
        self._clock.advance_ms(micros / 1_000)
        self._touched.add(0)

    def restart(self) -> None:
        """Stop, and continue from the store."""
        self.settle()
        self._run.stop()
        self._store.close()
        self._store = self._open_store()
        self._run = self._start(self.pipeline())

    def panes(self, step: int = 0) -> list[dict[str, Any]]:
        """The panes of a step since the last call."""
        self.settle()
        return [pane_fields(key, shown) for key, shown in self._shelves[step].take()]

    def dropped(self, step: int = 0) -> int:
        """Number of elements of a step that were too late."""
        self.settle()
        return sum(dropped_in(self._store, name) for name in self._stages[step].names(_windows(step)))

    def close(self) -> None:
        """Stop, and delete the store."""
        self._run.abandon()
        self._store.close()

    def _touch(self, step: int) -> None:
        if step in self._touched:
            self.settle()
        self._touched.add(step)

    def settle(self) -> None:
        """Let all actions so far take effect."""
        if self._touched:
            bundles, self._bundles = self._bundles, {}
            self._touched.clear()
            self._bring(bundles)
            self._rest()

    def pipeline(self) -> Pipeline:
        """The steps side by side, each with a separate input and sink."""
        pipeline = Pipeline(_PIPELINE)
        for step, (stage, shelf) in enumerate(zip(self._stages, self._shelves, strict=True)):
            pipeline.inject(_input(step), key="key", id="id", **stage.setting.times())
            panes = stage.windowed(pipeline, _windows(step), self._streams(step))
            panes.sink(f"panes_{step}", shelf)
        return pipeline

    def _streams(self, step: int) -> tuple[str, ...]:
        """The streams of a step's elements."""
        return (_input(step),)


class LocalTranscriptRun(TranscriptRun):
    """Steps on the local runner, over a store in memory.

    Args:
        strategies: one per step.
        row_format: how the store encodes row files; `IpcRowFormat` takes a third of a run's time away.
    """

    _run: LocalRun

    def __init__(self, *strategies: WindowingStrategy | Stage, row_format: RowFormat | None = None) -> None:
        self._disk = MemoryObjects()
        self._row_format = row_format or ParquetRowFormat()
        TranscriptRun.__init__(self, strategies)

    def _open_store(self) -> Store:
        return Store.in_memory(
            objects=self._disk,
            registry=self._registry,
            clock=self._clock,
            rng=self._rng,
            row_format=self._row_format,
        )

    def _start(self, pipeline: Pipeline) -> LocalRun:
        # A transcript may bring late elements after the end, and restart in between.
        runner = LocalRunner(self._store, clock=self._clock, rng=self._rng, progress=False, accept_ended=True)
        return runner.start(pipeline, stepping=True)

    def _bring(self, bundles: Mapping[int, Sequence[dict[str, Any]]]) -> None:
        for step, rows in bundles.items():
            self._run.inject(_input(step), rows)

    def _rest(self) -> None:
        self._run.run_until_quiet(supersteps_max=_SUPERSTEPS_MAX)


class SparkTranscriptRun(TranscriptRun):
    """Steps on the Spark runner, over a store in a separate folder.

    A superstep consumes one batch of one input. So bundles of several steps travel in one batch, and a
    computation distributes them; elements with an id, or with ingress time, are injected directly.

    Args:
        strategies: one per step.
        spark: the session.
    """

    _run: SparkRun

    def __init__(self, *strategies: WindowingStrategy | Stage, spark: SparkSession) -> None:
        self._spark = spark
        self._folder = Path(tempfile.mkdtemp(prefix="millpond-transcript-"))
        TranscriptRun.__init__(self, strategies)

    @property
    def _has_hands(self) -> bool:
        return len(self._stages) > 1

    def _open_store(self) -> Store:
        return Store.open(
            self._folder / "pond",
            clock=self._clock,
            rng=self._rng,
            leases=lambda _, writer_id: MemoryLeases(self._registry, self._clock, writer_id=writer_id),
        )

    def _start(self, pipeline: Pipeline) -> SparkRun:
        runner = SparkRunner(
            self._store,
            spark=self._spark,
            clock=self._clock,
            rng=self._rng,
            progress=False,
            intervals=1,
            accept_ended=True,
        )
        run = runner.open(pipeline)
        if self._has_hands:
            # It holds no step back: each has a separate watermark.
            run.finish(_BUNDLES)
        return run

    def pipeline(self) -> Pipeline:
        """The steps side by side, each with a separate input and sink."""
        pipeline = TranscriptRun.pipeline(self)
        if self._has_hands:
            pipeline.inject(_BUNDLES, key="key", at="at", at_unit="us")
            steps = range(len(self._stages))
            pipeline.add(
                _Hands(),
                name="hands",
                subscribes={_BUNDLES: None},
                produces=[_bundle(step) for step in steps],
                on_error="stop",
            )
        return pipeline

    def _streams(self, step: int) -> tuple[str, ...]:
        return (_input(step), _bundle(step)) if self._has_hands else (_input(step),)

    def _bring(self, bundles: Mapping[int, Sequence[dict[str, Any]]]) -> None:
        handed = []
        for step, rows in bundles.items():
            by_itself = self._stages[step].setting.by_arrival or any(row["id"] is not None for row in rows)
            if by_itself or not self._has_hands:
                self._consume(_input(step), rows)
            else:
                at = min(row["at"] for row in rows)
                handed.append({"key": str(step), "at": at, "rows": orjson.dumps(rows).decode()})
        if handed:
            self._consume(_BUNDLES, handed)

    def _consume(self, stream: str, rows: Sequence[dict[str, Any]]) -> None:
        frame = self._spark.createDataFrame(pa.Table.from_pylist(list(rows), _SCHEMAS[stream == _BUNDLES]))
        known = input_positions(self._store.committer.snapshot.txns, _PIPELINE, stream)
        position = InputPosition(stream=stream, source="test", batch=known.get("test", -1) + 1)
        self._run.consume(frame.coalesce(1), position)

    def _rest(self) -> None:
        # One extra superstep: it waits for the sinks of the previous one, and commits a watermark
        # that no other superstep has committed.
        for _ in range(_SUPERSTEPS_MAX):
            has_work = self._run.has_work()
            self._run.advance()
            if not has_work:
                return

    def close(self) -> None:
        """Stop, and remove the folder."""
        TranscriptRun.close(self)
        shutil.rmtree(self._folder, ignore_errors=True)

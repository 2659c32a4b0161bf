"""Plays a story: one stream of scores, windowed steps side by side on it, a manually moved clock.

Nothing here is specific to tests. Users would write the same steps, `LocalRunner` and `SparkRunner` run them, and the
panes are read from Delta tables. Only the clock is not real.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import orjson
from deltalake import DeltaTable

import millpond as mp
from examples.streaming102.story import Moment, Score, Story, moments
from millpond.executor.superstep.plan import InputPosition
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.testing import ManualClock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Step = Callable[[mp.DataflowStream], mp.WindowedStream]
"""What is asked of the scores: where, when and how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A pane as read from the table.

    Attributes:
        value: the sum, or the retracted sum.
        window: start and end in microseconds; ``None`` for the global window.
        seen_us: the wall time of its production.
        index: 0, 1, 2 … over the panes of its window.
        nonspeculative_index: the same without the early ones.
    """

    value: Any
    window: tuple[int, int] | None
    seen_us: int
    timing: str
    is_retraction: bool
    index: int
    nonspeculative_index: int
    is_last: bool
    at_us: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a step.

    Attributes:
        panes: in the order in which they came.
        dropped: how many elements were too late for all their windows.
    """

    panes: list[Shown]
    dropped: int


def play(story: Story, steps: Mapping[str, Step], spark: SparkSession | None = None) -> dict[str, Outcome]:
    """What comes of each step.

    Args:
        story: what happens.
        steps: windowed steps by name; each sums up the points.
        spark: runs them on Spark; ``None`` takes the local runner.
    """
    with tempfile.TemporaryDirectory(prefix="millpond-story-") as folder:
        clock = ManualClock(0)
        store = mp.Store.in_memory(clock=clock) if spark is None else _store_on_disk(Path(folder), clock)
        pipeline = _pipeline(story, steps, Path(folder))
        runner = (
            _Locally(store, pipeline, clock) if spark is None else _OnSpark(store, pipeline, clock, spark)
        )
        try:
            for moment in moments(story):
                clock.advance_ms((moment.seen_us - clock.now_us()) / 1_000)
                _live(runner, moment)
            counts = runner.summary().totals.by_computation
        finally:
            runner.close()
            store.close()
        return {
            name: Outcome(
                panes=_panes(Path(folder) / "panes" / name), dropped=counts.get(name, {}).get("dropped", 0)
            )
            for name in steps
        }


def _store_on_disk(folder: Path, clock: ManualClock) -> mp.Store:
    """A store that Spark's workers can reach, with leases of this process: it has no rivals."""
    registry = MemoryRegistry()
    return mp.Store.open(
        folder / "pond",
        clock=clock,
        leases=lambda _, writer_id: MemoryLeases(registry, clock, writer_id=writer_id),
    )


def _pipeline(story: Story, steps: Mapping[str, Step], folder: Path) -> mp.Pipeline:
    pipeline = mp.Pipeline("streaming102")
    if story.by_ingress:
        scores = pipeline.inject("scores", key="team", at=mp.IngressTime())
    else:
        scores = pipeline.inject("scores", key="team", at="at", watermark=mp.ManualWatermark())
    for name, step in steps.items():
        windowed = step(scores)
        sums = windowed.combine(mp.Sum("points"), name=name)
        sums.sink(f"{name}_panes", mp.DeltaSink(str(folder / "panes" / name)))
    return pipeline


class _Runner(Protocol):
    def inject(self, scores: tuple[Score, ...]) -> None: ...
    def move(self, mark: int | None, percentile: float) -> None: ...
    def signal(self) -> None: ...
    def rest(self) -> None: ...
    def summary(self) -> mp.RunSummary: ...
    def close(self) -> None: ...


def _live(runner: _Runner, moment: Moment) -> None:
    if moment.scores:
        runner.inject(moment.scores)
    runner.rest()
    if moment.has_signal:
        runner.signal()
        runner.rest()
    for percentile, mark in moment.marks:
        runner.move(mark, percentile)
        runner.rest()


def _row(score: Score) -> dict[str, Any]:
    return {"team": score.key, "at": score.at_us, "points": score.value}


class _Locally:
    def __init__(self, store: mp.Store, pipeline: mp.Pipeline, clock: ManualClock) -> None:
        self._run = mp.LocalRunner(store, clock=clock, progress=False).start(pipeline, stepping=True)

    def inject(self, scores: tuple[Score, ...]) -> None:
        self._run.inject("scores", [_row(score) for score in scores])

    def move(self, mark: int | None, percentile: float) -> None:
        if mark is None:
            self._run.finish("scores")
        else:
            self._run.advance_watermark("scores", mark, percentile=percentile)

    def signal(self) -> None:
        self._run.signal("show", "TeamX")

    def rest(self) -> None:
        self._run.run_until_quiet()

    def summary(self) -> mp.RunSummary:
        return self._run.summary()

    def close(self) -> None:
        self._run.stop()


class _OnSpark:
    def __init__(
        self, store: mp.Store, pipeline: mp.Pipeline, clock: ManualClock, spark: SparkSession
    ) -> None:
        self._spark = spark
        self._batch = 0
        self._moved = False
        runner = mp.SparkRunner(store, spark=spark, clock=clock, progress=False, intervals=1)
        self._run = runner.open(pipeline)

    def inject(self, scores: tuple[Score, ...]) -> None:
        frame = self._spark.createDataFrame([_row(score) for score in scores])
        # Hand over batches as a streaming query would, because the clock must stand still meanwhile.
        self._run.consume(frame, InputPosition(stream="scores", source="story", batch=self._batch))
        self._batch += 1

    def move(self, mark: int | None, percentile: float) -> None:
        self._moved = True
        if mark is None:
            self._run.finish("scores")
        else:
            self._run.advance_watermark("scores", mark, percentile=percentile)

    def signal(self) -> None:
        self._run.signal("show", "TeamX")

    def rest(self) -> None:
        if self._moved:
            self._run.advance()
            self._moved = False
        while self._run.has_work():
            self._run.advance()

    def summary(self) -> mp.RunSummary:
        return self._run.summary()

    def close(self) -> None:
        self._run.stop()


def _panes(place: Path) -> list[Shown]:
    if not DeltaTable.is_deltatable(str(place)):
        return []
    rows = mp.read_table(place).to_pylist()
    found = [_shown(row["key"], orjson.loads(row["value"])) for row in rows]
    # Panes of one superstep have the same production time; a retraction precedes its pane.
    return sorted(
        found, key=lambda one: (one.seen_us, not one.is_retraction, one.window or (0, 0), one.index)
    )


def _shown(key: str, envelope: dict[str, Any]) -> Shown:
    shown = mp.windows.WindowedValue.from_json(envelope)
    return Shown(
        value=shown.value,
        window=None if shown.window.is_global else (shown.window.start, shown.window.end),
        seen_us=shown.pane.produced_at,
        timing=str(shown.pane.timing),
        is_retraction=shown.pane.is_retraction,
        index=shown.pane.index,
        nonspeculative_index=shown.pane.nonspeculative_index,
        is_last=shown.pane.is_last,
        at_us=shown.at,
        key=key,
    )

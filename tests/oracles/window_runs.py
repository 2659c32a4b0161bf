"""Many windowed steps in one run: generated strategies share a script, and so the cost of a run.

Each step consumes the same injected stream, so all see the same elements, watermarks and clocks. Each has a
separate sink.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from millpond.executor.windows.combiners import ToList
from millpond.executor.windows.pane import WindowedValue
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.strategy import WindowingStrategy
from millpond.executor.windows.trigger import Trigger
from millpond.executor.windows.window import WindowFn
from millpond.executor.windows.window_fns import UnalignedFixedWindows
from millpond.executor.windows.windowed_computation import WindowedComputation
from millpond.statestore.rows.row_format import RowFormat
from millpond.testing.transcripts.constructors import construct
from millpond.testing.transcripts.runs import (
    INPUT,
    LocalTranscriptRun,
    Shelf,
    SparkTranscriptRun,
    TranscriptRun,
    dropped_in,
)
from millpond.testing.transcripts.setting import TranscriptSetting, value_of
from millpond.testing.transcripts.transcript import Arrived
from tests.oracles.trigger import trigger_text
from tests.oracles.window import Arrival, OraclePane, WindowSpec
from tests.oracles.window_scripts import SIGNAL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PIPELINE = "transcript"


def strategy_of(spec: WindowSpec) -> WindowingStrategy:
    """Return the engine's strategy for the oracle's description."""
    return WindowingStrategy(
        window_fn=construct(trigger_text(spec.window_fn), WindowFn),
        trigger=construct(trigger_text(spec.trigger), Trigger),
        accumulation=spec.mode,  # type: ignore[arg-type]  # its name
        incremental=spec.incremental,
        allowed_lateness=f"{spec.lateness}us",
        timestamp_combiner=spec.combiner,  # type: ignore[arg-type]  # its name
        closing=spec.closing,  # type: ignore[arg-type]  # its name
        emit_empty_on_time=spec.empty_on_time,
        asked=spec.asked,  # type: ignore[arg-type]  # its name
    )


def phases_of(spec: WindowSpec, keys: Iterable[str]) -> dict[str, int]:
    """Return the start of each key's unaligned windows, in microseconds: a hash, given to the oracle."""
    window_fn = strategy_of(spec).window_fn
    if not isinstance(window_fn, UnalignedFixedWindows):
        return {}
    return {key: window_fn.phase_us(key) for key in keys}


def pane_of(key: str, shown: WindowedValue) -> OraclePane:
    """Return the engine's pane as the oracle's."""
    pane = shown.pane
    return OraclePane(
        key=key,
        window=(shown.window.start, shown.window.end),
        index=pane.index,
        is_retraction=pane.is_retraction,
        values=tuple(sorted(shown.value)),
        at=shown.at,
        nonspeculative_index=pane.nonspeculative_index,
        timing=str(pane.timing),
        is_last=pane.is_last,
        share=pane.watermark_percentile,
    )


def arrived(arrivals: Iterable[Arrival]) -> list[Arrived]:
    """Return the elements in a run's form."""
    return [Arrived(value=arrival.value, at_us=arrival.at, key=arrival.key, id=None) for arrival in arrivals]


class _Steps:
    """A pipeline of many steps, and the output of each."""

    def __init__(self, specs: Sequence[WindowSpec], *, by_ingress: bool = False) -> None:
        self._setting = TranscriptSetting(by_arrival=by_ingress)
        self._shifts = [(spec.shift, spec.horizon) for spec in specs]
        self.strategies = [strategy_of(spec) for spec in specs]
        self.shelves = [Shelf(f"memory://step/{number}") for number in range(len(specs))]

    def pipeline(self) -> Pipeline:
        pipeline = Pipeline(_PIPELINE)
        injected = pipeline.inject(INPUT, key="key", id="id", **self._setting.times())
        for number, (strategy, shelf) in enumerate(zip(self.strategies, self.shelves, strict=True)):
            stream, (shift, horizon) = injected, self._shifts[number]
            if shift:
                # Without a horizon, elements moved back may be late.
                held = f"{horizon}us" if horizon else "unbounded" if shift < 0 else 0
                move = partial(_moved, micros=shift)
                stream = stream.with_timestamps(
                    move, name=f"m{number}", late_data_horizon=held, on_error="stop"
                )
            step = WindowedComputation(strategy, ToList(), f"w{number}", of=value_of)
            stream.apply(step, name=f"w{number}", on_error="stop").sink(f"panes{number}", shelf)
        return pipeline

    def take(self) -> list[list[OraclePane]]:
        """Return the panes of each step since the last call."""
        return [sorted(pane_of(key, shown) for key, shown in shelf.take()) for shelf in self.shelves]


def _moved(value: Any, at: int, *, micros: int) -> int:
    return at + micros


class _WindowRun(TranscriptRun):
    """The output of a run of many steps, on either runner."""

    _steps: _Steps

    def pipeline(self) -> Pipeline:
        return self._steps.pipeline()

    def shown(self) -> list[list[OraclePane]]:
        """Return the panes of each step since the last call, sorted."""
        self.settle()
        return self._steps.take()

    def give_signal(self, key: str) -> None:
        """Signal all windows of a key, if any step listens."""
        if any(strategy.trigger.signals for strategy in self._steps.strategies):
            self.settle()
            self._run.signal(SIGNAL, key)
            self._touch(0)

    def drops(self) -> list[int]:
        """Return the number of late elements by step."""
        self.settle()
        return [dropped_in(self._store, f"w{number}") for number in range(len(self._steps.shelves))]


class LocalWindowRun(_WindowRun, LocalTranscriptRun):
    """Many steps on the local runner.

    Args:
        specs: their strategies.
        by_ingress: whether elements have the time of their arrival.
        row_format: how the store encodes row files; ``None``: as one on disk does.
    """

    def __init__(
        self,
        specs: Sequence[WindowSpec],
        *,
        by_ingress: bool = False,
        row_format: RowFormat | None = None,
    ) -> None:
        self._steps = _Steps(specs, by_ingress=by_ingress)
        super().__init__(self._steps.strategies[0], row_format=row_format)


class SparkWindowRun(_WindowRun, SparkTranscriptRun):
    """Many steps on the Spark runner.

    Args:
        specs: their strategies.
        spark: the session.
        by_ingress: whether elements have the time of their arrival.
    """

    def __init__(self, specs: Sequence[WindowSpec], spark: SparkSession, *, by_ingress: bool = False) -> None:
        self._steps = _Steps(specs, by_ingress=by_ingress)
        super().__init__(self._steps.strategies[0], spark=spark)

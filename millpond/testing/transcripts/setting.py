"""The surroundings of a transcript's windowed step: how elements get their times, and the steps that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from millpond.executor.time.clocks import LateDataHorizon, horizon_us
from millpond.executor.time.watermark_policies import IngressTime, ManualWatermark
from millpond.executor.windows.combiners import CombineFn, ToList
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.strategy import WindowingStrategy
from millpond.executor.windows.stream import DataflowStream
from millpond.executor.windows.windowed_computation import TimestampShift, WindowedComputation
from millpond.statestore.errors import InvalidError
from millpond.testing.transcripts.constructors import construct, duration_of, seconds_us

_TO_LIST: Final = ToList()


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptSetting:
    """The pipeline around a windowed step.

    Attributes:
        by_arrival: elements get their time of arrival, and the watermark follows the clock.
        shift_us: shift of each element's time before windowing, in microseconds; ``None`` for no such step.
        late_data_horizon: how far back the shift may go.
        then: further windowed steps, each over the panes of the previous one.
        combine: the result of a window's values, which must be a list.
    """

    by_arrival: bool = False
    shift_us: int | None = None
    late_data_horizon: LateDataHorizon = 0
    then: tuple[WindowingStrategy, ...] = ()
    combine: CombineFn = _TO_LIST

    @classmethod
    def of(cls, document: Mapping[str, Any], then: tuple[WindowingStrategy, ...]) -> TranscriptSetting:
        """The setting that a document describes.

        Raises:
            InvalidError: ``shift`` is not a number, or the horizon is invalid.
        """
        shift, horizon = document.get("shift"), document.get("late_data_horizon", 0)
        if shift is not None and (isinstance(shift, bool) or not isinstance(shift, int | float)):
            raise InvalidError("a shift is a number of seconds", shift=shift)
        horizon = duration_of(horizon)
        horizon_us(horizon)
        return cls(
            by_arrival=bool(document.get("by_arrival", False)),
            shift_us=None if shift is None else seconds_us(shift),
            late_data_horizon=horizon,
            then=then,
            combine=construct(document.get("combine", "ToList"), CombineFn),
        )

    def times(self) -> dict[str, Any]:
        """Arguments of ``Pipeline.inject`` that give an injected stream its times."""
        if self.by_arrival:
            return {"at": IngressTime()}
        # The times of a transcript are small: many lie in the first weeks of 1970.
        return {"at": "at", "at_unit": "us", "watermark": ManualWatermark()}


@dataclass(frozen=True, slots=True)
class Stage:
    """A windowed step with its surroundings, from outside elements to the last step's panes."""

    strategy: WindowingStrategy
    setting: TranscriptSetting = TranscriptSetting()

    def windowed(self, pipeline: Pipeline, name: str, streams: Sequence[str]) -> DataflowStream:
        """Add the steps to a pipeline.

        Args:
            pipeline: the pipeline, with the streams of elements.
            name: the first step's name; later steps are named after it.
            streams: the streams of elements, as rows with a JSON ``value``.

        Returns:
            The stream of the last step's panes.
        """
        sources = streams
        if self.setting.shift_us is not None:
            moved = f"{name}_shifted"
            shift = TimestampShift(_Shift(self.setting.shift_us), moved, self.setting.late_data_horizon)
            pipeline.add(
                shift, name=moved, subscribes=dict.fromkeys(streams), produces=[moved], on_error="stop"
            )
            sources = [moved]
        for step, strategy in zip(self.names(name), (self.strategy, *self.setting.then), strict=True):
            of = value_of if step == name else None
            combine = self.setting.combine if step == name else _TO_LIST
            computation = WindowedComputation(strategy, combine, step, of=of)
            subscribes = dict.fromkeys(sources)
            pipeline.add(computation, name=step, subscribes=subscribes, produces=[step], on_error="stop")
            sources = [step]
        return pipeline.stream(sources[0])

    def names(self, name: str) -> list[str]:
        """The windowed steps' names, given the first one's."""
        return [name, *(f"{name}_then_{number}" for number, _ in enumerate(self.setting.then, 1))]


def value_of(row: Mapping[str, Any]) -> Any:
    """The value of an injected row."""
    return orjson.loads(row["value"])


@dataclass(frozen=True, slots=True)
class _Shift:
    micros: int

    def __call__(self, value: Any, at: int) -> int:  # noqa: ARG002 - any value
        return at + self.micros

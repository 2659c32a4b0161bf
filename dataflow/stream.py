"""
Streams with windows: the verbs that the dataflow layer adds, and the pipeline that hands them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack, cast

from millpond.dataflow.combiners.combine_fn import CombineFn, ValueExtractor, check_extractor
from millpond.dataflow.combiners.combiners import ToList
from millpond.dataflow.step.element_wise import ElementWise, PaneKey, TimestampShift
from millpond.dataflow.step.pane import Pane
from millpond.dataflow.step.strategy import Accumulation, Closing, WindowingStrategy
from millpond.dataflow.step.windowed_computation import WindowedComputation
from millpond.dataflow.triggers.trigger import Trigger
from millpond.dataflow.triggers.watermark_triggers import Default
from millpond.dataflow.windows.timestamp_combiner import TimestampCombiner
from millpond.dataflow.windows.window import Window
from millpond.dataflow.windows.window_fn import WindowFn
from millpond.executor.pipeline.stream import ComputationOptions, Stream
from millpond.statestore.errors import InvalidError

if TYPE_CHECKING:
    from millpond.executor.event_time.duration import Duration, Instant
    from millpond.executor.event_time.late_data_horizon import LateDataHorizon
    from millpond.executor.pipeline.key_extractor import KeyExtractor

__all__ = ["DataflowStream", "WindowedStream"]


@dataclass(frozen=True, slots=True, repr=False)
class DataflowStream(Stream):
    """
    A stream whose records may be grouped in windows.
    """

    def window(
        self,
        window_fn: WindowFn,
        *,
        trigger: Trigger | None = None,
        accumulation: Accumulation | str = Accumulation.DISCARDING,
        allowed_lateness: Duration = 0,
        timestamp_combiner: TimestampCombiner | str = TimestampCombiner.END_OF_WINDOW,
        closing: Closing = "if_non_empty",
        emit_empty_on_time: bool = True,
        of: ValueExtractor = None,
    ) -> WindowedStream:
        """
        Say where in event time records are grouped, when groups are shown, and how panes relate.

        Args:
            window_fn: which windows a record belongs to.
            trigger: when a window shows its contents; when the watermark passes its end, unless given.
            accumulation: ``"discarding"``, ``"accumulating"`` or ``"retracting"``.
            allowed_lateness: how long after its end a window takes late records.
            timestamp_combiner: the event time of panes.
            closing: what comes when a window expires with elements that no trigger has shown.
            emit_empty_on_time: whether the on-time pane comes even without news.
            of: what of a record's value is the element that triggers and combiners see: a field,
                a function of the value, or ``None`` for all of it.

        Returns:
            The stream, ready to be combined or processed by window.

        Raises:
            InvalidError: the arguments cannot be, or do not fit each other.
        """
        check_extractor(of)
        strategy = WindowingStrategy(
            window_fn=window_fn,
            trigger=Default() if trigger is None else trigger,
            accumulation=cast(Accumulation, accumulation),
            allowed_lateness=allowed_lateness,
            timestamp_combiner=cast(TimestampCombiner, timestamp_combiner),
            closing=closing,
            emit_empty_on_time=emit_empty_on_time,
        )
        return WindowedStream(self, strategy, of)

    def flat_map(
        self,
        function: Callable[[Any], Iterable[Any]],
        *,
        name: str,
        key: KeyExtractor = None,
        **options: Unpack[ComputationOptions],
    ) -> DataflowStream:
        """
        Make any number of values of each one, on their own; windows, panes and retractions stay with them.

        Args:
            function: given a value, gives values; it must give the same ones for a retraction.
            name: the step's name.
            key: how the value's key is got before.
            options: `ComputationOptions`.
        """
        return self.apply(ElementWise(function, name), name=name, key=PaneKey.of(key), **options)

    def map(
        self,
        function: Callable[[Any], Any],
        *,
        name: str,
        key: KeyExtractor = None,
        **options: Unpack[ComputationOptions],
    ) -> DataflowStream:
        """
        Make one value of each one, like `flat_map`.
        """
        return self.flat_map(lambda value: (function(value),), name=name, key=key, **options)

    def with_timestamps(
        self,
        function: Callable[[Any, int], Instant],
        *,
        name: str,
        late_data_horizon: LateDataHorizon = 0,
        key: KeyExtractor = None,
        **options: Unpack[ComputationOptions],
    ) -> DataflowStream:
        """
        Give every value another event time.

        Forwards is free. Backwards, a value would be late for whoever has been told that time
        has passed it: a horizon holds the watermark of all that follows back by as much, always.

        Args:
            function: given a value and its time in microseconds, gives the new time: microseconds,
                or a ``datetime`` with a zone; it must give the same one for a retraction.
            name: the step's name.
            late_data_horizon: how far back times may be moved; what goes further is refused and
                becomes a dead letter. ``"unbounded"``: as far as you like, and openly late.
            key: how the value's key is got before.
            options: `ComputationOptions`.

        Example:
            ``logs.with_timestamps(lambda log, at: log["opened"], name="visits", late_data_horizon="1h")``
        """
        shift = TimestampShift(function, name, late_data_horizon)
        return self.apply(shift, name=name, key=PaneKey.of(key), **options)


@dataclass(frozen=True, slots=True)
class WindowedStream:
    """
    A stream with a windowing strategy, made by `DataflowStream.window`.
    """

    stream: DataflowStream
    strategy: WindowingStrategy
    of: ValueExtractor = None

    def flat_map(
        self,
        function: Callable[[Any], Iterable[Any]],
        *,
        name: str,
        key: KeyExtractor = None,
        **options: Unpack[ComputationOptions],
    ) -> WindowedStream:
        """
        Make any number of values of each one on its way into its windows; see `DataflowStream.flat_map`.

        Windows follow from event time, which no value changes; a window function of your own that
        looks at values sees the new ones.
        """
        return replace(self, stream=self.stream.flat_map(function, name=name, key=key, **options))

    def map(
        self,
        function: Callable[[Any], Any],
        *,
        name: str,
        key: KeyExtractor = None,
        **options: Unpack[ComputationOptions],
    ) -> WindowedStream:
        """
        Make one value of each one, like `flat_map`.
        """
        return replace(self, stream=self.stream.map(function, name=name, key=key, **options))

    def combine(
        self,
        combine: CombineFn,
        *,
        name: str,
        key: KeyExtractor = None,
        result: Callable[[str, Any, Window], Any] | None = None,
        **options: Unpack[ComputationOptions],
    ) -> DataflowStream:
        """
        Combine the values of each key and window into one.

        Args:
            combine: how, for example ``Count()``.
            name: the step's name, its table in SQL, and the stream of its panes.
            key: how the value's key is got; for the result of a windowed step, from its value.
            result: what to show, given key, combined value and window; the combined value alone
                unless given. A step after this one can then group by what was the key here.
            options: `ComputationOptions`.

        Returns:
            The stream of panes; its values are envelopes with ``value``, ``window``, ``at`` and ``pane``.

        Raises:
            InvalidError: the declaration cannot be right; the error names the culprit.

        Example:
            >>> by_team = scores.combine(Sum("score"), name="sums", result=lambda team, score, _: [team, score])
        """
        if not isinstance(combine, CombineFn):
            raise InvalidError("this is no CombineFn: give an instance", computation=name, combine=combine)
        finish = None if result is None else _Result(result)
        computation = WindowedComputation(self.strategy, combine, name, of=self.of, finish=finish)
        return self.stream.apply(computation, name=name, key=PaneKey.of(key), **options)

    def process_windows(
        self,
        function: Callable[[list[Any], Window, Pane], Iterable[Any]],
        *,
        name: str,
        key: KeyExtractor = None,
        **options: Unpack[ComputationOptions],
    ) -> DataflowStream:
        """
        Hand all values of each key and window to a function, and show what it gives.

        Args:
            function: given the values in the order in which they came, the window and the pane,
                gives the values to show.
            name: the step's name, its table in SQL, and the stream of its panes.
            key: how the value's key is got; for the result of a windowed step, from its value.
            options: `ComputationOptions`.
        """
        computation = WindowedComputation(
            self.strategy, ToList(), name, of=self.of, finish=_OfWindow(function)
        )
        return self.stream.apply(computation, name=name, key=PaneKey.of(key), **options)


@dataclass(frozen=True, slots=True)
class _Result:
    """
    A user's function of key, combined value and window, as a `Finish`.
    """

    function: Callable[[str, Any, Window], Any]

    def __call__(self, key: str, value: Any, window: Window, pane: Pane) -> Iterable[Any]:  # noqa: ARG002 - a Finish
        return (self.function(key, value, window),)


@dataclass(frozen=True, slots=True)
class _OfWindow:
    """
    A user's function of values, window and pane, as a `Finish`.
    """

    function: Callable[[list[Any], Window, Pane], Iterable[Any]]

    def __call__(self, key: str, value: Any, window: Window, pane: Pane) -> Iterable[Any]:  # noqa: ARG002 - a Finish
        return self.function(value, window, pane)

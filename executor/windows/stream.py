"""Streams with windows: windowing, combining, co-grouping and element-wise steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Unpack, cast, overload

from millpond.executor.computation.computation import Computation, Drain
from millpond.executor.computation.records import Record
from millpond.executor.inputs.keys import KeyExtractor, PaneKey
from millpond.executor.pipeline.checks import check_overrides
from millpond.executor.pipeline.nodes import (
    LATE,
    Backfill,
    ComputationOptions,
    OnError,
    OnLate,
    ProductionMode,
    ValueSchema,
)
from millpond.executor.pipeline.pipeline import Stream
from millpond.executor.time.clocks import LateDataHorizon
from millpond.executor.time.instants import Instant
from millpond.executor.windows.combiners import (
    CombineFields,
    CombineFn,
    ToList,
    TopN,
    ValueExtractor,
    check_extractor,
    without_element,
)
from millpond.executor.windows.pane import Pane
from millpond.executor.windows.strategy import (
    Accumulation,
    Asked,
    Closing,
    UpgradeWindows,
    WindowingStrategy,
    described,
)
from millpond.executor.windows.time_triggers import Default
from millpond.executor.windows.trigger import Trigger
from millpond.executor.windows.window import Element, TimestampCombiner, Window, WindowFn
from millpond.executor.windows.window_fns import SlidingWindows
from millpond.executor.windows.windowed_computation import (
    ElementWise,
    TimestampShift,
    WindowedComputation,
    element_of,
    refuse_one_value,
)
from millpond.statestore.arguments import check_function
from millpond.statestore.durations import Duration, accepts_old_durations, duration_us
from millpond.statestore.errors import InvalidError

_LOG = logging.getLogger("millpond")


@dataclass(frozen=True, slots=True, repr=False)
class DataflowStream(Stream):
    """A stream whose records can be grouped into windows."""

    def window(
        self,
        window_fn: WindowFn,
        *,
        trigger: Trigger | None = None,
        accumulation: Accumulation | str | None = None,
        incremental: bool = False,
        allowed_lateness: Duration = 0,
        timestamp_combiner: TimestampCombiner | str = TimestampCombiner.END_OF_WINDOW,
        closing: Closing = "if_non_empty",
        emit_empty_on_time: bool = True,
        asked: Asked = "element",
        of: ValueExtractor = None,
        state_version: int = 0,
        upgrade_state: UpgradeWindows | None = None,
    ) -> WindowedStream:
        """Choose where in event time records are grouped, when groups are emitted, and how panes relate.

        These are the questions of the Dataflow model: ``window_fn`` answers *where*, ``trigger`` *when* and
        ``accumulation`` *how*. The step that follows answers *what*: `WindowedStream.combine`, for example.

        Args:
            window_fn: assigns each record to windows.
            trigger: by default, when the watermark passes the window's end, and again for each late record.
            accumulation: ``"discarding"``: a pane has the elements since the previous pane of its window;
                ``"accumulating"``: all so far; ``"retracting"``: all, after a retraction of the previous pane. By default
                discarding; accumulating where all panes go to sinks with ``mode="upsert"``, which keep the last one;
                retracting if a new pane may leave a row of the last one behind (docs/windows.md).
            incremental: retract the previous pane in any other mode, too. Downstream steps then hold the last pane of
                each window, such as its latest change with ``"discarding"``.
            allowed_lateness: how long after its end a window still accepts late records.
            timestamp_combiner: how a pane's event time follows from its window and elements.
            closing: whether an expiring window emits a last pane: ``"never"``, ``"if_non_empty"`` (if it
                holds elements that no pane has shown) or ``"always"``.
            emit_empty_on_time: emit the on-time pane even if no element arrived since the previous pane.
            asked: ``"element"`` asks the trigger after each element, in the order of arrival, so that panes do not
                depend on how the input is cut; ``"bundle"`` makes fewer panes of a busy key.
            of: the part of a record's value that triggers and combiners see: a field name or a function of the value.
            state_version: raise it with ``upgrade_state`` when other windows, another trigger, accumulation or combiner
                are to continue with open windows, which are refused otherwise (docs/how-to/change-code.md).
            upgrade_state: takes a key's stored windows and the version that stored them; returns them in today's form.

        Example:
            >>> hourly = scores.window(FixedWindows("1h"), allowed_lateness="1d", accumulation="accumulating")
        """
        check_extractor(of)
        strategy = WindowingStrategy(
            window_fn=window_fn,
            trigger=Default() if trigger is None else trigger,
            accumulation=cast(Accumulation, accumulation),
            incremental=incremental,
            allowed_lateness=allowed_lateness,
            timestamp_combiner=cast(TimestampCombiner, timestamp_combiner),
            closing=closing,
            emit_empty_on_time=emit_empty_on_time,
            asked=asked,
            state_version=state_version,
            upgrade_state=upgrade_state,
        )
        if isinstance(window_fn, SlidingWindows) and duration_us(window_fn.period) > duration_us(
            window_fn.size
        ):
            _LOG.warning(
                "the windows begin further apart than they are long, and records in between are in none: it is "
                "SlidingWindows(size, period): stream=`%s` window_fn=`%s`",
                self.name,
                window_fn,
            )
        return WindowedStream(self, strategy, of)

    def late(self) -> DataflowStream:
        """Return the records that came too late for the windowed step whose results this stream has.

        Its records are those that the counter ``dropped`` of the step counts: all of their windows had expired. Each has
        its value as the step got it, the step's key, and its own time, which is behind the watermark; it comes exactly
        once. The stream is named ``{step}.late``. Of `WindowedStream.top`, take ``pipeline.stream("{name}_each").late()``.

        Raises:
            InvalidError: the stream is not the result of a windowed step, or the step withholds late records by
                ``on_late``.

        Example:
            ``hourly.late().sink("late", mp.DeltaSink("late"))``
        """
        node = self.pipeline.producer_of(self.name)
        code = None if node is None else node.computation
        if (
            node is None
            or not isinstance(code, WindowedComputation)
            or node.production_names[code.stream] != self.name
        ):
            raise InvalidError("only the result of a windowed step has late records", stream=self.name)
        if any(node.drops_late(own.stream) for own in node.subscriptions):
            raise InvalidError(
                'late() needs the records that on_late="drop" withholds: leave on_late out, because the step itself drops '
                "records whose windows have all expired",
                computation=node.name,
            )
        code.late_stream = f"{self.name}{LATE}"
        self.pipeline.add_production(node.name, code.late_stream)
        return replace(self, name=code.late_stream)

    def flat_map(
        self,
        function: Callable[[Any], Iterable[Any]],
        *,
        name: str,
        key: KeyExtractor = None,
        schema: ValueSchema = None,
        **options: Unpack[ComputationOptions],
    ) -> DataflowStream:
        """Replace each value by an iterable of any number of values; windows, panes and retractions are kept.

        The function must be deterministic, so that a retraction yields the values it retracts. ``name`` names the
        step and its output stream. ``key`` extracts the key under which the step runs; the record's key by default.
        With a ``schema`` the values are dicts of its fields, kept and delivered as columns; panes have none.

        Example:
            >>> words = lines.flat_map(str.split, name="words")
        """
        check_function("function", function, computation=name)
        code = ElementWise(function, name)
        return self.apply(code, name=name, key=PaneKey.of(key, name), produces={name: schema}, **options)

    def map(
        self,
        function: Callable[[Any], Any],
        *,
        name: str,
        key: KeyExtractor = None,
        schema: ValueSchema = None,
        **options: Unpack[ComputationOptions],
    ) -> DataflowStream:
        """Replace each value by one value; see `flat_map`."""
        check_function("function", function, computation=name)
        code = ElementWise(lambda value: (function(value),), name, is_one_to_one=True)
        return self.apply(code, name=name, key=PaneKey.of(key, name), produces={name: schema}, **options)

    def union(
        self,
        *others: DataflowStream,
        name: str,
        schema: ValueSchema = None,
        **options: Unpack[ComputationOptions],
    ) -> DataflowStream:
        """Join this stream and others of its pipeline into one; keys, windows, panes and retractions are kept.

        Records of different streams are in no order. ``schema`` is that of the values; see `flat_map`.

        Example:
            ``visits = web.union(app, name="visits")``
        """
        streams = (self, *others)
        if not others or len({stream.name for stream in streams}) < len(streams):
            raise InvalidError("a union is of two or more different streams", computation=name)
        if any(stream.pipeline is not self.pipeline for stream in others):
            raise InvalidError("a union is of streams of one pipeline", computation=name)
        produced = self.pipeline.add(
            ElementWise(_itself, name, is_one_to_one=True),
            name=name,
            subscribes={stream.name: None for stream in streams},
            produces={name: schema},
            **options,
        )
        return replace(self, name=produced[name].name)

    def with_timestamps(
        self,
        function: Callable[[Any, int], Instant],
        *,
        name: str,
        late_data_horizon: LateDataHorizon = 0,
        key: KeyExtractor = None,
        schema: ValueSchema = None,
        **options: Unpack[ComputationOptions],
    ) -> DataflowStream:
        """Give each value a new event time.

        A later time is always safe. An earlier time may be behind the watermark that downstream steps
        have already seen. So ``late_data_horizon`` holds the watermark of this step's output back
        by the same amount, at the price of later results everywhere downstream.

        Args:
            function: takes a value and its event time in microseconds since 1970 UTC and returns the
                new time: microseconds, or a ``datetime`` with a zone; the same for a retraction.
            name: the step's name and the name of its output stream.
            late_data_horizon: how far back a time may be moved; a value that is moved further becomes a dead letter.
                ``"unbounded"`` does not hold the watermark: values may be moved back freely, and may be late.
            key: extracts the key under which the step runs; the record's key by default.
            schema: the schema of the values; see `flat_map`.
            options: see `ComputationOptions`.

        Example:
            ``logs.with_timestamps(lambda log, at: log["opened"], name="visits", late_data_horizon="1h")``
        """
        check_function("function", function, computation=name)
        shift = TimestampShift(function, name, late_data_horizon)
        return self.apply(shift, name=name, key=PaneKey.of(key, name), produces={name: schema}, **options)


@dataclass(frozen=True, slots=True)
class WindowedStream:
    """A stream with a windowing strategy; returned by `DataflowStream.window`."""

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
        """Replace each value by any number of values before it is windowed, by its event time, which stays."""
        return replace(self, stream=self.stream.flat_map(function, name=name, key=key, **options))

    def map(
        self,
        function: Callable[[Any], Any],
        *,
        name: str,
        key: KeyExtractor = None,
        **options: Unpack[ComputationOptions],
    ) -> WindowedStream:
        """Replace each value by one value before it is windowed; see `flat_map`."""
        return replace(self, stream=self.stream.map(function, name=name, key=key, **options))

    @overload
    def combine(
        self,
        combine: CombineFn | Mapping[str, CombineFn],
        *,
        name: str,
        key: KeyExtractor = None,
        result: Callable[[str, Any, Window], Any] | None = None,
        **options: Unpack[ComputationOptions],
    ) -> DataflowStream: ...

    @overload
    def combine(
        self,
        *,
        name: str,
        key: KeyExtractor = None,
        result: Callable[[str, Any, Window], Any] | None = None,
        exactly_once: bool = True,
        on_error: OnError = "dead_letter",
        retries: int = 2,
        intervals: int | None = None,
        on_late: OnLate | Mapping[str, OnLate] = "process",
        productions: ProductionMode = "strong",
        user_code_timeout: str | timedelta | None = None,
        time_sorted: bool = False,
        drain: Drain = "last_event",
        feedback: Collection[str] = (),
        renamed_from: str | None = None,
        backfill: Backfill | None = None,
        **fields: CombineFn,
    ) -> DataflowStream: ...

    @accepts_old_durations
    def combine(
        self,
        combine: CombineFn | Mapping[str, CombineFn] | None = None,
        *,
        name: str,
        key: KeyExtractor = None,
        result: Callable[[str, Any, Window], Any] | None = None,
        **fields: Any,
    ) -> DataflowStream:
        """Combine the elements of each key and window into one value, or into several fields of one value.

        Args:
            combine: the combine function, for example ``Count()``; or several by the names of their
                fields, which may be given as keywords instead: ``total=Sum("amount"), visits=Count()``.
                The combined value is then an object with these fields, each of which may be a column
                of a sink. A field with the name of an argument or an option must be given in a mapping.
            name: the step's name, its table in SQL, and the name of its output stream.
            key: extracts the grouping key from a value (of a windowed step's result: from the
                value inside its envelope); the record's key by default.
            result: takes the key, the combined value and the window, and returns the value to emit, for example
                with the key, so that a later step can group by it.
            fields: several combine functions, and options; see `ComputationOptions`.

        Returns:
            The stream of panes: envelopes with ``value``, ``window``, ``at`` and ``pane``.

        Example:
            >>> by_team = scores.combine(Sum("score"), name="sums", result=lambda team, score, _: [team, score])
            >>> both = scores.combine(total=Sum("score"), best=Max("score"), name="both")
        """
        options = ComputationOptions()
        for option in ComputationOptions.__annotations__.keys() & fields.keys():
            options[option] = fields.pop(option)  # type: ignore[literal-required]  # one of its keys
        chosen = _chosen(combine, fields, step=name)
        check_function("result", result, optional=True, computation=name)
        finish = None if result is None else _Result(result)
        computation = WindowedComputation(self.strategy, chosen, name, of=self.of, finish=finish)
        return self.stream.apply(computation, name=name, key=PaneKey.of(key, name), **options)

    def top(
        self,
        count: int,
        combine: CombineFn,
        *,
        name: str,
        key: KeyExtractor = None,
        among: Callable[[str], str] | None = None,
        smallest: bool = False,
        **options: Unpack[ComputationOptions],
    ) -> DataflowStream:
        """Rank the keys of each window by their combined values, greatest first.

        Two steps: ``{name}_each`` combines each key's elements, and retracts its previous pane with each new one;
        ``{name}`` keeps the best of a window. So a list stays right when late elements change it, and when a value
        falls and another one moves up. Both steps take triggers and lateness from `DataflowStream.window`. A list
        replaces the previous list, or retracts it with ``accumulation="retracting"``.

        Args:
            count: the number of keys to show, at least 1.
            combine: combines the elements of a key into the value to rank by, for example ``Count()``.
            name: the name of the second step, its table in SQL, and the name of its output stream.
            key: extracts the key from a value; the record's key by default.
            among: takes a key and returns the group within which it is ranked; by default all keys are one
                group, which is one row of the store.
            smallest: rank the smallest first instead.
            options: see `ComputationOptions`; for both steps. ``renamed_from`` is the former ``name``.

        Returns:
            The stream of panes, by group: lists of ``{"key": …, "value": …}``. Keys with equal values are
            in the order of the keys, likewise greatest first.

        Example:
            ``best = sales.window(FixedWindows("1d")).top(3, Sum("amount"), key="product", name="best")``
        """
        check_function("among", among, optional=True, computation=name)
        each = replace(self.strategy, accumulation=Accumulation.RETRACTING)
        of_each = options.copy()
        if former := options.get("renamed_from"):
            of_each["renamed_from"] = f"{former}_each"
        entries = replace(self, strategy=each).combine(
            combine, name=f"{name}_each", key=key, result=entry_of, **of_each
        )
        is_retracting = self.strategy.accumulation is Accumulation.RETRACTING
        every = replace(
            self.strategy,
            window_fn=_WindowOfEntry(),
            accumulation=Accumulation.RETRACTING if is_retracting else Accumulation.ACCUMULATING,
            # A retraction and its replacement arrive in one bundle: a list between them would lack the key.
            asked="bundle",
        )
        # `Pipeline.check` may still choose to retract lists whose entries are rows of an upsert.
        object.__setattr__(every, "is_accumulation_given", self.strategy.is_accumulation_given)
        best = TopN(count, of=ranked, smallest=smallest, retractable=True)
        return WindowedStream(entries, every).combine(
            best, name=name, key=group_of(among), result=_listed, **options
        )

    def process_windows(
        self,
        function: Callable[[list[Any], Window, Pane], Iterable[Any]],
        *,
        name: str,
        key: KeyExtractor = None,
        **options: Unpack[ComputationOptions],
    ) -> DataflowStream:
        """Pass all elements of each key and window to a function, and emit each returned value in an envelope.

        The function takes the elements in order of arrival, the window and the pane. The elements are kept until the
        window's contents are discarded: prefer `combine` where a combine function exists, which explains the arguments.
        """
        check_function("function", function, computation=name)
        computation = WindowedComputation(
            self.strategy, ToList(), name, of=self.of, finish=OfWindow(function)
        )
        return self.stream.apply(computation, name=name, key=PaneKey.of(key, name), **options)


def _chosen(
    combine: CombineFn | Mapping[str, CombineFn] | None, fields: Mapping[str, CombineFn], *, step: str
) -> CombineFn:
    if combine is None:
        combine = fields
    elif fields:
        raise InvalidError(
            "combine takes one combiner, or several by field, and the options of a computation",
            computation=step,
            fields=sorted(fields),
        )
    if isinstance(combine, Mapping):
        try:
            return CombineFields(dict(combine))
        except InvalidError as error:
            error.add_note(f"in the combiners of {step!r}")
            raise
    if not isinstance(combine, CombineFn):
        raise InvalidError("combine takes an instance of a CombineFn", computation=step, combine=combine)
    check_overrides(CombineFn, combine, computation=step)
    return combine


def _itself(value: Any) -> Iterable[Any]:
    return (value,)


def passes_values_on(code: Computation) -> bool:
    """Return True for the steps of `DataflowStream.union` and `DataflowStream.with_timestamps`."""
    return isinstance(code, TimestampShift) or (isinstance(code, ElementWise) and code.function is _itself)


def entry_of(key: str, value: Any, window: Window) -> dict[str, Any]:
    return {"key": key, "value": value, "window": list(window)}


@dataclass(frozen=True, slots=True)
class _WindowOfEntry(WindowFn):
    def assign(self, element: Element) -> Sequence[Window]:
        start, end = element.value["window"]
        return (Window(start, end),)


def ranked(entry: Any) -> list[Any]:
    # Equal values are ordered by their keys.
    return [entry["value"], entry["key"]]


def group_of(among: Callable[[str], str] | None) -> Callable[[Any], str]:
    return lambda entry: "all" if among is None else among(entry["key"])


def _listed(key: str, best: Any, window: Window) -> Any:  # noqa: ARG001 - a result of `WindowedStream.combine`
    return [{"key": ranked, "value": value} for value, ranked in best]


@dataclass(frozen=True, slots=True)
class _Result:
    """A user's function of key, combined value and window as a `Finish`."""

    function: Callable[[str, Any, Window], Any]

    def __call__(self, key: str, value: Any, window: Window, pane: Pane) -> Iterable[Any]:  # noqa: ARG002 - a Finish
        return (self.function(key, value, window),)


@dataclass(frozen=True, slots=True)
class OfWindow:
    """A user's function of elements, window and pane as a `Finish`."""

    function: Callable[[list[Any], Window, Pane], Iterable[Any]]

    def __call__(self, key: str, value: Any, window: Window, pane: Pane) -> Iterable[Any]:  # noqa: ARG002 - a Finish
        results = self.function(value, window, pane)
        refuse_one_value(results, "process_windows")
        return results


@dataclass(frozen=True)
class _ByTag(CombineFn):
    tags: tuple[str, ...]

    def create(self) -> dict[str, list[Any]]:
        return {tag: [] for tag in self.tags}

    def add(self, accumulator: dict[str, list[Any]], value: tuple[str, Any]) -> dict[str, list[Any]]:
        tag, inner = value
        accumulator[tag].append(inner)
        return accumulator

    def merge(self, accumulators: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
        return {tag: [value for group in accumulators for value in group[tag]] for tag in self.tags}

    def uncombine(self, accumulator: dict[str, list[Any]], value: tuple[str, Any]) -> dict[str, list[Any]]:
        rest, is_held = self.uncombine_if_held(accumulator, value)
        if not is_held:
            raise InvalidError("a retraction matches no element", value=value[1])
        return rest

    def uncombine_if_held(
        self, accumulator: dict[str, list[Any]], value: tuple[str, Any]
    ) -> tuple[dict[str, list[Any]], bool]:
        tag, inner = value
        rest, is_held = without_element(accumulator[tag], inner)
        return {**accumulator, tag: rest}, is_held


class _CoGrouping(WindowedComputation):
    def __init__(
        self,
        strategy: WindowingStrategy,
        tags: Mapping[str, str],
        stream: str,
        extractors: Mapping[str, ValueExtractor],
    ) -> None:
        super().__init__(strategy, _ByTag(tuple(tags.values())), stream)
        self.tags = dict(tags)
        self.extractors = dict(extractors)

    @property
    def fingerprint(self) -> Mapping[str, str]:  # type: ignore[override]  # a constant of the class elsewhere
        given = {tag: self.extractors.get(tag) for tag in self.tags.values()}
        return {**super().fingerprint, "combine": f"co_group{described(given)}"}

    def element(self, record: Record) -> Element:
        tag = self.tags[record.stream]
        element = element_of(record, self.extractors.get(tag))
        return element._replace(value=(tag, element.value))


def co_group(
    streams: Mapping[str, DataflowStream],
    strategy: WindowingStrategy,
    *,
    name: str,
    keys: Mapping[str, KeyExtractor] | None = None,
    of: Mapping[str, ValueExtractor] | None = None,
    **options: Unpack[ComputationOptions],
) -> DataflowStream:
    """Group several streams of one pipeline by key and window, the basis of joins (Beam's CoGroupByKey).

    A pane's value is an object with one list per tag; use ``flat_map`` to turn the lists into joined rows.

    Args:
        streams: the input streams, by tag; each stream once.
        strategy: windows, trigger, accumulation and lateness.
        name: the step's name, its table in SQL, and the name of its output stream.
        keys: extracts the grouping key from a value, by tag; by default the record's key.
        of: the part of a value that is kept, by tag: a field name or a function; by default the whole value.
        options: see `ComputationOptions`.

    Example:
        >>> joined = co_group({"bid": bids, "auction": auctions}, strategy, name="joined", keys={"bid": "auction"})
    """
    pipelines = {id(stream.pipeline) for stream in streams.values()}
    if len(pipelines) != 1 or len({stream.name for stream in streams.values()}) < len(streams):
        raise InvalidError("co_group takes different streams of one pipeline", step=name)
    first, *_ = streams.values()
    key_extractors, extractors = keys or {}, of or {}
    if unknown := sorted({*key_extractors, *extractors} - streams.keys()):
        raise InvalidError("keys and of take the tags of the streams", step=name, unknown=unknown)
    for extractor in extractors.values():
        check_extractor(extractor)
    produced = first.pipeline.add(
        _CoGrouping(strategy, {stream.name: tag for tag, stream in streams.items()}, name, extractors),
        name=name,
        subscribes={
            stream.name: PaneKey.of(key_extractors.get(tag), name) for tag, stream in streams.items()
        },
        produces=(name,),
        **options,
    )
    return replace(first, name=produced[name].name)

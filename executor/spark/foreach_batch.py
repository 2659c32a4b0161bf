"""Embedding: a pipeline, or one computation, in the ``foreachBatch`` of the user's own streaming queries.

All functions of a pipeline and a store share one run: one set of leases, one superstep at a time, one sequence of
commits. The first batch of any query opens the run, `EmbeddedRun.close` or a failure ends it, and the next batch of a
query that was started since then opens it again. A query that is stopped in the middle of a batch ends the run too,
since Spark cancels its jobs, but that is not a failure.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any, Final, NoReturn, Self, Unpack
from weakref import WeakValueDictionary

from pyspark.sql import DataFrame

from millpond.executor.computation.computation import Computation, Drain
from millpond.executor.inputs.extraction import FieldExtractor
from millpond.executor.inputs.keys import KeyField
from millpond.executor.inputs.payload import Payload
from millpond.executor.pipeline.nodes import (
    SIGNALS,
    Backfill,
    ComputationOptions,
    OnError,
    OnLate,
    ProductionMode,
    StateSchema,
    ValueSchema,
)
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.run.options import SparkRunnerOptions
from millpond.executor.sinks.sink import Sink
from millpond.executor.spark.queries import QueryStart
from millpond.executor.spark.run import SparkRun
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.spark.session import INSTEAD, refuse_connect
from millpond.executor.time.instants import TimeUnit
from millpond.executor.time.observations import OnAhead
from millpond.executor.time.watermark_policies import IngressTime, WatermarkPolicy
from millpond.statestore.durations import Duration, with_new_names
from millpond.statestore.errors import (
    InternalError,
    InvalidError,
    QueryStoppedError,
    UnavailableError,
    UnpicklableError,
    did_you_mean,
)
from millpond.statestore.history.lineage import place_of
from millpond.statestore.store import Store

_LOG: Final = logging.getLogger("millpond")
_OPENINGS_MAX: Final = 10
"""Number of times that a batch may find its run closed by another thread."""

_OWNERS: Final[dict[tuple[str, str], EmbeddedRun]] = {}
"""The open run of this process, or the run being opened, by the place of the store and the pipeline's name."""

_CLAIM: Final = threading.Lock()
"""Held while `_OWNERS` changes."""


@dataclass(slots=True, eq=False)
class OpenRun:
    """A run from its opening to its end, with the consumers of batches by stream; a closed run has no failure."""

    run: SparkRun
    functions: dict[str, Callable[[DataFrame, int], None]] = field(default_factory=dict)
    failure: BaseException | None = None
    is_over: bool = False


class EmbeddedRun:
    """The run that all functions of a pipeline and a store share; any thread may use it."""

    def __init__(self, pipeline: EnginePipeline, place: str) -> None:
        self.pipeline: EnginePipeline = pipeline
        self._name = (place, pipeline.name)
        self._lock = threading.RLock()
        self._options: dict[str, Any] = {}
        self._said: set[str] = set()
        self._runner: SparkRunner | None = None
        self._streams: set[str] = set()
        self._open: OpenRun | None = None
        self._is_too_late = False

    def join(
        self, stream: str, options: Mapping[str, Any], make: Callable[[Mapping[str, Any]], SparkRunner]
    ) -> None:
        """Add a stream's function, and the options of its call.

        The functions share the run, so each option is the same in every call that names it. Once a run has ended, a
        call may change options for the next run.
        """
        with self._lock:
            # Make the runner first: it refuses options that it does not know.
            all_options = {**self._options, **options}
            runner = make(all_options)
            for name, value in options.items():
                is_known, is_open = name in self._options, self._open is not None
                before = self._options.get(name)
                is_same = before is value or bool(before == value)
                if is_known and (is_open or name in self._said) and not is_same:
                    raise InvalidError(
                        "the functions of a pipeline share one run: say an option once, or the same each time",
                        pipeline=self.pipeline.name,
                        option=name,
                        given=value,
                        before=before,
                    )
                if is_open and not is_known:
                    raise InvalidError(
                        "the run has begun without this option: say it where its first function is made",
                        pipeline=self.pipeline.name,
                        option=name,
                    )
            self._runner, self._options = runner, all_options
            self._said |= options.keys()
            self._streams.add(stream)

    @property
    def run(self) -> SparkRun:
        opened = self._open
        if opened is None:
            raise InvalidError(
                "no run is open: the first batch of a query opens it", pipeline=self.pipeline.name
            )
        return opened.run

    def consume(self, stream: str, frame: DataFrame, batch: int) -> OpenRun:
        """Consume one micro-batch of a stream in exactly one superstep and one commit; return the run."""
        for _ in range(_OPENINGS_MAX):
            opened = self._opened(stream)
            try:
                if stream not in opened.functions:
                    opened.functions[stream] = opened.run.on_batch(stream)
                opened.functions[stream](frame, batch)
            except BaseException as failure:
                if self._is_blamed(opened, stream, failure):
                    raise
            else:
                return opened
        raise UnavailableError("the run is closed again and again while a batch waits for it", input=stream)

    def close(self) -> None:
        """Do all the work that is due, and give the leases back; the next batch of a query opens the run again."""
        # A batch that arrives meanwhile waits for the lock, and then opens another run.
        with self._lock:
            opened = self._ended()
            if opened is None:
                return
            try:
                opened.run.run_until_quiet()
                streams = opened.run.topology.injectors.keys() - {SIGNALS}
                opened.run.note_unfed(sorted(streams))
                summary = opened.run.summary()
                for stream in sorted(summary.skipped.keys() & streams - self._streams - {*summary.ended}):
                    _LOG.warning(
                        "no function takes a stream of the pipeline, which keeps event time where it was unless it was "
                        'declared idle or gone: pipeline.foreach_batch(store, into="%s") makes one pipeline=`%s`',
                        stream,
                        self.pipeline.name,
                    )
            except BaseException:
                opened.run.abandon()
                raise
            opened.run.stop()

    def abandon(self) -> None:
        with self._lock:
            if (opened := self._ended()) is not None:
                opened.run.abandon()

    def _opened(self, stream: str) -> OpenRun:
        """Return the open run, or open one for a batch of this stream."""
        with self._lock:
            opened = self._open
        if opened is not None:
            return opened
        self._claim()
        with self._lock:
            if self._is_too_late:
                raise UnavailableError("the process ends: the next one takes the batch", input=stream)
            if self._open is not None:
                return self._open
            if self._runner is None:
                raise InternalError("a function of the pipeline is called before one was made")
            try:
                run = self._runner.open(self.pipeline)
            except BaseException:
                self._disclaim()
                raise
            run.start_ticker()
            self._open = opened = OpenRun(run)
            atexit.register(self._close_at_exit)
            if waiting := sorted(run.topology.injectors.keys() - {stream, SIGNALS}):
                _LOG.info(
                    "the run is open; other streams keep event time where it was until their first batch pipeline=`%s` "
                    "first=`%s` others=`%s`",
                    self.pipeline.name,
                    stream,
                    waiting,
                )
            return opened

    def _claim(self) -> None:
        takes = self._options.get("on_held", "take") == "take"
        with _CLAIM:
            former = _OWNERS.get(self._name)
            if takes or former is None:
                _OWNERS[self._name] = self
        if takes and former is not None and former is not self:
            former._give_way()  # noqa: SLF001 - of the same class

    def _disclaim(self) -> None:
        with _CLAIM:
            if _OWNERS.get(self._name) is self:
                del _OWNERS[self._name]

    def _is_blamed(self, opened: OpenRun, stream: str, failure: BaseException) -> bool:
        """Record the failure of a batch; return True if its query must fail too instead of retrying."""
        stop = failure if isinstance(failure, QueryStoppedError) else None
        with self._lock:
            if not opened.is_over:
                if opened.run.is_active:
                    return True
                opened.failure = failure if stop is None else None
                self._ended()
                opened.run.abandon()
            # A run without a failure was closed, or a query was stopped: this query or another.
            is_own_stop = stop is not None and stop.details.get("input") == stream
            return is_own_stop or opened.failure is not None

    def _ended(self) -> OpenRun | None:
        """Forget and return the open run, which the caller stops."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.is_over = True
            self._said.clear()
            self._disclaim()
            atexit.unregister(self._close_at_exit)
        return opened

    def _give_way(self) -> None:
        """End the run because another pipeline of its name is about to run on its store in this process."""
        with self._lock:
            opened = self._ended()
            if opened is None:
                return
            opened.failure = InvalidError(
                "another pipeline of this name has taken the store over, in this process: make the functions of all "
                "streams from one Pipeline object",
                pipeline=self.pipeline.name,
            )
            _LOG.warning("%s", opened.failure)
            opened.run.abandon()

    def _close_at_exit(self) -> None:
        """Give the leases back at the end of the process, when it is too late for work."""
        with self._lock:
            self._is_too_late = True
            opened = self._ended()
        if opened is None:
            return
        if opened.run.has_work():
            _LOG.warning("work is due that the next run will do: call close() when the query has ended")
        opened.run.stop()


INPUT = "input"
"""Name of the injected stream of an embedded computation."""

_RUNS: Final[WeakValueDictionary[tuple[str, int], EmbeddedRun]] = WeakValueDictionary()
"""The run of each pipeline object on a store, by the store's place, as long as one of its functions lives."""

_MAKING: Final = threading.Lock()
"""Held while a function is made, so that all functions of a pipeline and a store find the same run."""


class ForeachBatch:
    """A function for ``writeStream.foreachBatch`` that feeds an injected stream of a pipeline.

    The functions of one `Pipeline` object and store share one run; each belongs to a separate query. The first batch
    of any query takes the leases; `close`, a failure or the end of the process gives them back. `close` also does the
    work that is due by then; the end of the process is too late for that.

    - A failure ends the run, and its query. The other queries fail with the same error at their next batch. A query
      that was started again takes the leases again.
    - A query that you stop does not end the run: the other queries continue, and it continues once you start it again.
    - A stream whose query has had no batch yet holds event time where it was before the run: windows of other
      streams that are joined with it wait.

    The end of a ``with`` closes the function; after an exception the leases are given back, and no work is done.

    Example::

        with pipeline.foreach_batch("pond", into="payments") as function:
            frame.writeStream.foreachBatch(function).trigger(availableNow=True).start().awaitTermination()
    """

    def __init__(self, embedded: EmbeddedRun, stream: str) -> None:
        self._embedded = embedded
        self._stream = stream
        self._joined: tuple[QueryStart, OpenRun] | None = None

    def __call__(self, frame: DataFrame, batch: int) -> None:
        """Consume one micro-batch in exactly one superstep and one commit.

        Raises:
            InvalidError: the frame is not a batch of a streaming query, or it does not fit the stream.
            MillpondError: the error that ended the superstep, or the run since the query's last batch; Spark stops
                the query.
        """
        refuse_connect(frame, input=self._stream)
        begun = QueryStart.of(frame, self._stream)
        if self._joined is not None and self._joined[0] == begun and self._joined[1].failure is not None:
            raise self._joined[1].failure
        self._joined = begun, self._embedded.consume(self._stream, frame, batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self._embedded.abandon()

    def __reduce__(self) -> NoReturn:
        """Raise `InvalidError`: the function cannot be sent to the server of Spark Connect."""
        raise UnpicklableError(
            "a foreachBatch function of Millpond stays in its process, and Spark Connect would send it to the server: "
            f"{INSTEAD}"
        )

    @property
    def run(self) -> SparkRun:
        """The open run, for its watermarks, signals, counts, and rows of streams without a query.

        Raises:
            InvalidError: no run is open: no batch has arrived yet, or the run has ended.
        """
        return self._embedded.run

    def close(self) -> None:
        """Do all the work that the batches so far have made due, and give the leases back.

        Call it when the queries have ended, on any of the functions that share the run: after ``availableNow`` queries
        all productions are then delivered, all timers that the watermark has passed have fired, and the sinks are
        written. A query that still runs takes the leases again with its next batch. A second call does nothing.

        Raises:
            MillpondError: the error of that work; the leases are released anyway.
        """
        self._embedded.close()


class PipelineBatchOptions(SparkRunnerOptions, total=False):
    """The options of `Pipeline.foreach_batch`: the options of `SparkRunner`, which explains each."""


def stream_function(
    pipeline: EnginePipeline,
    store: Store | str | Path,
    stream: str,
    options: Mapping[str, Any],
) -> ForeachBatch:
    """Return the function of one injected stream of a pipeline; see `Pipeline.foreach_batch`."""
    streams = sorted(pipeline.check().injectors.keys() - {SIGNALS})
    if stream not in streams:
        raise InvalidError(
            f"the pipeline injects no such stream{did_you_mean(stream, streams)}",
            pipeline=pipeline.name,
            into=stream,
            injected=streams,
        )
    if options.get("checkpoint_location") is not None:
        raise InvalidError(
            "the query has its own checkpoint: name its place in writeStream.option('checkpointLocation', …)",
            checkpoint_location=options["checkpoint_location"],
        )
    place = store.path if isinstance(store, Store) else place_of(store)
    with _MAKING:
        embedded = _RUNS.get((place, id(pipeline)))
        if embedded is None:
            # The run keeps the pipeline alive, so that no other pipeline gets its id.
            embedded = _RUNS[place, id(pipeline)] = EmbeddedRun(pipeline, place)
        said = {"store": store if isinstance(store, Store) else place, **with_new_names(options)}
        embedded.join(stream, said, lambda known: SparkRunner(**known))
    return ForeachBatch(embedded, stream)


class ForeachBatchOptions(SparkRunnerOptions, total=False):
    """The further options of `foreach_batch`; `Pipeline.inject`, `ComputationOptions` and `SparkRunner` explain each."""

    at_unit: TimeUnit | None
    at_zone: str | None
    change: str | None
    payload: Payload | None
    max_record_bytes: int | None
    ahead_max: Duration | None
    on_ahead: OnAhead
    idle_after: Duration | None
    members: Sequence[str]
    member: FieldExtractor | None
    skew_limit: Duration | None
    exactly_once: bool
    on_error: OnError
    retries: int
    on_late: OnLate | Mapping[str, OnLate]
    productions: ProductionMode
    user_code_timeout: str | timedelta | None
    feedback: Collection[str]
    renamed_from: str | None
    time_sorted: bool
    drain: Drain
    backfill: Backfill | None


def foreach_batch(
    store: Store | str | Path,
    computation: Computation,
    *,
    key: KeyField,
    at: FieldExtractor | IngressTime,
    id: FieldExtractor | None = None,  # noqa: A002 - the word of the paper and of the users
    watermark: WatermarkPolicy | None = None,
    id_slack: Duration = "3h",
    name: str | None = None,
    produces: str | Sequence[str] | Mapping[str, ValueSchema] | None = None,
    state: StateSchema | None = None,
    sink: Sink | Mapping[str, Sink] | None = None,
    pipeline: str | None = None,
    drop: Sequence[str] = (),
    **options: Unpack[ForeachBatchOptions],
) -> ForeachBatch:
    """Embed a computation in the user's own streaming query.

    This is the short form of `Pipeline.foreach_batch`, which takes several computations, streams and windows.

    Args:
        store: path of the store, or an open store.
        computation: the code to run for each key.
        key: column, list of columns (or function of the row) with the key; see `Pipeline.inject`.
        at: column (or function of the row) with the event time, or `IngressTime`.
        id: column (or function of the row) with the record's id; records with the same id count once.
        watermark: policy by which the low watermark follows the records; by default the delay of the query's
            ``withWatermark`` on the column ``at``, and without that records must arrive in the order of their times.
        id_slack: time within which a sender may repeat a record; see `Pipeline.inject`.
        name: the computation's name in the store; by default the name of its class.
        produces: the stream or streams of the computation's productions, or a mapping of them to the schemas of their
            values; by default one stream with the computation's name.
        state: the schema of the computation's states; see `Pipeline.add`.
        sink: one sink for the first of these streams, or a mapping of streams to sinks. `DEAD_LETTERS` is a
            stream, too.
        pipeline: name under which the store keeps the consumed position of the query: the name of the
            computation at the query's first start. By default ``renamed_from``, or else the computation's name.
            Keep ``renamed_from`` or ``pipeline`` in the code, because the query keeps its first name.
        drop: former computations of this pipeline whose rows are removed; see `Pipeline`.
        options: all other options of `Pipeline.inject`, of the computation and of the `SparkRunner`;
            ``intervals`` is the computation's.

    Raises:
        InvalidError: an option is unknown or out of its range.

    Example::

        df.writeStream.foreachBatch(
            foreach_batch("pond", SpikeDetector(), key="query", at="time", on_error="stop")
        ).option("checkpointLocation", "…").start()
    """
    chosen = name or type(computation).__name__
    given = with_new_names(options)
    options_known = ForeachBatchOptions.__annotations__.keys()
    for option in given.keys() - _STREAM_OPTIONS - _CODE_OPTIONS - options_known:
        raise InvalidError(
            f"no such option{did_you_mean(option, options_known)}",
            option=option,
            options=sorted(options_known),
        )
    of_stream = {option: value for option, value in given.items() if option in _STREAM_OPTIONS}
    of_code = {option: value for option, value in given.items() if option in _CODE_OPTIONS}
    of_runner = {option: given[option] for option in given.keys() - of_stream.keys() - of_code.keys()}
    # The store and its sinks keep the query under its first name.
    first = pipeline or of_code.get("renamed_from") or chosen
    graph = EnginePipeline(first, drop=drop)
    if watermark is not None:
        of_stream["watermark"] = watermark
    stream = graph.inject(INPUT, key=key, at=at, id=id, id_slack=id_slack, **of_stream)
    output = stream.apply(computation, name=chosen, produces=produces, state=state, **of_code)
    sinks = sink if isinstance(sink, Mapping) else {} if sink is None else {output.name: sink}
    for produced, target in sinks.items():
        # A store keeps the sink of the first stream under the computation's name.
        graph.add_sink(first if produced == output.name else f"{first}.{produced}", produced, target)
    return stream_function(graph, store, INPUT, of_runner)


_STREAM_OPTIONS: Final = frozenset(signature(EnginePipeline.inject).parameters)
_CODE_OPTIONS: Final = frozenset(ComputationOptions.__annotations__)

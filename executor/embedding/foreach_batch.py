"""Embedding: a pipeline, or one computation, in the ``foreachBatch`` of the user's own streaming queries."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from inspect import signature
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, Unpack
from weakref import WeakValueDictionary

from millpond.executor.computation.computation import Computation
from millpond.executor.embedding.embedded_run import EmbeddedRun, OpenRun
from millpond.executor.event_time.duration import Duration
from millpond.executor.event_time.time_reading import TimeUnit
from millpond.executor.injectors.ingress_time import IngressTime
from millpond.executor.injectors.policy import WatermarkPolicy
from millpond.executor.payloads.payload import Payload
from millpond.executor.pipeline.backfill import Backfill
from millpond.executor.pipeline.injector_node import FieldExtractor
from millpond.executor.pipeline.key_extractor import KeyField
from millpond.executor.pipeline.names import SIGNALS
from millpond.executor.pipeline.nodes import OnError, OnLate
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.pipeline.stream import ComputationOptions
from millpond.executor.pipeline.weak import ProductionMode
from millpond.executor.sinks.sink import Sink
from millpond.executor.spark.connect import refuse_connect, refuse_pickle
from millpond.executor.spark.micro_batches import QueryStart
from millpond.executor.spark.run import SparkRun
from millpond.executor.spark.runner import SparkRunner, SparkRunnerOptions
from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.statestore.identity.location import place_of
from millpond.statestore.store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

INPUT = "input"
"""Name of the injected stream of an embedded computation."""


_RUNS: Final[WeakValueDictionary[tuple[str, int], EmbeddedRun]] = WeakValueDictionary()
"""The run of each pipeline object on a store, by its place, for as long as a function of it is known."""

_MAKING: Final = threading.Lock()
"""Held while a function is made, so that those of one pipeline and store find the same run."""


class ForeachBatch:
    """A function for ``writeStream.foreachBatch`` that feeds an injected stream of a pipeline.

    The functions of one `Pipeline` object and store share one run, each in a query of its own. The first batch of any
    of them takes the leases; `close`, a failure or the end of the process gives them back. `close` also does the work
    that is due by then; the end of the process is too late for that.

    - A failure ends the run, and its query. The other queries fail with the same error at their next batch. A query
      that was started again takes the leases again.
    - A query that you stop ends nothing: the others go on, and so does it once you start it again.
    - A stream whose query has not had a batch yet keeps event time where it was before the run: windows of other
      streams that are joined with it wait.

    At the end of a ``with`` it is closed; after an exception the leases are given back, and no work is done.

    Args:
        embedded: the run.
        stream: the injected stream.

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
            InvalidError: this is no batch of a streaming query, or it does not fit the stream.
            MillpondError: the error that ended the superstep, or the run since the query's last batch; Spark stops
                the query.
        """
        refuse_connect(frame, input=self._stream)
        begun = QueryStart.of(frame, self._stream)
        if self._joined is not None and self._joined[0] == begun:
            self._joined[1].raise_failure()
        self._joined = begun, self._embedded.consume(self._stream, frame, batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._embedded.abandon()

    def __reduce__(self) -> NoReturn:
        """Refuse to be sent to the server of Spark Connect.

        Raises:
            InvalidError: always.
        """
        refuse_pickle("a foreachBatch function of Millpond")

    @property
    def run(self) -> SparkRun:
        """The run that is open: for its watermarks, signals, counts, and rows of streams without a query.

        Raises:
            InvalidError: none is: no batch has come yet, or it has ended.
        """
        return self._embedded.run

    def close(self) -> None:
        """Do all the work that the batches so far have made due, and give the leases back.

        Call it when the queries have ended, on any of the functions that share the run: after ``availableNow`` queries
        all productions are then delivered, all timers that the watermark has passed have fired, and the sinks are
        written. A query that still runs takes the leases again with its next batch. A second call does nothing.

        Raises:
            MillpondError: what that work has failed with; the leases are released anyway.
        """
        self._embedded.close()


class PipelineBatchOptions(SparkRunnerOptions, total=False):
    """The options of `Pipeline.foreach_batch`: those of `SparkRunner`, which explains each, and ``tick_ms``."""

    tick_ms: float


def stream_function(
    pipeline: EnginePipeline,
    store: Store | str | Path,
    stream: str,
    options: Mapping[str, Any],
) -> ForeachBatch:
    """The function of one injected stream of a pipeline; see `Pipeline.foreach_batch`.

    Args:
        pipeline: the pipeline.
        store: path of the store, or an open one.
        stream: the injected stream.
        options: some of `PipelineBatchOptions`.

    Raises:
        InvalidError: the pipeline is invalid or has no such stream, or an option is wrong.
    """
    streams = sorted(pipeline.check().injectors.keys() - {SIGNALS})
    if stream not in streams:
        raise InvalidError(
            f"the pipeline injects no such stream{did_you_mean(stream, streams)}",
            pipeline=pipeline.name,
            into=stream,
            injected=streams,
        )
    known = PipelineBatchOptions.__annotations__.keys()
    for option in sorted(options.keys() - known):
        raise InvalidError(
            f"no such option{did_you_mean(option, known)}", option=option, options=sorted(known)
        )
    place = store.path if isinstance(store, Store) else place_of(store)
    with _MAKING:
        embedded = _RUNS.get((place, id(pipeline)))
        if embedded is None:
            # It keeps the pipeline, so that no other one gets its id.
            embedded = _RUNS[place, id(pipeline)] = EmbeddedRun(pipeline, place)
        said = {"store": store if isinstance(store, Store) else place, **options}
        embedded.join(stream, said, lambda known: SparkRunner(**known))
    return ForeachBatch(embedded, stream)


class ForeachBatchOptions(SparkRunnerOptions, total=False):
    """The further options of `foreach_batch`: those of `Pipeline.inject`, of a computation, and of the runner.

    `Pipeline.inject`, `ComputationOptions` and `SparkRunner` explain each.
    """

    at_unit: TimeUnit | None
    at_zone: str | None
    change: str | None
    payload: Payload | None
    idle_after: Duration | None
    members: Sequence[str]
    member: FieldExtractor | None
    skew_limit: Duration | None
    exactly_once: bool
    on_error: OnError
    retries: int
    on_late: OnLate | Mapping[str, OnLate]
    productions: ProductionMode
    user_code_timeout_ms: float | None
    feedback: Collection[str]
    renamed_from: str | None
    time_sorted: bool
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
    produces: str | Sequence[str] | None = None,
    sink: Sink | Mapping[str, Sink] | None = None,
    tick_ms: float = 250,
    pipeline: str | None = None,
    drop: Sequence[str] = (),
    **options: Unpack[ForeachBatchOptions],
) -> ForeachBatch:
    """Embed a computation in the user's own streaming query.

    For several computations, streams or windows see `Pipeline.foreach_batch`, of which this is the short form.

    Args:
        store: path of the store, or an open one.
        computation: what to run for each key.
        key: column, list of columns (or function of the row) with the key; see `Pipeline.inject`.
        at: column (or function of the row) with the event time, or `IngressTime`.
        id: column (or function of the row) with the record's id; records with the same id count once.
        watermark: how the low watermark follows from the records; by default the delay of the query's own
            ``withWatermark`` on the column ``at``, and without one they arrive in the order of their times.
        id_slack: how long a sender may repeat a record; see `Pipeline.inject`.
        name: the computation's name in the store; its class's name otherwise.
        produces: the stream or streams that the computation produces to; by default one with its name.
        sink: where its productions go: one sink for the first of its streams, or a mapping of streams to
            sinks. `DEAD_LETTERS` is a stream, too.
        tick_ms: how long the query must be silent before due timers fire without a batch.
        pipeline: under which name the store keeps how far it has consumed the query: the computation's
            when the query was started first. By default ``renamed_from``, or else the computation's name.
            Keep ``renamed_from`` or ``pipeline`` in the code, for the query keeps its first name.
        drop: former computations of this pipeline whose rows are removed; see `Pipeline`.
        options: all other options of `Pipeline.inject`, of the computation and of the `SparkRunner`;
            ``intervals`` is the computation's.

    Raises:
        InvalidError: an option is unknown, or wrong in itself.

    Example::

        df.writeStream.foreachBatch(
            foreach_batch("pond", SpikeDetector(), key="query", at="time", on_error="stop")
        ).option("checkpointLocation", "…").start()
    """
    chosen = name or type(computation).__name__
    of_stream, of_code, of_runner = _sorted_out(options)
    # The store and its sinks know the query by its first name.
    first = pipeline or of_code.get("renamed_from") or chosen
    graph = EnginePipeline(first, drop=drop)
    if watermark is not None:
        of_stream["watermark"] = watermark
    stream = graph.inject(INPUT, key=key, at=at, id=id, id_slack=id_slack, **of_stream)
    output = stream.apply(computation, name=chosen, produces=produces, **of_code)
    sinks = sink if isinstance(sink, Mapping) else {} if sink is None else {output.name: sink}
    for produced, target in sinks.items():
        # A store knows the sink of the first stream by the computation's name.
        graph.add_sink(first if produced == output.name else f"{first}.{produced}", produced, target)
    return stream_function(graph, store, INPUT, {**of_runner, "tick_ms": tick_ms})


_STREAM_OPTIONS: Final = frozenset(signature(EnginePipeline.inject).parameters)
_CODE_OPTIONS: Final = frozenset(ComputationOptions.__annotations__)


def _sorted_out(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The options of the stream, of the computation and of the runner."""
    known = _STREAM_OPTIONS | _CODE_OPTIONS | SparkRunnerOptions.__annotations__.keys()
    for option in options.keys() - known:
        options_known = sorted(ForeachBatchOptions.__annotations__)
        raise InvalidError(
            f"no such option{did_you_mean(option, options_known)}", option=option, options=options_known
        )
    of_stream = {name: value for name, value in options.items() if name in _STREAM_OPTIONS}
    of_code = {name: value for name, value in options.items() if name in _CODE_OPTIONS}
    rest = {name: value for name, value in options.items() if name not in of_stream and name not in of_code}
    return of_stream, of_code, rest

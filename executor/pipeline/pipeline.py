"""The pipeline and its streams: the user's declarations, before they are checked and frozen (MillWheel §3, §4.3).

A mistake that one line shows is refused at that line. `Pipeline.check`, which every runner calls before it
starts, refuses mistakes that need the whole picture. A dot joins the names of composites and steps because a
computation's name is also a table in SQL, a folder and a ZooKeeper node.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, Unpack, cast, get_args

import pyarrow as pa
from typing_extensions import TypeVar

from millpond.executor.computation.computation import Computation, Drain
from millpond.executor.computation.context import declared_counters
from millpond.executor.computation.state import CombiningState
from millpond.executor.inputs.extraction import FieldExtractor, InjectorNode
from millpond.executor.inputs.keys import KeyExtractor, KeyField, check_key_extractor, settled_key
from millpond.executor.inputs.payload import Payload
from millpond.executor.inputs.record_size import RECORD_BYTES_MAX, check_record_size
from millpond.executor.pipeline.checks import (
    ahead_limit,
    check_combining,
    check_field,
    check_hooks,
    check_ingress,
    check_inputs,
    check_key_field,
    check_members,
    check_name,
    check_payload,
    check_state_version,
    check_table,
    check_topology,
    positive_us,
    type_name,
)
from millpond.executor.pipeline.nodes import (
    DEAD_LETTERS,
    Backfill,
    ComputationNode,
    ComputationOptions,
    OnError,
    OnLate,
    ProductionMode,
    SinkNode,
    StateSchema,
    Subscription,
    ValueSchema,
    backfill_by_stream,
    way_of,
)
from millpond.executor.pipeline.topology import Topology, cycle_of, holding_edges
from millpond.executor.sinks.sink import Sink
from millpond.executor.time.clocks import declared_percentiles, horizon_us
from millpond.executor.time.instants import TimeReading, TimeUnit
from millpond.executor.time.observations import OnAhead
from millpond.executor.time.watermark_policies import BoundedDisorder, IngressTime, WatermarkPolicy
from millpond.statestore.arguments import check_count, check_flag, check_own_members
from millpond.statestore.durations import Duration, duration_ms, with_new_names
from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.statestore.rows.codec import ModelCodec
from millpond.statestore.rows.state_schema import AddendCodec, SchemaCodec
from millpond.statestore.view_columns import StateColumn

_ID_SLACK: Final = "3h"
_NO_DISORDER: Final = BoundedDisorder("0s")
_OPTIONS: Final = frozenset(ComputationOptions.__annotations__)
_WORDS: Final = {
    "on_error": get_args(OnError),
    "productions": get_args(ProductionMode),
    "drain": get_args(Drain),
}

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, repr=False)
class Stream:
    """A named stream of one pipeline, as returned by `Pipeline.inject`, `Pipeline.stream` and `apply`.

    A pipeline subclass sets ``stream_class`` to a subclass of this one with further operations, such as windows.
    """

    pipeline: EnginePipeline
    name: str

    def __repr__(self) -> str:
        return f"Stream({self.name!r} of {self.pipeline.name!r})"

    def apply(
        self,
        computation: Computation,
        *,
        name: str,
        key: KeyExtractor = None,
        produces: str | Sequence[str] | Mapping[str, ValueSchema] | None = None,
        state: StateSchema | None = None,
        **options: Unpack[ComputationOptions],
    ) -> Self:
        """Process this stream with a computation; return the stream that it produces to, the first one of several.

        Args:
            computation: an instance of the user's `Computation`.
            name: the computation's name, which is also its table in SQL.
            key: how to extract a record's key: a field of the value, a list of fields, a function of the
                value that returns text or a tuple, or ``None`` for the record's own key.
            produces: the stream or streams that the computation produces to; by default one stream with the
                computation's name. A mapping gives streams the schema of their values (see `Pipeline.add`).
            state: the schema of the computation's states (see `Pipeline.add`).
            options: further settings; see `ComputationOptions`.

        Example:
            ``counts = words.apply(Counter(), name="counts", key="word")``
        """
        streams = (name,) if produces is None else (produces,) if isinstance(produces, str) else produces
        if not streams:
            raise InvalidError(
                "apply needs a stream to return: use Pipeline.add for a computation that produces nothing",
                computation=name,
            )
        produced = self.pipeline.add(
            computation, name=name, subscribes={self.name: key}, produces=streams, state=state, **options
        )
        return replace(self, name=next(iter(produced.values())).name)

    def transform(
        self,
        name: str,
        function: Callable[Concatenate[Self, _Arguments], _Result],
        /,
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        """Apply a function to this stream as a composite, and return its result; see `Pipeline.transform`."""
        return self.pipeline.transform(name, function, self, *args, **kwargs)

    def sink(self, name: str, sink: Sink) -> Self:
        """Write this stream's records to ``sink``, outside Millpond, each exactly once; return this stream.

        The name is unique within the pipeline.
        """
        self.pipeline.add_sink(name, self.name, sink)
        return self


StreamT_co = TypeVar("StreamT_co", bound=Stream, default=Stream, covariant=True)
"""The class of a pipeline's streams: an `EnginePipeline` without a parameter has plain `Stream` objects."""


class EnginePipeline(Generic[StreamT_co]):
    """A graph of injectors, computations and sinks, joined by named streams.

    Args:
        name: the pipeline's name. The store keeps its input positions under this name, so a pipeline with
            another name reads its inputs again from the start.
        drop: the names of former computations whose rows are removed when the pipeline opens. A pipeline that
            lacks a computation with rows in the store does not open unless the name is in ``drop`` or
            ``retire``. Productions of a dropped computation are still delivered. Unknown names are ignored,
            so a name may stay in the code.
        retire: the names of former computations whose rows stay unchanged: readable, with their timers, but
            nothing runs. If the pipeline gets such a computation again, it continues from these rows and has
            missed the records in between. Also the names of former injected streams that others replace: without
            them a new stream would look like a renamed one, and is refused. Unknown names are ignored.
        renamed_from: the pipeline's former name. The pipeline continues with everything that the store has
            under that name. Afterwards the argument has no effect and may stay in the code.

    Example:
        >>> pipeline = Pipeline("zeitgeist")
        >>> pipeline.inject("queries", key="query", at="time", watermark=BoundedDisorder("30s"))
        Stream('queries' of 'zeitgeist')
    """

    stream_class: type[StreamT_co] = Stream  # type: ignore[assignment]  # the default of the parameter
    """The class of this pipeline's streams; a subclass sets it together with the type parameter."""

    def __init__(
        self,
        name: str,
        *,
        drop: Sequence[str] = (),
        retire: Sequence[str] = (),
        renamed_from: str | None = None,
    ) -> None:
        self.name: str = check_name("pipeline", name)
        self._drop = _gone("drop", drop, name)
        self._retire = _gone("retire", retire, name)
        if renamed_from is not None and check_name("pipeline", renamed_from) == name:
            raise InvalidError("renamed_from must be another name", pipeline=name)
        self._renamed_from = renamed_from
        self._composites: dict[str, list[str]] = {}
        self._within: tuple[str, ...] = ()
        self._injectors: dict[str, InjectorNode] = {}
        self._computations: dict[str, ComputationNode] = {}
        self._sinks: dict[str, SinkNode] = {}
        self._backfills: dict[str, Mapping[str, Backfill]] = {}

    def __repr__(self) -> str:
        return f"Pipeline({self.name!r}, computations={list(self._computations)})"

    def inject(
        self,
        name: str,
        *,
        key: KeyField,
        at: FieldExtractor | IngressTime,
        id: FieldExtractor | None = None,  # noqa: A002 - the word of the paper and of the users
        watermark: WatermarkPolicy | None = None,
        idle_after: Duration | None = None,
        members: Sequence[str] = (),
        member: FieldExtractor | None = None,
        skew_limit: Duration | None = None,
        id_slack: Duration = "3h",
        at_unit: TimeUnit | None = None,
        at_zone: str | None = None,
        change: str | None = None,
        payload: Payload | None = None,
        max_record_bytes: int | None = RECORD_BYTES_MAX,
        ahead_max: Duration | None = None,
        on_ahead: OnAhead = "dead_letter",
    ) -> StreamT_co:
        """Declare a stream of records from outside (MillWheel §4.3, §5.2).

        Args:
            name: the stream's name; the runner takes its input under the same name.
            key: where a row's key is: a column's name, a list of names, or a function of the row as a
                ``dict`` that returns text or a tuple. A text column is the key itself. A column of another
                type, or a list, makes a typed key; `decode_key` returns its values. In a list any column may
                be null. A single null is no key: the row becomes a dead letter.
            at: where a row's event time is, likewise: an ``int`` since 1970 UTC, a ``datetime``, or ISO 8601
                text; see ``at_unit`` and ``at_zone``. ``IngressTime()`` is the time of arrival, with its own watermark.
            id: where the publisher's id of a record is, likewise. Records that repeat an id are dropped. A record
                whose id is null has none, and counts each time.
            watermark: how the stream's low watermark follows from its records. By default rows are assumed to
                arrive in order of event time, as with ``BoundedDisorder("0s")``; a warning names the first
                record that this drops. On Spark the default is the delay of the frame's ``withWatermark``, if
                the column ``at`` has one.
            idle_after: how long the stream, or one of its members, may be silent before it stops holding the
                watermark back. Records that arrive after that may be late. ``None`` waits without a limit.
            members: the names of the expected senders. The watermark is the minimum of theirs, so a missing
                or silent member holds it until the member is idle or declared gone. Records of unknown
                senders are accepted and do not move the watermark.
            member: where the name of a row's sender is: a column's name, or a function of the row.
            skew_limit: how far the stream's watermark may run ahead of the slowest computation's before the
                stream pauses. This bounds the records that wait for a slower stream. If that stream sends nothing,
                this one stays paused until the other is idle or declared gone. Bounded runs (``run``) ignore the limit.
            id_slack: how long a sender may repeat a record. An id is kept until the slack has passed both on the
                wall clock since it first arrived and in event time since ``at``; a later repetition counts as new. A
                longer slack keeps more ids, about 20 bytes of disk each. A computation with several streams keeps all
                ids for the longest slack.
            at_unit: the unit of times that are numbers: ``"s"``, ``"ms"``, ``"us"`` or ``"ns"``; fractions are
                rounded to the microsecond. By default whole microseconds; then numbers that are dates from 2000 to
                2099 in milliseconds or nanoseconds are unreadable, and a run whose first records are all dates
                in seconds is refused.
            at_zone: the zone of times without one: ``"UTC"``, an offset such as ``"+02:00"``, or a place such as
                ``"Europe/Oslo"``. Of an hour that comes twice the first is taken; a time that never comes is as long
                after the change as without it. By default such times are unreadable.
            change: the column with the kind of change, if the rows are the changes of a table: Debezium's
                envelope (``op``, with ``before`` and ``after``), Delta's change data feed (``_change_type``),
                or ``+I -U +U -D``. The stream then has an element for each row that appears and a retraction
                for each that disappears, in the envelope of a pane, and windows remove retracted values.
                ``key``, ``at`` and ``id`` are columns of the row before or after the change; the other fields
                of the change are available as ``__change_ts_ms`` and so on.
            payload: decodes the values from one column of the rows: an `AvroPayload`, a `ProtobufPayload` or
                a `JsonPayload`. ``key``, ``at`` and ``id`` are then fields of the value, and the row's other
                columns are available as ``__row_offset`` and so on; records have the value alone. A row that
                cannot be decoded becomes a dead letter with the original row.
            max_record_bytes: size above which a record becomes a dead letter with the beginning of its value, 16 MiB
                by default: of the columns of its row, of the text and bytes of a mapping, or of the encoded payload.
                ``None`` accepts any size.
            ahead_max: how far a record's event time may lie ahead of its arrival, by the clock of this machine, so that
                a sender whose clock is fast does not move the watermark past all others. A replay of the commits uses
                the recorded arrival. ``None`` sets no bound.
            on_ahead: what becomes of a record beyond ``ahead_max``: ``"dead_letter"``, which can be retried;
                ``"clamp"``: its event time is the latest that is allowed, and its value stays as it is; or ``"hold"``:
                it keeps its time, and holds the watermark back to the latest that is allowed.

        Example:
            ``pipeline.inject("clicks", key="user", at="clicked_at", id="uuid", watermark=BoundedDisorder("30s"))``
        """
        name = self._named("stream", name)
        if name in self._injectors:
            raise InvalidError("two injectors feed one stream: give one of them another name", stream=name)
        check_key_field(key, name)
        is_assumed = watermark is None
        if isinstance(at, IngressTime):
            check_ingress(name, watermark, idle_after, members, skew_limit, ahead_max)
            watermark, is_assumed = at, False
        else:
            check_field("at", at, name)
        if id is not None:
            check_field("id", id, name)
        elif id_slack != _ID_SLACK:
            raise InvalidError(
                "id_slack is how long ids are kept, and the stream has none: say where they are with id=, or leave "
                "id_slack out",
                stream=name,
                id_slack=id_slack,
            )
        if change is not None and not (isinstance(change, str) and change):
            raise InvalidError("change must be a column's name", stream=name, type=type_name(change))
        check_payload(name, payload, change, (key, at, id, member))
        if watermark is None:
            watermark = _NO_DISORDER
        if inspect.isclass(watermark) or not isinstance(watermark, WatermarkPolicy):
            raise InvalidError(
                "watermark must be a WatermarkPolicy instance", stream=name, watermark=watermark
            )
        check_own_members("watermark", watermark, WatermarkPolicy, stream=name)
        check_members(name, members, member)
        check_record_size(name, max_record_bytes)
        self._injectors[name] = InjectorNode(
            stream=name,
            key=tuple(key) if isinstance(key, list) else key,
            at=at,
            id=id,
            watermark=watermark,
            idle_after_us=None if idle_after is None else positive_us("idle_after", idle_after, stream=name),
            members=tuple(members),
            member=member,
            skew_limit_us=None if skew_limit is None else positive_us("skew_limit", skew_limit, stream=name),
            id_slack_us=positive_us("id_slack", id_slack, stream=name),
            times=TimeReading.of(at_unit, at_zone, stream=name),
            change=change,
            payload=payload,
            is_assumed=is_assumed,
            ahead=ahead_limit(name, ahead_max, on_ahead),
            max_record_bytes=max_record_bytes,
        )
        return self.stream_class(self, name)

    def add(
        self,
        computation: Computation,
        *,
        name: str,
        subscribes: Mapping[str, KeyExtractor],
        produces: Sequence[str] | Mapping[str, ValueSchema] = (),
        state: StateSchema | None = None,
        **options: Unpack[ComputationOptions],
    ) -> dict[str, StreamT_co]:
        """Add a computation with any number of input and output streams; return the output streams by name.

        Args:
            computation: an instance of the user's `Computation`.
            name: the computation's name, which is also its table in SQL.
            subscribes: the input streams by name, each with the way to extract its records' keys: a field of
                the value, a list of fields, a function of the value, or ``None`` for the record's own key.
            produces: the names of the streams that the computation may produce to. A mapping gives each the
                schema of its values, or ``None``: a `pyarrow.Schema`. Such values are dicts of its fields; they are
                checked by ``produce`` and kept, delivered and written to sinks as columns of these types.
            state: the schema of the computation's states: a `pyarrow.Schema`. They are then dicts of its fields, which
                ``state.set`` checks, stored as columns of these types and shown so in SQL. Or a class (a dataclass,
                attrs, pydantic or msgspec): states are its objects, stored as JSON (`ModelCodec`). Or a
                `CombiningState`: sums to which code adds without a read of the row. By default a state is any value of
                the model (docs/how-to/schemas.md).
            options: further settings; see `ComputationOptions`.

        Example:
            ``pipeline.add(Join(), name="join", subscribes={"clicks": "user", "orders": "buyer"}, produces=["joined"])``
        """
        name = self._named("computation", name)
        if name in self._computations:
            raise InvalidError(
                "two computations have one name: it is their table in the store, so give one of them another",
                computation=name,
            )
        _check_computation(name, computation)
        if state is not None:
            computation = _with_schema(name, computation, state)
        declared_percentiles(computation.percentiles, name)
        horizon_us(computation.late_data_horizon)
        declared_counters(computation.counters, name)
        _check_on_late(name, options.get("on_late", "process"), subscribes)
        _check_order(name, computation)
        options.setdefault("time_sorted", computation.time_sorted)
        if isinstance(state, CombiningState):
            check_combining(name, computation, time_sorted=options["time_sorted"])
        options.setdefault("drain", computation.drain)
        streams = {stream: self._named("stream", stream) for stream in _productions(name, produces)}
        schemas = _value_schemas(name, produces, streams)
        check_table(name, computation, streams.values(), schemas, time_sorted=options["time_sorted"])
        node = ComputationNode(
            name=name,
            computation=computation,
            subscriptions=_subscriptions(name, subscribes, options.get("feedback", ()), self._prefix),
            produces=tuple(streams.values()),
            schemas=schemas,
            prefix=self._prefix,
            **_checked_options(name, options),
        )
        # Both are addressed by name, on the command line for example.
        if name in self._composites:
            raise InvalidError("a computation and a composite cannot share a name", computation=name)
        for composite in self._within:
            self._composites[composite].append(name)
        self._computations[name] = node
        if (backfill := options.get("backfill")) is not None:
            self._backfills[name] = backfill_by_stream(name, backfill, tuple(subscribes))
        return {stream: self.stream_class(self, whole) for stream, whole in streams.items()}

    def producer_of(self, stream: str) -> ComputationNode | None:
        """Return a computation that produces to ``stream``."""
        return next((node for node in self._computations.values() if stream in node.produces), None)

    def add_production(self, computation: str, stream: str) -> None:
        """Let a computation produce to one more stream."""
        node = self._computations[computation]
        if stream not in node.produces:
            self._computations[computation] = replace(node, produces=(*node.produces, stream))

    def add_sink(self, name: str, stream: str, sink: Sink) -> None:
        """Write a stream, which may be declared later, to a sink; `Stream.sink` is the shorter form."""
        name = self._named("sink", name, reserved=frozenset())
        if name in self._sinks:
            raise InvalidError("two sinks cannot share a name", sink=name)
        if inspect.isclass(sink) or not isinstance(sink, Sink):
            raise InvalidError(
                "sink must be a Sink instance, such as DeltaSink('out')", sink=name, type=type_name(sink)
            )
        check_own_members("sink", sink, Sink, sink=name)
        self._sinks[name] = SinkNode(name=name, stream=stream, sink=sink)

    def stream(self, name: str) -> StreamT_co:
        """Return the stream of that name, in a composite its own; declared later, it makes a cycle."""
        return self.stream_class(self, self._named("stream", name, reserved=frozenset()))

    def transform(
        self,
        name: str,
        function: Callable[_Arguments, _Result],
        /,
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        """Apply a function from streams to streams as a composite, whose steps share a name prefix; return its result.

        Everything the function declares (steps, streams, sinks, inputs) is named after the composite: its
        step ``clean`` is the computation ``visits.clean``, in SQL, in `millpond status` and everywhere else.
        So a function may be applied several times under different names, and composites may be nested. Code
        within the composite produces to its streams by their short names. Pass streams from outside as
        arguments. The composite's name is stored with every step, so keep it.

        Example:
            ``matched = pipeline.transform("matching", match, clicks, orders, within="1h")``
        """
        name = self._named("composite", name)
        if not callable(function):
            raise InvalidError(
                "a composite must be a function of streams", composite=name, type=type(function).__qualname__
            )
        if name in self._composites:
            raise InvalidError("two composites cannot share a name", composite=name)
        if name in self._computations:
            raise InvalidError("a computation and a composite cannot share a name", composite=name)
        self._composites[name] = []
        outside, self._within = self._within, (*self._within, name)
        try:
            return function(*args, **kwargs)
        finally:
            self._within = outside

    @property
    def _prefix(self) -> str:
        return f"{self._within[-1]}." if self._within else ""

    def _named(self, kind: str, name: object, *, reserved: frozenset[str] = frozenset({DEAD_LETTERS})) -> str:
        own = check_name(kind, name, reserved=reserved)
        return own if own == DEAD_LETTERS else check_name(kind, f"{self._prefix}{own}")

    def with_sinks(self, place: Callable[[str, Sink], Sink]) -> Self:
        """Return the same pipeline with the sinks that ``place`` returns for each name and sink."""
        other = copy(self)
        other._sinks = {  # noqa: SLF001 - its own
            name: replace(node, sink=place(name, node.sink)) for name, node in self._sinks.items()
        }
        return other

    def explain(self) -> str:
        """Return how each step runs, and why no faster, as a table; the same on every runner (docs/how-to/tune.md).

        On ``columns`` all keys of a bundle are done at once, and so is a ``table`` by code. ``short turns`` take each
        key, and ``hooks`` call code for it. A key with anything else than records on time takes the next way. Values
        that reach a step as text or as Python's objects are decoded one by one, and columns are not.

        Example:
            ``print(pipeline.explain())``
        """
        topology = self.check()
        schemas = {stream for node in topology.computations.values() for stream in node.schemas}
        rows = [("step", "runs by", "because", "values")]
        for name, node in topology.computations.items():
            forms = {one.stream: _form_of(one.stream, topology, schemas) for one in node.subscriptions}
            way = way_of(node)
            values = ", ".join(f"{stream}: {form}" for stream, form in forms.items())
            rows.append((name, way.name, way.because, values))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([lines[0], "─" * max(map(len, lines)), *lines[1:]])

    def check(self, inputs: Iterable[str] | None = None) -> Topology:
        """Check the whole declaration before the run, and return the immutable graph.

        Every runner calls this before it starts; call it directly to test a declaration. ``inputs`` are the names of
        the inputs given to the runner; ``None`` skips their check.
        """
        topology = Topology(
            name=self.name,
            injectors=dict(self._injectors),
            computations=dict(self._computations),
            sinks=dict(self._sinks),
            drop=self._drop,
            retire=self._retire,
            composites={name: tuple(steps) for name, steps in self._composites.items()},
            backfills=dict(self._backfills),
            renamed_from=self._renamed_from,
        )
        edges = holding_edges(topology)
        computations = {}
        for name, node in topology.computations.items():
            way = cycle_of(edges, name)
            cycle = (*(producer for producer, _ in way), name) if way else ()
            computations[name] = replace(node, cycle=cycle)
        topology = replace(topology, computations=computations)
        check_topology(topology)
        if inputs is not None:
            check_inputs(topology, inputs)
        return topology


def _form_of(stream: str, topology: Topology, schemas: Collection[str]) -> str:
    """Return in what form the values of a stream reach its consumers."""
    if stream in topology.injectors:
        # Python's dicts stay dicts, which only the run knows.
        injector = topology.injectors[stream]
        return "decoded payloads" if injector.payload is not None else "columns of tables and frames"
    if stream in schemas:
        return "columns"
    return "panes" if _has_panes(stream, topology, set()) else "text"


def _has_panes(stream: str, topology: Topology, seen: set[str]) -> bool:
    """Return True if windows have made the values of a stream, before all steps that keep panes."""
    seen.add(stream)
    for node in topology.producers_of(stream):
        kind = node.computation.way().panes
        if kind == "makes":
            return True
        inputs = (
            [one.stream for one in node.subscriptions if one.stream not in seen] if kind == "keeps" else []
        )
        if any(_has_panes(each, topology, seen) for each in inputs):
            return True
    return False


def _gone(argument: str, names: Sequence[str], pipeline: str) -> frozenset[str]:
    if isinstance(names, str):
        raise InvalidError(f"{argument} must be a list of computations", pipeline=pipeline, given=names)
    return frozenset(check_name("computation", name) for name in names)


def _check_computation(name: str, computation: object) -> None:
    if inspect.isclass(computation):
        raise InvalidError(
            "the computation is a class: give an instance", computation=name, type=computation.__qualname__
        )
    if not isinstance(computation, Computation):
        raise InvalidError(
            "computation must be a Computation instance", computation=name, type=type_name(computation)
        )
    check_hooks(name, computation)
    check_state_version(name, computation)


def _with_schema(name: str, computation: Computation, schema: StateSchema) -> Computation:
    """Return a copy of the computation whose states have this schema, or are objects of this class."""
    if computation.fingerprint or computation.codec is not Computation.codec:
        raise InvalidError(
            "state= is for code of your own without another codec: a library step keeps its own states, and codec= and "
            "state= exclude each other",
            computation=name,
        )
    declared = copy(computation)
    if schema is CombiningState:
        raise InvalidError("CombiningState is a class: give an instance, with a schema", computation=name)
    if inspect.isclass(schema):
        declared.codec = ModelCodec(schema)
        return declared
    if isinstance(schema, CombiningState):
        codec = _schema_codec(schema.schema, "state", AddendCodec, computation=name)
        fields = {f"state {field.name}": f"{field.name}: {field.type}" for field in codec.kind}
        declared.fingerprint = {"state": "CombiningState", **fields}
    else:
        codec = _schema_codec(schema, "state", computation=name)
    declared.codec = codec
    declared.state_columns = tuple(StateColumn(field.name, "field", field.type) for field in codec.kind)
    return declared


def _subscriptions(
    name: str, subscribes: Mapping[str, KeyExtractor], feedback: Collection[str], prefix: str
) -> tuple[Subscription, ...]:
    if not isinstance(subscribes, Mapping):
        raise InvalidError(
            "subscribes must map streams to key extractors", computation=name, type=type_name(subscribes)
        )
    if not subscribes:
        raise InvalidError("the computation must subscribe to a stream", computation=name)
    for stream, key in subscribes.items():
        check_name("stream", stream, reserved=frozenset())
        check_key_extractor(key, computation=name, stream=stream)
    if isinstance(feedback, str) or not isinstance(feedback, Collection):
        raise InvalidError("feedback must be a list of streams", computation=name, feedback=feedback)
    # Code within a composite may use the short names of its streams.
    returning = {f"{prefix}{stream}" if f"{prefix}{stream}" in subscribes else stream for stream in feedback}
    if unknown := sorted(returning - subscribes.keys()):
        raise InvalidError(
            "feedback must name streams that the computation consumes", computation=name, streams=unknown
        )
    return tuple(
        Subscription(stream=stream, key=settled_key(key), feedback=stream in returning)
        for stream, key in subscribes.items()
    )


def _value_schemas(
    name: str, produces: Sequence[str] | Mapping[str, ValueSchema], streams: Mapping[str, str]
) -> dict[str, SchemaCodec]:
    """Return the schemas of the produced values, by the whole name of their stream."""
    if not isinstance(produces, Mapping):
        return {}
    found = {}
    for stream, schema in produces.items():
        if schema is not None:
            found[streams[stream]] = _schema_codec(schema, "value", computation=name, stream=stream)
    return found


def _schema_codec(
    schema: object, whole: str, kind: type[SchemaCodec] = SchemaCodec, **subject: Any
) -> SchemaCodec:
    if not isinstance(schema, pa.Schema | pa.StructType):
        raise InvalidError("a schema must be an Arrow schema", **subject, type=type_name(schema))
    try:
        return kind(schema, whole)
    except InvalidError as error:
        raise InvalidError(error.message, **subject, **error.details) from error


def _productions(name: str, produces: Sequence[str] | Mapping[str, ValueSchema]) -> tuple[str, ...]:
    if isinstance(produces, str):
        raise InvalidError("produces must be a list of stream names", computation=name, produces=produces)
    for stream in produces:
        check_name("stream", stream)
    if len(set(produces)) < len(produces):
        raise InvalidError("produces must name each stream once", computation=name, produces=list(produces))
    return tuple(produces)


def _check_on_late(name: str, wanted: OnLate | Mapping[str, OnLate], streams: Iterable[str]) -> None:
    words = wanted.values() if isinstance(wanted, Mapping) else (wanted,)
    if not all(isinstance(word, str) and word in get_args(OnLate) for word in words):
        raise InvalidError("on_late must be process or drop", computation=name, on_late=wanted)
    if isinstance(wanted, Mapping) and (unknown := sorted(wanted.keys() - set(streams))):
        raise InvalidError(
            "on_late must name streams that the computation consumes", computation=name, streams=unknown
        )


def _check_order(name: str, computation: Computation) -> None:
    for flag in ("time_sorted", "in_order_of_arrival", "in_micro_batches", "holds_watermark"):
        check_flag(flag, getattr(computation, flag), computation=name)
    if computation.time_sorted and computation.in_order_of_arrival:
        raise InvalidError("in_order_of_arrival and time_sorted cannot be combined", computation=name)
    check_count("waiting_max", computation.waiting_max, computation=name)


def _checked_options(name: str, options: ComputationOptions) -> dict[str, Any]:
    options = cast(ComputationOptions, with_new_names(options))
    for option in options:
        if option not in _OPTIONS:
            raise InvalidError(
                f"no such option{did_you_mean(option, _OPTIONS)}",
                computation=name,
                option=option,
                options=sorted(_OPTIONS),
            )
    given: Mapping[str, Any] = {**options}
    for option in ("exactly_once", "time_sorted"):
        check_flag(option, given.get(option, False), computation=name)
    for option, words in _WORDS.items():
        if option in given and given[option] not in words:
            raise InvalidError(
                f"{option} must be {' or '.join(words)}", computation=name, **{option: given[option]}
            )
    timeout = options.get("user_code_timeout")
    if timeout is not None:
        duration_ms("user_code_timeout", timeout, least="1us")
    if options.get("renamed_from") is not None:
        check_name("computation", options["renamed_from"])
    check_count("retries", options.get("retries", 0), least=0, computation=name)
    intervals = options.get("intervals")
    if intervals is not None:
        check_count("intervals", intervals, computation=name)
    return {option: value for option, value in options.items() if option not in ("backfill", "feedback")}

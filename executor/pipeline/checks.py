"""Checks of a topology before it runs; every error names the wrong computation, stream or sink.

`Pipeline` refuses a mistake in a single declaration in that call, with the functions at the end.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Final, get_args

import cloudpickle

from millpond.executor.computation.computation import Computation
from millpond.executor.inputs.extraction import FieldExtractor
from millpond.executor.inputs.keys import check_key_extractor
from millpond.executor.inputs.payload import ROW_PREFIX, Payload
from millpond.executor.pipeline.nodes import DEAD_LETTERS, SIGNALS, SinkNode
from millpond.executor.pipeline.topology import (
    Topology,
    bounded_by_injectors,
    comes_back,
    cycle_of,
    holding_edges,
    is_in_cycle,
)
from millpond.executor.time.observations import AheadLimit, OnAhead
from millpond.executor.time.watermark_policies import IngressTime, WatermarkPolicy
from millpond.statestore.arguments import check_flag, check_instance
from millpond.statestore.durations import Duration, duration_us
from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.statestore.rows.codec import Codec
from millpond.statestore.rows.state_schema import SchemaCodec

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
_RESERVED: Final = frozenset({DEAD_LETTERS, SIGNALS})
_AT_WORK: Final = (
    "keep no lock, connection, file or Spark session in it, but make what belongs to a process where a hook first "
    "needs it"
)


def check_name(kind: str, name: object, *, reserved: frozenset[str] = _RESERVED) -> str:
    """Return the name, or refuse one that cannot be an SQL table, a folder and a ZooKeeper node alike."""
    if not isinstance(name, str):
        raise InvalidError(f"the {kind}'s name must be text", name=name, type=type(name).__name__)
    if not name:
        raise InvalidError(f"the {kind}'s name must not be empty")
    if not _NAME.fullmatch(name):
        usable = re.sub(r"^(?![A-Za-z_])", "_", re.sub(r"[^A-Za-z0-9_.-]", "_", name))[:100]
        raise InvalidError(
            f"the {kind}'s name must be a letter or _, then at most 99 letters, digits, _, - or ., such as {usable!r}",
            name=name,
        )
    if name in reserved:
        raise InvalidError(f"the {kind}'s name is reserved", name=name)
    return name


def type_name(value: Any) -> str:
    return value.__qualname__ if inspect.isclass(value) else type(value).__qualname__


def check_topology(topology: Topology) -> None:
    if not topology.injectors:
        raise InvalidError(
            "the pipeline has no injector, so nothing can ever happen: call inject", pipeline=topology.name
        )
    _names_differ_by_more_than_case(topology)
    _gone_computations_are_gone(topology)
    _streams_have_a_source(topology)
    _feedbacks_come_back(topology)
    _no_cycle_waits_for_itself(topology)
    _backfills_are_of_outside_records(topology)
    _sinks_can_be_written(topology)
    _code_can_travel(topology)


def check_inputs(topology: Topology, inputs: Iterable[str]) -> None:
    if not isinstance(inputs, Mapping | AbstractSet | Sequence) or not all(
        isinstance(name, str) for name in inputs
    ):
        raise InvalidError(
            f"the inputs of a run must be given by stream, as in {{{next(iter(topology.injectors), 'stream')!r}: rows}}",
            pipeline=topology.name,
            type=type(inputs).__name__,
        )
    given, expected = set(inputs), set(topology.injectors)
    for stream in sorted(given - expected, key=str):
        raise InvalidError(
            f"no injector names this input{did_you_mean(stream, expected)}",
            pipeline=topology.name,
            input=stream,
            injected=sorted(expected),
        )
    for stream in sorted(expected - given):
        raise InvalidError(
            "an injected stream has no input: give it one, which may be empty",
            pipeline=topology.name,
            stream=stream,
            inputs=sorted(given),
        )


def _names_differ_by_more_than_case(topology: Topology) -> None:
    seen: dict[str, str] = {}
    for name in topology.computations:
        other = seen.setdefault(name.lower(), name)
        if other != name:
            raise InvalidError(
                "two computations differ only by case, which SQL does not tell apart",
                first=other,
                second=name,
            )


def _gone_computations_are_gone(topology: Topology) -> None:
    for name in sorted(topology.drop & topology.computations.keys()):
        raise InvalidError(
            "the pipeline still has the computation that it drops: give it another name to start it empty",
            computation=name,
        )
    for name in sorted(topology.retire & topology.computations.keys()):
        raise InvalidError("the pipeline still has the computation that it retires", computation=name)
    for name in sorted(topology.retire & topology.drop):
        raise InvalidError("a former computation is in drop or in retire, not in both", computation=name)
    seen: dict[str, str] = {}
    for node in topology.computations.values():
        former = node.renamed_from
        if former is None:
            continue
        if former in topology.computations:
            raise InvalidError(
                "a computation cannot be renamed from one that the pipeline still has",
                computation=node.name,
                renamed_from=former,
            )
        other = seen.setdefault(former, node.name)
        if former in topology.drop | topology.retire or other != node.name:
            raise InvalidError(
                "the rows of a former computation can only go to one other, or be dropped",
                computation=node.name,
                renamed_from=former,
            )


def _streams_have_a_source(topology: Topology) -> None:
    for stream in topology.injectors:
        for node in topology.producers_of(stream):
            raise InvalidError(
                "an injected stream cannot be produced as well", stream=stream, computation=node.name
            )
    nodes = topology.computations.values()
    sources = {*topology.injectors, DEAD_LETTERS}.union(*(node.produces for node in nodes))
    read = [(own.stream, {"computation": node.name}) for node in nodes for own in node.subscriptions]
    for stream, subject in [*read, *((sink.stream, {"sink": sink.name}) for sink in topology.sinks.values())]:
        if stream not in sources:
            hint = did_you_mean(stream, sources)
            raise InvalidError(
                f"unknown stream: nothing injects or produces it{hint}", stream=stream, **subject
            )
    reached = topology.reached_from([*topology.injectors, DEAD_LETTERS])
    for name in topology.computations:
        if name not in reached:
            raise InvalidError("no injected record can ever reach this computation", computation=name)


def _feedbacks_come_back(topology: Topology) -> None:
    for node in topology.computations.values():
        for subscription in node.subscriptions:
            if subscription.feedback and not comes_back(topology, node, subscription.stream):
                raise InvalidError(
                    "this stream cannot be a feedback: no output of the computation ever returns on it",
                    computation=node.name,
                    stream=subscription.stream,
                )
    bounded = bounded_by_injectors(topology)
    for node in topology.computations.values():
        if node.name not in bounded:
            raise InvalidError(
                "this computation gets records only on feedbacks, which hold no watermark, so all of them would be "
                "late: declare as a feedback the stream on which they come back to where others come in",
                computation=node.name,
                feedback=[own.stream for own in node.subscriptions if own.feedback],
            )


def _no_cycle_waits_for_itself(topology: Topology) -> None:
    for node in topology.computations.values():
        if node.horizon_us and node.cycle:
            raise InvalidError(
                "a computation in a cycle would hold its own watermark back indefinitely: "
                "set its late_data_horizon to 0 or unbounded, or declare the way back as its feedback",
                computation=node.name,
            )
        if node.time_sorted and is_in_cycle(topology, node):
            raise InvalidError(
                "a computation in a cycle cannot be time_sorted: a record that waits holds the watermark that it "
                "waits for",
                computation=node.name,
            )
        if node.computation.holds_watermark and node.cycle:
            cycle = cycle_of(holding_edges(topology), node.name)
            _, last = cycle[-1]
            raise InvalidError(
                "a windowed step in a cycle would never show a pane, because it waits for a watermark that it "
                f"holds itself: give it feedback=[{last!r}], if what comes back on that stream may be late",
                computation=node.name,
                cycle=list(node.cycle),
                streams=[stream for _, stream in cycle],
            )


def _backfills_are_of_outside_records(topology: Topology) -> None:
    for name, streams in topology.backfills.items():
        for subscription in topology.computations[name].subscriptions:
            node = topology.injectors.get(subscription.stream)
            subject = {"computation": name, "stream": subscription.stream}
            if node is None:
                raise InvalidError(
                    "a computation with a backfill consumes injected streams only: what another one produces is not "
                    "kept; give the backfill to a second copy of that one, under another name",
                    **subject,
                )
            if subscription.stream in streams and isinstance(node.at, IngressTime):
                raise InvalidError(
                    "a stream by time of arrival has no times before it, so no backfill", **subject
                )
            if subscription.stream in streams and node.change is not None:
                raise InvalidError("a stream of changes has no backfill", **subject)


def _sinks_can_be_written(topology: Topology) -> None:
    seen: dict[str, str] = {}
    for node in topology.sinks.values():
        if node.stream in topology.injectors:
            raise InvalidError(
                "a sink cannot write an injected stream: put a computation between",
                sink=node.name,
                stream=node.stream,
            )
        other = seen.setdefault(_place(node.sink.identity), node.name)
        if other != node.name:
            raise InvalidError(
                "two sinks write to the same destination: give one of them another path",
                first=other,
                second=node.name,
                path=node.sink.identity,
            )
    for node in topology.sinks.values():
        for place, name in seen.items():
            refuse_sink_around(node, f"sink {name}", place)


def refuse_sink_around(node: SinkNode, what: str, path: str) -> None:
    """Refuse a folder with something else in it, because VACUUM deletes all that is not of the sink's table."""
    place, inner = _place(node.sink.identity), _place(path)
    if inner.startswith(f"{place.rstrip('/')}/"):
        raise InvalidError(
            f"the folder of a sink holds the {what}, whose files a VACUUM of the sink's table would delete: give the "
            "sink another path",
            sink=node.name,
            path=place,
            holds=inner,
        )


def _place(identity: str) -> str:
    """Return a sink's destination under one name, whatever links and detours its path has."""
    return identity if "://" in identity else os.path.realpath(identity)


def _code_can_travel(topology: Topology) -> None:
    for node in topology.computations.values():
        cause = _pickling_failure(node.computation)
        if cause is not None:
            subject = {"computation": node.name, "type": type(node.computation).__qualname__}
            attribute = _unpicklable_attribute(node.computation)
            if attribute is not None:
                subject["attribute"] = attribute
            raise InvalidError(
                f"the computation cannot be pickled, so it cannot travel to a worker: {_AT_WORK}",
                **subject,
                reason=cause,
            ) from cause
        for subscription in node.subscriptions:
            subject = {"computation": node.name, "stream": subscription.stream}
            _check_pickles(f"the key extractor cannot be pickled: {_AT_WORK}", subscription.key, subject)
    for injector in topology.injectors.values():
        for field in ("key", "at", "id", "watermark", "member"):
            subject = {"stream": injector.stream, "argument": field}
            _check_pickles(f"the injector cannot be pickled: {_AT_WORK}", getattr(injector, field), subject)


def _unpicklable_attribute(computation: object) -> str | None:
    attributes = dict(getattr(computation, "__dict__", {}))
    for name, value in inspect.getmembers_static(type(computation)):
        if not name.startswith("__"):
            attributes.setdefault(name, value)
    return next((name for name, value in attributes.items() if _pickling_failure(value) is not None), None)


def _check_pickles(message: str, value: object, subject: dict[str, str]) -> None:
    cause = _pickling_failure(value)
    if cause is not None:
        raise InvalidError(message, **subject, reason=cause) from cause


def _pickling_failure(value: object) -> Exception | None:
    if value is None or isinstance(value, str):
        return None
    try:
        cloudpickle.dumps(value)
    except Exception as failure:  # noqa: BLE001 - any __reduce__ of the user's may raise anything
        return failure
    return None


def check_field(argument: str, field: object, stream: str) -> None:
    if not (callable(field) or (isinstance(field, str) and field)):
        raise InvalidError(
            "an injector's argument must be a column's name or a function of the row",
            stream=stream,
            argument=argument,
            type=type_name(field),
        )


def check_key_field(key: object, stream: str) -> None:
    if isinstance(key, list | tuple):
        check_key_extractor(key, stream=stream, argument="key")
    else:
        check_field("key", key, stream)


def positive_us(name: str, duration: Duration, **subject: object) -> int:
    micros = duration_us(duration)
    if micros <= 0:
        raise InvalidError(f"{name} must be positive", **subject, value=duration)
    return micros


def check_ingress(
    stream: str,
    watermark: WatermarkPolicy | None,
    idle_after: Duration | None,
    members: Sequence[str],
    skew_limit: Duration | None,
    ahead_max: Duration | None,
) -> None:
    has_own = watermark is not None and not isinstance(watermark, IngressTime)
    if has_own or idle_after is not None or members or skew_limit is not None or ahead_max is not None:
        raise InvalidError(
            "a stream by time of arrival has its own watermark, and does not hold others back: "
            "it takes no watermark, idle_after, members, skew_limit or ahead_max",
            stream=stream,
        )


def ahead_limit(stream: str, ahead_max: Duration | None, on_ahead: OnAhead) -> AheadLimit | None:
    if on_ahead not in _ON_AHEAD:
        raise InvalidError(
            f"no such choice{did_you_mean(on_ahead, _ON_AHEAD)}",
            stream=stream,
            on_ahead=on_ahead,
            choices=_ON_AHEAD,
        )
    if ahead_max is None:
        if on_ahead != _ON_AHEAD[0]:
            raise InvalidError("on_ahead needs an ahead_max", stream=stream, on_ahead=on_ahead)
        return None
    return AheadLimit(max_us=positive_us("ahead_max", ahead_max, stream=stream), on_ahead=on_ahead)


_ON_AHEAD: Final = list(get_args(OnAhead))


def check_members(stream: str, members: Sequence[str], member: FieldExtractor | None) -> None:
    if isinstance(members, str) or not all(isinstance(name, str) and name for name in members):
        raise InvalidError("members must be a list of names", stream=stream, members=members)
    if len(set(members)) < len(members):
        raise InvalidError("members must name each sender once", stream=stream, members=list(members))
    if bool(members) != (member is not None):
        raise InvalidError("members and member must be given together", stream=stream)
    if member is not None:
        check_field("member", member, stream)


def check_payload(stream: str, payload: object, change: str | None, extractors: Sequence[object]) -> None:
    if payload is None:
        return
    if not isinstance(payload, Payload):
        raise InvalidError(
            "payload must be an AvroPayload, a ProtobufPayload or a JsonPayload",
            stream=stream,
            type=type_name(payload),
        )
    if change is not None:
        raise InvalidError(
            "a stream of changes takes no payload: decode it in the frame, for example with Spark's from_avro",
            stream=stream,
        )
    known = payload.fields()
    for extractor in extractors:
        for name in extractor if isinstance(extractor, list | tuple) else [extractor]:
            if known is None or not isinstance(name, str) or name in known or name.startswith(ROW_PREFIX):
                continue
            hint = did_you_mean(name, known) or f": columns of the row have {ROW_PREFIX} before their names"
            raise InvalidError(
                f"the payload's schema has no such field{hint}",
                stream=stream,
                field=name,
                fields=sorted(known),
            )


def check_overrides(base: type, declared: object, **subject: object) -> None:
    """Refuse a misspelt method or attribute: nothing would use it, and the inherited one would run instead."""
    kind = type(declared)
    names = [name for name in dir(kind) if not name.startswith("_")]
    missed = [name for name in names if hasattr(base, name) and getattr(kind, name) is getattr(base, name)]
    for name in names:
        is_method = callable(getattr(kind, name))
        alike = [one for one in missed if callable(getattr(kind, one)) is is_method]
        near = get_close_matches(name, alike, n=1, cutoff=0.9) if not hasattr(base, name) else ()
        # One that differs by its plural may be the code's own.
        if near and (is_method or f"{name}s" != near[0]):
            what, used = ("method", "calls") if is_method else ("attribute", "reads")
            raise InvalidError(
                f"nothing {used} this {what} of a {base.__name__}; did you mean {near[0]!r}?",
                **subject,
                type=kind.__qualname__,
                **{what: name},
            )


_HOOKS: Final = ("process_record", "process_records", "process_table", "process_timer", "upgrade_state")


def check_hooks(name: str, computation: Computation) -> None:
    """Refuse hooks whose body would never run: misspelt ones, and those that only make a generator or a coroutine."""
    check_overrides(Computation, computation, computation=name)
    for hook in _HOOKS:
        function = getattr(computation, hook)
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise InvalidError(
                "a hook must be a plain function: nothing awaits an async one, so it would never run",
                computation=name,
                hook=hook,
            )
        if inspect.isgeneratorfunction(function):
            raise InvalidError(
                "a hook must be a plain function: nothing reads yielded values, so it would never run; "
                "call context.produce instead of yield",
                computation=name,
                hook=hook,
            )


def check_table(
    name: str,
    computation: Computation,
    produces: Iterable[str],
    schemas: Collection[str],
    *,
    time_sorted: bool,
) -> None:
    """Refuse ``process_table`` where its columns would have no types, or where records must come one by one.

    ``schemas`` are those of the produced streams that have a schema.
    """
    kind = type(computation)
    if kind.process_table is Computation.process_table:
        return
    for hook in ("process_record", "process_records"):
        if getattr(kind, hook) is not getattr(Computation, hook):
            raise InvalidError(
                "process_table takes the place of the other hooks for records: leave one of them out",
                computation=name,
                hook=hook,
            )
    if time_sorted or computation.in_micro_batches:
        raise InvalidError(
            "process_table takes records of all keys at once: write process_record for a computation with time_sorted "
            "or in_micro_batches",
            computation=name,
        )
    codec = computation.codec
    if codec is not Computation.codec and not isinstance(codec, SchemaCodec):
        raise InvalidError(
            "process_table takes states as columns: give the computation state=, an Arrow schema, and no other codec",
            computation=name,
            codec=codec.name,
        )
    for stream in produces:
        # `apply` declares a stream of the computation's name whether or not the code produces to it.
        if stream not in schemas and stream != name:
            raise InvalidError(
                "process_table produces columns, so the stream needs a schema: give it one in produces",
                computation=name,
                stream=stream,
            )


def check_combining(name: str, computation: Computation, *, time_sorted: bool) -> None:
    """Refuse a `CombiningState` for code that needs its rows: for timers, waiting records, or another form of states."""
    if type(computation).process_timer is not Computation.process_timer or time_sorted:
        raise InvalidError(
            "a computation with a combining state has no timers and no time_sorted, because its rows are not read",
            computation=name,
        )
    if computation.state_version:
        raise InvalidError(
            "a combining state has no versions: sums cannot be added to states of another form",
            computation=name,
            state_version=computation.state_version,
        )


STATE_VERSION_MAX: Final = 2**31 - 1
"""The greatest number that the column has room for."""


def check_state_version(name: str, computation: Computation) -> None:
    _check_codec("codec", computation.codec, computation=name)
    version, codecs = computation.state_version, computation.codecs
    if type(version) is not int or not 0 <= version <= STATE_VERSION_MAX:
        raise InvalidError(
            "state_version is a whole number of at least 0", computation=name, state_version=version
        )
    if not isinstance(codecs, Mapping):
        raise InvalidError(
            "codecs must map earlier state versions to their codecs",
            computation=name,
            type=type(codecs).__name__,
        )
    for of_version, codec in codecs.items():
        if type(of_version) is not int or not 0 <= of_version < version:
            raise InvalidError(
                "codecs must name versions earlier than state_version",
                computation=name,
                version=of_version,
                state_version=version,
            )
        _check_codec("each codec", codec, computation=name, version=of_version)


def _check_codec(name: str, codec: Codec, **subject: Any) -> None:
    check_instance(name, codec, Codec, **subject)
    if not isinstance(codec.name, str):
        raise InvalidError("the name of a codec must be text", **subject, name=codec.name)
    check_flag("is_text of a codec", codec.is_text, **subject)


@contextmanager
def told_of_stream(stream: str) -> Iterator[None]:
    try:
        yield
    except InvalidError as error:
        raise InvalidError(error.message, **{**error.details, "stream": stream}) from error

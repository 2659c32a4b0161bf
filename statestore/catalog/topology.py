"""Topologies of pipelines: as declared, as commits record them, and how one differs from the next.

Each start of a pipeline, and each update of a running one, records the topology in its commit. A pipeline declares all of
its topology each time, which replaces the previous one (MillWheel §4.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field
from typing import Final

from millpond.statestore.errors import DataError
from millpond.statestore.history.replayed_log import newest_commits
from millpond.statestore.log.log import Log
from millpond.statestore.types import TableVersion, WallTimeMicros


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputationDefinition:
    """A declared computation; ``options`` must be representable as JSON."""

    name: str
    code_hash: str
    codec: str = "json"
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDefinition:
    """A named edge, with the computations or injectors that produce to it."""

    name: str
    producers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionDefinition:
    """A consumer of a stream; ``key_extractor`` names the key extractor (MillWheel §4.2)."""

    consumer: str
    stream: str
    key_extractor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkDefinition:
    """A sink: the stream that flows into it, and its destination."""

    name: str
    stream: str
    destination: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineDefinition:
    """The whole topology of a pipeline."""

    name: str
    computations: tuple[ComputationDefinition, ...] = ()
    streams: tuple[StreamDefinition, ...] = ()
    subscriptions: tuple[SubscriptionDefinition, ...] = ()
    sinks: tuple[SinkDefinition, ...] = ()


DEFINES: Final = b'"definition"'
"""Bytes of every commit that records a topology."""


def definition_from_metadata(metadata: Mapping[str, object]) -> PipelineDefinition | None:
    """Return the topology in a commit's metadata, if any; raise `DataError` if it is malformed."""
    value = metadata.get("definition")
    if not isinstance(value, Mapping):
        return None
    try:
        definition = PipelineDefinition(
            name=value["name"],
            computations=tuple(ComputationDefinition(**one) for one in value["computations"]),
            streams=tuple(
                StreamDefinition(name=one["name"], producers=tuple(map(str, one["producers"])))
                for one in value["streams"]
            ),
            subscriptions=tuple(SubscriptionDefinition(**one) for one in value["subscriptions"]),
            sinks=tuple(SinkDefinition(**one) for one in value.get("sinks", ())),
        )
    except (KeyError, TypeError) as error:
        raise DataError(_MALFORMED) from error
    name, *kinds = asdict(definition).values()
    values = (value for parts in kinds for part in parts for value in part.items())
    if not isinstance(name, str) or not all(isinstance(value, _KINDS.get(of, str)) for of, value in values):
        raise DataError(_MALFORMED)
    return definition


_MALFORMED: Final = "a commit carries a malformed pipeline definition"
_KINDS: Final[Mapping[str, type]] = {"options": Mapping, "producers": tuple}


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyChange:
    """The difference between two topologies of a pipeline; all names are sorted.

    Attributes:
        added: new computations.
        removed: computations that are gone.
        changed: computations with other code, options, inputs or productions.
        sinks_added: new sinks.
        sinks_removed: sinks that are gone.
        sinks_changed: sinks with another stream or destination.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    sinks_added: tuple[str, ...] = ()
    sinks_removed: tuple[str, ...] = ()
    sinks_changed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any(astuple(self))


def change_between(former: PipelineDefinition | None, present: PipelineDefinition) -> TopologyChange:
    """Return the changes from one topology to the next; ``former`` is ``None`` if there was none.

    Example:
        >>> change_between(None, PipelineDefinition(name="p", computations=(
        ...     ComputationDefinition(name="count", code_hash="1"),))).added
        ('count',)
    """
    code_before, code = ({} if one is None else _computations(one) for one in (former, present))
    sinks_before, sinks = (
        {} if one is None else {sink.name: (sink.stream, sink.destination) for sink in one.sinks}
        for one in (former, present)
    )
    return TopologyChange(
        added=tuple(sorted(code.keys() - code_before.keys())),
        removed=tuple(sorted(code_before.keys() - code.keys())),
        changed=_changed(code_before, code),
        sinks_added=tuple(sorted(sinks.keys() - sinks_before.keys())),
        sinks_removed=tuple(sorted(sinks_before.keys() - sinks.keys())),
        sinks_changed=_changed(sinks_before, sinks),
    )


def _changed(former: Mapping[str, object], present: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(sorted(name for name in former.keys() & present.keys() if former[name] != present[name]))


def _computations(definition: PipelineDefinition) -> dict[str, object]:
    """Return each computation's code, codec, options, inputs and outputs, for comparison."""
    return {
        one.name: (
            one.code_hash,
            one.codec,
            sorted(one.options.items()),
            sorted((s.stream, s.key_extractor) for s in definition.subscriptions if s.consumer == one.name),
            sorted(stream.name for stream in definition.streams if one.name in stream.producers),
        )
        for one in definition.computations
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTopology:
    """A topology that the log records, and the commit that introduced it."""

    version: TableVersion
    wall_us: WallTimeMicros
    is_update: bool  # of a running pipeline; otherwise of a start
    definition: PipelineDefinition
    change: TopologyChange | None  # ``None`` if the log does not reach back to the previous topology


def logged_topologies(log: Log, newest: TableVersion) -> list[LoggedTopology]:
    """Return the topologies in the remaining commits, oldest first, without starts that change nothing."""
    versions = log.inventory().versions[: newest + 1]
    is_whole = len(versions) == newest + 1 == versions[-1] + 1
    known: dict[str, PipelineDefinition] = {}
    topologies: list[LoggedTopology] = []
    for commit in reversed(list(newest_commits(log, newest, naming=DEFINES))):
        definition = definition_from_metadata(commit.metadata)
        if definition is None or known.get(definition.name) == definition:
            continue
        former = known.get(definition.name)
        known[definition.name] = definition
        topologies.append(
            LoggedTopology(
                version=commit.version,
                wall_us=commit.wall_us,
                is_update=commit.kind == "topology",
                definition=definition,
                change=change_between(former, definition) if former is not None or is_whole else None,
            )
        )
    return topologies

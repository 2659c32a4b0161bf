"""Values that go into the catalog and come out of it: frozen, without database types.

A *definition* is what a pipeline declares; an *entry* is what the catalog holds.

Derivation of catalog entries from a commit, the same for new commits and for old ones.

`CommitFacts` is the part of a commit that stays in the log: its ``txn`` actions and its
``commitInfo.millpond``. The journal derives the catalog's entries from the facts of a
new commit, `Catalog.rebuild` from the facts of commits read back. Both use this
module, so a rebuilt catalog equals the lost one.

It reads the metadata ``records``, ``late``, ``duplicates``, ``dead_letters`` (also
inside ``counts``), ``watermarks`` and ``output_watermarks`` (interval's app id to
microseconds), and ``definition`` (`definition_to_metadata`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Final
from urllib.parse import unquote

from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.rows.row import Fence, unpack_fence
from millpond.statestore.types import (
    EventTimeMicros,
    Sequencer,
    Superstep,
    TableVersion,
    WallTimeMicros,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogLimits:
    """Bounds of all data in the catalog that would grow with time.

    The journals may overshoot by an eighth before they are pruned; a single superstep is
    never split, so a superstep that touched more intervals than ``watermark_rows_max`` stays whole.
    """

    supersteps_max: int = 1_000
    watermark_rows_max: int = 200_000
    leases_per_interval_max: int = 16
    code_versions_max: int = 100

    def __post_init__(self) -> None:
        """Refuse bounds below 1."""
        bounds = (
            self.supersteps_max,
            self.watermark_rows_max,
            self.leases_per_interval_max,
            self.code_versions_max,
        )
        if min(bounds) < 1:
            raise InvalidError("a limit of the catalog must be at least 1", limits=bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputationDefinition:
    """A computation as its pipeline declares it; ``options`` must be representable as JSON."""

    name: str
    code_hash: str
    codec: str = "json"
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDefinition:
    """A stream: a named edge, and the computations or injectors that produce to it."""

    name: str
    producers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionDefinition:
    """A consumer of a stream; ``key_extractor`` is a text that names the key extractor."""

    consumer: str
    stream: str
    key_extractor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkDefinition:
    """A sink: the stream that flows into it, and where it writes."""

    name: str
    stream: str
    destination: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineDefinition:
    """The whole topology of a pipeline; recording it replaces the previous topology.

    The catalog has no table for ``sinks``: they are told by the log alone.
    """

    name: str
    computations: tuple[ComputationDefinition, ...] = ()
    streams: tuple[StreamDefinition, ...] = ()
    subscriptions: tuple[SubscriptionDefinition, ...] = ()
    sinks: tuple[SinkDefinition, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputationEntry:
    """A computation that a pipeline has declared; it is retired once its pipeline no longer declares it.

    ``code_version`` rises by one whenever the code's hash changes.
    """

    name: str
    pipeline: str
    code_version: int
    code_hash: str
    codec: str
    options: Mapping[str, object]
    recorded_us: WallTimeMicros
    retired_us: WallTimeMicros | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeVersion:
    """The code of a computation from ``recorded_us`` until the next version."""

    computation: str
    code_version: int
    code_hash: str
    recorded_us: WallTimeMicros


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalEntry:
    """An interval, its owner's last commit and its last known watermarks.

    ``opened_version`` is the version of the current owner's first commit (``None``: before the start of
    the remaining log); ``closed_version`` is the version at which a split or merge replaced the interval.
    """

    interval: Interval
    fence: Fence
    opened_version: TableVersion | None
    closed_version: TableVersion | None
    version: TableVersion
    input_watermark_us: EventTimeMicros | None
    output_watermark_us: EventTimeMicros | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEntry:
    """One owner of an interval: from its first commit until the next owner's."""

    interval: Interval
    sequencer: Sequencer
    opened_version: TableVersion | None
    closed_version: TableVersion | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkEntry:
    """Low watermarks after a superstep, of the interval, computation or injector whose app id is ``subject``."""

    pipeline: str
    superstep: Superstep
    subject: str
    version: TableVersion
    input_us: EventTimeMicros | None
    output_us: EventTimeMicros | None

    @property
    def interval(self) -> Interval | None:
        """The interval that the subject names; ``None`` for other subjects."""
        return Interval.from_app_id(self.subject)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPositionEntry:
    """The last batch of an external source whose effects are in the table."""

    pipeline: str
    input: str
    source_id: str
    position: int
    version: TableVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperstepEntry:
    """The counts of one superstep; ``commit_ms`` is known only to the process that made the commit."""

    pipeline: str
    superstep: Superstep
    version: TableVersion
    records: int
    late: int
    duplicates: int
    dead_letters: int
    commit_ms: float | None
    wall_us: WallTimeMicros


@dataclass(frozen=True, slots=True, kw_only=True)
class SavepointEntry:
    """A savepoint of the log: a table version with a name, and when it was dropped."""

    name: str
    version: TableVersion
    note: str = ""
    created_us: WallTimeMicros
    released_us: WallTimeMicros | None = None


class HorizonKind(StrEnum):
    """The kind of a horizon's publisher, which decides its meaning; see `HorizonEntry`."""

    READER = "reader"
    COLLECTOR = "collector"


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizonEntry:
    """A table version that its holder needs.

    A reader's horizon is the oldest version that it still reads; a collector's is the oldest
    version that it promises to leave readable. ``expires_us`` ``None`` never expires.
    """

    holder: str
    kind: HorizonKind
    version: TableVersion
    published_us: WallTimeMicros
    expires_us: WallTimeMicros | None


KNOWN_BEFORE_LOG: Final = "before_log"
"""Kind of the facts that replace all commits whose files are gone: they open no lease and add no journal row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFacts:
    """The facts of one landed commit.

    Args:
        version: the table version that it made.
        wall_us: the commit's time by the writer's clock (``commitInfo.timestamp``).
        txns: its ``txn`` actions: app id to version.
        metadata: ``commitInfo.millpond``.
        commit_ms: duration of the commit, where known; it is not in the log.
    """

    version: TableVersion
    wall_us: WallTimeMicros
    txns: Mapping[str, int] = field(default_factory=dict)
    metadata: Mapping[str, object] = field(default_factory=dict)
    commit_ms: float | None = None


def fences_of(txns: Mapping[str, int]) -> Iterator[tuple[Interval, Fence]]:
    """The fences among the ``txn`` actions, each with its interval."""
    for app_id, version in txns.items():
        interval = Interval.from_app_id(app_id)
        if interval is not None:
            yield interval, unpack_fence(version)


def input_positions_of(facts: CommitFacts) -> Iterator[InputPositionEntry]:
    """The positions of external sources that the commit moved.

    Raises:
        DataError: the log names a malformed input.
    """
    for app_id, position in facts.txns.items():
        if app_id.startswith(AppId.INPUT):
            parts = app_id.removeprefix(AppId.INPUT).split("/")
            if len(parts) != 3:
                raise DataError("the log names a malformed input", app_id=app_id)
            pipeline, name, source_id = map(unquote, parts)
            yield InputPositionEntry(
                pipeline=pipeline,
                input=name,
                source_id=source_id,
                position=position,
                version=facts.version,
            )


def superstep_of(facts: CommitFacts) -> SuperstepEntry | None:
    """The superstep that the commit ended; ``None`` for fences, compactions and other kinds."""
    key = _superstep_key(facts)
    if key is None:
        return None
    pipeline, superstep = key
    return SuperstepEntry(
        pipeline=pipeline,
        superstep=superstep,
        version=facts.version,
        records=_count(facts, "records"),
        late=_count(facts, "late"),
        duplicates=_count(facts, "duplicates"),
        dead_letters=_count(facts, "dead_letters"),
        commit_ms=facts.commit_ms,
        wall_us=facts.wall_us,
    )


def watermarks_of(facts: CommitFacts) -> Iterator[WatermarkEntry]:
    """The low watermarks that the commit journaled: of intervals (metadata), of whole
    computations and of injectors (``txn`` actions ``millpond/watermark/…``).
    """
    key = _superstep_key(facts)
    if key is None:
        return
    pipeline, superstep = key
    inputs, outputs = _times(facts, "watermarks"), _times(facts, "output_watermarks")
    for app_id, at in facts.txns.items():
        if app_id.startswith(AppId.WATERMARK):
            kind = app_id.removeprefix(AppId.WATERMARK).split("/")[1:2]
            (outputs if kind == ["injector"] else inputs)[app_id] = EventTimeMicros(at)
    for subject in inputs | outputs:
        yield WatermarkEntry(
            pipeline=pipeline,
            superstep=superstep,
            subject=subject,
            version=facts.version,
            input_us=inputs.get(subject),
            output_us=outputs.get(subject),
        )


def definition_to_metadata(definition: PipelineDefinition) -> dict[str, object]:
    """A topology as plain JSON, for a commit's metadata under ``definition``."""
    return asdict(definition)


def definition_from_metadata(metadata: Mapping[str, object]) -> PipelineDefinition | None:
    """The topology in a commit's metadata; ``None`` if there is none.

    Raises:
        DataError: there is one, but it is malformed.
    """
    value = metadata.get("definition")
    if not isinstance(value, Mapping):
        return None
    try:
        return PipelineDefinition(
            name=value["name"],
            computations=tuple(ComputationDefinition(**fields) for fields in value["computations"]),
            streams=tuple(
                StreamDefinition(name=fields["name"], producers=tuple(fields["producers"]))
                for fields in value["streams"]
            ),
            subscriptions=tuple(SubscriptionDefinition(**fields) for fields in value["subscriptions"]),
            sinks=tuple(SinkDefinition(**fields) for fields in value.get("sinks", ())),
        )
    except (KeyError, TypeError) as error:
        raise DataError("a commit carries a malformed pipeline definition") from error


def _superstep_key(facts: CommitFacts) -> tuple[str, Superstep] | None:
    if facts.metadata.get("kind") == KNOWN_BEFORE_LOG:
        return None
    for app_id, version in facts.txns.items():
        if app_id.startswith(AppId.SUPERSTEP):
            return unquote(app_id.removeprefix(AppId.SUPERSTEP)), Superstep(version)
    return None


def _count(facts: CommitFacts, name: str) -> int:
    value = facts.metadata.get(name)
    if value is None:
        counts = facts.metadata.get("counts")
        value = counts.get(name) if isinstance(counts, Mapping) else None
    return value if isinstance(value, int) else 0


def _times(facts: CommitFacts, name: str) -> dict[str, EventTimeMicros]:
    times = facts.metadata.get(name)
    if not isinstance(times, Mapping):
        return {}
    return {str(subject): EventTimeMicros(at) for subject, at in times.items() if isinstance(at, int)}

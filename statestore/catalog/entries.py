"""Values that go into the catalog and come out of it: frozen, without database types.

A *definition* is what a pipeline declares; an *entry* is what the catalog holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.rows.row import Fence
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

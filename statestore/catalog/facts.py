"""
What a commit says to the catalog: the one derivation, for live commits and for old ones.

`CommitFacts` is what every commit leaves in the log: its ``txn`` actions and its
``commitInfo.millpond``. The journal derives the catalog's entries from the facts of a
commit just made, `Catalog.rebuild` from the facts of commits read back. Both take this
path, so a rebuilt catalog equals the lost one.

Metadata that is looked at: ``records``, ``late``, ``duplicates``, ``dead_letters`` (also
inside ``counts``), ``watermarks`` and ``output_watermarks`` (interval's app id to
microseconds), ``definition`` (`definition_to_metadata`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Final
from urllib.parse import unquote

from millpond.statestore.app_ids import INPUT_PREFIX, SAVEPOINT_PREFIX, SUPERSTEP_PREFIX, WATERMARK_PREFIX
from millpond.statestore.catalog.entries import (
    ComputationDefinition,
    InputPositionEntry,
    PipelineDefinition,
    StreamDefinition,
    SubscriptionDefinition,
    SuperstepEntry,
    WatermarkEntry,
)
from millpond.statestore.errors import DataError
from millpond.statestore.interval import Interval
from millpond.statestore.rows.row import Fence, unpack_fence
from millpond.statestore.types import (
    EventTimeMicros,
    Superstep,
    TableVersion,
    WallTimeMicros,
)

__all__ = [
    "KNOWN_BEFORE_LOG",
    "SAVEPOINT_RELEASED",
    "CommitFacts",
    "definition_from_metadata",
    "definition_to_metadata",
    "fences_of",
    "input_positions_of",
    "savepoints_of",
    "superstep_of",
    "watermarks_of",
]

KNOWN_BEFORE_LOG: Final = "before_log"
"""Kind of the facts that stand for all commits whose files are gone: they open and journal nothing."""

SAVEPOINT_RELEASED: Final = 2**63 - 1
"""The ``txn`` version of a savepoint that was given up; no table version is as high."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFacts:
    """
    What one landed commit says.

    Args:
        version: the table version that it made.
        wall_us: when, by the clock of its writer (``commitInfo.timestamp``).
        txns: its ``txn`` actions: app id to version.
        metadata: ``commitInfo.millpond``.
        commit_ms: how long it took, where known; not in the log.
    """

    version: TableVersion
    wall_us: WallTimeMicros
    txns: Mapping[str, int] = field(default_factory=dict)
    metadata: Mapping[str, object] = field(default_factory=dict)
    commit_ms: float | None = None


def fences_of(txns: Mapping[str, int]) -> Iterator[tuple[Interval, Fence]]:
    """
    The intervals that the ``txn`` actions fence, and with what.
    """
    for app_id, version in txns.items():
        interval = Interval.from_app_id(app_id)
        if interval is not None:
            yield interval, unpack_fence(version)


def input_positions_of(facts: CommitFacts) -> Iterator[InputPositionEntry]:
    """
    The outside positions that the commit moved.
    """
    for app_id, position in facts.txns.items():
        if app_id.startswith(INPUT_PREFIX):
            parts = app_id.removeprefix(INPUT_PREFIX).split("/")
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


def savepoints_of(txns: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """
    The savepoints among the ``txn`` actions: name and table version (or `SAVEPOINT_RELEASED`).
    """
    for app_id, version in txns.items():
        if app_id.startswith(SAVEPOINT_PREFIX):
            yield unquote(app_id.removeprefix(SAVEPOINT_PREFIX)), version


def superstep_of(facts: CommitFacts) -> SuperstepEntry | None:
    """
    The superstep that the commit ended; ``None`` for fences, compactions and the like.
    """
    place = _superstep_place(facts)
    if place is None:
        return None
    pipeline, superstep = place
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
    """
    The low watermarks that the commit journaled: of intervals (metadata), of whole
    computations and of injectors (``txn`` actions ``millpond/watermark/…``).
    """
    place = _superstep_place(facts)
    if place is None:
        return
    inputs, outputs = _times(facts, "watermarks"), _times(facts, "output_watermarks")
    for app_id, at in facts.txns.items():
        if app_id.startswith(WATERMARK_PREFIX):
            kind = app_id.removeprefix(WATERMARK_PREFIX).split("/")[1:2]
            (outputs if kind == ["injector"] else inputs)[app_id] = EventTimeMicros(at)
    for subject in inputs | outputs:
        yield WatermarkEntry(
            pipeline=place[0],
            superstep=place[1],
            subject=subject,
            version=facts.version,
            input_us=inputs.get(subject),
            output_us=outputs.get(subject),
        )


def definition_to_metadata(definition: PipelineDefinition) -> dict[str, object]:
    """
    A topology as plain JSON, to ride in a commit's metadata under ``definition``.
    """
    return asdict(definition)


def definition_from_metadata(metadata: Mapping[str, object]) -> PipelineDefinition | None:
    """
    The topology that a commit's metadata carries, if it does.

    Raises:
        DataError: there is one, but it is malformed.
    """
    value = metadata.get("definition")
    if not isinstance(value, Mapping):
        return None
    try:
        return PipelineDefinition(
            name=value["name"],
            computations=tuple(ComputationDefinition(**each) for each in value["computations"]),
            streams=tuple(
                StreamDefinition(name=each["name"], producers=tuple(each["producers"]))
                for each in value["streams"]
            ),
            subscriptions=tuple(SubscriptionDefinition(**each) for each in value["subscriptions"]),
        )
    except (KeyError, TypeError) as error:
        raise DataError("a commit carries a malformed pipeline definition") from error


def _superstep_place(facts: CommitFacts) -> tuple[str, Superstep] | None:
    if facts.metadata.get("kind") == KNOWN_BEFORE_LOG:
        return None
    for app_id, version in facts.txns.items():
        if app_id.startswith(SUPERSTEP_PREFIX):
            return unquote(app_id.removeprefix(SUPERSTEP_PREFIX)), Superstep(version)
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

"""Declared topologies: computations and their code versions, streams, subscriptions.

The topology is dynamic (MillWheel §4.3): a pipeline declares all of it at each
start, which replaces its previous declaration. A computation that is no longer
declared is retired but stays listed, because its rows are still in the table.

What has changed between two topologies of a pipeline.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, select

from millpond.statestore.catalog.engine import (
    CODE_VERSIONS,
    COMPUTATIONS,
    STREAMS,
    SUBSCRIPTIONS,
    replace_rows,
)
from millpond.statestore.catalog.entries import (
    CatalogLimits,
    CodeVersion,
    ComputationDefinition,
    ComputationEntry,
    PipelineDefinition,
    StreamDefinition,
    SubscriptionDefinition,
)
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import WallTimeMicros


def write_definition(
    connection: Connection, definition: PipelineDefinition, at_us: WallTimeMicros, limits: CatalogLimits
) -> None:
    """Replace a pipeline's topology.

    Raises:
        InvalidError: a computation belongs to another pipeline, or its options are not JSON.
    """
    known = {entry.name: entry for entry in read_computations(connection)}
    for computation in definition.computations:
        _write_computation(connection, definition.name, computation, known.get(computation.name), at_us)
        _prune_code_versions(connection, computation.name, limits.code_versions_max)
    _retire_others(connection, definition, at_us)
    _replace_edges(connection, definition)


def replay_definition(
    connection: Connection, definition: PipelineDefinition, at_us: WallTimeMicros, limits: CatalogLimits
) -> None:
    """Record the topology in a commit of ``at_us``, unless a newer topology is known."""
    known = (entry for entry in read_computations(connection) if entry.pipeline == definition.name)
    if all(entry.recorded_us <= at_us for entry in known):
        write_definition(connection, definition, at_us, limits)


def _write_computation(
    connection: Connection,
    pipeline: str,
    computation: ComputationDefinition,
    known: ComputationEntry | None,
    at_us: WallTimeMicros,
) -> None:
    if known is not None and known.retired_us is None and known.pipeline != pipeline:
        raise InvalidError(
            "a computation of that name belongs to another pipeline of the store",
            computation=computation.name,
            pipeline=known.pipeline,
        )
    changed = known is None or known.code_hash != computation.code_hash
    code_version = (0 if known is None else known.code_version) + (1 if changed else 0)
    row = {
        "name": computation.name,
        "pipeline": pipeline,
        "code_version": code_version,
        "code_hash": computation.code_hash,
        "codec": computation.codec,
        "options": _to_json(computation.name, computation.options),
        "recorded_us": at_us if known is None or changed else known.recorded_us,
        "retired_us": None,
    }
    replace_rows(connection, COMPUTATIONS, [row])
    if changed:
        version = {
            "computation": computation.name,
            "code_version": code_version,
            "code_hash": computation.code_hash,
            "recorded_us": at_us,
        }
        replace_rows(connection, CODE_VERSIONS, [version])


def _to_json(computation: str, options: Mapping[str, object]) -> str:
    try:
        return json.dumps(dict(options), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InvalidError("a computation's options must be JSON", computation=computation) from error


def _prune_code_versions(connection: Connection, computation: str, versions_max: int) -> None:
    of_computation = CODE_VERSIONS.c.computation == computation
    newest = select(CODE_VERSIONS.c.code_version).where(of_computation)
    oldest_kept = connection.execute(
        newest.order_by(CODE_VERSIONS.c.code_version.desc()).limit(1).offset(versions_max - 1)
    ).scalar()
    if oldest_kept is not None:
        old = CODE_VERSIONS.c.code_version < oldest_kept
        connection.execute(CODE_VERSIONS.delete().where(of_computation, old))


def _retire_others(connection: Connection, definition: PipelineDefinition, at_us: WallTimeMicros) -> None:
    declared = [computation.name for computation in definition.computations]
    others = COMPUTATIONS.update().where(
        COMPUTATIONS.c.pipeline == definition.name,
        COMPUTATIONS.c.name.not_in(declared),
        COMPUTATIONS.c.retired_us.is_(None),
    )
    connection.execute(others.values(retired_us=at_us))


def _replace_edges(connection: Connection, definition: PipelineDefinition) -> None:
    pipeline = definition.name
    for table in (STREAMS, SUBSCRIPTIONS):
        connection.execute(table.delete().where(table.c.pipeline == pipeline))
    streams = [
        {"pipeline": pipeline, "name": stream.name, "producers": json.dumps(stream.producers)}
        for stream in definition.streams
    ]
    subscriptions = [
        {
            "pipeline": pipeline,
            "consumer": subscription.consumer,
            "stream": subscription.stream,
            "key_extractor": subscription.key_extractor,
        }
        for subscription in definition.subscriptions
    ]
    replace_rows(connection, STREAMS, streams)
    replace_rows(connection, SUBSCRIPTIONS, subscriptions)


def read_computations(connection: Connection) -> tuple[ComputationEntry, ...]:
    """Every computation ever declared, by name."""
    rows = connection.execute(select(COMPUTATIONS).order_by(COMPUTATIONS.c.name)).mappings()
    return tuple(ComputationEntry(**{**row, "options": json.loads(row["options"])}) for row in rows)


def read_code_versions(connection: Connection, computation: str) -> tuple[CodeVersion, ...]:
    """The last code versions of a computation, oldest first."""
    query = select(CODE_VERSIONS).where(CODE_VERSIONS.c.computation == computation)
    rows = connection.execute(query.order_by(CODE_VERSIONS.c.code_version)).mappings()
    return tuple(CodeVersion(**row) for row in rows)


def read_streams(connection: Connection, pipeline: str) -> tuple[StreamDefinition, ...]:
    """The streams of a pipeline, by name."""
    rows = select(STREAMS).where(STREAMS.c.pipeline == pipeline).order_by(STREAMS.c.name)
    return tuple(
        StreamDefinition(name=row.name, producers=tuple(json.loads(row.producers)))
        for row in connection.execute(rows)
    )


def read_subscriptions(connection: Connection, pipeline: str) -> tuple[SubscriptionDefinition, ...]:
    """The subscriptions of a pipeline, by consumer and stream."""
    rows = (
        select(SUBSCRIPTIONS.c.consumer, SUBSCRIPTIONS.c.stream, SUBSCRIPTIONS.c.key_extractor)
        .where(SUBSCRIPTIONS.c.pipeline == pipeline)
        .order_by(SUBSCRIPTIONS.c.consumer, SUBSCRIPTIONS.c.stream)
    )
    return tuple(SubscriptionDefinition(**row) for row in connection.execute(rows).mappings())


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyChange:
    """The computations and sinks by which a pipeline differs from the one before it; all names in order.

    Attributes:
        added: computations that the former one did not have.
        removed: computations that it no longer has.
        changed: computations with other code, options, inputs or productions.
        sinks_added: sinks that the former one did not have.
        sinks_removed: sinks that it no longer has.
        sinks_changed: sinks with another stream or destination.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    sinks_added: tuple[str, ...] = ()
    sinks_removed: tuple[str, ...] = ()
    sinks_changed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(
            self.added
            or self.removed
            or self.changed
            or self.sinks_added
            or self.sinks_removed
            or self.sinks_changed
        )


def change_between(former: PipelineDefinition | None, present: PipelineDefinition) -> TopologyChange:
    """What has changed from one topology to the next.

    Args:
        former: the earlier topology; ``None`` if there was none.
        present: the later one.

    Example:
        >>> from millpond.statestore.catalog.entries import ComputationDefinition
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
    """By computation, all that it is: code, codec, options, what it consumes and what it produces."""
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

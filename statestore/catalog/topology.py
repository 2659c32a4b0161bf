"""Declared topologies: computations and their code versions, streams, subscriptions.

The topology is dynamic (MillWheel §4.3): a pipeline declares all of it at each
start, which replaces its previous declaration. A computation that is no longer
declared is retired but stays listed, because its rows are still in the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from sqlalchemy import Connection, select

from millpond.statestore.catalog.engine import replace_rows
from millpond.statestore.catalog.entries import (
    CatalogLimits,
    CodeVersion,
    ComputationDefinition,
    ComputationEntry,
    PipelineDefinition,
    StreamDefinition,
    SubscriptionDefinition,
)
from millpond.statestore.catalog.tables import CODE_VERSIONS, COMPUTATIONS, STREAMS, SUBSCRIPTIONS
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

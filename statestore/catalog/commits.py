"""Recording of commits in the catalog: intervals and their owners, positions, journals.

A batch of commits costs a fixed number of statements: of current state only the last
value is written, journals are inserted whole. A commit that arrives after a later one
(a former owner's, for example) never reverts newer values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final

from sqlalchemy import Connection, Table, bindparam, func, select
from sqlalchemy.sql.elements import ColumnElement

from millpond.statestore.app_ids import SAVEPOINT_RELEASED, AppId, savepoints_of
from millpond.statestore.catalog.engine import (
    INPUT_POSITIONS,
    INTERVALS,
    LEASES,
    SAVEPOINTS,
    SUPERSTEPS,
    WATERMARKS,
    replace_rows,
)
from millpond.statestore.catalog.entries import (
    KNOWN_BEFORE_LOG,
    CatalogLimits,
    CommitFacts,
    InputPositionEntry,
    SuperstepEntry,
    WatermarkEntry,
    definition_from_metadata,
    fences_of,
    input_positions_of,
    superstep_of,
    watermarks_of,
)
from millpond.statestore.catalog.topology import replay_definition
from millpond.statestore.interval import Interval, superseded
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import Sequencer, TableVersion, WallTimeMicros

_NAMES_PER_QUERY: Final = 500


@dataclass(slots=True)
class _Touched:
    """The changes of a batch of commits to one interval."""

    interval: Interval
    fence: Fence
    version: TableVersion
    leases: dict[Sequencer, TableVersion | None] = field(default_factory=dict)
    input_us: int | None = None
    output_us: int | None = None


def write_commits(connection: Connection, batch: Iterable[CommitFacts], limits: CatalogLimits) -> int:
    """Record a batch of commits, and return how many journal rows that added."""
    ordered = sorted(batch, key=lambda facts: facts.version)
    _write_intervals(connection, _touched(ordered), limits.leases_per_interval_max)
    _write_positions(connection, ordered)
    _write_savepoints(connection, ordered)
    for facts in ordered:
        definition = definition_from_metadata(facts.metadata)
        if definition is not None:
            replay_definition(connection, definition, facts.wall_us, limits)
    return _write_journals(connection, ordered)


def _touched(ordered: Iterable[CommitFacts]) -> dict[str, _Touched]:
    touched: dict[str, _Touched] = {}
    for facts in ordered:
        opens = facts.metadata.get("kind") != KNOWN_BEFORE_LOG
        for interval, fence in fences_of(facts.txns):
            app_id = interval.app_id
            entry = touched.setdefault(app_id, _Touched(interval, fence, facts.version))
            entry.fence, entry.version = fence, facts.version
            entry.leases.setdefault(fence.sequencer, facts.version if opens else None)
        for watermark in watermarks_of(facts):
            _note_watermark(touched, watermark)
    return touched


def _note_watermark(touched: Mapping[str, _Touched], watermark: WatermarkEntry) -> None:
    entry = touched.get(watermark.subject)
    if entry is not None:
        entry.input_us = entry.input_us if watermark.input_us is None else watermark.input_us
        entry.output_us = entry.output_us if watermark.output_us is None else watermark.output_us


def _write_intervals(connection: Connection, touched: Mapping[str, _Touched], leases_max: int) -> None:
    known = _rows_by_app_id(connection, INTERVALS, list(touched))
    fresh = {
        app_id: entry
        for app_id, entry in touched.items()
        if _is_superseded_by(known.get(app_id), entry.version)
    }
    rows = [_interval_row(app_id, entry, known.get(app_id)) for app_id, entry in fresh.items()]
    _write_leases(connection, fresh, known, leases_max)
    replace_rows(connection, INTERVALS, rows)
    appeared = {
        entry.interval.computation
        for app_id, entry in fresh.items()
        if (old := known.get(app_id)) is None or old["closed_version"] is not None
    }
    for computation in sorted(appeared):
        _close_replaced(connection, computation)


def _is_superseded_by(known: Mapping[str, object] | None, version: int) -> bool:
    return known is None or int(str(known["version"])) <= version


def _interval_row(app_id: str, entry: _Touched, known: Mapping[str, object] | None) -> dict[str, object]:
    last = known or {}
    same_owner = last.get("sequencer") == entry.fence.sequencer
    return {
        "app_id": app_id,
        "computation": entry.interval.computation,
        "low": entry.interval.low,
        "high": entry.interval.high,
        "sequencer": entry.fence.sequencer,
        "commit_number": entry.fence.commit_number,
        "opened_version": last["opened_version"] if same_owner else entry.leases[entry.fence.sequencer],
        "closed_version": last.get("closed_version") if same_owner else None,
        "version": entry.version,
        "input_watermark_us": _or_last(entry.input_us, last.get("input_watermark_us")),
        "output_watermark_us": _or_last(entry.output_us, last.get("output_watermark_us")),
    }


def _or_last(value: int | None, last: object) -> object:
    return last if value is None else value


def _write_leases(
    connection: Connection,
    touched: Mapping[str, _Touched],
    known: Mapping[str, Mapping[str, object]],
    leases_max: int,
) -> None:
    opened: list[dict[str, object]] = []
    closed: list[dict[str, object]] = []
    for app_id, entry in touched.items():
        last = known[app_id]["sequencer"] if app_id in known else None
        for sequencer, version in entry.leases.items():
            if sequencer == last:
                continue
            opened.append(_lease_row(app_id, sequencer, version))
            closed.append({"of": app_id, "below": sequencer, "at": version})
    replace_rows(connection, LEASES, opened)
    _close_leases(connection, closed)
    _prune_leases(connection, {str(row["app_id"]) for row in opened}, leases_max)


def _close_leases(connection: Connection, closed: Sequence[Mapping[str, object]]) -> None:
    if closed:
        open_before: list[ColumnElement[bool]] = [
            LEASES.c.app_id == bindparam("of"),
            LEASES.c.sequencer < bindparam("below"),
            LEASES.c.closed_version.is_(None),
        ]
        connection.execute(LEASES.update().where(*open_before).values(closed_version=bindparam("at")), closed)


def _prune_leases(connection: Connection, app_ids: Iterable[str], leases_max: int) -> None:
    names = [{"of": app_id} for app_id in app_ids]
    if names:
        newest = LEASES.alias()
        oldest_kept = (
            select(newest.c.sequencer)
            .where(newest.c.app_id == bindparam("of"))
            .order_by(newest.c.sequencer.desc())
            .limit(1)
            .offset(leases_max - 1)
            .scalar_subquery()
        )
        prune = LEASES.delete().where(LEASES.c.app_id == bindparam("of"), LEASES.c.sequencer < oldest_kept)
        connection.execute(prune, names)


def _lease_row(app_id: str, sequencer: int, version: int | None) -> dict[str, object]:
    return {"app_id": app_id, "sequencer": sequencer, "opened_version": version, "closed_version": None}


def _close_replaced(connection: Connection, computation: str) -> None:
    still_open = select(INTERVALS).where(
        INTERVALS.c.computation == computation, INTERVALS.c.closed_version.is_(None)
    )
    rows = {
        Interval(row["computation"], row["low"], row["high"]): row
        for row in connection.execute(still_open).mappings()
    }
    replaced = superseded({interval: Sequencer(row["sequencer"]) for interval, row in rows.items()})
    closed = [
        {"of": interval.app_id, "at": rows[successor]["opened_version"] or rows[successor]["version"]}
        for interval, successor in replaced.items()
    ]
    for table in (INTERVALS, LEASES) if closed else ():
        change = table.update().where(table.c.app_id == bindparam("of"), table.c.closed_version.is_(None))
        connection.execute(change.values(closed_version=bindparam("at")), closed)


def _write_positions(connection: Connection, ordered: Iterable[CommitFacts]) -> None:
    last = {
        AppId.INPUT.of(position.pipeline, position.input, position.source_id): position
        for facts in ordered
        for position in input_positions_of(facts)
    }
    known = _rows_by_app_id(connection, INPUT_POSITIONS, list(last))
    rows = [
        {"app_id": app_id, **_row_of(position)}
        for app_id, position in last.items()
        if _is_superseded_by(known.get(app_id), position.version)
    ]
    replace_rows(connection, INPUT_POSITIONS, rows)


def _write_savepoints(connection: Connection, ordered: Iterable[CommitFacts]) -> None:
    for facts in ordered:
        for name, version in savepoints_of(facts.txns):
            if version == SAVEPOINT_RELEASED:
                release = SAVEPOINTS.update().where(SAVEPOINTS.c.name == name)
                connection.execute(release.values(released_us=facts.wall_us))
            else:
                _write_savepoint(connection, name, version, facts.wall_us)


def _write_savepoint(connection: Connection, name: str, version: int, wall_us: WallTimeMicros) -> None:
    known = connection.execute(select(SAVEPOINTS).where(SAVEPOINTS.c.name == name)).mappings().first()
    if known is None or known["released_us"] is not None or known["version"] != version:
        row = {"name": name, "version": version, "note": "", "created_us": wall_us, "released_us": None}
        replace_rows(connection, SAVEPOINTS, [row])


def _write_journals(connection: Connection, ordered: Iterable[CommitFacts]) -> int:
    supersteps: dict[tuple[str, int], dict[str, object]] = {}
    watermarks: dict[tuple[str, int, str], dict[str, object]] = {}
    for facts in ordered:
        entry = superstep_of(facts)
        if entry is not None:
            supersteps[entry.pipeline, entry.superstep] = _row_of(entry)
        for watermark in watermarks_of(facts):
            watermarks[watermark.pipeline, watermark.superstep, watermark.subject] = _row_of(watermark)
    replace_rows(connection, SUPERSTEPS, list(supersteps.values()))
    replace_rows(connection, WATERMARKS, list(watermarks.values()))
    return len(supersteps) + len(watermarks)


def prune_journals(connection: Connection, limits: CatalogLimits) -> None:
    """Cut the journals back to their bounds, oldest supersteps first."""
    newest = select(SUPERSTEPS.c.pipeline, func.max(SUPERSTEPS.c.superstep)).group_by(SUPERSTEPS.c.pipeline)
    for pipeline, superstep in connection.execute(newest).all():
        for table in (SUPERSTEPS, WATERMARKS):
            old = (table.c.pipeline == pipeline, table.c.superstep <= superstep - limits.supersteps_max)
            connection.execute(table.delete().where(*old))
    by_age = select(WATERMARKS.c.version).order_by(WATERMARKS.c.version.desc())
    oldest_kept = connection.execute(by_age.limit(1).offset(limits.watermark_rows_max - 1)).scalar()
    if oldest_kept is not None:
        connection.execute(WATERMARKS.delete().where(WATERMARKS.c.version < oldest_kept))


def _row_of(entry: InputPositionEntry | SuperstepEntry | WatermarkEntry) -> dict[str, object]:
    # Not `asdict`, which makes deep copies and takes five times as long.
    return {column.name: getattr(entry, column.name) for column in fields(entry)}


def _rows_by_app_id(
    connection: Connection, table: Table, app_ids: Sequence[str]
) -> dict[str, Mapping[str, object]]:
    rows: dict[str, Mapping[str, object]] = {}
    for start in range(0, len(app_ids), _NAMES_PER_QUERY):
        batch = app_ids[start : start + _NAMES_PER_QUERY]
        for row in connection.execute(select(table).where(table.c.app_id.in_(batch))).mappings():
            rows[str(row["app_id"])] = dict(row)
    return rows

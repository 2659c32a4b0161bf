"""Queries of recorded commits: intervals, owners, positions, journals."""

from __future__ import annotations

from sqlalchemy import Connection, RowMapping, select

from millpond.statestore.catalog.entries import (
    InputPositionEntry,
    IntervalEntry,
    LeaseEntry,
    SuperstepEntry,
    WatermarkEntry,
)
from millpond.statestore.catalog.tables import (
    INPUT_POSITIONS,
    INTERVALS,
    LEASES,
    SUPERSTEPS,
    WATERMARKS,
)
from millpond.statestore.interval import Interval
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import Superstep


def read_intervals(
    connection: Connection, computation: str | None, *, closed: bool
) -> tuple[IntervalEntry, ...]:
    """Intervals in key order; with ``closed`` also intervals that splits and merges replaced."""
    query = select(INTERVALS)
    if computation is not None:
        query = query.where(INTERVALS.c.computation == computation)
    if not closed:
        query = query.where(INTERVALS.c.closed_version.is_(None))
    entries = (_interval_entry(row) for row in connection.execute(query).mappings())
    # Sorted here because not every database compares strings by their bytes.
    return tuple(sorted(entries, key=_key_order))


def _key_order(entry: IntervalEntry) -> tuple[str, str, bool, str]:
    interval = entry.interval
    return interval.computation, interval.low, interval.high is None, interval.high or ""


def _interval_entry(row: RowMapping) -> IntervalEntry:
    return IntervalEntry(
        interval=Interval(row["computation"], row["low"], row["high"]),
        fence=Fence(row["sequencer"], row["commit_number"]),
        opened_version=row["opened_version"],
        closed_version=row["closed_version"],
        version=row["version"],
        input_watermark_us=row["input_watermark_us"],
        output_watermark_us=row["output_watermark_us"],
    )


def read_leases(connection: Connection, interval: Interval) -> tuple[LeaseEntry, ...]:
    """The last owners of an interval, oldest first."""
    query = select(LEASES).where(LEASES.c.app_id == interval.app_id).order_by(LEASES.c.sequencer)
    return tuple(
        LeaseEntry(
            interval=interval,
            sequencer=row.sequencer,
            opened_version=row.opened_version,
            closed_version=row.closed_version,
        )
        for row in connection.execute(query)
    )


def read_input_positions(connection: Connection) -> tuple[InputPositionEntry, ...]:
    """The consumed position of every external source."""
    columns = [column for column in INPUT_POSITIONS.columns if column.name != "app_id"]
    query = select(*columns).order_by(INPUT_POSITIONS.c.app_id)
    return tuple(InputPositionEntry(**row) for row in connection.execute(query).mappings())


def read_supersteps(connection: Connection, pipeline: str | None, limit: int) -> tuple[SuperstepEntry, ...]:
    """The last ``limit`` journaled supersteps, newest first."""
    query = select(SUPERSTEPS).order_by(SUPERSTEPS.c.version.desc()).limit(limit)
    if pipeline is not None:
        query = query.where(SUPERSTEPS.c.pipeline == pipeline)
    return tuple(SuperstepEntry(**row) for row in connection.execute(query).mappings())


def read_watermarks(
    connection: Connection, pipeline: str, superstep: Superstep | None
) -> tuple[WatermarkEntry, ...]:
    """The journaled watermarks of one superstep, or of all supersteps in the journal, oldest first."""
    query = select(WATERMARKS).where(WATERMARKS.c.pipeline == pipeline)
    if superstep is not None:
        query = query.where(WATERMARKS.c.superstep == superstep)
    query = query.order_by(WATERMARKS.c.superstep, WATERMARKS.c.subject)
    return tuple(WatermarkEntry(**row) for row in connection.execute(query).mappings())

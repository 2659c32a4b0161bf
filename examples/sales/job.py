"""The pipeline, and its run on either runner. No value is converted on the way: see `Orders`, the only code of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

import millpond as mp

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TIME: Final = pa.timestamp("us", "UTC")
_MONEY: Final = pa.decimal128(18, 2)

MONTHS: Final = pa.schema(
    [
        ("window_start", _TIME),
        ("key", pa.string()),
        ("spent", _MONEY),
        ("dearest", _MONEY),
        ("last_sale", _TIME),
        ("items", pa.int64()),
        ("sales", pa.int64()),
    ]
)
"""What each customer bought in each month."""

REGIONS: Final = pa.schema(
    [("key", pa.string()), ("credit", _MONEY), ("customers", pa.int64()), ("newest", pa.date32())]
)
"""The customers of each region, as their table stands."""

ORDERS: Final = pa.schema(
    [
        ("sale", pa.int64()),
        ("customer", pa.string()),
        ("sold_at", _TIME),
        ("amount", _MONEY),
        ("region", pa.string()),
        ("since", pa.date32()),
        ("left", _MONEY),
    ]
)
"""Each sale with its customer as they were at that time, and what was left of their credit."""


class Orders(mp.Computation):
    """Joins a customer's sales to the customer's row, which is the state."""

    time_sorted = True

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """Keep the customer's new row; pass on a sale with it."""
        if record.stream == "customers":
            if not record.value["pane"]["is_retraction"]:
                context.state.set(record.value["value"])
            return
        sale, customer = record.value, context.state.get()
        left = customer["credit"] - sale["amount"]
        context.produce("orders", {**sale, **customer, "left": left})


def sales_pipeline(output: Path) -> mp.Pipeline:
    """Return the pipeline; its inputs are ``sales``, and the changes of the ``customers``.

    Args:
        output: folder for its tables.
    """
    pipeline = mp.Pipeline("sales")
    sales = pipeline.inject("sales", key="customer", at="sold_at", id="sale")
    customers = pipeline.inject("customers", key="customer", at="changed_at", change="op")
    months = sales.window(mp.CalendarWindows.months(1, "UTC")).combine(
        spent=mp.Sum("amount"),
        dearest=mp.Max("amount"),
        last_sale=mp.Max("sold_at"),
        items=mp.Sum("items"),
        sales=mp.Count(),
        name="months",
    )
    regions = customers.window(
        mp.GlobalWindows(),
        trigger=mp.Repeatedly(mp.AfterCount(1)),
        accumulation="accumulating",
        asked="bundle",
    ).combine(
        credit=mp.Sum("credit"),
        customers=mp.Count(),
        newest=mp.Max("since", retractable=True),
        name="regions",
        key="region",
    )
    orders = pipeline.add(
        Orders(), name="orders", subscribes={"sales": None, "customers": None}, produces=["orders"]
    )["orders"]
    for stream, schema, keys in (
        (months, MONTHS, ["window_start", "key"]),
        (regions, REGIONS, ["key"]),
        (orders, ORDERS, ["sale"]),
    ):
        sink = mp.DeltaSink(str(output / stream.name), schema, mode="upsert", keys=keys)
        stream.sink(stream.name, sink)
    return pipeline


def run_local(
    tables: Mapping[str, pa.Table], store: mp.Store | Path, output: Path, pieces: int = 1
) -> mp.RunSummary:
    """Run the job in this process, with so many runs that each get more of the rows."""
    for piece in range(1, pieces):
        given = {name: table.slice(0, len(table) * piece // pieces) for name, table in tables.items()}
        mp.LocalRunner(store, progress=False).run(sales_pipeline(output), given, finish=False)
    return mp.LocalRunner(store, progress=False).run(sales_pipeline(output), tables)


def run_spark(
    tables: Mapping[str, pa.Table], store: mp.Store | Path, output: Path, spark: SparkSession
) -> mp.RunSummary:
    """Run the job on Spark."""
    frames = {name: spark.createDataFrame(table) for name, table in tables.items()}
    return mp.SparkRunner(store, spark=spark, progress=False).run(sales_pipeline(output), frames)

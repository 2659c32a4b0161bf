"""Nexmark's queries beside Spark's own streaming SQL: the time that each takes on the same files, in turns, in one session.

    python -m benchmarks.nexmark_sql --events 1000000 --json build/bench/nexmark_sql.json

Spark's part is what Structured Streaming can say in append mode, into Delta tables with its own checkpoint: q1, q5, q7
and q8. It cannot say q4, an average over results that change. Both read one file of each kind a micro-batch, and
Spark does not answer the windows that are open at the end, which Millpond closes: their rows are a difference that the
report shows. Of several bids that are the highest of a window, Spark's q7 names one. Millpond's figure includes
exactly-once results whose rows can be read, rewound and replayed, which Spark's part does not give.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from rich.console import Console
from rich.table import Table

from benchmarks.processor_time import used_seconds
from examples.nexmark.answers import read_answer
from examples.nexmark.generator import Generator
from examples.nexmark.job import run_stream_on_spark, stream_frames, write_events
from examples.nexmark.queries import QUERIES
from examples.quiet_spark import quiet_spark
from millpond.statestore.system import SystemClock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PIECE: Final = 50_000
_RATE: Final = 10_000.0
_DELAY: Final = "4 seconds"


def _timed(frame: DataFrame) -> DataFrame:
    return frame.selectExpr("*", "timestamp_micros(date_time) as at").withWatermark("at", _DELAY)


def _currency(frames: Mapping[str, DataFrame]) -> DataFrame:
    return frames["bids"].selectExpr(
        "auction", "bidder", "date_time", "cast(price as decimal(38, 3)) * 0.908 as price_eur"
    )


def _hot_items(frames: Mapping[str, DataFrame]) -> DataFrame:
    from pyspark.sql import functions as f

    counts = _timed(frames["bids"]).groupBy(f.window("at", "10 seconds", "2 seconds"), "auction").count()
    best = counts.groupBy("window").agg(
        f.expr("max(count) as num"), f.expr("collect_list(struct(auction, count)) as each")
    )
    return best.selectExpr("inline(filter(each, one -> one.count = num))")


def _highest_bid(frames: Mapping[str, DataFrame]) -> DataFrame:
    from pyspark.sql import functions as f

    bids = _timed(frames["bids"]).groupBy(f.window("at", "10 seconds"))
    return bids.agg(f.expr("max_by(struct(auction, price, bidder, date_time), price) as best")).select(
        "best.*"
    )


def _new_users(frames: Mapping[str, DataFrame]) -> DataFrame:
    from pyspark.sql import functions as f

    persons = _timed(frames["persons"]).groupBy(f.window("at", "10 seconds"), "id", "name").agg(f.count("*"))
    sellers = _timed(frames["auctions"]).groupBy(f.window("at", "10 seconds").alias("opened"), "seller")
    both = persons.join(sellers.agg(f.count("*")), f.expr("id = seller and window = opened"))
    return both.selectExpr("id as person_id", "name", "window.start as window_start")


_SQL: Final[Mapping[str, Callable[[Mapping[str, DataFrame]], DataFrame]]] = {
    "q1": _currency,
    "q5": _hot_items,
    "q7": _highest_bid,
    "q8": _new_users,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """One query's times in seconds, of the wall clock and of the processor, and the rows of its answers."""

    query: str
    millpond_s: float
    sql_s: float
    millpond_processor_s: float
    sql_processor_s: float
    millpond_rows: int
    sql_rows: int


def measure(name: str, input_folder: Path, spark: SparkSession) -> Beside:
    query, clock = QUERIES[name], SystemClock()
    with tempfile.TemporaryDirectory(prefix="millpond-nexmark-") as folder:
        own, sql = Path(folder) / "millpond", Path(folder) / "sql"
        began_us, used = clock.monotonic_us(), used_seconds()
        summary = run_stream_on_spark([query], input_folder, own / "pond", own, spark)
        own_s, own_processor_s = (clock.monotonic_us() - began_us) / 1e6, used_seconds() - used
        if summary.run.dead_letters:
            raise RuntimeError(f"{summary.run.dead_letters} records ended as dead letters")
        began_us, used = clock.monotonic_us(), used_seconds()
        answer = _SQL[name](stream_frames(query.inputs, input_folder, spark))
        writer = answer.writeStream.format("delta").option("checkpointLocation", str(sql / "checkpoint"))
        writer.trigger(availableNow=True).start(str(sql / "answer")).awaitTermination()
        sql_s, sql_processor_s = (clock.monotonic_us() - began_us) / 1e6, used_seconds() - used
        return Beside(
            query=name,
            millpond_s=round(own_s, 1),
            sql_s=round(sql_s, 1),
            millpond_processor_s=round(own_processor_s, 1),
            sql_processor_s=round(sql_processor_s, 1),
            millpond_rows=read_answer(query, own).total(),
            sql_rows=spark.read.format("delta").load(str(sql / "answer")).count(),
        )


@click.command(help=__doc__)
@click.option("--json", "path", type=click.Path(path_type=Path), default=Path("build/bench/nexmark_sql.json"))
@click.option("--query", "names", multiple=True, type=click.Choice(list(_SQL)), default=tuple(_SQL))
@click.option("--events", type=click.IntRange(_PIECE), default=1_000_000, show_default=True)
@click.option("--master", default="local[2]", show_default=True, help="Where Spark runs.")
def main(path: Path, names: tuple[str, ...], events: int, master: str) -> None:
    """Measure, write the JSON, print a table."""
    console, generator = Console(), Generator(rate=_RATE)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Each of Spark's 200 partitions by default would be a task and a state store, on however few cores.
    options = {"spark.sql.shuffle.partitions": str(os.cpu_count() or 1)}
    spark = quiet_spark("nexmark-sql", master=master, log=path.parent / "spark.log", options=options)
    found: list[Beside] = []
    try:
        with tempfile.TemporaryDirectory(prefix="millpond-nexmark-") as folder:
            warm, whole = Path(folder) / "warm", Path(folder) / "whole"
            kinds = ("persons", "auctions", "bids")
            write_events(kinds, generator.pieces(_PIECE), warm)
            write_events(kinds, Generator(rate=_RATE).pieces(events), whole)
            # Neither pays for the start of the JVM and its workers.
            measure(names[0], warm, spark)
            for name in names:
                console.print(f"{name}: {QUERIES[name].title} …")
                found.append(measure(name, whole, spark))
    finally:
        spark.stop()
    total = sum(one.millpond_s for one in found) / sum(one.sql_s for one in found)
    report = {"events": events, "queries": [asdict(one) for one in found], "millpond_to_sql": round(total, 2)}
    path.write_text(f"{json.dumps(report, indent=2)}\n", encoding="utf-8")
    table = Table(header_style="dim", box=None, pad_edge=False)
    table.add_column("query")
    for heading in ("Millpond (s)", "SQL (s)", "Millpond (CPU s)", "SQL (CPU s)", "rows", "SQL rows"):
        table.add_column(heading, justify="right")
    for one in found:
        cells = (one.millpond_s, one.sql_s, one.millpond_processor_s, one.sql_processor_s)
        table.add_row(one.query, *map(str, cells), f"{one.millpond_rows:,}", f"{one.sql_rows:,}")
    console.print(table)
    console.print(f"Millpond takes {total:.2f} times as long in all. Every figure is in {path}.")


if __name__ == "__main__":
    main()

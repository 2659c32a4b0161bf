"""A hot range of keys that wanders: throughput over time, with and without the balancer, and with an even load.

Nine tenths of the records have keys of one range, narrower than an interval, which moves every so many supersteps.
Each record costs the same small computation. The three runs do the same supersteps on ``local[2]``, and their counts
are compared in the end. With ``--faults`` another owner takes the pipeline over in the middle.

    python -m benchmarks.rebalance --json build/bench/rebalance.json --picture docs/pictures/rebalance.png
"""

from __future__ import annotations

import hashlib
import multiprocessing
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import click
import matplotlib as mpl
from matplotlib.figure import Figure

import millpond as mp
from benchmarks.json_result import tell_result
from benchmarks.pictures import STYLE
from millpond.executor.spark.session import spark_session
from millpond.executor.superstep.plan import InputPosition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from millpond.executor.spark.run import SparkRun

LOADS: Final = ("even", "balanced", "as cut at first")
"""An even load; a hot range with the balancer; the same without it."""

_KEYS: Final = 8_000
_HOT_KEYS: Final = 400
_INTERVALS: Final = 8
_ROUNDS: Final = 200


class Work(mp.Computation):
    """Counts a key's records, each at the price of some hashes."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """Hash and count."""
        digest = record.key.encode()
        for _ in range(_ROUNDS):
            digest = hashlib.sha256(digest).digest()
        context.state.set((context.state.get() or 0) + 1)


def run_once(
    load: str, supersteps: int, records: int, wander_every: int, *, faults: bool = False
) -> dict[str, Any]:
    """Run supersteps of a load, and tell how fast each was and whether all was counted."""
    options = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2"}
    with tempfile.TemporaryDirectory(prefix="millpond-rebalance-") as folder:
        spark = spark_session("rebalance", master="local[2]", options=options)
        spark.sparkContext.setLogLevel("ERROR")
        figures: list[dict[str, Any]] = []
        done = 0
        while done < supersteps:
            # A new owner in the middle, where faults are wanted.
            until = supersteps // 2 if faults and not done else supersteps
            with _run(spark, Path(folder), balanced=load == "balanced") as run:
                while done < until:
                    figures.append(_superstep(spark, run, load, done, records, wander_every))
                    done += 1
        with mp.Store.open(Path(folder, "pond"), read_only=True) as store:
            counted = store.sql().sql("select sum(state::bigint) as total from work").to_arrow_table()
        spark.stop()
    return {
        "load": load,
        "records": records,
        "wander_every": wander_every,
        "counted": int(counted.column("total")[0].as_py()),
        "expected": supersteps * records,
        "supersteps": figures,
    }


def _superstep(
    spark: SparkSession, run: SparkRun, load: str, number: int, records: int, wander_every: int
) -> dict[str, Any]:
    frame = _frame(spark, load, number, records, wander_every)
    report = run.consume(frame, InputPosition(stream="records", source="rebalance", batch=number))
    assert report is not None
    return {
        "superstep": number,
        "records_per_second": round(report.records_per_second),
        "intervals": len(run._coordinator.intervals_of("work")),
    }


def _frame(spark: SparkSession, load: str, number: int, records: int, wander_every: int) -> DataFrame:
    ids = spark.range(0, records, 1, 2)
    drawn = f"pmod(xxhash64(id, {number}), {_KEYS})"
    if load != "even":
        # Inside one of the intervals that the first superstep's even sample has cut, another one each time.
        width = _KEYS // _INTERVALS
        start = number // wander_every * 3 % _INTERVALS * width + (width - _HOT_KEYS) // 2
        hot = f"{start} + pmod(xxhash64(id, {number}, 1), {_HOT_KEYS})"
        drawn = f"IF({number} >= {wander_every} AND id % 10 > 0, {hot}, {drawn})"
    return ids.selectExpr(f"lpad(CAST({drawn} AS STRING), 6, '0') AS k", f"{number} AS at")


@contextmanager
def _run(spark: SparkSession, folder: Path, *, balanced: bool) -> Iterator[SparkRun]:
    pipeline = mp.Pipeline("rebalance")
    pipeline.inject("records", key="k", at="at", at_unit="us", watermark=mp.Monotone()).apply(
        Work(), name="work"
    )
    with mp.Store.open(folder / "pond") as store:
        runner = mp.SparkRunner(
            store,
            spark=spark,
            progress=False,
            intervals=_INTERVALS,
            balance=mp.BalancePolicy() if balanced else None,
        )
        with runner.open(pipeline) as run:
            yield run


def measure(
    loads: Sequence[str], supersteps: int, records: int, wander_every: int, *, faults: bool = False
) -> list[dict[str, Any]]:
    """Measure each load in a separate process."""
    # By this module's own name, under which the workers import the computation.
    from benchmarks.rebalance import run_once as run_by_name

    runs = []
    for load in loads:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            runs.append(
                pool.submit(run_by_name, load, supersteps, records, wander_every, faults=faults).result()
            )
    return runs


def summarise(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By load: the median rate to the even one, in the supersteps after a move of the hot range and 20 later."""
    even = {run["load"]: run for run in runs}.get("even")
    if even is None:
        return {}
    rate = median(one["records_per_second"] for one in even["supersteps"][even["wander_every"] :])
    told = {}
    for run in runs:
        every = run["wander_every"]
        moved = [one for one in run["supersteps"] if one["superstep"] >= every]
        soon = [one["records_per_second"] for one in moved if one["superstep"] % every < 5]
        later = [one["records_per_second"] for one in moved if one["superstep"] % every >= 20]
        told[run["load"]] = {
            "at_once": round(median(soon) / rate, 3) if soon else float("nan"),
            "after_20": round(median(later) / rate, 3) if later else float("nan"),
        }
    return told


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the rate of each load over its supersteps, smoothed over five, with the moves of the hot range."""
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(7, 3.8), layout="constrained")
        axes = figure.add_subplot()
        for run in runs:
            rates = [one["records_per_second"] for one in run["supersteps"]]
            smooth = [median(rates[max(0, at - 2) : at + 3]) for at in range(len(rates))]
            axes.plot(range(len(rates)), smooth, linewidth=1.4, label=run["load"])
        for at in range(runs[0]["wander_every"], len(runs[0]["supersteps"]), runs[0]["wander_every"]):
            axes.axvline(at, color="0.85", linewidth=1, zorder=0)
        axes.set(xlabel="superstep (lines: the hot range moves)", ylabel="records a second", ylim=(0, None))
        axes.legend(frameon=False, loc="lower right")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, metadata={"Software": None})


@click.command(help=__doc__)
@click.option("--supersteps", default=120, show_default=True, type=click.IntRange(2))
@click.option("--records", default=20_000, show_default=True, type=click.IntRange(1))
@click.option("--wander-every", default=40, show_default=True, type=click.IntRange(1))
@click.option("--load", "loads", type=click.Choice(LOADS), multiple=True, default=LOADS)
@click.option("--faults", is_flag=True, help="Let another owner take over in the middle.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures there.")
@click.option("--picture", type=click.Path(path_type=Path), help="Draw them there.")
def main(
    supersteps: int,
    records: int,
    wander_every: int,
    loads: tuple[str, ...],
    path: Path | None,
    picture: Path | None,
    *,
    faults: bool,
) -> None:
    """Measure, print JSON, draw."""
    runs = measure(loads, supersteps, records, wander_every, faults=faults)
    tell_result({"to_even": summarise(runs), "runs": runs}, path)
    if picture is not None:
        draw(runs, picture)


if __name__ == "__main__":
    main()

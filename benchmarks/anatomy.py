"""Where the time of a superstep on Spark goes, beside what Spark takes for as much as that without Millpond.

The keyed count of the throughput benchmark, with ids, in one session: supersteps that the driver brings to the workers
itself (`executor/spark/direct.py`) and the same supersteps as tasks of Spark. Beside them, in the same session over the
same files, the floor: a batch that nothing is done with, one that is collected, and one that is shuffled and goes
through Python unchanged, as a superstep of tasks has to. The forms take turns, twice; a figure is the median of the
second half of each turn's batches, because the JVM compiles for long.

    python -m benchmarks.anatomy --json build/bench/anatomy.json --picture docs/pictures/anatomy.png
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import click
import matplotlib as mpl
import pyarrow as pa
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.batches import COLUMNS, Load, write_batches
from benchmarks.engine_result import BatchTime, batch_times
from benchmarks.json_result import tell_result
from benchmarks.millpond_spark import measure
from benchmarks.pictures import STYLE
from examples.quiet_spark import quiet_spark
from millpond.executor.spark.direct import DirectRuns
from millpond.executor.spark.engine import SparkEngine
from millpond.executor.spark.hand_over import HomesReached
from millpond.executor.spark.routing import Router
from millpond.executor.superstep.superstep import Superstep
from millpond.statestore.system import SystemClock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTS: Final = {
    "log": "Spark's search for input and logs",
    "call": "Spark's call of foreachBatch, and the batch's offsets",
    "plan": "plans: routing, and what is done with the rows",
    "job": "Spark's jobs: rows read, moved and collected",
    "route": "Arrow: each row to its slot",
    "work": "Python workers: hooks, ids, row files",
    "commit": "commit",
    "rest": "the driver's rest",
}
"""The parts of a batch, in the order of the picture's bars."""

DIRECT: Final = "Millpond"
TASKS: Final = "Millpond, by tasks of Spark"
NOTHING: Final = "Spark: nothing"
COLLECT: Final = "Spark: collect"
SHUFFLE: Final = "Spark: shuffle, mapInArrow"

_TURNS: Final = 2
_CLOCK: Final = SystemClock()


class Stopwatch:
    """Sums up the milliseconds of methods, batch by batch."""

    def __init__(self) -> None:
        self.batches: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)

    @contextmanager
    def watching(self, methods: Mapping[str, tuple[type, str]]) -> Iterator[None]:
        """Time these methods, each a name with a class and the method's name; ``batch`` ends a batch."""
        with ExitStack() as stack:
            for name, (kind, method) in methods.items():
                stack.enter_context(mock.patch.object(kind, method, self._timed(name, getattr(kind, method))))
            yield

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **options: Any) -> Any:
            started_us = _CLOCK.monotonic_us()
            try:
                return function(*given, **options)
            finally:
                self._now[name] += (_CLOCK.monotonic_us() - started_us) / 1_000
                if name == "batch":
                    self.batches.append(dict(self._now))
                    self._now.clear()

        return timed


def parts_of(time: BatchTime, watched: Mapping[str, float]) -> dict[str, float]:
    """Divide a batch's time into `PARTS`, by the milliseconds of methods. What no method accounts for is the rest."""
    known = defaultdict(float, watched)
    is_direct = known["homes"] > 0
    parts = {
        "log": float(time.parts_ms["triggerExecution"] - time.parts_ms["addBatch"]),
        "call": time.parts_ms["addBatch"] - known["batch"],
        "plan": known["route"] + known["where"],
        "job": known["arrow"] if is_direct else known["tasks"],
        "route": known["collect"] - known["where"] - known["arrow"] if is_direct else 0.0,
        "work": known["homes"],
        "commit": known["commit"],
    }
    return parts | {"rest": time.parts_ms["triggerExecution"] - sum(parts.values())}


def measure_millpond(
    spark: SparkSession, folder: Path, load: Load, inputs: Path, *, directly: bool
) -> list[dict[str, float]]:
    """Run the load, and return the parts of each measured batch. By tasks, the work of Python is a part of the job."""
    from pyspark.sql.classic.dataframe import DataFrame as ClassicFrame

    watch = Stopwatch()
    methods = {
        "batch": (SparkEngine, "consume"),
        "route": (Router, "route"),
        "where": (ClassicFrame, "where"),
        "arrow": (ClassicFrame, "_collect_as_arrow"),
        "collect": (DirectRuns, "_collect"),
        "homes": (HomesReached, "run"),
        "tasks": (SparkEngine, "_collect"),
        "commit": (Superstep, "commit"),
    }
    with watch.watching(methods), ExitStack() as stack:
        if not directly:
            stack.enter_context(mock.patch.object(DirectRuns, "run", return_value=None))
            stack.enter_context(mock.patch.object(DirectRuns, "takes", return_value=False))
        result = measure(spark, folder, load, inputs)
    watched = watch.batches[-len(result.times) :]
    both = list(zip(result.times, watched, strict=True))
    return [parts_of(time, seen) for time, seen in both[load.warm_up :]]


def measure_spark(
    spark: SparkSession, folder: Path, load: Load, inputs: Path, form: Callable[[DataFrame], Any]
) -> list[dict[str, float]]:
    """Run a streaming query over the load whose batches a form of Spark's own takes."""
    frame = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).parquet(str(inputs))
    taken: list[float] = []

    def take(batch: DataFrame, _: int) -> None:
        started_us = _CLOCK.monotonic_us()
        batch.sparkSession.conf.set("spark.sql.adaptive.enabled", "false")
        form(batch)
        taken.append((_CLOCK.monotonic_us() - started_us) / 1_000)

    writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(folder))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    times = batch_times(query, are_read=form is not FORMS[NOTHING])
    both = list(zip(times, taken, strict=True))
    return [parts_of(time, {"batch": ms, "tasks": ms}) for time, ms in both[load.warm_up :]]


def _same(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def _shuffle(batch: DataFrame) -> None:
    cores = batch.sparkSession.sparkContext.defaultParallelism
    batch.repartition(cores, "key").mapInArrow(_same, batch.schema).write.format("noop").mode(
        "overwrite"
    ).save()


FORMS: Final[Mapping[str, Callable[[DataFrame], Any]]] = {
    NOTHING: lambda _: None,
    COLLECT: lambda batch: batch.toArrow(),
    SHUFFLE: _shuffle,
}


def compare(spark: SparkSession, load: Load) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of each part, by form."""
    seen: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="millpond-anatomy-") as name:
        work = Path(name)
        inputs = write_batches(work / "inputs", load)
        for turn in range(_TURNS):
            for title, form in FORMS.items():
                seen[title] += _later(measure_spark(spark, work / f"{title}{turn}", load, inputs, form))
            for title in (TASKS, DIRECT):
                folder = work / f"{title}{turn}"
                batches = measure_millpond(spark, folder, load, inputs, directly=title == DIRECT)
                seen[title] += _later(batches)
    return {
        title: {part: round(median(batch[part] for batch in batches), 1) for part in PARTS}
        for title, batches in seen.items()
    }


def _later(batches: list[dict[str, float]]) -> list[dict[str, float]]:
    return batches[len(batches) // 2 :]


def draw(forms: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draw a bar for each form, divided into its parts."""
    with mpl.rc_context({**STYLE, "font.size": 9}):
        figure = Figure(figsize=(7.4, 3.4), layout="constrained")
        axes = figure.subplots()
        left = dict.fromkeys(forms, 0.0)
        for number, (part, title) in enumerate(PARTS.items()):
            widths = [forms[form][part] for form in forms]
            axes.barh(
                list(forms), widths, left=list(left.values()), height=0.6, color=f"C{number}", label=title
            )
            left = {form: left[form] + forms[form][part] for form in forms}
        for place, total in enumerate(left.values()):
            axes.text(total, place, f" {total:,.0f}", va="center")
        axes.set(xlabel="milliseconds a batch")
        axes.invert_yaxis()
        figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, metadata={"Software": None})


def _table(forms: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table("milliseconds a batch", title="Medians of the later half of the batches")
    for form in forms:
        table.add_column(form, justify="right")
    for part, title in PARTS.items():
        table.add_row(title, *(f"{forms[form][part]:,.1f}" for form in forms))
    totals = {form: sum(parts.values()) for form, parts in forms.items()}
    table.add_row("all", *(f"{total:,.0f}" for total in totals.values()))
    table.add_row("to the shuffle", *(f"{total / totals[SHUFFLE]:.2f}" for total in totals.values()))
    return table


@click.command(help=__doc__)
@click.option("--json", "path", type=click.Path(path_type=Path), default=Path("build/bench/anatomy.json"))
@click.option("--picture", type=click.Path(path_type=Path), help="Draw the parts there.")
@click.option("--rows", default=50_000, show_default=True, help="Records in a batch.")
@click.option("--keys", default=10_000, show_default=True, help="Keys in a batch.")
@click.option("--batches", default=40, show_default=True, help="Batches of each turn.")
@click.option("--master", default="local[2]", show_default=True, help="Where Spark runs.")
def main(path: Path, picture: Path | None, rows: int, keys: int, batches: int, master: str) -> None:
    """Measure, print a table, write the JSON."""
    load = Load(rows_per_batch=rows, keys_per_batch=keys, batches=batches, warm_up=4)
    spark = quiet_spark(
        "millpond-anatomy",
        master=master,
        log=path.parent / "spark.log",
        options={"spark.driver.memory": "3g"},
    )
    try:
        forms = compare(spark, load)
    finally:
        spark.stop()
    Console(width=160).print(_table(forms))
    if picture is not None:
        draw(forms, picture)
    tell_result({"load": {"rows": rows, "keys": keys, "batches": batches}, "ms": forms}, path)


if __name__ == "__main__":
    main()

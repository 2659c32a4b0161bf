"""How long Spark takes to find the interval of each record, by the number of intervals.

Records of one column are routed as a superstep routes them, and thrown away. Next to it the same records are thrown
away without routing.

    python -m benchmarks.routing --intervals 2,100,1000,10000 --json build/bench/routing.json
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from benchmarks.json_result import tell_result
from benchmarks.numbers import numbers
from millpond.executor.inputs.extraction import InjectorNode
from millpond.executor.spark.routing import Router
from millpond.executor.spark.session import spark_session
from millpond.executor.spark.task_plan import Route
from millpond.executor.time.watermark_policies import BoundedDisorder
from millpond.statestore.system import SystemClock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_CORES: Final = 2
_ROUNDS: Final = 5


def measure(frame: DataFrame, intervals: Sequence[int]) -> list[dict[str, Any]]:
    """The best of some rounds for each number of intervals, in milliseconds.

    Args:
        frame: records with a key ``k`` of 16 hexadecimal digits and a time ``at``.
        intervals: into how many the keys are divided.
    """
    node = InjectorNode(stream="in", key="k", at="at", id=None, watermark=BoundedDisorder(0))
    records = frame.count()
    unrouted_ms = _best_ms(lambda: frame)
    runs = []
    for count in intervals:
        lows = ("", *(f"{number * 2**64 // count:016X}" for number in range(1, count)))
        route = Route(positions=tuple(range(count)), lows=lows, key=None)
        routed_ms = _best_ms(lambda route=route: Router(node).route(frame, [route]).frame)
        figures = {"records": records, "routed_ms": routed_ms, "unrouted_ms": unrouted_ms}
        runs.append({"intervals": count, **figures})
        click.echo(f"{runs[-1]}", err=True)
    return runs


def _best_ms(make: Callable[[], DataFrame]) -> float:
    clock, times_us = SystemClock(), []
    for _ in range(_ROUNDS):
        started_us = clock.monotonic_us()
        make().write.format("noop").mode("overwrite").save()
        times_us.append(clock.monotonic_us() - started_us)
    return round(min(times_us) / 1_000, 1)


@click.command(help=__doc__)
@click.option("--intervals", default="2,100,1000,10000", callback=numbers(int), show_default=True)
@click.option("--records", default=1_000_000, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures there.")
def main(intervals: list[int], records: int, path: Path | None) -> None:
    """Run the benchmark."""
    spark = spark_session("routing", master=f"local[{_CORES}]", options={"spark.ui.enabled": "false"})
    spark.sparkContext.setLogLevel("ERROR")
    frame = (
        spark.range(0, records, 1, _CORES)
        .selectExpr("lpad(hex(xxhash64(id)), 16, '0') AS k", "id AS at")
        .cache()
    )
    tell_result({"runs": measure(frame, intervals)}, path, indent=2)
    spark.stop()


if __name__ == "__main__":
    main()

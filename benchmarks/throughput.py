"""Millpond compared with Spark's own state, commits by the size of the table, and local latency.

    python -m benchmarks.throughput --json build/bench/throughput.json

All engines count the same records by key, from the same files, in one Spark session, one after the other;
see `transform_with_state`, `spark_counts` and `millpond_spark` for the engines, and `engine_result` for the timing.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console

from benchmarks import commit_time, local_latency, millpond_spark, spark_counts, transform_with_state
from benchmarks.batches import Load, write_batches
from benchmarks.engine_result import EngineResult
from benchmarks.tables import commit_table, engine_table, local_table
from examples.quiet_spark import quiet_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOADS: Final = (
    Load(rows_per_batch=50_000, keys_per_batch=10_000, batches=12, warm_up=3),
    Load(rows_per_batch=500_000, keys_per_batch=100_000, batches=4, warm_up=2),
)
QUICK_LOADS: Final = (
    Load(rows_per_batch=50_000, keys_per_batch=10_000, batches=4, warm_up=2),
    Load(rows_per_batch=500_000, keys_per_batch=100_000, batches=2, warm_up=1),
)
WARM_UP: Final = Load(rows_per_batch=20_000, keys_per_batch=4_000, batches=6, warm_up=0)
"""Run by all engines before any is measured, so that none of them pays for a JVM that is still cold."""

GOALS: Final = {50_000: 10, 500_000: 20}
"""Rows per batch → the required ratio of Millpond's rate to that of Spark's own state."""

ENGINES: Final = {
    millpond_spark.ENGINE: millpond_spark.measure,
    transform_with_state.ENGINE: transform_with_state.measure,
    **spark_counts.ENGINES,
}
PARTS: Final = ("engines", "commit", "local")

_PACKAGES: Final = ("millpond", "pyspark", "delta-spark", "pyarrow", "obstore", "numpy", "protobuf")


@click.command(help=__doc__)
@click.option("--json", "path", type=click.Path(path_type=Path), default=Path("build/bench/throughput.json"))
@click.option("--quick", is_flag=True, help="Fewer batches and commits: minutes become one.")
@click.option("--only", type=click.Choice(PARTS), multiple=True, help="Measure only this part.")
@click.option("--master", default="local[2]", show_default=True, help="Where Spark runs.")
def main(path: Path, quick: bool, only: tuple[str, ...], master: str) -> None:
    """Measure, write the JSON, print tables."""
    console, parts = Console(), only or PARTS
    report: dict[str, Any] = {"versions": _versions(), "machine": _machine(master), "quick": quick}
    if "engines" in parts:
        report |= _engines(console, path.parent, quick=quick, master=master)
    if "commit" in parts:
        console.print("Commits against the size of the table …")
        report["commit"] = commit_time.measure(100 if quick else 500)
    if "local" in parts:
        console.print("Latency of the local runner …")
        report["local"] = local_latency.measure(seconds=5 if quick else 20)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{json.dumps(report, indent=2)}\n", encoding="utf-8")
    _print(console, report)
    console.print(f"Every raw time is in {path}.")


def _engines(console: Console, folder: Path, *, quick: bool, master: str) -> dict[str, Any]:
    options = {"spark.driver.memory": "3g"}
    spark = quiet_spark("millpond-throughput", master=master, log=folder / "spark.log", options=options)
    try:
        report: dict[str, Any] = {"java": _java_version(spark)}
        results: list[EngineResult] = []
        _side_by_side(console, spark, WARM_UP)
        for load in QUICK_LOADS if quick else LOADS:
            results += _side_by_side(console, spark, load)
    finally:
        spark.stop()
    return report | {"results": [result.to_json() for result in results], "ratios": _ratios(results)}


def _side_by_side(console: Console, spark: SparkSession, load: Load) -> list[EngineResult]:
    """Run the engines over the same files, without the ones too slow for its keys."""
    with tempfile.TemporaryDirectory(prefix="millpond-throughput-") as name:
        work = Path(name)
        inputs = write_batches(work / "inputs", load)
        results = []
        for engine, measure in ENGINES.items():
            if load.keys_per_batch > spark_counts.KEYS_MAX.get(engine, load.keys_per_batch):
                continue
            console.print(
                f"{engine}: {load.rows_per_batch:,} rows over {load.keys_per_batch:,} keys a batch …"
            )
            results.append(measure(spark, work / engine, load, inputs))
        return results


def _ratios(results: list[EngineResult]) -> list[dict[str, Any]]:
    """Return how many times as fast as each other engine Millpond is; only `transform_with_state` has a goal."""
    own = {
        result.load: result.records_per_second for result in results if result.engine == millpond_spark.ENGINE
    }
    return [
        {
            "engine": result.engine,
            "rows_per_batch": result.load.rows_per_batch,
            "keys_per_batch": result.load.keys_per_batch,
            "ratio": round(own[result.load] / result.records_per_second, 2),
            "goal": GOALS[result.load.rows_per_batch]
            if result.engine == transform_with_state.ENGINE
            else None,
        }
        for result in results
        if result.engine != millpond_spark.ENGINE
    ]


def _print(console: Console, report: dict[str, Any]) -> None:
    if "results" in report:
        console.print(engine_table(report["results"], report["ratios"]))
    if "commit" in report:
        console.print(commit_table(report["commit"]))
    if "local" in report:
        console.print(local_table(report["local"]))


def _java_version(spark: SparkSession) -> str:
    query = "select java_method('java.lang.System', 'getProperty', 'java.version') as version"
    return str(spark.sql(query).collect()[0]["version"])


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {package: _version(package) for package in _PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _machine(master: str) -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "processor": platform.machine(),
        "spark_master": master,
        "load_average": os.getloadavg(),
    }


if __name__ == "__main__":
    main()

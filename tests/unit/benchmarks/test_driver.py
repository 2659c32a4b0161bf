"""The benchmark of the driver, with three intervals."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from benchmarks.driver import PHASES, measure
from benchmarks.tables import driver_table
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.gc.compaction import CompactionPolicy


def test_driver_benchmark_measures_each_phase() -> None:
    """Every interval has work and one file for each earlier superstep."""
    few, more = measure([1, 3], supersteps=3, files=2)

    assert [run["intervals"] for run in (few, more)] == [1, 3]
    assert few["files"] == more["files"] == 3
    assert all(run[f"{phase}_ms"] >= 0 for run in (few, more) for phase in (*PHASES, "log", "replay", "cpu"))
    assert 0 < few["superstep_ms"] <= few["superstep_max_ms"]
    assert all(more[name] > few[name] > 0 for name in ("plan_kib", "reports_kib", "commit_kib"))


def test_upkeep_reduces_the_files_of_an_interval() -> None:
    upkeep = UpkeepPolicy(compaction=CompactionPolicy(fan_in=2, files_max=2), background=False)
    (run,) = measure([3], supersteps=2, files=8, upkeep=upkeep)

    assert run["upkeep"]
    assert run["files"] < 8


def test_table_has_a_row_for_each_number_of_intervals() -> None:
    run = {f"{name}_ms": 1.0 for name in (*PHASES, "superstep", "total", "cpu")}
    run |= {f"{name}_kib": 1.0 for name in ("plan", "reports", "commit")}
    console = Console(file=StringIO(), record=True, width=200)
    console.print(driver_table([run | {"intervals": count, "files": 8} for count in (100, 1_000)]))

    lines = [line.split()[0] for line in console.export_text().splitlines() if line.strip()]
    assert lines[-2:] == ["100", "1,000"]

"""The benchmark of other engines: its table, its comparison of panes, and its words about engines that cannot run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image

from benchmarks.peers.engines import ENGINES
from benchmarks.peers.environments import UnavailableError, last_line
from benchmarks.peers.loads import Load, difference, write_load
from benchmarks.peers.measured import measure
from benchmarks.peers.report import draw, reasons, table_rows

_LOAD = Load(records=300, batch=100)


def _figure(engine: str, rate: int | None, *, with_ids: bool = False, part: str = "local") -> dict[str, Any]:
    outcome = {"reason": "no wheel"} if rate is None else {"records_per_cpu_second": rate}
    return {"engine": engine, "part": part, "batch": 50_000, "with_ids": with_ids, **outcome}


FIGURES = [
    _figure("millpond", 200),
    _figure("millpond", 100, with_ids=True),
    _figure("polars", 4_000),
    _figure("polars", 50, with_ids=True),
    _figure("bytewax", None),
    _figure("millpond_on_spark", 10, part="spark"),
    _figure("spark_native", 30, part="spark"),
]


def test_table_has_ratios_to_millpond_in_the_same_part() -> None:
    assert table_rows(FIGURES) == [
        ("Millpond", "50,000", "200", "1.00", "100", "1.00"),
        ("Bytewax, windows", "50,000", "-", "-", "-", "-"),
        ("Polars, one group-by", "50,000", "4,000", "20", "50", "0.50"),
        ("Millpond on Spark", "50,000", "10", "1.00", "-", "-"),
        ("Spark's own windows", "50,000", "30", "3.00", "-", "-"),
    ]


def test_engine_without_figure_keeps_its_reason() -> None:
    assert reasons(FIGURES) == ["Bytewax, windows: no wheel"]


def test_figures_are_drawn(tmp_path: Path) -> None:
    draw(FIGURES, tmp_path / "peers.png")

    with Image.open(tmp_path / "peers.png") as picture:
        assert picture.width > 500


def test_millpond_finds_every_pane(tmp_path: Path) -> None:
    """It runs in a process of its own, as in the benchmark: processor time of other tests' processes stays out."""
    own = next(engine for engine in ENGINES if engine.name == "millpond_without_upkeep")

    figures = measure("local", [replace(own, records=None)], tmp_path, lambda title: None, [_LOAD])

    panes = write_load(tmp_path / "expected", _LOAD).num_rows
    assert [(figure["with_ids"], figure.get("panes")) for figure in figures] == [
        (False, panes),
        (True, panes),
    ], figures
    assert all(figure["cpu_s"] > 0 for figure in figures)


def test_wrong_pane_is_found(tmp_path: Path) -> None:
    expected = write_load(tmp_path / "inputs", _LOAD)
    totals = pa.array([expected["total"][0].as_py() + 1, *expected["total"].to_pylist()[1:]])

    reason = difference(expected.set_column(2, "total", totals), expected)

    assert reason is not None
    assert reason.startswith(f"expected {expected.num_rows} panes")
    assert difference(expected.slice(1), expected) is not None


def test_engine_that_cannot_be_installed_has_a_reason_instead_of_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, folder: Path) -> Path:
        raise UnavailableError(f"installation failed: no wheel of {name}")

    monkeypatch.setattr("benchmarks.peers.measured.python_of", refuse)
    peer = next(engine for engine in ENGINES if engine.environment == "bytewax")

    (figure,) = measure("local", [replace(peer, records=None)], tmp_path, lambda title: None, [_LOAD])

    assert figure["reason"] == "installation failed: no wheel of bytewax"
    assert "records_per_cpu_second" not in figure


def test_engine_that_fails_has_its_last_line_as_reason(tmp_path: Path) -> None:
    unknown = replace(ENGINES[0], module="no_such_module", has_ids=False)

    (figure,) = measure("local", [unknown], tmp_path, lambda title: None, [_LOAD])

    assert figure["reason"].startswith("ended with code 1: ")
    assert "no_such_module" in figure["reason"]


def test_last_line_skips_blank_lines() -> None:
    assert last_line("one\n two \n\n") == "two"
    assert last_line("\n") == "no message"


def test_requirements_are_pinned() -> None:
    """They name versions and no addresses."""
    folder = Path("benchmarks/peers/requirements")
    names = {engine.environment for engine in ENGINES if engine.environment is not None}

    assert {path.stem for path in folder.iterdir()} == names
    for path in folder.iterdir():
        for line in path.read_text(encoding="utf-8").splitlines():
            name, _, version = line.partition("==")
            assert name, line
            assert version, line
            assert "/" not in line

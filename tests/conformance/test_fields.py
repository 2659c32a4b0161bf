"""Several combiners at once, on both runners: their fields in panes, table columns and SQL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pytest
from deltalake import DeltaTable

import millpond as mp
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import plays

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)

_SECOND_US = 1_000_000
_TIME = pa.timestamp("us", tz="UTC")
_BY_SESSION = pa.schema(
    [
        ("key", pa.string()),
        ("window_start", _TIME),
        ("total", pa.float64()),
        ("visits", pa.int64()),
        ("best", pa.list_(pa.float64())),
    ]
)
_OVERALL = pa.schema([("key", pa.string()), ("total", pa.float64()), ("sessions", pa.int64())])
_EACH: dict[str, Any] = {"trigger": mp.Repeatedly(mp.AfterCount(1)), "accumulation": "retracting"}


@pytest.fixture(params=["local", pytest.param("spark", marks=pytest.mark.spark)])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    spark = request.getfixturevalue("spark") if request.param == "spark" else None
    with plays(tmp_path, ManualClock, spark) as start:
        yield start


def _pipeline(folder: Path) -> mp.Pipeline:
    """Return each user's sessions, and their total, which follows each correction."""
    pipeline = mp.Pipeline("shop")
    visits = pipeline.inject("visits", key="user", at="at", at_unit="us", watermark=mp.ManualWatermark())
    by_session = visits.window(mp.Sessions("10s"), **_EACH).combine(
        total=mp.Sum("amount"), visits=mp.Count(), best=mp.TopN(2, "amount"), name="by_session"
    )
    overall = by_session.window(mp.GlobalWindows(), **_EACH).combine(
        {"total": mp.Sum("total"), "sessions": mp.Count()}, name="overall", key=lambda _: "all"
    )
    for stream, schema, keys in (
        (by_session, _BY_SESSION, ["key", "window_start"]),
        (overall, _OVERALL, ["key"]),
    ):
        table = mp.DeltaSink(str(folder / stream.name), schema, mode="upsert", keys=keys)
        stream.sink(f"{stream.name}_table", table)
    return pipeline


def _visit(second: int, amount: float, user: str = "anna") -> dict[str, Any]:
    return {"user": user, "at": second * _SECOND_US, "amount": float(amount)}


def test_fields_are_columns_on_both_runners(play: Any, tmp_path: Path) -> None:
    """Merged sessions are one row, and sums downstream are corrected exactly."""
    running = play(lambda: _pipeline(tmp_path))
    running.inject("visits", [_visit(0, 1e17), _visit(18, 2.5), _visit(0, 4, "ben")])
    running.settle()
    running.restart()
    running.inject("visits", [_visit(9, 0.5), _visit(100, -1e17)])
    running.settle()
    states = {key: orjson.loads(state) for key, state in running.states("by_session").items()}
    running.stop()
    shown = {
        name: sorted(DeltaTable(tmp_path / name).to_pyarrow_table().to_pylist(), key=str)
        for name in ("by_session", "overall")
    }

    assert [[*row.values()][2:] for row in shown["by_session"]] == [
        [1e17, 3, [1e17, 2.5]],
        [-1e17, 1, [-1e17]],
        [4.0, 1, [4.0]],
    ]
    assert [[*row.values()] for row in shown["overall"]] == [["all", 4.0, 3]]
    assert [window["accumulator"]["visits"] for window in states["anna"]["windows"]] == [3, 1]


class _Parted(mp.Computation):
    """Produces visits to streams by the composite's own names for them."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.produce("bought" if record.value["amount"] else "looked", record.value)


def _counted(visits: mp.DataflowStream, folder: Path) -> mp.DataflowStream:
    parted = visits.pipeline.add(
        _Parted(), name="parted", subscribes={visits.name: None}, produces=["bought", "looked"]
    )
    figures = parted["bought"].window(mp.FixedWindows("1h"), **_EACH)
    counts = figures.combine(visits=mp.Count(), total=mp.Sum("amount"), name="counts")
    schema = pa.schema([("key", pa.string()), ("visits", pa.int64()), ("total", pa.float64())])
    return counts.sink("table", mp.DeltaSink(str(folder / "counts"), schema, mode="upsert"))


def test_composite_runs_on_both_runners(play: Any, tmp_path: Path) -> None:
    """Its rows have its name as prefix; its code uses its own stream names."""

    def make() -> mp.Pipeline:
        pipeline = mp.Pipeline("shop")
        visits = pipeline.inject("visits", key="user", at="at", at_unit="us", watermark=mp.ManualWatermark())
        visits.transform("figures", _counted, tmp_path)
        return pipeline

    running = play(make)
    running.inject("visits", [_visit(0, 1.5), _visit(1, 0)])
    running.settle()
    running.restart()
    running.inject("visits", [_visit(2, 0.25)])
    running.settle()
    states = running.states("figures.counts")
    running.stop()

    assert orjson.loads(states["anna"])["windows"][0]["accumulator"]["visits"] == 2
    assert DeltaTable(tmp_path / "counts").to_pyarrow_table().to_pylist() == [
        {"key": "anna", "visits": 2, "total": 1.75}
    ]


def test_nulls_are_skipped_as_in_sql_on_both_runners(play: Any, tmp_path: Path) -> None:
    """Anna has two amounts among nulls, Ben only a null."""
    combiners: dict[str, tuple[mp.CombineFn, pa.DataType]] = {
        "visits": (mp.Count(), pa.int64()),
        "known": (mp.Count("amount"), pa.int64()),
        "total": (mp.Sum("amount"), pa.float64()),
        "spread": (mp.StdDev("amount"), pa.float64()),
        "last": (mp.windows.Last("amount"), pa.float64()),
        "dearest": (mp.ArgMax("item", by="amount"), pa.string()),
        "cheapest": (mp.windows.ArgMin("item", by="amount"), pa.string()),
        "amounts": (mp.windows.ToSet("amount"), pa.list_(pa.float64())),
    }

    def make() -> mp.Pipeline:
        pipeline = mp.Pipeline("shop")
        visits = pipeline.inject("visits", key="user", at="at", at_unit="us", watermark=mp.ManualWatermark())
        figures = visits.window(mp.FixedWindows("1h"), trigger=_EACH["trigger"]).combine(
            {name: combine for name, (combine, _) in combiners.items()}, name="figures"
        )
        columns = [(name, column) for name, (_, column) in combiners.items()]
        schema = pa.schema([("key", pa.string()), *columns])
        figures.sink("table", mp.DeltaSink(str(tmp_path / "figures"), schema, mode="upsert"))
        return pipeline

    def visit(second: int, item: str, amount: float | None, user: str = "anna") -> dict[str, Any]:
        return {"user": user, "at": second * _SECOND_US, "item": item, "amount": amount}

    running = play(make)
    running.inject("visits", [visit(0, "cup", 1.5), visit(1, "tea", None), visit(2, "tea", None, "ben")])
    running.settle()
    running.restart()
    running.inject("visits", [visit(3, "pot", 3.5), visit(4, "lid", 1.5), visit(5, "jar", None)])
    running.settle()
    summary = running.stop()
    rows = DeltaTable(tmp_path / "figures").to_pyarrow_table().to_pylist()

    assert summary.totals.dead_letters == 0
    assert sorted([*row.values()] for row in rows) == [
        ["anna", 5, 3, 6.5, 1.1547005383792515, 1.5, "pot", "cup", [1.5, 3.5]],
        ["ben", 1, 0, None, None, None, None, None, []],
    ]


def test_values_that_json_lacks_reach_the_table_on_both_runners(play: Any, tmp_path: Path) -> None:
    """A NaN makes a sum and a mean NaN; it is no dead letter, and other fields keep their values."""

    def make() -> mp.Pipeline:
        pipeline = mp.Pipeline("shop")
        visits = pipeline.inject("visits", key="user", at="at", at_unit="us", watermark=mp.ManualWatermark())
        figures = visits.window(mp.FixedWindows("1h"), **_EACH).combine(
            total=mp.Sum("amount"), mean=mp.Mean("amount"), visits=mp.Count(), name="figures"
        )
        schema = pa.schema(
            [("key", pa.string()), ("total", pa.float64()), ("mean", pa.float64()), ("visits", pa.int64())]
        )
        figures.sink("table", mp.DeltaSink(str(tmp_path / "figures"), schema, mode="upsert"))
        return pipeline

    running = play(make)
    running.inject("visits", [_visit(0, 1.5), _visit(1, float("nan")), _visit(2, 4, "ben")])
    running.settle()
    running.restart()
    running.inject("visits", [_visit(3, 2.5), _visit(3, float("inf"), "ben")])
    running.settle()
    summary = running.stop()
    rows = DeltaTable(tmp_path / "figures").to_pyarrow_table().to_pylist()

    assert summary.totals.dead_letters == 0
    assert [str([*row.values()]) for row in sorted(rows, key=str)] == [
        "['anna', nan, nan, 3]",
        "['ben', inf, inf, 2]",
    ]

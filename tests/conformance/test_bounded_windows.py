"""Pipelines on bounded input, whose final panes equal the stream's, on both runners."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.runner import LocalRunner
from millpond.executor.spark import bounded
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.time.watermark_policies import BoundedDisorder
from millpond.executor.windows.combiners import Count, ToList
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.window import Element, Merge, Window, WindowFn
from millpond.executor.windows.window_fns import FixedWindows, Sessions
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

_ROWS = [
    {"k": key, "t": at, "v": at % 7}
    for key, times in {"a": (3, 12, 5, 18, 41, 33), "b": (7, 8, 55)}.items()
    for at in times
]


class Even(WindowFn):
    """A user's window function: windows of ten, the odd ones merged with their predecessors."""

    is_merging = True

    def assign(self, element: Element) -> Sequence[Window]:
        start = element.at // 10 * 10
        return (Window(start, start + 10),)

    def merge(self, windows: Sequence[Window]) -> Sequence[Merge]:
        pairs: dict[int, list[Window]] = {}
        for window in windows:
            pairs.setdefault(window.start // 20 * 20, []).append(window)
        return [
            Merge(tuple(pair), Window(start, start + 20)) for start, pair in pairs.items() if len(pair) > 1
        ]


class Final(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        shown, kept = record.value, context.state.get({})
        assert not record.late
        context.state.set({**kept, str(shown["window"]): shown["value"]})


def make() -> Pipeline:
    """Fixed windows, sessions and a user's windows, the first of them windowed again."""
    pipeline = Pipeline("bounded")
    stream = pipeline.inject("s", key="k", at="t", watermark=BoundedDisorder("20us"))
    options: dict[str, Any] = {"accumulation": "accumulating", "allowed_lateness": "100us"}
    values = stream.window(FixedWindows("10us"), **options).map(_value, name="values")
    lists = values.combine(ToList(), name="lists")
    lists.apply(Final(), name="fixed")
    again = lists.window(FixedWindows("20us"), of=len, accumulation="retracting", allowed_lateness="100us")
    again.combine(ToList(), name="lengths").apply(Final(), name="again", on_error="stop")
    stream.window(Sessions("9us"), **options).combine(Count(), name="sessions").apply(Final(), name="counts")
    stream.window(Even(), **options).combine(ToList("v"), name="evens").apply(Final(), name="own")
    return pipeline


def _value(row: Any) -> int:
    return int(row["v"])


def finals(store: Store) -> dict[str, dict[str, Any]]:
    """What each last computation kept, by key, with values in no particular order."""
    values = {}
    for name in ("fixed", "again", "counts", "own"):
        for row in store.rows_view(name).to_arrow().to_pylist():
            kept = orjson.loads(row["state"]).items()
            values[f"{name} {row['key']}"] = {
                window: sorted(value) if isinstance(value, list) else value for window, value in kept
            }
    return values


def streamed() -> dict[str, dict[str, Any]]:
    """Return the final panes of the stream, fed record by record."""
    clock = ManualClock()
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    run = LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False).start(make(), stepping=True)
    for row in sorted(_ROWS, key=lambda row: row["t"] // 15):
        run.inject("s", [row])
        run.run_until_quiet()
    run.finish("s")
    run.run_until_quiet()
    run.stop()
    return finals(store)


def local(folder: Path, _: Callable[[], SparkSession]) -> dict[str, dict[str, Any]]:
    with Store.open(folder / "pond") as store:
        LocalRunner(store, progress=False).run(make(), {"s": _ROWS})
        return finals(store)


def spark(folder: Path, session: Callable[[], SparkSession]) -> dict[str, dict[str, Any]]:
    with Store.open(folder / "pond") as store:
        SparkRunner(store, spark=session(), progress=False, intervals=1).run(
            make(), {"s": session().createDataFrame(_ROWS)}
        )
        return finals(store)


def spark_in_pieces(folder: Path, session: Callable[[], SparkSession]) -> dict[str, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded, "PIECE_ROWS", 2)
        patch.setattr(bounded, "MEASURED_SIZES", range(1 << 70))
        return spark(folder, session)


@pytest.mark.parametrize(
    "runner",
    [
        local,
        pytest.param(spark, marks=pytest.mark.spark_all),
        pytest.param(spark_in_pieces, marks=pytest.mark.spark_all),
    ],
)
def test_bounded_input_gives_the_final_panes(
    runner: Callable[..., Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    expected = streamed()

    assert runner(tmp_path, lambda: request.getfixturevalue("spark")) == expected
    assert expected["counts a"] == {"[3, 27]": 4, "[33, 50]": 2}
    assert expected["own a"] == {"[0, 20]": [3, 4, 5, 5], "[30, 40]": [5], "[40, 50]": [6]}

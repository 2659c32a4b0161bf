"""Pipelines that continue from loaded rows, on both runners."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pytest

import millpond as mp
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import plays

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECOND: Final = 1_000_000
START: Final = 1_700_000_000 * SECOND
STATES: Final = {f"k{number:02d}": number for number in range(20)}


class Flush(mp.Computation):
    """Counts, and produces its count when a timer fires."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set({"n": context.state.get({"n": 0})["n"] + 1})

    def process_timer(self, context: mp.Context, timer: mp.Timer) -> None:
        context.produce("told", [timer.tag, context.state.get()["n"], timer.at - START])
        context.state.delete()


class Kept(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set([*record.value, record.at - START, record.late])


def pipeline() -> mp.Pipeline:
    made = mp.Pipeline("p")
    events = made.inject("events", key="k", at="at", watermark=mp.BoundedDisorder("0s"))
    events.apply(Flush(), name="flush", produces="told").apply(Kept(), name="kept")
    return made


@pytest.mark.parametrize("runner", ["local", pytest.param("spark", marks=pytest.mark.spark)])
def test_loaded_states_and_timers_continue(
    request: pytest.FixtureRequest, tmp_path: Path, runner: str
) -> None:
    """Loaded timers hold the watermark until they fire."""
    spark: SparkSession | None = request.getfixturevalue("spark") if runner == "spark" else None
    rows = [
        {"key": key, "state": {"n": n}, "timers": [{"at": START + n * SECOND, "tag": f"t{n}"}]}
        for key, n in STATES.items()
    ]
    table = pa.Table.from_pylist(rows)
    source = table if spark is None else spark.createDataFrame(table)
    with plays(tmp_path, ManualClock, spark) as starting:
        play = starting(pipeline)
        play.stop()
        play.store = play._open_store()
        loaded = play.store.load("flush", source, intervals=3)
        play.start()
        play.inject("events", [{"k": "k15", "at": START + 9 * SECOND}])
        play.settle()

        assert (loaded.rows, loaded.intervals) == (20, 3)
        fired = {key: n for key, n in STATES.items() if n <= 9}
        assert play.states("kept") == {
            key: f'["t{n}",{n},{n * SECOND},{n * SECOND},false]' for key, n in fired.items()
        }
        left = {key: n for key, n in STATES.items() if n > 9} | {"k15": 16}
        assert play.states("flush") == {key: f'{{"n":{n}}}' for key, n in left.items()}

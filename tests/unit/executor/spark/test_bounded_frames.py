"""Bounded frames that are consumed in pieces, in the order of event time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson
import pytest

import millpond as mp
from millpond.cli.terminal.inputs import consumed_inputs
from millpond.executor.spark import bounded
from millpond.statestore.failpoint import listening

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SECOND = 1_000_000
ROWS: list[dict[str, Any]] = [{"k": "ab"[n % 2], "at": n * SECOND, "n": n} for n in range(24)]
UNREADABLE = [{"k": "a", "at": None, "n": 100}, {"k": None, "at": 20 * SECOND, "n": 101}]


class Died(BaseException):
    """The process died here."""


class Seen(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        assert not record.late
        context.state.set([*context.state.get([]), record.value["value"]])


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "PIECE_ROWS", 5)
    monkeypatch.setattr(bounded, "MEASURED_SIZES", range(1 << 70))


def pipeline(*streams: str, backfill: str | None = None) -> mp.Pipeline:
    made = mp.Pipeline("p")
    for stream in streams:
        injected = made.inject(stream, key="k", at="at", watermark=mp.BoundedDisorder("1h"))
        injected.window(mp.FixedWindows("4s")).combine(mp.Count(), name=f"windows_{stream}").apply(
            Seen(), name=f"seen_{stream}"
        )
        if backfill is not None:
            injected.window(mp.FixedWindows("4s")).combine(mp.Count(), name="again", backfill=backfill).apply(
                Seen(), name="seen_again"
            )
    return made


def states(pond: Path, name: str) -> dict[str, list[int]]:
    with mp.Store.open(pond, read_only=True) as store:
        rows = store.rows_view(name).to_arrow().to_pylist()
    return {row["key"]: orjson.loads(row["state"]) for row in rows}


def run(
    spark: SparkSession, pond: Path, made: mp.Pipeline, dies_at: int = 0, **inputs: DataFrame
) -> mp.RunSummary | None:
    supersteps = Counter[str]()

    def die(name: str) -> None:
        supersteps[name] += 1
        if name == "superstep.committed" and supersteps[name] == dies_at:
            raise Died

    runner = mp.SparkRunner(pond, spark=spark, intervals=2, progress=False)
    try:
        with listening(die):
            return runner.run(made, inputs)
    except Died:
        return None


def test_pieces_close_windows_on_the_way(spark: SparkSession, tmp_path: Path) -> None:
    """Of two frames the one that is furthest behind continues, and unreadable rows come first."""
    left = spark.createDataFrame([*ROWS[::-1], *UNREADABLE], "k string, at long, n long")
    right = spark.createDataFrame([{**row, "at": row["at"] + 12 * SECOND} for row in ROWS])
    made = pipeline("left", "right")

    assert run(spark, tmp_path / "pond", made, 6, left=left, right=right) is None
    begun = states(tmp_path / "pond", "seen_left")
    assert 1 <= len(begun["a"]) < 6
    assert states(tmp_path / "pond", "seen_right") == {}
    with mp.Store.open(tmp_path / "pond", read_only=True) as store:
        snapshot = store.snapshot()
        consumed = {one.input: one for one in consumed_inputs(snapshot.txns, snapshot.source_offsets)}
    assert consumed["left"].position.startswith("piece ")
    summary = run(spark, tmp_path / "pond", made, left=left, right=right)

    assert summary is not None
    assert "of its rows were consumed before" in summary.skipped["left"]
    assert summary.totals.injected == 2 * len(ROWS)
    assert summary.totals.dead_letters == len(UNREADABLE)
    for stream in ("left", "right"):
        assert states(tmp_path / "pond", f"seen_{stream}") == {"a": [2] * 6, "b": [2] * 6}
    again = run(spark, tmp_path / "pond", made, left=left.repartition(3), right=right)
    assert again is not None
    assert again.skipped["left"] == "all 26 rows were consumed before"


def _without_first(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return rows[1:]


def _edited_first(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**rows[0], "n": 7}, *rows[1:]]


@pytest.mark.parametrize("change", [_without_first, _edited_first])
def test_consumed_pieces_are_known_again(
    spark: SparkSession, tmp_path: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
) -> None:
    """Rows that were not consumed may still change; a backfill has the consumed ones alone."""
    pond = tmp_path / "pond"
    assert run(spark, pond, pipeline("s"), 2, s=spark.createDataFrame(ROWS)) is None

    with pytest.raises(mp.InvalidError, match="consumed only once"):
        run(spark, pond, pipeline("s"), s=spark.createDataFrame(change(ROWS)))
    made = pipeline("s", backfill="input")
    assert run(spark, pond, made, s=spark.createDataFrame([*ROWS, {"k": "a", "at": 23 * SECOND, "n": 30}]))
    whole = {"a": [2, 2, 2, 2, 2, 3], "b": [2] * 6}
    assert states(pond, "seen_s") == states(pond, "seen_again") == whole

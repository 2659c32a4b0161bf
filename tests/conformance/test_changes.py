"""Table changes as input on both runners, also from a real Delta change data feed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from millpond.executor.spark.runner import SparkRunner
from millpond.executor.windows.window_fns import FixedWindows
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import plays
from tests.fixtures.changes import Form, Step, changes_in, scores_of_teams, standing_sums

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

Open = Callable[..., Any]

IMAGE = pa.struct(
    [
        pa.field("id", pa.string()),
        pa.field("team", pa.string()),
        pa.field("score", pa.int64()),
        pa.field("at", pa.int64()),
    ]
)
SCHEMAS = {
    "debezium": pa.schema(
        [
            pa.field("op", pa.string()),
            pa.field("before", IMAGE),
            pa.field("after", IMAGE),
            pa.field("ts_ms", pa.int64()),
            pa.field("source", pa.struct([pa.field("lsn", pa.int64())])),
        ]
    ),
    "delta": pa.schema(
        [
            *IMAGE,
            pa.field("_change_type", pa.string()),
            pa.field("_commit_version", pa.int64()),
            pa.field("_commit_timestamp", pa.int64()),
        ]
    ),
    "words": pa.schema([*IMAGE, pa.field("op", pa.string())]),
}


def image(name: str, team: str, score: int, at: int = 5) -> dict[str, Any]:
    return {"id": name, "team": team, "score": score, "at": at}


STEPS: list[Step] = [
    (None, image("a", "red", 3)),
    (None, image("b", "blue", 4, 15)),
    (image("a", "red", 3), image("a", "red", 10)),
    (image("b", "blue", 4, 15), image("b", "red", 4, 15)),
    (None, image("c", "blue", 7)),
    (image("a", "red", 10), None),
]


def table(form: Form, rows: list[dict[str, Any]]) -> pa.Table:
    """Return changes in columns, as a source passes them."""
    return pa.Table.from_pylist(rows, schema=SCHEMAS[form])


def standing(run: Any) -> dict[str, dict[int, int]]:
    """Return the last sum of each team and window."""
    shown = {key: orjson.loads(state) for key, state in run.states("standing").items()}
    return {team: {max(0, int(start)): total for start, total in of.items()} for team, of in shown.items()}


class Facts:
    """One test per fact; subclasses provide the runner."""

    @pytest.mark.parametrize("form", ["debezium", "delta", "words"])
    def test_sums_follow_updates_and_deletes(self, play: Open, form: Form) -> None:
        """Changes retract the old row under its old key and window, also after a restart."""
        run = play(partial(scores_of_teams, form, window_fn=FixedWindows("10us")))
        run.inject("scores", table(form, changes_in(form, STEPS)[:4]))
        run.settle()
        run.restart()
        run.inject("scores", table(form, changes_in(form, STEPS)[4:]))
        run.settle()

        assert standing(run) == standing_sums(STEPS, 10)
        assert run.run.summary().totals.dead_letters == 0

    def test_redelivered_changes_count_once(self, play: Open) -> None:
        """Each image of a change has an id derived from the id of the change."""
        run = play(partial(scores_of_teams, "debezium", ids=True))
        changes = table("debezium", changes_in("debezium", STEPS))
        for _ in range(2):
            run.inject("scores", changes)
            run.settle()

        assert standing(run) == standing_sums(STEPS)
        assert run.run.summary().totals.duplicates == 8

    def test_change_that_cannot_be_retracted_is_a_dead_letter(self, play: Open) -> None:
        """An update without the row before it, or an unknown change type; a tombstone has no effect."""
        run = play(partial(scores_of_teams, "debezium"))
        good = changes_in("debezium", STEPS[:2])
        tombstone = {"op": None, "before": None, "after": None}
        poor = {"op": "u", "before": None, "after": image("a", "red", 9)}
        odd = {"op": "x", "before": None, "after": image("a", "red", 9)}
        run.inject("scores", table("debezium", [*good, *good, tombstone, poor, odd]))
        run.settle()

        assert run.run.summary().totals.dead_letters == 2
        assert standing(run) == {"red": {0: 6}, "blue": {0: 8}}
        letters = [orjson.loads(state) for state in run.states("dead_letters").values() if state]
        assert {letter["key"] for letter in letters} == {"red"}
        assert all("no such change" in letter["error"] for letter in letters)


class TestLocal(Facts):
    @pytest.fixture
    def play(self, tmp_path: Path) -> Iterator[Open]:
        with plays(tmp_path, lambda: ManualClock(0)) as start:
            yield start

    def test_local_change_data_feed_is_sorted_by_commit(self, play: Open, tmp_path: Path) -> None:
        """Delta's own reader does not order the feed by commit."""
        path = tmp_path / "scores"
        rows = [image("a", "red", 3), image("b", "blue", 4)]
        configuration = {"delta.enableChangeDataFeed": "true"}
        write_deltalake(path, pa.Table.from_pylist(rows, pa.schema(IMAGE)), configuration=configuration)
        DeltaTable(path).update(predicate="id = 'a'", updates={"score": "10", "team": "'blue'"})
        DeltaTable(path).delete("id = 'b'")
        feed = pa.table(DeltaTable(path).load_cdf(starting_version=0))

        run = play(partial(scores_of_teams, "delta"))
        backwards = [feed.slice(row, 1) for row in reversed(range(feed.num_rows))]
        run.inject("scores", pa.concat_tables(backwards))
        run.settle()

        assert standing(run) == {"red": {0: 0}, "blue": {0: 10}}
        assert run.run.summary().totals.dead_letters == 0

    def test_table_without_the_column_is_refused(self, play: Open) -> None:
        run = play(partial(scores_of_teams, "words"))
        with pytest.raises(InvalidError, match="change column"):
            run.inject("scores", pa.table({"team": ["red"]}))


class TestSpark(Facts):
    @pytest.fixture
    def play(self, tmp_path: Path, spark: SparkSession) -> Iterator[Open]:
        with plays(tmp_path, lambda: ManualClock(0), spark) as start:
            yield start

    def test_streamed_change_data_feed_keeps_the_sums(self, spark: SparkSession, tmp_path: Path) -> None:
        """Inserts, updates, merges and deletes continue from one checkpoint, run after run."""
        source = f"delta.`{tmp_path / 'scores'}`"
        spark.sql(
            f"CREATE TABLE {source} (id STRING, team STRING, score INT, at TIMESTAMP) USING delta "
            "TBLPROPERTIES (delta.enableChangeDataFeed = true)"
        )
        at = "TIMESTAMP'2026-01-01 00:00:05Z'"
        first = [
            f"INSERT INTO {source} SELECT CAST(id AS STRING), IF(id % 2 = 0, 'red', 'blue'), id, {at} FROM RANGE(20)"
        ]
        merge = (
            f"MERGE INTO {source} t USING (SELECT * FROM VALUES ('7'), ('77') AS v (id)) s ON t.id = s.id "
            "WHEN MATCHED THEN UPDATE SET score = 1 "
            f"WHEN NOT MATCHED THEN INSERT (id, team, score, at) VALUES (s.id, 'green', 9, {at})"
        )
        second = [
            f"UPDATE {source} SET score = score + 100 WHERE id IN ('3', '4')",
            f"UPDATE {source} SET team = 'red' WHERE id = '5'",
            f"DELETE FROM {source} WHERE id IN ('4', '6')",
            merge,
        ]
        registry, clock = MemoryRegistry(), SystemClock()
        with Store.open(
            tmp_path / "pond", leases=lambda _, writer_id: MemoryLeases(registry, clock, writer_id=writer_id)
        ) as store:
            for statements in (first, second):
                for statement in statements:
                    spark.sql(statement)
                feed = spark.readStream.format("delta").option("readChangeFeed", "true")
                frame = feed.option("startingVersion", 0).load(str(tmp_path / "scores"))
                runner = SparkRunner(store, spark=spark, progress=False, intervals=2)
                summary = runner.run(scores_of_teams("delta"), {"scores": frame}, finish=False)
                assert summary.totals.dead_letters == 0
                rows = store.rows_view("standing").to_arrow().to_pylist()
                shown = {row["key"]: next(iter(orjson.loads(row["state"]).values())) for row in rows}
                sums = spark.sql(f"SELECT team, sum(score) AS total FROM {source} GROUP BY team").collect()
                assert shown == {row["team"]: row["total"] for row in sums}

"""``mp.spark.replay_on_spark``."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pytest

import millpond as mp

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

SCHEMA: Final = "k string, at long, n long"
ALARMS: Final = pa.schema([("key", pa.string()), ("sum", pa.int64()), ("again", pa.int64())])
FILES: Final = 5
ROWS: Final = [{"k": key, "at": at * 1_000_000, "n": at} for at in range(1, 11) for key in "abc"]


class Alarm(mp.Computation):
    """A sum with an alarm at a limit, and another alarm three seconds of event time later. Only key a's limit
    can change, and key c has none.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        total = context.state.get({"sum": 0})["sum"] + record.value["n"]
        context.state.set({"sum": total, "alarm": record.key != "c" and total >= self._limit_of(record.key)})
        if context.state.get()["alarm"]:
            context.produce("alarms", {"key": record.key, "sum": total, "again": None})
            context.set_timer(record.at + 3_000_000, tag=str(total))

    def process_timer(self, context: mp.Context, timer: mp.Timer) -> None:
        context.produce("alarms", {"key": context.key, "sum": None, "again": int(timer.tag)})

    def _limit_of(self, key: str) -> int:
        return self.limit if key == "a" else 20


def a_pipeline(folder: Path, limit: int = 20) -> mp.Pipeline:
    pipeline = mp.Pipeline("p")
    rows = pipeline.inject("in", key="k", at="at", at_unit="us", watermark=mp.BoundedDisorder("0s"))
    alarms = rows.apply(Alarm(limit), name="alarm", produces="alarms")
    alarms.sink("out", mp.DeltaSink(str(folder / "alarms"), schema=ALARMS))
    return pipeline


def a_stream(spark: SparkSession, folder: Path, files_at_once: int) -> DataFrame:
    stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", files_at_once)
    return stream.json(str(folder / "input"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession, zookeeper_hosts: str) -> Path:
    """A store that has read five files one at a time."""
    made = tmp_path_factory.mktemp("replayed")
    (made / "input").mkdir()
    for number in range(FILES):
        file = made / "input" / f"{number}.json"
        file.write_text("\n".join(map(json.dumps, ROWS[number * 6 : number * 6 + 6])), encoding="utf-8")
        os.utime(file, (1_700_000_000 + number, 1_700_000_000 + number))
    runner = mp.SparkRunner(
        made / "pond", spark=spark, zookeeper=zookeeper_hosts, intervals=1, progress=False
    )
    runner.run(a_pipeline(made), {"in": a_stream(spark, made, 1)})
    return made


def version_after(pond: Path, batches: int) -> int:
    """Return the first version that has consumed so many batches."""
    with mp.Store.open(pond, read_only=True) as store:
        for version in range(store.snapshot().version + 1):
            txns = store.snapshot(version).txns
            if any(app_id.startswith("millpond/input/") and at == batches - 1 for app_id, at in txns.items()):
                return version
    raise AssertionError(f"there are fewer than {batches} batches")


def replay(
    pond: Path, new: Path, pipeline: mp.Pipeline, frame: DataFrame, version: int, hosts: str
) -> tuple[mp.types.Replayed, mp.types.StoreDifference]:
    with mp.Store.open(pond, read_only=True) as store:
        done = mp.spark.replay_on_spark(
            store, new, pipeline, {"in": frame}, version=version, spark=frame.sparkSession, zookeeper=hosts
        )
        with mp.Store.open(new, read_only=True) as replayed:
            return done, mp.compare_stores(replayed, store)


def digests(*folders: Path) -> dict[str, str]:
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(("batches", "batches_of_replay"), [(0, 3), (2, 2 + 2)])
def test_replay_of_the_same_code_is_equal(
    folder: Path,
    tmp_path: Path,
    spark: SparkSession,
    zookeeper_hosts: str,
    batches: int,
    batches_of_replay: int,
) -> None:
    """Files after the version are read two at a time."""
    version = version_after(folder / "pond", batches) if batches else 0
    pipeline, stream = a_pipeline(folder), a_stream(spark, folder, 2)
    done, difference = replay(folder / "pond", tmp_path / "new", pipeline, stream, version, zookeeper_hosts)

    assert difference.is_empty, (difference.rows.to_pylist(), difference.sink_rows.to_pylist())
    assert [(part.name, part.equal) for part in difference.computations] == [("alarm", 3)]
    assert [(part.name, part.equal > 0) for part in difference.sinks] == [("out", True)]
    assert done.version == version
    offsets = tmp_path / "new" / "checkpoints" / "in" / "offsets"
    assert len([path for path in offsets.iterdir() if path.name.isdecimal()]) == batches_of_replay


def test_replay_with_a_changed_constant_differs_in_affected_keys(
    folder: Path, tmp_path: Path, spark: SparkSession, zookeeper_hosts: str
) -> None:
    """The original stays unchanged, and a repeated call changes nothing."""
    pond, new = folder / "pond", tmp_path / "new"
    untouched = pond / "rows", pond / "checkpoints", folder / "alarms"
    before = digests(*untouched)
    version, pipeline, stream = version_after(pond, 2), a_pipeline(folder, 60), a_stream(spark, folder, 2)
    done, difference = replay(pond, new, pipeline, stream, version, zookeeper_hosts)

    assert digests(*untouched) == before
    changed = [json.loads(row) for row in difference.sink_rows.column("row").to_pylist()]
    kinds = set(difference.sink_rows.column("kind").to_pylist())
    assert ({row["key"] for row in changed}, kinds) == ({"a"}, {"missing"})
    assert sorted(row["sum"] for row in changed if row.get("sum")) == [21, 28, 36, 45, 55]

    again, same = replay(pond, new, pipeline, stream, version, zookeeper_hosts)
    assert (again.records, same.sinks, same.computations) == (0, difference.sinks, difference.computations)
    assert done.records > 0


def test_bounded_input_is_replayed_from_a_version_before_it(
    tmp_path: Path, spark: SparkSession, zookeeper_hosts: str
) -> None:
    """From a version after the input, nothing is left to replay."""
    pond = tmp_path / "pond"
    frame = spark.createDataFrame([tuple(row.values()) for row in ROWS], SCHEMA).coalesce(1)
    runner = mp.SparkRunner(pond, spark=spark, zookeeper=zookeeper_hosts, intervals=1, progress=False)
    runner.run(a_pipeline(tmp_path), {"in": frame})

    same, lower = a_pipeline(tmp_path), a_pipeline(tmp_path, limit=60)
    done, difference = replay(pond, tmp_path / "same", same, frame, 0, zookeeper_hosts)
    assert difference.is_empty
    assert done.records > len(ROWS) - 1

    _, difference = replay(pond, tmp_path / "other", lower, frame, 0, zookeeper_hosts)
    assert difference.rows.column("key").to_pylist() == ["a"]
    assert {part.missing > part.added for part in difference.sinks} == {True}

    with mp.Store.open(pond, read_only=True) as store:
        consumed = store.snapshot().version
    done, difference = replay(pond, tmp_path / "late", lower, frame, consumed, zookeeper_hosts)
    assert (done.records, difference.is_empty) == (0, True)

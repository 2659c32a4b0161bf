"""A computation embedded in the user's own streaming query."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from deltalake import DeltaTable

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.sinks.sink import DeltaSink
from millpond.executor.spark.foreach_batch import ForeachBatch, foreach_batch
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.processes.ledger import LEDGER, START_US, Ledger, ledger_of, numbered, written

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytestmark = pytest.mark.spark

CLOCK = SystemClock()
SCHEMA = "k string, t long, id string, n long"


class Book(Computation):
    """A ledger that produces to the stream of its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def process_record(self, context: Context, record: Record) -> None:
        context.state.set([*context.state.get([]), record.value["n"]])
        context.produce(self.name, {"n": record.value["n"]})


class Job:
    """A user's streaming job with one file a batch."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        registry = MemoryRegistry()
        self._spark = spark
        self._folder = folder
        self.input = folder / "input"
        self.input.mkdir()
        self.checkpoint = folder / "checkpoint"
        self.sink = folder / "sink"
        self.store = Store.open(
            folder / "pond", leases=lambda _, writer_id: MemoryLeases(registry, CLOCK, writer_id=writer_id)
        )

    def bring(self, *numbers: int) -> None:
        """Add a file, dated a second after the last, because Spark reads files in the order of their times."""
        count = len(list(self.input.iterdir()))
        file = self._folder / f"{count:04d}.json"
        file.write_bytes(b"\n".join(orjson.dumps(row) for row in numbered(numbers)))
        os.utime(file, (START_US / 1e6 + count, START_US / 1e6 + count))
        file.rename(self.input / file.name)

    def embedded(self, computation: Computation | None = None, **options: Any) -> ForeachBatch:
        return foreach_batch(
            self.store,
            computation or Ledger(),
            key="k",
            at="t",
            sink=DeltaSink(str(self.sink)),
            spark=self._spark,
            intervals=1,
            progress=False,
            **{"name": LEDGER, **options},
        )

    def start(self, function: ForeachBatch) -> StreamingQuery:
        frame = self._spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(self.input))
        return (
            frame.writeStream.foreachBatch(function)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
            .start()
        )

    def run(self, **options: Any) -> None:
        """Run one process: consume everything and end."""
        function = self.embedded(**options)
        try:
            self.start(function).awaitTermination()
        finally:
            function.close()

    def assert_written(self, *numbers: int) -> None:
        assert ledger_of(self.store) == written(numbered(numbers))
        values = DeltaTable(self.sink).to_pyarrow_table().column("value").to_pylist()
        assert sorted(orjson.loads(value)["n"] for value in values) == sorted(numbers)


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Iterator[Job]:
    made = Job(spark, tmp_path)
    yield made
    made.store.close()


def test_restarted_query_continues_from_its_checkpoint(job: Job) -> None:
    """Each batch is one superstep."""
    job.bring(0, 1, 2)
    job.bring(5, 6)
    job.run()
    job.bring(10, 11)
    job.run()

    job.assert_written(0, 1, 2, 5, 6, 10, 11)


def test_backfill_is_processed_once_before_the_first_batch(job: Job) -> None:
    job.bring(10, 11)
    job.run(backfill=numbered((0, 1, 2)))
    job.bring(12)
    job.run(backfill=numbered((0, 1, 2)))

    job.assert_written(0, 1, 2, 10, 11, 12)


def test_each_version_has_the_offsets_of_its_batch(job: Job) -> None:
    """The query's checkpoint has them too, but may get lost."""
    job.bring(0, 1)
    job.bring(5, 6)
    job.run()
    noted = {int(file.name): file.read_text() for file in (job.checkpoint / "offsets").glob("[0-9]*")}
    newest = job.store.snapshot().version
    told = [[*job.store.snapshot(version).source_offsets.values()] for version in range(newest + 1)]

    assert len(noted) == 2
    assert [noted[0]] in told
    assert told[-1] == [noted[1]]


def test_repeated_batch_counts_once(job: Job) -> None:
    """Spark repeats a batch if it was killed between the commits of store and checkpoint."""
    job.bring(0, 1)
    job.bring(5, 6)
    job.run()
    version = job.store.snapshot().version
    for file in (job.checkpoint / "commits").glob("*1*"):
        file.unlink()
    job.run()

    job.assert_written(0, 1, 5, 6)
    assert job.store.snapshot().version == version + 1, "the fence of the second life, and nothing else"


def test_rewound_checkpoint_is_refused(job: Job) -> None:
    job.bring(0)
    job.run()
    shutil.copytree(job.checkpoint, job.checkpoint.with_name("older"))
    for number in (5, 10):
        job.bring(number)
        job.run()
    shutil.rmtree(job.checkpoint)
    shutil.copytree(job.checkpoint.with_name("older"), job.checkpoint)

    with pytest.raises(
        Exception, match=r"(?s)InvalidError: the checkpoint was rewound.*belongs to this store"
    ):
        job.run()
    job.assert_written(0, 5, 10)


def test_unknown_checkpoint_is_refused_unless_accepted(job: Job) -> None:
    job.bring(0)
    job.run()
    job.checkpoint = job.checkpoint.with_name("another")
    job.bring(5)

    with pytest.raises(Exception, match=r"(?s)InvalidError: this store has consumed .* another checkpoint"):
        job.run()
    job.assert_written(0)
    # The new checkpoint starts at the beginning, and without ids its records count again.
    job.run(accept_checkpoint=True)
    assert ledger_of(job.store) == {"k0": [0, 0, 5]}


def test_new_store_refuses_an_old_checkpoint(job: Job, spark: SparkSession, tmp_path: Path) -> None:
    """The records of the earlier batches would be missing."""
    job.bring(0)
    job.run()
    other = tmp_path / "other"
    other.mkdir()
    fresh = Job(spark, other)
    fresh.input, fresh.checkpoint = job.input, job.checkpoint
    job.bring(5)

    with pytest.raises(Exception, match=r"(?s)InvalidError: the checkpoint has handed out batches"):
        fresh.run()
    assert ledger_of(fresh.store) == {}
    fresh.store.close()


def test_renamed_computation_continues_with_renamed_from(job: Job) -> None:
    """The second rename must name the pipeline under which the query first started."""
    job.bring(0, 1)
    job.run()
    job.bring(5)
    with pytest.raises(Exception, match=r"(?s)InvalidError: another pipeline of this store.*`ledger`"):
        job.run(computation=Book("book"), name="book")

    job.run(computation=Book("book"), name="book", renamed_from=LEDGER)
    job.bring(10)
    with pytest.raises(Exception, match=r"(?s)InvalidError: the store has rows of a computation .*`book`"):
        job.run()
    job.run(computation=Book("tome"), name="tome", renamed_from="book", pipeline=LEDGER)

    kept = job.store.rows_view("tome").to_arrow()
    assert dict(zip(kept["key"].to_pylist(), kept["state"].to_pylist(), strict=True)) == {
        "k0": "[0,5,10]",
        "k1": "[1]",
    }
    assert DeltaTable(job.sink).to_pyarrow_table().num_rows == 4


def test_call_outside_of_a_streaming_query_is_refused(job: Job, spark: SparkSession) -> None:
    """Without a checkpoint a repeated batch could not be recognised."""
    function = job.embedded()
    frame = spark.createDataFrame([("a", 1, "1", 1)], SCHEMA)

    with pytest.raises(InvalidError, match="runs only as the foreachBatch of a streaming query"):
        function(frame, 0)
    function.close()

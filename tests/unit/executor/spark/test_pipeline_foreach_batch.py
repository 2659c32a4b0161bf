"""A whole pipeline in the user's own streaming queries: windows, two computations, two inputs, each in a query of its own."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson
import pytest
from deltalake import DeltaTable

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.runner import LocalRunner
from millpond.executor.sinks.sink import DeltaSink
from millpond.executor.spark.foreach_batch import ForeachBatch
from millpond.executor.time.watermark_policies import BoundedDisorder
from millpond.executor.windows.combiners import Sum
from millpond.executor.windows.composite_triggers import AfterEach
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.time_triggers import WatermarkPercentile
from millpond.executor.windows.window_fns import FixedWindows
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = pytest.mark.spark

START_US: Final = 1_800_000_000_000_000
SECOND_US: Final = 1_000_000
CLOCK: Final = SystemClock()
SCHEMA: Final = "k string, us long, id string, amount long"


class Balance(Computation):
    """Payments less orders, of each customer.

    Args:
        poison: the amount at which the code fails.
    """

    def __init__(self, poison: int | None = None) -> None:
        self.poison = poison

    def process_record(self, context: Context, record: Record) -> None:
        amount = record.value["amount"]
        if amount == self.poison:
            raise ValueError("poison")
        context.state.set(context.state.get(0) + (amount if record.stream == "payments" else -amount))
        if record.stream == "payments":
            context.produce("changes", {"amount": amount})


def _pipeline(folder: Path, *, poison: int | None = None, **payments: Any) -> Pipeline:
    """Options are those of the payments."""
    pipeline = Pipeline("shop")
    pipeline.inject("payments", key="k", at="t", id="id", **payments)
    pipeline.inject("orders", key="k", at="t", id="id", watermark=BoundedDisorder("10s"))
    balance = Balance(poison)
    made = pipeline.add(
        balance,
        name="balance",
        subscribes={"payments": None, "orders": None},
        produces=["changes"],
        productions="weak",
        on_error="stop" if poison else "dead_letter",
        retries=0,
    )
    tiers = AfterEach(WatermarkPercentile(90), WatermarkPercentile(100))
    minutes = made["changes"].window(FixedWindows("1m"), trigger=tiers).combine(Sum("amount"), name="minutes")
    minutes.sink("minutes", DeltaSink(str(folder / "minutes")))
    return pipeline


def _rows(prefix: str, seconds: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {
            "k": f"k{second % 3}",
            "us": START_US + second * SECOND_US,
            "id": f"{prefix}{second}",
            "amount": second + 1,
        }
        for second in seconds
    ]


def _states(store: Store) -> dict[str, int]:
    rows = store.rows_view("balance").to_arrow().to_pylist()
    return {row["key"]: int(row["state"]) for row in rows}


def _shown(folder: Path) -> Counter[tuple[str, str]]:
    """What each window has shown in all its panes together."""
    total: Counter[tuple[str, str]] = Counter()
    if not (folder / "minutes").exists():
        return total
    for row in DeltaTable(folder / "minutes").to_pyarrow_table().to_pylist():
        pane = orjson.loads(row["value"])
        total[row["key"], str(pane["window"])] += pane["value"]
    return total


class Shop:
    """Two streams of files, each read by a query of its own, and a store."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        registry = MemoryRegistry()
        self._spark = spark
        self.folder = folder
        self.brought: dict[str, list[dict[str, Any]]] = {"payments": [], "orders": []}
        self.store = Store.open(
            folder / "pond", leases=lambda _, writer_id: MemoryLeases(registry, CLOCK, writer_id=writer_id)
        )
        for stream in self.brought:
            (folder / stream).mkdir()

    def bring(self, stream: str, *seconds: int) -> None:
        """One more file of a stream, with a row at each of these seconds; a second younger than the one before, as Spark
        takes them in that order.
        """
        rows = _rows(stream, seconds)
        number = len(list((self.folder / stream).iterdir()))
        lines = b"\n".join(map(orjson.dumps, rows))
        file = self.folder / f"{stream}-{number:04d}.json"
        file.write_bytes(lines)
        os.utime(file, (START_US / 1e6 + number, START_US / 1e6 + number))
        file.rename(self.folder / stream / file.name)
        self.brought[stream] += rows

    def frame(self, stream: str) -> DataFrame:
        read = self._spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
        return read.json(str(self.folder / stream)).selectExpr(
            "k", "timestamp_micros(us) AS t", "id", "amount"
        )

    def function(self, pipeline: Pipeline, stream: str) -> ForeachBatch:
        options = {"spark": self._spark, "intervals": 2, "progress": False}
        return pipeline.foreach_batch(self.store, into=stream, **options)

    def start(self, pipeline: Pipeline, stream: str, **trigger: Any) -> StreamingQuery:
        frame = self.frame(stream)
        if stream == "payments":
            frame = frame.withWatermark("t", "30 seconds")
        return (
            frame.writeStream.foreachBatch(self.function(pipeline, stream))
            .option("checkpointLocation", str(self.folder / "checkpoints" / stream))
            .trigger(**(trigger or {"availableNow": True}))
            .start()
        )

    def run(self, pipeline: Pipeline, *streams: str) -> None:
        """A life of the job: both queries at once consume what there is."""
        with self.function(pipeline, "orders"):
            queries = [self.start(pipeline, stream) for stream in streams or self.brought]
            for query in queries:
                query.awaitTermination()

    def assert_as_locally(self) -> None:
        """States and windows are those of the local runner on the same rows."""
        local = self.folder / "local"
        rows = {
            stream: [{**row, "t": row["us"]} for row in brought] for stream, brought in self.brought.items()
        }
        pipeline = _pipeline(local, watermark=BoundedDisorder("30s"))
        LocalRunner(local / "pond", progress=False).run(pipeline, rows, finish=False)
        with Store.open(local / "pond", read_only=True) as store:
            assert _states(self.store) == _states(store)
        assert _shown(self.folder) == _shown(local)
        assert _shown(local), "some windows are over"


@pytest.fixture
def shop(spark: SparkSession, tmp_path: Path) -> Iterator[Shop]:
    made = Shop(spark, tmp_path)
    yield made
    made.store.close()


def test_two_queries_feed_a_pipeline_with_windows(shop: Shop) -> None:
    """Over two lives with ``availableNow`` state and panes are those of the local runner; all due work is done at the end."""
    shop.bring("payments", *range(0, 80, 3))
    shop.bring("payments", *range(1, 120, 3))
    shop.bring("orders", *range(0, 100, 2))
    shop.run(_pipeline(shop.folder))
    shop.bring("payments", *range(120, 260, 5))
    shop.bring("orders", *range(100, 300, 7))
    shop.run(_pipeline(shop.folder))

    shop.assert_as_locally()


def test_the_delay_of_each_frame_is_taken_whenever_its_query_begins(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """The second query's first batch says its watermark, though the run has been open since the other's; until then its
    stream keeps event time where it was.
    """
    caplog.set_level(logging.INFO, "millpond")
    shop.bring("orders", 100)
    shop.bring("payments", 100)
    pipeline = _pipeline(shop.folder)
    orders = shop.start(pipeline, "orders")
    orders.awaitTermination()
    run = shop.function(pipeline, "orders").run
    assert run.watermark("balance") < START_US
    assert "others=`['payments']`" in caplog.text

    shop.start(pipeline, "payments").awaitTermination()
    with shop.function(pipeline, "payments"):
        assert run.is_active
        assert run.watermark("balance") == START_US + 70 * SECOND_US
    assert "watermark from withWatermark stream=`payments` delay=`30s`" in caplog.text


def test_a_declared_watermark_goes_before_that_of_the_frame(shop: Shop) -> None:
    """What the pipeline says of its stream is what its author means."""
    shop.bring("orders", 100)
    shop.bring("payments", 100)
    pipeline = _pipeline(shop.folder, watermark=BoundedDisorder("5s"))
    for stream in shop.brought:
        shop.start(pipeline, stream).awaitTermination()
    with shop.function(pipeline, "payments") as function:
        assert function.run.watermark("balance") == START_US + 90 * SECOND_US


def test_a_batch_that_spark_brings_again_is_skipped(shop: Shop) -> None:
    """Killed before it noted the batch in its checkpoint, Spark repeats it under the same number, and nothing counts twice."""
    shop.bring("payments", 1, 2, 3)
    shop.bring("orders", 1, 2)
    shop.run(_pipeline(shop.folder))
    for file in shop.folder.glob("checkpoints/*/commits/*0*"):
        file.unlink()
    shop.bring("payments", 200)
    shop.bring("orders", 200)
    shop.run(_pipeline(shop.folder))

    shop.assert_as_locally()


def test_a_query_may_be_stopped_and_started_while_another_goes_on(shop: Shop) -> None:
    """In one process, with the same function: the run stays what it is."""
    pipeline = _pipeline(shop.folder)
    shop.bring("payments", 1, 2, 3)
    shop.bring("orders", 1)
    queries = {stream: shop.start(pipeline, stream, processingTime="0 seconds") for stream in shop.brought}
    try:
        for query in queries.values():
            query.processAllAvailable()
        run = shop.function(pipeline, "orders").run
        queries["payments"].stop()
        shop.bring("payments", 50, 140)
        shop.bring("orders", 130)
        queries["orders"].processAllAvailable()
        queries["payments"] = shop.start(pipeline, "payments", processingTime="0 seconds")
        for query in queries.values():
            query.processAllAvailable()
        assert shop.function(pipeline, "orders").run is run
    finally:
        for query in queries.values():
            query.stop()
        shop.function(pipeline, "orders").close()

    shop.assert_as_locally()


def test_a_failure_is_that_of_all_queries_and_a_new_start_goes_on(shop: Shop) -> None:
    """What stops the run by one stream's record is the error of the other stream's next batch; mended, both go on."""
    broken = _pipeline(shop.folder, poison=8)
    shop.bring("payments", 1)
    shop.bring("orders", 1)
    orders = shop.start(broken, "orders", processingTime="0 seconds")
    orders.processAllAvailable()
    shop.bring("payments", 7)
    with pytest.raises(Exception, match="poison"):
        shop.start(broken, "payments").awaitTermination()
    assert orders.isActive
    shop.bring("orders", 5)
    with pytest.raises(Exception, match="poison"):
        orders.processAllAvailable()
    shop.bring("payments", 130)
    shop.bring("orders", 140)
    shop.run(_pipeline(shop.folder))

    shop.assert_as_locally()


def test_a_query_that_ends_by_itself_waits_for_no_slower_stream(shop: Shop) -> None:
    """A stream far ahead of another, which will bring nothing, is consumed to its end in spite of its ``skew_limit``."""
    shop.bring("payments", 1, 2)
    shop.bring("payments", 1_000)
    shop.bring("payments", 2_000)
    pipeline = _pipeline(shop.folder, skew_limit="10s")
    shop.run(pipeline, "payments")

    assert _states(shop.store) == {"k1": 1_003, "k2": 2_004}


def test_a_query_that_waits_for_a_slower_stream_can_be_stopped(shop: Shop) -> None:
    """It ends at once, the run does not, and the batch comes again."""
    pipeline = _pipeline(shop.folder, skew_limit="10s")
    shop.bring("orders", 1)
    shop.start(pipeline, "orders").awaitTermination()
    shop.bring("payments", 1_000)
    payments = shop.start(pipeline, "payments", processingTime="0 seconds")
    payments.processAllAvailable()
    shop.bring("payments", 2_000)
    _await(payments, lambda: payments.status["message"] == "Processing new data")
    with shop.function(pipeline, "orders") as function:
        run = function.run
        payments.stop()
        assert run.is_active
        assert function.run is run
    assert "k2" not in _states(shop.store)


class Slow(Computation):
    """Code that is at work on its first record until it may end.

    Args:
        folder: where it says that it works, and is told to go on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def process_record(self, context: Context, record: Record) -> None:
        (self.folder / "begun").touch()
        for _ in range(1_200):
            if (self.folder / "go").exists():
                break
            threading.Event().wait(0.05)
        context.state.set([*context.state.get([]), record.value["amount"]])


def test_a_query_that_is_stopped_in_a_batch_ends_no_other(shop: Shop) -> None:
    """Spark cancels what is under way, and the run with it; the other query opens it again, and the stopped one goes on
    with its batch when it is started again.
    """
    pipeline = Pipeline("slow")
    for stream in shop.brought:
        pipeline.inject(stream, key="k", at="t", id="id").apply(Slow(shop.folder), name=f"of_{stream}")
    shop.bring("payments", 1)
    payments = shop.start(pipeline, "payments", processingTime="0 seconds")
    orders = shop.start(pipeline, "orders", processingTime="0 seconds")
    _await(payments, (shop.folder / "begun").exists)
    payments.stop()
    (shop.folder / "go").touch()
    shop.bring("orders", 4)
    orders.processAllAvailable()
    shop.start(pipeline, "payments").awaitTermination()
    orders.stop()
    shop.function(pipeline, "orders").close()

    states = {stream: shop.store.rows_view(f"of_{stream}").to_arrow().to_pylist() for stream in shop.brought}
    assert [row["state"] for row in states["payments"]] == ["[2]"]
    assert [row["state"] for row in states["orders"]] == ["[5]"]


def _await(query: StreamingQuery, is_so: Callable[[], bool]) -> None:
    """Wait for something while a query runs."""
    for _ in range(600):
        if is_so():
            return
        assert not query.awaitTermination(0.1)
    raise AssertionError("it does not come")


def test_a_frame_without_a_column_of_its_stream_is_refused(shop: Shop, spark: SparkSession) -> None:
    """At its first batch, with the column's name, though the run was opened by another stream."""
    pipeline = _pipeline(shop.folder)
    shop.bring("orders", 1)
    shop.bring("payments", 1)
    shop.start(pipeline, "orders").awaitTermination()
    frame = shop.frame("payments").drop("id")
    query = (
        frame.writeStream.foreachBatch(shop.function(pipeline, "payments"))
        .option("checkpointLocation", str(shop.folder / "checkpoints" / "other"))
        .start()
    )
    with pytest.raises(Exception, match=r"(?s)InvalidError.*`id`"):
        query.processAllAvailable()
    query.stop()
    shop.function(pipeline, "orders").close()

"""A whole pipeline in the user's own streaming queries."""

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
    """A customer's payments less the orders; the amount ``poison`` fails."""

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
    """Make the pipeline; options apply to the payments."""
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
    """Return the values of each window over all its panes."""
    total: Counter[tuple[str, str]] = Counter()
    if not (folder / "minutes").exists():
        return total
    for row in DeltaTable(folder / "minutes").to_pyarrow_table().to_pylist():
        pane = orjson.loads(row["value"])
        total[row["key"], str(pane["window"])] += pane["value"]
    return total


class Shop:
    """Two streams of files, each with its own query, and a store."""

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
        """Add a file with rows at the seconds, dated a second after the last, because Spark reads files in
        the order of their times.
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
        """Run one process in which both queries consume everything."""
        with self.function(pipeline, "orders"):
            queries = [self.start(pipeline, stream) for stream in streams or self.brought]
            for query in queries:
                query.awaitTermination()

    def assert_as_locally(self) -> None:
        """Compare states and windows with the local runner's on the same rows."""
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


def test_two_queries_give_the_states_and_panes_of_the_local_runner(shop: Shop) -> None:
    """Two processes run with ``availableNow``, and each does all due work at its end."""
    shop.bring("payments", *range(0, 80, 3))
    shop.bring("payments", *range(1, 120, 3))
    shop.bring("orders", *range(0, 100, 2))
    shop.run(_pipeline(shop.folder))
    shop.bring("payments", *range(120, 260, 5))
    shop.bring("orders", *range(100, 300, 7))
    shop.run(_pipeline(shop.folder))

    shop.assert_as_locally()


def test_frame_watermark_counts_from_the_first_batch_of_its_query(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """The run is already open for the other stream; until then the stream holds event time."""
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


def test_declared_watermark_overrides_the_frames(shop: Shop) -> None:
    shop.bring("orders", 100)
    shop.bring("payments", 100)
    pipeline = _pipeline(shop.folder, watermark=BoundedDisorder("5s"))
    for stream in shop.brought:
        shop.start(pipeline, stream).awaitTermination()
    with shop.function(pipeline, "payments") as function:
        assert function.run.watermark("balance") == START_US + 90 * SECOND_US


def test_repeated_batch_is_skipped(shop: Shop) -> None:
    """Spark repeats a batch that its checkpoint lacks, with the same number."""
    shop.bring("payments", 1, 2, 3)
    shop.bring("orders", 1, 2)
    shop.run(_pipeline(shop.folder))
    for file in shop.folder.glob("checkpoints/*/commits/*0*"):
        file.unlink()
    shop.bring("payments", 200)
    shop.bring("orders", 200)
    shop.run(_pipeline(shop.folder))

    shop.assert_as_locally()


def test_query_can_be_restarted_while_another_runs(shop: Shop) -> None:
    """The same function feeds the same run."""
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


def test_failure_reaches_all_queries_and_corrected_code_continues(shop: Shop) -> None:
    """The other stream's query fails at its next batch."""
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


def test_available_now_query_ignores_skew_limit(shop: Shop) -> None:
    """The other stream has no more rows, so waiting for it would never end."""
    shop.bring("payments", 1, 2)
    shop.bring("payments", 1_000)
    shop.bring("payments", 2_000)
    pipeline = _pipeline(shop.folder, skew_limit="10s")
    shop.run(pipeline, "payments")

    assert _states(shop.store) == {"k1": 1_003, "k2": 2_004}


def test_query_waiting_for_its_skew_limit_can_be_stopped(shop: Shop) -> None:
    """The run continues, and Spark repeats the batch."""
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
    """Code that signals its start by a file in ``folder``, and works until there is another file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def process_record(self, context: Context, record: Record) -> None:
        (self.folder / "begun").touch()
        for _ in range(1_200):
            if (self.folder / "go").exists():
                break
            threading.Event().wait(0.05)
        context.state.set([*context.state.get([]), record.value["amount"]])


def test_query_stopped_in_a_batch_does_not_end_the_other(shop: Shop) -> None:
    """Spark cancels the run's job; the other query opens the run again, and the stopped one repeats its
    batch.
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
    """Wait for a condition while the query runs."""
    for _ in range(600):
        if is_so():
            return
        assert not query.awaitTermination(0.1)
    raise AssertionError("it does not come")


def test_frame_without_a_declared_column_is_refused_at_its_first_batch(
    shop: Shop, spark: SparkSession
) -> None:
    """The other stream has opened the run before."""
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

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812

import millpond as mp

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_RECORD = {
    "type": "record",
    "name": "R",
    "fields": [{"name": "k", "type": "string"}, {"name": "t", "type": "long"}],
}


class Tally(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set(context.state.get(0) + 1)


def _frame(spark: SparkSession, *payloads: bytes) -> Any:
    return spark.createDataFrame([(bytearray(one),) for one in payloads], "value binary").coalesce(1)


def _letters(folder: Path) -> list[dict[str, Any]]:
    with mp.Store.open(folder, read_only=True) as store:
        return [
            orjson.loads(state) for state in store.rows_view(mp.DEAD_LETTERS).to_arrow()["state"].to_pylist()
        ]


def test_nulls_of_permissive_from_json_become_dead_letters(spark: SparkSession, tmp_path: Path) -> None:
    """The letter keeps the payload, so a declared payload can still give the reason."""
    fields = F.from_json(F.col("value").cast("string"), "k string, t bigint", {"mode": "PERMISSIVE"})
    raw = _frame(spark, b'{"k":"a","t":1}', b'{"k":', b'{"k":"a","t":2}')
    frame = raw.select(fields.alias("made"), "value").select("made.*", "value")
    pipeline = mp.Pipeline("p")
    pipeline.inject("in", key="k", at="t", at_unit="us").apply(Tally(), name="tally")

    summary = mp.SparkRunner(tmp_path / "pond", spark=spark, progress=False).run(pipeline, {"in": frame})

    assert (summary.run.records, summary.run.dead_letters) == (2, 1)
    (letter,) = _letters(tmp_path / "pond")
    assert letter["error"] == "the key is null"
    payload = mp.letter_value(letter)["value"]
    with pytest.raises(mp.InvalidError, match="does not fit its schema schema=`R` reason=`it is not JSON"):
        mp.JsonPayload({"title": "R"}).decode(payload)


def test_unavailable_schema_registry_ends_the_run(spark: SparkSession, tmp_path: Path) -> None:
    """The next run processes the records; dead letters would lose them."""
    here = tmp_path / "here"

    def schema(number: int) -> Any:
        if not here.exists():
            raise ConnectionError("no route")
        return _RECORD if number == 1 else None

    pipeline = mp.Pipeline("p")
    payload = mp.AvroPayload(_RECORD, framing="confluent", schemas=schema)
    pipeline.inject("in", key="k", at="t", at_unit="us", payload=payload).apply(Tally(), name="tally")
    frame = _frame(spark, b"\x00\x00\x00\x00\x01\x02a\x02", b"\x00\x00\x00\x00\x02\x02a\x02")
    runner = mp.SparkRunner(tmp_path / "pond", spark=spark, progress=False)

    with pytest.raises((PySparkException, mp.UnavailableError), match="a schema could not be looked up"):
        runner.run(pipeline, {"in": frame})
    here.touch()
    summary = runner.run(pipeline, {"in": frame})

    assert (summary.run.records, summary.run.dead_letters) == (1, 1)
    assert [letter["error"] for letter in _letters(tmp_path / "pond")] == [
        "the payload names an unknown schema schema_id=`2`"
    ]


def test_streaming_query_decodes_payloads_across_restarts(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    payload = mp.JsonPayload({"type": "object", "required": ["k"]})

    def run() -> mp.RunSummary:
        pipeline = mp.Pipeline("p")
        pipeline.inject("in", key="k", at="t", at_unit="us", payload=payload).apply(Tally(), name="tally")
        stream = spark.readStream.schema("value binary").parquet(str(folder))
        return mp.SparkRunner(tmp_path / "pond", spark=spark, progress=False).run(
            pipeline, {"in": stream}, finish=False
        )

    _frame(spark, b'{"k":"a","t":1}', b'{"t":1}').write.parquet(str(folder))
    first = run()
    _frame(spark, b'{"k":"a","t":2}').write.mode("append").parquet(str(folder))
    second = run()

    assert [(one.run.records, one.run.dead_letters) for one in (first, second)] == [(1, 1), (1, 0)]
    with mp.Store.open(tmp_path / "pond", read_only=True) as store:
        assert store.rows_view("tally").to_arrow()["state"].to_pylist() == ["2"]


def test_embedded_computation_decodes_payloads(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    _frame(spark, b'{"k":"a","t":1}', b'{"t":1}').write.parquet(str(folder))
    payload = mp.JsonPayload({"type": "object", "required": ["k"]})
    function = mp.foreach_batch(
        tmp_path / "pond",
        Tally(),
        name="tally",
        key="k",
        at="t",
        at_unit="us",
        payload=payload,
        progress=False,
    )
    stream = spark.readStream.schema("value binary").parquet(str(folder))

    query = (
        stream.writeStream.foreachBatch(function)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    function.close()

    with mp.Store.open(tmp_path / "pond", read_only=True) as store:
        assert store.rows_view("tally").to_arrow()["state"].to_pylist() == ["1"]
    assert len(_letters(tmp_path / "pond")) == 1


@pytest.mark.parametrize(("at", "watermark"), [("__row_timestamp", 7_000_000), ("timestamp", 9_000_000)])
def test_frame_watermark_applies_to_the_row_column_only(
    spark: SparkSession, tmp_path: Path, at: str, watermark: int
) -> None:
    """A field of the payload may have the same name."""
    folder = str(tmp_path / "in")
    given = _frame(spark, b'{"k":"a","timestamp":9000000}')
    given.withColumn("timestamp", F.timestamp_seconds(F.lit(9))).write.parquet(folder)
    stream = spark.readStream.schema("value binary, timestamp timestamp").parquet(folder)
    pipeline = mp.Pipeline("p")
    payload = mp.JsonPayload({"type": "object"})
    pipeline.inject("in", key="k", at=at, at_unit="us", payload=payload).apply(Tally(), name="tally")

    summary = mp.SparkRunner(tmp_path / "pond", spark=spark, progress=False).run(
        pipeline, {"in": stream.withWatermark("timestamp", "2 seconds")}, finish=False
    )

    assert summary.watermark == watermark

"""Input columns with the engine's names: they are refused, and no input bytes are unpickled."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.inputs.changes import flat_rows
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.spark.routed import pop_productions
from millpond.executor.spark.routing import Router
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.spark.task_plan import PRODUCTIONS, TARGET, Route
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.fault

NAMES = ("__millpond_productions", "__MILLPOND_Productions", "__millpond_target", "__millpond_slot")


class Owned:
    """A class whose pickle makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


class Count(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.state.set(1)


def pipeline(key: Any = "k") -> EnginePipeline:
    graph = EnginePipeline("p")
    graph.inject("s", key=key, at="t").apply(Count(), name="c")
    return graph


def store(folder: Path) -> Store:
    registry = MemoryRegistry()
    return Store.open(
        folder / "pond",
        leases=lambda _, writer_id: MemoryLeases(registry, SystemClock(), writer_id=writer_id),
    )


def hostile(folder: Path, name: str = PRODUCTIONS) -> pa.Table:
    """Return rows marked as the error of a routing task, with a pickle."""
    code = b"\xff" * 8 + pickle.dumps(Owned(folder / "owned"))
    return pa.table({"k": ["a", "b"], "t": [0, 1], name: pa.array([code, None])})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["table", "mappings", "run"])
def test_local_input_with_reserved_name_is_refused(tmp_path: Path, name: str, how: str) -> None:
    rows: Any = hostile(tmp_path, name)
    given = rows.to_pylist() if how == "mappings" else rows
    refused = pytest.raises(InvalidError, match=f"reserved for Millpond's own columns.*column=`{name}`")
    with store(tmp_path) as opened:
        if how == "run":
            with refused:
                LocalRunner(opened).run(pipeline(), {"s": given})
        else:
            with LocalRunner(opened).start(pipeline(), stepping=True) as run, refused:
                run.inject("s", given)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["__change_sign", "__change_error", "__change__commit_version"])
@pytest.mark.parametrize("is_image", [False, True])
def test_change_with_reserved_field_is_refused(name: str, is_image: bool) -> None:
    row = {"k": "a", name: 7}
    change: dict[str, Any] = {"op": "c", "before": None, "after": row} if is_image else {"op": "+I", **row}
    for rows in ([change], pa.Table.from_pylist([change])):
        with pytest.raises(InvalidError, match=f"begin with __change_ are reserved.*column=`{name}`"):
            flat_rows("op", rows)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["k", lambda row: row["k"]], ids=["column", "function"])
def test_file_with_reserved_name_is_refused_on_spark(
    spark: SparkSession, tmp_path: Path, name: str, key: Any
) -> None:
    """Whoever made the file chose the names of its columns."""
    (tmp_path / "input").mkdir()
    pq.write_table(hostile(tmp_path, name), tmp_path / "input" / "1.parquet")
    frame = spark.read.parquet(str(tmp_path / "input"))
    with (
        store(tmp_path) as opened,
        pytest.raises(InvalidError, match="reserved for Millpond's own columns"),
    ):
        SparkRunner(opened, spark=spark).run(pipeline(key), {"s": frame})
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("key", ["k", lambda row: row["k"]], ids=["column", "function"])
def test_later_batch_with_reserved_name_brings_no_such_column(
    spark: SparkSession, tmp_path: Path, key: Any
) -> None:
    """A router computes the columns of an input once, from its first batch."""
    router, routes = Router(pipeline(key).check().injectors["s"]), (Route(positions=(0,), lows=("",)),)
    router.route(spark.createDataFrame([("a", 0)], "k string, t long"), routes)

    with suppress(InvalidError):
        routed = router.route(spark.createDataFrame(hostile(tmp_path)), routes)
        assert PRODUCTIONS not in routed.frame.columns


def test_error_of_a_routing_task_is_no_pickle(tmp_path: Path) -> None:
    """Even bytes in the place of another task's error are only read as JSON."""
    column = hostile(tmp_path).column(PRODUCTIONS).combine_chunks()
    batch = pa.RecordBatch.from_arrays([pa.array([0, 0], pa.int32()), column], names=[TARGET, PRODUCTIONS])
    with pytest.raises(ValueError, match=r"utf-8|JSON|Expecting"):
        pop_productions([batch])
    assert not (tmp_path / "owned").exists()

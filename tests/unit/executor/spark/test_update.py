"""Updates of a Spark run while its streaming query continues."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.spark.run import SparkRun
from millpond.executor.spark.runner import SparkRunner
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.servers.zookeeper import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

CLOCK = SystemClock()
FILES = 12


class Add(Computation):
    """Counts of the numbers ``by`` that were added."""

    def __init__(self, by: int) -> None:
        self.by = by

    def process_record(self, context: Any, record: Any) -> None:
        seen = context.state.get({})
        context.state.set({**seen, str(self.by): seen.get(str(self.by), 0) + 1})


def pipeline(by: int = 1, *names: str, streams: tuple[str, ...] = ("s",)) -> EnginePipeline:
    """Make computations that read one stream, and another for each further stream."""
    gone = {"of_more"} - {f"of_{stream}" for stream in streams}
    made = EnginePipeline("p", retire=sorted(gone))
    for stream in streams:
        made.inject(stream, key="k", at="t")
        if stream != "s":
            made.stream(stream).apply(Add(1), name=f"of_{stream}")
    for name in ("first", *names):
        made.add(Add(by), name=name, subscribes={"s": None})
    return made


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    registry = MemoryRegistry()
    with Store.open(
        tmp_path / "pond", leases=lambda _, writer_id: MemoryLeases(registry, CLOCK, writer_id=writer_id)
    ) as opened:
        yield opened


def stream(spark: SparkSession, folder: Path) -> DataFrame:
    """Stream a folder's files, one a batch."""
    folder.mkdir()
    return spark.readStream.schema("k string, t long").option("maxFilesPerTrigger", 1).json(str(folder))


def bring(folder: Path, number: int) -> None:
    file = folder.parent / f"{folder.name}{number}.json"
    file.write_text(json.dumps({"k": "k", "t": number}))
    file.rename(folder / file.name)


def counts(store: Store, computation: str) -> dict[str, int]:
    store.committer.refresh()
    rows = store.rows_view(computation).to_arrow().to_pylist()
    return {} if not rows else json.loads(rows[0]["state"])


def records(run: SparkRun) -> int:
    return run.summary().totals.injected


def test_streaming_query_continues_through_updates(store: Store, spark: SparkSession, tmp_path: Path) -> None:
    """Each record counts once, by the code that ran when it arrived."""
    runner = SparkRunner(store, spark=spark, intervals=1, progress=False, tick="50ms")
    folder = tmp_path / "s"
    with runner.start(pipeline(1), {"s": stream(spark, folder)}) as run:
        query = run.queries[0].id
        for number in range(FILES):
            bring(folder, number)
            if number in (3, 6, 9):
                assert run.update(pipeline(number, "other")).change
        assert wait_until(lambda: records(run) == FILES, CLOCK)
        run.update(pipeline(100, "other"))
        bring(folder, FILES)
        assert wait_until(lambda: records(run) == FILES + 1, CLOCK)
        assert [one.id for one in run.queries] == [query]

    first = counts(store, "first")
    assert sum(first.values()) == FILES + 1
    assert first["100"] == 1
    assert counts(store, "other")["100"] == 1


def test_query_of_a_removed_stream_is_stopped_alone(
    store: Store, spark: SparkSession, tmp_path: Path
) -> None:
    """Its consumed records stay, and later injections are refused."""
    runner = SparkRunner(store, spark=spark, intervals=1, progress=False, tick="50ms")
    inputs = {name: stream(spark, tmp_path / name) for name in ("s", "more")}
    with runner.start(pipeline(1, streams=("s", "more")), inputs) as run:
        for name in inputs:
            bring(tmp_path / name, 1)
        assert wait_until(lambda: records(run) == len(inputs), CLOCK)

        run.update(pipeline(2))

        assert run.is_active
        assert len(run.queries) == 1
        with pytest.raises(InvalidError, match="no injector feeds this stream"):
            run.inject_durably("more", [{"k": "k", "t": 2}])
        bring(tmp_path / "s", 2)
        assert wait_until(lambda: records(run) == len(inputs) + 1, CLOCK)

    assert (counts(store, "first"), counts(store, "of_more")) == ({"1": 1, "2": 1}, {"1": 1})

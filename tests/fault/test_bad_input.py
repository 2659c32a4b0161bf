"""Bad input of every kind: a dead letter or a clear error, with nothing lost or half written."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.run.run import RunSummary
from millpond.executor.sinks.sink import DeltaSink
from millpond.executor.spark.runner import SparkRunner
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.processes.ledger import (
    LEDGER,
    ROWS,
    START_US,
    Ledger,
    ledger_of,
    ledger_pipeline,
    numbered,
    written,
)
from tests.processes.failing_code import FAILURES, Fragile

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.fault

CLOCK = SystemClock()
GOOD = numbered([0, 5, 10, 15, 1, 6, 2])
BAD_AT = START_US + 7_500_000
YEAR_12000 = 316_516_147_200_000_000

UNREADABLE: dict[str, tuple[Any, str]] = {
    "null key": ({"k": None, "t": BAD_AT, "id": "x", "n": 99}, "key.* null"),
    "no key": ({"t": BAD_AT, "id": "x", "n": 99}, "no such field"),
    "key that is a list": ({"k": [7], "t": BAD_AT, "id": "x", "n": 99}, "key has no values of this type"),
    "key that is no UTF-8": ({"k": "\ud800", "t": BAD_AT, "id": "x", "n": 99}, "UTF-8"),
    "null time": ({"k": "k0", "t": None, "id": "x", "n": 99}, "time is null"),
    "unreadable time": ({"k": "k0", "t": "yesterday", "id": "x", "n": 99}, "not ISO 8601 text"),
    "time out of range": ({"k": "k0", "t": YEAR_12000, "id": "x", "n": 99}, "outside the years 1 to 9999"),
    "time that is none": ({"k": "k0", "t": 1.5, "id": "x", "n": 99}, "time"),
    "unusable id": ({"k": "k0", "t": BAD_AT, "id": 1.5, "n": 99}, "the id is neither"),
    "no fields": (7, "no fields"),
}
"""Rows that cannot become records, with a pattern of their dead letters' errors."""


def fragile_pipeline(sink: Path | None = None, **options: Any) -> EnginePipeline:
    pipeline = EnginePipeline(LEDGER)
    pipeline.inject(ROWS, key="k", at="t", id="id")
    produced = pipeline.add(
        options.pop("computation", Fragile()),
        name=LEDGER,
        subscribes={ROWS: None},
        produces=(LEDGER,),
        **options,
    )
    if sink is not None:
        produced[LEDGER].sink("numbers", DeltaSink(str(sink)))
    return pipeline


def bad_row(do: str, number: int = 99) -> dict[str, Any]:
    return {"k": "k0", "t": BAD_AT, "id": f"bad {do}", "n": number, "do": do}


def numbers_in(sink: Path) -> list[int]:
    values = DeltaTable(sink).to_pyarrow_table().column("value").to_pylist()
    return sorted(orjson.loads(value)["n"] for value in values)


def letters_in(store: Store) -> list[tuple[Any, ...]]:
    query = """
        select state ->> 'stream', state ->> 'key', state ->> 'value', state ->> 'error'
        from dead_letters order by key
    """
    return store.sql().sql(query).fetchall()


def assert_only_this_died(store: Store, sink: Path, error: str, summary: RunSummary) -> None:
    letters = letters_in(store)
    assert len(letters) == 1
    assert summary.run.dead_letters == 1
    pattern = pa.compute.match_substring_regex(pa.array([letters[0][3]]), f"(?s){error}")[0]
    assert pattern.as_py(), letters
    assert ledger_of(store) == written(GOOD)
    assert numbers_in(sink) == sorted(row["n"] for row in GOOD)
    timers = store.rows_view(LEDGER).to_arrow().column("timers").to_pylist()
    assert [timer for row_timers in timers for timer in row_timers] == []


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.in_memory() as opened:
        yield opened


@pytest.mark.parametrize("kind", UNREADABLE)
def test_unreadable_row_becomes_a_dead_letter(store: Store, tmp_path: Path, kind: str) -> None:
    """A row without a readable key, time or id does not affect its batch."""
    row, error = UNREADABLE[kind]
    rows = [*GOOD[:3], row, *GOOD[3:]]
    summary = LocalRunner(store, progress=False).run(fragile_pipeline(tmp_path / "s"), {ROWS: rows})

    assert_only_this_died(store, tmp_path / "s", error, summary)
    assert summary.run.injected == len(GOOD)


@pytest.mark.parametrize("failure", FAILURES)
def test_failing_code_affects_only_its_record(store: Store, tmp_path: Path, failure: str) -> None:
    rows = [*GOOD[:3], bad_row(failure), *GOOD[3:]]
    summary = LocalRunner(store, progress=False).run(fragile_pipeline(tmp_path / "s"), {ROWS: rows})

    assert_only_this_died(store, tmp_path / "s", FAILURES[failure][1], summary)
    stream, key, value, _ = letters_in(store)[0]
    assert (stream, key, orjson.loads(value)["n"]) == (ROWS, "k0", 99)


def test_failing_timer_changes_nothing_else(store: Store, tmp_path: Path) -> None:
    """Its dead letter ends it: it does not fire again."""
    rows = [{**row, "do": "later" if row["n"] == 5 else "ok"} for row in GOOD]
    summary = LocalRunner(store, progress=False).run(fragile_pipeline(tmp_path / "s"), {ROWS: rows})

    assert_only_this_died(store, tmp_path / "s", "ValueError: the timer boom", summary)
    assert letters_in(store)[0][:2] == ("", "k0")


def test_code_that_fails_once_is_retried(store: Store, tmp_path: Path) -> None:
    class Moody(Ledger):
        calls = 0

        def process_record(self, context: Context, record: Record) -> None:
            super().process_record(context, record)
            Moody.calls += 1
            if record.value["n"] == 5 and Moody.calls % 4:
                raise OSError("the service is away")

    pipeline = fragile_pipeline(tmp_path / "s", computation=Moody(), retries=4)
    summary = LocalRunner(store, progress=False).run(pipeline, {ROWS: GOOD})

    assert summary.run.dead_letters == 0
    assert ledger_of(store) == written(GOOD)
    assert numbers_in(tmp_path / "s") == sorted(row["n"] for row in GOOD)


@pytest.mark.parametrize("failure", ["raise", "state", "early"])
def test_stopping_at_an_error_writes_nothing(store: Store, tmp_path: Path, failure: str) -> None:
    """Corrected code continues at the record that the error names."""
    good = LocalRunner(store, progress=False).start(fragile_pipeline(tmp_path / "s"), stepping=True)
    good.inject(ROWS, GOOD[:3])
    good.run_until_quiet()
    good.stop()
    version = store.snapshot().version
    run = LocalRunner(store, progress=False).start(fragile_pipeline(tmp_path / "s", on_error="stop"))
    receipt = run.inject(ROWS, [*GOOD[3:], bad_row(failure)])

    with pytest.raises(
        InvalidError, match=r"user code failed, and on_error says to stop.*key=`k0`"
    ) as raised:
        receipt.wait("60s")
    assert raised.value.details["computation"] == LEDGER
    assert raised.value.__cause__ is not None
    run.abandon()
    # Only the new owner's fence was written.
    assert store.snapshot().version - version <= 2
    assert ledger_of(store) == written(GOOD[:3])
    assert letters_in(store) == []
    with LocalRunner(store, progress=False).start(ledger_pipeline()) as again:
        again.inject(ROWS, GOOD[3:]).wait("60s")
    assert ledger_of(store) == written(GOOD)


def test_bad_cells_of_columns_become_dead_letters(store: Store, tmp_path: Path) -> None:
    """Bad cells are null keys, and null or impossible times."""
    extra = [
        {"k": None, "t": BAD_AT, "id": "x", "n": 97},
        {"k": "k0", "t": None, "id": "y", "n": 98},
        {"k": "k0", "t": YEAR_12000, "id": "z", "n": 99},
    ]
    table = pa.Table.from_pylist([*GOOD, *extra])
    summary = LocalRunner(store, progress=False).run(fragile_pipeline(tmp_path / "s"), {ROWS: table})

    assert ledger_of(store) == written(GOOD)
    assert sorted(orjson.loads(letter[2])["n"] for letter in letters_in(store)) == [97, 98, 99]
    assert (summary.run.dead_letters, summary.run.injected) == (3, len(GOOD))


def test_batch_of_only_bad_rows_is_consumed_on_request(store: Store) -> None:
    rows = [row for row, _ in UNREADABLE.values()]
    with pytest.raises(InvalidError, match=f"too many records.*`{len(UNREADABLE)}`"):
        LocalRunner(store, progress=False).run(fragile_pipeline(), {ROWS: rows})
    assert letters_in(store) == []
    summary = LocalRunner(store, progress=False, dead_letter_limit=None).run(fragile_pipeline(), {ROWS: rows})

    assert summary.run.dead_letters == len(UNREADABLE)
    assert ledger_of(store) == {}
    assert len(letters_in(store)) == len(UNREADABLE)


def test_failing_timer_beyond_calendars_becomes_a_dead_letter(store: Store) -> None:
    """The greatest possible time is no date."""

    class Late(Computation):
        def process_record(self, context: Context, record: Record) -> None:
            context.set_timer(2**62, tag="late")

        def process_timer(self, context: Context, timer: object) -> None:
            raise ValueError("far too late")

    LocalRunner(store, progress=False).run(fragile_pipeline(computation=Late()), {ROWS: GOOD[:1]})

    assert [letter[3] for letter in letters_in(store)] == ["ValueError: far too late"]


def test_unpicklable_code_is_refused_before_a_store_exists(tmp_path: Path) -> None:
    locked = Ledger()
    locked.lock = threading.Lock()  # type: ignore[attr-defined]
    for runner in (LocalRunner(tmp_path / "pond"), SparkRunner(tmp_path / "pond")):
        with pytest.raises(InvalidError, match=f"(?s)pickle.*{LEDGER}"):
            runner.run(ledger_pipeline(computation=locked), {ROWS: GOOD})
    assert not (tmp_path / "pond").exists()


def test_missing_key_column_is_refused_by_name(store: Store) -> None:
    """The run does not end."""
    with LocalRunner(store, progress=False).start(fragile_pipeline()) as run:
        with pytest.raises(InvalidError, match=r"no such key column column=`k`"):
            run.inject(ROWS, pa.table({"t": [1], "id": ["a"], "n": [1]}))
        run.inject(ROWS, GOOD).wait("60s")
    assert ledger_of(store) == written(GOOD)


@pytest.mark.spark
def test_bad_rows_on_spark_become_dead_letters(tmp_path: Path, spark: SparkSession) -> None:
    """All good rows of the batch take effect."""
    bad: list[tuple[str | None, str | None, str, int, str]] = [
        (None, _text(BAD_AT), "a", 100, "ok"),
        ("k0", None, "b", 101, "ok"),
        ("k0", "yesterday", "c", 102, "ok"),
        ("k0", "+12000-01-01T00:00:00Z", "d", 103, "ok"),
    ]
    failing = sorted(FAILURES)
    bad += [("k0", _text(BAD_AT + at), f"f{at}", 110 + at, do) for at, do in enumerate(failing)]
    bad += [("k9", _text(BAD_AT), "g", 130, "later")]
    good = [(row["k"], _text(row["t"]), row["id"], row["n"], "ok") for row in GOOD]
    frame = spark.createDataFrame(
        [*good[:3], *bad, *good[3:]], "k string, t string, id string, n long, do string"
    )
    registry = MemoryRegistry()
    with Store.open(
        tmp_path / "pond", leases=lambda _, writer_id: MemoryLeases(registry, CLOCK, writer_id=writer_id)
    ) as store:
        runner = SparkRunner(store, spark=spark, progress=False, intervals=2)
        summary = runner.run(fragile_pipeline(tmp_path / "s"), {ROWS: frame})
        letters = {orjson.loads(value).get("n"): error for _, _, value, error in letters_in(store)}
        ledger = ledger_of(store)

    assert ledger == {**written(GOOD), "k9": [130]}
    assert numbers_in(tmp_path / "s") == sorted([*(row["n"] for row in GOOD), 130])
    errors = {100: "key.* null", 101: "time is null", 102: "time", 103: "time", None: "the timer boom"}
    errors |= {110 + at: FAILURES[do][1] for at, do in enumerate(failing)}
    assert set(letters) == set(errors)
    for number, error in errors.items():
        assert pa.compute.match_substring_regex(pa.array([letters[number]]), f"(?s){error}")[0].as_py(), (
            letters
        )
    assert summary.run.dead_letters == len(errors)


def _text(at: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(at / 1_000_000, tz=UTC).isoformat()


@pytest.mark.spark
def test_stopping_at_an_error_on_spark_writes_nothing(tmp_path: Path, spark: SparkSession) -> None:
    """Spark raises the error itself, and corrected code continues."""
    rows = [(row["k"], row["t"], row["id"], row["n"], "raise" if row["n"] == 6 else "ok") for row in GOOD]
    frame = spark.createDataFrame(rows, "k string, t long, id string, n long, do string")
    registry = MemoryRegistry()
    with Store.open(
        tmp_path / "pond", leases=lambda _, writer_id: MemoryLeases(registry, CLOCK, writer_id=writer_id)
    ) as store:
        runner = SparkRunner(store, spark=spark, progress=False, intervals=1)
        with pytest.raises(InvalidError, match="user code failed, and on_error says to stop") as raised:
            runner.run(fragile_pipeline(on_error="stop"), {ROWS: frame})
        assert "number 6 is refused" in str(raised.value)
        assert ledger_of(store) == {}
        runner.run(ledger_pipeline(), {ROWS: frame})
        assert ledger_of(store) == written(GOOD)

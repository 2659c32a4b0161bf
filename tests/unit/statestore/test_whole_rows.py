"""Whole rows: record ids and undelivered productions, as columns and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.offline_gc import collect_offline
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.pipeline.nodes import DEAD_LETTERS
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.row import ROW_SCHEMA, ListsOfKeys, lists_by_key
from millpond.statestore.store import Store
from millpond.statestore.view import ROWS_VIEW_SCHEMA, WHOLE_ROW_SCHEMA
from millpond.testing.fixtures.determinism import ManualClock, SeededRng


class Counted(MemoryObjects):
    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def get(self, path: str) -> bytes:
        if path.endswith(".parquet"):
            self.read.append(path)
        return super().get(path)


class Pass(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.produce("seen", key=record.value["k"] + "'", value={"from": record.value["k"]})


class Keep(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        if record.value.get("forget"):
            context.state.delete()
        else:
            context.state.set((context.state.get() or 0) + 1)


class Sink(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.state.set(record.value)


class Pond:
    """A pipeline in memory, stepped manually: ``pass`` produces for ``last``, and ``keep`` counts."""

    def __init__(self) -> None:
        self.objects = Counted()
        self.clock = ManualClock()
        self.rng = SeededRng()
        self.store = Store.in_memory(objects=self.objects, clock=self.clock, rng=self.rng)
        pipeline = EnginePipeline("p")
        clicks = pipeline.inject("clicks", key="k", id="id", at="at", id_slack="1s")
        clicks.apply(Pass(), name="pass", produces="seen").apply(Sink(), name="last")
        clicks.apply(Keep(), name="keep")
        pipeline.stream(DEAD_LETTERS).apply(Sink(), name="letters")
        runner = LocalRunner(
            self.store, clock=self.clock, rng=self.rng, progress=False, upkeep=None, intervals=2
        )
        self.run: LocalRun = runner.start(pipeline, stepping=True)

    def feed(self, *records: dict[str, Any]) -> None:
        self.run.inject("clicks", [{"at": 1, **record} for record in records])
        self.run.step()

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        with self.store.sql() as connection:
            return connection.execute(query).fetchall()

    def close(self) -> None:
        self.run.stop()
        self.store.close()


@pytest.fixture
def pond() -> Iterator[Pond]:
    made = Pond()
    yield made
    made.close()


def test_ids_are_column(pond: Pond) -> None:
    """All updates of a key contribute, oldest first."""
    pond.feed({"k": "a", "id": "1"}, {"k": "b", "id": "2"})
    pond.feed({"k": "a", "id": "3", "at": 7})

    assert pond.ask(
        "select key, list_transform(record_ids, lambda each: decode(each.id)) from keep order by key"
    ) == [
        ("a", ["1", "3"]),
        ("b", ["2"]),
    ]
    assert pond.ask("select epoch_us(record_ids[2].at) from keep where key = 'a'") == [(7,)]


def test_key_with_only_ids_has_row(pond: Pond) -> None:
    pond.feed({"k": "a", "id": "1"}, {"k": "b", "id": "2"})
    pond.feed({"k": "b", "id": "3", "forget": True})
    pond.run.run_until_quiet()

    assert pond.ask('select key, state, len(record_ids) from "pass" order by key') == [
        ("a", None, 1),
        ("b", None, 2),
    ]
    assert pond.ask(
        "select key, state, len(timers), len(record_ids), superstep > 0 from keep order by key"
    ) == [
        ("a", "1", 0, 1, True),
        ("b", None, 0, 2, True),
    ]
    assert pond.ask("select count(*) from keep where state is not null") == [(1,)]


def test_undelivered_productions_are_columns(pond: Pond) -> None:
    """The superstep that delivers them removes them."""
    pond.feed({"k": "a", "id": "1"})

    assert pond.ask(
        """select key, productions[1].stream, productions[1].key, productions[1].value from "pass" """
    ) == [("a", "seen", "a'", '{"from":"a"}')]
    pond.run.run_until_quiet()
    assert pond.ask('select key, productions from "pass"') == [("a", [])]
    assert pond.ask("select key, state from last") == [("a'", '{"from":"a"}')]


def test_ids_and_productions_are_tables(pond: Pond) -> None:
    pond.feed({"k": "a", "id": "1"}, {"k": "a", "id": "2", "at": 5})

    assert pond.ask('select key, decode(id), epoch_us("at") from record_ids.keep order by id') == [
        ("a", "1", 1),
        ("a", "2", 5),
    ]
    assert (
        pond.ask('select key, stream, production_key, value from productions."pass"')
        == [("a", "seen", "a'", '{"from":"a"}')] * 2
    )
    assert pond.ask("from productions.keep") == []
    assert pond.ask("show tables") == [("dead_letters",), ("keep",), ("pass",)]


def test_older_version_shows_its_undelivered_productions(pond: Pond) -> None:
    pond.feed({"k": "a", "id": "1"})
    version = pond.store.snapshot().version
    pond.run.run_until_quiet()

    with pond.store.sql(version=version) as connection:
        (then,) = connection.execute('select len(productions) from "pass"').fetchall()
    assert (then, pond.ask('select len(productions) from "pass"')) == ((1,), [(0,)])


def test_dead_letters_are_visible_until_delivered(pond: Pond) -> None:
    pond.feed({"k": "a", "id": "1"}, {"k": None, "id": "2"})

    assert pond.ask("select distinct stream from productions.dead_letters") == [("dead_letters",)]


def test_query_for_state_reads_each_file_once(pond: Pond) -> None:
    pond.feed({"k": "a", "id": "1"}, {"k": "b", "id": "2"})
    files = {file.path for file in pond.store.snapshot().files_in("keep")}
    pond.objects.read.clear()

    pond.ask("select key, state from keep")
    assert sorted(path for path in pond.objects.read if path in files) == sorted(files)
    pond.objects.read.clear()
    pond.ask("select key, state, record_ids from keep")
    assert sorted(path for path in pond.objects.read if path in files) == sorted([*files, *files])


def test_query_for_states_of_kind_reads_no_ids(pond: Pond) -> None:
    pond.feed({"k": "a", "id": "1"})
    pond.run.run_until_quiet()
    files = {file.path for file in pond.store.snapshot().files_in("pass")}
    pond.objects.read.clear()

    assert pond.ask("""select key from "pass" where state is not null""") == []
    assert sorted(path for path in pond.objects.read if path in files) == sorted(files)


def test_arrow_matches_sql(pond: Pond) -> None:
    pond.feed({"k": "a", "id": "1"}, {"k": "b", "id": "2"}, {"k": "c", "id": "3", "forget": True})
    view = pond.store.rows_view("keep")

    whole = view.to_arrow(whole=True)
    assert whole.schema == WHOLE_ROW_SCHEMA
    assert whole.column("key").to_pylist() == ["a", "b", "c"]
    assert whole.equals(view.to_duckdb().to_arrow_table().cast(WHOLE_ROW_SCHEMA).sort_by("key"))
    assert view.to_arrow(["c", "a"], whole=True).equals(whole.take([0, 2]))
    assert view.to_arrow().equals(whole.select(ROWS_VIEW_SCHEMA.names).slice(0, 2))


def test_collected_ids_remove_row_without_state(pond: Pond) -> None:
    pond.feed({"k": "a", "id": "1"}, {"k": "b", "id": "2"})
    pond.feed({"k": "b", "id": "3", "forget": True})
    pond.feed({"k": "z", "id": "9", "at": 10**8})
    pond.run.run_until_quiet()
    assert pond.ask("select key, len(record_ids) from keep order by key") == [("a", 1), ("b", 2), ("z", 1)]
    pond.run.stop()

    pond.clock.advance_ms(60_000)
    policy = UpkeepPolicy(retention="1h", collect_every=1)
    collect_offline(pond.store, pond.clock, pond.rng, policy)

    assert pond.ask("select key from keep order by key") == [("a",), ("z",)]


@pytest.mark.parametrize("name", ["record_ids", "productions"])
def test_lists_are_joined_in_order_of_commits(name: str) -> None:
    kind = ROW_SCHEMA.field(name).type

    def value(number: int) -> dict[str, Any]:
        return (
            {"id": b"%d" % number, "at": number}
            if name == "record_ids"
            else {"stream": f"{number}", "at": number}
        )

    updates: Sequence[tuple[str, int, int, list[int] | None]] = (
        ("b", 2, 1, [5]), ("a", 1, 2, [3, 4]), ("a", 1, 1, [1, 2]), ("c", 1, 1, []), ("d", 1, 1, None), ("b", 1, 9, None),
        ("a", 2, 0, [6]),
    )  # fmt: skip
    table = pa.table(
        {
            "key": [key for key, *_ in updates],
            "sequencer": [sequencer for _, sequencer, _, _ in updates],
            "commit_number": [number for _, _, number, _ in updates],
            name: pa.array(
                [None if each is None else [value(number) for number in each] for *_, each in updates], kind
            ),
        }
    )
    joined = lists_by_key(table, name)
    expected = [
        pa.array([[value(n) for n in numbers]], kind).to_pylist()[0] for numbers in ([], [5], [1, 2, 3, 4, 6])
    ]

    assert joined.column("key").to_pylist() == ["a", "b"]
    assert ListsOfKeys(joined, name).at(pa.array(["x", "b", "a"])).to_pylist() == expected
    assert ListsOfKeys(lists_by_key(table.slice(0, 0), name), name).at(pa.array(["x"])).to_pylist() == [[]]

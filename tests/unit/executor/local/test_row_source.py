"""Sources that are read in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.inputs.extraction import Rows, pieces
from millpond.executor.inputs.row_digest import rows_digest
from millpond.executor.local import bounded
from millpond.executor.local.rows import RowSource
from millpond.executor.local.runner import LocalRunner
from millpond.executor.time.watermark_policies import BoundedDisorder
from millpond.executor.windows.combiners import Count
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.window_fns import FixedWindows
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

_TEN = 10


class Numbered(RowSource):
    """Rows with a time each, made while they are read."""

    def __init__(self, count: int, *, disorder: int = 0) -> None:
        self.times = [at + (disorder if at % 2 else 0) for at in range(count)]
        self.alive = 0
        self.most_alive = 0

    @property
    def count(self) -> int:
        return len(self.times)

    def rows(self) -> list[dict[str, Any]]:
        return [{"k": "only", "t": at} for at in self.times]

    def pieces(self, start: int, records_max: int) -> Iterator[tuple[int, Rows]]:
        for count, piece in pieces(self.rows()[start:], records_max):
            self.alive += count
            self.most_alive = max(self.most_alive, self.alive)
            try:
                yield count, piece
            finally:
                self.alive -= count


class Seen(Computation):
    def __init__(self) -> None:
        self.panes: list[tuple[int, Any, int]] = []

    def process_record(self, context: Context, record: Record) -> None:
        self.panes.append((record.value["window"][0], record.value["value"], context.watermark))


class Pond:
    """A store in memory that outlives its runs."""

    def __init__(self) -> None:
        self._objects, self._registry = MemoryObjects(), MemoryRegistry()
        self._clock, self._rng = ManualClock(), SeededRng(1)

    def store(self) -> Store:
        return Store.in_memory(
            objects=self._objects, registry=self._registry, clock=self._clock, rng=self._rng
        )

    def run(self, rows: Any, *, finish: bool = True, **options: Any) -> Any:
        pipeline, seen = Pipeline("bounded"), Seen()
        stream = pipeline.inject("s", key="k", at="t", **options)
        stream.window(FixedWindows(f"{_TEN}us")).combine(Count(), name="counts").apply(seen, name="seen")
        runner = LocalRunner(self.store(), clock=self._clock, rng=self._rng, progress=False)
        return seen.panes, runner.run(pipeline, {"s": rows}, finish=finish)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "BUNDLE_RECORDS_MAX", _TEN)


@pytest.mark.parametrize("disorder", [0, 7, 300])
@pytest.mark.parametrize("finish", [True, False])
def test_source_equals_its_rows_in_memory(disorder: int, finish: bool) -> None:
    """Panes and their watermarks agree for sorted and unsorted rows."""
    source = Numbered(100, disorder=disorder)
    options = {"finish": finish, "watermark": BoundedDisorder(f"{disorder}us")}
    read, read_summary = Pond().run(source, **options)
    held, held_summary = Pond().run(source.rows(), **options)

    assert read == held
    assert read
    assert (read_summary.run, read_summary.ended) == (held_summary.run, held_summary.ended)


def test_one_piece_is_in_memory_at_a_time() -> None:
    """This includes the first pass, which reads only the times."""
    source = Numbered(200)
    Pond().run(source)

    assert source.most_alive == _TEN


def test_grown_source_continues_at_the_stored_position() -> None:
    """Each commit stores where the consumed rows end, and a digest of them."""
    pond = Pond()
    _, first = pond.run(Numbered(35), finish=False)
    _, second = pond.run(Numbered(80), finish=False)

    assert (first.run.injected, second.run.injected) == (35, 45)
    assert second.skipped == {"s": "35 of 80 rows were consumed before"}
    (place,) = map(orjson.loads, pond.store().snapshot().source_offsets.values())
    assert place == {"rows": 80, "digest": f"{rows_digest(Numbered(80).rows(), 0):016x}"}


OLD = Numbered(35).rows()
NEW = Numbered(80).rows()[35:]
FORMS: dict[str, Any] = {
    "mappings": list,
    "iterator": iter,
    "arrow": pa.Table.from_pylist,
    "pandas": lambda rows: pa.Table.from_pylist(rows).to_pandas(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "second",
    [
        [*NEW],
        [{"k": "only", "t": 3}, *OLD],
        [*OLD[:7], {"k": "other", "t": 7}, *OLD[8:], *NEW],
        [*OLD[:7], *OLD[8:], *NEW],
        [*reversed(OLD)],
        [*OLD[:30]],
    ],
    ids=["only new rows", "row in front", "row edited", "row removed", "other order", "fewer"],
)
def test_other_rows_than_were_consumed_are_refused(second: list[Any], form: str) -> None:
    """They are told by a digest, however many they are; the refusal consumes nothing, and the right rows go on."""
    pond, make = Pond(), FORMS[form]
    pond.run(make(OLD), finish=False)
    place = dict(pond.store().snapshot().source_offsets)

    with pytest.raises(InvalidError, match="give the same rows again with the new ones behind them"):
        pond.run(make(second), finish=False)
    assert pond.store().snapshot().source_offsets == place
    assert pond.run(make([*OLD, *NEW]), finish=False)[1].run.injected == len(NEW)


def test_form_of_rows_may_change_between_runs() -> None:
    pond = Pond()
    for rows, make in zip(range(10, 50, 10), FORMS.values(), strict=True):
        _, summary = pond.run(make(Numbered(rows).rows()), finish=False)
        assert summary.run.injected == 10


def test_killed_run_continues_its_digest() -> None:
    """Supersteps of a run that continues store the digest that one run alone would store."""
    pond = Pond()
    for rows in (3, 25, 26, 61):
        pond.run(Numbered(rows), finish=False)
    (place,) = map(orjson.loads, pond.store().snapshot().source_offsets.values())

    assert int(place["digest"], 16) == rows_digest(Numbered(61).rows(), 0)


def test_position_of_earlier_version_is_known_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that are given then count as those that were consumed."""
    pond = Pond()
    with monkeypatch.context() as patch:
        patch.setattr(bounded.InputRest, "_place", lambda _: None)
        pond.run(Numbered(35), finish=False)
    assert pond.store().snapshot().source_offsets == {}

    assert pond.run(Numbered(80), finish=False)[1].run.injected == 45
    with pytest.raises(InvalidError, match="not the first 80"):
        pond.run([{"k": "other", "t": 0}, *Numbered(80).rows()], finish=False)


def test_change_stream_is_read_at_once() -> None:
    """Images of a change must be put in order, which needs all rows in memory."""

    class Changes(Numbered):
        def rows(self) -> list[dict[str, Any]]:
            return [{"k": "only", "t": at, "op": "+I"} for at in self.times]

    source = Changes(30)
    panes, summary = Pond().run(source, change="op")

    assert [value for _, value, _ in panes] == [_TEN] * 3
    assert summary.run.injected == 30


def test_all_rows_of_equal_tables_are_one_table() -> None:
    """Tables with different columns become mappings."""

    class Tables(RowSource):
        def __init__(self, *tables: Rows) -> None:
            self.tables = tables

        @property
        def count(self) -> int:
            return len(self.tables)

        def pieces(self, start: int, records_max: int) -> Iterator[tuple[int, Rows]]:
            return ((1, table) for table in self.tables)

    one, two, other = pa.table({"n": [1]}), pa.table({"n": [2]}), pa.table({"m": ["x"]})

    assert Tables(one, two).all_rows(9) == pa.table({"n": [1, 2]})
    assert Tables(one, other, [{"k": 3}]).all_rows(9) == [{"n": 1}, {"m": "x"}, {"k": 3}]
    assert Tables().all_rows(9) == []
    assert Tables(one, two).first(9) == one

"""Sources of rows: the same run as with the rows in memory, and refused when they are no longer the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.inputs.extraction import Rows, pieces
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
    """Rows with a time each, made as they are read."""

    def __init__(self, count: int, *, disorder: int = 0, name: str = "it") -> None:
        self.name = name
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

    def offsets(self, count: int) -> str | None:
        return f"{count} of {self.name}"

    def check_offsets(self, count: int, stored: str) -> None:
        if stored != self.offsets(count):
            raise InvalidError("another source", stored=stored)


class Seen(Computation):
    """Notes each pane, and the watermark at which it came."""

    def __init__(self) -> None:
        self.panes: list[tuple[int, Any, int]] = []

    def process_record(self, context: Context, record: Record) -> None:
        self.panes.append((record.value["window"][0], record.value["value"], context.watermark))


class Pond:
    """A store in memory, of which each run sees what the ones before it did."""

    def __init__(self) -> None:
        self._objects, self._registry = MemoryObjects(), MemoryRegistry()
        self._clock, self._rng = ManualClock(), SeededRng(1)

    def store(self) -> Store:
        return Store.in_memory(
            objects=self._objects, registry=self._registry, clock=self._clock, rng=self._rng
        )

    def run(self, rows: Any, *, finish: bool = True, **options: Any) -> Any:
        """Counts of windows of ten; what was seen, and the summary."""
        pipeline, seen = Pipeline("bounded"), Seen()
        stream = pipeline.inject("s", key="k", at="t", **options)
        stream.window(FixedWindows(_TEN)).combine(Count(), name="counts").apply(seen, name="seen")
        runner = LocalRunner(self.store(), clock=self._clock, rng=self._rng, progress=False)
        return seen.panes, runner.run(pipeline, {"s": rows}, finish=finish)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "BUNDLE_RECORDS_MAX", _TEN)


@pytest.mark.parametrize("disorder", [0, 7, 300])
@pytest.mark.parametrize("finish", [True, False])
def test_a_source_gives_what_its_rows_give(disorder: int, finish: bool) -> None:
    """The same panes at the same watermarks, sorted or not, at the end of the input or before more."""
    source = Numbered(100, disorder=disorder)
    options = {"finish": finish, "watermark": BoundedDisorder(disorder)}
    read, read_summary = Pond().run(source, **options)
    held, held_summary = Pond().run(source.rows(), **options)

    assert read == held
    assert read
    assert (read_summary.run, read_summary.ended) == (held_summary.run, held_summary.ended)


def test_one_piece_is_alive_at_a_time() -> None:
    """However many rows a source has, no more than a piece of them waits to be processed, for times or for good."""
    source = Numbered(200)
    Pond().run(source)

    assert source.most_alive == _TEN


def test_a_longer_source_goes_on_where_the_store_is() -> None:
    """Of a source that has grown only the rows behind are processed, and each commit says where they end."""
    pond = Pond()
    _, first = pond.run(Numbered(35), finish=False)
    _, second = pond.run(Numbered(80), finish=False)

    assert (first.run.injected, second.run.injected) == (35, 45)
    assert second.skipped == {"s": "35 of 80 rows were consumed before"}
    assert list(pond.store().snapshot().source_offsets.values()) == ["80 of it"]


def test_a_source_of_other_rows_is_refused() -> None:
    """A source that no longer says of the consumed rows what it said of them then stops the run before it does anything."""
    pond = Pond()
    pond.run(Numbered(35), finish=False)

    with pytest.raises(InvalidError, match="another source"):
        pond.run(Numbered(80, name="another"), finish=False)
    assert list(pond.store().snapshot().source_offsets.values()) == ["35 of it"]


def test_changes_are_read_as_a_whole() -> None:
    """Of a change stream all rows are in memory, because the images are put in order."""

    class Changes(Numbered):
        def rows(self) -> list[dict[str, Any]]:
            return [{"k": "only", "t": at, "op": "+I"} for at in self.times]

    source = Changes(30)
    panes, summary = Pond().run(source, change="op")

    assert [value for _, value, _ in panes] == [_TEN] * 3
    assert summary.run.injected == 30


def test_all_rows_of_tables_are_a_table() -> None:
    """Tables of the same columns are put together; others, and mappings, are a list of mappings."""

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

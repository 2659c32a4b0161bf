"""
Publishers repeat records: a record delivered again under its id changes nothing (I2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import orjson
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.executor.injectors.policy import BoundedDisorder
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.reporting.summary import RunSummary
from millpond.executor.soft_state.known_ids import KnownIds
from millpond.executor.soft_state.row_reader import RowReader
from millpond.statestore.interval import Interval
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.statestore.types import Superstep
from millpond.testing.fixtures.computations import SECOND_US, Count, Window
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from millpond.testing.processes.failing_code import Fragile
from millpond.testing.processes.ledger import LEDGER, ROWS, START_US

Row = dict[str, Any]


class Collected:
    """
    A sink that keeps its input in memory across restarts of the pipeline.
    """

    def __init__(self) -> None:
        self.identity = "collected"
        self.delivered = Superstep(0)
        self.values: Counter[str] = Counter()

    def open(self, *_names: object, **_seams: object) -> Collected:
        return self

    def write(self, superstep: Superstep, productions: pa.Table) -> None:
        if superstep > self.delivered:
            self.delivered = superstep
            columns = productions.select(["key", "value", "at"]).to_pylist()
            self.values.update(f"{row['key']} {row['value']} {row['at']}" for row in columns)


@dataclass(frozen=True, slots=True)
class Script:
    """
    Batches of rows, each with whether the pipeline is restarted after it.
    """

    batches: tuple[tuple[tuple[Row, ...], bool], ...]
    intervals: int

    def once(self) -> Script:
        """
        The same script without repetitions: the first delivery of each key and id.
        """
        seen: set[tuple[str, str]] = set()
        batches = []
        for rows, restarts in self.batches:
            fresh = []
            for row in rows:
                if row["id"] is None or (row["k"], row["id"]) not in seen:
                    seen.add((row["k"], row["id"]))
                    fresh.append(row)
            batches.append((tuple(fresh), restarts))
        return Script(tuple(batches), self.intervals)

    @property
    def deliveries(self) -> int:
        return sum(len(rows) for rows, _ in self.batches)


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """
    Up to a dozen records, each delivered up to three times, in any order, over several batches.
    """
    count = draw(st.integers(1, 12))
    rows = [
        {
            "k": draw(st.sampled_from(["a", "b", "c", ""])),
            "t": START_US + at * SECOND_US,
            # Different keys have equal ids: only key and id together identify a record.
            "id": f"id{number}" if draw(st.integers(0, 9)) else None,
            "n": number,
            "do": "raise" if draw(st.integers(0, 9)) == 0 else "ok",
        }
        for number, at in enumerate(draw(st.lists(st.integers(0, 90), min_size=count, max_size=count)))
    ]
    twins = [{**row, "k": "twin of another key"} for row in rows[:2]]
    deliveries = [row for row in [*rows, *twins] for _ in range(draw(st.integers(1, 3)))]
    order = draw(st.permutations(deliveries))
    cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=4)))
    pieces = [order[low:high] for low, high in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    return Script(
        tuple((tuple(piece), draw(st.booleans())) for piece in pieces),
        intervals=draw(st.integers(1, 3)),
    )


def pipeline(sinks: dict[str, Collected]) -> EnginePipeline:
    """
    A ledger whose code sometimes fails, a counter of its productions, and a window with timers.
    """
    made = EnginePipeline("p")
    # The bound on disorder is so large that no record is late: only duplicates are dropped.
    rows = made.inject(ROWS, key="k", at="t", id="id", watermark=BoundedDisorder("1h"))
    ledger = made.add(Fragile(), name=LEDGER, subscribes={ROWS: None}, produces=(LEDGER,), retries=0)
    ledger[LEDGER].sink("numbers", sinks["numbers"])
    made.stream(LEDGER).apply(Count(("counts",)), name="count", produces="counts").sink(
        "counts", sinks["counts"]
    )
    rows.apply(Window(("windows",)), name="window", produces="windows").sink("windows", sinks["windows"])
    return made


def played(script: Script) -> tuple[dict[str, Any], RunSummary]:
    """
    The results of a script: rows, sink contents, dead letters, watermark.
    """
    clock, disk, registry = ManualClock(), MemoryObjects(), MemoryRegistry()
    sinks = {name: Collected() for name in ("numbers", "counts", "windows")}
    for number, sink in enumerate(sinks.values()):
        sink.identity = f"collected {number}"

    def opened() -> Any:
        store = Store.in_memory(objects=disk, registry=registry, clock=clock, rng=SeededRng(1))
        runner = LocalRunner(store, clock=clock, rng=SeededRng(2), intervals=script.intervals, progress=False)
        return store, runner.start(pipeline(sinks), stepping=True)

    store, run = opened()
    for rows, restarts in script.batches:
        if rows:
            run.inject(ROWS, list(rows))
            run.step()
        if restarts:
            run.stop()
            store, run = opened()
    run.finish(ROWS)
    run.run_until_quiet()
    summary = run.stop()
    views = {name: store.rows_view(name).to_arrow() for name in (LEDGER, "count", "window", "dead_letters")}
    left = {
        name: [
            (row["key"] if name != "dead_letters" else "", _state(name, row["state"]), row["state_bytes"])
            for row in view.to_pylist()
        ]
        for name, view in views.items()
    }
    left["dead_letters"].sort()
    left |= {f"sink {name}": sink.values for name, sink in sinks.items()}
    return left, summary


def _state(name: str, state: str | None) -> str | None:
    """
    A state; of a dead letter only the record it is about.
    """
    if name != "dead_letters" or state is None:
        return state
    letter = orjson.loads(state)
    return f"{letter['key']} {orjson.loads(letter['value'])['n']}"


def forgetful(capacity_max: int, budget_bytes: int) -> Callable[[Interval, RowReader, int], KnownIds]:
    """
    A factory of known ids with another capacity than requested.
    """

    def make(interval: Interval, reader: RowReader, _: int) -> KnownIds:
        return KnownIds(interval, reader, budget_bytes, capacity_max=capacity_max)

    return make


@given(
    script=scripts(),
    capacity_max=st.sampled_from([1, 3, 1_000_000]),
    budget_bytes=st.sampled_from([0, 10_000, 1_000_000]),
)
@settings(deadline=None)
def test_what_comes_again_changes_nothing(script: Script, capacity_max: int, budget_bytes: int) -> None:
    """
    Records delivered up to three times, in any order, across batches and restarts, count once, whether ids are
    looked up in memory, in files, or through a filter that is rebuilt every few records.
    """
    with patch("millpond.executor.soft_state.soft_state.KnownIds", forgetful(capacity_max, budget_bytes)):
        left, summary = played(script)
    once = script.once()
    expected, plain = played(once)

    assert left == expected
    # Each of two consumers drops the repetitions.
    assert summary.totals.duplicates == 2 * (script.deliveries - once.deliveries)
    assert plain.totals.duplicates == 0
    assert summary.watermark == plain.watermark

"""Code that takes a bundle as a table: the rows and letters that the same code gives for one key at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import orjson
import pyarrow as pa
from hypothesis import event, given, settings
from hypothesis import strategies as st

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.key_groups import KeyGroups, TableContext
from millpond.executor.computation.records import Records
from millpond.executor.computation.timers import Timer
from millpond.executor.computation.values import ArrowValues, JsonValues, PythonValues, Values
from millpond.executor.interval.bundle import Deliveries
from millpond.executor.interval.letters import RetriedLetter
from millpond.executor.interval.processor import IntervalProcessor
from millpond.executor.interval.row_update import BundleResult, PartInColumns
from millpond.executor.interval.soft_state import BUDGET_BYTES
from millpond.executor.interval.table_turns import TableTurns
from millpond.executor.pipeline.nodes import ComputationNode, OnLate
from millpond.statestore.interval import Interval
from millpond.statestore.rows.row_format import IpcRowFormat
from millpond.statestore.rows.state_schema import SchemaCodec
from tests.fixtures.interval_run import IntervalRun

STATE = pa.schema([("n", pa.int64()), ("total", pa.float64()), ("ids", pa.list_(pa.binary()))])
SUM = pa.schema([("key", pa.string()), ("n", pa.int64()), ("late", pa.int64())])
EACH = pa.schema([("v", pa.int64()), ("stream", pa.string())])
KEYS = ["", "a", "b", "é", "\U0001f986"]
POISON, DELETES, FULL = 13, 99, 60


class ByKey(Computation):
    """Counts and adds up; one value raises, another one deletes, and so does a total that is too large."""

    codec = SchemaCodec(STATE)
    counters = ("seen",)
    late_data_horizon = "2us"

    def process_records(self, context: Context, records: Records) -> None:
        values = [record.value["v"] for record in records]
        context.count("seen", len(values))
        stored = context.state.get()
        state = stored or {"n": 0, "total": 0.0, "ids": []}
        added = sum(value or 0 for value in values)
        total = state["total"] + added
        n = state["n"] + len(values)
        late = int(np.sum(records.late))
        streams = [record.stream for record in records]
        at = {"at": records[0].at - 2} if n % 2 else {}
        context.produce("sums", {"key": context.key, "n": n, "late": late}, **at)
        if POISON in values or total > FULL:
            raise ValueError(values)
        if DELETES in values:
            context.state.delete()
        elif added or stored is None:
            ids = [*state["ids"], *(own for own in records.ids.to_pylist() if own is not None)]
            context.state.set({"n": n, "total": total, "ids": ids})
        for value, moment, stream in zip(values, records.at.tolist(), streams, strict=True):
            if value is not None and value > 5:
                context.produce("each", {"v": value, "stream": stream}, at=moment)

    def process_timer(self, context: Context, timer: Timer) -> None:
        state = context.state.get({"n": 0, "total": 0.0, "ids": []})
        context.state.set({**state, "n": state["n"] + 100})
        context.produce("sums", {"key": timer.tag, "n": -1, "late": 0})


class ByTable(Computation):
    codec = ByKey.codec
    counters = ByKey.counters
    late_data_horizon = ByKey.late_data_horizon
    process_timer = ByKey.process_timer

    def process_table(self, context: TableContext, table: pa.Table, groups: KeyGroups) -> None:
        bounds, first = groups.bounds, groups.bounds[:-1]
        context.count("seen", table.num_rows)
        column = table["v"].cast(pa.int64())
        values = column.fill_null(0).to_numpy()
        added = np.add.reduceat(values, first)
        stored = groups.states.is_valid().to_numpy(zero_copy_only=False)
        total = groups.state("total").fill_null(0).to_numpy() + added
        n = groups.state("n").fill_null(0).to_numpy() + np.diff(bounds)
        late = np.add.reduceat(groups.late.astype(np.int64), first)
        oldest, newest = np.minimum.reduceat(groups.at, first), np.maximum.reduceat(groups.at, first)
        sums = pa.table({"late": late, "n": n, "key": groups.keys})
        groups.produce("sums", sums, at=np.where(n % 2 == 1, oldest - 2, newest))
        if (values == POISON).any() or (total > FULL).any():
            raise ValueError(values)
        former = groups.state("ids").to_pylist()
        ids = groups.ids.to_pylist()
        all_ids = [
            [
                *(former[place] or []),
                *(own for own in ids[bounds[place] : bounds[place + 1]] if own is not None),
            ]
            for place in range(len(groups))
        ]
        deleted = np.maximum.reduceat((values == DELETES).astype(np.int64), first) > 0
        states = pa.StructArray.from_arrays(
            [pa.array(n), pa.array(total), pa.array(all_ids, pa.list_(pa.binary()))],
            names=["n", "total", "ids"],
            mask=pa.array(deleted),
        )
        groups.set_states(states, changed=(added != 0) | ~stored | deleted)
        wanted = np.flatnonzero(values > 5)
        chosen = pa.array(wanted)
        each = {"v": column.take(chosen), "stream": groups.streams.take(chosen)}
        groups.produce("each", each, owners=groups.owners[wanted], at=groups.at[wanted])


class Seeds(ByKey):
    """The code before: it sets timers, and its states may have no schema yet."""

    def process_records(self, context: Context, records: Records) -> None:
        for record in records:
            v = record.value["v"] or 0
            if v < 3:
                context.state.set({"n": v, "total": float(v), "ids": []})
            if v % 3 == 1:
                context.set_timer(record.at + v, tag=f"{v}", output_at=record.at)


class TextSeeds(Seeds):
    codec = Computation.codec


_cells = st.none() | st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 20, POISON, DELETES]) | st.integers(-9, 9)


@st.composite
def _deliveries(
    draw: st.DrawFn, kinds: Sequence[str] = ("arrow", "arrow", "arrow", "int32", "objects", "text")
) -> Deliveries:
    rows = draw(st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 25), _cells), max_size=8))
    # Arrow tells no type from nulls alone, which both ways must take.
    cells = [row[2] for row in rows]
    kind = draw(st.sampled_from(kinds))
    values: Values
    if kind == "arrow":
        values = ArrowValues(pa.table({"v": pa.array(cells, pa.int64()), "w": list(range(len(rows)))}))
    elif kind == "int32":
        values = ArrowValues(pa.table({"v": pa.array(cells, pa.int32())}))
    elif kind == "objects":
        values = PythonValues([{"v": cell} for cell in cells])
    else:
        values = JsonValues(pa.array([orjson.dumps({"v": cell}).decode() for cell in cells], pa.string()))
    stream = draw(st.sampled_from(["left", "right"]))
    ids = [f"{stream}\0{row[1]}".encode() if row[1] % 3 else None for row in rows]
    return Deliveries(
        stream=stream,
        keys=pa.array([row[0] for row in rows], pa.string()),
        at=np.array([row[1] for row in rows], np.int64),
        values=values,
        ids=pa.array(ids, pa.binary()) if draw(st.booleans()) else None,
    )


_letters = st.builds(
    lambda key, at, value, seen: RetriedLetter(
        name="letter",
        stream="left",
        key=key,
        at=at,
        value=orjson.dumps({"v": value}).decode(),
        id=b"letter",
        unseen_id=None if seen else b"left\0letter",
    ),
    st.sampled_from(KEYS),
    st.integers(0, 25),
    st.sampled_from([1, 6, POISON, DELETES]),
    st.booleans(),
)
# Bundles: deliveries, the step of the watermark, whether the other worker runs it, its first fate, and a letter.
_scripts = st.lists(
    st.tuples(
        st.lists(_deliveries(), max_size=3),
        st.integers(0, 8),
        st.booleans(),
        st.sampled_from(["committed", "committed", "committed", "lost", "failed"]),
        st.none() | st.none() | st.none() | _letters,
    ),
    min_size=1,
    max_size=5,
)


def _node(computation: Computation, on_late: OnLate, retries: int, timeout: str | None) -> ComputationNode:
    return ComputationNode(
        name="c",
        computation=computation,
        subscriptions=(),
        produces=("sums", "each"),
        schemas={"sums": SchemaCodec(SUM, "value"), "each": SchemaCodec(EACH, "value")},
        on_late=on_late,
        retries=retries,
        user_code_timeout=timeout,
    )


def _results(
    computation: Computation,
    former: Computation,
    script: Any,
    seed: Sequence[Deliveries],
    options: Any,
    budget: int,
) -> tuple[list[BundleResult], pa.Table]:
    run = IntervalRun(_node(computation, *options), Interval("c"), 2, budget, IpcRowFormat())
    run._workers[0].processor = IntervalProcessor(_node(former, *options), run.interval, run.soft_state(0))
    # The same soft state serves the code that follows, as when a pipeline is updated while it runs.
    results = [run.step(seed)]
    run._workers[0].processor = IntervalProcessor(
        _node(computation, *options), run.interval, run.soft_state(0)
    )
    watermark = 0
    for deliveries, step, is_moved, fate, letter in script:
        watermark += step
        worker = int(is_moved)
        bundle = run.bundle(deliveries, watermark, wall_time=7)
        if letter is not None:
            bundle = replace(bundle, plan=replace(bundle.plan, retried=(letter,)))
        if fate == "lost":
            run.attempt(bundle, worker)
        elif fate == "failed":
            run.soft_state(worker).synchronise(run.files)
            run.process_only(bundle, worker)
        attempt = run.attempt(bundle, worker)
        run.commit(attempt)
        results.append(attempt.result)
    return results, run.rows()


@contextmanager
def _noted() -> Iterator[list[tuple[int, int]]]:
    """Note of each bundle how many keys tables took, and how many they left."""
    taken: list[tuple[int, int]] = []
    method = TableTurns.run

    def noted(self: TableTurns, *arguments: Any) -> Any:
        part = method(self, *arguments)
        of_keys = part.change if isinstance(part, PartInColumns) else part
        taken.append((len(of_keys.places), len(part.others)))
        return part

    with patch.object(TableTurns, "run", noted):
        yield taken


@settings(max_examples=100, deadline=None)
@given(
    script=_scripts,
    seed=st.lists(_deliveries(kinds=["arrow"]), max_size=1),
    former=st.sampled_from([Seeds(), TextSeeds()]),
    on_late=st.sampled_from(["process", "process", "drop"]),
    retries=st.sampled_from([0, 2]),
    timeout=st.sampled_from([None, None, "1h"]),
    budget=st.sampled_from([BUDGET_BYTES, BUDGET_BYTES, 3_000]),
)
def test_tables_give_the_rows_and_letters_of_single_keys(
    script: Any,
    seed: Any,
    former: Computation,
    on_late: OnLate,
    retries: int,
    timeout: str | None,
    budget: int,
) -> None:
    """Poisonous records, deleted states, timers, late and repeated records, retried letters, lost bundles, evicted rows."""
    options = (on_late, retries, timeout)
    with _noted() as taken:
        tables, rows_of_tables = _results(ByTable(), former, script, seed, options, budget)
    keys, rows_of_keys = _results(ByKey(), former, script, seed, options, budget)

    event(f"tables took keys: {any(own for own, _ in taken)}, left some: {any(left for _, left in taken)}")
    event(f"letters: {any(result.dead_letters for result in tables)}")
    for one, other in zip(tables, keys, strict=True):
        assert (one.updates is None) == (other.updates is None)
        if one.updates is not None and other.updates is not None:
            assert one.updates.to_pylist() == other.updates.to_pylist()
        assert one.statistics == other.statistics
        assert (one.pending, one.productions) == (other.pending, other.productions)
        assert _told(one) == _told(other)
    assert rows_of_tables.to_pylist() == rows_of_keys.to_pylist()


def _told(result: BundleResult) -> list[Any]:
    # The error has the values as the code saw them.
    return [
        replace(letter, diagnostics="", error=letter.error.partition(":")[0])
        for letter in result.dead_letters
    ]

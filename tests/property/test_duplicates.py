"""Redelivered records of publishers, which change nothing (I2).

Clocks run fast, records are late, compactions forget, and hours pass on the wall. The oracle never forgets:
it knows the records without duplicates, and the redeliveries allowed to senders. Whole pipelines are tested,
and bundles of one interval, which are a hundred times as fast. ``MILLPOND_DUPLICATE_EXAMPLES=100000`` sets
the number of the latter; a plain test run has few. They follow from seeds, because Hypothesis would take a
fifth of the time for its draws.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from multiprocessing import get_context
from typing import Any, Final, Protocol, TypeVar
from unittest.mock import patch

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.executor.computation.values import PythonValues
from millpond.executor.interval.bundle import BundleStatistics, Deliveries
from millpond.executor.interval.known_files import KnownIds
from millpond.executor.interval.row_reader import RowReader
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.pipeline.nodes import ComputationNode, OnLate
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.run.run import RunSummary
from millpond.executor.time.watermark_policies import BoundedDisorder
from millpond.gc.compaction import CompactionPolicy, CompactionRules
from millpond.statestore.interval import Interval
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.record_ids import IdRetention
from millpond.statestore.rows.row_format import IpcRowFormat
from millpond.statestore.store import Store
from millpond.statestore.types import Superstep
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from millpond.testing.fixtures.own_writer import OwnWriter
from millpond.testing.processes.ledger import LEDGER, ROWS, START_US, Ledger
from millpond.testing.simulation.chance import Draw
from tests.fixtures.computations import SECOND_US, Count, Window
from tests.fixtures.interval_run import IntervalRun
from tests.processes.failing_code import Fragile

Row = dict[str, Any]
_Choice = TypeVar("_Choice")

MINUTE_MS: Final = 60_000
HOUR_US: Final = 3_600 * SECOND_US
EAGER: Final = CompactionPolicy(fan_in=2, files_max=2, small_bytes=1, garbage_ratio=0.1)
LAZY: Final = CompactionPolicy(fan_in=4, files_max=8)
CONSUMERS: Final = 3
MINUTE_US: Final = 60 * SECOND_US
MINUTES: Final = (0, 0, 1, 30, 59, 61, 180, 181, 700)
AHEAD_HOURS: Final = (-1, -1, -1, 0, 9)
SKEW_HOURS: Final = (0, 0, -1, 2, 9, -9)
FATES: Final = (
    "compacted",
    "compacted",
    "old files compacted",
    "young files compacted",
    "optimised",
    "restarted",
    "retried",
)
_SEEDS: Final = 20
_EXAMPLES: Final = int(os.environ.get("MILLPOND_DUPLICATE_EXAMPLES", "0"))

# Thousands of examples need no deadline.
pytestmark = [pytest.mark.timeout(0)] if _EXAMPLES else []


class Collected(OwnWriter):
    """A sink that keeps its input in memory across restarts of the pipeline."""

    def __init__(self) -> None:
        super().__init__("collected")
        self.values: Counter[str] = Counter()

    def write(self, superstep: Superstep, productions: pa.Table) -> None:
        if superstep > self.delivered:
            self.delivered = superstep
            columns = productions.select(["key", "value", "at"]).to_pylist()
            self.values.update(f"{row['key']} {row['value']} {row['at']}" for row in columns)


@dataclass(frozen=True, slots=True)
class Step:
    """A move of a script: time passes, rows arrive in one superstep, the pipeline restarts."""

    minutes: int
    rows: tuple[Row, ...]
    restarts: bool


@dataclass(frozen=True, slots=True)
class Script:
    """A run of the pipeline, and the period in which a sender may redeliver a record."""

    steps: tuple[Step, ...]
    intervals: int
    slack_hours: int

    def once(self) -> Script:
        """Return the script without duplicates: only the first delivery of each key and id."""
        seen: set[tuple[str, str]] = set()
        steps = []
        for step in self.steps:
            fresh = []
            for row in step.rows:
                if row["id"] is None or (row["k"], row["id"]) not in seen:
                    seen.add((row["k"], row["id"]))
                    fresh.append(row)
            steps.append(Step(step.minutes, tuple(fresh), restarts=False))
        return Script(tuple(steps), self.intervals, self.slack_hours)

    @property
    def deliveries(self) -> int:
        return sum(len(step.rows) for step in self.steps)


class Senders:
    """The allowed redeliveries, by a sender's own clock and the rows sent so far."""

    def __init__(self, slack_hours: int) -> None:
        self._slack_us = slack_hours * HOUR_US
        self._sent: list[tuple[int, Row]] = []
        self._newest_at = 0

    def send(self, now: int, row: Row) -> Row:
        """Record a delivery."""
        self._sent.append((now, row))
        self._newest_at = max(self._newest_at, row["t"])
        return row

    def repeatable(self, now: int) -> list[Row]:
        """Return rows first sent within a slack, or with nothing newer than a slack after them."""
        return [
            row
            for sent, row in self._sent
            if now - sent <= self._slack_us or self._newest_at - row["t"] <= self._slack_us
        ]


def fresh_row(draw: st.DrawFn, number: int, now: int) -> Row:
    """Return a record about as old as its sender's clock claims, which may be hours fast or slow."""
    skew_hours = draw(st.sampled_from([0, 0, 0, 0, 9, -9, 2]))
    return {
        "k": draw(st.sampled_from(["a", "b", "c", ""])),
        "t": now + skew_hours * HOUR_US - draw(st.integers(0, 90)) * SECOND_US,
        # Different keys share ids: only key and id together identify a record.
        "id": f"id{number}" if draw(st.integers(0, 9)) else None,
        "n": number,
        "do": "raise" if draw(st.integers(0, 9)) == 0 else "ok",
    }


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Up to a dozen records over several steps, and allowed redeliveries in any order."""
    slack_hours = draw(st.sampled_from([1, 3]))
    senders = Senders(slack_hours)
    now, number, steps = START_US, 0, []
    for _ in range(draw(st.integers(1, 7))):
        minutes = draw(st.sampled_from([0, 0, 1, 31, 60, 61, 180, 700]))
        now += minutes * 60 * SECOND_US
        rows = []
        for _ in range(draw(st.integers(0, 3))):
            row = senders.send(now, fresh_row(draw, number, now))
            rows.append(row)
            number += 1
            if draw(st.integers(0, 5)) == 0:
                rows.append(senders.send(now, {**row, "k": "twin of another key"}))
        known = [row for row in senders.repeatable(now) if row["id"] is not None]
        if known:
            rows += draw(st.lists(st.sampled_from(known), max_size=5))
        steps.append(Step(minutes, tuple(draw(st.permutations(rows))), draw(st.booleans())))
    return Script(tuple(steps), draw(st.integers(1, 3)), slack_hours)


def pipeline(sinks: dict[str, Collected], slack_hours: int) -> EnginePipeline:
    """Return a ledger with failing code, a count of its productions, a window, and a count without late rows."""
    made = EnginePipeline("p")
    rows = made.inject(
        ROWS, key="k", at="t", id="id", watermark=BoundedDisorder("1m"), id_slack=f"{slack_hours}h"
    )
    ledger = made.add(Fragile(), name=LEDGER, subscribes={ROWS: None}, produces=(LEDGER,), retries=0)
    ledger[LEDGER].sink("numbers", sinks["numbers"])
    made.stream(LEDGER).apply(Count(("counts",)), name="count", produces="counts").sink(
        "counts", sinks["counts"]
    )
    rows.apply(Window(("windows",)), name="window", produces="windows").sink("windows", sinks["windows"])
    rows.apply(Count(), name="punctual", on_late="drop")
    return made


def played(script: Script, compaction: CompactionPolicy | None) -> tuple[dict[str, Any], RunSummary]:
    """The results of a script: rows, sink contents, dead letters, watermark."""
    clock, disk, registry = ManualClock(START_US), MemoryObjects(), MemoryRegistry()
    sinks = {name: Collected() for name in ("numbers", "counts", "windows")}
    for number, sink in enumerate(sinks.values()):
        sink.identity = f"collected {number}"
    upkeep = None if compaction is None else UpkeepPolicy(compaction=compaction, collect_every=10**9)

    def opened() -> Any:
        store = Store.in_memory(objects=disk, registry=registry, clock=clock, rng=SeededRng(1))
        runner = LocalRunner(
            store,
            clock=clock,
            rng=SeededRng(2),
            intervals=script.intervals,
            progress=False,
            upkeep=upkeep,
            dead_letter_limit=None,
        )
        return store, runner.start(pipeline(sinks, script.slack_hours), stepping=True)

    store, run = opened()
    for step in script.steps:
        clock.advance_ms(step.minutes * MINUTE_MS)
        if step.rows:
            run.inject(ROWS, list(step.rows))
        run.step()
        if step.restarts:
            run.stop()
            store, run = opened()
    run.finish(ROWS)
    run.run_until_quiet()
    summary = run.stop()
    names = (LEDGER, "count", "window", "punctual", "dead_letters")
    left = {name: store.rows_view(name).to_arrow().to_pylist() for name in names}
    results: dict[str, Any] = {
        name: [
            (row["key"] if name != "dead_letters" else "", _state(name, row["state"]), row["state_bytes"])
            for row in rows
        ]
        for name, rows in left.items()
    }
    results["dead_letters"].sort()
    results |= {f"sink {name}": sink.values for name, sink in sinks.items()}
    return results, summary


def _state(name: str, state: str | None) -> str | None:
    """Return a state; of a dead letter only its record."""
    if name != "dead_letters" or state is None:
        return state
    letter = orjson.loads(state)
    return f"{letter['key']} {orjson.loads(letter['value'])['n']}"


def forgetful(
    capacity_max: int, budget_bytes: int
) -> Callable[[Interval, RowReader, Callable[[], int]], KnownIds]:
    """Return a factory of known ids that replaces the requested capacity."""

    def make(interval: Interval, reader: RowReader, _: Callable[[], int]) -> KnownIds:
        return KnownIds(interval, reader, lambda: budget_bytes, capacity_max=capacity_max)

    return make


@given(
    script=scripts(),
    compaction=st.sampled_from([EAGER, EAGER, LAZY]),
    capacity_max=st.sampled_from([1, 3, 1_000_000]),
    budget_bytes=st.sampled_from([0, 10_000, 1_000_000]),
)
@settings(deadline=None)
def test_allowed_redeliveries_change_nothing(
    script: Script, compaction: CompactionPolicy, capacity_max: int, budget_bytes: int
) -> None:
    """Order, batches, restarts, compactions and hours vary.

    Ids are looked up in memory, in files, or through a filter that is rebuilt every few records.
    """
    with patch("millpond.executor.interval.soft_state.KnownIds", forgetful(capacity_max, budget_bytes)):
        left, summary = played(script, compaction)
    once = script.once()
    # Nothing is compacted here, so nothing can be forgotten.
    expected, plain = played(once, None)

    assert left == expected
    assert summary.totals.duplicates == CONSUMERS * (script.deliveries - once.deliveries)
    assert plain.totals.duplicates == 0
    assert (summary.totals.late, summary.totals.dropped) == (plain.totals.late, plain.totals.dropped)
    assert summary.watermark == plain.watermark


@dataclass(frozen=True, slots=True)
class Turn:
    """A bundle of one interval, at a time and a watermark, and the events after it."""

    now: int
    watermark: int
    rows: tuple[Row, ...]
    worker: int
    fate: str
    cut: int


class Chooser(Protocol):
    """A source of decisions about a history: Hypothesis, or a seed at a fiftieth of the cost."""

    def number(self, low: int, high: int) -> int:
        """Return an integer from ``low`` to ``high``, both included."""
        ...

    def choice(self, choices: Sequence[_Choice]) -> _Choice: ...


class Drawn:
    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def number(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def choice(self, choices: Sequence[_Choice]) -> _Choice:
        return self._draw(st.sampled_from(choices))


@dataclass(frozen=True, slots=True)
class History:
    """The period of redelivery, and bundles whose rows are redelivered within it.

    Any part of a history is a history: without its first delivery, a duplicate is a record.
    """

    slack_hours: int
    on_late: OnLate
    turns: tuple[Turn, ...]

    def parts(self) -> Iterator[History]:
        """Yield the history without one turn, or without one row."""
        for index, turn in enumerate(self.turns):
            before, after = self.turns[:index], self.turns[index + 1 :]
            yield replace(self, turns=(*before, *after))
            for row in range(len(turn.rows)):
                rows = (*turn.rows[:row], *turn.rows[row + 1 :])
                yield replace(self, turns=(*before, replace(turn, rows=rows), *after))


def history(choose: Chooser) -> History:
    """Return a history of a few bundles.

    A sender may redeliver a row for a slack after its first delivery, and until the watermark is a slack
    past it.
    """
    slack_hours = choose.choice((1, 3))
    slack_us = slack_hours * HOUR_US
    now = watermark = START_US
    sent: list[tuple[int, Row]] = []
    made = []
    for _ in range(choose.number(2, 9)):
        now += choose.choice(MINUTES) * MINUTE_US
        watermark = max(watermark, now + choose.choice(AHEAD_HOURS) * HOUR_US)
        rows = []
        for _ in range(choose.number(0, 2)):
            number = len(sent)
            at = now + choose.choice(SKEW_HOURS) * HOUR_US - number
            # Keys share ids: only a key and an id together identify a record.
            row = {"k": "ab"[number % 2], "t": at, "id": str(number // 2).encode(), "n": number}
            sent.append((now, row))
            rows.append(row)
        allowed = [row for first, row in sent if now - first <= slack_us or watermark - row["t"] <= slack_us]
        if allowed:
            rows += [choose.choice(allowed) for _ in range(choose.number(0, 3))]
        if choose.number(0, 1):
            rows.reverse()
        made.append(
            Turn(
                now,
                watermark,
                tuple(rows),
                choose.number(0, 1),
                choose.choice(FATES),
                choose.number(0, 3),
            )
        )
    return History(slack_hours, choose.choice(("process", "drop")), tuple(made))


def bundles_of(run: IntervalRun, history: History) -> Iterator[BundleStatistics]:
    """Run the bundles, each with its fate."""
    for turn in history.turns:
        delivered = Deliveries(
            stream=ROWS,
            keys=pa.array([row["k"] for row in turn.rows], pa.string()),
            at=np.array([row["t"] for row in turn.rows], np.int64),
            values=PythonValues([{"n": row["n"]} for row in turn.rows]),
            ids=pa.array([row["id"] for row in turn.rows], pa.binary()),
        )
        bundle = run.bundle([delivered], turn.watermark, turn.now)
        if turn.fate == "retried":
            run.attempt(bundle, turn.worker)
        attempt = run.attempt(bundle, turn.worker)
        run.commit(attempt)
        retention = IdRetention.of(bundle.plan.watermark, bundle.wall_time, history.slack_hours * HOUR_US)
        rules = CompactionRules(pending_from=bundle.superstep, ids=retention)
        if turn.fate == "compacted":
            run.compact(rules)
        if turn.fate == "old files compacted":
            run.compact(rules, 0, turn.cut)
        if turn.fate == "young files compacted":
            run.compact(rules, turn.cut)
        if turn.fate == "optimised":
            run.optimise()
        if turn.fate == "restarted":
            run.soft_state(turn.worker).reset()
        yield attempt.result.statistics


def check(history: History) -> None:
    """Compare each bundle's statistics, and the final states, with the first deliveries.

    The filters are made for a thousand ids, ten times as many as a history has: larger ones would only cost
    memory.
    """
    with patch("millpond.executor.interval.soft_state.KnownIds", partial(KnownIds, capacity_max=1_000)):
        _check(history)


def _check(history: History) -> None:
    node = ComputationNode(
        name=LEDGER, computation=Ledger(), subscriptions=(), produces=(LEDGER,), on_late=history.on_late
    )
    run = IntervalRun(node, Interval(LEDGER), workers=2, row_format=IpcRowFormat())
    seen: set[int] = set()
    counted: dict[str, set[int]] = {"a": set(), "b": set()}
    for turn, statistics in zip(history.turns, bundles_of(run, history), strict=True):
        fresh = {row["n"]: row for row in turn.rows if row["n"] not in seen}
        seen |= fresh.keys()
        late = {number for number, row in fresh.items() if row["t"] < turn.watermark}
        dropped = late if history.on_late == "drop" else set()
        for number in fresh.keys() - dropped:
            counted[fresh[number]["k"]].add(number)

        assert statistics.duplicates == len(turn.rows) - len(fresh)
        assert (statistics.records, statistics.late) == (len(fresh), len(late))
        assert statistics.dropped == len(dropped)
    left = {row["key"]: orjson.loads(row["state"]) for row in run.rows().to_pylist()}

    assert {key: sorted(numbers) for key, numbers in left.items()} == {
        key: sorted(numbers) for key, numbers in counted.items() if numbers
    }


def least(history: History, is_bad: Callable[[History], bool]) -> History:
    """Return a bad history without a smaller bad part."""
    smaller = next(filter(is_bad, history.parts()), None)
    return history if smaller is None else least(smaller, is_bad)


def fails(history: History, kind: type[Exception]) -> bool:
    """Return True if a history fails in this way."""
    try:
        check(history)
    except kind:
        return True
    return False


def check_seeds(seeds: range) -> None:
    """Check the histories of these seeds; the error of the first failure names its least bad part."""
    for seed in seeds:
        made = history(Draw(seed))
        try:
            check(made)
        except Exception as error:
            part = least(made, partial(fails, kind=type(error)))
            error.add_note(f"history of seed {seed}; the least part that fails: {part}")
            raise


@given(made=st.composite(lambda draw: history(Drawn(draw)))())
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_interval_counts_each_record_once(made: History) -> None:
    """The first delivery has its effect or is dropped as late.

    Compactions, rewrites by another engine, retries and restarts lie between the deliveries.
    """
    check(made)


def test_interval_counts_each_record_once_in_many_histories() -> None:
    """Histories follow from seeds, up to 100,000 on all processors."""
    if not _EXAMPLES:
        check_seeds(range(_SEEDS))
        return
    parts = [range(_EXAMPLES)[start : start + _SEEDS] for start in range(0, _EXAMPLES, _SEEDS)]
    with ProcessPoolExecutor(
        mp_context=get_context("spawn"), initializer=pa.set_cpu_count, initargs=(1,)
    ) as pool:
        try:
            checked = sum(1 for _ in pool.map(check_seeds, parts))
        finally:
            pool.shutdown(cancel_futures=True)
    assert checked == len(parts)


def test_failing_history_is_reduced_to_two_deliveries() -> None:
    def is_bad(made: History) -> bool:
        return [row["n"] for turn in made.turns for row in turn.rows].count(3) > 1

    bad = next(made for made in map(history, map(Draw, count())) if is_bad(made))

    left = least(bad, is_bad)
    assert is_bad(left)
    assert not any(map(is_bad, left.parts()))
    assert [row["n"] for turn in left.turns for row in turn.rows] == [3, 3]

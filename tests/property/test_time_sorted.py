"""Records sorted by time, against a plain sort and scan, for any cut and disorder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args
from unittest.mock import patch

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.executor.computation.computation import Computation, Drain
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record, Records
from millpond.executor.computation.timers import Timer
from millpond.executor.local import bounded
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.nodes import ComputationOptions
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.time.watermark_policies import BoundedDisorder
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

Row = dict[str, Any]
Journals = dict[str, list[list[Any]]]

BOUND = 6
KEYS = ("a", "b")
STREAMS = ("left", "right")
TAGS = ("", "x")


class Journal(Computation):
    """Obeys its records, and keeps everything in its order of arrival."""

    def process_record(self, context: Context, record: Record) -> None:
        """Record the input, then set a timer, delete one, or fail."""
        action, tag, delay = record.value["action"]
        if action == "fail":
            raise ValueError(record.at)
        assert not record.late
        journal = context.state.get([])
        context.state.set([*journal, ["record", record.stream, record.value["number"], context.watermark]])
        if action == "set":
            context.set_timer(record.at + delay, tag)
        if action == "delete":
            context.delete_timer(tag)

    def process_timer(self, context: Context, timer: Timer) -> None:
        """Record the timer; a timer called x starts another."""
        context.state.set([*context.state.get([]), ["timer", timer.tag, timer.at, context.watermark]])
        if timer.tag == "x":
            context.set_timer(timer.at + 5, "")


class BatchJournal(Journal):
    """The same through the hook for several records at once."""

    def process_records(self, context: Context, records: Records) -> None:
        for record in records:
            self.process_record(context, record)


def scan(rows: Sequence[Row], drain: Drain) -> Journals:
    """The oracle: sort all rows by time, and fire due timers before each.

    It knows neither bundles nor watermarks nor stores. Rows of one time are sorted by stream, the left
    first, then by arrival. A timer after the newest of all rows sets no other timer, unless ``drain`` is all.
    """
    journals: Journals = {}
    last = max((row["t"] for row in rows), default=0) if drain == "last_event" else None
    for key in sorted({row["k"] for row in rows}):
        own = [row for row in rows if row["k"] == key]
        own.sort(key=lambda row: (row["t"], STREAMS.index(row["s"])))
        seen, timers = list[list[Any]](), dict[str, int]()
        for row in own:
            _fire(timers, row["t"], seen, last)
            action, tag, delay = row["action"]
            if action == "fail":
                continue
            seen.append(["record", row["s"], row["number"], row["t"]])
            if action == "set":
                timers[tag] = row["t"] + delay
            if action == "delete":
                timers.pop(tag, None)
        _fire(timers, None, seen, last)
        if seen:
            journals[key] = seen
    return journals


def _fire(timers: dict[str, int], until: int | None, seen: list[list[Any]], last: int | None) -> None:
    while timers:
        at, tag = min((at, tag) for tag, at in timers.items())
        if until is not None and at > until:
            return
        del timers[tag]
        seen.append(["timer", tag, at, at])
        if tag == "x":
            timers[""] = at + 5
            if last is not None and at > last:
                del timers[""]


def pipeline_of(
    computation: Computation, streams: Sequence[str], drain: Drain = "last_event"
) -> EnginePipeline:
    """Return the computation on these streams, out of order by `BOUND`."""
    pipeline = EnginePipeline("sorted")
    for stream in streams:
        pipeline.inject(stream, key="k", at="t", id="id", watermark=BoundedDisorder(f"{BOUND}us"))
    subscribes = dict.fromkeys(streams)
    options = ComputationOptions(time_sorted=True, retries=0, drain=drain)
    pipeline.add(computation, name="journal", subscribes=subscribes, **options)
    return pipeline


def journals_of(store: Store) -> Journals:
    rows = store.rows_view("journal").to_arrow().to_pylist()
    return {row["key"]: orjson.loads(row["state"]) for row in rows if row["state"] is not None}


actions = st.one_of(
    st.just(("none", "", 0)),
    st.tuples(st.just("set"), st.sampled_from(TAGS), st.integers(-2, 9)),
    st.tuples(st.just("delete"), st.sampled_from(TAGS), st.just(0)),
    st.just(("fail", "", 0)),
)
arrivals = st.lists(
    st.tuples(
        st.sampled_from(STREAMS), st.sampled_from(KEYS), st.integers(0, 40), st.integers(0, BOUND), actions
    ),
    max_size=24,
)


def arrived(drawn: Sequence[tuple[str, str, int, int, Any]], streams: Sequence[str]) -> list[Row]:
    """Return rows in an order of arrival at most `BOUND` late; rows of one time keep their order."""
    late_by = {(stream, at): delay for stream, _, at, delay, _ in drawn}
    ordered = sorted(drawn, key=lambda one: one[2] + late_by[one[0], one[2]])
    return [
        {"s": stream, "k": key, "t": at, "action": action, "number": number, "id": str(number)}
        for number, (stream, key, at, _, action) in enumerate(ordered)
        if stream in streams
    ]


def cut(rows: Sequence[Row], sizes: Sequence[int]) -> list[list[Row]]:
    """Cut rows into pieces of these sizes, repeatedly."""
    pieces, rest = list[list[Row]](), list(rows)
    while rest:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(rest[:size])
        rest = rest[size:]
    return pieces


def streamed(
    computation: Computation,
    rows: Sequence[Row],
    sizes: Sequence[int],
    restarts: set[int],
    streams: Sequence[str],
    drain: Drain,
) -> Journals:
    """Return the journals of rows in pieces, some redelivered, with restarts after some."""
    clock = ManualClock()
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    runner = LocalRunner(store, clock=clock, progress=False, intervals=2, dead_letter_limit=None)
    pieces = cut(rows, sizes)
    for number in range(len(pieces) + 1):
        if not number or number in restarts:
            run = runner.start(pipeline_of(computation, streams, drain), stepping=True)
        for again in pieces[number : number + 1] + pieces[number : number + 1] * (number in restarts):
            for row in again:
                run.inject(row["s"], [row])
            run.step()
        if number + 1 in restarts and number < len(pieces):
            run.stop()
    for stream in streams:
        run.finish(stream)
    run.run_until_quiet()
    assert not any(_waiting(run.summary().totals.by_computation))
    run.stop()
    return journals_of(store)


def _waiting(counts: Mapping[str, Mapping[str, int]]) -> list[int]:
    return [of_code.get("waited", 0) - of_code.get("resumed", 0) for of_code in counts.values()]


drains = st.sampled_from(get_args(Drain))
sizes = st.lists(st.integers(1, 12), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(arrivals, sizes, st.sets(st.integers(1, 12), max_size=3), st.booleans(), drains)
def test_stream_in_any_pieces_is_sorted_and_scanned(
    drawn: list[Any], pieces: list[int], restarts: set[int], is_batch: bool, drain: Drain
) -> None:
    rows = arrived(drawn, STREAMS[:1])

    computation = BatchJournal() if is_batch else Journal()
    journal = streamed(computation, rows, pieces, restarts, STREAMS[:1], drain)

    assert journal == scan(rows, drain)


@settings(max_examples=60, deadline=None)
@given(arrivals, sizes, st.sets(st.integers(1, 12), max_size=2), drains)
def test_two_streams_are_sorted_together(
    drawn: list[Any], pieces: list[int], restarts: set[int], drain: Drain
) -> None:
    """Of one time, the first stream's records come first."""
    rows = arrived(drawn, STREAMS)

    assert streamed(Journal(), rows, pieces, restarts, STREAMS, drain) == scan(rows, drain)


@settings(max_examples=60, deadline=None)
@given(arrivals, st.integers(1, 9), drains)
def test_bounded_run_equals_the_stream(drawn: list[Any], piece: int, drain: Drain) -> None:
    """Input is in any order and pieces of any size."""
    rows = arrived(drawn, STREAMS)
    clock = ManualClock()
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    runner = LocalRunner(store, clock=clock, progress=False, intervals=2, dead_letter_limit=None)
    own = {stream: [row for row in rows if row["s"] == stream] for stream in STREAMS}

    with patch.object(bounded, "BUNDLE_RECORDS_MAX", piece):
        runner.run(pipeline_of(Journal(), STREAMS, drain), own)

    assert journals_of(store) == scan(rows, drain)


def test_oracle_orders_streams_as_subscribed() -> None:
    topology = pipeline_of(Journal(), STREAMS).check()

    assert [topology.computations["journal"].rank(stream) for stream in STREAMS] == [0, 1]

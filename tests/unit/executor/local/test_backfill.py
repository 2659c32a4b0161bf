"""Backfills in the local runner."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millpond as mp
from millpond.executor.replay.repair import repair_store
from millpond.executor.replay.repair_plan import plan_rewind
from millpond.statestore.failpoint import listening
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.types import TableVersion
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

pytestmark = pytest.mark.slow

SECOND = 1_000_000
ROWS = [{"k": "ab"[n % 2], "at": (100 + n) * SECOND, "id": str(n), "n": n} for n in range(22)]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("millpond.executor.local.worker.BUNDLE_RECORDS_MAX", 4)
    monkeypatch.setattr("millpond.executor.local.bounded.BUNDLE_RECORDS_MAX", 4)
    return None


class Count(mp.Computation):
    def process_record(self, context, record):
        context.state.set(context.state.get(0) + 1)


class Seen(mp.Computation):
    def process_record(self, context, record):
        context.state.set([*context.state.get([]), [record.value["n"], record.late]])


class Forward(Count):
    def process_record(self, context, record):
        super().process_record(context, record)
        context.produce("forward", record.value)


class Alarm(mp.Computation):
    """A list of numbers, and of alarms that follow them by two seconds."""

    def process_record(self, context, record):
        context.state.set([*context.state.get([]), record.value["n"]])
        context.set_timer(record.at + 2 * SECOND, tag=str(record.value["n"]))

    def process_timer(self, context, timer):
        context.state.set([*context.state.get([]), f"alarm {timer.tag}"])


def pipeline(backfill: Any = None, *, joins: bool = True, ids: bool = False, **more: Any) -> mp.Pipeline:
    made = mp.Pipeline("p")
    stream = made.inject("s", key="k", at="at", id="id" if ids else None)
    stream.apply(Count(), name="old")
    if joins:
        stream.apply(Count(), name="new", backfill=backfill, **more)
        stream.window(mp.FixedWindows("5s")).combine(mp.Count(), name="windows", backfill=backfill)
    return made


def states(store: mp.Store, computation: str) -> dict[str, Any]:
    rows = store.rows_view(computation).to_arrow().to_pylist()
    return {row["key"]: json.loads(row["state"]) for row in rows}


def runner(store: mp.Store) -> mp.LocalRunner:
    return mp.LocalRunner(store, progress=False, upkeep=None, rng=SeededRng(9))


@pytest.fixture
def store() -> Iterator[mp.Store]:
    with mp.Store.in_memory(clock=ManualClock(), rng=SeededRng(1)) as opened:
        yield opened


WHOLE = {"a": 11, "b": 11}


def test_backfill_from_the_input_ends_at_the_stored_position(store: mp.Store) -> None:
    """The rows before the position are history and the others live, so each counts once: 22, not 33."""
    runner(store).run(pipeline(joins=False), {"s": ROWS[:11]}, finish=False)
    runner(store).run(pipeline("input"), {"s": ROWS}, finish=False)

    assert states(store, "old") == states(store, "new") == WHOLE


def test_history_that_overlaps_the_input_is_deduplicated_by_ids(store: mp.Store) -> None:
    """Before backfills, an overlapping second stream counted 22 for 11."""
    runner(store).run(pipeline(joins=False, ids=True), {"s": ROWS[:11]}, finish=False)
    summary = runner(store).run(pipeline(ROWS, ids=True), {"s": ROWS}, finish=False)

    assert states(store, "new") == WHOLE
    assert summary.run.duplicates == 22
    assert summary.run.injected == 11


def test_backfill_from_the_input_of_a_new_store_skips_nothing(store: mp.Store) -> None:
    for until in (11, 22):
        runner(store).run(pipeline("input"), {"s": ROWS[:until]}, finish=False)

    assert states(store, "old") == states(store, "new") == WHOLE


def test_history_is_in_order_and_never_late_and_timers_fire_on_the_way(store: mp.Store) -> None:
    """The history lies behind the stream's watermark and is longer than one piece."""
    made = mp.Pipeline("p")
    stream = made.inject("s", key="k", at="at")
    stream.apply(Count(), name="old")
    runner(store).run(made, {"s": ROWS}, finish=False)
    stream.apply(Seen(), name="seen", key=lambda row: "all", backfill=ROWS[::-1])
    stream.apply(Alarm(), name="alarm", key=lambda row: "all", backfill=ROWS[::-1])

    summary = runner(store).run(made, {"s": ROWS}, finish=True)

    assert states(store, "seen") == {"all": [[n, False] for n in range(22)]}
    told = states(store, "alarm")["all"]
    assert summary.run.late == 0
    assert sorted(map(str, told)) == sorted([*map(str, range(22)), *(f"alarm {n}" for n in range(22))])
    # Before the piece that begins with 12, the watermark had passed 110 s.
    assert told.index("alarm 8") < told.index(12) < told.index("alarm 12")


def test_injected_rows_wait_for_the_history(store: mp.Store) -> None:
    """In stepping mode each step processes one piece."""
    made = pipeline(ROWS[:11])
    with runner(store).start(made, stepping=True) as run:
        run.inject("s", ROWS[11:])
        run.step()
        assert sum(states(store, "new").values()) == 4
        assert states(store, "old") == {}
        run.run_until_quiet()

    assert states(store, "new") == WHOLE
    assert states(store, "old") == {"a": 5, "b": 6}


def test_stream_beyond_the_skew_limit_resumes_after_the_history(store: mp.Store) -> None:
    """The limit counts from the slowest computation, here the new one until its history is done."""
    made = mp.Pipeline("p")
    stream = made.inject("s", key="k", at="at", skew_limit="1s")
    stream.apply(Count(), name="old")
    runner(store).run(made, {"s": ROWS[:11]}, finish=False)
    stream.apply(Count(), name="new", backfill=ROWS[:11])
    with runner(store).start(made, stepping=True) as run:
        run.inject("s", ROWS[11:])
        run.run_until_quiet()

    assert states(store, "new") == WHOLE


def test_threaded_run_processes_the_history(store: mp.Store) -> None:
    with runner(store).start(pipeline(ROWS[:11])) as run:
        run.inject("s", ROWS[11:]).wait()
        assert run.run_until_quiet(timeout="1m")

    assert states(store, "new") == WHOLE


@pytest.mark.parametrize("kind", ["table", "file", "pandas", "iterator"])
def test_history_may_be_a_table_file_frame_or_list(store: mp.Store, tmp_path: Path, kind: str) -> None:
    table = pa.Table.from_pylist(ROWS[:11])
    pq.write_table(table, tmp_path / "rows.parquet")
    kinds = {
        "table": table,
        "file": tmp_path / "rows.parquet",
        "pandas": table.to_pandas(),
        "iterator": ROWS[:11],
    }
    runner(store).run(pipeline(kinds[kind]), {"s": ROWS[11:]}, finish=False)

    assert states(store, "new") == WHOLE


def test_histories_of_several_streams_advance_together(store: mp.Store) -> None:
    """The stream that is furthest behind goes first, so no record is late because of another."""
    made = mp.Pipeline("p")
    for name in ("left", "right"):
        made.inject(name, key="k", at="at")
    made.add(
        Seen(),
        name="seen",
        subscribes=dict.fromkeys(("left", "right"), lambda row: "all"),
        backfill={"left": ROWS[::2], "right": ROWS[1::2]},
    )
    with runner(store).start(made, stepping=True) as run:
        run.run_until_quiet()

    told = states(store, "seen")["all"]
    assert sorted(n for n, _ in told) == list(range(22))
    assert not any(late for _, late in told)


@pytest.mark.parametrize("mode", ["weak", "time_sorted", "cut into intervals"])
def test_history_works_with_weak_time_sorted_and_split_computations(store: mp.Store, mode: str) -> None:
    options: dict[str, Any] = {
        "weak": {"productions": "weak"},
        "time_sorted": {"time_sorted": True},
        "cut into intervals": {"intervals": 2},
    }[mode]
    made = mp.Pipeline("p")
    stream = made.inject("s", key="k", at="at")
    stream.apply(Count(), name="old")
    runner(store).run(made, {"s": ROWS[:11]}, finish=False)
    forwarded = stream.apply(Forward(), name="forward", backfill="input", **options)
    forwarded.apply(Seen(), name="seen", key=lambda value: "all")

    runner(store).run(made, {"s": ROWS}, finish=True)

    told = states(store, "seen")["all"]
    assert sorted(n for n, _ in told) == list(range(22))
    assert not any(late for _, late in told)
    assert states(store, "forward") == WHOLE


def test_unreadable_history_becomes_dead_letters_of_the_new_computation(store: mp.Store) -> None:
    rows = [*ROWS[:5], {"k": None, "at": 1, "id": "x", "n": 0}, {"k": "a", "at": None, "id": "y", "n": 0}]
    summary = mp.LocalRunner(store, progress=False, dead_letter_limit=None).run(
        pipeline(rows), {"s": ROWS[11:12]}, finish=False
    )

    letters = summary.run.by_computation
    assert {name: counts["dead_letters"] for name, counts in letters.items()} == {"new": 2, "windows": 2}


def test_empty_history_is_complete(store: mp.Store) -> None:
    """The next run must not read its backfill, which does not exist."""
    runner(store).run(pipeline([]), {"s": ROWS[:11]}, finish=False)
    runner(store).run(pipeline("/nowhere/rows.parquet"), {"s": ROWS}, finish=False)

    assert states(store, "new") == WHOLE


@pytest.mark.parametrize("others", [ROWS[1:], [{**ROWS[0], "n": 7}, *ROWS[1:]]], ids=["fewer", "edited"])
def test_backfill_that_does_not_continue_is_refused(store: mp.Store, others: list[dict[str, Any]]) -> None:
    """The process died after the first piece; the order of the given rows does not matter."""
    runner(store).run(pipeline(joins=False), {"s": ROWS}, finish=False)
    pieces = 0

    def die(name: str) -> None:
        nonlocal pieces
        pieces += name == "superstep.applied"
        if pieces == 2:
            raise Died(name)

    with listening(die), pytest.raises(Died):
        runner(store).run(pipeline(ROWS), {"s": ROWS}, finish=False)
    assert 0 < sum(states(store, "new").values()) < len(ROWS)

    with pytest.raises(mp.InvalidError, match="not the first 8 of this backfill in the order of their times"):
        runner(store).run(pipeline(others), {"s": ROWS}, finish=False)
    runner(store).run(pipeline(ROWS[::-1]), {"s": ROWS}, finish=False)
    assert states(store, "old") == states(store, "new") == WHOLE


def test_backfill_from_the_input_is_refused_after_inject(store: mp.Store) -> None:
    """No stored position counts injected rows, so the end of the history is unknown."""
    with runner(store).start(pipeline(joins=False), stepping=True) as run:
        run.inject("s", ROWS[:11])
        run.run_until_quiet()

    with pytest.raises(mp.InvalidError, match="no position of a bounded input counts"):
        runner(store).run(pipeline("input"), {"s": ROWS}, finish=False)


def test_loaded_computation_refuses_a_backfill(store: mp.Store) -> None:
    """The refusal must also release the leases."""
    store.load("new", [{"key": "a", "state": 5}])

    with pytest.raises(mp.InvalidError, match="has run, or was loaded, without its backfill"):
        runner(store).run(pipeline(ROWS), {"s": ROWS}, finish=False)

    with mp.LocalRunner(store, progress=False, on_held="refuse").start(pipeline(), stepping=True) as run:
        run.inject("s", ROWS)
        run.run_until_quiet()
    assert states(store, "new") == {"a": 16, "b": 11}


def test_history_shorter_than_the_consumed_part_is_refused(store: mp.Store) -> None:
    """Afterwards the right history continues."""
    made = pipeline(ROWS[:11])
    run = runner(store).start(made, stepping=True)
    run.step()
    run.stop()

    with pytest.raises(mp.InvalidError, match="it is another one"):
        runner(store).start(pipeline(ROWS[:3]), stepping=True)

    runner(store).run(made, {"s": ROWS[11:]}, finish=False)
    assert states(store, "new") == WHOLE


def test_renamed_computation_keeps_its_history(store: mp.Store) -> None:
    runner(store).run(pipeline("input"), {"s": ROWS[:11]}, finish=False)
    made = mp.Pipeline("p", drop=["windows"])
    stream = made.inject("s", key="k", at="at")
    stream.apply(Count(), name="old")
    stream.apply(Count(), name="newer", backfill="input", renamed_from="new")

    runner(store).run(made, {"s": ROWS}, finish=False)

    assert states(store, "newer") == WHOLE


def test_rewind_to_before_the_backfill_repeats_it() -> None:
    """The rewind also reverts the history's position."""
    disk, registry, clock = MemoryObjects(), mp.testing.MemoryRegistry(), ManualClock()
    with mp.Store.in_memory(objects=disk, registry=registry, clock=clock, rng=SeededRng(1)) as store:
        runner(store).run(pipeline(joins=False), {"s": ROWS[:11]}, finish=False)
        before = store.snapshot().version
        runner(store).run(pipeline("input"), {"s": ROWS}, finish=False)
    leases = mp.testing.MemoryLeases(registry, clock)
    repair_store(disk, plan_rewind(disk, TableVersion(before), None), leases, clock, SeededRng(2))
    leases.close()
    with mp.Store.in_memory(objects=disk, registry=registry, clock=clock, rng=SeededRng(3)) as store:
        assert states(store, "new") == {}
        runner(store).run(pipeline("input"), {"s": ROWS}, finish=False)

        assert states(store, "old") == states(store, "new") == WHOLE


class Died(BaseException):
    """The process died here."""


@pytest.mark.parametrize("ids", [False, True])
def test_each_record_counts_once_wherever_the_process_dies(*, ids: bool) -> None:
    """The process dies at each failpoint of the run with the backfill, then at the same one of the next run."""
    deaths = 0
    for death in range(1, 1_000, 4 if ids else 1):
        disk, registry = MemoryObjects(), mp.testing.MemoryRegistry()
        clock, reached = ManualClock(), Counter[str]()

        def die(name: str, reached: Counter[str] = reached, death: int = death) -> None:
            reached[name] += 1
            if reached.total() == death:
                raise Died(name)

        def opened(
            seed: int,
            disk: MemoryObjects = disk,
            registry: mp.testing.MemoryRegistry = registry,
            clock: ManualClock = clock,
        ) -> mp.Store:
            return mp.Store.in_memory(objects=disk, registry=registry, clock=clock, rng=SeededRng(seed))

        history = ROWS if ids else "input"
        with opened(1) as store:
            runner(store).run(pipeline(joins=False, ids=ids), {"s": ROWS[:11]}, finish=False)
        has_died = True
        for attempt in range(2):
            reached.clear()
            try:
                with opened(10 + attempt) as store, listening(die):
                    runner(store).run(pipeline(history, ids=ids), {"s": ROWS}, finish=True)
                has_died = False
            except Died:
                deaths += 1
        with opened(20) as store:
            runner(store).run(pipeline(history, ids=ids), {"s": ROWS}, finish=True)
            assert states(store, "old") == states(store, "new") == WHOLE, death
            assert states(store, "windows") == {}
        if not has_died:
            break
    assert deaths > 30


def declared(backfill: Any, *, behind: bool = False, **inject: Any) -> mp.Pipeline:
    made = mp.Pipeline("p")
    stream = made.inject("s", **{"key": "k", "at": "at", **inject})
    if behind:
        stream = stream.apply(Count(), name="before", produces="produced")
    stream.apply(Count(), name="new", backfill=backfill)
    return made


def test_backfill_of_unsupported_streams_is_refused() -> None:
    """Produced streams, times of arrival and changes have no history."""
    with pytest.raises(mp.InvalidError, match="consumes injected streams only"):
        declared(ROWS, behind=True).check()
    with pytest.raises(mp.InvalidError, match="by time of arrival"):
        declared(ROWS, at=mp.IngressTime()).check()
    with pytest.raises(mp.InvalidError, match="a stream of changes"):
        declared(ROWS, change="op").check()
    with pytest.raises(mp.InvalidError, match="or map streams that the computation consumes"):
        declared({"other": ROWS})
    made = mp.Pipeline("p")
    for name in ("left", "right"):
        made.inject(name, key="k", at="at")
    with pytest.raises(mp.InvalidError, match="map each to its backfill"):
        made.add(Count(), name="new", subscribes={"left": None, "right": None}, backfill=ROWS)

"""Exactly-once retries of dead letters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import orjson
import pytest

import millpond as mp
from millpond.executor.local.engine import LocalBatch
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.ownership.cuts import Cut
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.letter_retries import (
    LetterRequest,
    LetterSelection,
    ask_for_letters,
    waiting_letter_requests,
    withdraw_letter_requests,
)
from millpond.statestore.errors import FencedError, InvalidError
from millpond.statestore.failpoint import listening
from millpond.statestore.interval import Interval
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.rules import CommitRequest
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

KEYS = "abxy"
ALL = LetterSelection()


class Crash(BaseException):
    """The end of a process."""


class Fickle(mp.Computation):
    """A count that forwards its records. Until mended, odd records and timers of key ``a`` fail."""

    def __init__(self, *, mended: bool) -> None:
        self.mended = mended

    def process_record(self, context, record):
        context.produce("out", {"n": record.value["n"]})
        context.state.set(context.state.get(0) + 1)
        if record.value["n"] % 4 == 1 and not self.mended:
            raise ValueError("odd")
        context.set_timer(record.at + 1, tag=str(record.value["n"]))

    def process_timer(self, context, timer):
        context.produce("out", {"timer": timer.tag})
        if context.key == "a" and not self.mended:
            raise ValueError("timer")


class Seen(mp.Computation):
    def process_record(self, context, record):
        context.state.set(sorted([*context.state.get([]), orjson.dumps(record.value).decode()]))


def pipeline(*, mended: bool, name: str = "fickle", **options: Any) -> mp.Pipeline:
    """Chain ``in`` → ``fickle`` → ``seen``."""
    made = mp.Pipeline("p")
    stream = made.inject("in", key="k", at="n", id="n").apply(
        Fickle(mended=mended), name=name, produces="out", **options
    )
    stream.apply(Seen(), name="seen")
    return made


class Pond:
    """A store in memory for several owners in turn."""

    def __init__(self) -> None:
        self.clock, self.rng = ManualClock(), SeededRng(1)
        self.disk, self.registry = MemoryObjects(), MemoryRegistry()

    def store(self) -> Store:
        return Store.in_memory(objects=self.disk, registry=self.registry, clock=self.clock, rng=self.rng)

    def start(self, made: mp.Pipeline, *, deaf: bool = False) -> LocalRun:
        """Start a run; a deaf one is never notified of lost leases."""
        store = self.store()
        runner = LocalRunner(
            store, clock=self.clock, rng=self.rng, progress=False, intervals=1, dead_letter_limit=None
        )
        run = runner.start(made, stepping=True)
        if deaf:
            assert isinstance(store.leases, MemoryLeases)
            store.leases.hold_notices()
        return run

    def copy(self) -> Pond:
        """Copy the store."""
        other = Pond()
        for path in self.disk.list(""):
            other.disk.put(path, self.disk.get(path))
        return other

    def states(self) -> dict[str, dict[str, Any]]:
        store = self.store()
        found: dict[str, dict[str, Any]] = {}
        for name in ("fickle", "seen", "dead_letters"):
            rows = store.rows_view(name).to_arrow().to_pylist()
            found[name] = {row["key"]: orjson.loads(row["state"]) for row in rows if row["state"]}
        return found

    def ask(self, action: Any = "retry", selection: LetterSelection = ALL) -> int:
        return ask_for_letters(self.store(), action, selection).letters

    def waiting(self) -> tuple[LetterRequest, ...]:
        return waiting_letter_requests(self.store().snapshot().txns)


def rows() -> list[dict[str, Any]]:
    return [{"k": KEYS[n % 4], "n": n} for n in range(16)] + [{"k": "x", "n": 101}]


def ended(run: LocalRun) -> None:
    run.run_until_quiet()
    run.finish("in")
    run.run_until_quiet()
    run.stop()


@pytest.fixture(scope="module")
def failed() -> Pond:
    """A store whose pipeline has ended with letters of records and timers."""
    pond = Pond()
    run = pond.start(pipeline(mended=False))
    run.inject("in", rows())
    ended(run)
    letters = pond.states()["dead_letters"].values()
    assert {letter["error"] for letter in letters} == {"ValueError: odd", "ValueError: timer"}
    return pond


@pytest.fixture(scope="module")
def right() -> dict[str, dict[str, Any]]:
    """The states that mended code has from the start."""
    pond = Pond()
    run = pond.start(pipeline(mended=True))
    run.inject("in", rows())
    ended(run)
    return pond.states()


def coordinator_of(run: LocalRun) -> Coordinator:
    return run._worker.coordinator


def dying_at(number: int) -> tuple[Callable[[str], None], list[str]]:
    """Make a listener that ends the process at this failpoint, and the list of failpoints reached."""
    reached: list[str] = []

    def listen(name: str) -> None:
        reached.append(name)
        if len(reached) == number:
            raise Crash(name)

    return listen, reached


def test_letters_take_effect_once_after_a_crash_at_any_failpoint(
    failed: Pond, right: dict[str, dict[str, Any]]
) -> None:
    """The tool dies while it asks, or the pipeline while it retries."""
    died_at = set()
    number = 0
    while True:
        number += 1
        pond = failed.copy()
        listen, reached = dying_at(number)
        try:
            with listening(listen):
                pond.ask()
                run = pond.start(pipeline(mended=True))
                run.run_until_quiet()
        except Crash as crash:
            died_at.add(str(crash))
        if not pond.waiting() and pond.states()["dead_letters"]:
            pond.ask()
        ended(pond.start(pipeline(mended=True)))
        assert pond.states() == right, f"after a crash at {reached[-1]}"
        assert pond.waiting() == ()
        if len(reached) < number:
            break
    assert died_at >= {
        "commit.before_put",
        "commit.after_put",
        "superstep.planned",
        "superstep.bundle_processed",
        "superstep.file_written",
        "superstep.before_commit",
        "superstep.committed",
        "superstep.applied",
    }


def test_fenced_owner_retries_nothing(failed: Pond, right: dict[str, dict[str, Any]]) -> None:
    """The letters are in a superstep that it cannot commit; the new owner retries them."""
    pond = failed.copy()
    former = pond.start(pipeline(mended=True), deaf=True)
    former.run_until_quiet()
    pond.ask()
    pond.clock.advance_ms(1_000)
    coordinator = coordinator_of(former)
    assert coordinator.has_work()
    superstep = former._worker.superstep.prepare(LocalBatch())
    assert superstep.results.manifests

    successor = pond.start(pipeline(mended=True))
    with pytest.raises(FencedError):
        former._worker.superstep.commit(superstep)
    ended(successor)
    assert pond.states() == right


def test_letters_follow_a_cut_between_request_and_retry(
    failed: Pond, right: dict[str, dict[str, Any]]
) -> None:
    pond = failed.copy()
    run = pond.start(pipeline(mended=True))
    run.run_until_quiet()
    pond.ask()
    coordinator_of(run).recut(Cut.split(Interval("fickle"), ["b", "x"]))
    pond.clock.advance_ms(1_000)
    ended(run)

    assert pond.states() == right
    assert len(pond.store().snapshot().live_intervals("fickle")) == 3


def test_letter_of_overlapping_requests_is_retried_once(
    failed: Pond, right: dict[str, dict[str, Any]]
) -> None:
    pond = failed.copy()
    assert pond.ask(selection=LetterSelection(key="x")) == 1
    assert pond.ask(selection=LetterSelection(stream="in")) == 5
    assert pond.ask() == 9
    assert pond.ask() == 9
    assert len(pond.waiting()) == 3
    ended(pond.start(pipeline(mended=True)))

    assert pond.states() == right
    assert pond.waiting() == ()


def test_dropped_letter_is_not_retried(failed: Pond, right: dict[str, dict[str, Any]]) -> None:
    """The retry was requested first and has begun."""
    pond = failed.copy()
    pond.ask()
    run = pond.start(pipeline(mended=True))
    assert coordinator_of(run).has_work()
    assert pond.ask("drop", LetterSelection(key="x")) == 1
    pond.clock.advance_ms(1_000)
    ended(run)

    states = pond.states()
    assert states["dead_letters"] == {}
    assert states["fickle"] == {**right["fickle"], "x": right["fickle"]["x"] - 1}


def test_withdrawn_request_keeps_the_remaining_letters(failed: Pond, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.executor.superstep.letter_retries._RETRIED_MAX", 2)
    pond = failed.copy()
    pond.ask()
    run = pond.start(pipeline(mended=True))
    run.step()
    assert len(withdraw_letter_requests(pond.store())) == 1
    # The next commit shows the withdrawal to the pipeline.
    run.step()
    pond.clock.advance_ms(1_000)
    ended(run)

    assert len(pond.states()["dead_letters"]) == 5
    assert pond.waiting() == ()


def test_request_repeated_during_its_answer_is_answered_again(
    failed: Pond, right: dict[str, dict[str, Any]]
) -> None:
    """Nothing is retried twice."""
    pond = failed.copy()
    pond.ask()
    run = pond.start(pipeline(mended=True))
    retries = coordinator_of(run).letters.retries
    retries.answer = lambda _: None  # type: ignore[method-assign]
    run.run_until_quiet()
    del retries.answer
    (request,) = pond.waiting()
    repeated = LetterRequest(pipeline="p", action="retry", selection=ALL, number=request.number + (2 << 16))
    committer = pond.store().committer
    committer.commit(CommitRequest(kind="request", positions={repeated.app_id: repeated.number}))
    coordinator_of(run).maintain()
    assert pond.waiting() == (repeated,)

    pond.clock.advance_ms(1_000)
    ended(run)
    assert pond.waiting() == ()
    assert pond.states() == right


def test_letters_above_the_limit_are_retried_by_later_supersteps(
    failed: Pond, right: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is retried once, even if the run ends in between."""
    monkeypatch.setattr("millpond.executor.superstep.letter_retries._RETRIED_MAX", 2)
    pond = failed.copy()
    pond.ask()
    run = pond.start(pipeline(mended=True))
    run.step()
    assert len(pond.states()["dead_letters"]) == 7
    run.step()
    run.stop()
    assert len(pond.states()["dead_letters"]) == 5
    ended(pond.start(pipeline(mended=True)))

    assert pond.states() == right


def test_letters_follow_a_renamed_computation(failed: Pond) -> None:
    pond = failed.copy()
    pond.ask()
    ended(pond.start(pipeline(mended=True, name="steady", renamed_from="fickle")))

    assert pond.states()["dead_letters"] == {}
    rows = pond.store().rows_view("steady").to_arrow().to_pylist()
    assert {row["key"]: row["state"] for row in rows} == {"a": "4", "b": "4", "x": "5", "y": "4"}


def test_letters_without_a_consumer_stay_and_are_warned_of(
    failed: Pond, caplog: pytest.LogCaptureFixture
) -> None:
    """The request is answered."""
    pond = failed.copy()
    pond.ask()
    letters = pond.states()["dead_letters"]
    other = mp.Pipeline("p", drop=["fickle"])
    other.inject("in", key="k", at="n", id="n").apply(Seen(), name="seen")
    caplog.set_level(logging.WARNING, "millpond")
    ended(pond.start(other))

    assert pond.states()["dead_letters"] == letters
    assert pond.waiting() == ()
    assert any("9 dead letters stay what they are" in record.getMessage() for record in caplog.records)


def test_letters_are_the_first_input_of_a_restored_computation(failed: Pond) -> None:
    """The drop removed the computation's rows and intervals, but not its letters."""
    pond = failed.copy()
    dropping = mp.Pipeline("p", drop=["fickle"])
    dropping.inject("in", key="k", at="n", id="n").apply(Seen(), name="seen")
    ended(pond.start(dropping))
    assert pond.states()["fickle"] == {}
    pond.ask(selection=LetterSelection(error="odd"))
    ended(pond.start(pipeline(mended=True)))

    assert pond.states()["fickle"] == {"b": 4, "x": 1}
    assert {letter["error"] for letter in pond.states()["dead_letters"].values()} == {"ValueError: timer"}


def test_letter_stays_when_its_extractor_fails_at_the_retry() -> None:
    """The extractor finds a key while letters are selected, but none when the letter is read."""
    keys = iter([None, "a", None])
    made = mp.Pipeline("p")
    made.inject("in", key=lambda _: next(keys), at="n").apply(Seen(), name="fickle")
    pond = Pond()
    run = pond.start(made)
    run.inject("in", rows()[:1])
    run.run_until_quiet()
    pond.ask()
    pond.clock.advance_ms(1_000)
    run.run_until_quiet()
    run.stop()

    assert next(keys, "used up") == "used up"
    assert len(pond.states()["dead_letters"]) == 1
    assert pond.waiting() == ()


def test_request_without_matching_letters_is_refused(failed: Pond) -> None:
    pond = failed.copy()
    with pytest.raises(InvalidError, match="no such dead letter"):
        pond.ask(selection=LetterSelection(computation="seen"))
    assert pond.waiting() == ()


@pytest.mark.parametrize("options", [{"time_sorted": True}, {"productions": "weak"}, {"on_late": "drop"}])
def test_retries_work_with_time_sorted_weak_and_dropping_computations(options: dict[str, Any]) -> None:
    repaired, right = Pond(), Pond()
    for pond, mended in ((repaired, False), (right, True)):
        run = pond.start(pipeline(mended=mended, **options))
        run.inject("in", rows())
        ended(run)
    repaired.ask()
    ended(repaired.start(pipeline(mended=True, **options)))

    assert repaired.states() == right.states()

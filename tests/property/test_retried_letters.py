"""Retried letters compared with code that never failed, for any failures, requests, cuts and restarts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

import millpond as mp
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.ownership.cuts import Cut
from millpond.executor.superstep.letter_retries import (
    LetterSelection,
    ask_for_letters,
    waiting_letter_requests,
)
from millpond.statestore.errors import InvalidError
from millpond.statestore.failpoint import listening
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

KEYS = "abcd"


class Crash(BaseException):
    """The end of a process."""


class Fragile(mp.Computation):
    """Keeps and forwards numbers; until the code is corrected, some records and timers fail."""

    def __init__(self, *, mended: bool) -> None:
        self.mended = mended

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """Half of the effects come before the failure, half after it."""
        n, fails = record.value["n"], record.value["fails"]
        context.produce("out", [n, "first"])
        context.set_timer(record.at + 3, tag=f"{n} {fails}")
        if fails == "record" and not self.mended:
            raise ValueError("a record fails")
        context.state.set(sorted([*context.state.get([]), n]))
        context.produce("out", [n, "second"])

    def process_timer(self, context: mp.Context, timer: mp.Timer) -> None:
        context.produce("out", [timer.tag, "first"])
        if timer.tag.endswith("timer") and not self.mended:
            raise ValueError("a timer fails")
        context.produce("out", [timer.tag, "second"])


class Kept(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        kept = [*context.state.get([]), [orjson.dumps(record.value).decode(), record.at]]
        context.state.set(sorted(kept))


class Pond:
    """A store in memory, and the run that owns it.

    ``productions`` decides whether the second stage waits for commits.
    """

    def __init__(self, productions: str) -> None:
        self.productions: Any = productions
        self.clock, self.rng = ManualClock(), SeededRng(1)
        self.disk, self.registry = MemoryObjects(), MemoryRegistry()
        self.run: LocalRun | None = None

    def store(self) -> Store:
        return Store.in_memory(objects=self.disk, registry=self.registry, clock=self.clock, rng=self.rng)

    def start(self, *, mended: bool) -> LocalRun:
        pipeline = mp.Pipeline("p")
        first = pipeline.inject("in", key="k", at="n", id="n").apply(
            Fragile(mended=mended), name="fragile", produces="out", productions=self.productions
        )
        first.apply(Kept(), name="kept")
        runner = LocalRunner(
            self.store(),
            clock=self.clock,
            rng=self.rng,
            progress=False,
            intervals=2,
            dead_letter_limit=None,
        )
        self.run = runner.start(pipeline, stepping=True)
        return self.run

    def states(self, *computations: str) -> dict[str, dict[str, Any]]:
        store = self.store()
        return {
            name: {
                row["key"]: orjson.loads(row["state"])
                for row in store.rows_view(name).to_arrow().to_pylist()
                if row["state"]
            }
            for name in computations
        }

    def end(self) -> None:
        """End the input, with correct code."""
        run = self.start(mended=True)
        run.finish("in")
        run.run_until_quiet()
        run.stop()


rows = st.lists(
    st.tuples(st.sampled_from(KEYS), st.sampled_from(["no", "no", "record", "timer"])),
    min_size=1,
    max_size=12,
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("inject"), rows),
        st.tuples(st.just("ask"), st.sampled_from(["", *KEYS])),
        st.tuples(st.just("step"), st.just(None)),
        st.tuples(st.just("cut"), st.sampled_from(KEYS[1:])),
        st.tuples(st.just("restart"), st.booleans()),
        st.tuples(st.just("crash"), st.integers(1, 40)),
    ),
    max_size=14,
)


def play(pond: Pond, script: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Play a script; return all injected rows."""
    injected: list[dict[str, Any]] = []
    run = pond.start(mended=False)
    for kind, argument in script:
        pond.clock.advance_ms(1_000)
        if kind == "inject":
            batch = [
                {"k": key, "n": len(injected) + number, "fails": fails}
                for number, (key, fails) in enumerate(argument)
            ]
            injected += batch
            run.inject("in", batch)
            run.run_until_quiet()
        elif kind == "ask":
            ask(pond, LetterSelection(key=argument or None))
        elif kind == "step":
            run.step()
        elif kind == "cut":
            cut(run, argument)
        elif kind == "restart":
            run.stop()
            run = pond.start(mended=argument)
        else:
            crash(argument, lambda now=run: now.run_until_quiet())  # type: ignore[misc]
            run = pond.start(mended=False)
    run.stop()
    return injected


def ask(pond: Pond, selection: LetterSelection) -> None:
    try:
        ask_for_letters(pond.store(), "retry", selection)
    except InvalidError as error:
        assert "no such dead letter" in str(error)  # noqa: PT017 - the script may ask for nothing


def cut(run: LocalRun, key: str) -> None:
    coordinator = run._worker.coordinator
    for interval in coordinator.intervals_of("fragile"):
        if interval.contains(key) and interval.low != key:
            coordinator.recut(Cut.split(interval, [key]))


def crash(number: int, work: Callable[[], object]) -> None:
    """Work until the failpoint of this number ends the process, or no work is left."""
    reached: list[str] = []

    def listen(name: str) -> None:
        reached.append(name)
        if len(reached) == number:
            raise Crash(name)

    try:
        with listening(listen):
            work()
    except Crash:
        return


@settings(max_examples=30, deadline=None)
@given(script=steps, productions=st.sampled_from(["strong", "weak"]))
def test_retried_letters_give_the_states_of_correct_code(
    script: list[tuple[str, Any]], productions: str
) -> None:
    """No letter and no request is left."""
    pond, right = Pond(productions), Pond(productions)
    injected = play(pond, script)
    pond.end()
    ask(pond, LetterSelection())
    pond.end()

    run = right.start(mended=True)
    if injected:
        run.inject("in", injected)
        run.run_until_quiet()
    run.stop()
    right.end()
    assert pond.states("fragile", "kept") == right.states("fragile", "kept")
    assert pond.states("dead_letters") == {"dead_letters": {}}
    assert waiting_letter_requests(pond.store().snapshot().txns) == ()

"""State that hooks change in place, and the time that a key owes."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millpond as mp
from millpond.executor.computation.records import InputTime
from millpond.executor.computation.state import KeyState
from millpond.executor.computation.timers import KeyTimers, Timer, hold_of
from millpond.executor.time.clocks import Clocks
from millpond.statestore.rows.codec import JsonCodec
from millpond.statestore.rows.row import TimeDomain

_CLOCKS = Clocks(watermark=0, wall_time=0)


class _Names:
    made = 0

    def __init__(self, stored: Any) -> None:
        _Names.made += 1
        self.names: list[str] = list(stored or ())

    def to_json(self) -> list[str] | None:
        return self.names or None


def _state(encoded: str | None = None) -> KeyState:
    state = KeyState(JsonCodec(), KeyTimers(_CLOCKS), InputTime())
    state.bind(encoded)
    return state


def test_opened_state_is_shared_by_a_turn_and_stored_at_its_end() -> None:
    state = _state('["a"]')
    opened = state.open(_Names)
    opened.names.append("b")

    assert state.open(_Names) is opened
    assert state.settle() == '["a","b"]'
    assert state.open(_Names) is not opened


def test_opened_state_that_encodes_to_none_deletes_the_state() -> None:
    state = _state('["a"]')
    state.open(_Names).names.clear()

    assert state.settle() is None
    assert state.get("none") == "none"


def test_get_keeps_changes_in_place_and_set_discards_them() -> None:
    """A deletion and a rolled back turn discard them too."""
    state = _state('["a"]')
    state.open(_Names).names.append("b")
    assert state.get() == ["a", "b"]
    state.open(_Names).names.append("c")
    state.set(["d"])
    assert state.settle() == '["d"]'
    state.open(_Names).names.append("e")
    state.bind('["d"]')
    assert state.settle() == '["d"]'
    state.open(_Names).names.append("f")
    state.delete()
    assert state.settle() is None


@pytest.mark.parametrize("value", [{"pair": (1, 2)}, [(1,)], {"pairs": [{"pair": (1, 2)}]}, (1, 2)])
def test_state_reads_the_same_with_and_without_a_commit(value: Any) -> None:
    """JSON has no tuples, so nested tuples must read as lists at once."""
    state = _state()
    state.set(value)
    within = state.get()
    encoded = state.settle()
    state.bind(encoded)

    assert _shape(within) == _shape(state.get()) == _shape(json.loads(json.dumps(value)))


def test_changes_after_set_do_not_reach_the_state() -> None:
    state = _state()
    given: dict[str, Any] = {"seen": [1]}
    state.set(given)
    given["seen"].append(2)
    state.get()["seen"].append(3)

    assert state.get() == {"seen": [1]}
    assert state.settle() == '{"seen":[1]}'


def test_set_refuses_a_value_that_cannot_be_encoded() -> None:
    with pytest.raises(mp.InvalidError, match=r"values cannot have.* part=`value\.at` type=`object`"):
        _state().set({"at": object()})


@pytest.mark.parametrize("size", [1, 2, 3])
def test_state_does_not_depend_on_the_size_of_bundles(size: int) -> None:
    """The computation stores tuples and changes objects after `set`."""
    assert _read(size) == _read(6)


class _Kind(enum.StrEnum):
    BUS = "bus"


NONSENSE: dict[str, Callable[[], Any]] = {
    "an object": object,
    "a class": lambda: _Kind,
    "an enumeration's member": lambda: _Kind.BUS,
    "a set": lambda: {1, 2},
    "a function": lambda: len,
    "a generator": lambda: (number for number in range(3)),
    "a complex number": lambda: 1j,
    "half a character": lambda: "\ud800",
    "nanoseconds": lambda: pd.Timestamp(1),
    "a month's length": lambda: np.timedelta64(1, "M"),
    "a frame": lambda: pd.DataFrame({"a": [1]}),
    "an open file": lambda: sys.stdout,
}


class _Nonsensical(mp.Computation):
    """Tries each kind of nonsense and goes on; tells what was refused, and what the state is."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, str | None, Any]] = []

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        kind = record.value["kind"]
        context.state.set({"before": kind})
        value = {"items": [{}, {}, {}, {"price": NONSENSE[kind]()}]}
        for name, hand_over in (
            ("set", lambda: context.state.set(value)),
            ("produce", lambda: context.produce("out", value)),
        ):
            part = "not refused"
            try:
                hand_over()
            except mp.InvalidError as error:
                part = error.details["part"]
            self.told.append((kind, name, part, context.state.get()))


@pytest.mark.parametrize("size", [1, 3, len(NONSENSE)])
def test_nonsense_is_refused_at_the_call_with_its_part_in_any_cut(size: int) -> None:
    """The state stays as it was, the hook goes on, and nothing is produced."""
    code = _Nonsensical()
    pipeline = mp.Pipeline("p")
    pipeline.inject("in", key="key", at="at").apply(code, name="tries", produces="out")
    rows = [{"key": "a", "at": at, "kind": kind} for at, kind in enumerate(NONSENSE)]
    with mp.LocalRunner(mp.Store.in_memory(), progress=False).start(pipeline, stepping=True) as run:
        for start in range(0, len(rows), size):
            run.inject("in", rows[start : start + size])
            run.run_until_quiet()
        totals = run.summary().totals

    assert (totals.records, totals.productions, totals.dead_letters) == (len(rows), 0, 0)
    part = "value.items[3].price"
    assert code.told == [
        (kind, name, part, {"before": kind}) for kind in NONSENSE for name in ("set", "produce")
    ]


def _shape(value: Any) -> Any:
    """Return the value with the types of its containers."""
    if isinstance(value, dict):
        return {name: _shape(part) for name, part in value.items()}
    return (
        (type(value).__name__, [_shape(part) for part in value]) if isinstance(value, list | tuple) else value
    )


class _Careless(mp.Computation):
    """Code that stores tuples, changes them later, and remembers every state it has read."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        state = context.state.get({"pair": [], "count": 0})
        self.read.append(repr(state))
        if state["count"] != 2:
            state = {"pair": (record.at,), "count": state["count"] + 1}
            context.state.set(state)
        state["count"] += 10


def _read(size: int) -> list[str]:
    pipeline, careless = mp.Pipeline("careless"), _Careless()
    rows = pipeline.inject("rows", key="key", at="at", at_unit="us", watermark=mp.ManualWatermark())
    rows.apply(careless, name="careless", on_error="stop")
    with mp.LocalRunner(mp.Store.in_memory(), progress=False).start(pipeline, stepping=True) as run:
        for start in range(0, 6, size):
            run.inject("rows", [{"key": "k", "at": at} for at in range(start, start + size)])
            run.run_until_quiet()
    return careless.read


_TIMERS = st.builds(
    Timer,
    st.sampled_from("abc"),
    st.sampled_from([TimeDomain.EVENT, TimeDomain.HOLD]),
    st.just(100),
    st.integers(0, 9),
)


@given(
    row=st.lists(_TIMERS, max_size=3, unique_by=lambda timer: timer[:2]),
    moves=st.lists(st.one_of(_TIMERS, st.sampled_from("abc<>"))),
)
def test_owed_time_equals_a_search_through_all_timers(row: list[Timer], moves: list[Timer | str]) -> None:
    """The timers are set, replaced, deleted and rolled back in any order."""
    timers = KeyTimers(_CLOCKS)
    timers.bind(tuple(row))
    pending = {timer[:2]: timer for timer in row}
    savepoint, saved = timers.savepoint(), dict(pending)
    for move in moves:
        if isinstance(move, Timer):
            timers.set(move)
            pending[move[:2]] = move
        elif move == "<":
            savepoint, saved = timers.savepoint(), dict(pending)
        elif move == ">":
            timers.restore(savepoint)
            pending = dict(saved)
        else:
            timers.delete(move, TimeDomain.EVENT)
            pending.pop((move, TimeDomain.EVENT), None)

        assert timers.owed_at() == hold_of([*row, *pending.values()])

"""A state that hooks work on in place, and what a key owes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import millpond as mp
from millpond.executor.computation.records import InputTime
from millpond.executor.computation.state import Holds, KeyState
from millpond.executor.computation.timers import KeyTimers, Timer, hold_of
from millpond.executor.time.clocks import Clocks
from millpond.statestore.rows.codec import JsonCodec
from millpond.statestore.rows.row import TimeDomain

_CLOCKS = Clocks(watermark=0, wall_time=0)


class _Names:
    """A list of names, opened."""

    made = 0

    def __init__(self, stored: Any) -> None:
        _Names.made += 1
        self.names: list[str] = list(stored or ())

    def to_json(self) -> list[str] | None:
        """The names; no state without any."""
        return self.names or None


def _state(encoded: str | None = None) -> KeyState:
    state = KeyState(JsonCodec(), Holds(KeyTimers(_CLOCKS), InputTime()))
    state.bind(encoded)
    return state


def test_an_opened_state_is_made_once_and_stored_at_the_end() -> None:
    """All hooks of a turn get the same object, and what they changed in it is stored when the turn ends."""
    state = _state('["a"]')
    opened = state.open(_Names)
    opened.names.append("b")

    assert state.open(_Names) is opened
    assert state.settle() == '["a","b"]'
    assert state.open(_Names) is not opened


def test_a_state_of_which_nothing_is_left_is_no_state() -> None:
    """An opened state that gives ``None`` leaves the key without state."""
    state = _state('["a"]')
    state.open(_Names).names.clear()

    assert state.settle() is None
    assert state.get("none") == "none"


def test_reading_and_setting_end_what_was_opened() -> None:
    """`get` sees what was changed in place; `set`, `delete` and a turn that is undone discard it."""
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
def test_what_is_read_in_a_bundle_is_what_is_read_after_a_commit(value: Any) -> None:
    """A tuple anywhere in the state is a list at the next `get`, with a commit in between and without."""
    state = _state()
    state.set(value)
    within = state.get()
    encoded = state.settle()
    state.bind(encoded)

    assert _shape(within) == _shape(state.get()) == _shape(json.loads(json.dumps(value)))


def test_what_changes_after_set_is_not_set() -> None:
    """Neither the object that was set, nor one that was read, changes the state when it is modified later."""
    state = _state()
    given: dict[str, Any] = {"seen": [1]}
    state.set(given)
    given["seen"].append(2)
    state.get()["seen"].append(3)

    assert state.get() == {"seen": [1]}
    assert state.settle() == '{"seen":[1]}'


def test_a_value_that_cannot_be_encoded_is_refused_by_set() -> None:
    """A container with something in it that the codec lacks raises where it is set."""
    with pytest.raises(mp.InvalidError, match="the codec cannot encode this value"):
        _state().set({"at": object()})


@pytest.mark.parametrize("size", [1, 2, 3])
def test_state_does_not_depend_on_how_records_are_bundled(size: int) -> None:
    """A computation that puts tuples into its state, and changes it after `set`, reads the same for every cut."""
    assert _read(size) == _read(6)


def _shape(value: Any) -> Any:
    """A value with the types of its containers."""
    if isinstance(value, dict):
        return {name: _shape(part) for name, part in value.items()}
    return (
        (type(value).__name__, [_shape(part) for part in value]) if isinstance(value, list | tuple) else value
    )


class _Careless(mp.Computation):
    """Sets tuples, changes what it has set, and notes what it reads."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """Note the state, then set it and go on changing it."""
        state = context.state.get({"pair": [], "count": 0})
        self.read.append(repr(state))
        if state["count"] != 2:
            state = {"pair": (record.at,), "count": state["count"] + 1}
            context.state.set(state)
        state["count"] += 10


def _read(size: int) -> list[str]:
    """What the computation reads with so many records in a bundle."""
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
def test_what_a_key_owes_is_the_least_of_its_timers(row: list[Timer], moves: list[Timer | str]) -> None:
    """After timers are set, replaced, deleted and rolled back, the least time owed is that of a search through all."""
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

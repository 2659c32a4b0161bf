"""
A state that hooks work on in place, and what a key owes.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.computation.holds import Holds
from millpond.executor.computation.key_timers import KeyTimers
from millpond.executor.computation.record_columns import InputTime
from millpond.executor.computation.state import KeyState
from millpond.executor.computation.timer import Timer, hold_of
from millpond.executor.event_time.clocks import Clocks
from millpond.statestore.rows.codec import JsonCodec
from millpond.statestore.rows.row import TimeDomain

_CLOCKS = Clocks(watermark=0, wall_time=0)


class _Names:
    """
    A list of names, opened.
    """

    made = 0

    def __init__(self, stored: Any) -> None:
        _Names.made += 1
        self.names: list[str] = list(stored or ())

    def to_json(self) -> list[str] | None:
        """
        The names; no state without any.
        """
        return self.names or None


def _state(encoded: str | None = None) -> KeyState:
    state = KeyState(JsonCodec(), Holds(KeyTimers(_CLOCKS), InputTime()))
    state.bind(encoded)
    return state


def test_an_opened_state_is_made_once_and_stored_at_the_end() -> None:
    """
    All hooks of a turn get the same object, and what they changed in it is stored when the turn ends.
    """
    state = _state('["a"]')
    opened = state.open(_Names)
    opened.names.append("b")
    state.end_hook()

    assert state.open(_Names) is opened
    assert state.settle() == '["a","b"]'
    assert state.open(_Names) is not opened


def test_a_state_of_which_nothing_is_left_is_no_state() -> None:
    """
    An opened state that gives ``None`` leaves the key without state.
    """
    state = _state('["a"]')
    state.open(_Names).names.clear()

    assert state.settle() is None
    assert state.get("none") == "none"


def test_reading_and_setting_end_what_was_opened() -> None:
    """
    `get` sees what was changed in place; `set`, `delete` and a turn that is undone discard it.
    """
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
    """
    After timers are set, replaced, deleted and rolled back, the least time owed is that of a search through all.
    """
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

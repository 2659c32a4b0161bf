"""Timers and the queue of an interval."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from millpond.executor.computation.timers import (
    EarliestByKey,
    KeyTimes,
    Timer,
    TimerQueue,
    firing_order,
    hold_of,
)
from millpond.executor.time.clocks import EXACT
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.types import EventTimeMicros, WallTimeMicros

EVENT, WALL = TimeDomain.EVENT, TimeDomain.WALL


def timer(at: int, domain: TimeDomain = EVENT, tag: str = "", output_at: int | None = None) -> Timer:
    return Timer(tag, domain, at, at if output_at is None else output_at)


def due(queue: TimerQueue, event: int, wall: int = -1) -> set[str]:
    return queue.due_keys(EventTimeMicros(event), WallTimeMicros(wall))


def test_firing_order_is_time_then_domain_then_percentile_then_tag() -> None:
    early = Timer("z", EVENT, 1, 1, percentile=50)
    timers = [timer(2), timer(1, WALL), timer(1, tag="b"), timer(1, tag="a"), early]

    assert firing_order(timers) == tuple(reversed(timers))


def test_hold_is_the_oldest_output_time() -> None:
    """The time at which the timer fires does not matter."""
    assert hold_of([timer(5, output_at=9), timer(7, output_at=8)]) == 8
    assert hold_of([]) is None


def test_key_is_due_when_either_clock_reaches_a_timer() -> None:
    queue = TimerQueue()
    queue.put({"a": (timer(5),), "b": (timer(3, WALL),), "c": (timer(4, WALL), timer(9))})

    assert due(queue, 4, 2) == set()
    assert due(queue, 5, 3) == {"a", "b"}
    assert due(queue, 9, 4) == {"a", "b", "c"}
    assert due(queue, 9, 4) == {"a", "b", "c"}
    assert (queue.next_at(EVENT), queue.next_at(WALL), queue.hold(), len(queue._hold)) == (5, 3, 3, 3)


def test_put_replaces_a_keys_timers() -> None:
    queue = TimerQueue()
    queue.put({"a": (timer(5), timer(6, WALL))})
    queue.put({"a": (timer(8),)})

    assert (due(queue, 7, 7), queue.next_at(EVENT), queue.next_at(WALL), queue.hold()) == (set(), 8, None, 8)
    queue.put({"a": (timer(2),), "b": ()})
    assert (due(queue, 7), queue.hold()) == ({"a"}, 2)
    queue.put({"a": ()})
    assert (due(queue, 7), queue.next_at(EVENT), queue.hold(), len(queue._hold)) == (set(), None, None, 0)


def test_fill_from_columns_equals_put() -> None:
    queue = TimerQueue()
    event = KeyTimes(pa.array(["b", "a"]), np.array([7, 5]))
    queue.fill(
        {EXACT: event}, KeyTimes(pa.array(["c"]), np.array([3])), KeyTimes(pa.array(["a"]), np.array([1]))
    )

    assert (queue.next_at(EVENT), queue.next_at(WALL), queue.hold()) == (5, 3, 1)
    assert due(queue, 6, 3) == {"a", "c"}
    assert queue.waits(2, 1) == {"b": 5.0, "a": 3.0, "c": 2.0}


def test_waits_follow_the_clock_that_is_due_first() -> None:
    queue = TimerQueue()
    queue.put({"a": (timer(100), timer(1_000, WALL))})

    assert queue.waits(90, 0) == {"a": 10.0}
    assert queue.waits(0, 999) == {"a": 1.0}


@pytest.mark.parametrize("seed", range(5))
def test_heap_agrees_with_a_dict(seed: int) -> None:
    """Puts of 1 to 2,000 keys exercise the heap's rebuilding too."""
    rng = np.random.default_rng(seed)
    times, expected = EarliestByKey(), dict[str, int]()
    for _ in range(60):
        count = int(rng.choice([1, 3, 2_000]))
        put = {f"k{rng.integers(3_000)}": int(rng.integers(1_000)) for _ in range(count)}
        gone = {f"k{rng.integers(3_000)}" for _ in range(count // 2)} - put.keys()
        times.put(put, gone)
        expected.update(put)
        for key in gone:
            expected.pop(key, None)
        bound = int(rng.integers(1_000))

        assert times.until(bound) == {key for key, at in expected.items() if at <= bound}
        assert times.earliest() == min(expected.values())
        assert dict(times.items()) == expected

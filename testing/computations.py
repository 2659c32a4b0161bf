"""
Small computations for generated pipelines: between them they use all that a context offers.

Each is a deterministic function of its key's records in (time, arrival) order and of its
timers, so a model, the local runner and Spark must agree on what they leave behind. Values
are dicts with an integer ``n`` and a text ``k``.
"""

from __future__ import annotations

from typing import Any

from millpond.executor.computation import Computation
from millpond.executor.context import Context
from millpond.executor.record import Record, Records
from millpond.executor.timer import Timer
from millpond.statestore.codec import MsgpackCodec

__all__ = ["ZOO", "Alarm", "Batch", "Count", "Expire", "Faulty", "Forward", "Keeper", "Window"]

SECOND_US = 1_000_000


class Forward(Computation):
    """
    Produces every record again, under another key, with a greater number; keeps no state.

    Args:
        outputs: the streams to produce to.
    """

    def __init__(self, outputs: tuple[str, ...] = ()) -> None:
        self.outputs = outputs

    def process_record(self, context: Context, record: Record) -> None:
        """
        One record in, one production per stream out.
        """
        n = record.value["n"]
        for stream in self.outputs:
            context.produce(stream, {"n": n + 1, "k": str(n % 3)}, key=f"f{n % 4}")


class Count(Forward):
    """
    Counts and sums its records in JSON state; produces the running sum at every third.
    """

    def process_record(self, context: Context, record: Record) -> None:
        """
        Update the state; now and then produce it.
        """
        state = context.state.get({"count": 0, "sum": 0})
        state = {"count": state["count"] + 1, "sum": state["sum"] + record.value["n"]}
        context.state.set(state)
        if state["count"] % 3 == 0:
            for stream in self.outputs:
                context.produce(stream, {"n": state["sum"] % 97, "k": context.key})


class Window(Forward):
    """
    Collects its records until the watermark passes the end of their ten seconds; msgpack state.
    """

    codec = MsgpackCodec()

    def process_record(self, context: Context, record: Record) -> None:
        """
        Keep the number and ask to be woken at the window's end.
        """
        end = (record.at // (10 * SECOND_US) + 1) * 10 * SECOND_US
        windows: dict[str, list[int]] = context.state.get({})
        windows.setdefault(str(end), []).append(record.value["n"])
        context.state.set(windows)
        context.set_timer(end, tag=str(end))

    def process_timer(self, context: Context, timer: Timer) -> None:
        """
        Produce the window and forget it.
        """
        windows = context.state.get()
        numbers = windows.pop(timer.tag)
        context.state.set(windows) if windows else context.state.delete()
        for stream in self.outputs:
            context.produce(stream, {"n": sum(numbers), "k": context.key})


class Alarm(Forward):
    """
    Wakes at a wall time after each record; counts how often, and deletes every other alarm.
    """

    def process_record(self, context: Context, record: Record) -> None:
        """
        Set an alarm five wall seconds ahead, or take it back.
        """
        n = record.value["n"]
        if n % 2:
            context.set_timer(context.wall_time + 5 * SECOND_US, tag="alarm", domain="wall")
        else:
            context.delete_timer("alarm", domain="wall")

    def process_timer(self, context: Context, timer: Timer) -> None:  # noqa: ARG002 - a hook
        """
        Count the alarm.
        """
        context.state.set({"alarms": context.state.get({"alarms": 0})["alarms"] + 1})


class Expire(Forward):
    """
    Forgets a key a while after its last record: one timer, set again and again.
    """

    def process_record(self, context: Context, record: Record) -> None:
        """
        Remember the latest number and postpone the end.
        """
        context.state.set(record.value["n"])
        context.set_timer(record.at + 15 * SECOND_US, tag="end")

    def process_timer(self, context: Context, timer: Timer) -> None:
        """
        Say what is forgotten.
        """
        for stream in self.outputs:
            context.produce(stream, {"n": context.state.get(), "k": timer.tag})
        context.state.delete()


class Faulty(Count):
    """
    `Count` that raises at every fifth number, after it has touched state and timers.
    """

    def process_record(self, context: Context, record: Record) -> None:
        """
        Count, but fail now and then: nothing of that record may remain.
        """
        super().process_record(context, record)
        context.set_timer(record.at + SECOND_US, tag=f"faulty{record.value['n'] % 5}")
        if record.value["n"] % 5 == 0:
            raise ValueError("a number that this code cannot bear")

    def process_timer(self, context: Context, timer: Timer) -> None:  # noqa: ARG002 - a hook
        """
        Some timers cannot be borne either.
        """
        if timer.tag == "faulty3":
            raise ValueError("a timer that this code cannot bear")


class Batch(Forward):
    """
    Sees all of a key's records of a bundle at once.
    """

    def process_records(self, context: Context, records: Records) -> None:
        """
        Keep the number of records and the greatest of their numbers.
        """
        state: dict[str, Any] = context.state.get({"count": 0, "greatest": -1})
        greatest = max(record.value["n"] for record in records)
        context.state.set(
            {"count": state["count"] + len(records), "greatest": max(greatest, state["greatest"])}
        )


class Keeper(Forward):
    """
    Holds the time of its first record until the third has come, then produces at that time.
    """

    def process_record(self, context: Context, record: Record) -> None:
        """
        Hold, count, and let go.
        """
        count = context.state.get(0) + 1
        if count == 1:
            context.state.hold(record.at)
        context.state.set(count)
        held_at = context.state.held_at
        if count < 3 or held_at is None:
            return
        for stream in self.outputs:
            context.produce(stream, {"n": count, "k": context.key}, at=min(held_at, record.at))
        if record.value["n"] % 2:
            context.state.delete()
        else:
            context.state.release()


ZOO: tuple[type[Forward], ...] = (Forward, Count, Window, Alarm, Expire, Faulty, Batch, Keeper)
"""All of them."""

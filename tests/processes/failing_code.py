"""A ledger whose code fails on demand of a record, after it has used every effect.

The effects of the failing call must be undone, and no others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.computation.timers import Timer
from millpond.testing.processes.ledger import LEDGER, Ledger

_SECOND_US: Final = 1_000_000


def _raise(_context: Context, record: Record) -> None:
    raise ValueError(f"number {record.value['n']} is refused")


def _raise_unprintable(_context: Context, _record: Record) -> None:
    raise ValueError("half a character: \ud800")


def _recurse(context: Context, record: Record) -> None:
    _recurse(context, record)


FAILURES: Final[dict[str, tuple[Callable[[Context, Record], None], str]]] = {
    "raise": (_raise, "ValueError: number .* is refused"),
    "raise unprintable": (_raise_unprintable, "half a character"),
    "recurse": (_recurse, "RecursionError"),
    "state": (
        lambda context, _: context.state.set({1, 2}),
        "a part of the value has a type that values cannot have",
    ),
    "part of a state": (lambda context, _: context.state.set({"a": [1j]}), r"part=`value\.a\[0\]`"),
    "undeclared": (
        lambda context, record: context.produce(record.value["do"], 1),
        "does not declare this stream",
    ),
    "early": (
        lambda context, record: context.produce(LEDGER, 1, at=record.at - 1),
        "a time must not be before the input's",
    ),
    "production": (lambda context, _: context.produce(LEDGER, object()), "values cannot have"),
    "production key": (lambda context, _: context.produce(LEDGER, 1, key=3), "a production key must be text"),  # type: ignore[arg-type]
    "timer": (
        lambda context, record: context.set_timer(record.at, output_at=record.at - 1),
        "a time must not be before the input's",
    ),
}
"""Failures of a hook: the code that fails, and a pattern of the dead letter's error."""


class Fragile(Ledger):
    """Fails as the field ``do`` demands: a name of `FAILURES`, ``later`` for a failing timer, or ``ok``."""

    def process_record(self, context: Context, record: Record) -> None:
        """Append, produce and set a timer, then fail if the record demands it."""
        super().process_record(context, record)
        value: dict[str, Any] = record.value
        do = value.get("do") or "ok"
        if do == "later":
            context.set_timer(record.at + _SECOND_US, tag="boom")
        elif do != "ok":
            context.set_timer(record.at + _SECOND_US, tag="rolled back")
            FAILURES[do][0](context, record)

    def process_timer(self, context: Context, timer: Timer) -> None:
        """Fail, after an effect."""
        context.state.set(["spoilt"])
        raise ValueError(f"the timer {timer.tag} is refused")

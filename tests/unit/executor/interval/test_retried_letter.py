"""Records and timers of retried dead letters."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.computation.timers import Timer
from millpond.executor.interval.bundle import DeadLetter, id_base64, id_text
from millpond.executor.interval.letters import RetriedLetter, describe_value, letter_columns, timer_value
from millpond.executor.superstep.dead_letters import dead_letter_updates
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import Fence, TimeDomain
from millpond.statestore.rows.value_text import PlainObject
from millpond.statestore.types import CommitNumber, EventTimeMicros, Sequencer, Superstep


def stored(value: Any, **fields: Any) -> dict[str, Any]:
    described = describe_value(lambda: value)
    letter = DeadLetter(
        **{
            "computation": "c",
            "stream": "in",
            "key": "k",
            "value": described.text,
            "value_types": described.types,
            "at": 5,
            "error": "ValueError",
            "diagnostics": "Traceback",
            **fields,
        }
    )
    fence = Fence(Sequencer(1), CommitNumber(1))
    updates = dead_letter_updates(
        "p", [letter], superstep=Superstep(3), fence=fence, at=EventTimeMicros(9), produce=False
    )
    fields_of: dict[str, Any] = orjson.loads(updates.column("state")[0].as_py())
    return fields_of


@pytest.mark.parametrize(
    "value",
    [
        {"n": 1, "price": 1.5, "name": "å", "none": None, "list": [True, {}]},
        {"at": datetime(2026, 2, 8, 10, tzinfo=UTC), "day": date(2026, 2, 8), "for": timedelta(seconds=2)},
        {"paid": Decimal("1.10"), "raw": b"\xff\x00", "big": 2**70, "not a number": float("inf")},
        {1: "a", "b": 2},
        b"bytes",
        "text",
        None,
    ],
)
def test_retried_value_has_the_original_types(value: Any) -> None:
    """JSON lacks some of the types."""
    columns = letter_columns(RetriedLetter.read("p/3/0", stored(value)), 7, with_id=True)

    assert columns.value(0) == value
    assert type(columns.value(0)) is type(value)
    assert (columns.at, list(columns.streams), columns.watermark, columns.id(0)) == ([5], ["in"], 7, None)


def test_row_that_looks_like_a_pane_stays_a_row() -> None:
    row = PlainObject(value=1, window=[0, 1], at=0, pane={})
    columns = letter_columns(RetriedLetter.read("p/3/0", stored(row)), 7, with_id=True)

    assert columns.value(0) == row
    assert type(columns.value(0)) is PlainObject


@given(st.none() | st.binary() | st.text().map(str.encode))
def test_retried_id_has_the_original_bytes(record_id: bytes | None) -> None:
    """Even an id that begins like the prefix of a stream's scope."""
    for given_id in (record_id, None if record_id is None else b"in\0" + record_id):
        told = stored(1, id=id_text(given_id), id_base64=id_base64(given_id))
        letter = RetriedLetter.read("p/3/0", told)

        assert letter_columns(letter, 7, with_id=True).id(0) == given_id
        assert letter_columns(letter, 7, with_id=False).id(0) is None


@pytest.mark.parametrize(
    "timer",
    [
        Timer(tag="t", domain=TimeDomain.EVENT, at=7, output_at=5),
        Timer(tag="", domain=TimeDomain.WALL, at=-(2**62), output_at=2**62, holds=False),
        Timer(tag="90", domain=TimeDomain.EVENT, at=7, output_at=7, percentile=90.0),
    ],
)
def test_retried_timer_keeps_clock_times_and_hold(timer: Timer) -> None:
    told = stored(timer_value(timer), stream="", at=timer.output_at)

    assert RetriedLetter.read("p/3/0", told).timer == timer


def test_timer_of_an_older_version_waits_for_the_low_watermark() -> None:
    value = {"tag": "t", "domain": "event", "at": 7, "output_at": 5}
    old = {**stored(value, stream=""), "failed_at": None}

    assert RetriedLetter.read("p/3/0", old).timer == Timer("t", TimeDomain.EVENT, 7, 5)


def test_retries_are_counted() -> None:
    """A letter that was never retried lacks the field."""
    assert "retried" not in stored(1)
    assert RetriedLetter.read("p/3/0", stored(1)).retried == 1
    assert RetriedLetter.read("p/3/0", stored(1, retried=2)).retried == 3


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (stored("x" * (1 << 21)), "does not have the whole value"),
        (stored({"of": object()}), "does not have the whole value"),
        (stored(1, key=None), "no key"),
        (stored(1, at=None), "no event time"),
        (stored({"tag": "t"}, stream=""), "no timer"),
        ({**stored(1), "id_base64": "?"}, "id cannot be read"),
        ({**stored(1), "failed_at": None}, "did not keep the types"),
    ],
    ids=["long", "object", "key", "time", "timer", "id", "old"],
)
def test_incomplete_letter_is_refused_with_a_reason(told: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidError, match=reason):
        RetriedLetter.read("p/3/0", told)

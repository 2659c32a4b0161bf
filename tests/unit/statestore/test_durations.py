"""Durations of options, and their former names in milliseconds."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import millpond as mp
from millpond.statestore.durations import duration_ms, duration_us, timeout_ms
from millpond.statestore.errors import InvalidError


def apply(**options: Any) -> Any:
    return mp.Pipeline("p").inject("in", key="k", at="t").apply(mp.Computation(), name="c", **options)


def combine(**options: Any) -> Any:
    windows = mp.Pipeline("p").inject("in", key="k", at="t").window(mp.FixedWindows("1h"))
    return windows.combine(mp.Count(), name="c", **options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30s", 30_000_000),
        ("5m", 300_000_000),
        ("5min", 300_000_000),
        ("1h", 3_600_000_000),
        ("250ms", 250_000),
        ("7us", 7),
        ("2d", 172_800_000_000),
        ("1h30m", 5_400_000_000),
        (" 1 h 30 m ", 5_400_000_000),
        ("1.5s", 1_500_000),
        ("0s", 0),
        ("-2s", -2_000_000),
    ],
)
def test_text_with_units_is_added_up(text, expected):
    assert duration_us(text) == expected


def test_zero_needs_no_unit_and_timedelta_is_exact():
    assert duration_us(0) == 0
    assert duration_us(timedelta(days=1, microseconds=1)) == 86_400_000_001


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (1, "1s"),
        (-61, "-61s"),
        (1.5, "1.5s"),
        (1_800, "1800s"),
        (604_800, "604800s"),
        (300_000, "300000ms"),
        (86_400_000, "86400000ms"),
        (60_000_000, "60000000us"),
        (10**16, f"{10**16}us"),
    ],
)
def test_number_is_refused_with_the_unit_of_a_usual_length(number: Any, expected: str) -> None:
    with pytest.raises(InvalidError, match=f"must be text with a unit.*did you mean '{expected}'"):
        duration_us(number)
    with pytest.raises(InvalidError, match=f"tick must be text.*did you mean '{expected}'"):
        duration_ms("tick", number)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "-",
        "30",
        "s",
        "3 weeks",
        "1s x",
        "0.0000001s",
        True,
        False,
        None,
        0.0,
        float("nan"),
        10**400,
        np.int64(30),
        f"{2**70}us",
    ],
)
def test_invalid_duration_is_named(value):
    with pytest.raises(InvalidError, match="duration"):
        duration_us(value)


def test_option_is_text_or_timedelta() -> None:
    assert duration_ms("tick", "250ms") == duration_ms("tick", timedelta(milliseconds=250)) == 250.0
    assert timeout_ms(None) is None
    assert timeout_ms("-1ms") == -1.0


@pytest.mark.parametrize("value", [30, 0, 1.5, None, True])
def test_number_as_option_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidError, match="tick must be text such as '30s' or a timedelta"):
        duration_ms("tick", value)


@pytest.mark.parametrize("make", [mp.LocalRunner, mp.SparkRunner])
def test_runner_refuses_number_without_unit(make: Any) -> None:
    with pytest.raises(InvalidError, match="pause_timeout must be text such as '30s' or a timedelta"):
        make("nowhere", pause_timeout=300_000)


@pytest.mark.parametrize(
    ("call", "old", "new"),
    [
        (mp.BalancePolicy, "least_ms", "least_work"),
        (lambda **given: mp.LocalRunner("nowhere", **given), "pause_timeout_ms", "pause_timeout"),
        (lambda **given: mp.SparkRunner("nowhere", **given), "tick_ms", "tick"),
        (apply, "user_code_timeout_ms", "user_code_timeout"),
        (combine, "user_code_timeout_ms", "user_code_timeout"),
    ],
)
def test_old_name_in_milliseconds_warns(call: Any, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        call(**{old: 30})
    with (
        pytest.warns(DeprecationWarning, match=old),
        pytest.raises(InvalidError, match=f"{new} must be at least"),
    ):
        call(**{old: -1})


def test_field_with_old_name_is_kept() -> None:
    windows = mp.Pipeline("p").inject("in", key="k", at="t").window(mp.FixedWindows("1h"))

    assert windows.combine(tick_ms=mp.Max("tick"), name="c").name == "c"

"""Warnings of event times that are probably mistakes."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.superstep.admission import SuspectTimes
from millpond.executor.time.observations import InputObservation, TimesSeen
from millpond.executor.time.watermark_policies import IngressTime
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import EventTimeMicros

NOW_S = 1_714_521_600
NOW_US = NOW_S * 1_000_000
YEAR_US = 366 * 86_400_000_000


def seen(oldest: int, newest: int, records: int = 2) -> InputObservation:
    times = TimesSeen(oldest_at=EventTimeMicros(oldest), newest_at=EventTimeMicros(newest))
    return InputObservation(stream="s", records=records, times=times)


def suspects(**options: object) -> SuspectTimes:
    pipeline = EnginePipeline("p")
    pipeline.inject("s", **{"key": "k", "at": "t", **options}).apply(Computation(), name="c")  # type: ignore[arg-type]
    return SuspectTimes(pipeline.check(), Counter())


def told(caplog: pytest.LogCaptureFixture, times: SuspectTimes, *inputs: InputObservation) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "millpond"):
        times.check(inputs)
        times.observe(inputs, NOW_US)
    return caplog.messages


def test_times_in_seconds_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """All times of the first superstep must be recent dates in seconds."""
    times = suspects()
    assert "at_unit" in told(caplog, times, seen(NOW_S, NOW_S + 5), seen(NOW_S, NOW_S))[0]
    assert told(caplog, times, seen(NOW_S, NOW_S)) == []
    assert told(caplog, suspects(), seen(NOW_S, NOW_S), seen(0, NOW_S)) == []
    assert told(caplog, suspects(), seen(NOW_S, NOW_US)) == []


def test_many_times_in_seconds_are_refused() -> None:
    """Of all observations of the superstep together."""
    with pytest.raises(InvalidError, match=r'say inject\(\.\.\., at_unit="s"'):
        suspects().check([seen(NOW_S, NOW_S + 5, records=6), seen(NOW_S, NOW_S, records=4)])
    suspects().check([seen(NOW_S, NOW_S, records=9), seen(0, 0, records=1)])
    suspects(at_unit="us").check([seen(NOW_S, NOW_S, records=99)])


def test_declared_unit_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Neither is ingress time, nor a superstep without records."""
    assert told(caplog, suspects(at_unit="us"), seen(NOW_S, NOW_S)) == []
    assert told(caplog, suspects(at=IngressTime()), seen(NOW_S, NOW_S + NOW_US + 2 * YEAR_US)) == []
    assert told(caplog, suspects(), InputObservation(stream="s", records=0)) == []


def test_times_beyond_a_year_ahead_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Earlier ones may be planned."""
    times = suspects()
    assert told(caplog, times, seen(NOW_US, NOW_US + YEAR_US)) == []
    [warning] = told(caplog, times, seen(NOW_US, NOW_US + YEAR_US + 1_000_000))
    assert "newest=`2025-05-02T00:00:01+00:00` now=`2024-05-01T00:00:00+00:00`" in warning
    assert told(caplog, times, seen(NOW_US, NOW_US + 9 * YEAR_US)) == []

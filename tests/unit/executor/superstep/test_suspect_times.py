"""Suspect times: what is likely a mistake is told once, and what is not is not."""

from __future__ import annotations

import logging

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.superstep.admission import SuspectTimes
from millpond.executor.time.observations import InputObservation
from millpond.executor.time.watermark_policies import IngressTime
from millpond.statestore.types import EventTimeMicros

NOW_S = 1_714_521_600
NOW_US = NOW_S * 1_000_000
YEAR_US = 366 * 86_400_000_000


def seen(oldest: int, newest: int) -> InputObservation:
    return InputObservation(
        stream="s", records=2, oldest_at=EventTimeMicros(oldest), newest_at=EventTimeMicros(newest)
    )


def suspects(**options: object) -> SuspectTimes:
    pipeline = EnginePipeline("p")
    pipeline.inject("s", **{"key": "k", "at": "t", **options}).apply(Computation(), name="c")  # type: ignore[arg-type]
    return SuspectTimes(pipeline.check())


def told(caplog: pytest.LogCaptureFixture, times: SuspectTimes, *inputs: InputObservation) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "millpond"):
        times.observe(inputs, NOW_US)
    return caplog.messages


def test_seconds_are_told_once_and_only_of_the_first_records(caplog: pytest.LogCaptureFixture) -> None:
    """Dates of these years in seconds, all of them, and each task of a superstep counts."""
    times = suspects()
    assert "at_unit" in told(caplog, times, seen(NOW_S, NOW_S + 5), seen(NOW_S, NOW_S))[0]
    assert told(caplog, times, seen(NOW_S, NOW_S)) == []
    assert told(caplog, suspects(), seen(NOW_S, NOW_S), seen(0, NOW_S)) == []
    assert told(caplog, suspects(), seen(NOW_S, NOW_US)) == []


def test_a_unit_that_was_said_is_believed(caplog: pytest.LogCaptureFixture) -> None:
    """The same of a stream by time of arrival, and of a superstep without records."""
    assert told(caplog, suspects(at_unit="us"), seen(NOW_S, NOW_S)) == []
    assert told(caplog, suspects(at=IngressTime()), seen(NOW_S, NOW_S + NOW_US + 2 * YEAR_US)) == []
    assert told(caplog, suspects(), InputObservation(stream="s", records=0, newest_at=None)) == []


def test_the_far_future_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Within a year records are planned, later they are mistakes."""
    times = suspects()
    assert told(caplog, times, seen(NOW_US, NOW_US + YEAR_US)) == []
    [warning] = told(caplog, times, seen(NOW_US, NOW_US + YEAR_US + 1_000_000))
    assert "newest=`2025-05-02T00:00:01+00:00` now=`2024-05-01T00:00:00+00:00`" in warning
    assert told(caplog, times, seen(NOW_US, NOW_US + 9 * YEAR_US)) == []

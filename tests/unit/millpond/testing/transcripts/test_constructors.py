"""Constructor text, which is parsed and never executed."""

from __future__ import annotations

import pytest

from millpond.executor.windows.composite_triggers import AfterAny, AfterEach
from millpond.executor.windows.count_triggers import AfterCount
from millpond.executor.windows.time_triggers import AfterDelay, AfterWatermark, AtPeriod, Default
from millpond.executor.windows.trigger import Trigger
from millpond.executor.windows.window import WindowFn
from millpond.executor.windows.window_fns import FixedWindows
from millpond.statestore.errors import InvalidError
from millpond.testing.transcripts.constructors import construct


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Default", Default()),
        ("Default()", Default()),
        ("AfterAny(AfterCount(2), AfterWatermark)", AfterAny(AfterCount(2), AfterWatermark())),
        ("AfterWatermark(early=AfterCount(1), late=None)", AfterWatermark(early=AfterCount(1))),
        ("SequenceOf(AfterCount(count=3))", AfterEach(AfterCount(3))),
        ("AfterDelay(1.5, STREAM_TIME)", AfterDelay("1s500ms", "stream_time")),
        ("AtPeriod(-5, '1h', wall)", AtPeriod(-5_000_000, "1h", "wall")),
    ],
)
def test_text_constructs_trigger(text: str, expected: Trigger) -> None:
    assert construct(text, Trigger) == expected


def test_number_is_seconds() -> None:
    assert construct("FixedWindows(10, offset=0.5)", WindowFn) == FixedWindows("10s", "500ms")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "AfterCount(2",
        "print(1)",
        "AfterCount(1 + 1)",
        "AfterCount(*[2])",
        "AfterCount(**{'count': 2})",
        "().__class__",
        "AfterCount(count=[2])",
        "(lambda: 1)()",
        "AfterCount(2).fire()",
        "FixedWindows(10)",
        "AfterAny(5)",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidError):
        construct(text, Trigger)
